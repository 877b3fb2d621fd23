"""Our files below a query's checkpoint location, a path or any fsspec URL: identity, cuts, sealed epochs, stop mark.

- `query.json`: what the state depends on. It is compared before Spark starts, because Spark would restore the state of a changed
  plan and fail deep inside, or worse (rule 22).
- `cuts/`: positions of all sources after each micro-batch, one small file per epoch.
- `sealed/`: the output of an epoch, recorded before the first sink releases it. A batch that Spark runs again need not give the
  same rows in the same order, so the first try that ends is the epoch (rule 1); a later one is executed for Spark's state only.
- `stop`: the process that plans batches begins no further one while it exists; Spark itself can only break a query off.

Invariants: a file is whole when it exists; a sealed record is kept until the next but one epoch is sealed.
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
        # The record first: without it the rows are not looked for.
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
        """Return the cut after an epoch."""
        try:
            data = open_remote(self.root).get(_cut(epoch))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the cut of epoch {epoch} is missing ({self._place(epoch)}), so the positions of its sources are unknown. "
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
                    f"{self._path} is missing, although a query has run here, so it is unknown what its state belongs to. "
                    "Restore the checkpoint location as a whole, or begin with a new one."
                )
            self.write(wanted)
            return wanted
        if not self.begun():
            # Nothing was released and nothing is kept: a first try that failed does not bind later ones.
            self.write(wanted)
            return wanted
        difference = mismatch(found, wanted)
        if difference is not None:
            raise PlanMismatchError(
                f"the checkpoint location {self.checkpoint} belongs to another query.\n{difference}\n"
                "Use another state directory to begin from the start. To carry state over, make an edge checkpoint of this one "
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
    """`fordstone/stop` of one query."""

    checkpoint: str

    def set(self) -> None:
        """Begin no further batch."""
        open_remote(self.checkpoint).put(_STOP, b"")

    def clear(self) -> None:
        """Go on. Called before a query starts: one that was killed may have left it."""
        open_remote(self.checkpoint).remove(_STOP)

    def is_set(self) -> bool:
        """Whether to stop. Asked once a batch."""
        return open_remote(self.checkpoint).exists(_STOP)
