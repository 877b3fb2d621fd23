"""Format `fordstone-control`: rows of anybody's PySpark job as versions of a control table, for the nodes to take.

Tasks put their rows into blobs; the commit of a batch folds them into one version and publishes it, once for each batch of an owner,
however often it is called. Aborting undoes nothing: blobs that no version names are the hub's to collect.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
from pyspark.sql.types import StructType

from fordstone.connectors.control_log import apply_changes
from fordstone.connectors.control_publish import SNAPSHOT_EVERY
from fordstone.epochs.run_file import decode_run, encode_run
from fordstone.errors import ConfigError, FencedError, HubRefusedError, SchemaError, SinkError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import BLOB_BYTES_MAX, ControlPage, ControlPublish, ControlVersion
from fordstone.lang.schema import DataType
from fordstone.operators.base import DELETE, OP, UPSERT
from fordstone.plan.ids import checked_name
from fordstone.spark.formats.access import Options, address_of, client_of, count, named, patiently
from fordstone.spark.formats.rows import arrow_columns
from fordstone.state.base import RunRef

CONTROL_FORMAT: Final = "fordstone-control"
TASK_BLOB_BYTES: Final = 32 << 20
"""A task with more rows than this writes them into several blobs."""
_QUERY_ID: Final = "sql.streaming.queryId"
"""Where Spark tells a task which query it works for: random, made with the checkpoint, and the same after a restart."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSetting:
    """What the options say."""

    address: HubAddress
    pipeline: str
    control: str
    key: tuple[str, ...]
    owner: str | None
    batch: int | None

    @classmethod
    def of(cls, options: Options, schema: StructType) -> ControlSetting:
        """Read and check the options against the columns that will come."""
        key = tuple(name.strip() for name in options.get("key", "").split(",") if name.strip())
        if not key:
            raise ConfigError(
                'option \'key\' is not set: .option("key", "device"); several columns with commas between.'
            )
        missing = [name for name in key if name not in schema.fieldNames()]
        if missing:
            raise ConfigError(f"option 'key' names {missing[0]!r}, and the rows have {', '.join(schema.fieldNames())}.")
        owner = options.get("owner")
        return cls(
            address=address_of(options),
            pipeline=named(options, "pipeline", example="cold-chain"),
            control=named(options, "control", example="thresholds"),
            key=key,
            owner=None if owner is None else checked_name(owner, "owner"),
            batch=count(options, "batch"),
        )


@dataclass
class WrittenRows(WriterCommitMessage):
    """What one task has written."""

    refs: tuple[tuple[str, int, int], ...]
    """Digest, bytes and rows of each blob."""
    query: str | None
    """The id of the streaming query, which its checkpoint keeps."""


