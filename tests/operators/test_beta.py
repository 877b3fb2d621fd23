"""The Beta distribution against SciPy's, and the aggregates made of it against counts by hand."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special  # type: ignore[import-untyped]  # it ships no types
from tests.examples import examples

from fordstone.errors import ExpressionError
from fordstone.lang.aggregates import parse_aggregate
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate import beta
from fordstone.operators.aggregate.beta import beta_high, beta_low, beta_means, beta_quantiles
from fordstone.operators.aggregate.partial import Partials

SCHEMA = Schema.of({"k": "bigint", "ts": "timestamp", "ok": "boolean", "x": "double"})
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
sizes = st.floats(-3, 9).map(lambda exponent: 10.0**exponent)
SMALLEST = 1e-300
counts = st.one_of(st.integers(0, 5), st.integers(0, 1000), st.integers(0, 10**9))


def wrong(a: Any, b: Any, probability: float, found: Any, *, above: bool) -> list[tuple[Any, ...]]:
    """The quantiles that are not right to 9 digits, by SciPy's probabilities (its quantiles are not all right)."""
    a, b, found = map(np.atleast_1d, (a, b, found))
    below, beyond = found * (1 - 1e-9), np.minimum(found * (1 + 1e-9), 1.0)
    few, many = 1 - 1e-9, 1 + 1e-9
    if above:
        right = (special.betaincc(a, b, below) >= probability * few) & (
            special.betaincc(a, b, beyond) <= probability * many
        )
    else:
        right = (special.betainc(a, b, below) <= probability * many) & (
            special.betainc(a, b, beyond) >= probability * few
        )
    # What is too small for a double is 0.
    tiny = (found < SMALLEST) & (special.betainc(a, b, SMALLEST) >= (1 - probability if above else probability) * few)
    return [(a[at], b[at], found[at]) for at in np.flatnonzero(~(right | tiny))]


def quantile(a: float, b: float, probability: float, *, above: bool = False) -> float:
    return float(beta_quantiles(np.array([a]), np.array([b]), probability, above=above)[0])


@examples(200)
@given(
    a=sizes,
    b=sizes,
    probability=st.sampled_from([0.5, 0.4999, 0.25, 0.05, 0.025, 0.005, 1e-4, 1e-6]),
    above=st.booleans(),
)
def test_quantiles_have_the_probability_that_scipy_says(a, b, probability, above):
    assert wrong(a, b, probability, quantile(a, b, probability, above=above), above=above) == []


@pytest.mark.parametrize("probability", [0.5, 0.05, 0.025, 0.0005])
@pytest.mark.parametrize("above", [False, True])
def test_quantiles_are_right_everywhere_on_a_grid(probability, above):
    scale = 10.0 ** np.arange(-3, 9.01, 0.5)
    a, b = (side.reshape(-1) for side in np.meshgrid(scale, scale * 1.1))
    assert wrong(a, b, probability, beta_quantiles(a, b, probability, above=above), above=above) == []


@examples(100)
@given(true=counts, false=counts, level=st.floats(0.001, 0.9999))
def test_a_credible_interval_holds_its_level_and_leaves_as_much_below_as_above(true, false, level):
    a, b = np.array([1.0 + true]), np.array([1.0 + false])
    low, high = beta_low(a, b, level), beta_high(a, b, level)
    tail = (1 - level) / 2
    assert low < high
    assert special.betainc(a, b, low) == pytest.approx(tail, rel=1e-5)
    assert special.betaincc(a, b, high) == pytest.approx(tail, rel=1e-5)


def test_known_intervals():
    # With the uniform prior and n successes of n, the rate is below x with the probability x ** (n + 1).
    assert quantile(11.0, 1.0, 0.05) == pytest.approx(0.05 ** (1 / 11), rel=1e-14)
    assert quantile(1.0, 11.0, 0.05, above=True) == pytest.approx(1 - 0.05 ** (1 / 11), rel=1e-13)
    assert quantile(7.5, 7.5, 0.5) == pytest.approx(0.5, rel=1e-14)
    # Jeffreys' prior and nothing seen: the arcsine distribution.
    assert quantile(0.5, 0.5, 0.025) == pytest.approx(math.sin(math.pi / 2 * 0.025) ** 2, rel=1e-12)
    assert beta_means(np.array([3.0]), np.array([1.0])).tolist() == [0.75]


def test_a_quantile_does_not_depend_on_what_stands_beside_it_nor_on_how_often():
    random = np.random.default_rng(11)
    a, b = 10.0 ** random.uniform(-3, 9, (2, 3000))
    together = beta_quantiles(a, b, 0.025)
    assert beta_quantiles(a[::-1], b[::-1], 0.025)[::-1].tolist() == together.tolist()
    assert beta_quantiles(np.tile(a, 2), np.tile(b, 2), 0.025).tolist() == [*together, *together]
    assert [quantile(a[at], b[at], 0.025) for at in range(0, 3000, 100)] == together[::100].tolist()


