"""Patterns, hosted: in small micro-batches and with deaths in between, what the edge gives."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died

from fordstone import Pattern, Pipeline
from fordstone.connectors import MemorySink, files, memory

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = {"k": "string", "ts": "timestamp", "n": "bigint"}
LATENESS_S = 4
START = datetime(2026, 3, 29, 0, 59, tzinfo=UTC)
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


def fill(directory: Path, rng: Random) -> None:
    directory.mkdir()
    for number in range(2):
        now, lines = 0, []
        for _ in range(rng.randint(20, 60)):
            now += rng.choice((0, 0, 1, 1, 2))
            second = now - rng.choice((0, 0, 1, LATENESS_S, LATENESS_S + 1))
            ts = (START + timedelta(seconds=second)).isoformat()
            lines.append(json.dumps({"k": rng.choice(["a", "é", None]), "ts": ts, "n": rng.randrange(50)}) + "\n")
        (directory / f"{number}.jsonl").write_text("".join(lines))


def made(directory: Path, kind: str) -> tuple[Pipeline, dict[str, MemorySink]]:
    sinks = {"out": MemorySink(), "late": MemorySink(), "over": MemorySink()}
    pipeline = Pipeline("patterns")
    rows = pipeline.source("rows", files(str(directory / "*")), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    pattern, options = PATTERNS[kind]
    found = rows.group_by("k").match(pattern, {"rows": "count(*)", "total": "sum(n)", "since": "first(ts)"}, **options)
    found.sink("out", memory(sinks["out"]))
    found.late.sink("late", memory(sinks["late"]))
    found.timeouts.sink("over", memory(sinks["over"]))
    return pipeline, sinks


def shown(sinks: dict[str, MemorySink]) -> dict[str, Counter[Any]]:
    return {name: Counter(row for frame in sink.frames() for row in frame.rows()) for name, sink in sinks.items()}


def hosted(directory: Path, kind: str, state: Path, rng: Random, *, deaths: int) -> dict[str, Counter[Any]]:
    pipeline, sinks = made(directory, kind)
    spark = MicroSpark(rng.randrange(2**32))
    rows_max, shards = rng.choice((5, 11, 30)), rng.randint(1, 3)
    while True:
        spark.fate.dies_at = None
        if deaths:
            spark.fate.dies_within(rng.randint(1, 80))
        try:
            spark.start(
                pipeline.plan(), state=state, bounded=True, shards=shards, rows_max=rows_max, batch_rows=4
            ).run()
        except Died:
            deaths -= 1
        else:
            return shown(sinks)


@pytest.mark.parametrize("kind", PATTERNS)
def test_small_micro_batches_and_deaths_give_what_the_edge_gives(kind: str, tmp_path: Path) -> None:
    for seed in range(2):
        rng, root = Random(seed), tmp_path / str(seed)
        root.mkdir()
        fill(root / "in", rng)
        pipeline, sinks = made(root / "in", kind)
        pipeline.run(state=root / "edge", bounded=True, parallelism=rng.randint(1, 2), batch_rows=5, interval="5ms")
        wanted = shown(sinks)
        assert len(wanted["out"]) > 2, f"seed {seed}"
        assert hosted(root / "in", kind, root / "spark", rng, deaths=2) == wanted, f"seed {seed}"


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_batch_job_gives_what_the_edge_gives(kind: str, tmp_path: Path) -> None:
    fill(tmp_path / "in", Random(7))
    pipeline, sinks = made(tmp_path / "in", kind)
    pipeline.run(state=tmp_path / "edge", bounded=True)
    job, found = made(tmp_path / "in", kind)
    MicroSpark(1).run_batch(job.plan(), state=tmp_path / "batch", shards=3, batch_rows=4)
    assert shown(found) == shown(sinks)