class ControlFormat(DataSource):
    """`format("fordstone-control")`."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return CONTROL_FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """For `df.write`: mode append changes rows, mode overwrite replaces the table."""
        return ControlBatchWriter(ControlSetting.of(self.options, schema), schema, snapshot=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - Spark's
        """For `df.writeStream`: output mode complete replaces the table, the others change rows."""
        return ControlStreamWriter(ControlSetting.of(self.options, schema), schema, snapshot=overwrite)


class ControlStreamWriter(DataSourceStreamArrowWriter):
    """One version a micro-batch that has rows."""

    def __init__(self, setting: ControlSetting, schema: StructType, *, snapshot: bool) -> None:
        self._setting = setting
        self._schema = schema
        self._snapshot = snapshot

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """A task's rows."""
        return written(self._setting, self._schema, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish. May be called again for the same batch, also after `abort`."""
        tasks = [message for message in messages if isinstance(message, WrittenRows)]
        owner = self._setting.owner or next((task.query for task in tasks if task.query is not None), None)
        if owner is None:
            raise ConfigError(
                "this Spark does not tell tasks which query they work for, so the hub could not tell a batch that comes again from a new "
                "one. Set option 'owner' to a name for this checkpoint; another checkpoint needs another."
            )
        publish(self._setting, self._schema, tasks, owner=owner, batch=batchId, snapshot=self._snapshot)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Nothing to undo: what was published stays, what was not is not seen."""


class ControlBatchWriter(DataSourceArrowWriter):
    """One version a job."""

    def __init__(self, setting: ControlSetting, schema: StructType, *, snapshot: bool) -> None:
        self._setting = setting
        self._schema = schema
        self._snapshot = snapshot
        self._owner = setting.owner or f"job-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        """A task's rows."""
        return written(self._setting, self._schema, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish."""
        tasks = [message for message in messages if isinstance(message, WrittenRows)]
        batch = self._setting.batch
        if batch is None:
            batch = self._newest() + 1
        publish(self._setting, self._schema, tasks, owner=self._owner, batch=batch, snapshot=self._snapshot)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing to undo."""

    def _newest(self) -> int:
        """A number that this owner has not had: each of its batches made a version, and there are more versions than that."""
        setting = self._setting
        client = client_of(setting.address)
        return patiently(lambda: client.control_page(setting.pipeline, setting.control)).newest


def written(setting: ControlSetting, schema: StructType, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """Put rows into blobs at the hub."""
    client = client_of(setting.address)
    refs: list[tuple[str, int, int]] = []
    held: list[pa.RecordBatch] = []

    def put() -> None:
        ref, data = encode_run(rows_of(held, schema), "lz4")
        payload = bytes(data)
        patiently(lambda: client.put_blob(ref.digest, payload))
        refs.append((ref.digest, ref.size_bytes, ref.rows))
        held.clear()

    for batch in batches:
        if batch.num_rows:
            held.append(batch)
        if sum(part.nbytes for part in held) >= TASK_BLOB_BYTES:
            put()
    if held:
        put()
    context = TaskContext.get()
    return WrittenRows(refs=tuple(refs), query=None if context is None else context.getLocalProperty(_QUERY_ID))


def rows_of(batches: Sequence[pa.RecordBatch], schema: StructType) -> pl.DataFrame:
    """Spark's rows as a control table has them: times in UTC, types that the edge knows, and an `__op`.

    Raises:
        SchemaError: A column has a type that no pipeline has, or `__op` says something else than upsert and delete.
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
        raise SchemaError(f"column {OP!r} has {odd.item(0, OP)!r}; it says {UPSERT!r} or {DELETE!r}.")
    return frame.select(pl.exclude(OP), OP)


def folded(frames: Sequence[pl.DataFrame], key: Sequence[str]) -> pl.DataFrame:
    """One row a key, the last one; rows without a whole key are no rows of a table."""
    rows = pl.concat(frames)
    keyed = rows.drop_nulls(list(key))
    if keyed.height < rows.height:
        log.warning("control rows without a key dropped", extra={"rows": rows.height - keyed.height})
    return keyed.unique(subset=list(key), keep="last", maintain_order=True)


def publish(
    setting: ControlSetting, schema: StructType, tasks: Sequence[WrittenRows], *, owner: str, batch: int, snapshot: bool
) -> ControlVersion | None:
    """Make one version of what the tasks have written; None: there is nothing to publish.

    Raises:
        FencedError: Another owner has published since.
        SinkError: The hub said no.
    """
    client = client_of(setting.address)
    refs = [RunRef(digest, size_bytes, rows) for task in tasks for digest, size_bytes, rows in task.refs]
    if not refs and not snapshot:
        return None
    frames = [decode_run(patiently(lambda ref=ref: client.read_blob(ref)), ref) for ref in refs]  # type: ignore[misc]
    rows = folded(frames or [rows_of([_empty(schema)], schema)], setting.key)
    if snapshot:
        rows = rows.filter(pl.col(OP) != DELETE)
    elif not rows.height:
        return None
    else:
        whole = patiently(lambda: snapshot_due(client, setting, rows, owner=owner, batch=batch))
        rows, snapshot = (rows, False) if whole is None else (whole, True)
    ref, data = encode_run(rows, "lz4")
    if ref.size_bytes > BLOB_BYTES_MAX:
        raise SinkError(
            f"a version of control table {setting.control} has {ref.size_bytes} bytes; at most {BLOB_BYTES_MAX} go to every node at a "
            "time. Publish fewer rows a batch."
        )
    version = ControlPublish(owner=owner, batch=batch, blob=ref, snapshot=snapshot)
    payload = bytes(data)

    def said() -> ControlVersion:
        client.put_blob(ref.digest, payload)
        return client.publish(setting.pipeline, setting.control, version)

    try:
        return patiently(said)
    except HubRefusedError as error:
        if error.code == "stale_generation":
            raise FencedError(
                f"control table {setting.control} of pipeline {setting.pipeline} has a newer publisher than {owner}: a query with another "
                "checkpoint, or another job. A table has one at a time; stop this one, or that one and publish with a new owner."
            ) from error
        raise SinkError(f"control table {setting.control} was not published: {error}") from error


def snapshot_due(
    client: HubClient, setting: ControlSetting, changes: pl.DataFrame, *, owner: str, batch: int
) -> pl.DataFrame | None:
    """The whole table with these changes, if the next version should be that: about every `SNAPSHOT_EVERY`, so that a new node need not
    read them all; and where the columns have become others, which begins the table anew. None: just the changes.

    Only behind a version of this owner: from its first on every other is shut out, so that what the hub has is all there is.
    """
    table, since, last = changes.clear(), 0, None
    pages = _pages(client, setting)
    versions = [(version, page.blobs) for page in pages for version in page.versions]
    for version, _ in versions:
        since, last = (0 if version.snapshot else since + 1), version
    if last is None or (last.owner == owner and last.batch >= batch):
        return None
    newest = decode_run(client.read_blob(last.blob, versions[-1][1]), last.blob)
    if newest.schema != changes.schema:
        return changes.filter(pl.col(OP) != DELETE)
    if last.owner != owner or since + 1 < SNAPSHOT_EVERY:
        return None
    for version, blobs in versions:
        rows = decode_run(client.read_blob(version.blob, blobs), version.blob)
        same = rows.schema == changes.schema
        table = table.clear() if version.snapshot or not same else table
        table = apply_changes(table, [rows], list(setting.key)) if same else table
    return apply_changes(table, [changes], list(setting.key))


def _pages(client: HubClient, setting: ControlSetting) -> list[ControlPage]:
    """From the newest snapshot on."""
    found: list[ControlPage] = []
    after = 0
    while True:
        page = client.control_page(setting.pipeline, setting.control, after=after)
        if not page.versions:
            return found
        found.append(page)
        after = page.versions[-1].version
        if after >= page.newest:
            return found


def _empty(schema: StructType) -> Any:
    return pa.RecordBatch.from_pylist([], schema=arrow_columns(schema))
