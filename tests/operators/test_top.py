"""Top-N against a plain loop: whatever the batches, watermarks, barriers, restores and subtasks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, get_args

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.subtasks import Row, Subtasks, bits, events_of, frame_of, rank, restored

from fordstone import FordstoneError, Pipeline, by_count, session, tumbling
from fordstone.connectors import MemorySink, memory
from fordstone.lang.schema import Schema
from fordstone.operators.base import Emits, Moment
from fordstone.operators.top import RunningTop, WindowTop
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, StreamType
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
        (lambda rows: rows.top(None, by="x", per="k"), r"never complete.*Add ts to per= for a ranking of each window"),
        (lambda rows: rows.top(20_000, by="x", per="k"), "10,000 rows per key are the most"),
        (lambda rows: rows.top(3, by="x", per="k", numbering="rank"), "each needs one of its own"),
        (
            lambda rows: rows.group_by("k").agg(n="count(*)").top(3, by="n", per="n"),
            r"replace each other by \(k\).*not n",
        ),
        (lambda rows: rows.top(0, by="x", per="ts"), r"top\(0\) must be at least 1"),
        (lambda rows: rows.top("3", by="x", per="ts"), r"top\('3'\) is not a whole number"),
        (lambda rows: rows.top(3, by=(), per="ts"), "by= names no order"),
        (lambda rows: rows.top(3, by="y", per="ts"), "there is no column 'y'"),
        (lambda rows: rows.top(3, by="x DSC", per="ts"), "DSC"),
        (lambda rows: rows.top(3, by="x", per=["ts", "y"]), "per: there is no column 'y'"),
        (lambda rows: rows.top(3, by="x", per="ts", column="x"), "there is a column 'x' already"),
        (lambda rows: rows.top(3, by="x", per="ts", numbering="ntile"), "numbering='ntile' must be one of"),
    ],
)
def test_what_cannot_be_ranked_is_refused_when_it_is_written(build, message):
    with pytest.raises(FordstoneError, match=message):
        build(source())


def test_without_event_time_a_ranking_is_kept_up_to_date():
    assert source(time=None).top(3, by="x", per="ts")._type.upsert_key == ("ts", "rank")


def test_the_start_of_windows_of_one_length_gives_their_time_and_stays_it_when_the_end_is_dropped():
    counts = source().group_by("k").window(tumbling("10s")).agg(n="count(*)")
    assert counts.select("k", "n", "window_start AS since").top(1, by="n", per="since")._type.time == EventTime(
        column="since", shift_us=9_999_999
    )


def test_explain_shows_the_start_of_windows_and_their_length_as_the_time():
    counts = source().group_by("k").window(tumbling("10s")).agg(n="count(*)").select("n", "window_start")
    counts.sink("out", memory(MemorySink()))
    assert "window_start + 10s\n" in counts.pipeline.explain()


@pytest.mark.parametrize("window", [session("10s"), by_count(3)])
def test_windows_of_several_lengths_are_named_by_their_end(window):
    counts = source().group_by("k").window(window).agg(n="count(*)")
    assert counts.top(1, by="n", per="window_end")._type.upsert_key is None
    assert counts.top(1, by="n", per="window_start")._type.upsert_key == ("window_start", "rank"), "never complete"
    assert counts.select("n", "window_start")._type.time is None


def test_explain_says_what_is_ranked_and_kept():
    top = source().group_by("k").window(tumbling("10s")).agg(n="count(*)").top(3, by="n DESC, k", per="window_start")
    top.sink("out", memory(MemorySink()))
    text = top.pipeline.explain()
    assert "the first 3 of each window_start, by n DESC, k" in text
    assert "the rows that wait for time" in text


# All rows so far.

changes = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.integers(0, 4),
        st.sampled_from([None, 1.0, 2.5, math.nan, 7.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def running(*, replaced: bool, per: tuple[str, ...]) -> RunningTop:
    top = p.Top(
        name="top", input=p.Input("rows"), keys=per, n=2, by=(p.SortKey(sql="x", descending=True, nulls_first=False),)
    )
    schema = Schema.of({"k": "string", "id": "bigint", "x": "double"})
    return RunningTop(top, StreamType(schema=schema, upsert_key=("k", "id") if replaced else None), state=IN_MEMORY)


def latest(sink: dict[Any, Any], emits: Emits, per: tuple[str, ...]) -> None:
    """What a sink that keeps one row per key has then. No change is emitted that changes nothing."""
    for emit in emits:
        for row in emit.frame.iter_rows(named=True):
            op, place = row.pop("__op"), (*(row[name] for name in per), row["rank"])
            shown_row = tuple(map(bits, row.values()))
            assert sink.get(place) != shown_row or op == "delete"
            if op == "delete":
                del sink[place]
            else:
                sink[place] = shown_row


@pytest.mark.parametrize("per", [("k",), ()])
@pytest.mark.parametrize("replaced", [False, True])
@given(epochs=st.lists(st.tuples(st.lists(changes, max_size=3), st.booleans()), max_size=6))
def test_rankings_of_all_rows_so_far_are_kept_up_to_date(per, replaced, epochs):
    operator = running(replaced=replaced, per=per)
    sink: dict[Any, Any] = {}
    rows: list[Row] = []
    kept: dict[Any, Row] = {}
    for batches, restarts in epochs:
        for batch in batches:
            schema = {"k": pl.String, "id": pl.Int64, "x": pl.Float64, "__op": pl.String}
            given_rows = [(*row[:3], "delete" if replaced and row[3] else "upsert") for row in batch]
            frame = pl.DataFrame(given_rows, schema=schema, orient="row")
            assert not operator.on_batch(frame if replaced else frame.drop("__op"), late=False)
            rows += [row[:3] for row in given_rows]
            for k, number, x, op in given_rows:
                kept.pop((k, number), None)
                if op == "upsert":
                    kept[k, number] = (k, number, x)
        latest(sink, operator.on_barrier(Moment(now_us=1, before_us=0)), per)
        if restarts:
            operator = restored(operator, running(replaced=replaced, per=per), 0)
        wanted = {}
        competing = list(kept.values()) if replaced else rows
        for group in {row[0] if per else None for row in competing}:
            mine = sorted(
                (row for row in competing if not per or row[0] == group),
                key=lambda row: (_given((*row, None))[0], *map(rank, row)),
            )
            for place, row in enumerate(mine[:2], 1):
                wanted[(group, place) if per else (place,)] = (*map(bits, row), place)
        assert sink == wanted


def test_the_first_of_rows_that_replace_each_other_change_with_them():
    made = Pipeline("p")
    rows = [{"k": key} for key in "aabbbc"]
    found = MemorySink()
    counts = made.source("rows", memory([rows]), schema={"k": "string"}).group_by("k").agg(n="count(*)")
    counts.top(2, by="n DESC", column="place").sink("out", memory(found))
    made.run(bounded=True)
    assert sorted(found.rows().select("place", "k", "n").rows()) == [(1, "b", 3), (2, "a", 2)]
    assert "all rows, because one that falls back lets another in" in made.explain()
