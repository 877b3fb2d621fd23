"""Files that never grow, on both engines: where they end does not hold time back, whether in one epoch or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

import fsspec
import polars as pl
import pytest
from tests.spark.both_engines import Engine, OnEdge, OnSpark
from tests.spark.test_rolled_files import add, closed, counting, late, row, tens

from fordstone import Pipeline, tumbling
from fordstone.connectors import files
from fordstone.plan.plan import Plan

_NUMBERS = count(1)
SCHEMA = {"k": "string", "ts": "timestamp"}


@pytest.fixture(name="engine", params=["edge", "edge-3", "edge-all-at-once", "edge-3-all-at-once", "spark"])
def engine_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    """`all-at-once`: a file is read at once, so that all of them end in one epoch."""
    if request.param == "spark":
        return OnSpark(tmp_path, 1)
    return OnEdge(tmp_path, 3 if "-3" in request.param else 1, batch_rows=1000 if "all" in request.param else 7)


def parquet(path: Path, seconds: Iterable[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame([row(second) for second in seconds])
    # It appears when it is whole, as a file that never grows does.
    whole = path.with_suffix(".tmp")
    frame.with_columns(pl.col("ts").str.to_datetime(time_zone="UTC")).write_parquet(whole)
    whole.rename(path)


def parquet_files(root: Path) -> tuple[Plan, Callable[[str, Iterable[int]], None]]:
    return counting(root, "*.parquet"), lambda name, seconds: parquet(root / "in" / f"{name}.parquet", seconds)


def text_at_a_url(root: Path) -> tuple[Plan, Callable[[str, Iterable[int]], None]]:
    url = f"memory://ended{next(_NUMBERS)}/in"

    def put(name: str, seconds: Iterable[int]) -> None:
        add(root / "local" / f"{name}.jsonl", seconds)
        with fsspec.open(f"{url}/{name}.jsonl", "wb") as file:
            file.write((root / "local" / f"{name}.jsonl").read_bytes())

    pipeline = Pipeline("ended")
    source = pipeline.source("src", files(f"{url}/*.jsonl"), schema=SCHEMA, time="ts")
    made = source.group_by("k").window(tumbling("10s")).agg(n="count(*)")
    made.select("window_start", "n").sink("windows", files(str(root / "windows"), format="jsonl"))
    made.late.select("ts").sink("late", files(str(root / "late"), format="jsonl"))
    return pipeline.plan(), put


@pytest.mark.parametrize("kind", [parquet_files, text_at_a_url])
def test_files_that_are_there_close_all_windows_up_to_the_newest_row(
    engine: Engine, tmp_path: Path, kind: Callable[[Path], tuple[Plan, Callable[[str, Iterable[int]], None]]]
):
    plan, put = kind(tmp_path)
    for number in range(3):
        put(f"h{number:02d}", range(60 * number, 60 * number + 60))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 170)
    put("h03", range(180, 240))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 230)
    engine.restart()
    put("h04", range(240, 300))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 290)
    assert late(tmp_path) == 0


def test_rows_of_a_file_that_comes_later_are_late_where_windows_have_closed(engine: Engine, tmp_path: Path):
    plan, put = parquet_files(tmp_path)
    put("a", range(60))
    put("b", range(120, 180))
    engine.run(plan)
    put("c", range(100, 200))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 60) | tens(120, 170) | {170: 20, 180: 10}
    assert late(tmp_path) == 70, "those of 170 s to 178 s are in time for their window"


def test_a_text_file_that_may_grow_is_waited_for_still(engine: Engine, tmp_path: Path):
    pipeline = Pipeline("both")
    text = pipeline.source("text", files(str(tmp_path / "in/*.jsonl")), schema=SCHEMA, time="ts")
    table = pipeline.source("table", files(str(tmp_path / "in/*.parquet")), schema=SCHEMA, time="ts")
    made = text.union(table).group_by("k").window(tumbling("10s")).agg(n="count(*)")
    made.select("window_start", "n").sink("windows", files(str(tmp_path / "windows"), format="jsonl"))
    add(tmp_path / "in/a.jsonl", range(30))
    parquet(tmp_path / "in/a.parquet", range(60))
    parquet(tmp_path / "in/b.parquet", range(60, 120))
    plan = pipeline.plan()
    engine.run(plan)
    assert closed(tmp_path) == {0: 20, 10: 20}
    add(tmp_path / "in/a.jsonl", range(30, 90))
    engine.run(plan)
    assert closed(tmp_path) == dict.fromkeys(range(0, 80, 10), 20)


def test_of_two_sources_that_ended_the_furthest_counts(engine: Engine, tmp_path: Path):
    pipeline = Pipeline("both")
    one, two = (
        pipeline.source(name, files(str(tmp_path / f"in/{name}*.parquet")), schema=SCHEMA, time="ts") for name in "ab"
    )
    made = one.union(two).group_by("k").window(tumbling("10s")).agg(n="count(*)")
    made.select("window_start", "n").sink("windows", files(str(tmp_path / "windows"), format="jsonl"))
    parquet(tmp_path / "in/a.parquet", range(60))
    parquet(tmp_path / "in/b.parquet", range(60, 120))
    engine.run(pipeline.plan())
    assert closed(tmp_path) == tens(0, 110)


@pytest.mark.parametrize("rounds", [20, 25, 30, 35, 40, 400])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_epochs_in_which_files_ended_are_replayed_as_they_were(tmp_path: Path, parallelism: int, rounds: int):
    """Also if a run stopped between the barrier at which all files ended and the next: the run after it reads them once more."""
    plan, put = parquet_files(tmp_path)
    edge = OnEdge(tmp_path, parallelism, batch_rows=1000, keep=1000)
    for number in range(3):
        put(f"h{number:02d}", range(60 * number, 60 * number + 60))
    edge.run(plan, rounds)
    edge.restart()
    edge.run(plan)
    put("h03", range(180, 240))
    edge.run(plan)
    edge.damage(plan)
    edge.restart()
    edge.run(plan)
    assert edge.replayed > 2
    assert closed(tmp_path) == tens(0, 230)
    assert late(tmp_path) == 0
