"""End every process that a test run has started, once the run itself has ended, however it ended.

A run starts one guardian and keeps a pipe to it. When the run ends, even by SIGKILL, the system closes the pipe. The guardian then
ends all processes whose environment carries the tag of the run: hubs, nodes, Spark drivers, and whatever those have started.
It finds them through /proc, so it does nothing on systems without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO

VARIABLE = "FORDSTONE_TEST_RUN"
GRACE_SECONDS = 3.0
"""The time between SIGTERM and SIGKILL."""
POLL_SECONDS = 0.05


def start_guardian() -> IO[bytes]:
    """Tag this process's children, and start their guardian. Keep the returned pipe open for as long as they may live."""
    tag = uuid.uuid4().hex
    # A session of its own: Ctrl-C in a terminal does not reach the guardian.
    guardian = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).resolve()), tag],
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[VARIABLE] = tag
    guardian.returncode = 0  # It is not waited for: it outlives this process.
    assert guardian.stdin is not None
    return guardian.stdin


def tagged(tag: str) -> list[int]:
    """Return the ids of the running processes that were started with the tag in their environment."""
    wanted = f"{VARIABLE}={tag}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while they are looked at, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end_all(tag: str) -> None:
    """Ask every tagged process to end, and kill those that have not ended after a grace period."""
    asked: set[int] = set()
    deadline = time.monotonic() + GRACE_SECONDS
    while running := tagged(tag):
        late = time.monotonic() > deadline
        for pid in running:
            if late or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_all(sys.argv[1])
