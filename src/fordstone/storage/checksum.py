"""Values as JSON under their own SHA-256 checksum: the frame of every journal line and of small stored files.

The bytes are exactly `{"digest":"<sha256>","<kind>":<value>}` with the value in canonical JSON; the digest is that of all
bytes from the kind to the end of the value. Each value has one spelling, so a change of any byte is detected. Reading returns what was written or raises `DamagedError`.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple, TypeVar

import msgspec

from fordstone.errors import DamagedError

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
