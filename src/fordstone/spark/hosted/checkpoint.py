"""Our files below a query's checkpoint location, a path or any fsspec URL: identity, epochs, stop mark.

- `query.json`: what the state depends on. It is compared before Spark starts, because Spark would restore the state of a changed
  plan and fail deep inside, or worse (rule 22).
- `sealed/`: an epoch and its output, recorded before the first sink releases it. A batch that Spark executes again need not give the
  same rows in the same order, so the first try that ends is the epoch (rule 1); a later one is executed for Spark's state only.
- `cuts/`: what a micro-batch read and the positions of all sources after it, written after the last sink has released the epoch.
- `driver.json`: the driver that runs the query, at a URL, where nothing can be locked. The last one that was started is it; one that
  finds another there stops before it seals.
- `starts`: how often a driver has started, the generation that sinks compare (rule 18): a driver that still runs elsewhere is refused.
- `due`: when a batch is due although no rows come, of a query whose sources connectors of Spark's read.
- `stop`: the process that plans batches begins no further one while it exists; Spark itself can only break a query off. `held`: likewise where
  connectors of Spark's read, and that process can only hold the next batch back for a moment.

Spark may lose its own logs in a power cut, and plan a batch for the second time: then it is planned from the record here (rule 23).

Invariants: a file is whole when it exists; a sealed record is kept until the next but one epoch is sealed, and a cut for `CUTS_KEPT`
epochs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar
from uuid import uuid4

import msgspec
import polars as pl

from fordstone.connectors.base import Part
from fordstone.epochs.manifest import Cut
from fordstone.errors import CheckpointError, DamagedError, PlanMismatchError, StorageError, StoreLockedError
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.protocol.recovery import match_plan
from fordstone.spark.hosted.packing import decode, encode
from fordstone.spark.hosted.plan_batches import Work
from fordstone.spark.hosted.spark_files import spark_files
from fordstone.storage.remote import open_remote

IDENTITY_VERSION: Final = 2
CUTS_KEPT: Final = 200
"""More than the batches whose state Spark keeps (`spark.sql.streaming.minBatchesToRetain`, 100): it cannot go back further than that."""
IDENTITY_PATH: Final = "fordstone/query.json"
_OURS: Final = "fordstone"
_CUTS: Final = "fordstone/cuts"
_SEALED: Final = "fordstone/sealed"
_STARTS: Final = "fordstone/starts"
_STOP: Final = "fordstone/stop"
_DRIVER: Final = "fordstone/driver.json"
_DUE: Final = "fordstone/due"
_HELD: Final = "fordstone/held"
_SPARK_METADATA: Final = "metadata"
"""What Spark writes first of all, into the location of each stream."""
_SPARK_LOG: Final = "v1"
_NO_OFFSET: Final = "-"
_SUFFIX: Final = ".json"
_T = TypeVar("_T")


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
    seed_granted: int = 0
    """The generation that the edge had from its hub, under which the query writes to sinks."""
    bounded: bool = False
    connector_sources: tuple[str, ...] = ()
    """The sources that connectors of Spark's own read, in the order in which Spark's logs have them."""
    owner: str = ""
    """The identity of this query as a publisher: random, made with the location."""


class DriverMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A driver, as it is recorded."""

    token: str
    """Random: one per process."""
    host: str
    pid: int

    @classmethod
    def of_this_process(cls) -> DriverMark:
        return cls(token=uuid4().hex, host=socket.gethostname(), pid=os.getpid())


class EpochRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an epoch read. Work and input always give the same cut."""

    work: Work
    cut: Cut
    """The positions of the sources after it."""


class SealedEpoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one try at an epoch gave."""

    epoch: int
    attempt: str
    parts: dict[str, tuple[Part, ...]]
    """By sink: parts that its tasks wrote."""
    rows: dict[str, int]
    """By sink: how many rows are kept here for it, for sinks that take no parts."""
    record: EpochRecord

    @property
    def rows_out(self) -> int:
        """Dead letters are not counted."""
        parts = [part.rows for sink, parts in self.parts.items() for part in parts if not sink.startswith(DEAD_LETTERS)]
        return sum(parts) + sum(rows for sink, rows in self.rows.items() if not sink.startswith(DEAD_LETTERS))


