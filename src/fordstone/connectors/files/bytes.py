"""The bytes of one input file, read at given offsets.

A plain file may grow, and may be renamed while it is read; one that shrank or vanished cannot be read on from a position, and says so.
A compressed file is unpacked as it is read, forwards; offsets are those of the unpacked bytes.
"""

from __future__ import annotations

import ctypes
import gzip
import os
import struct
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final, Protocol, cast

from fordstone.errors import GoneError, SourceError

MARK_BYTES: Final = 4096
"""Number of bytes before the offset of a mark that are hashed."""
PACKED_SUFFIXES: Final = (".gz", ".zst")
_SKIP_BYTES: Final = 1 << 20
"""How much is read or unpacked at a time on the way to a position."""
_GZIP_END: Final = struct.Struct("<II")
"""The last bytes of a gzip file: the CRC-32 and the size of what is packed in it."""
# Of the Linux call statx, which Python has from 3.15 on: how large its result is, and where the time of creation is in it.
_STATX: Final = getattr(ctypes.CDLL(None), "statx", None) if sys.platform == "linux" else None
_STATX_BYTES: Final = 256
_STATX_BTIME: Final = 0x800
_STATX_BTIME_AT: Final = 0x50
_AT_EMPTY_PATH: Final = 0x1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What distinguishes a file, and what was read of it, from others."""

    inode: int
    born_ns: int
    """When the file was created: an inode is soon given to another file. 0: the file system does not say."""
    offset: int
    size: int
    """Of the whole file when it was last looked at. -1: of a file that never grows, in which positions are rows, it says nothing."""
    tail: str
    """A hash of the last bytes before the offset."""
    crc: int
    """The CRC-32 of all bytes before the offset."""

    @classmethod
    def of(cls, fd: int, offset: int | None = None, since: Mark | None = None) -> Mark:
        """Of an open file, by the bytes before the offset; None: before its end, for a file that never changes.

        `since`: an earlier mark of this file. The bytes before that one are not read again, if the offset is not before it.
        """
        looks = os.fstat(fd)
        at = looks.st_size if offset is None else offset
        known = since if since is not None and since.offset <= at else None
        return cls(
            inode=looks.st_ino,
            born_ns=_born_ns(fd),
            offset=at,
            size=-1 if offset is None else looks.st_size,
            tail=tail_hash(fd, at),
            crc=_crc(fd, 0, at) if known is None else _crc(fd, known.offset, at, known.crc),
        )

    @classmethod
    def of_file(cls, path: Path, offset: int | None = None, since: Mark | None = None) -> Mark:
        with opened(path) as fd:
            return cls.of(fd, offset, since)

    @classmethod
    def parse(cls, text: str) -> Mark | None:
        """Read back what `str` gives; None: there is nothing to compare with."""
        if not text:
            return None
        inode, born_ns, offset, size, tail, crc = text.split(":")
        return cls(
            inode=int(inode), born_ns=int(born_ns), offset=int(offset), size=int(size), tail=tail, crc=int(crc, 16)
        )

    def __str__(self) -> str:
        return f"{self.inode}:{self.born_ns}:{self.offset}:{self.size}:{self.tail}:{self.crc:08x}"

    @property
    def is_to_the_end(self) -> bool:
        """Whether all was read that was there when the file was last looked at."""
        return self.size == self.offset

    def is_on(self, fd: int) -> bool:
        """Whether an open file, which is this one, still has the last bytes before the offset."""
        return os.fstat(fd).st_size >= self.offset and tail_hash(fd, self.offset) == self.tail

    def is_of(self, path: Path) -> bool:
        """Whether there is this very file, by its inode, whatever it contains now."""
        try:
            with opened(path) as fd:
                return self._is_file(fd)
        except SourceError:
            return False

    def is_at(self, path: Path) -> bool:
        """Whether there is this very file, with the last bytes before the offset."""
        try:
            with opened(path) as fd:
                return self._is_file(fd) and self.is_on(fd)
        except SourceError:
            return False

    def is_copied_to(self, path: Path) -> bool:
        """Whether there is a file with all the bytes before the offset. It is read up to there."""
        try:
            with opened(path) as fd:
                return self.is_on(fd) and _crc(fd, 0, self.offset) == self.crc
        except SourceError:
            return False

    def is_packed_in(self, path: Path) -> bool:
        """Whether there is a compressed file of exactly the bytes before the offset. One of gzip is not unpacked: it says so at its end."""
        try:
            if path.suffix == ".gz":
                with opened(path) as fd:
                    end = read_at(fd, os.fstat(fd).st_size - _GZIP_END.size, _GZIP_END.size)
                return _GZIP_END.unpack(end) == (self.crc, self.offset & 0xFFFFFFFF)
            crc = size = 0
            with closing(PackedFile(path)) as packed:
                while size <= self.offset and (data := packed.at(size, _SKIP_BYTES)):
                    crc, size = zlib.crc32(data, crc), size + len(data)
        except (OSError, SourceError, struct.error):
            return False
        return (crc, size) == (self.crc, self.offset)

    def _is_file(self, fd: int) -> bool:
        born_ns = _born_ns(fd)
        return os.fstat(fd).st_ino == self.inode and (born_ns == self.born_ns or not (born_ns and self.born_ns))


def tail_hash(fd: int, offset: int) -> str:
    """Hash the last bytes before the offset."""
    start = max(0, offset - MARK_BYTES)
    return blake2b(read_at(fd, start, offset - start), digest_size=8).hexdigest()


def _crc(fd: int, start: int, end: int, crc: int = 0) -> int:
    while start < end and (data := read_at(fd, start, min(_SKIP_BYTES, end - start))):
        crc = zlib.crc32(data, crc)
        start += len(data)
    return crc


def _born_ns(fd: int) -> int:
    """When an open file was created; 0 if the system does not say."""
    if _STATX is None:
        return int(getattr(os.fstat(fd), "st_birthtime", 0) * 1_000_000_000)
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _STATX(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, found) != 0:
        return 0
    (mask,) = struct.unpack_from("=I", found, 0)
    seconds, rest = struct.unpack_from("=qI", found, _STATX_BTIME_AT)
    return int(seconds) * 1_000_000_000 + int(rest) if mask & _STATX_BTIME else 0


class FileBytes(ABC):
    """Used by one thread."""

    @abstractmethod
    def at(self, offset: int, length: int) -> bytes:
        """The bytes there; fewer than `length` only where the file ends now. Offsets of successive calls never go back."""

    @abstractmethod
    def size(self) -> int | None:
        """How many bytes there are now, if that is known without reading them."""

    @abstractmethod
    def identity(self, position: int) -> str:
        """What tells this file from others, by the bytes before the position; empty: nothing does."""

    @abstractmethod
    def check(self, position: int) -> None:
        """Raise `SourceError` if this is no longer the file that had something at `position`."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


