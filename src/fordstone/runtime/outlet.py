"""Outlets: where a task's rows leave for a sink.

With `release="commit"` rows wait in the outlet; at a barrier they are frozen, and leave when the barrier's attempt is
sealed. What an attempt that was given up had frozen stays pending and is part of the next (rule 4). Otherwise rows
are written to the sink at once. An outlet that holds too much asks for a barrier, and for no more input until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import polars as pl

from fordstone.connectors.base import Sink
from fordstone.plan.ids import Attempt
from fordstone.state.base import Piece

WAITING_BYTES_MAX: Final = 256 * 1024 * 1024


class Outlet:
    """One sink's end in one task."""

    def __init__(
        self,
        sink: str,
        *,
        write_to: Sink | None = None,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        on_full: Callable[[], None] | None = None,
    ) -> None:
        """With `write_to`, rows go there at once; else they wait for the seal, and `on_full` is called when they are many."""
        self.sink = sink
        self.rows = 0
        self._write_to = write_to
        self._waiting_bytes_max = waiting_bytes_max
        self._on_full = on_full
        self._open: list[pl.DataFrame] = []
        self._open_bytes = 0
        self._frozen: list[tuple[Attempt, Piece]] = []

    @property
    def waits(self) -> bool:
        return self._write_to is None

    def take(self, frame: pl.DataFrame) -> None:
        self.rows += frame.height
        if self._write_to is not None:
            # A clone: other tasks may hold this frame, and writing locks it (see `checkpoint.run_file.encode_run`).
            self._write_to.write(frame.clone())
            return
        self._open.append(frame)
        self._open_bytes += int(frame.estimated_size())
        if self._open_bytes > self._waiting_bytes_max and self._on_full is not None:
            self._on_full()

    def restore(self, frames: Iterable[pl.DataFrame]) -> None:
        """Put back output of an earlier run that no epoch has released yet. Called before anything else comes out."""
        for frame in frames:
            self._open.append(frame)
            self._open_bytes += int(frame.estimated_size())

    def freeze(self, attempt: Attempt, committed: Attempt) -> tuple[Piece, ...]:
        """Everything that is not sealed yet, up to this barrier. `committed`: the newest attempt that has been sealed."""
        self._frozen = [(frozen, piece) for frozen, piece in self._frozen if frozen > committed]
        if self._open:
            frames, self._open, self._open_bytes = self._open, [], 0
            self._frozen.append((attempt, Piece(make=lambda: pl.concat(frames), keep=True)))
        return tuple(piece for _, piece in self._frozen)

    def close(self) -> None:
        if self._write_to is not None:
            self._write_to.close()
