"""Sources whose input is pushed to them: MQTT, HTTP, sockets. It is journalled here before it is acknowledged, and read from the journal.

A `Feed` takes messages in, appends them to the `MessageLog`, and acknowledges to the sender what was synced; `JournalSource` reads the log as
one partition, whose positions are numbers of messages. The feed starts with the first read of new input, so that a replay of
recorded input takes nothing in. Messages are removed when no kept checkpoint needs them any more.

Invariant: a checkpoint keeps the journal's id, so positions are never looked up in another journal.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import polars as pl

from fordstone.connectors.base import (
    Capability,
    Chunk,
    ConnectorKind,
    Home,
    Idleness,
    OpenContext,
    Reader,
    ReadPlan,
    Rejected,
    Source,
    SourceOptions,
    SourceTrouble,
)
from fordstone.connectors.messages import MessageFormat, MessageFormatName, message_format
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.plan.plan import ConnectorSpec
from fordstone.storage.message_log import MessageLog, MessageReader, Messages, WhenFull

log = logging.getLogger(__name__)

PARTITION: Final = PartitionId("journal")
JOURNAL_BYTES: Final = 1 << 30
JOURNAL_BYTES_MIN: Final = 64 << 20
"""Room for the largest message, and for a segment to be trimmed."""
IfJournalLost = Literal["stop", "continue"]
"""What a run does whose checkpoint was made with a journal that is not here."""


class JournalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every source with a journal."""

    format: MessageFormatName = "json"
    received: str | None = None
    time_unit: str = "us"
    journal_bytes_max: int = JOURNAL_BYTES
    when_full: WhenFull = "wait"
    if_journal_lost: IfJournalLost = "stop"

    def check_journal(self, where: str) -> None:
        if self.journal_bytes_max < JOURNAL_BYTES_MIN:
            raise ConfigError(
                f"{where}: journal_bytes_max={self.journal_bytes_max} must be at least {JOURNAL_BYTES_MIN}."
            )


Beside = Callable[[Messages], pl.Series]
"""Makes a column of what is beside the values."""


class Feed(ABC):
    """Takes messages in from outside, on threads of its own, and acknowledges what the journal has."""

    @abstractmethod
    def start(self) -> None:
        """Begin. Called once, by the first read of new input; never for a replay. May raise `SourceError`."""

    @abstractmethod
    def check(self) -> None:
        """Raise what the feed has failed with for good. Called with every read; must not wait."""

    @abstractmethod
    def away(self) -> str | None:
        """Return why nothing comes in now; None: the sender can be reached, or cannot be asked."""

    def before_trim(self, position: int) -> None:  # noqa: B027 - most feeds keep nothing of messages
        """Called before messages in front of the position are removed."""

    @abstractmethod
    def close(self) -> None:
        """Stop. What was not synced is not acknowledged. Called once if it was started, and returns when nothing is appended any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageColumns:
    """How messages become rows: the value by its format, and columns of what is beside it."""

    schema: Schema
    value: MessageFormat
    beside: Mapping[str, Beside]
    """Of a column, its value for each message."""

    @classmethod
    def of(
        cls,
        schema: Schema,
        beside: Mapping[str, tuple[str, Beside]],
        *,
        format_name: MessageFormatName,
        time_unit: str,
        where: str,
    ) -> MessageColumns:
        """`beside`: for each column that is not in the value, its type and what makes it. All must be declared in the schema."""
        for name, (kind, _) in beside.items():
            if name not in schema:
                raise ConfigError(f"{where}: column {name!r} is not in the schema. Declare it as {kind!r}.")
            if schema[name].name != kind:
                raise ConfigError(f"{where}: column {name!r} is declared as {schema[name]}. Declare it as {kind!r}.")
        inner = Schema.of({name: str(kind) for name, kind in schema.items() if name not in beside})
        return cls(
            schema=schema,
            value=message_format(format_name, inner, time_unit=time_unit, where=where),
            beside={name: make for name, (_, make) in beside.items()},
        )

    def rows(self, messages: Messages) -> tuple[pl.DataFrame, np.ndarray, tuple[Rejected, ...]]:
        """Return the rows of some messages, the position of each, and what is no row."""
        decoded = self.value.decode(messages.values)
        whole = len(decoded.numbers) == len(messages.values)
        columns = [
            _column(make(messages).alias(name), None if whole else decoded.numbers)
            for name, make in self.beside.items()
        ]
        rejected = tuple(
            Rejected(position=messages.first + one.number, text=one.text, reason=one.reason) for one in decoded.rejected
        )
        frame = decoded.frame.with_columns(columns).select(list(self.schema))
        return frame, messages.first + decoded.numbers, rejected


def _column(column: pl.Series, numbers: np.ndarray | None) -> pl.Series:
    return column if numbers is None else column.gather(numbers)


def received(messages: Messages) -> pl.Series:
    """When each message came, for `MessageColumns.beside`."""
    return pl.Series(messages.times_us, dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))


def topics(messages: Messages) -> pl.Series:
    """The topic of each message."""
    return pl.Series(messages.topics, dtype=pl.String)


class JournalKind(ConnectorKind):
    """What the kinds of such sources have in common."""

    capabilities = frozenset({Capability.NEEDS_HOME})

    def why_never_all_there(self, spec: ConnectorSpec) -> str | None:
        return f"{spec.kind}: messages come for as long as somebody sends them, so there is no end to read up to."


def open_journal(spec: ConnectorSpec, options: JournalOptions, context: OpenContext) -> MessageLog:
    """Open the journal of a source step in the pipeline's directory on the node."""
    home: Home = context.home_of(spec)
    if not context.keeps_state:
        log.warning(
            "journal not kept: messages that were acknowledged and not processed when the run ends are lost; give a state directory",
            extra={"source": context.step},
        )
    folder = f"{home.directory}/journal/{context.step or spec.kind}"
    return MessageLog(home.disk, folder, bytes_max=options.journal_bytes_max, when_full=options.when_full)


