"""Spark reading a hub beside Spark reading Parquet files: the same rows, the same query, one Spark, in turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from fordstone.epochs.run_file import encode_run
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Commit, EpochEntry, LeaseRequest, StreamSegment
from fordstone.spark import register, session
from hub_process import hub_process
from hub_size import Size
from spark_cpu import cpu_seconds
from spark_input import SPARK_SCHEMA, readings
from table import Finding, Target, at_least, middle, number, spread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PIPELINE = "bench"
KEYS = 1_000
RAW, PARTIAL = "rows", "partials"
PARTIAL_SCHEMA = "dev int, start timestamp, n long, total double, low double, top double"
Query = Callable[[], "DataFrame"]


def spark_reads(size: Size, directory: Path | None) -> list[Finding]:
    """Windows over raw rows from both, and over partial rows that nodes have made of the same rows."""
    with (
        hub_process(directory) as hub,
        tempfile.TemporaryDirectory(dir=directory, prefix="fordstone-hub-bench-") as home,
    ):
        rows = _filled(hub.address, Path(home), size)
        spark = session(master="local[2]", memory="4g")
        try:
            register(spark)
            queries: dict[str, Query] = {
                "parquet": lambda: _windows(spark.read.schema(SPARK_SCHEMA).parquet(f"{home}/*.parquet")),
                "hub": lambda: _windows(_from_hub(spark, hub.address, RAW, SPARK_SCHEMA)),
                "partials": lambda: _merged(_from_hub(spark, hub.address, PARTIAL, PARTIAL_SCHEMA)),
            }
            _must_agree(queries)
            seconds, cpu_s = _timed(queries, size.repetitions)
        finally:
            spark.stop()
    return [
        *_compared("raw rows", "hub", rows, seconds, cpu_s, at_least(0.45)),
        *_compared("partial rows, made by nodes", "partials", rows, seconds, cpu_s, at_least(1.0)),
    ]


def _filled(address: HubAddress, home: Path, size: Size) -> int:
    """Rows in Parquet files, as Spark would have written them; in epochs of nodes; and as partial rows. How many there are."""
    client = HubClient(address)
    rows = 0
    for number_of_node in range(size.senders):
        node = f"node-{number_of_node}"
        generation = client.lease(PIPELINE, node, LeaseRequest(holder=node, local=1, start="s")).generation
        entries = []
        for epoch in range(1, size.epochs + 1):
            frame = readings(size.epoch_rows, KEYS, number_of_node * size.epochs + epoch)
            rows += frame.height
            frame.write_parquet(home / f"{node}-{epoch}.parquet", compression="snappy")
            streams = {RAW: _segment(client, frame), PARTIAL: _segment(client, _partials(frame))}
            entries.append(EpochEntry(epoch=epoch, streams=streams, created_us=epoch))
        client.commit(PIPELINE, node, Commit(generation=generation, epochs=tuple(entries)))
    client.close()
    return rows


def _segment(client: HubClient, frame: pl.DataFrame) -> StreamSegment:
    ref, data = encode_run(frame, "lz4")
    client.put_blob(ref.digest, bytes(data))
    return StreamSegment(runs=(ref,))


def _partials(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.group_by("dev", pl.col("ts").dt.truncate("10s").alias("start")).agg(
        pl.len().cast(pl.Int64).alias("n"),
        pl.col("temp").sum().alias("total"),
        pl.col("temp").min().alias("low"),
        pl.col("temp").max().alias("top"),
    )


def _from_hub(spark: SparkSession, address: HubAddress, stream: str, schema: str) -> DataFrame:
    reader = spark.read.format("fordstone").schema(schema).option("hub", address.url).option("metadata", "false")
    return reader.options(pipeline=PIPELINE, stream=stream).load()


def _windows(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses

    grouped = rows.groupBy("dev", F.window("ts", "10 seconds").start.alias("start"))
    return grouped.agg(
        F.count("*").alias("n"), F.sum("temp").alias("total"), F.min("temp").alias("low"), F.max("temp").alias("top")
    )


def _merged(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses

    found = rows.groupBy("dev", "start")
    return found.agg(
        *(f(name).alias(name) for f, name in ((F.sum, "n"), (F.sum, "total"), (F.min, "low"), (F.max, "top")))
    )


def _must_agree(queries: Mapping[str, Query]) -> None:
    """The same results from all, before any time is believed. It is the warm-up as well."""
    from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses

    found: dict[str, Any] = {}
    for name, query in queries.items():
        sums = query().agg(F.count("*"), F.sum("n"), F.round(F.sum("total"), 3), F.sum("low"), F.sum("top"))
        found[name] = [round(float(value), 3) for value in sums.collect()[0]]
    if any(one != found["parquet"] for one in found.values()):
        raise SystemExit(f"spark: the sides give different results: {found}")


def _timed(queries: Mapping[str, Query], repetitions: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    seconds: dict[str, list[float]] = {name: [] for name in queries}
    cpu_s: dict[str, list[float]] = {name: [] for name in queries}
    for _ in range(repetitions):
        for name, query in queries.items():
            before, began_s = cpu_seconds(), time.monotonic()
            query().write.format("noop").mode("overwrite").save()
            seconds[name].append(time.monotonic() - began_s)
            cpu_s[name].append(cpu_seconds() - before)
    return seconds, cpu_s


def _compared(
    case: str,
    side: str,
    rows: int,
    seconds: Mapping[str, list[float]],
    cpu_s: Mapping[str, list[float]],
    target: Target,
) -> list[Finding]:
    by_clock = [b / a for a, b in zip(seconds[side], seconds["parquet"], strict=True)]
    by_cpu = [b / a for a, b in zip(cpu_s[side], cpu_s["parquet"], strict=True)]
    speeds = ", ".join(f"{name} {rows / middle(seconds[name]) / 1e6:.2f} M rows/s" for name in (side, "parquet"))
    return [
        Finding(
            section="spark",
            case=f"{case}: a hub to Parquet files",
            measured=middle(by_clock),
            unit="times",
            target=target,
            note=f"{spread(by_clock)}; {speeds}; {number(rows)} rows",
            details={"rows": rows, "seconds": {name: seconds[name] for name in (side, "parquet")}},
        ),
        Finding(
            section="spark",
            case=f"{case}: a hub to Parquet files, processor time",
            measured=middle(by_cpu),
            unit="times",
            note=spread(by_cpu),
            details={"cpu_s": {name: cpu_s[name] for name in (side, "parquet")}},
        ),
    ]