@dataclass(frozen=True, slots=True)
class QueryFiles:
    """Our files below one checkpoint location. Also used by the process that plans batches."""

    root: str

    def cut(self, epoch: int) -> Cut:
        found = self.released(epoch)
        if found is None:
            raise CheckpointError(
                f"the cut of epoch {epoch} is missing ({self._place(_numbered(_CUTS, epoch))}), so the positions of its sources are "
                "unknown. Restore the checkpoint location as a whole, or begin with a new one."
            )
        return found.cut

    def released(self, epoch: int) -> EpochRecord | None:
        """Return the record of an epoch that all sinks have; None: not all have it, or it is no longer kept."""
        return self._read(_numbered(_CUTS, epoch), EpochRecord)

    def write_released(self, record: EpochRecord) -> None:
        """Record, durably, that all sinks have an epoch; a record that is there already is replaced by the same."""
        files, epoch = open_remote(self.root), record.cut.epoch
        files.put(_numbered(_CUTS, epoch), msgspec.json.encode(record))
        if epoch > CUTS_KEPT:
            files.remove(_numbered(_CUTS, epoch - CUTS_KEPT))

    def cut_epochs(self) -> tuple[int, ...]:
        return self._epochs_in(_CUTS)

    def record(self, epoch: int) -> EpochRecord | None:
        """Return the record of an epoch that was sealed; None: it was not, or is no longer kept."""
        released = self.released(epoch)
        if released is not None:
            return released
        sealed = self.sealed(epoch)
        return None if sealed is None else sealed.record

    def newest_record(self) -> int:
        """Return the newest epoch that has a record; 0: none has."""
        return max((*self.cut_epochs(), *self._epochs_in(_SEALED)), default=0)

    def sealed(self, epoch: int) -> SealedEpoch | None:
        """Return the record of an epoch; None: no try at it has come to its end."""
        return self._read(_numbered(_SEALED, epoch), SealedEpoch)

    def newest_sealed(self) -> SealedEpoch | None:
        epochs = self._epochs_in(_SEALED)
        return self.sealed(epochs[-1]) if epochs else None

    def seal(self, sealed: SealedEpoch, frames: Mapping[str, pl.DataFrame]) -> None:
        """Record an epoch, durably, with the rows of sinks that take no parts. The records before the last one go."""
        files = open_remote(self.root)
        for sink, frame in frames.items():
            files.put(_rows(sealed, sink), encode(frame))
        if not files.create(_numbered(_SEALED, sealed.epoch), msgspec.json.encode(sealed)):
            raise StoreLockedError(
                f"{self._place(_numbered(_SEALED, sealed.epoch))} was written meanwhile by another driver, which runs the same query. "
                "This one has stopped, and has released nothing of that epoch. Run each query once."
            )
        old = self.sealed(sealed.epoch - 2)
        if old is not None:
            # The record first: without it the rows are not looked for.
            for path in (_numbered(_SEALED, old.epoch), *(_rows(old, sink) for sink in old.rows)):
                files.remove(path)

    def sealed_rows(self, sealed: SealedEpoch, sink: str) -> pl.DataFrame:
        path = self._place(_rows(sealed, sink))
        try:
            frame = decode(open_remote(self.root).get(_rows(sealed, sink)))
        except (OSError, StorageError, pl.exceptions.PolarsError) as error:
            raise DamagedError(f"{path} cannot be read: {error}. Restore the checkpoint location.") from error
        if frame.height != sealed.rows[sink]:
            raise DamagedError(f"{path} has {frame.height} rows, {sealed.rows[sink]} were kept.")
        return frame

    def identity(self) -> QueryIdentity | None:
        """Return the identity of the query; None: the location is new."""
        found = self._read(IDENTITY_PATH, QueryIdentity)
        if found is not None and found.version != IDENTITY_VERSION:
            raise CheckpointError(
                f"{self._place(IDENTITY_PATH)} has version {found.version}; this fordstone reads version {IDENTITY_VERSION}."
            )
        return found

    def write_identity(self, identity: QueryIdentity) -> None:
        open_remote(self.root).put(IDENTITY_PATH, msgspec.json.format(msgspec.json.encode(identity), indent=1))

    def claim(self, wanted: QueryIdentity) -> QueryIdentity:
        """Return the identity to run with: the stored one if it fits; in a location where nothing has begun the wanted one."""
        found = self.identity()
        if found is None and self.has(_SPARK_METADATA):
            raise CheckpointError(
                f"{self._place(IDENTITY_PATH)} is missing, although a query has run here, so it is unknown what its state belongs to. "
                "Restore the checkpoint location as a whole, or begin with a new one."
            )
        if found is None or not self.begun():
            # Nothing was released and nothing is kept: a first try that failed does not bind later ones.
            self.write_identity(wanted)
            return wanted
        difference = mismatch(found, wanted)
        if difference is not None:
            raise PlanMismatchError(
                f"the checkpoint location {self.root} belongs to another query.\n{difference}\n"
                "Add --fresh to start from the beginning: it sets aside the state and the outputs. To carry state over, make an edge checkpoint of this one "
                "(fordstone checkpoints import-spark) and begin from it (--from-checkpoint, --allow-new-state)."
            )
        return found

    def next_start(self) -> int:
        """Count a start of a driver, durably, and return its number. Called before sinks are opened."""
        number = (self._read(_STARTS, int) or 0) + 1
        open_remote(self.root).put(_STARTS, msgspec.json.encode(number))
        return number

    def has(self, path: str) -> bool:
        """Return whether Spark has a file of that path below the location."""
        return open_remote(self.root).exists(path)

    def begun(self) -> bool:
        """Return whether a batch was ever planned here, or a batch job came to its end."""
        return self.has("offsets/0") or any(self._epochs_in(one) for one in (_SEALED, _CUTS))

    def spark_committed(self) -> bool:
        """Return whether Spark has committed a batch, and so has state."""
        return any(name.isdigit() for name in open_remote(self.root).sizes("commits"))

    def repair_spark(self) -> None:
        """Set aside what a power cut has torn of Spark's files. Called before Spark starts; `DamagedError` if that is not enough."""
        found, spark = self.identity(), spark_files(self.root)
        if found is None or spark is None:
            return
        newest = self.newest_record()
        spark.repair(
            first_epoch=found.first_epoch, recorded=lambda epoch: self.record(epoch) is not None, newest=newest
        )

    def take_over(self, driver: DriverMark) -> None:
        """Record that this driver runs the query from now on, and remove the temporary files of earlier ones."""
        files = open_remote(self.root)
        files.put(_DRIVER, msgspec.json.encode(driver))
        for directory in (_OURS, _CUTS, _SEALED):
            files.remove_leftovers(directory)

    def check_driver(self, driver: DriverMark) -> None:
        """Raise `StoreLockedError` if another driver has taken the query over."""
        found = self._read(_DRIVER, DriverMark)
        if found is not None and found != driver:
            raise StoreLockedError(
                f"the checkpoint location {self.root} was taken over by another driver (process {found.pid} on {found.host}), which was "
                "started later. This one has stopped, and has lost nothing. Run each query once."
            )

    def spark_offset(self, batch: int, number: int) -> str | None:
        """Return what Spark's log has of one of the query's sources, by its place, for a batch that was planned; None: no offset yet."""
        path = f"offsets/{batch}"
        try:
            version, _, *offsets = open_remote(self.root).get(path).decode().splitlines()
        except (OSError, StorageError, ValueError) as error:
            raise DamagedError(
                f"{self._place(path)} cannot be read: {error}. Restore the checkpoint location as a whole."
            ) from error
        if version != _SPARK_LOG or number >= len(offsets):
            raise DamagedError(
                f"{self._place(path)} is not a log of this query as Spark 4 writes it: it begins with {version!r} and has {len(offsets)} sources."
            )
        return None if offsets[number] == _NO_OFFSET else offsets[number]

    def spark_start(self, number: int) -> str:
        """Return where Spark has begun one of the query's sources, as an offset."""
        path = f"sources/{number}/0"
        try:
            version, _, text = open_remote(self.root).get(path).decode().lstrip("\0").partition("\n")
        except (OSError, StorageError, ValueError) as error:
            raise DamagedError(
                f"{self._place(path)} cannot be read: {error}. Restore the checkpoint location as a whole, or begin with a new one."
            ) from error
        if version != _SPARK_LOG:
            raise DamagedError(f"{self._place(path)} is not as Spark 4 writes it: it begins with {version!r}.")
        return text

    def put_due(self, due_us: int | None) -> None:
        """Record when, in microseconds since 1970, a batch is due although no rows come."""
        open_remote(self.root).put(_DUE, msgspec.json.encode(due_us))

    def due_us(self) -> int | None:
        return self._read(_DUE, int | None)  # type: ignore[arg-type]  # msgspec takes it

    def request_stop(self) -> None:
        open_remote(self.root).put(_STOP, b"")

    def clear_stop(self) -> None:
        """Called before a query starts: one that was killed may have left the mark."""
        for path in (_STOP, _HELD):
            open_remote(self.root).remove(path)

    def hold(self) -> None:
        """Record that the process that plans batches holds the next one back for a while, because a stop was requested."""
        open_remote(self.root).put(_HELD, b"")

    def held(self) -> bool:
        return self.has(_HELD)

    def stop_requested(self) -> bool:
        return self.has(_STOP)

    def _place(self, path: str) -> str:
        return f"{self.root.rstrip('/')}/{path}"

    def _read(self, path: str, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode(open_remote(self.root).get(path), type=kind)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedError(
                f"{self._place(path)} is damaged: {error}. Restore the checkpoint location, or begin with a new one."
            ) from error

    def _epochs_in(self, directory: str) -> tuple[int, ...]:
        names = [
            name.removesuffix(_SUFFIX) for name in open_remote(self.root).sizes(directory) if name.endswith(_SUFFIX)
        ]
        return tuple(sorted(int(name) for name in names if name.isdigit()))


def _numbered(directory: str, epoch: int) -> str:
    return f"{directory}/{epoch:012d}{_SUFFIX}"


def _rows(sealed: SealedEpoch, sink: str) -> str:
    at = sorted(sealed.rows).index(sink)
    return f"{_SEALED}/{sealed.epoch:012d}-{sealed.attempt}-{at}.arrow"


def mismatch(found: QueryIdentity, wanted: QueryIdentity) -> str | None:
    """The reason why a query cannot resume from a checkpoint location; None: it can."""
    if found.pipeline != wanted.pipeline:
        return f"  it is that of pipeline {found.pipeline}, this is {wanted.pipeline}."
    match = match_plan(found.step_digests, wanted.step_digests)
    if not match.whole:
        # Spark can neither drop nor add state: the last lines, which offer that, are the edge's.
        return "\n".join(line for line in match.explain().splitlines() if not line.startswith("--"))
    if found.stages != wanted.stages:
        return "  the steps are the same, but stand at other depths now, so that their state would be looked for elsewhere."
    if found.connector_sources != wanted.connector_sources:
        names = ", ".join(found.connector_sources or wanted.connector_sources)
        was, now = (
            ("Spark's own connector", "Fordstone")
            if found.connector_sources
            else ("Fordstone", "Spark's own connector")
        )
        return f"  source {names} was read by {was}, and is to be read by {now} now: Spark's logs have the positions of the one only."
    if found.bounded != wanted.bounded:
        was = "bounded" if found.bounded else "unbounded"
        return f"  its input was {was}."
    return None
