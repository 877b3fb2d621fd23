"""MQTT: topics as columns, what the options mean, and when a broker receives acknowledgements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import polars as pl
import pytest
from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from tests.services.mosquitto import Mosquitto
from tests.waiting import until

from fordstone.connectors import mqtt
from fordstone.connectors.base import ConnectorSpec, Delivery, Home, OpenContext, Source, SourceOptions
from fordstone.connectors.journal.source import PARTITION
from fordstone.connectors.mqtt.kind import TopicPattern, broker_address
from fordstone.connectors.registry import open_source, sink_delivery, source_delivery
from fordstone.errors import ConfigError, FordstoneError, SinkError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import OsDisk
from fordstone.storage.message_log import Messages
from fordstone.testing.contracts.connector import SinkContract

NUMBERS = count()
SCHEMA = Schema.of({"line": "string", "n": "bigint"})


# Topics


def messages_of(*topics: str) -> Messages:
    return Messages(
        first=0, values=[b""] * len(topics), topics=list(topics), times_us=[0] * len(topics), ids=[""] * len(topics)
    )


@pytest.mark.parametrize(
    ("pattern", "subscribed", "topic", "columns"),
    [
        ("plant/{line}/temp", "plant/+/temp", "plant/a b/temp", {"line": "a b"}),
        ("{site}/{line}", "+/+", "s/", {"site": "s", "line": ""}),
        ("plant/{rest...}", "plant/#", "plant/a/b/c", {"rest": "a/b/c"}),
        ("plant/{rest...}", "plant/#", "plant", {"rest": ""}),
        ("{all...}", "#", "a/b", {"all": "a/b"}),
        ("plant/+/#", "plant/+/#", "plant/x/y", {}),
        ("fixed", "fixed", "fixed", {}),
    ],
)
def test_levels_in_braces_are_columns(pattern: str, subscribed: str, topic: str, columns: dict[str, str]) -> None:
    parsed = TopicPattern.parse(pattern)
    assert parsed.filter == subscribed
    assert parsed.regex().fullmatch(topic)
    made = {name: make(messages_of(topic, topic))[0] for name, (_, make) in parsed.beside().items()}
    assert made == columns


@pytest.mark.parametrize(
    ("pattern", "topic"), [("plant/{line}/temp", "plant/a/b/temp"), ("plant/{line}", "other/a"), ("a.b/{x}", "aXb/c")]
)
def test_other_topics_do_not_match(pattern: str, topic: str) -> None:
    assert TopicPattern.parse(pattern).regex().fullmatch(topic) is None


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "has 1 to 65535 bytes"),
        ("a/{b", "a column takes a whole level"),
        ("a/x{b}", "a column takes a whole level"),
        ("{b...}/a", "must be the last one"),
        ("{b}/{b}", "'b' is there twice"),
        ("a/#/b", "'#' for all levels that follow, at the end"),
        ("a+/b", "stands for a whole level"),
    ],
)
def test_wrong_patterns_are_errors_of_the_pipeline(pattern: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mqtt(pattern, broker="b")


def test_a_sink_makes_topics_of_columns_and_no_value_can_change_their_levels() -> None:
    frame = pl.DataFrame({"line": ["a", "b/c", "+", None, "100%"], "rest": ["x/y", "", "#", "z", "w"]})
    assert TopicPattern.parse("p/{line}/{rest...}").topics_of(frame) == [
        *("p/a/x/y", "p/b%2Fc/", "p/%2B/%23", "p//z", "p/100%25/w")
    ]
    assert TopicPattern.parse("fixed").topics_of(frame) == ["fixed"] * 5


# Options


def test_what_is_wrong_with_options_is_said_when_they_are_given() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"qos": 2}, "qos=2 is not offered.*Use qos=1.*deduplicate"),
        ({"qos": 3}, "qos"),
        ({"format": "xml"}, "format='xml' must be"),
        ({"broker": "host:0"}, "broker='host:0' is not HOST:PORT"),
        ({"share": "a/b"}, "share='a/b' is the name of a group"),
        ({"password": "X"}, "password= needs user="),
        ({"cert_file": "a", "tls": True}, "go together"),
        ({"ca_file": "a"}, "are for tls=True"),
        ({"keepalive": "soon"}, "keepalive"),
    ]
    for options, says in cases:
        with pytest.raises(ConfigError, match=says):
            mqtt("t", **({"broker": "b:1883"} | options))


def test_brokers_have_usual_ports() -> None:
    assert broker_address("b", tls=False) == ("b", 1883)
    assert broker_address("b", tls=True) == ("b", 8883)
    assert broker_address("[::1]:7", tls=False) == ("::1", 7)
    assert broker_address("[::1]", tls=False) == ("::1", 1883)


def test_deliveries_are_declared_as_they_are() -> None:
    once, least = mqtt("t", broker="b", qos=0), mqtt("t", broker="b")
    assert (source_delivery(once), source_delivery(least)) == (Delivery.AT_MOST_ONCE, Delivery.AT_LEAST_ONCE)
    assert sink_delivery(least) is Delivery.AT_LEAST_ONCE
    with pytest.raises(ConfigError, match="a sink publishes to one topic per row"):
        sink_delivery(mqtt("t/+", broker="b"))


def test_a_plan_has_the_name_of_the_password_and_not_the_password(tmp_path: Path) -> None:
    spec = mqtt("t", broker="b", user="u", password="BROKER_PASSWORD")
    assert spec.options["password"] == "BROKER_PASSWORD"
    with pytest.raises(ConfigError, match="there is no environment variable of that name"):
        Open(tmp_path, spec).take()


# With a broker


class Publisher:
    """Publishes with QoS 1 and waits for the acknowledgement."""

    def __init__(self, broker: Mosquitto, **more: str) -> None:
        self.client = Client(CallbackAPIVersion.VERSION2, client_id=f"publisher-{next(NUMBERS)}", protocol=MQTTv5)
        if more:
            self.client.username_pw_set(more["user"], more["password"])
        self.client.max_inflight_messages_set(500)
        self.client.connect("127.0.0.1", broker.port)
        self.client.loop_start()

    def publish(self, topic: str, numbers: range, qos: int = 1) -> None:
        sent = [self.client.publish(topic, json.dumps({"n": n}), qos) for n in numbers]
        for one in sent:
            one.wait_for_publish(60)
            assert one.is_published()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def publisher(mosquitto: Mosquitto) -> Iterator[Publisher]:
    made = Publisher(mosquitto)
    yield made
    made.close()


@pytest.fixture
def name() -> str:
    return f"t{next(NUMBERS)}"


class Open:
    """One start of a source step over a folder."""

    def __init__(
        self, place: Path, spec: ConnectorSpec, *, schema: Schema = SCHEMA, secrets: dict[str, str] | None = None
    ) -> None:
        self.disk = OsDisk(place)
        context = OpenContext(home=Home(disk=self.disk, directory="p/n"), step="in", secrets=secrets or {})
        self.source: Source = open_source(spec, SourceOptions(schema=schema, bounded=False), context)
        self.reader = self.source.open(PARTITION, Position(0), with_positions=False)
        self.frames: list[pl.DataFrame] = []
        self.rejected: list[str] = []

    def take(self) -> None:
        while (chunk := self.reader.read(1000)) is not None:
            self.frames.append(chunk.frame)
            self.rejected += [one.text for one in chunk.rejected]

    def rows(self, wanted: int) -> pl.DataFrame:
        def enough() -> bool:
            self.take()
            return sum(frame.height for frame in self.frames) >= wanted

        until(enough, f"{wanted} rows", report=lambda: (self.frames, self.source.trouble()), seconds_max=60)
        return pl.concat(self.frames)

    def connected(self) -> None:
        def met() -> bool:
            self.take()
            return self.source.trouble().away is None

        until(met, "connection", report=self.source.trouble, seconds_max=60)

    def close(self) -> None:
        self.reader.close()
        self.source.close()
        self.disk.close()


@contextmanager
def started(place: Path, spec: ConnectorSpec, **options: Any) -> Iterator[Open]:
    opened = Open(place, spec, **options)
    try:
        opened.connected()
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_messages_are_rows_and_parts_of_topics_are_columns(
    mosquitto: Mosquitto, publisher: Publisher, tmp_path: Path, name: str, version: Any
) -> None:
    schema = Schema.of({"line": "string", "n": "bigint", "topic": "string", "at": "timestamp"})
    spec = mqtt(f"{name}/{{line}}/x", broker=mosquitto.address, version=version, topic="topic", received="at")
    with started(tmp_path, spec, schema=schema) as opened:
        publisher.publish(f"{name}/a/x", range(3))
        publisher.publish(f"{name}/b/y", range(3))
        publisher.client.publish(f"{name}/a/x", b"{", 1)
        publisher.publish(f"{name}/b/x", range(3, 5))
        found = opened.rows(5)
    assert found.select("line", "n", "topic").rows() == [
        *(("a", n, f"{name}/a/x") for n in range(3)),
        *(("b", n, f"{name}/b/x") for n in range(3, 5)),
    ]
    assert found["at"].null_count() == 0
    assert opened.rejected == ["{"]


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_what_is_published_while_the_source_is_away_comes_later(
    mosquitto: Mosquitto, publisher: Publisher, tmp_path: Path, name: str, version: Any
) -> None:
    spec = mqtt(f"{name}/{{line}}", broker=mosquitto.address, version=version)
    with started(tmp_path, spec) as opened:
        publisher.publish(f"{name}/a", range(10))
        opened.rows(10)
    publisher.publish(f"{name}/a", range(10, 300))
    publisher.publish(f"{name}/a", range(300, 310), qos=2)
    with started(tmp_path, spec) as opened:
        # A message whose acknowledgement was under way when the source was closed may come again.
        def found() -> list[int]:
            opened.take()
            return list(dict.fromkeys(n for frame in opened.frames for n in frame["n"]))

        until(lambda: len(found()) >= 310, "310 messages")
        assert found() == list(range(310))


def test_members_of_a_group_share_the_messages(
    mosquitto: Mosquitto, publisher: Publisher, tmp_path: Path, name: str
) -> None:
    def spec(member: str) -> ConnectorSpec:
        return mqtt(f"{name}/{{line}}", broker=mosquitto.address, share=name, client_id=f"{name}-{member}")

    with started(tmp_path / "a", spec("a")) as first, started(tmp_path / "b", spec("b")) as second:
        publisher.publish(f"{name}/x", range(100))

        def all_there() -> bool:
            first.take()
            second.take()
            return sum(frame.height for one in (first, second) for frame in one.frames) >= 100

        until(all_there, "100 rows")
        shares = [sorted(pl.concat(one.frames)["n"].to_list()) for one in (first, second)]
    assert sorted(shares[0] + shares[1]) == list(range(100))
    assert all(shares)


def test_nothing_is_acknowledged_before_it_is_synced(
    mosquitto: Mosquitto, publisher: Publisher, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, syncing = Event(), Event()
    spec = mqtt(f"{name}/{{line}}", broker=mosquitto.address)
    with started(tmp_path, spec) as opened:
        whole = opened.disk.fsync

        def slow(path: str) -> None:
            syncing.set()
            assert go_on.wait(60)
            raise OSError("the machine went off")

        monkeypatch.setattr(opened.disk, "fsync", slow)
        publisher.publish(f"{name}/a", range(5))
        assert syncing.wait(60)
        opened.take()
        assert opened.frames == []
        go_on.set()
        until(lambda: _failed(opened.take), "the failure to be raised")
        monkeypatch.setattr(opened.disk, "fsync", whole)
    with started(tmp_path / "other disk", spec) as opened:
        assert opened.rows(5)["n"].to_list() == list(range(5)), "the broker has them still"


def _failed(call: Callable[[], None]) -> bool:
    try:
        call()
    except (FordstoneError, OSError):
        return True
    return False


def test_a_full_journal_acknowledges_nothing_until_there_is_room_and_loses_nothing(
    mosquitto: Mosquitto, publisher: Publisher, tmp_path: Path, name: str
) -> None:
    spec = mqtt(f"{name}/{{line}}", broker=mosquitto.address)
    with started(tmp_path, spec) as opened:
        log = opened.source.messages  # type: ignore[attr-defined]
        log._bytes_max = 50_000
        log._segment_bytes = 2_000
        publisher.publish(f"{name}/a", range(4000))

        def full() -> bool:
            opened.take()
            return "is full" in (opened.source.trouble().away or "")

        until(full, "a full journal", report=opened.source.trouble, seconds_max=20)

        def trimmed() -> bool:
            opened.take()
            taken = sum(frame.height for frame in opened.frames)
            log.trim(taken)  # a position is a number of messages
            return taken >= 4000

        until(trimmed, "4000 rows", report=opened.source.trouble, seconds_max=20)
        assert pl.concat(opened.frames)["n"].to_list() == list(range(4000))
        opened.connected()


def test_a_wrong_password_is_an_error_that_says_so(tmp_path: Path, name: str) -> None:
    broker = Mosquitto(durable=False, passwords={"ann": "right"})
    try:
        for version in ("3.1.1", "5"):
            spec = mqtt(f"{name}/{{line}}", broker=broker.address, user="ann", password="P", version=version)
            with started(tmp_path / version, spec, secrets={"P": "right"}):
                pass
            opened = Open(tmp_path / f"{version}-wrong", spec, secrets={"P": "wrong"})
            try:
                until(lambda: _failed(opened.take), "an error", seconds_max=20)  # noqa: B023 - called here
                with pytest.raises(SourceError, match=r"source in: mqtt.*refuses client(?s:.)*Check user, password"):
                    opened.take()
            finally:
                opened.close()
    finally:
        broker.close()


def test_messages_of_an_earlier_subscription_of_the_session_are_not_rows(
    mosquitto: Mosquitto, publisher: Publisher, tmp_path: Path, name: str
) -> None:
    for topic in ("old", "new"):
        spec = mqtt(f"{name}/{topic}/{{line}}", broker=mosquitto.address, client_id=name)
        with started(tmp_path / topic, spec) as opened:
            publisher.publish(f"{name}/old/a", range(5))
            publisher.publish(f"{name}/new/a", range(5, 8))
            assert opened.rows(3)["n"].to_list()[-3:] == (list(range(5)) if topic == "old" else list(range(5, 8)))[-3:]
    assert pl.concat(opened.frames)["n"].to_list() == list(range(5, 8))


class TestMqttSink(SinkContract):
    applies_upserts = False

    @pytest.fixture(autouse=True)
    def _broker(self, mosquitto: Mosquitto) -> Iterator[None]:
        self.broker = mosquitto
        self.topic = f"sink{next(NUMBERS)}"
        self.found: list[dict[str, Any]] = []
        self.marks = 0
        self.watcher = Client(CallbackAPIVersion.VERSION2, client_id=self.topic, protocol=MQTTv5)
        self.watcher.on_message = self._on_message
        subscribed = Event()
        self.watcher.on_subscribe = lambda *_: subscribed.set()
        self.watcher.connect("127.0.0.1", mosquitto.port)
        self.watcher.loop_start()
        self.watcher.subscribe(f"{self.topic}/#", 1)
        assert subscribed.wait(60)
        yield
        self.watcher.disconnect()
        self.watcher.loop_stop()

    def _on_message(self, client: Client, userdata: object, message: Any) -> None:
        if message.topic == f"{self.topic}/mark":
            self.marks += 1
        else:
            self.found.append(json.loads(message.payload))

    def spec(self, place: Path) -> ConnectorSpec:
        return mqtt(f"{self.topic}/rows", broker=self.broker.address)

    def seen(self, place: Path) -> pl.DataFrame:
        wanted = self.marks + 1
        self.watcher.publish(f"{self.topic}/mark", b"", 1)
        until(lambda: self.marks >= wanted, "the mark", seconds_max=20)
        plain: dict[str, pl.DataType] = {
            name: pl.String() if kind.name == "timestamp" else kind.polars for name, kind in self.schema.items()
        }
        hidden: dict[str, pl.DataType] = {
            name: pl.String() for name in ("__id", "__op") if any(name in row for row in self.found)
        }
        frame = pl.DataFrame(self.found, schema=plain | hidden)
        return frame.with_columns(pl.col("ts").str.to_datetime(time_zone="UTC", time_unit="us"))


def test_a_sink_without_the_columns_of_its_topic_is_an_error(mosquitto: Mosquitto) -> None:
    from fordstone.connectors.base import SinkStream
    from fordstone.connectors.registry import open_sink

    stream = SinkStream(step="out", schema=Schema.of({"n": "bigint"}))
    with pytest.raises(SinkError, match="the rows have no column 'line'"):
        open_sink(mqtt("p/{line}", broker=mosquitto.address), stream)
