"""Epochs of a file sink that several processes write.

A writer puts each part below a hidden directory of the attempt, `.tmp-epoch-<number>-<attempt>/`. `Staging` is the other
end, in the one process that releases: it shuts stragglers out, throws away what was not asked for, and gives the directory
the epoch's name in one step. The processes share nothing but the file system.

Invariants: no staged file has the ending of its format before its epoch is released, because patterns such as
`**/*.parquet` find hidden names too; a part under its name is whole and durable, however many tries write it at once; a
directory with an epoch's name never changes.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Final

import polars as pl

from fordstone.checkpoint.disk import Disk, OsDisk
from fordstone.connectors.connector import Part, PartWriter, SinkStream
from fordstone.connectors.file_settings import FileSettings
from fordstone.connectors.sink_rows import SinkRows
from fordstone.connectors.stream_mark import EPOCH_PREFIX, MARK_NAME, PART_PREFIX, TEMPORARY_PREFIX
from fordstone.errors import SinkError, StorageError

EPOCH_DIGITS: Final = 12
PART_DIGITS: Final = 6
ATTEMPT_CHARS: Final = 32
"""So much of an attempt stands in the names of its parts, which tells them from those of others."""
STAGED_ENDING: Final = ".staged"
_STAGED: Final = f"{TEMPORARY_PREFIX}{EPOCH_PREFIX}"
_SEALED: Final = f"{TEMPORARY_PREFIX}sealed-"
_PART_FILE: Final = f"{TEMPORARY_PREFIX}{PART_PREFIX}"
_DIRECTORY = re.compile(rf"(?:{re.escape(_STAGED)}|{re.escape(_SEALED)})(\d{{{EPOCH_DIGITS}}})-")
_ATTEMPT = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def epoch_name(epoch: int) -> str:
    """What the file or directory of an epoch is called, less the file's ending."""
    return f"{EPOCH_PREFIX}{epoch:0{EPOCH_DIGITS}d}"


def open_file_parts(settings: FileSettings, stream: SinkStream) -> PartWriter:
    """Open a writer for a directory that its sink has opened, here or on another machine."""
    rows = SinkRows(settings, stream)
    root = Path(settings.path).expanduser().absolute()
    if not (root / MARK_NAME).exists():
        raise SinkError(
            f"{root} has no {MARK_NAME} here, though its sink is open: this machine sees another directory.\n"
            f"Parts are written by several machines. Give a directory that all of them share, by its full path."
        )
    return FilePartWriter(rows, OsDisk(root), where=settings.path)


class FilePartWriter(PartWriter):
    """Writes parts below the hidden directory of their attempt."""

    def __init__(self, rows: SinkRows, disk: Disk, *, where: str) -> None:
        self._rows = rows
        self._disk = disk
        self._where = where
        rows.check_mark(disk.read(MARK_NAME))

    def write(self, epoch: int, attempt: str, number: int, frame: pl.DataFrame) -> Part:
        """Write one part, whole, or nothing. Of two tries at the same part the later one stays; no rows, no file."""
        mark = _checked(attempt)[:ATTEMPT_CHARS]
        part = Part(name=f"{PART_PREFIX}{number:0{PART_DIGITS}d}-{mark}.{self._rows.format}", rows=frame.height)
        if frame.is_empty():
            return part
        directory = _staged(epoch, attempt)
        data = self._rows.encoded(self._rows.columns(frame, epoch))
        # In the root, and of this try alone: nothing half done can be in the directory when it becomes the epoch.
        temporary = f"{_PART_FILE}{epoch:0{EPOCH_DIGITS}d}-{number:0{PART_DIGITS}d}-{secrets.token_hex(8)}"
        self._disk.make_dirs(directory)
        try:
            self._disk.create(temporary, data)
            self._disk.fsync(temporary)
            self._disk.rename(temporary, f"{directory}/{part.name}{STAGED_ENDING}")
            self._disk.fsync_dir(directory)
        except StorageError:
            self._drop(temporary)
            raise
        except FileNotFoundError as error:
            self._drop(temporary)
            raise SinkError(
                f"{self._where}: part {number} of epoch {epoch} came too late: attempt {attempt} was released or given up."
            ) from error
        return part

    def _drop(self, temporary: str) -> None:
        with contextlib.suppress(StorageError):
            self._disk.remove(temporary)


class Staging:
    """What writers have staged, seen by the one process that releases it."""

    def __init__(self, disk: Disk, *, where: str) -> None:
        self._disk = disk
        self._where = where

    def sweep(self, epoch: int | None = None, *, keep: str | None = None) -> None:
        """Take away the staged attempts at an epoch, or all that is temporary; but not the attempt `keep`."""
        for name in self._disk.list(""):
            staged = _DIRECTORY.match(name)
            if staged is not None and keep is not None and name.endswith(f"-{keep}"):
                continue
            if staged is not None and epoch in {None, int(staged[1])}:
                self._take_away(name)
            elif epoch is None and name.startswith(TEMPORARY_PREFIX):
                self._disk.remove(name)  # left by a crash

    def seal(self, epoch: int, attempt: str, names: Collection[str]) -> list[str]:
        """Shut writers of the attempt out and keep these parts only; gives their paths, still hidden.

        May be called again after it failed.
        """
        staged, sealed = _staged(epoch, attempt), _sealed(epoch, attempt)
        if not self._disk.exists(sealed) and self._disk.exists(staged):
            self._disk.rename(staged, sealed)
            self._disk.fsync_dir("")  # before it is renamed again: no crash may leave it under two names
        # A part has its last name already if the release failed between this and the directory's rename.
        found = {name.removesuffix(STAGED_ENDING): f"{sealed}/{name}" for name in self._disk.list(sealed)}
        missing = [name for name in names if name not in found]
        if missing:
            raise SinkError(
                f"{self._where}: {missing[0]} of epoch {epoch} is gone, though it was written (attempt {attempt}).\n"
                f"Was the directory opened or cleared by somebody else? Is it shared by all machines? Nothing was released."
            )
        for name in found.keys() - set(names):
            self._disk.remove(found[name])  # of a try that failed
        return [found[name] for name in sorted(names)]

    def publish(self, epoch: int, attempt: str) -> None:
        """Make a sealed attempt the epoch, durably, in one step."""
        sealed = _sealed(epoch, attempt)
        for name in self._disk.list(sealed):
            if name.endswith(STAGED_ENDING):
                self._disk.rename(f"{sealed}/{name}", f"{sealed}/{name.removesuffix(STAGED_ENDING)}")
        self._disk.fsync_dir(sealed)  # what was removed may not come back
        self._disk.rename(sealed, epoch_name(epoch))
        self._disk.fsync_dir("")

    def _take_away(self, directory: str) -> None:
        # A writer that nobody waits for any more may still add to it: then it goes when the sink is next opened.
        with contextlib.suppress(StorageError):
            for name in self._disk.list(directory):
                self._disk.remove(f"{directory}/{name}")
            self._disk.remove_dir(directory)


def _staged(epoch: int, attempt: str) -> str:
    return f"{_STAGED}{epoch:0{EPOCH_DIGITS}d}-{_checked(attempt)}"


def _sealed(epoch: int, attempt: str) -> str:
    return f"{_SEALED}{epoch:0{EPOCH_DIGITS}d}-{_checked(attempt)}"


def _checked(attempt: str) -> str:
    if _ATTEMPT.fullmatch(attempt) is None:
        raise ValueError(f"attempt {attempt!r} must be letters, digits, '_', '.' and '-'")
    return attempt
