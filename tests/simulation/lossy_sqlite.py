"""SQLite files on a disk that forgets what was not synced, for the hub's log.

The files are real ones, below a folder in memory; a VFS of SQLite (through `apsw`, which has its own SQLite) records every write since the
last sync of each file. A power cut keeps what was synced, and of the other writes any part: none, all, the first ones, or some here and
there, the last of them torn at a sector. The log itself works with `sqlite3`; `Connection` offers the part of its interface that the log uses.

Invariants: what `xSync` has returned for survives; readers see every write until the power goes; nothing is written after it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import apsw

SECTOR_BYTES: Final = 512
_NAMES: Final = count()
_OPEN: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE


@dataclass(slots=True)
class _File:
    """What is durable of a file, and what was done to it since."""

    durable: bytes = b""
    named: bool = False
    """Its name is durable."""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Offset and bytes of a write; a size and None: it was truncated."""


class LossyFiles:
    """The disk. One per hub; used by every thread of the hub."""

    def __init__(self, power_cut: Callable[[], Exception]) -> None:
        """`power_cut` makes what an operation raises when the power goes in the middle of it."""
        self.cut_after: int | None = None
        """How many more writes and syncs there are before the power goes."""
        self._power_cut = power_cut
        self._files: dict[str, _File] = {}
        self._removed: dict[str, bytes] = {}
        """Files whose removal is not durable yet."""
        self._off = False
        self._mutex = threading.Lock()
        self._name = f"lossy-{next(_NAMES)}"
        self._vfs = _Vfs(self._name, self)

    def connect(self, path: Path) -> Connection:
        return Connection(apsw.Connection(str(path), flags=_OPEN, vfs=self._name))

    def power_off(self) -> None:
        """From now on nothing is written any more. Connections may be closed then."""
        with self._mutex:
            self._off = True

    def power_on(self, rng: Random) -> list[str]:
        """Leave in each file what the power cut has left of it. No connection is open. Return the files that were not synced."""
        with self._mutex:
            unsynced = [name for name, file in sorted(self._files.items()) if file.changes]
            for name, file in sorted(self._files.items()):
                path = Path(name)
                if not file.named and rng.getrandbits(1):
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(_changed(file.durable, _surviving(file.changes, rng)))
            for name, durable in sorted(self._removed.items()):
                if rng.getrandbits(1):
                    Path(name).write_bytes(durable)
            for name in self._files:
                Path(f"{name}-shm").unlink(missing_ok=True)
            self._files.clear()
            self._removed.clear()
            self._off, self.cut_after = False, None
            return unsynced

    def close(self) -> None:
        self._vfs.unregister()

    # What the VFS reports.

    def opened(self, name: str) -> None:
        with self._mutex:
            if name not in self._files:
                there = Path(name)
                found = there.exists()
                self._files[name] = _File(there.read_bytes() if found else b"", named=found)
                self._removed.pop(name, None)

    def changed(self, name: str, offset: int, data: bytes | None) -> bool:
        """Note a change; False: the power is off, and it must not be made."""
        with self._mutex:
            if self._goes_on():
                self._files[name].changes.append((offset, data))
            return not self._off

    def synced(self, name: str) -> None:
        with self._mutex:
            if self._goes_on():
                file = self._files[name]
                file.durable = _changed(file.durable, file.changes)
                file.changes.clear()
                if not file.named and name.endswith(("-wal", "-journal")):
                    # SQLite syncs the directory, too, with the first sync of these.
                    self._removed.clear()
                    for one in self._files.values():
                        one.named = True

    def removed(self, name: str, *, durably: bool) -> bool:
        with self._mutex:
            if self._goes_on():
                file = self._files.pop(name, _File())
                if file.named and not durably:
                    self._removed[name] = file.durable
            return not self._off

    def _goes_on(self) -> bool:
        if self._off:
            return False
        if self.cut_after is not None:
            self.cut_after -= 1
            if self.cut_after < 0:
                self._off = True
                raise self._power_cut()
        return True


def _surviving(changes: list[tuple[int, bytes | None]], rng: Random) -> list[tuple[int, bytes | None]]:
    match rng.randrange(4):
        case 0:
            return []
        case 1:
            return changes
        case 2:
            kept = changes[: rng.randint(0, len(changes))]
        case _:
            kept = [change for change in changes if rng.getrandbits(1)]
    offset, data = kept[-1] if kept else (0, None)
    if data is not None:
        sectors = rng.randint(0, len(data) // SECTOR_BYTES)
        kept[-1] = (offset, data[: sectors * SECTOR_BYTES])
    return kept


def _changed(content: bytes, changes: Iterable[tuple[int, bytes | None]]) -> bytes:
    now = bytearray(content)
    for offset, data in changes:
        if data is None:
            del now[offset:]
        else:
            now.extend(bytes(max(0, offset - len(now))))
            now[offset : offset + len(data)] = data
    return bytes(now)


class _Vfs(apsw.VFS):
    def __init__(self, name: str, files: LossyFiles) -> None:
        super().__init__(name, "")
        self._lossy = files

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - SQLite's name
        return _VfsFile(name, flags, self._lossy)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802 - SQLite's name
        if self._lossy.removed(filename, durably=syncdir):
            super().xDelete(filename, syncdir)


class _VfsFile(apsw.VFSFile):
    def __init__(self, name: str | apsw.URIFilename | None, flags: list[int], files: LossyFiles) -> None:
        self._name = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._lossy = files
        if self._name is not None:  # a temporary file has none, and needs nothing
            files.opened(self._name)
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - SQLite's name
        if self._name is None or self._lossy.changed(self._name, offset, bytes(data)):
            super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802 - SQLite's name
        if self._name is None or self._lossy.changed(self._name, newsize, None):
            super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802 - SQLite's name
        del flags  # the folder is in memory: only the record of it matters
        if self._name is not None:
            self._lossy.synced(self._name)


class Connection:
    """The part of `sqlite3.Connection` that the hub's log uses. Every statement is carried out to its end at once."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    def execute(self, query: str, values: Iterable[Any] = ()) -> _Rows:
        return self._run(lambda: list(self._db.execute(query, values if isinstance(values, dict) else tuple(values))))

    def executemany(self, query: str, values: Iterable[Iterable[Any]]) -> _Rows:
        return self._run(lambda: list(self._db.executemany(query, [tuple(one) for one in values])))

    def executescript(self, script: str) -> _Rows:
        return self._run(lambda: list(self._db.execute(script)))

    def create_function(self, name: str, count: int, function: Callable[..., Any], *, deterministic: bool) -> None:
        self._db.create_scalar_function(name, function, count, deterministic=deterministic)

    def close(self) -> None:
        self._db.close()

    @staticmethod
    def _run(work: Callable[[], list[Any]]) -> _Rows:
        try:
            return _Rows(work())
        except apsw.ConstraintError as error:
            raise sqlite3.IntegrityError(str(error)) from error
        except apsw.Error as error:
            raise sqlite3.OperationalError(str(error)) from error


class _Rows:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[Any]:
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)
