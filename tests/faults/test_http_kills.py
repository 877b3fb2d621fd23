"""HTTP under `kill -9`: clients that repeat requests with their keys until they are answered find each row once."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from random import Random

import pytest
import urllib3
from tests.faults.pipeline_run import PipelineRun
from tests.services.base import free_port
from tests.waiting import until

PIPELINE = """
from fordstone import Pipeline
from fordstone.connectors import files, http_in

p = Pipeline("p")
rows = p.source("rows", http_in(port={port}), schema={{"n": "bigint"}})
rows.sink("out", files("out", format="jsonl"))
"""
BATCH = 10


class Client(threading.Thread):
    """Posts batches of numbers. A request is repeated until it is answered."""

    def __init__(self, number: int, port: int) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.pool = urllib3.HTTPConnectionPool("127.0.0.1", port, timeout=10, retries=False)
        self.sent = 0
        self.repeated = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.005):
            first = self.number * 1_000_000 + self.sent * BATCH
            body = json.dumps([{"n": n} for n in range(first, first + BATCH)])
            while not self.post(body, str(first)):
                self.repeated += 1
                self.over.wait(0.02)
            self.sent += 1

    def post(self, body: str, key: str) -> bool:
        try:
            return self.pool.request("POST", "/events", body=body, headers={"idempotency-key": key}).status == 202
        except urllib3.exceptions.HTTPError:
            return False


@pytest.mark.parametrize("seed", range(2))
def test_every_request_that_was_answered_is_there_once(tmp_path: Path, seed: int) -> None:
    rng, port = Random(seed), free_port()
    run = PipelineRun(tmp_path, PIPELINE.format(port=port))
    run.start()
    clients = [Client(number, port) for number in range(3)]
    for client in clients:
        client.start()
    for _ in range(5):
        wanted = sum(client.sent for client in clients) + rng.randint(5, 150)
        until(lambda: sum(client.sent for client in clients) >= wanted, "answers", report=run.log, seconds_max=60)  # noqa: B023
        run.end(signal.SIGKILL)
        run.start()
    for client in clients:
        client.over.set()
    for client in clients:
        client.join(60)
    published = {client.number * 1_000_000 + n for client in clients for n in range(client.sent * BATCH)}
    until(lambda: published <= run.rows().keys(), "every row", report=run.log, seconds_max=60)
    run.end(signal.SIGINT)
    found = run.rows()
    assert found.keys() == published
    assert set(found.values()) == {1}
    repeated = sum(client.repeated for client in clients)
    assert repeated
    print(f"seed {seed}: {len(published)} rows answered, 0 lost, 0 doubled, {repeated} requests repeated")
