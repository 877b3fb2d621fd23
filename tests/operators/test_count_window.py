"""Count windows against a plain loop: whatever the batches, watermarks, barriers, restores and subtasks, the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import (
    Row,
    Subtasks,
    below,
    bits,
    events_of,
    fragments_of,
    frame_of,
    frozen,
    held_rows,
    rank,
    released,
    restored,
    rows_written_since,
    shown,
)

from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import LATE, ROW_ID, Moment
from fordstone.operators.window.count import BRANCHES, CountAggregate, Panes
from fordstone.plan.plan import Count
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "i": "bigint", "x": "double"})
AGGREGATES = {"n": "count(*)", "has": "count(i)", "total": "sum(i)", "top": "max(x)"}

rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "a", "a", "b", "é", "键", None]),
    st.one_of(st.integers(-4, 9), st.integers(-4, 9), st.none(), st.integers(-(10**15), 10**15)),
    st.sampled_from([None, 1, 2, 7, 2**63 - 1]),
    st.sampled_from([None, 1.0, 0.0, -0.0, -2.5, math.inf, math.nan]),
)
shapes = st.one_of(
    st.sampled_from([(1, 1), (3, 3), (4, 2), (5, 2), (2, 5), (3, 1), (7, 3)]),
    st.tuples(st.integers(1, 70), st.integers(1, 9)),
)


def windows(
    size: int,
    every: int | None = None,
    *,
    keys: Sequence[str] = ("k",),
    shift_us: int = 0,
    with_id: bool = False,
    columns: Mapping[str, str] | None = None,
    **named: str,
) -> CountAggregate:
    aggregates = columns or named or AGGREGATES
    fragments = fragments_of(aggregates, SCHEMA, step="packs", keys=keys, shift_us=shift_us, with_id=with_id)
    return CountAggregate(fragments, Count(size=size, slide=every or size), state=IN_MEMORY)


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    return frame_of(rows, SCHEMA)


# The oracle: slices of the sorted rows of a key.


def wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def result(key: Any, rows: Sequence[Row]) -> Row:
    whole = [row[2] for row in rows if row[2] is not None]
    reals = [row[3] for row in rows if row[3] is not None]
    top = math.nan if any(map(math.isnan, reals)) else max(reals, default=None)
    # Which zero is the greatest is not said.
    return (key, rows[0][1], rows[-1][1], len(rows), len(whole), wrapped(sum(whole)) if whole else None, top or None)


def expected(rows: Sequence[Row], size: int, every: int) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for key in {row[0] for row in rows}:
        mine = sorted(
            (row for row in rows if row[0] == key), key=lambda row: (row[1], rank(row[2]), rank(row[3]), rank(row[0]))
        )
        for start in range(0, len(mine) - size + 1, every):
            found[tuple(map(bits, result(key, mine[start : start + size])))] += 1
    return found


def without_zeros(frames: Sequence[pl.DataFrame]) -> list[pl.DataFrame]:
    return [one.with_columns(pl.when(pl.col("top") != 0).then("top")) for one in frames]


@examples(60)
@given(happens=events_of(st.lists(rows_of_any_kind, min_size=1, max_size=25), most=12), shape=shapes)
def test_every_window_comes_out_once_when_it_is_full(happens, shape):
    tasks = Subtasks(make=lambda: windows(*shape), frame=frame)
    happened = tasks.live_through(happens)
    assert shown(tasks.late) == Counter(tuple(map(bits, row)) for row in happened.late)
    so_far = [row for row in happened.taken if row[1] < tasks.watermark_us]
    assert shown(without_zeros(tasks.out)) == expected(so_far, *shape)
    tasks.watermark(TIME_MAX_US)
    assert shown(without_zeros(tasks.out)) == expected(happened.taken, *shape)


DUCKDB = """
    WITH numbered AS (SELECT *, row_number() OVER (PARTITION BY k ORDER BY ts, i) AS number FROM rows),
    ends AS (SELECT k, number FROM numbered WHERE number >= {size} AND (number - {size}) % {every} = 0)
    SELECT e.k, epoch_us(min(ts)), epoch_us(max(ts)), count(*), sum(i)::bigint, max(x), avg(x)
    FROM ends e JOIN numbered n ON n.k = e.k AND n.number > e.number - {size} AND n.number <= e.number
    GROUP BY e.k, e.number ORDER BY ALL
