"""Sessions and windows by count on the edge engine: results do not depend on how they ran; what is said of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from random import Random
from typing import Any

import polars as pl
import pytest
from tests.edge.runs import LATENESS_S, START, in_disorder, in_sessions, in_time, run_in_parts, same_rows

from fordstone import Pipeline, by_count, session, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.errors import PlanMismatchError
from fordstone.operators.base import ROW_ID
from fordstone.plan.plan import Plan, Window
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain
from fordstone.planner.graph import build_graph

SCHEMA = {"k": "string", "ts": "timestamp", "n": "bigint"}
GAP_S = 4
SIZE, EVERY = 5, 2
AGGREGATES = {"rows": "count(*)", "total": "sum(n)", "top": "max(n)"}
COLUMNS: dict[str, Any] = {
    "k": pl.String(),
    "window_start": pl.Datetime("us", "UTC"),
    "window_end": pl.Datetime("us", "UTC"),
    "rows": pl.Int64(),
    "total": pl.Int64(),
    "top": pl.Int64(),
}
Row = tuple[str | None, int, int]


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], at(row[1]), row[2])


def some_rows(seed: int, count: int) -> list[Row]:
    """Rows whose time moves on with some disorder and some silence; a few are late."""
    rng = Random(seed)
    seconds = in_disorder(rng, count, steps=(0, 0, 1, 1, 2))
    return [(rng.choice(["a", "b", "é", "键", None]), second, rng.randrange(100)) for second in seconds]


def result(rows: list[Row], end: int) -> tuple[Any, ...]:
    values = [row[2] for row in rows]
    return (rows[0][0], at(rows[0][1]), at(end), len(rows), sum(values), max(values))


def sessions_of(partitions: list[list[Row]]) -> list[tuple[Any, ...]]:
    return [result(rows, rows[-1][1] + GAP_S) for rows in in_sessions(partitions, GAP_S)[0]]


def packs_of(partitions: list[list[Row]]) -> list[tuple[Any, ...]]:
    kept, _ = in_time(partitions)
    found = []
    for key in {row[0] for row in kept}:
        rows = sorted((row for row in kept if row[0] == key), key=lambda row: row[1:])
        packs = [rows[start : start + SIZE] for start in range(0, len(rows) - SIZE + 1, EVERY)]
        found += [result(pack, pack[-1][1]) for pack in packs]
    return found


WINDOWS: dict[str, tuple[Window, Callable[[list[list[Row]]], list[tuple[Any, ...]]]]] = {
    "sessions": (session(f"{GAP_S}s"), sessions_of),
    "packs": (by_count(SIZE, every=EVERY), packs_of),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_restart_with_other_subtasks_goes_on_with_what_was_open(tmp_path, kind):
    window, rows_of = WINDOWS[kind]
    partitions = [some_rows(seed, 90) for seed in (5, 6)]
    out, source = MemorySink(), MemorySource([[], []])
    pipeline = Pipeline("restarts")
    rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    rows.group_by("k").window(window).agg(**AGGREGATES).sink("out", memory(out))
    run_in_parts(pipeline, source, [[record(row) for row in given] for given in partitions], tmp_path)
    same_rows(out.rows(), pl.DataFrame(rows_of(partitions), schema=COLUMNS, orient="row"))


def test_windows_may_follow_each_other(tmp_path):
    out, tops = MemorySink(), MemorySink()
    pipeline = Pipeline("chains")
    given = [record(("a", second, second)) for second in range(40)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    packs = rows.group_by("k").window(by_count(5)).agg(name="packs", total="sum(n)")
    packs.group_by("k").window(tumbling("20s")).agg(name="of_packs", top="max(total)", n="count(*)").sink(
        "tops", memory(tops)
    )
    visits = rows.filter("n % 10 < 6").group_by("k").window(session("3s")).agg(name="visits", rows="count(*)")
    visits.group_by("k").window(by_count(2)).agg(name="pairs", rows="sum(rows)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, batch_rows=3, interval="5ms")
    # The fourth pack ends with the row of second 19, the eighth with that of 39; windows of 20 s begin at 23:59:40.
    assert tops.rows().sort("window_end").select("n", "top").rows() == [(2, 35), (4, 135), (2, 185)]
    assert out.rows().sort("window_end")["rows"].to_list() == [12, 12]


@pytest.mark.parametrize("kind", WINDOWS)
def test_rows_released_at_once_carry_different_ids(tmp_path, kind):
    out = MemorySink()
    pipeline = Pipeline("ids")
    given = [record((key, second // 6 * 6, 1)) for second in range(60) for key in ("a", None)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    rows.group_by("k").window(WINDOWS[kind][0]).agg(**AGGREGATES).sink("out", memory(out), release="at_once")
    pipeline.run(state=tmp_path, bounded=True)
    assert out.rows()[ROW_ID].n_unique() == out.rows().height > 10


# What runs, and what is said of it.


def plan_of(window: Window, *, keys: tuple[str, ...] = ("k",)) -> Plan:
    pipeline = Pipeline("windows")
    rows = pipeline.source("rows", memory(MemorySource()), schema=SCHEMA, time="ts", lateness="5s")
    rows.group_by(*keys).window(window).agg(n="count(*)", name="found").sink("out", stdout())
    return pipeline.plan()


def test_sessions_are_explained():
    text = explain(plan_of(session("90s")), parallelism=2)
    assert "found: sessions that end after a gap of 1m30s for each k\n" in text
    assert re.search(r"keeps +partial aggregates of sessions that may go on\n", text)
    assert "→ task found: rows, shuffled by k\n" in text


def test_windows_by_count_are_explained_and_so_are_gaps():
    text = explain(plan_of(by_count(1000, every=10)), parallelism=2)
    assert "found: windows of 1,000 rows every 10 for each k\n" in text
    kept = "the rows that wait for time, a count per key, and partial aggregates of open windows"
    assert re.search(rf"keeps +{kept}\n", text)
    assert "gaps" not in text
    text = explain(plan_of(by_count(10, every=25), keys=()), parallelism=2)
    assert "found: windows of 10 rows every 25 (with gaps of 15, where rows count for none) over all rows\n" in text


@pytest.mark.parametrize("kind", WINDOWS)
def test_rows_are_shuffled_by_key_and_never_combined_first(kind):
    graph = build_graph(plan_of(WINDOWS[kind][0]), 3)
    (edge,) = graph.into("found")
    assert (edge.keys, edge.feeder, graph.vertex("found").parallelism) == (("k",), False, 3)


def test_what_their_state_depends_on_is_in_their_digest():
    windows: list[Window] = [session("4s"), session("5s"), by_count(4), by_count(4, every=2), by_count(5)]
    plans = [plan_of(window) for window in windows]
    assert len({step_digests(plan, stream_types(plan))["found"] for plan in plans}) == len(plans)


def test_the_state_of_another_gap_is_refused(tmp_path):
    source = MemorySource([[record(("a", 1, 2))]])

    def run(gap: str) -> None:
        pipeline = Pipeline("changed")
        rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
        rows.group_by("k").window(session(gap)).agg(n="count(*)", name="visits").sink("out", memory(MemorySink()))
        pipeline.run(state=tmp_path, bounded=True)

    run("5s")
    with pytest.raises(PlanMismatchError, match="changed: visits"):
        run("6s")
