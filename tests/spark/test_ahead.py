"""Rows ahead of the clock on Spark, without a JVM: judged as on the edge, and as they were planned, whenever they are read."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.simulator import SimClock
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died
from tests.spark.runs import EdgeSide

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, files, memory
from fordstone.spark.hosted import source as source_module
from fordstone.spark.hosted.commit import BatchOutcome

pytestmark = pytest.mark.usefixtures("quick_disk")

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOW_US = int(NOW.timestamp()) * 1_000_000
DAY_US = 24 * 3600 * 1_000_000
YEAR_S = 365 * 24 * 3600
SECONDS = {
    "a": [0, 20, YEAR_S, 30, 3600, 45, YEAR_S + 1, 3500],
    "b": [5, 3601, 10, 59, 70, 3599, 3600, 4000],
}
"""By file. The clock stands at 0, so that a tie with the limit is at 3600."""
CLOSED = {("a", 0), ("a", 20), ("a", 30), ("b", 5), ("b", 10), ("b", 59), ("b", 70), ("b", 3599)}
AHEAD = {("a", YEAR_S), ("a", YEAR_S + 1), ("b", 3601), ("b", 4000)}
LATE = {("a", 45), ("a", 3500)}


def write(folder: Path) -> str:
    folder.mkdir()
    for name, seconds in SECONDS.items():
        rows = [{"k": name, "ts": (NOW + timedelta(seconds=one)).isoformat(), "second": one} for one in seconds]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "*")


class Case:
    """Windows of a minute, and what is late for them."""

    def __init__(self, path: str) -> None:
        self.windows, self.late = MemorySink(), MemorySink()
        self.pipeline = Pipeline("ahead")
        schema = {"k": "string", "ts": "timestamp", "second": "bigint"}
        rows = self.pipeline.source("rows", files(path), schema=schema, time="ts")
        made = rows.group_by("k").window(tumbling("1m")).agg(seconds="collect(second)")
        made.sink("windows", memory(self.windows))
        made.late.sink("late", memory(self.late))

    def found(self) -> tuple[set[tuple[str, int]], Counter[tuple[str, int]]]:
        closed = [row for frame in self.windows.frames() for row in frame.select("k", "seconds").rows()]
        late = [row for frame in self.late.frames() for row in frame.select("k", "second").rows()]
        return {(k, second) for k, seconds in closed for second in seconds}, Counter(late)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimClock:
    made = SimClock(NOW_US)
    monkeypatch.setattr(source_module, "wall_clock_us", made.wall_us)
    return made


def test_the_rows_are_judged_as_on_the_edge(tmp_path: Path, clock: SimClock) -> None:
    path = write(tmp_path / "in")
    edge = Case(path)
    EdgeSide(edge.pipeline.plan(), {}, clock=SimClock(NOW_US)).run(bounded=False, stop_after=200, batch_rows=3)
    hosted = Case(path)
    outcomes: list[BatchOutcome] = []
    options: dict[str, Any] = {"state": tmp_path / "state", "rows_max": 6, "batch_rows": 2, "shards": 2}
    MicroSpark(1).start(hosted.pipeline.plan(), {}, on_batch=outcomes.append, **options).run()
    assert clock.wall_us() == NOW_US
    assert hosted.found() == edge.found() == (CLOSED, Counter(AHEAD | LATE))
    assert sum(one.rows_late for one in outcomes) == len(AHEAD | LATE)


@pytest.mark.parametrize("dies_before", ["run", "read", "stage", "commit"])
def test_a_batch_that_runs_again_a_day_later_believes_what_it_was_planned_to(
    tmp_path: Path, clock: SimClock, dies_before: str
) -> None:
    path = write(tmp_path / "in")
    case, spark = Case(path), MicroSpark(2)
    options: dict[str, Any] = {"state": tmp_path / "state", "shards": 2}
    spark.fate.dies_before = dies_before
    with pytest.raises(Died):
        spark.start(case.pipeline.plan(), {}, **options).run()
    clock.now_us += DAY_US
    spark.start(case.pipeline.plan(), {}, **options).run()
    assert case.found() == (CLOSED, Counter(AHEAD | LATE))


def test_a_clock_that_jumped_forward_and_was_set_right_protects_again(tmp_path: Path, clock: SimClock) -> None:
    (tmp_path / "in").mkdir()
    case, spark = Case(str(tmp_path / "in" / "*")), MicroSpark(4)
    options: dict[str, Any] = {"state": tmp_path / "state", "shards": 2}

    def run(second: int) -> None:
        row = {"k": "a", "ts": (NOW + timedelta(seconds=second)).isoformat(), "second": second}
        with (tmp_path / "in" / "a.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        spark.start(case.pipeline.plan(), {}, **options).run()

    run(0)
    clock.set_us = 365 * DAY_US
    run(60)
    clock.set_us = 0
    run(30 * 24 * 3600)
    run(120)
    assert case.found() == ({("a", 0), ("a", 60)}, Counter([("a", 30 * 24 * 3600)]))


def test_history_is_believed(tmp_path: Path, clock: SimClock) -> None:
    case = Case(write(tmp_path / "in"))
    assert clock.wall_us() == NOW_US
    MicroSpark(3).run_batch(case.pipeline.plan(), {}, state=tmp_path / "state", shards=2)
    assert case.found()[0] >= AHEAD
