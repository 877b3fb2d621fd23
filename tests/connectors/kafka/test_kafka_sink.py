"""A topic as a sink, on a real broker: what messages contain, and transactions that are cut off at the worst moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.kafka.topics import json_rows, topic_of
from tests.services.base import free_port, start_or_skip
from tests.services.kafka import KafkaBroker, started

from fordstone import Pipeline
from fordstone.connectors import kafka, memory
from fordstone.connectors.base import ConnectorSpec, SinkDelayedError, SinkStream
from fordstone.connectors.kafka.rows import Outgoing
from fordstone.connectors.kafka.sink import KafkaSink
from fordstone.connectors.registry import open_sink
from fordstone.errors import ConfigError, FencedError, SinkError
from fordstone.lang.schema import Schema
from fordstone.protocol.lease import Fence

SCHEMA = {"n": "bigint"}
STREAM = SinkStream(
    step="out",
    schema=Schema.of(SCHEMA),
    pipeline="p",
    node="n1",
    owner="state",
    start="one",
    generation=Fence(0, 1),
    resumes_after=0,
)
TRIES_MAX = 200


@pytest.fixture
def topic(kafka_broker: KafkaBroker, tmp_path: Path) -> str:
    return kafka_broker.create(topic_of(tmp_path))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[KafkaBroker]:
    """A broker that the test may end."""
    broker = start_or_skip(lambda: started(tmp_path / "kafka"))
    broker.create("t")
    yield broker
    broker.stop()


def opened(spec: ConnectorSpec, stream: SinkStream = STREAM, **changed: Any) -> KafkaSink:
    sink = open_sink(spec, replace(stream, **changed))
    assert isinstance(sink, KafkaSink)
    return sink


def numbers(*given: int) -> pl.DataFrame:
    return pl.DataFrame({"n": given}, schema={"n": pl.Int64})


def seen(broker: KafkaBroker, topic: str = "t") -> list[int]:
    return [row["n"] for row in json_rows(broker, topic)]


def patiently(step: Callable[[], object]) -> int:
    """Do a step as the engine does: again, as long as the sink is delayed. Return how often it was."""
    for delays in range(TRIES_MAX):
        try:
            step()
        except SinkDelayedError:
            continue
        return delays
    raise AssertionError(f"the sink is delayed after {TRIES_MAX} tries")


class Held:
    """Holds a sink in the middle of its next transaction, after the first row is at the broker."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._messages = self._sink._messages.of
        self._reached, self._go_on = threading.Event(), threading.Event()
        self._sink._messages.of = self._of

    def _of(self, frame: pl.DataFrame) -> Iterator[Outgoing]:
        self._sink._messages.of = self._messages
        for number, one in enumerate(self._messages(frame)):
            if number == 1:
                assert self._sink._producer.flush(30) == 0
                self._reached.set()
                assert self._go_on.wait(60)
            yield one

    def during(self, step: Callable[[], object], meanwhile: Callable[[], object]) -> list[BaseException]:
        """Do the step on a thread, and something else in its middle. Return what the step raised."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - it is what the test asks for
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert self._reached.wait(60)
        meanwhile()
        self._go_on.set()
        thread.join(120)
        assert not thread.is_alive()
        return raised


# What messages contain.


def test_columns_are_key_headers_time_and_partition_of_the_message(kafka_broker: KafkaBroker, tmp_path: Path):
    topic = kafka_broker.create(topic_of(tmp_path), partitions=3)
    schema = Schema.of({"k": "string", "n": "int", "trace": "string", "at": "timestamp", "p": "int"})
    spec = kafka(
        topic, servers=kafka_broker.servers, key="k", timestamp="at", headers={"trace": "x-trace"}, partition="p"
    )
    at = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    rows = [["a", 1, "t1", at, 2], [None, 2, None, at, 0], ["c", 3, "", at, 1]]
    opened(spec, schema=schema).release(1, pl.DataFrame(rows, schema=schema.polars, orient="row"))
    found = kafka_broker.messages(topic)
    assert [(one.partition(), one.key(), one.value(), one.headers()) for one in found] == [
        (0, None, b'{"k":null,"n":2}', None),
        (1, b"c", b'{"k":"c","n":3}', [("x-trace", b"")]),
        (2, b"a", b'{"k":"a","n":1}', [("x-trace", b"t1")]),
    ]
    assert {one.timestamp()[1] for one in found} == {int(at.timestamp() * 1000)}


def test_raw_values_have_the_changes_of_an_upsert_as_headers(kafka_broker: KafkaBroker, topic: str):
    schema = Schema.of({"k": "string", "v": "binary"})
    spec = kafka(topic, servers=kafka_broker.servers, key="k", format="raw")
    frame = pl.DataFrame({"k": ["a"], "v": [b"\x00\xff"], "__op": ["upsert"]})
    opened(spec, schema=schema, upsert_key=("k",)).release(1, frame)
    (found,) = kafka_broker.messages(topic)
    assert (found.key(), found.value(), found.headers()) == (b"a", b"\x00\xff", [("__op", b"upsert")])


def test_keys_choose_partitions_as_producers_in_java_do(kafka_broker: KafkaBroker, tmp_path: Path):
    topic = kafka_broker.create(topic_of(tmp_path), partitions=5)
    schema = Schema.of({"k": "string"})
    opened(kafka(topic, servers=kafka_broker.servers, key="k"), schema=schema).release(
        1, pl.DataFrame({"k": ["21", "foobar", "a-little-bit-long-string"]})
    )
    # murmur2, from the tests of Apache Kafka's Utils: -973932308, -790332482, -985981536.
    wanted = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    found = {one.key(): one.partition() for one in kafka_broker.messages(topic)}
    assert found == {key: (value & 0x7FFFFFFF) % 5 for key, value in wanted.items()}


def test_a_row_that_is_too_large_is_an_error_that_names_the_setting(kafka_broker: KafkaBroker, topic: str):
    schema = Schema.of({"v": "string"})
    sink = opened(kafka(topic, servers=kafka_broker.servers), schema=schema)
    frame = pl.DataFrame({"v": ["small", "x" * 3_000_000]})
    with pytest.raises(SinkError, match=r"does not take these rows(?s:.)*message\.max\.bytes"):
        sink.release(1, frame)
    assert kafka_broker.values(topic) == []


def test_a_sink_has_one_topic_and_no_offsets():
    for wrong in (kafka(["a", "b"], servers="localhost:1"), kafka("a", servers="localhost:1", offset="n")):
        rows = Pipeline("p").source("rows", memory([{"n": 1}]))
        rows.sink("out", wrong)
        with pytest.raises(ConfigError, match=r"one topic|for sources"):
            rows.pipeline.run(bounded=True)


def test_a_topic_that_is_not_there_is_an_error(kafka_broker: KafkaBroker):
    with pytest.raises(SinkError, match="there is no topic 'typo'"):
        opened(kafka("typo", servers=kafka_broker.servers))
    with pytest.raises(SinkDelayedError, match=r"does not answer(?s:.)*refused"):
        opened(kafka("t", servers=f"127.0.0.1:{free_port()}"))


# Transactions that are cut off.


def test_a_producer_that_dies_in_its_transaction_leaves_nothing_that_is_seen(kafka_broker: KafkaBroker, topic: str):
    spec = kafka(topic, servers=kafka_broker.servers)
    dead = opened(spec)
    dead.release(1, numbers(1, 2))
    successor: list[KafkaSink] = []

    def take_over() -> None:
        successor.append(opened(spec, start="two", generation=Fence(0, 2), resumes_after=1))

    (error,) = Held(dead).during(lambda: dead.release(2, numbers(3, 4, 5)), take_over)
    assert isinstance(error, FencedError)
    successor[0].release(2, numbers(3, 4, 5))
    assert seen(kafka_broker, topic) == [1, 2, 3, 4, 5]
    assert len(kafka_broker.values(topic, committed=False)) > 5


@pytest.mark.slow
def test_a_broker_that_is_killed_in_a_transaction_gets_the_epoch_once(own: KafkaBroker):
    sink = opened(kafka("t", servers=own.servers))
    sink.release(1, numbers(1, 2))

    def restart() -> None:
        own.kill()
        own.start()

    def release() -> None:
        patiently(lambda: sink.release(2, numbers(3, 4, 5)))

    assert Held(sink).during(release, restart) == []
    sink.release(3, numbers(6))
    assert seen(own) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_broker_that_is_away_delays_the_sink(own: KafkaBroker):
    sink = opened(kafka("t", servers=own.servers, client={"socket.timeout.ms": 1000}))
    sink.release(1, numbers(1))
    own.kill()
    with pytest.raises(SinkDelayedError, match="does not answer"):
        sink.release(2, numbers(2))
    own.start()
    patiently(lambda: sink.release(2, numbers(2)))
    assert seen(own) == [1, 2]


def test_a_transaction_that_has_timed_out_is_made_again_whole(kafka_broker: KafkaBroker, topic: str):
    sink = opened(kafka(topic, servers=kafka_broker.servers, client={"transaction.timeout.ms": 1000}))
    sink.release(1, numbers(1, 2))

    def release() -> None:
        patiently(lambda: sink.release(2, numbers(3, 4, 5)))

    def wait_for_its_end() -> None:
        kafka_broker.settle(topic)

    assert Held(sink).during(release, wait_for_its_end) == []
    assert seen(kafka_broker, topic) == [1, 2, 3, 4, 5]
    assert len(kafka_broker.values(topic, committed=False)) == 6


def test_a_copy_of_the_state_is_refused_and_does_not_end_what_the_newer_one_has_in_flight(
    kafka_broker: KafkaBroker, topic: str
):
    spec = kafka(topic, servers=kafka_broker.servers)
    newer = opened(spec, start="five", generation=Fence(0, 5))
    newer.release(1, numbers(1))

    def refused() -> None:
        with pytest.raises(FencedError):
            opened(spec, start="old", generation=Fence(0, 4), resumes_after=1)
        with pytest.raises(SinkError, match=r"has epoch 1, but the state(?s:.)*cannot be taken back"):
            opened(spec, start="six", generation=Fence(0, 6), resumes_after=0)

    assert Held(newer).during(lambda: newer.release(2, numbers(2, 3)), refused) == []
    assert seen(kafka_broker, topic) == [1, 2, 3]
    # Nothing was aborted: two marks of commits, and one of the claim without rows.
    assert kafka_broker.ends(topic)[0] == 3 + 2


def test_a_writer_that_was_replaced_ends_nothing_of_its_successor_when_it_tries_again(
    kafka_broker: KafkaBroker, topic: str
):
    spec = kafka(topic, servers=kafka_broker.servers)
    replaced = opened(spec)
    successor = opened(spec, start="two", generation=Fence(0, 2))

    def tries() -> None:
        for _ in range(2):
            with pytest.raises(FencedError):
                replaced.release(1, numbers(9))

    assert Held(successor).during(lambda: successor.release(1, numbers(1, 2)), tries) == []
    assert seen(kafka_broker, topic) == [1, 2]
    assert kafka_broker.ends(topic)[0] == 2 + 1  # one mark of a commit, and none of an abort


# The mark.


def test_a_claim_that_was_just_committed_holds_before_readers_of_the_group_see_it(
    kafka_broker: KafkaBroker, topic: str
):
    """The offsets of a transaction become visible a little after the producer has the answer."""
    spec = kafka(topic, servers=kafka_broker.servers)
    for number in range(1, 31):
        opened(spec, start=f"{number}", generation=Fence(0, number)).write(numbers(number))
    assert seen(kafka_broker, topic) == list(range(1, 31))


def test_an_epoch_of_which_the_mark_has_expired_is_released_as_the_user_says(kafka_broker: KafkaBroker, topic: str):
    spec = kafka(topic, servers=kafka_broker.servers)
    opened(spec).release(1, numbers(1))
    kafka_broker.client().delete_consumer_groups(["fordstone.p.n1.out"])["fordstone.p.n1.out"].result(30)
    again: dict[str, Any] = {"start": "two", "generation": Fence(0, 2), "resumes_after": 1}
    sink = opened(spec, **again)
    for _ in range(2):
        with pytest.raises(SinkError, match=r"has expired(?s:.)*unmarked='skip'(?s:.)*unmarked='write'"):
            sink.release(1, numbers(1))
    sink.release(1, numbers())
    skipping = opened(kafka(topic, servers=kafka_broker.servers, unmarked="skip"), **(again | {"start": "three"}))
    assert seen(kafka_broker, topic) == [1]
    skipping.release(1, numbers(1))
    skipping.release(2, numbers(2))
    assert seen(kafka_broker, topic) == [1, 2]


def test_an_epoch_of_which_the_mark_has_expired_may_be_written_again(kafka_broker: KafkaBroker, topic: str):
    opened(kafka(topic, servers=kafka_broker.servers)).release(1, numbers(1))
    kafka_broker.client().delete_consumer_groups(["fordstone.p.n1.out"])["fordstone.p.n1.out"].result(30)
    spec = kafka(topic, servers=kafka_broker.servers, unmarked="write")
    sink = opened(spec, start="two", generation=Fence(0, 2), resumes_after=1)
    for epoch in (1, 1, 2):
        sink.release(epoch, numbers(epoch))
    assert seen(kafka_broker, topic) == [1, 1, 2]


def test_a_group_of_another_tool_under_the_name_of_the_sink_is_an_error(kafka_broker: KafkaBroker, topic: str):
    kafka_broker.commit("fordstone.p.n1.other", topic, 7)
    with pytest.raises(SinkError, match="has an offset that this sink has not written"):
        opened(kafka(topic, servers=kafka_broker.servers), step="other")


def test_a_run_that_meets_later_epochs_of_a_lost_state_stops(kafka_broker: KafkaBroker, topic: str, tmp_path: Path):
    def run(state: str, **options: Any) -> None:
        pipeline = Pipeline("lost")
        rows = pipeline.source("rows", memory([{"n": 1}, {"n": 2}]))
        rows.sink("out", kafka(topic, servers=kafka_broker.servers))
        pipeline.run(bounded=True, state=tmp_path / state, **options)

    run("one")
    run("one")
    assert seen(kafka_broker, topic) == [1, 2]
    with pytest.raises(SinkError, match=r"has epochs? 1(?s:.)*cannot be taken back(?s:.)*--discard-later-output"):
        run("two")
    run("three", discard_later_output=True)
    assert seen(kafka_broker, topic) == [1, 2, 1, 2]
