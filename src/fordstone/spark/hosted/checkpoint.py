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

A location is a path or a URL (`storage.remote`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import Part
from fordstone.epochs.manifest import Cut
from fordstone.errors import CheckpointError, DamagedError, PlanMismatchError, StorageError
from fordstone.protocol.recovery import match_plan
from fordstone.spark.hosted.packing import decode, encode
from fordstone.storage.remote import open_remote

SEALED_VERSION: Final = 1
_DIGITS: Final = 12
_SUFFIX: Final = ".json"
_SEALED: Final = "fordstone/sealed"
_CUTS: Final = "fordstone/cuts"


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
    """The records below a query's checkpoint location."""

    root: str

    def read(self, epoch: int) -> SealedEpoch | None:
        """The record of an epoch; None: no try at it has come to its end."""
        place = f"{self.root.rstrip('/')}/{_record(epoch)}"
        try:
            found = msgspec.json.decode(open_remote(self.root).get(_record(epoch)), type=SealedEpoch)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise DamagedError(f"{place} is damaged: {error}. Restore the checkpoint location.") from error
        if found.version != SEALED_VERSION:
            raise DamagedError(f"{place} has version {found.version}; this fordstone reads version {SEALED_VERSION}.")
        return found

    def newest(self) -> SealedEpoch | None:
        """The newest record."""
        epochs = _epochs_in(self.root, _SEALED)
        return self.read(epochs[-1]) if epochs else None

    def write(self, sealed: SealedEpoch, frames: Mapping[str, pl.DataFrame]) -> None:
        """Record an epoch, durably. The records before the last one go."""
        files = open_remote(self.root)
        for sink, frame in frames.items():
            files.put(_rows(sealed, sink), encode(frame))
        files.put(_record(sealed.epoch), msgspec.json.encode(sealed))
        self._forget(sealed.epoch - 2)

    def frame(self, sealed: SealedEpoch, sink: str) -> pl.DataFrame:
        """The rows that are kept for a sink."""
        path = f"{self.root.rstrip('/')}/{_rows(sealed, sink)}"
        try:
            frame = decode(open_remote(self.root).get(_rows(sealed, sink)))
        except (OSError, StorageError, pl.exceptions.PolarsError) as error:
            raise DamagedError(f"{path} cannot be read: {error}. Restore the checkpoint location.") from error
        if frame.height != sealed.rows[sink]:
            raise DamagedError(f"{path} has {frame.height} rows, {sealed.rows[sink]} were kept.")
        return frame

    def _forget(self, epoch: int) -> None:
        old = self.read(epoch) if epoch > 0 else None
        if old is None:
            return
        # The record first: without it nobody looks for the rows.
        files = open_remote(self.root)
        for path in (_record(epoch), *(_rows(old, sink) for sink in old.rows)):
            files.remove(path)


def _record(epoch: int) -> str:
    return f"{_SEALED}/{epoch:0{_DIGITS}d}{_SUFFIX}"


def _rows(sealed: SealedEpoch, sink: str) -> str:
    at = sorted(sealed.rows).index(sink)
    return f"{_SEALED}/{sealed.epoch:0{_DIGITS}d}-{sealed.attempt}-{at}.arrow"


def _epochs_in(root: str, directory: str) -> list[int]:
    """Return the epochs that have a file of their own in a directory, in order."""
    names = [name.removesuffix(_SUFFIX) for name in open_remote(root).sizes(directory) if name.endswith(_SUFFIX)]
    return sorted(int(name) for name in names if name.isdigit())


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


@dataclass(frozen=True, slots=True)
class CutFiles:
    """The directory of cuts below a query's checkpoint location."""

    root: str

    def read(self, epoch: int) -> Cut:
        """The cut behind an epoch."""
        try:
            data = open_remote(self.root).get(_cut(epoch))
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
        files = open_remote(self.root)
        files.put(_cut(cut.epoch), msgspec.json.encode(cut))
        if cut.epoch > KEPT:
            files.remove(_cut(cut.epoch - KEPT))

    def epochs(self) -> tuple[int, ...]:
        """The epochs whose cuts are there, in order."""
        return tuple(_epochs_in(self.root, _CUTS))

    def _place(self, epoch: int) -> str:
        return f"{self.root.rstrip('/')}/{_cut(epoch)}"


def _cut(epoch: int) -> str:
    return f"{_CUTS}/{epoch:0{_DIGITS}d}{_SUFFIX}"


IDENTITY_VERSION: Final = 1
_FILE: Final = "fordstone/query.json"
_STOP: Final = "fordstone/stop"
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
    """The file below a checkpoint location."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self._path = f"{checkpoint.rstrip('/')}/{_FILE}"
        self._files = open_remote(checkpoint)

    def read(self) -> QueryIdentity | None:
        """What stands there; None: the location is new."""
        try:
            found = msgspec.json.decode(self._files.get(_FILE), type=QueryIdentity)
        except FileNotFoundError:
            return None
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
        return self._files.exists(path)

    def write(self, identity: QueryIdentity) -> None:
        """Write it, once, before the query starts."""
        self._files.put(_FILE, msgspec.json.format(msgspec.json.encode(identity), indent=1))

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
        return self.has("offsets/0") or any(_epochs_in(self.checkpoint, one) for one in (_SEALED, _CUTS))

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
        open_remote(self.checkpoint).put(_STOP, b"")

    def take_away(self) -> None:
        """Go on. Called before a query starts: one that was killed may have left its mark."""
        open_remote(self.checkpoint).remove(_STOP)

    def stands(self) -> bool:
        """Whether to stop. Asked once a batch."""
        return open_remote(self.checkpoint).exists(_STOP)
