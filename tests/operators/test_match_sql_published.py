"""Examples that documentations of MATCH_RECOGNIZE give, as steps: stages that follow each other at once, preferred matches.

The rows and results are those that Flink's page on pattern recognition describes.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.match.check import derive_match
from fordstone.operators.match.step import MatchRows
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, StreamType
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"symbol": "string", "ts": "timestamp", "price": "bigint"})
STREAM = StreamType(schema=SCHEMA, time=EventTime(column="ts"))
START = datetime(2011, 4, 1, 10, tzinfo=UTC)


def stage(name, predicate=None, least=1, most=1, **more):
    return p.Stage(
        name=name, predicate=predicate, follows="next", repeats="next", times_min=least, times_max=most,
        **{"quantifier": "greedy"} | more,
    )  # fmt: skip


def found(stages, prices, measures, *, step_s=1, ends=True, **options):
    """One row per match; times as seconds after the first row."""
    step = p.Match(
        name="m", input=p.Input("ticker"), keys=("symbol",), pattern="m", stages=tuple(stages), choose="preferred",
        own_row=True, measures=tuple(measures), **options,
    )  # fmt: skip
    derive_match(step, {step.input: STREAM})
    times = [START + timedelta(seconds=step_s * at) for at in range(len(prices))]
    rows = pl.DataFrame({"symbol": ["ACME"] * len(prices), "ts": times, "price": prices}, schema=SCHEMA.polars)
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    operator.on_batch(rows, late=False)
    last_us = int((times[-1] - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    emits = [emit for emit in operator.on_watermark(TIME_MAX_US if ends else last_us + 1) if emit.port == "main"]
    if not emits:
        return []
    assert emits[0].frame["symbol"].unique().to_list() == ["ACME"]
    seconds = pl.col(pl.Datetime).sub(pl.lit(START)).dt.total_seconds()
    return sorted(emits[0].frame.drop("symbol").with_columns(seconds).rows())


def test_a_falling_price_that_rises_again():
    stages = [
        stage("start_row"),
        stage(
            "down",
            "(last(down.price, 1) IS NULL AND down.price < start_row.price) OR down.price < last(down.price, 1)",
            1,
            None,
        ),
        stage("up", "up.price > last(down.price, 1)"),
    ]
    measures = ["start_row.ts AS since", "last(down.ts) AS bottom", "last(up.ts) AS until"]
    prices = [12, 17, 19, 21, 25, 18, 15, 14, 24, 25, 19]
    assert found(stages, prices, measures, skip="last", skip_to="up") == [(4, 7, 8)]


def test_the_longest_time_in_which_a_mean_stays_low():
    stages = [stage("a", "avg(a.price) < 15", 1, None), stage("b")]
    measures = ["first(a.ts) AS since", "last(a.ts) AS until", "avg(a.price) AS mean"]
    prices = [12, 17, 13, 16, 25, 2, 4, 10, 15, 25, 25, 30]
    assert found(stages, prices, measures) == [(0, 3, 14.5), (5, 10, 13.5)]


@pytest.mark.parametrize(("quantifier", "prices"), [("greedy", [(16,)]), ("reluctant", [(13,), (16,)])])
def test_greedy_takes_as_many_as_can_be_and_reluctant_as_few(quantifier, prices):
    stages = [
        stage("a", "a.price > 10"),
        stage("b", "b.price < 15", 1, None, optional=True, quantifier=quantifier),
        stage("c", "c.price > 12"),
    ]
    assert found(stages, [10, 11, 12, 13, 14, 16], ["c.price AS last"]) == prices


def test_a_drop_in_time():
    stages = [
        stage("a"),
        stage("b", "b.price > a.price - 10", 1, None, optional=True),
        stage("c", "c.price < a.price - 10"),
    ]
    prices = [20, 17, 18, 11, 14, 9, 15, 14, 24, 1, 19]
    # The described match takes an hour to the second; a match here takes less than what is given.
    within_us = 3_600_000_001
    measures = ["c.ts AS at", "a.price - c.price AS by"]
    assert found(stages, prices, measures, step_s=1200, within_us=within_us) == [(10_800, 14)]
    # From the row 40 minutes before on it is another match, which only that one keeps away.
    assert found(stages, prices, measures, step_s=1200, within_us=within_us - 1) == [(10_800, 13)]


def test_first_and_last_of_a_rising_price():
    stages = [
        stage("a", "last(a.price, 1) IS NULL OR a.price > last(a.price, 1)", 1, None),
        stage("b", "b.price < last(a.price)"),
    ]
    measures = ["first(a.price) AS start", "last(a.price) AS top", "b.price AS last"]
    assert found(stages, [10, 12, 13, 11], measures) == [(10, 13, 11)]


@pytest.mark.parametrize(
    ("skip", "sums"),
    [
        ({"skip": "past_last"}, [(17, 4, 6), (26, 0, 3)]),
        ({"skip": "next"}, [(17, 4, 6), (22, 3, 6), (24, 1, 4), (25, 2, 5), (26, 0, 3)]),
        ({"skip": "last", "skip_to": "a"}, [(17, 4, 6), (25, 2, 5), (26, 0, 3)]),
    ],
)
def test_where_to_go_on(skip, sums):
    stages = [stage("a", "sum(a.price) < 30", 1, None), stage("c")]
    measures = ["sum(a.price) AS total", "first(ts) AS since", "last(ts) AS until"]
    assert found(stages, [7, 9, 10, 5, 10, 7, 14], measures, ends=False, **skip) == sums


def test_conditions_see_the_row_and_all_rows_before_it():
    stages = [
        stage("a", "a.price >= 10"),
        stage("b", "b.price > a.price AND sum(price) < 100 AND sum(b.price) < 80", 1, None),
    ]
    assert found(stages, [10, 15, 20, 31, 35], ["count(b.*) AS n", "sum(price) AS total"]) == [(3, 76)]


def test_offsets_count_back_within_a_stage():
    stages = [
        stage("a", "a.price >= 10"),
        stage(
            "b",
            "(last(b.price, 1) IS NULL OR b.price > last(b.price, 1)) "
            "AND (last(b.price, 2) IS NULL OR b.price > 2 * last(b.price, 2))",
            1,
            None,
        ),
    ]
    measures = ["count(b.*) AS n", "last(b.price, 2) AS third", "first(b.price, 1) AS second"]
    assert found(stages, [10, 15, 20, 31, 35], measures) == [(3, 15, 20)]


@pytest.mark.parametrize(("prices", "n"), [([10, 15, 20], 3), ([10, 20], 2)])
def test_offsets_without_a_stage_count_back_over_all_rows(prices, n):
    stages = [stage("a"), stage("b", "b.price < 20", optional=True), stage("c", "last(price, 1) < c.price")]
    assert found(stages, prices, ["count(*) AS n", "c.price AS last"]) == [(n, 20)]


def test_a_greedy_last_stage_waits_for_the_row_that_it_cannot_take():
    stages = [stage("a", "price > 10", 1, None)]
    assert found(stages, [11, 12, 13], ["count(*) AS n"], ends=False) == []
    assert found(stages, [11, 12, 13, 5, 20], ["count(*) AS n"], ends=False) == [(3,)]
    assert found(stages, [11, 12, 13, 5, 20], ["count(*) AS n"]) == [(1,), (3,)]
