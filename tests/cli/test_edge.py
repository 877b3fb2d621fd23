"""`fordstone edge`: what it starts, and real processes that fail, are killed and are stopped. The hub is away: that is no reason to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import urllib3
from tests.cli.place import SECONDS_MAX, Invoke, finish, start
from tests.edge.test_supervisor import FakeProcess, gone

from fordstone.cli.edge import ChildLines
from fordstone.cli.tiers import forwarded
from fordstone.runtime.health import PipelineWatch

NOBODY = "http://127.0.0.1:9"
FLOW = """
from fordstone import Pipeline
from fordstone.connectors import files

p = Pipeline("{name}")
rows = p.source("rows", files("in/*.jsonl"), schema={{"device": "string", "ts": "timestamp", "temp": "double"}}, time="ts")
rows.to_center()
rows.sink("out", files("out/{name}", format="jsonl"))
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The processes that the agent would have started; each ends at once, with the code that stands in its place, else 0."""
    found: list[FakeProcess] = []

    def spawning(on_line: object, *, catch_out: bool) -> Callable[[str, Sequence[str]], FakeProcess]:
        def spawn(name: str, command: Sequence[str]) -> FakeProcess:
            found.append(FakeProcess(name=name, command=tuple(command), pid=1, code=0))
            return found[-1]

        return spawn

    monkeypatch.setattr("fordstone.cli.edge.spawning", spawning)
    return found


def words(process: FakeProcess) -> list[str]:
    """What follows `fordstone`."""
    return list(process.command[process.command.index("run") :])


def test_each_file_is_a_process_with_a_folder_of_its_own_and_the_options_that_were_given(
    invoke: Invoke, place: Path, started: list[FakeProcess]
):
    (place / "other.py").write_text("")
    given = "--node gw-7 --state kept --outbox-max 1GB --no-hub-state --interval 5s --parallelism 2 --keep 4 -v"
    result = invoke("edge", "flow.py:p", "other.py", "--hub", NOBODY, *given.split())
    assert result.exit_code == 0, result.stderr
    common = "--interval 5s --parallelism 2 --keep 4 --outbox-max 1GB --no-hub-state --node gw-7 --logs json -v"
    first, second = (words(process) for process in started)
    assert first[:6] == ["run", "flow.py:p", "--part", "edge", "--state", "kept/flow.p"]
    assert second[:6] == ["run", "other.py", "--part", "edge", "--state", "kept/other"]
    assert sorted(first[6:]) == sorted(second[6:]) == sorted(["--hub", NOBODY, *common.split()])


def test_every_word_that_a_process_is_given_is_one_that_it_knows(
    invoke: Invoke, started: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
):
    from fordstone.cli.run import run

    given = (
        "--outbox-full block --take-over --hub-state --batch-rows 5 --compression zstd --remote x --failure-every 1h"
    )
    assert invoke("edge", "flow.py", "--hub", NOBODY, "--node", "a", *given.split()).exit_code == 0
    context = run.make_context("run", words(started[0])[1:])
    assert (context.params["part"], context.params["take_over"], context.params["logs"]) == ("edge", True, "json")


def test_who_has_taken_over_does_not_say_it_again(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    from fordstone.edge.agent.supervisor import Supervisor

    jobs = []
    monkeypatch.setattr(Supervisor, "add", lambda _self, job: jobs.append(job))
    assert invoke("edge", "flow.py", "--hub", NOBODY, "--node", "a", "--take-over").exit_code == 0
    assert "--take-over" in jobs[0].command
    assert "--take-over" not in jobs[0].again


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["flow.py"], "`fordstone edge` needs a hub: give --hub URL, or set FORDSTONE_HUB."),
        (["nowhere.py", "--hub", NOBODY], "nowhere.py does not exist"),
        (["flow.py", "flow.py", "--hub", NOBODY], "would share the folder flow"),
        (["flow.py", "--hub", NOBODY, "--node", "a/b"], "node 'a/b'"),
        (["flow.py", "--hub", "x"], "hub 'x' is not an address"),
        (["flow.py", "--hub", NOBODY, "--outbox-max", "0"], "this is not a size"),
        (["flow.py", "--hub", NOBODY, "--health", "here:there"], "--health 'here:there' is not HOST:PORT"),
    ],
)
def test_what_makes_no_sense_is_reported_at_once(
    invoke: Invoke, started: list[FakeProcess], monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
):
    monkeypatch.delenv("FORDSTONE_HUB", raising=False)
    result = invoke("edge", *given)
    assert result.exit_code == 2
    problem = json.loads(result.stderr)["problem"] if result.stderr.startswith("{") else result.stderr
    assert said in problem
    assert started == []


def test_lines_that_are_no_log_lines_become_some():
    line = forwarded("flow", '{"at": "x", "level": "INFO", "event": "started", "pipeline": "p"}')
    assert json.loads(line)["pipeline"] == "p"
    assert json.loads(forwarded("flow", '{"level": "INFO", "event": "started"}'))["pipeline"] == "flow"
    wrapped = json.loads(forwarded("flow", "Traceback (most recent call last):"))
    assert (wrapped["level"], wrapped["pipeline"], wrapped["text"]) == (
        "ERROR",
        "flow",
        "Traceback (most recent call last):",
    )


class Jobs:
    """What a supervisor says of one job."""

    def __init__(self) -> None:
        self.starts, self.ended = 1, False
        self.given_up: dict[str, str] = {}

    def starts_of(self, _name: str) -> int:
        return self.starts

    def has_ended(self, _name: str) -> bool:
        return self.ended


def test_the_health_of_a_child_comes_from_its_lines_and_they_are_printed_once_a_minute(
    capsys: pytest.CaptureFixture[str],
):
    now_s = [1000.0]
    watch, jobs = PipelineWatch("flow"), Jobs()
    lines = ChildLines({"flow": watch}, clock_s=lambda: now_s[0])
    progress = {"level": "INFO", "event": "pipeline progress", "pipeline": "p", "elapsed_us": 5, "epoch": 7}
    for _ in range(13):
        lines.on_line("flow", "err", json.dumps(progress))
        now_s[0] += 5
    lines.on_line("flow", "err", json.dumps(progress | {"epoch": "not ours"}))
    lines.on_line("flow", "err", '{"level": "INFO", "event": "epoch sealed"}')
    printed = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert printed == ["pipeline progress", "pipeline progress", "epoch sealed"]
    lines.look(jobs)  # type: ignore[arg-type]
    found = watch.health()
    assert (found.state, found.epoch, found.ready) == ("running", 7, True)
    jobs.starts = 2
    lines.look(jobs)  # type: ignore[arg-type]
    lines.look(jobs)  # type: ignore[arg-type]
    assert (watch.health().state, watch.health().restarts) == ("restarting", 1)
    jobs.given_up = {"flow": "misused"}
    lines.look(jobs)  # type: ignore[arg-type]
    assert not watch.health().healthy


class Agent:
    """A real one."""

    def __init__(self, place: Path, *files: str, options: Sequence[str] = ()) -> None:
        self.process: subprocess.Popen[str] = start(
            place, "edge", *files, "--hub", NOBODY, "--node", "gateway", "--interval", "100ms", *options
        )
        self.lines: list[dict[str, Any]] = []

    def until(self, event: str, **facts: object) -> dict[str, Any]:
        """Read on to the next such line."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.lines.append(json.loads(text))
            if self.lines[-1]["event"] == event and facts.items() <= self.lines[-1].items():
                return self.lines[-1]
        raise AssertionError(f"ended without {event}: {self.lines}")


