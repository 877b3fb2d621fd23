"""Processes that die at any step of a batch: it is run again from its offset, in another order, and every row is out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.spark.micro import MicroQuery, MicroSpark
from tests.spark.micro_state import Died
from tests.spark.pipelines import read_all
from tests.spark.runs import EachSeed, Trial, compare, out_of, out_of_files, small_values

from fordstone.connectors import ConnectorSpec, files
from fordstone.connectors.files.rows import rows

pytestmark = pytest.mark.usefixtures("quick_disk")


def crashing(seed: int, root: Path) -> Counter[str]:
    trial = Trial(seed, root)
    trial.fill(30)
    rng = trial.rng
    spark = MicroSpark(seed, cores=rng.randint(1, 3))
    in_files = rng.random() < 0.6
    file_format = rng.choice(("parquet", "arrow"))

    def in_directory(name: str) -> ConnectorSpec:
        return files(str(root / "out" / name), format=file_format)

    connector: Callable[[str], ConnectorSpec] | None = in_directory if in_files else None
    case, sinks = trial.case(connector)
    case.oracle.batch(read_all(trial.files), ended=trial.files)
    case.oracle.finish()
    plan, functions, shards = case.pipeline.plan(), case.pipeline.functions, rng.randint(1, 3)
    rows_max = rng.choice((10, 20, 1000))

    def started() -> MicroQuery:
        spark.cores = rng.randint(1, 3)
        return spark.start(
            plan, functions, state=root / "state", bounded=True, shards=shards, rows_max=rows_max, batch_rows=8
        )

    deaths = rng.randint(1, 5)
    while True:
        if deaths:
            spark.fate.dies_within(rng.choice((rng.randint(1, 10), rng.randint(1, 50))))
        else:
            spark.fate.dies_at = None
        try:
            started().run()
        except Died:
            deaths -= 1
        else:
            break
    found = out_of_files(case, root / "out") if in_files else out_of(case, sinks)
    compare(found, case.oracle, what=f"died {dict(spark.fate.died)}")
    for source, count in case.oracle.dead_letters().items():
        letters = rows(root / "state" / plan.pipeline / "_spark" / "fordstone" / "dead-letters" / source)
        assert letters.height == count, f"dead letters of {source}"
    return Counter(deaths=spark.fate.died.total())


def test_a_row_is_out_once_whenever_the_process_dies(each_seed: EachSeed, tmp_path: Path) -> None:
    def tried_once(seed: int) -> Counter[str]:
        with small_values(seed):
            return crashing(seed, tmp_path / str(seed))

    tried = each_seed(tried_once)
    assert tried["deaths"] > tried["seeds"]
