"""A run of two tiers on one machine: the order of its processes, what is shown of them, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cli.place import Invoke
from tests.edge.test_supervisor import FakeProcess

from fordstone.cli.tiers import CENTER, EDGE, HUB, Course, Talk
from fordstone.cli.view.tiers_view import Board, LineTiersView, plain_table
from fordstone.edge.agent.supervisor import Job, Supervisor
from fordstone.protocol.restart import AT_A_TERMINAL

URL = "http://127.0.0.1:4711"
TIERED = """
from fordstone import Pipeline
from fordstone.connectors import files

p = Pipeline("two-tiers")
rows = p.source("rows", files("in/*.jsonl"), schema={"device": "string", "ts": "timestamp", "temp": "double"}, time="ts")
rows.to_center().sink("out", files("out/all", format="jsonl"))
"""


class Stage:
    """A course whose processes end when the test says so."""

    def __init__(self, *, bounded: bool = False) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self.now_us = 0
        self.url: str | None = None
        self.supervisor = Supervisor(
            spawn=self.spawn, monotonic_us=lambda: self.now_us, policy=AT_A_TERMINAL, chance=lambda: 1.0
        )
        self.course = Course(
            self.supervisor,
            hub=lambda listen: Job(name=HUB, command=("hub", listen)),
            halves=lambda url: {name: Job(name=name, command=(name, url)) for name in (EDGE, CENTER)},
            ready=lambda: self.url,
            bounded=bounded,
        )
        self.course.step()

    def spawn(self, name: str, command: Sequence[str]) -> FakeProcess:
        self.processes[name] = FakeProcess(name=name, command=tuple(command), pid=len(self.processes) + 1)
        return self.processes[name]

    def step(self, seconds: float = 0.0) -> None:
        self.now_us += int(seconds * 1e6)
        for _ in range(3):
            self.course.step()

    def ready(self) -> None:
        self.url = URL
        self.step()

    def end(self, name: str, code: int = 0) -> None:
        self.processes[name].code = code
        self.step()

    @property
    def told(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.heard and process.code is None]


def test_the_halves_start_when_the_hub_listens_and_know_where():
    stage = Stage()
    stage.step()
    assert list(stage.processes) == [HUB]
    stage.ready()
    assert stage.processes[EDGE].command == (EDGE, URL)
    assert stage.processes[CENTER].command == (CENTER, URL)


def test_told_to_stop_the_edge_goes_first_then_the_center_then_the_hub():
    stage = Stage()
    stage.ready()
    stage.course.stop()
    stage.step()
    assert stage.told == [EDGE]
    stage.course.stop()
    stage.end(EDGE)
    assert stage.told == [CENTER]
    stage.end(CENTER)
    assert stage.told == [HUB]
    assert stage.course.phase == "stopping hub"
    stage.end(HUB)
    assert (stage.course.phase, stage.course.failed) == ("over", None)


def test_told_to_stop_before_the_hub_listens_nothing_else_is_started():
    stage = Stage()
    stage.course.stop()
    stage.url = URL
    stage.step()
    assert stage.told == [HUB]
    stage.end(HUB)
    assert (stage.course.phase, list(stage.processes)) == ("over", [HUB])


def test_a_bounded_run_is_the_edge_to_its_end_then_the_center():
    stage = Stage(bounded=True)
    stage.ready()
    assert list(stage.processes) == [HUB, EDGE]
    stage.end(EDGE)
    assert list(stage.processes) == [HUB, EDGE, CENTER]
    assert stage.told == []
    stage.end(CENTER)
    assert stage.told == [HUB]
    stage.end(HUB)
    assert stage.course.phase == "over"


def test_a_bounded_run_that_is_told_to_stop_starts_no_center():
    stage = Stage(bounded=True)
    stage.ready()
    stage.course.stop()
    stage.end(EDGE)
    stage.end(HUB)
    assert (stage.course.phase, CENTER in stage.processes) == ("over", False)


@pytest.mark.parametrize("part", [EDGE, CENTER])
def test_a_part_that_fails_stops_the_rest_in_order(part: str):
    stage = Stage()
    stage.ready()
    stage.end(part, 1)
    other = CENTER if part == EDGE else EDGE
    assert stage.told == [other]
    stage.end(other)
    stage.end(HUB)
    assert (stage.course.phase, stage.course.failed) == ("over", part)


def test_a_hub_that_is_killed_comes_back_at_the_same_place():
    stage = Stage()
    stage.ready()
    assert stage.processes[HUB].command == ("hub", "127.0.0.1:0")
    stage.end(HUB, -9)
    stage.step(1)
    assert stage.processes[HUB].command == ("hub", "127.0.0.1:4711")
    assert stage.course.phase == "running"


def event(name: str, **facts: object) -> str:
    return json.dumps({"at": "2026-01-31T12:00:01.000Z", "level": "INFO", "event": name} | facts)


def test_lines_of_children_go_where_they_belong(capsys: pytest.CaptureFixture[str]):
    board = Board("cold-chain")
    talk = Talk(LineTiersView(board), verbose=False)
    talk.heard(EDGE, "err", event("pipeline progress", rows_in=10, epoch=3))
    talk.heard(EDGE, "err", event("checkpoint sealed", level="INFO"))
    talk.heard(EDGE, "err", event("checkpoint damaged", level="WARNING", epoch=41))
    talk.heard(CENTER, "err", "Traceback (most recent call last):")
    talk.heard(CENTER, "out", "a row")
    talk.heard(CENTER, "err", event("command failed", level="ERROR", problem="no file matches"))
    printed = capsys.readouterr()
    assert printed.out == "a row\n"
    assert printed.err.splitlines() == [
        "edge: 12:00:01 WARNING checkpoint damaged epoch=41",
        "center: Traceback (most recent call last):",
    ]
    assert board.facts[EDGE]["rows_in"] == 10
    assert talk.last_words(CENTER) == "no file matches"


def test_the_table_has_a_row_for_each_part():
    board = Board("cold-chain")
    for second in range(2):
        facts = {"rows_in": 500 * second, "rows_out": 2, "epoch": 3, "outbox_epochs": 2, "outbox_bytes": 1200}
        board.heard(EDGE, {"event": "pipeline progress", "watermark_us": 0} | facts, second * 1_000_000)
    board.heard(CENTER, {"event": "pipeline prepares", "doing": "starting Spark ..."}, 0)
    assert plain_table(board.rows(2_000_000)).splitlines() == [
        "  part    rows/s  rows in  rows out  late  epoch  outbox             lag",
        "  edge       500      500         2     0      3  2 epochs, 1.20 kB  2.00 s",
        "  center                                                                     starting Spark ...",
    ]


def test_a_part_that_is_over_says_how_and_has_no_problem_left():
    board = Board("cold-chain")
    board.heard(EDGE, {"event": "pipeline progress", "hub_problem": "the hub is\naway"}, 0)
    assert board.problems() == ["edge: the hub is away"]
    board.heard(EDGE, {"event": "pipeline over", "hub_problem": "the hub is away", "outcome": "stopped"}, 0)
    assert board.problems() == []
    assert board.rows(0)[0][-1] == "stopped"


def test_a_reader_of_rows_who_has_gone_is_noticed_and_children_are_read_on(monkeypatch: pytest.MonkeyPatch):
    talk = Talk(LineTiersView(Board("cold-chain")), verbose=False)

    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    talk.heard(CENTER, "out", "a row")
    assert talk.nobody_reads
    talk.heard(CENTER, "err", event("command failed", problem="x"))
    assert talk.last_words(CENTER) == "x"


def test_a_terminal_sees_phase_problems_and_the_table():
    from rich.console import Console

    from fordstone.cli.view.tiers_live import LiveTiersView

    plain = LineTiersView(Board("cold-chain"))
    console = Console(width=100, record=True, file=io.StringIO())
    view = LiveTiersView(plain, console=console)
    view.heard(EDGE, {"event": "pipeline progress", "rows_in": 7, "epoch": 3, "hub_problem": "the hub is away"})
    console.print(view.drawn("stopping edge", URL))
    text = console.export_text()
    assert "edge: the hub is away" in text
    assert "stopping: the edge finishes its epoch" in text
    assert f"cold-chain  hub {URL}" in text
    assert any(line.split()[:3] == ["edge", "0", "7"] for line in text.splitlines())


def test_lines_for_a_log_file_tell_of_what_happens(capsys: pytest.CaptureFixture[str]):
    view = LineTiersView(Board("cold-chain"))
    view.phase("hub", None)
    view.phase("running", URL)
    view.phase("running", URL)
    view.heard(CENTER, {"event": "pipeline prepares", "doing": "starting Spark ..."})
    view.phase("stopping edge", URL)
    assert capsys.readouterr().err.splitlines() == [
        "cold-chain: starting the hub ...",
        f"cold-chain: the hub listens at {URL}",
        "cold-chain: center: starting Spark ...",
        "cold-chain: stopping: the edge finishes its epoch and sends what it has (once more to stop at once)",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--on", "spark"], "Choose the center's engine: --center spark|local."),
        (["--hub", "http://127.0.0.1:1"], "--hub: that goes with --part edge or --part center."),
        (["--take-over"], "--take-over: that goes with --part edge"),
        (["--available-now"], "Use --bounded"),
        (["--from-checkpoint", "x"], "Run the center alone"),
        (["--center", "local", "--master", "local[2]"], "--master goes with --center spark, not with --center local."),
        (["--part", "edge"], "the edge part of a pipeline needs a hub: give --hub URL, or set FORDSTONE_HUB."),
        (["--part", "center"], "the center part of a pipeline needs a hub"),
        (["--part", "edge", "--on", "spark", "--hub", URL], "--on spark goes with --part center"),
        (["--part", "edge", "--center", "local", "--hub", URL], "--center: with --part edge there is no center here."),
        (["--part", "center", "--outbox-max", "1GB", "--hub", URL], "--outbox-max: that goes with --part edge"),
        (["--part", "edge", "--hub", "hub.example"], "hub 'hub.example' is no address"),
        (["--part", "edge", "--hub", URL, "--outbox-max", "many"], "--outbox-max many: that is not a size"),
        (["--part", "edge", "--hub", URL, "--token-file", "nowhere"], "--token-file nowhere: it cannot be read"),
        (["--part", "edge", "--hub", URL, "--ca", "nowhere"], "--ca nowhere: there is no such file"),
    ],
)
def test_what_makes_no_sense_with_two_tiers_is_a_misuse_before_anything_starts(
    invoke: Invoke, place: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
):
    monkeypatch.delenv("FORDSTONE_HUB", raising=False)
    (place / "tiered.py").write_text(TIERED)
    result = invoke("run", "tiered.py", *given)
    assert result.exit_code == 2, result.stderr
    assert said in " ".join(result.stderr.split())
    assert not (place / "state").exists()


@pytest.mark.parametrize("given", [["--center", "local"], ["--hub", URL], ["--outbox-full", "block"]])
def test_a_pipeline_of_one_tier_has_no_options_of_two(invoke: Invoke, given: list[str]):
    result = invoke("run", "flow.py", "--bounded", *given)
    assert result.exit_code == 2
    assert f"{given[0]}: pipeline cold-chain has one tier" in result.stderr


def test_a_hub_that_is_set_for_other_commands_does_not_disturb_a_pipeline_of_one_tier(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORDSTONE_HUB", URL)
    assert invoke("run", "flow.py", "--bounded").exit_code == 0


def test_the_center_of_a_pipeline_of_one_tier_is_the_whole_of_it_on_spark(invoke: Invoke):
    result = invoke("center", "flow.py", "--on", "edge")
    assert result.exit_code == 2
    assert "fordstone run FILE" in result.stderr
    result = invoke("run", "flow.py", "--part", "center", "--hub", URL)
    assert result.exit_code == 2
    assert "pipeline cold-chain has no center part" in result.stderr
