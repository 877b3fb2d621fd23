"""The mark by which a running query is told to begin no further batch: `fordstone/stop` below its checkpoint location.

Spark can only break a query off. The process that plans its batches, beside the driver or on a Connect server, looks for
the mark before each; when it stands, there is nothing more to do, and the query can be stopped between two batches.

What a checkpoint location belongs to: `fordstone/query.json`, written when a query first uses it.

Spark itself would take up the state of a plan that has changed and fail deep inside, or worse. So what the state depends on
is written down, compared first, and a difference is told in our words (rule 22).

The cuts of a query: where all sources stood behind each micro-batch, one small file an epoch.

Written by the driver when a batch's output is out, before Spark commits the batch; read by the planner for the next. So
whatever Spark begins again with, the cut before it is there. Kept as long as Spark keeps its own log, and some more.

Sealed epochs of a query: what a micro-batch let out, written down before the first sink hears of it.

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

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec
import msgspec
import polars as pl

from fordstone.connectors.base import Part
from fordstone.epochs.manifest import Cut
from fordstone.errors import CheckpointError, DamagedError, PlanMismatchError
from fordstone.protocol.recovery import match_plan
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


KEPT: Final = 200
_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class CutFiles:
    """The directory of cuts below a query's checkpoint location, a path or any fsspec URL."""

    root: str

    def read(self, epoch: int) -> Cut:
        """The cut behind an epoch."""
        fs, path = fsspec.core.url_to_fs(self._place(epoch))
        try:
            data = fs.cat_file(path)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the cut of epoch {epoch} is missing ({self._place(epoch)}), so nobody knows where its sources stood. "
                "Restore the checkpoint location as a whole, or begin with a new one."
            ) from error
        try:
            return msgspec.json.decode(data, type=Cut)
        except msgspec.DecodeError as error:
            raise DamagedError(f"{self._place(epoch)} is damaged: {error}. Restore the checkpoint location.") from error

    def write(self, cut: Cut) -> None:
        """Keep a cut, durably; one that is there already is replaced by the same."""
        place = self._place(cut.epoch)
        write_whole(place, msgspec.json.encode(cut))
        fs, _ = fsspec.core.url_to_fs(place)
        if cut.epoch > KEPT and fs.exists(self._path(fs, cut.epoch - KEPT)):
            fs.rm_file(self._path(fs, cut.epoch - KEPT))

    def epochs(self) -> tuple[int, ...]:
        """The epochs whose cuts are there, in order."""
        fs, path = fsspec.core.url_to_fs(self._directory())
        if not fs.exists(path):
            return ()
        names = [str(name).rpartition("/")[2] for name in fs.ls(path, detail=False)]
        return tuple(
            sorted(int(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX) and name[0].isdigit())
        )

    def _directory(self) -> str:
        return f"{self.root.rstrip('/')}/fordstone/cuts"

    def _place(self, epoch: int) -> str:
        return f"{self._directory()}/{epoch:0{_DIGITS}d}{_SUFFIX}"

    def _path(self, fs: Any, epoch: int) -> str:
        return str(fs._strip_protocol(self._place(epoch)))  # noqa: SLF001 - fsspec's own way to a path


IDENTITY_VERSION: Final = 1
_FILE: Final = "fordstone/query.json"
_LOG: Final = "metadata"
"""What Spark writes first of all, into the location of each stream."""


class QueryIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a query's state depends on."""

    version: int = IDENTITY_VERSION
    pipeline: str
    plan: msgspec.Raw
    """As it was when the query was begun."""
    step_digests: dict[str, str]
    stages: tuple[tuple[str, ...], ...]
    """The keyed steps of each stage."""
    shards: int
    first_epoch: int
    """The epoch of Spark's batch 0."""
    seed: str | None = None
    """The edge's state directory that the state came from, if it did not begin empty."""
    seed_node: str | None = None
    bounded: bool = False
    owner: str = ""
    """Random, made with the location: who this query is to those it publishes to."""


