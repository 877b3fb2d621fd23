"""Files at a URL: the only module that uses fsspec, which is imported when the first URL needs it.

`open_remote` returns a `Remote`, which stores and reads whole files below one URL. Plain paths and `file://` go through
`OsDisk`, so that files there are written atomically and durably. `FsspecRemote` also stores and reads files in parts, and
`read_url` reads one, for blobs. Drivers retry for seconds at most; when to retry later is for callers to decide.

Invariants: a file appears whole, on each kind of store by the means of that kind (`_Appears`); every request ends after its own time
limit, also where the driver has none; nothing is answered from a cache of listings.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast
from urllib.parse import unquote

from fordstone.errors import ConfigError, StorageError
from fordstone.storage.atomic import TEMP_PREFIX, AtomicWriter, remove_leftovers
from fordstone.storage.disk import Disk, OsDisk

log = logging.getLogger(__name__)

T = TypeVar("T")
REQUEST_TIMEOUT_S: Final = 60.0
"""Time limit of one request, without the time for its bytes."""
BYTES_PER_S_MIN: Final = 64 * 1024
"""What a store must take or give per second, at least."""
READ_TIMEOUT_S: Final = 600.0
"""Time limit of a read of which the size is not known before. Drivers of object stores give up earlier if no bytes come."""
S3_OPTIONS: Final[Mapping[str, Any]] = {
    "use_listings_cache": False,
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 10, "retries": {"mode": "standard", "max_attempts": 3}},
}
"""Three attempts with growing waits and jitter, also when the store answers 503 or SlowDown."""
S3_TRIES: Final = 2
"""Of s3fs itself, around the three attempts: for a response that is cut."""
S3_PART_BYTES: Final = 8 << 20
"""A file of at least two parts is uploaded in parts: after an error only a part is sent again."""
UPLOADS_MAX: Final = 1000
"""Maximum number of unfinished uploads that are removed at once."""
HDFS_OPTIONS: Final[Mapping[str, Any]] = {"dfs.client.failover.max.attempts": "3"}
"""Attempts to reach a NameNode. By itself the driver makes fifteen, which takes three minutes if nothing listens."""
REASON_CHARS_MAX: Final = 300
"""Maximum length of what a backend says, in an error."""
_CAUSED_BY: Final = "↳"
_COLOURS: Final = re.compile(r"\x1b\[\d*m")
_MESSAGE: Final = re.compile(r"<Message>(.*?)</Message>")
_WRAPPING: Final = re.compile(r'^(?:\w+\("(?:[\w.$]+", ")?)?(?:[a-z]\w*\.)+[\w$]+: |^\w+\("(?:[\w.$]+", ")?')
"""What a driver puts before the words of a server: names of classes."""
_STAMPS: Final = (
    *("ETag", "etag", "content_md5", "md5Hash", "mtime", "modification_time"),
    *("LastModified", "last_modified", "created"),
)
"""Under which of these names a store gives what changes with a file's content."""
_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
_RENAMES_OVER: Final = frozenset({"hdfs", "viewfs"})
_UNSAFE: Final = {"webhdfs": "hdfs", "swebhdfs": "hdfs"}
"""Where a rename onto an existing file does nothing and reports nothing; with the scheme to use instead."""
_REPLACED_PREFIX: Final = ".replaced-"
"""Begins the name of a file that is being replaced, where a rename does not replace one."""
_PACKAGES: Final = {
    "s3": "pip install 'fordstone[s3]'",
    "s3a": "pip install 'fordstone[s3]'",
    "hdfs": "pip install 'fordstone[hdfs]'",
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "abfs": "pip install adlfs",
    "abfss": "pip install adlfs",
    "az": "pip install adlfs",
}
_ADVICE: Final = (
    (
        "safe mode",
        "The NameNode takes no changes now. `hdfs dfsadmin -safemode get` shows whether it still is in safe mode.",
    ),
    ("bucket does not exist", "Create the bucket, or correct the URL."),
    ("NoSuchBucket", "Create the bucket, or correct the URL."),
    ("locate credentials", "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."),
    ("signature", "Check the credentials: the secret key does not belong to the key id."),
    ("access key", "Check the credentials: the store does not have this key id."),
    ("UserNotFound", "Check the credentials: the store does not have this key id."),
    ("scheme is not allowed", "Set AWS_ALLOW_HTTP=true if the endpoint has no TLS."),
    ("Permission denied", "Check the owner and the mode of the directory, and HADOOP_USER_NAME."),
    ("Forbidden", "Check the credentials, and what they may do."),
    ("Access Denied", "Check the credentials, and what they may do."),
)
"""What to do, by a part of what the store has answered."""


