"""Values as JSON under their own checksum: manifests and cuts.

The bytes are exactly `{"digest":"<sha256 of the value>","<kind>":<value>}`, the value in canonical JSON: one spelling,
so that a change of any byte is noticed. Files and their names are `store`'s and `cut_log`'s.

Invariants: whatever the bytes are, reading gives the value that was written or raises `DamagedError`, or
`CheckpointError` for a newer version; run digests of a manifest that was read are file names and nothing more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from fordstone.epochs.manifest import MANIFEST_VERSION, Cut, Manifest
from fordstone.epochs.run_file import DIGEST_CHARS, is_digest
from fordstone.errors import CheckpointError, DamagedError
from fordstone.state.base import RunRef

T = TypeVar("T")
EPOCH_DIGITS: Final = 12
EPOCH_MAX: Final = 10**EPOCH_DIGITS - 1
_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_MANIFEST: Final = msgspec.json.Decoder(Manifest)
_CUT: Final = msgspec.json.Decoder(Cut)
_EPOCH: Final = msgspec.json.Decoder(int)
_HEAD: Final = b'{"digest":"'
_DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class _Version(msgspec.Struct):
    version: int


_VERSION: Final = msgspec.json.Decoder(_Version)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest file."""
    return _seal(b"manifest", _ENCODER.encode(manifest))


def decode_manifest(data: bytes, *, pipeline: str, node: str, epoch: int) -> Manifest:
    """Read a manifest file back that was found where this epoch of this pipeline on this node belongs."""
    body = _unseal(b"manifest", data)
    version = _decode(_VERSION, body).version
    if version > MANIFEST_VERSION:
        raise CheckpointError(
            f"the manifest has version {version}, this Fordstone reads up to {MANIFEST_VERSION}. "
            f"It was written by a newer one: use that, or a copy of the state from before the upgrade."
        )
    manifest = _decode(_MANIFEST, body)
    if manifest.version < 1:
        raise DamagedError(f"the version is {manifest.version}, versions start at 1")
    if not 1 <= manifest.epoch <= EPOCH_MAX or manifest.cut.epoch != manifest.epoch:
        raise DamagedError(f"the epoch is {manifest.epoch}, and its cut has {manifest.cut.epoch}")
    if (manifest.pipeline, manifest.node, manifest.epoch) != (pipeline, node, epoch):
        raise DamagedError(
            f"it is checkpoint {manifest.epoch} of pipeline {manifest.pipeline} on node {manifest.node} under a wrong name"
        )
    _check_runs(manifest.runs())
    return manifest


def encode_cut(cut: Cut) -> bytes:
    """The bytes of one line of the cut log, without its newlines."""
    return _seal(b"cut", _ENCODER.encode(cut))


def decode_cut(line: bytes) -> Cut:
    """Read one line of the cut log back."""
    cut = _decode(_CUT, _unseal(b"cut", line))
    if not 1 <= cut.epoch <= EPOCH_MAX:
        raise DamagedError(f"the epoch is {cut.epoch}")
    _check_runs(run for segment in cut.segments for run in segment.runs)
    return cut


def encode_sealed(epoch: int) -> bytes:
    """The line of the cut log that says that an epoch is sealed."""
    return _seal(b"sealed", _ENCODER.encode(epoch))


def decode_sealed(line: bytes) -> int:
    """Read such a line back."""
    epoch = _decode(_EPOCH, _unseal(b"sealed", line))
    if not 1 <= epoch <= EPOCH_MAX:
        raise DamagedError(f"the epoch is {epoch}")
    return epoch


def seal_line(kind: bytes, value: object) -> bytes:
    """Any value as one line of a file that others keep (the outbox, the owner), without its newlines."""
    return _seal(kind, _ENCODER.encode(value))


def unseal_line(kind: bytes, line: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Read such a line back; `DamagedError` if it is of another kind, or is not what was written."""
    return _decode(decoder, _unseal(kind, line))


def epoch_name(epoch: int, suffix: str = ".json") -> str:
    """The file name that belongs to an epoch; names sort as epochs do."""
    return f"{epoch:0{EPOCH_DIGITS}}{suffix}"


def parse_epoch_name(name: str, suffix: str = ".json") -> int | None:
    """The epoch that a file name belongs to, if it is one of ours."""
    stem = name.removesuffix(suffix)
    if len(name) != EPOCH_DIGITS + len(suffix) or len(stem) != EPOCH_DIGITS or not (stem.isascii() and stem.isdigit()):
        return None
    return int(stem)


def encode_note(note: dict[str, object]) -> bytes:
    """A note for people, as JSON."""
    return msgspec.json.format(_ENCODER.encode(note)) + b"\n"


def _seal(kind: bytes, body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest().encode()
    return b"".join((_HEAD, digest, b'","', kind, b'":', body, b"}"))


def _unseal(kind: bytes, data: bytes) -> bytes:
    """Check the frame byte by byte rather than as JSON: there is one way to spell it, and no parser sees damaged bytes."""
    end_of_digest = len(_HEAD) + DIGEST_CHARS
    middle = b'","' + kind + b'":'
    start = end_of_digest + len(middle)
    if len(data) <= start or not data.startswith(_HEAD) or data[end_of_digest:start] != middle or data[-1:] != b"}":
        raise DamagedError(f"its {len(data)} bytes are not a {kind.decode()} under a checksum")
    body = data[start:-1]
    digest = hashlib.sha256(body).hexdigest()
    if digest.encode() != data[len(_HEAD) : end_of_digest]:
        raise DamagedError(f"the {kind.decode()} does not have the digest that stands beside it")
    return body


def _check_runs(runs: Iterable[RunRef]) -> None:
    for run in runs:
        if not is_digest(run.digest) or run.size_bytes < 0 or run.rows < 0:
            raise DamagedError(
                f"it names an impossible run: {run.digest[:80]!r}, {run.size_bytes} bytes, {run.rows} rows"
            )


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except _DECODE_ERRORS as error:
        raise DamagedError(f"the checksum is right but the content is not: {error}") from error