class QueryFile:
    """The file below a checkpoint location, a path or any fsspec URL."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self._fs, self._path = fsspec.core.url_to_fs(f"{checkpoint.rstrip('/')}/{_FILE}")
        self._root = self._path.removesuffix(f"/{_FILE}")

    def read(self) -> QueryIdentity | None:
        """What stands there; None: the location is new."""
        if not self._fs.exists(self._path):
            return None
        try:
            found = msgspec.json.decode(self._fs.cat_file(self._path), type=QueryIdentity)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {error}. Restore the checkpoint location, or begin with a new one."
            ) from error
        if found.version != IDENTITY_VERSION:
            raise CheckpointError(
                f"{self._path} has version {found.version}; this fordstone reads version {IDENTITY_VERSION}."
            )
        return found

    def has(self, path: str) -> bool:
        """Whether Spark has a file of that path below the location."""
        return bool(self._fs.exists(f"{self._root}/{path}"))

    def write(self, identity: QueryIdentity) -> None:
        """Write it, once, before the query starts."""
        place = f"{self.checkpoint.rstrip('/')}/{_FILE}"
        write_whole(place, msgspec.json.format(msgspec.json.encode(identity), indent=1))

    def checked(self, wanted: QueryIdentity) -> QueryIdentity:
        """The identity to run with: what stands there if it fits, else the wanted one, which then stands there."""
        found = self.read()
        if found is None:
            if self._used():
                raise CheckpointError(
                    f"{self._path} is missing, although a query has run here, so nobody knows what its state belongs to. "
                    "Restore the checkpoint location as a whole, or begin with a new one."
                )
            self.write(wanted)
            return wanted
        if not self.begun():
            # Nothing was let out and nothing is kept: a first try that failed binds nobody.
            self.write(wanted)
            return wanted
        difference = mismatch(found, wanted)
        if difference is not None:
            raise PlanMismatchError(
                f"the checkpoint location {self.checkpoint} belongs to another query.\n{difference}\n"
                "Use another state directory to begin anew. To carry state over, make an edge checkpoint of this one "
                "(fordstone checkpoints import-spark) and begin from it (--from-checkpoint, --allow-new-state)."
            )
        return found

    def begun(self) -> bool:
        """Whether a batch was ever planned here, or a batch job came to its end."""
        names = ("offsets/0", "fordstone/sealed/*.json", "fordstone/cuts/*.json")
        return any(self._fs.glob(f"{glob.escape(self._root)}/{name}") for name in names)

    def _used(self) -> bool:
        """Whether a query of Spark's was ever started here."""
        return self.has(_LOG)


def mismatch(found: QueryIdentity, wanted: QueryIdentity) -> str | None:
    """Why a query cannot go on from a checkpoint location, in words; None: it can."""
    if found.pipeline != wanted.pipeline:
        return f"  it is that of pipeline {found.pipeline}, this is {wanted.pipeline}."
    match = match_plan(found.step_digests, wanted.step_digests)
    if not match.whole:
        # Spark can neither drop nor add state: the last lines, which offer that, are the edge's.
        return "\n".join(line for line in match.explain().splitlines() if not line.startswith("--"))
    if found.stages != wanted.stages:
        return "  the steps are the same, but stand at other depths now, so that their state would be looked for elsewhere."
    if found.bounded != wanted.bounded:
        was = "bounded" if found.bounded else "unbounded"
        return f"  its input was {was}."
    return None


@dataclass(frozen=True, slots=True)
class StopMark:
    """The mark of one query."""

    checkpoint: str

    def put(self) -> None:
        """Begin no further batch."""
        fs, path = self._place()
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, b"")

    def take_away(self) -> None:
        """Go on. Called before a query starts: one that was killed may have left its mark."""
        fs, path = self._place()
        if fs.exists(path):
            fs.rm_file(path)

    def stands(self) -> bool:
        """Whether to stop. Asked once a batch."""
        fs, path = self._place()
        fs.invalidate_cache()
        return bool(fs.exists(path))

    def _place(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(f"{self.checkpoint.rstrip('/')}/fordstone/stop")
        return fs, str(path)
