"""Bad input to a query on Spark: checkpoints that do not fit or are damaged, sources and sinks in the way, failing functions.

The error is text that says what happened and what to do, without a word of Spark's stack.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.examples import rest
from tests.faults.child_spark import answer
from tests.faults.oracle import Feed
from tests.faults.spark_job import SparkJob
from tests.faults.spark_oracle import judge_spark
from tests.faults.spark_process import CHECKPOINT, cut

from fordstone.storage.disk import OsDisk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FINISH = {"available_now": True, "rows_max": 60}
NO_RESTART = {"failures_max": 0}
ROWS = 120
_STACK = re.compile(r"\tat |\bat org\.apache|JVM stacktrace|Traceback|SQLSTATE|py4j|PySpark|pyspark|org\.apache")


@pytest.fixture(scope="module")
def stopped(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """A query that has done some batches and was stopped."""
    feed = Feed(folder=tmp_path_factory.mktemp("stopped") / "job", seed=40)
    feed.write(ROWS)
    result = run(spark, feed)
    assert result["outcome"] == "stopped"
    assert cut(feed.folder) > 1
    return feed


@pytest.fixture
def feed(stopped: Feed) -> Iterator[Feed]:
    """It, to be spoilt, and put right afterwards; there is more to read."""
    # In its place: Spark writes whole paths into its checkpoints.
    whole = stopped.copy(stopped.folder.with_name("whole"))
    feed = deepcopy(stopped)
    feed.write(ROWS)
    yield feed
    shutil.rmtree(stopped.folder)
    whole.folder.rename(stopped.folder)


def run(spark: SparkSession, feed: Feed, **job: Any) -> dict[str, Any]:
    with contextlib.chdir(feed.folder):
        return answer(SparkJob(**{"options": FINISH, "restart": NO_RESTART} | job), spark)


def refused(answer: dict[str, Any], kind: str, *texts: str) -> str:
    """The job ended with an error that a person can use."""
    assert answer.get("error") == kind, answer
    assert not _STACK.search(answer["text"]), answer["text"]
    for text in texts:
        assert text in answer["text"], answer["text"]
    return str(answer["text"])


def finish(spark: SparkSession, feed: Feed, **job: Any) -> None:
    """Nothing was spoilt by the refusal: with the cause out of the way the results are exact."""
    feed.close()
    result = run(spark, feed, **job)
    assert result.get("outcome") == "stopped", result
    judge_spark(feed.folder, feed.written)


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another window": ({"window": "20s"}, ["  matches: count_by_k, rows, smooth_by_k", "  changed: windows_by_k"]),
    "a step less": (
        {"per_key": False},
        ["  matches: rows, smooth_by_k, windows_by_k", "  no longer in the plan: count_by_k"],
    ),
    "a step more": (
        {"per_n": True},
        ["  matches: count_by_k, rows, smooth_by_k, windows_by_k", "  not in the checkpoint: count_by_n"],
    ),
}


@pytest.mark.parametrize("change", ["another window", *rest("a step less", "a step more")])
def test_another_plan_on_an_old_checkpoint_is_refused_with_the_steps_that_match(
    change: str, spark: SparkSession, feed: Feed
) -> None:
    changes, lines = CHANGES[change]
    lines_shown = refused(run(spark, feed, **changes), "PlanMismatchError").splitlines()
    place = feed.folder / CHECKPOINT
    assert lines_shown[0] == f"the checkpoint location {place} belongs to another query."
    assert lines_shown[1:-1] == lines
    assert lines_shown[-1].startswith(
        "Add --fresh to start from the beginning: it sets aside the state and the outputs."
    )


def test_a_plan_that_changed_only_where_it_has_no_state_goes_on(spark: SparkSession, feed: Feed) -> None:
    finish(spark, feed, function="in_place")


def newest_cut(feed: Feed) -> Path:
    return feed.folder / CHECKPOINT / "fordstone" / "cuts" / f"{cut(feed.folder):012d}.json"


def test_a_missing_cut_is_reported_and_with_it_back_the_query_goes_on(spark: SparkSession, feed: Feed) -> None:
    place = newest_cut(feed)
    away = place.rename(feed.folder / "away")
    refused(
        run(spark, feed),
        "TaskError",
        f"the cut of epoch {int(place.stem)} is missing ({place})",
        "Restore the checkpoint location as a whole, or begin with a new one.",
    )
    away.rename(place)
    finish(spark, feed)


def test_a_damaged_cut_is_reported(spark: SparkSession, feed: Feed) -> None:
    place = newest_cut(feed)
    place.write_bytes(place.read_bytes()[:-20])
    refused(
        run(spark, feed),
        "TaskError",
        f"{place} is damaged",
        "Restore the checkpoint location, or begin with a new one.",
    )


def test_a_damaged_identity_is_reported(spark: SparkSession, feed: Feed) -> None:
    place = feed.folder / CHECKPOINT / "fordstone" / "query.json"
    place.write_bytes(place.read_bytes()[:100])
    refused(run(spark, feed), "DamagedError", f"{place} is damaged", "Restore the checkpoint location")


def test_a_missing_identity_is_reported(spark: SparkSession, feed: Feed) -> None:
    place = feed.folder / CHECKPOINT / "fordstone" / "query.json"
    place.unlink()
    refused(run(spark, feed), "CheckpointError", f"{place} is missing", "Restore the checkpoint location")
    assert not place.exists()


def test_state_that_is_gone_is_reported(spark: SparkSession, feed: Feed) -> None:
    shutil.rmtree(feed.folder / CHECKPOINT / "state")
    refused(
        run(spark, feed), "CheckpointError", "the state of pipeline faults is gone", "Restore the checkpoint location"
    )


def test_state_of_which_a_part_is_gone_is_reported(spark: SparkSession, feed: Feed) -> None:
    part = feed.folder / CHECKPOINT / "state" / "0" / "1"
    shutil.rmtree(part)
    # Which of its files Spark misses first depends on what it wrote last.
    refused(run(spark, feed), "TaskError", "[CANNOT_LOAD_STATE_STORE.", f"{part}/", ".changelog does not exist")


def test_a_damaged_record_of_an_epoch_is_reported(spark: SparkSession, feed: Feed) -> None:
    place = feed.folder / CHECKPOINT / "fordstone" / "sealed" / f"{cut(feed.folder):012d}.json"
    place.write_bytes(place.read_bytes()[:-20])
    refused(run(spark, feed), "DamagedError", f"{place} is damaged")


def test_a_second_driver_is_refused_naming_the_first(spark: SparkSession, feed: Feed) -> None:
    with contextlib.closing(OsDisk(feed.folder / CHECKPOINT / "fordstone")) as first:
        first.lock()
        refused(run(spark, feed), "StoreLockedError", f"belongs to process {os.getpid()}, which is still running")


@pytest.mark.full
def test_a_file_that_shrank_after_its_batch_was_planned_is_reported(spark: SparkSession, feed: Feed) -> None:
    # The batch is in Spark's log, and was not done.
    assert run(spark, feed, function="raises")["error"] == "TaskError"
    file = next((feed.folder / "in").iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refused(run(spark, feed), "TaskError", f"{file} shrank: it has")
    file.write_bytes(whole)
    finish(spark, feed)


def test_a_file_that_shrank_below_what_was_read_is_reported(spark: SparkSession, feed: Feed) -> None:
    # The checkpoint must know the file by its inode, which the fixture may have changed: else it is another file, not a shorter one.
    assert "error" not in run(spark, feed)
    file = next((feed.folder / "in").iterdir())
    size = file.stat().st_size
    os.truncate(file, 100)
    refused(
        run(spark, feed),
        "TaskError",
        f"{file} shrank: it has 100 bytes, and {size} had been read.",
        "its rest cannot be read",
    )


def test_a_sink_directory_of_another_stream_is_reported_before_anything_runs(spark: SparkSession, feed: Feed) -> None:
    shutil.rmtree(feed.folder / "out" / "kept")
    shutil.copytree(feed.folder / "out" / "windows", feed.folder / "out" / "kept")
    before = cut(feed.folder)
    refused(run(spark, feed), "SinkError", "out/kept")
    assert cut(feed.folder) == before


@pytest.mark.full  # as `test_a_plan_that_changed_only_where_it_has_no_state_goes_on` does
def test_a_function_written_in_place_runs_in_workers(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path / "job", seed=41)
    feed.write(ROWS)
    finish(spark, feed, function="in_place")


@pytest.mark.full
def test_a_function_that_raises_the_same_each_time_is_named_with_a_row_and_not_tried_again(
    spark: SparkSession, feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(spark, feed, function="raises", restart={})
    refused(
        result,
        "TaskError",
        "step function: function raising raised RuntimeError: the sensor table is locked, twice for the same row:",
        "The row was read from source",
    )
    assert "query failed" not in caplog.text
    # Once it works again, so does the pipeline.
    finish(spark, feed)


def test_a_function_that_gives_what_was_not_declared_is_named_and_not_tried_again(
    spark: SparkSession, feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(spark, feed, function="mistaken", restart={})
    refused(result, "TaskError", "step function: map_batches gave columns id, k, ts")
    assert "query failed" not in caplog.text
