"""The expected results of the demo, computed without any code of Fordstone, and the comparison with the actual ones.

The oracle reads the input as it was written and the output files as they are: JSON lines and Parquet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

WINDOW_US = 10_000_000
TOLERANCE = 1e-9
_KEY = ["device", "start"]
_NEWEST = pl.Schema(
    {
        "device": pl.String(),
        "start": pl.Int64(),
        "n": pl.Int64(),
        "mean": pl.Float64(),
        "low": pl.Float64(),
        "top": pl.Float64(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The comparison of the center's windows with the expected ones."""

    produced: int
    counted: int
    lost: int
    doubled: int
    wrong: int
    """Windows whose mean, minimum or maximum differs."""
    windows: int

    @property
    def good(self) -> bool:
        return self.lost == self.doubled == self.wrong == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """The alarms that the gateways released at once."""

    alarms: int
    again: int
    """Alarms that were repeated after a restart, and were recognised by their id."""
    unfounded: int
    """Alarms for a reading that was not written, or that is not above its limit."""


def judge_windows(written: pl.DataFrame, directory: Path) -> Verdict:
    """Compare the newest result of each window with the result of Polars over the rows that were written."""
    start = (pl.col("us") // WINDOW_US * WINDOW_US).alias("start")
    temp = pl.col("temp")
    expected = written.group_by("device", start).agg(
        pl.len().cast(pl.Int64).alias("n"), temp.mean().alias("mean"), temp.min().alias("low"), temp.max().alias("top")
    )
    both = expected.join(newest(directory), on=_KEY, how="full", coalesce=True, suffix="_found")
    wanted, found = pl.col("n").fill_null(0), pl.col("n_found").fill_null(0)
    differs = [
        ((pl.col(name) - pl.col(f"{name}_found")).abs() > TOLERANCE * pl.max_horizontal(1.0, pl.col(name).abs()))
        for name in ("mean", "low", "top")
    ]
    counts = both.select(
        wanted.sum().alias("produced"),
        found.sum().alias("counted"),
        (wanted - found).clip(0).sum().alias("lost"),
        (found - wanted).clip(0).sum().alias("doubled"),
        pl.any_horizontal(differs).sum().alias("wrong"),
    ).row(0, named=True)
    return Verdict(**{name: int(value or 0) for name, value in counts.items()}, windows=expected.height)


def newest(directory: Path) -> pl.DataFrame:
    """Return the newest result of each window: device, start, n, mean, low, top."""
    frames = [pl.read_parquet(file) for file in epoch_files(directory)]
    if not frames:
        return pl.DataFrame(schema=_NEWEST)
    rows = pl.concat(frames, how="diagonal").with_columns(pl.col("window_start").dt.epoch("us").alias("start"))
    return rows.unique(_KEY, keep="last", maintain_order=True).select(*_NEWEST)


def epoch_files(directory: Path) -> list[Path]:
    """Return the files of all epochs, oldest first: each epoch is one file, or one directory of parts."""
    found = [*directory.glob("epoch-*.parquet"), *directory.glob("epoch-*/part-*.parquet")]
    return sorted(found, key=lambda file: file.relative_to(directory).as_posix())


def judge_alarms(written: pl.DataFrame, directories: Iterable[Path]) -> Alarms:
    """Count alarms as a receiver does that keeps the first one of each id."""
    sent = [row for directory in directories for row in json_rows(directory, "rows-*.jsonl")]
    by_id = {row["__id"]: row for row in reversed(sent)}
    known = set(written.select("device", "seq", "temp").iter_rows()) if sent else set()
    unfounded = sum(
        (row["device"], row["seq"], row["temp"]) not in known or not row["temp"] > row["high"] for row in by_id.values()
    )
    return Alarms(alarms=len(by_id), again=len(sent) - len(by_id), unfounded=unfounded)


def json_rows(directory: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of all files in the order of their names. An incomplete last line after a crash is not a row."""
    for file in sorted(directory.glob(pattern)):
        for line in file.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)
