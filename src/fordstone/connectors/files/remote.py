"""Files at a URL (`s3://`, `memory://`, any that fsspec opens): a source of files that never change, and a sink.

Source: a file is complete when it is listed, and is a partition that ends. The readers are those of local files: they fetch text in ranges,
and have a copy on the local disk of what is compressed, Parquet or Arrow. A file that was read to its end is not fetched again.

Sink: as `files.sink`, an epoch is one file, written in one step as far as the store has one (`FsspecRemote.put`), or a directory of parts
that several processes have written below `_staged/`.

Invariants: a file that was read and is another one now is an error; an epoch never changes.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import (
    Chunk,
    Part,
    PartedSink,
    PartWriter,
    Reader,
    ReadPlan,
    SinkStream,
    SourceOptions,
    judge_claim,
    later_output,
    owned_by_newer,
)
from fordstone.connectors.compare import same_rows
from fordstone.connectors.files.bytes import FileBytes, Tracked
from fordstone.connectors.files.columns import SAMPLE_BYTES
from fordstone.connectors.files.rows import EPOCH_PREFIX, MARK_NAME, PART_PREFIX, ROWS_PREFIX, SinkRows, read_mark
from fordstone.connectors.files.settings import FileSettings, is_data
from fordstone.connectors.files.sink import (
    DAMAGED_PREFIX,
    DISCARDED_ENDING,
    DISCARDED_PREFIX,
    EPOCH_DIGITS,
    EPOCH_NAME,
    STAGED_ENDING,
    epoch_name,
    part_name,
)
from fordstone.connectors.files.source import FileSource, pattern_of
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import GoneError, ReplacedError, SinkError, SourceError, StorageError
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.claim import SinkWriter, Take
from fordstone.protocol.partitions import SeriesPlace
from fordstone.storage.remote import FsspecRemote, RemoteFile, open_filesystem

log = logging.getLogger(__name__)


def open_url(url: str, *, commits: bool = False) -> FsspecRemote:
    """Open what is below a URL; `commits`: to write files that must appear whole."""
    return FsspecRemote(*open_filesystem(url, kind="files", commits=commits))


class RemoteFileSource(FileSource):
    """The files that match the pattern of a URL."""

    def __init__(self, settings: FileSettings, options: SourceOptions) -> None:
        super().__init__(settings, options)
        parts = settings.path.split("/")
        fixed = next((place for place, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts) - 1)
        self._url, self._below = "/".join(parts[:fixed]), "/".join(parts[fixed:])
        self._remote = open_url(self._url)
        self._files: dict[str, RemoteFile] = {}
        self._read_up_to: dict[str, PartitionCut] = {}

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        self._read_up_to |= cuts

    def series(self, partition: PartitionId) -> Sequence[SeriesPlace]:
        """None is needed: a file ends."""
        del partition
        return ()

    def identity(self, partition: PartitionId, position: Position) -> str:
        return self._file(partition).identity if position > 0 else ""

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        """Open a file when it is first read from."""
        return RemoteReader(self, partition, position, with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """By newlines; a file of which a copy is needed is read."""
        if self.has_ended(partition, position):
            return ReadPlan(position=position, ended=True)
        file, path = self._file(partition), Path(partition)
        if not self._is_plain_text(path):
            return super(FileSource, self).plan_read(partition, position, rows_max)
        return self._plan_lines(partition, path, self._format_of(path), file.size, position, max(1, rows_max))

    def plan_rest(self, partition: PartitionId, position: Position) -> Position:
        del partition
        return position

    def has_ended(self, partition: PartitionId, position: Position) -> bool:
        """Whether an earlier run read the file to its end, which is here. `ReplacedError` if it is another one now."""
        cut = self._read_up_to.get(partition)
        if cut is None or not cut.identity or position == 0:
            return False
        if cut.identity != (now := self._file(partition).identity):
            raise ReplacedError(
                f"{self._url}/{partition} is another file than the one that was read ({now} now, {cut.identity} then).\n"
                "Files at a URL must not change: give new content a new name."
            )
        return cut.done and cut.position == position

    def fetched(
        self, partition: PartitionId, position: Position, *, with_positions: bool
    ) -> tuple[Reader, tempfile.TemporaryDirectory[str] | None]:
        """Open a file, or a copy in a directory that the caller removes."""
        path = Path(partition)
        if self._is_plain_text(path):
            return self._open_at(path, position, with_positions=with_positions), None
        directory = tempfile.TemporaryDirectory(prefix="fordstone-")
        path = Path(directory.name) / path.name
        try:
            self._remote.get_file(partition, path)
            return self._open_at(path, position, with_positions=with_positions), directory
        except FileNotFoundError:
            directory.cleanup()
            raise self._gone(partition) from None
        except BaseException:
            directory.cleanup()
            raise

    @contextmanager
    def sample(self, partition: PartitionId) -> Iterator[Path]:
        """A copy of the file, or of its beginning if it is text."""
        with tempfile.TemporaryDirectory(prefix="fordstone-") as directory:
            path = Path(directory) / Path(partition).name
            try:
                if not self._is_plain_text(Path(partition)):
                    self._remote.get_file(partition, path)
                else:
                    length = min(self._file(partition).size, SAMPLE_BYTES)
                    path.write_bytes(self._remote.get_range(partition, 0, length) if length else b"")
            except FileNotFoundError:
                raise self._gone(partition) from None
            yield path

    def _bytes(self, path: Path, tracked: Tracked | None = None) -> FileBytes:
        if path.is_absolute():
            return super()._bytes(path, tracked)
        return RemoteBytes(self._remote, self._file(PartitionId(str(path))), str(path))

    def _called(self, partition: PartitionId) -> str:
        return f"{self._url}/{partition}"

    def _gone(self, partition: str) -> GoneError:
        return GoneError(f"{self._url}/{partition} is gone, and was not read to its end. Bring it back.")

    def empty(self) -> pl.DataFrame:
        return self._options.schema.empty()

    def _grows(self) -> bool:
        return False

    def _matching(self) -> list[str]:
        pattern = pattern_of(self._below)
        try:
            found = {
                name: file
                for name, file in self._remote.walk("**" in self._below or "/" in self._below).items()
                if pattern.fullmatch(name) and not name.rpartition("/")[2].startswith((".", "_"))
            }
        except StorageError as error:
            raise SourceError(str(error)) from error
        self._files |= found
        return list(found)

    def _assigned(self, names: list[str]) -> list[PartitionId]:
        return [PartitionId(name) for name in names]

    def _sizes(self) -> dict[str, int]:
        return {name: file.size for name, file in self._files.items()}

    def _file(self, partition: PartitionId) -> RemoteFile:
        if partition not in self._files:
            try:
                self._files[partition] = self._remote.look(partition)
            except FileNotFoundError:
                raise self._gone(partition) from None
        return self._files[partition]


class RemoteBytes(FileBytes):
    """The bytes of one file at a URL, fetched in ranges."""

    def __init__(self, remote: FsspecRemote, file: RemoteFile, name: str) -> None:
        self._remote = remote
        self._file = file
        self._name = name

    def at(self, offset: int, length: int) -> bytes:
        length = min(length, self._file.size - offset)
        return self._remote.get_range(self._name, offset, length) if length > 0 else b""

    def size(self) -> int:
        return self._file.size

    def identity(self, position: int) -> str:
        return self._file.identity if position > 0 else ""

    def check(self, position: int) -> None:
        """It does not change: `RemoteFileSource` compares what it is when it is opened."""

    def close(self) -> None:
        """Nothing is open."""


class RemoteReader(Reader):
    """Reads one file, which is opened with the first read and closed at the end."""

    def __init__(
        self, source: RemoteFileSource, partition: PartitionId, position: Position, *, with_positions: bool
    ) -> None:
        self._source = source
        self._partition = partition
        self._position = position
        self._with_positions = with_positions
        self._copy: tuple[Reader, tempfile.TemporaryDirectory[str] | None] | None = None
        self._ended = source.has_ended(partition, position)

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        if self._ended:
            return Chunk(frame=self._source.empty(), position=self._position, ended=True)
        if self._copy is None:
            self._copy = self._source.fetched(self._partition, self._position, with_positions=self._with_positions)
        chunk = self._copy[0].read(rows_max, until)
        if chunk is not None:
            self._position, self._ended = chunk.position, chunk.ended
            if chunk.ended:
                self.close()
        return chunk

    def identity(self) -> str:
        return self._source.identity(self._partition, self._position)

    def close(self) -> None:
        if self._copy is not None:
            reader, directory = self._copy
            reader.close()
            if directory is not None:
                directory.cleanup()
            self._copy = None


WRITER_NAME: Final = "_writer.json"
STAGED_NAME: Final = "_staged"
_STAGED = re.compile(rf"(\d{{{EPOCH_DIGITS}}})-(.+?)-{PART_PREFIX}.*{re.escape(STAGED_ENDING)}")


def _staged(epoch: int, attempt: str, name: str) -> str:
    """Where a part is until its epoch is released. No pattern for output finds it."""
    return f"{STAGED_NAME}/{epoch:0{EPOCH_DIGITS}d}-{attempt}-{name}{STAGED_ENDING}"


def open_remote_sink(settings: FileSettings, stream: SinkStream) -> PartedSink:
    """Open what is at the URL, and begin it if there is nothing."""
    kind = RemoteDeadLetterSink if settings.damaged == "set_aside" else RemoteFileSink
    return kind(settings, stream)


def open_remote_parts(settings: FileSettings, stream: SinkStream) -> PartWriter:
    """Open a writer for a URL that its sink has opened, here or on another machine."""
    rows, remote = SinkRows(settings, stream), open_url(settings.path)
    try:
        rows.check_mark(remote.get(MARK_NAME))
    except FileNotFoundError as error:
        raise SinkError(
            f"{settings.path} has no {MARK_NAME} here, though its sink is open: this machine sees another store.\n"
            "Parts are written by several machines. Give all of them the same settings for the URL."
        ) from error
    return RemotePartWriter(rows, remote)


class RemotePartWriter(PartWriter):
    """Writes parts below `_staged/`."""

    def __init__(self, rows: SinkRows, remote: FsspecRemote) -> None:
        self._rows = rows
        self._remote = remote

    def write(self, epoch: int, attempt: str, number: int, frame: pl.DataFrame) -> Part:
        """Write one part, whole, or nothing. Of two tries at the same part the later one stays; no rows, no file."""
        part = Part(name=f"{part_name(attempt, number)}.{self._rows.format}", rows=frame.height)
        if not frame.is_empty():
            data = self._rows.encoded(self._rows.columns(frame, epoch))
            self._remote.put(_staged(epoch, attempt, part.name), data)
        return part


class RemoteFileSink(PartedSink):
    """Writes one stream below one URL.

    It keeps its writer in `_writer.json`, and looks there before each file. A store of objects does not make the two one step: a
    file that is on its way while another machine takes over may still arrive (`FilesKind.fences`). Nor does it rename a directory: parts
    of an epoch appear in `epoch-<number>/` one after the other. Their names are sealed with the epoch, so what a crash leaves out follows.
    """

    def __init__(self, settings: FileSettings, stream: SinkStream) -> None:
        self._where = settings.path
        self._rows = SinkRows(settings, stream)
        self._stream = stream
        self._remote = open_url(settings.path, commits=True)
        self._rows_number: int | None = None
        self._rows_files = 0
        self._mark()
        if stream.owner:
            self._claim()
            for folder in ("", STAGED_NAME):
                self._remote.remove_leftovers(folder)
        self._sweep(keep=stream.sealed)
        self._check_later(discard=stream.discard_later)

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Write the epoch's file, unless the epoch is there; one without rows has none."""
        self._check_claim()
        name = f"{epoch_name(epoch)}.{self._rows.format}"
        would = [(name, self._rows.encoded(self._rows.columns(frame, epoch)))] if frame.height else []
        if there := self._there(epoch):
            self._compare(epoch, there, would)
        elif would and not self._remote.create(*would[0]):
            # By a writer that has taken over meanwhile, or by the former one, from which this one has taken over.
            self._check_claim()
            self._compare(epoch, [name], would)

    def takes_parts(self) -> bool:
        return self._remote.is_shared

    def release_parts(self, epoch: int, attempt: str, parts: Sequence[Part]) -> None:
        """Move the staged parts into the epoch's directory, as far as they are not there; an epoch without rows has none."""
        self._check_claim()
        staged = {f"{epoch_name(epoch)}/{part.name}": _staged(epoch, attempt, part.name) for part in parts if part.rows}
        there = self._there(epoch)
        if set(there) <= staged.keys():
            for name in sorted(staged.keys() - set(there)):
                self._check_claim()
                self._move(epoch, staged[name], name)
        else:
            self._compare(epoch, there, [(name, self._part(epoch, staged[name])) for name in sorted(staged)])
        with suppress(StorageError):  # the epoch is out; what is left over goes when the sink is next opened
            self._sweep(epoch)

    def _move(self, epoch: int, staged: str, name: str) -> None:
        try:
            self._remote.move(staged, name)
        except FileNotFoundError as error:
            if not self._remote.exists(name):
                raise self._gone(epoch, staged) from error

    def _part(self, epoch: int, staged: str) -> bytes:
        try:
            return self._remote.get(staged)
        except FileNotFoundError as error:
            raise self._gone(epoch, staged) from error

    def _gone(self, epoch: int, staged: str) -> SinkError:
        self._check_claim()  # another writer that takes over removes what is staged
        return SinkError(
            f"{self._where}/{staged} is gone, though it was written. Epoch {epoch} is not complete.\n"
            "Was it removed by hand, or by a rule of the store for old files? Restore it."
        )

    def _sweep(self, epoch: int | None = None, *, keep: str | None = None) -> None:
        """Remove what is staged, all or of an epoch; but not of the attempt `keep`."""
        for name in self._remote.sizes(STAGED_NAME):
            found = _STAGED.fullmatch(name)
            if found and epoch in {None, int(found[1])} and not (keep is not None and found[2] == keep):
                self._remote.remove(f"{STAGED_NAME}/{name}")

    def _there(self, epoch: int) -> list[str]:
        """The files of an epoch that are there, in order."""
        name = epoch_name(epoch)
        whole = f"{name}.{self._rows.format}"
        if self._remote.exists(whole):
            return [whole]
        return sorted(f"{name}/{part}" for part in self._remote.sizes(name) if part.startswith(PART_PREFIX))

    def _compare(self, epoch: int, there: Sequence[str], would: Sequence[tuple[str, bytes]]) -> None:
        """What is there must be what would have been written, in however many files."""
        found = [(name, self._remote.get(name)) for name in there]
        same = [data for _, data in found] == [data for _, data in would]
        if not would or not (same or same_rows(self._rows.decoded(found), self._rows.decoded(would))):
            raise SinkError(
                f"{self._where} already has epoch {epoch} ({there[0]}), with other rows than are released now.\n"
                f"It is the output of another run. Choose another place, or move this one away; nothing was overwritten."
            )

    def write(self, frame: pl.DataFrame) -> None:
        """Write another file: files at a URL cannot be appended to."""
        if frame.is_empty():
            return
        self._check_claim()
        if self._rows_number is None:
            taken = [int(name.split("-")[1]) for name in self._remote.sizes("") if name.startswith(ROWS_PREFIX)]
            self._rows_number = max(taken, default=0) + 1
        self._rows_files += 1
        name = f"{ROWS_PREFIX}{self._rows_number:06d}-{self._rows_files:08d}.{self._rows.format}"
        self._remote.put(name, self._rows.encoded(self._rows.columns(frame, None)))

    def close(self) -> None:
        """Nothing is open."""

    def _mark(self) -> None:
        names = self._remote.sizes("")
        if MARK_NAME in names:
            self._rows.check_mark(self._remote.get(MARK_NAME))
            return
        others = sorted(name for name in names if is_data(name))
        if others:
            raise SinkError(
                f"{self._where} has files ({others[0]}) but no {MARK_NAME}. Restore it, or choose another place."
            )
        self._remote.put(MARK_NAME, self._rows.mark.to_json())

    def _claim(self) -> None:
        there = self._writer()
        decision = judge_claim(self._where, self._stream, [] if there is None else [there], self._check_later)
        if isinstance(decision, Take):
            # Before it is taken: a run that cannot go on must not stop one that can.
            self._check_later()
            self._remote.put(WRITER_NAME, msgspec.json.encode(self._stream.writer))

    def _check_claim(self) -> None:
        if self._stream.owner and (there := self._writer()) != self._stream.writer:
            raise owned_by_newer(self._where, self._stream, there)

    def _writer(self) -> SinkWriter | None:
        try:
            return msgspec.json.decode(self._remote.get(WRITER_NAME), type=SinkWriter)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _check_later(self, *, discard: bool = False) -> None:
        """Find later epochs than those of the writer's state. They are an error, unless they are set aside."""
        after = self._stream.resumes_after
        if after is None or (self._stream.discard_later and not discard):
            return
        later = {name: epoch for name, epoch in self._epochs().items() if epoch > after}
        if not later:
            return
        if not discard:
            raise later_output(self._where, self._stream, list(later.values()))
        for name in sorted(later):
            self._set_aside(name, f"{DISCARDED_PREFIX}{after + 1}/{name}{DISCARDED_ENDING}")
        log.warning("later output set aside", extra={"step": self._stream.step, "epochs": sorted(set(later.values()))})

    def _epochs(self) -> dict[str, int]:
        """The files of epochs with the epochs' numbers."""
        whole = {name: int(found[1]) for name in self._remote.sizes("") if (found := EPOCH_NAME.fullmatch(name))}
        parted = {name: int(found[1]) for name in self._remote.folders("") if (found := EPOCH_NAME.fullmatch(name))}
        after = self._stream.resumes_after or 0
        return whole | {
            f"{folder}/{name}": epoch
            for folder, epoch in parted.items()
            if epoch > after
            for name in self._remote.sizes(folder)
        }

    def _set_aside(self, name: str, to: str) -> None:
        self._remote.put(to, self._remote.get(name))
        self._remote.remove(name)


