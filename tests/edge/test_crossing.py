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
from fordstone.edge.engine.crossing import Crossing
from fordstone.edge.link.outbox import Outbox
from fordstone.epochs.manifest import Cut, Manifest, PartitionCut, Segment, SourceCut, TaskCut
from fordstone.epochs.run_file import decode_run
from fordstone.epochs.store import CheckpointStore
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ENDED_US
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.planner.graph import build_graph
from fordstone.state.base import RunRef
from fordstone.testing.memory_disk import MemoryDisk

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


def manifest_of(plan: p.Plan, cut: Cut, tasks: tuple[TaskCut, ...] = ()) -> Manifest:
    return Manifest(
        pipeline=plan.pipeline,
        node="n",
        epoch=cut.epoch,
        attempt=1,
        mode="aligned",
        parallelism=2,
        plan_digest="",
        step_digests={},
        created_us=77,
        cut=cut,
        tasks=tasks,
    )


def crossing_of(plan: p.Plan, disk: MemoryDisk | None = None) -> Crossing:
    disk = disk or MemoryDisk()
    disk.make_dirs("crossing/n")
    outbox = Outbox(disk, "crossing/n", bytes_max=1 << 30)
    outbox.begin(0, lambda _: None)
    return Crossing(outbox, plan, build_graph(plan, 2))


def cut_of(epoch: int, **facts: Any) -> Cut:
    sources = {"source": SourceCut(partitions={"0": PartitionCut(position=5)}, watermark_us=1000)}
    known: dict[str, Any] = {"sources": sources, "segments": (Segment("s", (ROWS,)),), "now_us": 123}
    return Cut(epoch=epoch, **known | facts)


def test_behind_a_source_the_time_is_the_sources():
    plan = plan_over(memory(MemorySource([])))
    tasks = (TaskCut("source/0", {}, 5000), TaskCut("source/1", {}, 9000))
    entry = crossing_of(plan).entry(manifest_of(plan, cut_of(3), tasks))
    assert (entry.epoch, entry.created_us, entry.ended) == (3, 123, False)
    assert entry.streams["s"].runs == (ROWS,)
    assert entry.streams["s"].watermark_us == 1000


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
    assert crossing_of(plan).entry(manifest_of(plan, cut, tasks)).streams["s"].watermark_us == 900


def test_a_subtask_behind_idle_ones_holds_no_time_back_whatever_number_runs_now():
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
    manifest = manifest_of(plan, cut, tasks)
    assert crossing_of(plan).entry(manifest).streams["s"].watermark_us == 800
    back = {"a": PartitionCut(position=5, idle=True), "b": PartitionCut(position=6)}
    cut = cut_of(3, sources={"source": SourceCut(partitions=back), "other": SourceCut(partitions={})})
    outbox = crossing_of(plan).outbox
    alone = Crossing(outbox, plan, build_graph(plan, 1))
    assert alone.entry(manifest_of(plan, cut, tasks)).streams["s"].watermark_us == 100


def test_behind_a_shuffle_the_time_is_that_of_the_slowest_subtask():
    plan = windowed()
    vertex = build_graph(plan, 2).home["s"]
    assert vertex != "source"
    tasks = (TaskCut("source/0", {}, 1), TaskCut(f"{vertex}/0", {}, 700), TaskCut(f"{vertex}/1", {}, 600))
    assert crossing_of(plan).entry(manifest_of(plan, cut_of(3), tasks)).streams["s"].watermark_us == 600


def test_at_the_end_nothing_will_follow():
    plan = windowed()
    entry = crossing_of(plan).entry(manifest_of(plan, cut_of(3, ended=True)))
    assert entry.ended
    assert entry.streams["s"].watermark_us == ENDED_US


def test_an_entry_is_the_same_whenever_it_is_made():
    plan = plan_over(memory(MemorySource([])))
    first = manifest_of(plan, cut_of(3))
    later = msgspec.structs.replace(first, created_us=99, attempt=8)
    assert crossing_of(plan).entry(first).digest() == crossing_of(plan).entry(later).digest()


def test_the_versions_of_control_tables_stand_in_the_entry():
    plan = with_control()
    limits = SourceCut(partitions={"control": PartitionCut(position=12)})
    cut = cut_of(3, sources=cut_of(3).sources | {"limits": limits})
    assert crossing_of(plan).entry(manifest_of(plan, cut)).controls == {"limits": 12}
    assert crossing_of(plan).entry(manifest_of(plan, cut_of(3))).controls == {"limits": 0}


def test_a_lost_entry_is_found_in_the_manifest_exactly_and_in_the_cut_nearly():
    plan, disk = windowed(), MemoryDisk()
    store = CheckpointStore(disk, pipeline="crossing", node="n", keep=1)
    vertex = build_graph(plan, 2).home["s"]
    for epoch in (1, 2):
        run = store.write_run(pl.DataFrame({"id": [epoch]}))
        cut = cut_of(epoch, segments=(Segment("s", (run,)),))
        store.commit(manifest_of(plan, cut, (TaskCut(f"{vertex}/0", {}, 50 * epoch),)))
    crossing = crossing_of(plan, disk)
    first = crossing.entry(store.manifest(1))
    store.collect(held={run.digest for run in first.streams["s"].runs})
    assert store.epochs() == (2,)
    find = crossing.finder(store)
    exact, nearly = find(2), find(1)
    assert exact is not None
    assert (exact.exact, exact.entry) == (True, crossing.entry(store.manifest(2)))
    assert nearly is not None
    assert not nearly.exact
    assert nearly.entry.streams["s"].runs == first.streams["s"].runs
    assert nearly.entry.streams["s"].watermark_us == TIME_MIN_US
    assert find(3) is None


def test_rows_that_are_gone_are_not_found():
    plan, disk = windowed(), MemoryDisk()
    store = CheckpointStore(disk, pipeline="crossing", node="n", keep=1)
    for epoch in (1, 2):
        run = store.write_run(pl.DataFrame({"id": [epoch]}))
        store.commit(manifest_of(plan, cut_of(epoch, segments=(Segment("s", (run,)),))))
    store.collect()
    assert crossing_of(plan, disk).finder(store)(1) is None


def test_where_nothing_crosses_nothing_was_lost_while_there_was_no_hub():
    pipeline = Pipeline("crossing")
    pipeline.source("source", memory(MemorySource([])), schema=SCHEMA, time="ts").sink("s", memory(MemorySink()))
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="crossing", node="n")
    found = crossing_of(pipeline.plan(), disk).finder(store)(7)
    assert found is not None
    assert (found.entry.epoch, found.entry.streams, found.exact) == (7, {}, False)


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
    return [line for line in (home / "outbox.jsonl").read_bytes().split(b"\n") if b'"entry"' in line]
