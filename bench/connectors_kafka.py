"""Kafka: the source beside a bare consumer and `read_ndjson`, and the sink with transactions beside the sink without.

Beside the rates, which are judged, stands the share by processor time of all threads: other work on the machine hardly changes it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import polars as pl
from confluent_kafka import Consumer, TopicPartition
from tests.services.kafka import KafkaBroker, started

from fordstone import Pipeline
from fordstone.connectors import kafka as kafka_topic
from fordstone.connectors import memory
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from table import Finding, at_least, in_turn, rate_of, spread

SCHEMA: Final = {"device": "string", "n": "bigint", "temp": "double", "text": "string"}
MESSAGE_BYTES: Final = 1_000
CONSUME: Final = 10_000
READ_ROWS: Final = 1 << 16
SOURCE_SHARE: Final = at_least(0.80)
SINK_SHARE: Final = at_least(0.85)


def kafka(directory: Path, quick: bool) -> list[Finding]:
    broker = started(directory / "broker")
    try:
        return [*_source(broker, quick), *_sink(broker, directory, quick)]
    finally:
        broker.stop()


def _source(broker: KafkaBroker, quick: bool) -> list[Finding]:
    count, repetitions = (100_000, 3) if quick else (500_000, 7)
    topic = broker.create("in")
    broker.send(topic, messages(count))
    sides = {"bare": lambda: _bare(broker, topic, count), "ours": lambda: _ours(broker, topic, count)}
    seconds, cpu_s = in_turn(sides, repetitions)
    rates = {name: [count / one for one in found] for name, found in seconds.items()}
    shares = [ours / bare for ours, bare in zip(rates["ours"], rates["bare"], strict=True)]
    by_cpu = statistics.median(bare / ours for ours, bare in zip(cpu_s["ours"], cpu_s["bare"], strict=True))
    return [
        rate_of("kafka source", "consume + read_ndjson", rates["bare"]),
        rate_of("kafka source", "our source", rates["ours"]),
        Finding(
            section="kafka source",
            case="our source, of the bare loop",
            measured=statistics.median(shares),
            unit="share",
            target=SOURCE_SHARE,
            note=f"{count:,} messages of {MESSAGE_BYTES} bytes, 1 partition; {spread(shares)}; by processor time {by_cpu:.2f}",
            details={"seconds": seconds, "cpu_s": cpu_s},
        ),
    ]


def _sink(broker: KafkaBroker, directory: Path, quick: bool) -> list[Finding]:
    count, repetitions = (300_000, 3) if quick else (1_500_000, 5)
    rows = pl.DataFrame({"device": "d", "n": range(count), "temp": 20.5}).with_columns(
        pl.format("d{}", pl.col("n") % 1000).alias("device")
    )
    broker.create("out")

    def run(guarantee: str) -> None:
        state = directory / f"state-{guarantee}-{time.monotonic_ns()}"
        pipeline = Pipeline(f"bench-{state.name}", guarantee=guarantee)  # type: ignore[arg-type]  # one of its words
        schema = {"device": "string", "n": "bigint", "temp": "double"}
        pipeline.source("rows", memory([rows]), schema=schema).sink(
            "out", kafka_topic("out", servers=broker.servers, key="device")
        )
        pipeline.run(bounded=True, state=state, interval="1s")

    sides: dict[str, Callable[[], None]] = {
        "at_least_once": lambda: run("at_least_once"),
        "exactly_once": lambda: run("exactly_once"),
    }
    seconds, cpu_s = in_turn(sides, repetitions)
    rates = {name: [count / one for one in found] for name, found in seconds.items()}
    shares = [exactly / least for exactly, least in zip(rates["exactly_once"], rates["at_least_once"], strict=True)]
    return [
        rate_of("kafka sink", "at least once", rates["at_least_once"]),
        rate_of("kafka sink", "exactly once", rates["exactly_once"]),
        Finding(
            section="kafka sink",
            case="exactly once, of at least once",
            measured=statistics.median(shares),
            unit="share",
            target=SINK_SHARE,
            note=f"{count:,} rows from memory, a checkpoint every second; {spread(shares)}",
            details={"seconds": seconds, "cpu_s": cpu_s},
        ),
    ]


def messages(count: int, message_bytes: int = MESSAGE_BYTES) -> list[bytes]:
    """JSON of about this size, of a thousand devices."""
    found = []
    for number in range(count):
        row = {"device": f"d{number % 1000}", "n": number, "temp": number / 8, "text": ""}
        row["text"] = "x" * (message_bytes - len(json.dumps(row)))
        found.append(json.dumps(row).encode())
    return found


def _bare(broker: KafkaBroker, topic: str, count: int) -> int:
    settings: dict[str, Any] = {
        "bootstrap.servers": broker.servers,
        "group.id": "bench",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "fetch.queue.backoff.ms": 5,
        "queued.max.messages.kbytes": 32_768,
    }
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, 0, 0)])
    schema, total, rows = Schema.of(SCHEMA).polars, 0, 0
    while rows < count:
        values = [one.value() for one in consumer.consume(CONSUME, timeout=0.01) if one.error() is None]
        if values:
            frame = pl.read_ndjson(b"\n".join(values), schema=dict(schema))
            rows, total = rows + frame.height, total + int(frame["n"].sum())
    consumer.close()
    return total


def frames(broker: KafkaBroker, topic: str, count: int) -> Iterator[tuple[float, pl.DataFrame]]:
    """What our source reads, each frame with when its read began."""
    spec = kafka_topic(topic, servers=broker.servers)
    source = open_source(spec, SourceOptions(schema=Schema.of(SCHEMA), bounded=False))
    reader = source.open(source.partitions()[0], Position(0), with_positions=False)
    rows = 0
    while rows < count:
        began_s = time.perf_counter()
        chunk = reader.read(READ_ROWS)
        if chunk is None:
            time.sleep(0.001)  # as the engine
            continue
        rows += chunk.frame.height
        if chunk.frame.height:
            yield began_s, chunk.frame
    reader.close()
    source.close()


def _ours(broker: KafkaBroker, topic: str, count: int) -> int:
    return sum(int(frame["n"].sum()) for _, frame in frames(broker, topic, count))
