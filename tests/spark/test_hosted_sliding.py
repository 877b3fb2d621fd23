"""Sliding windows and early results inside Spark: what DuckDB gives, with small micro-batches and processes that die."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.edge.runs import in_time, same_rows
from tests.edge.windowing import AGGREGATES, EXACT, Row, Slid, latest, some_rows, source, write
from tests.spark.micro import MicroSpark
from tests.spark.runs import small_values
from tests.spark.small_batches import run_with_deaths

from fordstone import Pipeline

pytestmark = pytest.mark.usefixtures("quick_disk")
SHAPES = [(20, 5, 0, None), (20, 7, 3, "1ms"), (30, 2, 1, None), (30, 2, 1, "1ms"), (4, 9, 2, "1ms")]


def partitions_of(root: Path) -> list[list[Row]]:
    partitions = [some_rows(seed, 50) for seed in (11, 12)]
    write(root, partitions)
    return partitions


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("size_s", "every_s", "offset_s", "early"), SHAPES)
def test_windows_are_those_of_one_query_however_often_processes_die(tmp_path, size_s, every_s, offset_s, early, exact):
    partitions = partitions_of(tmp_path / "in")
    slid = Slid(size_s, every_s, offset_s, EXACT if exact else AGGREGATES)
    pipeline = Pipeline("sliding")
    slid.add(source(pipeline, tmp_path / "in"), late=exact, early=early)
    options: dict[str, Any] = {"state": tmp_path / "state", "shards": 3, "rows_max": 15, "batch_rows": 8}
    with small_values(every_s):
        ended = run_with_deaths(
            MicroSpark(size_s, cores=2), pipeline, Random(size_s), deaths=3, within=(5, 120), **options
        )
    assert ended.died > 0
    assert ended.batches > 0
    wanted = slid.expected(partitions)
    if early is None:
        same_rows(slid.out.rows(), wanted)
    else:
        same_rows(slid.final.rows(), wanted)
        same_rows(latest(slid.out), wanted)
    if exact:
        assert slid.late.rows().height == in_time(partitions)[1]


def test_windows_as_a_batch_job_are_the_same(tmp_path):
    partitions = partitions_of(tmp_path / "in")
    slid, pipeline = Slid(20, 7, 3), Pipeline("sliding")
    slid.add(source(pipeline, tmp_path / "in"))
    MicroSpark(1, cores=2).run_batch(pipeline.plan(), {}, state=tmp_path / "state", shards=3, batch_rows=8)
    same_rows(slid.out.rows(), slid.expected(partitions))
