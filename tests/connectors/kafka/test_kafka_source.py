"""Topics as sources, on a real broker: the parts of a message, where partitions begin, and what may happen to a topic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.kafka.topics import topic_of
from tests.services.base import free_port, start_or_skip
from tests.services.kafka import KafkaBroker, started
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, kafka, memory
from fordstone.connectors.base import Chunk, ConnectorSpec, OpenContext, Reader, Source, SourceOptions
from fordstone.connectors.kafka import fetcher as fetcher_module
from fordstone.connectors.registry import open_source
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, NotInstalledError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import read_all

WORD = {"word": "string"}
build: Any = kafka
"""Without types, for what is wrong on purpose."""


@pytest.fixture
def topic(kafka_broker: KafkaBroker, tmp_path: Path) -> str:
    return kafka_broker.create(topic_of(tmp_path))


def opened(spec: ConnectorSpec, schema: dict[str, str] = WORD, *, bounded: bool = True, **context: Any) -> Source:
    return open_source(spec, SourceOptions(schema=Schema.of(schema), bounded=bounded), OpenContext(**context))


def all_rows(source: Source, schema: dict[str, str] = WORD, number: int = 0) -> list[dict[str, Any]]:
    found = read_all(source, source.partitions()[number], Schema.of(schema), arrives_late=True)
    assert not found.rejected
    return found.rows.to_dicts()


def read_until(reader: Reader, rows: int) -> list[Chunk]:
    """Read as an engine does, until this number of rows has come."""
    chunks: list[Chunk] = []

    def enough() -> bool:
        chunk = reader.read(1_000)
        if chunk is not None:
            chunks.append(chunk)
        return sum(one.frame.height for one in chunks) >= rows

    until(enough, f"{rows} rows", seconds_max=30)
    return chunks


def run(spec: ConnectorSpec, state: Path, schema: dict[str, str] = WORD, **options: Any) -> list[dict[str, Any]]:
    pipeline, out = Pipeline("p"), MemorySink()
    pipeline.source("rows", spec, schema=schema).sink("out", memory(out))
    pipeline.run(state=state, **(options or {"available_now": True}))
    return out.rows().to_dicts()


# The parts of a message.


def test_key_headers_time_partition_and_offset_are_columns(kafka_broker: KafkaBroker, topic: str):
    with kafka_broker.producer() as producer:
        for number in range(3):
            headers = [("trace", b"old"), ("trace", b"t%d" % number), ("raw", b"\xff")] if number else None
            producer.produce(
                topic, f'{{"n":{number}}}', f"k{number}", timestamp=1_700_000_000_000 + number, headers=headers
            )
        producer.produce(topic, None, b"gone", timestamp=1_700_000_000_000)
    schema = {
        "k": "string",
        "n": "int",
        "trace": "string",
        "raw": "binary",
        "at": "timestamp",
        "p": "int",
        "o": "bigint",
    }
    spec = kafka(
        topic,
        servers=kafka_broker.servers,
        key="k",
        timestamp="at",
        partition="p",
        offset="o",
        headers={"trace": "trace", "raw": "raw"},
    )
    rows = all_rows(opened(spec, schema), schema)
    assert [row["k"] for row in rows] == ["k0", "k1", "k2", "gone"]
    assert [row["n"] for row in rows] == [0, 1, 2, None]
    assert [(row["trace"], row["raw"]) for row in rows] == [
        (None, None),
        ("t1", b"\xff"),
        ("t2", b"\xff"),
        (None, None),
    ]
    assert [row["at"].timestamp() for row in rows[:2]] == [1_700_000_000.0, 1_700_000_000.001]
    assert [(row["p"], row["o"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(("kind", "values"), [("string", ["a b", "", None]), ("binary", [b"a b", b"", None])])
def test_a_raw_value_is_one_column(kafka_broker: KafkaBroker, topic: str, kind: str, values: list[Any]):
    kafka_broker.send(topic, [b"a b", b"", None])
    spec = kafka(topic, servers=kafka_broker.servers, format="raw")
    schema = {"line": kind}
    assert [row["line"] for row in all_rows(opened(spec, schema), schema)] == values


def test_what_is_no_row_becomes_a_dead_letter_with_its_partition_and_offset(
    kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    with kafka_broker.producer() as producer:
        for key, value in (
            (b"a", b'{"word":"x"}'),
            (b"b", b"{poison"),
            (b"\xff", b'{"word":"y"}'),
            (b"d", b'{"word":"z"}'),
        ):
            producer.produce(topic, value, key)
    spec = kafka(topic, servers=kafka_broker.servers, key="k")
    rows = run(spec, tmp_path, {"k": "string", **WORD})
    assert [(row["k"], row["word"]) for row in rows] == [("a", "x"), ("d", "z")]
    (letters,) = tmp_path.rglob("dead-letters/rows/*.jsonl")
    found = [json.loads(line) for line in letters.read_text().splitlines()]
    assert [one["partition"] for one in found] == [f"{topic}/0"] * 2
    assert [one["reason"].split(":")[0] for one in found] == ["offset 1", "offset 2"]
    assert found[0]["text"] == "{poison"


# Where partitions begin.


def test_a_value_that_no_column_needs_is_not_decoded(kafka_broker: KafkaBroker, topic: str):
    kafka_broker.send(topic, ["no JSON", None, "{}"])
    schema = {"o": "bigint", "at": "timestamp"}
    found = all_rows(opened(kafka(topic, servers=kafka_broker.servers, offset="o", timestamp="at"), schema), schema)
    assert [row["o"] for row in found] == [0, 1, 2]


def test_a_sink_without_a_column_for_the_value_is_refused(kafka_broker: KafkaBroker, topic: str, tmp_path: Path):
    pipeline = Pipeline("p")
    rows = pipeline.source("rows", memory([{"at": "2026-01-01T00:00:00Z"}]), schema={"at": "timestamp"})
    rows.sink("out", kafka(topic, servers=kafka_broker.servers, timestamp="at"))
    with pytest.raises(ConfigError, match="no column is left for the value"):
        pipeline.run(bounded=True, state=tmp_path / "state")


def test_latest_begins_after_what_is_there_also_if_the_first_run_read_nothing(
    kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    spec = kafka(topic, servers=kafka_broker.servers, start="latest")
    kafka_broker.send(topic, ['{"word":"before"}'])
    assert run(spec, tmp_path) == []
    kafka_broker.send(topic, ['{"word":"a"}', '{"word":"b"}'])
    assert run(spec, tmp_path) == [{"word": "a"}, {"word": "b"}]
    assert run(spec, tmp_path) == []


def test_a_time_begins_at_the_first_message_that_is_not_older(kafka_broker: KafkaBroker, topic: str):
    with kafka_broker.producer() as producer:
        for second in range(5):
            producer.produce(topic, f'{{"word":"{second}"}}', timestamp=1_700_000_000_000 + 1000 * second)
    for start, first in (("2023-11-14T22:13:22Z", 2), ("2023-11-14T23:13:22.5+01:00", 3), ("2030-01-01", 5)):
        spec = kafka(topic, servers=kafka_broker.servers, start=start)
        assert [row["word"] for row in all_rows(opened(spec))] == [str(second) for second in range(first, 5)]


def test_an_epoch_that_began_at_latest_is_read_again_from_the_same_offset(kafka_broker: KafkaBroker, topic: str):
    spec = kafka(topic, servers=kafka_broker.servers, start="latest")
    kafka_broker.send(topic, ['{"word":"before"}'])
    source = opened(spec, bounded=False)
    (partition,) = source.partitions()
    reader = source.open(partition, Position(0), with_positions=False)
    reader.read(1)
    kafka_broker.send(topic, ['{"word":"a"}', '{"word":"b"}'])
    end = read_until(reader, 2)[-1].position
    again = opened(spec, bounded=False)
    again.restore({partition: PartitionCut(position=int(end), identity=reader.identity())})
    found = read_all(again, partition, Schema.of(WORD), until=int(end))
    assert found.rows["word"].to_list() == ["a", "b"]


def test_a_partition_that_is_added_is_found_and_read_from_its_first_message(kafka_broker: KafkaBroker, topic: str):
    source = opened(kafka(topic, servers=kafka_broker.servers, start="latest"), bounded=False)
    assert source.partitions() == [f"{topic}/0"]
    kafka_broker.add_partitions(topic, 3)
    kafka_broker.send(topic, ['{"word":"new"}'], partition=2)
    until(lambda: len(source.partitions()) == 3, "the new partitions", seconds_max=30)
    reader = source.open(PartitionId(f"{topic}/2"), Position(0), with_positions=False)
    assert read_until(reader, 1)[-1].frame.to_dicts() == [{"word": "new"}]


def test_several_topics_are_read_together(kafka_broker: KafkaBroker, tmp_path: Path):
    topics = [kafka_broker.create(topic_of(tmp_path, name)) for name in ("a", "b")]
    for topic in topics:
        kafka_broker.send(topic, [f'{{"word":"{topic[0]}"}}'])
    assert sorted(row["word"] for row in run(kafka(topics, servers=kafka_broker.servers), tmp_path)) == ["a", "b"]


# What may happen to a topic.


def test_messages_that_were_deleted_before_they_were_read_are_an_error_or_skipped_on_purpose(
    kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    spec = kafka(topic, servers=kafka_broker.servers)
    kafka_broker.send(topic, [f'{{"word":"{number}"}}' for number in range(10)])
    assert len(run(spec, tmp_path)) == 10
    kafka_broker.send(topic, [f'{{"word":"{number}"}}' for number in range(10, 20)])
    kafka_broker.delete_before(topic, 15)
    for _ in range(2):
        with pytest.raises(
            SourceError,
            match=r"from offset 10 on, but its oldest message has offset 15: 5 offsets(?s:.)*lost='skip'(?s:.)*--fresh",
        ):
            run(spec, tmp_path)
    skipping = kafka(topic, servers=kafka_broker.servers, lost="skip")
    assert [row["word"] for row in run(skipping, tmp_path)] == [str(number) for number in range(15, 20)]


def test_a_topic_that_was_created_again_is_an_error_although_its_offsets_would_fit(
    kafka_broker: KafkaBroker, topic: str, tmp_path: Path
):
    spec = kafka(topic, servers=kafka_broker.servers)
    kafka_broker.send(topic, ['{"word":"old"}'])
    assert len(run(spec, tmp_path)) == 1
    kafka_broker.delete(topic)
    kafka_broker.create(topic)
    kafka_broker.send(topic, ['{"word":"new"}'] * 5)
    for _ in range(2):
        with pytest.raises(SourceError, match=r"was deleted and created again(?s:.)*--fresh"):
            run(spec, tmp_path)
    assert len(run(spec, tmp_path, available_now=True, fresh=True)) == 5


def test_a_topic_that_is_created_again_while_it_is_read_is_no_part_of_a_checkpoint(
    kafka_broker: KafkaBroker, topic: str
):
    source = opened(kafka(topic, servers=kafka_broker.servers), bounded=False)
    reader = source.open(source.partitions()[0], Position(0), with_positions=False)
    kafka_broker.send(topic, ['{"word":"old"}'])
    read_until(reader, 1)
    assert json.loads(reader.identity())["topic_id"]
    kafka_broker.delete(topic)
    kafka_broker.create(topic)
    kafka_broker.send(topic, ['{"word":"new"}'] * 5)

    def read_on() -> None:
        read_until(reader, 1)
        reader.identity()

    with pytest.raises(SourceError, match="was deleted and created again"):
        read_on()


def test_a_topic_that_is_not_there_is_an_error(kafka_broker: KafkaBroker, tmp_path: Path):
    with pytest.raises(SourceError, match=r"there is no topic 'typo' at 127(?s:.)*Create it"):
        run(kafka("typo", servers=kafka_broker.servers), tmp_path)


# The cluster.


def test_a_server_that_does_not_answer_is_waited_for_and_named(topic: str):
    source = opened(kafka(topic, servers=f"127.0.0.1:{free_port()}"), bounded=False)
    assert list(source.partitions()) == []
    assert "does not answer" in str(source.trouble().away)
    assert "refused" in str(source.trouble().away)
    with pytest.raises(ConnectionError, match="does not answer"):
        opened(kafka(topic, servers=f"127.0.0.1:{free_port()}")).partitions()


@pytest.mark.slow
def test_reading_goes_on_when_the_broker_is_back(tmp_path: Path):
    broker = start_or_skip(lambda: started(tmp_path / "kafka"))
    topic = broker.create("t")
    broker.send(topic, ['{"word":"a"}'])
    source = opened(kafka(topic, servers=broker.servers), bounded=False)
    (partition,) = source.partitions()
    reader = source.open(partition, Position(0), with_positions=False)
    read_until(reader, 1)
    broker.kill()

    def is_away() -> bool:
        assert source.partitions() == [partition]
        assert reader.read(10) is None
        return source.trouble().away is not None

    until(is_away, "the trouble", seconds_max=60)
    assert source.plan_read(partition, Position(2), 10).position == 2
    broker.start()
    broker.send(topic, ['{"word":"b"}'])
    assert read_until(reader, 1)[-1].frame.to_dicts() == [{"word": "b"}]
    until(lambda: not source.partitions() or source.trouble().away is None, "the end of it", seconds_max=30)
    source.close()
    broker.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    broker = start_or_skip(lambda: started(tmp_path_factory.mktemp("guarded"), users={"ann": "right"}))
    broker.create("t")
    broker.send("t", ['{"word":"a"}'])
    yield broker
    broker.stop()


def with_password(broker: KafkaBroker, secret: str = "ANN_PASSWORD") -> ConnectorSpec:
    client = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "ann",
        "sasl.password": {"secret": secret},
    }
    return kafka("t", servers=broker.guarded_servers, client=client)


@pytest.mark.slow
def test_a_password_comes_from_the_secrets(guarded: KafkaBroker):
    spec = with_password(guarded)
    assert all_rows(opened(spec, secrets={"ANN_PASSWORD": "right"})) == [{"word": "a"}]
    with pytest.raises(
        ConfigError, match=r"sasl\.password names the secret 'ANN_PASSWORD', and there is no environment variable"
    ):
        opened(spec, secrets={})


@pytest.mark.slow
def test_a_wrong_password_is_an_error_and_is_not_shown(guarded: KafkaBroker):
    source = opened(with_password(guarded), bounded=False, secrets={"ANN_PASSWORD": "wrong-one"})
    with pytest.raises(SourceError, match=r"does not let this process in(?s:.)*Check security\.protocol") as caught:
        until(lambda: bool(source.partitions()), "an error", seconds_max=30)
    assert "wrong-one" not in str(caught.value)


def test_offsets_are_published_for_other_tools(kafka_broker: KafkaBroker, topic: str, tmp_path: Path):
    kafka_broker.send(topic, ['{"word":"a"}'] * 7)
    source = opened(kafka(topic, servers=kafka_broker.servers, group=f"g-{topic}"), bounded=False)
    (partition,) = source.partitions()
    source.ack({partition: PartitionCut(position=8)})
    until(lambda: kafka_broker.committed(f"g-{topic}", topic) == 7, "the offset", seconds_max=30)


def test_what_nobody_takes_is_not_fetched_without_end(
    kafka_broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held_max, size = 200_000, 100
    monkeypatch.setattr(fetcher_module, "HELD_BYTES_MAX", held_max)
    monkeypatch.setattr(fetcher_module, "QUEUED_KBYTES", 64)
    topic = kafka_broker.create(topic_of(tmp_path), partitions=2)
    words = [f"{number:0{size}}" for number in range(10_000)]
    with kafka_broker.producer(batch_num_messages=100) as producer:
        for word in words:
            for number in (0, 1):
                producer.produce(topic, f'{{"word":"{word}"}}', partition=number)
    client = {"fetch.message.max.bytes": 20_000}
    source: Any = opened(kafka(topic, servers=kafka_broker.servers, client=client), bounded=False)
    readers = [source.open(partition, Position(0), with_positions=False) for partition in source.partitions()]
    for reader in readers:
        reader.read(1)
        reader.read(1)
    found = read_until(readers[0], len(words))
    other = source.fetcher._open[topic, 1]
    until(lambda: readers[0].read(1) is None and other.paused, "the pause", seconds_max=30)
    assert other.held_bytes < 3 * held_max  # all of it would be 18 times as much
    assert pl.concat([one.frame for one in found])["word"].to_list()[-len(words) :] == words
    rest = read_until(readers[1], len(words) - 1)
    assert pl.concat([one.frame for one in rest])["word"].to_list()[-len(words) + 1 :] == words[1:]


# What is declared.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"topics": []}, "name a topic"),
        ({"topics": ["a", "a"]}, "name each topic once"),
        ({"servers": "localhost"}, "must be host:port"),
        ({"start": "yesterday"}, "must be 'earliest', 'latest' or a time"),
        ({"format": "avro"}, "format"),
        ({"client": {"group.id": "g"}}, "use group="),
        ({"client": {"sasl.password": "p"}}, "would be part of the plan(?s:.)*'secret'"),
        ({"key": "k", "timestamp": "k"}, "cannot be two parts"),
    ],
)
def test_options_are_checked_when_the_pipeline_is_built(given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        build(**{"topics": "t", "servers": "localhost:9092", **given})


def test_columns_are_checked_against_the_schema():
    for given, says in (
        ({"key": "nothing"}, "no column 'nothing'"),
        ({"timestamp": "word"}, "must be timestamp, and is string"),
    ):
        with pytest.raises(ConfigError, match=says):
            opened(build("t", servers="localhost:9092", **given))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    spec = kafka("t", servers="localhost:9092")
    for name in [
        name for name in sys.modules if name.startswith("fordstone.connectors.kafka.") and not name.endswith("kind")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(NotInstalledError, match=r"pip install 'fordstone\[kafka\]'"):
        opened(spec)
