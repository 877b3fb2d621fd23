"""The seam to the file system: the few operations that durability consists of.

All stored files go through `Disk`, so that tests can use `testing.MemoryDisk` instead and see what a crash leaves. The
callers decide the order of operations; `atomic` and `journal` have the common ones.

Paths are '/'-joined strings below a root. Invariants of `OsDisk`: a file stays open from its first write until it is
synced, so that no write error is missed; after a failed sync every later change is refused, because what the disk holds
is unknown.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

from fordstone.errors import DamagedError, StorageError, StoreLockedError, describe_refusal

log = logging.getLogger(__name__)

Data = bytes | bytearray | memoryview
LOCK_NAME: Final = "lock"
PIECE_BYTES: Final = 1 << 18
"""Of files that are read or written in pieces."""
PRIVATE_FILE: Final = 0o600
PRIVATE_DIRECTORY: Final = 0o700
_BAD_SECTOR: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""From file systems without hard links, such as FAT."""
_NOT_SYNCED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP})
"""From a directory that this user may not open, or whose file system cannot be synced."""
_WRITE_MAX_BYTES: Final = 1 << 30
"""Linux moves at most 2 GiB in one call."""


class FatalStorageError(StorageError):
    """A sync failed: what the disk holds is unknown. The process must stop and start again from what is durable."""


class Disk(ABC):
    """A file system, as far as stores need it.

    Called from several threads. Every method may raise `StorageError`. Reading, truncating or renaming a missing file
    raises `FileNotFoundError`. Nothing is durable before `fsync` (bytes) and `fsync_dir` (names) have returned.
    """

    @abstractmethod
    def create(self, path: str, data: Data) -> None:
        """Write a new file. `FileExistsError` if the name is taken. After `StorageError` a part of it may be there."""

    @abstractmethod
    def append(self, path: str, data: Data) -> None:
        """Add to the end of a file, which is created if missing. After `StorageError` a part of it may be there."""

    @abstractmethod
    def truncate(self, path: str, size_bytes: int) -> None:
        """Cut a file to its first `size_bytes` bytes. Durable after `fsync`."""

    @abstractmethod
    def fsync(self, path: str) -> None:
        """Make the bytes of a file durable. Failure is `FatalStorageError`, and is never retried."""

    @abstractmethod
    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        """Rename a file, replacing the file of the new name; or a directory with its content, to a name that is free.

        Atomic for readers; durable after `fsync_dir`. `replace=False`, for files: `FileExistsError` if the new name is taken, by
        whichever process.
        """

    @abstractmethod
    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable. Failure is `FatalStorageError`, and is never retried."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the whole file. `DamagedError` if the medium cannot be read."""

    @abstractmethod
    def read_part(self, path: str, start: int, size_bytes: int) -> bytes:
        """Return some bytes of a file; fewer if it ends before. Errors as of `read`."""

    @abstractmethod
    def read_pieces(self, path: str) -> Iterator[bytes]:
        """Yield the whole file piece by piece, with the errors of `read`. It is one file, also if another takes its name meanwhile."""

    @abstractmethod
    def list(self, path: str) -> Sequence[str]:
        """Return the names in a directory, sorted; none if there is no such directory."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file; it may be gone already."""

    @abstractmethod
    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; it may be gone already."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is such a file or directory."""

    @abstractmethod
    def make_dirs(self, path: str) -> None:
        """Create a directory and those above it, durably; they may exist already."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes; a directory is no file."""


