"""A query on Spark whose checkpoint location is in S3, through Hadoop's S3A: its driver is killed, and the sinks are exact in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.examples import rest
from tests.faults.oracle import Feed
from tests.faults.spark_job import SparkChild, SparkJob
from tests.faults.spark_oracle import judge_spark
from tests.faults.spark_process import spark_started
from tests.services.base import maven_jars, start_or_skip
from tests.services.s3 import KEY, S3, SECRET

from fordstone.storage.remote import open_remote

JARS = (
    "org.apache.hadoop:hadoop-aws:3.5.0",
    "software.amazon.awssdk:bundle:2.35.4",
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1",
)
"""S3A of the version of Hadoop inside PySpark, and what it was built with, of which the first has 654 MB."""


@pytest.mark.parametrize("place", rest("sink.released:4", "batch.executed:1", "batch.sealed:1"))
def test_a_query_in_s3_is_exact_although_its_driver_is_killed(
    place: str, s3: S3, s3_url: str, tmp_path: Path, faults: Callable[..., None]
) -> None:
    jars = start_or_skip(lambda: maven_jars("hadoop-aws-3.5.0", JARS, transitive=False))
    state = f"{s3_url.replace('s3://', 's3a://')}/state"
    settings = {
        "spark.jars": ",".join(f"local:{jar}" for jar in jars.glob("*.jar")),
        "spark.hadoop.fs.s3a.endpoint": s3.address,
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": KEY,
        "spark.hadoop.fs.s3a.secret.key": SECRET,
    }
    feed = Feed(folder=tmp_path, seed=92)
    feed.write(200)
    live = SparkJob(options={"interval": "10ms", "rows_max": 60, "state": state})
    child = SparkChild(settings=settings, jobs=(live,))
    with spark_started(tmp_path, child, failpoint=f"{place}@{tmp_path / 'hits'}") as process:
        ended = process.ended()
    assert ended.killed, ended.errors
    faults(spark_driver_kills=1)
    feed.write(60)
    feed.close()
    rest_of_it = SparkJob(options={"available_now": True, "state": state})
    with spark_started(tmp_path, SparkChild(settings=settings, jobs=(rest_of_it,))) as process:
        assert process.ended().report["outcome"] == "stopped"
    judge_spark(tmp_path, feed.written)
    assert open_remote(f"{s3_url}/state/faults/_spark").sizes("fordstone")["query.json"]
