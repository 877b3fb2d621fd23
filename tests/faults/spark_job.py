"""The pipeline that the faults on Spark are aimed at, and the session that it runs in: as text for the child.

Paths are relative, as in `job`. Plain rows, running upserts, windows with what was late for them and an EWMA go to text,
Parquet and Arrow files and to Delta tables.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import polars as pl
from tests.faults.job import LATENESS_S, PIPELINE, SCHEMA, WINDOW_S, attach_refusing, attach_tables

from fordstone import Pipeline, tumbling
from fordstone.connectors import delta, files

ALPHA = 0.25
HELD_SECONDS_MAX = 600.0
POLL_SECONDS = 0.01


class SparkJob(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run it."""

    window: str = f"{WINDOW_S}s"
    per_key: bool = True
    """Whether the running aggregate is there."""
    per_n: bool = False
    """Whether another aggregate is there."""
    function: Literal["holds", "raises", "in_place", "mistaken"] | None = None
    """What the user's function between filter and sinks does."""
    refusing: bool = False
    """Whether there are functions that raise for some rows, which become dead letters."""
    tables: str = ""
    """The dsn of a database of PostgreSQL whose tables are sinks, too."""
    options: dict[str, Any] = {}
    """Of `SparkConfig`."""
    restart: dict[str, int] = {}
    """Of `RestartPolicy`."""


class SparkChild(msgspec.Struct, frozen=True, kw_only=True):
    """What one process does."""

    master: str = "local[2,2]"
    """Two tasks at once; one that fails is tried again once."""
    settings: dict[str, str] = {}
    """Of Spark."""
    jobs: tuple[SparkJob, ...]


def build(job: SparkJob) -> Pipeline:
    """The pipeline, in the working directory."""
    pipeline = Pipeline(PIPELINE)
    rows = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    kept = rows.filter("id % 7 <> 3")
    match job.function:
        case "holds":
            kept = kept.map_batches(Holding(Path.cwd()), name="function")
        case "raises":
            kept = kept.map_batches(raising, name="function")
        case "mistaken":
            kept = kept.map_batches(mistaken, name="function")
        case "in_place":
            least = -1
            kept = kept.map_batches(lambda frame: frame.filter(pl.col("id") > least), name="function")
        case None:
            pass
    kept.sink("kept", files("out/kept", format="jsonl"))
    if job.per_key:
        per_key = kept.group_by("k").agg(name="count_by_k", n="count(*)", total="sum(id)", top="max(n)")
        per_key.sink("per_key", files("out/per_key", format="jsonl"))
        per_key.sink("totals", delta("out/totals"))
    if job.per_n:
        kept.group_by("n").agg(name="count_by_n", c="count(*)").sink("per_n", files("out/per_n", format="jsonl"))
    windows = kept.group_by("k").window(tumbling(job.window)).agg(name="windows_by_k", n="count(*)", total="sum(id)")
    windows.sink("windows", files("out/windows", format="parquet"))
    windows.late.sink("late", files("out/late", format="arrow"))
    smooth = kept.group_by("k").ewma(name="smooth_by_k", alpha=ALPHA, smooth="n")
    smooth.sink("smooth", delta("out/smooth"))
    if job.refusing:
        attach_refusing(kept)
    if job.tables:
        attach_tables(kept, job.tables)
    return pipeline


class Holding:
    """A user's function that stands still while there is a file `hold`, and says who and where it is: `held/<pid>`."""

    def __init__(self, folder: Path) -> None:
        self._hold = folder / "hold"
        self._held = folder / "held"

    def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
        if self._hold.exists():
            with suppress(FileNotFoundError):  # it was just released
                (self._held / str(os.getpid())).touch()
        until = time.monotonic() + HELD_SECONDS_MAX
        while self._hold.exists():
            assert time.monotonic() < until, "it was not released"
            time.sleep(POLL_SECONDS)
        return frame


def raising(frame: pl.DataFrame) -> pl.DataFrame:
    """A user's function that fails."""
    del frame
    raise RuntimeError("the sensor table is locked")


def mistaken(frame: pl.DataFrame) -> pl.DataFrame:
    """A user's function that gives what was not declared."""
    return frame.drop("n")
