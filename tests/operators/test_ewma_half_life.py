"""EWMA by half-life against plain loops: to the last bit however rows came, and against the sums that it stands for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import Row, Subtasks, bits, events_of, restored
from tests.operators.test_ewma import COLUMNS, SCHEMA, batches_of_rows, frame, order, plain, released

from fordstone.lang.expression import parse_double
from fordstone.operators import ewma as recurrence
from fordstone.operators.ewma import Decaying, Ewma, Means, Values, halved, smooth_by_time
from fordstone.plan.stream_type import EventTime
from fordstone.state.memory import IN_MEMORY

HALF_LIFE_US = 3


def ewma(*, half_life_us: int = HALF_LIFE_US, shift_us: int = 0, **columns: str) -> Ewma:
    given = [parse_double(sql, SCHEMA, name) for name, sql in (columns or COLUMNS).items()]
    return Ewma(
        ("k",),
        given,
        SCHEMA,
        half_life_us=half_life_us,
        time=EventTime(column="ts", shift_us=shift_us),
        state=IN_MEMORY,
    )


class Loop:
    """The mean of one key and column, one value after the other."""

    def __init__(self, half_life_us: int = HALF_LIFE_US) -> None:
        self.half_life_us = half_life_us
        self.mean: float | None = None
        self.weight = 0.0
        self.time = 0

    def take(self, time: int, value: float | None) -> float | None:
        if value is None:
            return self.mean
        with np.errstate(all="ignore"):
            x = np.float64(value)
            if self.mean is None:
                self.mean, self.weight = value, 1.0
            else:
                (decay,) = halved(np.array([float(time - self.time) / self.half_life_us])).tolist()
                self.weight = decay * self.weight + 1.0
                share = 1.0 / self.weight
                self.mean = float(x * share + np.float64(1.0 - share) * self.mean)
        self.time = time
        return self.mean


def expected(rows: Sequence[Row]) -> Counter[Any]:
    """Every row with its three means."""
    found: Counter[Any] = Counter()
    for key in {row[0] for row in rows}:
        loops = [Loop(), Loop(), Loop()]
        for row in sorted((row for row in rows if row[0] == key), key=order):
            x, i = row[4], row[5]
            values = [x, None if i is None else float(i), None if x is None else x - 1]
            means = [loop.take(row[1], value) for loop, value in zip(loops, values, strict=True)]
            found[tuple(map(bits, (*row, *means)))] += 1
    return found


@examples(80)
@given(happens=events_of(batches_of_rows), narrow_keys=st.sampled_from([1, 3, 32]))
def test_every_row_comes_out_once_with_the_means_of_a_plain_loop(happens, narrow_keys):
    with patch.object(recurrence, "NARROW_KEYS", narrow_keys):
        Subtasks(make=ewma, frame=frame).check(happens, expected)


def by_sums(times: Sequence[int], values: Sequence[float], half_life_us: int) -> list[float]:
    """What a mean by half-life is: at each row, all values so far by their age."""
    means = []
    for now in range(1, len(times) + 1):
        weights = np.exp2((np.array(times[:now]) - times[now - 1]) / half_life_us)
        means.append(float(np.sum(weights * np.array(values[:now])) / np.sum(weights)))
    return means


@examples(60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.floats(-1e6, 1e6)), min_size=1, max_size=40),
    half_life_us=st.sampled_from([1, 3, 10, 1000]),
)
def test_a_mean_is_the_sum_of_values_by_their_age_over_the_sum_of_weights(rows, half_life_us):
    rows = sorted(rows)
    operator = ewma(half_life_us=half_life_us, s="x")
    operator.on_batch(frame([plain("a", time, x) for time, x in rows]), late=False)
    times, values = zip(*rows, strict=True)
    assert released(operator)["s"].to_list() == pytest.approx(by_sums(times, values, half_life_us), rel=1e-9, abs=1e-6)


def test_a_value_counts_half_after_the_half_life_and_values_of_one_time_count_alike():
    operator = ewma(half_life_us=10, s="x")
    rows = [("a", 0, 3.0), ("a", 10, 6.0), ("b", 0, 1.0), ("b", 0, 2.0), ("b", 0, 6.0), ("c", 5, None), ("c", 6, 4.0)]
    operator.on_batch(frame([plain(k, time, x) for k, time, x in rows]), late=False)
    out = released(operator)
    found = {key: out.filter(pl.col("k") == key)["s"].to_list() for key in "abc"}
    assert found == {
        "a": [3.0, pytest.approx((0.5 * 3 + 6) / 1.5)],
        "b": [1.0, 1.5, pytest.approx(3.0)],
        "c": [None, 4.0],
    }


def test_nulls_do_not_move_the_time_that_a_value_ages_from():
    operator = ewma(half_life_us=10, s="x")
    operator.on_batch(frame([plain("a", 0, 3.0), plain("a", 7, None)]), late=False)
    assert released(operator, 8)["s"].to_list() == [3.0, 3.0]
    operator = restored(operator, ewma(half_life_us=10, s="x"), 8)
    operator.on_batch(frame([plain("a", 10, 6.0)]), late=False)
    assert released(operator)["s"].to_list() == [pytest.approx(5.0)]


def test_a_constant_stays_what_it_is_even_near_the_largest_double():
    for value in (0.1, -1.7e308, 1.7976931348623157e308):
        operator = ewma(half_life_us=7, s="x")
        operator.on_batch(frame([plain("a", time, value) for time in range(300)]), late=False)
        means = np.array(released(operator)["s"])
        assert np.all(np.isfinite(means))
        assert means == pytest.approx(value, rel=1e-14)


def test_nan_stays_and_after_a_very_long_time_only_the_newest_value_counts():
    operator = ewma(half_life_us=1, s="x")
    rows = [plain("a", 0, 1e300), plain("a", 10**15, 2.0), plain("b", 0, math.nan), plain("b", 10**15, 2.0)]
    operator.on_batch(frame(rows), late=False)
    assert [str(s) for s in released(operator).sort("k", "ts")["s"]] == ["1e+300", "2.0", "nan", "nan"]


def test_infinities_stay_while_they_count():
    operator = ewma(half_life_us=10, s="x")
    operator.on_batch(
        frame([plain("a", time, x) for time, x in enumerate([1.0, math.inf, 2.0, -math.inf])]), late=False
    )
    assert [str(s) for s in released(operator)["s"]] == ["1.0", "inf", "inf", "nan"]


def test_three_numbers_a_key_and_column_are_kept():
    operator = ewma(s="x", t="x + 1")
    operator.on_batch(frame([plain("a", time, float(time)) for time in range(20)]), late=False)
    released(operator, 15)
    (piece,) = operator.states()["means"].freeze()
    assert (piece.frame().height, piece.frame().width) == (1, 1 + 2 * 3 + 1)


# The recursion and its powers alone.


def test_powers_of_a_half_are_right_to_about_the_last_bit():
    random = np.random.default_rng(7)
    times = np.concatenate(
        [random.uniform(0, 3, 3000), random.uniform(0, 1000, 3000), 10.0 ** random.uniform(-20, 3, 999)]
    )
    wanted = [float(Decimal(2) ** -Decimal(time)) for time in times.tolist()]
    assert halved(times) == pytest.approx(wanted, rel=4e-16)
    assert halved(np.array([0.0, 1.0, 2.0, 1074.0, 1080.0, 1e300, np.inf])).tolist() == [1, 0.5, 0.25, 5e-324, 0, 0, 0]


def test_a_power_is_the_same_whatever_stands_beside_it():
    times = np.random.default_rng(3).uniform(0, 50, 1001)
    together = halved(times)
    assert [halved(times[at : at + 1])[0] for at in range(0, 1001, 7)] == together[::7].tolist()
    assert halved(times[3:90:5]).tolist() == together[3:90:5].tolist()


@examples(60)
@given(short=st.lists(st.integers(1, 9), max_size=60), longest=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_the_recursion_is_a_plain_loop_wherever_it_is_cut(short, longest, seed):
    random = np.random.default_rng(seed)
    counts = [*short, longest]
    values = [random.normal(size=count) * 10.0 ** random.integers(-300, 300) for count in counts]
    times = [np.sort(random.integers(-50, 50, size=count)) for count in counts]
    wanted = []
    for xs, ts in zip(values, times, strict=True):
        loop = Loop(13)
        wanted += [loop.take(time, x) for time, x in zip(ts.tolist(), xs.tolist(), strict=True)]
    cuts = [int(random.integers(0, count + 1)) for count in counts]
    size = len(counts)
    means, known = np.full(size, np.nan), np.zeros(size, dtype=np.bool_)
    weights, last = np.zeros(size), np.zeros(size, dtype=np.int64)
    found: list[list[float]] = [[] for _ in counts]
    for part in ([slice(0, cut) for cut in cuts], [slice(cut, None) for cut in cuts]):
        keys = [key for key, rows in enumerate(part) if values[key][rows].size]
        if not keys:
            continue
        lengths = np.array([values[key][part[key]].size for key in keys], dtype=np.int64)
        out, after = smooth_by_time(
            Values(values=np.concatenate([values[key][part[key]] for key in keys]), valid=None),
            np.concatenate([times[key][part[key]] for key in keys]),
            lengths,
            Decaying(means=Means(values=means[keys], known=known[keys]), weights=weights[keys], times_us=last[keys]),
            13,
        )
        means[keys], known[keys] = after.means.values, after.means.known
        weights[keys], last[keys] = after.weights, after.times_us
        given = iter(out.values.tolist())
        for key, length in zip(keys, lengths.tolist(), strict=True):
            found[key] += [next(given) for _ in range(length)]
    assert [bits(s) for key in found for s in key] == [bits(s) for s in wanted]
