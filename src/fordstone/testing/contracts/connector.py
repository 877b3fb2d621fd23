# ruff: noqa: S101 - suites of tests: they assert, and the names of the tests are the sentences
"""The contracts of `connectors.Source`, with its `Reader`, and of `connectors.Sink`, to be run on every connector.

Derive a class whose name begins with `Test`, say how the source is filled, or how the sink is opened and what can be seen in
it, and pytest runs the promises of the seam on it. A crash is a sink that is never closed, and another opened in its place.
`read_all` is of use to other tests of sources too.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
from polars.testing import assert_frame_equal

from fordstone.connectors.base import (
    Chunk,
    ConnectorSpec,
    Delivery,
    PartedSink,
    PartWriter,
    Reader,
    Rejected,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.connectors.compare import same_rows
from fordstone.connectors.registry import fences, open_parts, open_sink, open_source, sink_delivery
from fordstone.errors import FencedError, SinkError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.lease import Fence

SCHEMA = Schema.of({"device": "string", "ts": "timestamp", "temp": "double", "n": "bigint"})
"""The columns that both suites read and write."""
CHUNK_ROWS = (1, 2, 3, 7, 64, 100_000)
"""The sizes in which the suite reads."""
EMPTY_READS_MAX = 10_000
"""Maximum number of reads before the suite decides that the input has no end."""
POSITIONS_MAX = 12
"""Number of positions of a partition from which the suite resumes."""
ALL_ROWS = 2**62
"""More than any source has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Everything that a reader returned, and its position after each chunk."""

    rows: pl.DataFrame
    row_positions: list[int]
    rejected: list[Rejected]
    positions: list[int]
    ended: bool


def read_all(
    source: Source,
    partition: PartitionId,
    schema: Schema,
    *,
    position: int = 0,
    rows_max: int | Callable[[], int] = 100_000,
    until: int | None = None,
    with_positions: bool = True,
) -> ReadBack:
    """Read a partition until it ends, reaches `until`, or has nothing now. `rows_max` may be another for each read."""
    reader = source.open(partition, Position(position), with_positions=with_positions)
    try:
        chunks = list(_chunks(reader, rows_max, until))
    finally:
        reader.close()
    return ReadBack(
        rows=pl.concat([schema.empty(), *(chunk.frame for chunk in chunks)]),
        row_positions=[
            place for chunk in chunks if chunk.row_positions is not None for place in chunk.row_positions.to_list()
        ],
        rejected=[rejected for chunk in chunks for rejected in chunk.rejected],
        positions=[int(chunk.position) for chunk in chunks],
        ended=bool(chunks) and chunks[-1].ended,
    )


def _chunks(reader: Reader, rows_max: int | Callable[[], int], until: int | None) -> Iterator[Chunk]:
    for _ in range(EMPTY_READS_MAX):
        rows = rows_max if isinstance(rows_max, int) else rows_max()
        chunk = reader.read(rows, None if until is None else Position(until))
        if chunk is None:
            return
        yield chunk
        if chunk.ended or (until is not None and chunk.position >= until):
            return
    raise AssertionError(f"no end after {EMPTY_READS_MAX} reads")


@contextmanager
def _raises(kind: type[Exception], says: str = "") -> Iterator[None]:
    """Expect an error whose text has a match of `says`. The suite needs no more of pytest than that it is run by it."""
    text = None
    try:
        yield
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind.__name__} was raised"
    assert re.search(says, text), f"{says!r} is not in: {text}"


class SourceContract(ABC):
    """What every source promises."""

    schema = SCHEMA
    partitions_min = 2
    """1 for a kind of source that has one partition only."""

    @abstractmethod
    def fill(self, place: Path) -> ConnectorSpec:
        """Make input of at least `partitions_min` partitions, of which one has at least ten rows. Called once in each test."""

    @abstractmethod
    def expected(self) -> Sequence[pl.DataFrame] | None:
        """The rows of each partition that `fill` makes, in the order of partitions; None if only the source knows."""

    @abstractmethod
    def grow(self, place: Path) -> pl.DataFrame | None:
        """Add rows to the first partition and give them; None if this source cannot grow."""

    def source(self, spec: ConnectorSpec, *, bounded: bool = True) -> Source:
        return open_source(spec, SourceOptions(schema=self.schema, bounded=bounded))

    def test_partitions_are_the_same_in_the_same_order_each_time(self, tmp_path: Path) -> None:
        spec = self.fill(tmp_path)
        source = self.source(spec)
        names = list(source.partitions())
        assert len(names) >= self.partitions_min
        assert len(set(names)) == len(names)
        assert list(source.partitions()) == names
        assert list(self.source(spec).partitions()) == names

    def test_rows_have_exactly_the_declared_columns_and_types(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        for partition in source.partitions():
            reader = source.open(partition, Position(0), with_positions=False)
            for chunk in _chunks(reader, 5, None):
                assert chunk.frame.schema == self.schema.polars
                assert chunk.row_positions is None
            reader.close()

    def test_what_was_put_in_comes_out(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        expected = self.expected()
        if expected is None:
            expected = [read_all(source, partition, self.schema).rows for partition in source.partitions()]
        assert len(expected) == len(source.partitions())
        for partition, rows in zip(source.partitions(), expected, strict=True):
            assert_frame_equal(read_all(source, partition, self.schema).rows, rows)

    def test_any_chunking_gives_the_same_rows_and_rejections(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        for partition in source.partitions():
            whole = read_all(source, partition, self.schema)
            for rows_max in CHUNK_ROWS:
                cut = read_all(source, partition, self.schema, rows_max=rows_max)
                assert_frame_equal(cut.rows, whole.rows)
                assert cut.rejected == whole.rejected
                assert cut.row_positions == whole.row_positions
                assert cut.positions[-1] == whole.positions[-1]

    def test_reading_from_each_position_gives_exactly_what_follows(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        for partition in source.partitions():
            whole = read_all(source, partition, self.schema)
            for position in self._positions(source, partition):
                rest = read_all(source, partition, self.schema, position=position, rows_max=5)
                before = sum(place < position for place in whole.row_positions)
                assert_frame_equal(rest.rows, whole.rows.slice(before))
                assert rest.row_positions == whole.row_positions[before:]
                assert rest.rejected == [one for one in whole.rejected if one.position >= position]

    def test_until_is_reached_and_never_passed(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        for partition in source.partitions():
            whole = read_all(source, partition, self.schema)
            for until in filter(None, self._positions(source, partition)):  # none at 0, where reading begins
                for rows_max in (2, 100_000):
                    head = read_all(source, partition, self.schema, rows_max=rows_max, until=until)
                    assert head.positions[-1] == until
                    assert_frame_equal(head.rows, whole.rows.head(sum(place < until for place in whole.row_positions)))

    def test_nothing_comes_once_until_is_reached(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        partition = source.partitions()[0]
        until = self._positions(source, partition)[0]
        reader = source.open(partition, Position(0), with_positions=False)
        list(_chunks(reader, 100_000, until))
        assert reader.read(10, Position(until)) is None
        reader.close()

    def test_row_positions_grow_and_lie_within_what_was_read(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        for partition in source.partitions():
            reader = source.open(partition, Position(0), with_positions=True)
            start, last = 0, -1
            for chunk in _chunks(reader, 3, None):
                assert chunk.row_positions is not None
                assert chunk.row_positions.dtype == pl.Int64
                assert len(chunk.row_positions) == chunk.frame.height
                for place in chunk.row_positions.to_list():
                    assert start <= place < chunk.position
                    assert place > last
                    last = place
                start = int(chunk.position)
            reader.close()

    def test_reading_from_a_rows_position_begins_with_that_row(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        for partition in source.partitions():
            whole = read_all(source, partition, self.schema)
            for number in range(0, whole.rows.height, max(1, whole.rows.height // 10)):
                rest = read_all(source, partition, self.schema, position=whole.row_positions[number])
                assert_frame_equal(rest.rows, whole.rows.slice(number))

    def test_bounded_input_ends_and_stays_ended(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path))
        for partition in source.partitions():
            reader = source.open(partition, Position(0), with_positions=False)
            chunks = list(_chunks(reader, 100_000, None))
            assert chunks[-1].ended
            after = reader.read(10)
            assert after is None or (after.ended and after.frame.is_empty() and after.position == chunks[-1].position)
            reader.close()
            again = read_all(source, partition, self.schema, position=int(chunks[-1].position))
            assert again.ended
            assert again.rows.is_empty()
            assert not again.rejected

    def test_input_that_grows_is_read_on(self, tmp_path: Path) -> None:
        source = self.source(self.fill(tmp_path), bounded=False)
        partition = source.partitions()[0]
        reader = source.open(partition, Position(0), with_positions=False)
        before = list(_chunks(reader, 100_000, None))
        added = self.grow(tmp_path)
        if added is None:
            reader.close()
            return
        assert not before[-1].ended
        after = pl.concat([self.schema.empty(), *(chunk.frame for chunk in _chunks(reader, 2, None))])
        assert_frame_equal(after, added)
        reader.close()
        resumed = read_all(source, partition, self.schema, position=int(before[-1].position))
        assert_frame_equal(resumed.rows, added)

    def test_planned_reads_give_together_what_one_read_gives(self, tmp_path: Path) -> None:
        spec = self.fill(tmp_path)
        for partition in self.source(spec).partitions():
            for number, size in enumerate(CHUNK_ROWS):
                assert self._check_planned(spec, partition, size, seed=number, bounded=True)

    def test_planned_reads_of_input_that_may_grow_give_what_one_read_gives(self, tmp_path: Path) -> None:
        spec = self.fill(tmp_path)
        for partition in self.source(spec, bounded=False).partitions():
            for number, size in enumerate(CHUNK_ROWS):
                self._check_planned(spec, partition, size, seed=number, bounded=False)

    def test_all_there_is_may_be_planned_at_once(self, tmp_path: Path) -> None:
        spec = self.fill(tmp_path)
        source = self.source(spec)
        for partition in source.partitions():
            end = read_all(source, partition, self.schema).positions[-1]
            for position in (0, end):
                planned = self.source(spec).plan_read(partition, Position(position), ALL_ROWS)
                assert (planned.position, planned.ended) == (end, True)

    def test_a_planned_read_stays_the_same_when_input_grows(self, tmp_path: Path) -> None:
        spec = self.fill(tmp_path)
        planner = self.source(spec, bounded=False)
        partition = planner.partitions()[0]
        before = read_all(planner, partition, self.schema)
        planned = planner.plan_read(partition, Position(0), ALL_ROWS)
        assert planned.position == before.positions[-1]
        added = self.grow(tmp_path)
        for rows_max in (2, 100_000):
            again = self.source(spec, bounded=False)
            head = read_all(again, partition, self.schema, rows_max=rows_max, until=int(planned.position))
            assert_frame_equal(head.rows, before.rows)
        if added is None:
            return
        assert not planned.ended
        onward = planner.plan_read(partition, planned.position, ALL_ROWS)
        rest = read_all(
            planner, partition, self.schema, position=int(planned.position), rows_max=3, until=int(onward.position)
        )
        assert_frame_equal(rest.rows, added)

    def _check_planned(
        self, spec: ConnectorSpec, partition: PartitionId, size: int, *, seed: int, bounded: bool
    ) -> bool:
        """Plan with one source and read with others, about `size` rows at a time; compare with one read.

        Return whether the partition ended.
        """
        drawn = random.Random(seed)
        whole = read_all(self.source(spec, bounded=bounded), partition, self.schema)
        planner, position, ended = self.source(spec, bounded=bounded), Position(0), False
        pieces: list[ReadBack] = []
        for _ in range(EMPTY_READS_MAX):
            rows = drawn.randint(1, 2 * size)
            planned = planner.plan_read(partition, position, rows)
            assert planned.position >= position
            assert planned.ended or not ended
            ended = planned.ended
            if planned.position == position:
                break
            piece = read_all(
                self.source(spec, bounded=bounded),
                partition,
                self.schema,
                position=position,
                rows_max=lambda: drawn.randint(1, 2 * size),
                until=planned.position,
            )
            assert piece.positions[-1] == planned.position
            assert piece.rows.height + len(piece.rejected) <= 2 * rows
            pieces.append(piece)
            position = planned.position
        else:
            raise AssertionError(f"no end after {EMPTY_READS_MAX} plans")
        assert_frame_equal(pl.concat([self.schema.empty(), *(piece.rows for piece in pieces)]), whole.rows)
        assert [place for piece in pieces for place in piece.row_positions] == whole.row_positions
        # Of a reason only the text may depend on how far the reader looked.
        assert [(one.position, one.text) for piece in pieces for one in piece.rejected] == [
            (one.position, one.text) for one in whole.rejected
        ]
        return ended

    def _positions(self, source: Source, partition: PartitionId) -> list[int]:
        found = read_all(source, partition, self.schema, rows_max=1).positions
        return found[:: max(1, len(found) // POSITIONS_MAX)]


class SinkContract(ABC):
    """What every sink promises."""

    schema = SCHEMA
    applies_upserts = False
    """Whether a row of a stream of upserts replaces the one with its key, instead of being kept as a change."""
    restores_upserts = True
    """Whether later epochs of upserts that are set aside are undone, instead of being overwritten as their input is read again."""

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

    def open_as(
        self, place: Path, hub: int, local: int = 1, *, upsert_key: tuple[str, ...] | None = None, **given: Any
    ) -> Sink:
        """Open the sink as a start of a node does, with that generation; each number of the hub is another state directory."""
        owned: dict[str, Any] = {"pipeline": "suite", "node": "n1", "owner": f"state-{hub}", "start": f"{hub}.{local}"}
        stream = replace(self.stream(upsert_key=upsert_key), generation=Fence(hub, local), **(owned | given))
        return open_sink(self.spec(place), stream)

    def fences(self, place: Path) -> bool:
        """Whether the kind declares that older generations are refused."""
        return fences(self.spec(place))

    def exactly_once(self, place: Path) -> bool:
        """Whether releasing an epoch a second time must change nothing."""
        return sink_delivery(self.spec(place)) is Delivery.EXACTLY_ONCE

    def rows(self, first: int, count: int) -> pl.DataFrame:
        """Some rows, the same for the same numbers."""
        numbers = range(first, first + count)
        columns = {
            "device": [f"d{number % 3}" if number % 5 else None for number in numbers],
            "ts": [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(milliseconds=number) for number in numbers],
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

    # Generations: run on kinds that declare `fences`.

    def test_a_writer_that_was_replaced_by_a_newer_generation_is_refused(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path):
            return
        cut_off = self.open_as(tmp_path, 1, local=5)
        cut_off.release(1, self.rows(10, 3))
        successor = self.open_as(tmp_path, 2, resumes_after=1)
        for frame in (self.rows(90, 3), self.rows(0, 0)):
            with _raises(FencedError, r"node n1 \(generation 2\.1"):
                cut_off.release(2, frame)
        with _raises(FencedError):
            cut_off.write(self.rows(90, 3))
        successor.release(2, self.rows(20, 3))
        with _raises(FencedError):
            cut_off.release(2, self.rows(20, 3))
        successor.release(3, self.rows(30, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(epoch * 10, 3) for epoch in (1, 2, 3)]))

    def test_an_older_generation_cannot_open_the_sink_even_after_a_crash(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path):
            return
        self.open_as(tmp_path, 1).release(1, self.rows(10, 3))
        self.open_as(tmp_path, 2, resumes_after=1)  # and dies before it releases anything
        for hub, local in ((1, 1), (1, 9), (0, 9)):
            with _raises(FencedError, r"generation 2\.1"):
                self.open_as(tmp_path, hub, local, resumes_after=1)
        with _raises(FencedError):
            self.open_as(tmp_path, 2, 0)
        self.open_as(tmp_path, 2, 2, resumes_after=1).release(2, self.rows(20, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(10, 3), self.rows(20, 3)]))

    def test_without_a_hub_the_writer_that_opened_the_sink_last_may_write(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path):
            return
        first = self.open_as(tmp_path, 0, 7, owner="lost")
        first.release(1, self.rows(10, 3))
        second = self.open_as(tmp_path, 0, 1, owner="restored", resumes_after=1)
        with _raises(FencedError):
            first.release(2, self.rows(90, 3))
        second.release(2, self.rows(20, 3))
        copy = self.open_as(tmp_path, 0, 1, owner="restored", start="copy", resumes_after=2)
        with _raises(FencedError):
            second.release(3, self.rows(90, 3))
        copy.release(3, self.rows(30, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(epoch * 10, 3) for epoch in (1, 2, 3)]))

    def test_a_state_without_a_hub_takes_over_from_one_with_a_hub_only_on_purpose(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path):
            return
        granted = self.open_as(tmp_path, 2)
        granted.release(1, self.rows(10, 3))
        with _raises(FencedError, r"generation 2\.1.*--discard-later-output"):
            self.open_as(tmp_path, 0, 9, resumes_after=1)
        moved = self.open_as(tmp_path, 0, 9, resumes_after=1, discard_later=True)
        moved.release(2, self.rows(20, 3))
        with _raises(FencedError):
            granted.release(2, self.rows(90, 3))
        self.open_as(tmp_path, 0, 10, owner="state-0", resumes_after=2).release(3, self.rows(30, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(epoch * 10, 3) for epoch in (1, 2, 3)]))

    def test_sinks_of_one_start_share_their_claim(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path):
            return
        first, second = self.open_as(tmp_path, 1), self.open_as(tmp_path, 1)
        first.release(1, self.rows(10, 3))
        second.release(2, self.rows(20, 3))
        first.release(3, self.rows(30, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(epoch * 10, 3) for epoch in (1, 2, 3)]))

    def test_parts_of_a_writer_that_was_replaced_are_never_seen(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path) or self.open_parted(tmp_path) is None:
            return
        cut_off = self.open_as(tmp_path, 1)
        writer = open_parts(self.spec(tmp_path), self.stream())
        assert isinstance(cut_off, PartedSink)
        assert writer is not None
        parts = [writer.write(1, "a", number, self.rows(90 + number, 1)) for number in range(3)]
        successor = self.open_as(tmp_path, 2)
        with _raises(FencedError):
            cut_off.release_parts(1, "a", parts)
        parts = [writer.write(1, "b", number, self.rows(90 + number, 1)) for number in range(3)]
        with _raises(FencedError):
            cut_off.release_parts(1, "b", parts)
        successor.release(1, self.rows(10, 3))
        assert_frame_equal(self.seen(tmp_path), self.rows(10, 3))

    def test_later_epochs_than_those_of_the_state_are_an_error_that_stops_no_other_writer(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path):
            return
        released = self.open_as(tmp_path, 1)
        for epoch in (1, 2, 3):
            released.release(epoch, self.rows(epoch * 10, 3))
        for hub, local, known in ((1, 2, 1), (2, 1, 1), (2, 1, 0)):
            with _raises(SinkError, "epochs 2 to 3" if known else "epochs 1 to 3"):
                self.open_as(tmp_path, hub, local, resumes_after=known)
        released.release(4, self.rows(40, 3))
        self.open_as(tmp_path, 2, resumes_after=4).release(5, self.rows(50, 3))
        assert_frame_equal(self.seen(tmp_path), pl.concat([self.rows(epoch * 10, 3) for epoch in range(1, 6)]))

    def test_later_epochs_are_set_aside_if_that_is_asked_for(self, tmp_path: Path) -> None:
        if not self.fences(tmp_path):
            return
        key = ("device",) if self.applies_upserts and self.restores_upserts else None
        lost = self.open_as(tmp_path, 1, upsert_key=key)
        for epoch in (1, 2, 3):
            lost.release(epoch, self.rows(epoch * 10, 3))
        restored = self.open_as(tmp_path, 2, upsert_key=key, resumes_after=1, discard_later=True)
        assert same_rows(self.seen(tmp_path), self.rows(10, 3))
        restored.release(2, self.rows(50, 2))
        assert self.seen(tmp_path)["n"].is_in(self.rows(50, 2)["n"].to_list()).sum() == 2
        restored = self.open_as(tmp_path, 2, 2, upsert_key=key, resumes_after=2, discard_later=True)
        restored.release(2, self.rows(50, 2))
        restored.release(3, self.rows(60, 2))
        assert self.seen(tmp_path)["n"].is_in(self.rows(60, 2)["n"].to_list()).sum() == 2
        assert not self.seen(tmp_path)["n"].is_in(self.rows(20, 20)["n"].to_list()).any()
