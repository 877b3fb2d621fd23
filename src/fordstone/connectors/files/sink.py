"""A directory of output files.

`release` writes `epoch-<number>.<ending>`: the whole epoch or nothing, once. `write` emits rows at once, into
`rows-<number>...` files of this opening. A stream of upserts is written as a changelog: its rows with `__op` and `__epoch`.
Where several processes write an epoch, each puts its parts below a hidden directory of the attempt,
`.tmp-epoch-<number>-<attempt>/`, and `release_parts` gives that directory the epoch's name in one step. `rows` reads back.

Invariants: a visible file is complete (text files of `write` excepted, whose last line may be torn by a crash); an epoch
never changes; an epoch that is there with other rows is an error, not a silent skip. No staged file has the ending of its
format before its epoch is released, because patterns such as `**/*.parquet` find hidden names too. All sinks of one directory
are opened before the first row is written. Epochs may be removed once a later one is there. Nothing appears by a writer whose claim
(`files.claim`) another one has replaced: its files come out of the claim's directory, and what it has staged is renamed away.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import polars as pl

from fordstone.connectors.base import Part, PartedSink, PartWriter, SinkStream, later_output
from fordstone.connectors.compare import same_rows
from fordstone.connectors.files.claim import GONE_PREFIX, DirectoryClaim, remove_tree
from fordstone.connectors.files.rows import (
    EPOCH_PREFIX,
    MARK_NAME,
    PART_PREFIX,
    ROWS_PREFIX,
    SinkRows,
    read_mark,
)
from fordstone.connectors.files.settings import FileSettings, is_data
from fordstone.errors import DamagedError, SinkError, StorageError
from fordstone.storage.atomic import TEMP_PREFIX, AtomicWriter
from fordstone.storage.disk import Disk, OsDisk

log = logging.getLogger(__name__)

EPOCH_DIGITS: Final = 12
PART_DIGITS: Final = 6
ATTEMPT_CHARS: Final = 32
"""Number of characters of an attempt in the names of its parts, which separates them from other attempts' parts."""
STAGED_ENDING: Final = ".staged"
_STAGED: Final = f"{TEMP_PREFIX}{EPOCH_PREFIX}"
_SEALED: Final = f"{TEMP_PREFIX}sealed-"
_DIRECTORY = re.compile(rf"(?:{re.escape(_STAGED)}|{re.escape(_SEALED)})(\d{{{EPOCH_DIGITS}}})-")
_SWEEPS_MAX: Final = 100
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
        self._staging = Staging(disk, where=where)
        rows.check_mark(disk.read(MARK_NAME))

    def write(self, epoch: int, attempt: str, number: int, frame: pl.DataFrame) -> Part:
        """Write one part, whole, or nothing. Of two tries at the same part the later one stays; no rows, no file."""
        part = Part(name=f"{part_name(attempt, number)}.{self._rows.format}", rows=frame.height)
        if frame.is_empty():
            return part
        self._staging.put(epoch, attempt, number, part.name, self._rows.encoded(self._rows.columns(frame, epoch)))
        return part


class Staging:
    """What writers have staged: written by any process, sealed, published and removed by the one that releases it."""

    def __init__(self, disk: Disk, *, where: str) -> None:
        self._disk = disk
        self._writer = AtomicWriter(disk)
        self._where = where

    def put(self, epoch: int, attempt: str, number: int, name: str, data: bytes) -> None:
        """Stage a file, whole and durable, or nothing."""
        directory = _staged(epoch, attempt)
        self._disk.make_dirs(directory)
        try:
            # The temporary file is in the root, so that no incomplete file is in the directory when it becomes the epoch.
            self._writer.write(f"{directory}/{name}{STAGED_ENDING}", data, temp_directory="")
        except FileNotFoundError as error:
            raise SinkError(
                f"{self._where}: part {number} of epoch {epoch} came too late: attempt {attempt} was released or given up."
            ) from error

    def sweep(self, epoch: int | None = None, *, keep: str | None = None) -> None:
        """Remove the staged attempts at an epoch, or all that is temporary; but not the attempt `keep`."""
        for _ in range(_SWEEPS_MAX):
            found = [name for name in self._disk.list("") if _is_swept(name, epoch, keep)]
            for name in found:
                if _DIRECTORY.match(name) is not None or name.startswith(GONE_PREFIX):
                    remove_tree(self._disk, name)
                else:
                    self._disk.remove(name)  # left by a crash
            if not found:
                return  # another process may have renamed one meanwhile

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
                f"Was the directory opened or cleared by another process? Is it shared by all machines? Nothing was released."
            )
        for name in found.keys() - set(names):
            self._disk.remove(found[name])  # of a try that failed
        return [found[name] for name in sorted(names)]

    def sealed_name(self, epoch: int, attempt: str, name: str) -> str:
        """Where a part of a sealed attempt is."""
        return f"{_sealed(epoch, attempt)}/{name}{STAGED_ENDING}"

    def publish(self, epoch: int, attempt: str) -> None:
        """Make a sealed attempt the epoch, durably, in one step."""
        sealed = _sealed(epoch, attempt)
        for name in self._disk.list(sealed):
            if name.endswith(STAGED_ENDING):
                self._disk.rename(f"{sealed}/{name}", f"{sealed}/{name.removesuffix(STAGED_ENDING)}")
        self._disk.fsync_dir(sealed)  # what was removed may not come back
        self._disk.rename(sealed, epoch_name(epoch))
        self._disk.fsync_dir("")


