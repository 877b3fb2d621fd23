"""Topics of Kafka on Spark: our reader, Spark's own connector under the same pipeline, and Spark by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from tests.services.kafka import KafkaBroker, started

from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.connectors import kafka as kafka_topic
from fordstone.spark import run
from spark_cpu import cpu_seconds
from spark_size import Size
from table import Finding, middle, spread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA: Final = {"device": "string", "n": "bigint", "temp": "double", "text": "string"}
SPARK_SCHEMA: Final = "device string, n bigint, temp double, text string"
PARTITIONS: Final = 4
MESSAGE_BYTES: Final = 200
TOPIC: Final = "readings"
Totals = dict[str, tuple[int, int]]
"""Of each device, how many rows there are, and their sum."""


def kafka(spark: SparkSession, size: Size, home: Path) -> list[Finding]:
    """A batch job that counts by key, over all that is in a topic. The first run of each side is not counted."""
    broker = started(home / "broker")
    try:
        return _measured(spark, size, home, broker)
    finally:
        broker.stop()


def _measured(spark: SparkSession, size: Size, home: Path, broker: KafkaBroker) -> list[Finding]:
    count = size.kafka_rows
    broker.create(TOPIC, partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        broker.send(TOPIC, _messages(count // PARTITIONS), partition=partition)
    sides: dict[str, Callable[[], Totals]] = {
        "our reader": lambda: _hosted(spark, home, broker, spark_connector=False),
        "Spark's connector": lambda: _hosted(spark, home, broker, spark_connector=True),
        "by hand": lambda: _by_hand(spark, broker),
    }
    results = {name: side() for name, side in sides.items()}
    if any(result != results["by hand"] for result in results.values()):
        raise SystemExit("the sides give different results")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu_rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(size.repetitions):
        for name, side in sides.items():
            began_s, before_s = time.monotonic(), cpu_seconds()
            side()
            rates[name].append(count / (time.monotonic() - began_s))
            cpu_rates[name].append(count / (cpu_seconds() - before_s))
    findings = [
        Finding(
            section="kafka",
            case=name,
            measured=middle(rates[name]) / 1000,
            unit="k rows/s",
            note=f"{count:,} messages of {MESSAGE_BYTES} bytes, {PARTITIONS} partitions; {middle(cpu_rates[name]) / 1000:.0f} k rows per CPU s",
            details={"rows_per_s": rates[name], "rows_per_cpu_s": cpu_rates[name]},
        )
        for name in sides
    ]
    for one, other in (
        ("Spark's connector", "our reader"),
        ("our reader", "by hand"),
        ("Spark's connector", "by hand"),
    ):
        by_clock = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        by_cpu = [a / b for a, b in zip(cpu_rates[one], cpu_rates[other], strict=True)]
        case = f"{one} to {other}"
        findings += [
            Finding(section="kafka", case=case, measured=middle(by_clock), unit="times", note=spread(by_clock)),
            Finding(
                section="kafka",
                case=f"{case}, processor time",
                measured=middle(by_cpu),
                unit="times",
                note=spread(by_cpu),
            ),
        ]
    return findings


def _messages(count: int) -> list[bytes]:
    found = []
    for number in range(count):
        row = {"device": f"d{number % 1000}", "n": number, "temp": number / 8, "text": ""}
        row["text"] = "x" * (MESSAGE_BYTES - len(json.dumps(row)))
        found.append(json.dumps(row).encode())
    return found


def _hosted(spark: SparkSession, home: Path, broker: KafkaBroker, *, spark_connector: bool) -> Totals:
    pipeline, out = Pipeline("totals"), MemorySink()
    spec = kafka_topic(TOPIC, servers=broker.servers, spark_connector=spark_connector)
    totals = pipeline.source("rows", spec, schema=SCHEMA).group_by("device").agg(rows="count(*)", total="sum(n)")
    totals.sink("out", memory(out))
    run(pipeline, spark=spark, state=home / uuid4().hex, bounded=True)
    return {row["device"]: (row["rows"], row["total"]) for row in out.rows().to_dicts()}


def _by_hand(spark: SparkSession, broker: KafkaBroker) -> Totals:
    from pyspark.sql import functions as f

    rows = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", broker.servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", TOPIC)
        .load()
        .select(f.from_json(f.col("value").cast("string"), SPARK_SCHEMA).alias("row"))
        .select("row.*")
    )
    found = rows.groupBy("device").agg(f.count("*").alias("rows"), f.sum("n").alias("total")).collect()
    return {row["device"]: (row["rows"], row["total"]) for row in found}
