"""The pipeline that the faults are aimed at: what a test says about it, as text for the child, and how it is built.

Paths are relative: a job runs in a folder of its own, with `in/`, `out/`, `state/` and `remote/` below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import polars as pl

from fordstone import Context, KeyedFunction, Pipeline, Stream, ValueState, tumbling
from fordstone.connectors import files, postgres
from fordstone.plan.plan import Mode, OnError, StateKind

PIPELINE = "faults"
NODE = "node"
NUMBERED = {"k": "bigint", "id": "bigint", "number": "bigint"}
SCHEMA = {"id": "bigint", "k": "bigint", "ts": "timestamp", "n": "bigint"}
LATENESS_S = 4
WINDOW_S = 10
LIVE: dict[str, Any] = {"interval": "2ms"}
"""Waits for more input, and seals as often as the disk allows."""
BOUNDED: dict[str, Any] = {"bounded": True, "interval": "10m"}
"""Ends with the input, in one epoch."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run it."""

    mode: Mode = "aligned"
    window: str = f"{WINDOW_S}s"
    per_key: bool = True
    """Whether the running aggregate is there."""
    per_n: bool = False
    """Whether another aggregate is there."""
    column: str = "id"
    """What the filter reads."""
    on_error: OnError = "keep"
    failing: int = 0
    """How many times in all, counted across processes, the user's function raises."""
    refusing: bool = False
    """Whether there are functions that raise for some rows, which become dead letters."""
    mutant: str | None = None
    """A deliberate fault of `tests.simulation.mutants`, to see that the tests notice."""
    tables: str = ""
    """The dsn of a database of PostgreSQL whose tables are sinks, too."""
    task: Literal["run", "merge"] = "run"
    state: StateKind = "memory"
    """Where steps keep their state."""
    out: str = "out"
    """Where the sinks are, or a URL."""
    options: dict[str, Any] = {}
    """Of `Pipeline.run`."""


def build(job: Job) -> Pipeline:
    """Plain rows, running upserts, windows and what was late for them, each to files."""
    pipeline = Pipeline(PIPELINE, mode=job.mode, state=job.state)
    rows = pipeline.source(
        "rows", files("in/*.jsonl"), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s", on_error=job.on_error
    )
    kept = rows.filter(f"{job.column} % 7 <> 3")
    if job.failing:
        kept = kept.map_batches(_Flaky(job.failing), name="flaky")
    kept.sink("kept", files(f"{job.out}/kept", format="jsonl"))
    if job.tables:
        attach_tables(kept, job.tables)
    if job.per_key:
        per_key = kept.group_by("k").agg(name="count_by_k", n="count(*)", total="sum(id)", top="max(n)")
        per_key.sink("per_key", files(f"{job.out}/per_key", format="jsonl"))
    if job.per_n:
        kept.group_by("n").agg(name="count_by_n", c="count(*)").sink("per_n", files(f"{job.out}/per_n", format="jsonl"))
    if job.refusing:
        attach_refusing(kept)
    windows = kept.group_by("k").window(tumbling(job.window)).agg(name="windows_by_k", n="count(*)", total="sum(id)")
    windows.sink("windows", files(f"{job.out}/windows", format="parquet"))
    windows.late.sink("late", files(f"{job.out}/late", format="arrow"))
    return pipeline


def attach_tables(kept: Stream, dsn: str) -> None:
    """Write plain rows and a running aggregate to tables of PostgreSQL, too."""
    kept.sink("kept_table", postgres("kept", dsn))
    per_key = kept.group_by("k").agg(name="tabled_by_k", n="count(*)", total="sum(id)", top="max(n)")
    per_key.sink("per_key_table", postgres("per_key", dsn))


def attach_refusing(rows: Stream) -> None:
    """Attach functions that raise for some rows: one of rows, and one with state."""
    passed = rows.map(refuse, on_error="dead_letter", name="refuse")
    passed.sink("passed", files("out/passed", format="jsonl"))
    numbered = rows.group_by("k").process(Refusing, schema=NUMBERED, on_error="dead_letter", name="refuse_by_k")
    numbered.sink("numbered", files("out/numbered", format="jsonl"))


def is_refused(number: int) -> bool:
    """Whether functions raise for the row with this id."""
    return number % 4 == 1


def refuse(row: dict[str, Any]) -> dict[str, Any]:
    """Raise for some rows."""
    if is_refused(row["id"]):
        raise ValueError(f"row {row['id']}")
    return row


class Refusing(KeyedFunction):
    """Numbers the rows of a key. Raises for some rows, when it has counted them already."""

    seen = ValueState("bigint")

    def process(self, row: dict[str, Any], ctx: Context) -> Iterator[dict[str, Any]]:
        self.seen.set(self.seen.get(0) + 1)
        yield {"k": ctx.key, "id": row["id"], "number": self.seen.get()}
        refuse(row)


class _Flaky:
    """A user's function that raises in its third batch, until it has done so often enough. A file counts."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._batches = 0
        self._count = Path("raised")

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        self._batches += 1
        raised = len(self._count.read_bytes()) if self._count.exists() else 0
        if self._batches % 3 == 0 and raised < self._failures:
            with self._count.open("ab") as file:
                file.write(b"x")
            raise OSError("the sensor table is locked")
        return frame
