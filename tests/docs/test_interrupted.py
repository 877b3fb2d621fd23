"""A test run that is interrupted, or even killed, leaves no process: neither its own workers nor what a page has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.blocks import REPOSITORY
from tests.waiting import until

NAMES = ("one", "two", "three")
RUN = """
import signal, sys, pytest
# A run in the background ignores Ctrl-C, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))
"""


def runs(pid: int) -> bool:
    """Whether the process is there and more than an entry that waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the guardian finds processes through /proc")
@pytest.mark.parametrize("workers", ["0", "1"], ids=["alone", "in a worker"])
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process(ended_by: signal.Signals, workers: str, tmp_path: Path) -> None:
    page = REPOSITORY / "tests" / "docs" / "waiting_page.py"
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", "-n", workers, str(page)],
        cwd=REPOSITORY,
        env=outer | {"FORDSTONE_TEST_FOLDER": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in NAMES), "start")
        pids = [int((tmp_path / name).read_text()) for name in NAMES]
        assert all(map(runs, pids))
        # Ctrl-C in a terminal reaches all processes of the run; the other signals come from outside, for one process.
        (os.killpg if ended_by == signal.SIGINT else os.kill)(run.pid, ended_by)
        until(lambda: run.poll() is not None, "end of the run")
        until(lambda: not any(map(runs, pids)), "end of its processes")
    finally:
        run.kill()
        run.wait()
