"""Whole files, parts of files and listings in any store that fsspec opens. What differs per kind of store is asked of `kinds`.

A file appears whole (`Appears`): as one object, or under a temporary name of its own that is renamed at the end. Each driver has its own
exceptions; they all become `StoreAwayError`, except `FileNotFoundError` where a method says so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast

from fordstone.storage.atomic import TEMP_PREFIX
from fordstone.storage.remote.base import Remote
from fordstone.storage.remote.errors import StoreAwayError, is_missing_bucket, reason
from fordstone.storage.remote.kinds import Appears, StoreKind, kind_of
from fordstone.storage.remote.limits import READ_TIMEOUT_S, LimitedFile, limited, request_timeout_s

log = logging.getLogger(__name__)

T = TypeVar("T")
UPLOADS_MAX: Final = 1000
"""Maximum number of unfinished uploads that are removed at once."""
_REPLACED_PREFIX: Final = ".replaced-"
"""Begins the name of a file that is being replaced, where a rename does not replace one."""
_STAMPS: Final = (
    *("ETag", "etag", "content_md5", "md5Hash", "mtime", "modification_time"),
    *("LastModified", "last_modified", "created"),
)
"""Under which of these names a store gives what changes with a file's content."""


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
    """Any store that fsspec can open."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    # Whole files: what every `Remote` does.

    def put(self, path: str, data: bytes) -> None:
        with self._errors("write", path):
            self._place(path, lambda at: self._write(at, data), size=lambda: len(data))

    def create(self, path: str, data: bytes) -> bool:
        """Store a file unless another is there: by a condition of the request, or by a rename that does not replace."""
        with self._errors("write", path):
            try:
                if self._appears is Appears.AT_ONCE:
                    self._limited(
                        lambda: self._write(self._at(path), data, mode="create"), request_timeout_s(len(data))
                    )
                elif self._limited(lambda: self._exists(path)):
                    raise FileExistsError(path)  # noqa: TRY301 - as from the store
                else:
                    self._place(path, lambda at: self._write(at, data), size=lambda: len(data), replaces=False)
            except FileExistsError:
                # An earlier request of this call may have arrived although its answer was lost.
                return self.get(path) == data
            return True

    def get(self, path: str) -> bytes:
        with self._errors("read", path):
            for at in self._places(path):
                with _missing_is_empty():
                    return self._limited(lambda at=at: bytes(self._fs.cat_file(at)), self._read_timeout_s(at))  # type: ignore[misc]
        raise FileNotFoundError(errno.ENOENT, "no such remote file", path)

    def exists(self, path: str) -> bool:
        with self._errors("look for", path):
            return self._limited(lambda: self._exists(path))

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
            if self._kind.keeps_uploads:
                self._remove_uploads(directory)
            if self._appears is Appears.AT_ONCE:
                return
            for entry in self._entries(directory):
                if _name(entry).startswith(TEMP_PREFIX):
                    self._limited(lambda at=str(entry["name"]): self._fs.rm_file(at))  # type: ignore[misc]

    # For blobs: files that do not fit into memory.

    def put_file(self, local: Path, path: str) -> None:
        """Store a local file, as `put` does."""
        with self._errors("write", path, missing=True):
            upload = self._kind.upload
            self._place(path, lambda at: self._fs.put_file(str(local), at, **upload), size=lambda: local.stat().st_size)

    def open(self, path: str) -> IO[bytes]:
        """Open a file to read it in parts; `FileNotFoundError` if there is none."""
        with self._errors("read", path, missing=True):
            file = self._limited(lambda: self._fs.open(self._at(path), "rb"))
            return cast("IO[bytes]", file if self._appears is Appears.AT_ONCE else LimitedFile(file))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes; `FileNotFoundError` if there is none."""
        return self.look(path).size

    def remove_all_leftovers(self) -> None:
        """As `remove_leftovers`, of the directory and those in it."""
        self.remove_leftovers("")
        if self._appears is not Appears.AT_ONCE:
            for folder in self.folders(""):
                self.remove_leftovers(folder)

    # For sources and sinks of files.

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same files."""
        return self._kind.is_shared

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
            found = self._limited(work, READ_TIMEOUT_S)
            start = len(str(self._fs._strip_protocol(self._root)).rstrip("/")) + 1  # noqa: SLF001 - fsspec's own way to spell a path
            return {name[start:]: RemoteFile.of(info) for name, info in found.items() if info["type"] == "file"}

    def folders(self, directory: str) -> list[str]:
        """List the directories in a directory."""
        with self._errors("list", directory):
            return [_name(entry) for entry in self._entries(directory) if entry["type"] == "directory"]

    def look(self, path: str) -> RemoteFile:
        """Return what a file looks like; `FileNotFoundError` if there is none."""
        with self._errors("look at", path, missing=True):
            return RemoteFile.of(self._limited(lambda: self._fs.info(self._at(path))))

    def get_file(self, path: str, local: Path) -> None:
        """Copy a file to the local disk; `FileNotFoundError` if there is none."""
        with self._errors("read", path, missing=True):
            self._limited(lambda: self._fs.get_file(self._at(path), str(local)), self._read_timeout_s(self._at(path)))

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of a file."""
        with self._errors("read", path):
            return self._limited(
                lambda: bytes(self._fs.cat_file(self._at(path), start=offset, end=offset + length)),
                request_timeout_s(length),
            )

    def move(self, path: str, to: str) -> None:
        """Give a file another name, which none has. `FileNotFoundError` if there is none; a move that failed may be repeated."""

        def work() -> None:
            if self._appears is Appears.AT_ONCE:
                self._fs.cp_file(self._at(path), self._at(to))
                self._fs.rm_file(self._at(path))
            else:
                self._fs.makedirs(self._at(to.rpartition("/")[0]), exist_ok=True)
                self._fs.mv(self._at(path), self._at(to))

        with self._errors("move", path, missing=True):
            self._limited(work)

    # How a file appears whole.

    @property
    def _kind(self) -> StoreKind:
        return kind_of(self._fs)

    @property
    def _appears(self) -> Appears:
        return self._kind.appears

    def _write(self, at: str, data: bytes, **condition: str) -> None:
        self._fs.pipe_file(at, data, **condition, **self._kind.upload)

    def _place(
        self, path: str, write: Callable[[str], None], *, size: Callable[[], int], replaces: bool = True
    ) -> None:
        """Store a file so that it appears whole.

        Where a rename may not replace a file, the older one is renamed before, to where `get` finds it until the new one is there: a
        crash between the two renames loses neither.
        """
        if self._appears is Appears.AT_ONCE:
            self._limited(lambda: write(self._at(path)), request_timeout_s(size()))
            return
        folder, _, name = path.rpartition("/")
        temporary = self._at(f"{folder}/{TEMP_PREFIX}{secrets.token_hex(6)}-{name}".lstrip("/"))

        def work() -> None:
            self._fs.makedirs(self._at(folder), exist_ok=True)
            replaced: str | None = None
            try:
                write(temporary)
                self._check_arrived(temporary, size())
                if self._appears is Appears.RENAMED:
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

        self._limited(work, request_timeout_s(size()))

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
        return (at, self._at(_replaced(path)), at) if self._appears is Appears.ASIDE else (at,)

    def _remove_uploads(self, directory: str) -> None:
        bucket, _, prefix = self._at(directory).strip("/").partition("/")
        prefix = prefix and f"{prefix}/"

        def work() -> None:
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, MaxUploads=UPLOADS_MAX)
            for upload in found.get("Uploads") or ():
                self._fs.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

        try:
            self._limited(work, READ_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - some stores, and some credentials, have no such request; work goes on without it
            log.warning(
                "unfinished uploads not removed", extra={"place": self._at(directory), "problem": reason(error)}
            )

    # Requests.

    def _exists(self, path: str) -> bool:
        return any(self._fs.exists(at) for at in self._places(path))

    def _entries(self, directory: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with _missing_is_empty():
            found += self._limited(lambda: list(self._fs.ls(self._at(directory), detail=True)), READ_TIMEOUT_S)
        return found

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _limited(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Do one thing in the store within a time limit, past any cache of listings."""
        self._fs.invalidate_cache()
        return limited(work, request_timeout_s() if timeout_s is None else timeout_s)

    def _read_timeout_s(self, at: str) -> float:
        """Return the time limit of reading a whole file. `FileNotFoundError` if there is none."""
        if self._appears is Appears.AT_ONCE:
            return READ_TIMEOUT_S
        return request_timeout_s(self._limited(lambda: int(self._fs.info(at)["size"] or 0)))

    @contextlib.contextmanager
    def _errors(self, what: str, path: str, *, missing: bool = False) -> Iterator[None]:
        """Turn the errors of the driver into `StoreAwayError`. `missing`: `FileNotFoundError` is raised as it is."""
        try:
            yield
        except Exception as error:  # each driver has exceptions of its own
            if missing and isinstance(error, FileNotFoundError) and not is_missing_bucket(error):
                raise
            raise StoreAwayError(f"could not {what} {self._called(path)}: {reason(error)}") from error

    def _called(self, path: str) -> str:
        with contextlib.suppress(Exception):
            return str(self._fs.unstrip_protocol(self._at(path)))
        return self._at(path)


@contextlib.contextmanager
def _missing_is_empty() -> Iterator[None]:
    """Continue after what is not there, except a bucket: a misspelt one must not look like an empty store."""
    try:
        yield
    except FileNotFoundError as error:
        if is_missing_bucket(error):
            raise


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _replaced(path: str) -> str:
    folder, separator, name = path.rpartition("/")
    return f"{folder}{separator}{_REPLACED_PREFIX}{name}"
