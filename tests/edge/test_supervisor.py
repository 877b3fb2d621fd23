"""The supervisor with processes that are only remembered, and the real thing where it has to be real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from fordstone.edge.agent.supervisor import ChildProcess, Job, Supervisor
from fordstone.protocol.retry import (
    AGENT,
    AT_A_TERMINAL,
    ExitDecision,
    Finished,
    GiveUp,
    RestartAfter,
    RestartPolicy,
    SupervisionPolicy,
    judge_exit,
)

SECONDS_MAX = 30


@dataclass
class FakeProcess:
    """Ends when the test says so."""

    name: str
    command: tuple[str, ...]
    pid: int
    code: int | None = None
    heard: list[str] = field(default_factory=list)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.heard.append("terminate")

    def kill(self) -> None:
        self.heard.append("kill")
        self.code = -9


class World:
    """A clock that the test turns, and all processes that were started."""

    def __init__(self, policy: SupervisionPolicy = AGENT, *, chance: Callable[[], float] = lambda: 1.0) -> None:
        self.now_us = 0
        self.started: list[FakeProcess] = []
        self.refused = 0
        self.supervisor = Supervisor(spawn=self.spawn, monotonic_us=lambda: self.now_us, policy=policy, chance=chance)

    def spawn(self, name: str, command: Sequence[str]) -> FakeProcess:
        if self.refused:
            self.refused -= 1
            raise BlockingIOError("no process ids left")
        self.started.append(FakeProcess(name=name, command=tuple(command), pid=1000 + len(self.started)))
        return self.started[-1]

    def after(self, seconds: float) -> None:
        self.now_us += int(seconds * 1e6)
        self.supervisor.step()

    def end(self, code: int, *, after: float = 0.0) -> None:
        self.started[-1].code = code
        self.after(after)


@pytest.mark.parametrize(
    ("policy", "code", "stop_requested", "killed", "decision"),
    [
        (AGENT, 0, False, False, Finished()),
        (AGENT, 0, True, False, Finished()),
        (AGENT, -15, True, False, Finished()),
        (AGENT, 1, False, False, RestartAfter(500_000, 1)),
        (AGENT, -9, False, False, RestartAfter(500_000, 1)),
        (AT_A_TERMINAL, -9, False, False, RestartAfter(100_000, 1)),
        (AT_A_TERMINAL, 1, False, False, GiveUp("it failed (exit code 1)")),
        (AGENT, -9, True, True, GiveUp("it did not stop in time and was killed")),
        (AGENT, 1, True, False, GiveUp("it ended with code 1 as it stopped")),
    ],
)
def test_an_end_is_judged_by_its_code_and_by_who_wanted_it(
    policy: SupervisionPolicy, code: int, stop_requested: bool, killed: bool, decision: ExitDecision
):
    facts = {"failures": 0, "lasted_us": 0, "chance": 1.0}
    assert judge_exit(policy, code=code, stop_requested=stop_requested, killed=killed, **facts) == decision  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "why"), [(2, "misused"), (3, "taken its pipeline over")])
def test_what_starting_again_would_only_repeat_is_given_up_even_by_an_agent(code: int, why: str):
    decision = judge_exit(AGENT, code=code, stop_requested=False, failures=0, lasted_us=0, chance=1.0)
    assert isinstance(decision, GiveUp)
    assert why in decision.reason


def test_a_failed_process_is_started_again_after_waits_that_double_up_to_a_bound_and_never_end():
    world = World()
    world.supervisor.add(Job(name="a", command=("x",)))
    world.after(0)
    waits = []
    for _ in range(100):
        world.end(1)
        began_us = world.now_us
        count = len(world.started)
        while len(world.started) == count:
            world.after(0.25)
        waits.append((world.now_us - began_us) / 1e6)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(waits[8:]) == {60.0}
    assert len(world.started) == 101


def test_processes_that_failed_together_are_not_started_again_at_the_same_moment():
    waits_s: list[list[float]] = []
    for seed in range(20):
        world = World(chance=Random(seed).random)
        world.supervisor.add(Job(name="a", command=("x",)))
        world.after(0)
        found = []
        for count in range(1, 11):
            world.end(1)
            began_us = world.now_us
            while len(world.started) == count:
                world.after(0.01)
            found.append((world.now_us - began_us) / 1e6)
        waits_s.append(found)
    for failures, of_nodes in enumerate(zip(*waits_s, strict=True)):
        longest_s = min(0.5 * 2**failures, 60.0)
        assert len(set(of_nodes)) > 10
        assert longest_s / 2 <= min(of_nodes) < longest_s * 0.7 < max(of_nodes) <= longest_s + 0.01


def test_a_process_that_ran_long_enough_is_forgiven():
    world = World()
    world.supervisor.add(Job(name="a", command=("x",)))
    world.after(0)
    for _ in range(5):
        world.end(1)
        world.after(60)
    world.end(1, after=120)
    world.after(0.5)
    assert len(world.started) == 7, "half a second after a failure that is counted as the first"


def test_another_command_is_used_once_a_process_has_run_for_a_while():
    world = World()
    world.supervisor.add(Job(name="a", command=("x", "--take-over"), again=("x",)))
    world.after(0)
    world.end(1)
    world.after(1)
    world.end(-9, after=60)
    world.after(1)
    world.end(-9)
    world.after(1)
    assert [process.command for process in world.started] == [
        ("x", "--take-over"),
        ("x", "--take-over"),
        ("x",),
        ("x",),
    ]


def test_a_job_may_be_given_another_command_for_its_next_start():
    world = World()
    world.supervisor.add(Job(name="a", command=("x", "0")))
    world.after(0)
    world.supervisor.renew("a", ("x", "4711"))
    world.end(-9)
    world.after(1)
    assert [process.command for process in world.started] == [("x", "0"), ("x", "4711")]


def test_a_process_that_cannot_be_started_now_is_started_later():
    world = World()
    world.refused = 1
    world.supervisor.add(Job(name="a", command=("x",)))
    world.after(0)
    assert (world.started, world.supervisor.over) == ([], False)
    world.after(0.5)
    assert len(world.started) == 1


def test_stopping_asks_first_and_kills_only_after_the_wait():
    world = World()
    world.supervisor.add(Job(name="a", command=("x",), stop_timeout_us=10_000_000))
    world.after(0)
    world.supervisor.stop()
    world.after(9)
    assert world.started[0].heard == ["terminate"]
    world.supervisor.stop()
    world.after(1)
    assert world.started[0].heard == ["terminate", "kill"]
    world.after(0)
    assert world.supervisor.over
    assert "did not stop in time" in world.supervisor.given_up["a"]


def test_a_process_that_waits_for_a_restart_is_not_started_after_a_stop():
    world = World()
    world.supervisor.add(Job(name="a", command=("x",)))
    world.after(0)
    world.end(1)
    world.supervisor.stop()
    world.after(1000)
    assert world.supervisor.over
    assert len(world.started) == 1


def test_one_job_may_be_stopped_while_others_run_on():
    world = World()
    for name in ("edge", "hub"):
        world.supervisor.add(Job(name=name, command=(name,)))
    world.after(0)
    world.supervisor.stop("edge")
    edge, hub = world.started
    assert (edge.heard, hub.heard) == (["terminate"], [])
    edge.code = 0
    world.after(0)
    assert (world.supervisor.has_ended("edge"), world.supervisor.has_ended("hub")) == (True, False)
    assert world.supervisor.code_of("edge") == 0


def test_one_that_is_given_up_leaves_the_others_alone():
    world = World()
    for name in ("bad", "good"):
        world.supervisor.add(Job(name=name, command=(name,)))
    world.after(0)
    world.started[0].code = 2
    world.after(3600)
    assert list(world.supervisor.given_up) == ["bad"]
    assert [process.name for process in world.started] == ["bad", "good"]
    assert not world.supervisor.over


def test_at_a_terminal_one_that_is_killed_again_and_again_is_given_up():
    world = World(SupervisionPolicy(restart=RestartPolicy(failures_max=2), final_codes=range(1, 256)))
    world.supervisor.add(Job(name="a", command=("x",)))
    world.after(0)
    for _ in range(3):
        world.end(-9)
        world.after(60)
    assert world.supervisor.given_up == {"a": "it failed 3 times in a row"}


class Lines:
    """What a real child printed."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.came = threading.Event()

    def __call__(self, name: str, stream: str, text: str) -> None:
        self.lines.append((name, stream, text))
        self.came.set()


