"""Keep child processes running: start them, restart them after failures, and stop them cleanly.

`protocol.retry` decides what follows from an exit. A `Supervisor` is handed its clock and how to start a process
(`ChildProcess` is the real one), and never waits: its caller pauses between calls of `step`.

Invariants: a job has at most one process. After `stop` it is never started again. A process that ignores SIGTERM for
`stop_timeout_us` is killed, by its own id. On Linux, no child outlives this process, however this process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final, Literal, Protocol, assert_never

from fordstone.protocol.retry import AGENT, Finished, GiveUp, RestartAfter, SupervisionPolicy, judge_exit

LINE_CHARS_MAX: Final = 1 << 20
"""Maximum length of one printed line; a longer one is passed on in parts."""
READ_WAIT_S: Final = 5.0
"""Timeout for the last output of a child that has ended: a grandchild may still hold the pipe."""
# This runs in the child before it executes the command. Code between fork and exec (`preexec_fn`) could deadlock on a lock that
# another thread held. PR_SET_PDEATHSIG stays in force after exec. If the parent is dead already, the child exits.
_BIND: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
Stream = Literal["out", "err"]
OnLine = Callable[[str, Stream, str], None]
"""Called with the job's name, the stream and a line without its line end, from one thread per stream, in order."""


class ChildProcess:
    """A real process (see `Process`) that leads its own process group, so Ctrl-C at the terminal reaches only the parent.

    Start it from a thread that lives as long as the child should: the kernel kills the child when that thread ends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        on_line: OnLine,
        environment: Mapping[str, str] | None = None,
        catch_out: bool = True,
    ) -> None:
        """`catch_out`: pass its standard output on as lines, too; otherwise it inherits ours."""
        self._name = name
        self._on_line = on_line
        self._process = subprocess.Popen(  # noqa: S603 - a command of our own, without a shell
            bound(command),
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if catch_out else None,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._readers = [
            self._reader(stream, pipe)
            for stream, pipe in (("out", self._process.stdout), ("err", self._process.stderr))
            if pipe is not None
        ]

    @property
    def pid(self) -> int:
        """Its id, which is also that of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs. After its end, all its output has been passed on."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(READ_WAIT_S)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the process only: it stops its own children."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to its group, so its children end, too."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _reader(self, stream: Any, pipe: IO[str]) -> threading.Thread:
        thread = threading.Thread(target=self._read, args=(stream, pipe), name=f"{self._name}-{stream}", daemon=True)
        thread.start()
        return thread

    def _read(self, stream: Stream, pipe: IO[str]) -> None:
        with pipe:
            while line := pipe.readline(LINE_CHARS_MAX):
                self._on_line(self._name, stream, line.rstrip("\n"))


def bound(command: Sequence[str]) -> list[str]:
    """Return a command whose process the kernel kills when this one dies. The first word must be a path."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), *command]


log = logging.getLogger(__name__)

STOP_TIMEOUT_US: Final = 90_000_000
"""Longer than a pipeline needs to finish an epoch and Spark to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process to keep running."""

    name: str
    command: tuple[str, ...]
    again: tuple[str, ...] | None = None
    """Another command for restarts, once a process has run long enough to reset the count of failures."""
    stop_timeout_us: int = STOP_TIMEOUT_US


class Process(Protocol):
    """A started process. Used from the one thread that calls `Supervisor.step`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return its exit code, below 0 for a signal; None while it runs. After its end, all its output has been passed on."""
        ...

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM). Has no effect after its end."""
        ...

    def kill(self) -> None:
        """Kill it and its children (SIGKILL). Has no effect after its end."""
        ...


Spawn = Callable[[str, Sequence[str]], Process]
"""Starts the process of a job, given its name and command. Raises `OSError` if that fails."""


@dataclass(slots=True)
class _Entry:
    """A job and its state."""

    job: Job
    process: Process | None = None
    began_us: int = 0
    due_us: int | None = None
    """When it is to be started; None if it runs or has ended."""
    starts: int = 0
    failures: int = 0
    settled: bool = False
    """One of its processes has run long enough to reset the count of failures."""
    stop_requested: bool = False
    deadline_us: int | None = None
    killed: bool = False
    code: int | None = None
    given_up: str | None = None

    @property
    def over(self) -> bool:
        return self.process is None and self.due_us is None


