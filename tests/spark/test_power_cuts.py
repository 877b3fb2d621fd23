"""A power cut at the center takes what Spark wrote: every row is counted once all the same, or the query stops with an error.

Ten rows are read, ten more in a few batches; then something of Spark's is lost, and ten more rows come. The same losses are tried on the
stand-in for Spark and on Spark itself. There what we sync is on the disk; Spark never syncs.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died, SparkRefuses
from tests.spark.power import Left, Power

from fordstone import Pipeline
from fordstone.connectors import files
from fordstone.epochs.manifest import Cut
from fordstone.errors import CheckpointError, DamagedError, FordstoneError, StorageError
from fordstone.protocol.retry import RestartPolicy
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.checkpoint import QueryFiles
from fordstone.spark.hosted.spark_files import SET_ASIDE, SparkFiles, spark_files
from fordstone.spark.run import run_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES = 4
"""One in the first run, three in the second."""
LAST = BATCHES - 1


class Center:
    """A query over one growing file, with one running sum."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = root / "state" / "p" / "_spark"
        self.written = 0

    def pipeline(self) -> Pipeline:
        pipeline = Pipeline("p")
        rows = pipeline.source("s", files(str(self.root / "in" / "*.jsonl")), schema={"k": "string", "n": "bigint"})
        totals = rows.group_by("k").agg(name="totals", n="count(*)", total="sum(n)")
        totals.sink("out", files(str(self.root / "out"), format="jsonl"))
        return pipeline

    def feed(self, count: int = 10) -> None:
        (self.root / "in").mkdir(parents=True, exist_ok=True)
        with (self.root / "in" / "a.jsonl").open("a") as file:
            for n in range(self.written, self.written + count):
                file.write(json.dumps({"k": "a", "n": n}) + "\n")
        self.written += count

    def totals(self) -> list[tuple[int, int]]:
        """Count and sum as they were released, in order of epochs."""
        found = [
            json.loads(line) for file in self.root.glob("out/**/*.jsonl") for line in file.read_text().splitlines()
        ]
        return [(row["n"], row["total"]) for row in sorted(found, key=lambda row: row["__epoch"])]


def total(rows: int) -> tuple[int, int]:
    return rows, sum(range(rows))


RIGHT = [total(10), total(14), total(18), total(20), total(30)]
"""After each epoch, if the second run reads four rows at a time."""

# What is lost. Batches are counted from 0, state from 1.

Loss = Callable[[Path], None]


def lose(*patterns: str) -> Loss:
    return each(Path.unlink, *patterns)


def tear(*patterns: str) -> Loss:
    return each(lambda file: os.truncate(file, 0), *patterns)


