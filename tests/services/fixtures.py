"""One server of each kind per test run, started when the first test asks for it. Fault tests that end servers start their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.services.base import start_or_skip

if TYPE_CHECKING:
    from tests.services.kafka import KafkaBroker


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    from tests.services.kafka import started

    broker = start_or_skip(lambda: started(tmp_path_factory.mktemp("kafka")))
    yield broker
    broker.stop()
