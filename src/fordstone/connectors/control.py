"""Connector `control`: a control table as nodes read it and as the center writes it.

The source reads only the folder (`ControlLog`) that `edge.link.control` fills, so it needs no network, works offline and replays
exactly. It has one partition, whose positions are the table's versions. Its rows carry `__op` and `__version` beside the table's
columns. The sink publishes each epoch of the center's rows as a version, through `hub.client.publisher`.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import polars as pl

from fordstone.connectors.base import (
    Capability,
    Chunk,
    ConnectorKind,
    Delivery,
    OpenContext,
    Reader,
    Sink,
    SinkDelayedError,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.epochs.manifest import PartitionCut
from fordstone.epochs.run_file import decode_run, encode_run
from fordstone.errors import ConfigError, DamagedError, HubAwayError, SourceError, StorageError
from fordstone.hub.client.publisher import ControlPublisher, apply_changes
from fordstone.hub.messages import NodePosition
from fordstone.lang.schema import Schema
from fordstone.operators.base import DELETE, OP, UPSERT
from fordstone.operators.join.lookup import VERSION
from fordstone.plan.ids import PartitionId, Position, checked_name
from fordstone.plan.plan import ConnectorSpec
from fordstone.protocol.chain import CHAIN_START
from fordstone.state.base import RunRef
from fordstone.storage.atomic import AtomicWriter
from fordstone.storage.disk import Disk, FatalStorageError

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient

log = logging.getLogger(__name__)

PARTITION: Final = PartitionId("control")
COMPACT_FILES_MIN: Final = 16
"""Fewer files are not compacted, since the whole table is rewritten for it."""
COMPACT_FILES_MAX: Final = 512
"""This many files are compacted even if they have few rows compared with the table."""
COMPACT_SHARE: Final = 4
"""Fewer files are compacted when they have at least one row per this many rows of the table."""
_CHANGE: Final = re.compile(r"(\d{12,19})-(\d{12,19})-(\d{1,12})-([0-9a-f]{64})?-([0-9a-f]{64})\.arrow")
_BASE: Final = re.compile(r"base-(\d{12,19})-(\d{1,12})-([0-9a-f]{64})?-([0-9a-f]{64})\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file."""

    version: int
    after: int
    """The version before it; of a base 0."""
    rows: int
    chain: str
    """At the version, in the hub's log of the table."""
    digest: str
    base: bool = False

    @property
    def name(self) -> str:
        if self.base:
            return f"base-{self.version:012}-{self.rows}-{self.chain}-{self.digest}.arrow"
        return f"{self.version:012}-{self.after:012}-{self.rows}-{self.chain}-{self.digest}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Rows with `__op`, and the version of each row."""

    frame: pl.DataFrame
    versions: pl.Series
    position: int