class JournalSource(Source):
    """The one partition of a journal."""

    def __init__(
        self,
        messages: MessageLog,
        columns: MessageColumns,
        *,
        bounded: bool,
        where: str,
        feed: Feed | None = None,
        if_journal_lost: IfJournalLost = "stop",
    ) -> None:
        """`where` begins errors. `feed`: closed with the source; None: another process or a test fills the journal. Bounded: read what is there."""
        self.messages = messages
        self.columns = columns
        self.end = messages.end if bounded else None
        self.feed = feed
        self._where = where
        self._continues = if_journal_lost == "continue"
        self._started = False

    def partitions(self) -> Sequence[PartitionId]:
        return [PARTITION]

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Raise if the positions are not of this journal."""
        cut = cuts.get(PARTITION)
        if cut is None or not cut.position:
            return
        messages, other = self.messages, bool(cut.identity) and cut.identity != self.messages.id
        if not other and cut.position <= messages.end:
            return
        if self._continues and not messages.end:
            messages.begin_at(cut.position)
            log.warning(
                "journal lost, continuing without it", extra={"folder": messages.folder, "position": cut.position}
            )
        if self._continues and messages.first == cut.position:
            return  # it was begun for this checkpoint, now or by an earlier start
        found = f"is another one (of {messages.end} messages)" if other else f"has only {messages.end}"
        raise SourceError(
            f"{self._where}: the checkpoint was made after {cut.position} messages of a journal, and the one in {messages.folder} {found}. What "
            "was acknowledged to the sender and not processed is in the other one.\n"
            "Bring the directory back, from the old machine or from a copy that is as new as the checkpoint. If it is lost, remove this one and "
            'start with if_journal_lost="continue" in the options of the source: the messages that only it had are lost.'
        )

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:  # noqa: ARG002 - there is one
        return JournalReader(self, int(position), with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:  # noqa: ARG002 - there is one
        """A position is a number of messages, so nothing has to be read."""
        end = self.messages.end if self.end is None else self.end
        planned = max(int(position), min(int(position) + max(1, rows_max), end))
        return ReadPlan(position=Position(planned), ended=self.end is not None and planned >= self.end)

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:  # noqa: ARG002 - there is one
        """While the sender cannot be reached, silence means nothing."""
        return Idleness.EXPECTED if self.feed is None or self.feed.away() is None else Idleness.UNKNOWN

    def trouble(self) -> SourceTrouble:
        return SourceTrouble(away=None if self.feed is None else self.feed.away())

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        if (cut := cuts.get(PARTITION)) is not None:
            if self.feed is not None:
                self.feed.before_trim(cut.position)
            self.messages.trim(cut.position)

    def close(self) -> None:
        if self.feed is not None and self._started:
            self.feed.close()
        self.messages.close()

    def take_in(self) -> None:
        """Let the feed begin, if it has not, and raise what it has failed with."""
        if self.feed is None:
            return
        if not self._started:
            self.feed.start()
            self._started = True
        self.feed.check()


class JournalReader(Reader):
    """Reads a journal's messages as rows."""

    def __init__(self, source: JournalSource, position: int, *, with_positions: bool) -> None:
        self._source = source
        self._columns = source.columns
        self._messages = MessageReader(source.messages, position)
        self._with_positions = with_positions

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        source, before = self._source, self._messages.position
        source.messages.check()
        if until is None and source.end is None:
            source.take_in()
        limits = [int(limit) for limit in (until, source.end) if limit is not None]
        found = self._messages.read(rows_max, min(limits, default=None))
        position = self._messages.position
        ended = source.end is not None and position >= source.end
        if position == before and not (ended and until is None):
            return None
        parts = [self._columns.rows(some) for some in found]
        empty = self._columns.schema.empty()
        places = np.concatenate([np.zeros(0, np.int64), *(places for _, places, _ in parts)])
        return Chunk(
            frame=pl.concat([frame for frame, _, _ in parts]) if parts else empty,
            position=Position(position),
            row_positions=pl.Series(places, dtype=pl.Int64) if self._with_positions else None,
            rejected=tuple(one for _, _, rejected in parts for one in rejected),
            ended=ended,
        )

    def identity(self) -> str:
        return self._source.messages.id

    def close(self) -> None:
        """The journal is the source's."""


def open_journal_source(
    spec: ConnectorSpec,
    settings: JournalOptions,
    options: SourceOptions,
    context: OpenContext,
    *,
    called: str,
    make_feed: Callable[[MessageLog, str], Feed],
    beside: Mapping[str, tuple[str, Beside]] | None = None,
) -> JournalSource:
    """Open the journal of a step and the source over it. `make_feed` gets the journal, and how errors begin: with the step and `called`."""
    where = f"source {context.step}: {called}"
    if options.bounded:
        raise ConfigError(
            f"{where}: messages come for as long as somebody sends them, so there is no end. Run it without --bounded."
        )
    made = dict(beside or {})
    if settings.received is not None:
        made[settings.received] = ("timestamp", received)
    columns = MessageColumns.of(
        options.schema, made, format_name=settings.format, time_unit=settings.time_unit, where=where
    )
    messages = open_journal(spec, settings, context)
    return JournalSource(
        messages,
        columns,
        bounded=False,
        where=where,
        feed=make_feed(messages, where),
        if_journal_lost=settings.if_journal_lost,
    )
