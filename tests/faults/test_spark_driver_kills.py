"""SIGKILL of a Spark driver: Python, Java or both, at failpoints and (in full) at random moments. The sinks are exact in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.faults.child_spark import answer
from tests.faults.oracle import Feed, judge_refused
from tests.faults.spark_job import SparkChild, SparkJob
from tests.faults.spark_oracle import judge_spark
from tests.faults.spark_process import (
    SparkProcess,
    committed,
    cut,
    dead_letters,
    held,
    planned,
    release,
    released,
    spark_started,
    staged,
    stored,
)

from fordstone.storage.failpoint import SPARK_FAILPOINTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIVE = {"interval": "10ms", "rows_max": 24}
"""Small batches, one after the other."""
FINISH = {"available_now": True}
FIRST_ROWS, FEED_ROWS = 200, 60
DELAY_SECONDS_MAX = 0.06

Reached = Callable[[Path], int]
STARTING = ("java", "session", "worker")
"""Moments before there is a query; the others are what the query leaves as it goes."""
PROGRESS: dict[str, Reached] = {
    "planned": planned,
    "stored": stored,
    "staged": staged,
    "released": released,
    "cut": cut,
    "committed": committed,
}
MOMENTS = (*STARTING, *STARTING, *PROGRESS, *PROGRESS, "released", "cut")


@pytest.mark.full
def test_a_driver_killed_at_random_moments_loses_and_doubles_nothing(
    tmp_path: Path, faults: Callable[..., None], spark: SparkSession
) -> None:
    rng = Random(20)
    feed = Feed(folder=tmp_path, seed=20)
    feed.write(FIRST_ROWS)
    child = SparkChild(jobs=(SparkJob(options=LIVE),))
    chosen = [
        (moment, rng.choice(("group", "python") if moment in STARTING else ("group", "python", "java")))
        for moment in rng.sample(MOMENTS, len(MOMENTS))
    ]
    assert {victim for _, victim in chosen} == {"group", "python", "java"}
    kill_at_moments(chosen, feed, child, rng, faults)
    finish(feed, spark)


def kill_at_moments(
    chosen: Iterable[tuple[str, str]], feed: Feed, child: SparkChild, rng: Random, faults: Callable[..., None]
) -> None:
    dying: list[SparkProcess] = []
    for moment, victim in chosen:
        with spark_started(feed.folder, child) as process:
            dying.append(process)
            feed.write(FEED_ROWS)
            await_moment(process, feed.folder, moment, rng)
            kill(process, victim)
        # The next driver starts at once, whatever is left of this one.
        faults(spark_driver_kills=1)
    for process in dying:
        process.until_gone()


def await_moment(process: SparkProcess, folder: Path, moment: str, rng: Random) -> None:
    """Wait for something to happen, and then a little, which chance chooses."""
    process.until(lambda: process.java() is not None, "Java")
    if moment == "session":
        others = set(folder.glob("tmp/blockmgr-*"))
        process.until(lambda: bool(set(folder.glob("tmp/blockmgr-*")) - others), "Spark's session")
    elif moment == "worker":
        process.until(lambda: process.daemon() is not None, "a Python worker")
    elif moment in PROGRESS:
        reached = PROGRESS[moment]
        for _ in range(rng.choice((1, 1, 2))):
            before = reached(folder)
            process.until(lambda before=before: reached(folder) > before, moment)  # type: ignore[misc]
    time.sleep(rng.uniform(0, DELAY_SECONDS_MAX))


def kill(process: SparkProcess, victim: str) -> None:
    match victim:
        case "group":
            assert process.kill_group().killed
        case "python":
            assert process.kill().killed
        case _:
            ended = process.kill_java()
            assert ended.code == 1, ended.errors
            assert ended.lines[-1]["error"] == "TaskError", ended.errors
            assert "pipeline faults: Spark's Java process has ended" in ended.lines[-1]["text"]


def finish(feed: Feed, spark: SparkSession, *, refusing: bool = False) -> None:
    """Read what is left, in another process, and judge what came out."""
    feed.close()
    with contextlib.chdir(feed.folder):
        result = answer(SparkJob(refusing=refusing, options=FINISH), spark)
    assert result.get("outcome") == "stopped", result
    judge_spark(feed.folder, feed.written)
    if refusing:
        judge_refused(feed.folder, dead_letters(feed.folder), feed.written)


PLACES = (
    ("batch.executed", 1),
    ("batch.sealed", 1),
    ("sink.released", 4),
    ("batch.released", 2),
    ("batch.kept", 1),
)
"""The hit at which each driver of a chain is killed: the next one starts on what the one before has left."""
BASE_PLACES = (("sink.released", 4),)
"""Where a part of the output is visible. The others are hit without Java in `tests/spark/test_hosted_sinks.py`."""
JAVA_KILLED = (("released", "java"),)
"""Java alone is killed."""


def test_the_chain_has_every_failpoint() -> None:
    assert {name for name, _ in PLACES} == set(SPARK_FAILPOINTS)


@pytest.mark.parametrize(
    "places", [pytest.param(BASE_PLACES, id="base"), pytest.param(PLACES, id="each", marks=pytest.mark.full)]
)
def test_a_driver_killed_at_failpoints_of_a_commit_loses_and_doubles_no_row_and_no_dead_letter(
    places: tuple[tuple[str, int], ...], tmp_path: Path, faults: Callable[..., None], spark: SparkSession
) -> None:
    feed = Feed(folder=tmp_path, seed=21)
    feed.write(FIRST_ROWS)
    child = SparkChild(jobs=(SparkJob(refusing=True, options=LIVE),))
    for number, (name, count) in enumerate(places):
        hits = tmp_path / f"hits-{number}"
        with spark_started(tmp_path, child, failpoint=f"{name}:{count}@{hits}") as process:
            feed.write(FEED_ROWS)
            process.until(lambda process=process: process.java() is not None, "Java")  # type: ignore[misc]
            ended = process.ended()
            assert ended.killed, ended.errors
            process.until_gone()
        assert hits.read_text().splitlines() == [name] * count
        reached = (released(tmp_path), cut(tmp_path), committed(tmp_path))
        # Nothing is released of a batch that has not been executed as a whole; the cut is kept when all is released.
        assert released(tmp_path) - cut(tmp_path) == (name in {"sink.released", "batch.released"}), reached
        assert cut(tmp_path) - committed(tmp_path) == (name == "batch.kept"), reached
        faults(spark_driver_kills=1)
    if places == PLACES:
        kill_at_moments(JAVA_KILLED, feed, child, Random(21), faults)
    finish(feed, spark, refusing=True)


@pytest.mark.full
def test_a_python_worker_killed_where_tasks_are_tried_once_is_a_failure_that_the_runner_mends(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = Feed(folder=tmp_path, seed=22)
    feed.write(FEED_ROWS)
    # The second job runs in the same Spark, once the first was asked to stop.
    jobs = tuple(SparkJob(function="holds", options=options) for options in (LIVE, FINISH))
    with spark_started(tmp_path, SparkChild(master="local[2,1]", jobs=jobs)) as process:
        process.until(lambda: committed(tmp_path) > 0, "a batch")
        worker = held(process, feed)
        assert worker in process.family()
        os.kill(worker, signal.SIGKILL)
        faults(spark_python_worker_kills=1)
        release(feed)
        before = committed(tmp_path)
        process.until(lambda: committed(tmp_path) > before, "another batch")
        feed.close()
        ended = process.stop()
        process.until_gone()
    assert ended.code == 0, ended.errors
    assert ended.lines[0]["progress"]["restarts"] >= 1
    judge_spark(tmp_path, feed.written)
