"""Timelines and buffers: rows that live until their time has come, in memory or, with `pieces_on_disk`, in files.

Rows arrive open. A barrier seals the open rows into a piece; pieces stay in memory, because they are the state. Every piece is
ordered by time, so that the rows due at a bound are a slice of it, found by bisection: closing costs what it returns, not what
it leaves. Nothing is deleted from a piece: a row is dead when its time is not above the last bound (`_closed_us`), and a piece is
dropped when all its rows are dead. The merger removes the dead rows of pieces that stay.

Invariants: bounds only grow; every open row is alive; the time of a row is never null; frames are never changed, so that a frozen
piece stays as it was, and the merger may swap pieces of the same meaning at any moment. A row is closed or released once, and
what a bound releases does not depend on batches, barriers and restores.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.polars.times import microseconds
from fordstone.state.base import (
    Asked,
    Buffer,
    Found,
    Piece,
    PieceList,
    RunRef,
    SearchBuffer,
    State,
    Timeline,
    first_within,
    pieces_to_merge,
)

NEVER_US: Final = TIME_MAX_US + 1
"""The time of rows that are never due."""
Rows = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
DEAD_SHARE_MAX: Final = 0.75
"""A large piece with more dead rows than this is worth writing again."""
MERGE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of rows that are on disk no more than this is merged at once."""
DEAD_ROWS_MIN: Final = 65536
"""Pieces with fewer dead rows than this are left alone: they cost next to nothing."""


class TimedPiece(Piece):
    """A piece whose rows are ordered by `time`, or in any order and never due when that is None."""

    __slots__ = ("_size_bytes", "_time", "_times", "index", "least_us", "most_us")

    def __init__(
        self,
        frame: pl.DataFrame | None = None,
        *,
        time: str | None,
        span_us: tuple[int, int],
        make: Callable[[], pl.DataFrame] | None = None,
        size_bytes: int = 0,
        ref: RunRef | None = None,
    ) -> None:
        super().__init__(frame, make=make, ref=ref, keep=True, span_us=span_us)
        self.least_us, self.most_us = span_us
        self._size_bytes = size_bytes
        self._time = time
        self._times: npt.NDArray[np.int64] | None = None
        self.index: KeyTimeIndex | None = None
        """By key, once it has been searched."""

    def _rank(self, bound_us: int) -> int:
        """How many rows have a time up to `bound_us`. Makes the rows only when that cannot be known without."""
        if bound_us < self.least_us or self._time is None:
            return 0
        return int(self._row_times(self._time).searchsorted(bound_us, "right"))

    def _row_times(self, time: str) -> Rows:
        times = self._times
        if times is None:
            times = self._times = times_of(self.frame(), time).to_numpy()
        return times

    def between(self, after_us: int, until_us: int) -> pl.DataFrame:
        """The rows with `after_us` < time <= `until_us`, without copying them."""
        start = self._rank(after_us)
        return self.frame().slice(start, self._rank(until_us) - start)

    def after(self, bound_us: int) -> pl.DataFrame:
        """The rows that are alive after `bound_us`, without copying them."""
        return self.frame().slice(self._rank(bound_us))

    def rows_after(self, bound_us: int) -> int:
        return 0 if self.most_us <= bound_us else self._rows() - self._rank(bound_us)

    def _rows(self) -> int:
        """How many rows there are. Makes them only when that cannot be known without."""
        if self._frame is None and self.ref is not None:
            return self.ref.rows
        return self.frame().height

    def next_us(self, bound_us: int) -> int:
        """The least time after `bound_us`, or `NEVER_US`."""
        if bound_us < self.least_us:
            return self.least_us
        if self._time is None:
            return NEVER_US
        times = self._row_times(self._time)
        rank = times.searchsorted(bound_us, "right")
        return int(times[rank]) if rank < times.size else NEVER_US

    def index_by(self, key: Sequence[str], time: str) -> KeyTimeIndex:
        """The index by key, made when the piece is first searched."""
        if self.index is None:
            frame = self.frame()
            self.index = KeyTimeIndex(frame, key, times_of(frame, time).to_numpy())
        return self.index

    def rows_at(self, places: Rows) -> pl.DataFrame:
        """The rows at these places."""
        return self.frame()[places]

    def store(self) -> None:
        """Move the rows to where pieces of this kind keep them: here they stay in memory."""

    def size_bytes(self) -> int:
        """About how much memory the rows take; a guess from above while they are not made."""
        frame = self._frame
        return self._size_bytes if frame is None else int(frame.estimated_size())


