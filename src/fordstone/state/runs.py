"""Runs: append-only partial aggregates, dropped whole when their time has come.

A windowed aggregate adds partial rows of many keys; nothing is looked up. Partial rows of one key meet when they are
coalesced, when a merger folds pieces, and at the latest when they are closed.

Leaves to the operator: what a partial row is, and how equal keys fold (`combine_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import polars as pl

from fordstone.state.timeline import NEVER_US, OpenRows, Timeline

COALESCE_ROWS_MIN: Final = 256 * 1024
"""Fewer open rows than this are not worth folding."""
COALESCE_RATIO: Final = 4
"""Open rows are folded when there are so many times more of them than were left by the last time."""
PATIENCE_MAX: Final = 16
"""How much longer to wait, at most, when folding does not make the rows fewer."""
COALESCE_BYTES: Final = 256 * 1024 * 1024
"""Open rows are folded at this size even when there are few, unless as much was left by the last time."""
SHRINK_LEAST: Final = 0.5
"""Folding that leaves more than this share of the rows was not worth it."""


class Runs(Timeline):
    """Partial aggregates by key and, mostly, by the end of their window. One thread, except as `State` says."""

    def __init__(
        self,
        key: Sequence[str],
        *,
        time_column: str | None,
        combine_rows: Callable[[pl.DataFrame], pl.DataFrame],
        coalesce_rows_min: int = COALESCE_ROWS_MIN,
    ) -> None:
        """`time_column` (Int64 microseconds): when a row is due. None: never, for aggregates without a window.

        `combine_rows` folds the partial rows of equal key (and equal time) into one, keeps the columns and their
        types, gives them in any order, and is called on any thread: it must be pure.
        """
        super().__init__(key, time_column=time_column)
        self._coalesce_rows_min = coalesce_rows_min
        self._combine_rows = combine_rows
        self._patience = 1

    def add(self, frame: pl.DataFrame) -> None:
        """Add partial rows; all of them later than the last `close`. Called for every batch: no work per key."""
        self._take(frame)
        raw = self._raw
        left_rows = sum(piece.rows_after(self._closed_us) for piece in self._ordered)
        if raw.rows > max(COALESCE_RATIO * left_rows, self._coalesce_rows_min) * self._patience or (
            raw.size_bytes > COALESCE_BYTES and raw.rows > left_rows
        ):
            self._coalesce()
            shrunk = self._ordered[0].frame().height <= SHRINK_LEAST * (raw.rows + left_rows)
            self._patience = 1 if shrunk else min(2 * self._patience, PATIENCE_MAX)

    def close(self, bound_us: int) -> pl.DataFrame:
        """Remove the rows with time <= `bound_us` and give them folded, in any order.

        Called at every watermark, with the watermark itself: after a restore all rows up to the watermark count as
        closed. Costs nothing when no row is due. A frame without columns if there never were rows.
        """
        return self._folded(self._due(bound_us))

    def scan(self) -> pl.DataFrame:
        """All rows, folded, in any order. Costs as much as the state is large."""
        return self._folded(self._live())

    def drain(self) -> pl.DataFrame:
        """Remove all rows and give them folded, in any order. A frame without columns if there never were rows."""
        rows = self.scan()
        self._pieces.reset([])
        self._ordered, self._raw = [], OpenRows()
        self._least_us = NEVER_US
        return rows

    def _folded(self, frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
        if frames:
            return self._fold(pl.concat(frames, rechunk=True))
        return pl.DataFrame() if self._empty is None else self._empty

    def _fold(self, frame: pl.DataFrame) -> pl.DataFrame:
        folded = self._combine_rows(frame).select(frame.columns)
        if folded.dtypes != frame.dtypes:
            raise TypeError(f"combine_rows must keep the types of its rows: took {frame.schema}, gave {folded.schema}.")
        return folded
