"""Input that grows while a query runs: files that grow, new files, partitions that fall idle and come back, restarts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.spark.micro import MicroQuery, MicroSpark
from tests.spark.runs import EachSeed, Trial, compare, out_of

pytestmark = pytest.mark.usefixtures("quick_disk")


def growing(seed: int, root: Path) -> Counter[str]:
    trial = Trial(seed, root, idle_after="1s" if seed % 2 else None)
    rng = trial.rng
    case, sinks = trial.case()
    plan, functions = case.pipeline.plan(), case.pipeline.functions
    spark = MicroSpark(seed, cores=rng.randint(1, 3))
    shards, rows_max = rng.randint(1, 3), rng.choice((5, 20, 1000))

    def started() -> MicroQuery:
        return spark.start(
            plan,
            functions,
            state=root / "state",
            shards=shards,
            rows_max=rows_max,
            batch_rows=rng.choice((2, 1000)),
            available_now=rng.random() < 0.2,
        )

    query = started()
    for number in range(rng.randint(4, 9)):
        source = rng.choice(list(trial.files))
        if trial.idle_after is not None:
            spark.now_us += rng.choice((0, 400_000, 1_100_000))
        match rng.randrange(6) if number else 0:
            case 0 | 1:
                # Only files of lines can come back from idleness.
                ending = None if trial.idle_after is None else rng.choice(("jsonl", "csv"))
                trial.add_file(source, rng.choice((0, 1, 5, 15)), second=rng.randint(0, 40), ending=ending)
            case 2 | 3 | 4:
                grows = [place for place, file in enumerate(trial.files[source]) if file.grows]
                if grows:
                    trial.grow(source, rng.choice(grows), rng.choice((1, 5, 15)))
            case _:
                query = started()
        query.step()
    query = started()
    query.run()
    for reads, ended in trial.history(query.location):
        case.oracle.batch(reads, ended)
    case.oracle.finish()
    compare(out_of(case, sinks), case.oracle, what="stream")
    read = {
        (source, name)
        for source, cut in query.committer.files.cut(query.epoch).sources.items()
        for name in cut.partitions
    }
    assert read == {(source, file.path.name) for source, found in trial.files.items() for file in found}
    return Counter(batches=len(query.location.batches("commits")))


def test_input_that_grows_gives_what_the_oracle_gives(each_seed: EachSeed, tmp_path: Path) -> None:
    each_seed(lambda seed: growing(seed, tmp_path / str(seed)))
