"""A directory of output files.

`release` writes `epoch-<number>.<ending>`, `release_parts` makes a directory `epoch-<number>/` of what writers in other
processes have staged (see `file_parts`): the whole epoch or nothing, once. `write` lets rows out at once, into
`rows-<number>...` files of this opening. A stream of upserts is written as a changelog: its rows with `__op` and `__epoch`.
Reading back is left to `changelog`.

Invariants: a visible file is complete (text files of `write` excepted, whose last line may be torn by a crash); an epoch
never changes; an epoch that is there with other rows is an error, not a silent skip. All sinks of one directory are
opened before the first row is written. Epochs may be taken away once a later one is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import polars as pl

from fordstone.checkpoint.disk import Disk, OsDisk
from fordstone.connectors.connector import Delivery, Part, PartedSink, SinkStream
from fordstone.connectors.file_parts import STAGED_ENDING, Staging, epoch_name
from fordstone.connectors.file_settings import FileSettings
from fordstone.connectors.same_rows import same_rows
from fordstone.connectors.sink_rows import SinkRows
from fordstone.connectors.stream_mark import EPOCH_PREFIX, MARK_NAME, PART_PREFIX, ROWS_PREFIX, TEMPORARY_PREFIX
from fordstone.errors import SinkError, StorageError

_CLAIM_PREFIX: Final = ".claim-"
_CLAIMS_MAX: Final = 10_000
_APPENDED: Final = frozenset({"jsonl", "csv"})


def open_file_sink(settings: FileSettings, stream: SinkStream) -> PartedSink:
    """Open the directory, which is made if missing."""
    return FileSink(settings, stream, OsDisk(Path(settings.path).expanduser().absolute()))


class FileSink(PartedSink):
    """Writes one stream into one directory."""

    def __init__(self, settings: FileSettings, stream: SinkStream, disk: Disk) -> None:
        self._where = settings.path
        self._rows = SinkRows(settings, stream)
        self._disk = disk
        self._staging = Staging(disk, where=settings.path)
        self._sync = settings.sync
        self._rows_number: int | None = None
        self._rows_file: str | None = None
        self._rows_columns: list[str] = []
        self._rows_files = 0
        self._staging.sweep(keep=stream.sealed)
        self._mark()

    @property
    def delivery(self) -> Delivery:
        """An epoch that is there already is left alone."""
        return Delivery.EXACTLY_ONCE

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Write the epoch's file, unless the epoch is there; one without rows has none."""
        rows = self._rows.columns(frame, epoch) if frame.height else None
        there = self._there(epoch)
        if there is not None:
            would = [] if rows is None else [(f"epoch {epoch}", self._rows.encoded(rows))]
            self._compare(epoch, there, would)
        elif rows is not None:
            self._publish(f"{epoch_name(epoch)}.{self._rows.format}", self._rows.encoded(rows))

    def release_parts(self, epoch: int, attempt: str, parts: Sequence[Part]) -> None:
        """Give the staged directory the epoch's name, unless the epoch is there; one without rows has none."""
        names = {part.name for part in parts if part.rows}
        there = self._there(epoch)
        if there is not None and names and {name.rpartition("/")[2] for name in there} == names:
            # Parts are named after their attempt: it is this one, released before a crash.
            self._disk.fsync_dir("")
            with contextlib.suppress(StorageError):
                self._staging.sweep(epoch)
            return
        staged = self._staging.seal(epoch, attempt, names)
        if there is not None:
            self._compare(epoch, there, [(name, self._disk.read(name)) for name in staged])
        elif staged:
            self._staging.publish(epoch, attempt)
        with contextlib.suppress(StorageError):  # the epoch is out; what is left over goes when the sink is next opened
            self._staging.sweep(epoch)

    def write(self, frame: pl.DataFrame) -> None:
        """Append to this opening's text file, or write another whole file."""
        if frame.is_empty():
            return
        rows = self._rows.columns(frame, None)
        if self._rows.format in _APPENDED:
            self._append(rows)
            return
        self._publish(self._next_rows_file(), self._rows.encoded(rows))

    def close(self) -> None:
        """Make what was written durable."""
        if self._rows_file is not None:
            self._disk.fsync(self._rows_file)
            self._rows_file = None

    def _mark(self) -> None:
        if self._disk.exists(MARK_NAME):
            self._rows.check_mark(self._disk.read(MARK_NAME))
            return
        others = [name for name in self._disk.list("") if name.startswith((EPOCH_PREFIX, ROWS_PREFIX))]
        if others:
            raise SinkError(
                f"{self._where} has output ({others[0]}) but no {MARK_NAME}. Restore it, or choose another directory."
            )
        self._publish(MARK_NAME, self._rows.mark.to_json())

    def _publish(self, name: str, data: bytes) -> None:
        """All of it under its name, durably, or nothing."""
        temporary = f"{TEMPORARY_PREFIX}{name}{STAGED_ENDING}"
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

    def _there(self, epoch: int) -> list[str] | None:
        """The files of an epoch that is there, in order; None if it is not."""
        name = epoch_name(epoch)
        if self._disk.exists(f"{name}.{self._rows.format}"):
            return [f"{name}.{self._rows.format}"]
        if not self._disk.exists(name):
            return None
        return [f"{name}/{part}" for part in self._disk.list(name) if part.startswith(PART_PREFIX)]

    def _compare(self, epoch: int, there: Sequence[str], would: Sequence[tuple[str, bytes]]) -> None:
        """What is there must be what would have been written, in however many files."""
        found = [(name, self._disk.read(name)) for name in there]
        same = [data for _, data in found] == [data for _, data in would]
        # In any order: an epoch whose stored output was damaged has been computed again.
        if not would or not (same or same_rows(self._rows.decoded(found), self._rows.decoded(would))):
            raise SinkError(
                f"{self._where} already has epoch {epoch} ({epoch_name(epoch)}), with other rows than are released now.\n"
                f"It is the output of another run. Choose another directory, or move this one away; nothing was overwritten."
            )
        self._disk.fsync_dir("")  # whoever wrote it may have been stopped before its name was durable

    def _append(self, rows: pl.DataFrame) -> None:
        if self._rows_columns != rows.columns:
            self.close()
        name = self._rows_file
        self._rows_file = None  # if what follows fails, a line may be torn: the next goes into another file
        if name is None:
            name = self._next_rows_file()
            self._disk.create(name, self._rows.encoded(rows))
            self._rows_columns = rows.columns
            if self._sync:
                self._disk.fsync(name)
                self._disk.fsync_dir("")
        else:
            self._disk.append(name, self._rows.encoded(rows, header=False))
            if self._sync:
                self._disk.fsync(name)
        self._rows_file = name

    def _next_rows_file(self) -> str:
        self._rows_files += 1
        return f"{ROWS_PREFIX}{self._claimed():06d}-{self._rows_files:08d}.{self._rows.format}"

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