def halve(*patterns: str) -> Loss:
    return each(lambda file: os.truncate(file, file.stat().st_size // 2), *patterns)


def each(lose_one: Callable[[Path], None], *patterns: str) -> Loss:
    def loss(location: Path) -> None:
        for file in found(location, *patterns):
            lose_one(file)

    return loss


def found(location: Path, *patterns: str) -> list[Path]:
    files = [file for pattern in patterns for file in location.glob(pattern) if file.is_file()]
    assert files, f"nothing is called {patterns} in {sorted(location.rglob('*'))}"
    return files


def both(*losses: Loss) -> Loss:
    def all_of_them(location: Path) -> None:
        for loss in losses:
            loss(location)

    return all_of_them


OFFSETS, COMMITS, STATE = f"offsets/*{LAST}*", f"commits/*{LAST}*", f"state/0/*/*{LAST + 1}_*"
"""Of the last batch, with what is hidden."""
LOSSES: dict[str, Loss] = {
    "the offset": lose(OFFSETS),
    "the commit": lose(COMMITS),
    "offset and commit": lose(OFFSETS, COMMITS),
    "offset, commit and state": lose(OFFSETS, COMMITS, STATE),
    "an empty offset": both(lose(COMMITS), tear(OFFSETS)),
    "an empty commit": tear(COMMITS),
    "half of an offset": both(lose(COMMITS), halve(OFFSETS)),
    "empty logs": tear(OFFSETS, COMMITS),
    "empty logs and state": tear(OFFSETS, COMMITS, STATE),
    "the logs of several batches": lose("offsets/*[123]*", "commits/*[123]*"),
    "the commits of several batches": lose("commits/*[123]*"),
    "the offsets of several batches": lose("offsets/*[123]*"),
    "several batches": lose("offsets/*[123]*", "commits/*[123]*", "state/0/*/*[234]_*"),
    "all of Spark's files": lose("offsets/*", "commits/*", "state/**/*", "*metadata*"),
    "all of Spark's files but metadata": lose("offsets/*", "commits/*", "state/**/*"),
    "all of Spark's bytes": tear("offsets/*", "commits/*", "state/**/*", "*metadata*"),
    "the commit before all sinks had the epoch": lose(COMMITS, f"fordstone/cuts/*{BATCHES}.json"),
    "offset and commit before all sinks had the epoch": lose(OFFSETS, COMMITS, f"fordstone/cuts/*{BATCHES}.json"),
}
ON_SPARK = (
    "the offset",
    "offset and commit",
    "offset, commit and state",
    "empty logs and state",
    "the commits of several batches",
    "several batches",
    "all of Spark's files",
    "all of Spark's bytes",
)
"""Those that are tried on Spark itself, too."""
STOPS: dict[str, Loss] = {
    "the state of the last batch": lose(STATE),
    "the bytes of that state": tear(STATE),
    "half of the bytes of that state": halve(STATE),
    "all state": lose("state/**/*"),
}
"""Here the commit is there, so that Spark starts after it. It may not start with less state."""


def run_micro(spark: MicroSpark, center: Center, **options: Any) -> None:
    spark.start(center.pipeline().plan(), state=center.root / "state", available_now=True, shards=2, **options).run()


@pytest.fixture
def micro(tmp_path: Path, quick_disk: None) -> tuple[MicroSpark, Center]:
    spark, center = MicroSpark(), Center(tmp_path)
    center.feed()
    run_micro(spark, center)
    center.feed()
    run_micro(spark, center, rows_max=4)
    assert center.totals() == RIGHT[:BATCHES]
    return spark, center


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_are_counted_once_whatever_is_lost(loss: str, micro: tuple[MicroSpark, Center]) -> None:
    spark, center = micro
    LOSSES[loss](center.location)
    center.feed()
    run_micro(spark, center)
    assert center.totals() == RIGHT
    # And the next start finds nothing to mend.
    aside = sorted((center.location / SET_ASIDE).glob("*"))
    run_micro(spark, center)
    assert center.totals() == RIGHT
    assert sorted((center.location / SET_ASIDE).glob("*")) == aside


@pytest.mark.parametrize("loss", STOPS)
def test_state_that_is_lost_after_its_commit_stops_the_query(loss: str, micro: tuple[MicroSpark, Center]) -> None:
    spark, center = micro
    STOPS[loss](center.location)
    center.feed()
    with pytest.raises((SparkRefuses, CheckpointError)):
        run_micro(spark, center)
    assert center.totals() == RIGHT[:BATCHES]


def test_what_is_set_aside_can_be_looked_at(micro: tuple[MicroSpark, Center]) -> None:
    spark, center = micro
    tear(OFFSETS, COMMITS)(center.location)
    run_micro(spark, center)
    aside = center.location / SET_ASIDE / "1"
    assert sorted(str(file.relative_to(aside)) for file in aside.rglob("*") if file.is_file()) == [
        "commits/3",
        "offsets/3",
    ]


def test_a_batch_that_no_record_tells_of_is_not_planned_again(micro: tuple[MicroSpark, Center]) -> None:
    """Spark has gone back further than records are kept."""
    spark, center = micro
    lose("offsets/*[123]*", "commits/*[123]*", "fordstone/cuts/*2.json")(center.location)
    center.feed()
    with pytest.raises(DamagedError, match=r"asks for epoch 2, .* epochs up to 4 are sealed .* no longer recorded"):
        run_micro(spark, center)
    assert center.totals() == RIGHT[:BATCHES]


def test_torn_logs_stay_where_they_are_if_setting_them_aside_would_not_help(micro: tuple[MicroSpark, Center]) -> None:
    spark, center = micro
    both(tear("offsets/*[123]*", "commits/*[123]*"), lose("fordstone/cuts/*2.json"))(center.location)
    with pytest.raises(DamagedError, match="can be read up to batch 0 only, but epochs up to 4 are sealed"):
        run_micro(spark, center)
    assert (center.location / "offsets" / "1").exists()


def test_another_batch_is_never_counted_under_the_record_of_a_sealed_one(micro: tuple[MicroSpark, Center]) -> None:
    """Spark's log has a plan for the batch, but not the one that was sealed: the location was put together from two."""
    spark, center = micro
    lose(COMMITS)(center.location)
    offset = center.location / "offsets" / str(LAST)
    work = json.loads(json.loads(offset.read_text().partition("\n")[2])["work"])
    work["reads"][0]["until"] = work["reads"][0]["position"] + 17  # one row
    offset.write_text("v1\n" + json.dumps({"epoch": BATCHES, "work": json.dumps(work)}))
    center.feed()
    with pytest.raises(
        DamagedError,
        match=f"epoch {BATCHES} is sealed in .*, but the batch that Spark executed is not what its record says",
    ):
        run_micro(spark, center)
    assert center.totals() == RIGHT[:BATCHES]
    # What the text advises helps.
    lose(OFFSETS)(center.location)
    run_micro(spark, center)
    assert center.totals() == RIGHT


def test_other_input_is_never_counted_under_the_record_of_a_sealed_batch(micro: tuple[MicroSpark, Center]) -> None:
    spark, center = micro
    lose(COMMITS)(center.location)
    kept = center.location / "fordstone" / "cuts" / f"{BATCHES:012d}.json"
    record = json.loads(kept.read_text())
    record["cut"]["sources"]["s"]["watermark_us"] += 1
    kept.write_text(json.dumps(record))
    with pytest.raises(DamagedError, match="but what that batch found in its input is not what its record says"):
        run_micro(spark, center)


# What is made durable, and when.


def test_what_spark_wrote_is_durable_before_the_epoch_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at the seal, with everything lost that was not synced: all that the sealed epoch needs is there."""
    power, spark, center = Power(), MicroSpark(), Center(tmp_path)
    monkeypatch.setattr(os, "fsync", power.fsync)
    center.feed(20)
    spark.fate.dies_before = "sink.released"
    with pytest.raises(Died):
        run_micro(spark, center, rows_max=10)
    power.cut(center.location, left=lambda _: Left.GONE)
    assert {str(file.relative_to(center.location)) for file in found(center.location, "[!f]*", "[!f]*/**/*")} == {
        "metadata",
        "offsets/0",
        "state/0/0/1_0.changelog",
    }
    run_micro(spark, center)
    assert center.totals() == [total(10), total(20)]


def test_only_new_files_are_synced_and_with_them_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    power = Power()
    monkeypatch.setattr(os, "fsync", power.fsync)
    place, spark = tmp_path / "state" / "0" / "1", SparkFiles(tmp_path)
    place.mkdir(parents=True)
    (place / "1.changelog").write_text("1")
    (place / ".1.changelog.crc").write_text("1")
    (tmp_path / "fordstone").mkdir()
    (tmp_path / "fordstone" / "lock").touch()
    assert spark.sync() == 1
    assert power.syncs == 1 + 4, "the file, its directory, and those above, whose names are new"
    assert spark.sync() == 0
    assert power.syncs == 1 + 4
    (place / "2.changelog").write_text("2")
    (place / "x").write_text("another")
    (place / "x").replace(place / "1.changelog")
    assert spark.sync() == 2
    assert power.syncs == 1 + 4 + 3
    (tmp_path / "state" / "0" / "1" / "SSTs").mkdir()
    table = place / "SSTs" / "a.sst"
    table.write_text("a part")
    assert spark.sync() == 1
    table.write_text("a part and the rest")
    assert spark.sync() == 1, "it is written in place, and was not whole the first time"


def test_a_disk_that_refuses_to_sync_stops_the_query_before_the_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark, center = MicroSpark(), Center(tmp_path)
    center.feed()
    real = os.fsync

    def refuse(fd: int) -> None:
        if "/offsets/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"syncing .*offsets/0 failed"):
        run_micro(spark, center)
    assert QueryFiles(str(center.location)).newest_record() == 0
    assert center.totals() == []


def test_files_at_a_url_are_left_to_their_store() -> None:
    assert spark_files("memory://somewhere/p/_spark") is None
    assert spark_files("file:///somewhere/p/_spark") is not None


# Acknowledging.


class Acked:
    """A planner that notes what it acknowledges."""

    acks = True

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def ack(self, cut: Cut) -> None:
        self.epochs.append(cut.epoch)


def test_input_is_acknowledged_when_the_commit_of_its_batch_is_durable(
    micro: tuple[MicroSpark, Center], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its commit a batch is executed again, and needs its input."""
    spark, center = micro
    power = Power()
    monkeypatch.setattr(os, "fsync", power.fsync)
    query = spark.start(center.pipeline().plan(), state=center.root / "state", available_now=True)
    reader, planner = query.reader._reader.get(), Acked()
    reader._planner = planner
    end = json.loads(query.location.offset(LAST))
    reader.commit(end)
    assert planner.epochs == [BATCHES]
    power.cut(center.location / "commits", left=lambda _: Left.GONE)
    assert (center.location / "commits" / str(LAST)).stat().st_size > 0
    (center.location / "commits" / str(LAST)).unlink()
    reader.commit(end)
    assert planner.epochs == [BATCHES]


# On Spark itself.


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Center:
    """Two runs, in a place that each test gets as it was."""
    center = Center(tmp_path_factory.mktemp("center") / "now")
    center.feed()
    run_spark(spark, center)
    center.feed()
    run_spark(spark, center, rows_max=4)
    assert center.totals() == RIGHT[:BATCHES]
    shutil.copytree(center.root, center.root.with_name("before"))
    return center


@pytest.fixture
def center(template: Center) -> Center:
    shutil.rmtree(template.root)
    shutil.copytree(template.root.with_name("before"), template.root)
    template.written = 20
    return template


def run_spark(spark: SparkSession, center: Center, *, failures_max: int = 3, **options: Any) -> None:
    config = SparkConfig(state=center.root / "state", available_now=True, shards=2, **options)
    run_plan(center.pipeline().plan(), {}, config, spark=spark, restart=RestartPolicy(failures_max=failures_max))


@pytest.mark.parametrize("loss", ON_SPARK)
def test_rows_are_counted_once_on_spark_whatever_is_lost(loss: str, center: Center, spark: SparkSession) -> None:
    LOSSES[loss](center.location)
    center.feed()
    run_spark(spark, center)
    assert center.totals() == RIGHT


@pytest.mark.parametrize("loss", STOPS)
def test_spark_never_starts_with_less_state_than_it_has_committed(
    loss: str, center: Center, spark: SparkSession
) -> None:
    STOPS[loss](center.location)
    center.feed()
    with pytest.raises(FordstoneError, match=r"CANNOT_LOAD_STATE_STORE|CHECKSUM|STDS_FAILED_TO_READ"):
        run_spark(spark, center)
    assert center.totals() == RIGHT[:BATCHES]


@pytest.mark.parametrize("left", [Left.GONE, Left.EMPTY])
def test_spark_goes_on_after_a_power_cut_with_what_was_synced(
    left: Left, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process synced is on the disk; everything else is gone, or has a name and no bytes."""
    power, center = Power(really=True), Center(tmp_path)
    center.feed()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", power.fsync)
        run_spark(spark, center)
        center.feed()
        run_spark(spark, center, rows_max=4)
    lost = power.cut(center.location, left=lambda _: left)
    assert lost.total() > 0, "Spark syncs nothing itself: at least the last commit"
    assert not (center.location / "commits" / str(LAST)).exists() or left is Left.EMPTY
    center.feed()
    run_spark(spark, center)
    assert center.totals() == RIGHT
