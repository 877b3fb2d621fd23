"""Format `fordstone-control`: rows of anybody's PySpark job as versions of a control table, for nodes to read.

Tasks put their rows into blobs; the commit of a batch publishes them as one version through `hub.client.publisher`, once per
batch of an owner, however often it is called with the same rows. Aborting undoes nothing: the hub collects blobs that no version names.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import ArrayType, MapType, StructType

from fordstone.epochs.run_file import encode_run
from fordstone.epochs.untrusted import decode_untrusted
from fordstone.errors import ConfigError, SchemaError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import client_of, retry
from fordstone.hub.client.publisher import ControlPublisher
from fordstone.hub.messages import ControlVersion
from fordstone.lang.schema import DataType
from fordstone.operators.base import DELETE, OP, UPSERT
from fordstone.plan.ids import checked_name
from fordstone.spark.formats.options import Options, address_of, columns, count, named
from fordstone.spark.formats.rows import arrow_columns
from fordstone.state.base import RunRef

CONTROL_FORMAT: Final = "fordstone-control"
TASK_BLOB_BYTES: Final = 32 << 20
"""A task with more rows than fit writes them into several blobs."""
_QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's property with the id of a task's query: random, kept in the checkpoint, the same after a restart."""
_JOB_GROUP: Final = "spark.jobGroup.id"
"""Spark's property with the job group of a task. That of a streaming query is the id of its run: random, another one after a restart."""
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSetting:
    """The options."""

    address: HubAddress
    pipeline: str
    control: str
    key: tuple[str, ...]
    owner: str | None
    batch: int | None

    @classmethod
    def of(cls, options: Options, schema: StructType) -> ControlSetting:
        """Read the options and check them against the columns of the rows."""
        key = columns(options, "key")
        if not key:
            raise ConfigError(
                'option \'key\' is not set: .option("key", "device"); several columns separated by commas.'
            )
        missing = [name for name in key if name not in schema.fieldNames()]
        if missing:
            raise ConfigError(f"option 'key' names {missing[0]!r}, and the rows have {', '.join(schema.fieldNames())}.")
        nested = [name for name in key if isinstance(schema[name].dataType, ArrayType | MapType | StructType)]
        if nested:
            raise ConfigError(
                f"option 'key' names {nested[0]!r}, which is {schema[nested[0]].dataType.simpleString()} and cannot be a key. Use a field, a "
                "value or an element of it, in a column of its own."
            )
        owner = options.get("owner")
        return cls(
            address=address_of(options),
            pipeline=named(options, "pipeline", example="cold-chain"),
            control=named(options, "control", example="thresholds"),
            key=key,
            owner=None if owner is None else checked_name(owner, "owner"),
            batch=count(options, "batch"),
        )

    def publisher(self, start: str | None = None) -> ControlPublisher:
        client = client_of(self.address)
        return ControlPublisher(client, pipeline=self.pipeline, control=self.control, keys=self.key, start=start)


@dataclass
class WrittenRows(WriterCommitMessage):
    """The blobs that one task has written."""

    refs: tuple[RunRef, ...]
    query: str | None
    """The id of the streaming query, kept in its checkpoint."""
    start: str | None
    """Of the streaming query: another one for each start."""


