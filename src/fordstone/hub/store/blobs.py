"""The blob store: any fsspec URL, with blobs as `<digest[:2]>/<digest>`.

The log records references to blobs, and `retention` removes them.

Invariants: a blob appears under its name only whole, verified and (on a disk) durable. An upload that fails leaves nothing
under a name; temporary files that a crash leaves are removed at the next start. Only small bodies are in memory as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.messages import Rejection
from fordstone.storage.atomic import place_file, write_file
from fordstone.storage.disk import sync_dir, write_all
from fordstone.storage.failpoint import Failpoints, NoFailpoints
from fordstone.storage.remote import FsspecRemote, Remote, local_path, open_filesystem, open_remote

CHUNK_BYTES: Final = 1 << 20
SMALL_BYTES: Final = 1 << 20
"""An upload stays in memory up to this size."""
TEMP_SUFFIX: Final = ".part"
ID_NAME: Final = "hub.id"
_ID: Final = re.compile(r"[0-9a-f]{32}")
_BAD_SECTOR: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Stored(Enum):
    """What became of an upload."""

    NEW = auto()
    KNOWN = auto()
    """It was there already, with the same content."""
    REPAIRED = auto()
    """It was there already, with other content, which it has replaced."""


class BlobStore(ABC):
    """Called from many threads. Every method may raise `Rejection` with `storage`."""

    @abstractmethod
    def put(self, digest: str, upload: Upload) -> None:
        """Store verified bytes under their name. Durable on return; on failure nothing is under the name.

        May take the upload's file away with it.
        """

    @abstractmethod
    def size(self, digest: str) -> int | None:
        """Return the size of a blob; None: there is none."""

    @abstractmethod
    def open(self, digest: str) -> IO[bytes]:
        """Read one; `Rejection` with `not_found` if there is none. What was opened can be read to its end."""

    @abstractmethod
    def remove(self, digest: str) -> None:
        """Remove a blob; it may be gone already."""

    @abstractmethod
    def names(self, prefix: str) -> list[tuple[str, int]]:
        """List digests and sizes of the blobs that begin with these two hex digits."""

    @abstractmethod
    def beside(self) -> Path:
        """A directory for uploads that are not small."""


class DiskBlobs(BlobStore):
    """A directory. The temporary files of an earlier process are removed when it is opened: one process owns it."""

    def __init__(self, root: Path, *, failpoints: Failpoints | None = None) -> None:
        self.root = root
        self._failpoints = failpoints or NoFailpoints()
        self._incoming = root / "incoming"
        self._settled: set[str] = set()
        with _storage("make the directory", root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear(self._incoming)

    def put(self, digest: str, upload: Upload) -> None:
        """An upload that is a file already is only synced and renamed."""
        temp = str(upload.path or self._incoming / f"{digest}.{secrets.token_hex(8)}")
        with _storage("write", temp):
            self._settle(digest[:2])
            place_file(temp, self._at(digest), upload.data, failpoints=self._failpoints, kind="hub.blob")

    def size(self, digest: str) -> int | None:
        with _storage("look at", self._at(digest)):
            try:
                size_bytes = os.stat(self._at(digest)).st_size  # noqa: PTH116 - called for every blob, and twice as quick
            except FileNotFoundError:
                return None
            self._settle(digest[:2])
            return size_bytes

    def open(self, digest: str) -> IO[bytes]:
        with _storage("read", self._at(digest)):
            try:
                return Path(self._at(digest)).open("rb")
            except FileNotFoundError:
                raise _no_such(digest) from None

    def remove(self, digest: str) -> None:
        """Unlink; a name that a power cut brings back is found by the sweep."""
        with _storage("remove", self._at(digest)):
            Path(self._at(digest)).unlink(missing_ok=True)

    def names(self, prefix: str) -> list[tuple[str, int]]:
        names: list[tuple[str, int]] = []
        with _storage("list", self.root / prefix):
            try:
                found = list((self.root / prefix).iterdir())
            except FileNotFoundError:
                return names
            self._settle(prefix)
            for path in found:
                with contextlib.suppress(FileNotFoundError):
                    names.append((path.name, path.stat().st_size))
        return names

    def beside(self) -> Path:
        """On the same disk, so that a file becomes a blob by its name."""
        return self._incoming

    def _settle(self, prefix: str) -> None:
        """Make the names of one directory durable, once: a process that was killed may have left some that are not."""
        if prefix in self._settled:
            return
        folder = self.root / prefix
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_dir(folder)
        sync_dir(self.root)
        self._settled.add(prefix)

    def _at(self, digest: str) -> str:
        return f"{self.root}/{digest[:2]}/{digest}"


class FsspecBlobs(BlobStore):
    """Whatever fsspec can open. Blobs are put whole: an object store shows them then or not at all."""

    def __init__(self, filesystem: Any, root: str, beside: Path, *, failpoints: Failpoints | None = None) -> None:
        self._root = root.rstrip("/")
        self._remote = FsspecRemote(filesystem, root)
        self._beside = beside
        _clear(beside)
        self._failpoints = failpoints or NoFailpoints()

    def put(self, digest: str, upload: Upload) -> None:
        path = _path(digest)
        try:
            with _storage("write", self._at(digest)):
                if upload.path is None:
                    self._remote.put(path, bytes(upload.data))
                else:
                    self._remote.put_file(upload.path, path)
                self._failpoints.hit("hub.blob-written")
                arrived = self._remote.size(path)
                if arrived != upload.size_bytes:
                    raise OSError(errno.EIO, f"{arrived} of {upload.size_bytes} bytes arrived")  # noqa: TRY301 - reported as the store's other errors
            self._failpoints.hit("hub.blob-renamed")
        except BaseException:
            with contextlib.suppress(Exception):
                self._remote.remove(path)
            raise

    def size(self, digest: str) -> int | None:
        with _storage("look at", self._at(digest)):
            try:
                return self._remote.size(_path(digest))
            except FileNotFoundError:
                return None

    def open(self, digest: str) -> IO[bytes]:
        with _storage("read", self._at(digest)):
            try:
                return self._remote.open(_path(digest))
            except FileNotFoundError:
                raise _no_such(digest) from None

    def remove(self, digest: str) -> None:
        with _storage("remove", digest):
            self._remote.remove(_path(digest))

    def names(self, prefix: str) -> list[tuple[str, int]]:
        with _storage("list", prefix):
            return list(self._remote.sizes(prefix).items())

    def beside(self) -> Path:
        """On this machine, in a directory of this hub's own."""
        return self._beside

    def _at(self, digest: str) -> str:
        return f"{self._root}/{_path(digest)}"


