"""Buffer: rows that wait for the watermark, and are given out in order of time.

Operators that depend on order (patterns, EWMA, count windows) hold rows here until no earlier one can come.

Invariants: a row is released once; what a watermark releases, and in which order, does not depend on the batches in
which the rows came, nor on barriers and restores in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from fordstone.model.manifest import TIME_MAX_US, TIME_MIN_US
from fordstone.state.timeline import Timeline


class Buffer(Timeline):
    """Rows ordered by time. One thread, except as `State` says."""

    def __init__(self, key: Sequence[str], *, time_column: str, order_columns: Sequence[str] = ()) -> None:
        """`time_column` is Datetime in microseconds, or Int64; rows of one time are given out by `order_columns`."""
        super().__init__(key, time_column=time_column)
        self._order = (time_column, *(column for column in order_columns if column != time_column))

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows; none of them below the last watermark. Called for every batch."""
        self._take(frame)

    def release(self, watermark_us: int) -> pl.DataFrame:
        """Remove the rows with time < `watermark_us` and give them by time, order columns and arrival.

        The last watermark, `TIME_MAX_US`, releases all there is. Called at every watermark; costs nothing when no row is
        due. A frame without columns if there never were rows.
        """
        return self._sorted(self._due(self._closed_by(watermark_us)))

    def scan(self) -> pl.DataFrame:
        """All rows, in the order in which they would be released."""
        return self._sorted(self._live())

    def _sorted(self, frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
        if not frames:
            return pl.DataFrame() if self._empty is None else self._empty
        return pl.concat(frames, rechunk=True).sort(self._order, maintain_order=True)

    def _fold(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame

    def _closed_by(self, watermark_us: int) -> int:
        if watermark_us == TIME_MAX_US:
            return TIME_MAX_US
        return max(watermark_us, TIME_MIN_US + 1) - 1
