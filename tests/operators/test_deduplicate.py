"""Deduplication against a plain loop: whatever the batches, watermarks, barriers, restores and subtasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import Row, Subtasks, below, bits, events_of, frame_of, rank, restored

from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators import deduplicate as module
from fordstone.operators.base import LATE, ROW_ID, Moment
from fordstone.operators.deduplicate import Deduplicate, _openers
from fordstone.plan.stream_type import EventTime
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "x": "double", "tags": "array<string>"})
WITHIN_US = 3

rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "a", "b", "é", "键", "", None]),
    st.one_of(st.integers(-2, 2), st.integers(-20, 20), st.none(), st.integers(-(10**15), 10**15)),
    st.sampled_from([None, 1.0, 0.0, -0.0, math.nan, -math.inf]),
    st.sampled_from([None, [], ["x"], ["x", None]]),
)


def deduplicate(
    *, keys: Sequence[str] = ("k",), within_us: int = WITHIN_US, shift_us: int = 0, schema: Schema = SCHEMA
) -> Deduplicate:
    return Deduplicate(
        keys, schema, within_us=within_us, time=EventTime(column="ts", shift_us=shift_us), state=IN_MEMORY
    )


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    return frame_of(rows, SCHEMA)


def same(value: Any) -> Any:
    """Both zeros are one key, and so is every NaN."""
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def expected(rows: Sequence[Row], keys: Sequence[str], within_us: int) -> Counter[Any]:
    """One row after the other, in order."""
    found: Counter[Any] = Counter()
    kept_us: dict[Any, int] = {}
    places = [list(SCHEMA).index(key) for key in keys]
    for row in sorted(rows, key=lambda row: (row[1], *map(rank, row))):
        key = tuple(same(row[place]) for place in places)
        if key not in kept_us or row[1] - kept_us[key] >= within_us:
            kept_us[key] = row[1]
            found[tuple(map(bits, row))] += 1
    return found


@examples(150)
@given(
    happens=events_of(st.lists(rows_of_any_kind, min_size=1, max_size=15)),
    keys=st.sampled_from([("k",), ("k",), ("x",), ("x", "k")]),
    within_us=st.sampled_from([1, 2, 3, 7, 10**14, 2**62, TIME_MAX_US]),
    past_keys=st.sampled_from([0, 0, 4096]),
)
def test_rows_come_out_as_from_a_plain_loop_however_they_came(happens, keys, within_us, past_keys):
    subtasks = Subtasks(make=lambda: deduplicate(keys=keys, within_us=within_us), frame=frame, keys=keys)
    with patch.object(module, "PAST_KEYS_MIN", past_keys):
        subtasks.check(happens, lambda rows: expected(rows, keys, within_us))


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    within_us=st.sampled_from([1, 5, 50, 10**6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_chains_of_spans_are_followed_as_a_loop_would(lengths, within_us, seed):
    random = np.random.default_rng(seed)
    keys = np.repeat(np.arange(len(lengths)), lengths)
    times = np.concatenate([np.sort(random.integers(-100, 100, length)) for length in lengths])
    wanted: list[int] = []
    last: dict[int, int] = {}
    for number, (key, time) in enumerate(zip(keys.tolist(), times.tolist(), strict=True)):
        if key not in last or time - last[key] >= within_us:
            last[key] = time
            wanted.append(number)
    assert _openers(keys, times, within_us).tolist() == wanted


# One thing at a time.


def row(k: Any, time: int | None, x: float | None = None) -> Row:
    return (k, time, x, None)


def released(operator: Deduplicate, watermark_us: int = TIME_MAX_US) -> list[tuple[Any, ...]]:
    emits = operator.on_watermark(watermark_us)
    return [found for emit in emits for found in emit.frame.select("k", pl.col("ts").cast(pl.Int64), "x").iter_rows()]


def kept_rows(operator: Deduplicate) -> int:
    return sum(piece.frame().height for piece in operator.states()["kept"].freeze())


def test_rows_exactly_the_span_apart_are_both_kept_and_dropped_rows_open_no_span():
    operator = deduplicate(within_us=10)
    operator.on_batch(frame([row("a", time) for time in (0, 9, 10, 18, 20, 29, 31)]), late=False)
    assert [time for _, time, _ in released(operator)] == [0, 10, 20, 31]


def test_a_repeated_row_is_dropped_after_a_restore_too_and_only_until_the_span_is_over():
    operator = deduplicate(within_us=10)
    operator.on_batch(frame([row("a", 0), row("b", 4)]), late=False)
    assert len(released(operator, 5)) == 2
    operator = restored(operator, deduplicate(within_us=10), 5)
    operator.on_batch(frame([row("a", 9), row("b", 13), row("a", 10), row("b", 14)]), late=False)
    assert released(operator) == [("a", 10, None), ("b", 14, None)]


def test_of_rows_of_one_time_the_first_in_order_is_kept_whatever_came_first():
    for given_rows in ([row("a", 1, 2.0), row("a", 1, None), row("a", 1, 1.0)], [row("a", 1, 1.0), row("a", 1)]):
        operator = deduplicate()
        for one in given_rows:
            operator.on_batch(frame([one]), late=False)
        assert released(operator) == [("a", 1, None)]


def test_null_keys_are_one_key_and_so_are_both_zeros_and_every_nan():
    operator = deduplicate(keys=("x",), within_us=100)
    values = [None, 0.0, math.nan, None, -0.0, -math.nan]
    operator.on_batch(frame([row("a", time, x) for time, x in enumerate(values)]), late=False)
    assert [time for _, time, _ in released(operator, 6)] == [0, 1, 2]
    operator = restored(operator, deduplicate(keys=("x",), within_us=100), 6)
    operator.on_batch(frame([row("a", 6 + time, x) for time, x in enumerate(values)]), late=False)
    assert released(operator) == []


def test_several_columns_make_a_key():
    operator = deduplicate(keys=("x", "k"), within_us=100)
    operator.on_batch(frame([row("a", 0, 1.0), row("a", 1, 2.0), row("b", 2, 1.0), row("a", 3, 1.0)]), late=False)
    assert [time for _, time, _ in released(operator)] == [0, 1, 2]


def test_late_rows_leave_as_they_came_and_open_nothing():
    operator = deduplicate()
    operator.on_watermark(10)
    (emit,) = operator.on_batch(frame([row("a", None), row("b", 9), row("c", 10)]), late=False)
    assert (emit.port, emit.frame["k"].to_list(), emit.frame.columns) == (LATE, ["a", "b"], list(SCHEMA))
    (emit,) = operator.on_batch(below(frame([row("d", 50)])), late=True)
    assert (emit.port, emit.frame["k"].to_list()) == (LATE, ["d"])
    operator.on_batch(frame([row("b", 10)]), late=False)
    assert sorted(released(operator)) == [("b", 10, None), ("c", 10, None)]


def test_a_watermark_or_a_barrier_without_rows_gives_nothing():
    operator = deduplicate()
    assert operator.on_watermark(5) == []
    operator.on_batch(frame([row("a", 7)]), late=False)
    assert operator.on_watermark(7) == []
    assert operator.on_barrier(Moment(now_us=1, before_us=0)) == []
    operator.on_batch(frame([row("a", 8)]), late=False)
    assert released(operator, 8) == [("a", 7, None)]
    assert operator.on_watermark(9) == [], "nothing but a repeated row"


def test_ids_that_rows_carry_for_others_are_left_behind():
    operator = deduplicate()
    operator.on_batch(frame([row("a", 1)]).with_columns(pl.lit("id").alias(ROW_ID)), late=False)
    (emit,) = operator.on_watermark(TIME_MAX_US)
    assert emit.frame.columns == list(SCHEMA)


def test_the_time_of_a_windows_result_is_before_its_end():
    operator = deduplicate(shift_us=-1, within_us=5)
    operator.on_batch(frame([row("a", 10), row("a", 14), row("a", 15)]), late=False)
    assert released(operator, 9) == []
    assert released(operator, 10) == [("a", 10, None)]
    operator = restored(operator, deduplicate(shift_us=-1, within_us=5), 10)
    assert released(operator) == [("a", 15, None)]


@pytest.mark.parametrize("restores", [False, True])
def test_keys_are_forgotten_when_their_span_is_over_in_state_and_in_memory(restores):
    operator = deduplicate(within_us=1000)
    for start in range(0, 200_000, 10_000):
        operator.on_batch(frame([row(f"{time}", time) for time in range(start, start + 10_000, 2)]), late=False)
        assert len(released(operator, start + 10_000)) == 5000
        if restores:
            operator = restored(operator, deduplicate(within_us=1000), start + 10_000)
            operator.on_watermark(start + 10_000)
    assert len(operator._spans.index) <= 5000 + 2 * 500 + module.PAST_KEYS_MIN
    assert sum(len(piece.frame()) for piece in operator.states()["waiting"].freeze()) == 0
    assert kept_rows(operator) < 1000, "what was opened in the last span, and not much of the past with it"
    operator.on_watermark(10**9)
    assert kept_rows(operator) == 0


def test_spans_that_are_over_are_dropped_by_a_watermark_that_releases_nothing():
    operator = deduplicate(within_us=10)
    operator.on_batch(frame([row(f"{number}", 0) for number in range(20)]), late=False)
    released(operator, 5)
    assert kept_rows(operator) == 20
    operator.on_watermark(10)
    assert kept_rows(operator) == 0
    assert len(operator._spans.index) <= module.PAST_KEYS_MIN


def test_a_long_chain_of_one_key_takes_few_passes():
    times = np.arange(200_000, dtype=np.int64)
    found = _openers(np.zeros(200_000, dtype=np.int64), times, 2)
    assert found.tolist() == list(range(0, 200_000, 2))
