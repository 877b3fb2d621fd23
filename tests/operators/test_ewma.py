"""EWMA against a plain loop: whatever the batches, watermarks, barriers, restores and subtasks, the same to the last bit."""

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
from tests.operators.subtasks import Row, Subtasks, below, bits, events_of, frame_of, rank, restored

from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.expression import parse_double
from fordstone.lang.schema import Schema
from fordstone.operators import ewma as recurrence
from fordstone.operators.base import LATE, MAIN, ROW_ID, Moment
from fordstone.operators.ewma import Ewma, Means, Values, smooth
from fordstone.plan.stream_type import EventTime
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of(
    {"k": "string", "ts": "timestamp", "tags": "array<string>", "f": "float", "x": "double", "i": "bigint"}
)
COLUMNS = {"sx": "x", "si": "i", "sd": "x - 1"}
ALPHA = 0.3
Time = int | None

few_floats = st.sampled_from([None, 1.0, 0.0, -0.0, math.nan])
floats = st.one_of(few_floats, st.sampled_from([math.inf, -math.inf, 1e308, -1.7e308, 5e-324]), st.floats(-50, 50))
integers = st.one_of(
    st.sampled_from([None, 7]), st.sampled_from([2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63)]), st.integers(-9, 9)
)
rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "a", "b", "é", "键", "", None]),
    st.one_of(st.integers(-2, 2), st.integers(-6, 6), st.none(), st.integers(-(10**15), 10**15)),
    st.sampled_from([None, [], ["x"], ["x", None]]),
    few_floats,
    floats,
    integers,
)
batches_of_rows = st.lists(rows_of_any_kind, min_size=1, max_size=12)


def ewma(*, keys: Sequence[str] = ("k",), schema: Schema = SCHEMA, shift_us: int = 0, **columns: str) -> Ewma:
    given = [parse_double(sql, schema, name) for name, sql in (columns or COLUMNS).items()]
    return Ewma(keys, given, schema, alpha=ALPHA, time=EventTime(column="ts", shift_us=shift_us), state=IN_MEMORY)


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    return frame_of(rows, SCHEMA)


# The oracle: a loop over sorted rows.


def order(row: Row) -> tuple[Any, ...]:
    k, time, tags, f, x, i = row
    return (time, *map(rank, (x, i, k, tags, f)))


def step(mean: float | None, value: float | None, alpha: float = ALPHA) -> float | None:
    if value is None:
        return mean
    with np.errstate(all="ignore"):
        return value if mean is None else float(np.float64(alpha) * value + np.float64(1 - alpha) * mean)


def expected(rows: Sequence[Row]) -> Counter[Any]:
    """Every row with its three means."""
    found: Counter[Any] = Counter()
    for key in {row[0] for row in rows}:
        means: list[float | None] = [None, None, None]
        for row in sorted((row for row in rows if row[0] == key), key=order):
            x, i = row[4], row[5]
            values = [x, None if i is None else float(i), None if x is None else x - 1]
            means = [step(mean, value) for mean, value in zip(means, values, strict=True)]
            found[tuple(map(bits, (*row, *means)))] += 1
    return found


@given(happens=events_of(batches_of_rows), narrow_keys=st.sampled_from([1, 3, 32]))
def test_every_row_comes_out_once_with_the_means_of_a_plain_loop(happens, narrow_keys):
    with patch.object(recurrence, "NARROW_KEYS", narrow_keys):
        Subtasks(make=ewma, frame=frame).check(happens, expected)


# One thing at a time.


def plain(k: Any, time: Time, x: float | None, i: int | None = None) -> Row:
    return (k, time, None, None, x, i)


def released(operator: Ewma, watermark_us: int = TIME_MAX_US) -> pl.DataFrame:
    emits = operator.on_watermark(watermark_us)
    assert [emit.port for emit in emits] in ([], [MAIN])
    return emits[0].frame if emits else frame([])


def test_columns_are_those_of_the_input_and_the_new_ones():
    operator = ewma()
    operator.on_batch(frame([plain("a", 1, 1.0)]), late=False)
    out = released(operator)
    assert out.columns == [*SCHEMA, *COLUMNS]
    assert {out.schema[name] for name in COLUMNS} == {pl.Float64()}


def test_the_first_value_is_the_start_and_a_null_carries_the_mean_so_far():
    operator = ewma(s="x")
    operator.on_batch(frame([plain("a", time, x) for time, x in enumerate([None, 4.0, None, 8.0, None])]), late=False)
    mean = 0.3 * 8.0 + 0.7 * 4.0
    assert released(operator)["s"].to_list() == [None, 4.0, 4.0, mean, mean]


def test_a_null_in_a_later_release_carries_the_mean_of_an_earlier_one():
    operator = ewma(s="x")
    operator.on_batch(frame([plain("a", 1, 4.0), plain("b", 1, None)]), late=False)
    released(operator, 2)
    operator.on_batch(frame([plain("a", 3, None), plain("b", 3, None), plain("a", 4, 8.0)]), late=False)
    found = {(k, ts.microsecond): s for k, ts, s in released(operator).select("k", "ts", "s").iter_rows()}
    assert found == {("a", 3): 4.0, ("b", 3): None, ("a", 4): 0.3 * 8.0 + 0.7 * 4.0}


