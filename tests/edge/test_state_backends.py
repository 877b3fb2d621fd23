"""Pipelines whose state is elsewhere than in memory: the same rows, a checkpoint of one taken up by another, and what is said of it."""

from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tests.faults.small_disk import small_disk

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, files, generator, memory
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import NotInstalledError, PipelineError
from fordstone.operators.base import OperatorContext
from fordstone.operators.registry import make_operator
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.protocol.progress import Progress
from fordstone.spark.explain import explain as explain_on_spark
from fordstone.state import rocksdb
from fordstone.storage.disk import OsDisk


def totals_of(state: Path, pipeline: Pipeline) -> pl.DataFrame:
    """What the newest checkpoint says of the table."""
    plan = pipeline.plan()
    context = OperatorContext(plan=plan, types=stream_types(plan))
    table = make_operator(plan.step("by_k"), context).states()["totals"]
    store = CheckpointStore(OsDisk(state), pipeline=plan.pipeline, node="node", read_only=True)
    found = [runs for runs in store.manifest(store.epochs()[-1]).states if runs.step == "by_k"]
    return pl.concat(
        [table.combine([store.read_run(run) for run in runs.runs], oldest=True) for runs in found if runs.runs]
    ).sort("k")


def written(path: Path, rng: Random, count: int, first: int) -> None:
    lines = [
        f'{{"k": "k{rng.randrange(30)}", "ts": "2026-01-01T00:{(first + number) // 60 % 60:02}:{(first + number) % 60:02}Z", "n": {rng.randrange(100)}}}\n'
        for number in range(count)
    ]
    path.write_text("".join(lines))


def totals(root: Path, kind: p.StateKind, sink: MemorySink, windows: MemorySink) -> Pipeline:
    pipeline = Pipeline("totals", state=kind)
    rows = pipeline.source(
        "rows", files(str(root / "in-*.jsonl")), schema={"k": "string", "ts": "timestamp", "n": "bigint"}, time="ts"
    )
    rows.group_by("k").agg(n="sum(n)", top="max(n)", name="by_k").sink("totals", memory(sink))
    rows.group_by("k").window(tumbling("1m")).agg(n="count(*)", name="by_minute").sink("windows", memory(windows))
    return pipeline


def test_a_checkpoint_of_one_backend_is_taken_up_by_another_and_back(tmp_path: Path) -> None:
    rng = Random(5)
    for directory in ("one", "other"):
        (tmp_path / directory).mkdir()
    sinks = {name: (MemorySink(), MemorySink()) for name in ("one", "other")}
    for start, kind in enumerate(("memory", "rocksdb", "file", "rocksdb", "memory")):
        written(tmp_path / f"in-{start}.jsonl", rng, 200, 200 * start)
        for name, kept in (("one", "memory"), ("other", kind)):
            pipeline = totals(tmp_path, kept, *sinks[name])  # type: ignore[arg-type]  # words of `StateKind`
            # Another number of tasks each time: key groups move, too.
            pipeline.run(state=tmp_path / name, available_now=True, parallelism=1 + start % 3)
        one, other = (totals_of(tmp_path / name, pipeline) for name in ("one", "other"))
        assert one.height == 30
        assert_frame_equal(one, other)
    for left, right in zip(*sinks.values(), strict=True):
        assert left.rows().height
        assert sorted(left.rows().rows()) == sorted(right.rows().rows())


def test_a_table_that_finds_its_disk_full_stops_the_run_until_there_is_room(tmp_path: Path) -> None:
    schema: dict[str, str] = {"k": "string", "ts": "timestamp", "n": "bigint"}
    shown: list[Progress] = []
    with small_disk(tmp_path, "state/full/node/working", size="32m") as disk:
        batches: list[int] = []

        def fills(frame: pl.DataFrame) -> pl.DataFrame:
            batches.append(frame.height)
            if len(batches) == 20:
                disk.fill()
            return frame

        def show(progress: Progress) -> None:
            if progress.stalled is not None:
                shown.append(progress)
                disk.make_room()

        sink = MemorySink()
        pipeline = Pipeline("full", state="rocksdb")
        rows = pipeline.source("rows", generator(rows=60_000, keys=30_000, seed=4), schema=schema, time="ts")
        rows.map_batches(fills, name="fills").group_by("k").agg(n="count(*)").sink("totals", memory(sink))
        with patch.object(rocksdb, "WRITE_BUFFER_BYTES", 128 * 1024):
            report = pipeline.run(
                state=tmp_path / "state", bounded=True, batch_rows=1000, interval="50ms", on_progress=show
            )
    assert len(shown) == 1, "it was full"
    assert str(shown[0].stalled).startswith("the disk is full: could not")
    assert "the database of a table" in str(shown[0].stalled)
    assert shown[0].waits_for == "disk"
    assert report.outcome == "ended"
    assert report.progress.restarts >= 1
    newest = sink.rows().group_by("k").agg(pl.col("n").max())
    assert newest["n"].sum() == 60_000


