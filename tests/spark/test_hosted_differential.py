"""Random pipelines over random files: the hosted way, as a stream and as a batch job, against the edge engine and the oracle."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.spark.micro import MicroSpark
from tests.spark.oracle import same
from tests.spark.pipelines import read_all
from tests.spark.runs import EdgeSide, Trial, compare, ids_of, out_of


def bounded(seed: int, root: Path) -> None:
    trial = Trial(seed, root)
    trial.fill()
    rng = trial.rng
    case, sinks = trial.case()
    case.oracle.batch(read_all(trial.files), ended=trial.files)
    case.oracle.finish()

    edge_case, edge_sinks = trial.case()
    edge = EdgeSide(edge_case.pipeline.plan(), edge_case.pipeline.functions)
    edge.run(parallelism=rng.randint(1, 2), batch_rows=rng.choice((3, 16, 1000)), rng=Random(seed))
    compare(out_of(edge_case, edge_sinks), case.oracle, what="edge")

    spark = MicroSpark(seed, cores=rng.randint(1, 3))
    options = {"shards": rng.randint(1, 4), "batch_rows": rng.choice((2, 16, 1000))}
    query = spark.start(
        case.pipeline.plan(),
        case.pipeline.functions,
        bounded=True,
        state=root / "stream",
        rows_max=rng.choice((5, 20, 60, 1000)),
        **options,
    )
    query.run()
    compare(out_of(case, sinks), case.oracle, what="stream")

    batch_case, batch_sinks = trial.case()
    spark.run_batch(batch_case.pipeline.plan(), batch_case.pipeline.functions, state=root / "batch", **options)
    compare(out_of(batch_case, batch_sinks), case.oracle, what="batch job")

    for name, kind in case.kinds.items():
        if kind == "at_once":
            wanted = ids_of(edge_sinks, name)
            assert same(ids_of(sinks, name), wanted) is None
            assert same(ids_of(batch_sinks, name), wanted) is None


@pytest.mark.parametrize("block", range(4))
def test_bounded_input_gives_what_the_edge_and_the_oracle_give(block: int, tmp_path: Path) -> None:
    for seed in range(block * 15, block * 15 + 15):
        try:
            bounded(seed, tmp_path / str(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
