"""Every case of `operators` on every engine. An engine runs all of them once, as one pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.cases.operators import CASES, Built, Case, Given, build

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_BATCHES = pytest.mark.slow
RUNS = [
    pytest.param({"mode": "aligned", "parallelism": 1, "batch_rows": 1000}, id="aligned-1-1000"),
    pytest.param({"mode": "aligned", "parallelism": 1, "batch_rows": 50, "kept": "rocksdb"}, id="rocksdb-1-50"),
    pytest.param(
        {"mode": "aligned", "parallelism": 2, "batch_rows": 20, "kept": "file"}, id="file-2-20", marks=SMALL_BATCHES
    ),
    pytest.param({"mode": "aligned", "parallelism": 3, "batch_rows": 7}, id="aligned-3-7", marks=SMALL_BATCHES),
    pytest.param({"mode": "unaligned", "parallelism": 2, "batch_rows": 3}, id="unaligned-2-3", marks=SMALL_BATCHES),
    pytest.param({"mode": "blocking", "parallelism": 2, "batch_rows": 20}, id="blocking-2-20", marks=pytest.mark.full),
]

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Given, Path]:
    found, root = Given.some(), tmp_path_factory.mktemp("cases")
    found.write(root)
    return found, root


@pytest.fixture(scope="module", params=RUNS)
def on_edge(
    request: pytest.FixtureRequest, given: tuple[Given, Path], tmp_path_factory: pytest.TempPathFactory
) -> Built:
    options = dict(request.param)
    built = build(given[1], mode=options.pop("mode"), state=options.pop("kept", "memory"))
    built = replace(built, state=tmp_path_factory.mktemp("edge"))
    built.pipeline.run(state=built.state, bounded=True, interval="5ms", **options)
    return built


@pytest.fixture(scope="module")
def as_stream(spark: SparkSession, given: tuple[Given, Path], tmp_path_factory: pytest.TempPathFactory) -> Built:
    from fordstone.spark.config import SparkConfig
    from fordstone.spark.hosted.query import hosted_query

    built = replace(build(given[1]), state=tmp_path_factory.mktemp("stream"))
    config = SparkConfig(state=built.state, bounded=True, shards=2, rows_max=60, batch_rows=16)
    query = hosted_query(built.pipeline.plan(), built.pipeline.functions, config, spark, batch=False)
    batches: list[Any] = []
    running = query.start(batches.append)
    running.awaitTermination()
    assert len(batches) > 2
    # Spark's own watermark plays no part (rule 7).
    assert all(
        one.numRowsDroppedByWatermark == 0 for progress in running.recentProgress for one in progress.stateOperators
    )
    return built


@pytest.fixture(scope="module")
def as_batch_job(spark: SparkSession, given: tuple[Given, Path], tmp_path_factory: pytest.TempPathFactory) -> Built:
    from fordstone.spark import run

    built = replace(build(given[1]), state=tmp_path_factory.mktemp("batch"))
    run(built.pipeline, spark=spark, state=built.state, bounded=True, shards=2, batch_rows=16)
    return built


@by_case
def test_on_the_edge(case: Case, on_edge: Built, given: tuple[Given, Path]) -> None:
    case.check(on_edge.found(case), given[0])


@by_case
def test_on_spark_as_a_stream(case: Case, as_stream: Built, given: tuple[Given, Path]) -> None:
    case.check(as_stream.found(case), given[0])


@by_case
def test_on_spark_as_a_batch_job(case: Case, as_batch_job: Built, given: tuple[Given, Path]) -> None:
    case.check(as_batch_job.found(case), given[0])
