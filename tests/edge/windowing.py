"""Rows in files for sliding windows, and what DuckDB makes of those that are in time. For both engines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import polars as pl
from tests.edge.runs import LATENESS_S, in_disorder, with_watermarks

from fordstone import Pipeline, Stream, sliding
from fordstone.connectors import MemorySink, files, memory
from fordstone.operators.base import OP

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "i": "bigint"}
START = datetime(1969, 12, 31, 23, 59, 40, tzinfo=UTC)
AGGREGATES = {"n": "count(*)", "total": "sum(i)", "low": "min(x)", "top": "max(x)", "mean": "avg(x)"}
EXACT = {"n": "count(*)", "total": "sum(i)"}
"""Those that are taken back pane by pane."""
KEY = ["k", "window_start", "window_end"]
Row = tuple[str | None, int, float, int]


def some_rows(seed: int, count: int) -> list[Row]:
    """Rows whose time moves on with some disorder and some silence; a few are late."""
    rng = Random(seed)
    seconds = in_disorder(rng, count, steps=(0, 0, 1, 1, 2))
    return [
        (rng.choice(["a", "b", "é", None]), second, float(rng.randrange(64)), rng.randrange(100)) for second in seconds
    ]


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), *row[2:])


def write(root: Path, partitions: list[list[Row]]) -> None:
    root.mkdir(parents=True)
    for number, rows in enumerate(partitions):
        records = [dict(zip(SCHEMA, record(row), strict=True)) for row in rows]
        lines = [json.dumps(one | {"ts": one["ts"].isoformat()}) + "\n" for one in records]
        (root / f"{number}.jsonl").write_text("".join(lines))


@dataclass(frozen=True)
class Slid:
    """Windows over rows."""

    size_s: int
    every_s: int
    offset_s: int = 0
    aggregates: dict[str, str] = field(default_factory=lambda: AGGREGATES)
    out: MemorySink = field(default_factory=MemorySink)
    late: MemorySink = field(default_factory=MemorySink)
    final: MemorySink = field(default_factory=MemorySink)

    def add(self, rows: Stream, *, late: bool = False, early: str | None = None) -> None:
        window = sliding(f"{self.size_s}s", every=f"{self.every_s}s", offset=f"{self.offset_s}s")
        found = rows.group_by("k").window(window, early=early).agg(**self.aggregates)
        found.sink("out", memory(self.out))
        if late:
            found.late.sink("late", memory(self.late))
        if early is not None:
            found.final().sink("final", memory(self.final))

    def expected(self, partitions: list[list[Row]], allowed_s: int = 0) -> pl.DataFrame:
        """What DuckDB finds in each window, of rows that it is open for; `allowed_s`: how long it is kept after its end."""
        given = self._given(partitions)
        columns = ", ".join(f"{sql} AS {name}" for name, sql in self.aggregates.items())
        with duckdb.connect(config={"threads": 1}) as base:
            base.register("given", given.to_arrow())
            found: pl.DataFrame = base.sql(
                f"WITH starts AS (SELECT {self.offset_s} + {self.every_s} * n AS s FROM range(-200, 1000) AS r(n)) "
                f"SELECT k, s AS window_start, s + {self.size_s} AS window_end, {columns} "
                f"FROM given JOIN starts ON t >= s AND t < s + {self.size_s} AND s + {self.size_s + allowed_s} > w GROUP BY ALL"
            ).pl()
        times = (pl.col("window_start", "window_end") * 1_000_000).cast(pl.Datetime("us", "UTC"))
        return found.with_columns(times, pl.col("n", "total").cast(pl.Int64))

    def rows_late(self, partitions: list[list[Row]], allowed_s: int = 0) -> int:
        """How many rows lie in windows, all of which are closed for them."""
        late = 0
        for t, w in self._given(partitions).select("t", "w").iter_rows():
            ends = [
                start + self.size_s
                for start in range(t - self.size_s + 1, t + 1)
                if (start - self.offset_s) % self.every_s == 0
            ]
            late += bool(ends) and max(ends) + allowed_s <= w
        return late

    def _given(self, partitions: list[list[Row]]) -> pl.DataFrame:
        moved_s = int(START.timestamp())
        return pl.DataFrame(
            [
                (row[0], moved_s + row[1], moved_s + watermark, *row[2:])
                for row, watermark in with_watermarks(partitions)
            ],
            schema={"k": pl.String, "t": pl.Int64, "w": pl.Int64, "x": pl.Float64, "i": pl.Int64},
            orient="row",
        )


def source(pipeline: Pipeline, root: Path) -> Stream:
    return pipeline.source("rows", files(str(root / "*")), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")


def latest(sink: MemorySink) -> pl.DataFrame:
    """The last version of each row of upserts."""
    assert set(sink.rows().get_column(OP)) == {"upsert"}
    return sink.rows().unique(KEY, keep="last", maintain_order=True).drop(OP)
