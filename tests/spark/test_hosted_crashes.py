"""Processes that die at any step of a batch, and machines that lose power with them: every row is out once.

A process that died leaves all that Spark wrote: the batch is run again from its offset, in another order. After a power cut any of it may
be gone or empty, if it was not synced.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.spark.micro import MicroQuery, MicroSpark
from tests.spark.micro_state import Died
from tests.spark.pipelines import read_all
from tests.spark.power import Power, by_chance
from tests.spark.runs import EachSeed, Trial, compare, out_of, out_of_files, small_values

from fordstone.connectors import ConnectorSpec, files
from fordstone.connectors.files.rows import rows


def crashing(seed: int, root: Path, power: Power | None = None) -> Counter[str]:
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
    lost: Counter[str] = Counter()
    while True:
        if deaths:
            spark.fate.dies_within(rng.choice((rng.randint(1, 10), rng.randint(1, 50))))
        else:
            spark.fate.dies_at = None
        try:
            started().run()
        except Died:
            deaths -= 1
            if power is not None:
                lost += power.cut(root / "state", root / "out", left=by_chance(rng))
        else:
            break
    found = out_of_files(case, root / "out") if in_files else out_of(case, sinks)
    compare(found, case.oracle, what=f"died {dict(spark.fate.died)}")
    for source, count in case.oracle.dead_letters().items():
        letters = rows(root / "state" / plan.pipeline / "_spark" / "fordstone" / "dead-letters" / source)
        assert letters.height == count, f"dead letters of {source}"
    return Counter(deaths=spark.fate.died.total()) + Counter({f"files {what}": count for what, count in lost.items()})


@pytest.mark.usefixtures("quick_disk")
def test_a_row_is_out_once_whenever_the_process_dies(each_seed: EachSeed, tmp_path: Path) -> None:
    def tried_once(seed: int) -> Counter[str]:
        with small_values(seed):
            return crashing(seed, tmp_path / str(seed))

    tried = each_seed(tried_once)
    assert tried["deaths"] > tried["seeds"]


def test_a_row_is_out_once_whenever_the_machine_loses_power(
    each_seed: EachSeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried_once(seed: int) -> Counter[str]:
        power = Power()
        monkeypatch.setattr(os, "fsync", power.fsync)
        with small_values(seed):
            return crashing(seed, tmp_path / str(seed), power)

    tried = each_seed(tried_once)
    assert tried["deaths"] > tried["seeds"]
    assert tried["files gone"] > 0
    assert tried["files torn"] > 0
