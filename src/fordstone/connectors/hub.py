"""Kinds `hub` (a stream at a hub as a source: nodes are partitions, epochs are positions) and `center` (the same stream as a sink).

`hub.client.reader` asks the hub, checks the rows and decides about time; here they become partitions and chunks. Whole epochs
are read. While the hub is away there is nothing to read, and nothing fails; only a read that was planned (`until`) waits for
it, for a bounded time. Addresses and tokens are in the spec's `at`, beside what the plan means.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import (
    ALL_ROWS,
    Capability,
    Chunk,
    ClockUs,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    Idleness,
    OpenContext,
    Reader,
    ReadPlan,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
    SourceTrouble,
)
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import (
    ConfigError,
    HubAwayError,
    HubError,
    HubRefusedError,
    NodeQuarantinedError,
    RejectedEpochError,
    SourceError,
)
from fordstone.hub.client.address import FROM_EARLIEST, HubAddress
from fordstone.hub.client.client import HubClient, client_of
from fordstone.hub.client.reader import (
    EPOCHS_HELD_MAX,
    EPOCHS_PER_READ_MAX,
    START,
    EpochBuffer,
    Follower,
    Pauses,
    StreamFacts,
    StreamReader,
    declared_us,
)
from fordstone.hub.messages import (
    NODES_PER_REQUEST_MAX,
    RUNBOOK,
    EpochRange,
    NodeEpochs,
    NodePosition,
    StreamEpoch,
    StreamNode,
)
from fordstone.lang.duration import TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan.ids import PartitionId, Position, checked_name
from fordstone.protocol.progress import NotRead
from fordstone.protocol.retry import Backoff

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS: Final = 10.0
"""Timeout for the hub's first response, so that all nodes join together."""
QUIET: Final = Backoff(first_us=1_000_000, max_us=4_000_000)
"""Pauses after epochs or rows could not be read."""
_ORDINAL_BITS: Final = 31


class HubOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options in the plan."""

    pipeline: str
    stream: str
    consumer: str = "center"
    """The name under which the hub keeps rows for this reader."""


class HubKind(ConnectorKind):
    """The kind `hub`."""

    capabilities = frozenset({Capability.AT_HUB, Capability.DECLARES_TIME})

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        _options(spec)
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        named = _options(spec)
        if spec.at is msgspec.UNSET or "url" not in spec.at:
            raise ConfigError(f"stream {named.stream} of pipeline {named.pipeline} is at a hub. Say which: --hub URL.")
        return HubSource(
            client_of(HubAddress.from_at(spec.at)),
            named,
            options.schema,
            bounded=options.bounded,
            clock_us=context.clock_us,
            from_earliest=spec.at.get(FROM_EARLIEST) == "true",
        )


class CenterKind(ConnectorKind):
    """The kind `center`: the far end of the cut. The edge engine's outbox takes its rows, so it is never opened."""

    capabilities = frozenset({Capability.AT_HUB, Capability.CROSSES})

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def fences(self, spec: ConnectorSpec) -> bool:
        """The hub does."""
        del spec
        return True

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        del spec, context
        raise ConfigError(
            f"step {stream.step}: rows for the center leave through the edge engine's outbox. "
            "Run this part with: fordstone run FILE --part edge --hub URL."
        )


def _options(spec: ConnectorSpec) -> HubOptions:
    try:
        options = msgspec.convert(spec.options, HubOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"hub: {error}. Options are: {', '.join(HubOptions.__struct_fields__)}.") from error
    for name in HubOptions.__struct_fields__:
        checked_name(getattr(options, name), name)
    return options


