"""What the Spark benchmarks read: readings of devices in Parquet files, which come into view one micro-batch at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl

FILES = 4
"""Of a micro-batch. More than there are tasks, so that both sides can share them out."""
BATCH_SPAN_US = 60_000_000
"""The rows of a micro-batch lie in so much event time."""
FIRST_US = 1_750_000_000_000_000
SCHEMA = {"ts": "timestamp", "dev": "int", "temp": "double"}
SPARK_SCHEMA = "ts timestamp, dev int, temp double"
_TIME = pl.Datetime("us", "UTC")


def readings(rows: int, keys: int, number: int) -> pl.DataFrame:
    """Micro-batch `number`: times in order, devices at random, temperatures around 20."""
    rng = np.random.default_rng(number)
    begin_us = FIRST_US + number * BATCH_SPAN_US
    times = np.sort(rng.integers(begin_us, begin_us + BATCH_SPAN_US, rows))
    devices = rng.integers(0, keys, rows).astype(np.int32)
    return pl.DataFrame({"ts": pl.Series(times).cast(_TIME), "dev": devices, "temp": rng.normal(20, 5, rows)})


def write_batch(directory: Path, frame: pl.DataFrame, *, files: int = FILES) -> None:
    """The rows as files of one micro-batch, each in order of time over all of its span."""
    directory.mkdir(parents=True)
    for number in range(files):
        frame.gather_every(files, number).write_parquet(directory / f"{number}.parquet")


def stored(directory: Path, *, rows: int, keys: int, batches: int) -> Path:
    """The micro-batches of a load, made once."""
    place = directory / f"rows-{rows}-keys-{keys}"
    for number in range(batches):
        batch = place / f"{number:03d}"
        if not batch.exists():
            write_batch(batch, readings(rows, keys, number))
    return place


class Inlet:
    """A directory that a query reads, into which micro-batches come whole: each is a directory that gets its name last."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._staging = directory.with_name(f"{directory.name}-staging")
        directory.mkdir(parents=True)

    @property
    def pattern(self) -> str:
        return f"{self._directory}/*/*.parquet"

    def let_in(self, batch: Path) -> None:
        """Show the files of a micro-batch, which stay where they are as well."""
        self._staging.mkdir()
        for file in batch.iterdir():
            os.link(file, self._staging / file.name)
        self._staging.rename(self._directory / batch.name)