def open_bytes(path: Path, tracked: Tracked | None = None) -> FileBytes:
    """Open a file for reading, by its name's ending. `tracked`: it may be renamed while it is read."""
    return PackedFile(path) if path.suffix in PACKED_SUFFIXES else PlainFile(path, tracked)


class Tracked(Protocol):
    """Finds a file again that was renamed."""

    def mark(self, fd: int, position: int) -> Mark:
        """Return the mark of the open file, and remember the file by it."""
        ...

    def still_there(self, fd: int, position: int) -> Path | None:
        """Return None if what is open is the file, and remember it by its bytes before `position`; else where the file is now.

        Raises `SourceError` if it is nowhere.
        """
        ...


class PlainFile(FileBytes):
    """A file as it lies on the disk."""

    def __init__(self, path: Path, tracked: Tracked | None = None) -> None:
        self._path = path
        self._tracked = tracked
        self._fd = _opened(path)

    def at(self, offset: int, length: int) -> bytes:
        try:
            return read_at(self._fd, offset, length)
        except OSError as error:
            raise unreadable(self._path, error) from error

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def identity(self, position: int) -> str:
        if position == 0:
            return ""
        return str(Mark.of(self._fd, position) if self._tracked is None else self._tracked.mark(self._fd, position))

    def check(self, position: int) -> None:
        """See whether what is open is still the file, and change to where it is now if it is not."""
        path = None if self._tracked is None else self._tracked.still_there(self._fd, position)
        if path is not None:
            fd = _opened(path)
            os.close(self._fd)
            self._path, self._fd = path, fd
        if self.size() < position:
            raise shrank(self._path, self.size(), position)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for a moment."""
    fd = _opened(path)
    try:
        yield fd
    finally:
        os.close(fd)


def read_at(fd: int, offset: int, length: int) -> bytes:
    """Ask until the system gives nothing: it may give less than was asked for before the end."""
    parts = []
    while length > 0 and (part := os.pread(fd, length, offset)):
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class HeldBytes(FileBytes):
    """Bytes that are in memory already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def at(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def size(self) -> int:
        return len(self._data)

    def identity(self, position: int) -> str:  # noqa: ARG002
        return ""

    def check(self, position: int) -> None:
        """They cannot change."""

    def close(self) -> None:
        """Nothing is held open."""


class PackedFile(FileBytes):
    """A gzip or Zstandard file, unpacked as it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._kept = b""
        self._identity = ""
        try:
            self._stream = _unpacked(path)
        except OSError as error:
            raise unreadable(path, error) from error

    def at(self, offset: int, length: int) -> bytes:
        """Unpack up to the end of what is asked for; keeps no more than that."""
        if offset < self._offset:
            raise AssertionError(f"{self._path}: cannot go back from {self._offset} to {offset}")
        while offset > self._offset + len(self._kept):
            if not self._more(min(_SKIP_BYTES, offset - self._offset)):
                return b""
        self._kept = self._kept[offset - self._offset :]
        self._offset = offset
        parts, have = [self._kept], len(self._kept)
        while have < length and (part := self._read(length - have)):
            parts.append(part)
            have += len(part)
        self._kept = b"".join(parts)
        return self._kept[:length]

    def size(self) -> None:
        """Known only at the end."""

    def identity(self, position: int) -> str:  # noqa: ARG002
        if not self._identity:
            self._identity = str(Mark.of_file(self._path))
        return self._identity

    def check(self, position: int) -> None:
        """A compressed file is complete when it is opened; only its end can disagree."""

    def close(self) -> None:
        self._stream.close()
        self._kept = b""

    def _more(self, length: int) -> bool:
        self._offset += len(self._kept)
        self._kept = self._read(length)
        return bool(self._kept)

    def _read(self, length: int) -> bytes:
        try:
            return self._stream.read(length)
        except Exception as error:
            # The class ZstdError is in whichever package unpacks.
            if not (isinstance(error, OSError | EOFError | zlib.error) or type(error).__name__ == "ZstdError"):
                raise
            raise SourceError(
                f"{self._path} is damaged: it cannot be unpacked ({error}). Get the file again."
            ) from error


def _unpacked(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    for name in ("compression.zstd", "zstandard"):  # Python 3.14's own, or the package
        try:
            return cast("BinaryIO", import_module(name).open(path, "rb"))
        except ModuleNotFoundError:
            continue
    raise SourceError(f"{path}: reading .zst needs the package 'zstandard'. Install it, or unpack the file first.")


def shrank(path: Path, size: int, position: int) -> SourceError:
    """The error for a file that ends before a position."""
    return SourceError(
        f"{path} shrank: it has {size} bytes, and {position} had been read.\n"
        f"Files may only be appended to. Write to a new name instead of truncating or rotating in place."
    )


def unreadable(path: Path, error: OSError) -> SourceError:
    """The error for a file that the system does not give."""
    if isinstance(error, FileNotFoundError):
        return GoneError(
            f"{path} vanished: it was being read, or a checkpoint says that it was.\n"
            f"Put it back, or start with an empty state directory. Input may be removed only when no kept checkpoint needs it."
        )
    return SourceError(f"{path} cannot be read: {error.strerror}.")
