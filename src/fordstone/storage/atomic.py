"""Atomic file writes: write a temporary file, sync it, rename it, sync the directory.

Readers see the old file or the new one, never a part of either. `AtomicWriter` works on any `Disk`; `write_file` is for
callers that have only a path, `place_file` for files that were written piece by piece. Nothing else in the project renames a temporary file into place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fordstone.errors import DamagedError, StorageError
from fordstone.storage.disk import Data, Disk, OsDisk, sync_dir, write_all
from fordstone.storage.failpoint import Failpoints

TEMP_PREFIX: Final = ".tmp-"
"""Of temporary names. Spark and other readers of directories skip names that begin with a dot."""


class AtomicWriter:
    """Replaces whole files on one disk.

    Each instance has temporary names of its own, so two writers in one process never collide.
    """

    def __init__(self, disk: Disk, failpoints: Failpoints | None = None) -> None:
        self._disk = disk
        self._failpoints = failpoints
        self._token = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    def write(
        self,
        path: str,
        data: Data | Iterator[Data],
        *,
        kind: str | None = None,
        temp_directory: str | None = None,
        over: bool = True,
    ) -> None:
        """Replace the file at `path`. Its bytes and its name are durable on return. `over=False`: `FileExistsError` if it is there.

        `data`: all of it, or pieces, which may be read from the old file.
        `kind` names the failpoints: `<kind>.created`, `<kind>.synced`, `<kind>.renamed` and `<kind>.dir-synced`.
        `temp_directory`: where the temporary file is written; by default beside `path`. On `StorageError` before the
        rename, nothing has changed.
        """
        self.replace(path, data, kind=kind, temp_directory=temp_directory, over=over)
        self._disk.fsync_dir(_parent(path))
        self._hit(kind, "dir-synced")

    def replace(
        self,
        path: str,
        data: Data | Iterator[Data],
        *,
        kind: str | None = None,
        temp_directory: str | None = None,
        sync: bool = True,
        over: bool = True,
    ) -> None:
        """Replace the file as `write` does, but leave the sync of the directory to the caller.

        Several files of one directory then share one sync. `sync=False`: atomic for readers, but not durable.
        """
        directory = _parent(path) if temp_directory is None else temp_directory
        temp = _join(directory, f"{TEMP_PREFIX}{self._token}-{next(self._numbers)}")
        try:
            pieces = data if isinstance(data, Iterator) else iter((data,))
            self._disk.create(temp, next(pieces, b""))
            for piece in pieces:
                self._disk.append(temp, piece)
            self._hit(kind, "created")
            if sync:
                self._disk.fsync(temp)
            self._hit(kind, "synced")
            self._disk.rename(temp, path, replace=over)
        except (StorageError, DamagedError, FileNotFoundError, FileExistsError):
            with contextlib.suppress(StorageError):
                self._disk.remove(temp)
            raise
        self._hit(kind, "renamed")

    def _hit(self, kind: str | None, event: str) -> None:
        if kind is not None and self._failpoints is not None:
            self._failpoints.hit(f"{kind}.{event}")


def write_file(path: str | Path, data: Data, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a file of the real file system, whole or not at all. Missing directories are created.

    `durable=False` skips both syncs: a crash may lose the file, but no reader sees a part of it. Raises `StorageError`.
    """
    place = Path(path)
    disk = OsDisk(place.parent, file_mode=mode)
    try:
        writer = AtomicWriter(disk)
        if durable:
            writer.write(place.name, data)
        else:
            writer.replace(place.name, data, sync=False)
    finally:
        disk.close()


def place_file(temp: str, path: str, data: Data, *, failpoints: Failpoints, kind: str) -> None:
    """Add the last bytes to a temporary file, which may be new, and give it its name. Durable on return, for its owner only.

    For files that come piece by piece, and many at once: unlike with a `Disk`, a failed sync fails this file alone. Raises `OSError`;
    then neither name is there. The failpoints are `<kind>-written` and `<kind>-renamed`.
    """
    name = temp
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        failpoints.hit(f"{kind}-written")
        os.rename(temp, path)  # noqa: PTH104 - called for every blob of a hub, and twice as quick
        name = path
        failpoints.hit(f"{kind}-renamed")
        sync_dir(path.rpartition("/")[0])
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108 - as above
        raise


def remove_leftovers(disk: Disk, directory: str) -> None:
    """Remove temporary files that a crash left in a directory. Only its single writer may call this."""
    for name in disk.list(directory):
        if name.startswith(TEMP_PREFIX):
            disk.remove(_join(directory, name))


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
