"""Kafka read by Spark's own connector: the rows of our reader, exact positions, and clear refusals."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from tests.connectors.kafka.test_kafka_registry import FIRST
from tests.connectors.kafka.test_kafka_registry import message as avro_message
from tests.connectors.kafka.topics import in_transactions, topic_of
from tests.services.base import start_or_skip
from tests.services.kafka import KafkaBroker, started
from tests.services.registry import Registry
from tests.services.spark_kafka import setting
from tests.waiting import until

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, files, kafka, memory
from fordstone.connectors.base import Chunk, ConnectorSpec, OpenContext, SourceOptions, SparkConnector
from fordstone.connectors.kafka.spark_connector import SparkKafka
from fordstone.connectors.registry import open_source, spark_connector
from fordstone.errors import ConfigError, FordstoneError, PlanMismatchError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.progress import Progress
from fordstone.spark import run
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.commit import BatchOutcome
from fordstone.spark.hosted.query import hosted_query
from fordstone.spark.hosted.state_transfer import import_spark
from fordstone.spark.run import run_plan
from fordstone.testing.contracts.connector import read_all

WORD = {"word": "string"}
build: Any = kafka


@pytest.fixture(autouse=True)
def _jars() -> None:
    start_or_skip(setting)


@pytest.fixture
def topic(kafka_broker: KafkaBroker, tmp_path: Path) -> str:
    return kafka_broker.create(topic_of(tmp_path), partitions=2)


# The same rows.


POISON: tuple[tuple[bytes | None, bytes | None, Any], ...] = (
    (b"k", b'{"word":"plain","n":1}', None),
    (None, b'{"word":"no key"}', [("trace", b"old"), ("trace", b"new"), ("other", b"\xff")]),
    (b"k", None, [("trace", None)]),
    (b"k", b"", []),
    (b"", b'{"word":"line\n break",\n"n":2}', [("trace", b"")]),
    (b"\xff", b'{"word":"key is no text"}', None),
    (b"k", b"{poison", [("trace", b"\xfe")]),
    (b"k", b"\xff\xfe", None),
    (b"k", b'{"word":5,"n":"x"}', None),
    (b"k", b'[1]\n{"word":"two"}', None),
    (b"k", '{"word":"ünïcode 🪨"}'.encode(), [("trace", "ü".encode())]),
)
SPECS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "json": ({}, {"word": "string", "n": "int"}),
    "all parts": (
        {
            "key": "key",
            "timestamp": "at",
            "partition": "p",
            "offset": "o",
            "headers": {"trace": "trace", "other": "other"},
        },
        {
            "key": "string",
            "at": "timestamp",
            "p": "int",
            "o": "bigint",
            "trace": "string",
            "other": "binary",
            "word": "string",
        },
    ),
    "raw text": ({"format": "raw"}, {"line": "string"}),
    "raw bytes with a key": ({"format": "raw", "key": "key"}, {"key": "binary", "line": "binary"}),
}


@pytest.fixture
def full_topic(kafka_broker: KafkaBroker, topic: str) -> str:
    """A topic with everything that a message may be, and with transactions that were committed and aborted."""
    with kafka_broker.producer() as producer:
        for number, (key, value, headers) in enumerate(POISON):
            at = 1_700_000_000_123 + number
            producer.produce(topic, value, key, headers=headers, timestamp=at, partition=number % 2)
    good = [b'{"word":"committed"}'] * 3
    in_transactions(kafka_broker, topic, [(good, True), ([b'{"word":"aborted"}'] * 3, False), (good, True)])
    return topic


def read_table(spark: SparkSession, connector: SparkConnector, options: dict[str, str]) -> pa.Table:
    """What Spark reads. On a busy machine its consumer may report messages as lost that are there; a query is then started again."""
    for _ in range(3):
        rows = spark.read.format(connector.format).options(**options).load().selectExpr(*connector.columns())
        with suppress(Py4JJavaError):
            return rows.toArrow()
    raise AssertionError("Spark read nothing")


def read_by_both(
    spark: SparkSession, spec: ConnectorSpec, columns: dict[str, str], partitions: int
) -> list[tuple[pl.DataFrame, int]]:
    """Read partitions to their ends with our reader and with Spark's connector; both must give the same. Return rows, and how many were rejected."""
    given = SourceOptions(schema=Schema.of(columns), bounded=True)
    connector = spark_connector(spec, given)
    assert connector is not None
    source, found = open_source(spec, given, OpenContext()), []
    for name in source.partitions()[:partitions]:
        ours = read_all(source, name, given.schema, arrives_late=True)
        end = source.plan_read(name, Position(0), 1_000).position
        table = read_table(spark, connector, connector.batch_options({name: (Position(1), end)}))
        chunks = [
            chunk
            for batch in table.to_batches(max_chunksize=4)
            for at, chunk in connector.chunks(pl.DataFrame(pl.from_arrow(batch)), with_positions=True)
            if at == name
        ]
        frame = pl.concat([chunk.frame for chunk in chunks])
        assert frame.equals(ours.rows), (columns, name, frame, ours.rows)
        rejected = [(one.position, one.text, one.reason) for chunk in chunks for one in chunk.rejected]
        assert rejected == [(one.position, one.text, one.reason) for one in ours.rejected], columns
        positions = [position for chunk in chunks for position in _listed(chunk)]
        assert positions == sorted(positions)
        assert len(positions) == frame.height
        found.append((frame, len(rejected)))
    source.close()
    return found


