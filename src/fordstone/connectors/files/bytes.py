"""The bytes of one input file, read at given offsets.

A plain file may grow; one that shrank, vanished or was replaced cannot be read on from a position, and says so. A
compressed file is unpacked as it is read, forwards; offsets are those of the unpacked bytes.
"""

from __future__ import annotations

import gzip
import os
import zlib
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final, cast

from fordstone.errors import GoneError, SourceError

PACKED_SUFFIXES: Final = (".gz", ".zst")
_SKIP_BYTES: Final = 1 << 20
"""How much is unpacked at a time on the way to a position."""


class FileBytes(ABC):
    """Used by one thread."""

    @abstractmethod
    def at(self, offset: int, length: int) -> bytes:
        """The bytes there; fewer than `length` only where the file ends now. Offsets of successive calls never go back."""

    @abstractmethod
    def size(self) -> int | None:
        """How many bytes there are now, if that is known without reading them."""

    @abstractmethod
    def check(self, position: int) -> None:
        """Raise `SourceError` if this is no longer the file that had something at `position`."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


def open_bytes(path: Path) -> FileBytes:
    """Open a file for reading, by its name's ending."""
    return PackedFile(path) if path.suffix in PACKED_SUFFIXES else PlainFile(path)


class PlainFile(FileBytes):
    """A file as it lies on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error

    def at(self, offset: int, length: int) -> bytes:
        """Ask until the system gives nothing: it may give less than was asked for before the end."""
        parts = []
        try:
            while length > 0 and (part := os.pread(self._fd, length, offset)):
                parts.append(part)
                offset += len(part)
                length -= len(part)
        except OSError as error:
            raise unreadable(self._path, error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def check(self, position: int) -> None:
        """Compare what is open with what bears the name, and its size with the position."""
        mine = os.fstat(self._fd)
        try:
            named = self._path.stat()
        except OSError as error:
            raise unreadable(self._path, error) from error
        if mine.st_size < position or named.st_size < position:
            raise shrank(self._path, min(mine.st_size, named.st_size), position)
        if (mine.st_ino, mine.st_dev) != (named.st_ino, named.st_dev):
            raise SourceError(
                f"{self._path} was replaced by another file while it was read, at byte {position}.\n"
                f"Files may only be appended to. Give new content a new name."
            )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class HeldBytes(FileBytes):
    """Bytes that are in memory already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def at(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def size(self) -> int:
        return len(self._data)

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