def test_nan_stays_and_infinities_follow_the_arithmetic():
    operator = ewma(s="x")
    values = {"nan": [1.0, math.nan, 2.0], "inf": [1.0, math.inf, math.inf, 2.0], "both": [math.inf, -math.inf, 1.0]}
    rows = [plain(k, time, x) for k, xs in values.items() for time, x in enumerate(xs)]
    operator.on_batch(frame(rows), late=False)
    out = released(operator)
    found = {k: [str(s) for s in out.filter(pl.col("k") == k)["s"]] for k in values}
    assert found == {
        "nan": ["1.0", "nan", "nan"],
        "inf": ["1.0", "inf", "inf", "inf"],
        "both": ["inf", "nan", "nan"],
    }


def test_rows_of_one_time_are_taken_by_what_is_read_and_then_by_the_rest_nulls_first():
    operator = ewma(s="x")
    rows = [
        plain("a", 5, 2.0),
        plain("a", 5, 1.0, 9),
        plain("a", 5, 1.0, None),
        plain("a", 5, None),
        plain("a", 4, 8.0),
    ]
    for row in rows:
        operator.on_batch(frame([row]), late=False)
    assert released(operator).select("x", "i").rows() == [(8.0, None), (None, None), (1.0, None), (1.0, 9), (2.0, None)]


def test_rows_are_emitted_in_order_of_time():
    operator = ewma(s="x")
    operator.on_batch(frame([plain("ab"[time % 2], time, 1.0) for time in (5, -3, 0, 4, -7, 2)]), late=False)
    times = released(operator)["ts"].cast(pl.Int64).to_list()
    assert times == sorted(times)


def test_rows_without_a_time_rows_that_time_has_passed_and_late_rows_leave_as_they_came():
    operator = ewma()
    operator.on_watermark(10)
    (emit,) = operator.on_batch(frame([plain("a", None, 1.0), plain("b", 9, 2.0), plain("c", 10, 3.0)]), late=False)
    assert (emit.port, emit.frame["k"].to_list(), emit.frame.columns) == (LATE, ["a", "b"], list(SCHEMA))
    (emit,) = operator.on_batch(below(frame([plain("d", 50, 1.0)])), late=True)
    assert (emit.port, emit.frame["k"].to_list()) == (LATE, ["d"])
    assert released(operator)["k"].to_list() == ["c"]


def test_a_watermark_that_releases_nothing_gives_nothing():
    operator = ewma()
    assert operator.on_watermark(5) == []
    operator.on_batch(frame([plain("a", 7, 1.0)]), late=False)
    assert operator.on_watermark(7) == []
    assert operator.on_barrier(Moment(now_us=1, before_us=0)) == []
    assert released(operator, 8).height == 1
    assert operator.on_watermark(TIME_MAX_US) == []


def test_without_a_key_all_rows_are_smoothed_together():
    operator = ewma(keys=(), s="x")
    operator.on_batch(frame([plain("a", 1, 4.0), plain("b", 2, 8.0)]), late=False)
    assert released(operator, 3)["s"].to_list() == [4.0, 0.3 * 8.0 + 0.7 * 4.0]
    operator = restored(operator, ewma(keys=(), s="x"), 3)
    operator.on_batch(frame([plain(None, 5, None)]), late=False)
    assert released(operator)["s"].to_list() == [0.3 * 8.0 + 0.7 * 4.0]


def test_both_zeros_are_one_key_and_so_is_every_nan():
    operator = ewma(keys=("x",), s="i")
    given = [(0.0, 10), (math.nan, 1), (-0.0, 20), (-math.nan, 2)]
    operator.on_batch(frame([plain("a", time, x, i) for time, (x, i) in enumerate(given)]), late=False)
    assert released(operator, 4)["s"].to_list() == [10.0, 1.0, 0.3 * 20 + 0.7 * 10, 0.3 * 2 + 0.7 * 1]
    operator.on_batch(frame([plain("a", 4, -0.0, None)]), late=False)
    assert released(operator)["s"].to_list() == [0.3 * 20 + 0.7 * 10]


def test_rows_that_differ_only_in_the_sign_of_zero_are_ordered_too():
    found = set()
    for rows in ([plain("a", 1, 0.0), plain("a", 1, -0.0)], [plain("a", 1, -0.0), plain("a", 1, 0.0)]):
        operator = ewma(s="i + 1")
        operator.on_batch(frame([plain("a", 0, 1.0, 7), *rows]), late=False)
        found.add(tuple(map(bits, released(operator)["x"].to_list())))
    assert found == {tuple(map(bits, [1.0, -0.0, 0.0]))}