def part_name(attempt: str, number: int) -> str:
    """What a part is called, less the file's ending."""
    return f"{PART_PREFIX}{number:0{PART_DIGITS}d}-{_checked(attempt)[:ATTEMPT_CHARS]}"


def _is_swept(name: str, epoch: int | None, keep: str | None) -> bool:
    staged = _DIRECTORY.match(name)
    if staged is None:
        return epoch is None and name.startswith(TEMP_PREFIX)
    return epoch in {None, int(staged[1])} and not (keep is not None and name.endswith(f"-{keep}"))


def _staged(epoch: int, attempt: str) -> str:
    return f"{_STAGED}{epoch:0{EPOCH_DIGITS}d}-{_checked(attempt)}"


def _sealed(epoch: int, attempt: str) -> str:
    return f"{_SEALED}{epoch:0{EPOCH_DIGITS}d}-{_checked(attempt)}"


def _checked(attempt: str) -> str:
    if _ATTEMPT.fullmatch(attempt) is None:
        raise ValueError(f"attempt {attempt!r} must be letters, digits, '_', '.' and '-'")
    return attempt


DISCARDED_PREFIX: Final = "discarded-"
"""Begins the names of directories with epochs that were set aside."""
DISCARDED_ENDING: Final = ".old"
EPOCH_NAME: Final = re.compile(rf"{re.escape(EPOCH_PREFIX)}(\d{{{EPOCH_DIGITS}}})(?:\..*)?")
_CLAIM_PREFIX: Final = ".claim-"
_CLAIMS_MAX: Final = 10_000
_APPENDED: Final = frozenset({"jsonl", "csv"})


def open_file_sink(settings: FileSettings, stream: SinkStream) -> PartedSink:
    """Open the directory, and create it if it is missing."""
    root = Path(settings.path).expanduser().absolute()
    if settings.damaged == "set_aside":
        # Dead letters lie beside the state, and nobody else reads them. Output is shared, by the umask.
        return DeadLetterSink(settings, stream, OsDisk(root, private=True))
    return FileSink(settings, stream, OsDisk(root))


def first_output(settings: FileSettings) -> str | None:
    """The first file of rows in the directory of a sink; None if it has none."""
    found = OsDisk(Path(settings.path).expanduser().absolute(), create_root=False).list("")
    return next((f"{settings.path}/{name}" for name in found if name.startswith((EPOCH_PREFIX, ROWS_PREFIX))), None)


def free_name(disk: Disk, prefix: str) -> str:
    """The first name of this prefix and a number that is not taken."""
    taken = set(disk.list(""))
    return next(name for number in itertools.count(1) if (name := f"{prefix}{number}") not in taken)


