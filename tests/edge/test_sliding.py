"""Sliding windows and early results on the edge engine: results do not depend on how they ran; what is said of them."""

from __future__ import annotations

import signal

import pytest
from tests.edge.runs import LATENESS_S, TICKS_MAX, run_in_parts, same_rows
from tests.edge.windowing import AGGREGATES, EXACT, KEY, SCHEMA, Slid, latest, record, some_rows

from fordstone import Pipeline, sliding, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.operators.base import OP, ROW_ID
from fordstone.plan.plan import Plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain
from fordstone.protocol.progress import Progress

SHAPES = [Slid(20, 7, 3), Slid(30, 2, 1), Slid(30, 2, 1, EXACT)]


def fresh(slid: Slid) -> Slid:
    return Slid(slid.size_s, slid.every_s, slid.offset_s, slid.aggregates)


def shape_name(slid: Slid) -> str:
    return f"{slid.size_s}by{slid.every_s}x{len(slid.aggregates)}"


@pytest.mark.parametrize("early", [None, "1ms", "1h"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_a_restart_with_other_subtasks_goes_on_with_what_was_open(tmp_path, shape, early):
    slid, partitions = fresh(shape), [some_rows(seed, 90) for seed in (5, 6)]
    pipeline, given = Pipeline("restarts"), MemorySource([[], []])
    rows = pipeline.source("rows", memory(given), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    slid.add(rows, early=early)
    parts = [[record(row) for row in rows_of] for rows_of in partitions]
    run_in_parts(pipeline, given, parts, tmp_path, out=False)
    wanted = slid.expected(partitions)
    if early is None:
        same_rows(slid.out.rows(), wanted)
    else:
        same_rows(slid.final.rows(), wanted)
        same_rows(latest(slid.out), wanted)
        assert slid.out.rows().height > wanted.height


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_early_results_come_before_a_window_closes_and_a_filter_follows_them(tmp_path, guarantee):
    out, tall, final = MemorySink(), MemorySink(), MemorySink()
    pipeline = Pipeline("early", guarantee=guarantee)
    given = MemorySource([[record(("a", second, 1.0, 1)) for second in range(3)]])
    rows = pipeline.source("rows", memory(given), schema=SCHEMA, time="ts")
    windows = rows.group_by("k").window(tumbling("1h"), early="1us").agg(n="count(*)")
    windows.sink("out", memory(out))
    windows.filter("n > 3").sink("tall", memory(tall))
    windows.final().group_by().window(tumbling("1d")).agg(n="sum(n)").sink("final", memory(final))
    ticks = 0
    done: set[str] = set()

    def more_when_seen(_: Progress) -> None:
        nonlocal ticks
        ticks += 1
        if "more" not in done and out.rows().height:
            done.add("more")
            given.append(0, [record(("a", second, 1.0, 1)) for second in range(3, 5)])
        if "stop" not in done and (tall.rows().height or ticks > TICKS_MAX):
            done.add("stop")
            signal.raise_signal(signal.SIGTERM)

    pipeline.run(state=tmp_path, interval="5ms", on_progress=more_when_seen)
    assert out.rows().get_column("n").to_list()[:1] == [3]
    assert out.rows().get_column("n").to_list()[-1] == 5
    assert tall.rows().select("n", OP).rows()[-1] == (5, "upsert")
    assert final.rows().height == 0
    if guarantee == "exactly_once":
        pipeline.run(state=tmp_path, bounded=True)
        assert final.rows().get_column("n").to_list() == [5]


def test_windows_of_windows_hold_exactly_those_that_lie_in_them(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("twice")
    given = [record(("a", second, 1.0, 1)) for second in range(20, 80)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    tens = rows.group_by("k").window(sliding("10s", every="5s")).agg(name="tens", n="count(*)")
    tens.group_by("k").window(tumbling("30s")).agg(name="half", windows="count(*)", n="sum(n)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    found = out.rows().sort(KEY).select("windows", "n").rows()
    assert found == [(6, 55), (6, 60), (1, 5)]


def test_results_carry_ids_of_key_and_window_where_they_are_released_at_once(tmp_path):
    slid, out = Slid(20, 5), MemorySink()
    pipeline = Pipeline("ids")
    given = MemorySource([[record(row) for row in some_rows(1, 60)]])
    rows = pipeline.source("rows", memory(given), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    windows = rows.group_by("k").window(sliding("20s", every="5s"), early="1ms").agg(**AGGREGATES)
    windows.final().sink("out", memory(out), release="at_once")
    pipeline.run(state=tmp_path, bounded=True, interval="5ms")
    same_rows(out.rows(), slid.expected([some_rows(1, 60)]))
    assert out.rows().get_column(ROW_ID).n_unique() == out.rows().height


def plan_of(*, early: str | None = None, every: str = "10s") -> Plan:
    pipeline = Pipeline("words")
    rows = pipeline.source("rows", memory([]), schema=SCHEMA, time="ts")
    windows = rows.group_by("k").window(sliding("1m", every=every), early=early).agg(name="windows", n="count(*)")
    (windows if early is None else windows.final()).sink("out", stdout())
    return pipeline.plan()


def words(plan: Plan) -> str:
    return explain(plan)


def test_explain_says_what_windows_share_what_is_early_and_where_gaps_are():
    text = words(plan_of(early="1s"))
    assert "1m windows every 10s for each k" in text
    assert "provisional results about every 1s, at barriers" in text
    assert "replace each other by k, window_start, window_end" in text
    assert "partial aggregates of the panes of open windows, which these share" in text
    assert "final results: " in text
    gaps = words(plan_of(every="90s"))
    assert "1m windows every 1m30s (with gaps of 30s, where rows count for none) for each k" in gaps
    assert "partial aggregates of open windows" in gaps


def test_early_results_are_another_state_and_how_often_they_come_is_not():
    digests = [
        step_digests(plan, stream_types(plan))["windows"]
        for plan in (plan_of(early=early) for early in (None, "1s", "5s"))
    ]
    assert digests[0] != digests[1] == digests[2]
