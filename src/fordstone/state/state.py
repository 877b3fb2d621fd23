"""The seam of state: what an operator's state promises to whoever snapshots and restores it.

Three shapes implement it: `table.Table`, `runs.Runs` and `buffer.Buffer`. An operator owns its states and calls their
own methods; the engine (a task on the edge, a stateful processor on Spark) only calls what stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import polars as pl

from fordstone.state.piece import Piece


class State(ABC):
    """One named state of one operator on one subtask. Called by one thread, except `combine` and `merged`."""

    @property
    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The key columns, by which rows of a piece belong to key groups. Every piece has them. Empty: not keyed."""

    @abstractmethod
    def freeze(self) -> tuple[Piece, ...]:
        """Seal what changed since the last call and give all pieces, oldest first.

        Called at every barrier on the task's thread: must not take longer than the change itself demands. The pieces
        together are the whole state at this moment, whatever happens after.
        """

    @abstractmethod
    def load(self, pieces: Sequence[Piece], *, watermark_us: int) -> None:
        """Become what these pieces (all `in_memory`, oldest first) say. Called at most once, before anything else.

        Pieces that carry a `ref` stay durable: they are not written again. `watermark_us` is the operator's watermark
        when they were frozen: what it had already closed is dropped.
        """

    @abstractmethod
    def mergeable(self) -> tuple[Piece, ...]:
        """Contiguous pieces that are worth folding into one now, or none. Called by the merger, off the task's thread."""

    @abstractmethod
    def combine(self, frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:
        """The rows that mean the same as `frames` together. Pure. `oldest`: nothing older exists, so tombstones may go."""

    @abstractmethod
    def merged(self, old: Sequence[Piece], new: Piece) -> None:
        """Use `new` (durable) in place of `old`, unless they have gone. Called off the task's thread."""

    @property
    @abstractmethod
    def keeps_frames(self) -> bool:
        """Whether the rows of written pieces stay in memory because they are the state itself."""

    @abstractmethod
    def size_bytes(self) -> int:
        """About how much memory the state takes."""
