"""Starting, starting again and moving hosted queries: what a hostile user, or a crash at a bad moment, may do to them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.sql import SparkSession
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died
from tests.spark.runs import EdgeSide

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, generator, memory, rows
from fordstone.connectors.base import SinkStream
from fordstone.connectors.files import sink as file_sink
from fordstone.epochs.manifest import Cut
from fordstone.errors import (
    CheckpointError,
    ConfigError,
    FordstoneError,
    PipelineError,
    PlanMismatchError,
    StoreLockedError,
)
from fordstone.lang.schema import Schema
from fordstone.plan.plan import ConnectorSpec, Plan
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted import commit
from fordstone.spark.hosted.checkpoint import EpochRecord, QueryFiles
from fordstone.spark.hosted.commit import Committer, PartTask, SinkSpec
from fordstone.spark.hosted.packing import PACK_BYTES, Packed, Packer, What, batches, encode
from fordstone.spark.hosted.plan_batches import Work
from fordstone.spark.hosted.state_transfer import import_spark
from fordstone.spark.run import run_plan
from fordstone.spark.session.session import check_file_system
from fordstone.storage.disk import OsDisk


def add(path: Path, numbers: Iterable[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({"n": number}) + "\n" for number in numbers)


def plan(root: Path, predicate: str = "n >= 0", *, sink: ConnectorSpec | None = None, name: str = "out") -> Plan:
    pipeline = Pipeline("p")
    source = pipeline.source("src", files(str(root / "in/*.jsonl")), schema={"n": "bigint"})
    source.filter(predicate).sink(name, sink or files(str(root / "out"), format="jsonl"))
    return pipeline.plan()


def out(root: Path, name: str = "out") -> list[int]:
    return sorted(rows(root / name)["n"].to_list())


def died_before(spark: MicroSpark, what: str, start: Any) -> None:
    spark.fate.dies_before = what
    with pytest.raises(Died):
        start().run()


def thrown_dice(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(n=pl.lit(time.monotonic_ns()))


# A batch that is run again.


def test_a_batch_that_was_released_is_not_released_differently_by_a_changed_filter(tmp_path: Path) -> None:
    add(tmp_path / "in/a.jsonl", range(4))
    spark = MicroSpark()
    died_before(spark, "commit", lambda: spark.start(plan(tmp_path, "n > 0"), state=tmp_path / "state"))
    spark.start(plan(tmp_path, "n > 1"), state=tmp_path / "state").run()
    assert out(tmp_path) == [1, 2, 3]


def test_a_function_that_throws_dice_does_not_stop_a_query_for_ever(tmp_path: Path) -> None:
    pipeline = Pipeline("p")
    source = pipeline.source("src", files(str(tmp_path / "in/*.jsonl")), schema={"n": "bigint"})
    thrown = source.map_batches(thrown_dice, schema={"n": "bigint"})
    for name in ("a", "b"):
        thrown.sink(name, files(str(tmp_path / name), format="jsonl"))
    add(tmp_path / "in/a.jsonl", range(3))
    spark = MicroSpark()

    def start() -> Any:
        return spark.start(pipeline.plan(), pipeline.functions, state=tmp_path / "state")

    died_before(spark, "batch.released", start)
    start().run()
    # Both sinks have the try that was sealed.
    assert out(tmp_path, "a") == out(tmp_path, "b")


def test_a_sealed_epoch_whose_sink_was_renamed_is_not_lost_in_silence(tmp_path: Path) -> None:
    add(tmp_path / "in/a.jsonl", range(4))
    spark = MicroSpark()
    died_before(spark, "batch.sealed", lambda: spark.start(plan(tmp_path), state=tmp_path / "state"))
    with pytest.raises(PlanMismatchError, match=r"epoch 1 is sealed(?s:.)*sink out, which the plan no longer has"):
        spark.start(plan(tmp_path, name="other"), state=tmp_path / "state").run()
    spark.start(plan(tmp_path), state=tmp_path / "state").run()
    assert out(tmp_path) == [0, 1, 2, 3]


def test_a_second_copy_of_a_task_cannot_change_what_the_first_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark may run a task twice at once; both get the same rows in another order, and cut them into parts elsewhere."""
    monkeypatch.setattr(commit, "PART_BYTES_MAX", 1)
    stream = SinkStream(step="out", schema=Schema.of({"n": "bigint"}))
    spec = SinkSpec(connector=files(str(tmp_path / "out"), format="jsonl"), stream=stream)
    committer = Committer(
        first_epoch=1,
        specs=[spec],
        files=QueryFiles(str(tmp_path / "state")),
        lateness_us={},
        on_batch=lambda outcome: None,
    )
    tries = iter((7, 8))
    monkeypatch.setattr("pyspark.TaskContext.get", type("Task", (), {"taskAttemptId": lambda _: next(tries)}))

    def task(order: Iterable[int]) -> Any:
        packed = [Packed(0, What.OUT, 0, encode(pl.DataFrame({"n": [n]}))) for n in order]
        return (
            row for batch in PartTask([spec], 1, "attempt")(batches(iter(packed), [0])) for row in batch.to_pylist()
        )

    won = list(task([1, 2]))
    next(task([2, 1]))
    assert [row["what"] for row in won] == [What.PART, What.PART]
    sealed = committer.seal(1, "attempt", won, EpochRecord(work=Work(epoch=1), cut=Cut(epoch=1, sources={})))
    assert sealed is not None
    committer.finish(sealed)
    assert out(tmp_path) == [1, 2]