def test_each_kind_of_message_gives_the_rows_and_dead_letters_of_our_reader(
    spark: SparkSession, kafka_broker: KafkaBroker, full_topic: str
):
    for options, columns in SPECS.values():
        spec = build(full_topic, servers=kafka_broker.servers, spark_connector=True, **options)
        for frame, rejected in read_by_both(spark, spec, columns, partitions=2):
            assert frame.height + rejected >= 5


def test_messages_in_avro_give_the_rows_and_dead_letters_of_our_reader(
    spark: SparkSession, kafka_broker: KafkaBroker, registry: Registry, topic: str
):
    number = registry.register(f"{topic}-value", FIRST)
    good = [avro_message(number, FIRST, {"id": one, "place": f"p{one}"}) for one in range(3)]
    kafka_broker.send(topic, [good[0], None, b"\0\0\0\0", good[1], b"no Avro", good[2][:-1]])
    spec = build(topic, servers=kafka_broker.servers, format="avro", schema_registry=registry.url, spark_connector=True)
    ((frame, rejected),) = read_by_both(spark, spec, {"id": "int", "place": "string"}, partitions=1)
    assert frame["place"].to_list() == ["p0", None, "p1"]
    assert rejected == 3


def _listed(chunk: Chunk) -> list[int]:
    return [] if chunk.row_positions is None else chunk.row_positions.to_list()


def windows(broker: KafkaBroker, topic: str) -> tuple[Pipeline, MemorySink]:
    pipeline, out = Pipeline("p"), MemorySink()
    spec = kafka(topic, servers=broker.servers, spark_connector=True)
    rows = pipeline.source("rows", spec, schema={"word": "string", "ts": "timestamp"}, time="ts")
    rows.group_by("word").window(tumbling("10s")).agg(n="count(*)").sink("out", memory(out))
    return pipeline, out


