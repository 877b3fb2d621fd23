"""Plans reads of files: the position that a read of about `rows_max` rows would reach. Checking an unchanged file costs one `stat`.

Text is not parsed. Where each newline ends a record, a few samples estimate the length of records, and a search around the
estimated position finds the end of one. Otherwise the bytes up to there are searched for newlines inside values; blocks that
contain such newlines are left to `LineReader`. Bounded input ends where the file ended at the first call. A file that was replaced
by one that is not shorter is not noticed here, but by readers that keep it open.

Invariants: a planned position is one that a `LineReader` passes when it reads straight through: after a newline, or at
the end of bounded input, whatever is appended later. Memory does not grow with the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fordstone.connectors.base import ReadPlan
from fordstone.connectors.files.bytes import FileBytes, PlainFile, shrank, unreadable
from fordstone.connectors.files.lines import BLOCK_BYTES_MAX, LineFormat, LineReader, Offsets, newlines
from fordstone.connectors.files.tables import TableReader
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position

SAMPLE_BYTES: Final = 1 << 16
"""How much is looked at where reading would begin."""
SPREAD_SAMPLES: Final = 8
SPREAD_BYTES: Final = 1 << 14
"""Number and size of the samples taken on the way to the end of the read."""
SHRINKS_MAX: Final = 6
"""How often the way is made shorter because lines on it turn out to be short."""
_NEAR_ENOUGH: Final = 1.25
WALK_BYTES_MIN: Final = 1 << 12
WALK_BYTES_MAX: Final = 1 << 20
READ_ROWS_MIN: Final = 16
READ_ROWS_MAX: Final = 1 << 14


class LineReach:
    """Looks through one file, once. Leaves closing it to who opened it."""

    def __init__(
        self,
        data: FileBytes,
        line_format: LineFormat,
        schema: Schema,
        *,
        end: int,
        bounded: bool,
        line_bytes_max: int,
    ) -> None:
        """`end` is how much of the file there is now or, of bounded input, ever."""
        self._data = data
        self._format = line_format
        self._schema = schema
        self._end = end
        self._bounded = bounded
        self._line_bytes_max = line_bytes_max

    def find(self, position: int, rows_max: int, *, searched: int = 0) -> int | None:
        """Where a read of about `rows_max` rows would end; None if there is nothing to read yet.

        No newline lies between `position` and `searched`: an earlier search found none.
        """
        first = self._format.begin(self._data, self._end if self._bounded else None, complete=self._bounded)
        if first is None:
            return None
        begin = max(position, first)
        if begin >= self._end:
            return begin if self._bounded else None
        rows_max = max(1, rows_max)
        if self._bounded and self._about_rows(begin, self._end - begin) <= rows_max:
            return self._end  # where a reader may stop, whatever lies before it
        if self._format.ends_at_every_newline:
            return self._by_samples(begin, rows_max, max(begin, searched))
        return self._by_walk(begin, rows_max)

    def _by_samples(self, begin: int, rows_max: int, searched: int) -> int | None:
        sample = self._data.at(begin, min(SAMPLE_BYTES, self._end - begin))
        ends = newlines(sample)
        if ends.size >= rows_max:
            return begin + int(ends[rows_max - 1]) + 1
        way = self._end - begin
        if way > len(sample):
            way = min(way, rows_max * len(sample) // max(1, ends.size))
            way = self._shrunk(begin, max(1, way), rows_max)
        if begin + way >= self._end and self._bounded:
            return self._end
        found = self._last_newline(searched, begin + way)
        if found is None and begin + way < self._end:
            found = self._first_newline(max(searched, begin + way))
        if found is not None:
            return found + 1
        return self._end if self._bounded else None

    def _shrunk(self, begin: int, way: int, rows_max: int) -> int:
        """Make the way shorter until samples along it promise not many more rows than are wanted."""
        for _ in range(SHRINKS_MAX):
            rows = self._about_rows(begin, way)
            if rows <= _NEAR_ENOUGH * rows_max:
                break
            way = max(1, int(way * rows_max / rows))
        return way

    def _about_rows(self, begin: int, way: int) -> float:
        """How many lines lie on the way, if it is everywhere as it is in samples."""
        if way <= SPREAD_SAMPLES * SPREAD_BYTES:
            data = self._data.at(begin, way)
            return data.count(b"\n") + (not data.endswith(b"\n"))
        looked, rows = 0, 0
        for number in range(SPREAD_SAMPLES):
            data = self._data.at(begin + (way - SPREAD_BYTES) * number // (SPREAD_SAMPLES - 1), SPREAD_BYTES)
            looked, rows = looked + len(data), rows + data.count(b"\n")
        return rows * way / max(1, looked)

    def _last_newline(self, begin: int, end: int) -> int | None:
        length = SAMPLE_BYTES
        while end > begin:
            start = max(begin, end - length)
            if (found := self._data.at(start, end - start).rfind(b"\n")) >= 0:
                return start + found
            end, length = start, min(length * 4, BLOCK_BYTES_MAX)
        return None

    def _first_newline(self, begin: int) -> int | None:
        length = SAMPLE_BYTES
        while begin < self._end:
            data = self._data.at(begin, min(length, self._end - begin))
            if (found := data.find(b"\n")) >= 0:
                return begin + found
            if not data:
                break
            begin, length = begin + len(data), min(length * 4, BLOCK_BYTES_MAX)
        return None

    def _by_walk(self, begin: int, rows_max: int) -> int | None:
        """Go from record to record. Counts each line that is a record, a blank one too, as the reader does."""
        place, rows = begin, 0
        block_bytes, read_rows = SAMPLE_BYTES, READ_ROWS_MIN
        while rows < rows_max and place < self._end:
            data = self._data.at(place, min(block_bytes, self._end - place))
            ends = _line_ends(data, self._format.ends(data))[: rows_max - rows]
            if ends.size:
                place += int(ends[-1]) + 1
                rows += ends.size
                block_bytes = min(block_bytes * 2, WALK_BYTES_MAX)
                continue
            came, records = self._read(place, min(read_rows, rows_max - rows))
            if came <= place:
                break
            place, rows = came, rows + max(1, records)
            read_rows = min(max(READ_ROWS_MIN, records * 2), READ_ROWS_MAX)
            block_bytes = WALK_BYTES_MIN
        return place if place > begin else None

    def _read(self, place: int, rows_max: int) -> tuple[int, int]:
        """Where the reader comes to, and over how many records."""
        reader = LineReader(
            self._data,
            self._format,
            self._schema,
            place,
            bounded=self._bounded,
            with_positions=False,
            line_bytes_max=self._line_bytes_max,
        )
        chunk = reader.read(rows_max, Position(self._end) if self._bounded else None)
        return (place, 0) if chunk is None else (int(chunk.position), chunk.frame.height + len(chunk.rejected))


def _line_ends(data: bytes, ends: Offsets) -> Offsets:
    """The ends of those records, from the first on, that are one line each."""
    if ends.size == data.count(b"\n"):
        return ends
    whole = ends == newlines(data)[: ends.size]
    return ends if whole.all() else ends[: int(np.argmin(whole))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """How many rows a table had when its file looked like this."""

    size: int
    mtime_ns: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unfinished:
    """A line that begins at `position` and has no newline before `searched`."""

    position: int
    searched: int


class FileReach:
    """The files of one source, as far as they were asked about. Used by one thread."""

    def __init__(self, schema: Schema, *, bounded: bool, line_bytes_max: int) -> None:
        self._schema = schema
        self._bounded = bounded
        self._line_bytes_max = line_bytes_max
        self._ends: dict[Path, int] = {}
        self._unfinished: dict[Path, _Unfinished] = {}
        self._counted: dict[Path, _Counted] = {}

    def of_lines(
        self, path: Path, line_format: Callable[[], LineFormat], position: Position, rows_max: int
    ) -> ReadPlan:
        """Of a text file that is not compressed."""
        size = _stat(path).st_size
        end = self._ends.setdefault(path, size) if self._bounded else size
        if size < max(position, end):
            raise shrank(path, size, max(position, end))
        if position >= end:
            return ReadPlan(position=position, ended=self._bounded)
        unfinished = self._unfinished.get(path)
        data = PlainFile(path)
        try:
            found = LineReach(
                data,
                line_format(),
                self._schema,
                end=end,
                bounded=self._bounded,
                line_bytes_max=self._line_bytes_max,
            ).find(
                position,
                rows_max,
                searched=unfinished.searched if unfinished and unfinished.position == position else 0,
            )
        finally:
            data.close()
        if found is None:
            self._unfinished[path] = _Unfinished(position=position, searched=end)
            return ReadPlan(position=position)
        self._unfinished.pop(path, None)
        return ReadPlan(position=Position(found), ended=self._bounded and found >= end)

    def of_table(self, path: Path, table: Callable[[], TableReader], position: Position, rows_max: int) -> ReadPlan:
        """The plan for a file that stores its number of rows."""
        looks = _stat(path)
        counted = self._counted.get(path)
        same = counted is not None and (counted.size, counted.mtime_ns) == (looks.st_size, looks.st_mtime_ns)
        if counted is None or not same or position > counted.rows:
            rows = self._count(table)
            if rows is None:
                return ReadPlan(position=position)
            counted = _Counted(size=looks.st_size, mtime_ns=looks.st_mtime_ns, rows=rows)
            self._counted[path] = counted
        found = max(position, min(counted.rows, position + max(1, rows_max)))
        return ReadPlan(position=Position(found), ended=found >= counted.rows)

    def rows_of(self, path: Path) -> int | None:
        """How many rows a table has, if it was asked about."""
        counted = self._counted.get(path)
        return None if counted is None else counted.rows

    def _count(self, table: Callable[[], TableReader]) -> int | None:
        reader = table()
        try:
            return reader.count()
        finally:
            reader.close()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