def test_a_batch_job_that_died_between_its_sinks_is_finished_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline("p")
    source = pipeline.source("src", files(str(tmp_path / "in/*.jsonl")), schema={"n": "bigint"})
    for name in ("a", "b"):
        source.sink(name, files(str(tmp_path / name), format="jsonl"))
    add(tmp_path / "in/a.jsonl", range(3))
    spark = MicroSpark()
    really = file_sink.FileSink.release_parts
    released: list[Any] = []

    def dies(self: Any, *args: Any) -> None:
        if released:
            raise Died("between two sinks")
        released.append(args)
        really(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(file_sink.FileSink, "release_parts", dies)
        with pytest.raises(Died):
            spark.run_batch(pipeline.plan(), state=tmp_path / "state")
    add(tmp_path / "in/b.jsonl", range(3, 6))  # comes too late for this job
    spark.run_batch(pipeline.plan(), state=tmp_path / "state")
    assert out(tmp_path, "a") == out(tmp_path, "b") == [0, 1, 2]


def test_a_batch_job_that_is_done_is_an_error_if_there_is_new_input(tmp_path: Path) -> None:
    add(tmp_path / "in/a.jsonl", range(3))
    spark = MicroSpark()
    for _ in range(2):
        spark.run_batch(plan(tmp_path), state=tmp_path / "state")
    add(tmp_path / "in/b.jsonl", range(3, 6))
    with pytest.raises(
        CheckpointError, match=r"(?s)Source src has new input since, in b.jsonl.*--fresh.*--available-now"
    ):
        spark.run_batch(plan(tmp_path), state=tmp_path / "state")


# Starting.


def test_a_query_that_never_began_does_not_bind_its_state_directory(tmp_path: Path) -> None:
    spark = MicroSpark()
    with pytest.raises(FordstoneError, match="no file matches"):
        spark.run_batch(plan(tmp_path), state=tmp_path / "state")
    add(tmp_path / "in/a.jsonl", range(3))
    spark.start(plan(tmp_path), state=tmp_path / "state").run()
    assert out(tmp_path) == [0, 1, 2]


def test_two_processes_do_not_run_one_query(tmp_path: Path) -> None:
    config = SparkConfig(state=tmp_path / "state")
    held = OsDisk(Path(config.checkpoint_of("p")) / "fordstone")
    held.lock()
    with pytest.raises(StoreLockedError):
        run_plan(plan(tmp_path), {}, config, spark=MicroSpark())  # type: ignore[arg-type]  # it does not come to that
    held.close()


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_only_its_user_can_read_the_state_of_a_query_before_spark_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, scheme: str
) -> None:
    add(tmp_path / "in/a.jsonl", range(3))
    spark, state = MicroSpark(), tmp_path / "above" / "state"
    modes: dict[str, str] = {}

    def once(*_: Any) -> Any:
        modes.update({path.name: oct(path.stat().st_mode & 0o777) for path in (state, state / "p")})
        spark.run_batch(plan(tmp_path), state=state)

    monkeypatch.setattr(sys.modules["fordstone.spark.run"], "_run_once", once)
    before = os.umask(0o022)
    try:
        if there:
            (state / "p" / "_spark" / "state").mkdir(parents=True)
        config = SparkConfig(state=f"{scheme}{state}", bounded=True)
        run_plan(plan(tmp_path), {}, config, spark=spark)  # type: ignore[arg-type]  # as far as it is used
    finally:
        os.umask(before)
    assert modes == {"state": "0o755", "p": "0o700"}, "that of the pipeline is ours, and the one above it the user's"
    ours = [path for path in (state / "p" / "_spark" / "fordstone").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in ours} == {"0o600"}
    output = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in output} == {"0o644"}, "output is shared"


