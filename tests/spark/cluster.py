"""A real Spark cluster on this machine, of processes of its own, through pip's PySpark; and Spark Connect.

Loopback only, ports that the system gives, a folder for what they write. They end with the `with` block, by their own
ids, and should the test process be killed, with it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
from tests.java_options import OPTIONS
from tests.waiting import until

from fordstone.spark.session import java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_SECONDS_MAX = 120.0
END_SECONDS_MAX = 20.0
POLL_SECONDS = 0.05
DAEMON_MEMORY = "256m"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_MASTER_URL = re.compile(r"Starting Spark master at (spark://\S+)")
_PORTS = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
_REGISTERED = "Successfully registered with master"
_PR_SET_PDEATHSIG = 1


class Daemon:
    """One master, worker or server. What it logs goes to a file in its folder."""

    def __init__(self, folder: Path, *command: str, memory: str = DAEMON_MEMORY, hidden: Path | None = None) -> None:
        """`hidden`: a directory that this daemon and its children see as an empty one of their own, as on another machine."""
        folder.mkdir()
        self._log = folder / "log"
        home = Path(pyspark.__file__).parent
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
        environment |= {
            "JAVA_HOME": str(java.home()),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": memory,
            "SPARK_DAEMON_JAVA_OPTS": OPTIONS,
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "PYSPARK_PYTHON": sys.executable,
        }
        words = [str(home / "bin" / "spark-class"), *command]
        if hidden is not None:
            words = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden), *words]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, met: Callable[[], bool], what: str) -> None:
        """Wait for something to happen while it runs."""
        until(met, what, seconds_max=WAIT_SECONDS_MAX, alive=lambda: self.running, report=self.log)

    def said(self, pattern: re.Pattern[str]) -> str:
        """What the pattern's group stands for in its log, as soon as it is there."""
        self.until(lambda: pattern.search(self.log()) is not None, pattern.pattern)
        found = pattern.search(self.log())
        assert found is not None
        return found[1]

    def executors(self) -> list[int]:
        """The ids of the executors that this worker runs now."""
        return [pid for pid in _children(self.pid) if EXECUTOR in _command(pid)]

    def kill(self) -> None:
        """SIGKILL, which nobody can catch."""
        self._process.kill()
        self._process.wait(END_SECONDS_MAX)

    def end(self) -> None:
        """SIGTERM, upon which a worker ends its executors; SIGKILL if that does not help."""
        mine = self.executors() if self.running else []
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.kill()
        deadline = time.monotonic() + END_SECONDS_MAX
        for pid in mine:
            while EXECUTOR in _command(pid):
                if time.monotonic() >= deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(POLL_SECONDS)


class Cluster:
    """A master and its workers, for as long as the block lasts that made it."""

    def __init__(self, master: str, workers: list[Daemon]) -> None:
        self.master = master
        self.workers = workers

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    def executor_pids(self) -> list[int]:
        """Of all executors that run now, whatever the application."""
        return [pid for worker in self.workers if worker.running for pid in worker.executors()]

    def python_pids(self) -> list[int]:
        """Of the Python processes that run tasks now; the one that forks them for its executor is not among them."""
        forking = [
            pid for executor in self.executor_pids() for pid in _children(executor) if "pyspark.daemon" in _command(pid)
        ]
        return [pid for parent in forking for pid in _children(parent)]

    def until(self, met: Callable[[], bool], what: str) -> None:
        """Wait for something that happens in the cluster."""
        self.workers[0].until(met, what)

    def log(self) -> str:
        """What the workers have logged, and the executors that they ran."""
        return "\n".join(worker.log() for worker in self.workers)


@contextmanager
def standalone(
    folder: Path, *, workers: int = 2, cores: int = 1, memory: str = "1g", apart: Path | None = None
) -> Iterator[Cluster]:
    """A master and `workers` workers, registered with it; each has `cores` and `memory` for executors.

    `apart`: a directory that the last worker does not share with the others.
    """
    started: list[Daemon] = []
    try:
        master = Daemon(folder / "master", "org.apache.spark.deploy.master.Master", *_PORTS)
        started.append(master)
        url = master.said(_MASTER_URL)
        for number in range(workers):
            place = folder / f"worker-{number}"
            room = ["--cores", str(cores), "--memory", memory, "--work-dir", str(place / "work")]
            hidden = apart if number == workers - 1 else None
            started.append(Daemon(place, "org.apache.spark.deploy.worker.Worker", *_PORTS, *room, url, hidden=hidden))
        for worker in started[1:]:
            worker.until(lambda worker=worker: _REGISTERED in worker.log(), "registration of a worker")  # type: ignore[misc]  # a lambda's default has no type
        yield Cluster(url, started[1:])
    finally:
        for daemon in reversed(started):
            daemon.end()


@contextmanager
def connect_server(spark: SparkSession) -> Iterator[str]:
    """Let a Spark serve Spark Connect, too; gives the address, `sc://...`."""
    services: Any = spark.sparkContext._jvm.org.apache.spark.sql.connect.service  # type: ignore[union-attr]  # py4j's
    service = getattr(getattr(services, "SparkConnectService$"), "MODULE$")  # how Java names an object of Scala
    service.start(spark.sparkContext._jsc.sc())
    nothing = spark.sparkContext._jvm.scala.Option.empty()  # type: ignore[union-attr]  # as above
    try:
        yield f"sc://127.0.0.1:{service.localPort()}"
    finally:
        service.stop(nothing, nothing)


def can_hide() -> bool:
    """Whether a process may be started with a directory of its own, for which it must be root's."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def _die_with_parent() -> None:
    # Runs between fork and exec; the process that it becomes is the Java process itself.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Also of threads other than the first, which is where Java starts its children."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:  # that thread has ended meanwhile
            continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
