"""The contracts of sources and sinks, on a real broker. Messages are in transactions, some of which were aborted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from tests.connectors.kafka.topics import in_transactions, json_rows, topic_of, values_of
from tests.services.kafka import KafkaBroker
from tests.services.registry import Registry

from fordstone.connectors import kafka
from fordstone.connectors.avro.decode import Decoder
from fordstone.connectors.avro.encode import Encoder
from fordstone.connectors.avro.schema import parse, schema_of
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

    def values(self, frame: pl.DataFrame) -> list[bytes]:
        return values_of(frame)

    def spec(self, topic: str) -> ConnectorSpec:
        return kafka(topic, servers=self.broker.servers)

    def send(self, topic: str) -> None:
        """25 rows and one that is none."""
        good = self.values(self.rows(0, 25))
        lost = self.values(self.rows(900, 3))
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
        self.broker.send(topic, self.values(self.rows(100, 4)), partition=1)
        return self.spec(topic)

    def expected(self) -> Sequence[pl.DataFrame]:
        return [self.rows(0, 25), self.rows(100, 4)]

    def grow(self, place: Path) -> pl.DataFrame:
        more = self.rows(200, 3)
        lost = self.values(self.rows(900, 2))
        in_transactions(self.broker, topic_of(place), [(lost, False), (self.values(more), True)])
        return more


@pytest.mark.full
class TestAvroSource(TestKafkaSource):
    """The same with Avro and a schema registry."""

    @pytest.fixture(autouse=True)
    def _with_registry(self, registry: Registry) -> None:
        self.registry = registry
        text = schema_of(self.schema, "contract")
        self.schema_id = registry.register("contract-value", text)
        self.encoder = Encoder(parse(text), self.schema)

    def values(self, frame: pl.DataFrame) -> list[bytes]:
        return self.encoder.encode(frame, b"\0" + self.schema_id.to_bytes(4, "big"))

    def spec(self, topic: str) -> ConnectorSpec:
        return kafka(topic, servers=self.broker.servers, format="avro", schema_registry=self.registry.url)


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


@pytest.mark.full
class TestAvroSink(TestKafkaSink):
    """The same with Avro and a schema registry. Ids and changes of rows are headers."""

    @pytest.fixture(autouse=True)
    def _with_registry(self, registry: Registry) -> None:
        self.registry = registry

    def spec(self, place: Path) -> ConnectorSpec:
        return kafka(
            topic_of(place),
            servers=self.broker.servers,
            key="device",
            format="avro",
            schema_registry=self.registry.url,
        )

    def seen(self, place: Path) -> pl.DataFrame:
        messages = self.broker.messages(topic_of(place))
        if not messages:
            return self.schema.empty()
        latest = self.registry.latest(f"{topic_of(place)}-value")
        found = Decoder(parse(latest["schema"]), self.schema).decode([message.value()[5:] for message in messages])
        assert not found.failed
        headers = [dict(message.headers() or ()) for message in messages]
        hidden = [name for name in ("__id", "__op") if any(name in one for one in headers)]
        return found.frame.with_columns(
            pl.Series(name, [one[name].decode() if name in one else None for one in headers], dtype=pl.String)
            for name in hidden
        )
