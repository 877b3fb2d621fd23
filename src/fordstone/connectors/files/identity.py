"""Which file is which partition, although files are renamed, replaced and truncated by log rotation.

A partition is the file that its rows came from. Its name is the path under which the file was first found. With the position, a cut
holds a mark of the file (`bytes.Mark`). A file with another mark under a known name is another partition, `<name>~2`; the old one goes on
under the path where its file is found.

Nothing is assumed of a file of which nothing has been read: it is what has its name. A file is found again by its inode and time of
creation. Another file is taken for a copy of it only if it has all the bytes that were read, and only under the old name, or if
the old file was truncated (`copytruncate`) or not read to its end: of a file that was, and is gone, no rest is looked for.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fordstone.connectors.files.bytes import PACKED_SUFFIXES, Mark, opened, shrank, tail_hash, unreadable
from fordstone.connectors.files.series import rotated_from
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import GoneError, ReplacedError, SourceError
from fordstone.plan.ids import PartitionId

log = logging.getLogger(__name__)

COPY_SECONDS: Final = 10
"""A copy that is being made has been written to within this time."""
_NUMBERED: Final = re.compile(r"(?P<name>.+)~\d+")


class Whereabouts:
    """Where the file of each partition is. Used by all threads that read a source."""

    def __init__(self, root: Path, *, bounded: bool) -> None:
        self.root = root
        self._bounded = bounded
        self._lock = threading.RLock()
        self._names: dict[str, str] = {}
        """Of known partitions: the path below the root."""
        self._marks: dict[str, Mark] = {}
        self._compared: dict[str, tuple[Mark, int, int]] = {}
        """Marks that were found in the files under the partitions' paths, and the size and time of the files then."""
        self._listed: Sequence[str] = ()
        self._finished: set[str] = set()
        """Partitions that had been read to their end: nothing is missed if their files are gone."""
        self._lost: set[str] = set()
        """Partitions whose files were found nowhere: they are not searched for again."""

        self._packed: set[tuple[str, int | None]] = set()
        """Compressed files, by name and inode, whose rows were read before they were compressed."""

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Take in what cuts say of partitions. A mark that is further on replaces an older one."""
        with self._lock:
            for name, cut in cuts.items():
                self._names.setdefault(name, self._named(name))
                if cut.idle or cut.done:
                    self._finished.add(name)
                mark = Mark.parse(cut.identity)
                if mark is not None and mark.offset >= (known.offset if (known := self._marks.get(name)) else 0):
                    self._marks[name] = mark

    def marked(self, partition: PartitionId, fd: int, offset: int | None) -> Mark:
        """Return the mark of a file that is open as this partition, and remember it unless one further on is known."""
        looks = os.fstat(fd)
        mark = Mark.of(fd, offset, self._marks.get(partition))
        with self._lock:
            self._names.setdefault(partition, self._named(partition))
            known = self._marks.get(partition)
            if known is None or mark.offset >= known.offset:
                self._marks[partition] = mark
                self._compared[partition] = (mark, looks.st_size, looks.st_mtime_ns)
        return mark

    def tracked(self, partition: PartitionId) -> TrackedFile:
        return TrackedFile(self, partition)

    def mark(self, partition: PartitionId) -> Mark | None:
        return self._marks.get(partition)

    def name(self, partition: PartitionId) -> str:
        """The path of a partition below the root, where it was last found."""
        return self._names.get(partition) or self._named(partition)

    def path(self, partition: PartitionId) -> Path:
        """Find the file of a partition. `ReplacedError` if another file has its name, `GoneError` if none has."""
        with self._lock:
            here, mark = self.root / self.name(partition), self._marks.get(partition)
            if mark is None:
                return here
            try:
                looks: os.stat_result | None = here.stat()
            except OSError:
                looks = None
            if looks is not None and looks.st_ino == mark.inode and looks.st_size >= mark.offset:
                compared = (mark, looks.st_size, looks.st_mtime_ns)
                if self._compared.get(partition) == compared or mark.is_at(here):
                    self._compared[partition] = compared
                    return here
            path = self._search(here, partition, mark)
            if path is not None:
                self._names[partition] = str(path.relative_to(self.root))
                with opened(path) as fd:  # the inode may be another one from now on
                    self.marked(partition, fd, None if mark.size < 0 else mark.offset)
                return path
            packed = (path for path in _files_in(here.parent) if path.suffix in PACKED_SUFFIXES)
            if looks is None or self._is_of_another(here, partition) or any(map(mark.is_packed_in, packed)):
                raise unreadable(here, FileNotFoundError())
        raise _replaced(here, looks, mark)

    def assign(self, names: Sequence[str]) -> list[PartitionId]:
        """Return the partitions whose files there are: those that are known, wherever they are now, and new ones for other files."""
        with self._lock:
            self._listed, listed = names, set(names)
            owners: dict[str, str] = {}
            missed = []  # opening them is the error
            for partition in sorted(self._names.keys() - self._lost, key=lambda one: (one not in self._marks, one)):
                try:
                    path = str(self.path(PartitionId(partition)).relative_to(self.root))
                except GoneError as error:
                    if partition not in self._finished and self._has_rest(partition, error):
                        missed.append(partition)
                    else:
                        self._lost.add(partition)
                        if partition not in self._finished:
                            log.warning(
                                "file is gone that was read to its end when it was last looked at",
                                extra={"file": partition, "position": self._marks[partition].offset},
                            )
                    continue
                if partition in self._marks or path in listed:
                    owners.setdefault(path, partition)
            for name in names:
                if name not in owners and not self._is_being_copied(name, owners) and not self._was_read(name):
                    owners[name] = self._new_id(name)
                    self._names[owners[name]] = name
            return [PartitionId(name) for name in (*(owner for _, owner in sorted(owners.items())), *sorted(missed))]

    def _has_rest(self, partition: str, error: GoneError) -> bool:
        """Whether rows of a partition that is nowhere may not have been read: it was replaced, or longer when it was last looked at."""
        mark = self._marks[partition]
        return isinstance(error, ReplacedError) or mark.size > mark.offset

    def _is_being_copied(self, name: str, owners: Mapping[str, str]) -> bool:
        """Whether a rotated file was just written, and ends as the one that it is rotated from has bytes at that place.

        That one will be truncated when the copy is whole. If it is not, this is a file of its own, which is read after a moment;
        bounded input is all there at once.
        """
        base = rotated_from(name)
        if self._bounded or base is None or base not in owners:
            return False
        try:
            looks = (self.root / name).stat()
            if looks.st_size == 0:
                return True
            if abs(time.time() - looks.st_ctime) >= COPY_SECONDS:
                return False
            with opened(self.root / name) as copy, opened(self.root / base) as origin:
                return tail_hash(copy, looks.st_size) == tail_hash(origin, looks.st_size)
        except (OSError, SourceError):
            return False

    def _was_read(self, name: str) -> bool:
        """Whether a compressed file is what became of a rotated one that was read to its end. Compressed input that is bounded is read."""
        if self._bounded or rotated_from(name) is None or not name.endswith(PACKED_SUFFIXES):
            return False
        path = self.root / name
        looks = (name, _inode(path))
        if looks not in self._packed and any(mark.is_packed_in(path) for mark in self._marks.values()):
            self._packed.add(looks)
        return looks in self._packed

    def _named(self, partition: str) -> str:
        """The path that a partition had when it was found."""
        numbered = _NUMBERED.fullmatch(partition)
        return partition if numbered is None or (self.root / partition).exists() else numbered["name"]

    def _new_id(self, name: str) -> str:
        number, found = 2, name
        while found in self._names:
            number, found = number + 1, f"{name}~{number}"
        return found

    def _search(self, here: Path, partition: str, mark: Mark) -> Path | None:
        """Where the file of a partition is now: by its inode, else a copy of it under its old name, else one under another name."""
        paths = list(dict.fromkeys([*_files_in(here.parent), *(self.root / name for name in self._listed)]))
        inodes = {path: _inode(path) for path in paths}
        for path in paths:
            if inodes[path] == mark.inode and mark.is_at(path):
                return path
        if mark.is_copied_to(here):
            return here
        left = not mark.is_to_the_end and partition not in self._finished
        if not (left or mark.is_of(here)):
            return None
        others: dict[int, list[Mark]] = {}
        for name, other in self._marks.items():
            if name != partition:
                others.setdefault(other.inode, []).append(other)
        for path in paths:
            taken = any(other.is_at(path) for other in others.get(inodes[path] or 0, ()))
            if path != here and not taken and mark.is_copied_to(path):
                return path
        return None

    def _is_of_another(self, here: Path, partition: str) -> bool:
        """Whether what has the name of a partition is the file of another one, or a copy of it: rotation has removed the file."""
        others = (mark for name, mark in self._marks.items() if name != partition)
        return any(mark.is_at(here) or mark.is_copied_to(here) for mark in others)


class TrackedFile:
    """The open file of one partition, which may be renamed, replaced or truncated. Used by one thread."""

    def __init__(self, where: Whereabouts, partition: PartitionId) -> None:
        self._where = where
        self._partition = partition
        self._looked: tuple[int, ...] = ()
        """The position, and what the file looked like when it was last compared."""

    def mark(self, fd: int, position: int) -> Mark:
        """As `bytes.Tracked` says."""
        return self._where.marked(self._partition, fd, position)

    def still_there(self, fd: int, position: int) -> Path | None:
        """As `bytes.Tracked` says. An unchanged file costs two `stat`."""
        mine, mark = os.fstat(fd), self._where.mark(self._partition)
        here = self._where.root / self._where.name(self._partition)
        try:
            named = here.stat()
        except OSError:
            named = None
        looks = (position, mine.st_ino, mine.st_size, mine.st_mtime_ns)
        same = named is not None and (named.st_ino, named.st_dev) == (mine.st_ino, mine.st_dev)
        if same and looks == self._looked:
            return None
        if same and mine.st_size >= position and (mark is None or mark.is_on(fd)):
            self._looked = looks
            if position >= (1 if mark is None else mark.offset):
                self.mark(fd, position)
            return None
        if mark is None and position > 0 and mine.st_size >= position:
            self.mark(fd, position)
        elif mark is None and (named is None or same):
            return None  # nothing was read of it yet
        return self._where.path(self._partition)


def _files_in(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return sorted(directory / entry.name for entry in entries if entry.is_file())
    except OSError:
        return []


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _replaced(here: Path, looks: os.stat_result, mark: Mark) -> ReplacedError:
    if looks.st_ino == mark.inode and looks.st_size < mark.offset:
        text = str(shrank(here, looks.st_size, mark.offset)).partition("\n")[0]
    else:
        text = (
            f"{here} is another file than the one that was read up to byte {mark.offset}: its bytes before that are others "
            f"(inode {looks.st_ino} with {looks.st_size} bytes now, inode {mark.inode} then)."
        )
    return ReplacedError(
        f"{text}\nThe old content was looked for in {here.parent}, under other names too, and is not there: its rest cannot be read. "
        "Bring it back under any name in that directory, or start with an empty state directory."
    )