class StoreAwayError(StorageError):
    """A store at a URL could not do what it was asked. It may be able to later."""


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


class _Appears(Enum):
    """How a file appears whole in a store."""

    AT_ONCE = auto()
    """With all its content, by one request, under its name: objects."""
    RENAMED = auto()
    """By a rename, which replaces an older file in the same step."""
    ASIDE = auto()
    """By a rename that may not replace one: the older file is renamed before."""


class FsspecRemote(Remote):
    """Any store that fsspec can open. Each backend has its own exceptions; they all become `StoreAwayError`."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def put(self, path: str, data: bytes) -> None:
        with self._errors("write", path):
            self._place(path, lambda at: self._write(at, data), size=lambda: len(data))

    def put_file(self, local: Path, path: str) -> None:
        """Store a local file, as `put` does."""
        with self._errors("write", path, missing=True):
            self._place(
                path, lambda at: self._fs.put_file(str(local), at, **self._upload), size=lambda: local.stat().st_size
            )

    def create(self, path: str, data: bytes) -> bool:
        """Store a file unless another is there: by a condition of the request, or by a rename that does not replace."""
        with self._errors("write", path):
            try:
                if self._appears is _Appears.AT_ONCE:
                    self._limited(lambda: self._write(self._at(path), data, mode="create"), len(data))
                elif self._limited(lambda: self._exists(path)):
                    raise FileExistsError(path)  # noqa: TRY301 - as from the store
                else:
                    self._place(path, lambda at: self._write(at, data), size=lambda: len(data), replaces=False)
            except FileExistsError:
                # An earlier request of this call may have arrived although its answer was lost.
                return self.get(path) == data
            return True

    def _write(self, at: str, data: bytes, **condition: str) -> None:
        self._fs.pipe_file(at, data, **condition, **self._upload)

    @property
    def _upload(self) -> dict[str, int]:
        """The options of an upload: of an S3 file system alone, which passes those of others on to the store."""
        return {"chunksize": S3_PART_BYTES} if "s3" in _protocols(self._fs) else {}

    def _place(
        self, path: str, write: Callable[[str], None], *, size: Callable[[], int], replaces: bool = True
    ) -> None:
        """Store a file so that it appears whole.

        Where a rename may not replace a file, the older one is renamed before, to where `get` finds it until the new one is there: a
        crash between the two renames loses neither.
        """
        if self._appears is _Appears.AT_ONCE:
            self._limited(lambda: write(self._at(path)), size())
            return
        folder, _, name = path.rpartition("/")
        temporary = self._at(f"{folder}/{TEMP_PREFIX}{secrets.token_hex(6)}-{name}".lstrip("/"))

        def work() -> None:
            self._fs.makedirs(self._at(folder), exist_ok=True)
            replaced: str | None = None
            try:
                write(temporary)
                self._check_arrived(temporary, size())
                if self._appears is _Appears.RENAMED:
                    self._fs.mv(temporary, self._at(path), overwrite=replaces)
                else:
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

        self._limited(work, size())

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
        return (at, self._at(_replaced(path)), at) if self._appears is _Appears.ASIDE else (at,)

    @property
    def _appears(self) -> _Appears:
        protocols = _protocols(self._fs)
        if _OBJECT_STORES.intersection(protocols):
            return _Appears.AT_ONCE
        return _Appears.RENAMED if _RENAMES_OVER.intersection(protocols) else _Appears.ASIDE

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same files."""
        return "memory" not in _protocols(self._fs)

    def move(self, path: str, to: str) -> None:
        """Give a file another name, which none has. `FileNotFoundError` if there is none; a move that failed may be repeated."""

        def work() -> None:
            if self._appears is _Appears.AT_ONCE:
                self._fs.cp_file(self._at(path), self._at(to))
                self._fs.rm_file(self._at(path))
            else:
                self._fs.makedirs(self._at(to.rpartition("/")[0]), exist_ok=True)
                self._fs.mv(self._at(path), self._at(to))

        with self._errors("move", path, missing=True):
            self._limited(work)

    def folders(self, directory: str) -> list[str]:
        """List the directories in a directory."""
        with self._errors("list", directory):
            return [_name(entry) for entry in self._entries(directory) if entry["type"] == "directory"]

    def get_file(self, path: str, local: Path) -> None:
        """Copy a file to the local disk; `FileNotFoundError` if there is none."""
        with self._errors("read", path, missing=True):
            self._limited(lambda: self._fs.get_file(self._at(path), str(local)), of=self._time_to_read(self._at(path)))

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of a file."""
        with self._errors("read", path):
            return self._limited(
                lambda: bytes(self._fs.cat_file(self._at(path), start=offset, end=offset + length)), length
            )

    def look(self, path: str) -> RemoteFile:
        """Return what a file looks like; `FileNotFoundError` if there is none."""
        with self._errors("look at", path, missing=True):
            return RemoteFile.of(self._limited(lambda: self._fs.info(self._at(path))))

    def walk(self, deep: bool) -> dict[str, RemoteFile]:  # noqa: FBT001
        """List the files by their paths; `deep`: also those in directories below."""

        def work() -> dict[str, Any]:
            found: dict[str, Any] = self._fs.find(self._root, maxdepth=None if deep else 1, detail=True)
            if not found:
                # `find` takes every error for an empty directory.
                with _missing_is_empty():
                    self._fs.ls(self._root, detail=False)
            return found

        with self._errors("list", ""):
            found = self._limited(work, of=READ_TIMEOUT_S)
            start = len(str(self._fs._strip_protocol(self._root)).rstrip("/")) + 1  # noqa: SLF001 - fsspec's own way to spell a path
            return {name[start:]: RemoteFile.of(info) for name, info in found.items() if info["type"] == "file"}

    def get(self, path: str) -> bytes:
        with self._errors("read", path):
            for at in self._places(path):
                with _missing_is_empty():
                    return self._limited(lambda at=at: bytes(self._fs.cat_file(at)), of=self._time_to_read(at))  # type: ignore[misc]
        raise FileNotFoundError(errno.ENOENT, "no such remote file", path)

    def _time_to_read(self, at: str) -> float:
        """The time limit of reading a whole file. `FileNotFoundError` if there is none."""
        if self._appears is _Appears.AT_ONCE:
            return READ_TIMEOUT_S
        size_bytes = self._limited(lambda: int(self._fs.info(at)["size"] or 0))
        return REQUEST_TIMEOUT_S + size_bytes / BYTES_PER_S_MIN

    def open(self, path: str) -> IO[bytes]:
        """Open a file to read it in parts; `FileNotFoundError` if there is none."""
        with self._errors("read", path, missing=True):
            file = self._limited(lambda: self._fs.open(self._at(path), "rb"))
            return cast("IO[bytes]", file if self._appears is _Appears.AT_ONCE else _LimitedFile(file))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes; `FileNotFoundError` if there is none."""
        return self.look(path).size

    def exists(self, path: str) -> bool:
        with self._errors("look for", path):
            return self._limited(lambda: self._exists(path))

    def _exists(self, path: str) -> bool:
        return any(self._fs.exists(at) for at in self._places(path))

    def sizes(self, directory: str) -> dict[str, int]:
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
        found: list[dict[str, Any]] = []
        with _missing_is_empty():
            found += self._limited(lambda: list(self._fs.ls(self._at(directory), detail=True)), of=READ_TIMEOUT_S)
        return found

    def remove(self, path: str) -> None:
        def work() -> None:
            # What it replaces goes first, so that it does not come back.
            for at in reversed(self._places(path)[:2]):
                with _missing_is_empty():
                    self._fs.rm_file(at)

        with self._errors("remove", path):
            self._limited(work)

    def remove_leftovers(self, directory: str) -> None:
        """Remove temporary files, and uploads that have begun and not ended, which a store keeps, and charges for, unseen."""
        with self._errors("list", directory):
            if self._appears is _Appears.AT_ONCE:
                self._remove_uploads(directory)
                return
            for entry in self._entries(directory):
                if _name(entry).startswith(TEMP_PREFIX):
                    self._limited(lambda at=str(entry["name"]): self._fs.rm_file(at))  # type: ignore[misc]

    def remove_all_leftovers(self) -> None:
        """As `remove_leftovers`, of the directory and those in it."""
        self.remove_leftovers("")
        if self._appears is not _Appears.AT_ONCE:
            for folder in self.folders(""):
                self.remove_leftovers(folder)

    def _remove_uploads(self, directory: str) -> None:
        if "s3" not in _protocols(self._fs):
            return
        bucket, _, prefix = self._at(directory).strip("/").partition("/")
        prefix = prefix and f"{prefix}/"

        def work() -> None:
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, MaxUploads=UPLOADS_MAX)
            for upload in found.get("Uploads") or ():
                self._fs.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

        try:
            self._limited(work, of=READ_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - some stores, and some credentials, have no such request; work goes on without it
            log.warning(
                "unfinished uploads not removed", extra={"place": self._at(directory), "problem": reason(error)}
            )

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _limited(self, work: Callable[[], T], size_bytes: int = 0, *, of: float | None = None) -> T:
        self._fs.invalidate_cache()
        return limited(work, (REQUEST_TIMEOUT_S if of is None else of) + size_bytes / BYTES_PER_S_MIN)

    @contextlib.contextmanager
    def _errors(self, what: str, path: str, *, missing: bool = False) -> Iterator[None]:
        """Turn the errors of the backend into `StoreAwayError`. `missing`: `FileNotFoundError` is raised as it is."""
        try:
            yield
        except Exception as error:  # each backend has exceptions of its own
            if missing and isinstance(error, FileNotFoundError) and not _no_bucket(error):
                raise
            raise StoreAwayError(f"could not {what} {self._called(path)}: {reason(error)}") from error

    def _called(self, path: str) -> str:
        with contextlib.suppress(Exception):
            return str(self._fs.unstrip_protocol(self._at(path)))
        return self._at(path)


class _LimitedFile(io.RawIOBase):
    """A file that is open to read, of a driver without time limits."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        return bytes(limited(lambda: self._file.read(size), REQUEST_TIMEOUT_S if size >= 0 else READ_TIMEOUT_S))


def limited(work: Callable[[], T], timeout_s: float) -> T:
    """Return what `work` returns; `TimeoutError` if it does not return in time. Then its thread is left to itself, and ends with the process.

    `work` may still be carried out later: what it stores must have a name of its own, or be the same each time.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            raised.append(error)

    thread = threading.Thread(target=run, name="remote-request", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no response within {timeout_s:.0f} s")
    return returned[0]


@contextlib.contextmanager
def _missing_is_empty() -> Iterator[None]:
    """Continue after what is not there, except a bucket: a misspelt one must not look like an empty store."""
    try:
        yield
    except FileNotFoundError as error:
        if _no_bucket(error):
            raise


def _no_bucket(error: BaseException) -> bool:
    return type(error.__cause__).__name__ == "NoSuchBucket"


def reason(error: BaseException) -> str:
    """What a backend says, without its stack, and what to do about it."""
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in _COLOURS.sub("", text).replace("\\n", "\n").splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if _CAUSED_BY in text:
        # From the outermost error to what caused it, which may be the document that a store has answered.
        message = _MESSAGE.search(text)
        first = message[1] if message else lines[-1].removeprefix(_CAUSED_BY).strip()
    unwrapped = _WRAPPING.sub("", first).replace('\\"', '"')
    first = unwrapped.rstrip('").' if unwrapped != first else ".")
    if len(first) > REASON_CHARS_MAX:
        first = f"{first[:REASON_CHARS_MAX]} …"
    advice = next((advice for part, advice in _ADVICE if part in text), None)
    return f"{first}." if advice is None else f"{first}.\n{advice}"


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
    return FsspecRemote(*open_filesystem(url, kind="remote", commits=True))


def open_filesystem(url: str, *, kind: str, commits: bool = False) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. `kind` says in errors what the URL is for.

    `commits`: files are written there that must appear whole. `ConfigError` for a kind of URL where that cannot be had.
    """
    scheme, _, rest = url.partition("://")
    if commits and scheme in _UNSAFE:
        raise ConfigError(
            f"{kind} {url!r}: {scheme} cannot replace a file in one step, and reports success when it did nothing.\n"
            f"Use {_UNSAFE[scheme]}://{rest} with the port of the NameNode's RPC, and install {_PACKAGES[_UNSAFE[scheme]]}."
        )
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - a process without such URLs does not load it

        if scheme == "hdfs":
            _use_hdfs_native()
        filesystem, root = url_to_fs(url, **_driver_options(scheme))
        if scheme in {"s3", "s3a"}:
            filesystem.retries = S3_TRIES
    except OSError as error:
        # Some kinds connect when they are opened.
        raise StoreAwayError(f"{kind} {url!r} cannot be reached: {reason(error)}") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{kind} {url!r} cannot be opened: {error}.\nInstall what this kind of URL needs: "
            f"{_PACKAGES.get(scheme, 'fsspec documents which package has it')}."
        ) from error
    return filesystem, str(root)


def _driver_options(scheme: str) -> dict[str, Any]:
    """Ours, as far as fsspec's own configuration has no others."""
    from fsspec.config import conf  # noqa: PLC0415 - as above

    ours = {"s3": S3_OPTIONS, "s3a": S3_OPTIONS, "hdfs": HDFS_OPTIONS}.get(scheme, {})
    return {name: value for name, value in ours.items() if name not in conf.get(scheme, {})}


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
        raise StoreAwayError(f"could not read {url}: {reason(error)}") from error


def local_path(url: str) -> str | None:
    """Return the path that a plain path or a file URL names; None for other URLs."""
    scheme, separator, rest = url.partition("://")
    if separator:
        return rest if scheme in {"file", "local"} else None
    return url.removeprefix("file:")
