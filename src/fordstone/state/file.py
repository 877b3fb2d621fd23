"""Pieces of timelines and buffers on disk, for rows that do not fit into memory until their time has come.

The rows of a piece are put into a working file once the piece has been written as a run, or when too many are open: blocks of
Arrow IPC, ordered by time, of which only the place and the first and last time are held. A close reads the blocks with rows that are due, a
search those with rows that may be meant. The numbers of an index by key are mapped into memory. (Polars 2 does not map Arrow IPC.)

Leaves to others: when rows are stored and merged (`timeline`).

Invariants: a file belongs to one piece, never changes, and goes with it; stored or not, a piece gives the same rows in the same order.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from fordstone.state.base import RunRef
from fordstone.state.timeline import NEVER_US, KeyTimeIndex, OnDisk, Rows, TimedPiece, times_of
from fordstone.state.working import WorkingFileError, WorkingFiles, refusals

BLOCK_BYTES: Final = 512 * 1024
"""About how many bytes of rows a block has: the least that is read."""
BLOCK_ROWS_MIN: Final = 4
OPEN_BYTES_MAX: Final = 16 * 1024 * 1024
MERGED_BYTES_MAX: Final = 4 * 1024 * 1024


class BlockCache:
    """The blocks that were read last. Called by any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._mutex = threading.Lock()
        self._blocks: OrderedDict[tuple[Path, int], tuple[pl.DataFrame, int]] = OrderedDict()
        self._size_bytes = 0

    def get(self, path: Path, number: int, read: Callable[[], pl.DataFrame]) -> pl.DataFrame:
        """Return the block, and read it if it is not held."""
        at = (path, number)
        with self._mutex:
            if at in self._blocks:
                self._blocks.move_to_end(at)
                return self._blocks[at][0]
        block = read()
        size_bytes = int(block.estimated_size())
        with self._mutex:
            if at not in self._blocks:
                self._blocks[at] = block, size_bytes
                self._size_bytes += size_bytes
            while self._size_bytes > self._bytes_max and self._blocks:
                self._size_bytes -= self._blocks.popitem(last=False)[1][1]
        return block