def test_the_time_of_a_windows_result_is_before_its_end_and_counts_so_after_a_restore():
    operator = ewma(shift_us=-1, s="x")
    operator.on_batch(frame([plain("a", 10, 4.0), plain("a", 11, 8.0)]), late=False)
    assert released(operator, 9).height == 0
    assert released(operator, 10)["ts"].cast(pl.Int64).to_list() == [10]
    operator = restored(operator, ewma(shift_us=-1, s="x"), 10)
    assert operator.on_watermark(10) == []
    (late,) = operator.on_batch(frame([plain("a", 10, 1.0), plain("a", 12, 1.0)]), late=False)
    assert (late.port, late.frame.columns, late.frame.height) == (LATE, list(SCHEMA), 1)
    assert released(operator).select(pl.col("ts").cast(pl.Int64), "s").rows() == [
        (11, 0.3 * 8.0 + 0.7 * 4.0),
        (12, 0.3 * 1.0 + 0.7 * (0.3 * 8.0 + 0.7 * 4.0)),
    ]


def test_ids_that_rows_carry_for_others_are_left_behind():
    operator = ewma(s="x")
    operator.on_batch(frame([plain("a", 1, 1.0)]).with_columns(pl.lit("id").alias(ROW_ID)), late=False)
    operator.on_batch(frame([plain("a", 2, 1.0)]), late=False)
    assert released(operator).columns == [*SCHEMA, "s"]


def test_a_checkpoint_holds_the_rows_that_wait_and_one_number_a_key():
    operator = ewma(s="x")
    operator.on_batch(frame([plain("a", time, float(time)) for time in range(20)]), late=False)
    released(operator, 15)
    pieces = {name: state.freeze() for name, state in operator.states().items()}
    assert sum(piece.frame().height for piece in pieces["waiting"]) == 5
    assert [piece.frame().height for piece in pieces["means"]] == [1]


# The recursion alone: many keys, long keys, cuts anywhere.


@given(
    short=st.lists(st.integers(1, 9), max_size=80),
    longest=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    alpha=st.one_of(st.sampled_from([1.0, 0.5, 1e-300, 5e-324, 1 - 2**-53]), st.floats(0, 1, exclude_min=True)),
    nulls=st.booleans(),
)
def test_the_recursion_is_a_plain_loop_wherever_it_is_cut(short, longest, seed, alpha, nulls):
    counts = [*short, longest]
    random = np.random.default_rng(seed)
    values = [random.normal(size=count) * 10.0 ** random.integers(-300, 300) for count in counts]
    valid = [random.random(count) < 0.6 for count in counts]
    wanted: list[float | None] = []
    for xs, shown_ in zip(values, valid, strict=True):
        mean: float | None = None
        for x, is_there in zip(xs.tolist(), shown_.tolist(), strict=True):
            mean = step(mean, x if is_there or not nulls else None, alpha)
            wanted.append(mean)
    cuts = [int(random.integers(0, count + 1)) for count in counts]
    means = Means(values=np.full(len(counts), np.nan), known=np.zeros(len(counts), dtype=np.bool_))
    found: list[list[float | None]] = [[] for _ in counts]
    for part in ([slice(0, cut) for cut in cuts], [slice(cut, None) for cut in cuts]):
        keys = [key for key, rows in enumerate(part) if values[key][rows].size]
        if not keys:
            continue
        rows = Values(
            values=np.concatenate([values[key][part[key]] for key in keys]),
            valid=np.concatenate([valid[key][part[key]] for key in keys]) if nulls else None,
        )
        lengths = np.array([values[key][part[key]].size for key in keys], dtype=np.int64)
        out, after = smooth(rows, lengths, Means(values=means.values[keys], known=means.known[keys]), alpha)
        means.values[keys], means.known[keys] = after.values, after.known
        there = np.ones(out.values.size, dtype=np.bool_) if out.valid is None else out.valid
        given = iter([s if known else None for s, known in zip(out.values.tolist(), there.tolist(), strict=True)])
        for key, length in zip(keys, lengths.tolist(), strict=True):
            found[key] += [next(given) for _ in range(length)]
    assert [bits(s) for key in found for s in key] == [bits(s) for s in wanted]


@pytest.mark.parametrize("narrow_keys", [1, 32, 10**9])
def test_a_key_with_more_rows_than_a_short_number_counts_is_smoothed_as_well(narrow_keys):
    counts = np.array([3, 70_000, 1], dtype=np.int64)
    values = np.arange(counts.sum(), dtype=np.float64)
    before = Means(values=np.array([1.0, 2.0, 3.0]), known=np.array([True, False, True]))
    with patch.object(recurrence, "NARROW_KEYS", narrow_keys):
        out, after = smooth(Values(values=values, valid=None), counts, before, 0.25)
    mean, wanted = 3.0, [3.0]
    for x in values[4:70_003].tolist():
        mean = 0.25 * x + 0.75 * mean
        wanted.append(mean)
    assert out.values[3:70_003].tolist() == wanted
    assert after.values[1] == mean
    assert out.values[70_003] == after.values[2] == 0.25 * 70_003 + 0.75 * 3.0
