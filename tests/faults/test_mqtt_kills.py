"""MQTT under `kill -9`: of the broker, of the pipeline, and of both. With QoS 1 nothing that was published is lost."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from tests.faults.pipeline_run import PipelineRun
from tests.services.base import start_or_skip
from tests.services.mosquitto import Mosquitto
from tests.waiting import until

PIPELINE = """
from fordstone import Pipeline
from fordstone.connectors import files, mqtt

p = Pipeline("p")
rows = p.source("rows", mqtt("plant/{{line}}/n", broker="{broker}"), schema={{"line": "string", "n": "bigint"}})
rows.sink("out", files("out", format="jsonl"))
"""


class SteadyPublisher(threading.Thread):
    """Publishes numbers until it is stopped. Those in `acknowledged` are the broker's responsibility."""

    def __init__(self, broker: Mosquitto) -> None:
        super().__init__(daemon=True)
        self.client = Client(CallbackAPIVersion.VERSION2, client_id="plant", protocol=MQTTv5)
        self.client.on_publish = self._on_publish
        self.client.reconnect_delay_set(0.05, 0.2)  # type: ignore[arg-type]
        self.client.connect("127.0.0.1", broker.port, clean_start=True)
        self.client.loop_start()
        self.acknowledged: set[int] = set()
        """Packet ids. There are fewer messages than ids, so none is used again."""
        self.numbers: dict[int, int] = {}
        self.over = threading.Event()
        self.quiet = threading.Lock()

    def _on_publish(self, client: Client, userdata: object, mid: int, reason: object, properties: object) -> None:
        self.acknowledged.add(mid)

    def run(self) -> None:
        number = 0
        while not self.over.wait(0.01):
            with self.quiet:
                for _ in range(5 if number < len(self.acknowledged) + 50 else 0):
                    sent = self.client.publish(f"plant/l{number % 3}/n", json.dumps({"n": number}), 1)
                    self.numbers[sent.mid] = number
                    number += 1

    def await_more(self, count: int) -> None:
        wanted = len(self.acknowledged) + count
        until(lambda: len(self.acknowledged) >= wanted, "acknowledgements", seconds_max=60)

    def let_broker_save(self) -> None:
        """Return when the broker has saved what it has acknowledged. It saves a change when the next one comes, after acknowledging it."""
        with self.quiet:
            self._await_acknowledgements()
            for number in range(3):
                self.client.publish("saved", str(number), 1, retain=True).wait_for_publish(60)

    def _await_acknowledgements(self) -> None:
        until(lambda: self.numbers.keys() <= self.acknowledged, "acknowledgements", seconds_max=60)

    def stop(self) -> set[int]:
        self.over.set()
        self.join(60)
        self._await_acknowledgements()
        self.client.disconnect()
        self.client.loop_stop()
        return set(self.numbers.values())


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_was_published_is_lost_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    broker = start_or_skip(Mosquitto)
    try:
        run = PipelineRun(tmp_path, PIPELINE.format(broker=broker.address))
        run.start()
        publisher = SteadyPublisher(broker)

        def subscribed() -> bool:
            publisher.client.publish("plant/probe/n", '{"n": -1}', 1)
            return -1 in run.rows()

        until(subscribed, "a subscription", report=run.log, seconds_max=60, poll_seconds=0.2)
        publisher.start()
        for _ in range(5):
            publisher.await_more(rng.randint(20, 120))
            victim = rng.randrange(3)
            if victim != 1:
                run.end(signal.SIGKILL)
                publisher.await_more(50)  # which nobody receives
            if victim != 0:
                publisher.let_broker_save()
                broker.kill()
                broker.start()
            if victim != 1:
                run.start()
        published = publisher.stop()
        until(
            lambda: published <= run.rows().keys(),
            "every row",
            report=lambda: (sorted(published - run.rows().keys()), len(published), run.log(), broker.log_tail()),
            seconds_max=30,
        )
        run.end(signal.SIGINT)
        found = Counter({n: times for n, times in run.rows().items() if n >= 0})
        assert published <= found.keys()
        assert len(published) > 100
        print(f"seed {seed}: {len(published)} published, 0 lost, {found.total() - len(found)} doubled")
    finally:
        broker.close()
