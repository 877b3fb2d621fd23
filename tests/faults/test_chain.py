"""Kafka, PostgreSQL and RocksDB in one pipeline, as in the example: whichever of them is killed, both systems have every row once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests.connectors.kafka.topics import json_rows
from tests.services.base import start_or_skip
from tests.services.kafka import KafkaBroker, started
from tests.services.postgres import Postgres
from tests.waiting import until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plant.py"
COMMAND = Path(sys.executable).with_name("fordstone")
SITES = {f"d{number}": ("north", "south")[number % 2] for number in range(10)}
SECONDS_MAX = 300.0


class Plant:
    """The servers, the example, and what it was sent."""

    def __init__(self, broker: KafkaBroker, postgres: Postgres, folder: Path) -> None:
        self.broker, self.postgres = broker, postgres
        self._folder = folder
        self._rng = Random(7)
        self.sent: list[tuple[str, float]] = []

    def send(self, count: int) -> None:
        rows = [(self._rng.choice(list(SITES)), self._rng.randrange(400) / 10) for _ in range(count)]
        self.sent += rows
        values = [msgspec.json.encode({"device": device, "temp": temp}) for device, temp in rows]
        self.broker.send("readings", values, partition=self._rng.randrange(2))

    @contextmanager
    def running(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = os.environ | self.postgres.environment | {"KAFKA_SERVERS": self.broker.servers}
        command: list[str | Path] = [
            COMMAND,
            "run",
            EXAMPLE,
            "--state",
            self._folder / "state",
            "--interval",
            "30ms",
            *options,
        ]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def totals(self) -> dict[str, int]:
        """What the database has, if the sink has made its table."""
        (made,) = self.postgres.rows("SELECT to_regclass('totals') IS NOT NULL")[0]
        return dict(self.postgres.rows("SELECT site, n FROM totals")) if made else {}

    def feed(self, process: subprocess.Popen[bytes]) -> None:
        """Send rows, and wait until the database has counted some of them."""
        before = self.totals()
        self.send(self._rng.randint(1, 60))
        alive = lambda: process.poll() is None  # noqa: E731 - a name for what follows
        until(lambda: self.totals() != before, "a commit", seconds_max=SECONDS_MAX, alive=alive, report=self.log)

    def log(self) -> str:
        return (self._folder / "log").read_text()[-5_000:]

    def finish(self) -> None:
        """Read the rest, and check."""
        with self.running("--available-now") as process:
            assert process.wait(SECONDS_MAX) == 0, self.log()
        self.check()

    def check(self) -> None:
        """Compare what both systems have with what was sent."""
        assert self.totals() == dict(Counter(SITES[device] for device, _ in self.sent))
        warmest = dict(self.postgres.rows("SELECT device, warmest FROM warmest"))
        assert warmest == {device: max(temp for one, temp in self.sent if one == device) for device, _ in self.sent}
        alarms = Counter((row["device"], row["temp"], row["site"]) for row in json_rows(self.broker, "alarms"))
        assert alarms == Counter((device, temp, SITES[device]) for device, temp in self.sent if temp > 30)


@pytest.fixture(name="plant")
def plant_fixture(tmp_path: Path) -> Iterator[Plant]:
    """Servers of the test's own, because it kills them."""
    postgres = start_or_skip(Postgres)
    try:
        broker = start_or_skip(lambda: started(tmp_path / "kafka"))
        broker.create("readings", partitions=2)
        broker.create("alarms")
        places = ", ".join(f"('{device}', '{site}')" for device, site in SITES.items())
        postgres.execute("CREATE TABLE devices (device text, site text)", f"INSERT INTO devices VALUES {places}")
        yield Plant(broker, postgres, tmp_path)
        broker.stop()
    finally:
        postgres.close()


@pytest.mark.parametrize(
    "lives",
    [
        [["pipeline"], ["broker", "database"], ["database", "pipeline"]],
        pytest.param(
            [[], ["broker"], ["database"], ["broker", "pipeline"], ["pipeline"], ["broker", "database", "pipeline"]]
            * 3,
            marks=pytest.mark.full,
        ),
    ],
    ids=["few", "many"],
)
def test_whatever_is_killed_both_systems_have_every_row_once(
    lives: list[list[str]], plant: Plant, faults: Callable[..., None]
) -> None:
    rng = Random(11)
    for victims in lives:
        with plant.running() as process:
            for _ in range(rng.randint(1, 5)):
                plant.feed(process)
            plant.send(rng.randint(1, 200))
            if "broker" in victims:
                plant.broker.kill()
            if "database" in victims:
                plant.postgres.kill()
            if "pipeline" in victims:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            faults(kills=len(victims))
            if "broker" in victims:
                plant.broker.start()
            if "database" in victims:
                plant.postgres.start()
            if "pipeline" not in victims:
                plant.feed(process)
    plant.finish()


@pytest.mark.spark
@pytest.mark.full
def test_on_spark_both_systems_have_every_row_once(plant: Plant) -> None:
    for _ in range(2):
        plant.send(100)
        with plant.running("--on", "spark", "--master", "local[2]", "--available-now") as process:
            assert process.wait(SECONDS_MAX) == 0, plant.log()
    plant.check()
