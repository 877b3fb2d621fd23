"""Format `fordstone`: a stream of a hub as a source of anybody's PySpark job, streaming or batch.

Spark calls the planner's half in a process beside the driver, and `read` in its tasks. `hub.client.reader` asks the hub; here
its epochs become offsets, micro-batches and tasks. Nothing here needs Fordstone's session settings.

Invariants: a batch is made of whole epochs, of each node in order and without gaps; offsets only grow; an offset differs from
the one before only if there are epochs in between; equal offsets have equal text, since Spark compares them as text.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import LongType, StringType, StructField, StructType

from fordstone.epochs.untrusted import DecodeBudget
from fordstone.errors import (
    HubAwayError,
    NodeQuarantinedError,
    RejectedEpochError,
    RejectedRunError,
    SchemaError,
    SourceError,
)
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import client_of
from fordstone.hub.client.reader import (
    BACK_OFF,
    START,
    EpochBuffer,
    Pauses,
    StreamFacts,
    StreamReader,
    declared_us,
    is_finished,
)
from fordstone.hub.messages import (
    NUMBER_MAX,
    PAGE_ENTRIES_MAX,
    EpochRange,
    NodePosition,
    NodeStop,
    StreamEpoch,
    StreamNode,
)
from fordstone.lang.choices import check_word
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan.ids import checked_name
from fordstone.runtime.assignment import balance
from fordstone.spark.formats.options import Options, address_of, count, flag, named
from fordstone.spark.formats.rows import (
    RunRows,
    arrow_columns,
    check_metadata,
    decode_rows,
    record_batches,
    spark_columns,
    stored_columns,
)
from fordstone.state.base import RunRef
from fordstone.storage.clock import monotonic_clock_us

HUB_FORMAT: Final = "fordstone"
NODE: Final = "_node"
EPOCH: Final = "_epoch"
METADATA: Final = StructType([StructField(NODE, StringType()), StructField(EPOCH, LongType())])
TASK_BYTES: Final = 64 << 20
"""A batch has more tasks than the driver's machine has cores if each would have more than this."""
WAIT_SECONDS: Final = 0.25
"""Timeout of the planner's long poll: a query with nothing to do asks four times per second."""
EPOCHS_PER_BATCH_MAX: Final = 20_000
"""Maximum number of epochs that the planner holds, and that a batch has, unless there are more nodes."""
Read: TypeAlias = tuple[str, int, RunRef]
"""A run, with its node and epoch."""
log = logging.getLogger(__name__)


# Offsets and batches: pure decisions.


