"""The seam of connectors: where rows come from and where they go.

A connector in a pipeline is a `ConnectorSpec`: a kind and plain options that a plan can store. One `ConnectorKind` per kind says what
it can do (`capabilities`, delivery) and opens the live `Source` or `Sink` on the node that runs it. Our kinds are listed in
`registry`; other packages offer theirs through the entry point group `fordstone.connectors`, whose names are kinds and whose values are
subclasses of `ConnectorKind`. Engines ask for capabilities and never compare the names of kinds.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import polars as pl

from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, FencedError, NotInstalledError, SinkError, StorageError
from fordstone.lang.choices import check_options, check_word
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.plan.plan import ConnectorSpec as ConnectorSpec  # noqa: PLC0414 - connectors import it from here
from fordstone.protocol.claim import Keep, OwnedByNewer, SinkWriter, Take, decide_claim
from fordstone.protocol.lease import NO_FENCE, Fence
from fordstone.protocol.partitions import SeriesPlace
from fordstone.protocol.progress import NotRead
from fordstone.storage.clock import monotonic_clock_us
from fordstone.storage.disk import Disk

ClockUs = Callable[[], int]
"""Returns microseconds on a clock that never goes back."""
_Options = TypeVar("_Options", bound=msgspec.Struct)
ALL_ROWS: Final = 1 << 62
"""For `Source.plan_read`: everything that is there."""
PLAN_READ_ROWS: Final = 1 << 16
"""How many rows `Source.plan_read` reads at a time, if it has to read."""


class Delivery(StrEnum):
    """The strongest delivery that a connector can give, strongest first."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTrouble:
    """What is wrong with a source that can nonetheless be read on."""

    away: str | None = None
    """Why nothing can be read now: the system that keeps the input cannot be reached."""
    not_read: tuple[NotRead, ...] = ()
    """The partitions that are not read on, at a hub."""


class Idleness(StrEnum):
    """What the silence of a partition means."""

    EXPECTED = "expected"
    """Rows may come at any time. After `idle_after` without rows the partition no longer holds the watermark back."""
    FINISHED = "finished"
    """All of it was read, and its writer has finished: it does not hold the watermark back. It may start again."""
    UNKNOWN = "unknown"
    """The system cannot be asked, so silence means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Input that could not be read as a row of the schema."""

    position: int
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The result of one read: rows in the source's schema, and the position after them."""

    frame: pl.DataFrame
    position: Position
    row_positions: pl.Series | None = None
    """The position of each row (Int64), when the reader was opened with `with_positions`."""
    rejected: tuple[Rejected, ...] = ()
    ended: bool = False
    """Bounded input has been read to its end: nothing follows."""
    watermark_us: int | None = None
    """Of a source that declares its time: the watermark after these rows."""
    late: pl.Series | None = None
    """Of a source that declares its time: the watermark that each row was below where it was judged, Int64, null for rows in time
    (rule 6); None: all are in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How far a read would come, as planned before it is made."""

    position: Position
    ended: bool = False
    """Bounded input ends at the position: nothing follows."""


class Reader(ABC):
    """Reads one partition. Used by one thread. `close` may not be called at all after a crash."""

    @abstractmethod
    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """Return the next rows, at most about `rows_max`, or None when there is nothing now. Never waits.

        With `until` (a position that an earlier read of this partition or `Source.plan_read` gave, here or in another
        process), read up to it and not past it, whatever was added since: None then means that it is reached. Input that was
        removed since is an error. Reading twice from one position gives the same rows, however the reads are cut.
        """

    def identity(self) -> str:
        """Return what tells the input that was read from other input of the same name, to be kept with the position; empty: nothing.

        Called at barriers after rows were read.
        """
        return ""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""


