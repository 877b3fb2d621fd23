"""Time that the far end declares: whom it waits for, what is late, and that it does not depend on how epochs were committed."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random

import polars as pl
import pytest
from tests.connectors.fake_hub import WAIT_SECONDS, Epoch, FakeHub
from tests.edge.declared import (
    OFFLINE_US,
    SECOND_US,
    Center,
    Outputs,
    center_plan,
    epoch,
    hub,
    over_hub,
    rows,
)
from tests.edge.hub_nodes import Node
from tests.edge.runs import TICKS_MAX
from tests.hub.running import running_hub

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors.base import Chunk, ConnectorSpec
from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.epochs.manifest import PartitionCut
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.reader import MAX_AHEAD_US
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan import plan as p
from fordstone.plan.ids import Position
from fordstone.protocol.progress import Progress
from fordstone.runtime.partition import Partition

__all__ = ["hub"]

HOUR_S = 3600
Found = tuple[dict[tuple[str | None, int], list[int]], list[int]]
"""The windows, and the late rows."""
STEP = p.Source(name="s", connector=ConnectorSpec("hub"), schema={}, time="ts", declares_time=True)


# One partition.


def chunk(frame: pl.DataFrame, watermark_us: int | None = None, late: list[int | None] | None = None) -> Chunk:
    return Chunk(
        frame=frame,
        position=Position(1),
        watermark_us=watermark_us,
        late=None if late is None else pl.Series(late, dtype=pl.Int64),
    )


def test_what_is_declared_counts_after_the_rows_and_never_goes_back():
    partition = Partition(name="a")
    old = rows(("x", 5.0, 1)).drop(ROW_WATERMARK)
    judged = partition.judged(STEP, chunk(old, watermark_us=9 * SECOND_US), old)
    assert (judged.in_time.height, judged.late, partition.max_time_us) == (1, None, 9 * SECOND_US)
    partition.judged(STEP, chunk(old.clear(), watermark_us=3 * SECOND_US), old.clear())
    partition.judged(STEP, chunk(old.clear(), watermark_us=None), old.clear())
    assert partition.watermark_us(0) == 9 * SECOND_US


def test_rows_are_late_if_marked_or_older_than_the_floor_and_never_by_their_neighbours():
    partition = Partition(name="a", floor_us=5 * SECOND_US, max_time_us=100 * SECOND_US)
    frame = rows(("x", 4.0, 1), ("x", 900.0, 2), ("x", 5.0, 3), ("x", 6.0, 4)).drop(ROW_WATERMARK)
    judged = partition.judged(STEP, chunk(frame, late=[None, None, None, 8 * SECOND_US]), frame)
    assert judged.in_time["id"].to_list() == [2, 3]
    assert judged.late is not None
    assert judged.late["id"].to_list() == [1, 4]
    assert judged.late[ROW_WATERMARK].to_list() == [5 * SECOND_US, 8 * SECOND_US]
    assert partition.max_time_us == 100 * SECOND_US, "rows move no declared time"


def test_the_floor_is_compared_with_the_shifted_time():
    partition = Partition(name="a", floor_us=5 * SECOND_US)
    frame = rows(("x", 5.0, 1), ("x", 6.0, 2)).drop(ROW_WATERMARK)
    step = p.Source(name="s", connector=ConnectorSpec("hub"), schema={}, time="ts", declares_time=True, shift_us=-1)
    judged = partition.judged(step, chunk(frame), frame)
    assert judged.in_time["id"].to_list() == [2]


def test_rows_without_a_sane_time_are_neither_late_nor_in_time_and_marks_stay_with_their_rows():
    partition = Partition(name="a", floor_us=2 * SECOND_US)
    frame = rows(("x", None, 1), ("x", 1.0, 2), ("x", 3.0, 3), ("x", 4.0, 4)).drop(ROW_WATERMARK)
    judged = partition.judged(STEP, chunk(frame, late=[7, None, None, 9 * SECOND_US]), frame)
    assert judged.untimed is not None
    assert judged.late is not None
    assert (judged.untimed["id"].to_list(), judged.late["id"].to_list()) == ([1], [2, 4])
    assert judged.in_time["id"].to_list() == [3]


def test_without_a_time_column_only_marks_make_rows_late():
    step = p.Source(name="s", connector=ConnectorSpec("hub"), schema={}, declares_time=True)
    partition = Partition(name="a", floor_us=TIME_MAX_US)
    frame = rows(("x", None, 1), ("x", 1.0, 2)).drop(ROW_WATERMARK)
    judged = partition.judged(step, chunk(frame, watermark_us=7, late=[None, 9]), frame)
    assert (judged.in_time["id"].to_list(), partition.max_time_us) == ([1], 7)


# A center.


def test_a_silent_node_holds_time_back_until_it_speaks(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    hub.add("a", epoch(60, ("x", 1.0, 1)))
    hub.add("b", epoch(60, ("x", 2.0, 2)))
    hub.add("c", epoch(3, ("x", 3.0, 3)))
    center.run()
    assert (out.found(), center.watermark_s) == ({}, 3)
    hub.add("a", epoch(600))
    assert center.run().watermark_s == 3
    hub.add("c", epoch(10, ("x", 4.0, 4)))
    center.run()
    assert (out.found(), center.watermark_s) == ({("x", 0): [1, 2, 3, 4]}, 10)
    assert out.ids("late") == []
    center.kill()


def test_a_node_away_for_longer_than_offline_is_not_waited_for_and_its_old_rows_are_late_when_it_comes_back(
    hub: FakeHub,
):
    out = Outputs()
    center = Center(hub, center_plan(out))
    for node in ("a", "b", "c"):
        hub.add(node, epoch(3, (node, 1.0, ord(node))))
    center.run()
    center.clock.now_us += OFFLINE_US - SECOND_US
    hub.add("a", epoch(50))
    hub.add("b", epoch(55))
    assert center.run().watermark_s == 3
    center.clock.now_us += 2 * SECOND_US
    assert center.run().watermark_s == 50
    assert out.found() == {("a", 0): [97], ("b", 0): [98], ("c", 0): [99]}
    hub.add("c", epoch(52, ("c", 49.0, 1), ("c", 51.0, 2)))
    center.run()
    assert out.ids("late") == [1]
    hub.add("a", epoch(100))
    hub.add("b", epoch(100))
    assert center.run().watermark_s == 52, "it is waited for again"
    hub.add("c", epoch(100))
    center.run()
    assert out.found()["c", 50] == [2]
    center.kill()


def test_nodes_that_have_ended_rest_and_end_neither_time_nor_those_that_join_later(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    hub.add("a", epoch(12, ("a", 1.0, 1)), Epoch(watermark_us=TIME_MAX_US, ended=True))
    center.run()
    assert center.watermark_s == 12
    hub.add("b", epoch(25, ("b", 13.0, 2), ("b", 21.0, 3)))
    center.run()
    hub.add("b", epoch(40))
    center.run()
    assert (out.ids("late"), center.watermark_s) == ([], 40), "nobody waits for a node that rests"
    assert out.found() == {("a", 0): [1], ("b", 10): [2], ("b", 20): [3]}
    hub.add("a", epoch(45, ("a", 41.0, 4)))
    center.run()
    hub.add("b", epoch(60))
    center.run()
    assert center.watermark_s == 45, "started again, it is waited for"
    center.kill()


@pytest.mark.parametrize("bounded", [True, False])
def test_the_end_of_a_node_within_history_does_not_end_time_for_what_it_sent_after_it(hub: FakeHub, bounded: bool):
    out = Outputs()
    center = Center(hub, center_plan(out), bounded=bounded, batch_rows=1)
    hub.add("a", epoch(12, ("a", 1.0, 1)), Epoch(watermark_us=TIME_MAX_US, ended=True))
    hub.add("a", epoch(45, ("a", 41.0, 2)), epoch(60, ("a", 46.0, 3)))
    center.run()
    assert (out.ids("late"), out.found()) == ([], {("a", 0): [1], ("a", 40): [2, 3]})
    center.kill()


@pytest.mark.parametrize("ended", [True, False])
def test_a_node_whose_stream_is_finished_is_not_waited_for_even_if_the_node_itself_goes_on(hub: FakeHub, ended: bool):
    center = Center(hub, center_plan(Outputs()))
    hub.add("a", epoch(12, ("a", 1.0, 1)), Epoch(watermark_us=TIME_MAX_US, ended=ended))
    hub.add("b", epoch(20, ("b", 13.0, 2)))
    center.run()
    hub.add("b", epoch(40))
    assert center.run().watermark_s == 40
    center.kill()


def test_a_hub_away_for_longer_than_offline_makes_no_node_seem_silent(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    for node in ("a", "b"):
        hub.add(node, epoch(3, (node, 1.0, ord(node))))
    center.run()
    hub.goes(away=True)
    follower = center.source._follower
    assert follower is not None
    until = time.monotonic() + WAIT_SECONDS
    while not follower.away:
        assert time.monotonic() < until
        follower._stopped.wait(0.01)
    center.run()
    center.clock.now_us += 3 * OFFLINE_US
    center.run()
    hub.goes(away=False)
    hub.add("a", epoch(500, ("a", 100.0, 1)))
    center.run()
    assert center.watermark_s == 3, "the other may have been there all the time"
    hub.add("b", epoch(500, ("b", 100.0, 2)))
    center.run()
    assert (out.ids("late"), center.watermark_s) == ([], 500)
    center.kill()


def test_a_node_a_year_ahead_closes_no_more_than_an_hour_of_windows(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    hub.now_us = 0
    year_s = 365 * 24 * HOUR_S
    hub.add("a", epoch(year_s, ("x", 1.0, 1), ("x", 2.0 * HOUR_S, 2)))
    assert center.run().watermark_s == MAX_AHEAD_US / SECOND_US
    assert out.found() == {("x", 0): [1]}
    hub.now_us = 2 * HOUR_S * SECOND_US
    hub.add("a", epoch(year_s, ("x", 2.0 * HOUR_S + 1, 3)))
    center.run()
    assert out.found()["x", 2 * HOUR_S] == [2, 3]
    assert out.ids("late") == []
    center.kill()


def test_rows_that_were_late_at_the_edge_are_late_here(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    hub.add("a", epoch(5, ("x", 1.0, 1), ("x", 2.0, 2), late={2: 12.0}))
    hub.add("a", epoch(10, ("x", 9.0, 3)))
    center.run()
    assert out.found() == {("x", 0): [1, 3]}
    assert out.ids("late") == [2]
    assert out.ids("rows") == [1, 2, 3], "who keeps rows as they are has no use for lateness"
    center.kill()


def test_epochs_without_rows_move_time(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    hub.add("a", epoch(1, ("x", 1.0, 1)))
    center.run()
    for second in range(2, 12):
        hub.add("a", epoch(second))
        assert center.run().watermark_s == second
    assert out.found() == {("x", 0): [1]}
    center.kill()


def test_rows_without_a_time_go_to_the_dead_letters(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    hub.add("a", epoch(10, ("x", None, 1), ("x", 2.0, 2)))
    center.run()
    assert center.letters.count == 1
    assert out.found() == {("x", 0): [2]}
    center.kill()


def test_a_node_that_joins_later_is_late_only_with_what_is_older_than_the_centers_time(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    hub.add("a", epoch(20, ("x", 1.0, 1)))
    center.run()
    hub.add("b", epoch(15, ("x", 14.0, 2), ("x", 21.0, 3)))
    center.run()
    assert out.ids("late") == [2]
    hub.add("b", epoch(40))
    hub.add("a", epoch(40))
    center.run()
    assert out.found() == {("x", 0): [1], ("x", 20): [3]}
    center.kill()


@pytest.mark.parametrize("bounded", [True, False])
def test_time_goes_on_although_rows_carry_none(hub: FakeHub, bounded: bool):
    sink = MemorySink()
    pipeline = Pipeline("p")
    pipeline.source("s", memory(MemorySource([[]])), schema={"k": "string", "id": "bigint"}).sink("rows", memory(sink))
    center = Center(hub, over_hub(pipeline.plan(), {"url": "http://hub.test"}), bounded=bounded)
    partial = rows(("x", None, 1)).select("k", "id")
    hub.add("a", Epoch(runs=[partial], watermark_us=7 * SECOND_US))
    hub.add("b", Epoch(watermark_us=TIME_MIN_US))
    center.run()
    assert sink.rows()["id"].to_list() == [1]
    if bounded:
        assert center.engine is not None
        assert center.engine.over
        assert center.watermark_s == TIME_MAX_US / SECOND_US
    else:
        assert center.watermark_s is None
        hub.add("b", Epoch(watermark_us=9 * SECOND_US))
        assert center.run().watermark_s == 7
        center.kill()
        center.start()
        assert center.run().watermark_s == 7
    center.kill()


def test_a_bounded_run_that_has_ended_has_ended_although_its_rows_carry_no_time(hub: FakeHub):
    sink = MemorySink()
    pipeline = Pipeline("p")
    pipeline.source("s", memory(MemorySource([[]])), schema={"k": "string", "id": "bigint"}).sink("rows", memory(sink))
    center = Center(hub, over_hub(pipeline.plan(), {"url": "http://hub.test"}), bounded=True)
    hub.add("a", Epoch(runs=[rows(("x", None, 1)).select("k", "id")], watermark_us=7))
    center.run()
    center.kill()
    assert center.start().time_has_ended
    center.kill()


def test_at_the_end_of_bounded_input_everything_comes_out(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out), bounded=True)
    hub.add("a", epoch(1, ("x", 1.0, 1)))
    hub.add("b", epoch(500, ("x", 400.0, 2)))
    center.run()
    assert center.engine is not None
    assert center.engine.over
    assert out.found() == {("x", 0): [1], ("x", 400): [2]}
    assert out.ids("late") == []


def test_the_hub_may_remove_what_lies_before_the_oldest_checkpoint(hub: FakeHub):
    out = Outputs()
    center = Center(hub, center_plan(out))
    for second in range(1, 9):
        hub.add("a", epoch(second, ("x", float(second), second)))
        center.run()
    passed = hub.passed["center"].get("a", 0)
    hub.add("a", epoch(9))
    assert center.engine is not None
    kept = center.engine.store.manifest(center.engine.store.epochs()[0]).cut.sources["s"].partitions["a"].position
    assert passed <= kept
    assert hub.wait_for_passed("center", {"a": kept}), (hub.passed, kept)
    # What it then removes is never requested again, not even by a run that has to compute epochs again.
    center.kill()
    hub.remove_epochs("a", kept)
    center.start(damage_newest=True)
    hub.add("a", epoch(100))
    center.run()
    assert out.found()["x", 0] == list(range(1, 9))
    center.kill()


def test_nothing_is_acknowledged_that_the_oldest_checkpoint_would_read_again(hub: FakeHub):
    center = Center(hub, center_plan(Outputs()))
    hub.add("a", epoch(1))
    center.run()
    acknowledged: list[tuple[int, int, int]] = []

    def ack(cuts: Mapping[str, PartitionCut]) -> None:
        assert center.engine is not None
        store = center.engine.store
        oldest, *_, newest = (store.manifest(one).cut.sources["s"].partitions["a"].position for one in store.epochs())
        acknowledged.append((cuts["a"].position, oldest, newest))

    center.source.ack = ack  # type: ignore[method-assign]
    for second in range(2, 5):
        hub.add("a", epoch(second))
        center.run()
    assert all(position == oldest for position, oldest, _ in acknowledged)
    assert any(oldest < newest for _, oldest, newest in acknowledged)
    center.kill()


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_with_weaker_guarantees_time_is_where_it_was_after_a_kill(hub: FakeHub, guarantee: p.Guarantee):
    out = Outputs()
    center = Center(hub, center_plan(out, guarantee=guarantee))
    hub.add("a", epoch(20, ("x", 1.0, 1), ("x", 21.0, 2)))
    hub.add("b", epoch(20, ("x", 2.0, 3)))
    assert center.run().watermark_s == 20
    center.kill()
    center.start()
    hub.add("a", epoch(40, ("x", 22.0, 4)))
    hub.add("b", epoch(40))
    assert center.run().watermark_s == 40
    ids = [sorted(found) for frame in out.windows.written for found in frame["ids"].to_list()]
    assert sorted(ids) == [[1, 3], [2, 4]]
    center.kill()


# How epochs were committed, read, and computed again makes no difference.


def history(rng: Random) -> dict[str, list[Epoch]]:
    """Three nodes whose times go their own ways, with late rows, empty epochs, and an end."""
    found: dict[str, list[Epoch]] = {}
    number = 0
    for node in ("a", "b", "c"):
        second, epochs = rng.randint(0, 5), []
        for _ in range(rng.randint(6, 14)):
            given: list[tuple[str | None, float | None, int]] = []
            late: dict[int, float] = {}
            for _ in range(rng.choice((0, 0, 1, 3, 8))):
                number += 1
                is_late = second > 3 and rng.random() < 0.2
                at = rng.randint(0, second - 1) if is_late else second + rng.randint(0, 12)
                given.append((rng.choice(("x", "y", None)), float(at), number))
                if is_late:
                    late[number] = second
            second += rng.choice((0, 1, 4, 15))
            epochs.append(epoch(second, *given, late=late))
        found[node] = epochs
    return found


def run_history(hub: FakeHub, nodes: dict[str, list[Epoch]], rng: Random, *, wild: bool) -> Found:
    """Everything that comes out; `wild`: ranges folded, batches cut, killed, restored, computed again, all as drawn."""
    hub.reset()
    out = Outputs()
    center = Center(hub, center_plan(out), batch_rows=rng.choice((1, 5, 1000)) if wild else 1000)
    left = {node: list(epochs) for node, epochs in nodes.items()}
    for node, epochs in left.items():
        hub.add(node, epochs.pop(0))
    while any(left.values()):
        node = rng.choice([node for node, epochs in left.items() if epochs])
        size = rng.randint(1, 5) if wild else 1
        taken, left[node] = left[node][:size], left[node][size:]
        hub.add(node, *taken)
        if not wild:
            continue
        center.run(rng.choice((5, 20, 60)))
        if rng.random() < 0.3:
            center.kill()
            center.parallelism = rng.choice((1, 2, 3))
            store = center.disk.list("p/center/manifests")
            center.start(damage_newest=len(store) > 1 and rng.random() < 0.5)
    center.kill()
    center.bounded = True
    center.run(2000)
    assert center.engine is not None
    assert center.engine.over
    assert out.ids("rows") == sorted(
        n for epochs in nodes.values() for one in epochs for run in one.runs for n in run["id"]
    )
    return out.found(), out.ids("late")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_folded_commits_other_batches_kills_and_epochs_computed_again_give_the_same(seed: int, hub: FakeHub):
    nodes = history(Random(seed))
    single = run_history(hub, nodes, Random(seed), wild=False)
    end = pl.col("ts").dt.truncate("10s").cast(pl.Int64) + 10 * SECOND_US
    late = [run.filter(end <= pl.col(ROW_WATERMARK)) for epochs in nodes.values() for one in epochs for run in one.runs]
    assert single[1] == sorted(n for run in late for n in run["id"])
    for number in range(2):
        assert run_history(hub, nodes, Random(100 * seed + number), wild=True) == single


# A real hub.


def test_a_center_over_a_real_hub_goes_on_when_the_hub_comes_back_and_lets_it_remove_epochs(tmp_path: Path):
    out = Outputs()
    now_s = time.time()
    with ExitStack() as first:
        address = first.enter_context(running_hub(tmp_path / "hub"))
        nodes = {name: Node(HubClient(address), name) for name in ("a", "b", "ahead")}
        nodes["a"].commit(epoch(5, ("x", 1.0, 1)), epoch(10), epoch(11, ("x", 10.5, 2), ("x", 3.0, 3), late={3: 10.0}))
        nodes["b"].commit(epoch(12, ("x", 2.0, 4)))
        nodes["ahead"].commit(epoch(now_s + 365 * 24 * HOUR_S, ("x", now_s + 2 * HOUR_S, 5)))
        plan = center_plan(out, place=address.at())
        second = ExitStack()
        ticks = 0

        def steer(progress: Progress) -> None:
            nonlocal ticks, nodes
            ticks += 1
            assert ticks < TICKS_MAX, "it took too long"
            if progress.rows_in == 5 and out.windows.released and "again" not in nodes:
                first.close()
                port = int(address.url.rpartition(":")[2])
                second.enter_context(running_hub(tmp_path / "hub", port=port))
                nodes = {name: Node(HubClient(address), name) for name in ("a", "b", "again")}
                nodes["a"].commit(epoch(20, ("x", 19.0, 6)))
                nodes["b"].commit(epoch(20, ("x", 18.0, 7)))
            if progress.rows_in == 7 and ("x", 10) in out.found() and not progress.stopping:
                signal.raise_signal(signal.SIGTERM)

        with second:
            run(plan, {}, RunConfig(state=tmp_path / "state", node="center", interval="20ms"), on_progress=steer)
            assert out.found() == {("x", 0): [1, 4], ("x", 10): [2, 6, 7]}
            assert out.ids("late") == [3]
            (stream,) = HubClient(address).streams().streams
            assert set(stream.consumers) == {"center"}
            run(plan, {}, RunConfig(state=tmp_path / "state", node="center", bounded=True))
    assert out.ids("rows") == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(out.found().values()) == [[1, 4], [2, 6, 7], [5]]
