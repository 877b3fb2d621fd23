"""Start children by forking a process that has imported everything already: a child then begins at once, without a second of imports.

One such process, the nursery, serves a process that runs tests, and ends with it. What it forks is as real as any process: it has a
memory, files and signals of its own, and only its imports were done before. Of the libraries that are imported, only the
allocators have started threads by then, and those are made for it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

IMPORTED = (
    "tests.epochs.child_commits",
    "tests.faults.child_pipeline",
    "tests.faults.two_tier_child",
    "fordstone.cli.edge",
    "fordstone.cli.run",
    "fordstone.cli.hub",
    "fordstone.edge.run",
    "fordstone.edge.link",
    "fordstone.hub.server.serve",
)
DRIVERS = ("s3fs", "hdfs_native.fsspec")
"""Imported when the first URL needs them. Some of the children have one, and an import takes longer than what they do there."""
_REQUEST_BYTES_MAX = 1 << 20


class Forked:
    """A child of the nursery, with the methods of `subprocess.Popen` that the tests use."""

    stdin: IO[bytes] | None = None

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def poll(self) -> int | None:
        return self._nursery.code_of(self.pid, seconds=0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._nursery.code_of(self.pid, seconds=timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        # The nursery has not waited for it as long as its end was not reported, so that the number is still its own.
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks, as seen from the tests."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}

    def start(
        self, module: str, argument: str, *, folder: Path, environment: Mapping[str, str], files: Sequence[IO[bytes]]
    ) -> Forked:
        """Run a module with one argument; `files` are its standard input, output and error."""
        request = {"module": module, "argument": argument, "folder": str(folder), "environment": dict(environment)}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [file.fileno() for file in files])
            while "pid" not in (message := self._receive(None)):
                pass
            # The system uses numbers again: this is the end of an earlier child.
            self._codes.pop(message["pid"], None)
            return Forked(self, message["pid"])

    def code_of(self, pid: int, seconds: float | None) -> int | None:
        """The exit code of a child as `subprocess` gives it; None: it has not ended within that time."""
        with self._lock:
            while pid not in self._codes and self._receive(seconds):
                pass
            return self._codes.get(pid)

    def _receive(self, seconds: float | None) -> dict[str, Any]:
        """Take one message, if one comes within that time."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return {}
        data = self._socket.recv(_REQUEST_BYTES_MAX)
        if not data:
            raise AssertionError("the process that forks children has ended")
        message: dict[str, Any] = json.loads(data)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


@cache
def nursery() -> Nursery:
    """The one of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forked", str(theirs.fileno())],
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"POLARS_MAX_THREADS": "2"},
            pass_fds=[theirs.fileno()],
        )
    process.returncode = 0  # It is not waited for: it ends when this process does.
    return Nursery(ours)


def serve(requests: socket.socket) -> None:
    """Fork a child for each request, and tell of their ends, until nobody asks any more. Returns in each child, which then is to run."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    while True:
        ready = select.select([requests.fileno(), reading], [], [])[0]
        if reading in ready:
            os.read(reading, 1024)
            _tell_of_ends(requests)
        if requests.fileno() in ready:
            data, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 3)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                os.close(reading)
                os.close(writing)
                become(json.loads(data), files)
                return
            for file in files:
                os.close(file)
            requests.send(json.dumps({"pid": pid}).encode())


def _tell_of_ends(requests: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            requests.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Take what a started process is given."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["module"], request["argument"]]


if __name__ == "__main__":
    for name in (*IMPORTED, *DRIVERS):
        import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(import_module(sys.argv[0]).main())
