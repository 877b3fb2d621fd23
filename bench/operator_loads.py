"""The rows that operators are measured with, and what each is measured against: one plain query over all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
import polars as pl

from fordstone import KeyedFunction, Pattern, Pipeline, Stream, ValueState, session, sliding
from fordstone.connectors import MemorySink, MemorySource, memory
from table import Target, at_least

FIRST_US = 1_767_225_600_000_000
LATE_US = 1_000_000
"""Rows are up to so much out of order."""
SCHEMA = {"k": "bigint", "id": "bigint", "ts": "timestamp", "x": "double", "n": "bigint"}
Peer = Callable[[Sequence[pl.DataFrame]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One row of the table."""

    section: str
    case: str
    step: str
    pipeline: Callable[[], Pipeline]
    rows: Callable[[int], Sequence[pl.DataFrame]]
    peers: dict[str, Peer] = field(default_factory=dict)
    """The quickest of them counts. Each gives the number of its result rows."""
    other_windows: frozenset[str] = frozenset()
    """Peers that give fewer windows at the beginning, so that their rows are not compared."""
    tuned: dict[str, Peer] = field(default_factory=dict)
    """Queries that are not plain, but do in one go what the operator does: shown, and not judged by."""
    target: Target
    """A share of the peer's speed, or with no peer rows a second."""


def rows_of(count: int, *, keys: int, seconds: float, jitter_us: int = LATE_US, seed: int = 1) -> pl.DataFrame:
    """Rows, evenly over a number of seconds, slightly out of order."""
    random = np.random.default_rng(seed)
    times = FIRST_US + np.linspace(0, seconds * 1e6, count, endpoint=False).astype(np.int64)
    times -= random.integers(0, jitter_us, count)
    return pl.DataFrame(
        {
            "k": random.integers(0, keys, count),
            "id": np.arange(count),
            "ts": times,
            "x": random.normal(20, 5, count).round(3),
            "n": random.integers(0, 1_000, count),
        }
    ).with_columns(pl.col("ts").cast(pl.Datetime("us", "UTC")))


def _pipeline(build: Callable[[Stream], Stream], **other: str) -> Callable[[], Pipeline]:
    def made() -> Pipeline:
        pipeline = Pipeline("bench")
        stream = pipeline.source("s", memory(MemorySource([])), schema=SCHEMA | other, time="ts", lateness="1s")
        build(stream).sink("out", memory(MemorySink()))
        return pipeline

    return made


# What each is beside.

SUMMARY = (
    pl.len(),
    pl.col("x").sum(),
    pl.col("n").sum().alias("sn"),
    pl.col("x").min().alias("lo"),
    pl.col("x").max().alias("hi"),
)


def polars_copies(given: Sequence[pl.DataFrame]) -> int:
    # Every row once for each of its six windows, then one group_by.
    (rows,) = given
    last = pl.col("ts").to_physical() // 10_000_000 * 10_000_000
    return (
        rows.lazy()
        .select("k", "x", "n", pl.concat_list([last - 10_000_000 * back for back in range(6)]).alias("start"))
        .explode("start")
        .group_by("k", "start")
        .agg(SUMMARY)
        .collect()
        .height
    )


def polars_sliding(given: Sequence[pl.DataFrame]) -> int:
    # Panes first, each of which is then copied into its six windows: as the operator does it.
    (rows,) = given
    last = pl.col("ts").to_physical() // 10_000_000 * 10_000_000
    return (
        rows.lazy()
        .select("k", "x", "n", last.alias("last"))
        .group_by("k", "last")
        .agg(SUMMARY)
        .with_columns(pl.concat_list([pl.col("last") - 10_000_000 * back for back in range(6)]).alias("start"))
        .explode("start")
        .group_by("k", "start")
        .agg(pl.col("len").sum(), pl.col("x").sum(), pl.col("sn").sum(), pl.col("lo").min(), pl.col("hi").max())
        .collect()
        .height
    )


