"""Deduplication, means by half-life and rates, hosted: in small micro-batches and with deaths, what the edge gives."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.operators.subtasks import bits
from tests.spark import small_batches
from tests.spark.micro import MicroSpark
from tests.spark.runs import small_values
from tests.spark.small_batches import LATENESS_S, Made, run_with_deaths

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, files, memory

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}


def value_and_key(rng: Random) -> dict[str, Any]:
    x = rng.choice((None, 0.0, rng.uniform(-5, 5)))
    return {"k": rng.choice(["a", "é", None]), "x": x}


fill = partial(small_batches.fill, row=value_and_key, rows_min=30)


def made(directory: Path) -> Made:
    sinks = {name: MemorySink() for name in ("once", "late", "means", "rates")}
    pipeline = Pipeline("estimates")
    rows = pipeline.source("rows", files(str(directory / "*")), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    once = rows.deduplicate("k", within="3s", name="first")
    once.sink("once", memory(sinks["once"]))
    once.late.sink("late", memory(sinks["late"]))
    once.group_by("k").ewma(s="x", half_life="5s", name="slow").sink("means", memory(sinks["means"]))
    rates = rows.group_by("k").window(tumbling("20s"))
    rates.agg(mean="beta_mean(x > 0)", low="beta_low(x > 0, 0.9)", high="beta_high(x > 0, 0.9, 0.5, 0.5)").sink(
        "rates", memory(sinks["rates"])
    )
    return pipeline, sinks


def shown(sinks: dict[str, MemorySink]) -> dict[str, Counter[Any]]:
    return {
        name: Counter(tuple(map(bits, row)) for frame in sink.frames() for row in frame.rows())
        for name, sink in sinks.items()
    }


def test_small_micro_batches_and_deaths_give_what_the_edge_gives_to_the_last_bit(tmp_path: Path) -> None:
    for seed in range(3):
        rng, root = Random(seed), tmp_path / str(seed)
        fill(root / "in", rng)
        pipeline, sinks = made(root / "in")
        pipeline.run(state=root / "edge", bounded=True, parallelism=rng.randint(1, 2), batch_rows=5, interval="5ms")
        wanted = shown(sinks)
        assert all(wanted.values()), f"seed {seed}"
        pipeline, sinks = made(root / "in")
        options: dict[str, Any] = {
            "state": root / "spark",
            "shards": rng.randint(1, 3),
            "rows_max": 15,
            "batch_rows": 4,
        }
        with small_values(seed):
            run_with_deaths(MicroSpark(seed), pipeline, rng, deaths=2, **options)
        assert shown(sinks) == wanted, f"seed {seed}"


def test_a_batch_job_gives_what_the_edge_gives(tmp_path: Path) -> None:
    fill(tmp_path / "in", Random(7))
    pipeline, sinks = made(tmp_path / "in")
    pipeline.run(state=tmp_path / "edge", bounded=True)
    job, found = made(tmp_path / "in")
    MicroSpark(1).run_batch(job.plan(), job.functions, state=tmp_path / "batch", shards=2, batch_rows=6)
    assert shown(found) == shown(sinks)
