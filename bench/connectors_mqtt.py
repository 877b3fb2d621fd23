"""MQTT: the source with its synced journal beside a bare paho consumer, on the same messages of the same broker.

Each consumer opens a session, messages are published into it while it is away, and the time is from its first message to its last. The source's
time ends when all messages are rows of a frame.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Final

from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from tests.services.mosquitto import Mosquitto

from fordstone.connectors import mqtt as mqtt_topics
from fordstone.connectors.base import Home, OpenContext, Reader, SourceOptions
from fordstone.connectors.journal.source import PARTITION, JournalSource
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import OsDisk
from table import Finding, at_least, middle, rate_of, spread

SHARE: Final = at_least(0.80)
SCHEMA = Schema.of({"line": "string", "n": "bigint", "temp": "double", "note": "string"})


def mqtt(directory: Path, quick: bool) -> list[Finding]:
    count, repetitions = (10_000, 1) if quick else (30_000, 3)
    broker = Mosquitto(durable=False)
    try:
        alone: list[float] = []
        ours: list[float] = []
        for number in range(repetitions):
            alone.append(_bare(broker, f"bare{number}", count))
            with tempfile.TemporaryDirectory(dir=directory) as journal:
                ours.append(_source(broker, f"source{number}", count, journal))
    finally:
        broker.close()
    shares = [mine / bare for mine, bare in zip(ours, alone, strict=True)]
    return [
        rate_of("mqtt", "bare paho consumer", alone),
        rate_of("mqtt", "our source, journalled and synced", ours),
        Finding(
            section="mqtt",
            case="our source, of the bare consumer",
            measured=middle(shares),
            unit="share",
            target=SHARE,
            note=f"{count:,} messages of 190 bytes with QoS 1; {spread(shares)}",
            details={"bare": alone, "ours": ours},
        ),
    ]


def _publish(broker: Mosquitto, topic: str, count: int) -> None:
    client = Client(CallbackAPIVersion.VERSION2, client_id="publisher", protocol=MQTTv5)
    client.max_inflight_messages_set(1000)
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    sent = [
        client.publish(f"{topic}/l{n % 5}", json.dumps({"n": n, "temp": n / 7, "note": "x" * 150}), 1)
        for n in range(count)
    ]
    for one in sent:
        one.wait_for_publish()
    client.disconnect()
    client.loop_stop()


def _bare(broker: Mosquitto, topic: str, count: int) -> float:
    """Messages per second of a client that only counts, and acknowledges by itself."""
    seen: list[float] = []

    def connected() -> Client:
        client = Client(CallbackAPIVersion.VERSION2, client_id="bare", protocol=MQTTv5)
        client.on_message = lambda *_: seen.append(time.perf_counter())
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval, properties.ReceiveMaximum = 600, 1000
        client.connect("127.0.0.1", broker.port, clean_start=False, properties=properties)
        return client

    client = connected()
    done: list[bool] = []
    client.on_subscribe = lambda *_: done.append(True)
    while not client.is_connected():
        client.loop(0.1)
    client.subscribe(f"{topic}/+", 1)
    while not done:
        client.loop(0.1)
    client.disconnect()
    _publish(broker, topic, count)
    client = connected()
    while len(seen) < count:
        client.loop(1.0)
    client.unsubscribe(f"{topic}/+")
    client.disconnect()
    return count / (seen[-1] - seen[0])


def _source(broker: Mosquitto, topic: str, count: int, directory: str) -> float:
    """Messages per second of the source."""
    spec = mqtt_topics(f"{topic}/{{line}}", broker=broker.address)

    def opened() -> tuple[JournalSource, Reader]:
        disk = OsDisk(directory)
        context = OpenContext(home=Home(disk=disk, directory="p/n"), step="in")
        made = open_source(spec, SourceOptions(schema=SCHEMA, bounded=False), context)
        assert isinstance(made, JournalSource)
        return made, made.open(PARTITION, Position(made.messages.end), with_positions=False)

    first, reader = opened()
    while reader.read(1) is None and first.trouble().away is not None:
        time.sleep(0.01)
    first.close()
    _publish(broker, topic, count)
    second, reader = opened()
    rows: list[int] = []
    times: list[float] = []
    while sum(rows) < count:
        chunk = reader.read(65_536)
        if chunk is None:
            time.sleep(0.001)
            continue
        rows.append(chunk.frame.height)
        times.append(time.perf_counter())
    second.close()
    return sum(rows[1:]) / (times[-1] - times[0])  # the first batch was under way before
