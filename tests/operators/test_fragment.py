"""Every aggregate, users' own included, over fragments: what it gives over the rows of the window alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from random import Random

import polars as pl
import pytest
from tests.operators.subtasks import Row, Subtasks

from fordstone.lang.aggregates import Aggregate, parse_aggregate, user_aggregate
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.fragment import Fragments
from fordstone.operators.aggregate.partial import Partials
from fordstone.operators.aggregate.user import Aggregator
from fordstone.operators.window.count import CountAggregate
from fordstone.operators.window.session import SessionAggregate
from fordstone.plan.plan import Count
from fordstone.plan.stream_type import EventTime
from fordstone.state.memory import IN_MEMORY

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "i": "bigint", "x": "double"})
EVERY_AGGREGATE = {
    "n": "count(*)",
    "mean": "avg(x) + min(x)",
    "top": "max(i)",
    "head": "first(i)",
    "tail": "last(x)",
    "spread": "stddev(x)",
    "kinds": "count_distinct(i)",
    "middle": "quantile(x, 0.5)",
    "all": "collect(i)",
    "share": "beta_mean(i > 3)",
    "exact": "count(DISTINCT i)",
    "at_top": "max_by(i, x)",
}


class Widest(Aggregator):
    """A user's own: the least and the greatest, and how far they are apart."""

    state = {"lo": "double", "hi": "double"}  # noqa: RUF012 - as the seam has it
    result = "double"

    def add(self, value: pl.Expr) -> dict[str, pl.Expr]:  # type: ignore[override]  # one argument
        return {"lo": value.min(), "hi": value.max()}

    def merge(self, lo: pl.Expr, hi: pl.Expr) -> dict[str, pl.Expr]:  # type: ignore[override]  # its own state
        return {"lo": lo.min(), "hi": hi.max()}

    def finish(self, lo: pl.Expr, hi: pl.Expr) -> pl.Expr:  # type: ignore[override]  # its own state
        return hi - lo


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    given = [(row[0], EPOCH + dt.timedelta(microseconds=row[1]), *row[2:]) for row in rows]
    return pl.DataFrame(given, schema=SCHEMA.polars, orient="row")


def every_aggregate() -> list[Aggregate]:
    own = user_aggregate(
        "wide",
        "widest",
        ("x",),
        SCHEMA,
        kind=DataType("double"),
        state=(("lo", DataType("double")), ("hi", DataType("double"))),
    )
    return [*(parse_aggregate(sql, SCHEMA, name) for name, sql in EVERY_AGGREGATE.items()), own]


@pytest.mark.parametrize("kind", ["sessions", "packs", "sliding"])
def test_every_aggregate_gives_what_it_gives_over_the_rows_of_the_window_alone(kind):
    rng = Random(3)
    rows = [(rng.choice("ab"), at // 2 * 2 + at // 20 * 9, rng.randrange(9), rng.random()) for at in range(90)]

    def made() -> SessionAggregate | CountAggregate:
        time = EventTime(column="ts")
        fragments = Fragments(("k",), every_aggregate(), SCHEMA, time=time, functions={"widest": Widest})
        if kind == "sessions":
            return SessionAggregate(fragments, gap_us=9, state=IN_MEMORY)
        return CountAggregate(fragments, Count(size=11, slide=11 if kind == "packs" else 4), state=IN_MEMORY)

    tasks = Subtasks(make=made, frame=frame)
    for start in range(0, len(rows), 17):
        tasks.batch(rows[start : start + 17])
        tasks.restore(1 + start % 2)
        tasks.watermark(min(row[1] for row in rows[start + 17 :]) if rows[start + 17 :] else TIME_MAX_US)
    out = pl.concat(tasks.out).with_columns(pl.col(pl.Datetime).cast(pl.Int64))
    partials = Partials(("k",), every_aggregate(), SCHEMA, time=EventTime(column="ts"), functions={"widest": Widest})
    assert out.height > 4
    for row in out.iter_rows(named=True):
        # Rows in order of time and of what is read; which window they are of is known by its times and its count.
        mine = sorted((r for r in rows if r[0] == row["k"]), key=lambda r: (r[1], r[3], r[2]))
        inside = [r for r in mine if row["window_start"] <= r[1] <= row["window_end"]]
        candidates = [inside[at : at + row["n"]] for at in range(len(inside) - row["n"] + 1)]
        wanted = [partials.finish(partials.of_rows(frame(rows_))).row(0, named=True) for rows_ in candidates]
        got = {name: row[name] for name in (*EVERY_AGGREGATE, "wide")}
        assert any(got == {name: pytest.approx(one[name]) for name in got} for one in wanted)