"""


@examples(6)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 100),
    every=st.integers(1, 20),
    batch_rows=st.sampled_from([20, 40, 400]),
)
def test_many_keys_in_disorder_give_what_duckdb_gives(seed, size, every, batch_rows):
    rng = Random(seed)
    rows = [(f"k{rng.randrange(3)}", rng.randrange(600), number, float(rng.randrange(99))) for number in range(400)]
    rows.sort(key=lambda row: row[1] + rng.randint(0, 30))
    columns = {"n": "count(*)", "total": "sum(i)", "hi": "max(x)", "mean": "avg(x)"}
    tasks = Subtasks(make=lambda: windows(size, every, columns=columns), frame=frame, parallelism=2)
    tasks.feed(rows, batch_rows=batch_rows, lag_us=30, rng=rng)
    assert tasks.late == []
    tasks.check_query(DUCKDB.format(size=size, every=every), rows)


# One thing at a time.


def plain(k: Any, time: int | None, i: int | None = 1) -> Row:
    return (k, time, i, None)


def full(operator: CountAggregate, watermark_us: int = TIME_MAX_US) -> list[Row]:
    return sorted(released(operator, watermark_us), key=lambda row: tuple(map(str, row)))


def test_windows_follow_each_other_and_the_rest_is_not_emitted_even_at_the_end():
    operator = windows(3, total="sum(i)")
    operator.on_batch(frame([plain("a", time, 10**time) for time in range(8)]), late=False)
    assert full(operator) == [("a", 0, 2, 111), ("a", 3, 5, 111000)]


def test_a_window_slides_by_rows_and_the_first_comes_when_it_is_full():
    operator = windows(4, 2, total="sum(i)")
    operator.on_batch(frame([plain("a", time, 10**time) for time in range(7)]), late=False)
    assert full(operator, 3) == []
    assert full(operator, 5) == [("a", 0, 3, 1111)]
    assert full(operator) == [("a", 2, 5, 111100)]


def test_rows_between_windows_are_in_none():
    operator = windows(2, 5, total="sum(i)")
    for time in range(14):
        operator.on_batch(frame([plain("a", time, 1 if time % 5 < 2 else 1000)]), late=False)
        operator.on_watermark(time + 1) if time in {2, 3, 7, 8} else None
    operator = restored(operator, windows(2, 5, total="sum(i)"), 9)
    assert full(operator) == [("a", 10, 11, 2)]


def test_the_window_ends_at_its_last_row_which_may_share_its_time_with_the_next():
    operator = windows(2, total="sum(i)")
    operator.on_batch(frame([plain("a", 5, i) for i in (4, 1, 3, 2)]), late=False)
    assert full(operator) == [("a", 5, 5, 3), ("a", 5, 5, 7)]


def test_rows_of_one_time_are_counted_in_the_order_of_what_is_read_whatever_came_first():
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 0, 1)):
        operator = windows(2, top="max(x)", low="min(x)")
        rows = [("a", 1, 9, None), ("a", 1, 8, 1.0), ("a", 1, 7, 2.0), ("a", 1, 6, math.nan)]
        for at in order:
            operator.on_batch(frame([rows[at]]), late=False)
        assert {row[3:] for row in full(operator)} == {(bits(1.0), bits(1.0)), ("nan", bits(2.0))}


def test_rows_without_a_time_rows_that_time_has_passed_and_late_rows_leave_as_they_came():
    operator = windows(1)
    operator.on_watermark(10)
    (emit,) = operator.on_batch(frame([plain("a", None), plain("b", 9), plain("c", 10)]), late=False)
    assert (emit.port, emit.frame["k"].to_list(), emit.frame.columns) == (LATE, ["a", "b"], list(SCHEMA))
    (emit,) = operator.on_batch(below(frame([plain("d", 50)])), late=True)
    assert (emit.port, emit.frame["k"].to_list()) == (LATE, ["d"])
    assert [row[0] for row in full(operator)] == ["c"]


def test_without_a_key_all_rows_are_counted_together():
    operator = windows(2, keys=(), total="sum(i)")
    operator.on_batch(frame([plain("a", 1), plain("b", 2), plain(None, 3, 5)]), late=False)
    assert full(operator, 4) == [(1, 2, 2)]
    operator = restored(operator, windows(2, keys=(), total="sum(i)"), 4)
    operator.on_batch(frame([plain("c", 9, 7)]), late=False)
    assert full(operator) == [(3, 9, 12)]


def test_both_zeros_are_one_key_without_a_sign():
    operator = windows(2, keys=("x",), n="count(*)")
    for time, x in enumerate([-0.0, 0.0, -0.0, -0.0]):
        operator.on_batch(frame([("a", time, 1, x)]), late=False)
        operator.on_watermark(time) if time != 2 else None
    assert full(operator) == [(bits(0.0), 2, 3, 2)]


def test_the_time_of_a_windows_result_is_before_its_end():
    operator = windows(2, shift_us=-1, n="count(*)")
    operator.on_batch(frame([plain("a", 10), plain("a", 12)]), late=False)
    assert full(operator, 11) == []
    operator = restored(operator, windows(2, shift_us=-1, n="count(*)"), 11)
    assert full(operator, 12) == [("a", 9, 11, 2)]


def test_ids_are_of_step_key_and_number_so_that_windows_of_one_time_differ():
    found = set()
    for cuts in (1, 3):
        operator = windows(1, with_id=True, n="count(*)")
        rows = [plain("a", 1), plain("a", 1), plain("a", 1), plain(None, 1)]
        for cut in range(cuts):
            operator.on_batch(frame(rows[cut::cuts]), late=False)
        (emit,) = operator.on_watermark(TIME_MAX_US)
        found.add(tuple(sorted(emit.frame[ROW_ID])))
    assert found == {("packs|-|0", "packs|1:a|0", "packs|1:a|1", "packs|1:a|2")}


def test_columns_are_the_key_the_window_and_the_aggregates():
    operator = windows(1)
    operator.on_batch(frame([plain("a", 1)]).with_columns(pl.lit("id").alias(ROW_ID)), late=False)
    (emit,) = operator.on_watermark(TIME_MAX_US)
    assert emit.frame.columns == ["k", "window_start", "window_end", *AGGREGATES]


@pytest.mark.parametrize(("size", "every", "panes_max"), [(20, 20, 1), (20, 5, 4), (20, 6, 7), (3, 20, 1)])
def test_a_key_keeps_no_more_panes_than_a_window_has(size, every, panes_max):
    operator = windows(size, every, n="count(*)")
    for time in range(55):
        operator.on_batch(frame([plain("a", time)]), late=False)
        operator.on_watermark(time + 1)
        assert len(operator._table) <= panes_max


def test_an_epoch_in_which_few_keys_changed_writes_only_those():
    operator = windows(10, n="count(*)")
    operator.on_batch(frame([plain(f"k{key}", 1) for key in range(500)]), late=False)
    operator.on_watermark(2)
    before = frozen(operator)
    operator.on_batch(frame([plain("k7", 5), plain("k8", 6)]), late=False)
    operator.on_watermark(10)
    assert rows_written_since(before, operator) == 4


def test_a_window_that_is_full_when_its_rows_come_leaves_nothing_in_a_checkpoint_but_a_count():
    operator = windows(3, n="count(*)")
    operator.on_batch(frame([plain("a", time) for time in range(6)]), late=False)
    assert len(full(operator)) == 2
    assert held_rows(operator) == {"waiting": 0, "counts": 1, "panes": 0}


def test_keys_that_come_together_are_counted_apart():
    operator = windows(4, 2, total="sum(i)")
    for start in range(0, 12, 3):
        rows = [
            plain(key, time, 10**time * (1 + "abc".index(key))) for time in range(start, start + 3) for key in "abc"
        ]
        operator.on_batch(frame(rows), late=False)
        found = full(operator, start + 3)
    sums = {"a": 1111, "b": 2222, "c": 3333}
    assert found == [(key, at, at + 3, sums[key] * 10**at) for key in sums for at in (6, 8)]


def test_nothing_due_gives_nothing():
    operator = windows(2)
    assert operator.on_watermark(5) == []
    operator.on_batch(frame([plain("a", 7)]), late=False)
    assert operator.on_barrier(Moment(now_us=1, before_us=0)) == []
    assert operator.on_watermark(8) == []


@pytest.mark.parametrize("size", [1, BRANCHES - 1, BRANCHES, BRANCHES + 1, BRANCHES**2, 2 * BRANCHES**2 + BRANCHES + 3])
def test_windows_at_every_row_are_sums_of_slices_however_many_levels_they_have(size):
    rng = np.random.default_rng(size)
    values = rng.integers(-(10**9), 10**9, 400)
    operator = windows(size, 1, total="sum(i)")
    operator.on_batch(frame([plain("a", time, int(value)) for time, value in enumerate(values)]), late=False)
    found = [
        row[3] for cut in (1, 150, 151, TIME_MAX_US) for row in sorted(full(operator, cut), key=lambda row: row[1])
    ]
    assert found == [int(values[at : at + size].sum()) for at in range(values.size - size + 1)]


@given(size=st.integers(1, 60), slide=st.integers(1, 60))
def test_a_window_is_a_whole_number_of_panes(size, slide):
    panes = Panes(size=size, slide=slide)
    rows = np.arange(300)
    of_rows, held = panes.of_rows(rows), panes.hold(rows)
    for window, start in enumerate(range(0, 300 - size, slide)):
        inside = (of_rows >= window * panes.step) & (of_rows < window * panes.step + panes.length) & held
        assert np.flatnonzero(inside).tolist() == list(range(start, start + size))