def polars_dynamic(given: Sequence[pl.DataFrame]) -> int:
    (rows,) = given
    return rows.sort("ts").group_by_dynamic("ts", every="10s", period="60s", group_by="k").agg(SUMMARY).height


def polars_session(given: Sequence[pl.DataFrame]) -> int:
    (rows,) = given
    return (
        rows.sort("k", "ts")
        .with_columns(
            ((pl.col("ts").diff().cast(pl.Int64) >= GAP_US) | (pl.col("k") != pl.col("k").shift()))
            .fill_null(value=True)
            .cum_sum()
            .alias("session")
        )
        .group_by("session")
        .agg(
            pl.col("k").first(),
            pl.col("ts").min(),
            pl.col("ts").max().alias("last"),
            pl.len(),
            pl.col("x").sum(),
            pl.col("x").max().alias("hi"),
        )
        .height
    )


def polars_ewma(given: Sequence[pl.DataFrame]) -> int:
    (rows,) = given
    return rows.sort("ts").with_columns(pl.col("x").ewm_mean(alpha=0.2, adjust=False).over("k").alias("s")).height


def polars_half_life(given: Sequence[pl.DataFrame]) -> int:
    (rows,) = given
    return rows.sort("ts").with_columns(pl.col("x").ewm_mean_by("ts", half_life="30s").over("k").alias("s")).height


def polars_unique(given: Sequence[pl.DataFrame]) -> int:
    (rows,) = given
    return rows.sort("ts").unique("id", keep="first", maintain_order=True).height


def duckdb_join(given: Sequence[pl.DataFrame]) -> int:
    left, right = given
    with duckdb.connect(config={"threads": 1}) as base:
        base.register("l", left.to_arrow())
        base.register("r", right.to_arrow())
        base.sql(
            "create table out as select l.*, r.id as id_right, r.ts as ts_right, r.x as x_right, r.n as n_right from l join r on l.k = r.k "
            "and r.ts between l.ts - interval 100 milliseconds and l.ts + interval 100 milliseconds"
        )
        return int(base.sql("select count(*) from out").fetchall()[0][0])


def polars_join(given: Sequence[pl.DataFrame]) -> int:
    left, right = given
    # All pairs of a key would not fit; pairs of a key and a tenth of a second, or its neighbours, do.
    slot = pl.col("ts").to_physical() // 100_000
    sides = (
        left.with_columns(slot.alias("slot")),
        right.with_columns(pl.concat_list(slot - 1, slot, slot + 1).alias("slot")).explode("slot"),
    )
    near = (pl.col("ts_right") - pl.col("ts")).abs() <= pl.duration(milliseconds=100)
    return sides[0].join(sides[1], on=["k", "slot"]).filter(near).height


# The loads.

GAP_US = 300_000


class Counted(KeyedFunction):
    """Counts the rows of a key, and gives every row its number."""

    seen = ValueState("bigint")

    def process(self, row, ctx):  # type: ignore[no-untyped-def]  # noqa: ARG002 - written as users write
        number = (self.seen.get() or 0) + 1
        self.seen.set(number)
        yield {"k": row["k"], "number": number}


def _joined() -> Pipeline:
    pipeline = Pipeline("bench")
    left, right = (
        pipeline.source(name, memory(MemorySource([])), schema=SCHEMA, time="ts", lateness="1s") for name in ("l", "r")
    )
    left.join(right, on="k", between=("-100ms", "100ms"), name="step").sink("out", memory(MemorySink()))
    return pipeline


def _pattern(stream: Stream) -> Stream:
    rising = (
        Pattern("rising").start("a", "n < 4").then("b", "n >= 4 AND n < 7").then("c", "n >= 7 AND n < 10").within("60s")
    )
    return stream.group_by("k").match(rising, measures={"began": "a.ts", "ended": "c.ts"}, name="step")


def _with_doubles(count: int) -> Sequence[pl.DataFrame]:
    rows = rows_of(count, keys=1_000, seconds=count / 10_000)
    again = rows.sample(fraction=0.05, seed=2)
    return (pl.concat([rows, again]).sort("ts").head(count),)


