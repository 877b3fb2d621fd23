"""Real Spark drivers: a Python process, its Java process and their Python workers; and what they leave in a folder.

They lead a process group of their own, except for the workers, which end when Java does. All that a test has started is
gone when its block ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.job import PIPELINE
from tests.faults.oracle import Feed
from tests.faults.process import Ended, Process
from tests.faults.spark_job import SparkChild

GONE_SECONDS_MAX = 600.0
HELD_ROWS = 60
CHECKPOINT = f"state/{PIPELINE}/_spark"


class SparkProcess(Process):
    """One running driver."""

    poll_seconds = 0.02

    def __init__(self, folder: Path, child: SparkChild, *, failpoint: str = "") -> None:
        module = "tests.faults.child_spark"
        super().__init__(folder, child, failpoint=failpoint, module=module, apart=True)
        self._seen: set[tuple[int, str]] = {(self.pid, born(self.pid))}
        """With when each was started: the system gives the id of one that has ended to another, of somebody else."""

    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._err.read_text()

    def family(self) -> list[int]:
        """The ids of all that it has started, and their children: those that run now, and none that ran earlier."""
        found = descendants(self.pid)
        self._seen.update((pid, born(pid)) for pid in found)
        return found

    def java(self) -> int | None:
        """The id of its Java process."""
        return next((pid for pid in self.family() if "org.apache.spark.deploy.SparkSubmit" in command(pid)), None)

    def daemon(self) -> int | None:
        """The id of a process that forks Python workers for Java."""
        return next((pid for pid in self.family() if "daemon pyspark" in command(pid)), None)

    def kill_group(self) -> Ended:
        """SIGKILL for Python and Java at once."""
        self.family()
        os.killpg(self.pid, signal.SIGKILL)
        return self.ended()

    def kill(self) -> Ended:
        """SIGKILL for Python alone."""
        self.family()
        return super().kill()

    def kill_java(self) -> Ended:
        """SIGKILL for Java alone: Python has to end by itself."""
        java = self.java()
        assert java is not None
        os.kill(java, signal.SIGKILL)
        return self.ended()

    def until_gone(self, *, by_force: bool = False) -> None:
        """Wait until nothing of it is left that was ever seen."""
        if self.running:
            self.family()
        until = time.monotonic() + GONE_SECONDS_MAX
        while left := [pid for pid, when in self._seen if when and born(pid) == when]:
            for pid in left if by_force else ():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
            if self.pid in left:
                self.ended()
            assert time.monotonic() < until, f"still there: {[command(pid) for pid in left]}"
            time.sleep(self.poll_seconds)


@contextmanager
def spark_started(folder: Path, child: SparkChild, *, failpoint: str = "") -> Iterator[SparkProcess]:
    """A driver that does not outlive the test. What it started may outlive the block by as long as it needs to end."""
    process = SparkProcess(folder, child, failpoint=failpoint)
    whole = False
    try:
        yield process
        whole = True
    finally:
        if process.running or not whole:
            process.until_gone(by_force=True)


def held(process: SparkProcess, feed: Feed) -> int:
    """Wait until a task stands still in a function of job `holds`; gives the id of its Python worker."""
    place = feed.folder / "held"
    place.mkdir()
    (feed.folder / "hold").touch()
    feed.write(HELD_ROWS)
    process.until(lambda: any(place.iterdir()), "a task that is held")
    return int(next(place.iterdir()).name)


def release(feed: Feed) -> None:
    """Let tasks go on."""
    (feed.folder / "hold").unlink()
    shutil.rmtree(feed.folder / "held")


# Processes.


def children(pid: int) -> list[int]:
    """Of all its threads: Java starts its children in any."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:  # that thread has ended meanwhile
            continue
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def parent(pid: int) -> int:
    """Who started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command(pid: int) -> str:
    """How it was started; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def program(pid: int) -> Path:
    """The file that it runs; an empty path if it is gone."""
    try:
        return Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        return Path()


def born(pid: int) -> str:
    """When it was started, as the system counts; nothing if it is gone, or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


# What the query has left so far: the newest batch, or epoch, of each kind.


def planned(folder: Path) -> int:
    """Batches in Spark's log, counted like epochs."""
    return _newest(folder / CHECKPOINT / "offsets", lambda name: int(name) + 1 if name.isdigit() else 0)


def stored(folder: Path) -> int:
    """How many files of state there are."""
    return sum(1 for _ in (folder / CHECKPOINT / "state").glob("*/*/**/*.changelog"))


def staged(folder: Path) -> int:
    """The newest epoch of which a task has written a part, released or not."""
    there = (folder / "out").glob("*/.tmp-epoch-*")
    return max(released(folder), *(int(path.name.split("-")[2]) for path in there), 0)


def released(folder: Path) -> int:
    """The newest epoch that any sink of files shows."""
    return max((int(path.stem.partition("-")[2]) for path in (folder / "out").glob("*/epoch-*")), default=0)


def cut(folder: Path) -> int:
    """The newest epoch with a cut."""
    return _newest(folder / CHECKPOINT / "fordstone" / "cuts", lambda name: int(name.partition(".")[0] or 0))


def committed(folder: Path) -> int:
    """The newest batch that Spark has committed, counted like epochs."""
    return _newest(folder / CHECKPOINT / "commits", lambda name: int(name) + 1 if name.isdigit() else 0)


def dead_letters(folder: Path) -> Path:
    """Where the dead letters of a job lie."""
    return folder / CHECKPOINT / "fordstone" / "dead-letters"


def _newest(directory: Path, number: Callable[[str], int]) -> int:
    return max((number(path.name) for path in directory.iterdir()), default=0) if directory.exists() else 0
