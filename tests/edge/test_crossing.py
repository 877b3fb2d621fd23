"""What of a sealed epoch crosses: its rows, its times, and the versions of its control tables."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from tests.edge.crossing_runs import center, epochs_at, ids_at, plan_over, rows, run_plan, source_of
from tests.edge.test_hub_run import nobody, port_of, read
from tests.hub.running import running_hub

from fordstone import Pipeline, tumbling
from fordstone.connectors import memory
from fordstone.connectors.base import ConnectorSpec
from fordstone.connectors.memory import MemorySink, MemorySource
from fordstone.edge.engine.sealing import Crossing
from fordstone.epochs.manifest import Cut, PartitionCut, Segment, SourceCut, TaskCut
from fordstone.epochs.run_file import decode_run
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ENDED_US
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.planner.graph import build_graph
from fordstone.state.base import RunRef

SCHEMA = {"id": "bigint", "ts": "timestamp"}
ROWS = RunRef("a" * 64, 10, 1)


def windowed() -> p.Plan:
    pipeline = Pipeline("crossing")
    stream = pipeline.source("source", memory(MemorySource([])), schema=SCHEMA, time="ts")
    stream.group_by("id").window(tumbling("10s")).agg(n="count(*)").sink("s", memory(MemorySink()))
    return center(pipeline.plan())


def with_control() -> p.Plan:
    """A second source, of kind control, as the split makes it."""
    plan = plan_over(memory(MemorySource([])))
    control = p.Source(
        name="limits",
        connector=ConnectorSpec("control", {"control": "limits", "keys": ["id"]}),
        schema={"id": "bigint"},
        replaces=("id",),
    )
    return msgspec.structs.replace(plan, steps=(control, *plan.steps))


def recorded(plan: p.Plan, cut: Cut, tasks: tuple[TaskCut, ...] = (), *, parallelism: int = 2) -> Cut:
    return Crossing(plan, build_graph(plan, parallelism)).add_to(cut, tasks)


def watermark_us(plan: p.Plan, cut: Cut, tasks: tuple[TaskCut, ...] = ()) -> int:
    (segment,) = recorded(plan, cut, tasks).segments
    return segment.watermark_us


def cut_of(epoch: int, **facts: Any) -> Cut:
    sources = {"source": SourceCut(partitions={"0": PartitionCut(position=5)}, watermark_us=1000)}
    known: dict[str, Any] = {"sources": sources, "segments": (Segment("s", (ROWS,)),), "now_us": 123}
    return Cut(epoch=epoch, **known | facts)


def test_after_a_source_the_time_is_the_sources():
    plan = plan_over(memory(MemorySource([])))
    tasks = (TaskCut("source/0", {}, 5000), TaskCut("source/1", {}, 9000))
    (segment,) = recorded(plan, cut_of(3), tasks).segments
    assert segment == Segment("s", (ROWS,), stream="s", watermark_us=1000)


def test_a_subtask_whose_partitions_are_idle_or_done_or_none_holds_no_time_back():
    plan = plan_over(memory(MemorySource([])))
    partitions = {
        "a": PartitionCut(position=5),
        "b": PartitionCut(position=5, idle=True),
        "c": PartitionCut(position=5, done=True),
    }
    cut = cut_of(3, sources={"source": SourceCut(partitions=partitions, watermark_us=TIME_MIN_US)})
    tasks = (
        TaskCut("source/0", {"a": 900}, 900),
        TaskCut("source/1", {"b": 100}, 100),
        TaskCut("source/2", {"c": 50}, 50),
        TaskCut("source/3", {}),
    )
    (segment,) = recorded(plan, cut, tasks, parallelism=4).segments
    assert segment.watermark_us == 900


def test_a_subtask_after_idle_ones_holds_no_time_back():
    pipeline = Pipeline("crossing")
    sources = [
        pipeline.source(name, memory(MemorySource([])), schema=SCHEMA, time="ts") for name in ("source", "other")
    ]
    sources[0].union(sources[1], name="both").sink("s", memory(MemorySink()))
    plan = center(pipeline.plan())
    partitions = {"a": PartitionCut(position=5), "b": PartitionCut(position=5, idle=True)}
    cut = cut_of(3, sources={"source": SourceCut(partitions=partitions), "other": SourceCut(partitions={})})
    tasks = (
        TaskCut("source/0", {"a": 900}, 900),
        TaskCut("source/1", {"b": 100}, 100),
        TaskCut("other/0", {}),
        TaskCut("other/1", {}),
        TaskCut("both/0", {}, 800),
        TaskCut("both/1", {}, 100),
    )
    assert watermark_us(plan, cut, tasks) == 800
    back = {"a": PartitionCut(position=5, idle=True), "b": PartitionCut(position=6)}
    cut = cut_of(3, sources={"source": SourceCut(partitions=back), "other": SourceCut(partitions={})})
    assert watermark_us(plan, cut, tasks) == 100


def test_after_a_shuffle_the_time_is_that_of_the_slowest_subtask():
    plan = windowed()
    vertex = build_graph(plan, 2).home["s"]
    assert vertex != "source"
    tasks = (TaskCut("source/0", {}, 1), TaskCut(f"{vertex}/0", {}, 700), TaskCut(f"{vertex}/1", {}, 600))
    assert watermark_us(plan, cut_of(3), tasks) == 600


def test_the_versions_of_control_tables_are_in_the_record():
    plan = with_control()
    limits = SourceCut(partitions={"control": PartitionCut(position=12)})
    cut = cut_of(3, sources=cut_of(3).sources | {"limits": limits})
    assert recorded(plan, cut).controls == {"limits": 12}
    assert recorded(plan, cut_of(3)).controls == {"limits": 0}


def test_a_sink_of_this_node_has_no_stream():
    pipeline = Pipeline("crossing")
    pipeline.source("source", memory(MemorySource([])), schema=SCHEMA, time="ts").sink("s", memory(MemorySink()))
    assert not recorded(pipeline.plan(), cut_of(3)).crosses


@pytest.mark.parametrize("parallelism", [1, 2])
def test_windows_cross_before_the_time_that_closed_them(tmp_path: Path, parallelism: int):
    pipeline = Pipeline("crossing")
    source = MemorySource([rows(200), rows(200)])
    stream = pipeline.source("source", memory(source), schema=SCHEMA, time="ts")
    counted = stream.select("id % 7 AS k", "ts").group_by("k").window(tumbling("10s")).agg(n="count(*)")
    counted.sink("s", memory(MemorySink()))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(center(pipeline.plan()), hub, tmp_path / "state", parallelism=parallelism)
        epochs = epochs_at(hub)
        total = 0
        with contextlib.closing(HubClient(hub)) as client:
            for epoch in epochs:
                for ref in epoch.runs:
                    found = decode_run(client.read_blob(ref), ref)
                    total += found.select(pl.col("n").sum()).item()
                    assert found.select(pl.col("window_end").to_physical().max()).item() <= epoch.watermark_us
    assert total == 400
    marks = [epoch.watermark_us for epoch in epochs]
    assert marks == sorted(marks)
    assert marks[-1] == ENDED_US


def test_epochs_that_are_computed_again_do_not_change_what_waits_for_the_hub(tmp_path: Path):
    away = nobody()
    source = source_of(100)
    plan = plan_over(memory(source))
    first = run_plan(plan, away, tmp_path / "a", bounded=False, on_progress=read(100))
    home = tmp_path / "a" / "crossing" / "node"
    before = entries(home)
    newest = max((home / "manifests").iterdir())
    newest.write_bytes(newest.read_bytes()[:-5])
    source.append(0, rows(20, 100))
    second = run_plan(plan, away, tmp_path / "a", bounded=False, on_progress=read(20))
    assert second.resumed_from is not None
    assert second.resumed_from < first.progress.epoch
    assert entries(home)[: len(before)] == before
    with running_hub(tmp_path / "hub", port=port_of(away)) as hub:
        run_plan(plan, hub, tmp_path / "a")
        assert ids_at(hub) == list(range(120))


def test_rows_that_wait_and_are_damaged_with_their_checkpoint_are_computed_again(tmp_path: Path):
    away = nobody()
    source = source_of(100)
    plan = plan_over(memory(source))
    run_plan(plan, away, tmp_path / "a", bounded=False, on_progress=read(100))
    home = tmp_path / "a" / "crossing" / "node"
    for manifest in (home / "manifests").iterdir():
        manifest.write_bytes(b"{}")
    damaged = [line.split(b'"digest":"')[2][:64].decode() for line in entries(home) if b'"runs":[{' in line]
    for digest in damaged:
        (home / "runs" / digest).write_bytes(b"damaged")
    assert damaged
    with running_hub(tmp_path / "hub", port=port_of(away)) as hub:
        run_plan(plan, hub, tmp_path / "a")
        assert ids_at(hub) == list(range(100))


def entries(home: Path) -> list[bytes]:
    return [line for line in (home / "epochs.jsonl").read_bytes().split(b"\n") if b'"cut"' in line]
