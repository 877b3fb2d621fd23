"""The queries that are measured: ours, and what somebody would write by hand in PySpark for the same.

A side is started with where it reads and a home of its own, below which it keeps its checkpoint and its output.
All of them run in the same Spark, with the same settings: state in RocksDB of which a batch writes the change, as many
shuffle partitions as cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from fordstone import Pipeline, tumbling
from fordstone.connectors import files
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.commit import BatchOutcome
from fordstone.spark.hosted.query import hosted_query
from fordstone.spark.session.session import prepared
from spark_input import SCHEMA, SPARK_SCHEMA

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Spark's workers do not know where the benchmarks lie: what they are to run is sent whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]  # it ships no types

ALPHA = 0.2
LATENESS = "10s"
SIZE = "10s"
OUT = "out"
_AT_ONCE = "1ms"
"""Between two micro-batches: there is a next one as soon as there are files."""
_SMOOTHED = f"{SPARK_SCHEMA}, smooth double"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a side is given."""

    pattern: str
    home: Path
    on_batch: Callable[[BatchOutcome], None] = lambda _: None
    rows_max: int = 1 << 40
    """What comes into view together is read by one micro-batch, on every side."""

    @property
    def out(self) -> str:
        return str(self.home / OUT)

    def config(self) -> SparkConfig:
        return SparkConfig(state=self.home / "state", interval=_AT_ONCE, rows_max=self.rows_max)


Side = Callable[["SparkSession", Place], "StreamingQuery"]


# Ours.


def windows_plan(place: Place) -> Pipeline:
    p = Pipeline("windows")
    rows = p.source("readings", files(place.pattern), schema=SCHEMA, time="ts", lateness=LATENESS)
    windows = rows.group_by("dev").window(tumbling(SIZE))
    found = windows.agg(n="count(*)", total="sum(temp)", low="min(temp)", top="max(temp)")
    found.sink("out", files(place.out, format="parquet"))
    return p


def ewma_plan(place: Place, *, emits: bool) -> Pipeline:
    p = Pipeline("ewma")
    rows = p.source("readings", files(place.pattern), schema=SCHEMA, time="ts", lateness=LATENESS)
    smoothed = rows.group_by("dev").ewma(alpha=ALPHA, smooth="temp")
    if not emits:
        smoothed = smoothed.filter("smooth < -1000000")
    smoothed.sink("out", files(place.out, format="parquet"))
    return p


def hosted_windows(spark: SparkSession, place: Place) -> StreamingQuery:
    """Windows by our operators."""
    return _hosted(spark, windows_plan(place), place)


def hosted_ewma(spark: SparkSession, place: Place) -> StreamingQuery:
    """EWMA, every row written out."""
    return _hosted(spark, ewma_plan(place, emits=True), place)


def hosted_ewma_to_nobody(spark: SparkSession, place: Place) -> StreamingQuery:
    """EWMA, and a filter after it that no row passes."""
    return _hosted(spark, ewma_plan(place, emits=False), place)


def growing(spark: SparkSession, place: Place) -> StreamingQuery:
    """Means of more and more keys, of which nothing is emitted."""
    p = Pipeline("growing")
    rows = p.source("readings", files(place.pattern), schema=SCHEMA, time="ts", lateness="0s")
    smoothed = rows.group_by("dev").ewma(alpha=ALPHA, smooth="temp").filter("smooth < -1000000")
    smoothed.sink("out", files(place.out, format="parquet"))
    return _hosted(spark, p, place)


def _hosted(spark: SparkSession, p: Pipeline, place: Place) -> StreamingQuery:
    query = hosted_query(p.plan(), p.functions, place.config(), spark, batch=False)
    return query.start(place.on_batch)


# By hand.


def windows_by_hand(spark: SparkSession, place: Place) -> StreamingQuery:
    """The same windows with Spark's own operators."""
    windows = _read(spark, place).withWatermark("ts", "10 seconds").groupBy("dev", F.window("ts", "10 seconds"))
    found = windows.agg(
        F.count("*").alias("n"),
        F.sum("temp").alias("total"),
        F.min("temp").alias("low"),
        F.max("temp").alias("top"),
    )
    columns = ("dev", "window.start", "window.end", "n", "total", "low", "top")
    return _to_parquet(found.select(*columns).toDF("dev", "window_start", "window_end", *columns[3:]), place)


def identity(spark: SparkSession, place: Place) -> StreamingQuery:
    """Every row through Python and back, and written out."""
    return _to_parquet(_read(spark, place).mapInArrow(_same, SPARK_SCHEMA), place)


def identity_to_nobody(spark: SparkSession, place: Place) -> StreamingQuery:
    """Every row through Python and back."""
    return _to_nobody(_read(spark, place).mapInArrow(_same, SPARK_SCHEMA), place)


def ewma_by_key(spark: SparkSession, place: Place) -> StreamingQuery:
    """EWMA with a state for each key, every row written out. Rows do not wait for late ones: that would be yet more work."""
    return _to_parquet(_smoothed_by_key(spark, place), place)


def ewma_by_key_to_nobody(spark: SparkSession, place: Place) -> StreamingQuery:
    """The same without a sink."""
    return _to_nobody(_smoothed_by_key(spark, place), place)


def _smoothed_by_key(spark: SparkSession, place: Place) -> DataFrame:
    rows = _read(spark, place).groupBy("dev")
    return rows.transformWithStateInPandas(EwmaOfKey(), _SMOOTHED, outputMode="Append", timeMode="None")


class EwmaOfKey(StatefulProcessor):
    """The mean of one key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._mean = handle.getValueState("mean", "mean double")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: ARG002, N802, N803 - Spark's names
        import pandas  # noqa: ICN001 - the short name is that of the types above

        frame = pandas.concat(list(rows)).sort_values(["ts", "temp"])
        known = self._mean.get()
        mean = None if known is None else known[0]
        means = []
        for value in frame["temp"].tolist():
            mean = value if mean is None else ALPHA * value + (1.0 - ALPHA) * mean
            means.append(mean)
        self._mean.update((mean,))
        yield frame.assign(smooth=means)

    def close(self) -> None:
        """Nothing is held."""


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _read(spark: SparkSession, place: Place) -> DataFrame:
    return prepared(spark).readStream.schema(SPARK_SCHEMA).option("maxFileAge", "36500d").parquet(place.pattern)


def _to_parquet(rows: DataFrame, place: Place) -> StreamingQuery:
    return _started(rows.writeStream.format("parquet").option("path", place.out), place)


def _to_nobody(rows: DataFrame, place: Place) -> StreamingQuery:
    return _started(rows.writeStream.format("noop"), place)


def _started(writer: DataStreamWriter, place: Place) -> StreamingQuery:
    return (
        writer.outputMode("append")
        .option("checkpointLocation", str(place.home / "checkpoint"))
        .trigger(processingTime="1 milliseconds")
        .start()
    )