class Source(ABC):
    """A place rows come from, as replayable partitions."""

    @abstractmethod
    def partitions(self) -> Sequence[PartitionId]:
        """Return the present partitions in a stable order. Called at the start and then about once per second; the list may grow."""

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Take in the partitions of a checkpoint, with what `identity` gave for them. Called before `partitions` and `open`."""
        del cuts

    def expect_reads(self, reads: Mapping[PartitionId, tuple[Position, Position]]) -> None:
        """Take in which reads follow in this process, from where to where. Called once, after `restore`, by a task of an engine that plans.

        A source that asks a server may ask for many of them at once.
        """
        del reads

    def identity(self, partition: PartitionId, position: Position) -> str:
        """As `Reader.identity`, of what is before the position. Called by an engine that plans reads without a reader."""
        del partition, position
        return ""

    @abstractmethod
    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        """Start reading at `position` (0 is the beginning)."""

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """Return where reading about `rows_max` rows from `position` would end now; `position` itself if there are none.

        Called by an engine that plans reads in one process and makes them in others, once per micro-batch and
        partition, on a source that it keeps open. A reader can stop at the planned position and finds the same rows before it
        whatever is added later. The plan may exceed `rows_max` by a factor of two.

        This implementation reads the rows and drops them. Sources that know the answer without reading override it.
        """
        reader = self.open(partition, position, with_positions=False)
        planned, rows = ReadPlan(position=position), 0
        try:
            while rows < max(1, rows_max) and not planned.ended:
                chunk = reader.read(min(max(1, rows_max - rows), PLAN_READ_ROWS))
                if chunk is None:
                    break
                unchanged = chunk.position <= planned.position
                planned = ReadPlan(position=chunk.position, ended=chunk.ended)
                if unchanged:
                    break
                rows += chunk.frame.height + len(chunk.rejected)
        finally:
            reader.close()
        return planned

    def still_planned(self, partition: PartitionId, position: Position, until: Position) -> Position:
        """Return how far a planned read, of which nothing was released, may still go: `until`, or less if it turned out to be unreadable.

        Called by an engine that plans reads, before it makes one that was planned by another process.
        """
        del partition, position
        return until

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        """Say what it means that nothing follows this position. Called at every barrier of unbounded input; must not wait."""
        del partition, position
        return Idleness.EXPECTED

    def trouble(self) -> SourceTrouble:
        """Say what is wrong with input that reading goes on without. Called up to 20 times a second; must not wait."""
        return SourceTrouble()

    def ended(self) -> bool:
        """Return whether no partition will be added, and each present one ends where its reader says so (`Chunk.ended`).

        Called at the end of epochs of unbounded input; must not wait. Once true, it stays true. A run ends by itself when all its
        sources have ended and were read to their ends, as a bounded one does. By default there may always be more.
        """
        return False

    def series(self, partition: PartitionId) -> Sequence[SeriesPlace]:
        """Return the series that a partition may belong to, by its name: in a series, later partitions continue earlier ones.

        Called at every barrier of unbounded input with event time. A partition that was read to its end no longer holds the
        watermark back when a later one of its series has rows, and the times of the rows agree (`protocol.partitions.followers`).
        """
        del partition
        return ()

    def is_quiet(self, partition: PartitionId) -> bool:
        """Return whether a partition's last write is old enough to take it for finished if a later one seems to continue it.

        Called at barriers where it was read to its end, and it is not certain that its series is one.
        """
        del partition
        return False

    def plan_rest(self, partition: PartitionId, position: Position) -> Position | None:
        """Return where a partition that another one continues ends, where nothing follows `position` but at most an unfinished row.

        Called at barriers where `plan_read` or a reader finds nothing. `position` itself: nothing is left. A larger one: a reader
        reads up to it (`until`), and takes what is there as the last row. None: the last row may still be written.
        """
        del partition
        return position

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Acknowledge: no run will start before these positions again. Called from time to time, also with the same positions.

        Only sources over a system that retains rows until they are acknowledged have to do something.
        """
        del cuts

    def size_bytes(self) -> int | None:
        """Return the total size of the input, if known: for progress bars only."""
        return None

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        """Return the share of bounded input before these positions, from 0 to 1, if known: for progress bars, twice per second."""
        del cuts
        return None

    def close(self) -> None:  # noqa: B027 - most sources share nothing between their readers
        """Close what its readers share, such as a connection. Called once, at the end of a run, after all readers were closed.

        May not be called at all after a crash.
        """


