"""One server of each kind per test run, started when the first test asks for it. Fault tests that end servers start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.services.base import start_or_skip
from tests.services.kafka import KafkaBroker
from tests.services.kafka import started as started_kafka
from tests.services.mosquitto import Mosquitto
from tests.services.postgres import Postgres


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    broker = start_or_skip(lambda: started_kafka(tmp_path_factory.mktemp("kafka")))
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def mosquitto() -> Iterator[Mosquitto]:
    server = start_or_skip(Mosquitto)
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = start_or_skip(Postgres)
    yield server
    server.close()
