# ruff: noqa: S101 - a suite of tests: it asserts, and the names of its tests are the sentences
"""The contract of `connectors.Source` and `Reader`, to be run on every source.

Derive a class whose name begins with `Test`, say how the source is filled, and pytest runs the promises of the seam on
it. `read_all` is of use to other tests of sources too.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from polars.testing import assert_frame_equal

from fordstone.connectors.base import Chunk, ConnectorSpec, Reader, Rejected, Source, SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position

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


def read_planned(
    planner: Source,
    reading: Callable[[], Source],
    partition: PartitionId,
    schema: Schema,
    *,
    rows_max: Callable[[], int],
) -> tuple[list[ReadBack], bool]:
    """Read a partition as engines do that plan in one process and read in others: from reach to reach, as far as it goes.

    `rows_max` gives the size of each plan and of each read. Checks on the way that reads end where they should. Gives
    the reads, and whether the last plan said that the partition has ended.
    """
    position, ended = 0, False
    pieces: list[ReadBack] = []
    for _ in range(EMPTY_READS_MAX):
        rows = rows_max()
        reach = planner.plan_read(partition, Position(position), rows)
        assert reach.position >= position
        assert reach.ended or not ended
        ended = reach.ended
        if reach.position == position:
            return pieces, ended
        piece = read_all(reading(), partition, schema, position=position, rows_max=rows_max, until=int(reach.position))
        assert piece.positions[-1] == reach.position
        assert piece.rows.height + len(piece.rejected) <= 2 * rows
        pieces.append(piece)
        position = int(reach.position)
    raise AssertionError(f"no end after {EMPTY_READS_MAX} plans")


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


class SourceContract(ABC):
    """What every source promises."""

    schema = Schema.of({"device": "string", "ts": "timestamp", "temp": "double", "n": "bigint"})

    @abstractmethod
    def fill(self, place: Path) -> ConnectorSpec:
        """Make input of at least two partitions, of which one has at least ten rows. Called once in each test."""

    @abstractmethod
    def expected(self) -> Sequence[pl.DataFrame] | None:
        """The rows of each partition that `fill` makes, in the order of partitions; None if only the source knows."""

    @abstractmethod
    def grow(self, place: Path) -> pl.DataFrame | None:
        """Add rows to the first partition and give them; None if this source cannot grow."""

    def source(self, spec: ConnectorSpec, *, bounded: bool = True) -> Source:
        """Open the source."""
        return open_source(spec, SourceOptions(schema=self.schema, bounded=bounded))

    def test_partitions_are_the_same_in_the_same_order_each_time(self, tmp_path: Path) -> None:
        spec = self.fill(tmp_path)
        source = self.source(spec)
        names = list(source.partitions())
        assert len(names) >= 2
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
                reach = self.source(spec).plan_read(partition, Position(position), ALL_ROWS)
                assert (reach.position, reach.ended) == (end, True)

    def test_a_planned_read_stays_the_same_when_input_grows(self, tmp_path: Path) -> None:
        spec = self.fill(tmp_path)
        planner = self.source(spec, bounded=False)
        partition = planner.partitions()[0]
        before = read_all(planner, partition, self.schema)
        reach = planner.plan_read(partition, Position(0), ALL_ROWS)
        assert reach.position == before.positions[-1]
        added = self.grow(tmp_path)
        for rows_max in (2, 100_000):
            again = self.source(spec, bounded=False)
            head = read_all(again, partition, self.schema, rows_max=rows_max, until=int(reach.position))
            assert_frame_equal(head.rows, before.rows)
        if added is None:
            return
        assert not reach.ended
        onward = planner.plan_read(partition, reach.position, ALL_ROWS)
        rest = read_all(
            planner, partition, self.schema, position=int(reach.position), rows_max=3, until=int(onward.position)
        )
        assert_frame_equal(rest.rows, added)

    def _check_planned(
        self, spec: ConnectorSpec, partition: PartitionId, size: int, *, seed: int, bounded: bool
    ) -> bool:
        """Compare, with plans and reads of about `size` rows; return whether the partition ended."""
        drawn = random.Random(seed)
        whole = read_all(self.source(spec, bounded=bounded), partition, self.schema)
        pieces, ended = read_planned(
            self.source(spec, bounded=bounded),
            lambda: self.source(spec, bounded=bounded),
            partition,
            self.schema,
            rows_max=lambda: drawn.randint(1, 2 * size),
        )
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
