"""A directory of output files.

`release` writes `epoch-<number>.<ending>`: the whole epoch or nothing, once. `write` lets rows out at once, into
`rows-<number>...` files of this opening. A stream of upserts is written as a changelog: its rows with `__op` and `__epoch`.
Reading back is left to `changelog`.

Invariants: a visible file is complete (text files of `write` excepted, whose last line may be torn by a crash); an epoch's
file never changes; an epoch that is there with other rows is an error, not a silent skip. All sinks of one directory are
opened before the first row is written. Files may be taken away once that of a later epoch is there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import polars as pl

from fordstone.checkpoint.disk import Disk, OsDisk
from fordstone.connectors.cells import check_flat, json_types
from fordstone.connectors.connector import Delivery, Sink, SinkStream
from fordstone.connectors.encoding import encoded
from fordstone.connectors.file_rows import file_rows
from fordstone.connectors.file_settings import FileFormat, FileSettings
from fordstone.connectors.same_rows import same_rows
from fordstone.connectors.stream_mark import (
    EPOCH,
    EPOCH_PREFIX,
    MARK_NAME,
    OP,
    ROWS_PREFIX,
    UPSERT,
    StreamMark,
    read_mark,
)
from fordstone.errors import ConfigError, SinkError, StorageError
from fordstone.model.schema import RESERVED_PREFIX

EPOCH_DIGITS: Final = 12
_TEMPORARY: Final = ".tmp-"
_CLAIM_PREFIX: Final = ".claim-"
_CLAIMS_MAX: Final = 10_000
_APPENDED: Final = frozenset({"jsonl", "csv"})


def open_file_sink(settings: FileSettings, stream: SinkStream) -> Sink:
    """Open the directory, which is made if missing."""
    return FileSink(settings, stream, OsDisk(Path(settings.path).expanduser().absolute()))


class FileSink(Sink):
    """Writes one stream into one directory."""

    def __init__(self, settings: FileSettings, stream: SinkStream, disk: Disk) -> None:
        self._where = settings.path
        self._format = _format(settings, stream)
        self._stream = stream
        self._disk = disk
        self._delimiter = settings.delimiter or ","
        self._compression = settings.compression
        self._sync = settings.sync
        self._rows_number: int | None = None
        self._rows_file: str | None = None
        self._rows_columns: list[str] = []
        self._rows_files = 0
        for name in disk.list(""):
            if name.startswith(_TEMPORARY):
                disk.remove(name)  # left by a crash
        self._written = StreamMark.of(settings, stream, self._format)
        self._mark(self._written)

    @property
    def delivery(self) -> Delivery:
        """An epoch that is there already is left alone."""
        return Delivery.EXACTLY_ONCE

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Write the epoch's file, unless it is there; an epoch without rows has none."""
        name = f"{EPOCH_PREFIX}{epoch:0{EPOCH_DIGITS}d}.{self._format}"
        if self._disk.exists(name):
            self._compare(name, epoch, frame)
            self._disk.fsync_dir("")  # whoever wrote it may have been stopped before its name was durable
        elif frame.height:
            self._publish(name, self._encoded(self._columns(frame, epoch)))

    def write(self, frame: pl.DataFrame) -> None:
        """Append to this opening's text file, or write another whole file."""
        if frame.is_empty():
            return
        rows = self._columns(frame, None)
        if self._format in _APPENDED:
            self._append(rows)
            return
        self._rows_files += 1
        self._publish(f"{ROWS_PREFIX}{self._claimed():06d}-{self._rows_files:08d}.{self._format}", self._encoded(rows))

    def close(self) -> None:
        """Make what was written durable."""
        if self._rows_file is not None:
            self._disk.fsync(self._rows_file)
            self._rows_file = None

    def _mark(self, mark: StreamMark) -> None:
        if not self._disk.exists(MARK_NAME):
            others = [name for name in self._disk.list("") if name.startswith((EPOCH_PREFIX, ROWS_PREFIX))]
            if others:
                raise SinkError(
                    f"{self._where} has output ({others[0]}) but no {MARK_NAME}. Restore it, or choose another directory."
                )
            self._publish(MARK_NAME, mark.to_json())
            return
        difference = read_mark(self._disk.read(MARK_NAME), where=self._where).disagreement(mark)
        if difference:
            raise SinkError(
                f"{self._where} holds the output of another stream: {mark.step} writes {difference}.\n"
                f"Choose another directory, or move this one away."
            )

    def _columns(self, frame: pl.DataFrame, epoch: int | None) -> pl.DataFrame:
        """The declared columns with their types, then those that begin with `__`."""
        schema = self._stream.schema
        missing = [name for name in schema if name not in frame.columns]
        if missing:
            raise SinkError(
                f"{self._where}: rows come without column {missing[0]!r}; they have {', '.join(frame.columns)}."
            )
        own = [name for name in frame.columns if name.startswith(RESERVED_PREFIX) and name not in {OP, EPOCH}]
        columns = [pl.col(name).cast(kind.polars) for name, kind in schema.items()] + [pl.col(name) for name in own]
        if self._stream.upsert_key is not None:
            columns.append(pl.col(OP).cast(pl.String) if OP in frame.columns else pl.lit(UPSERT).alias(OP))
            columns.append(pl.lit(epoch, dtype=pl.Int64).alias(EPOCH))
        return frame.select(columns)

    def _encoded(self, frame: pl.DataFrame, *, header: bool = True) -> bytes:
        return encoded(frame, self._format, header=header, delimiter=self._delimiter, compression=self._compression)

    def _publish(self, name: str, data: bytes) -> None:
        """All of it under its name, durably, or nothing."""
        temporary = _TEMPORARY + name
        try:
            self._disk.remove(temporary)
            self._disk.create(temporary, data)
            self._disk.fsync(temporary)
            self._disk.rename(temporary, name)
        except StorageError:
            with contextlib.suppress(StorageError):
                self._disk.remove(temporary)
            raise
        self._disk.fsync_dir("")

    def _compare(self, name: str, epoch: int, frame: pl.DataFrame) -> None:
        """What is there must be what would have been written."""
        there = self._disk.read(name)
        if frame.height:
            would = self._encoded(self._columns(frame, epoch))
            mark = self._written
            # In any order: an epoch whose stored output was damaged has been computed again.
            if there == would or same_rows(file_rows(there, mark, where=name), file_rows(would, mark, where=name)):
                return
        raise SinkError(
            f"{self._where} already has epoch {epoch} ({name}), with other rows than are released now.\n"
            f"It is the output of another run. Choose another directory, or move this one away; nothing was overwritten."
        )

    def _append(self, rows: pl.DataFrame) -> None:
        if self._rows_columns != rows.columns:
            self.close()
        name = self._rows_file
        self._rows_file = None  # if what follows fails, a line may be torn: the next goes into another file
        if name is None:
            self._rows_files += 1
            name = f"{ROWS_PREFIX}{self._claimed():06d}-{self._rows_files:08d}.{self._format}"
            self._disk.create(name, self._encoded(rows))
            self._rows_columns = rows.columns
            if self._sync:
                self._disk.fsync(name)
                self._disk.fsync_dir("")
        else:
            self._disk.append(name, self._encoded(rows, header=False))
            if self._sync:
                self._disk.fsync(name)
        self._rows_file = name

    def _claimed(self) -> int:
        """The number of this opening, larger than any before it; claimed when the first row is written."""
        if self._rows_number is not None:
            return self._rows_number
        taken = [
            int(name.split("-")[1]) for name in self._disk.list("") if name.startswith((ROWS_PREFIX, _CLAIM_PREFIX))
        ]
        number = max(taken, default=0) + 1
        for candidate in range(number, number + _CLAIMS_MAX):
            claim = f"{_CLAIM_PREFIX}{candidate:06d}"
            try:
                self._disk.create(claim, b"")
            except FileExistsError:
                continue  # another sink of this directory was quicker
            self._disk.fsync(claim)
            self._rows_number = candidate
            return candidate
        raise SinkError(f"{self._where}: no number is free for another file; {_CLAIMS_MAX} were tried.")


def _format(settings: FileSettings, stream: SinkStream) -> FileFormat:
    if settings.format is None:
        raise ConfigError(
            f"sink {stream.step}: files({settings.path!r}) needs format='jsonl', 'csv', 'parquet' or 'arrow'."
        )
    if any(mark in settings.path for mark in "*?["):
        raise ConfigError(f"sink {stream.step}: files({settings.path!r}) is a pattern; a sink needs a directory.")
    if settings.format == "jsonl":
        json_types(stream.schema)
    if settings.format == "csv":
        check_flat(stream.schema, where=f"sink {stream.step}")
        if len(stream.schema) == 1:
            raise SinkError(
                f"sink {stream.step}: CSV of one column cannot tell null from a blank line. Use jsonl, parquet or arrow."
            )
    unknown = [name for name in stream.upsert_key or () if name not in stream.schema]
    if unknown:
        raise SinkError(f"sink {stream.step}: the key column {unknown[0]!r} is not among {', '.join(stream.schema)}.")
    return settings.format
