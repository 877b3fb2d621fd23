"""Topics as a source: each of their partitions is one, and the position is the next offset plus one.

Position 0 is that of a partition that was never read: `start=` says at which offset it begins. What it turned out to be is kept, with the topic's id,
in the checkpoint (`identity`), so that reading again from 0 gives the same rows.

Invariants: rows come from committed transactions only, each offset once and in order; a position covers offsets that have no row, such
as marks of transactions; a topic that was deleted and created again, and an offset that is gone, are errors and never a silent jump.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from confluent_kafka import KafkaError, KafkaException

from fordstone.connectors.base import (
    ALL_ROWS,
    Chunk,
    Idleness,
    OpenContext,
    Reader,
    ReadPlan,
    SourceOptions,
    SourceTrouble,
    SparkReadSource,
)
from fordstone.connectors.kafka.client import At, AwayError, Cluster, Topic, code_of, described
from fordstone.connectors.kafka.fetcher import Fetched, FetchedMessages, Fetcher
from fordstone.connectors.kafka.kind import LATEST, KafkaSettings
from fordstone.connectors.kafka.rows import MessageRows
from fordstone.connectors.schema_registry import RegistryAwayError
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import SourceError
from fordstone.plan.ids import PartitionId, Position

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""Interval at which topics are described, to find new partitions."""
ENDS_KEPT_S: Final = 0.02
"""How long it is believed that nothing follows an offset."""
MISSING_LOOKS_MAX: Final = 3
"""A topic that was there, and is missing this often in succession, is gone."""
UNTIL_WAIT_S: Final = 60.0
"""Maximum wait for messages that are known to be there."""
UNREAD_GROUP: Final = "fordstone"
"""The client wants the name of a group, although it joins none."""


class PartitionMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of a partition beside its position."""

    topic_id: str = ""
    start: int
    """The offset that it was begun at."""

    @classmethod
    def of(cls, identity: str) -> PartitionMark | None:
        return msgspec.json.decode(identity, type=cls) if identity else None

    @property
    def identity(self) -> str:
        return msgspec.json.encode(self).decode()


class KafkaSource(SparkReadSource):
    """The partitions of some topics. They share one consumer."""

    def __init__(self, settings: KafkaSettings, options: SourceOptions, context: OpenContext) -> None:
        self._settings = settings
        self._bounded = options.bounded
        self._rows = MessageRows(settings, options.schema, context)
        self._cluster = Cluster(settings, context, fails=SourceError)
        self._lock = threading.RLock()
        self._fetcher: Fetcher | None = None
        self._brief = options.bounded
        self._topics: dict[str, Topic] = {}
        self._looked_s = -1.0
        self._look: threading.Thread | None = None
        self._missing: dict[str, int] = {}
        self._away: str | None = None
        self._problem: BaseException | None = None
        self._first: frozenset[At] | None = None
        """The partitions that were there at first, if none was in a checkpoint."""
        self._marks: dict[At, PartitionMark] = {}
        """Of partitions that were begun."""
        self._ends: dict[At, int] = {}
        """Of bounded input."""
        self._known_ends: dict[At, int] = {}
        self._ends_asked_s = float("-inf")

    def partitions(self) -> Sequence[PartitionId]:
        """The first call waits for the cluster; later ones return what was found last, and look again in the background."""
        with self._lock:
            if self._look is not None and not self._look.is_alive():
                self._look = None
            now_s = time.monotonic()
            if self._looked_s < 0:
                self._describe()
                if self._topics and self._bounded:
                    self._take_ends()
            elif self._look is None and not self._bounded and now_s - self._looked_s >= LOOK_EVERY_S:
                self._looked_s = now_s
                self._look = threading.Thread(target=self._look_again, name="fordstone-kafka-topics", daemon=True)
                self._look.start()
            if self._problem is not None:
                raise self._problem
            return [PartitionId(_name(at)) for at in self._all()]

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        with self._lock:
            for name, cut in cuts.items():
                mark = PartitionMark.of(cut.identity)
                if mark is not None:
                    self._marks[_at(name)] = mark

    def expect_reads(self, reads: Mapping[PartitionId, tuple[Position, Position]]) -> None:
        del reads
        self._brief = True

    def identity(self, partition: PartitionId, position: Position) -> str:
        mark = self._marks.get(_at(partition))
        return mark.identity if position and mark is not None else ""

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        return KafkaReader(self, self._rows, _at(partition), int(position), with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """By offsets: there are at most as many rows. While the cluster is away there is nothing."""
        at = _at(partition)
        try:
            offset = int(position) - 1 if position else self.begin(at)
            end = self._end(at, offset)
        except AwayError as error:
            self._away = str(error)
            if self._bounded or rows_max >= ALL_ROWS:
                raise  # nothing can be said of all that is there
            return ReadPlan(position=position)
        planned = max(offset, min(end, offset + max(1, rows_max)))
        return ReadPlan(position=Position(planned + 1), ended=self.ends_at(at, planned))

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        del partition, position
        return Idleness.EXPECTED if self._away is None else Idleness.UNKNOWN

    def trouble(self) -> SourceTrouble:
        return SourceTrouble(away=self._away)

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Publish the positions under the group, if there is one. A failure is tried again with the next ones."""
        if self._settings.group is None:
            return
        offsets = [(_at(name), cut.position - 1) for name, cut in cuts.items() if cut.position > 0]
        try:
            if offsets:
                self.fetcher.commit(offsets)
        except KafkaException as error:
            log.warning("offsets not published", extra={"group": self._settings.group, "problem": described(error)})

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        begun = {at: self._marks[at].start for at in self._ends if at in self._marks}
        total = sum(max(0, self._ends[at] - start) for at, start in begun.items())
        read = sum(
            max(0, min(cut.position - 1, self._ends[at]) - begun[at])
            for name, cut in cuts.items()
            if (at := _at(name)) in begun and cut.position
        )
        return read / total if total and len(begun) == len(self._ends) else None

    def close(self) -> None:
        with self._lock:
            if self._fetcher is not None:
                self._fetcher.close()
                self._fetcher = None
            self._cluster.close()
            self._rows.close()

    # Where Spark reads.

    def start_of(self, partition: PartitionId) -> Position:
        return Position(self.begin(_at(partition)) + 1)

    def begun_at(self, partition: PartitionId, position: Position) -> None:
        at = _at(partition)
        with self._lock:
            topic = self._topics.get(at[0])
            self._marks[at] = PartitionMark(topic_id="" if topic is None else topic.id, start=int(position) - 1)

    def check_there(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Offsets must be between the oldest one and the end."""
        self.restore(cuts)
        self.check_same()
        offsets = {_at(name): cut.position - 1 for name, cut in cuts.items() if cut.position}
        for at in offsets:
            if at not in self._all():
                raise self._gone(at[0])
        oldest, ends = self._cluster.oldest(offsets), self._cluster.ends(offsets)
        for at, offset in offsets.items():
            if not oldest[at] <= offset <= ends[at]:
                self._lost(at, offset)

    def check_same(self) -> None:
        """Compare the ids of the topics."""
        found = self._cluster.describe(self._settings.topics)
        with self._lock:
            self._take(found, first=True)

    # For the readers.

    @property
    def fetcher(self) -> Fetcher:
        with self._lock:
            if self._fetcher is None:
                group = self._settings.group or UNREAD_GROUP
                self._fetcher = Fetcher(self._cluster, group=group, brief=self._brief)
            return self._fetcher

    @property
    def bounded(self) -> bool:
        return self._bounded

    def begin(self, at: At) -> int:
        """Return the offset that a partition begins at. It is found out once, for all partitions that there are."""
        with self._lock:
            if at not in self._marks:
                if not self._topics:
                    self._describe(at_once=True)
                new = [one for one in {at, *self._all()} if one not in self._marks]
                for one, offset in self._starts(new).items():
                    topic = self._topics.get(one[0])
                    self._marks[one] = PartitionMark(topic_id="" if topic is None else topic.id, start=offset)
            return self._marks[at].start

    def end_of(self, at: At) -> int | None:
        """Where bounded input ends; None: it does not."""
        if not self._bounded:
            return None
        with self._lock:
            if at not in self._ends:
                self._take_ends(at)
            return self._ends[at]

    def ends_at(self, at: At, offset: int) -> bool:
        end = self.end_of(at)
        return end is not None and offset >= end

    def verify(self, at: At, since_s: float) -> str:
        """Return the identity of a partition, seen in the cluster after `since_s`: what was read before is of this topic."""
        with self._lock:
            if self._looked_s < since_s and self._away is None and not self._brief:
                self._look_again()
                if self._problem is not None:
                    raise self._problem
            mark = self._marks.get(at)
            return "" if mark is None else mark.identity

    def failed(self, at: At, offset: int, error: KafkaException) -> int:
        """Raise what an error of the consumer means; return the offset to go on with, if messages are gone and that is allowed."""
        if code_of(error) in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:  # noqa: SLF001 - its name
            return self._lost(at, offset)
        found = self._cluster.error(error)
        if isinstance(found, AwayError):
            self._away = str(found)
            return offset
        raise found

    def heard(self) -> None:
        self._away = None

    def is_away(self, why: str) -> None:
        """Note that nothing can be read now, although the cluster may answer."""
        self._away = why

    # What is there.

    def _all(self) -> list[At]:
        return [
            (name, number)
            for name in self._settings.topics
            if name in self._topics
            for number in self._topics[name].partitions
        ]

    def _describe(self, *, at_once: bool = False) -> None:
        """Look for the first time."""
        try:
            self._take(self._cluster.describe(self._settings.topics), first=True)
        except AwayError as error:
            self._away = str(error)
            self._cluster.check_denied()
            if self._bounded or at_once:
                raise
            if not self._marks:
                log.warning("kafka away", extra={"topics": self._settings.topics, "problem": str(error)})
            # What the checkpoint knows is there.
            for topic, number in sorted(self._marks):
                known = self._topics.get(topic, Topic("", ()))
                self._topics[topic] = Topic(self._marks[topic, number].topic_id, (*known.partitions, number))
            self._looked_s = time.monotonic()

    def _look_again(self) -> None:
        began_s = time.monotonic()
        try:
            found = self._cluster.describe(self._settings.topics)
            with self._lock:
                self._take(found, first=False)
                self._looked_s = began_s
        except AwayError as error:
            self._away = str(error)
        except BaseException as error:  # noqa: BLE001 - raised by the next call of `partitions`
            self._problem = error

    def _take(self, found: Mapping[str, Topic | None], *, first: bool) -> None:
        self._away = None
        for name, topic in found.items():
            if topic is None:
                self._missing[name] = self._missing.get(name, 0) + 1
                if first or self._missing[name] >= MISSING_LOOKS_MAX:
                    raise self._gone(name)
                continue
            self._missing.pop(name, None)
            for at, mark in self._marks.items():
                if at[0] == name and mark.topic_id and topic.id and mark.topic_id != topic.id:
                    raise self._replaced(name, mark.topic_id, topic.id)
            self._topics[name] = topic
        if self._first is None:
            self._first = frozenset(self._all() if not self._marks else ())
        self._looked_s = time.monotonic()

    def _starts(self, partitions: Sequence[At]) -> dict[At, int]:
        """Where partitions begin that no checkpoint has. One that was added to its topic later is read from its first message."""
        time_ms = self._settings.start_ms()
        if time_ms is not None:
            return self._cluster.at_time(partitions, time_ms)
        first = self._first or frozenset()
        at_end = [
            at for at in partitions if self._settings.start == LATEST and (at in first or not (first or self._marks))
        ]
        return self._cluster.oldest(set(partitions) - set(at_end)) | self._cluster.ends(at_end)

    def _take_ends(self, *more: At) -> None:
        wanted = {*self._all(), *more} - self._ends.keys()
        self._ends |= self._cluster.ends(wanted)

    def _end(self, at: At, offset: int) -> int:
        """Where a partition ends now. That nothing follows an offset is asked for all partitions together, once while a batch is planned."""
        bounded = self.end_of(at)
        if bounded is not None:
            return bounded
        with self._lock:
            asked_s = time.monotonic()
            if self._known_ends.get(at, -1) <= offset and asked_s - self._ends_asked_s >= ENDS_KEPT_S:
                self._known_ends = self._cluster.ends({at, *self._all()})
                self._ends_asked_s = asked_s
                self._away = None
            return self._known_ends.get(at, -1)

    # Errors.

    def _lost(self, at: At, offset: int) -> int:
        oldest, end = self._cluster.oldest([at])[at], self._cluster.ends([at])[at]
        if offset < oldest and self._settings.lost == "skip":
            log.warning("messages skipped", extra={"partition": _name(at), "from_offset": offset, "to_offset": oldest})
            return oldest
        if offset < oldest:
            skip = "Set lost='skip' to go on with the oldest message, and without those"
            if self._settings.spark_connector:
                skip = (
                    "To go on with the oldest message, and without those: make a checkpoint of the state (fordstone checkpoints import-spark), and begin "
                    "from it (--from-checkpoint) with lost='skip' and without spark_connector"
                )
            raise SourceError(
                f"{self._settings.called}: {_name(at)} is to be read from offset {offset} on, but its oldest message has offset {oldest}: "
                f"{oldest - offset:,} offsets were deleted before they were read (retention, or a deletion by hand).\n"
                f"{skip}; or start over with --fresh. Keep messages longer (retention.ms of the topic) than this pipeline may be away."
            )
        raise SourceError(
            f"{self._settings.called}: {_name(at)} was read up to offset {offset}, but it ends at {end} now. The cluster has lost messages, or the "
            "topic was deleted and created again.\n"
            "Nothing more was read. Bring the topic back; or start over with --fresh, which reads it from its beginning."
        )

    def _gone(self, topic: str) -> SourceError:
        return SourceError(
            f"{self._settings.called}: there is no topic {topic!r} at {self._settings.servers}.\n"
            "Create it, or correct its name. A user who may not see a topic gets the same answer."
        )

    def _replaced(self, topic: str, was: str, now: str) -> SourceError:
        return SourceError(
            f"{self._settings.called}: topic {topic!r} was deleted and created again: the checkpoint is of the topic with id {was}, and this one has "
            f"{now}. Its offsets mean other messages.\n"
            "If the old topic can be brought back, do that. To read the new one from its beginning, start over with --fresh; to keep the state of this "
            "pipeline as it is, read the new topic with another pipeline."
        )


class KafkaReader(Reader):
    """Reads one partition."""

    def __init__(self, source: KafkaSource, rows: MessageRows, at: At, position: int, *, with_positions: bool) -> None:
        self._source = source
        self._rows = rows
        self._at = at
        self._position = position
        self._with_positions = with_positions
        self._fetched: Fetched | None = None
        self._held: tuple[int, Sequence[Any]] | None = None
        """Messages that were taken and not decoded yet, with the position after them: their schema could not be asked for."""
        self._ended = False
        self._read_s = float("-inf")

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        if until is not None and self._position >= until:
            return None
        try:
            if self._position == 0:
                start = self._source.begin(self._at) + 1
                return self._moved(start if until is None else min(start, int(until)), [])
            return self._read(rows_max, None if until is None else int(until) - 1)
        except RegistryAwayError as error:
            if until is not None or self._source.bounded:
                raise AwayError(str(error)) from error
            self._source.is_away(str(error))
            return None
        except AwayError as error:
            if until is not None or self._source.bounded:
                raise
            self._source.failed(self._at, self._position, KafkaException(KafkaError(KafkaError._TRANSPORT, str(error))))  # noqa: SLF001 - its name
            return None

    def _read(self, rows_max: int, before: int | None) -> Chunk | None:
        if self._held is not None:
            chunk = self._moved(*self._held, waits=before is not None)
            self._source.heard()
            return chunk
        end = self._source.end_of(self._at)
        if end is not None and self._position - 1 >= end:
            if self._ended:
                return None
            return self._moved(self._position, [])
        stop = min((one for one in (before, end) if one is not None), default=None)
        if self._fetched is None:
            self._fetched = self._source.fetcher.open(self._at, self._position - 1)
        wait_s = UNTIL_WAIT_S if before is not None else 0.0
        try:
            messages = self._source.fetcher.take(self._fetched, rows_max, before=stop, wait_s=wait_s)
        except KafkaException as error:
            offset = self._source.failed(self._at, self._position - 1, error)
            self._close_fetched()
            if stop is not None:
                offset = min(offset, stop)
            return self._moved(offset + 1, []) if offset >= self._position else None
        position = self._fetched.next_offset + 1
        if position > self._position:
            self._held = (position, messages)
            chunk = self._moved(position, messages, waits=before is not None)
            self._source.heard()
            return chunk
        if before is not None:
            raise AwayError(
                f"Kafka has sent nothing of {_name(self._at)} from offset {self._position - 1} on for {UNTIL_WAIT_S:.0f} s, although messages up to "
                f"{before} were there."
            )
        return None

    def _moved(self, position: int, messages: Sequence[Any], *, waits: bool = False) -> Chunk:
        fetched = FetchedMessages(messages) if messages else None
        wait_s = UNTIL_WAIT_S if waits or self._source.bounded else 0.0
        frame, positions, rejected = self._rows.of(fetched, wait_s=wait_s)
        self._held = None
        self._position = position
        self._read_s = time.monotonic()
        self._ended = self._source.ends_at(self._at, position - 1)
        return Chunk(
            frame=frame,
            position=Position(position),
            row_positions=positions if self._with_positions else None,
            rejected=rejected,
            ended=self._ended,
        )

    def identity(self) -> str:
        return self._source.verify(self._at, self._read_s)

    def _close_fetched(self) -> None:
        if self._fetched is not None:
            self._source.fetcher.close_partition(self._fetched)
            self._fetched = None

    def close(self) -> None:
        self._close_fetched()


def _name(at: At) -> str:
    return f"{at[0]}/{at[1]}"


def _at(partition: str) -> At:
    topic, _, number = partition.rpartition("/")
    return topic, int(number)
