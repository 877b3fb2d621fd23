"""A signal to stop in the middle of a batch job. Of a stream: test_cli."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fordstone import Pipeline
from fordstone.connectors import files, generator
from fordstone.errors import SinkError, TaskError
from fordstone.protocol.progress import Progress
from fordstone.spark.config import SparkConfig
from fordstone.spark.run import run_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Far longer than any test: only a job that is broken off ends.
NEVER_S = 3600


def endless(tmp_path: Path) -> Pipeline:
    begun = tmp_path / "begun"

    def wait(row: dict[str, Any]) -> dict[str, Any]:
        begun.touch()
        time.sleep(NEVER_S)
        return row

    p = Pipeline("endless")
    rows = p.source("rows", generator(rows=10), schema={"device": "string"})
    rows.map(wait, schema={"device": "string"}).sink("out", files(str(tmp_path / "out"), format="jsonl"))
    return p


def test_a_signal_breaks_a_batch_job_off_and_nothing_is_released(spark: SparkSession, tmp_path: Path):
    p = endless(tmp_path)
    sent: list[int] = []

    def on_progress(_: Progress) -> None:
        if (tmp_path / "begun").exists() and not sent:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    config = SparkConfig(state=tmp_path / "state", bounded=True)
    with pytest.raises(TaskError, match="stopped before the batch job was done: nothing was released"):
        run_plan(p.plan(), p.functions, config, spark=spark, on_progress=on_progress)
    assert not list((tmp_path / "out").glob("epoch-*"))
    assert spark.range(3).count() == 3, "only the job was ended"


def test_a_batch_job_that_nobody_can_watch_any_more_is_broken_off(spark: SparkSession, tmp_path: Path):
    p = endless(tmp_path)

    def on_progress(_: Progress) -> None:
        if (tmp_path / "begun").exists():
            raise SinkError("stdout: the reader of the progress has gone. Stopping.")

    config = SparkConfig(state=tmp_path / "state", bounded=True)
    with pytest.raises(SinkError, match="has gone"):
        run_plan(p.plan(), p.functions, config, spark=spark, on_progress=on_progress)
    assert spark.range(3).count() == 3
