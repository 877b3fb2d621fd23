"""The contracts of sources and sinks, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.redis.streams import add, add_rows, key_of, rows_of
from tests.services.redis import RedisServer

from fordstone.connectors import redis_stream
from fordstone.connectors.base import ConnectorSpec, Sink, Source
from fordstone.connectors.redis.kind import EntryFormat
from fordstone.testing.contracts.connector import SinkContract, SourceContract


class TestRedisSource(SourceContract):
    server: RedisServer
    format: EntryFormat = "fields"

    @pytest.fixture(autouse=True)
    def _given(self, redis_server: RedisServer) -> Iterator[None]:
        self.server = redis_server
        with ExitStack() as self.opened:
            yield

    def source(self, spec: ConnectorSpec, *, bounded: bool = True) -> Source:
        source = super().source(spec, bounded=bounded)
        self.opened.callback(source.close)
        return source

    def rows(self, first: int, count: int) -> pl.DataFrame:
        numbers = range(first, first + count)
        columns = {
            "device": [f"d{number % 3}" if number % 4 else None for number in numbers],
            "ts": [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=number) for number in numbers],
            "temp": [number / 7 for number in numbers],
            "n": [-number * 10_000_000_000 for number in numbers],
        }
        return pl.DataFrame(columns, schema=self.schema.polars)

    def fill(self, place: Path) -> ConnectorSpec:
        keys = [key_of(place, name) for name in "ab"]
        add_rows(self.server, keys[0], self.rows(0, 12), format=self.format)
        add(
            self.server,
            keys[0],
            [{"temp": "warm"}, {"device": b"\xff"}] if self.format == "fields" else [{"value": "{"}, {"x": 1}],
        )
        add_rows(self.server, keys[0], self.rows(12, 13), format=self.format)
        add_rows(self.server, keys[1], self.rows(100, 4), format=self.format)
        return redis_stream(keys, url=self.server.url, format=self.format)

    def expected(self) -> Sequence[pl.DataFrame]:
        return [self.rows(0, 25), self.rows(100, 4)]

    def grow(self, place: Path) -> pl.DataFrame:
        more = self.rows(200, 3)
        add_rows(self.server, key_of(place, "a"), more, format=self.format)
        return more


class TestRedisSourceOfJson(TestRedisSource):
    format = "json"


class TestRedisSink(SinkContract):
    takes_rows_back = False
    server: RedisServer
    format: EntryFormat = "fields"

    @pytest.fixture(autouse=True)
    def _given(self, redis_server: RedisServer) -> Iterator[None]:
        self.server = redis_server
        with ExitStack() as self.opened:
            yield

    def open(self, place: Path, **given: Any) -> Sink:
        return self.to_be_closed(super().open(place, **given))

    def open_as(self, place: Path, hub: int, local: int = 1, **given: Any) -> Sink:
        return self.to_be_closed(super().open_as(place, hub, local, **given))

    def to_be_closed(self, sink: Sink) -> Sink:
        self.opened.callback(sink.close)
        return sink

    def spec(self, place: Path) -> ConnectorSpec:
        return redis_stream(key_of(place), url=self.server.url, format=self.format)

    def seen(self, place: Path) -> pl.DataFrame:
        return rows_of(self.server, key_of(place), self.schema, format=self.format)


class TestRedisSinkOfJson(TestRedisSink):
    format = "json"
