"""A spec that carries an object of this process beside its fields.

The object is no field: it is not part of the plan's JSON nor of equality, and a plan read back from JSON lacks it.

The seam of connectors: where rows come from and where they go.

A connector in a pipeline is a `ConnectorSpec`: a kind and plain options, fit to stand in a plan. `registry.open_source`
and `open_sink` make the live object on the node that runs it.

The seam for those who add a system: one `ConnectorKind` for each kind of connector.

Ours stand in `registry`; others are found through the entry point group `fordstone.connectors`, whose names are kinds
and whose values are subclasses of `ConnectorKind`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
import polars as pl

from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.plan.plan import ConnectorSpec

ClockUs = Callable[[], int]
"""Microseconds on a clock that never goes back."""


def system_clock_us() -> int:
    """The machine's own monotonic clock."""
    return time.monotonic_ns() // 1_000


class ConnectorKind(ABC):  # noqa: B024 - each kind overrides the half it has; the other half refuses by itself
    """Opens the connectors of one kind. Made without arguments, once per call; keeps nothing.

    A kind that cannot be read, or cannot be written, leaves that half alone: asking for it is then an error that says so.
    """

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """What a source gives at best. Called while a pipeline is built: may not touch the system."""
        raise ConfigError(f"connector {spec.kind!r} cannot be read from: use it as a sink.")

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """What a sink gives at best. Called while a pipeline is built: may not touch the system."""
        raise ConfigError(f"connector {spec.kind!r} cannot be written to: use it as a source.")

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, clock_us: ClockUs) -> Source:
        """Make the live source, on the node that runs it, once per start."""
        del options, clock_us
        raise ConfigError(f"connector {spec.kind!r} cannot be read from: use it as a sink.")

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream) -> Sink:
        """Make the live sink, on the node that runs it, before any row comes."""
        del stream
        raise ConfigError(f"connector {spec.kind!r} cannot be written to: use it as a source.")

    def open_parts(self, spec: ConnectorSpec, stream: SinkStream) -> PartWriter | None:
        """Make a writer of parts, wherever rows are; None: all rows of an epoch go through `open_sink`'s sink."""
        del spec, stream
        return None


__all__ = [
    "Chunk",
    "ConnectorSpec",
    "Delivery",
    "Idleness",
    "Part",
    "PartWriter",
    "PartedSink",
    "ReadPlan",
    "Reader",
    "Rejected",
    "Sink",
    "SinkStream",
    "Source",
    "SourceOptions",
]

REACH_ROWS: Final = 1 << 16
"""How many rows `Source.reach` reads at a time, if it reads."""


class Delivery(StrEnum):
    """What a connector can give at best, strongest first."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"


class Idleness(StrEnum):
    """What the silence of a partition means."""

    EXPECTED = "expected"
    """Rows may come at any time. Silent for long enough, it is no longer waited for."""
    RESTING = "resting"
    """All of it was read, and its far end has said that it rests: it is not waited for. It may come back."""
    UNKNOWN = "unknown"
    """The far end cannot be asked: silence means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Input that could not be read as a row of the schema."""

    position: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one read gave: rows in the source's schema, and where the partition stands behind them."""

    frame: pl.DataFrame
    position: Position
    row_positions: pl.Series | None = None
    """The position of each row (Int64), when the reader was opened with `with_positions`."""
    rejected: tuple[Rejected, ...] = ()
    ended: bool = False
    """Nothing will ever follow: bounded input has been read to its end."""
    watermark_us: int | None = None
    """Of a source that declares its time: how far it has come behind these rows."""
    late: pl.Series | None = None
    """Of a source that declares its time: which rows are late (Boolean); None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How far a read would come, asked before it is made."""

    position: Position
    ended: bool = False
    """Bounded input ends there: nothing will ever follow."""