class HubSource(Source):
    """The nodes of a stream as partitions.

    A process that plans (the edge engine, Spark's planner) follows the hub in the background. One that only makes planned
    reads (a task of Spark) asks for the epochs of these.
    """

    def __init__(
        self,
        client: HubClient,
        options: HubOptions,
        schema: Schema,
        *,
        bounded: bool,
        clock_us: ClockUs,
        from_earliest: bool = False,
        pause: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
        follower: Callable[..., Follower] = Follower,
    ) -> None:
        """`from_earliest`: a node of which nothing was read is read from the first epoch on that the hub keeps."""
        self.options = options
        self.schema = schema
        self.bounded = bounded
        self.reader = StreamReader(client, options.pipeline, options.stream, pause=pause, chance=chance)
        self._from_earliest = from_earliest
        self._make_follower = follower
        self._facts: StreamFacts | None = None
        self._ends: dict[str, NodePosition] = {}
        """Of bounded input, the last epoch of each node."""
        self._follower: Follower | None = None
        self._pauses = Pauses(QUIET, clock_us=clock_us, chance=chance)
        self._marks: dict[str, NodePosition] = {}
        """The newest position of each node that was seen, here or before a restart. The hub compares it with its log."""
        self._asked: dict[str, tuple[str | None, int]] = {}
        """The newest commit of each node after which the hub was asked for epochs, and had none to give: log and number."""
        self._rejected: dict[str, tuple[str | None, int]] = {}
        """Nodes of which an epoch was rejected here: the facts contain their quarantine from this number of that log on."""
        self._awaited: dict[str, str] = {}
        """Nodes that may bring back what a restored hub lacks, and why, as it was logged."""
        self._cuts: dict[str, int] = {}
        """The restored positions."""
        self._plans = Plans()
        self._buffer = EpochBuffer()
        self._blobs: str | None = None
        self._expected: dict[str, tuple[int, int]] = {}
        """The planned reads of this process, from where to where."""
        self._open = weakref.WeakValueDictionary[str, HubReader]()
        self._readers = 0
        self._mutex = threading.RLock()
        self._filling = threading.Lock()

    def partitions(self) -> Sequence[PartitionId]:
        """Nodes, by name. The first call waits for the hub's response, unless the hub is away."""
        facts = self._following()
        if self._follower is not None and (refusal := self._follower.refusal()) is not None:
            raise self.reader.refused(refusal)
        return [PartitionId(node) for node in (self._ends if self.bounded else facts.nodes())]

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        for node, cut in cuts.items():
            self._cuts[node] = cut.position
            self._note(node, NodePosition.of_identity(cut.identity))

    def expect_reads(self, reads: Mapping[PartitionId, tuple[Position, Position]]) -> None:
        self._expected = {node: (int(position), int(until)) for node, (position, until) in reads.items()}

    def identity(self, partition: PartitionId, position: Position) -> str:
        """The hub is asked only if the chain at the position is not known: it was planned before this process began."""
        epoch = int(position)
        known = (self._plans.end(partition), self._ends.get(partition, START), self._marks.get(partition, START))
        found = next((one for one in known if one.epoch == epoch), None)
        if found is None and epoch:
            wanted = {str(partition): self._range(partition, epoch - 1, until=epoch)}
            one = self.reader.retry(lambda: self.reader.plan(wanted, rows_max=1))[partition]
            if one.stopped is not None:
                raise self.reader.stopped(partition, epoch - 1, one.stopped)
            found = one.end
        return (found or START).identity

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        with self._mutex:
            self._readers += 1
            reader = self._open[partition] = HubReader(self, partition, int(position), with_positions=with_positions)
        return reader

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """From what is known of the nodes, and if rows have to be counted, from the hub: for all nodes with news together.

        While the hub is away there is nothing: what was planned then could not be read.
        """
        end = self._planned_end(partition, int(position), max(1, rows_max))
        return ReadPlan(position=Position(end), ended=self.ends_at(partition, end))

    def still_planned(self, partition: PartitionId, position: Position, until: Position) -> Position:
        """A node in quarantine is read up to the epoch before."""
        newest = self._following().newest(partition)
        if newest is None or not newest.quarantined or newest.quarantined > until:
            return until
        return Position(max(int(position), newest.epoch))

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        """A node that has finished, or is in quarantine, is not waited for; it may go on later. While the hub is away, nothing is known."""
        facts = self._following()
        if self._follower is not None and (self._follower.away or not facts.complete):
            return Idleness.UNKNOWN
        if self._is_rejected(partition):
            return Idleness.FINISHED
        return Idleness.FINISHED if facts.is_finished(partition, int(position)) else Idleness.EXPECTED

    def trouble(self) -> SourceTrouble:
        """From what is known already: nothing is asked here."""
        facts, follower = self._facts, self._follower
        found = sorted((one.node, one.quarantined) for one in (() if facts is None else facts.all()) if one.quarantined)
        return SourceTrouble(
            away=None if follower is None else follower.problem,
            not_read=tuple(NotRead(pipeline=self.options.pipeline, node=node, epoch=epoch) for node, epoch in found),
        )

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Report the positions to the hub, in the background. Those that do not arrive are reported the next time."""
        marks = {node: NodePosition.of_identity(cut.identity) for node, cut in cuts.items()}
        # What was read after the cut is not acknowledged with it.
        positions = {node: at for node, at in marks.items() if 0 < at.epoch <= cuts[node].position}
        if self._follower is not None:
            self._follower.acknowledge(positions)
        elif self.bounded and self._facts is not None and not self._pauses.pausing:
            try:
                self.reader.acknowledge(self.options.consumer, positions)
            except HubError as error:
                self._pauses.failed()
                log.warning("position not acknowledged", extra={"stream": self.options.stream, "problem": str(error)})

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        epochs = sum(end.epoch for end in self._ends.values())
        read = sum(min(cut.position, self._ends.get(node, START).epoch) for node, cut in cuts.items())
        return read / epochs if epochs else None

    def close(self) -> None:
        """Stop following, until something is asked again. Garbage collection does it too."""
        with self._mutex:
            if self._follower is not None:
                self._follower.stop()
            self._follower = None

    # For the readers.

    def reader_closed(self) -> None:
        """Stop following with the last reader of a run."""
        with self._mutex:
            self._readers -= 1
            if self._readers == 0:
                self.close()

    def ends_at(self, node: str, position: int) -> bool:
        """Whether bounded input is known to end there."""
        return self.bounded and self._facts is not None and position >= self._ends.get(node, START).epoch

    def read_now(self, node: str, position: int, rows_max: int) -> EpochRows:
        """The next epochs with their rows, as far as they can be had now."""
        if not self._may_ask(node, position):
            return EpochRows(end=position)
        newest = self._newest_commit(node)  # before the hub is asked: what comes meanwhile is news
        try:
            try:
                read = self._next(node, position, rows_max, self._readable_end(node))
            except RejectedEpochError as error:
                if self.bounded:
                    raise self._quarantined(error) from error
                self._reject(error)
                read = EpochRows(end=position)
        except HubAwayError as error:
            self._pauses.failed(error)
            return EpochRows(end=position)
        except HubRefusedError as error:
            raise self.reader.refused(error) from error
        self._pauses.succeeded()
        if read.end <= position:
            self._asked[node] = newest
        return read

    def read_planned(self, node: str, position: int, rows_max: int, until: int) -> EpochRows:
        """The next epochs with their rows, up to one that was there when the read was planned."""
        try:
            read = self.reader.retry(lambda: self._next(node, position, rows_max, until))
        except RejectedEpochError as error:
            raise self._quarantined(error) from error
        if read.end >= until:
            self._expected.pop(node, None)
        elif node in self._expected:
            self._expected[node] = (read.end, until)
        if read.end <= position:
            raise SourceError(
                f"{self.reader.title}: of node {node} epochs {position + 1} to {until} are to be read, which were there when this read was "
                f"planned, and the hub no longer has them. Restore the hub's data; {RUNBOOK} says how."
            )
        return read

    # Epochs by need.

    def _next(self, node: str, position: int, rows_max: int, until: int | None) -> EpochRows:
        """The next epochs with their rows; an end after the position and no epochs: there are none up to there, and none are missing."""
        entries = self._buffer.epochs_after(node, position, rows_max, until=until)
        if not entries:
            end = self._fill(node, position, rows_max, until)
            entries = self._buffer.epochs_after(node, position, rows_max, until=until)
            if not entries:
                self._note(node, end)
                return EpochRows(end=max(position, end.epoch))
        read: list[tuple[StreamEpoch, list[pl.DataFrame]]] = []
        try:
            for entry, frames in self.reader.frames(entries, self.schema, self._blobs):
                read.append((entry, frames))
        except RejectedEpochError:
            if not read:
                self._buffer.put(node, position, ())  # what is skipped since is not in the next response
                raise
        last = read[-1][0]
        self._note(node, NodePosition(last.epoch, last.chain))
        self._buffer.forget({node: last.epoch})
        return EpochRows(epochs=read, end=last.epoch)

    def _fill(self, node: str, position: int, rows_max: int, until: int | None) -> NodePosition:
        """List epochs of a node, and in the same request those of others that are read next. Return where those of the node end."""
        with self._filling:
            if self._buffer.has(node, position, until):
                return START  # another thread asked
            ranges = {node: self._range(node, position, until=until)}
            if self._buffer.count < EPOCHS_HELD_MAX:
                for other, at, end in self._read_next():
                    if len(ranges) == NODES_PER_REQUEST_MAX:
                        break
                    if other not in ranges and not self._buffer.has(other, at, end):
                        ranges[other] = self._range(other, at, until=end)
            epochs_max = max(1, min(EPOCHS_PER_READ_MAX, EPOCHS_HELD_MAX // len(ranges)))
            page = self.reader.epochs(ranges, rows_max=rows_max, epochs_max=epochs_max)
            self._blobs = page.blobs
            for name, one in page.nodes.items():
                if name in ranges:
                    # If another node is stopped, reading it reports that.
                    self._buffer.put(name, ranges[name].after, one.epochs)
            asked = page.nodes.get(node, NodeEpochs())
            if asked.stopped is not None:
                raise self.reader.stopped(node, position, asked.stopped)
            self._note_wait(node, asked)
            if asked.skipped:
                log.warning(
                    "epochs passed over",
                    extra={"stream": self.options.stream, "node": node, "after": position, "epochs": asked.skipped},
                )
            return asked.end

    # Nodes in quarantine.

    def _reject(self, error: RejectedEpochError) -> None:
        """Put a node into quarantine, and do not read it on until the operator has said how."""
        change = self.reader.quarantine(error, self.options.consumer)
        if change.quarantine is not None:
            self._rejected[error.node] = self._newest_commit(error.node)[0], change.seq

    def _is_rejected(self, node: str) -> bool:
        """Whether an epoch of a node was rejected here, and the facts do not say so yet."""
        since = self._rejected.get(node)
        if since is None:
            return False
        log_id, seq = self._newest_commit(node)
        if log_id != since[0] or seq >= since[1]:
            del self._rejected[node]
            return False
        return True

    def _quarantined(self, error: RejectedEpochError) -> NodeQuarantinedError:
        return self.reader.quarantined(error, self.options.consumer, "A new start goes on without it.")

    def _readable_end(self, node: str) -> int | None:
        """The last epoch that is read of a node; None: whatever the hub gives."""
        newest = self._newest(node)
        return newest.epoch if newest.quarantined and not self.bounded else self._end_of(node)

    def _read_next(self) -> Iterator[tuple[str, int, int | None]]:
        """The nodes that are read next in this process: from where, and if it is planned, to where."""
        if self._expected:
            yield from ((node, position, until) for node, (position, until) in self._expected.items())
            return
        with self._mutex:
            reading = [(node, reader.position) for node, reader in self._open.items()]
        for node, position in reading:
            newest = None if self._facts is None else self._facts.newest(node)
            if newest is not None and self._has_more(newest, position):
                yield node, position, self._end_of(node)

    def _range(self, node: str, position: int, *, until: int | None) -> EpochRange:
        earliest = self._from_earliest and position == 0
        return EpochRange(after=position, until=until, seen=self._marks.get(node, START), earliest=earliest)

    def _may_ask(self, node: str, position: int) -> bool:
        """Whether the hub can be asked for epochs of a node, and may have some.

        If what is newest does not fit what was read, the log seems to be another one, and the hub decides what that means. If it has
        no epochs, it is asked again after the node's next commit.
        """
        facts = self._following()
        away = self._follower is not None and self._follower.away
        if not facts.complete or self._pauses.pausing or (away and facts.blobs is None):
            return False
        newest = facts.newest(node)
        if newest is None or self._asked.get(node) == self._newest_commit(node) or self._is_rejected(node):
            return False
        if newest.quarantined:
            self._buffer.put(node, newest.epoch, ())  # it may be skipped
        return self._has_more(newest, position) or not self._fits(newest)

    def _has_more(self, newest: StreamNode, position: int) -> bool:
        return (self._ends.get(newest.node, START).epoch if self.bounded else newest.epoch) > position

    def _fits(self, newest: StreamNode) -> bool:
        """Whether what was seen of a node may be part of the log that ends with its newest epoch."""
        mark = self._marks.get(newest.node, START)
        return mark.epoch < newest.epoch or mark == position_of(newest)

    def _planned_end(self, node: str, position: int, rows_max: int) -> int:
        if not self._may_ask(node, position):
            return position
        newest = self._newest(node)
        target = self._ends.get(node, START) if self.bounded else position_of(newest)
        if rows_max >= ALL_ROWS and self._has_more(newest, position) and self._fits(newest):
            self._plans.keep(node, PlannedRead(after=position, rows_max=rows_max, first=target.epoch, end=target))
            return target.epoch
        planned = self._plans.find(node, position, rows_max, target.epoch)
        if planned is None:
            self._plan(node, position, rows_max)
            planned = self._plans.find(node, position, rows_max, target.epoch)
        return position if planned is None else planned

    def _plan(self, node: str, position: int, rows_max: int) -> None:
        """Plan a read of this node, and in the same request of all others that have more."""
        rows_max = self._plans.rows_max = max(rows_max, self._plans.rows_max if rows_max == 1 else 1)
        ranges = {node: self._range(node, position, until=self._end_of(node))}
        for other, at in self._cuts.items():
            newest = self._following().newest(other)
            if other not in ranges and newest is not None and self._has_more(newest, at):
                ranges[other] = self._range(other, at, until=self._end_of(other))
        newest_commit = self._newest_commit(node)
        try:
            found = self.reader.plan(ranges, rows_max=rows_max)
        except HubAwayError as error:
            self._pauses.failed(error)
            return
        except HubRefusedError as error:
            raise self.reader.refused(error) from error
        self._pauses.succeeded()
        for name, one in found.items():
            after = ranges[name].after
            if one.stopped is None and one.end.epoch > after:
                complete = one.end.epoch >= (self._end_of(name) or self._newest(name).epoch)
                first = one.first or one.end.epoch
                self._plans.keep(
                    name, PlannedRead(after=after, rows_max=rows_max, first=first, end=one.end, complete=complete)
                )
        own = found[node]
        if own.stopped is not None:
            raise self.reader.stopped(node, position, own.stopped)
        self._note_wait(node, own)
        if own.end.epoch <= position:
            self._asked[node] = newest_commit

    def _note_wait(self, node: str, found: NodeEpochs) -> None:
        """Log, once, why a node of a restored hub is waited for."""
        if found.awaited and self._awaited.get(node) != found.awaited:
            fields = {"stream": self.options.stream, "node": node, "problem": found.awaited}
            log.warning("center waits for a node", extra=fields)
        self._awaited[node] = found.awaited

    def mark(self, node: str) -> NodePosition:
        """The newest position of a node that was seen."""
        return self._marks.get(node, START)

    def _note(self, node: str, at: NodePosition) -> None:
        # Without a chain: the end of epochs that were discarded at the hub. There is nothing to compare.
        if at.epoch > self._marks.get(node, START).epoch and at.chain:
            self._marks[node] = at

    def _end_of(self, node: str) -> int | None:
        return self._ends.get(node, START).epoch if self.bounded else None

    def _newest(self, node: str) -> StreamNode:
        newest = self._following().newest(node)
        if newest is None:
            raise AssertionError(f"nothing is known of node {node}")
        return newest

    def _newest_commit(self, node: str) -> tuple[str | None, int]:
        """The log, and the number in it, of the newest commit that is known. A log that was restored gives the same numbers again."""
        facts = self._following()
        log_id, newest = facts.listed_log, facts.newest(node)
        return log_id, 0 if newest is None else newest.seq

    def _following(self) -> StreamFacts:
        """The facts of a process that plans: listed once if input is bounded, else followed from here on."""
        with self._mutex:
            if self._facts is None:
                self._facts = self._list() if self.bounded else StreamFacts()
            if self._follower is None and not self.bounded:
                self._follower = self._make_follower(self.reader, self._facts, consumer=self.options.consumer)
                weakref.finalize(self, self._follower.stop)
                self._follower.start()
                self._follower.wait_until_listed(FIRST_WAIT_SECONDS)
            return self._facts

    def _list(self) -> StreamFacts:
        self.reader.retry(lambda: self.reader.acknowledge(self.options.consumer, {}))
        facts = self.reader.facts()
        self._ends = {one.node: position_of(one) for one in sorted(facts.all(), key=lambda one: one.node)}
        for one in facts.all():
            if one.quarantined:
                fields = {"stream": self.options.stream, "node": one.node, "epoch": one.quarantined}
                log.warning("input ends before a quarantine", extra=fields)
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRows:
    """Epochs of a node with their rows."""

    epochs: Sequence[tuple[StreamEpoch, list[pl.DataFrame]]] = ()
    end: int
    """Where a reader stands after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRead:
    """A read as it was planned: how far about `rows_max` rows after an epoch go."""

    after: int
    rows_max: int
    first: int
    """The first epoch of the read."""
    end: NodePosition
    complete: bool = False
    """It contained all that was there."""


