"""Format `fordstone`: a stream of a hub as a source of anybody's PySpark job, streaming or batch.

Spark calls the planner's half in a process beside the driver, and `read` in its tasks. `hub.client.reader` asks the hub; here
its epochs become offsets, micro-batches and tasks. Nothing here needs Fordstone's session settings.

Invariants: a batch is made of whole epochs, of each node in order and without gaps; offsets only grow; an offset differs from
the one before only if there are epochs in between; equal offsets have equal text, since Spark compares them as text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

from fordstone.errors import HubAwayError, SchemaError, SourceError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import client_of
from fordstone.hub.client.reader import Gap, StreamIndex, StreamReader, declared_us, find_gaps, is_finished
from fordstone.hub.messages import StreamEpoch
from fordstone.lang.choices import check_word
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan.ids import checked_name
from fordstone.runtime.assignment import balance
from fordstone.spark.formats.options import Options, address_of, count, flag, named
from fordstone.spark.formats.rows import (
    RunRows,
    arrow_columns,
    check_metadata,
    record_batches,
    spark_columns,
    stored_columns,
)
from fordstone.state.base import RunRef

HUB_FORMAT: Final = "fordstone"
NODE: Final = "_node"
EPOCH: Final = "_epoch"
METADATA: Final = StructType([StructField(NODE, StringType()), StructField(EPOCH, LongType())])
TASK_BYTES: Final = 64 << 20
"""A batch has more tasks than the driver's machine has cores if each would have more than this."""
WAIT_SECONDS: Final = 0.25
"""Timeout of the planner's long poll: a query with nothing to do asks four times per second."""
EPOCHS_PER_BATCH_MAX: Final = 50_000
"""Maximum number of entries that the planner holds."""
GAPS_SHOWN_MAX: Final = 5
log = logging.getLogger(__name__)


# Offsets and batches: pure decisions.


class Offset(msgspec.Struct, frozen=True, kw_only=True):
    """How far a query has read a stream."""

    nodes: dict[str, int] = {}
    """The newest epoch of each node that was read."""
    finished: frozenset[str] = frozenset()
    """The nodes whose newest epoch said that their input had ended: the watermark does not wait for them."""
    seq: int = 0
    """The hub's number of a commit: all epochs of commits up to it are read."""
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

    def covers(self, other: Offset) -> bool:
        """Whether everything that the other offset has read is read here too."""
        return self.seq >= other.seq and all(self.nodes.get(node, 0) >= epoch for node, epoch in other.nodes.items())


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


def next_offset(start: Offset, waiting: Sequence[StreamEpoch], *, read_to: int, limit: Limit) -> Offset:
    """The end of the next batch; `start` itself if there is nothing to read.

    Args:
        start: The end of the batch before.
        waiting: All epochs after `start` that the hub has committed up to `read_to`, in the hub's order.
        read_to: The hub's number of a commit.
        limit: The maximum size of the batch.
    """
    taken = limit.take(waiting)
    if not taken:
        return start
    nodes, finished, times_us = dict(start.nodes), set(start.finished), dict[str, int]()
    for entry in taken:
        nodes[entry.node] = entry.epoch
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
        seq=max(start.seq, read_to if len(taken) == len(waiting) else waiting[len(taken)].seq - 1),
        watermark_us=max([start.watermark_us, *([min(reached_us)] if reached_us else [])]),
    )


def find_lost(start: Offset, end: Offset, found: Iterable[StreamEpoch]) -> list[Gap]:
    """The epochs of a planned batch that are not among those found."""
    entries = list(found)
    lost = find_gaps(start.nodes, entries)
    newest = {**start.nodes, **{entry.node: entry.epoch for entry in entries}}
    for node, epoch in sorted(end.nodes.items()):
        if newest.get(node, 0) < epoch:
            lost.append(Gap(node=node, first=newest.get(node, 0) + 1, last=epoch))
    return lost


