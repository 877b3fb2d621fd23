"""An append-only log of checksummed lines in one file.

Each line is a value as `seal` frames it. What the lines mean, and what to do about damage, is for the owner of
the log to decide. A file is read and rewritten in pieces, so its size is bounded by the disk alone.

Invariants: after `append(sync=True)` returns, its lines survive a crash, and all before them; of lines that were not synced, any may be lost,
also one before a line that is kept, which is then counted as damaged; a line that a crash or a full disk tore is
removed before the next one is written, so it never joins with a good line; `rewrite` replaces the file atomically.

The frame, also used by small stored files, is a JSON value under its own SHA-256 checksum: exactly
`{"digest":"<sha256>","<kind>":<value>}` with the value in canonical JSON; the digest covers all bytes from the kind to the end of
the value. Each value has one spelling, so a change of any byte is detected. Reading returns what was written or raises `DamagedError`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec

from fordstone.errors import DamagedError
from fordstone.storage.atomic import AtomicWriter
from fordstone.storage.disk import PIECE_BYTES, Disk

T = TypeVar("T")
DIGEST_CHARS: Final = 64
KIND_CHARS_MAX: Final = 32
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_HEAD: Final = b'{"digest":"'
_DIGEST_END: Final = len(_HEAD) + DIGEST_CHARS
_KIND_START: Final = _DIGEST_END + len(b'","')
_DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class Record(NamedTuple):
    """One value whose checksum is right, not decoded yet."""

    kind: str
    body: bytes

    @property
    def size_bytes(self) -> int:
        """The size of its line."""
        return _KIND_START + len(self.kind) + len(b'":') + len(self.body) + len(b"}\n")

    def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode the value; `DamagedError` if it is not of the decoder's type."""
        try:
            return decoder.decode(self.body)
        except _DECODE_ERRORS as error:
            raise DamagedError(f"the checksum is right but the content is not: {error}") from error


def seal(kind: str, value: object) -> bytes:
    """Encode a value under its checksum, without a newline. A `msgspec.Raw` value is taken as it is."""
    content = kind.encode() + b'":' + _ENCODER.encode(value)
    return b"".join((_HEAD, hashlib.sha256(content).hexdigest().encode(), b'","', content, b"}"))


def unseal(data: bytes) -> Record:
    """Check the frame and the checksum of `seal`ed bytes. `DamagedError` if either is wrong.

    The frame is compared byte by byte, so no parser sees damaged bytes.
    """
    kind_end = data.find(b'":', _KIND_START, _KIND_START + KIND_CHARS_MAX + 2)
    if not data.startswith(_HEAD) or data[_DIGEST_END:_KIND_START] != b'","' or kind_end < 0 or data[-1:] != b"}":
        raise DamagedError(f"its {len(data)} bytes are not a value under a checksum")
    kind, body = data[_KIND_START:kind_end], data[kind_end + 2 : -1]
    if not (kind.isascii() and kind.isalpha()) or not body:
        raise DamagedError(f"its {len(data)} bytes are not a value under a checksum")
    if hashlib.sha256(data[_KIND_START:-1]).hexdigest().encode() != data[len(_HEAD) : _DIGEST_END]:
        raise DamagedError(f"the {kind.decode()} does not match the digest that is stored with it")
    return Record(kind.decode(), body)


def unseal_as(kind: str, data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Read back one value of a known kind. `DamagedError` if it is of another kind or not what was written."""
    record = unseal(data)
    if record.kind != kind:
        raise DamagedError(f"it is a {record.kind}, not a {kind}")
    return record.decode(decoder)


class JournalLines(Iterable[Record]):
    """The lines of a journal that are whole, in order, read one by one. The rest is counted meanwhile, and known after the last one."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        """`pieces`: the bytes of the file, wherever they came from."""
        self.damaged_lines = 0
        """Lines that cannot be read although a whole line follows them: the disk or an intruder changed them."""
        self.torn_bytes = 0
        """Bytes after the last whole line: what a crash left of the last append, or damage to the last line."""
        self.whole_bytes = 0
        """The size of the file without the torn bytes."""
        self.lacks_newline = False
        """The last line is whole, but for its newline."""
        self._pieces = pieces

    def __iter__(self) -> Iterator[Record]:
        """To be called once."""
        damaged_since_whole = 0
        for line in _split(self._pieces):
            self.torn_bytes += len(line)
            try:
                record = unseal(line.removesuffix(b"\n"))
            except DamagedError:
                damaged_since_whole += 1
                continue
            self.damaged_lines += damaged_since_whole
            self.whole_bytes += self.torn_bytes
            self.lacks_newline = not line.endswith(b"\n")
            damaged_since_whole = self.torn_bytes = 0
            yield record


class Journal:
    """Reads, appends to and rewrites one file. Calls must not overlap; the owner of the log serializes them."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk
        self._directory = path.rpartition("/")[0]
        self._writer = AtomicWriter(disk)
        self._size_bytes: int | None = None
        """The size up to the last whole line; None until the file has been read or rewritten."""
        self._has_torn_tail = False
        self._lacks_newline = False
        self._is_new = False

    @property
    def size_bytes(self) -> int:
        if self._size_bytes is None:
            self._look()
        return self._size_bytes or 0

    def exists(self) -> bool:
        return self._disk.exists(self.path)

    def read(self) -> JournalLines:
        """Return what the file holds; nothing if there is no file. Changes nothing on the disk."""
        return JournalLines(self._pieces())

    def append(self, *lines: bytes, sync: bool = True) -> None:
        """Add lines in one write. Durable on return unless `sync` is False; then they are with the next synced append.

        After `StorageError` the lines may be there in part; the next append removes that part first.
        """
        if self._size_bytes is None:
            self._look()
        if self._has_torn_tail and self.exists():
            self._disk.truncate(self.path, self._size_bytes or 0)
            self._disk.fsync(self.path)
        data = b"\n" * self._lacks_newline + b"".join(line + b"\n" for line in lines)
        self._has_torn_tail = True
        self._disk.append(self.path, data)
        self._has_torn_tail = self._lacks_newline = False
        self._size_bytes = (self._size_bytes or 0) + len(data)
        if sync:
            self.sync()

    def sync(self) -> None:
        self._disk.fsync(self.path)
        if self._is_new:
            self._disk.fsync_dir(self._directory)
            self._is_new = False

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the whole file with these lines, durably. They may be read from the old one, which is still there on an error."""
        size_bytes = 0

        def pieces() -> Iterator[bytes]:
            nonlocal size_bytes
            piece = bytearray()
            for line in lines:
                piece += line + b"\n"
                if len(piece) >= PIECE_BYTES:
                    size_bytes += len(piece)
                    yield bytes(piece)
                    piece.clear()
            size_bytes += len(piece)
            yield bytes(piece)

        self._writer.write(self.path, pieces())
        self._size_bytes, self._has_torn_tail, self._lacks_newline, self._is_new = size_bytes, False, False, False

    def _look(self) -> None:
        lines = self.read()
        for _ in lines:
            pass
        self._size_bytes = lines.whole_bytes
        self._has_torn_tail, self._lacks_newline = lines.torn_bytes > 0, lines.lacks_newline
        self._is_new = not self.exists()

    def _pieces(self) -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError):
            yield from self._disk.read_pieces(self.path)


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their newlines, which the last one may lack."""
    begun = bytearray()
    for piece in pieces:
        *ended, rest = piece.split(b"\n")
        for end in ended:
            yield b"%b%b\n" % (bytes(begun), end)
            begun.clear()
        begun += rest
    if begun:
        yield bytes(begun)
