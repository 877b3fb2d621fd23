"""Encode and decode manifests and cuts, each under its own checksum (`storage.journal`).

Files and their names are `store`'s and `cut_log`'s. Invariants: whatever the bytes are, reading gives the value that was written or raises `DamagedError`, or
`CheckpointError` for a newer version; run digests of a manifest that was read are file names and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from fordstone.epochs.manifest import MANIFEST_VERSION, Cut, Manifest
from fordstone.epochs.run_file import is_digest
from fordstone.errors import CheckpointError, DamagedError
from fordstone.state.base import RunRef
from fordstone.storage.journal import Record, seal, unseal_as

EPOCH_DIGITS: Final = 12
EPOCH_MAX: Final = 10**EPOCH_DIGITS - 1
_MANIFEST: Final = msgspec.json.Decoder(Manifest)
_CUT: Final = msgspec.json.Decoder(Cut)
_EPOCH: Final = msgspec.json.Decoder(int)


class _Version(msgspec.Struct):
    version: int


_VERSION: Final = msgspec.json.Decoder(_Version)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest file."""
    return seal("manifest", manifest)


def decode_manifest(data: bytes, *, pipeline: str, node: str, epoch: int) -> Manifest:
    """Read a manifest file back that was found where this epoch of this pipeline on this node belongs."""
    version = unseal_as("manifest", data, _VERSION).version
    if version > MANIFEST_VERSION:
        raise CheckpointError(
            f"the manifest has version {version}, this Fordstone reads up to {MANIFEST_VERSION}. "
            f"It was written by a newer one: use that, or a copy of the state from before the upgrade."
        )
    manifest = unseal_as("manifest", data, _MANIFEST)
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
    return seal("cut", cut)


def cut_of(record: Record) -> Cut:
    """Decode a line of the cut log. `DamagedError` if it is no cut, or an impossible one."""
    if record.kind != "cut":
        raise DamagedError(f"it is a {record.kind}, not a cut")
    cut = record.decode(_CUT)
    if not 1 <= cut.epoch <= EPOCH_MAX:
        raise DamagedError(f"the epoch is {cut.epoch}")
    _check_runs(run for segment in cut.segments for run in segment.runs)
    return cut


def encode_sealed(epoch: int) -> bytes:
    """The line of the cut log that says that an epoch is sealed."""
    return seal("sealed", epoch)


def sealed_of(record: Record) -> int:
    """Decode such a line."""
    epoch = record.decode(_EPOCH)
    if not 1 <= epoch <= EPOCH_MAX:
        raise DamagedError(f"the epoch is {epoch}")
    return epoch


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
    return msgspec.json.format(msgspec.json.encode(note, order="deterministic")) + b"\n"


def _check_runs(runs: Iterable[RunRef]) -> None:
    for run in runs:
        if not is_digest(run.digest) or run.size_bytes < 0 or run.rows < 0:
            raise DamagedError(
                f"it names an impossible run: {run.digest[:80]!r}, {run.size_bytes} bytes, {run.rows} rows"
            )