@pytest.mark.parametrize("a", [1e-300, 1e-12, 1.0, 1e15])
@pytest.mark.parametrize("b", [1e-300, 1e-12, 1.0, 1e15])
@pytest.mark.parametrize("level", [5e-324, 0.95, 1 - 2**-53])
def test_extremes_give_a_rate_and_never_nan(a, b, level):
    low, high = beta_low(np.array([a]), np.array([b]), level)[0], beta_high(np.array([a]), np.array([b]), level)[0]
    assert 0 <= low <= high * (1 + 1e-9) <= 1 + 1e-9


def test_few_steps_are_enough(monkeypatch):
    monkeypatch.setattr(beta, "STEPS_MAX", 12)
    test_quantiles_are_right_everywhere_on_a_grid(0.025, above=False)


# The aggregates.


def partials(**aggregates: str) -> Partials:
    return Partials(["k"], [parse_aggregate(sql, SCHEMA, name) for name, sql in aggregates.items()], SCHEMA)


def frame(values: list[bool | None]) -> pl.DataFrame:
    rows = [(number % 2, EPOCH + timedelta(seconds=number), ok, None) for number, ok in enumerate(values)]
    return pl.DataFrame(rows, schema=SCHEMA.polars, orient="row")


@examples(50)
@given(values=st.lists(st.sampled_from([True, True, False, None]), min_size=1, max_size=60), cut=st.integers(0, 60))
def test_aggregates_are_those_of_the_counts_however_they_were_merged(values, cut):
    step = partials(
        mean="beta_mean(ok)",
        low="beta_low(ok, 0.9)",
        high="beta_high(ok, 0.9)",
        skewed="beta_low(ok, 0.9, 0.5, 2)",
        width="beta_high(ok, 0.9) - beta_low(ok, 0.9)",
    )
    rows = frame(values)
    parts = [step.of_rows(rows[:cut]), step.of_rows_unmerged(rows[cut:])]
    found = step.finish(step.merge(pl.concat([part.select(step.columns()) for part in parts]))).sort("k")
    for k, mean, low, high, skewed, width in found.iter_rows():
        mine = values[k::2]
        true, false = mine.count(True), mine.count(False)
        assert mean == pytest.approx((1 + true) / (2 + true + false), rel=1e-14)
        assert low == pytest.approx(special.betaincinv(1 + true, 1 + false, 0.05), rel=1e-10)
        assert high == pytest.approx(special.betainccinv(1 + true, 1 + false, 0.05), rel=1e-10)
        assert skewed == pytest.approx(special.betaincinv(0.5 + true, 2 + false, 0.05), rel=1e-10)
        assert width == high - low


def test_rows_can_be_taken_out_again():
    step = partials(low="beta_low(ok, 0.5)")
    assert step.invertible


def test_nothing_counted_leaves_the_prior():
    step = partials(mean="beta_mean(ok, 3, 1)", null="beta_mean(NULL)", low="beta_low(ok, 0.9)")
    found = step.finish(step.of_rows(frame([None])))
    assert found.rows() == [(0, 0.75, 0.5, pytest.approx(0.05))]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("beta_mean(x)", "a condition is needed here, but this is double"),
        ("beta_mean(ok, 0, 1)", "a of beta_mean is not above 0"),
        ("beta_mean(ok, 1, -2)", "b of beta_mean is not above 0"),
        ("beta_mean(ok, 1, 1e300)", "b of beta_mean is not above 0 and below 1e\\+15"),
        ("beta_low(ok)", r"it is written beta_low\(ok, level"),
        ("beta_low(ok, 0)", "level of beta_low is not above 0 and below 1"),
        ("beta_high(ok, 1)", "level of beta_high is not above 0 and below 1"),
        ("beta_high(ok, 95)", "level of beta_high is not above 0 and below 1"),
        ("beta_high(ok, x)", "a number written out"),
        ("beta_high(ok, CAST('NaN' AS DOUBLE))", "level of beta_high is not above 0 and below 1"),
        ("beta_mean()", "is called with 0 arguments"),
        ("beta_mean(DISTINCT ok)", "DISTINCT"),
    ],
)
def test_mistakes_are_named(sql, says):
    with pytest.raises(ExpressionError, match=says):
        parse_aggregate(sql, SCHEMA)


def test_a_written_aggregate_reads_back_to_itself():
    for sql in ("beta_mean(ok)", "beta_low(x > 1, 0.95)", "beta_high(ok, 0.95, 0.5, 0.5)"):
        found = parse_aggregate(sql, SCHEMA)
        assert parse_aggregate(found.sql, SCHEMA, found.name) == found