class BatchPlanner:
    """Plans the batches of one query. One thread, in the process beside the driver. Fetches no rows.

    Every call may raise `HubAwayError` and change nothing.
    """

    def __init__(self, reader: StreamReader, *, fail_on_loss: bool = True) -> None:
        self._reader = reader
        self._fail_on_loss = fail_on_loss
        self._start = Offset()
        self._index = StreamIndex()
        """Everything that was listed after `_start`."""

    @property
    def blobs(self) -> str | None:
        return self._index.blobs

    def newest_commit(self) -> int:
        after = self._index.after
        for page in self._reader.pages(after):
            after = page.next
        return after

    def offset_of_end(self) -> Offset:
        offset = Offset()
        for page in self._reader.pages():
            offset = next_offset(offset, page.epochs, read_to=page.next, limit=Limit())
        return offset

    def plan(self, start: Offset, limit: Limit, *, until: int | None = None, wait_s: float = 0.0) -> Offset:
        """The end of the next batch; `start`: there is nothing to read.

        Args:
            start: The end of the batch before.
            limit: The maximum size of the batch.
            until: The number of the last commit to be read.
            wait_s: Timeout for something to come, if nothing is there.
        """
        index = self._index_after(start)
        waiting = index.unread(start.nodes)
        while index.entries < EPOCHS_PER_BATCH_MAX and (until is None or index.after < until):
            if len(limit.take(waiting)) < len(waiting):
                break
            page = self._reader.page(index.after, wait_s=0.0 if waiting else wait_s)
            index.add(page)
            waiting = index.unread(start.nodes)
            if not page.more:
                break
        if until is not None:
            waiting = [entry for entry in waiting if entry.seq <= until]
        self._check_lost(find_gaps(start.nodes, waiting))
        read_to = index.after if until is None else min(index.after, until)
        return next_offset(start, waiting, read_to=read_to, limit=limit)

    def epochs(self, start: Offset, end: Offset) -> list[StreamEpoch]:
        """The epochs of a planned batch.

        Raises:
            SourceError: The hub no longer has some of them.
        """
        index, more = self._index_after(start), True
        while True:
            found = [entry for entry in index.unread(start.nodes) if entry.epoch <= end.nodes.get(entry.node, 0)]
            lost = find_lost(start, end, found)
            if not lost or not more:
                break
            page = self._reader.page(index.after)
            index.add(page)
            more = page.more or bool(page.epochs)
        self._check_lost(lost)
        return found

    def _index_after(self, start: Offset) -> StreamIndex:
        """The index of what follows an offset, and of nothing before it."""
        if not start.covers(self._start) or start.seq > self._index.after:
            self._index = StreamIndex(start.seq)
        self._index.forget(start.nodes)
        self._start = start
        return self._index

    def _check_lost(self, lost: Sequence[Gap]) -> None:
        if not lost or not self._fail_on_loss:
            return
        shown = "; ".join(f"node {gap.node}: {gap.first} to {gap.last}" for gap in lost[:GAPS_SHOWN_MAX])
        raise SourceError(
            f"the hub no longer has epochs of {self._reader.title} that this query has not read "
            f"({shown}{'; ...' if len(lost) > GAPS_SHOWN_MAX else ''}). "
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

    def __init__(self, reads: Sequence[tuple[str, int, RunRef]], blobs: str | None) -> None:
        super().__init__(None)
        self.reads = tuple(reads)
        self.blobs = blobs


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
        columns = spark_columns(stored_columns(reader.blob(entry.runs[-1], reader.title, blobs)))
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
        """One share of the runs per task."""
        pages = list(self._setting.reader().pages())
        return list(_shares(self._setting, [entry for page in pages for entry in page.epochs], pages[-1].blobs))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, RunShare):
            yield from _rows(self._setting, self._schema, partition)


class HubStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Epochs as they are committed."""

    def __init__(self, setting: StreamSetting, schema: StructType) -> None:
        self._setting = setting
        self._schema = schema
        self._planner: BatchPlanner | None = None
        self._until: int | None = None
        self._registered = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Before everything that the hub keeps, or after it. Called for a new checkpoint only."""
        return (self._plans().offset_of_end() if self._setting.latest else Offset()).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The options, as far as Spark has classes for them: `latestOffset` keeps to all of them."""
        limit = self._setting.limit
        if limit.rows is not None:
            return ReadMaxRows(limit.rows)
        return ReadAllAvailable() if limit.size_bytes is None else ReadMaxBytes(limit.size_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read only what is committed now. If the hub stays away, the query fails, since it would end with nothing done."""
        self._until = self._plans().newest_commit()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch; the start itself: nothing to do, or the hub is away."""
        offset = Offset.from_json(start)
        allowed = self._limit(limit)
        if self._until is not None:
            return self._setting.reader().retry(lambda: self._latest(offset, allowed)).to_json()
        try:
            return self._latest(offset, allowed).to_json()
        except HubAwayError as error:
            log.warning("hub away", extra={"problem": str(error)})
            return offset.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One share of the batch per task. After a restart the batch may have been planned by the previous run."""
        planner, first, last = self._plans(), Offset.from_json(start), Offset.from_json(end)
        entries = self._setting.reader().retry(lambda: planner.epochs(first, last))
        return _shares(self._setting, entries, planner.blobs)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RunShare):
            raise TypeError(f"{partition!r} is not a share of a batch")
        yield from _rows(self._setting, self._schema, partition)

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
            self._setting.reader().acknowledge(self._setting.consumer, offset.nodes)
        except HubAwayError:
            return False  # the next call reports more
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
        return self.__dict__ | {"_planner": None}


def reads_of(entries: Iterable[StreamEpoch]) -> list[tuple[str, int, RunRef]]:
    """The runs of these epochs that have rows."""
    return [(entry.node, entry.epoch, run) for entry in entries for run in entry.runs if run.rows]


def _shares(setting: StreamSetting, entries: Sequence[StreamEpoch], blobs: str | None) -> list[RunShare]:
    reads = reads_of(entries)
    size_bytes = sum(run.size_bytes for _, _, run in reads)
    tasks = setting.tasks or max(len(os.sched_getaffinity(0)), -(-size_bytes // TASK_BYTES))
    shares = balance(reads, tasks, lambda read: read[2].size_bytes)
    return [RunShare(sorted(share, key=lambda read: read[:2]), blobs) for share in shares]


def _rows(setting: StreamSetting, schema: StructType, share: RunShare) -> Iterator[pa.RecordBatch]:
    reader = setting.reader()

    def fetched() -> Iterator[RunRows]:
        for node, epoch, run in share.reads:
            where = f"epoch {epoch} of node {node} in stream {setting.stream}"
            constants = {NODE: pa.scalar(node), EPOCH: pa.scalar(epoch)} if setting.metadata else {}
            data = reader.retry(lambda: reader.blob(run, where, share.blobs))  # noqa: B023 - called at once
            yield RunRows(data=data, where=where, constants=constants)

    yield from record_batches(fetched(), arrow_columns(schema))