def test_a_partition_that_has_nothing_but_marks_of_transactions_still_holds_the_watermark(
    spark: SparkSession, kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    def send(partition: int, *seconds: int) -> None:
        rows = [json.dumps({"word": "w", "ts": f"2026-01-01T00:00:{one:02}Z"}) for one in seconds]
        kafka_broker.send(topic, rows, partition=partition)

    found: dict[str, list[Any]] = {"edge": [], "spark": []}
    for number in range(2):
        if number == 0:
            send(0, 1, 12, 25)
            send(1, 2, 3)
        else:
            in_transactions(kafka_broker, topic, [([b'{"word":"gone"}'], False)])
            send(1, 31, 8, 32)  # the second is late
        for engine, seen in found.items():
            pipeline, out = windows(kafka_broker, topic)
            state = tmp_path / engine
            if engine == "edge":
                report = pipeline.run(state=state, available_now=True)
            else:
                report = run(pipeline, spark=spark, state=state, available_now=True)
            rows = sorted((row["window_start"].second, row["n"]) for row in out.rows().to_dicts())
            seen.append((rows, report.progress.rows_in, report.progress.rows_late))
    assert found["spark"] == found["edge"]
    assert found["edge"] == [([], 5, 0), ([(0, 3), (10, 1)], 3, 1)]


class Words:
    """A pipeline that counts words of a topic, and what was sent to it."""

    def __init__(self, broker: KafkaBroker, topic: str) -> None:
        self.broker = broker
        self.topic = topic
        self.sent: Counter[str] = Counter()
        self.counted: dict[str, int] = {}

    def send(self, *words: str, partition: int = 0) -> None:
        self.broker.send(self.topic, [json.dumps({"word": word}) for word in words], partition=partition)
        self.sent.update(words)

    def pipeline(self, *, spark_reads: bool, **options: Any) -> tuple[Pipeline, MemorySink]:
        pipeline, out = Pipeline("p"), MemorySink()
        spec = build(self.topic, servers=self.broker.servers, spark_connector=spark_reads, **options)
        words = pipeline.source("rows", spec, schema=WORD)
        words.group_by("word").agg(n="count(*)").sink("out", memory(out))
        return pipeline, out

    def _count(self, out: MemorySink) -> None:
        for row in out.rows().to_dicts():
            assert row["n"] > self.counted.get(row["word"], 0), row
            self.counted[row["word"]] = row["n"]

    def on_spark(self, spark: SparkSession, state: Path, *, spark_reads: bool = True, **options: Any) -> int:
        """Run over what is there, and return how many rows were read."""
        given = {name: options.pop(name) for name in ("start", "lost") if name in options}
        pipeline, out = self.pipeline(spark_reads=spark_reads, **given)
        if "bounded" not in options:
            options["available_now"] = True
        report = run(pipeline, spark=spark, state=state, **options)
        self._count(out)
        return report.progress.rows_in

    def on_edge(self, state: Path) -> int:
        pipeline, out = self.pipeline(spark_reads=True)
        report = pipeline.run(state=state, available_now=True)
        self._count(out)
        return report.progress.rows_in


@pytest.fixture
def words(kafka_broker: KafkaBroker, topic: str) -> Words:
    return Words(kafka_broker, topic)


def test_state_moves_between_readers_and_engines_without_a_word_lost_or_doubled(
    spark: SparkSession, words: Words, tmp_path: Path
):
    words.send("a", "b", "a")
    in_transactions(words.broker, words.topic, [([b'{"word":"gone"}'], False)])
    assert words.on_edge(tmp_path / "edge") == 3
    words.send("a", "c", partition=1)
    # From the edge to Spark's connector, in several batches, and again in the same location.
    first = tmp_path / "first"
    assert words.on_spark(spark, first, from_checkpoint=str(tmp_path / "edge"), rows_max=1) == 2
    words.send("b", "b")
    assert words.on_spark(spark, first) == 2
    # To our reader on Spark: not in place, but through a checkpoint.
    words.send("d")
    with pytest.raises(PlanMismatchError, match="was read by Spark's own connector, and is to be read by Fordstone"):
        words.on_spark(spark, first, spark_reads=False)
    import_spark(spark, str(first / "p/_spark"), str(tmp_path / "back"))
    assert words.on_spark(spark, tmp_path / "second", spark_reads=False, from_checkpoint=str(tmp_path / "back")) == 1
    with pytest.raises(PlanMismatchError, match="was read by Fordstone, and is to be read by Spark's own connector"):
        words.on_spark(spark, tmp_path / "second")
    # And back to the edge.
    import_spark(spark, str(tmp_path / "second/p/_spark"), str(tmp_path / "home"))
    words.send("a", partition=1)
    assert words.on_edge(tmp_path / "home") == 1
    assert words.counted == dict(words.sent)


def test_a_batch_job_reads_what_is_there_and_no_partition_need_have_rows(
    spark: SparkSession, words: Words, tmp_path: Path
):
    assert words.on_spark(spark, tmp_path / "empty", bounded=True) == 0
    words.send("a", "b", "a", partition=1)
    in_transactions(words.broker, words.topic, [([b'{"word":"gone"}'], False)])
    assert words.on_spark(spark, tmp_path / "state", bounded=True) == 3
    assert words.counted == dict(words.sent)


def test_tables_are_read_again_between_batches(
    spark: SparkSession, kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    table, out = tmp_path / "table.parquet", MemorySink()
    version = 1

    def write() -> None:
        pl.DataFrame({"word": ["w"], "version": [version]}).write_parquet(table)

    write()
    pipeline = Pipeline("p")
    schema = WORD | {"n": "bigint"}
    rows = pipeline.source("rows", kafka(topic, servers=kafka_broker.servers, spark_connector=True), schema=schema)
    found = rows.distinct().lookup(files(str(table)), on="word", schema=WORD | {"version": "bigint"}, refresh="1ms")
    found.sink("out", memory(out))
    sent: list[int] = []

    def on_progress(progress: Progress) -> None:
        nonlocal version
        versions = [row["version"] for frame in out.frames() for row in frame.rows(named=True)]
        if progress.stopping:
            return
        if version in versions and version == 2:
            os.kill(os.getpid(), signal.SIGINT)
        elif version in versions:
            version = 2
            write()
        sent.append(1)
        assert len(sent) < 500, "the table is not read again"
        kafka_broker.send(topic, [json.dumps({"word": "w", "n": len(sent)})])

    config = SparkConfig(state=tmp_path / "state", interval="50ms")
    report = run_plan(pipeline.plan(), pipeline.functions, config, spark=spark, on_progress=on_progress)
    assert report.outcome == "stopped"


def test_new_partitions_are_read_from_their_first_message_and_latest_counts_from_the_first_start(
    spark: SparkSession, words: Words, tmp_path: Path
):
    words.send("before")
    words.sent.clear()
    state = tmp_path / "state"
    assert words.on_spark(spark, state, start="latest") == 0
    words.send("after")
    words.broker.add_partitions(words.topic, 3)
    words.send("new", partition=2)
    assert words.on_spark(spark, state, start="latest") == 2
    assert words.counted == dict(words.sent)


@pytest.mark.full
def test_a_broker_that_asks_for_a_password_is_read(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KAFKA_PASSWORD", "simple")
    broker = start_or_skip(lambda: started(tmp_path / "kafka", users={"ann": "simple"}))
    try:
        broker.create("guarded")
        broker.send("guarded", [b'{"word":"a"}'])
        client = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "ann",
            "sasl.password": {"secret": "KAFKA_PASSWORD"},
        }
        spec = build("guarded", servers=broker.guarded_servers, spark_connector=True, client=client)
        connector = spark_connector(spec, SourceOptions(schema=Schema.of(WORD), bounded=True))
        assert connector is not None
        options = connector.batch_options({PartitionId("guarded/0"): (Position(1), Position(2))})
        assert read_table(spark, connector, options)["value"].to_pylist() == [b'{"word":"a"}']
    finally:
        broker.stop()


# What is wrong.


def test_messages_that_are_gone_and_a_topic_that_was_created_again_are_errors_with_choices(
    spark: SparkSession, words: Words, tmp_path: Path
):
    words.send("a", "a")
    words.on_spark(spark, tmp_path / "state")
    words.send("b", "b", "c")
    words.broker.delete_before(words.topic, 4)
    with pytest.raises(SourceError, match=r"offset 2 .* oldest message has offset 4: 2 offsets were deleted") as found:
        words.on_spark(spark, tmp_path / "state")
    assert "--fresh" in str(found.value)
    assert "import-spark" in str(found.value)
    # Now the offsets exist, but mean other messages.
    words.broker.delete(words.topic)
    words.broker.create(words.topic, partitions=2)
    words.send("b", "b", "c")
    with pytest.raises(SourceError, match="was deleted and created again"):
        words.on_spark(spark, tmp_path / "state")


def test_a_log_of_spark_that_says_other_positions_is_refused(spark: SparkSession, words: Words, tmp_path: Path):
    words.send("a", "a")
    words.on_spark(spark, tmp_path / "state")
    words.send("b")
    logged = tmp_path / "state/p/_spark/offsets/0"
    assert f'{{"{words.topic}":{{"0":2,"1":0}}}}' in logged.read_text()
    logged.write_text(logged.read_text().replace('"0":2', '"0":1'))
    logged.with_name(".0.crc").unlink()
    with pytest.raises(FordstoneError, match=rf"begins with {words.topic}/0 at 3, and Spark's log .* says 2"):
        words.on_spark(spark, tmp_path / "state")


def test_without_the_connector_the_error_says_how_to_get_it(
    spark: SparkSession, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SparkKafka, "format", "kafka-that-is-not-there")
    words.send("a")
    with pytest.raises(ConfigError, match=f"spark.jars.packages=.*spark-sql-kafka-0-10_2.13:{spark.version}"):
        words.on_spark(spark, tmp_path / "state")


# What comes without rows.


def test_early_results_and_idle_partitions_need_no_further_rows(
    spark: SparkSession, kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    pipeline, out = Pipeline("p"), MemorySink()
    spec = kafka(topic, servers=kafka_broker.servers, spark_connector=True)
    schema = {"word": "string", "ts": "timestamp"}
    rows = pipeline.source("rows", spec, schema=schema, time="ts", idle_after="100ms")
    rows.group_by("word").window(tumbling("10s"), early="100ms").agg(n="count(*)").sink("out", memory(out))
    kafka_broker.send(topic, [json.dumps({"word": "w", "ts": "2026-01-01T00:00:01Z"})])
    outcomes: list[BatchOutcome] = []
    config = SparkConfig(state=tmp_path, interval="50ms")
    query = hosted_query(pipeline.plan(), pipeline.functions, config, spark, batch=False)
    stream = query.start(outcomes.append)
    try:
        until(
            lambda: len(outcomes) > 2 and all(one.idle for one in outcomes[-1].cut.sources["rows"].partitions.values()),
            "batches without rows",
            alive=lambda: stream.isActive,
            report=stream.exception,
        )
    finally:
        stream.stop()
        query.close()
    assert [one.rows_in for one in outcomes[:2]] == [1, 0]
    assert out.rows()["n"].to_list() == [1]


@pytest.mark.full
def test_a_query_that_always_has_rows_is_stopped_between_two_batches(spark: SparkSession, words: Words, tmp_path: Path):
    pipeline, _ = words.pipeline(spark_reads=True)
    words.send("a")
    batches: list[int] = []

    def on_batch(outcome: BatchOutcome) -> None:
        batches.append(outcome.epoch)
        words.send("a")

    query = hosted_query(pipeline.plan(), {}, SparkConfig(state=tmp_path, interval="1ms"), spark, batch=False)
    stream = query.start(on_batch)
    try:
        until(lambda: len(batches) > 1, "batches", alive=lambda: stream.isActive, report=stream.exception)
        query.files.request_stop()
        until(query.files.held, "a batch that is held back", alive=lambda: stream.isActive, report=stream.exception)
    finally:
        stream.stop()
        query.close()
    planned, committed = (
        {int(file.name) for file in (tmp_path / "p/_spark" / log).iterdir() if file.name.isdigit()}
        for log in ("offsets", "commits")
    )
    assert planned == committed
    query.files.clear_stop()
    assert not query.files.held()