class Upload:
    """One body that is uploaded: hashed as it comes, in memory while it is small, else in a file beside the blobs.

    Used by one thread at a time. `close` is always called, and removes what was not stored.
    """

    def __init__(self, beside: Path) -> None:
        self.size_bytes = 0
        self.data = bytearray()
        """What is not in the file."""
        self.path: Path | None = None
        self._hash = hashlib.sha256()
        self._beside = beside
        self._fd = -1

    def write(self, *parts: bytes | bytearray) -> None:
        """Add pieces. What is written to the file is not copied before."""
        for part in parts:
            self._hash.update(part)
            self.size_bytes += len(part)
            if self.size_bytes <= SMALL_BYTES:
                self.data += part
                continue
            with _storage("write", "an upload"):
                self._spill()
                write_all(self._fd, part)

    def store(self, blobs: BlobStore, digest: str) -> Stored:
        """Verify, then put it under its name, unless it is there already: what is there is read and compared by its digest."""
        self.verify(digest)
        there = blobs.size(digest)
        if there == self.size_bytes and is_whole(blobs, digest):
            return Stored.KNOWN
        blobs.put(digest, self)
        return Stored.NEW if there is None else Stored.REPAIRED

    def verify(self, digest: str) -> None:
        found = self._hash.hexdigest()
        if found != digest:
            raise Rejection(
                "wrong_digest",
                f"the {self.size_bytes} bytes that came have digest {found}, not {digest}: they were changed on the way. "
                "Send again.",
            )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _spill(self) -> None:
        if self.path is None:
            self.path = self._beside / f"upload.{secrets.token_hex(16)}{TEMP_SUFFIX}"
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if self.data:
            write_all(self._fd, self.data)
            self.data.clear()


class BlobLocks:
    """A lock per blob, for storing and removing it.

    Otherwise one upload might take for durable what another has only just renamed, or a removal delete what was uploaded again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._locked: set[str] = set()

    @contextlib.contextmanager
    def arrival(self, digest: str) -> Iterator[None]:
        """Hold the lock of this blob; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: digest not in self._locked)
            self._locked.add(digest)
        with self._released([digest]):
            yield

    @contextlib.contextmanager
    def removal(self, digests: list[str]) -> Iterator[list[str]]:
        """Hold the locks of those that are free, and yield them."""
        with self._changed:
            free = [digest for digest in digests if digest not in self._locked]
            self._locked.update(free)
        with self._released(free):
            yield free

    @contextlib.contextmanager
    def _released(self, digests: list[str]) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._locked.difference_update(digests)
                self._changed.notify_all()


