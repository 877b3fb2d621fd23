"""Pages about other systems run against their real servers. The address is in the environment, as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.blocks import REPOSITORY, Page
from tests.services.kafka import KafkaBroker


def run(page: str, directory: Path) -> None:
    with Page(name=page, directory=directory) as runner:
        runner.run_all((REPOSITORY / page).read_text())


def test_the_page_about_kafka_runs(kafka_broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_SERVERS", kafka_broker.servers)
    with kafka_broker.removed("lines", "counts", "orders"):
        run("docs/how-to/kafka.md", tmp_path)
