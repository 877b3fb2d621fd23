"""The source of files on local disks. `files.remote` has those at URLs.

A source is a pattern; each file that matches is a partition, named by its path below the fixed part of the pattern when it was found.
Names that begin with '.' or '_' are left out (unless the pattern says so itself): they are work in progress.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fordstone.connectors.base import Reader, ReadPlan, Source, SourceOptions
from fordstone.connectors.files.bytes import PACKED_SUFFIXES, FileBytes, Tracked, open_bytes, opened, shrank, unreadable
from fordstone.connectors.files.columns import check_declared
from fordstone.connectors.files.formats import CsvRows, JsonLines, LineFormat
from fordstone.connectors.files.identity import Whereabouts
from fordstone.connectors.files.lines import BLOCK_BYTES_MAX, LineReader
from fordstone.connectors.files.series import places
from fordstone.connectors.files.settings import TABLES, FileFormat, FileSettings
from fordstone.connectors.files.tables import TableReader
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import SourceError
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.partitions import SeriesPlace

REST_SECONDS: Final = 10
"""The last line of a file that another one continues needs no newline after this time without a write."""
QUIET_SECONDS: Final = 3600
"""A file that another one seems to continue is finished after this time without a write, although it is not certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """The number of rows of a table file, and the size and time that the file had then."""

    looks: tuple[int, int]
    rows: int


