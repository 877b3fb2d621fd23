"""Spark's Python workers do not look for garbage among what stays for good."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fordstone.errors import ConfigError
from fordstone.spark.session.session import WorkerFacts, check_workers, complaints


def worker(*, host: str = "a", python: str = "3.11.7", missing: str = "", version: str = "0.1.0") -> WorkerFacts:
    return WorkerFacts(host=host, python=python, missing=missing, fordstone=version)


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([worker(), worker(python="3.11.2")], []),
        ([worker(python="3.12.1")], ["a: Python 3.12.1, where the driver has 3.11.7"]),
        ([worker(missing="polars", version="0.1.0")], ["a: without polars"]),
        ([worker(missing="fordstone, polars", version="")], ["a: without fordstone, polars"]),
        ([worker(version="0.0.9")], ["a: Fordstone 0.0.9, where the driver has 0.1.0"]),
        (
            [worker(host="b", version="0.0.9"), worker(), worker(host="b", version="0.0.9")],
            ["b: Fordstone 0.0.9, where the driver has 0.1.0"],
        ),
    ],
)
def test_what_an_executor_lacks_is_reported_once_per_machine(workers, found):
    assert complaints(workers, python="3.11.7", version="0.1.0") == found


def test_executors_with_the_drivers_environment_pass(spark):
    check_workers(spark, 2)


def test_executors_without_fordstone_are_named_with_what_to_do(spark, tmp_path):
    # Python as on a machine where Fordstone was not installed.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "sys.path[:] = [entry for entry in sys.path if not (Path(entry) / 'fordstone').is_dir()]\n"
    )
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    bare.chmod(0o755)
    theirs = spark.newSession()
    theirs.conf.set("spark.sql.execution.pyspark.python", str(bare))
    with pytest.raises(ConfigError, match="without fordstone") as raised:
        check_workers(theirs, 2)
    assert "install 'fordstone[spark]' on every machine" in str(raised.value)


def test_executors_without_python_are_an_error_too(spark, tmp_path):
    theirs = spark.newSession()
    theirs.conf.set("spark.sql.execution.pyspark.python", str(tmp_path / "no-such-python"))
    with pytest.raises(ConfigError, match=r"the executors cannot run Python: .*no-such-python"):
        check_workers(theirs, 1)


_PROGRAM = """
import gc
from fordstone.spark.hosted.packing import freeze_gc

class Loop:
    def __init__(self):
        self.itself = self

gc.disable()  # by itself it would remove what the imports left
before = len(gc.get_objects())
kept = [Loop() for _ in range(100)]
freeze_gc()
print(gc.get_freeze_count() > 0, len(gc.get_objects()) < before)
again = gc.get_freeze_count()
made = [Loop() for _ in range(100)]
freeze_gc()
print(gc.get_freeze_count() == again)
del made
print(gc.collect() >= 100)
"""


@pytest.mark.parametrize("reused", [True, False])
def test_what_is_there_after_the_first_task_is_left_alone_in_workers_that_are_used_again(reused: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_REUSE_WORKER"}
    environment |= {"SPARK_REUSE_WORKER": "1"} if reused else {}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment, check=True, timeout=600
    )
    frozen, once, garbage = done.stdout.splitlines()
    assert frozen == f"{reused} {reused}"
    assert (once, garbage) == ("True", "True")
