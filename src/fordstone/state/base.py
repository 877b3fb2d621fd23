"""The seams of state: pieces and `State` for the engine that snapshots and restores, `StateBackend` for the operators.

A state is an ordered list of immutable pieces. At a barrier the rows changed since the last one are sealed into a new piece, and the
list is the snapshot; a writer makes unwritten pieces durable later. An attempt that is given up needs no undoing: its pieces
are still in the list, and the next attempt carries them. Pieces of similar size are merged (`pieces_to_merge`), so that each row is
rewritten about once per size tier, and the number of pieces grows with the logarithm of the state.

An operator is handed a `StateBackend` and never names a class of state, so that another backend can hold the same state
elsewhere. `memory` has the backend that keeps everything in memory; `testing.contracts.state` has the suites that backends pass.

Invariants: a piece never changes what it means; `ref` is set once; a list is only appended to at its end, or has a contiguous part
replaced by one piece of the same meaning.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl


class RunRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names one immutable file by what is in it."""

    digest: str
    size_bytes: int
    rows: int


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
        time can decide without the rows whether it needs them.
        """
        self._frame = frame
        self._make = make
        self._ref = ref
        self._keep = keep
        self.span_us = span_us
        self._lock = threading.Lock()

    @property
    def ref(self) -> RunRef | None:
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

    def read(self) -> pl.DataFrame:
        """The rows, as `frame` gives them, but without holding on to them."""
        with self._lock:
            if self._frame is not None:
                return self._frame
            make = self._make
        if make is None:
            raise LookupError("the rows of this piece are on disk only")
        return make()

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
        """Put `new` in place of the contiguous `old`. Return whether they were still there."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """What to write in place of pieces, without reading them."""

    old: tuple[Piece, ...]
    frames: Iterator[pl.DataFrame]
    """The rows, in frames for one piece each. They can be gone through once."""
    done: Callable[[Sequence[Piece], Sequence[Piece]], None]
    """Called with the old pieces and the new ones, which are durable."""


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
        """Contiguous pieces that should be merged into one now, or none. Called by the merger, off the task's thread."""

    @abstractmethod
    def combine(self, frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:
        """The rows that mean the same as `frames` together. Pure. `oldest`: nothing older exists, so tombstones may go."""

    @abstractmethod
    def merged(self, old: Sequence[Piece], new: Piece) -> None:
        """Use `new` (durable) in place of `old`, unless they have gone. Called off the task's thread."""

    def rewrite(self) -> Rewrite | None:
        """What to write in place of old pieces; None: nothing. Called by the merger; if that fails, it is asked again later.

        For states that have their rows elsewhere than in memory: `combine` would need the rows of all pieces at once.
        """
        return None

    @property
    def loads_lazily(self) -> bool:
        """Whether `load` reads one piece after the other, with `Piece.read`, so that not all of them need to be in memory."""
        return False

    @property
    @abstractmethod
    def keeps_frames(self) -> bool:
        """Whether the rows of written pieces stay in memory because they are the state itself."""

    @abstractmethod
    def size_bytes(self) -> int:
        """About how much memory the state takes."""


RATIO: Final = 4
"""Sizes within this factor are alike."""
PIECES_MAX: Final = 12
"""Number of pieces of one tier that are merged."""
PIECES_TOTAL_MAX: Final = 64
"""Maximum number of pieces; above it, the cheapest neighbours are merged whatever their sizes."""
SMALLEST_ROWS: Final = 4096
"""Pieces up to this are all of the lowest tier: a file costs about as much whatever is in it."""


def tier_of(rows: int) -> int:
    """The size tier of a piece with this number of rows, from 0."""
    return ((max(rows, SMALLEST_ROWS) // SMALLEST_ROWS).bit_length() - 1) // (RATIO.bit_length() - 1)


def pieces_to_merge(rows: Sequence[int | None]) -> range | None:
    """Which neighbours to merge, given the rows of each piece, oldest first; `None` is a piece that may not be touched."""
    tiers = [None if count is None else tier_of(count) for count in rows]
    for tier in sorted({tier for tier in tiers if tier is not None}):
        start = alike = 0
        for at, other in enumerate([*tiers, None]):
            if other is not None and other <= tier:
                alike += other == tier
                continue
            if alike >= PIECES_MAX:
                return range(start, at)
            start, alike = at + 1, 0
    return _cheapest(rows) if len(rows) > PIECES_TOTAL_MAX else None


def _cheapest(rows: Sequence[int | None]) -> range | None:
    best: range | None = None
    best_rows = 0
    for start in range(len(rows) - PIECES_MAX + 1):
        counts = [count for count in rows[start : start + PIECES_MAX] if count is not None]
        if len(counts) == PIECES_MAX and (best is None or sum(counts) < best_rows):
            best, best_rows = range(start, start + PIECES_MAX), sum(counts)
    return best


def first_within(pieces: Sequence[Piece], rows_max: int) -> Sequence[Piece]:
    """The first of some written pieces, at least two, that have no more rows together."""
    count = rows = 0
    for piece in pieces:
        rows += 0 if piece.ref is None else piece.ref.rows
        if rows > rows_max and count > 1:
            break
        count += 1
    return pieces[:count]


FOUND: Final = "__found"
"""A column that `Table.get` adds: whether the key has a row."""


class Table(State):
    """One row per key, changed in place. Called by one thread, except as `State` says."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def get(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return for each of `keys`, in order: the key, its values (null where missing), and `FOUND`. Keys may repeat."""

    @abstractmethod
    def put(self, frame: pl.DataFrame) -> None:
        """Set the rows of these keys, all columns of them. Keys should not repeat; if one does, its last row counts."""

    @abstractmethod
    def delete(self, keys: pl.DataFrame) -> None:
        """Remove the rows of these keys. Keys may repeat; those without a row are ignored."""

    @abstractmethod
    def scan(self) -> pl.DataFrame:
        """Return all rows, in any order. Costs as much as the state is large."""

    @abstractmethod
    def keys_until(self, column: str, bound: int, *, after: int | None = None) -> tuple[pl.DataFrame, int | None]:
        """Return the keys of rows whose Int64 `column` lies in (`after`, `bound`], and the least value above `bound`.

        Keys come without their sub-key and may repeat; a null lies nowhere. Reads one column of all rows at most.
        """


class Timeline(State):
    """Partial rows that are merged by key and time, and removed once their time has come. One thread, except as `State` says."""

    @property
    @abstractmethod
    def closed_us(self) -> int:
        """The bound up to which rows have been removed, before a restore as well."""

    @abstractmethod
    def add(self, frame: pl.DataFrame) -> None:
        """Add partial rows; all of them later than the last `close`. Called for every batch: does no work per key."""

    @abstractmethod
    def close(self, bound_us: int) -> pl.DataFrame:
        """Remove the rows with time <= `bound_us` and return them merged, in any order.

        Called at every watermark, with the watermark itself: after a restore all rows up to the watermark count as
        closed. Costs nothing when no row is due. Returns a frame without columns if there never were rows.
        """

    @abstractmethod
    def drop(self, bound_us: int) -> None:
        """Remove rows as `close` does, without merging them first."""

    @abstractmethod
    def scan(self) -> pl.DataFrame:
        """Return all rows, merged, in any order. Costs as much as the state is large."""

    @abstractmethod
    def drain(self) -> pl.DataFrame:
        """Remove all rows and return them merged, in any order; a frame without columns if there never were rows."""


class Buffer(State):
    """Rows that wait for the watermark, and are released in order of time. One thread, except as `State` says."""

    @abstractmethod
    def add(self, frame: pl.DataFrame) -> None:
        """Add rows; none of them below the last watermark. Called for every batch."""

    @abstractmethod
    def release(self, watermark_us: int) -> pl.DataFrame:
        """Remove the rows with time < `watermark_us` and return them by time and arrival.

        The last watermark, `TIME_MAX_US`, releases all rows. Called at every watermark; costs nothing when no row is
        due. Returns a frame without columns if there never were rows.
        """

    @abstractmethod
    def scan(self) -> pl.DataFrame:
        """Return all rows, in the order in which they would be released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Keys to search for, with a range of times for each, both ends included."""

    keys: pl.DataFrame
    from_us: npt.NDArray[np.int64]
    to_us: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Pairs: the number of what was asked, and the row that was found for it."""

    asked: npt.NDArray[np.int64]
    rows: pl.DataFrame


class SearchBuffer(Buffer):
    """A buffer that can be searched by key and time."""

    @abstractmethod
    def drop(self, watermark_us: int) -> None:
        """Remove the rows with time < `watermark_us`, as `release` does, without returning them."""

    @abstractmethod
    def search(self, asked: Asked) -> Found | None:
        """Return all pairs of equal keys whose time lies in the range; None if there are none. Null equals nothing.

        Rows that were released may be found if their time is asked for.
        """


class KeyIndex(ABC):
    """A slot per key, densely numbered from 0 on, for arrays beside it. Never stored: it is made again from a state."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of keys."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many slots there is room for: arrays kept by slot need this size."""

    @abstractmethod
    def insert(self, keys: pl.DataFrame) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the slot of each key, new where need be; and the slots that are new. Keys may repeat."""

    @abstractmethod
    def fill(self, keys: pl.DataFrame) -> npt.NDArray[np.int64]:
        """Take all keys at once into an empty index, none of them twice, and return their slots. Faster than `insert`."""


class StateBackend(ABC):
    """Makes the states of operators. Called when an operator is made, by any thread; every call makes a fresh, empty state."""

    @abstractmethod
    def table(self, key: Sequence[str], *, schema: Mapping[str, pl.DataType], sub_key: Sequence[str] = ()) -> Table:
        """Make a table with one row per `key` and `sub_key`; rows belong to key groups by `key` alone.

        `schema`: all columns with their types, key columns included; the others are the values.
        """

    @abstractmethod
    def timeline(
        self, key: Sequence[str], *, time_column: str | None, merge_rows: Callable[[pl.DataFrame], pl.DataFrame]
    ) -> Timeline:
        """Make a timeline. `time_column` (Int64 microseconds): when a row is due; None: never.

        `merge_rows` merges the partial rows of equal key (and equal time) into one, keeps the columns and their types,
        returns them in any order, and is called on any thread: it must be pure.
        """

    @abstractmethod
    def buffer(self, key: Sequence[str], *, time_column: str) -> Buffer:
        """Make a buffer. `time_column` is Datetime in microseconds, or Int64."""

    @abstractmethod
    def search_buffer(self, key: Sequence[str], *, time_column: str) -> SearchBuffer:
        """Make a buffer that can be searched. `time_column` is Int64: until when a row is kept, and what searches go by."""

    @abstractmethod
    def key_index(self, schema: Mapping[str, pl.DataType]) -> KeyIndex:
        """Make an index over keys with these columns, at least one. Null equals null, NaN equals NaN, -0.0 equals 0.0."""
