"""The MQTT source with its synced journal beside a bare paho consumer, on the same messages of the same broker.

    uv run python bench/connectors_mqtt.py [--messages N]

Each consumer opens a session, messages are published into it while it is away, and the time is from its first message to its last. The source's
time ends when all messages are rows of a frame.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from tests.services.mosquitto import Mosquitto

from fordstone.connectors import mqtt
from fordstone.connectors.base import Home, OpenContext, Reader, SourceOptions
from fordstone.connectors.journal.source import PARTITION, JournalSource
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import OsDisk

SCHEMA = Schema.of({"line": "string", "n": "bigint", "temp": "double", "note": "string"})


def publish(broker: Mosquitto, topic: str, count: int) -> None:
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


def bare(broker: Mosquitto, topic: str, count: int) -> float:
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
    publish(broker, topic, count)
    client = connected()
    while len(seen) < count:
        client.loop(1.0)
    client.unsubscribe(f"{topic}/+")
    client.disconnect()
    return count / (seen[-1] - seen[0])


def source(broker: Mosquitto, topic: str, count: int, directory: str) -> float:
    """Messages per second of the source."""
    spec = mqtt(f"{topic}/{{line}}", broker=broker.address)

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
    publish(broker, topic, count)
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


def measure(count: int, rounds: int = 3) -> dict[str, float]:
    """The medians of some rounds, and their ratio."""
    broker = Mosquitto(durable=False)
    try:
        alone, ours = [], []
        for number in range(rounds):
            alone.append(bare(broker, f"bare{number}", count))
            with tempfile.TemporaryDirectory() as directory:
                ours.append(source(broker, f"source{number}", count, directory))
    finally:
        broker.close()
    bare_rate, our_rate = statistics.median(alone), statistics.median(ours)
    return {"paho messages/s": bare_rate, "source messages/s": our_rate, "ratio": our_rate / bare_rate}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=30_000)
    print(json.dumps(measure(parser.parse_args().messages), indent=2))
