"""Tables of lookups that are read again while a query runs on Spark: all rows of a batch find the same, also when it is executed again."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died
from tests.spark.runs import EachSeed

from fordstone import Pipeline
from fordstone.connectors import files, refreshed_table
from fordstone.errors import SourceError
from fordstone.protocol.progress import Progress
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted import source as source_module
from fordstone.spark.hosted import tables as tables_module
from fordstone.spark.run import run_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOKS_MAX = 500

SCHEMA = {"k": "string", "n": "bigint"}


class AtOnce(threading.Thread):
    """A thread that has done its work when it was started, so that a seed gives one course of events."""

    def start(self) -> None:
        self.run()


class World:
    """Input, a table with versions, and a query that is started again and again."""

    def __init__(self, root: Path, rng: Random) -> None:
        self.root, self.rng = root, rng
        self.spark = MicroSpark(rng.randrange(2**32))
        self.version = self.sent = 0
        (root / "in").mkdir(parents=True)
        self.change()

    def change(self) -> None:
        """Write the next version of the table."""
        self.version += 1
        pl.DataFrame({"k": list("abc"), "version": [self.version] * 3}).write_parquet(self.root / "table.parquet")

    def send(self, count: int) -> None:
        with (self.root / "in" / f"{self.rng.randrange(3)}.jsonl").open("a") as file:
            for _ in range(count):
                self.sent += 1
                file.write(json.dumps({"k": self.rng.choice("abc"), "n": self.sent}) + "\n")

    def pipeline(self, refresh: str = "2s") -> Pipeline:
        """Look rows up where they are read, and after a keyed step."""
        pipeline = Pipeline("refreshed")
        schema = {"k": "string", "version": "bigint"}
        table = files(str(self.root / "table.parquet"))
        read = pipeline.source("rows", files(str(self.root / "in/*.jsonl")), schema=SCHEMA)
        first = read.lookup(table, on="k", schema=schema, refresh=refresh, name="early")
        second = first.distinct().lookup(table, on="k", schema=schema, refresh=refresh, suffix="_late", name="late")
        second.sink("out", files(str(self.root / "out"), format="jsonl"))
        return pipeline

    def options(self) -> dict[str, Any]:
        return {"state": self.root / "state", "shards": 2}

    def start(self, **options: Any) -> Any:
        return self.spark.start(self.pipeline().plan(), **self.options(), rows_max=7, **options)

    def out(self) -> pl.DataFrame:
        """All rows with their epochs, in order."""
        found = [pl.DataFrame(schema={"epoch": pl.Int64, "n": pl.Int64, "version": pl.Int64, "version_late": pl.Int64})]
        for path in sorted(self.root.glob("out/epoch-*/*.jsonl")):
            epoch = int(path.parent.name.removeprefix("epoch-"))
            found.append(pl.read_ndjson(path).select(pl.lit(epoch).alias("epoch"), "n", "version", "version_late"))
        return pl.concat(found, how="vertical_relaxed")

    def check(self) -> None:
        out = self.out()
        assert sorted(out["n"]) == list(range(1, out.height + 1))
        assert out["version"].to_list() == out["version_late"].to_list(), (
            "one table in a batch, wherever it looks rows up"
        )
        assert out.group_by("epoch").agg(pl.col("version").n_unique())["version"].max() == 1
        assert out["version"].is_sorted()

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("state/**/lookups/early-*/*.arrow"))


@pytest.fixture(name="each_second")
def each_second_fixture(quick_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is planned every second, and a table was read before the next."""
    clock = itertools.count(1_780_000_000_000_000, 1_000_000)
    monkeypatch.setattr(source_module, "wall_clock_us", lambda: next(clock))
    monkeypatch.setattr(refreshed_table, "threading", SimpleNamespace(**vars(threading) | {"Thread": AtOnce}))


@pytest.fixture(name="world")
def world_fixture(tmp_path: Path, each_second: None) -> World:
    return World(tmp_path, Random(1))


@pytest.mark.usefixtures("each_second")
def test_rows_of_a_batch_find_one_version_also_when_it_is_executed_again(each_seed: EachSeed, tmp_path: Path) -> None:
    def tried_once(seed: int) -> Counter[str]:
        rng = Random(seed)
        world = World(tmp_path / str(seed), rng)
        deaths, query = 0, None
        for _ in range(30):
            try:
                if query is None:
                    query = world.start()
                world.spark.fate.dies_at = None
                if rng.random() < 0.5:
                    world.spark.fate.dies_within(rng.randint(1, 40))
                match rng.randrange(3):
                    case 0:
                        world.change()
                    case 1:
                        world.send(rng.randint(1, 12))
                    case _:
                        query.step()
            except Died:
                deaths, query = deaths + 1, None
        world.spark.fate.dies_at = None
        query = query or world.start()
        query.run()
        world.send(5)
        query.run()
        world.check()
        out = world.out()
        assert out.height == world.sent
        assert len(world.kept()) <= 3
        return Counter(deaths=deaths, versions=out["version"].n_unique())

    tried = each_seed(tried_once)
    assert tried["deaths"] >= tried["seeds"]
    assert tried["versions"] > 2 * tried["seeds"]


def test_a_batch_job_looks_rows_up_in_what_the_table_has_when_it_begins(world: World) -> None:
    world.change()
    world.send(20)
    world.spark.run_batch(world.pipeline().plan(), **world.options())
    assert world.out()["version"].unique().to_list() == [2]
    assert world.out().height == 20


def test_a_table_that_is_none_is_logged_and_rows_find_what_was_there_before(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    query = world.start()
    world.send(1)
    query.run()
    table = world.root / "table.parquet"
    pl.DataFrame({"k": ["a", "a"], "version": [2, 3]}).write_parquet(table)
    for _ in range(3):
        world.send(1)
        query.run()
    assert "more than one row for k='a'" in caplog.text
    assert world.out()["version"].unique().to_list() == [1]
    # At a start there is nothing before.
    other = World(world.root / "other", Random(2))
    table.rename(other.root / "table.parquet")
    other.send(1)
    with pytest.raises(SourceError, match="more than one row"):
        other.start().run()


def test_a_table_is_read_again_while_no_rows_come(world: World) -> None:
    query = world.start()
    world.send(1)
    query.run()
    world.change()
    for _ in range(5):
        assert query.run() == 0, "a table that was read again is no batch"
    world.send(1)
    query.run()
    assert world.out()["version"].to_list() == [1, 2]


def test_a_batch_whose_table_was_removed_says_so(world: World) -> None:
    query = world.start()
    world.send(1)
    world.spark.fate.dies_before = "run"
    with pytest.raises(Died):
        query.run()
    for path in world.root.glob("state/**/lookups/*/*.arrow"):
        path.unlink()
    tables_module._frame.cache_clear()
    with pytest.raises(SourceError, match="is missing: it has the table that rows of this batch are looked up in"):
        world.start().run()


def test_rows_on_spark_find_what_the_table_has_since(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path, Random(1))
    world.send(2)
    looks: list[int] = []

    def on_progress(progress: Progress) -> None:
        if progress.stopping:
            return
        looks.append(world.version)
        assert len(looks) < LOOKS_MAX, "the table is not read again"
        world.send(1)
        if world.version not in world.out()["version"]:
            return
        if world.version == 2:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            world.change()

    pipeline = world.pipeline(refresh="10ms")
    config = SparkConfig(**world.options(), interval="50ms")
    report = run_plan(pipeline.plan(), pipeline.functions, config, spark=spark, on_progress=on_progress)
    assert report.outcome == "stopped"
    world.check()
    assert world.out()["version"].unique().sort().to_list() == [1, 2]