def _with_text_ids(count: int) -> Sequence[pl.DataFrame]:
    (rows,) = _with_doubles(count)
    return (rows.with_columns(pl.format("message-{}", "id").alias("id")),)


LOADS: tuple[Load, ...] = (
    Load(
        section="sliding", case="60 s by 10 s, 1,000 keys", step="step", target=at_least(0.5),
        pipeline=_pipeline(
            lambda s: s.group_by("k").window(sliding("60s", every="10s")).agg(
                n="count(*)", sx="sum(x)", sn="sum(n)", lo="min(x)", hi="max(x)", name="step"
            )
        ),
        rows=lambda count: (rows_of(count, keys=1_000, seconds=count / 10_000),),
        peers={"Polars, six copies of each row": polars_copies, "Polars group_by_dynamic": polars_dynamic},
        tuned={"Polars, six copies of each pane": polars_sliding},
        other_windows=frozenset({"Polars group_by_dynamic"}),
    ),
    Load(
        section="session", case="gap 0.3 s, 1,000 keys", step="step", target=at_least(0.4),
        pipeline=_pipeline(
            lambda s: s.group_by("k").window(session("300ms")).agg(n="count(*)", sx="sum(x)", hi="max(x)", name="step")
        ),
        rows=lambda count: (rows_of(count, keys=1_000, seconds=count / 10_000),),
        peers={"Polars sort and group_by": polars_session},
    ),
    *(
        Load(
            section="ewma", case=f"alpha, {keys:,} keys", step="step", target=at_least(0.4),
            pipeline=_pipeline(lambda s: s.group_by("k").ewma(alpha=0.2, smooth="x", name="step")),
            rows=lambda count, keys=keys: (rows_of(count, keys=keys, seconds=count / 10_000),),  # type: ignore[misc]
            peers={"Polars sort and ewm_mean": polars_ewma},
        )
        for keys in (1_000, 100_000)
    ),
    *(
        Load(
            section="ewma", case=f"half-life, {keys:,} keys", step="step", target=at_least(0.4),
            pipeline=_pipeline(lambda s: s.group_by("k").ewma(half_life="30s", smooth="x", name="step")),
            rows=lambda count, keys=keys: (rows_of(count, keys=keys, seconds=count / 10_000),),  # type: ignore[misc]
            peers={"Polars sort and ewm_mean_by": polars_half_life},
        )
        for keys in (1_000, 100_000)
    ),
    Load(
        section="join", case="100 ms around, 1,000 keys", step="step", target=at_least(0.4),
        pipeline=_joined,
        rows=lambda count: (
            rows_of(count // 2, keys=1_000, seconds=count / 20_000),
            rows_of(count // 2, keys=1_000, seconds=count / 20_000, seed=3),
        ),
        peers={"DuckDB, one thread": duckdb_join, "Polars, by tenths of a second": polars_join},
    ),
    *(
        Load(
            section="dedup", case=f"5 % repeated, within 1 h, ids of {kind}", step="step", target=at_least(0.5),
            pipeline=_pipeline(lambda s: s.deduplicate("id", within="1h", name="step"), id=kind),
            rows=made,
            peers={"Polars sort and unique": polars_unique},
        )
        for kind, made in (("bigint", _with_doubles), ("string", _with_text_ids))
    ),
    Load(
        section="pattern", case="three steps, 1 % candidates, 1,000 keys", step="step", target=at_least(2_000_000),
        pipeline=_pipeline(_pattern),
        rows=lambda count: (rows_of(count, keys=1_000, seconds=count / 10_000),),
    ),
    Load(
        section="process", case="a value a key, 1,000 keys", step="step", target=at_least(200_000),
        pipeline=_pipeline(
            lambda s: s.group_by("k").process(Counted, schema={"k": "bigint", "number": "bigint"}, name="step")
        ),
        rows=lambda count: (rows_of(count // 4, keys=1_000, seconds=count / 40_000),),
    ),
)  # fmt: skip