def rows_on_disk(
    files: WorkingFiles,
    *,
    cache_bytes: int,
    open_bytes_max: int = OPEN_BYTES_MAX,
    merged_bytes_max: int = MERGED_BYTES_MAX,
    block_bytes: int = BLOCK_BYTES,
) -> OnDisk:
    """How states of one pipeline keep their rows in these files. `cache_bytes`: of blocks that were read last, for all of them together."""
    place = _Place(files=files, cache=BlockCache(cache_bytes), block_bytes=block_bytes)

    def make_piece(
        frame: pl.DataFrame | None = None,
        *,
        time: str | None,
        span_us: tuple[int, int],
        make: Callable[[], pl.DataFrame] | None = None,
        size_bytes: int = 0,
        ref: RunRef | None = None,
    ) -> FilePiece:
        piece = FilePiece(frame, time=time, span_us=span_us, make=make, size_bytes=size_bytes, ref=ref, place=place)
        if frame is not None and ref is not None:
            piece.store()
        return piece

    return OnDisk(make_piece=make_piece, open_bytes_max=open_bytes_max, merged_bytes_max=merged_bytes_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    files: WorkingFiles
    cache: BlockCache
    block_bytes: int


class FilePiece(TimedPiece):
    """A piece that moves its rows to a file when it has been written, or when `store` is called."""

    __slots__ = ("__weakref__", "_following", "_place", "_stored", "_storing")

    def __init__(
        self,
        frame: pl.DataFrame | None = None,
        *,
        time: str | None,
        span_us: tuple[int, int],
        make: Callable[[], pl.DataFrame] | None,
        size_bytes: int,
        ref: RunRef | None,
        place: _Place,
    ) -> None:
        super().__init__(frame, time=time, span_us=span_us, make=make, size_bytes=size_bytes, ref=ref)
        self._place = place
        self._stored: _Stored | None = None
        self._storing = threading.Lock()
        self._following: tuple[int, int] | None = None
        """A bound, and the least time after it, as the last read has shown."""

    @property
    def in_memory(self) -> bool:
        return True

    def store(self) -> None:
        """Move the rows to a file, if they are not in one. Called by the task and by the writer."""
        with self._storing:
            if self._stored is not None:
                return
            frame = TimedPiece.frame(self)
            self._stored = _Stored.write(frame, self._time, self._place.files.fresh(self), self._place)
            with self._lock:
                self._frame = self._times = None

    def written(self, ref: RunRef) -> None:
        super().written(ref)
        self.store()

    def frame(self) -> pl.DataFrame:
        """All rows. They are read each time, once they are stored."""
        stored = self._needed()
        if stored is None:
            try:
                return super().frame()
            except LookupError:
                # The writer has just stored them.
                if (stored := self._stored) is None:
                    raise
        return stored.rows(0, stored.blocks)

    def read(self) -> pl.DataFrame:
        return self.frame()

    def between(self, after_us: int, until_us: int) -> pl.DataFrame:
        stored = self._needed()
        if stored is None or self._time is None:
            return super().between(after_us, until_us)
        first, last = stored.first_after(after_us), stored.first_after(until_us)
        rows = stored.rows(first, min(last + 1, stored.blocks))
        times = times_of(rows, self._time).to_numpy()
        start, stop = times.searchsorted((after_us, until_us), "right")
        if stop < times.size:
            self._following = until_us, int(times[stop])
        return rows.slice(int(start), int(stop - start))

    def after(self, bound_us: int) -> pl.DataFrame:
        if self._time is None or bound_us < self.least_us:
            return self.frame()
        return self.between(bound_us, NEVER_US)

    def rows_after(self, bound_us: int) -> int:
        """At most by a block more than there are."""
        if self.most_us <= bound_us:
            return 0
        stored = self._stored
        if stored is None:
            return super().rows_after(bound_us)
        return int(stored.starts[-1] - stored.starts[stored.first_after(bound_us)])

    def next_us(self, bound_us: int) -> int:
        if bound_us < self.least_us:
            return self.least_us
        if bound_us >= self.most_us:
            return NEVER_US
        if self._following is not None and self._following[0] == bound_us:
            return self._following[1]
        stored = self._needed()
        if stored is None:
            return super().next_us(bound_us)
        block = stored.first_after(bound_us)
        if stored.least_us[block] > bound_us:
            return int(stored.least_us[block])
        times = times_of(stored.rows(block, block + 1), str(self._time)).to_numpy()
        return int(times[times.searchsorted(bound_us, "right")])

    def size_bytes(self) -> int:
        """About how much memory the rows take: their blocks' places once they are stored, and nothing while they are a run alone."""
        stored = self._stored
        if stored is not None:
            return 4 * stored.offsets.nbytes
        return 0 if self._frame is None and self.ref is not None else super().size_bytes()

    def index_by(self, key: Sequence[str], time: str) -> KeyTimeIndex:
        index = super().index_by(key, time)
        stored = self._needed()
        if stored is not None and not stored.is_mapped:
            with refusals("write", stored.path / "index"):
                index.map_to(str(stored.path / "index"))
            stored.is_mapped = True
        return index

    def rows_at(self, places: Rows) -> pl.DataFrame:
        stored = self._needed()
        return super().rows_at(places) if stored is None else stored.rows_at(places)

    def _needed(self) -> _Stored | None:
        """The file, now that rows are needed; None: they are in memory until they are written as a run."""
        if self._stored is None and self.ref is not None:
            self.store()
        return self._stored


class _Stored:
    """A file of blocks. Never changes."""

    __slots__ = ("_cache", "is_mapped", "least_us", "most_us", "offsets", "path", "starts")

    def __init__(
        self, path: Path, offsets: Rows, starts: Rows, least_us: Rows, most_us: Rows, cache: BlockCache
    ) -> None:
        self.path, self._cache = path, cache
        self.offsets, self.starts = offsets, starts
        """Of each block, and after the last: where it is in the file, and in the rows."""
        self.least_us, self.most_us = least_us, most_us
        self.is_mapped = False

    @classmethod
    def write(cls, frame: pl.DataFrame, time: str | None, path: Path, place: _Place) -> _Stored:
        """Write rows that are in order of time."""
        rows = max(BLOCK_ROWS_MIN, place.block_bytes * frame.height // max(1, int(frame.estimated_size())))
        starts = np.append(np.arange(0, max(1, frame.height), rows), frame.height)
        offsets = [0]
        try:
            with refusals("write", path / "rows"), (path / "rows").open("wb") as file:
                for start in starts[:-1].tolist():
                    buffer = io.BytesIO()
                    frame.slice(start, rows).rechunk().write_ipc_stream(buffer, compression="lz4")
                    file.write(buffer.getbuffer())
                    offsets.append(file.tell())
        except WorkingFileError:
            # Another try has a directory of its own.
            shutil.rmtree(path, ignore_errors=True)
            raise
        if time is None or not frame.height:
            least = most = np.full(starts.size - 1, NEVER_US)
        else:
            times = times_of(frame, time).to_numpy()
            least, most = times[starts[:-1]], times[starts[1:] - 1]
        return cls(path, np.array(offsets), starts, least, most, place.cache)

    @property
    def blocks(self) -> int:
        return self.starts.size - 1

    def first_after(self, bound_us: int) -> int:
        """The first block with a time after this; the number of blocks if there is none."""
        return int(self.most_us.searchsorted(bound_us, "right"))

    def rows(self, first: int, end: int) -> pl.DataFrame:
        """The rows of some blocks; of none, a frame without rows."""
        if first >= end:
            return self._block(0).clear()
        if end - first > 1:
            # Not by the cache: who reads many does not come back for them.
            return pl.concat([self._read(number) for number in range(first, end)])
        return self._block(first)

    def rows_at(self, places: Rows) -> pl.DataFrame:
        """The rows at these places, in their order."""
        of_block = self.starts.searchsorted(places, "right") - 1
        needed = np.unique(of_block)
        parts = [
            self._block(number).select(pl.all().gather(places[of_block == number] - self.starts[number]))
            for number in needed.tolist()
        ]
        if len(parts) == 1:
            return parts[0]
        back = np.empty(places.size, dtype=np.int64)
        back[of_block.argsort(kind="stable")] = np.arange(places.size)
        return pl.concat(parts).select(pl.all().gather(back))

    def _block(self, number: int) -> pl.DataFrame:
        return self._cache.get(self.path, number, lambda: self._read(number))

    def _read(self, number: int) -> pl.DataFrame:
        start, end = int(self.offsets[number]), int(self.offsets[number + 1])
        path = self.path / "rows"
        with refusals("read", path), path.open("rb") as file:
            file.seek(start)
            return pl.read_ipc_stream(file.read(end - start))
