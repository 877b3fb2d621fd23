"""What a file source remembers to tell how far reads would come: one look at a file that has nothing new costs one `stat`.

Bounded input ends where the file ended when it was first asked about. That a file was replaced by another one that is
not shorter goes unnoticed here: readers that keep it open would tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fordstone.connectors.connector import Reach
from fordstone.connectors.file_bytes import PlainFile, shrank, unreadable
from fordstone.connectors.line_format import LineFormat
from fordstone.connectors.line_reach import LineReach
from fordstone.connectors.tables import TableReader
from fordstone.model.ids import Position
from fordstone.model.schema import Schema


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

    def of_lines(self, path: Path, line_format: Callable[[], LineFormat], position: Position, rows_max: int) -> Reach:
        """Of a text file that is not compressed."""
        size = _stat(path).st_size
        end = self._ends.setdefault(path, size) if self._bounded else size
        if size < max(position, end):
            raise shrank(path, size, max(position, end))
        if position >= end:
            return Reach(position=position, ended=self._bounded)
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
            return Reach(position=position)
        self._unfinished.pop(path, None)
        return Reach(position=Position(found), ended=self._bounded and found >= end)

    def of_table(self, path: Path, table: Callable[[], TableReader], position: Position, rows_max: int) -> Reach:
        """Of a file that tells how many rows it has."""
        looks = _stat(path)
        counted = self._counted.get(path)
        same = counted is not None and (counted.size, counted.mtime_ns) == (looks.st_size, looks.st_mtime_ns)
        if counted is None or not same or position > counted.rows:
            rows = self._count(table)
            if rows is None:
                return Reach(position=position)
            counted = _Counted(size=looks.st_size, mtime_ns=looks.st_mtime_ns, rows=rows)
            self._counted[path] = counted
        found = max(position, min(counted.rows, position + max(1, rows_max)))
        return Reach(position=Position(found), ended=found >= counted.rows)

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
