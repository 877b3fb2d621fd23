"""Other engines beside ours on one topic: count the messages of each device and add up their numbers, from JSON.

Each engine has an environment of its own in the cache of the tests' servers, and is a process of its own. Times are from the first message that
an engine hands on to its result, without its start. Flink, which does not show that moment, is timed as a whole, the second time it runs the job
in one process; so is our whole pipeline, with its state and checkpoints. What is judged is our source with a `group_by` per batch: Quix Streams and
Bytewax, too, only read and count in plain memory, and save nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
from tests.services.base import MissingServiceError, installed, maven_jars, run_installer
from tests.services.kafka import KafkaBroker, java, started

from connectors_kafka import SCHEMA, frames, messages
from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.connectors import kafka as kafka_topic
from table import Finding, at_least, missing, number, rate_of, spread

RATIO: Final = at_least(3.0)
PEER_TIMEOUT_S: Final = 600.0
Totals = dict[str, list[int]]
"""Of each device, how many messages it has, and the sum of their numbers."""

QUIX: Final = """
import json, sys, time
from quixstreams import Application

servers, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = {"fetch.queue.backoff.ms": 5, "queued.max.messages.kbytes": 32768}
app = Application(servers, consumer_group=f"quix-{time.time()}", auto_offset_reset="earliest", consumer_extra_config=client, loglevel=None)
found, left, times = {}, [count], []

def add(row):
    if left[0] == count:
        times.extend([time.perf_counter(), time.process_time()])
    one = found.setdefault(row["device"], [0, 0])
    one[0] += 1
    one[1] += row["n"]
    left[0] -= 1
    if not left[0]:
        times.extend([time.perf_counter(), time.process_time()])

app.dataframe(app.topic(topic, value_deserializer="json")).update(add)
app.run(count=count, collect=False)
print(json.dumps({"seconds": times[2] - times[0], "cpu_s": times[3] - times[1], "found": found}))
"""
BYTEWAX: Final = """
import json, sys, time
import bytewax.operators as op
import orjson
from bytewax.connectors.kafka import KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.testing import TestingSink, run_main

servers, topic = sys.argv[1:3]
client = {"fetch.queue.backoff.ms": "5", "queued.max.messages.kbytes": "32768"}
times, out = [], []

def decoded(message):
    if not times:
        times.extend([time.perf_counter(), time.process_time()])
    row = orjson.loads(message.value)
    return row["device"], row["n"]

flow = Dataflow("totals")
rows = op.input("in", flow, KafkaSource([servers], [topic], tail=False, add_config=client, batch_size=10_000))
totals = op.fold_final("add", op.map("decode", rows, decoded), lambda: (0, 0), lambda one, n: (one[0] + 1, one[1] + n))
op.output("out", totals, TestingSink(out))
run_main(flow)
print(json.dumps({"seconds": time.perf_counter() - times[0], "cpu_s": time.process_time() - times[1], "found": dict(out)}))
"""
FLINK: Final = """
import json, sys, time
from pyflink.table import EnvironmentSettings, TableEnvironment

servers, topic, count, jar = sys.argv[1:5]
tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
options = {
    "pipeline.jars": f"file://{jar}",
    "parallelism.default": "1",
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "5 s",
    "table.exec.mini-batch.size": count,
}
for name, value in options.items():
    tables.get_config().set(name, value)
tables.execute_sql(f\"\"\"CREATE TABLE messages (device STRING, n BIGINT) WITH ('connector' = 'kafka', 'topic' = '{topic}',
    'properties.bootstrap.servers' = '{servers}', 'properties.group.id' = 'flink', 'scan.startup.mode' = 'earliest-offset',
    'scan.bounded.mode' = 'latest-offset', 'format' = 'json')\"\"\")
for _ in range(2):
    began, found = time.perf_counter(), {}
    with tables.execute_sql("SELECT device, COUNT(*), SUM(n) FROM messages GROUP BY device").collect() as rows:
        for row in rows:
            if row.get_row_kind().name in ("INSERT", "UPDATE_AFTER"):
                found[row[0]] = [row[1], row[2]]
