"""Sessions and windows by count, hosted: in small micro-batches and with deaths in between, what the edge gives."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tests.spark.micro import MicroSpark
from tests.spark.small_batches import LATENESS_S, SCHEMA, Made, by_edge, fill, hosted, shown

from fordstone import Pipeline, by_count, session
from fordstone.connectors import MemorySink, files, memory
from fordstone.plan.windows import Window

pytestmark = pytest.mark.usefixtures("quick_disk")

WINDOWS: dict[str, Window] = {"sessions": session("3s"), "packs": by_count(4, every=3), "sparse": by_count(2, every=3)}


def made(directory: Path, window: Window) -> Made:
    sinks = {"out": MemorySink(), "late": MemorySink()}
    pipeline = Pipeline("windows")
    rows = pipeline.source("rows", files(str(directory / "*")), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    found = rows.group_by("k").window(window).agg(rows="count(*)", total="sum(n)", top="max(n)", name="found")
    found.sink("out", memory(sinks["out"]))
    found.late.sink("late", memory(sinks["late"]))
    return pipeline, sinks


@pytest.mark.parametrize("kind", WINDOWS)
def test_small_micro_batches_and_deaths_give_what_the_edge_gives(kind: str, tmp_path: Path) -> None:
    for seed in range(3):
        rng, root = Random(seed), tmp_path / str(seed)
        fill(root / "in", rng)
        wanted = by_edge(made(root / "in", WINDOWS[kind]), root / "edge", rng)
        assert len(wanted["out"]) > 5, f"seed {seed}"
        assert hosted(made(root / "in", WINDOWS[kind]), root / "spark", rng) == wanted, f"seed {seed}"


def chained(directory: Path) -> Made:
    sinks = {"out": MemorySink()}
    pipeline = Pipeline("chain")
    rows = pipeline.source("rows", files(str(directory / "*")), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    visits = rows.group_by("k").window(session("2s")).agg(rows="count(*)", total="sum(n)", name="visits")
    packs = visits.group_by("k").window(by_count(2, every=1)).agg(rows="sum(rows)", total="max(total)", name="packs")
    found = packs.group_by().window(session("3s")).agg(n="count(*)", rows="sum(rows)", total="sum(total)", name="found")
    found.sink("out", memory(sinks["out"]))
    return pipeline, sinks


def test_windows_over_windows_give_what_the_edge_gives(tmp_path: Path) -> None:
    fill(tmp_path / "in", Random(3))
    pipeline, wanted = chained(tmp_path / "in")
    pipeline.run(state=tmp_path / "edge", bounded=True, parallelism=2, batch_rows=5, interval="5ms")
    job, found = chained(tmp_path / "in")
    MicroSpark(5).start(job.plan(), state=tmp_path / "spark", bounded=True, shards=3, rows_max=9, batch_rows=4).run()
    assert shown(found) == shown(wanted)
    assert len(shown(wanted)["out"]) > 1


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_batch_job_gives_what_the_edge_gives(kind: str, tmp_path: Path) -> None:
    fill(tmp_path / "in", Random(7))
    pipeline, sinks = made(tmp_path / "in", WINDOWS[kind])
    pipeline.run(state=tmp_path / "edge", bounded=True)
    job, found = made(tmp_path / "in", WINDOWS[kind])
    MicroSpark(1).run_batch(job.plan(), job.functions, state=tmp_path / "batch", shards=2, batch_rows=6)
    assert shown(found) == shown(sinks)