class FileSource(Source):
    """The files that match a pattern."""

    def __init__(self, settings: FileSettings, options: SourceOptions) -> None:
        self._settings = settings
        self._options = options
        self._root, self._pattern = (Path(), "") if settings.is_url else _split(settings.path)
        self._found: Sequence[PartitionId] | None = None
        self._tables: dict[str, TableReader] = {}
        self._known_sizes: dict[str, int] | None = None
        self._where = Whereabouts(self._root, bounded=options.bounded)
        self._ends: dict[str, int] = {}
        """Where bounded text files ended when they were first planned."""
        self._unfinished: dict[str, tuple[int, int]] = {}
        """Of text files: where a line begins, and up to where it was searched for its newline in vain."""
        self._counted: dict[str, _Counted] = {}
        self._columns_checked = False

    def partitions(self) -> Sequence[PartitionId]:
        """The files there are, by name. Bounded input is what was there at the first call."""
        if self._found is not None:
            return self._found
        found = self._assigned(sorted(self._matching()))
        self._check_columns(found)
        if not self._options.bounded:
            return found
        if not found:
            raise SourceError(
                f"no file matches {self._settings.path!r} (working directory {Path.cwd()}).\n"
                "Correct the path. A source of an unbounded run waits for files."
            )
        self._found = found
        return found

    def path_of(self, partition: PartitionId) -> Path:
        """Where the file of a partition is now."""
        return self._where.path(partition)

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        self._where.restore(cuts)

    def identity(self, partition: PartitionId, position: Position) -> str:
        if position == 0:
            return ""
        path = self.path_of(partition)
        with opened(path) as fd:
            return str(self._where.marked(partition, fd, position if self._is_plain_text(path) else None))

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        """Open one file. Positions are bytes of text files, rows of others."""
        path = self.path_of(partition)
        reader = self._open_at(path, position, with_positions=with_positions, tracked=self._where.tracked(partition))
        if isinstance(reader, TableReader):
            self._tables[partition] = reader
        return reader

    def _open_at(
        self, path: Path, position: Position, *, with_positions: bool, tracked: Tracked | None = None
    ) -> Reader:
        file_format = self._format_of(path)
        if file_format in TABLES:
            return self._table(path, file_format, position, with_positions=with_positions)
        data = self._bytes(path, tracked)
        return self._line_reader(data, path, file_format, position, with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """Plan from a file's number of rows, or by its newlines. An unchanged file costs one `stat`; compressed files are read."""
        path = self.path_of(partition)
        if path.suffix in PACKED_SUFFIXES:
            return super().plan_read(partition, position, rows_max)
        file_format, looks = self._format_of(path), _stat(path)
        if file_format in TABLES:
            return self._plan_table(partition, path, file_format, looks, position, max(1, rows_max))
        return self._plan_lines(partition, path, file_format, looks.st_size, position, max(1, rows_max))

    def _plan_table(
        self,
        partition: PartitionId,
        path: Path,
        file_format: FileFormat,
        looks: os.stat_result,
        position: Position,
        rows_max: int,
    ) -> ReadPlan:
        found = self._counted.get(partition)
        if found is None or found.looks != (looks.st_size, looks.st_mtime_ns) or position > found.rows:
            with closing(self._table(path, file_format, position, with_positions=False)) as reader:
                rows = reader.count()
            if rows is None:
                return ReadPlan(position=position)
            found = self._counted[partition] = _Counted(looks=(looks.st_size, looks.st_mtime_ns), rows=rows)
        stop = max(position, min(found.rows, position + rows_max))
        return ReadPlan(position=Position(stop), ended=stop >= found.rows)

    def _plan_lines(
        self,
        partition: PartitionId,
        path: Path,
        file_format: FileFormat,
        size: int,
        position: Position,
        rows_max: int,
    ) -> ReadPlan:
        """A planned position is one that a reader passes that reads straight through, whatever is appended later."""
        end = size if self._grows() else self._ends.setdefault(partition, size)
        if size < max(position, end):
            raise shrank(path, size, max(position, end))
        if position >= end:
            return ReadPlan(position=position, ended=not self._grows())
        begin, searched = self._unfinished.get(partition, (-1, 0))
        with closing(self._bytes(path)) as data:
            if (
                begin == position
                and end - searched <= BLOCK_BYTES_MAX
                and b"\n" not in data.at(searched, end - searched)
            ):
                found = None
            else:
                reader = self._line_reader(data, path, file_format, position, with_positions=False)
                found = reader.plan(rows_max, end)
        if found is None:
            self._unfinished[partition] = (position, end)
            return ReadPlan(position=position)
        self._unfinished.pop(partition, None)
        return ReadPlan(position=Position(found), ended=not self._grows() and found >= end)

    def series(self, partition: PartitionId) -> Sequence[SeriesPlace]:
        return places(self._where.name(partition), self._settings.series)

    def is_quiet(self, partition: PartitionId) -> bool:
        return _seconds_since_write(_stat(self.path_of(partition))) >= QUIET_SECONDS

    def plan_rest(self, partition: PartitionId, position: Position) -> Position | None:
        """A last line without a newline, of a text file that has not been written to for a while."""
        path = self.path_of(partition)
        if not self._is_plain_text(path):
            return position
        looks = _stat(path)
        if looks.st_size <= position:
            return position
        return Position(looks.st_size) if _seconds_since_write(looks) >= REST_SECONDS else None

    def size_bytes(self) -> int:
        return sum(self._sizes().values())

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        """By bytes. Compressed files do not tell how many of theirs lie before a position."""
        sizes = self._sizes()
        total = sum(sizes.values())
        if not total or any(name.endswith(PACKED_SUFFIXES) for name in sizes):
            return None
        return sum(self._read_of(name, size, cuts[name]) for name, size in sizes.items() if name in cuts) / total

    def _read_of(self, name: str, size: int, cut: PartitionCut) -> float:
        if cut.done:
            return size
        counted = self._counted.get(name) or self._tables.get(name)
        rows = None if counted is None else counted.rows
        return min(cut.position, size) if rows is None else size * min(cut.position / max(rows, 1), 1.0)

    def _sizes(self) -> dict[str, int]:
        if self._known_sizes is None or not self._options.bounded:
            paths = {name: self._root / self._where.name(name) for name in self.partitions()}
            self._known_sizes = {name: path.stat().st_size for name, path in paths.items() if path.exists()}
        return self._known_sizes

    @contextmanager
    def sample(self, partition: PartitionId) -> Iterator[Path]:
        """A local file that begins as the file of a partition, to look at its columns."""
        yield self.path_of(partition)

    def _check_columns(self, found: Sequence[PartitionId]) -> None:
        """Compare the first file, by name, with the schema, as soon as it has rows."""
        if found and self._settings.missing == "error" and self._options.schema and not self._columns_checked:
            with self.sample(found[0]) as path:
                where, schema = self._called(found[0]), self._options.schema
                self._columns_checked = check_declared(path, self._settings, schema, where=where)

    def _called(self, partition: PartitionId) -> str:
        """How messages name the file of a partition."""
        return str(self.path_of(partition))

    def _format_of(self, path: Path) -> FileFormat:
        file_format = self._settings.format_of(path)
        if file_format is None:
            raise SourceError(
                f"{path}: its ending does not tell the format. Say format='jsonl', 'csv', 'parquet' or 'arrow'."
            )
        if path.suffix in PACKED_SUFFIXES and (file_format in TABLES or self._grows()):
            raise SourceError(
                f"{path}: compressed files can be read only as bounded input, of JSON lines or CSV. Unpack it first. Only the compressed form of "
                "a rotated file that was read to its end is left out."
            )
        return file_format

    def _is_plain_text(self, path: Path) -> bool:
        """Whether a position in a file is a byte of it. Other files never grow."""
        return self._format_of(path) not in TABLES and path.suffix not in PACKED_SUFFIXES

    def _table(self, path: Path, file_format: FileFormat, position: Position, *, with_positions: bool) -> TableReader:
        return TableReader(
            path,
            file_format,
            self._options.schema,
            position,
            bounded=not self._grows(),
            with_positions=with_positions,
        )

    def _line_reader(
        self, data: FileBytes, path: Path, file_format: FileFormat, position: Position, *, with_positions: bool
    ) -> LineReader:
        settings, schema = self._settings, self._options.schema
        line_format: LineFormat = (
            JsonLines(schema, time_unit=settings.time_unit)
            if file_format == "jsonl"
            else CsvRows(
                path,
                schema,
                delimiter=settings.delimiter_of(path),
                header=settings.header,
                time_unit=settings.time_unit,
            )
        )
        return LineReader(
            data,
            line_format,
            schema,
            position,
            bounded=not self._grows(),
            with_positions=with_positions,
            line_bytes_max=settings.line_bytes_max,
        )

    def _assigned(self, names: list[str]) -> Sequence[PartitionId]:
        """The partitions that files of these names are."""
        return self._where.assign(names)

    def _bytes(self, path: Path, tracked: Tracked | None = None) -> FileBytes:
        return open_bytes(path, tracked)

    def _grows(self) -> bool:
        """Whether files may grow."""
        return not self._options.bounded

    def _matching(self) -> list[str]:
        if not glob.has_magic(self._pattern):
            if (self._root / self._pattern).is_dir():
                raise SourceError(
                    f"{self._settings.path!r} is a directory. Name the files in it: {self._settings.path.rstrip('/')}/*.jsonl"
                )
            return [self._pattern] if (self._root / self._pattern).is_file() else []
        own = Path(self._pattern).name.startswith("_")
        names = glob.iglob(self._pattern, root_dir=self._root, recursive=True)  # noqa: PTH207 - leaves out hidden files, as Path.glob does not
        return [
            name for name in names if (own or not Path(name).name.startswith("_")) and (self._root / name).is_file()
        ]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from error


def _seconds_since_write(looks: os.stat_result) -> float:
    return time.time() - looks.st_mtime


def pattern_of(path: str) -> re.Pattern[str]:
    """The names that a pattern of `glob` matches."""
    parts = re.split(r"(\*\*/|\*|\?|\[[^]]+\])", path)
    meaning = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(meaning.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts)
    )


def _split(path: str) -> tuple[Path, str]:
    """The fixed directory of a pattern, as it is now, and the rest."""
    parts = Path(path).expanduser().parts
    fixed = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed]).absolute(), str(Path(*parts[fixed:]))