class ControlLog:
    """The folder in which a node keeps its copy of a control table: what changed, version by version.

    Each version is one Arrow file, `<version>-<after>-<rows>-<chain>-<digest>.arrow`: what changed since version `after`. A prefix of
    them may be compacted into `base-<version>-<rows>-<chain>-<digest>.arrow`, the whole table. The chain distinguishes the version from
    others of its number (rule 24). May be used from any thread: one adds, others read and compact.

    Invariants: a version is visible to readers only when it is durable; after a crash a prefix of the added versions is found;
    rows have the digest in the file's name; versions grow, and each file names its predecessor, so that a missing one is noticed.
    """

    def __init__(self, disk: Disk, folder: str, *, schema: Schema, keys: Sequence[str]) -> None:
        """Open the folder, creating it if missing, and remove damaged files with all versions after them."""
        self.folder = folder
        self.schema = schema
        self.keys = tuple(keys)
        self.columns = pl.Schema(dict(schema.polars) | {OP: pl.String()})
        """The stored columns."""
        self._disk = disk
        self._writer = AtomicWriter(disk)
        self._mutex = threading.RLock()
        disk.make_dirs(folder)
        self._entries = self._opened()

    @property
    def newest(self) -> int:
        """The newest version that is here; 0: none."""
        entries = self._entries
        return entries[-1].version if entries else 0

    @property
    def chain(self) -> str:
        """At the newest version."""
        entries = self._entries
        return entries[-1].chain if entries else CHAIN_START

    def chain_at(self, version: int) -> str:
        """The chain at a version that is here; empty: it is not."""
        return next((entry.chain for entry in reversed(self._entries) if entry.version == version), CHAIN_START)

    @property
    def files(self) -> int:
        return len(self._entries)

    def add(self, version: int, changes: pl.DataFrame, *, chain: str) -> None:
        """Store what changed since the newest version here. Durable on return; `StorageError` leaves all as it was."""
        with self._mutex:
            if version <= self.newest:
                raise ValueError(f"version {version} does not follow {self.newest}")
            entry = self._write(changes, version, chain, after=self.newest)
            self._entries = [*self._entries, entry]

    def begin_at(self, version: int, table: pl.DataFrame, *, chain: str) -> None:
        """Put the whole table as of a later version in place of all that is here."""
        with self._mutex:
            if version <= self.newest:
                raise ValueError(f"version {version} does not follow {self.newest}")
            self._replace(self._entries, self._write(table, version, chain, after=0, base=True))

    def read(self, position: int, rows_max: int, until: int | None = None) -> Changes | None:
        """Whole versions after `position`, about `rows_max` rows of them; None: there are none, or `until` is reached."""
        frames: list[pl.DataFrame] = []
        versions: list[pl.Series] = []
        newest = position
        with self._mutex:
            for entry in self._entries:
                if entry.version <= position or (until is not None and newest >= until):
                    continue
                if frames and sum(frame.height for frame in frames) + entry.rows > rows_max:
                    break
                self._check_follows(entry, newest, until)
                frames.append(self._frame(entry))
                versions.append(pl.Series([entry.version], dtype=pl.Int64).new_from_index(0, entry.rows))
                newest = entry.version
            if until is not None and not frames and position < until:
                raise self._gone(position, f"version {until} is needed again and is not there")
        if not frames:
            return None
        return Changes(frame=pl.concat(frames), versions=pl.concat(versions), position=newest)

    def table(self) -> pl.DataFrame:
        """The table as of the newest version: its columns, and `__op`, always 'upsert'."""
        with self._mutex:
            return self._table_of(self._entries)

    def compact(self, version: int) -> None:
        """Replace all files up to `version` with one, if that is worth it. No reader may start before it any more."""
        with self._mutex:
            old = [entry for entry in self._entries if entry.version <= version]
            changes = sum(entry.rows for entry in old if not entry.base)
            table = sum(entry.rows for entry in old if entry.base)
            if len(old) < COMPACT_FILES_MIN or (len(old) < COMPACT_FILES_MAX and changes * COMPACT_SHARE < table):
                return
            self._replace(old, self._write(self._table_of(old), old[-1].version, old[-1].chain, after=0, base=True))

    def _replace(self, old: Sequence[Entry], base: Entry) -> None:
        """`old`: the first ones."""
        self._entries = [base, *self._entries[len(old) :]]
        for entry in old:
            # Need not be durable: opening removes files that are older than a base.
            self._disk.remove(f"{self.folder}/{entry.name}")

    def _write(self, rows: pl.DataFrame, version: int, chain: str, *, after: int, base: bool = False) -> Entry:
        ref, data = encode_run(rows.select(list(self.columns)).cast(self.columns), "zstd")
        entry = Entry(version=version, after=after, rows=ref.rows, chain=chain, digest=ref.digest, base=base)
        self._writer.write(f"{self.folder}/{entry.name}", data)
        return entry

    def _check_follows(self, entry: Entry, newest: int, until: int | None) -> None:
        """Raise unless the entry is the next one to read: what was compacted cannot be read in parts."""
        if (entry.base and newest > 0) or (not entry.base and entry.after != newest):
            raise self._gone(newest, f"the next one there is {entry.version}, which follows {entry.after}")
        if until is not None and entry.version > until:
            raise self._gone(newest, f"version {until} is needed again and was compacted")

    def _gone(self, position: int, what: str) -> SourceError:
        return SourceError(
            f"control table in {self.folder}: what follows version {position} is gone: {what}.\n"
            "Bring the folder back from a copy that is as old as the checkpoint, or start over with an empty state directory."
        )

    def _frame(self, entry: Entry) -> pl.DataFrame:
        data = self._disk.read(f"{self.folder}/{entry.name}")
        return decode_run(data, RunRef(digest=entry.digest, size_bytes=len(data), rows=entry.rows))

    def _table_of(self, entries: Sequence[Entry]) -> pl.DataFrame:
        frames = [self._frame(entry) for entry in entries]
        return apply_changes(pl.DataFrame(schema=self.columns), frames, self.keys)

    # Opening.

    def _opened(self) -> list[Entry]:
        found = self._listed()
        bases = [entry for entry in found if entry.base and not self._is_lost(entry)]
        kept = [max(bases, key=lambda entry: entry.version)] if bases else []
        for entry in sorted((entry for entry in found if not entry.base), key=lambda entry: entry.version):
            newest = kept[-1].version if kept else 0
            if entry.version <= newest:
                continue
            if self._is_lost(entry, newest):
                # Later versions need it. The hub has all of them.
                break
            kept.append(entry)
        names = {entry.name for entry in kept}
        for name in self._disk.list(self.folder):
            if name not in names:
                self._disk.remove(f"{self.folder}/{name}")
        # Removed files must not come back beside versions that are fetched again, and renamed ones must stay.
        self._disk.fsync_dir(self.folder)
        return kept

    def _listed(self) -> list[Entry]:
        found = []
        for name in self._disk.list(self.folder):
            if (change := _CHANGE.fullmatch(name)) is not None:
                version, after, rows, chain, digest = change.groups(default=CHAIN_START)
                found.append(Entry(version=int(version), after=int(after), rows=int(rows), chain=chain, digest=digest))
            elif (base := _BASE.fullmatch(name)) is not None:
                version, rows, chain, digest = base.groups(default=CHAIN_START)
                found.append(
                    Entry(version=int(version), after=0, rows=int(rows), chain=chain, digest=digest, base=True)
                )
        return found

    def _is_lost(self, entry: Entry, newest: int = 0) -> bool:
        """Whether a file is of no use: damaged, of another plan, or without its predecessor."""
        try:
            fits = self._frame(entry).schema == self.columns
            problem = None if fits else "it has the columns of another plan"
        except DamagedError as error:
            problem = str(error)
        if entry.after != newest:
            problem = f"it follows version {entry.after}, and the one before it is {newest}"
        if problem is not None:
            log.warning("control version lost", extra={"folder": self.folder, "file": entry.name, "problem": problem})
        return problem is not None


