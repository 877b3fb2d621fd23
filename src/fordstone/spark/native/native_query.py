"""A native query: Spark's own source and operators, with our sinks behind them.

Each stream that has sinks is one query with a checkpoint of its own; the sinks of one stream share it, and a micro-batch
of it is an epoch of theirs. Its state is Spark's: nobody else can take it over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec
import polars as pl
import pyarrow as pa

from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.planner.digest import step_digests
from fordstone.spark.config import SparkConfig, spark_span
from fordstone.spark.hosted.commit import BatchOutcome, OnBatch, PartTask, Sinks, SinkSpec, sink_specs, tell_nobody
from fordstone.spark.hosted.identity import QueryFile, QueryIdentity
from fordstone.spark.hosted.packing import PACKED, Packed, What, encode
from fordstone.spark.hosted.paths import absolute
from fordstone.spark.hosted.query import check_sinks
from fordstone.spark.hosted.sealed import SealedFiles, write_whole
from fordstone.spark.hosted.source import batches
from fordstone.spark.native.choice import sink_streams
from fordstone.spark.native.function_rows import typed_frame
from fordstone.spark.native.native import lower, output_mode
from fordstone.spark.session.session import parallelism, prepared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from fordstone.operators.base import Functions


_DONE: Final = "fordstone/done"
"""Below a stream's location: its batch job is done, and all of it is out."""


@dataclass(frozen=True, kw_only=True)
class NativeQuery:
    """One pipeline as Spark's own queries."""

    plan: p.Plan
    config: SparkConfig
    frames: dict[p.Input, DataFrame]
    checkpoint: str

    @property
    def spark(self) -> SparkSession:
        """The session that all of it is in."""
        return next(iter(self.frames.values())).sparkSession

    def start(self, on_batch: OnBatch) -> list[StreamingQuery]:
        """Start a stream for each stream with sinks."""
        return [self._start(stream, frame, on_batch) for stream, frame in self.frames.items()]

    def run_batch(self, on_batch: OnBatch) -> None:
        """Run a batch job for each stream with sinks. One that was done already is left as it is."""
        for stream, frame in self.frames.items():
            place = self._place(stream)
            if not QueryFile(place).has(_DONE):
                self._committer(stream, on_batch).run_batch(frame)
                write_whole(f"{place}/{_DONE}", b"")

    def done(self) -> bool:
        """Whether an earlier run has done its batch jobs."""
        return all(QueryFile(self._place(stream)).has(_DONE) for stream in self.frames)

    def _start(self, stream: p.Input, frame: DataFrame, on_batch: OnBatch) -> StreamingQuery:
        writer = (
            frame.writeStream.foreachBatch(self._committer(stream, on_batch))
            .outputMode(output_mode(self.plan, stream))
            .queryName(f"fordstone {self.plan.pipeline} {stream}")
            .option("checkpointLocation", self._place(stream))
        )
        if self.config.available_now:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=spark_span(self.config.interval)).start()

    def _place(self, stream: p.Input) -> str:
        return f"{self.checkpoint}/{stream}"

    def _committer(self, stream: p.Input, on_batch: OnBatch) -> NativeCommitter:
        specs = sink_specs(self.plan, stream_types(self.plan))
        names = [step.name for step in self.plan.steps if isinstance(step, p.Sink) and step.input == stream]
        return NativeCommitter([specs[name] for name in names], SealedFiles(self._place(stream)), on_batch)


class NativeCommitter:
    """Spark's `foreachBatch` function of a native query, on the driver."""

    def __init__(self, specs: list[SinkSpec], sealed: SealedFiles, on_batch: OnBatch) -> None:
        self._specs = specs
        self._sealed = sealed
        self._sinks = Sinks(specs, sealed)
        self._on_batch = on_batch

    def run_batch(self, rows: DataFrame) -> None:
        """Run a batch job; if an earlier try came to its end, let out what it gave."""
        sealed = self._sealed.read(1)
        if sealed is None:
            self(rows, 0)
        else:
            self._sinks.release(sealed)
            self._on_batch(BatchOutcome(epoch=1, rows_out=sealed.rows_out))

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Execute the batch, once, and release its epoch at every sink."""
        epoch, attempt = batch_id + 1, uuid4().hex
        # By place: `mapInArrow` cannot take columns whose names need quotes.
        placed = batch.toDF(*(f"c{at}" for at in range(len(batch.columns))))
        rows = placed.mapInArrow(_letting_out(self._specs, epoch, attempt), PACKED).toArrow().to_pylist()
        sealed = self._sinks.seal(epoch, attempt, rows, None)
        self._sinks.release(sealed)
        self._on_batch(BatchOutcome(epoch=epoch, rows_out=sealed.rows_out))

    def __getstate__(self) -> dict[str, Any]:
        """Sent to another process, as Spark Connect does, it tells nobody of its batches."""
        return self.__dict__ | {"_on_batch": tell_nobody}


def _letting_out(
    specs: list[SinkSpec], epoch: int, attempt: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What tasks do with the rows of a batch: pack them for each sink, and write the parts of those that take them."""

    def let_out(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def packed() -> Iterator[Packed]:
            for batch in rows:
                if not batch.num_rows:
                    continue
                frame = _frame(batch, specs[0])
                for tag in range(len(specs)):
                    yield Packed(0, What.OUT, tag, encode(frame))

        return PartTask(specs, epoch, attempt)(batches(packed(), [0]))

    return let_out


def _frame(batch: pa.RecordBatch, spec: SinkSpec) -> pl.DataFrame:
    schema = spec.stream.schema
    rows = typed_frame(batch.select(list(range(len(schema)))), schema)
    hidden = [
        pl.Series(name, batch.column(len(schema) + at).to_pylist(), dtype=pl.String)
        for at, name in enumerate(spec.hidden)
    ]
    return rows.with_columns(hidden)


def native_query(
    plan: p.Plan, functions: Functions, config: SparkConfig, spark: SparkSession, *, streaming: bool
) -> NativeQuery:
    """Check what can be checked, and lay the queries out."""
    plan = absolute(plan)
    check_sinks(plan, spark, streaming=streaming)
    checkpoint = config.checkpoint_of(plan.pipeline)
    QueryFile(checkpoint).checked(
        QueryIdentity(
            pipeline=plan.pipeline,
            way="native",
            plan=msgspec.Raw(plan.unplaced().to_json()),
            step_digests=step_digests(plan, stream_types(plan)),
            stages=(tuple(map(str, sink_streams(plan))),),
            shards=config.shards or parallelism(spark),
            first_epoch=1,
            bounded=config.bounded,
        )
    )
    own = prepared(spark)
    frames = lower(plan, own, functions=functions, streaming=streaming)
    return NativeQuery(plan=plan, config=config, frames=frames, checkpoint=checkpoint)