class ControlFormat(DataSource):
    """`format("fordstone-control")`."""

    @classmethod
    def name(cls) -> str:
        return CONTROL_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """For `df.write`: mode append changes rows, mode overwrite replaces the table."""
        return ControlBatchWriter(ControlSetting.of(self.options, schema), schema, replace=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - Spark's
        """For `df.writeStream`: output mode complete replaces the table, the others change rows."""
        return ControlStreamWriter(ControlSetting.of(self.options, schema), schema, replace=overwrite)


class ControlStreamWriter(DataSourceStreamArrowWriter):
    """One version per micro-batch that has rows."""

    def __init__(self, setting: ControlSetting, schema: StructType, *, replace: bool) -> None:
        self._setting = setting
        self._schema = schema
        self._replace = replace

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        return written(self._setting, self._schema, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish. May be called again for the same batch, also after `abort`."""
        tasks = [message for message in messages if isinstance(message, WrittenRows)]
        owner = self._setting.owner or next((task.query for task in tasks if task.query is not None), None)
        if owner is None:
            raise ConfigError(
                "tasks of this Spark do not know the id of their query, so the hub could not distinguish a repeated batch from a new one. "
                "Set option 'owner' to a name for this checkpoint; another checkpoint needs another name."
            )
        start = next((task.start for task in tasks if task.start is not None), None)
        publish(self._setting, self._schema, tasks, owner=owner, batch=batchId, replace=self._replace, start=start)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Nothing to undo: what was published stays, and other blobs are not seen."""


class ControlBatchWriter(DataSourceArrowWriter):
    """One version per job."""

    def __init__(self, setting: ControlSetting, schema: StructType, *, replace: bool) -> None:
        self._setting = setting
        self._schema = schema
        self._replace = replace
        self._owner = setting.owner or f"job-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        return written(self._setting, self._schema, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish."""
        tasks = [message for message in messages if isinstance(message, WrittenRows)]
        batch = self._setting.batch
        if batch is None:
            # A number that this owner has not used: there are at least as many versions as batches of it.
            batch = retry(self._setting.publisher().newest) + 1
        publish(self._setting, self._schema, tasks, owner=self._owner, batch=batch, replace=self._replace)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing to undo."""


def written(setting: ControlSetting, schema: StructType, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """Put the rows of a task into blobs at the hub."""
    client = client_of(setting.address)
    refs: list[RunRef] = []
    held: list[pa.RecordBatch] = []

    def put() -> None:
        ref, data = encode_run(rows_of(held, schema), "lz4")
        payload = bytes(data)
        retry(lambda: client.put_blob(ref.digest, payload))
        refs.append(ref)
        held.clear()

    for batch in batches:
        if batch.num_rows:
            held.append(batch)
        if sum(part.nbytes for part in held) >= TASK_BLOB_BYTES:
            put()
    if held:
        put()
    context = TaskContext.get()
    if context is None:
        return WrittenRows(refs=tuple(refs), query=None, start=None)
    query, group = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_JOB_GROUP)
    return WrittenRows(refs=tuple(refs), query=query, start=group if group and _RUN_ID.fullmatch(group) else None)


def rows_of(batches: Sequence[pa.RecordBatch], schema: StructType) -> pl.DataFrame:
    """Spark's rows as a control table has them: times in UTC, types of pipelines, and `__op`.

    Raises:
        SchemaError: A column has a type that no pipeline has, or `__op` is neither upsert nor delete.
    """
    # Spark gives times in the session's zone; they are the same moments in UTC.
    frame = pl.DataFrame(pa.Table.from_batches(batches).cast(arrow_columns(schema)))
    columns = []
    for column in frame.iter_columns():
        kind = DataType.from_polars(column.dtype).polars
        if isinstance(column.dtype, pl.Datetime) and column.dtype.time_zone is None:
            columns.append(column.dt.replace_time_zone("UTC").cast(kind))
        else:
            columns.append(column.cast(kind))
    frame = pl.DataFrame(columns)
    if OP not in frame.columns:
        return frame.with_columns(pl.lit(UPSERT).alias(OP))
    odd = frame.filter(~pl.col(OP).is_in([UPSERT, DELETE]) | pl.col(OP).is_null())
    if odd.height:
        raise SchemaError(f"column {OP!r} has {odd.item(0, OP)!r}; it has to be {UPSERT!r} or {DELETE!r}.")
    return frame.select(pl.exclude(OP), OP)


def publish(
    setting: ControlSetting,
    schema: StructType,
    tasks: Sequence[WrittenRows],
    *,
    owner: str,
    batch: int,
    replace: bool,
    start: str | None = None,
) -> ControlVersion | None:
    """Publish what the tasks have written as one version; None: there is nothing to publish.

    Raises:
        FencedError: Another owner has published since.
        SinkError: The hub refused, or this owner has published later batches.
    """
    client = client_of(setting.address)
    refs = [ref for task in tasks for ref in task.refs]
    if not refs and not replace:
        return None
    frames = [decode_untrusted(retry(lambda ref=ref: client.read_blob(ref)), ref) for ref in refs]  # type: ignore[misc]
    rows = pl.concat(frames or [rows_of([pa.RecordBatch.from_pylist([], schema=arrow_columns(schema))], schema)])
    publisher = setting.publisher(start)
    return retry(lambda: publisher.publish(rows, owner=owner, batch=batch, replace=replace))