def changes_between(before: pl.DataFrame, after: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """What turns one table into another: new and changed rows, and deletes. Both have `__op`, and one row per key."""
    key, others = list(keys), [name for name in after.columns if name not in keys]
    known = before.select(*key, *(pl.col(name).alias(f"__was_{name}") for name in others))
    joined = after.join(known, on=key, how="left", maintain_order="left")
    # A row without a partner has null beside its `__op`.
    other = [
        _comparable(pl.col(name), kind).ne_missing(_comparable(pl.col(f"__was_{name}"), kind))
        for name, kind in after.schema.items()
        if name in others
    ]
    changed = joined.filter(pl.any_horizontal(other)).select(after.columns)
    gone = before.join(after.select(key), on=key, how="anti", maintain_order="left")
    return pl.concat([changed, gone.with_columns(pl.lit(DELETE).alias(OP))])


def _comparable(column: pl.Expr, kind: pl.DataType) -> pl.Expr:
    """A value that is equal only for the same value: as text the zeros differ, and all NaNs are equal."""
    return column.cast(pl.String) if kind.is_float() else column


class ControlKind(ConnectorKind):
    """The kind `control`."""

    capabilities = frozenset({Capability.AT_HUB, Capability.FEEDS_BACK, Capability.NEEDS_HOME})

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """The hub publishes a batch of an owner once."""
        del spec
        return Delivery.EXACTLY_ONCE

    def fences(self, spec: ConnectorSpec) -> bool:
        """The hub does: of two publishers, and of two starts of one, the former is refused. So is one from older state (`protocol.publication`)."""
        del spec
        return True

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        """Open the folder of the table in the pipeline's directory. `edge.link` fills it."""
        name, home = checked_name(spec.options["control"], "control"), context.home_of(spec)
        keys = tuple(spec.options.get("keys", ()))
        table = ControlLog(home.disk, f"{home.directory}/control/{name}", schema=options.schema, keys=keys)
        return ControlSource(table, bounded=options.bounded)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        del context
        if spec.at is msgspec.UNSET or "url" not in spec.at:
            raise ConfigError(
                f"control table {spec.options['control']} is published through a hub: give its address (--hub)."
            )
        # Nodes that only read the table need no client.
        from fordstone.hub.client.address import HubAddress  # noqa: PLC0415 - see above
        from fordstone.hub.client.client import HubClient  # noqa: PLC0415 - see above

        return ControlSink(
            HubClient(HubAddress.from_at(spec.at)),
            stream,
            pipeline=spec.options["pipeline"],
            control=spec.options["control"],
            keys=tuple(spec.options["keys"]),
        )


class ControlSource(Source):
    """The folder of a control table as a source."""

    def __init__(self, table: ControlLog, *, bounded: bool) -> None:
        self.log = table
        self._bounded = bounded

    def partitions(self) -> Sequence[PartitionId]:
        return (PARTITION,)

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        del partition
        return _ControlReader(self.log, int(position), bounded=self._bounded, with_positions=with_positions)

    def size_bytes(self) -> int | None:
        """Nothing: a progress bar does not wait for it."""
        return 0

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        del cuts
        return 1.0

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Compact versions that will not be read again."""
        if PARTITION not in cuts:
            return
        try:
            self.log.compact(cuts[PARTITION].position)
        except FatalStorageError:
            raise
        except (StorageError, DamagedError) as error:
            # It is tried again with the next call.
            log.warning("control versions not compacted", extra={"folder": self.log.folder, "problem": str(error)})


class _ControlReader(Reader):
    """Reads whole versions."""

    def __init__(self, table: ControlLog, position: int, *, bounded: bool, with_positions: bool) -> None:
        self._log = table
        self._position = position
        self._bounded = bounded
        self._with_positions = with_positions

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """The next versions. Of bounded input, what is there when it is asked for is all there is."""
        found = self._log.read(self._position, rows_max, None if until is None else int(until))
        if found is None:
            if not self._bounded or until is not None:
                return None
            return self._chunk(pl.DataFrame(schema=self._log.columns), pl.Series(dtype=pl.Int64), ended=True)
        self._position = found.position
        return self._chunk(found.frame, found.versions, ended=False)

    def _chunk(self, frame: pl.DataFrame, versions: pl.Series, *, ended: bool) -> Chunk:
        return Chunk(
            frame=frame.with_columns(versions.alias(VERSION)),
            position=Position(self._position),
            # A position is that of a whole version; rows of tables are never given ids.
            row_positions=versions - 1 if self._with_positions else None,
            ended=ended,
        )

    def identity(self) -> str:
        """The version that was read, and the chain at it."""
        return NodePosition(self._position, self._log.chain_at(self._position)).identity

    def close(self) -> None:
        """Nothing is held open."""


class ControlSink(Sink):
    """Publishes one control table. Used by one thread at a time."""

    def __init__(
        self, client: HubClient, stream: SinkStream, *, pipeline: str, control: str, keys: Sequence[str]
    ) -> None:
        self._client = client
        self._control = control
        self._publisher = ControlPublisher(
            client,
            pipeline=pipeline,
            control=control,
            keys=keys,
            start=stream.start or secrets.token_hex(16),
            resumes_after=stream.resumes_after,
            discard_later=stream.discard_later,
        )
        self._columns = pl.Schema(dict(stream.schema.polars) | {OP: pl.String()})
        # Without a name for the checkpoint, rows may be published again after a restart, under another owner.
        self._owner = stream.owner or secrets.token_hex(16)
        self._written = 0

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Publish the epoch's rows as a version; an epoch without rows is none."""
        self._publish(epoch, frame)

    def write(self, frame: pl.DataFrame) -> None:
        """Publish rows at once. After a restart they may come again, from another owner: such batches have no lasting numbers."""
        if not self._written:
            self._owner = secrets.token_hex(16)
        self._written += 1
        self._publish(self._written, frame)

    def close(self) -> None:
        self._client.close()

    def _publish(self, batch: int, frame: pl.DataFrame) -> None:
        if OP not in frame.columns:
            frame = frame.with_columns(pl.lit(UPSERT).alias(OP))
        rows = frame.select(list(self._columns)).cast(self._columns)
        try:
            self._publisher.publish(rows, owner=self._owner, batch=batch)
        except HubAwayError as error:
            # Without the cause: Spark recognises errors of users by their class names in the text, and this is none.
            raise SinkDelayedError(
                f"control table {self._control} cannot be published: {error} It will be tried again."
            ) from None