class OsDisk(Disk):
    """The real file system below a directory."""

    def __init__(
        self,
        root: str | Path,
        *,
        file_mode: int = 0o644,
        create_root: bool = True,
        private: bool = False,
        tighten: bool = True,
    ) -> None:
        """`create_root=False`: a missing root is created by `make_dirs`, so a disk that is only read creates nothing.

        `private`: only this user may read the root, which is tightened if it has a wider mode, and what is created below it. With
        `tighten=False` a root that exists keeps its mode: it may be shared.
        """
        self._root = Path(root)
        self._tightens = private and tighten
        self._file_mode = PRIVATE_FILE if private else file_mode
        self._dir_mode = PRIVATE_DIRECTORY if private else 0o777
        self._mutex = threading.Lock()
        self._unsynced: dict[str, int] = {}
        self._failed: str | None = None
        self._lock_fd: int | None = None
        self._abandoned = False
        self._durable: set[Path] = set()
        """Directories whose names are known to be durable."""
        if create_root:
            self._create_root()

    @property
    def root(self) -> Path:
        return self._root

    def create(self, path: str, data: Data) -> None:
        """Write a new file and keep it open until it is synced."""
        self._write(path, data, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def append(self, path: str, data: Data) -> None:
        """Add to the end of a file and keep it open until it is synced."""
        self._write(path, data, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def truncate(self, path: str, size_bytes: int) -> None:
        """Cut the file, through the descriptor that wrote to it if that is still open."""
        self._check()
        with self._mutex:
            fd = self._unsynced.get(path)
        try:
            os.truncate(self._at(path) if fd is None else fd, size_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._refuse(error, "truncate", path)

    def fsync(self, path: str) -> None:
        """Sync through the descriptor that wrote, so that the kernel reports every error since."""
        self._check()
        with self._mutex:
            fd = self._unsynced.pop(path, None)
        try:
            if fd is None:
                fd = os.open(self._at(path), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._fail(error, path)

    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        self._check()
        self._forget(old)
        self._forget(new)
        try:
            if replace or not self._link(self._at(old), self._at(new)):
                self._at(old).replace(self._at(new))
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            self._refuse(error, "rename", old)

    def fsync_dir(self, path: str) -> None:
        self._check()
        self._sync_dir(self._at(path), path)

    def read(self, path: str) -> bytes:
        with self._reading(path) as file:
            return file.readall()

    def read_part(self, path: str, start: int, size_bytes: int) -> bytes:
        with self._reading(path) as file:
            file.seek(start)
            return file.read(size_bytes)

    def read_pieces(self, path: str) -> Iterator[bytes]:
        with self._reading(path) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[io.FileIO]:
        try:
            with self._at(path).open("rb", buffering=0) as file:
                yield file
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from error
        except OSError as error:
            if error.errno in _BAD_SECTOR:
                raise DamagedError(f"{self._at(path)} cannot be read: {error.strerror}.") from error
            self._refuse(error, "read", path)

    def list(self, path: str) -> Sequence[str]:
        try:
            return sorted(entry.name for entry in self._at(path).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            self._refuse(error, "list", path)

    def remove(self, path: str) -> None:
        self._check()
        self._forget(path)
        try:
            self._at(path).unlink(missing_ok=True)
        except OSError as error:
            self._refuse(error, "remove", path)

    def remove_dir(self, path: str) -> None:
        self._check()
        try:
            self._at(path).rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            self._refuse(error, "remove", path)

    def exists(self, path: str) -> bool:
        try:
            return self._at(path).exists()
        except OSError as error:
            self._refuse(error, "look at", path)

    def make_dirs(self, path: str) -> None:
        """Create the missing directories from the top, and sync the parent of each.

        The parent of one that exists is synced too, once: the process that created it may have been killed before it did so.
        """
        self._check()
        self._create_root()
        here = self._root
        for part in path.split("/"):
            parent, here = here, here / part
            if here in self._durable and here.is_dir():
                continue
            try:
                here.mkdir(self._dir_mode, exist_ok=True)
            except OSError as error:
                self._refuse(error, "create the directory", path)
            self._sync_dir(parent, path)
            self._durable.add(here)

    def size(self, path: str) -> int:
        try:
            status = self._at(path).stat()
        except FileNotFoundError:
            raise
        except OSError as error:
            self._refuse(error, "look at", path)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return status.st_size

    def lock(self) -> None:
        """Lock this root against other processes, until `close` or the end of this process.

        Called once, before anything is written. `StoreLockedError` names the process that has the lock.
        """
        if self._lock_fd is not None:
            return
        fd = -1
        try:
            fd = os.open(self._at(LOCK_NAME), os.O_RDWR | os.O_CREAT, self._file_mode)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            other = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise StoreLockedError(
                f"the state directory {self._root} belongs to process {other or '(unknown)'}, which is still running.\n"
                f"Stop that process, or give this one a directory of its own."
            ) from error
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._refuse(error, "lock", LOCK_NAME)
        self._lock_fd = fd
        # The root may have been created by a process that was killed before it had synced the directory above.
        self._sync_parent()

    def abandon(self, reason: str) -> None:
        """Refuse every change from now on, and keep the lock until this process ends: a thread may still be in a call."""
        self._failed = reason
        self._abandoned = True

    def close(self) -> None:
        """Release the lock, and close files that were written but never synced. A disk that was abandoned stays locked."""
        if self._abandoned:
            return
        with self._mutex:
            open_fds = list(self._unsynced.values())
            self._unsynced.clear()
        for fd in open_fds:
            os.close(fd)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _create_root(self) -> None:
        """Create the root and what is missing above it, and sync the parent of each."""
        if self._root in self._durable and self._root.is_dir():
            return
        missing = []
        here = self._root.absolute()
        try:
            while not here.is_dir() and here != here.parent:
                missing.append(here)
                here = here.parent
            for directory in reversed(missing):
                directory.mkdir(self._dir_mode if directory == self._root.absolute() else 0o777, exist_ok=True)
        except OSError as error:
            self._refuse(error, "create the directory", "")
        if self._tightens:
            make_private(self._root)
        for directory in reversed(missing):
            self._sync_dir(directory.parent, "")
        self._durable.add(self._root)

    def _sync_parent(self) -> None:
        """Sync the directory above the root, as far as this user may."""
        try:
            sync_dir(self._root.absolute().parent)
        except OSError as error:
            if error.errno not in _NOT_SYNCED:
                self._fail(error, "")

    @staticmethod
    def _link(old: Path, new: Path) -> bool:
        """Give a file a name that must be free; return whether this file system can. Its old name is gone then."""
        try:
            os.link(old, new)
        except FileExistsError:
            # On a network file system, the answer to the first request may have been lost, and this is that to the second.
            if not new.samefile(old):
                raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if new.exists():
                raise FileExistsError(errno.EEXIST, "the file exists", str(new)) from error
            return False
        with contextlib.suppress(OSError):
            # The file has its new name. What is left of the old one is removed as any temporary file.
            old.unlink()
        return True

    def _at(self, path: str) -> Path:
        return self._root / path

    def _write(self, path: str, data: Data, flags: int) -> None:
        self._check()
        try:
            with self._mutex:
                fd = self._unsynced.get(path)
                if fd is None or flags & os.O_EXCL:
                    fd = os.open(self._at(path), flags, self._file_mode)
                    self._unsynced[path] = fd
            write_all(fd, data)
        except FileExistsError:
            raise
        except OSError as error:
            self._refuse(error, f"write {memoryview(data).nbytes} bytes to", path)

    def _forget(self, path: str) -> None:
        with self._mutex:
            fd = self._unsynced.pop(path, None)
        if fd is not None:
            os.close(fd)

    def _sync_dir(self, directory: Path, path: str) -> None:
        try:
            sync_dir(directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._fail(error, path)

    def _check(self) -> None:
        if self._failed is not None:
            raise FatalStorageError(self._failed)

    def _fail(self, error: OSError, path: str) -> NoReturn:
        self._failed = (
            f"syncing {self._at(path)} failed: {error.strerror}. What the disk holds is unknown, and nothing was acknowledged.\n"
            f"The process must stop. Check the disk (dmesg, smartctl), then start again: it resumes from what is durable."
        )
        raise FatalStorageError(self._failed) from error

    def _refuse(self, error: OSError, what: str, path: str) -> NoReturn:
        raise StorageError(describe_refusal(error, what, self._at(path))) from error


def make_private(path: Path) -> None:
    """Let only this user read a directory or a file; what may not be changed is logged."""
    try:
        mode = PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE
        if path.stat().st_mode & 0o077:
            path.chmod(mode)
    except OSError as error:
        log.warning("others can read it", extra={"path": str(path), "error": error.strerror})


def write_all(fd: int, data: Data) -> None:
    """Write everything to an open file. Raises `OSError`."""
    with memoryview(data).cast("B") as view:
        written = 0
        while written < len(view):
            written += os.write(fd, view[written : written + _WRITE_MAX_BYTES])


def sync_dir(path: str | Path) -> None:
    """Make the names in a directory durable. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
