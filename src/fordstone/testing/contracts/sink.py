# ruff: noqa: S101 - a suite of tests: it asserts, and the names of its tests are the sentences
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

from fordstone.connectors.base import ConnectorSpec, Delivery, PartedSink, PartWriter, Sink, SinkStream
from fordstone.connectors.compare import same_rows
from fordstone.connectors.registry import open_parts, open_sink, sink_delivery
from fordstone.lang.schema import Schema

_START = datetime(2026, 1, 1, tzinfo=UTC)


class SinkContract(ABC):
    """What every sink promises."""

    schema = Schema.of({"device": "string", "ts": "timestamp", "temp": "double", "n": "bigint"})
    applies_upserts = False
    """Whether a row of a stream of upserts replaces the one with its key, instead of being kept as a change."""

    @abstractmethod
    def spec(self, place: Path) -> ConnectorSpec:
        """The sink under test; the same one for the same place."""

    @abstractmethod
    def seen(self, place: Path) -> pl.DataFrame:
        """What a reader of the system sees now, in the order of release."""

    def stream(self, *, upsert_key: tuple[str, ...] | None = None) -> SinkStream:
        """What the suite writes."""
        return SinkStream(step="results", schema=self.schema, upsert_key=upsert_key)

    def open(self, place: Path, *, upsert_key: tuple[str, ...] | None = None) -> Sink:
        """Open the sink, as the engine does after each start."""
        return open_sink(self.spec(place), self.stream(upsert_key=upsert_key))

    def exactly_once(self, place: Path) -> bool:
        """Whether releasing an epoch a second time must change nothing."""
        return sink_delivery(self.spec(place)) is Delivery.EXACTLY_ONCE

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

    def open_parted(self, place: Path) -> tuple[PartedSink, PartWriter] | None:
        """Open the sink and a writer of parts, as an engine of several processes does; None if the kind has no parts."""
        sink = self.open(place)
        writer = open_parts(self.spec(place), self.stream())
        if writer is None:
            return None
        assert isinstance(sink, PartedSink)
        return sink, writer

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
        if not self.exactly_once(tmp_path):
            return
        for epoch in (1, 2, 2):
            sink.release(epoch, self.rows(epoch * 10, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(10, 3), self.rows(20, 3)]))

    def test_the_last_epoch_is_released_again_after_a_crash_and_seen_once(self, tmp_path: Path) -> None:
        crashed = self.open(tmp_path)
        if not self.exactly_once(tmp_path):
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

    def test_written_rows_of_one_opening_come_after_those_of_the_previous_one(self, tmp_path: Path) -> None:
        self.open(tmp_path).write(self.rows(0, 3))
        sink = self.open(tmp_path)
        sink.write(self.rows(3, 3))
        sink.close()
        assert_frame_equal(self.seen(tmp_path), self.rows(0, 6))

    def test_parts_are_seen_together_when_they_are_released_and_not_before(self, tmp_path: Path) -> None:
        if (opened := self.open_parted(tmp_path)) is None:
            return
        sink, writer = opened
        for epoch in (1, 2):
            parts = [writer.write(epoch, f"a{epoch}", n, self.rows(epoch * 100 + n * 10, n + 1)) for n in (2, 0, 1)]
            assert [part.rows for part in parts] == [3, 1, 2]
            assert self.seen(tmp_path).height == 6 * (epoch - 1)
            sink.release_parts(epoch, f"a{epoch}", parts)
            assert self.seen(tmp_path).height == 6 * epoch
        sink.release(3, self.rows(300, 2))
        wanted = [self.rows(epoch * 100 + n * 10, n + 1) for epoch in (1, 2) for n in range(3)]
        assert same_rows(self.seen(tmp_path), pl.concat([*wanted, self.rows(300, 2)]))

    def test_an_epoch_is_seen_once_however_it_was_cut_when_it_is_released_again(self, tmp_path: Path) -> None:
        if self.open_parted(tmp_path) is None or not self.exactly_once(tmp_path):
            return
        cuts = ([(0, 6)], [(0, 2), (2, 4)], [(5, 1), (1, 4), (0, 1)], [(0, 6)])
        for number, cut in enumerate([*cuts, *reversed(cuts)]):
            opened = self.open_parted(tmp_path)
            assert opened is not None
            sink, writer = opened
            if len(cut) == 1:
                sink.release(1, self.rows(*cut[0]))
            else:
                parts = [writer.write(1, f"a{number}", n, self.rows(*some)) for n, some in enumerate(cut)]
                sink.release_parts(1, f"a{number}", parts)
            assert same_rows(self.seen(tmp_path), self.rows(0, 6))
        parts = [writer.write(2, "b", n, self.rows(10 + n, 1)) for n in range(3)]
        for _ in range(2):
            sink.release_parts(2, "b", parts)
            sink, writer = self.open_parted(tmp_path) or (sink, writer)
            parts = [writer.write(2, "b", n, self.rows(12 - n, 1)) for n in range(3)]
        sink.release(2, self.rows(10, 3))
        assert same_rows(self.seen(tmp_path), pl.concat([self.rows(0, 6), self.rows(10, 3)]))

    def test_a_part_that_was_written_by_two_tries_is_seen_once(self, tmp_path: Path) -> None:
        if (opened := self.open_parted(tmp_path)) is None:
            return
        sink, writer = opened
        writer.write(1, "a", 0, self.rows(0, 3))
        parts = [writer.write(1, "a", 0, self.rows(0, 3)), writer.write(1, "a", 1, self.rows(3, 1))]
        sink.release_parts(1, "a", parts)
        assert same_rows(self.seen(tmp_path), self.rows(0, 4))

    def test_parts_that_are_not_released_are_never_seen(self, tmp_path: Path) -> None:
        if (opened := self.open_parted(tmp_path)) is None:
            return
        sink, writer = opened
        writer.write(1, "given-up", 0, self.rows(100, 3))
        parts = [writer.write(1, "a", 0, self.rows(0, 2))]
        writer.write(1, "a", 7, self.rows(200, 3))
        writer.write(2, "given-up", 0, self.rows(300, 3))
        sink.release_parts(1, "a", parts)
        writer.write(1, "given-up", 1, self.rows(400, 3))
        assert same_rows(self.seen(tmp_path), self.rows(0, 2))
        sink, writer = self.open_parted(tmp_path) or opened
        sink.release_parts(2, "b", [writer.write(2, "b", 0, self.rows(2, 2))])
        assert same_rows(self.seen(tmp_path), self.rows(0, 4))

    def test_epochs_without_parts_or_with_empty_ones_change_nothing(self, tmp_path: Path) -> None:
        if (opened := self.open_parted(tmp_path)) is None:
            return
        sink, writer = opened
        sink.release_parts(1, "a", [])
        writer.write(2, "a", 1, self.rows(100, 2))
        for attempt in "ab":
            sink.release_parts(2, attempt, [writer.write(2, attempt, 0, self.rows(0, 0))])
        assert self.seen(tmp_path).height == 0
        sink.release_parts(3, "a", [writer.write(3, "a", n, self.rows(n, n)) for n in (0, 1)])
        assert same_rows(self.seen(tmp_path), self.rows(1, 1))

    def test_ids_are_passed_on(self, tmp_path: Path) -> None:
        sink = self.open(tmp_path)
        sink.write(self.rows(0, 2).with_columns(pl.Series("__id", ["p:0:0", "p:1:0"])))
        sink.write(self.rows(2, 1).with_columns(pl.lit("p:2:0").alias("__id")))
        assert_frame_equal(self.seen(tmp_path).drop("__id"), self.rows(0, 3))
        assert self.seen(tmp_path)["__id"].to_list() == ["p:0:0", "p:1:0", "p:2:0"]

    def test_upserts_and_deletes_find_the_row_of_their_key_null_included(self, tmp_path: Path) -> None:
        if not self.applies_upserts:
            return

        def changes(first: int, op: str, *devices: str | None) -> pl.DataFrame:
            named = pl.Series("device", devices, dtype=pl.String)
            return self.rows(first, len(devices)).with_columns(named, pl.lit(op).alias("__op"))

        sink = self.open(tmp_path, upsert_key=("device",))
        epochs = [
            changes(0, "upsert", "a", None, "c", "a"),
            changes(10, "upsert", None, "d"),
            pl.concat([changes(20, "delete", "a", "nobody"), changes(30, "upsert", "c")]),
            changes(40, "delete", None),
            changes(50, "upsert", "a", None),
        ]
        for epoch, frame in enumerate(epochs, start=1):
            sink.release(epoch, frame)
            sink = self.open(tmp_path, upsert_key=("device",))
            sink.release(epoch, frame)
            past = pl.concat(epochs[:epoch]).unique("device", keep="last")
            wanted = past.filter(pl.col("__op") == "upsert").drop("__op")
            assert same_rows(self.seen(tmp_path), wanted)
        sink.write(changes(60, "upsert", "a"))
        assert self.seen(tmp_path).filter(device="a")["n"].to_list() == self.rows(60, 1)["n"].to_list()

    def test_ids_and_changes_are_passed_on(self, tmp_path: Path) -> None:
        if self.applies_upserts:
            return
        sink = self.open(tmp_path, upsert_key=("device",))
        sink.release(1, self.rows(0, 2).with_columns(pl.lit("upsert").alias("__op")))
        sink.release(2, self.rows(0, 1).with_columns(pl.lit("delete").alias("__op")))
        assert self.seen(tmp_path)["__op"].to_list() == ["upsert", "upsert", "delete"]
        sink.write(self.rows(0, 1).with_columns(pl.lit("p:0:0").alias("__id"), pl.lit("upsert").alias("__op")))
        assert self.seen(tmp_path)["__id"].to_list() == [None, None, None, "p:0:0"]
