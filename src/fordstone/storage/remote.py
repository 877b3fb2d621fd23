"""Files at a URL: the only module that uses fsspec, which is imported when the first URL needs it.

`open_remote` returns a `Remote`, which stores and reads whole files below one URL. Plain paths and `file://` go through
`OsDisk`, so that files there are written atomically and durably. `FsspecRemote` also stores and reads files in parts, and
`read_url` reads one, for blobs. When to retry is for callers to decide.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote

from fordstone.errors import ConfigError, StorageError
from fordstone.storage.atomic import TEMP_PREFIX, AtomicWriter, remove_leftovers
from fordstone.storage.disk import Disk, OsDisk

_STAMPS: Final = ("ETag", "etag", "content_md5", "md5Hash", "mtime", "LastModified", "last_modified", "created")
"""Under which of these names a store gives what changes with a file's content."""
_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Where a file appears with all its content at once."""
_REPLACED_PREFIX: Final = ".replaced-"
"""Begins the name of a file that is being replaced, where a rename does not replace one."""
_PACKAGES: Final = {
    "s3": "pip install 'fordstone[s3]'",
    "s3a": "pip install 'fordstone[s3]'",
    "hdfs": "pip install hdfs-native",
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "abfs": "pip install adlfs",
    "abfss": "pip install adlfs",
    "az": "pip install adlfs",
}


class Remote(ABC):
    """Whole files below one URL. Called by one thread at a time. Every method may raise `StorageError`, and may be retried."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Store a file, replacing an older one. It appears whole; after a failure, also of this process, there is the older one or this one."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """What a store says of a file."""

    size: int
    identity: str
    """Another one if the content is another."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> RemoteFile:
        size = int(info["size"] or 0)
        stamp = next((str(info[name]) for name in _STAMPS if info.get(name)), "")
        return cls(size=size, identity=f"{size}:{stamp}")


class FsspecRemote(Remote):
    """Any store that fsspec can open. Each backend has its own exceptions; they all become `StorageError`."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def put(self, path: str, data: bytes) -> None:
        with self._errors("write", path):
            self._place(path, lambda at: self._fs.pipe_file(at, data), size=lambda: len(data))

    def put_file(self, local: Path, path: str) -> None:
        """Store a local file, as `put` does."""
        with self._errors("write", path, missing=True):
            self._place(path, lambda at: self._fs.put_file(str(local), at), size=lambda: local.stat().st_size)

    def _place(self, path: str, write: Callable[[str], None], *, size: Callable[[], int]) -> None:
        """Store a file so that it appears whole: as one object, or under another name first.

        Not all stores replace a file when they rename another one. So the older one is renamed before, to where `get` finds it until the
        new one is there: a crash between the two renames loses neither.
        """
        folder, _, name = path.rpartition("/")
        self._fs.makedirs(self._at(folder), exist_ok=True)
        if self._writes_whole:
            write(self._at(path))
            return
        temporary = self._at(f"{folder}/{TEMP_PREFIX}{secrets.token_hex(6)}-{name}".lstrip("/"))
        try:
            write(temporary)
            self._check_arrived(temporary, size())
            replaced = self._set_aside(path)
            self._fs.mv(temporary, self._at(path))
            self._check_arrived(self._at(path), size())
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise
        if replaced is not None:
            with contextlib.suppress(Exception):  # the next replacement removes it
                self._fs.rm_file(replaced)

    def _check_arrived(self, at: str, size_bytes: int) -> None:
        self._fs.invalidate_cache()
        arrived = int(self._fs.info(at)["size"])
        if arrived != size_bytes:
            raise OSError(errno.EIO, f"{arrived} of {size_bytes} bytes arrived")

    def _set_aside(self, path: str) -> str | None:
        """Rename the file that is about to be replaced; return where it is, None if there is none."""
        if not self._fs.exists(self._at(path)):
            return None
        replaced = self._at(_replaced(path))
        if self._fs.exists(replaced):
            self._fs.rm_file(replaced)  # of an earlier time
        self._fs.mv(self._at(path), replaced)
        return replaced

    def _places(self, path: str) -> tuple[str, ...]:
        """Where a file may be, in the order in which to look: another process may finish replacing it meanwhile."""
        at = self._at(path)
        return (at,) if self._writes_whole else (at, self._at(_replaced(path)), at)

    @property
    def _writes_whole(self) -> bool:
        return bool(_OBJECT_STORES.intersection(_protocols(self._fs)))

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same files."""
        return "memory" not in _protocols(self._fs)

    def move(self, path: str, to: str) -> None:
        """Give a file another name, which none has. `FileNotFoundError` if there is none; a move that failed may be repeated."""
        with self._errors("move", path, missing=True):
            if self._writes_whole:
                self._fs.cp_file(self._at(path), self._at(to))
                self._fs.rm_file(self._at(path))
            else:
                self._fs.makedirs(self._at(to.rpartition("/")[0]), exist_ok=True)
                self._fs.mv(self._at(path), self._at(to))

    def folders(self, directory: str) -> list[str]:
        """List the directories in a directory, past any cache of listings."""
        with self._errors("list", directory):
            return [_name(entry) for entry in self._entries(directory) if entry["type"] == "directory"]

    def get_file(self, path: str, local: Path) -> None:
        """Copy a file to the local disk; `FileNotFoundError` if there is none."""
        with self._errors("read", path, missing=True):
            self._fs.get_file(self._at(path), str(local))

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of a file."""
        with self._errors("read", path):
            return bytes(self._fs.cat_file(self._at(path), start=offset, end=offset + length))

    def look(self, path: str) -> RemoteFile:
        """Return what a file looks like; `FileNotFoundError` if there is none."""
        with self._errors("look at", path, missing=True):
            self._fs.invalidate_cache()
            return RemoteFile.of(self._fs.info(self._at(path)))

    def walk(self, deep: bool) -> dict[str, RemoteFile]:  # noqa: FBT001
        """List the files, past any cache of listings, by their paths; `deep`: also those in directories below."""
        with self._errors("list", ""):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, maxdepth=None if deep else 1, detail=True)
            if not found:
                # `find` takes every error for an empty directory.
                with contextlib.suppress(FileNotFoundError):
                    self._fs.ls(self._root, detail=False)
            start = len(str(self._fs._strip_protocol(self._root)).rstrip("/")) + 1  # noqa: SLF001 - fsspec's own way to spell a path
            return {name[start:]: RemoteFile.of(info) for name, info in found.items() if info["type"] == "file"}

    def get(self, path: str) -> bytes:
        with self._errors("read", path):
            for at in self._places(path):
                with contextlib.suppress(FileNotFoundError):
                    return bytes(self._fs.cat_file(at))
        raise FileNotFoundError(errno.ENOENT, "no such remote file", path)

    def open(self, path: str) -> IO[bytes]:
        """Open a file to read it in parts; `FileNotFoundError` if there is none."""
        with self._errors("read", path, missing=True):
            file: IO[bytes] = self._fs.open(self._at(path), "rb")
            return file

    def size(self, path: str, *, fresh: bool = False) -> int:
        """Return the size of a file in bytes; `FileNotFoundError` if there is none. `fresh`: past any cache of listings."""
        with self._errors("look at", path, missing=True):
            if fresh:
                self._fs.invalidate_cache()
            return int(self._fs.info(self._at(path))["size"])

    def exists(self, path: str) -> bool:
        with self._errors("look for", path):
            self._fs.invalidate_cache()
            return any(self._fs.exists(at) for at in self._places(path))

    def sizes(self, directory: str) -> dict[str, int]:
        """List the directory, past any cache of listings."""
        with self._errors("list", directory):
            entries = [entry for entry in self._entries(directory) if entry["type"] == "file"]
            found = {_name(entry): int(entry["size"] or 0) for entry in entries}
        replaced = {
            name.removeprefix(_REPLACED_PREFIX): size
            for name, size in found.items()
            if name.startswith(_REPLACED_PREFIX)
        }
        whole = {name: size for name, size in found.items() if not name.startswith((TEMP_PREFIX, _REPLACED_PREFIX))}
        return replaced | whole

    def _entries(self, directory: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return list(self._fs.ls(self._at(directory), detail=True))
        return []

    def remove(self, path: str) -> None:
        with self._errors("remove", path):
            # What it replaces goes first, so that it does not come back.
            for at in reversed(self._places(path)[:2]):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(at)

    def remove_leftovers(self, directory: str) -> None:
        if self._writes_whole:
            return
        with self._errors("list", directory), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            for at in self._fs.ls(self._at(directory), detail=False):
                if at.rpartition("/")[2].startswith(TEMP_PREFIX):
                    self._fs.rm_file(at)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextlib.contextmanager
    def _errors(self, what: str, path: str, *, missing: bool = False) -> Iterator[None]:
        """Turn the errors of the backend into `StorageError`. `missing`: `FileNotFoundError` is raised as it is."""
        try:
            yield
        except Exception as error:  # each backend has exceptions of its own
            if missing and isinstance(error, FileNotFoundError):
                raise
            raise StorageError(f"could not {what} {self._at(path)}: {error}.") from error


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _replaced(path: str) -> str:
    folder, separator, name = path.rpartition("/")
    return f"{folder}{separator}{_REPLACED_PREFIX}{name}"


def open_remote(url: str) -> Remote:
    """Open what a URL or a path names. `StorageError` if that needs a connection and it fails. Creates nothing."""
    path = local_path(url)
    if path is not None:
        root = Path(path).expanduser()
        if root.exists() and not root.is_dir():
            # It must not look like an empty store: a node without state would start from the beginning.
            raise StorageError(f"remote {url!r} cannot be reached: {root} is not a directory.")
        # Copies have the rows and the state of a node. The directory itself may hold those of others, too.
        return DiskRemote(OsDisk(root, create_root=False, private=True, tighten=False))
    return FsspecRemote(*open_filesystem(url, kind="remote"))


def open_filesystem(url: str, *, kind: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. `kind` says in errors what the URL is for."""
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - a process without such URLs does not load it

        if scheme == "hdfs":
            _use_hdfs_native()
        filesystem, root = url_to_fs(url)
    except OSError as error:
        # Some kinds connect when they are opened.
        raise StorageError(f"{kind} {url!r} cannot be reached: {error}.") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{kind} {url!r} cannot be opened: {error}.\nInstall what this kind of URL needs: "
            f"{_PACKAGES.get(scheme, 'fsspec documents which package has it')}."
        ) from error
    return filesystem, str(root)


def _use_hdfs_native() -> None:
    """Without Java: fsspec's own class for HDFS needs libhdfs and a JVM."""
    import fsspec  # noqa: PLC0415 - as above

    import_module("hdfs_native")
    fsspec.register_implementation("hdfs", "hdfs_native.fsspec.HdfsFileSystem", clobber=True)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    found = filesystem.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def read_url(url: str, *, bytes_max: int) -> bytes:
    """Return at most `bytes_max` bytes of the file at a URL. `FileNotFoundError` if there is none, else `StorageError`."""
    local = local_path(url)
    filesystem, path = open_filesystem(url, kind="file") if local is None else (None, unquote(local))
    try:
        with Path(path).open("rb") if filesystem is None else filesystem.open(path, "rb") as file:
            return bytes(file.read(bytes_max))
    except FileNotFoundError:
        raise
    except Exception as error:  # each backend has exceptions of its own
        raise StorageError(f"could not read {url}: {error}.") from error


def local_path(url: str) -> str | None:
    """Return the path that a plain path or a file URL names; None for other URLs."""
    scheme, separator, rest = url.partition("://")
    if separator:
        return rest if scheme in {"file", "local"} else None
    return url.removeprefix("file:")
