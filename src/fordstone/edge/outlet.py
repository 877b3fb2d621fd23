"""Outlets: where a task's rows leave for a sink.

With `release="commit"` rows wait in the outlet; at a barrier they are frozen, and leave when the barrier's attempt is
sealed. What an attempt that was given up had frozen stays pending and is part of the next (rule 4). Otherwise rows
are written to the sink at once.
"""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from fordstone.connectors.connector import Sink
from fordstone.model.ids import Attempt
from fordstone.state.piece import Piece


class Outlet:
    """One sink's end in one task."""

    def __init__(self, sink: str, *, write_to: Sink | None = None, wake: Callable[[], None] | None = None) -> None:
        """With `write_to`, rows go there at once; else they wait for the seal."""
        self.sink = sink
        self.rows = 0
        self._write_to = write_to
        self._wake = wake
        self._open: list[pl.DataFrame] = []
        self._frozen: list[tuple[Attempt, Piece]] = []

    @property
    def waits(self) -> bool:
        """Whether rows wait for the seal."""
        return self._write_to is None

    def take(self, frame: pl.DataFrame) -> None:
        """Rows come out."""
        self.rows += frame.height
        if self._write_to is not None:
            self._write_to.write(frame)
        else:
            self._open.append(frame)

    def freeze(self, attempt: Attempt, committed: Attempt) -> tuple[Piece, ...]:
        """Everything that is not sealed yet, up to this barrier. `committed`: the newest attempt that has been sealed."""
        self._frozen = [(frozen, piece) for frozen, piece in self._frozen if frozen > committed]
        if self._open:
            frames, self._open = self._open, []
            self._frozen.append((attempt, Piece(make=lambda: pl.concat(frames), keep=True)))
        return tuple(piece for _, piece in self._frozen)

    def close(self) -> None:
        """Finish."""
        if self._write_to is not None:
            self._write_to.close()
