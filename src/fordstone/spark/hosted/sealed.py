"""Sealed epochs of a query: what a micro-batch let out, written down before the first sink hears of it.

Spark runs a batch again when the driver died before its commit, and what comes out then need not be the same to the last
bit: rows are shuffled in another order, floats are added in another order, a user's function may throw dice. So the first
try that came to its end is the epoch (rule 1): its parts and rows are recorded here, and a later try is executed for the
sake of Spark's state, but lets out what is recorded.

Invariants: a record is whole when its file is there; it stands until the next epoch is recorded; parts that it names are
not swept away while it stands.

Write a small file below a checkpoint location, whole or not at all.

A location is a path or any fsspec URL. On a disk the file is durable when the call returns; stores behind URLs show an object
when all of it is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import fsspec
import msgspec
import polars as pl

from fordstone.connectors.base import Part
from fordstone.epochs.manifest import Cut
from fordstone.errors import DamagedError
from fordstone.spark.hosted.packing import decode, encode


def write_whole(place: str, data: bytes) -> None:
    """Put the file there; one that is there already is replaced."""
    fs, path = fsspec.core.url_to_fs(place)
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    if "file" in protocols:
        _write_local(Path(path), data)
    else:
        fs.pipe_file(path, data)


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


SEALED_VERSION: Final = 1
_DIGITS: Final = 12


class SealedEpoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one try at an epoch gave."""

    version: int = SEALED_VERSION
    epoch: int
    attempt: str
    parts: dict[str, tuple[Part, ...]]
    """By sink: parts that its tasks wrote."""
    rows: dict[str, int]
    """By sink: how many rows are kept here for it, for sinks that take no parts."""
    cut: Cut
    """The positions of the sources after it."""

    @property
    def rows_out(self) -> int:
        """All rows of the epoch."""
        return sum(part.rows for parts in self.parts.values() for part in parts) + sum(self.rows.values())


@dataclass(frozen=True, slots=True)
class SealedFiles:
    """The records below a query's checkpoint location, a path or any fsspec URL."""

    root: str

    def read(self, epoch: int) -> SealedEpoch | None:
        """The record of an epoch; None: no try at it has come to its end."""
        fs, path = fsspec.core.url_to_fs(self._record(epoch))
        if not fs.exists(path):
            return None
        try:
            found = msgspec.json.decode(fs.cat_file(path), type=SealedEpoch)
        except msgspec.DecodeError as error:
            raise DamagedError(
                f"{self._record(epoch)} is damaged: {error}. Restore the checkpoint location."
            ) from error
        if found.version != SEALED_VERSION:
            raise DamagedError(f"{path} has version {found.version}; this fordstone reads version {SEALED_VERSION}.")
        return found

    def newest(self) -> SealedEpoch | None:
        """The newest record."""
        fs, path = fsspec.core.url_to_fs(self._directory())
        names = [str(name).rpartition("/")[2] for name in fs.ls(path, detail=False)] if fs.exists(path) else []
        epochs = [int(name.removesuffix(".json")) for name in names if name.endswith(".json") and name[0].isdigit()]
        return self.read(max(epochs)) if epochs else None

    def write(self, sealed: SealedEpoch, frames: Mapping[str, pl.DataFrame]) -> None:
        """Record an epoch, durably. The records before the last one go."""
        for sink, frame in frames.items():
            write_whole(self._rows(sealed, sink), encode(frame))
        write_whole(self._record(sealed.epoch), msgspec.json.encode(sealed))
        self._forget(sealed.epoch - 2)

    def frame(self, sealed: SealedEpoch, sink: str) -> pl.DataFrame:
        """The rows that are kept for a sink."""
        fs, path = fsspec.core.url_to_fs(self._rows(sealed, sink))
        try:
            frame = decode(fs.cat_file(path))
        except (OSError, pl.exceptions.PolarsError) as error:
            raise DamagedError(f"{path} cannot be read: {error}. Restore the checkpoint location.") from error
        if frame.height != sealed.rows[sink]:
            raise DamagedError(f"{path} has {frame.height} rows, {sealed.rows[sink]} were kept.")
        return frame

    def _forget(self, epoch: int) -> None:
        old = self.read(epoch) if epoch > 0 else None
        if old is None:
            return
        # The record first: without it nobody looks for the rows.
        for place in (self._record(epoch), *(self._rows(old, sink) for sink in old.rows)):
            fs, path = fsspec.core.url_to_fs(place)
            if fs.exists(path):
                fs.rm_file(path)

    def _directory(self) -> str:
        return f"{self.root.rstrip('/')}/fordstone/sealed"

    def _record(self, epoch: int) -> str:
        return f"{self._directory()}/{epoch:0{_DIGITS}d}.json"

    def _rows(self, sealed: SealedEpoch, sink: str) -> str:
        at = sorted(sealed.rows).index(sink)
        return f"{self._directory()}/{sealed.epoch:0{_DIGITS}d}-{sealed.attempt}-{at}.arrow"


def sealed_of(
    epoch: int, attempt: str, given: Sequence[tuple[str, Sequence[Part], Sequence[pl.DataFrame]]], cut: Cut
) -> tuple[SealedEpoch, dict[str, pl.DataFrame]]:
    """A record of what the tasks of a try gave, sink by sink, and the rows that belong to it."""
    frames = {sink: pl.concat(some) for sink, _, some in given if some}
    sealed = SealedEpoch(
        epoch=epoch,
        attempt=attempt,
        parts={sink: tuple(parts) for sink, parts, _ in given if parts},
        rows={sink: frame.height for sink, frame in frames.items()},
        cut=cut,
    )
    return sealed, frames