def test_twenty_runs_in_one_process_leave_nothing_open_and_no_working_files(tmp_path: Path) -> None:
    open_files: list[int] = []
    gc.disable()  # what is closed is not closed by it
    try:
        for start in range(20):
            written(tmp_path / f"in-{start}.jsonl", Random(start), 50, 50 * start)
            pipeline = totals(tmp_path, "rocksdb", MemorySink(), MemorySink())
            pipeline.run(state=tmp_path / "state", available_now=True)
            open_files.append(len(list(Path("/proc/self/fd").iterdir())))
            working = tmp_path / "state" / "totals" / "node" / "working"
            assert [path.name for path in working.iterdir()] == ["kept"]
    finally:
        gc.enable()
    assert open_files[-1] == open_files[1]


# What users see.


def pipeline_of(**options: Any) -> Pipeline:
    pipeline = Pipeline("totals", **options)
    rows = pipeline.source(
        "rows", files("in/*.jsonl"), schema={"k": "string", "ts": "timestamp", "state": "string"}, time="ts"
    )
    rows.group_by("k", state="memory").agg(n="count(*)", name="small").sink("a", files("out/a"))
    # A column may be called state.
    rows.group_by("k").agg(state="last(state)", name="large").sink("b", files("out/b"))
    rows.deduplicate("k", within="1h", state="file", name="once").sink("c", files("out/c"))
    return pipeline


def test_explain_shows_where_state_is_kept_if_not_in_memory() -> None:
    plan = pipeline_of(state="rocksdb").plan()
    assert [plan.state_of(name) for name in ("small", "large", "once")] == ["memory", "rocksdb", "file"]
    text = pipeline_of(state="rocksdb").explain()
    assert text.count("what is kept by key in RocksDB, what waits for time in files") == 1
    assert text.count("what waits for time in files, what is kept by key in memory") == 1
    assert "RocksDB" not in pipeline_of().explain()
    on_spark = explain_on_spark(plan)
    assert on_spark.count("in Spark's own state store; state='rocksdb' is for the edge") == 1


def test_where_state_is_kept_changes_neither_what_a_plan_means_nor_how_it_is_stored() -> None:
    plans = [pipeline_of(**options).plan() for options in ({}, {"state": "rocksdb"}, {"state": "file"})]
    assert len({plan.digest() for plan in plans}) == 1
    assert len({plan.to_json() for plan in plans}) == 3
    assert p.read_plan(plans[1].to_json()) == plans[1]
    # Plans that say nothing are as they were before there was a choice.
    plain = Pipeline("plain")
    plain.source("rows", files("in"), schema={"k": "string"}).sink("out", files("out"))
    assert b"state" not in plain.plan().to_json()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"state": "rockdb"},
            r"pipeline totals: state='rockdb' must be 'memory', 'file' or 'rocksdb'. Did you mean 'rocksdb'\?",
        ),
        ({"state": None}, "state=None must be"),
    ],
)
def test_a_word_that_does_not_exist_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Pipeline("totals", **given)


def test_a_word_that_does_not_exist_is_refused_at_a_step() -> None:
    pipeline = Pipeline("totals")
    rows = pipeline.source("rows", files("in"), schema={"k": "string", "ts": "timestamp"}, time="ts")
    with pytest.raises(PipelineError, match="step once: state='disk' must be"):
        rows.deduplicate("k", within="1h", state="disk", name="once")  # type: ignore[arg-type]  # what is tried
    with pytest.raises(PipelineError, match="group_by: state='disk' must be"):
        rows.group_by("k", state="disk")  # type: ignore[arg-type]  # what is tried
    assert [step.name for step in pipeline._graph.steps] == ["rows"]


def test_a_missing_package_stops_the_run_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written(tmp_path / "in-0.jsonl", Random(1), 5, 0)
    pipeline = totals(tmp_path, "rocksdb", MemorySink(), MemorySink())
    with pytest.raises(NotInstalledError, match=r'pip install "fordstone\[rocksdb\]"'):
        pipeline.run(state=tmp_path / "state", bounded=True)
