"""The driver that the faults happen to: runs jobs on Spark, through the public API.

Prints a line of JSON for each job: its report, or the error, which is text alone unless it is a bug. It ends with the last
job, and with code 1 at the first that fails.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from tests.faults.process import ROOT
from tests.faults.spark_job import SparkChild, SparkJob, build
from tests.java_options import OPTIONS

from fordstone.cli.logs import configure_logging
from fordstone.errors import FordstoneError
from fordstone.protocol.retry import RestartPolicy
from fordstone.spark.config import SparkConfig
from fordstone.spark.run import leave, run_plan
from fordstone.spark.session.application import application

PR_SET_PDEATHSIG = 1


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive the test, nor Java it
    child = msgspec.json.decode(sys.argv[1], type=SparkChild)
    configure_logging(0)
    temporary = Path("tmp").absolute()
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)  # who is killed leaves things lying about
    settings = {
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={temporary}",
        "spark.executor.extraJavaOptions": OPTIONS,
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.local.dir": str(temporary),
    }
    if child.master.startswith("local"):
        settings["spark.python.daemon.module"] = "tests.faults.spark_daemon"
    with application(name="faults", master=child.master, memory="512m", config=settings | child.settings) as spark:
        return run_all(child, spark)


def run_all(child: SparkChild, spark: SparkSession) -> int:
    for job in child.jobs:
        result = answer(job, spark)
        print(json.dumps(result), flush=True)
        if "error" in result:
            return 2 if result["error"] == "bug" else 1
    return 0


def answer(job: SparkJob, spark: SparkSession) -> dict[str, Any]:
    """Run a job in the working directory, and return its report, or the error."""
    try:
        pipeline = build(job)
        config, restart = SparkConfig(**job.options), RestartPolicy(**job.restart)
        report = run_plan(pipeline.plan(), pipeline.functions, config, spark=spark, restart=restart)
    except FordstoneError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except Exception:  # noqa: BLE001 - the test reports it
        return {"error": "bug", "text": traceback.format_exc()}
    result: dict[str, Any] = msgspec.to_builtins(report)
    return result


if __name__ == "__main__":
    code = main()
    if code:
        leave(code)  # as the command line does
