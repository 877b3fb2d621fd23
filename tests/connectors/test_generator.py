"""Made-up rows: a pure function of seed, partition and sequence number."""

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.examples import examples

from fordstone.connectors import generator
from fordstone.connectors.base import OpenContext, Reader, ReadPlan, Source, SourceOptions
from fordstone.connectors.generator import ROWS_MAX
from fordstone.connectors.registry import open_source
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import read_all

SCHEMA = Schema.of(
    {
        "device": "string", "other": "string", "ts": "timestamp", "temp": "double", "f": "float", "n": "bigint", "i": "int",
        "s": "smallint", "t": "tinyint", "ok": "boolean", "day": "date", "d": "decimal(8,2)", "b": "binary",
    }
)  # fmt: skip

GOLDEN = [
    ("k000643", 1767225600000000, 20.990751, 449404577),
    ("k000374", 1767225600001000, 20.622315, 604102188),
    ("k000033", 1767225600002000, 23.96263, 499032303),
]


class Clock:
    def __init__(self) -> None:
        self.now_us = 1_000_000_000

    def __call__(self) -> int:
        return self.now_us


def source(*, schema: Schema = SCHEMA, bounded: bool = False, clock: Clock | None = None, **options: Any) -> Source:
    context = OpenContext() if clock is None else OpenContext(clock_us=clock)
    return open_source(generator(**options), SourceOptions(schema=schema, bounded=bounded), context)


def lane(made: Source, number: int = 0, position: int = 0) -> Reader:
    return made.open(made.partitions()[number], Position(position), with_positions=False)


def rows(made: Source, first: int, count: int, number: int = 0) -> pl.DataFrame:
    chunk = lane(made, number, first).read(count)
    assert chunk is not None
    assert chunk.frame.height == count
    return chunk.frame


@examples(100)
@given(
    first=st.integers(0, 2**40),
    cut=st.integers(1, 49),
    seed=st.integers(-(2**63), 2**63),
    disorder=st.sampled_from(["0s", "3s"]),
)
def test_any_slice_is_the_same_alone(first: int, cut: int, seed: int, disorder: str) -> None:
    made = source(seed=seed, disorder=disorder)
    whole = rows(made, first, 50)
    assert_frame_equal(pl.concat([rows(made, first, cut), rows(made, first + cut, 50 - cut)]), whole)


def test_the_rows_of_seed_0_are_those_of_every_release() -> None:
    schema = Schema.of({"device": "string", "ts": "timestamp", "temp": "double", "n": "bigint"})
    first = rows(source(schema=schema), 0, 3).with_columns(pl.col("ts").to_physical(), pl.col("temp").round(6))
    assert first.rows() == GOLDEN


def test_seeds_partitions_and_columns_have_rows_of_their_own() -> None:
    made = source(partitions=2)
    assert list(made.partitions()) == ["lane-000000", "lane-000001"]
    base = rows(made, 0, 100)
    assert base["temp"].to_list() != rows(made, 0, 100, number=1)["temp"].to_list()
    assert base["temp"].to_list() != rows(source(seed=1), 0, 100)["temp"].to_list()
    assert base["device"].to_list() != base["other"].to_list()


def test_values_are_spread_as_promised() -> None:
    made = rows(source(keys=50), 0, 100_000)
    assert made["device"].n_unique() == 50
    assert made["device"].min() == "k000000"
    assert made["device"].max() == "k000049"
    counts = made["device"].value_counts()["count"]
    assert 1700 < counts.min() <= counts.max() < 2300  # type: ignore[operator]
    assert made["temp"].mean() == pytest.approx(20, abs=0.1)
    assert made["temp"].std() == pytest.approx(5, abs=0.1)
    assert made["ok"].mean() == pytest.approx(0.5, abs=0.02)
    assert made["n"].n_unique() > 99_900
    assert 0 <= made["t"].min() <= made["t"].max() < 100  # type: ignore[operator]
    assert made["d"].min() >= 0  # type: ignore[operator]


def test_times_advance_by_the_step_and_disorder_makes_no_row_later_than_its_lateness() -> None:
    ordered = rows(source(start="2026-01-01T00:00:00+01:00", step="250ms"), 0, 10)["ts"].to_physical()
    assert ordered[0] == 1_767_222_000_000_000
    assert ordered.diff().drop_nulls().unique().to_list() == [250_000]
    mixed = rows(source(step="1ms", disorder="2s"), 0, 100_000)["ts"].to_physical()
    lag = mixed.cum_max() - mixed
    assert 1_900_000 < lag.max() <= 2_000_000  # type: ignore[operator]


def test_an_end_is_reached_once_and_bounded_input_needs_one() -> None:
    made = source(rows=10, bounded=True)
    found = read_all(made, made.partitions()[0], SCHEMA, rows_max=4)
    assert (found.rows.height, found.ended, found.positions) == (10, True, [4, 8, 10])
    assert read_all(source(rows=0, bounded=True), PartitionId("lane-000000"), SCHEMA).ended
    with pytest.raises(SourceError, match="generator\\(rows="):
        source(bounded=True)


