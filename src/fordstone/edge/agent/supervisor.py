"""Keep processes running: start them, start them again after failures, and stop them cleanly.

What follows from an end is judged in `protocol.supervision`; how a process is started is handed in (`edge.child_process` does it
for real), and so is the clock. Nothing here waits: whoever calls `step` rests in between.

Invariants: a job has at most one process. After `stop` it is never started again. A process that does not heed SIGTERM within
`stop_wait_us` is killed, by its own id.

Start a child process that cannot outlive this one, and hand on what it prints, line by line.

The child leads a process group of its own: a Ctrl-C at the terminal reaches only the parent, which stops its children in the
order that it wants. On Linux the kernel kills the child when the parent dies, however that happens. Elsewhere a parent that is
killed leaves its children behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final, Literal, Protocol, assert_never

from fordstone.protocol.supervision import AGENT, Done, GiveUp, StartAgain, SupervisionPolicy, judge_end

LINE_CHARS_MAX: Final = 1 << 20
"""Of one printed line; what is longer comes in parts."""
READ_WAIT_S: Final = 5.0
"""Once a child has ended, what it printed is waited for so long: a grandchild may still hold the pipe."""
# A process of its own, for code between fork and exec may wait for ever for a lock that another thread of ours held. What is asked
# of the kernel (PR_SET_PDEATHSIG) outlasts exec; whose parent has died before it asked, ends.
_BIND: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
Stream = Literal["out", "err"]
OnLine = Callable[[str, Stream, str], None]
"""Called with the job's name, the stream and a line without its end; from a thread of the child's, one line after the other."""


class ChildProcess:
    """One started process; see `supervisor.Process`. Start it from a thread that lives as long as the children should."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        on_line: OnLine,
        environment: Mapping[str, str] | None = None,
        catch_out: bool = True,
    ) -> None:
        """`catch_out`: its standard output is handed on as lines too; else it goes where ours goes."""
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
        """Its id, which is that of its group too."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs. After an end, all that it printed has been handed on."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(READ_WAIT_S)
        return code

    def terminate(self) -> None:
        """SIGTERM, to the process alone: it stops what it has started itself."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, to its group: what it has started goes too."""
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
    """The command of a process that the kernel kills when this one dies. The first word is a path."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), *command]


log = logging.getLogger(__name__)

STOP_WAIT_US: Final = 90_000_000
"""Longer than a pipeline takes to finish an epoch and Spark to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process to keep running."""

    name: str
    command: tuple[str, ...]
    again: tuple[str, ...] | None = None
    """The command once a process has run for long enough to be forgiven earlier failures, if that is another."""
    stop_wait_us: int = STOP_WAIT_US


class Process(Protocol):
    """A started process. Used from the one thread that calls `Supervisor.step`."""

    @property
    def pid(self) -> int:
        """Its id."""
        ...

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs. After an end, everything that it printed has been handed on."""
        ...

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM). Harmless after its end."""
        ...

    def kill(self) -> None:
        """End it and what it has started (SIGKILL). Harmless after its end."""
        ...


Spawn = Callable[[str, Sequence[str]], Process]
"""Starts the process of a job by its name and command; raises `OSError` if that cannot be done."""


@dataclass(slots=True)
class _Kept:
    """A job and how it stands."""

    job: Job
    process: Process | None = None
    began_us: int = 0
    due_us: int | None = None
    """When it is to be started; None: it runs, or is over."""
    starts: int = 0
    failures: int = 0
    settled: bool = False
    """One of its processes has run for long enough."""
    told: bool = False
    deadline_us: int | None = None
    deaf: bool = False
    code: int | None = None
    given_up: str | None = None

    @property
    def over(self) -> bool:
        return self.process is None and self.due_us is None


class Supervisor:
    """Call `step` about ten times a second, until `over`."""

    def __init__(
        self,
        *,
        spawn: Spawn,
        monotonic_us: Callable[[], int],
        policy: SupervisionPolicy = AGENT,
        given_up_level: int = logging.ERROR,
    ) -> None:
        """`given_up_level`: how loud to log that a job is given up; who tells it otherwise wants it quiet."""
        self._given_up_level = given_up_level
        self._spawn = spawn
        self._now_us = monotonic_us
        self._policy = policy
        self._kept: dict[str, _Kept] = {}

    def add(self, job: Job) -> None:
        """Take a job on; it is started by the next `step`."""
        if job.name in self._kept and not self._kept[job.name].over:
            raise ValueError(f"job {job.name} is running already")
        self._kept[job.name] = _Kept(job=job, due_us=self._now_us())

    def step(self) -> None:
        """Take note of ends, start what is due, kill what was told to stop and does not."""
        for kept in self._kept.values():
            if kept.process is not None:
                code = kept.process.poll()
                if code is not None:
                    self._ended(kept, code)
                elif kept.deadline_us is not None and self._now_us() >= kept.deadline_us and not kept.deaf:
                    kept.deaf = True
                    log.warning("process killed", extra={"job": kept.job.name, "why": "it did not stop in time"})
                    kept.process.kill()
            elif kept.due_us is not None and self._now_us() >= kept.due_us:
                self._start(kept)

    def stop(self, *names: str) -> None:
        """Ask these jobs to stop, or all if none is named. May be called again."""
        for kept in self._kept.values():
            if kept.told or (names and kept.job.name not in names):
                continue
            kept.told, kept.due_us = True, None
            if kept.process is not None:
                kept.deadline_us = self._now_us() + kept.job.stop_wait_us
                kept.process.terminate()

    def kill(self) -> None:
        """End everything at once. For a way out that nothing else may follow."""
        for kept in self._kept.values():
            kept.told, kept.due_us = True, None
            if kept.process is not None:
                kept.process.kill()

    def renew(self, name: str, words: tuple[str, ...]) -> None:
        """From now on start this job by another command."""
        kept = self._kept[name]
        kept.job = replace(kept.job, command=words, again=None)

    @property
    def over(self) -> bool:
        """Whether nothing runs and nothing is to be started."""
        return all(kept.over for kept in self._kept.values())

    def has_ended(self, name: str) -> bool:
        """Whether this job is over."""
        return self._kept[name].over

    def code_of(self, name: str) -> int | None:
        """How this job's last process ended; None before any end."""
        return self._kept[name].code

    def pid_of(self, name: str) -> int | None:
        """The process of this job, if it runs."""
        process = self._kept[name].process
        return None if process is None else process.pid

    def restarts_of(self, name: str) -> int:
        """How often this job was started again."""
        return max(0, self._kept[name].starts - 1)

    @property
    def given_up(self) -> dict[str, str]:
        """The jobs that are not started again although they failed, with the reason."""
        return {name: kept.given_up for name, kept in self._kept.items() if kept.given_up is not None}

    def _start(self, kept: _Kept) -> None:
        command = kept.job.again if kept.settled and kept.job.again is not None else kept.job.command
        kept.began_us, kept.due_us = self._now_us(), None
        kept.starts += 1
        try:
            kept.process = self._spawn(kept.job.name, command)
        except OSError as error:
            # No memory, or no process ids left: that may pass.
            log.warning("process not started", extra={"job": kept.job.name, "problem": str(error)})
            self._ended(kept, -1)
            return
        log.info("process started", extra={"job": kept.job.name, "pid": kept.process.pid, "starts": kept.starts})

    def _ended(self, kept: _Kept, code: int) -> None:
        kept.process, kept.deadline_us, kept.code = None, None, code
        lasted_us = self._now_us() - kept.began_us
        kept.settled = kept.settled or lasted_us >= self._policy.restart.forgiven_after_us
        decision = judge_end(
            self._policy, code=code, told=kept.told, failures=kept.failures, lasted_us=lasted_us, deaf=kept.deaf
        )
        facts = {"job": kept.job.name, "code": code, "lasted_us": lasted_us}
        match decision:
            case Done():
                log.info("process ended", extra=facts)
            case GiveUp(why=why):
                kept.given_up = why
                log.log(self._given_up_level, "process given up", extra=facts | {"why": why})
            case StartAgain(wait_us=wait_us, failures=failures):
                kept.failures = failures
                kept.due_us = self._now_us() + wait_us
                log.warning("process failed", extra=facts | {"failures": failures, "wait_us": wait_us})
            case _:
                assert_never(decision)