class Reader(ABC):
    """Reads one partition. Used by one thread. `close` may not be called at all after a crash."""

    @abstractmethod
    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """Give the next rows, at most about `rows_max`, or None when there is nothing now. Never waits.

        With `until` (a position that an earlier read of this partition or `Source.reach` gave, here or in another
        process), reads up to it and not past it, whatever has come since: None then means that it is reached. What has
        gone since is an error. Reading twice from one position gives the same rows, however the reads are cut.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""


class Source(ABC):
    """A place rows come from, as replayable partitions."""

    @property
    @abstractmethod
    def delivery(self) -> Delivery:
        """What a restart from a position gives."""

    @abstractmethod
    def partitions(self) -> Sequence[PartitionId]:
        """The partitions there are now, in a stable order. Called at the start and then about once a second; may grow."""

    @abstractmethod
    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        """Start reading at `position` (0 is the beginning)."""

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """Where reading about `rows_max` rows from `position` would end now; `position` itself when nothing is there.

        Called by an engine that plans reads in one process and makes them in others, once a micro-batch for each
        partition, on a source that it keeps. A reader may stop there, and finds the same rows before it whatever comes
        later. Twice as many rows as asked for are not too many; any number above what there is means all of it.

        Sources that can tell without reading override it: here the rows are read, some at a time, and thrown away.
        """
        reader = self.open(partition, position, with_positions=False)
        reach, rows = ReadPlan(position=position), 0
        try:
            while rows < max(1, rows_max) and not reach.ended:
                chunk = reader.read(min(max(1, rows_max - rows), REACH_ROWS))
                if chunk is None:
                    break
                stands = chunk.position <= reach.position
                reach = ReadPlan(position=chunk.position, ended=chunk.ended)
                if stands:
                    break
                rows += chunk.frame.height + len(chunk.rejected)
        finally:
            reader.close()
        return reach

    def outlook(self, partition: PartitionId, position: Position) -> Idleness:
        """What it means that nothing comes behind this position. Asked at every barrier of input without end; never waits."""
        del partition, position
        return Idleness.EXPECTED

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Hear that no run will ever start before these positions again. Called now and then; may be called with the same again.

        Only sources whose far end keeps rows for us until we are done with them have anything to do.
        """
        del cuts

    def size_bytes(self) -> int | None:
        """How much there is to read in all, if known: for progress bars only."""
        return None

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        """How much of bounded input lies before these cuts, from 0 to 1, if known. For progress bars: asked twice a second."""
        del cuts
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStream:
    """What a sink is told about the stream it takes."""

    step: str
    schema: Schema
    upsert_key: tuple[str, ...] | None = None
    """None: rows are appended. Else each row replaces the one before with the same key; `__op` is 'upsert' or 'delete'."""
    sealed: str | None = None
    """An attempt whose parts are still to be released: a sink that sweeps up when it is opened leaves those alone."""
    owner: str = ""
    """Random, kept with the checkpoints of whoever writes: a state begun anew is another owner. Empty: unknown."""


class Sink(ABC):
    """A place rows go. Used by one thread at a time."""

    @property
    @abstractmethod
    def delivery(self) -> Delivery:
        """`EXACTLY_ONCE` if `release` of an epoch that is already there changes nothing."""

    @abstractmethod
    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Make the rows of a sealed epoch visible, durably, all at once. Called in order of epochs, after the seal.

        After a crash the last epoch may be released again with the same rows: a sink that says `EXACTLY_ONCE` then does
        nothing. Epochs without rows are released too.
        """

    @abstractmethod
    def write(self, frame: pl.DataFrame) -> None:
        """Let rows out now, without waiting for a seal (`at_once`, at-least-once and at-most-once). May repeat on replay."""

    @abstractmethod
    def close(self) -> None:
        """Finish files and connections. May not be called at all after a crash."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some rows of an epoch, written and durable, but not visible yet."""

    name: str
    rows: int


class PartWriter(ABC):
    """Writes parts of epochs for a `PartedSink`, in another process than the sink's. Keeps nothing between calls."""

    @abstractmethod
    def write(self, epoch: int, attempt: str, number: int, frame: pl.DataFrame) -> Part:
        """Write rows durably where nobody sees them yet. Called at most once with success for a number of an attempt.

        A failed call may be made again, here or elsewhere. `attempt` is new for each try at an epoch; parts of attempts
        that were never released are swept away when the sink is next opened or the epoch is released.
        """


class PartedSink(Sink):
    """A sink whose epochs may be written in parts by several processes, and made visible by one."""

    @abstractmethod
    def release_parts(self, epoch: int, attempt: str, parts: Sequence[Part]) -> None:
        """As `release`, of the rows that these parts hold together. No parts: an epoch without rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What the engine tells a source when it opens it."""

    schema: Schema
    bounded: bool
    """Stop at what is there now, instead of waiting for more."""
    options: dict[str, Any] = field(default_factory=dict)


class LiveSpec(ConnectorSpec, frozen=True, dict=True):
    """Made by `LiveSpec.around`; read by `live_of`."""

    @classmethod
    def around(cls, live: object, *, kind: str, options: dict[str, Any] | None = None) -> LiveSpec:
        """A spec of this kind with its object at hand."""
        spec = cls(kind=kind, options=options or {})
        spec.__dict__["live"] = live
        return spec


def live_of(spec: ConnectorSpec) -> object | None:
    """The object that the spec carries, unless it came from JSON."""
    return spec.__dict__.get("live") if isinstance(spec, LiveSpec) else None
