"""A query on Spark whose checkpoint location is in HDFS: drivers are killed one after the other, and the sinks are exact in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.examples import rest
from tests.faults.child_spark import answer
from tests.faults.oracle import Feed
from tests.faults.spark_job import SparkChild, SparkJob
from tests.faults.spark_oracle import judge_spark
from tests.faults.spark_process import spark_started

from fordstone.storage.remote import open_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACES = ("sink.released:4", *rest("batch.sealed:1", "batch.executed:1", "batch.released:2", "batch.kept:1"))


@pytest.mark.parametrize("place", PLACES)
def test_a_query_in_hdfs_is_exact_although_its_driver_is_killed(
    place: str, hdfs_url: str, tmp_path: Path, faults: Callable[..., None], spark: SparkSession
) -> None:
    feed = Feed(folder=tmp_path, seed=91)
    feed.write(200)
    child = SparkChild(jobs=(SparkJob(options={"interval": "10ms", "rows_max": 60, "state": hdfs_url}),))
    with spark_started(tmp_path, child, failpoint=f"{place}@{tmp_path / 'hits'}") as process:
        assert process.ended().killed
    faults(spark_driver_kills=1)
    feed.write(60)
    feed.close()
    with contextlib.chdir(tmp_path):
        result = answer(SparkJob(options={"available_now": True, "state": hdfs_url}), spark)
    assert result.get("outcome") == "stopped", result
    judge_spark(tmp_path, feed.written)
    assert not (tmp_path / "state").exists()
    assert open_remote(f"{hdfs_url}/faults/_spark").sizes("fordstone")["query.json"]
