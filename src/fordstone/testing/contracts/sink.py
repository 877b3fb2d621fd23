# ruff: noqa: S101, D102 - a suite of tests: it asserts, and the names of its tests are the sentences
"""The contract of `connectors.Sink`, to be run on every sink that can be looked at.

Derive a class whose name begins with `Test`, say how the sink is opened and what can be seen in it, and pytest runs the
promises of the seam on it. A crash is a sink that is never closed, and another opened in its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
from polars.testing import assert_frame_equal

from fordstone.connectors.connector import ConnectorSpec, Delivery, Sink, SinkStream
from fordstone.connectors.registry import open_sink, sink_delivery
from fordstone.model.schema import Schema

_START = datetime(2026, 1, 1, tzinfo=UTC)


class SinkContract(ABC):
    """What every sink promises."""

    schema = Schema.of({"device": "string", "ts": "timestamp", "temp": "double", "n": "bigint"})

    @abstractmethod
    def spec(self, place: Path) -> ConnectorSpec:
        """The sink under test; the same one for the same place."""

    @abstractmethod
    def seen(self, place: Path) -> pl.DataFrame:
        """What a reader of the far end sees now, in the order in which it was let out."""

    def stream(self, *, upsert_key: tuple[str, ...] | None = None) -> SinkStream:
        """What the suite writes."""
        return SinkStream(step="results", schema=self.schema, upsert_key=upsert_key)

    def open(self, place: Path, *, upsert_key: tuple[str, ...] | None = None) -> Sink:
        """Open the sink, as the engine does after each start."""
        return open_sink(self.spec(place), self.stream(upsert_key=upsert_key))

    def rows(self, first: int, count: int) -> pl.DataFrame:
        """Some rows, the same for the same numbers."""
        numbers = range(first, first + count)
        columns = {
            "device": [f"d{number % 3}" if number % 5 else None for number in numbers],
            "ts": [_START + timedelta(milliseconds=number) for number in numbers],
            "temp": [number / 8 if number % 4 else None for number in numbers],
            "n": [number * 10_000_000_000 for number in numbers],
        }
        return pl.DataFrame(columns, schema=self.schema.polars)

    def test_delivery_is_what_was_said_while_the_pipeline_was_built(self, tmp_path: Path) -> None:
        assert self.open(tmp_path).delivery == sink_delivery(self.spec(tmp_path))

    def test_released_epochs_are_seen_in_order(self, tmp_path: Path) -> None:
        sink = self.open(tmp_path)
        for epoch in range(1, 12):
            sink.release(epoch, self.rows(epoch * 10, 3))
        sink.close()
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(epoch * 10, 3) for epoch in range(1, 12)]))

    def test_a_released_epoch_is_seen_at_once(self, tmp_path: Path) -> None:
        sink = self.open(tmp_path)
        sink.release(1, self.rows(0, 4))
        assert_frame_equal(self.seen(tmp_path), self.rows(0, 4))

    def test_an_epoch_that_is_released_again_is_seen_once(self, tmp_path: Path) -> None:
        sink = self.open(tmp_path)
        if sink.delivery is not Delivery.EXACTLY_ONCE:
            return
        for epoch in (1, 2, 2):
            sink.release(epoch, self.rows(epoch * 10, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(10, 3), self.rows(20, 3)]))

    def test_the_last_epoch_is_released_again_after_a_crash_and_seen_once(self, tmp_path: Path) -> None:
        crashed = self.open(tmp_path)
        if crashed.delivery is not Delivery.EXACTLY_ONCE:
            return
        crashed.release(1, self.rows(10, 3))
        crashed.release(2, self.rows(20, 3))
        sink = self.open(tmp_path)
        sink.release(2, self.rows(20, 3))
        sink.release(3, self.rows(30, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(epoch * 10, 3) for epoch in (1, 2, 3)]))

    def test_epochs_without_rows_change_nothing_however_often_they_come(self, tmp_path: Path) -> None:
        sink = self.open(tmp_path)
        sink.release(1, self.rows(0, 2))
        for _ in range(2):
            sink.release(2, self.rows(0, 0))
        sink.release(3, self.rows(2, 2))
        self.open(tmp_path).release(4, self.rows(0, 0))
        assert_frame_equal(self.seen(tmp_path), self.rows(0, 4))

    def test_written_rows_are_seen_at_once_and_in_order(self, tmp_path: Path) -> None:
        sink = self.open(tmp_path)
        sink.write(self.rows(0, 3))
        assert_frame_equal(self.seen(tmp_path), self.rows(0, 3))
        sink.write(self.rows(0, 0))
        sink.write(self.rows(3, 3))
        assert_frame_equal(self.seen(tmp_path), self.rows(0, 6))

    def test_written_rows_of_one_opening_come_behind_those_of_the_one_before(self, tmp_path: Path) -> None:
        self.open(tmp_path).write(self.rows(0, 3))
        sink = self.open(tmp_path)
        sink.write(self.rows(3, 3))
        sink.close()
        assert_frame_equal(self.seen(tmp_path), self.rows(0, 6))

    def test_ids_and_changes_are_passed_on(self, tmp_path: Path) -> None:
        sink = self.open(tmp_path, upsert_key=("device",))
        sink.release(1, self.rows(0, 2).with_columns(pl.lit("upsert").alias("__op")))
        sink.release(2, self.rows(0, 1).with_columns(pl.lit("delete").alias("__op")))
        assert self.seen(tmp_path)["__op"].to_list() == ["upsert", "upsert", "delete"]
        sink.write(self.rows(0, 1).with_columns(pl.lit("p:0:0").alias("__id"), pl.lit("upsert").alias("__op")))
        assert self.seen(tmp_path)["__id"].to_list() == [None, None, None, "p:0:0"]