class Plans:
    """The newest planned read of each node."""

    def __init__(self) -> None:
        self.rows_max = 1
        """Of the last read that was planned for more than one row."""
        self._planned: dict[str, PlannedRead] = {}

    def keep(self, node: str, planned: PlannedRead) -> None:
        self._planned[node] = planned

    def end(self, node: str) -> NodePosition:
        """The end of a node's planned read; epoch 0 if there is none."""
        planned = self._planned.get(node)
        return START if planned is None else planned.end

    def find(self, node: str, after: int, rows_max: int, newest: int) -> int | None:
        """Where a read ends that is planned already; None: it has to be planned.

        A plan may have up to twice as many rows as asked for. One row is asked for to see whether there are any.
        """
        planned = self._planned.get(node)
        if planned is None or planned.after != after or planned.end.epoch > newest:
            return None  # planned from another position, or before the node was in quarantine
        if rows_max == 1:
            return planned.first
        if planned.complete:
            fits = planned.end.epoch == newest and planned.rows_max <= 2 * rows_max
        else:
            fits = rows_max <= 2 * planned.rows_max and planned.rows_max <= 2 * rows_max
        return planned.end.epoch if fits else None


class HubReader(Reader):
    """Reads the epochs of one node."""

    def __init__(self, source: HubSource, node: str, position: int, *, with_positions: bool) -> None:
        self._source: HubSource | None = source
        self._node = node
        self.position = position
        self._mark = source.mark(node)
        self._with_positions = with_positions

    def identity(self) -> str:
        return self._mark.identity

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """Whole epochs: small ones together up to `rows_max` rows, a large one alone."""
        source, rows_max = self._source, max(1, rows_max)
        if source is None:
            raise AssertionError("a closed reader was asked to read")
        if until is None:
            read = source.read_now(self._node, self.position, rows_max)
        elif self.position >= until:
            return None
        else:
            read = source.read_planned(self._node, self.position, rows_max, int(until))
        if read.end > self.position:
            return self._chunk(source, read)
        if source.ends_at(self._node, self.position):
            return Chunk(frame=source.schema.empty(), position=Position(self.position), ended=True)
        return None

    def close(self) -> None:
        if self._source is not None:
            self._source.reader_closed()
        self._source = None

    def _chunk(self, source: HubSource, read: EpochRows) -> Chunk:
        frames: list[pl.DataFrame] = []
        late: list[pl.Series] = []
        places: list[pl.Series] = []
        for entry, runs in read.epochs:
            first = entry.epoch << _ORDINAL_BITS
            for rows in runs:
                frames.append(rows.select(list(source.schema)))
                late.append(_watermarks_of(rows))
                places.append(pl.int_range(first, first + rows.height, eager=True))
                first += rows.height
        self.position = read.end
        self._mark = source.mark(self._node)
        watermarks = pl.concat([pl.Series(dtype=pl.Int64), *late])
        return Chunk(
            frame=pl.concat([source.schema.empty(), *frames]),
            position=Position(self.position),
            row_positions=pl.concat([pl.Series(dtype=pl.Int64), *places]) if self._with_positions else None,
            ended=source.ends_at(self._node, self.position),
            watermark_us=max((declared_us(entry) for entry, _ in read.epochs), default=TIME_MIN_US),
            late=watermarks if watermarks.null_count() < watermarks.len() else None,
        )


def position_of(newest: StreamNode) -> NodePosition:
    """The position after the newest epoch of a node."""
    return NodePosition(newest.epoch, newest.chain)


def _watermarks_of(rows: pl.DataFrame) -> pl.Series:
    if ROW_WATERMARK not in rows.columns:
        return pl.repeat(None, rows.height, dtype=pl.Int64, eager=True).rename("")
    return rows.get_column(ROW_WATERMARK).rename("")