class Offset(msgspec.Struct, frozen=True, kw_only=True):
    """How far a query has read a stream."""

    nodes: dict[str, NodePosition] = {}
    """The newest epoch of each node that was read, with the chain at it."""
    finished: frozenset[str] = frozenset()
    """The nodes whose newest epoch said that their input had ended: the watermark does not wait for them."""
    watermark_us: int = TIME_MIN_US
    """A time that all nodes had reached, finished ones aside."""

    def to_json(self) -> dict[str, Any]:
        """For Spark. Names are sorted, so that equal offsets have equal text."""
        found: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        return found

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offset:
        """Back from Spark's checkpoint.

        Raises:
            SourceError: Another source wrote it.
        """
        try:
            if set(value) == set(cls.__struct_fields__):
                return msgspec.convert(value, cls)
        except msgspec.ValidationError:
            pass
        raise SourceError(
            f"the query's checkpoint has an offset that format 'fordstone' did not write: {str(value)[:200]}. "
            "Use a checkpoint location of this query's own."
        )

    def at(self, node: str) -> NodePosition:
        """How far a node was read."""
        return self.nodes.get(node, START)

    @property
    def epochs(self) -> dict[str, int]:
        """The newest epoch of each node."""
        return {node: at.epoch for node, at in self.nodes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Maximum size of a batch. Its first epoch is always in it, however large."""

    rows: int | None = None
    size_bytes: int | None = None
    epochs: int | None = None

    def take(self, waiting: Sequence[StreamEpoch]) -> list[StreamEpoch]:
        """As many of the first epochs as the limit allows, and at least one."""
        rows = size_bytes = 0
        for number, entry in enumerate(waiting):
            rows += sum(run.rows for run in entry.runs)
            size_bytes += sum(run.size_bytes for run in entry.runs)
            sizes = ((rows, self.rows), (size_bytes, self.size_bytes), (number + 1, self.epochs))
            if number and any(most is not None and size > most for size, most in sizes):
                return list(waiting[:number])
        return list(waiting)


def next_offset(start: Offset, waiting: Sequence[StreamEpoch], limit: Limit) -> Offset:
    """The end of the next batch; `start` itself if there is nothing to read.

    Args:
        start: The end of the batch before.
        waiting: Epochs after `start`, of each node the next ones; those that come first are taken first.
        limit: The maximum size of the batch.
    """
    taken = limit.take(waiting)
    if not taken:
        return start
    nodes, finished, times_us = dict(start.nodes), set(start.finished), dict[str, int]()
    for entry in taken:
        nodes[entry.node] = NodePosition(entry.epoch, entry.chain)
        (finished.add if is_finished(entry) else finished.discard)(entry.node)
        times_us[entry.node] = max(times_us.get(entry.node, TIME_MIN_US), declared_us(entry))
    # A node without news was no further back than the watermark. A finished one counts only with what it declared before.
    reached_us = [
        times_us.get(node, start.watermark_us)
        for node in nodes
        if node not in finished or times_us.get(node, TIME_MIN_US) > TIME_MIN_US
    ]
    return Offset(
        nodes=nodes,
        finished=frozenset(finished),
        watermark_us=max([start.watermark_us, *([min(reached_us)] if reached_us else [])]),
    )


def offset_after(newest: Iterable[StreamNode]) -> Offset:
    """The offset of a query that has read everything."""
    nodes = list(newest)
    times_us = [declared_us(one) for one in nodes if not is_finished(one)]
    return Offset(
        nodes={one.node: NodePosition(one.epoch, one.chain) for one in nodes},
        finished=frozenset(one.node for one in nodes if is_finished(one)),
        watermark_us=min(times_us, default=TIME_MIN_US),
    )


class BatchPlanner:
    """Plans the batches of one query. One thread, in the process beside the driver. Fetches no rows.

    It holds one record per node, and at most `EPOCHS_PER_BATCH_MAX` epochs, or one per node. Every call but `epochs` may raise
    `HubAwayError`; it can then be made again.
    """

    def __init__(self, reader: StreamReader, *, fail_on_loss: bool = True) -> None:
        self._reader = reader
        self._fail_on_loss = fail_on_loss
        self._facts = StreamFacts()
        self._buffer = EpochBuffer()
        self.blobs: str | None = None

    def newest_epochs(self) -> dict[str, int]:
        """The newest epoch of each node that is committed now."""
        self._update()
        return {one.node: one.epoch for one in self._facts.all()}

    def offset_of_end(self) -> Offset:
        self._update()
        return offset_after(self._facts.all())

    def plan(
        self, start: Offset, limit: Limit, *, until: Mapping[str, int] | None = None, wait_s: float = 0.0
    ) -> Offset:
        """The end of the next batch; `start`: there is nothing to read.

        Args:
            start: The end of the batch before.
            limit: The maximum size of the batch.
            until: The last epoch of each node that is to be read.
            wait_s: Timeout for something to come, if nothing is there.
        """
        self._buffer.forget(start.epochs)
        ranges = self._unread(start, until)
        if until is None:
            self._update(wait_s=0.0 if ranges else wait_s)
            ranges = self._unread(start, until)
        self._list(ranges, limit)
        waiting = [entry for node, wanted in ranges.items() for entry in self._held(node, wanted)]
        # Those that were committed first come first.
        waiting.sort(key=lambda entry: (entry.seq, entry.node, entry.epoch))
        return next_offset(start, waiting, limit)

    def epochs(self, start: Offset, end: Offset) -> list[StreamEpoch]:
        """The epochs of a planned batch, the same however often it is planned.

        Raises:
            SourceError: The hub no longer has some of them, or has others, or stays away.
        """
        found: list[StreamEpoch] = []
        missing: dict[str, EpochRange] = {}
        for node, last in end.nodes.items():
            wanted = self._range(start.at(node), until=last.epoch, seen=last)
            if wanted.after >= last.epoch:
                continue
            held = self._held(node, wanted)
            if held and (held[-1].epoch, held[-1].chain) == (last.epoch, last.chain):
                found += held
            else:
                missing[node] = wanted
        listed = self._reader.epochs_between(missing, on_stopped=self._stopped, on_missing=self._check_missing)
        for entry, blobs in listed:
            self.blobs = blobs
            found.append(entry)
        return found

    def _update(self, *, wait_s: float = 0.0) -> None:
        while self._reader.update(self._facts, wait_s=wait_s):
            wait_s = 0.0

    def _unread(self, start: Offset, until: Mapping[str, int] | None) -> dict[str, EpochRange]:
        """The nodes that have epochs after an offset."""
        ends = self._facts.all() if until is None else [one for one in self._facts.all() if one.node in until]
        found: dict[str, EpochRange] = {}
        for newest in ends:
            at, end = start.at(newest.node), newest.epoch if until is None else until[newest.node]
            # A log that ends before what was read, or there with other content: the hub says what that means.
            if end > at.epoch or newest.epoch < at.epoch or (newest.epoch == at.epoch and newest.chain != at.chain):
                found[newest.node] = self._range(at, until=None if until is None else end, seen=at)
        return found

    def _range(self, at: NodePosition, *, until: int | None, seen: NodePosition) -> EpochRange:
        # A query begins with the earliest epochs that the hub keeps.
        earliest = at.epoch == 0 or not self._fail_on_loss
        return EpochRange(after=at.epoch, until=until, seen=seen, earliest=earliest)

    def _list(self, ranges: Mapping[str, EpochRange], limit: Limit) -> None:
        """List epochs of the nodes of which none is held."""
        left = {node: one for node, one in ranges.items() if not self._buffer.has(node, one.after, one.until)}
        epochs_max = max(1, min(PAGE_ENTRIES_MAX, EPOCHS_PER_BATCH_MAX // max(1, len(ranges))))
        rows_max = NUMBER_MAX if limit.rows is None else limit.rows
        while left and self._buffer.count < max(EPOCHS_PER_BATCH_MAX, len(ranges)):
            page = self._reader.epochs(left, rows_max=rows_max, epochs_max=epochs_max)
            self.blobs = page.blobs
            for node in page.nodes.keys() & left.keys():
                one, wanted = page.nodes[node], left.pop(node)
                if one.stopped is not None:
                    raise self._stopped(node, wanted.after, one.stopped)
                self._buffer.put(node, wanted.after, one.epochs)

    def _held(self, node: str, wanted: EpochRange) -> list[StreamEpoch]:
        return self._buffer.epochs_after(
            node, wanted.after, NUMBER_MAX, until=wanted.until, epochs_max=EPOCHS_PER_BATCH_MAX
        )

    def _stopped(self, node: str, after: int, stop: NodeStop) -> SourceError:
        return self._lost(node, stop.reason) if stop.code == "gone" else self._reader.stopped(node, after, stop)

    def _check_missing(self, node: str, wanted: EpochRange) -> None:
        if self._fail_on_loss:
            raise self._lost(node, f"epochs {wanted.after + 1} to {wanted.until} are missing")

    def _lost(self, node: str, reason: str) -> SourceError:
        return SourceError(
            f"the hub no longer has epochs of {self._reader.title} that this query has not read (node {node}: {reason}). "
            "All consumers that the hub knows had passed them. To continue with what is there: option 'failOnDataLoss' = 'false'. To "
            "make the hub keep what this query has not read: option 'consumer' with a name of its own."
        )


# The data source.


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSetting:
    """The options. They are sent to the tasks, with the token, and are not in Spark's checkpoint."""

    address: HubAddress
    pipeline: str
    stream: str
    metadata: bool
    consumer: str | None
    latest: bool
    limit: Limit
    tasks: int | None
    fail_on_loss: bool

    @classmethod
    def of(cls, options: Options) -> StreamSetting:
        starting = options.get("startingEpochs", "earliest")
        check_word("startingEpochs", starting, ("earliest", "latest"))
        consumer = options.get("consumer")
        return cls(
            address=address_of(options),
            pipeline=named(options, "pipeline", example="cold-chain"),
            stream=named(options, "stream", example="readings"),
            metadata=flag(options, "metadata", default=True),
            consumer=None if consumer is None else checked_name(consumer, "consumer"),
            latest=starting == "latest",
            limit=Limit(rows=count(options, "maxRowsPerBatch"), size_bytes=count(options, "maxBytesPerBatch")),
            tasks=count(options, "tasks"),
            fail_on_loss=flag(options, "failOnDataLoss", default=True),
        )

    def reader(self) -> StreamReader:
        return StreamReader(client_of(self.address), self.pipeline, self.stream)


class RunShare(InputPartition):
    """The runs that one task reads, each with its node and epoch."""

    def __init__(self, reads: Sequence[Read], blobs: str | None) -> None:
        super().__init__(None)
        self.reads = tuple(reads)
        self.blobs = blobs


class EpochShare(InputPartition):
    """The epochs that one task of a batch job lists and reads, by node."""

    def __init__(self, ranges: Sequence[tuple[str, EpochRange]]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)


class HubSource(DataSource):
    """`format("fordstone")`."""

    @classmethod
    def name(cls) -> str:
        return HUB_FORMAT

    def schema(self) -> StructType:
        """The columns of a recent run, then `_node` and `_epoch`. Called if the user gives no schema."""
        setting = StreamSetting.of(self.options)
        reader = setting.reader()
        example = reader.example()
        if example is None:
            raise SchemaError(
                f"stream {setting.stream} of pipeline {setting.pipeline} has no rows at the hub at {setting.address.url} yet, so "
                "its columns are not known. Check both names (`fordstone streams`), or give the columns: "
                '.schema("device string, temp double").'
            )
        entry, blobs = example
        run = entry.runs[-1]
        try:
            data = reader.retry(lambda: reader.blob(entry.node, entry.epoch, run, blobs))
            columns = spark_columns(stored_columns(data, run))
        except (RejectedRunError, RejectedEpochError) as error:
            raise _quarantined(setting, reader, entry.node, entry.epoch, error) from error
        if not setting.metadata:
            return columns
        check_metadata(columns, METADATA)
        return StructType([*columns.fields, *METADATA.fields])

    def reader(self, schema: StructType) -> DataSourceReader:
        return HubBatchReader(StreamSetting.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return HubStreamReader(StreamSetting.of(self.options), schema)


class HubBatchReader(DataSourceReader):
    """All epochs that the hub keeps when the job is planned."""

    def __init__(self, setting: StreamSetting, schema: StructType) -> None:
        self._setting = setting
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """One share of the epochs per task, which lists them itself: there may be millions."""
        nodes = self._setting.reader().facts().all()
        tasks = _tasks(self._setting, sum(one.size_bytes for one in nodes))
        pieces = epoch_pieces(nodes, tasks)
        return [EpochShare([piece[:2] for piece in share]) for share in balance(pieces, tasks, lambda piece: piece[2])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, EpochShare):
            raise TypeError(f"{partition!r} is not a share of a batch job")
        reader = self._setting.reader()
        for node, wanted in partition.ranges:
            found = reader.epochs_between({node: wanted})
            yield from _rows(self._setting, self._schema, ((reads_of([entry]), blobs) for entry, blobs in found))


class HubStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Epochs as they are committed."""

    def __init__(self, setting: StreamSetting, schema: StructType) -> None:
        self._setting = setting
        self._schema = schema
        self._planner: BatchPlanner | None = None
        self._until: dict[str, int] | None = None
        """With the trigger AvailableNow, the last epoch of each node that is read."""
        self._pauses: Pauses | None = None
        self._registered = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Before everything that the hub keeps, or after it. Called for a new checkpoint only."""
        if not self._setting.latest:
            return Offset().to_json()
        return self._setting.reader().retry(self._plans().offset_of_end).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The options, as far as Spark has classes for them: `latestOffset` keeps to all of them."""
        limit = self._setting.limit
        if limit.rows is not None:
            return ReadMaxRows(limit.rows)
        return ReadAllAvailable() if limit.size_bytes is None else ReadMaxBytes(limit.size_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read only what is committed now. If the hub stays away, the query fails, since it would end with nothing done."""
        self._until = self._setting.reader().retry(self._plans().newest_epochs)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch; the start itself: nothing to do, or the hub is away."""
        offset = Offset.from_json(start)
        allowed = self._limit(limit)
        if self._until is not None:
            return self._setting.reader().retry(lambda: self._latest(offset, allowed)).to_json()
        pauses = self._pauses = self._pauses or Pauses(BACK_OFF, clock_us=monotonic_clock_us, chance=random.random)
        if pauses.pausing:
            return offset.to_json()
        try:
            latest = self._latest(offset, allowed).to_json()
        except HubAwayError as error:
            log.warning("hub away", extra={"problem": str(error)})
            pauses.failed(error)
            return offset.to_json()
        pauses.succeeded()
        return latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One share of the batch per task. After a restart the batch may have been planned by the previous run."""
        planner, first, last = self._plans(), Offset.from_json(start), Offset.from_json(end)
        return _shares(self._setting, planner.epochs(first, last), planner.blobs)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RunShare):
            raise TypeError(f"{partition!r} is not a share of a batch")
        epochs = groupby(partition.reads, key=lambda read: read[:2])
        yield from _rows(self._setting, self._schema, ((list(reads), partition.blobs) for _, reads in epochs))

    def commit(self, end: dict[str, Any]) -> None:
        """Report to the hub, if the query has a consumer name, that it will never ask for these epochs again."""
        self._acknowledge(Offset.from_json(end))

    def _latest(self, start: Offset, limit: Limit) -> Offset:
        if not self._registered:
            # Before the first listing, so that the hub keeps what was listed.
            self._registered = self._acknowledge(start)
        wait_s = WAIT_SECONDS if self._until is None else 0.0
        return self._plans().plan(start, limit, until=self._until, wait_s=wait_s)

    def _acknowledge(self, offset: Offset) -> bool:
        if self._setting.consumer is None:
            return True
        try:
            refused = self._setting.reader().acknowledge(self._setting.consumer, offset.nodes)
        except HubAwayError:
            return False  # the next call reports more
        for node, reason in refused.items():
            # Planning the next batch finds the same, and fails.
            log.warning("position rejected", extra={"node": node, "problem": reason})
        return True

    def _limit(self, limit: ReadLimit) -> Limit:
        match limit:
            case ReadMaxRows(max_rows=rows):
                return Limit(rows=rows, size_bytes=self._setting.limit.size_bytes)
            case ReadMaxBytes(max_bytes=size_bytes):
                return Limit(size_bytes=size_bytes)
            case ReadMaxFiles(max_files=epochs):
                return Limit(epochs=epochs)
            case _:
                return Limit()

    def _plans(self) -> BatchPlanner:
        # Not in `__init__`: Spark sends this object to its tasks.
        if self._planner is None:
            self._planner = BatchPlanner(self._setting.reader(), fail_on_loss=self._setting.fail_on_loss)
        return self._planner

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_planner": None, "_pauses": None}


def epoch_pieces(nodes: Iterable[StreamNode], tasks: int) -> list[tuple[str, EpochRange, int]]:
    """The kept epochs of nodes in pieces that can be spread over tasks: node, which of them, and about how many bytes.

    Each piece names the newest epoch, so that a task notices a log that was set back since the job was planned.
    """
    kept = [one for one in nodes if one.epoch > one.removed]
    piece_bytes = max(1, sum(one.size_bytes for one in kept) // max(1, tasks))
    pieces: list[tuple[str, EpochRange, int]] = []
    for one in kept:
        epochs = one.epoch - one.removed
        count = min(epochs, -(-one.size_bytes // piece_bytes) or 1)
        bounds = [one.removed + epochs * number // count for number in range(count + 1)]
        for after, until in pairwise(bounds):
            wanted = EpochRange(after=after, until=until, seen=NodePosition(one.epoch, one.chain), earliest=True)
            pieces.append((one.node, wanted, one.size_bytes // count))
    return pieces


def reads_of(entries: Iterable[StreamEpoch]) -> list[Read]:
    """The runs of these epochs that have rows."""
    return [(entry.node, entry.epoch, run) for entry in entries for run in entry.runs if run.rows]


def _shares(setting: StreamSetting, entries: Sequence[StreamEpoch], blobs: str | None) -> list[RunShare]:
    reads = reads_of(entries)
    tasks = _tasks(setting, sum(run.size_bytes for _, _, run in reads))
    shares = balance(reads, tasks, lambda read: read[2].size_bytes)
    return [RunShare(sorted(share, key=lambda read: read[:2]), blobs) for share in shares]


def _tasks(setting: StreamSetting, size_bytes: int) -> int:
    return setting.tasks or max(len(os.sched_getaffinity(0)), -(-size_bytes // TASK_BYTES))


def _quarantined(
    setting: StreamSetting, reader: StreamReader, node: str, epoch: int, error: RejectedRunError | RejectedEpochError
) -> NodeQuarantinedError:
    """Put a node into quarantine, as a center does, and return the error to fail with.

    A batch job that is started again goes on without the node. A stream does not: Spark has fixed what its batch reads, and would take
    the epoch for read.
    """
    rejected = error
    if not isinstance(rejected, RejectedEpochError):
        rejected = RejectedEpochError(str(error), node=node, epoch=epoch, reason=f"stream {setting.stream}: {error}")
    goes_on = "A batch job that is started again goes on without it; a stream goes on after a skip."
    return reader.quarantined(rejected, setting.consumer or f"format-{HUB_FORMAT}", goes_on)


def _rows(
    setting: StreamSetting, schema: StructType, epochs: Iterable[tuple[Sequence[Read], str | None]]
) -> Iterator[pa.RecordBatch]:
    """The rows of runs, those of an epoch together, with where blobs can be read directly."""
    reader, target = setting.reader(), arrow_columns(schema)

    def fetched() -> Iterator[RunRows]:
        for reads, blobs in epochs:
            budget = DecodeBudget.of_epoch(run for _, _, run in reads)
            for read in reads:
                yield fetched_run(read, blobs, budget)

    def fetched_run(read: Read, blobs: str | None, budget: DecodeBudget) -> RunRows:
        node, epoch, run = read
        where = f"epoch {epoch} of node {node} in stream {setting.stream}"
        constants = {NODE: pa.scalar(node), EPOCH: pa.scalar(epoch)} if setting.metadata else {}
        # If columns do not fit, the query may be wrong: the node is not put into quarantine for all readers.
        which = f"{node} --pipeline {setting.pipeline}"
        advice = (
            f"If the node sends what it should not: `fordstone hub quarantine {which} --epoch {epoch}`, then `fordstone hub skip {which} "
            f"--until {epoch}`."
        )
        try:
            data = reader.retry(lambda: reader.blob(node, epoch, run, blobs))
            return decode_rows(data, run, target, where=where, constants=constants, advice=advice, budget=budget)
        except (RejectedRunError, RejectedEpochError) as error:
            raise _quarantined(setting, reader, node, epoch, error) from error

    yield from record_batches(fetched(), target)
