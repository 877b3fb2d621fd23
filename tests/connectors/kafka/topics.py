"""Topics for tests: names, rows as messages, and messages as rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from tests.services.kafka import KafkaBroker

from fordstone.connectors.files.rows import encoded

TIMEOUT_S = 20.0


def topic_of(place: Path, name: str = "t") -> str:
    """A topic that only one test uses."""
    return re.sub(r"[^\w.-]", "-", f"{name}-{place.parent.name}-{place.name}")[-200:]


def values_of(frame: pl.DataFrame) -> list[bytes]:
    return encoded(frame, "jsonl").splitlines()


def in_transactions(broker: KafkaBroker, topic: str, batches: Sequence[tuple[Sequence[bytes], bool]]) -> None:
    """Send batches of values to partition 0, each in a transaction that is committed, or aborted."""
    with broker.producer(transactional_id=f"tests.{topic}") as producer:
        producer.init_transactions(TIMEOUT_S)
        for values, commit in batches:
            producer.begin_transaction()
            for value in values:
                producer.produce(topic, value=value, partition=0)
            producer.flush(TIMEOUT_S)
            (producer.commit_transaction if commit else producer.abort_transaction)(TIMEOUT_S)
    broker.settle(topic)


def json_rows(broker: KafkaBroker, topic: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(value) for value in broker.values(topic)]