def times_of(frame: pl.DataFrame, time: str) -> pl.Series:
    """The time column as whole microseconds."""
    column = microseconds(frame.get_column(time))
    return column.rechunk() if column.n_chunks() > 1 else column


class OpenRows:
    """Rows as they came, with the least and the most of their times."""

    __slots__ = ("frames", "least_us", "most_us", "rows", "size_bytes")

    def __init__(self) -> None:
        self.frames: list[pl.DataFrame] = []
        self.rows = 0
        self.size_bytes = 0
        self.least_us = NEVER_US
        self.most_us = TIME_MIN_US

    def append(self, frame: pl.DataFrame, least_us: int, most_us: int) -> None:
        self.frames.append(frame)
        self.rows += frame.height
        self.size_bytes += int(frame.estimated_size())
        self.least_us = min(self.least_us, least_us)
        self.most_us = max(self.most_us, most_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """How rows are kept in files."""

    make_piece: Callable[..., TimedPiece]
    """Makes a piece that `store` moves to a file. Called as `TimedPiece` is."""
    open_bytes_max: int
    """Open rows, and pieces that wait to be written, are moved to files from this size on."""
    merged_bytes_max: int
    """Pieces with more bytes of rows than this are not merged with others."""


class TimedRows(State):
    """Open rows, and pieces ordered by time. Base of the shapes whose rows are dropped when their time has come."""

    def __init__(self, key: Sequence[str], *, time_column: str | None, on_disk: OnDisk | None = None) -> None:
        """`on_disk`: how rows are kept in files; None: they stay in memory."""
        self._key = tuple(key)
        self._time = time_column
        self._on_disk = on_disk
        self._make_piece: type[TimedPiece] | Callable[..., TimedPiece] = (
            TimedPiece if on_disk is None else on_disk.make_piece
        )
        self._pieces = PieceList()
        self._empty: pl.DataFrame | None = None
        self._closed_us = TIME_MIN_US
        self._least_us = NEVER_US
        self._ordered: list[TimedPiece] = []
        """Open rows that a close or a coalescing has put in order; older than `_raw`, oldest first."""
        self._raw = OpenRows()
        self._row_bytes = 1
        """About, of the widest rows so far."""

    @abstractmethod
    def _compacted(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The fewest rows that mean the same. Called on any thread."""

    @property
    def key(self) -> tuple[str, ...]:
        return self._key

    @property
    def keeps_frames(self) -> bool:
        return True

    @property
    def loads_lazily(self) -> bool:
        return self._on_disk is not None

    @property
    def closed_us(self) -> int:
        """The bound up to which rows have been emitted, before a restore as well."""
        return self._closed_us

    def size_bytes(self) -> int:
        return self._raw.size_bytes + sum(piece.size_bytes() for piece in (*self._held(), *self._ordered))

    # Rows in and out, on the task's thread.

    def _take(self, frame: pl.DataFrame) -> None:
        """Add rows. Costs a look at their times."""
        if frame.height == 0:
            return
        if self._empty is None:
            self._empty = frame.clear()
        # Column by column: comparing two Polars schemas takes longer than the rest of this function.
        elif frame.columns != self._empty.columns or frame.dtypes != self._empty.dtypes:
            raise TypeError(
                f"all rows of a state must have the same columns: expected {self._empty.schema}, got {frame.schema}."
            )
        least_us, most_us = self._extremes(frame)
        if least_us <= self._closed_us:
            raise ValueError(f"a row with {self._time} = {least_us} came after {self._closed_us} had been closed.")
        self._raw.append(frame, least_us, most_us)
        self._least_us = min(self._least_us, least_us)
        self._row_bytes = max(self._row_bytes, self._raw.size_bytes // self._raw.rows)
        if self._on_disk is not None and self._open_bytes() > self._on_disk.open_bytes_max:
            self._coalesce()
            if 2 * self._open_bytes() > self._on_disk.open_bytes_max:
                piece = self._ordered.pop()
                piece.store()
                self._pieces.append(piece)

    def _open_bytes(self) -> int:
        return self._raw.size_bytes + sum(piece.size_bytes() for piece in self._ordered)

    def _due(self, bound_us: int) -> list[pl.DataFrame]:
        """Remove the rows with time <= `bound_us` and give them, oldest arrivals first. Free when none are due."""
        closed_us = self._closed_us
        if bound_us <= closed_us:
            return []
        if bound_us < self._least_us:
            self._closed_us = bound_us
            return []
        pieces = (*self._held(), *self._ordered)
        due = [
            piece.between(closed_us, bound_us)
            for piece in pieces
            if closed_us < piece.most_us and piece.least_us <= bound_us
        ]
        rest: list[pl.DataFrame] = []
        if self._raw.least_us <= bound_us:
            raw, self._raw = self._raw, OpenRows()
            frame = pl.concat(raw.frames)
            if raw.most_us <= bound_us:
                due.append(frame)
            else:
                is_due = times_of(frame, str(self._time)) <= bound_us
                due.append(frame.filter(is_due))
                rest = [frame.filter(~is_due)]
        self._closed_us = bound_us
        self._pieces.discard([piece for piece in self._held() if piece.most_us <= bound_us])
        self._ordered = [piece for piece in self._ordered if piece.most_us > bound_us]
        if rest:
            self._push(rest)
        live = [piece.next_us(bound_us) for piece in (*self._held(), *self._ordered)]
        self._least_us = min([*live, self._raw.least_us])
        return [frame for frame in due if frame.height]

    def _push(self, frames: Sequence[pl.DataFrame]) -> None:
        """Put open rows in order. Neighbours of similar size are merged, so that there are never many."""
        rows = sum(frame.height for frame in frames)
        frames = list(frames)
        while self._ordered and self._ordered[-1].rows_after(self._closed_us) < 2 * rows:
            older = self._ordered.pop().after(self._closed_us)
            frames.insert(0, older)
            rows += older.height
        self._ordered.append(self._piece(self._in_order(frames)))

    def _coalesce(self) -> None:
        frames = [*(piece.after(self._closed_us) for piece in self._ordered), *self._raw.frames]
        self._ordered = [self._piece(self._in_order(frames))]
        self._raw = OpenRows()

    def _live(self) -> list[pl.DataFrame]:
        """All rows that are alive, oldest arrivals first."""
        ordered = [piece.after(self._closed_us) for piece in (*self._held(), *self._ordered)]
        return [frame for frame in (*ordered, *self._raw.frames) if frame.height]

    # What the engine calls.

    def freeze(self) -> tuple[Piece, ...]:
        """Seal the open rows into one piece, which is merged when it is first needed."""
        ordered, raw, closed_us = self._ordered, self._raw, self._closed_us
        if len(ordered) == 1 and not raw.rows:
            self._pieces.append(ordered[0])
        elif ordered or raw.rows:
            frames = (*(piece.after(closed_us) for piece in ordered), *raw.frames)
            least_us = min([raw.least_us, *(piece.next_us(closed_us) for piece in ordered)])
            most_us = max([raw.most_us, *(piece.most_us for piece in ordered)])
            size_bytes = raw.size_bytes + sum(piece.size_bytes() for piece in ordered)
            make = partial(self._in_order, frames)
            self._pieces.append(
                self._make_piece(make=make, time=self._time, span_us=(least_us, most_us), size_bytes=size_bytes)
            )
        self._ordered, self._raw = [], OpenRows()
        if self._on_disk is not None:
            waiting = [piece for piece in self._held() if piece.ref is None]
            if sum(piece.size_bytes() for piece in waiting) > self._on_disk.open_bytes_max:
                for piece in waiting:
                    piece.store()
        return self._pieces.snapshot()

    def load(self, pieces: Sequence[Piece], *, watermark_us: int) -> None:
        """Become what the pieces say, less what is dead at `watermark_us`."""
        self._closed_us = self._closed_by(watermark_us)
        held = []
        for piece in pieces:
            span_us = piece.span_us if piece.ref is not None else None
            if span_us is not None and span_us[1] <= self._closed_us:
                continue
            if span_us is not None and span_us[0] > self._closed_us:
                # All of it is alive: the rows are not needed before some of them are due.
                size_bytes = 0 if piece.ref is None else piece.ref.size_bytes
                make = piece.frame if self._on_disk is None else piece.read
                held.append(
                    self._make_piece(make=make, time=self._time, span_us=span_us, size_bytes=size_bytes, ref=piece.ref)
                )
                continue
            frame = piece.read()
            if self._empty is None and frame.width:
                self._empty = frame.clear()
            frame = self._alive(frame)
            if frame.height:
                self._row_bytes = max(self._row_bytes, int(frame.estimated_size()) // frame.height)
                timed = self._piece(frame, ref=piece.ref)
                timed.store()
                held.append(timed)
        self._pieces.reset(held)
        self._least_us = min((piece.next_us(self._closed_us) for piece in held), default=NEVER_US)

    def mergeable(self) -> tuple[Piece, ...]:
        """Written neighbours of like size, or one large piece that is mostly dead."""
        held, closed_us = self._held(), self._closed_us
        rows = [piece.rows_after(closed_us) if piece.ref is not None else None for piece in held]
        found = pieces_to_merge(
            [count if self._is_small(piece) else None for piece, count in zip(held, rows, strict=True)]
        )
        if found is not None:
            some = held[found.start : found.stop]
            return some if self._on_disk is None else tuple(first_within(some, MERGE_BYTES_MAX // self._row_bytes))
        for piece, alive in zip(held, rows, strict=True):
            rows_in_all = 0 if alive is None else piece.rows_after(TIME_MIN_US)
            if alive is not None and rows_in_all - alive > max(DEAD_ROWS_MIN, DEAD_SHARE_MAX * rows_in_all):
                return (piece,)
        return ()

    def _is_small(self, piece: TimedPiece) -> bool:
        """Whether merging it needs little memory."""
        if self._on_disk is None or piece.ref is None:
            return True
        return piece.ref.rows * self._row_bytes <= self._on_disk.merged_bytes_max

    def combine(self, frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:  # noqa: ARG002 - no tombstones here
        """Merge, without the rows that are dead by now: no later checkpoint could bring them back."""
        return self._in_order([self._alive(frame) for frame in frames])

    def merged(self, old: Sequence[Piece], new: Piece) -> None:
        """Swap the pieces. The task may be closing or freezing at the same time: both forms mean the same to it."""
        frame = new.frame()
        self._pieces.replace(old, [self._piece(frame, ref=new.ref)] if frame.height else [])

    # Shared steps.

    def _held(self) -> tuple[TimedPiece, ...]:
        return self._pieces.snapshot()  # type: ignore[return-value]  # only timed pieces are ever put in

    def _closed_by(self, watermark_us: int) -> int:
        """The largest time that is dead at a watermark."""
        return watermark_us

    def _extremes(self, frame: pl.DataFrame) -> tuple[int, int]:
        if self._time is None:
            return NEVER_US, NEVER_US
        times = microseconds(frame.get_column(self._time))
        if times.null_count():
            raise ValueError(f"column {self._time!r}: rows of timed state have a time.")
        return int(times.min()), int(times.max())  # type: ignore[arg-type]  # never null, checked above

    def _alive(self, frame: pl.DataFrame) -> pl.DataFrame:
        if self._time is None or frame.height == 0:
            return frame
        alive = times_of(frame, self._time) > self._closed_us
        return frame if alive.all() else frame.filter(alive)

    def _together(self, frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """The frames merged into one; without columns if there never were rows."""
        if frames:
            return self._compacted(pl.concat(frames, rechunk=True))
        return pl.DataFrame() if self._empty is None else self._empty

    def _in_order(self, frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """Merge the frames and order the rows by time; equal times stay as they came."""
        frame = self._compacted(pl.concat(frames, rechunk=True))
        return (frame if self._time is None else frame.sort(self._time, maintain_order=True)).rechunk()

    def _piece(self, frame: pl.DataFrame, *, ref: RunRef | None = None) -> TimedPiece:
        """A piece of these rows, put in order by time where they are not."""
        if frame.height == 0:
            return self._make_piece(frame, time=self._time, span_us=(NEVER_US, TIME_MIN_US), ref=ref)
        span_us = self._extremes(frame)
        if self._time is not None and not times_of(frame, self._time).is_sorted():
            frame = frame.sort(self._time, maintain_order=True)
        return self._make_piece(frame, time=self._time, span_us=span_us, ref=ref)


class MemoryBuffer(TimedRows, Buffer):
    """Rows ordered by time."""

    def __init__(self, key: Sequence[str], *, time_column: str, on_disk: OnDisk | None = None) -> None:
        super().__init__(key, time_column=time_column, on_disk=on_disk)
        self._column = time_column

    def add(self, frame: pl.DataFrame) -> None:
        self._take(frame)

    def release(self, watermark_us: int) -> pl.DataFrame:
        return self._together(self._due(self._closed_by(watermark_us)))

    def scan(self) -> pl.DataFrame:
        return self._together(self._live())

    def _compacted(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.sort(self._column, maintain_order=True)

    def _closed_by(self, watermark_us: int) -> int:
        if watermark_us == TIME_MAX_US:
            return TIME_MAX_US
        return max(watermark_us, TIME_MIN_US + 1) - 1


COALESCE_ROWS_MIN: Final = 256 * 1024
"""Fewer open rows than this are not worth merging."""
COALESCE_RATIO: Final = 4
"""Open rows are merged when their number exceeds this multiple of what the last merge left."""
PATIENCE_MAX: Final = 16
"""How much longer to wait, at most, when merging does not make the rows fewer."""
COALESCE_BYTES: Final = 256 * 1024 * 1024
"""Open rows are merged at this size even when there are few, unless as much was left by the last time."""
SHRINK_LEAST: Final = 0.5
"""Merging that leaves more than this share of the rows was not worth it."""


class MemoryTimeline(TimedRows, Timeline):
    """Partial aggregates by key and, mostly, by the end of their window."""

    def __init__(
        self,
        key: Sequence[str],
        *,
        time_column: str | None,
        merge_rows: Callable[[pl.DataFrame], pl.DataFrame],
        coalesce_rows_min: int = COALESCE_ROWS_MIN,
        on_disk: OnDisk | None = None,
    ) -> None:
        super().__init__(key, time_column=time_column, on_disk=on_disk)
        self._coalesce_rows_min = coalesce_rows_min
        self._merge_rows = merge_rows
        self._patience = 1

    def add(self, frame: pl.DataFrame) -> None:
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
        return self._together(self._due(bound_us))

    def drop(self, bound_us: int) -> None:
        self._due(bound_us)

    def scan(self) -> pl.DataFrame:
        return self._together(self._live())

    def drain(self) -> pl.DataFrame:
        rows = self.scan()
        self._pieces.reset([])
        self._ordered, self._raw = [], OpenRows()
        self._least_us = NEVER_US
        return rows

    def _compacted(self, frame: pl.DataFrame) -> pl.DataFrame:
        merged = self._merge_rows(frame).select(frame.columns)
        if merged.dtypes != frame.dtypes:
            raise TypeError(f"merge_rows must keep the types of its rows: took {frame.schema}, gave {merged.schema}.")
        return merged


class MemorySearchBuffer(MemoryBuffer, SearchBuffer):
    """Rows that can be searched by key and time."""

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows, and put them in order: they are searched soon."""
        self._take(frame)
        raw, self._raw = self._raw, OpenRows()
        if raw.rows:
            self._push(raw.frames)

    def drop(self, watermark_us: int) -> None:
        self._due(self._closed_by(watermark_us))

    def search(self, asked: Asked) -> Found | None:
        least_us, most_us = max(int(asked.from_us.min()), self._closed_us + 1), int(asked.to_us.max())
        pieces = [
            piece
            for piece in (*self._held(), *self._ordered)
            if piece.least_us <= most_us and piece.most_us >= least_us
        ]
        if not pieces:
            return None
        hashes = _hashes(asked.keys)
        by_hash = (hashes >> np.uint32(16)).astype(np.uint16).argsort(kind="stable")
        if (there := _there(asked.keys)) is not None:
            by_hash = by_hash[there.take(by_hash)]
        pairs = [piece.index_by(self._key, self._column).search(hashes, asked, by_hash) for piece in pieces]
        # One call for all columns of a piece, and the rest for all pieces together: calls are what small batches cost.
        rows = [piece.rows_at(at) for piece, (_, at) in zip(pieces, pairs, strict=True) if at.size]
        if not rows:
            return None
        found = Found(asked=np.concatenate([number for number, _ in pairs]), rows=pl.concat(rows))
        return _equal(found, asked.keys[found.asked])


class KeyTimeIndex:
    """The rows of a frame that is ordered by time, by the hash of their key, then by time. Rows with a null key are left out.

    A search costs the steps of a bisection and what it finds, however many rows a key has. Made when a piece is first searched,
    dropped with it, never stored. Hashes only narrow the search down: keys are compared.
    """

    def __init__(self, frame: pl.DataFrame, key: Sequence[str], times: Rows) -> None:
        self._times = times
        keys = frame.select(key)
        hashes = _hashes(keys)
        # Two sorts by 16 bits each, which NumPy does by radix, take a third of one by 32.
        order = hashes.astype(np.uint16).argsort(kind="stable")
        order = order[(hashes.take(order) >> np.uint32(16)).astype(np.uint16).argsort(kind="stable")]
        if (there := _there(keys)) is not None:
            order = order[there.take(order)]
        self._order = order
        # A row's number is its place in time: hash and place together are one number that ascends.
        self._codes: Rows = self._code(hashes.take(order)) + order

    def map_to(self, path: str) -> None:
        """Keep the numbers in files, which are mapped into memory."""
        for name in ("_times", "_order", "_codes"):
            np.save(f"{path}{name}.npy", getattr(self, name))
            setattr(self, name, np.load(f"{path}{name}.npy", mmap_mode="r"))

    def _code(self, hashes: Hashes) -> Rows:
        return hashes.astype(np.int64) * (self._times.size + 1)

    def search(self, hashes: Hashes, asked: Asked, by_hash: Rows) -> tuple[Rows, Rows]:
        """Numbers of what is asked, and of the rows that have its hash, and a time between.

        `by_hash`: what is asked, about in order of the hashes: then the search goes through memory once.
        """
        first = self._times.searchsorted(asked.from_us, "left").take(by_hash)
        until = self._times.searchsorted(asked.to_us, "right").take(by_hash)
        some = until > first
        if not some.all():
            by_hash, first, until = by_hash[some], first[some], until[some]
        codes = self._code(hashes.take(by_hash))
        start = self._codes.searchsorted(codes + first)
        counts = self._codes.searchsorted(codes + until) - start
        pairs = int(counts.sum())
        # From the start of each stretch, one after the other.
        places = np.arange(pairs) + (start - (np.cumsum(counts) - counts)).repeat(counts)
        return by_hash.repeat(counts), self._order.take(places)


def _equal(found: Found, keys: pl.DataFrame) -> Found | None:
    """Without pairs whose keys only have the same hash. `keys`: what was asked, for each pair."""
    same = np.ones(found.asked.size, dtype=np.bool_)
    for key in keys.get_columns():
        same &= (key == found.rows.get_column(key.name)).to_numpy()
    if same.all():
        return found
    return Found(asked=found.asked[same], rows=found.rows.filter(pl.Series(same))) if same.any() else None


def _hashes(keys: pl.DataFrame) -> Hashes:
    found: Hashes = (keys.hash_rows().to_numpy() >> np.uint64(32)).astype(np.uint32)
    return found


def _there(keys: pl.DataFrame) -> Mask | None:
    """Which keys have no null; None: all."""
    if not any(column.null_count() for column in keys.get_columns()):
        return None
    there: Mask = keys.select(pl.all_horizontal(pl.all().is_not_null())).to_series().to_numpy()
    return there
