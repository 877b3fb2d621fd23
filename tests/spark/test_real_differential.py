"""Random pipelines on a real Spark, as a stream and as a batch job, against the edge engine and the oracle.

The same cases run by the hundred without Java in test_hosted_differential; here it is Spark that plans, shuffles, keeps
the state and commits.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples import rest
from tests.spark.oracle import same
from tests.spark.pipelines import read_all
from tests.spark.runs import EdgeSide, Trial, compare, ids_of, out_of

from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.query import hosted_query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEEDS = (5, 8, 12, 14, 17, 36)
"""Between them these pipelines have a step of every kind."""


def _ignore(_outcome: Any) -> None:
    pass


@pytest.mark.parametrize("seed", [*SEEDS[:2], *rest(*SEEDS[2:])])
def test_edge_stream_and_batch_give_what_the_oracle_gives(seed: int, spark: SparkSession, tmp_path: Path) -> None:
    trial = Trial(seed, tmp_path)
    trial.fill()
    case, sinks = trial.case()
    case.oracle.batch(read_all(trial.files), ended=trial.files)
    case.oracle.finish()

    edge_case, edge_sinks = trial.case()
    EdgeSide(edge_case.pipeline.plan(), edge_case.pipeline.functions).run(
        parallelism=2, batch_rows=16, rng=Random(seed)
    )
    compare(out_of(edge_case, edge_sinks), case.oracle, what="edge")

    config = SparkConfig(state=tmp_path / "stream", bounded=True, shards=2, rows_max=100)
    query = hosted_query(case.pipeline.plan(), case.pipeline.functions, config, spark, batch=False)
    running = query.start(_ignore)
    running.awaitTermination()
    progress = running.recentProgress
    assert progress
    assert all(one.numRowsDroppedByWatermark == 0 for one_batch in progress for one in one_batch.stateOperators)
    compare(out_of(case, sinks), case.oracle, what="stream")

    batch_case, batch_sinks = trial.case()
    config = SparkConfig(state=tmp_path / "batch", bounded=True, shards=2)
    hosted_query(batch_case.pipeline.plan(), batch_case.pipeline.functions, config, spark, batch=True).run_batch(
        _ignore
    )
    compare(out_of(batch_case, batch_sinks), case.oracle, what="batch job")

    for name, kind in case.kinds.items():
        if kind == "at_once":
            wanted = ids_of(edge_sinks, name)
            assert same(ids_of(sinks, name), wanted) is None
            assert same(ids_of(batch_sinks, name), wanted) is None
