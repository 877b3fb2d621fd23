"""Every aggregate hosted on Spark: the edge engine's results, with small batches and deaths in between."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
from tests.edge.test_aggregates import SCHEMA, TEXTS, Longest, record, some_rows
from tests.spark.micro import MicroSpark
from tests.spark.small_batches import run_with_deaths

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, files, memory
from fordstone.connectors.compare import same_rows

pytestmark = pytest.mark.usefixtures("quick_disk")


def built(root: Path) -> tuple[Pipeline, MemorySink, MemorySink]:
    windows, running = MemorySink(), MemorySink()
    pipeline = Pipeline("aggregates")
    stream = pipeline.source("rows", files(str(root / "*.jsonl")), schema=SCHEMA, time="ts", on_error="fail")
    stream.group_by("k").window(tumbling("10s")).agg(own=Longest.of("s"), **TEXTS).sink("windows", memory(windows))
    stream.group_by("k").agg(own=Longest.of("s"), **TEXTS).sink("running", memory(running))
    return pipeline, windows, running


def latest(sink: MemorySink) -> pl.DataFrame:
    return sink.rows().unique("k", keep="last", maintain_order=True)


@pytest.mark.parametrize("seed", range(4))
def test_hosted_results_are_those_of_the_edge_engine(seed: int, tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.mkdir()
    for number in range(2):
        rows = (record(row) for row in some_rows(10 * seed + number, 60))
        lines = [json.dumps({"k": k, "ts": ts.isoformat(), "x": x, "s": s}) + "\n" for k, ts, x, s in rows]
        (given / f"{number}.jsonl").write_text("".join(lines))
    pipeline, edge_windows, edge_running = built(given)
    pipeline.run(state=tmp_path / "edge", bounded=True, parallelism=2, batch_rows=9)

    pipeline, windows, running = built(given)
    options: dict[str, Any] = {"state": tmp_path / "spark", "shards": 3, "rows_max": 25, "batch_rows": 5}
    run_with_deaths(MicroSpark(seed), pipeline, Random(seed), deaths=3, **options)
    assert windows.rows().height >= 6
    assert same_rows(windows.rows(), edge_windows.rows())
    columns = edge_running.rows().columns
    assert same_rows(latest(running).select(columns), latest(edge_running))