def test_a_rate_paces_by_the_clock_and_counts_from_where_reading_began() -> None:
    clock = Clock()
    reader = lane(source(rate=1000, clock=clock), position=500)
    assert reader.read(100) is None
    clock.now_us += 20_000
    chunk = reader.read(100)
    assert chunk is not None
    assert (chunk.frame.height, chunk.position) == (20, 520)
    clock.now_us += 10_000_000
    heights = [chunk.frame.height for _ in range(3) if (chunk := reader.read(100)) is not None]
    assert heights == [100, 100, 100]


def test_a_replay_is_not_paced_and_what_follows_it_is() -> None:
    clock = Clock()
    reader = lane(source(rate=1000, clock=clock))
    chunk = reader.read(1000, Position(300))
    assert chunk is not None
    assert chunk.position == 300
    assert reader.read(100) is None
    clock.now_us += 5_000
    chunk = reader.read(100)
    assert chunk is not None
    assert chunk.position == 305


def test_planned_rows_are_paced_by_the_planners_clock_and_read_whatever_the_readers_says() -> None:
    clock, stopped = Clock(), Clock()
    planner = source(rate=1000, clock=clock)
    partition = planner.partitions()[0]
    assert planner.plan_read(partition, Position(500), 10**6).position == 500
    clock.now_us += 20_000
    reach = planner.plan_read(partition, Position(500), 10**6)
    assert (reach.position, reach.ended) == (520, False)
    assert planner.plan_read(partition, Position(500), 5).position == 505
    found = read_all(
        source(rate=1000, clock=stopped), partition, SCHEMA, position=500, rows_max=7, until=int(reach.position)
    )
    assert found.positions == [507, 514, 520]
    assert_frame_equal(found.rows, rows(source(), 500, 20))


def test_a_planner_does_not_wait_for_rows_that_were_read_before_it_began() -> None:
    clock = Clock()
    planner = source(rate=1000, clock=clock)
    partition = planner.partitions()[0]
    planner.plan_read(partition, Position(0), 10)
    clock.now_us += 1_000
    assert planner.plan_read(partition, Position(10**9), 10).position == 10**9
    clock.now_us += 3_000
    assert planner.plan_read(partition, Position(10**9), 10).position == 10**9 + 3
    assert planner.plan_read(partition, Position(0), 10**6).position == 10**6


@pytest.mark.parametrize("rate", [None, 1000])
def test_bounded_rows_are_all_there_when_they_are_planned(rate: float | None) -> None:
    planner = source(rows=100, rate=rate, clock=Clock(), bounded=True)
    partition = planner.partitions()[0]
    assert planner.plan_read(partition, Position(0), 60) == ReadPlan(position=Position(60))
    for position in (0, 60, 100):
        assert planner.plan_read(partition, Position(position), 2**62) == ReadPlan(position=Position(100), ended=True)


def test_a_plan_for_rows_without_end_has_one() -> None:
    planner = source()
    assert planner.plan_read(planner.partitions()[0], Position(10), 2**62) == ReadPlan(position=Position(ROWS_MAX))


def test_names_of_keys_do_not_depend_on_how_many_rows_are_made() -> None:
    made = source(keys=150_000)
    whole = rows(made, 0, 200_000).select("device", "b")
    reader = lane(made, position=100_000)
    for first in range(100_000, 100_300, 100):
        chunk = reader.read(100)
        assert chunk is not None
        assert_frame_equal(chunk.frame.select("device", "b"), whole.slice(first, 100))


@pytest.mark.parametrize("name", ["lane-000003", "lane--00001", "lane-1", "lane-", "1", "lane-00000\u0661", "other"])
def test_a_partition_that_is_not_there_is_an_error(name: str) -> None:
    made = source(partitions=3)
    with pytest.raises(SourceError, match="there are 3"):
        made.open(PartitionId(name), Position(0), with_positions=False)
    with pytest.raises(SourceError, match="there are 3"):
        made.plan_read(PartitionId(name), Position(0), 1)


@pytest.mark.parametrize(
    "options",
    [{"rows": -1}, {"partitions": 0}, {"keys": 0}, {"rate": 0}, {"rate": float("nan")}, {"step": "0s"}, {"step": "soon"}, {"disorder": 5}, {"start": "noon"}, {"rows": "x"}],
)  # fmt: skip
def test_options_that_make_no_sense_are_errors_while_the_pipeline_is_built(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        generator(**options)


def test_a_type_for_which_no_rows_can_be_made_is_an_error_that_names_the_column() -> None:
    with pytest.raises(ConfigError, match="column 'l' has type array<int>"):
        lane(source(schema=Schema.of({"l": "array<int>"})))
