"""The cost of reading a memory source that is appended to for a long time."""

from __future__ import annotations

import polars as pl

from fordstone.connectors import MemorySource, memory
from fordstone.connectors.base import Reader, SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position

SCHEMA = Schema.of({"n": "bigint"})


def reader_of(live: MemorySource, *, position: int = 0) -> Reader:
    source = open_source(memory(live), SourceOptions(schema=SCHEMA, bounded=False))
    return source.open(PartitionId("memory-000000"), Position(position), with_positions=True)


def frame(first: int, rows: int) -> pl.DataFrame:
    return pl.DataFrame({"n": range(first, first + rows)}, schema={"n": pl.Int64})


def test_what_was_read_is_removed_so_that_a_long_stream_does_not_slow_down() -> None:
    live = MemorySource([[]])
    reader = reader_of(live)
    for round_ in range(100):
        live.append(0, frame(round_ * 3, 3))
        chunk = reader.read(10)
        assert chunk is not None
        assert chunk.frame["n"].to_list() == [round_ * 3, round_ * 3 + 1, round_ * 3 + 2]
        assert len(reader._made) == 0  # type: ignore[attr-defined]  # looks inside: the pieces that are held


def test_a_read_may_end_in_the_middle_of_a_frame_and_the_next_goes_on_there() -> None:
    live = MemorySource([[]])
    live.append(0, frame(0, 5))
    live.append(0, [])
    live.append(0, [[5], ["no number"], [7]])
    live.append(0, frame(8, 2))
    reader = reader_of(live)
    rows: list[int] = []
    numbers: list[int] = []
    rejected: list[int] = []
    while (chunk := reader.read(3)) is not None:
        assert chunk.row_positions is not None
        rows += chunk.frame["n"].to_list()
        numbers += chunk.row_positions.to_list()
        rejected += [row.position for row in chunk.rejected]
    assert rows == numbers == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert rejected == [6]


def test_a_reader_that_starts_in_the_middle_passes_over_what_came_before() -> None:
    live = MemorySource([frame(0, 4)])
    live.append(0, frame(4, 4))
    chunk = reader_of(live, position=5).read(100)
    assert chunk is not None
    assert chunk.frame["n"].to_list() == [5, 6, 7]
    assert chunk.position == 8
