"""Random pipelines over random files: the hosted way, as a stream and as a batch job, against the edge engine and the oracle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.spark.micro import MicroSpark
from tests.spark.oracle import same
from tests.spark.pipelines import read_all
from tests.spark.runs import EachSeed, EdgeSide, Trial, compare, ids_of, out_of

pytestmark = pytest.mark.usefixtures("quick_disk")


def bounded(seed: int, root: Path) -> Counter[str]:
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
    options: dict[str, Any] = {"shards": rng.randint(1, 4), "batch_rows": rng.choice((2, 16, 1000))}
    query = spark.start(
        case.pipeline.plan(),
        case.pipeline.functions,
        bounded=True,
        state=root / "stream",
        rows_max=rng.choice((5, 20, 60, 1000)),
        **options,
    )
    batches = query.run()
    compare(out_of(case, sinks), case.oracle, what="stream")

    batch_case, batch_sinks = trial.case()
    spark.run_batch(batch_case.pipeline.plan(), batch_case.pipeline.functions, state=root / "batch", **options)
    compare(out_of(batch_case, batch_sinks), case.oracle, what="batch job")

    for name, kind in case.kinds.items():
        if kind == "at_once":
            wanted = ids_of(edge_sinks, name)
            assert same(ids_of(sinks, name), wanted) is None
            assert same(ids_of(batch_sinks, name), wanted) is None
    return Counter(batches=batches + 1)


def test_bounded_input_gives_what_the_edge_and_the_oracle_give(each_seed: EachSeed, tmp_path: Path) -> None:
    each_seed(lambda seed: bounded(seed, tmp_path / str(seed)))
