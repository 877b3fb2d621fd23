"""Aggregates over frames of rows against a plain loop and DuckDB: whatever the batches, watermarks, barriers, restores and subtasks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from random import Random
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.subtasks import Row, Subtasks, bits, events_of, frame_of, held_rows, rank, restored, shown

from fordstone import FordstoneError, Pipeline, Stream, tumbling
from fordstone.connectors import MemorySink, memory
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.over import Over
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "x": "double", "i": "int", "s": "string", "d": "decimal(10,2)"})
AGGREGATES = {
    "rows": "count(*)", "known": "count(i)", "total": "sum(i)", "lowest": "min(x)", "top": "max(s)", "high": "max(x)",
    "price": "sum(d)", "opened": "first(i)", "closed": "last(s)", "mean": "avg(i)", "spread": "var_pop(i)",
}  # fmt: skip
Frame = tuple[str, int | None]
FRAMES: list[Frame] = [("rows", 0), ("rows", 1), ("rows", 2), ("rows", 5), ("rows", None), ("range", 0), ("range", 2), ("range", 5), ("range", None)]  # fmt: skip
rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "a", "b", "é", None]),
    st.one_of(st.integers(-3, 3), st.integers(-9, 9), st.none()),
    st.sampled_from([None, 1.0, 0.0, -0.0, math.nan, math.inf, 2.5]),
    st.one_of(st.none(), st.integers(-9, 9)),
    st.sampled_from([None, "", "é", "long"]),
    st.sampled_from([None, Decimal("1.25"), Decimal("-99999999.99")]),
)
events = events_of(st.lists(rows_of_any_kind, min_size=1, max_size=12))


def over(frame: Frame, aggregates: dict[str, str] = AGGREGATES, *, keys: Sequence[str] = ("k",)) -> Over:
    step = p.Over(
        name="over",
        input=p.Input("rows"),
        keys=tuple(keys),
        frame=frame[0],  # type: ignore[arg-type]  # one of the two
        preceding=frame[1],
        aggregates=tuple(p.NamedAggregate(name, sql) for name, sql in aggregates.items()),
        order=("i",),
    )
    return Over(step, SCHEMA, time=EventTime(column="ts"), state=IN_MEMORY)


def subtasks(frame: Frame, aggregates: dict[str, str] = AGGREGATES) -> Subtasks:
    return Subtasks(lambda: over(frame, aggregates), lambda rows: frame_of(rows, SCHEMA))


def _order(row: Row) -> tuple[Any, ...]:
    """The time, then `order`, then what the aggregates read, then the rest."""
    k, ts, x, i, s, d = row
    return ts, *map(rank, (i, x, s, d, k))


def _one_zero(value: float | None) -> float | None:
    return None if value is None else value + 0.0


def _results(rows: list[Row]) -> tuple[Any, ...]:
    xs = [row[2] for row in rows if row[2] is not None]
    numbers = [row[3] for row in rows if row[3] is not None]
    texts = [row[4] for row in rows if row[4] is not None]
    prices = [row[5] for row in rows if row[5] is not None]
    return (
        len(rows),
        len(numbers),
        sum(numbers) if numbers else None,
        _one_zero(min(xs, key=rank)) if xs else None,
        max(texts) if texts else None,
        _one_zero(max(xs, key=rank)) if xs else None,
        sum(prices) if prices else None,
        rows[0][3],
        rows[-1][4],
        round(statistics.fmean(numbers), 9) + 0.0 if numbers else None,
        round(float(statistics.pvariance(numbers)), 9) + 0.0 if numbers else None,
    )


def by_hand(rows: list[Row], frame: Frame) -> Counter[Any]:
    kind, preceding = frame
    found: Counter[Any] = Counter()
    for key in {row[0] for row in rows}:
        mine = sorted((row for row in rows if row[0] == key), key=_order)
        for place, row in enumerate(mine):
            if kind == "rows":
                inside = mine[0 if preceding is None else max(place - preceding, 0) : place + 1]
            else:
                least = -math.inf if preceding is None else row[1] - preceding
                inside = [other for other in mine if least <= other[1] <= row[1]]
            found[*map(bits, row), *map(bits, _results(inside))] += 1
    return found


def rounded(frames: list[pl.DataFrame]) -> list[pl.DataFrame]:
    return [frame.with_columns(pl.col("mean", "spread").round(9) + 0.0) for frame in frames]


@given(frame=st.sampled_from(FRAMES), events=events)
def test_every_row_has_the_aggregates_of_its_frame(frame, events):
    made = subtasks(frame)
    happened = made.live_through(events)
    passed = [row for row in happened.taken if row[1] < made.watermark_us]
    assert shown(rounded(made.out)) == by_hand(passed, frame)
    made.watermark(TIME_MAX_US)
    assert shown(rounded(made.out)) == by_hand(happened.taken, frame)
    assert shown(made.late) == Counter(tuple(map(bits, row)) for row in happened.late)


def some_rows(count: int, seed: int = 1) -> list[Row]:
    """Rows of a few keys, no two of one key at one time."""
    rng = Random(seed)
    return [(rng.choice("abc"), time + rng.randrange(5) * 10, rng.random(), rng.randrange(9), None, None) for time in range(0, count * 100, 100)]  # fmt: skip


@pytest.mark.parametrize(
    ("frame", "sql"),
    [
        (("rows", 9), "ROWS BETWEEN 9 PRECEDING AND CURRENT ROW"),
        (("range", 2500), "RANGE BETWEEN 2500 PRECEDING AND CURRENT ROW"),
        (("range", None), "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"),
    ],
)
def test_many_rows_give_what_duckdb_gives(frame: Frame, sql: str):
    rows = some_rows(900)
    made = subtasks(frame, {"n": "count(*)", "top": "max(i)", "opened": "first(i)", "dev": "stddev_samp(x)"})
    made.feed(rows, batch_rows=37, lag_us=100, rng=Random(2))
    over = f"OVER (PARTITION BY k ORDER BY epoch_us(ts) {sql})"
    made.check_query(
        f"""SELECT k, epoch_us(ts) AS t, x, i, s, d, count(*) {over}, max(i) {over}, first(i) {over}, stddev_samp(x) {over}
        FROM rows ORDER BY k, t""",
        rows,
    )


def results(operator: Over, rows: list[Row], watermark_us: int = TIME_MAX_US) -> list[Any]:
    """The last column of what is released."""
    operator.on_batch(frame_of(rows, SCHEMA), late=False)
    return [row[-1] for emit in operator.on_watermark(watermark_us) for row in emit.frame.sort("ts").rows()]


def one(time: int, x: float | None = None, i: int | None = None) -> Row:
    return ("a", time, x, i, None, None)


def test_no_rounding_error_and_no_nan_outlives_its_rows():
    given_rows = [one(0, 1e17), one(1, 1.0), one(2, math.nan), one(3, 1.0), one(4, 2.0)]
    assert results(over(("rows", 1), {"sx": "sum(x)"}), given_rows)[-1] == 3.0
    assert results(over(("rows", 1), {"sx": "sum(x)"}), given_rows[:2] + given_rows[3:])[-1] == 3.0


def test_lag_looks_back_over_releases_and_restarts_and_is_null_before_the_first_row():
    operator = over(("rows", 2), {"before": "lag(i, 2)"})
    assert results(operator, [one(0, i=10), one(1, i=11)], 2) == [None, None]
    fresh = restored(operator, over(("rows", 2), {"before": "lag(i, 2)"}), 2)
    fresh.on_watermark(2)
    assert results(fresh, [one(2, i=12), one(3, i=13), one(4, i=14)]) == [10, 11, 12]


def test_equal_times_belong_to_one_frame_by_time_and_are_ordered_by_rows():
    given_rows = [one(0, i=1), one(1, i=2), one(1, i=3)]
    assert sorted(results(over(("range", 0), {"si": "sum(i)"}), given_rows)) == [1, 5, 5]
    assert sorted(results(over(("rows", None), {"si": "sum(i)"}), given_rows)) == [1, 3, 6]


@pytest.mark.parametrize(("frame", "held"), [(("rows", 3), 3), (("rows", None), 1), (("range", 20), 3)])
def test_no_more_is_kept_than_frames_to_come_may_hold(frame: Frame, held: int):
    operator = over(frame, {"n": "count(*)"})
    results(operator, [one(time, i=1) for time in range(0, 1000, 10)], 1000)
    (row,) = [row for piece in operator.states()["frames"].freeze() for row in piece.frame().to_dicts()]
    assert len(row["__rows"]) == held - (frame == ("range", 20))


def test_keys_that_no_frame_reaches_any_more_are_forgotten():
    operator = over(("range", 20), {"n": "count(*)"})
    results(operator, [(key, time, None, 1, None, None) for time, key in enumerate("abcdefgh")], 8)
    assert held_rows(operator)["frames"] == 8
    operator.on_watermark(25)
    assert len(operator._table) == 3
    operator.on_watermark(1000)
    assert len(operator._table) == 0


def source(**options: Any) -> Stream:
    made = Pipeline("p")
    schema = {"k": "string", "ts": "timestamp", "x": "double"}
    return made.source("rows", memory([]), schema=schema, **({"time": "ts"} | options))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda rows: rows.over(rows=3), "needs at least one aggregate"),
        (lambda rows: rows.over(rows=0, n="count(*)"), "either rows= .* or range="),
        (lambda rows: rows.over(rows=2, range="1s", n="count(*)"), "either rows= .* or range="),
        (lambda rows: rows.over(rows=2, x="count(*)"), "there is a column 'x' already"),
        (lambda rows: rows.over(rows=2, y="lag(x, 2)"), r"lag looks 2 rows back.*over\(rows=3"),
        (lambda rows: rows.over(y="lag(x)"), r"lag looks 1 rows back.*over\(rows=2"),
        (lambda rows: rows.over(rows=2, y="median(x)"), "median is not one of the aggregates here"),
        (lambda rows: rows.over(rows=2, y="sum(DISTINCT x)"), "without OVER"),
        (lambda rows: rows.over(rows=2, y="sum(z)"), "no column 'z'"),
        (lambda rows: rows.over(rows=2_000_000, y="sum(x)"), "at most 1,000,000"),
        (lambda rows: rows.window(tumbling("1s")).over(rows=2, y="sum(x)"), "Leave .window"),
        (lambda rows: rows.agg(y="lag(x)"), "lag is not one of the aggregates here"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_written(build, message):
    with pytest.raises(FordstoneError, match=message):
        build(source().group_by("k"))


def test_event_time_is_needed():
    with pytest.raises(FordstoneError, match="over needs event time"):
        source(time=None).group_by("k").over(rows=2, y="sum(x)")


def test_explain_says_which_rows_a_frame_holds_and_what_is_kept():
    rows = source()
    for frame in ({"rows": 3}, {"range": "10s"}, {}):
        rows.group_by("k").over(y="sum(x)", **frame).sink(f"out_{len(frame)}_{'rows' in frame}", memory(MemorySink()))
    text = rows.pipeline.explain()
    for said in ("over the last 3 rows for each k", "over the rows of the last 10s", "over all rows so far"):
        assert said in text
    assert "one row per key" in text
