"""The devices of one gateway: they write readings into a file that grows, in real time.

All rows are kept for the oracle. The same seed gives the same rows in every run, except for their times, which are those of the run.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from pathlib import Path

import numpy as np
import polars as pl

JITTER_US = 300_000
"""The maximum time from a row's time to its writing: less than the pipeline's lateness, so no row is late."""
SPIKE_SHARE = 0.0004


class Devices:
    """`devices` devices, each with `rate` readings per second. Used by one thread."""

    def __init__(
        self, gateway: str, folder: Path, *, devices: int, rate: float, seed: int, roll_seconds: float | None = None
    ) -> None:
        """`roll_seconds`: begin another file at this interval; None: there is one file."""
        self.gateway = gateway
        self.rows = 0
        self.raw_bytes = 0
        self._folder = folder
        self._roll_seconds = roll_seconds
        self._rng = np.random.default_rng([seed, sum(gateway.encode())])
        self._names = np.array([f"{gateway}-{number:03d}" for number in range(devices)])
        self._base = self._rng.normal(4.0, 1.5, devices)
        self._rate = rate * devices
        self._kept: list[pl.DataFrame] = []
        self._moments: list[tuple[int, float]] = []
        """The first row number of each write, and the time of the write."""
        folder.mkdir(parents=True)
        self._file(0.0).touch()

    def write_until(self, elapsed_seconds: float) -> None:
        """Write the rows that are due by then."""
        count = int(elapsed_seconds * self._rate) - self.rows
        if count <= 0:
            return
        which = self._rng.integers(0, len(self._names), count)
        temp = self._base[which] + self._rng.normal(0, 0.8, count)
        temp += np.where(self._rng.random(count) < SPIKE_SHARE, 12.0, 0.0)
        us = time.time_ns() // 1000 - self._rng.integers(0, JITTER_US, count)
        frame = pl.DataFrame(
            {
                "device": self._names[which],
                "seq": np.arange(self.rows, self.rows + count),
                "us": us,
                "temp": temp.round(3),
            }
        )
        stamped = frame.with_columns(
            pl.col("us").cast(pl.Datetime("us")).dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").alias("ts")
        )
        text = stamped.select("device", "seq", "ts", "temp").write_ndjson().encode()
        with self._file(elapsed_seconds).open("ab") as file:
            file.write(text)
        self._moments.append((self.rows, time.monotonic()))
        self._kept.append(frame)
        self.rows += count
        self.raw_bytes += len(text)

    def _file(self, elapsed_seconds: float) -> Path:
        if self._roll_seconds is None:
            return self._folder / "readings.jsonl"
        return self._folder / f"readings-{int(elapsed_seconds // self._roll_seconds):06d}.jsonl"

    def written(self) -> pl.DataFrame:
        """Return all rows: device, seq, us, temp."""
        return pl.concat(self._kept)

    def written_at(self, seq: int) -> float:
        """Return when the reading with this number was written, on the monotonic clock."""
        return self._moments[bisect_right(self._moments, seq, key=lambda moment: moment[0]) - 1][1]
