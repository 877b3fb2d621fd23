"""A pipeline that goes from the edge to Spark and back, at any number of tasks and shards, with exact results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died
from tests.spark.pipelines import read_all
from tests.spark.runs import DeadLetterBox, EachSeed, EdgeSide, Trial, compare, ids_of, out_of, small_values

from fordstone.spark.hosted.state_transfer import import_spark
from fordstone.storage.disk import OsDisk

pytestmark = pytest.mark.usefixtures("quick_disk")


def moving(seed: int, root: Path) -> Counter[str]:
    # What grows after it fell idle may be late: which rows are depends on when, so then nothing grows.
    idles = seed % 3 == 0
    trial = Trial(seed, root, idle_after="20ms" if idles else None)
    trial.fill(30)
    rng = trial.rng
    case, sinks = trial.case()
    plan, functions = case.pipeline.plan(), case.pipeline.functions
    spark = MicroSpark(seed, cores=2)
    boxes: dict[str, DeadLetterBox] = {}
    letters: dict[str, dict[int, int]] = {source: {} for source in trial.files}
    tables = any(file.format in {"parquet", "arrow"} for found in trial.files.values() for file in found)
    legs = rng.randint(2, 4)
    on_edge = rng.random() < 0.5
    edge_root: Path | None = None
    for leg in range(legs):
        last = leg == legs - 1
        spark.now_us += rng.choice((0, 30_000))
        if leg and not idles:
            for source, found in trial.files.items():
                for number, file in enumerate(found):
                    if file.format in {"jsonl", "csv"}:
                        trial.grow(source, number, rng.choice((0, 1, 10)))
        if on_edge:
            edge_root = edge_root or root / f"edge{leg}"
            edge = EdgeSide(plan, functions, disk=OsDisk(edge_root), dead_letters=boxes)
            edge.run(
                bounded=last,
                # More tasks over tables, not to the end: see test_edge_tables.
                parallelism=rng.randint(1, 3) if last or not tables else 1,
                batch_rows=rng.choice((3, 16)),
                stop_after=None if last else rng.choice((rng.randint(1, 40), 150)),
                rng=rng,
            )
        else:
            state = root / f"spark{leg}"
            options: dict[str, Any] = {
                "state": state,
                "shards": rng.randint(1, 4),
                "from_checkpoint": None if edge_root is None else str(edge_root),
            }
            if last and rng.random() < 0.5:
                spark.run_batch(plan, functions, **options)
            else:
                query = spark.start(plan, functions, bounded=last, rows_max=rng.choice((5, 20)), **options)
                for _ in range(10**6 if last else rng.randint(1, 5)):
                    if not query.step():
                        break
                    spark.now_us += rng.choice((0, 30_000))
            checkpoint = state / plan.pipeline / "_spark"
            for source in trial.files:
                for letters_file in (checkpoint / "fordstone" / "dead-letters" / source).glob("epoch-*.jsonl"):
                    letters[source][int(letters_file.stem.removeprefix("epoch-"))] = len(
                        letters_file.read_text().splitlines()
                    )
            if not last:
                edge_root = root / f"edge{leg}"
                import_spark(spark, str(checkpoint), str(edge_root))  # type: ignore[arg-type]  # as far as it is used
        on_edge = not on_edge
    case.oracle.batch(read_all(trial.files), ended=trial.files)
    case.oracle.finish()
    compare(out_of(case, sinks), case.oracle, what=f"{legs} legs")
    for source, count in case.oracle.dead_letters().items():
        # A query lets the last epoch of the edge out once more, in case the edge had not come to it.
        by_epoch = letters[source] | (boxes[source].epochs if source in boxes else {})
        assert sum(by_epoch.values()) == count, f"dead letters of {source}"
    for name, kind in case.kinds.items():
        if kind == "at_once":
            ids = [row[-1] for row in ids_of(sinks, name)]
            assert len(set(ids)) == len(ids)
    return Counter(moves=legs - 1)


def seeded_and_dying(seed: int, root: Path, step: int) -> bool:
    """From the edge to Spark, where the process dies at a step of the first batch; says whether there was such a step."""
    trial = Trial(seed, root, ids=False)
    for source in trial.files:
        trial.add_file(source, 40, ending="jsonl")
    case, sinks = trial.case()
    plan, functions = case.pipeline.plan(), case.pipeline.functions
    EdgeSide(plan, functions, disk=OsDisk(root / "edge")).run(bounded=False, batch_rows=8, stop_after=4)
    for source in trial.files:
        trial.grow(source, 0, 40)
    spark = MicroSpark(seed)
    options: dict[str, Any] = {"state": root / "spark", "shards": 2, "bounded": True, "rows_max": 15}
    spark.fate.dies_within(step)
    try:
        spark.start(plan, functions, **options, from_checkpoint=str(root / "edge")).step()
    except Died:
        died = True
    else:
        died, spark.fate.dies_at = False, None
    spark.start(plan, functions, **options, from_checkpoint=str(root / "edge")).run()
    case.oracle.batch(read_all(trial.files), ended=trial.files)
    case.oracle.finish()
    compare(out_of(case, sinks), case.oracle, what=f"died {dict(spark.fate.died)}")
    return died


def test_a_pipeline_that_moves_between_edge_and_spark_is_exact(each_seed: EachSeed, tmp_path: Path) -> None:
    def tried_once(seed: int) -> Counter[str]:
        with small_values(seed):
            return moving(seed, tmp_path / str(seed))

    each_seed(tried_once)


@pytest.mark.parametrize("seed", [7])
def test_a_move_to_spark_is_exact_at_whatever_step_of_its_first_batch_the_process_dies(
    seed: int, tmp_path: Path
) -> None:
    """It died between the cut and Spark's commit: the batch was run again without the state that it had begun with."""
    step = 1
    while seeded_and_dying(seed, tmp_path / str(step), step):
        step += 1
    assert step > 20
