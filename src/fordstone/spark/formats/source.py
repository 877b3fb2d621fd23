"""Format `fordstone`: a stream of a hub as a source of anybody's PySpark job, streaming or batch.

Spark calls the planner's half in a process beside the driver, and `read` in its tasks. A micro-batch is made of whole epochs; a
row comes once, as `hub_offsets` says. Nothing here needs Fordstone's session settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

from fordstone.errors import ConfigError, HubAwayError, HubRefusedError, SchemaError, SourceError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.messages import ConsumerPosition, StreamEpoch
from fordstone.plan.ids import checked_name
from fordstone.spark.formats.access import Options, address_of, client_of, count, flag, named, patiently
from fordstone.spark.formats.offsets import Limit, Offset, RunRead, assign, reads_of
from fordstone.spark.formats.rows import RunRows, arrow_columns, record_batches, spark_columns, stored_columns
from fordstone.spark.formats.tail import StreamTail
from fordstone.state.base import RunRef

HUB_FORMAT: Final = "fordstone"
NODE: Final = "_node"
EPOCH: Final = "_epoch"
TASK_BYTES: Final = 64 << 20
"""A batch is dealt out to more tasks than the driver's machine has cores, if they would have more than this each."""
WAIT_SECONDS: Final = 0.25
"""So long the planner lets the hub wait for news, so that a query with nothing to do asks four times a second."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSetting:
    """What the options say. Goes to the tasks, token and all; not into Spark's checkpoint."""

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
        """Read and check the options."""
        starting = options.get("startingEpochs", "earliest")
        if starting not in {"earliest", "latest"}:
            raise ConfigError(f"option 'startingEpochs' is {starting!r}; it is 'earliest' or 'latest'.")
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

    def tail(self) -> StreamTail:
        """A view of the stream that has seen nothing yet."""
        return StreamTail(client_of(self.address), self.pipeline, self.stream, fail_on_loss=self.fail_on_loss)


class RunShare(InputPartition):
    """What one task reads."""

    def __init__(self, reads: Sequence[RunRead], blobs: str | None) -> None:
        super().__init__(None)
        self.reads = tuple(reads)
        self.blobs = blobs


class HubSource(DataSource):
    """`format("fordstone")`."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return HUB_FORMAT

    def schema(self) -> StructType:
        """The columns of a new run, with `_node` and `_epoch` behind them. Called where the user gives no schema."""
        setting = StreamSetting.of(self.options)
        tail = setting.tail()
        entry = tail.example()
        if entry is None:
            raise SchemaError(
                f"stream {setting.stream} of pipeline {setting.pipeline} has no rows at the hub at {setting.address.url} yet, so "
                "its columns are not known. Check both names (`fordstone streams`), or give the columns: "
                '.schema("device string, temp double").'
            )
        run = entry.runs[-1]
        stored = stored_columns(client_of(setting.address).read_blob(run, tail.blobs))
        return with_metadata(spark_columns(stored)) if setting.metadata else spark_columns(stored)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        return HubBatchReader(StreamSetting.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For `spark.readStream`."""
        return HubStreamReader(StreamSetting.of(self.options), schema)


def with_metadata(columns: StructType) -> StructType:
    """The columns and ours behind them."""
    taken = [name for name in (NODE, EPOCH) if name in columns.fieldNames()]
    if taken:
        raise SchemaError(
            f"the stream has a column {taken[0]!r} of its own, which is where the source says whose a row is. Set option 'metadata' to "
            "'false' to read the stream's."
        )
    return StructType([*columns.fields, StructField(NODE, StringType()), StructField(EPOCH, LongType())])


class HubBatchReader(DataSourceReader):
    """All epochs that the hub keeps when the job is planned."""

    def __init__(self, setting: StreamSetting, schema: StructType) -> None:
        self._setting = setting
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """The runs, dealt out."""
        tail = self._setting.tail()
        return list(_shares(self._setting, patiently(tail.all), tail.blobs))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's runs."""
        if isinstance(partition, RunShare):
            yield from _rows(self._setting, self._schema, partition)


class HubStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Epochs as they come."""

    def __init__(self, setting: StreamSetting, schema: StructType) -> None:
        self._setting = setting
        self._schema = schema
        self._tail: StreamTail | None = None
        self._until: int | None = None
        self._registered = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Before all that the hub keeps, or behind it. Called for a new checkpoint only."""
        return (patiently(self._known().skipped) if self._setting.latest else Offset()).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """What the options say, as far as Spark has words for it: `latestOffset` holds to all of them."""
        limit = self._setting.limit
        if limit.rows is not None:
            return ReadMaxRows(limit.rows)
        return ReadAllAvailable() if limit.size_bytes is None else ReadMaxBytes(limit.size_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read what is committed now and no more. A hub that stays away fails the query, which would else end with nothing done."""
        self._until = patiently(self._known().end)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch; the start itself: nothing to do, or the hub is away."""
        offset = Offset.from_json(start)
        allowed = self._limit(limit)
        try:
            if self._until is not None:
                return patiently(lambda: self._latest(offset, allowed)).to_json()
            return self._latest(offset, allowed).to_json()
        except HubAwayError as error:
            if self._until is not None:
                raise
            log.warning("hub away", extra={"problem": str(error)})
            return offset.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The batch between two offsets, dealt out to tasks. After a restart those may be of the query before."""
        tail = self._known()
        entries = patiently(lambda: tail.batch(Offset.from_json(start), Offset.from_json(end)))
        return _shares(self._setting, entries, tail.blobs)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's runs."""
        if not isinstance(partition, RunShare):
            raise TypeError(f"{partition!r} is not a share of a batch")
        yield from _rows(self._setting, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Tell the hub that this query will never ask for these epochs again, if it goes by a name."""
        self._tell(Offset.from_json(end))

    def _latest(self, start: Offset, limit: Limit) -> Offset:
        if not self._registered:
            # Before the first look, so that nothing goes between looking and reading.
            self._registered = self._tell(start)
        wait_s = WAIT_SECONDS if self._until is None else 0.0
        return self._known().latest(start, limit, until=self._until, wait_s=wait_s)

    def _tell(self, offset: Offset) -> bool:
        setting = self._setting
        if setting.consumer is None:
            return True
        position = ConsumerPosition(streams={setting.stream: dict(offset.nodes)})
        try:
            client_of(setting.address).consumer(setting.pipeline, setting.consumer, position)
        except HubAwayError:
            return False  # the next call says more
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

    def _known(self) -> StreamTail:
        # Not in `__init__`: Spark sends this object to its tasks.
        if self._tail is None:
            self._tail = self._setting.tail()
        return self._tail

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tail": None}


def _shares(setting: StreamSetting, entries: Sequence[StreamEpoch], blobs: str | None) -> list[RunShare]:
    reads = reads_of(entries)
    size_bytes = sum(read.size_bytes for read in reads)
    tasks = setting.tasks or max(len(os.sched_getaffinity(0)), -(-size_bytes // TASK_BYTES))
    return [RunShare(hand, blobs) for hand in assign(reads, tasks)]


def _rows(setting: StreamSetting, schema: StructType, share: RunShare) -> Iterator[pa.RecordBatch]:
    client = client_of(setting.address)

    def fetched() -> Iterator[RunRows]:
        for read in share.reads:
            where = f"epoch {read.epoch} of node {read.node} in stream {setting.stream}"
            constants = {NODE: pa.scalar(read.node), EPOCH: pa.scalar(read.epoch)} if setting.metadata else {}
            ref = RunRef(digest=read.digest, size_bytes=read.size_bytes, rows=read.rows)
            try:
                data = patiently(lambda ref=ref: client.read_blob(ref, share.blobs))  # type: ignore[misc]  # mypy cannot tell it
            except HubRefusedError as error:
                raise SourceError(
                    f"{where} cannot be read: {error} If the hub has let it go meanwhile, start the query again; with option "
                    "'consumer' the hub waits for this query."
                ) from error
            yield RunRows(data=data, where=where, constants=constants)

    yield from record_batches(fetched(), arrow_columns(schema))