def is_whole(blobs: BlobStore, digest: str, *, after_chunk: Callable[[int], None] = lambda _: None) -> bool:
    """Read a blob and compare its digest; False also if it is gone, or the medium cannot be read. `after_chunk` gets the bytes read."""
    found = hashlib.sha256()
    try:
        with blobs.open(digest) as file:
            while True:
                with _storage("read", digest):
                    data = file.read(CHUNK_BYTES)
                if not data:
                    return found.hexdigest() == digest
                found.update(data)
                after_chunk(len(data))
    except Rejection as rejection:
        if rejection.refusal.error == "not_found" or _is_bad_sector(rejection.__cause__):
            return False
        raise


def open_blobs(url: str | Path, *, beside: Path, failpoints: Failpoints | None = None) -> BlobStore:
    """The store that a URL or path names. `beside`: the directory for uploads to a remote store."""
    text = str(url)
    local = local_path(text)
    if local is not None:
        return DiskBlobs(Path(unquote(local) if "://" in text else local), failpoints=failpoints)
    filesystem, root = open_filesystem(text, kind="blob store")
    return FsspecBlobs(filesystem, root, beside, failpoints=failpoints)


def claim(url: str, data: Path) -> None:
    """Make the store at `url` this hub's. `ConfigError` if it is another hub's; `StorageError` if it cannot be read.

    A hub removes blobs that its log does not record, so two hubs must never share a store. Both the data directory and the
    store have a file with the hub's random id, which is made once. A data directory restored from a copy keeps its id.
    """
    try:
        ours = _own_id(data / ID_NAME)
    except OSError as error:
        raise StorageError(f"{data / ID_NAME} cannot be read: {error.strerror}.") from error
    local = local_path(url)
    try:
        store = open_remote(url if local is None else unquote(local))
        theirs = _read_id(store)
        if theirs is None:
            # Another hub may begin in the same store at this moment: one of them finds the id of the other.
            store.create(ID_NAME, ours.encode())
            theirs = _read_id(store)
    except StorageError as error:
        raise StorageError(f"blob store {url!r} cannot be reached: {error}") from error
    if theirs != ours:
        raise ConfigError(
            f"the blob store {url!r} belongs to another hub ({theirs}; this one is {ours}), and one would remove what the other needs.\n"
            f"Give this hub another store with --blobs, or start the other hub's --data. If that directory is lost for good, remove "
            f"{ID_NAME} from the store."
        )
    if isinstance(store, FsspecRemote):
        store.remove_all_leftovers()  # of an earlier process of this hub


def _own_id(path: Path) -> str:
    try:
        found = path.read_text("ascii").strip()
    except FileNotFoundError:
        made = secrets.token_hex(16)
        write_file(path, made.encode(), mode=0o600)
        return made
    if _ID.fullmatch(found) is None:
        raise StorageError(
            f"{path} is damaged: restore it from a copy, or from the blob store, which has the same file."
        )
    return found


def _read_id(store: Remote) -> str | None:
    try:
        return store.get(ID_NAME).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None


def _clear(incoming: Path) -> None:
    """Make the directory for uploads, and remove those that a killed process has left: one process owns it."""
    with _storage("make the directory", incoming):
        incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in incoming.iterdir():
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def _storage(what: str, where: object) -> Iterator[None]:
    """Turn what a disk or a backend raises into a rejection; each backend has exceptions of its own."""
    try:
        yield
    except (Rejection, FileNotFoundError):
        raise
    except Exception as raised:
        # A remote's error says again what could not be done and where; its cause is what the backend has raised.
        error = raised.__cause__ or raised if isinstance(raised, StorageError) else raised
        full = isinstance(error, OSError) and error.errno in _FULL
        reason = "it is full. Free space, or let consumers read on" if full else str(error)
        raise Rejection(
            "storage", f"the hub's store could not {what} {where}: {reason}. Nothing was kept; try again later."
        ) from raised


def _is_bad_sector(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _BAD_SECTOR


def _path(digest: str) -> str:
    return f"{digest[:2]}/{digest}"


def _no_such(digest: str) -> Rejection:
    return Rejection("not_found", f"the hub has no blob {digest}.")
