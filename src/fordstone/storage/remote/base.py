"""The seam: whole files below one URL, and its implementation on a local disk."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

from fordstone.storage.atomic import TEMP_PREFIX, AtomicWriter, remove_leftovers
from fordstone.storage.disk import Disk


class Remote(ABC):
    """Whole files below one URL. Called by one thread at a time. Every method may raise `StorageError`, and may be retried."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Store a file, replacing an older one. It appears whole; after a failure, also of this process, there is the older one or this one."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Store a file as `put` does, unless another is there: then return False. True also if the same is there.

        Of several that create one file at the same time, one gets True; on kinds of stores without such a request that is not certain.
        """

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Return the whole file; `FileNotFoundError` if there is none."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is such a file now, past any cache of listings."""

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """Return the files of a directory with their sizes in bytes; none if there is no such directory."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file; it may be gone already."""

    @abstractmethod
    def remove_leftovers(self, directory: str) -> None:
        """Remove temporary files of an earlier process. Called by the only writer, before it writes."""


class DiskRemote(Remote):
    """A directory, such as a mounted share. Files appear whole or not at all, and are durable when `put` returns."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._writer = AtomicWriter(disk)

    def put(self, path: str, data: bytes) -> None:
        self._disk.make_dirs(path.rpartition("/")[0])
        self._writer.write(path, data)

    def create(self, path: str, data: bytes) -> bool:
        self._disk.make_dirs(path.rpartition("/")[0])
        try:
            self._writer.write(path, data, over=False)
        except FileExistsError:
            return self._disk.read(path) == data
        return True

    def get(self, path: str) -> bytes:
        return self._disk.read(path)

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def sizes(self, directory: str) -> dict[str, int]:
        sizes = {}
        for name in self._disk.list(directory):
            if not name.startswith(TEMP_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    sizes[name] = self._disk.size(f"{directory}/{name}")
        return sizes

    def remove(self, path: str) -> None:
        self._disk.remove(path)

    def remove_leftovers(self, directory: str) -> None:
        remove_leftovers(self._disk, directory)


def local_path(url: str) -> str | None:
    """Return the path that a plain path or a file URL names; None for other URLs."""
    scheme, separator, rest = url.partition("://")
    if separator:
        return rest if scheme in {"file", "local"} else None
    return url.removeprefix("file:")
