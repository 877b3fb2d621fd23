"""The rows that the edge benchmarks read: readings of devices, in order of time, as frames in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import polars as pl

from fordstone.connectors import MemorySource
from fordstone.connectors.memory import Rows

FIRST_US = 1_577_836_800_000_000
"""2020: times near 1970 look like a wrong unit, and times after now like a wrong clock."""
SPAN_US = 200_000_000
"""The rows of one lot lie in so much event time."""
SCHEMA = {"ts": "timestamp", "dev": "int", "temp": "double"}
_TIME = pl.Datetime("us", "UTC")


@lru_cache(maxsize=2)
def readings(rows: int, keys: int) -> pl.DataFrame:
    """Times in order over `SPAN_US` from `FIRST_US` on, devices at random, temperatures around 20."""
    rng = np.random.default_rng(0)
    times = np.sort(rng.integers(0, SPAN_US, rows))
    devices = rng.integers(0, keys, rows).astype(np.int32)
    return _frame(times, devices, rng.normal(20, 5, rows))


def every_key_once(keys: int) -> pl.DataFrame:
    """One row per device, devices in no order."""
    rng = np.random.default_rng(1)
    times = np.linspace(0, SPAN_US - 1, keys).astype(np.int64)
    return _frame(times, rng.permutation(keys).astype(np.int32), rng.normal(20, 5, keys))


def _frame(times: np.ndarray, devices: np.ndarray, temperatures: np.ndarray) -> pl.DataFrame:
    return pl.DataFrame({"ts": pl.Series(FIRST_US + times).cast(_TIME), "dev": devices, "temp": temperatures})


def cut(frame: pl.DataFrame, batch_rows: int) -> list[pl.DataFrame]:
    return [frame.slice(start, batch_rows) for start in range(0, frame.height, batch_rows)]


def partitioned(frame: pl.DataFrame, *, batch_rows: int, partitions: int) -> MemorySource:
    """The rows once, their batches assigned in turn. Each partition is in order of time."""
    source = MemorySource([[] for _ in range(partitions)])
    for index, batch in enumerate(cut(frame, batch_rows)):
        source.append(index % partitions, batch)
    return source


class Endless(MemorySource):
    """The rows again and again, each time `SPAN_US` later. Made as they are read, so that they take no room."""

    def __init__(self, frame: pl.DataFrame, *, batch_rows: int, partitions: int, first_lot: int = 0) -> None:
        super().__init__([[] for _ in range(partitions)])
        batches = cut(frame, batch_rows)
        # Only whole batches: a short one would be read together with a part of the next.
        whole = [batch for batch in batches if batch.height == batches[0].height]
        self._shares = [whole[number::partitions] for number in range(partitions)]
        self._first_lot = first_lot

    def pieces(self, partition: int, first: int) -> tuple[list[Rows], bool]:
        """The next batch, whenever one is asked for."""
        share = self._shares[partition]
        lot, index = divmod(first, len(share))
        later = pl.duration(microseconds=(lot + self._first_lot) * SPAN_US)
        return [share[index].with_columns(pl.col("ts") + later)], False


def checksum(results: pl.DataFrame) -> dict[str, float]:
    """A few numbers that two correct results have in common. Columns: n, total, low, top, one row per device and window."""
    found = results.select(
        rows=pl.len(),
        n=pl.col("n").sum(),
        total=pl.col("total").sum(),
        low=pl.col("low").sum(),
        top=pl.col("top").sum(),
    )
    return {name: float(value) for name, value in found.row(0, named=True).items()}


def must_agree(checksums: Sequence[dict[str, float]]) -> None:
    """A fast wrong answer is worth nothing."""
    first = checksums[0]
    for other in checksums[1:]:
        for name, value in first.items():
            if not np.isclose(value, other[name], rtol=1e-9, atol=0):
                raise AssertionError(f"the results differ in {name}: {first} and {other}")