def ended(child: ChildProcess) -> int:
    until = time.monotonic() + SECONDS_MAX
    while (code := child.poll()) is None:
        assert time.monotonic() < until, "the child did not end"
    return code


def test_what_a_child_prints_has_been_handed_on_when_its_end_is_known():
    lines = Lines()
    code = "import sys; print('one'); print('two', file=sys.stderr); print('three', end=''); sys.exit(7)"
    assert ended(ChildProcess("a", [sys.executable, "-c", code], on_line=lines)) == 7
    assert sorted(lines.lines) == [("a", "err", "two"), ("a", "out", "one"), ("a", "out", "three")]


def test_a_child_is_asked_to_stop_and_its_group_is_not_ours():
    lines = Lines()
    code = "import os, signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print(os.getpgid(0), flush=True); signal.pause()"
    child = ChildProcess("a", [sys.executable, "-c", code], on_line=lines)
    assert lines.came.wait(SECONDS_MAX)
    assert int(lines.lines[0][2]) == child.pid != os.getpgid(0)
    child.terminate()
    assert ended(child) == 5
    child.kill()


def test_killing_a_child_takes_what_it_has_started_along():
    lines = Lines()
    code = (
        "import subprocess, sys, signal; signal.signal(15, signal.SIG_IGN); "
        "print(subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']).pid, flush=True); signal.pause()"
    )
    child = ChildProcess("a", [sys.executable, "-c", code], on_line=lines)
    assert lines.came.wait(SECONDS_MAX)
    child.kill()
    assert ended(child) == -signal.SIGKILL
    assert gone(int(lines.lines[0][2]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there can the kernel be asked for it")
def test_no_child_outlives_a_parent_that_is_killed():
    parent = (
        "import sys, threading\nfrom fordstone.edge.agent.supervisor import ChildProcess\n"
        "code = 'import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()'\n"
        "child = ChildProcess('a', [sys.executable, '-c', code], on_line=lambda *line: print(line[2], flush=True))\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        process.kill()
        process.wait()
    assert gone(child)


def gone(pid: int) -> bool:
    """Whether the process is gone, or nothing but a name that nobody has asked for yet; waits for it."""
    until = time.monotonic() + SECONDS_MAX
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
    return False
