"""Patterns, hosted: in small micro-batches and with deaths in between, what the edge gives."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.spark.micro import MicroSpark
from tests.spark.small_batches import LATENESS_S, SCHEMA, Made, by_edge, fill, hosted, shown

from fordstone import Pattern, Pipeline
from fordstone.connectors import MemorySink, files, memory

pytestmark = pytest.mark.usefixtures("quick_disk")

PATTERNS: dict[str, tuple[Pattern, dict[str, Any]]] = {
    "rise": (
        Pattern("rise").start("a", "n > 20").then("b", "n > a.n", times=(1, 2)).then("c", "n < avg(b.n)").within("15s"),
        {"skip": "none"},
    ),
    "streak": (
        Pattern("streak").start("a", "n > 10", one_or_more=True, consecutive=True, greedy=True).within("30s"),
        {"choose": "preferred"},
    ),
    "silence": (Pattern("silence").start("a", "n > 40").not_followed_by("b", "n < 10").within("6s"), {}),
}


def made(directory: Path, kind: str) -> Made:
    sinks = {"out": MemorySink(), "late": MemorySink(), "over": MemorySink()}
    pipeline = Pipeline("patterns")
    rows = pipeline.source("rows", files(str(directory / "*")), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    pattern, options = PATTERNS[kind]
    found = rows.group_by("k").match(pattern, {"rows": "count(*)", "total": "sum(n)", "since": "first(ts)"}, **options)
    found.sink("out", memory(sinks["out"]))
    found.late.sink("late", memory(sinks["late"]))
    found.timeouts.sink("over", memory(sinks["over"]))
    return pipeline, sinks


@pytest.mark.parametrize("kind", PATTERNS)
def test_small_micro_batches_and_deaths_give_what_the_edge_gives(kind: str, tmp_path: Path) -> None:
    for seed in range(2):
        rng, root = Random(seed), tmp_path / str(seed)
        fill(root / "in", rng)
        wanted = by_edge(made(root / "in", kind), root / "edge", rng)
        assert len(wanted["out"]) > 2, f"seed {seed}"
        assert hosted(made(root / "in", kind), root / "spark", rng) == wanted, f"seed {seed}"


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_batch_job_gives_what_the_edge_gives(kind: str, tmp_path: Path) -> None:
    fill(tmp_path / "in", Random(7))
    pipeline, sinks = made(tmp_path / "in", kind)
    pipeline.run(state=tmp_path / "edge", bounded=True)
    job, found = made(tmp_path / "in", kind)
    MicroSpark(1).run_batch(job.plan(), state=tmp_path / "batch", shards=3, batch_rows=4)
    assert shown(found) == shown(sinks)
