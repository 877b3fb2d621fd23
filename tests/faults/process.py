"""Real processes: start them in a folder, wait for what they do, end them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tests.faults.forked import IMPORTED, Forked, nursery
from tests.faults.job import NODE, PIPELINE, Job
from tests.waiting import until

from fordstone.epochs.store import CheckpointStore
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import FAILPOINT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS_MAX = 600.0
"""Generous: a busy machine must not fail a test. Without a fault, every wait ends within seconds."""
POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a process left."""

    code: int
    lines: list[dict[str, Any]]
    """What it printed."""
    errors: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def report(self) -> dict[str, Any]:
        """Of a run that came to its end."""
        assert self.code == 0, self.errors
        return self.lines[-1]


class Process:
    """One running child. Its output goes to files in its folder."""

    poll_seconds = POLL_SECONDS

    def __init__(
        self,
        folder: Path,
        job: msgspec.Struct,
        *,
        failpoint: str = "",
        inside: tuple[str, ...] = (),
        module: str = "tests.faults.child_pipeline",
        apart: bool = False,
    ) -> None:
        """`inside` is a command that runs the one that follows it. `apart`: it leads a process group of its own."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "POLARS_MAX_THREADS": "2", FAILPOINT_VARIABLE: failpoint}
        argument = msgspec.json.encode(job).decode()
        self._process: subprocess.Popen[bytes] | Forked
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err, Path(os.devnull).open("rb") as nothing:
            if module in IMPORTED and not inside and not apart:
                self._process = nursery().start(
                    module, argument, folder=folder, environment=environment, files=(nothing, out, err)
                )
            else:
                self._process = subprocess.Popen(
                    [*inside, sys.executable, "-m", module, argument],
                    cwd=folder,
                    env=environment,
                    stdin=nothing,
                    stdout=out,
                    stderr=err,
                    start_new_session=apart,
                )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def lines(self) -> list[dict[str, Any]]:
        """What it has printed so far, whole lines only."""
        text = self._out.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._err.read_text()

    def until(self, met: Callable[[], bool], what: str) -> None:
        """Wait for something to happen while it runs."""
        self.until_dead_or(met, what)
        assert self.running or met(), f"it ended before {what}:\n{self._err.read_text()}"

    def until_dead_or(self, met: Callable[[], bool], what: str) -> None:
        """Wait for something to happen, or for its end."""
        until(
            lambda: not self.running or met(),
            what,
            seconds_max=WAIT_SECONDS_MAX,
            poll_seconds=self.poll_seconds,
            report=self._err.read_text,
        )

    def kill(self) -> Ended:
        """SIGKILL, which no process can catch."""
        self._process.kill()
        return self.ended()

    def stop(self) -> Ended:
        """SIGTERM: finish the epoch and end."""
        self._process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> Ended:
        """Wait for its end."""
        try:
            code = self._process.wait(WAIT_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"it did not end within {WAIT_SECONDS_MAX:.0f} s:\n{self._err.read_text()}") from None
        return Ended(code=code, lines=self.lines(), errors=self._err.read_text())


@contextmanager
def started(folder: Path, job: Job, *, failpoint: str = "", inside: tuple[str, ...] = ()) -> Iterator[Process]:
    """A process that does not outlive the test."""
    process = Process(folder, job, failpoint=failpoint, inside=inside)
    try:
        yield process
    finally:
        if process.running:
            process.kill()


def run_to_end(folder: Path, job: Job, *, failpoint: str = "", inside: tuple[str, ...] = ()) -> Ended:
    """Start it and wait."""
    with started(folder, job, failpoint=failpoint, inside=inside) as process:
        return process.ended()


def store_of(folder: Path, state: str = "state") -> Path:
    """Where the checkpoints of a job lie."""
    return folder / state / PIPELINE / NODE


def sealed(folder: Path, state: str = "state") -> int:
    """The newest epoch with a manifest."""
    return max((int(file.stem) for file in (store_of(folder, state) / "manifests").glob("*.json")), default=0)


def opened_store(folder: Path) -> CheckpointStore:
    """The checkpoints of a job, for looking at."""
    return CheckpointStore(OsDisk(folder / "state"), pipeline=PIPELINE, node=NODE, read_only=True)


def released(folder: Path) -> int:
    """The newest epoch that any sink shows."""
    return max((int(file.stem.partition("-")[2]) for file in folder.glob("out/*/epoch-*")), default=0)
