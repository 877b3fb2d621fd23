"""The rim towards remote storage: whole files, put and got.

Any fsspec URL will do; `file://` and plain paths go through `OsDisk` instead, which makes them durable. What is copied,
in which order, and when to try again is `upload`'s.

fsspec is imported only when a URL needs it.
"""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from fordstone.errors import ConfigError, StorageError
from fordstone.storage.atomic import TEMP_PREFIX, AtomicWriter, remove_leftovers
from fordstone.storage.disk import Disk, OsDisk

T = TypeVar("T")


class Remote(ABC):
    """Called by one thread at a time. Every method may raise `StorageError`: it may be tried again later."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Store a file, replacing what has the name. When this fails, a part of it may be there."""

    @abstractmethod
    def get(self, path: str) -> bytes:
        """The whole file; `FileNotFoundError` if there is none."""

    @abstractmethod
    def sizes(self, directory: str) -> dict[str, int]:
        """The files of a directory with their sizes in bytes; none if there is no such directory."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Take a file away; it may be gone already."""

    @abstractmethod
    def tidy(self, directory: str) -> None:
        """Remove what an earlier process left half-written. Called by the only writer, before it writes."""


class DiskRemote(Remote):
    """A directory, such as a mounted share. Files appear whole or not at all, and are durable."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._writer = AtomicWriter(disk)

    def put(self, path: str, data: bytes) -> None:
        """Write beside, sync, rename, sync the directory."""
        directory = path.rpartition("/")[0]
        self._disk.make_dirs(directory)
        self._writer.write(path, data)

    def get(self, path: str) -> bytes:
        """Read the file."""
        return self._disk.read(path)

    def sizes(self, directory: str) -> dict[str, int]:
        """List, without what an earlier process left half-written."""
        sizes = {}
        for name in self._disk.list(directory):
            if not name.startswith(TEMP_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    sizes[name] = self._disk.size(f"{directory}/{name}")
        return sizes

    def remove(self, path: str) -> None:
        """Unlink the file."""
        self._disk.remove(path)

    def tidy(self, directory: str) -> None:
        """Remove temporary files."""
        remove_leftovers(self._disk, directory)


class FsspecRemote(Remote):
    """Whatever fsspec can open. Backends raise what they like, so every exception of theirs becomes a `StorageError`."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def put(self, path: str, data: bytes) -> None:
        """Write in one call, which object stores make atomic."""

        def put() -> None:
            self._fs.makedirs(self._at(path.rpartition("/")[0]), exist_ok=True)
            self._fs.pipe_file(self._at(path), data)

        self._try("write", path, put)

    def get(self, path: str) -> bytes:
        """Read in one call."""

        def get() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(self._at(path)))
            except FileNotFoundError:
                return None

        data = self._try("read", path, get)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "no such remote file", path)
        return data

    def sizes(self, directory: str) -> dict[str, int]:
        """List, past any cache of listings."""

        def sizes() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._at(directory), detail=True)
            except FileNotFoundError:
                return {}
            return {
                entry["name"].rpartition("/")[2]: int(entry["size"] or 0)
                for entry in entries
                if entry["type"] == "file"
            }

        return self._try("list", directory, sizes)

    def remove(self, path: str) -> None:
        """Delete the file."""

        def remove() -> None:
            try:
                self._fs.rm_file(self._at(path))
            except FileNotFoundError:
                return

        self._try("remove", path, remove)

    def tidy(self, directory: str) -> None:
        """Nothing to do: files are written under their own names, and what is short is written again."""

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _try(self, what: str, path: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # each backend has exceptions of its own
            raise StorageError(f"could not {what} {self._at(path)}: {error}. It will be tried again.") from error


def open_remote(url: str) -> Remote:
    """The remote that a URL names. `StorageError` if it must be contacted to be opened and does not answer."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return DiskRemote(OsDisk(url))
    if scheme in {"file", "local"}:
        return DiskRemote(OsDisk(rest))
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - a pipeline without remote copies does not pay for it

        filesystem, root = url_to_fs(url)
    except OSError as error:
        # Some kinds connect when they are opened.
        raise StorageError(f"remote {url!r} cannot be reached: {error}. It will be tried again.") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"remote {url!r} cannot be opened: {error}.\nInstall what this kind of URL needs (for s3: fordstone[s3])."
        ) from error
    return FsspecRemote(filesystem, root)
