"""Spark's Python workers do not look for garbage among what stays for good."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import gc
from fordstone.spark.session.worker_heap import leave_alone_what_stays

class Loop:
    def __init__(self):
        self.itself = self

before = len(gc.get_objects())
kept = [Loop() for _ in range(100)]
leave_alone_what_stays()
print(gc.get_freeze_count() > 0, len(gc.get_objects()) < before)
again = gc.get_freeze_count()
made = [Loop() for _ in range(100)]
leave_alone_what_stays()
print(gc.get_freeze_count() == again)
del made
print(gc.collect() >= 100)
"""


@pytest.mark.parametrize("reused", [True, False])
def test_what_is_there_after_the_first_task_is_left_alone_in_workers_that_are_used_again(reused: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_REUSE_WORKER"}
    environment |= {"SPARK_REUSE_WORKER": "1"} if reused else {}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    frozen, once, garbage = done.stdout.splitlines()
    assert frozen == f"{reused} {reused}"
    assert (once, garbage) == ("True", "True")