@pytest.fixture
def agent(place: Path) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def make(*files: str, **more: Any) -> Agent:
        agents.append(Agent(place, *files, **more))
        return agents[-1]

    for name in ("one", "two"):
        (place / f"{name}.py").write_text(FLOW.format(name=name))
    yield make
    for one in agents:
        one.process.kill()
        one.process.communicate(timeout=SECONDS_MAX)


@pytest.mark.slow
def test_pipelines_run_without_the_hub_come_back_after_a_kill_and_stop_on_request(
    place: Path, agent: Callable[..., Agent]
):
    running = agent("one.py", "two.py")
    pids = {running.until("process started", job=name)["job"]: running.lines[-1]["pid"] for name in ("one", "two")}
    running.until("pipeline progress", pipeline="one")
    os.kill(pids["one"], signal.SIGKILL)
    running.until("process failed", job="one", code=-9)
    again = running.until("process started", job="one")
    assert again["pid"] != pids["one"]
    running.until("pipeline progress", pipeline="one")
    if not any(line["event"] == "pipeline progress" and line["pipeline"] == "two" for line in running.lines):
        running.until("pipeline progress", pipeline="two")
    running.process.send_signal(signal.SIGTERM)
    code, _, err = finish(running.process)
    lines = [json.loads(line) for line in err.splitlines()]
    assert code == 0, lines
    ended = [(line["job"], line["code"]) for line in lines if line["event"] == "process ended"]
    assert sorted(ended) == [("one", 0), ("two", 0)]
    assert (place / "state" / "one" / "one" / "gateway" / "manifests").exists()


def test_an_agent_answers_probes_for_its_pipelines(agent: Callable[..., Agent]):
    running = agent("one.py", options=["--health", "0"])
    url = running.until("health served")["url"]
    assert url.startswith("http://127.0.0.1:")
    assert urllib3.request("GET", f"{url}/healthz", retries=False).status == 200
    running.until("pipeline progress")
    answered = urllib3.request("GET", f"{url}/readyz", retries=False)
    assert answered.status == 200
    (one,) = answered.json()["pipelines"]
    assert (one["pipeline"], one["state"], one["healthy"]) == ("one", "running", True)


def test_nothing_outlives_an_agent_that_is_killed(agent: Callable[..., Agent]):
    running = agent("one.py")
    pid = running.until("process started")["pid"]
    running.until("pipeline progress")
    running.process.kill()
    assert gone(pid)


@pytest.mark.slow
def test_one_whose_command_is_misused_is_given_up_and_the_code_says_so(agent: Callable[..., Agent]):
    running = agent("one.py", options=["--keep", "0"])
    said = running.until("command failed")
    assert "keep=0" in said["problem"]
    assert "misused" in running.until("process given up")["reason"]
    assert finish(running.process)[0] == 2
