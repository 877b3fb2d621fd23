"""Top-N per window against a plain loop: whatever the batches, watermarks, barriers, restores and subtasks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.subtasks import Row, Subtasks, bits, events_of, frame_of, rank

from fordstone import FordstoneError, Pipeline, by_count, session, tumbling
from fordstone.connectors import MemorySink, memory
from fordstone.lang.schema import Schema
from fordstone.operators.top import WindowTop
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "x": "double", "i": "int"})
rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "b", "é", None]),
    st.one_of(st.integers(-3, 3), st.none()),
    st.sampled_from([None, 1.0, 0.0, -0.0, math.nan, math.inf, 2.5]),
    st.sampled_from([None, 1, 2]),
)
events = events_of(st.lists(rows_of_any_kind, min_size=1, max_size=12), steps=(1, 1, 2, 3))


def step(n: int | None, numbering: p.Numbering) -> p.Top:
    by = (p.SortKey(sql="x", descending=True, nulls_first=False), p.SortKey(sql="i + 1"))
    return p.Top(name="top", input=p.Input("rows"), keys=("k", "ts"), n=n, by=by, numbering=numbering)


def _sort_key(row: Row) -> tuple[Any, ...]:
    """By x, descending, nulls last; then by i; then by all columns."""
    return _given(row), *map(rank, row)


def _given(row: Row) -> tuple[Any, ...]:
    x, i = row[2], row[3]
    descending = (3,) if x is None else (1,) if math.isnan(x) else (2, -x + 0.0)
    return descending, rank(i)


def by_hand(rows: list[Row], n: int | None, numbering: str) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for group in {(row[0], row[1]) for row in rows}:
        mine = sorted((row for row in rows if row[:2] == group), key=_sort_key)
        given_keys = [_given(row) for row in mine]
        for place, row in enumerate(mine):
            number = {
                "row_number": place + 1,
                "rank": given_keys.index(given_keys[place]) + 1,
                "dense_rank": len(set(given_keys[: place + 1])),
            }[numbering]
            if n is None or number <= n:
                found[*map(bits, row), number] += 1
    return found


@pytest.mark.parametrize("numbering", get_args(p.Numbering))
@given(events=events, n=st.sampled_from([None, 1, 2, 3]))
def test_the_first_rows_of_each_window_are_those_of_a_plain_loop(numbering, events, n):
    def make() -> WindowTop:
        return WindowTop(step(n, numbering), SCHEMA, time=EventTime(column="ts"), state=IN_MEMORY)

    subtasks = Subtasks(make, lambda rows: frame_of(rows, SCHEMA), keys=("k", "ts"))
    subtasks.check(events, lambda rows: by_hand(rows, n, numbering))


def source(**options: Any):
    made = Pipeline("p")
    schema = {"k": "string", "ts": "timestamp", "x": "double"}
    return made.source("rows", memory([]), schema=schema, **({"time": "ts"} | options))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda rows: rows.top(3, by="x", per="k"), "per= has no column that gives the window of a row, such as ts"),
        (lambda rows: rows.top(0, by="x", per="ts"), r"top\(0\) must be at least 1"),
        (lambda rows: rows.top("3", by="x", per="ts"), r"top\('3'\) is not a whole number"),
        (lambda rows: rows.top(3, by=(), per="ts"), "by= names no order"),
        (lambda rows: rows.top(3, by="y", per="ts"), "there is no column 'y'"),
        (lambda rows: rows.top(3, by="x DSC", per="ts"), "DSC"),
        (lambda rows: rows.top(3, by="x", per=["ts", "y"]), "per: there is no column 'y'"),
        (lambda rows: rows.top(3, by="x", per="ts", column="x"), "there is a column 'x' already"),
        (lambda rows: rows.top(3, by="x", per="ts", numbering="ntile"), "numbering='ntile' must be one of"),
        (lambda rows: rows.group_by("k").agg(n="count(*)").top(3, by="n"), "cannot take rows that replace each other"),
    ],
)
def test_what_cannot_be_ranked_is_refused_when_it_is_written(build, message):
    with pytest.raises(FordstoneError, match=message):
        build(source())


def test_event_time_is_needed():
    with pytest.raises(FordstoneError, match="needs event time"):
        source(time=None).top(3, by="x", per="ts")


def test_the_start_of_windows_of_one_length_gives_their_time_and_stays_it_when_the_end_is_dropped():
    counts = source().group_by("k").window(tumbling("10s")).agg(n="count(*)")
    assert counts.select("k", "n", "window_start AS since").top(1, by="n", per="since")._type.time == EventTime(
        column="since", shift_us=9_999_999
    )


@pytest.mark.parametrize("window", [session("10s"), by_count(3)])
def test_windows_of_several_lengths_are_named_by_their_end(window):
    counts = source().group_by("k").window(window).agg(n="count(*)")
    with pytest.raises(FordstoneError, match="such as window_end, so"):
        counts.top(1, by="n", per="window_start")
    assert counts.select("n", "window_start")._type.time is None


def test_explain_says_what_is_ranked_and_kept():
    top = source().group_by("k").window(tumbling("10s")).agg(n="count(*)").top(3, by="n DESC, k", per="window_start")
    top.sink("out", memory(MemorySink()))
    text = top.pipeline.explain()
    assert "the first 3 of each window_start, by n DESC, k" in text
    assert "the rows that wait for time" in text