class SparkReadSource(Source):
    """A source that Spark can read with a connector of its own (`SparkConnector`), as the driver opens it: it reads nothing itself."""

    @abstractmethod
    def start_of(self, partition: PartitionId) -> Position:
        """Return the position at which reading begins of a partition that no checkpoint has. Asks the system."""

    @abstractmethod
    def begun_at(self, partition: PartitionId, position: Position) -> None:
        """Take in where Spark has begun a partition that no checkpoint has."""

    @abstractmethod
    def check_there(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Raise `SourceError` if what follows these positions is not there any more, or is other input of the same name.

        Called before Spark is started. Asks the system.
        """

    @abstractmethod
    def check_same(self) -> None:
        """Raise `SourceError` if the input has become other input of the same name. Called before an epoch is sealed. Asks the system."""


class SparkConnector(ABC):
    """A connector of Spark's own, in place of `Source.open`. Used by the driver, and in tasks without the source.

    Spark plans what a micro-batch reads, and keeps it in its log as offsets of its own form. Each partition of the source is read by one task
    of a batch, in order. Made for each use, and keeps no connection.
    """

    format: ClassVar[str]
    """As Spark calls it: `spark.readStream.format(...)`."""

    @abstractmethod
    def check(self) -> None:
        """Raise `ConfigError` if the source has options that the connector cannot keep to. It must not touch the system."""

    @abstractmethod
    def stream_options(self, starts: Mapping[PartitionId, Position], rows_max: int) -> dict[str, str]:
        """Return the options of a stream that begins at these positions, if Spark has no log of it, and reads about `rows_max` rows per batch."""

    @abstractmethod
    def batch_options(self, reads: Mapping[PartitionId, tuple[Position, Position]]) -> dict[str, str]:
        """Return the options of a batch job that reads exactly this. `reads` is not empty."""

    @abstractmethod
    def columns(self) -> list[str]:
        """Return what `chunks` needs of Spark's rows, as SQL expressions."""

    @abstractmethod
    def positions(self, offset: str) -> dict[PartitionId, Position]:
        """Return the positions that an offset in Spark's log stands for."""

    @abstractmethod
    def chunks(self, frame: pl.DataFrame, *, with_positions: bool) -> Iterable[tuple[PartitionId, Chunk]]:
        """Return the rows of a batch of these columns by partition, in order: those that a `Reader` would return. Called in tasks."""

    @abstractmethod
    def how_to_install(self, spark_version: str) -> str:
        """Return what to do where this version of Spark lacks the connector, as sentences."""


def close_sources(sources: Iterable[Source]) -> None:
    """Close them all, although some may fail."""
    with ExitStack() as closing:
        for source in sources:
            closing.callback(source.close)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStream:
    """The stream that a sink receives."""

    step: str
    schema: Schema
    upsert_key: tuple[str, ...] | None = None
    """None: rows are appended. Otherwise each row replaces the previous one with the same key; `__op` is 'upsert' or 'delete'."""
    sealed: str | None = None
    """An attempt whose parts are still to be released: a sink that removes leftovers when it is opened keeps these."""
    pipeline: str = ""
    node: str = ""
    """The node whose state numbers the epochs of the stream; also on Spark, if the query began from a node's checkpoint."""
    owner: str = ""
    """Random, kept with the checkpoints of the writer, so that a new state directory is another owner. Empty: unknown."""
    start: str = ""
    """Random, of this start of the engine."""
    generation: Fence = NO_FENCE
    """Of this start (rule 18): what the hub granted, then the number of starts. A sink refuses an older one, if its kind declares that."""
    resumes_after: int | None = None
    """The newest epoch that is sealed in the writer's state. Later epochs in the sink are from state that was lost, or from another writer,
    and are an error (`later_output`). None: the sink does not look."""
    discard_later: bool = False
    """Set such epochs aside instead."""

    @property
    def writer(self) -> SinkWriter:
        """Who writes, as sinks keep it."""
        hub, local = self.generation
        return SinkWriter(
            pipeline=self.pipeline, node=self.node, holder=self.owner, start=self.start, hub=hub, local=local
        )


class SinkDelayedError(StorageError):
    """A sink cannot take rows for now. The edge engine waits and tries again; on Spark the batch is run again.

    Not in `fordstone.errors`: by that name `spark.run` recognizes, in the text of Spark's errors, those that the user has to correct.
    """

    step: str = ""
    """The sink, set by the edge engine. Empty: no sink is waited for, but the hub."""


def later_output(
    where: str,
    stream: SinkStream,
    epochs: Sequence[int],
    *,
    problem: str | None = None,
    start_over: str = "To start over with all input, use --fresh.",
) -> SinkError:
    """Return the error of a sink that has later epochs than the writer's state: their rows would be there twice.

    `problem`: why the sink cannot set them aside by itself, and what to do. `start_over`: as a sentence, where `--fresh` does not
    set the sink's output aside.
    """
    first, last = min(epochs), max(epochs)
    span = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    known = f"only up to epoch {stream.resumes_after}" if stream.resumes_after else "no epoch at all"
    why = "It is an older copy, or a new machine has taken over what the old one had released and not sent."
    if not stream.resumes_after:
        why = "It is the output of another run, or the state of this one was removed or never sent to the hub."
    aside = (
        problem
        or "start once with --discard-later-output (in Python: discard_later_output=True), which sets them aside."
    )
    return SinkError(
        f"sink {stream.step}: {where} has {span}, but the state that this run resumes from has {known}. {why} The rows of {span} "
        f"would be written a second time.\n"
        f"Bring the newer state back: the old state directory, or the machine that has it. If it is lost, {aside} Then their input is read "
        f"again, as far as it is still there. {start_over} Nothing was written."
    )


def judge_claim(
    where: str, stream: SinkStream, found: Iterable[SinkWriter], check_later: Callable[[], None]
) -> Keep | Take:
    """Return whether the sink is this writer's already, or may be taken; raise if it has a newer one.

    `check_later` raises if the sink has later epochs than the writer's state: of an older copy that says more.
    """
    decision = decide_claim(found, stream.writer, restored=stream.discard_later)
    if isinstance(decision, OwnedByNewer):
        if decision.by.holder == stream.owner:
            check_later()
        raise owned_by_newer(where, stream, decision.by)
    return decision


def owned_by_newer(where: str, stream: SinkStream, by: SinkWriter | None) -> FencedError:
    """Return the error of a writer that is too old, or that was replaced. `by`: None if the other writer is unknown."""
    other = by.described() if by is not None else "another process"
    mine = stream.writer.described()
    advice = "If it is the one that should go on, stop the other, and start with --take-over."
    if not stream.generation.hub:
        advice = (
            "If it is the one that should go on, stop the other. Then start with --hub and --take-over; or, where this process has no hub, "
            "once with --discard-later-output (in Python: discard_later_output=True), which takes the sink over with this state."
        )
    if by is not None and by.holder == stream.owner:
        advice = (
            "Both are starts of one state directory: this one is an older copy, or another process runs from a copy of it. If this one "
            "should go on, stop the other, and start once with --discard-later-output."
        )
    return FencedError(
        f"sink {stream.step}: {where} has been taken over by {other}; this is {mine}. This process stops and writes nothing more. What it has "
        f"sealed stays in its state directory. {advice}"
    )


class Sink(ABC):
    """A place rows go. Used by one thread at a time.

    A sink whose kind declares `ConnectorKind.fences` keeps the writer of its stream (`SinkStream.writer`) durably. When it is opened, it asks
    `judge_claim`, which raises if there is a newer one; so does every release after another writer has opened it, in the step that
    would make rows visible. A sink that records epochs compares them with `SinkStream.resumes_after` before and after it is claimed.
    """

    @abstractmethod
    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Make the rows of a sealed epoch visible, durably, all at once. Called in order of epochs, after the seal.

        After a crash the last epoch may be released again with the same rows: a sink whose kind declares `EXACTLY_ONCE`
        then does nothing. Epochs without rows are released too.
        """

    @abstractmethod
    def write(self, frame: pl.DataFrame) -> None:
        """Emit rows now, without waiting for a seal (`at_once`, at-least-once and at-most-once). May repeat on replay."""

    @abstractmethod
    def close(self) -> None:
        """Finish files and connections. May not be called at all after a crash."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some rows of an epoch, written and durable, but not visible yet."""

    name: str
    rows: int
    note: str = ""
    """What else the writer passes to `release_parts`, in the sink's own form."""


class PartWriter(ABC):
    """Writes parts of epochs for a `PartedSink`, in another process than the sink's. Keeps nothing between calls."""

    @abstractmethod
    def write(self, epoch: int, attempt: str, number: int, frame: pl.DataFrame) -> Part:
        """Write rows durably where no reader sees them yet. Succeeds at most once per number and attempt.

        A failed call may be repeated, in this process or another. Each try at an epoch has a new `attempt`; parts of attempts
        that were never released are removed when the sink is next opened or the epoch is released.
        """


class PartedSink(Sink):
    """A sink whose epochs may be written in parts by several processes, and made visible by one."""

    @abstractmethod
    def takes_parts(self) -> bool:
        """Return whether the next epoch may be written in parts. Asked once per epoch, before its first row; it must not wait.

        False: the epoch comes to `release`. Parts that were written are released, whatever this returns later.
        """

    @abstractmethod
    def release_parts(self, epoch: int, attempt: str, parts: Sequence[Part]) -> None:
        """Like `release`, for the rows of all these parts. Without parts the epoch has no rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How the engine opens a source."""

    schema: Schema
    bounded: bool
    """Stop at the end of the present input instead of waiting for more."""


class LiveSpec(ConnectorSpec, frozen=True, dict=True):
    """A spec that carries an object of this process beside its fields: made by `LiveSpec.around`, read by `live_of`.

    The object is not part of the plan's JSON or of equality, and a plan that was read from JSON lacks it.
    """

    @classmethod
    def around(cls, live: object, *, kind: str, options: dict[str, Any] | None = None) -> LiveSpec:
        """Make a spec of this kind that carries the object."""
        spec = cls(kind=kind, options=options or {})
        spec.__dict__["live"] = live
        return spec


def live_of(spec: ConnectorSpec) -> object | None:
    """Return the object that the spec carries; None if it came from JSON."""
    return spec.__dict__.get("live") if isinstance(spec, LiveSpec) else None


def options_of(spec: ConnectorSpec, options: type[_Options]) -> _Options:
    """Return the options of the spec as a struct, whose `__post_init__` may raise `ConfigError` for more."""
    try:
        return msgspec.convert(spec.options, options)
    except msgspec.ValidationError as error:
        problem = str(error)
    called = f"{spec.kind}({spec.options['path']!r})" if "path" in spec.options else spec.kind
    check_options(spec.options, options.__struct_fields__, where=f"{called}: ")
    for name, kind in get_type_hints(options).items():
        if name in spec.options and (words := _words(kind)):
            check_word(name, spec.options[name], words, where=f"{called}: ")
    raise ConfigError(f"{called}: {problem}. Options are: {', '.join(options.__struct_fields__)}.")


def _words(kind: Any) -> tuple[str, ...]:
    """The words that an option of this type may have; none if it is not of fixed words."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((get_args(part) for part in get_args(kind) if get_origin(part) is Literal), ())


def checked_spec(kind: str, given: Mapping[str, Any], options: type[msgspec.Struct]) -> ConnectorSpec:
    """Make a spec of the options that are not None, and check them."""
    spec = ConnectorSpec(kind=kind, options={name: value for name, value in given.items() if value is not None})
    options_of(spec, options)
    return spec


class Capability(StrEnum):
    """What the connectors of a kind do beyond reading rows and writing rows. Declared by the kind, asked for by the engines."""

    CROSSES = "crosses"
    """As a sink: its rows leave through the node's outbox to the hub. It is never opened."""
    FEEDS_BACK = "feeds_back"
    """As a source: its rows are the versions of a control table, which the node fetches from the hub."""
    AT_HUB = "at_hub"
    """Its other end is a hub, so it needs the hub's address (`ConnectorSpec.at`)."""
    NEEDS_HOME = "needs_home"
    """It keeps files in the pipeline's directory on the node (`OpenContext.home`)."""
    DECLARES_TIME = "declares_time"
    """As a source: each chunk says how far its event time has come, and which rows are late."""
    PRINTS = "prints"
    """As a sink: it writes to the terminal that the command runs in."""
    IN_PROCESS = "in_process"
    """Its rows are in the memory of the process that builds the pipeline: no other process can read or write them."""
    TABLE = "table"
    """As a source: its rows have no positions, so it can be read whole and looked up in, and is no stream."""
    OWNS_PATH = "owns_path"
    """As a sink: the directory in its option `path` is its own. No other sink may write there."""
    SET_ASIDE = "set_aside"
    """As a sink: all that it wrote is in the directory in its option `path`, which `--fresh` renames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The pipeline's directory on a node. Files below `directory` are written through `disk` and survive restarts."""

    disk: Disk
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenContext:
    """What surrounds a connector on the node that opens it. Handed to every source and sink."""

    node: str = ""
    """The id of the node; empty at the center and in tests."""
    step: str = ""
    """The name of the step that is opened; empty in tests."""
    home: Home | None = None
    """Given to kinds that declare `NEEDS_HOME`. None where a task runs without a state directory, as Spark's executors do."""
    keeps_state: bool = True
    """Whether a later run may resume from the positions of this one."""
    clock_us: ClockUs = monotonic_clock_us
    """Microseconds on a clock that never goes back."""
    secrets: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Values that must not be part of a plan, such as passwords, by name. The environment variables of the process by default."""

    def home_of(self, spec: ConnectorSpec) -> Home:
        """The home directory, or an error that says why there is none."""
        if self.home is None:
            raise ConfigError(
                f"connector {spec.kind!r} keeps files in the state directory of a node, and there is none here. "
                "Run this step at the edge."
            )
        return self.home


class Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that is not in the plan: it is looked up by this name where the connector is opened."""

    secret: str

    def of(self, context: OpenContext, *, where: str) -> str:
        """Return the value. `where` begins the error if there is none."""
        found = context.secrets.get(self.secret)
        if found is None:
            raise ConfigError(
                f"{where} is the secret {self.secret!r}, and there is no environment variable of that name here. "
                "On Spark, the executors need it too."
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What `fordstone connectors` says of a kind."""

    summary: str
    """What it connects to, in a few words."""
    source: str = ""
    """An example of a source, as an expression that uses the names in `fordstone.connectors`; empty: it cannot be read from."""
    sink: str = ""
    """Likewise of a sink."""
    guarantee: str
    """How it keeps its guarantees, and what they need, in a sentence or two."""
    extra: str = ""
    """The extra of the package that brings what it needs: `pip install 'fordstone[EXTRA]'`."""
    package: str = ""
    """The package that this extra is for."""
    modules: tuple[str, ...] = ()
    """What is imported of it."""
    page: str = ""
    """Its page in the documentation."""


@contextmanager
def needs_package(about: About, *, where: str) -> Iterator[None]:
    """Surround the import of what comes with an extra. If that is missing, the error says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in about.modules:
            raise
        raise NotInstalledError(
            f"{where} needs the package {about.package}.\nInstall it with: pip install 'fordstone[{about.extra}]'"
        ) from error


class ConnectorKind(ABC):  # noqa: B024 - each kind overrides the half it has; the other half refuses by itself
    """Opens the connectors of one kind. Constructed without arguments for each call, so it keeps no state.

    A kind that cannot be read, or cannot be written, does not override that half: asking for it is an error that says so.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    about: ClassVar[About | None] = None
    """For `fordstone connectors`, which does not list a kind without it."""

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """Return the strongest delivery of a source. Called while a pipeline is built: it must not touch the system."""
        raise ConfigError(f"connector {spec.kind!r} cannot be read from: use it as a sink.")

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """Return the strongest delivery of a sink. Called while a pipeline is built: it must not touch the system.

        `EXACTLY_ONCE` if releasing an epoch a second time changes nothing.
        """
        raise ConfigError(f"connector {spec.kind!r} cannot be written to: use it as a source.")

    def fences(self, spec: ConnectorSpec) -> bool:
        """Return whether the sink refuses a writer of an older generation, in the step that makes rows visible. It must not touch the system.

        False: while another machine takes over, rows of the former one may still come, and rows may be there twice (`explain` says so).
        """
        del spec
        return False

    def why_never_all_there(self, spec: ConnectorSpec) -> str | None:
        """Return why a source cannot be read up to what is there now (`--available-now`); None: it can."""
        del spec
        return None

    def reads_from(self, spec: ConnectorSpec, written: ConnectorSpec) -> bool:
        """Return whether a source of `spec` would read what a sink of `written`, of this kind, writes. It must not touch the system."""
        del spec, written
        return False

    def place(self, spec: ConnectorSpec) -> str:
        """Return the place of a sink whose kind declares `OWNS_PATH`, however it is spelt. It must not touch the system."""
        return str(spec.options.get("path", ""))

    def describe_source(self, spec: ConnectorSpec) -> Mapping[str, str]:
        """Return what `explain` shows of a source with event time, as labels and texts. It must not touch the system."""
        del spec
        return {}

    def first_look(self, spec: ConnectorSpec) -> str | None:
        """Return the schema that a source probably has, as text that can be pasted; None: that cannot be found out, or not yet.

        Asked only where a schema is missing, to be shown in the error. It may read from the system, a little.
        """
        del spec
        return None

    def earlier_output(self, spec: ConnectorSpec) -> str | None:
        """Return what the sink already contains, to be named in an error; None: nothing.

        Asked before a run that keeps no state starts: its epochs begin at 1, so they would be mixed with what is there. A sink that
        keeps nothing, or refuses the epochs of another run by itself, leaves this as it is.
        """
        del spec
        return None

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        """Make the live source, on the node that runs it, once per start."""
        del options, context
        raise ConfigError(f"connector {spec.kind!r} cannot be read from: use it as a sink.")

    def spark_connector(
        self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext
    ) -> SparkConnector | None:
        """Return the connector of Spark's own that reads the source on Spark, if the spec asks for it; None: tasks read the live source.

        If there is one, `open_source` returns a `SparkReadSource`. It must not touch the system.
        """
        del spec, options, context
        return None

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Make the live sink, on the node that runs it, before the first row."""
        del stream, context
        raise ConfigError(f"connector {spec.kind!r} cannot be written to: use it as a source.")

    def open_parts(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> PartWriter | None:
        """Make a writer of parts, in any process that has rows; None: all rows of an epoch go through the sink."""
        del spec, stream, context
        return None
