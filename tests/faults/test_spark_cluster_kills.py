"""SIGKILL on a real standalone cluster: a Python worker in the middle of a task, an executor, a worker with its executor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.oracle import Feed
from tests.faults.spark_job import SparkChild, SparkJob
from tests.faults.spark_oracle import judge_spark
from tests.faults.spark_process import SparkProcess, committed, held, parent, release, spark_started
from tests.spark.cluster import Cluster, standalone

LIVE = {"interval": "10ms", "rows_max": 24}
FINISH = {"available_now": True}
ROWS = 60
BATCHES = 2
"""The number of batches that are committed after each fault, before the next."""


@pytest.mark.full
@pytest.mark.spark
def test_a_cluster_that_loses_a_python_worker_an_executor_and_a_machine_gives_exact_results(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = Feed(folder=tmp_path, seed=30)
    feed.write(ROWS)
    with standalone(tmp_path) as cluster:
        # The second job runs in the same application, once the first was asked to stop.
        jobs = (SparkJob(function="holds", options=LIVE), SparkJob(function="holds", options=FINISH))
        with spark_started(tmp_path, SparkChild(master=cluster.master, jobs=jobs)) as process:
            go_on(process, feed)
            for fault in (kill_python_worker, kill_executor, kill_machine):
                fault(cluster, held(process, feed))
                faults(**{f"spark_{fault.__name__.removeprefix('kill_')}_kills": 1})
                release(feed)
                go_on(process, feed)
            feed.close()
            ended = process.stop()
            assert ended.code == 0, ended.errors
            process.until_gone()
    assert [report["outcome"] for report in ended.lines] == ["stopped", "stopped"]
    faults(spark_query_restarts=sum(report["progress"]["restarts"] for report in ended.lines))
    judge_spark(tmp_path, feed.written)


def go_on(process: SparkProcess, feed: Feed) -> None:
    """Let the input grow until some more batches are committed."""
    feed.write(BATCHES * ROWS)
    goal = committed(feed.folder) + BATCHES
    process.until(lambda: committed(feed.folder) >= goal, "more batches")


def kill_python_worker(cluster: Cluster, pid: int) -> None:
    assert pid in cluster.python_pids()
    os.kill(pid, signal.SIGKILL)


def kill_executor(cluster: Cluster, pid: int) -> None:
    executor = parent(parent(pid))
    assert executor in cluster.executor_pids()
    os.kill(executor, signal.SIGKILL)


def kill_machine(cluster: Cluster, pid: int) -> None:
    """The worker first, so that it does not start another executor."""
    executor = parent(parent(pid))
    (worker,) = [worker for worker in cluster.workers if worker.pid == parent(executor)]
    worker.kill()
    with suppress(ProcessLookupError):  # it ends by itself when its worker is gone
        os.kill(executor, signal.SIGKILL)
