"""Rows in files for joins, and what DuckDB makes of those that are in time. For both engines."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
from tests.edge.runs import LATENESS_S, in_time, same_rows

from fordstone import Pipeline, Stream, tumbling
from fordstone.connectors import ConnectorSpec, MemorySink, files, memory

SCHEMA = {"k": "string", "ts": "timestamp", "x": "bigint"}
START = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW_S = 10
Row = tuple[str | None, int, int]
"""Key, second, value."""


def some_rows(seed: int, count: int, *, late: bool = True) -> list[Row]:
    """Rows whose time moves on with some disorder; a few are late, many share key and time, some are the same."""
    rng, now, rows = random.Random(seed), 0, []
    for _ in range(count):
        now += rng.choice((0, 0, 1))
        back = rng.choice((0, 0, 1, LATENESS_S, LATENESS_S + 2 if late else 0))
        rows.append((rng.choice(["a", "b", "é", None]), now - back, rng.randint(0, 2)))
    return rows


@dataclass(frozen=True)
class Input:
    """The rows of both sides, by partition."""

    left: list[list[Row]]
    right: list[list[Row]]

    @classmethod
    def of(cls, seed: int, count: int = 60) -> Input:
        return cls(
            [some_rows(seed * 10 + number, count) for number in range(2)],
            [some_rows(seed * 10 + 5 + number, count) for number in range(2)],
        )

    def write(self, root: Path) -> None:
        for side, partitions in (("l", self.left), ("r", self.right)):
            for number, rows in enumerate(partitions):
                path = root / side / f"{number}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f"{json.dumps(record(row))}\n" for row in rows))

    def joined(self, how: str, from_s: int, to_s: int) -> pl.DataFrame:
        """What comes out, by DuckDB: k, ts, x, ts_right, x_right."""
        with duckdb.connect(config={"threads": 1}) as base:
            base.execute("SET timezone = 'UTC'")
            for name, partitions in (("l", self.left), ("r", self.right)):
                rows = [record(row) for rows in partitions for row in judged(rows)[0]]
                base.register(name, typed(rows).to_arrow())
            found: pl.DataFrame = base.sql(
                f"SELECT coalesce(l.k, r.k) AS k, l.ts, l.x, r.ts AS ts_right, r.x AS x_right FROM l {how} JOIN r ON l.k = r.k "
                f"AND r.ts BETWEEN l.ts + INTERVAL ({from_s}) SECOND AND l.ts + INTERVAL ({to_s}) SECOND"
            ).pl()
        return found.cast({"ts": pl.Datetime("us", "UTC"), "ts_right": pl.Datetime("us", "UTC")})

    def late_rows(self) -> int:
        return sum(judged(rows)[1] for rows in (*self.left, *self.right))


def judged(rows: list[Row]) -> tuple[list[Row], int]:
    """The rows of a partition that are in time, and how many are not."""
    return in_time([rows])


def record(row: Row) -> dict[str, Any]:
    return {"k": row[0], "ts": (START + timedelta(seconds=row[1])).isoformat(), "x": row[2]}


def typed(records: list[dict[str, Any]]) -> pl.DataFrame:
    rows = [(one["k"], datetime.fromisoformat(one["ts"]), one["x"]) for one in records]
    return pl.DataFrame(rows, schema={"k": pl.String, "ts": pl.Datetime("us", "UTC"), "x": pl.Int64}, orient="row")


def source(pipeline: Pipeline, name: str, root: Path) -> Stream:
    spec: ConnectorSpec = files(str(root / name / "*.jsonl"))
    return pipeline.source(name, spec, schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")


@dataclass
class Joined:
    """A join of two file sources, with a window after it where it has time."""

    pipeline: Pipeline
    out: MemorySink
    late: MemorySink
    windows: MemorySink
    late_windows: MemorySink

    @classmethod
    def over(cls, root: Path, how: str, from_s: int, to_s: int, *, mode: Any = "aligned") -> Joined:
        found = cls(Pipeline("joins", mode=mode), *(MemorySink() for _ in range(4)))
        left, right = (source(found.pipeline, name, root) for name in ("l", "r"))
        joined = left.join(right, on="k", between=(f"{from_s}s", f"{to_s}s"), how=how)
        joined.sink("out", memory(found.out))
        joined.late.sink("late", memory(found.late))
        if how != "full":
            counted = joined.group_by("k").window(tumbling(f"{WINDOW_S}s")).agg(n="count(*)", top="max(x_right)")
            counted.sink("windows", memory(found.windows))
            counted.late.sink("late_windows", memory(found.late_windows))
        return found

    def check(self, given: Input, how: str, from_s: int, to_s: int) -> None:
        """Everything that came out is what it should be."""
        wanted = given.joined(how, from_s, to_s)
        same_rows(self.out.rows(), wanted)
        assert self.late.rows().height == given.late_rows() > 0
        if how != "full":
            same_rows(self.windows.rows(), windows_of(wanted, how, from_s, to_s))
            assert self.late_windows.rows().height == 0, "nothing that a join gives is late for what follows"


def windows_of(joined: pl.DataFrame, how: str, from_s: int, to_s: int) -> pl.DataFrame:
    """The counts of a window after a join."""
    if how == "right" or (how == "inner" and from_s >= 0 < to_s):
        time = pl.col("ts_right") + pl.duration(seconds=max(-from_s, 0))
    else:
        time = pl.col("ts") + pl.duration(seconds=max(to_s, 0))
    start = time.dt.truncate(f"{WINDOW_S}s").alias("window_start")
    counted = joined.group_by("k", start).agg(pl.len().cast(pl.Int64).alias("n"), pl.col("x_right").max().alias("top"))
    end = (pl.col("window_start") + pl.duration(seconds=WINDOW_S)).alias("window_end")
    return counted.with_columns(end).select("k", "window_start", "window_end", "n", "top")