def test_fresh_sets_the_checkpoint_and_the_outputs_aside_before_the_query_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path / "in/a.jsonl", range(3))
    spark, state = MicroSpark(), tmp_path / "state"
    spark.run_batch(plan(tmp_path), state=state)
    add(tmp_path / "in/b.jsonl", range(3, 6))

    def once(*_: Any) -> Any:
        spark.run_batch(plan(tmp_path), state=state)

    monkeypatch.setattr(sys.modules["fordstone.spark.run"], "_run_once", once)
    run_plan(plan(tmp_path), {}, SparkConfig(state=state, bounded=True, fresh=True), spark=spark)  # type: ignore[arg-type]
    assert out(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert out(tmp_path, "out.old-1") == [0, 1, 2], "nothing was deleted"
    assert (state / "p" / "_spark.old-1" / "fordstone").is_dir()
    with pytest.raises(ConfigError, match="the state is at s3://bucket/state/p/_spark, which cannot be renamed"):
        run_plan(plan(tmp_path), {}, SparkConfig(state="s3://bucket/state", fresh=True), spark=spark)  # type: ignore[arg-type]


def test_at_most_once_is_refused(tmp_path: Path) -> None:
    pipeline = Pipeline("p", guarantee="at_most_once")
    source = pipeline.source("src", files(str(tmp_path / "in/*.jsonl")), schema={"n": "bigint"})
    source.sink("out", files(str(tmp_path / "out"), format="jsonl"))
    with pytest.raises(PipelineError, match="at_most_once, which Spark cannot give"):
        MicroSpark().query(pipeline.plan(), state=tmp_path / "state")


@pytest.mark.parametrize("connector", [generator(rate=1000), generator(), generator(rows=10, rate=5)])
def test_available_now_refuses_a_generator_of_which_nothing_or_everything_is_there(
    connector: ConnectorSpec, tmp_path: Path
) -> None:
    pipeline = Pipeline("p")
    pipeline.source("g", connector, schema={"n": "bigint"}).sink("out", memory(MemorySink()))
    with pytest.raises(ConfigError, match="needs rows=, and no rate="):
        MicroSpark().query(pipeline.plan(), state=tmp_path / "state", available_now=True)


def test_rows_in_memory_of_an_earlier_try_are_not_read(tmp_path: Path) -> None:
    sink, spark = MemorySink(), MicroSpark()

    def of(*numbers: int) -> Plan:
        pipeline = Pipeline("p")
        source = pipeline.source("src", memory([[{"n": n}] for n in numbers]), schema={"n": "bigint"})
        source.sink("out", memory(sink))
        return pipeline.plan()

    spark.fate.dies_within(1)
    with pytest.raises(Died):
        spark.run_batch(of(1, 2, 3), state=tmp_path / "state")
    spark.fate.dies_at = None
    spark.run_batch(of(1), state=tmp_path / "state")
    assert sink.rows()["n"].to_list() == [1]


def test_no_packed_row_is_larger_than_spark_can_carry() -> None:
    packer = Packer(1)
    wide = pl.DataFrame({"k": ["a"] * 10_000, "text": [f"{i:08d}" * 1024 for i in range(10_000)]})
    assert wide.estimated_size() > 4 * PACK_BYTES
    packer.keyed(0, ["k"], wide, late=False)
    packed = list(packer.taken())
    assert max(len(one.data) for one in packed) < 2 * PACK_BYTES
    assert pl.concat([pl.read_ipc_stream(one.data) for one in packed]).equals(wide)


# Moving.


def test_a_second_move_into_a_query_that_has_gone_on_is_refused(tmp_path: Path) -> None:
    spark, state = MicroSpark(), tmp_path / "spark"

    def edge(folder: str) -> str:
        EdgeSide(plan(tmp_path), {}, disk=OsDisk(tmp_path / folder)).run(bounded=False, stop_after=60)
        return str(tmp_path / folder)

    add(tmp_path / "in/a.jsonl", range(10))
    first = edge("edge1")
    add(tmp_path / "in/a.jsonl", range(10, 20))
    spark.start(plan(tmp_path), state=state, from_checkpoint=first).run()
    import_spark(spark, str(state / "p/_spark"), str(tmp_path / "edge2"))  # type: ignore[arg-type]  # as far as it is used
    add(tmp_path / "in/a.jsonl", range(20, 30))
    second = edge("edge2")
    assert out(tmp_path) == list(range(30))
    add(tmp_path / "in/a.jsonl", range(30, 40))
    with pytest.raises(CheckpointError, match="has state of its own"):
        spark.start(plan(tmp_path), state=state, from_checkpoint=second)
    spark.start(plan(tmp_path), state=tmp_path / "spark2", from_checkpoint=second).run()
    assert out(tmp_path) == list(range(40))


def test_an_edge_that_runs_is_not_moved_away_from(tmp_path: Path) -> None:
    add(tmp_path / "in/a.jsonl", range(10))
    EdgeSide(plan(tmp_path), {}, disk=OsDisk(tmp_path / "edge")).run(bounded=False, stop_after=60)
    running = OsDisk(tmp_path / "edge")
    running.lock()
    with pytest.raises(StoreLockedError):
        MicroSpark().query(plan(tmp_path), state=tmp_path / "spark", from_checkpoint=str(tmp_path / "edge"))
    running.close()


def test_sealed_epochs_beyond_the_newest_readable_checkpoint_are_not_done_again(tmp_path: Path) -> None:
    edge = EdgeSide(plan(tmp_path), {}, disk=OsDisk(tmp_path / "edge"))
    for number in range(3):
        add(tmp_path / "in/a.jsonl", range(number * 10, number * 10 + 10))
        edge.run(bounded=False, stop_after=60)
    newest = max((tmp_path / "edge/p/node/manifests").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-20])
    with pytest.raises(
        CheckpointError, match=r"has sealed epochs after its newest whole checkpoint\. Run it once on the edge"
    ):
        MicroSpark().query(plan(tmp_path), state=tmp_path / "spark", from_checkpoint=str(tmp_path / "edge"))
    # Without the cuts the edge cannot replay either, so it would be of no use to run it.
    (tmp_path / "edge/p/node/epochs.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"the cuts of epochs? .* are needed, but they cannot be read") as caught:
        MicroSpark().query(plan(tmp_path), state=tmp_path / "spark", from_checkpoint=str(tmp_path / "edge"))
    assert "Run it once" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "advice"),
    [("s3://bucket/state", "Write s3a:// in the place of s3://"), ("s3a://bucket/state", "for S3 they are listed in")],
)
def test_a_location_for_which_spark_has_no_classes_is_an_error_that_says_what_to_do(
    spark: SparkSession, location: str, advice: str
) -> None:
    with pytest.raises(ConfigError, match=f"no file system for the checkpoint location {location}: .*\n.*{advice}"):
        check_file_system(spark, location)
    check_file_system(spark, "hdfs://127.0.0.1:1/state")
