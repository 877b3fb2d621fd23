"""A disk in memory that forgets what was not made durable.

Stands in for `OsDisk` in simulation. A crash keeps what was synced and decides the rest by a seeded random choice, as
an unkind file system would: unsynced bytes are lost, torn, zeroed, whole, or whole but for one sector; a name that was made, moved or removed
without a sync of its directory is as it was or as it became, each change on its own, in any order.

Invariants: what `fsync` and `fsync_dir` have returned for survives every crash; after a failed sync everything is
refused until the crash. New directories are durable at once, as `Disk.make_dirs` promises; moved or removed ones are not.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, NoReturn, get_args

from fordstone.errors import DamagedError, StorageError
from fordstone.storage.disk import Data, Disk, FatalStorageError

Change = Literal["create", "append", "truncate", "fsync", "rename", "fsync_dir", "remove", "remove_dir"]
Operation = Change | Literal["read", "make_dirs"]
Fault = Literal["full", "read-only", "sync", "bad-sector"]
SECTOR_BYTES: Final = 64
"""Smaller than that of any disk: the files of a simulation are small."""
PIECE_BYTES: Final = 200
"""Smaller than those of a real disk, too: lines are cut by their ends."""
CHANGING: Final[tuple[Change, ...]] = get_args(Change)


class PowerCut(BaseException):
    """The machine went off in the middle of an operation. Nothing may catch this but the test."""


@dataclass(slots=True, eq=False)
class _File:
    """An inode: what readers see, and what is durable of it."""

    data: bytes
    durable: bytes | None = None


@dataclass(slots=True, eq=False)
class _Directory:
    """What readers see, what is durable, and the changes between the two, which a crash keeps or loses one by one."""

    names: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    changes: list[_Entries] = field(default_factory=list)

    def change(self, *entries: tuple[str, _Node | None]) -> None:
        _apply(self.names, entries)
        self.changes.append(entries)

    def make(self, name: str) -> _Directory:
        """A directory below this one, durable whatever becomes of earlier changes of its name."""
        made = self.names[name] = self.durable[name] = _Directory()
        self.changes = [tuple(entry for entry in change if entry[0] != name) for change in self.changes]
        return made


_Node = _File | _Directory
_Entries = tuple[tuple[str, _Node | None], ...]
"""These names now stand for these files or directories, or for none."""


class MemoryDisk(Disk):
    """Counts what it does, fails on demand, and can be switched off."""

    def __init__(self, *, room_bytes: int | None = None) -> None:
        """`room_bytes`: how much fits before the disk is full; may be changed at any time. None: no bound."""
        self.room_bytes = room_bytes
        self.counts: Counter[str] = Counter()
        """How often each operation was called."""
        self.changes = 0
        """How many changing operations (`CHANGING`) were called since the last crash."""
        self.cut_after: int | None = None
        """After how many changes since the last crash the power goes: the next one raises `PowerCut`."""
        self.failures = 0
        """How many planned faults have happened."""
        self._root = _Directory()
        self._planned: dict[str, list[tuple[int, Fault]]] = {}
        self._used_bytes = 0
        self._off: str | None = None
        self._mutex = threading.Lock()

    def create(self, path: str, data: Data) -> None:
        with self._operation("create", path) as fault:
            directory, name = self._find_directory(path)
            if name in directory.names:
                raise FileExistsError(errno.EEXIST, "the file exists", path)
            kept, full = self._fit(bytes(data), fault)
            directory.change((name, _File(kept)))
            if full:
                raise _full(path)

    def append(self, path: str, data: Data) -> None:
        with self._operation("append", path) as fault:
            directory, name = self._find_directory(path)
            file = directory.names.get(name)
            if isinstance(file, _Directory):
                raise StorageError(f"could not append to {path}: it is a directory.")
            kept, full = self._fit(bytes(data), fault)
            if file is None:
                directory.change((name, _File(kept)))
            else:
                file.data += kept
            if full:
                raise _full(path)

    def truncate(self, path: str, size_bytes: int) -> None:
        with self._operation("truncate", path):
            file = self._file(path)
            self._used_bytes -= max(0, len(file.data) - size_bytes)
            file.data = file.data[:size_bytes]

    def fsync(self, path: str) -> None:
        with self._operation("fsync", path) as fault:
            file = self._file(path)
            if fault is not None:
                self._fail(path)
            file.durable = file.data

    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        """Move a name. Within a directory it is one change; between two it is two, which a crash may part."""
        with self._operation("rename", old):
            source, old_name = self._find_directory(old)
            target, new_name = self._find_directory(new)
            moved, replaced = source.names.get(old_name), target.names.get(new_name)
            if moved is None:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", old)
            if replaced is not None and not replace:
                raise FileExistsError(errno.EEXIST, "the file exists", new)
            if replaced is not None and replaced is not moved:
                if not (isinstance(replaced, _File) and isinstance(moved, _File)):
                    raise StorageError(f"could not rename {old}: {new} is there, and one of them is a directory.")
                self._used_bytes -= len(replaced.data)
            if source is target:
                source.change((old_name, None), (new_name, moved))
            else:
                target.change((new_name, moved))
                source.change((old_name, None))

    def fsync_dir(self, path: str) -> None:
        with self._operation("fsync_dir", path) as fault:
            directory = self._directory(path)
            if directory is None:
                raise FileNotFoundError(errno.ENOENT, "no such directory", path)
            if fault is not None:
                self._fail(path)
            if directory.changes:
                directory.durable = dict(directory.names)
                directory.changes.clear()

    def read(self, path: str) -> bytes:
        with self._operation("read", path):
            return self._file(path).data

    def read_part(self, path: str, start: int, size_bytes: int) -> bytes:
        return self.read(path)[start : start + size_bytes]

    def read_pieces(self, path: str) -> Iterator[bytes]:
        data = self.read(path)
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]

    def list(self, path: str) -> Sequence[str]:
        with self._mutex:
            directory = self._directory(path)
            return () if directory is None else sorted(directory.names)

    def remove(self, path: str) -> None:
        with self._operation("remove", path):
            if self.exists(path):
                directory, name = self._find_directory(path)
                self._used_bytes -= len(self._file(path).data)
                directory.change((name, None))

    def remove_dir(self, path: str) -> None:
        with self._operation("remove_dir", path):
            found = self._directory(path)
            if found is None:
                return
            if found.names:
                raise StorageError(f"could not remove {path}: the directory is not empty.")
            directory, name = self._find_directory(path)
            directory.change((name, None))

    def exists(self, path: str) -> bool:
        parent, _, name = path.rpartition("/")
        directory = self._directory(parent)
        return not path or (directory is not None and name in directory.names)

    def make_dirs(self, path: str) -> None:
        with self._operation("make_dirs", path):
            here = self._root
            for name in path.split("/") if path else ():
                below = here.names.get(name)
                if isinstance(below, _File):
                    raise StorageError(f"could not create the directory {path}: {name} is a file.")
                here = here.make(name) if below is None else below

    def size(self, path: str) -> int:
        with self._mutex:
            return len(self._file(path).data)

    def crash(self, rng: Random) -> None:
        """Lose power: keep what is durable, and of the rest what `rng` says. The disk works again afterwards."""
        with self._mutex:
            self._used_bytes = 0
            waiting = [self._root]
            while waiting:
                directory = waiting.pop()
                if directory.changes:
                    for change in _surviving(directory.changes, rng):
                        _apply(directory.durable, change)
                    directory.changes.clear()
                    directory.names = dict(directory.durable)
                for node in directory.names.values():
                    if isinstance(node, _Directory):
                        waiting.append(node)
                        continue
                    if node.durable is not node.data:
                        node.data = node.durable = _settle(node, rng)
                    self._used_bytes += len(node.data)
        self.kill()

    def kill(self) -> None:
        """Lose the process but not the power: all that was written is still there, synced or not. It works again afterwards."""
        self._off = None
        self._planned.clear()
        self.cut_after = None
        self.changes = 0

    def fail_next(self, operation: Operation, fault: Fault, *, after: int = 0) -> None:
        """Make an operation fail once: the next one, or the one after that many more.

        `full` writes a part and refuses; `read-only` refuses; `sync` fails a sync, after which all is refused;
        `bad-sector` fails a read.
        """
        self._planned.setdefault(operation, []).append((after, fault))

    def damage(self, path: str, data: bytes) -> None:
        """Replace bytes of a file durably, without any call of the code under test: bit rot, or an attacker."""
        with self._mutex:
            file = self._file(path)
            file.data = file.durable = data

    @contextmanager
    def _operation(self, operation: Operation, path: str) -> Iterator[Fault | None]:
        """Hold the mutex, count the operation, and raise or give the fault that is planned for it."""
        with self._mutex:
            self.counts[operation] += 1
            if self._off is not None and operation != "read":
                raise FatalStorageError(self._off)
            if operation in CHANGING:
                if self.cut_after is not None and self.changes >= self.cut_after:
                    raise PowerCut(f"before {operation} {path}, change {self.changes + 1}")
                self.changes += 1
            fault = self._due(operation)
            if fault == "read-only":
                raise StorageError(
                    f"could not {operation} {path}: the file system is read-only. Nothing was acknowledged."
                )
            if fault == "bad-sector":
                raise DamagedError(f"{path} cannot be read: input/output error.")
            yield fault

    def _due(self, operation: Operation) -> Fault | None:
        planned = self._planned.get(operation)
        if not planned:
            return None
        after, fault = planned[0]
        if after > 0:
            planned[0] = (after - 1, fault)
            return None
        planned.pop(0)
        self.failures += 1
        return fault

    def _fit(self, data: bytes, fault: Fault | None) -> tuple[bytes, bool]:
        """What of the data finds room, and whether that was not all."""
        kept = data[: len(data) // 2] if fault == "full" else data
        if self.room_bytes is not None:
            kept = kept[: max(0, self.room_bytes - self._used_bytes)]
        self._used_bytes += len(kept)
        return kept, fault == "full" or len(kept) < len(data)

    def _fail(self, path: str) -> NoReturn:
        self._off = f"syncing {path} failed: input/output error. What the disk holds is unknown. The process must stop."
        raise FatalStorageError(self._off)

    def _find_directory(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = path.rpartition("/")
        directory = self._directory(parent)
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", parent)
        return directory, name

    def _directory(self, path: str) -> _Directory | None:
        here: _Node | None = self._root
        for name in path.split("/") if path else ():
            here = here.names.get(name) if isinstance(here, _Directory) else None
        return here if isinstance(here, _Directory) else None

    def _file(self, path: str) -> _File:
        directory, name = self._find_directory(path)
        file = directory.names.get(name)
        if not isinstance(file, _File):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return file


def _apply(names: dict[str, _Node], entries: _Entries) -> None:
    for name, node in entries:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _surviving(changes: list[_Entries], rng: Random) -> list[_Entries]:
    """Half the time as a journal would, a first part of the changes; else any of them."""
    if rng.getrandbits(1):
        return changes[: rng.randint(0, len(changes))]
    return [change for change in changes if rng.getrandbits(1)]


def _settle(file: _File, rng: Random) -> bytes:
    """What is left of a file whose last writes were not synced."""
    data, durable = file.data, file.durable or b""
    if len(data) < len(durable) and durable.startswith(data):
        return data if rng.getrandbits(1) else durable
    if not data.startswith(durable) or len(data) == len(durable):
        return durable
    match rng.randrange(4):
        case 0:
            return durable
        case 1:
            return data
        case 2:
            return data[: rng.randint(len(durable), len(data))]
        case _:
            torn = rng.randint(len(durable), len(data))
            # All that follows was lost, or one sector, and later ones were written before it.
            kept = len(data) if torn % 2 else min(len(data), (torn // SECTOR_BYTES + 1) * SECTOR_BYTES)
            return data[:torn] + bytes(kept - torn) + data[kept:]


def _full(path: str) -> StorageError:
    return StorageError(
        f"the disk is full: could not write {path}. Nothing was acknowledged.\nMake room; it will be tried again."
    )