print(json.dumps({"seconds": time.perf_counter() - began, "found": found}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What one run took."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another engine, and its program for the same work."""

    name: str
    packages: tuple[str, ...]
    program: str
    jar: str = ""
    judged: bool = True

    def command(self) -> list[str]:
        """What is put before the arguments. Installs it when it is first needed; raises `MissingServiceError` if it cannot be had."""

        def install(folder: Path) -> None:
            run_installer(sys.executable, "-m", "venv", folder)
            pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            run_installer(*pip, *self.packages)

        label = self.packages[0].replace("==", "-").replace("[kafka]", "")
        return [str(installed(f"peer-{label}", install) / "bin/python"), "-c", self.program]

    def jars(self) -> list[str]:
        if not self.jar:
            return []
        _, artifact, version = self.jar.split(":")
        return [str(next(maven_jars(f"{artifact}-{version}", [self.jar], transitive=False).glob("*.jar")))]


PEERS: Final = (
    Peer(name="Quix Streams 3.28.1", packages=("quixstreams==3.28.1",), program=QUIX),
    Peer(name="Bytewax 0.21.1", packages=("bytewax[kafka]==0.21.1", "orjson"), program=BYTEWAX),
    Peer(
        name="Flink SQL 2.3.0",
        packages=("apache-flink==2.3.0",),
        program=FLINK,
        jar="org.apache.flink:flink-sql-connector-kafka:5.0.0-2.2",
        judged=False,
    ),
)


def peers(directory: Path, quick: bool) -> list[Finding]:
    count, repetitions, sizes = (100_000, 1, (1_000,)) if quick else (500_000, 3, (1_000, 200))
    broker = started(directory / "broker")
    try:
        return [
            finding
            for size in sizes
            for finding in _compared(broker, directory, count, repetitions, message_bytes=size)
        ]
    finally:
        broker.stop()


def _compared(
    broker: KafkaBroker, directory: Path, count: int, repetitions: int, *, message_bytes: int
) -> list[Finding]:
    section = f"count, {message_bytes} B"
    topic = broker.create(f"of-{message_bytes}-bytes")
    broker.send(topic, messages(count, message_bytes))
    expected = _expected(count)
    ours: list[Times] = []
    whole: list[Times] = []
    theirs: dict[str, list[Times]] = {peer.name: [] for peer in PEERS}
    reasons: dict[str, str] = {}
    for at in range(repetitions):
        ours.append(_our_source(broker, topic, count, expected))
        whole.append(_our_pipeline(broker, topic, directory / f"state-{message_bytes}-{at}", expected))
        for peer in PEERS:
            if peer.name not in reasons:
                try:
                    theirs[peer.name].append(_theirs(peer, broker, topic, count, expected))
                except MissingServiceError as error:
                    reasons[peer.name] = str(error)
    findings = [
        rate_of(section, "our source and a group_by", [count / one.seconds for one in ours]),
        rate_of(section, "our pipeline, exactly once", [count / one.seconds for one in whole]),
    ]
    for peer in PEERS:
        if peer.name in reasons:
            findings.append(missing(section, peer.name, reasons[peer.name]))
            continue
        ratios = [one.seconds / mine.seconds for mine, one in zip(ours, theirs[peer.name], strict=True)]
        note = f"{count:,} messages; {spread(ratios)}"
        if peer.judged:
            by_cpu = statistics.median(
                one.cpu_s / mine.cpu_s for mine, one in zip(ours, theirs[peer.name], strict=True)
            )
            note += f"; by processor time {number(by_cpu)}"
        findings += [
            rate_of(section, peer.name, [count / one.seconds for one in theirs[peer.name]]),
            Finding(
                section=section,
                case=f"our source, of {peer.name}",
                measured=statistics.median(ratios),
                unit="times",
                target=RATIO if peer.judged else None,
                note=note,
                details={"ours": [asdict(one) for one in ours], "theirs": [asdict(one) for one in theirs[peer.name]]},
            ),
        ]
    return findings


def _expected(count: int) -> Totals:
    """What `connectors_kafka.messages` sums up to."""
    totals: Totals = {}
    for n in range(count):
        one = totals.setdefault(f"d{n % 1000}", [0, 0])
        one[0] += 1
        one[1] += n
    return totals


def _our_source(broker: KafkaBroker, topic: str, count: int, expected: Totals) -> Times:
    parts: list[pl.DataFrame] = []
    began: list[float] = []
    for read_s, frame in frames(broker, topic, count):
        if not began:
            # (Of the first read, the processor time is not known apart: it is that of one batch.)
            began = [read_s, time.process_time()]
        parts.append(frame.group_by("device").agg(pl.len().alias("count"), pl.col("n").sum()))
    found = pl.concat(parts).group_by("device").agg(pl.col("count").sum(), pl.col("n").sum())
    times = Times(seconds=time.perf_counter() - began[0], cpu_s=time.process_time() - began[1])
    _check("our source", {device: [rows, total] for device, rows, total in found.rows()}, expected)
    return times


def _our_pipeline(broker: KafkaBroker, topic: str, state: Path, expected: Totals) -> Times:
    kept = MemorySink()
    pipeline = Pipeline(f"bench-{state.name}")
    rows = pipeline.source("messages", kafka_topic(topic, servers=broker.servers), schema=SCHEMA)
    rows.group_by("device").agg(count="count(*)", total="sum(n)").sink("totals", memory(kept))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    pipeline.run(bounded=True, state=state, interval="1s")
    times = Times(seconds=time.perf_counter() - began_s, cpu_s=time.process_time() - began_cpu_s)
    found = kept.latest().select("device", "count", "total").rows()
    _check("our pipeline", {device: [rows, total] for device, rows, total in found}, expected)
    return times


def _theirs(peer: Peer, broker: KafkaBroker, topic: str, count: int, expected: Totals) -> Times:
    """Raises `MissingServiceError` if it cannot be had or does not run."""
    arguments = [broker.servers, topic, str(count), *peer.jars()]
    # Flink starts Java.
    environment = {**os.environ, "JAVA_HOME": str(java().parent.parent)}
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*peer.command(), *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PEER_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise MissingServiceError(f"not finished after {PEER_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise MissingServiceError(f"ended with {done.returncode}: {_last_line(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    _check(peer.name, answer["found"], expected)
    return Times(seconds=answer["seconds"], cpu_s=answer.get("cpu_s", float("nan")))


def _check(who: str, found: Totals, expected: Totals) -> None:
    if found != expected:
        raise SystemExit(
            f"{who}: {len(found)} devices with {sum(one[0] for one in found.values()):,} messages: not what the topic has"
        )


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
