"""Ending a process around threads that cannot be ended."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time
from fordstone.spark.session.exit import leave
atexit.register(lambda: sys.stdout.write("tidied"))
threading.Thread(target=time.sleep, args=(600,)).start()
leave(3)
"""


def test_a_process_leaves_with_its_code_and_tidied_up_whatever_its_threads_do() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "tidied", "")
