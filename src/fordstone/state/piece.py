"""Pieces: the immutable parts that a state is made of, on their way from memory to runs.

A state is an ordered list of pieces. At a barrier the rows changed since the last one are sealed into a new piece and
the list is handed over as it stands; a writer makes unwritten pieces durable behind the task's back. So an attempt
that is given up needs no undoing: its pieces are still in the list, and the next attempt carries them.

Invariants: a piece never changes what it stands for; `ref` is set once; a list is only ever appended to at its end or
has a contiguous part replaced by one piece of the same meaning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import polars as pl

from fordstone.model.manifest import RunRef


class Piece:
    """Some rows of state. Made by the task, written by the writer; both may hold it at once."""

    __slots__ = ("_frame", "_keep", "_lock", "_make", "_ref", "span_us")

    def __init__(
        self,
        frame: pl.DataFrame | None = None,
        *,
        make: Callable[[], pl.DataFrame] | None = None,
        ref: RunRef | None = None,
        keep: bool = False,
        span_us: tuple[int, int] | None = None,
    ) -> None:
        """`make` gives the rows when they are first asked for; `keep` holds on to them after they are written.

        `span_us`: the least and the most time of rows that are ordered by it, where known, so that a state which goes by
        time can tell without the rows whether it needs them.
        """
        self._frame = frame
        self._make = make
        self._ref = ref
        self._keep = keep
        self.span_us = span_us
        self._lock = threading.Lock()

    @property
    def ref(self) -> RunRef | None:
        """The run that holds these rows, once there is one."""
        return self._ref

    @property
    def in_memory(self) -> bool:
        """Whether `frame` can be had without reading a file."""
        return self._frame is not None or self._make is not None

    def frame(self) -> pl.DataFrame:
        """The rows. Only for pieces that are `in_memory`."""
        with self._lock:
            if self._frame is None:
                if self._make is None:
                    raise LookupError("the rows of this piece are on disk only")
                self._frame = self._make()
                self._make = None
            return self._frame

    def written(self, ref: RunRef) -> None:
        """Called once by the writer when the rows are durable as `ref`."""
        with self._lock:
            self._ref = ref
            if not self._keep:
                self._frame = self._make = None


class PieceList:
    """The ordered pieces of one state. The task appends and freezes; the merger replaces; neither waits for the other."""

    __slots__ = ("_lock", "_pieces")

    def __init__(self, pieces: Sequence[Piece] = ()) -> None:
        self._lock = threading.Lock()
        self._pieces = tuple(pieces)

    def append(self, piece: Piece) -> None:
        """Add the newest piece."""
        with self._lock:
            self._pieces = (*self._pieces, piece)

    def snapshot(self) -> tuple[Piece, ...]:
        """The pieces as they stand, oldest first."""
        return self._pieces

    def reset(self, pieces: Sequence[Piece]) -> None:
        """Start over from these pieces: on loading, or when everything was rewritten as one."""
        with self._lock:
            self._pieces = tuple(pieces)

    def replace(self, old: Sequence[Piece], new: Sequence[Piece]) -> bool:
        """Put `new` where the contiguous `old` stand; says whether they still stood there."""
        with self._lock:
            pieces = self._pieces
            for start in range(len(pieces) - len(old) + 1):
                if all(pieces[start + i] is piece for i, piece in enumerate(old)):
                    self._pieces = (*pieces[:start], *new, *pieces[start + len(old) :])
                    return True
            return False

    def discard(self, gone: Sequence[Piece]) -> None:
        """Drop pieces whose every row is dead."""
        with self._lock:
            self._pieces = tuple(piece for piece in self._pieces if not any(piece is dead for dead in gone))