class RemoteDeadLetterSink(RemoteFileSink):
    """Writes dead letters, which stop no pipeline: as `files.sink.DeadLetterSink`, at a URL."""

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        try:
            super().release(epoch, frame)
        except SinkError as error:
            there = self._there(epoch)
            if not there:
                raise
            self._set_damaged_aside(there, error)
            super().release(epoch, frame)

    def _mark(self) -> None:
        try:
            super()._mark()
        except SinkError as error:
            found = self._remote.sizes("")
            written = [name for name in found if name.startswith((EPOCH_PREFIX, ROWS_PREFIX))]
            # The letters beside a mark that cannot be read are still letters; those of another stream are not.
            marked = [MARK_NAME] if MARK_NAME in found else []
            self._set_damaged_aside([*marked, *(written if self._is_readable() else [])], error)
            self._remote.put(MARK_NAME, self._rows.mark.to_json())

    def _is_readable(self) -> bool:
        try:
            read_mark(self._remote.get(MARK_NAME), where=self._where)
        except (FileNotFoundError, SinkError):
            return False
        return True

    def _set_damaged_aside(self, names: Sequence[str], problem: Exception) -> None:
        place = next(name for n in count(1) if not self._remote.sizes(name := f"{DAMAGED_PREFIX}{n}"))
        for name in names:
            self._set_aside(name, f"{place}/{name.replace('/', '-')}")
        where = f"{self._where}/{place}"
        log.warning("dead letters damaged", extra={"problem": str(problem), "files": list(names), "set_aside": where})


def first_remote_output(settings: FileSettings) -> str | None:
    """The first file of rows at the URL of a sink; None if there is none."""
    remote = open_url(settings.path)
    names = sorted([*remote.sizes(""), *remote.folders("")])
    return next((f"{settings.path}/{name}" for name in names if name.startswith((EPOCH_PREFIX, ROWS_PREFIX))), None)