class Supervisor:
    """Runs jobs. Call `step` about ten times a second until `over`."""

    def __init__(
        self,
        *,
        spawn: Spawn,
        monotonic_us: Callable[[], int],
        policy: SupervisionPolicy = AGENT,
        given_up_level: int = logging.ERROR,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`given_up_level`: the log level when a job is given up, for callers that report it in another way.

        `chance()` returns a random number from 0 to 1, for the jitter of waits.
        """
        self._given_up_level = given_up_level
        self._spawn = spawn
        self._now_us = monotonic_us
        self._policy = policy
        self._chance = chance
        self._entries: dict[str, _Entry] = {}

    def add(self, job: Job) -> None:
        if job.name in self._entries and not self._entries[job.name].over:
            raise ValueError(f"job {job.name} is running already")
        self._entries[job.name] = _Entry(job=job, due_us=self._now_us())

    def step(self) -> None:
        """Handle exits, start what is due, and kill what does not stop in time."""
        for entry in self._entries.values():
            if entry.process is not None:
                code = entry.process.poll()
                if code is not None:
                    self._ended(entry, code)
                elif entry.deadline_us is not None and self._now_us() >= entry.deadline_us and not entry.killed:
                    entry.killed = True
                    log.warning("process killed", extra={"job": entry.job.name, "reason": "it did not stop in time"})
                    entry.process.kill()
            elif entry.due_us is not None and self._now_us() >= entry.due_us:
                self._start(entry)

    def stop(self, *names: str) -> None:
        """Ask these jobs to stop, or all if none is named. May be called again."""
        for entry in self._entries.values():
            if entry.stop_requested or (names and entry.job.name not in names):
                continue
            entry.stop_requested, entry.due_us = True, None
            if entry.process is not None:
                entry.deadline_us = self._now_us() + entry.job.stop_timeout_us
                entry.process.terminate()

    def kill(self) -> None:
        """Kill everything at once, for an exit that cannot wait."""
        for entry in self._entries.values():
            entry.stop_requested, entry.due_us = True, None
            if entry.process is not None:
                entry.process.kill()

    def renew(self, name: str, command: tuple[str, ...]) -> None:
        """Use another command from the next start of this job on."""
        entry = self._entries[name]
        entry.job = replace(entry.job, command=command, again=None)

    @property
    def over(self) -> bool:
        """Whether nothing runs and nothing is to be started."""
        return all(entry.over for entry in self._entries.values())

    def has_ended(self, name: str) -> bool:
        return self._entries[name].over

    def code_of(self, name: str) -> int | None:
        """Return the exit code of this job's last process; None if none has ended."""
        return self._entries[name].code

    def starts_of(self, name: str) -> int:
        """Return how often a process of this job was started."""
        return self._entries[name].starts

    @property
    def given_up(self) -> dict[str, str]:
        """The jobs that failed and are not started again, with the reason."""
        return {name: entry.given_up for name, entry in self._entries.items() if entry.given_up is not None}

    def _start(self, entry: _Entry) -> None:
        command = entry.job.again if entry.settled and entry.job.again is not None else entry.job.command
        entry.began_us, entry.due_us = self._now_us(), None
        entry.starts += 1
        try:
            entry.process = self._spawn(entry.job.name, command)
        except OSError as error:
            # Out of memory or of process ids, which may be temporary.
            log.warning("process not started", extra={"job": entry.job.name, "problem": str(error)})
            self._ended(entry, -1)
            return
        log.info("process started", extra={"job": entry.job.name, "pid": entry.process.pid, "starts": entry.starts})

    def _ended(self, entry: _Entry, code: int) -> None:
        entry.process, entry.deadline_us, entry.code = None, None, code
        lasted_us = self._now_us() - entry.began_us
        entry.settled = entry.settled or lasted_us >= self._policy.restart.forgiven_after_us
        decision = judge_exit(
            self._policy,
            code=code,
            stop_requested=entry.stop_requested,
            failures=entry.failures,
            lasted_us=lasted_us,
            chance=self._chance(),
            killed=entry.killed,
        )
        facts = {"job": entry.job.name, "code": code, "lasted_us": lasted_us}
        match decision:
            case Finished():
                log.info("process ended", extra=facts)
            case GiveUp(reason=reason):
                entry.given_up = reason
                log.log(self._given_up_level, "process given up", extra=facts | {"reason": reason})
            case RestartAfter(wait_us=wait_us, failures=failures):
                entry.failures = failures
                entry.due_us = self._now_us() + wait_us
                log.warning("process failed", extra=facts | {"failures": failures, "wait_us": wait_us})
            case _:
                assert_never(decision)