class FileSink(PartedSink):
    """Writes one stream into one directory."""

    def __init__(self, settings: FileSettings, stream: SinkStream, disk: Disk) -> None:
        self._where = settings.path
        self._rows = SinkRows(settings, stream)
        self._disk = disk
        self._writer = AtomicWriter(disk)
        self._staging = Staging(disk, where=settings.path)
        self._sync = settings.sync
        self._rows_number: int | None = None
        self._rows_file: str | None = None
        self._rows_columns: list[str] = []
        self._rows_files = 0
        self._stream = stream
        self._claim = (
            DirectoryClaim(disk, stream, where=settings.path, check_later=self._check_later) if stream.owner else None
        )
        self._mark()
        if self._claim is not None:
            self._claim.take()
        self._staging.sweep(keep=stream.sealed)
        # Now no other writer can add epochs any more.
        self._check_later(discard=stream.discard_later)

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Write the epoch's file, unless the epoch is there; one without rows has none."""
        self._check_claim()
        rows = self._rows.columns(frame, epoch) if frame.height else None
        there = self._there(epoch)
        if there is not None:
            would = [] if rows is None else [(f"epoch {epoch}", self._rows.encoded(rows))]
            self._compare(epoch, there, would)
        elif rows is not None:
            self._put(f"{epoch_name(epoch)}.{self._rows.format}", self._rows.encoded(rows))

    def takes_parts(self) -> bool:
        return True

    def release_parts(self, epoch: int, attempt: str, parts: Sequence[Part]) -> None:
        """Give the staged directory the epoch's name, unless the epoch is there; one without rows has none."""
        self._check_claim()
        names = {part.name for part in parts if part.rows}
        there = self._there(epoch)
        if there is not None and names and {name.rpartition("/")[2] for name in there} == names:
            # Parts are named after their attempt: it is this one, released before a crash.
            self._disk.fsync_dir("")
            with contextlib.suppress(StorageError):
                self._staging.sweep(epoch)
            return
        try:
            staged = self._staging.seal(epoch, attempt, names)
            if there is not None:
                self._compare(epoch, there, [(name, self._disk.read(name)) for name in staged])
            elif staged:
                self._staging.publish(epoch, attempt)
        except (FileNotFoundError, SinkError):
            self._check_claim()  # another writer that takes over removes what is staged
            raise
        with contextlib.suppress(StorageError):  # the epoch is out; what is left over goes when the sink is next opened
            self._staging.sweep(epoch)

    def write(self, frame: pl.DataFrame) -> None:
        """Append to this opening's text file, or write another whole file."""
        if frame.is_empty():
            return
        self._check_claim()
        rows = self._rows.columns(frame, None)
        if self._rows.format in _APPENDED:
            self._append(rows)
            return
        self._put(self._next_rows_file(), self._rows.encoded(rows))

    def close(self) -> None:
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
        foreign = sorted(name for name in self._disk.list("") if is_data(name))
        if foreign:
            raise SinkError(
                f"{self._where} has files that no sink wrote ({foreign[0]}): in one directory nothing would distinguish them from its output.\n"
                f"Choose an empty directory, or move them away."
            )
        self._writer.write(MARK_NAME, self._rows.mark.to_json())

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.held()

    def _put(self, name: str, data: bytes) -> None:
        """Make a file appear, durably; `FencedError` if another writer has taken the directory over."""
        if self._claim is None:
            self._writer.write(name, data)
            return
        try:
            self._writer.write(name, data, temp_directory=self._claim.directory, over=False)
        except (FileNotFoundError, FileExistsError) as error:
            self._check_claim()
            raise SinkError(
                f"{self._where}/{name} could not be written: another process writes to this directory at the same time. Let only one run of "
                "the pipeline write there."
            ) from error

    def _check_later(self, *, discard: bool = False) -> None:
        """Find later epochs than those of the writer's state. They are an error, unless they are set aside."""
        after = self._stream.resumes_after
        if after is None or (self._stream.discard_later and not discard):
            return
        epochs = {name: int(found[1]) for name in self._disk.list("") if (found := EPOCH_NAME.fullmatch(name))}
        later = {name: epoch for name, epoch in epochs.items() if epoch > after}
        if not later:
            return
        if not discard:
            raise later_output(self._where, self._stream, list(later.values()))
        place = free_name(self._disk, DISCARDED_PREFIX)
        self._disk.make_dirs(place)
        for name in later:
            self._discard(name, place)
        self._disk.fsync_dir(place)
        self._disk.fsync_dir("")
        extra = {"step": self._stream.step, "epochs": sorted(later.values()), "to": f"{self._where}/{place}"}
        log.warning("later output set aside", extra=extra)

    def _discard(self, name: str, place: str) -> None:
        """Move an epoch, and give its files an ending that no pattern for output finds."""
        if name.endswith(f".{self._rows.format}"):
            self._disk.rename(name, f"{place}/{name}{DISCARDED_ENDING}")
            return
        self._disk.rename(name, f"{place}/{name}")
        for part in self._disk.list(f"{place}/{name}"):
            self._disk.rename(f"{place}/{name}/{part}", f"{place}/{name}/{part}{DISCARDED_ENDING}")
        self._disk.fsync_dir(f"{place}/{name}")

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
                f"It is the output of another run. Choose another directory, or start over with --fresh, which sets the state and this "
                f"directory aside. Nothing was overwritten."
            )
        self._disk.fsync_dir("")  # its writer may have been stopped before the name was durable

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


DAMAGED_PREFIX: Final = "damaged-"
"""Begins the names of directories with dead letters that were set aside."""


class DeadLetterSink(FileSink):
    """Writes dead letters, which stop no pipeline: what is damaged is moved to `damaged-<number>/`, logged, and written again."""

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        try:
            super().release(epoch, frame)
        except (SinkError, DamagedError) as error:
            there = self._there(epoch)
            if there is None:
                raise
            self._set_aside(there, error)
            super().release(epoch, frame)

    def _mark(self) -> None:
        try:
            super()._mark()
        except (SinkError, DamagedError) as error:
            written = [name for name in self._disk.list("") if name.startswith((EPOCH_PREFIX, ROWS_PREFIX))]
            # The letters beside a mark that cannot be read are still letters; those of another stream are not.
            self._set_aside([MARK_NAME, *(written if self._is_readable() else [])], error)
            self._writer.write(MARK_NAME, self._rows.mark.to_json())

    def _is_readable(self) -> bool:
        try:
            read_mark(self._disk.read(MARK_NAME), where=self._where)
        except (FileNotFoundError, SinkError, DamagedError):
            return False
        return True

    def _set_aside(self, names: Sequence[str], problem: Exception) -> None:
        place = free_name(self._disk, DAMAGED_PREFIX)
        self._disk.make_dirs(place)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._disk.rename(name, f"{place}/{name.replace('/', '-')}")
        self._disk.fsync_dir(place)
        self._disk.fsync_dir("")
        where = f"{self._where}/{place}"
        log.warning("dead letters damaged", extra={"problem": str(problem), "files": list(names), "set_aside": where})
