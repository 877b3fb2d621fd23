"""The contracts of sources and sinks, on a real broker. Messages are in transactions, some of which were aborted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from tests.connectors.kafka.topics import in_transactions, json_rows, topic_of, values_of
from tests.services.kafka import KafkaBroker

from fordstone.connectors import kafka
from fordstone.connectors.base import ConnectorSpec
from fordstone.testing.contracts.connector import SinkContract, SourceContract


class TestKafkaSource(SourceContract):
    arrives_late = True
    broker: KafkaBroker

    @pytest.fixture(autouse=True)
    def _given(self, kafka_broker: KafkaBroker) -> None:
        self.broker = kafka_broker

    def rows(self, first: int, count: int) -> pl.DataFrame:
        columns = {
            "device": [f"d{number % 3}" for number in range(first, first + count)],
            "ts": [
                datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=number)
                for number in range(first, first + count)
            ],
            "temp": [number / 4 for number in range(first, first + count)],
            "n": list(range(first, first + count)),
        }
        return pl.DataFrame(columns, schema=self.schema.polars)

    def send(self, topic: str) -> None:
        """25 rows and one that is none."""
        good = values_of(self.rows(0, 25))
        lost = values_of(self.rows(900, 3))
        batches = [
            (lost, False),
            (good[:10], True),
            (lost, False),
            (lost, False),
            ([*good[10:12], b"{no row", *good[12:]], True),
            (lost, False),
        ]
        in_transactions(self.broker, topic, batches)

    def fill(self, place: Path) -> ConnectorSpec:
        topic = self.broker.create(topic_of(place), partitions=2)
        self.send(topic)
        self.broker.send(topic, values_of(self.rows(100, 4)), partition=1)
        return kafka(topic, servers=self.broker.servers)

    def expected(self) -> Sequence[pl.DataFrame]:
        return [self.rows(0, 25), self.rows(100, 4)]

    def grow(self, place: Path) -> pl.DataFrame:
        more = self.rows(200, 3)
        in_transactions(self.broker, topic_of(place), [(values_of(self.rows(900, 2)), False), (values_of(more), True)])
        return more


class TestKafkaSink(SinkContract):
    takes_rows_back = False
    broker: KafkaBroker

    @pytest.fixture(autouse=True)
    def _given(self, kafka_broker: KafkaBroker, tmp_path: Path) -> None:
        self.broker = kafka_broker
        kafka_broker.create(topic_of(tmp_path))

    def spec(self, place: Path) -> ConnectorSpec:
        return kafka(topic_of(place), servers=self.broker.servers, key="device")

    def seen(self, place: Path) -> pl.DataFrame:
        rows = json_rows(self.broker, topic_of(place))
        hidden = [name for name in ("__id", "__op") if any(name in row for row in rows)]
        schema = {**self.schema.polars, "ts": pl.String(), **dict.fromkeys(hidden, pl.String())}
        frame = pl.DataFrame([[row.get(name) for name in schema] for row in rows], schema=schema, orient="row")
        return frame.with_columns(pl.col("ts").str.to_datetime(time_unit="us", time_zone="UTC"))
