"""A run of two tiers on one machine: the order of its processes, what is shown of them, and what is refused."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.place import Invoke
from tests.cli.test_view import PROGRESS
from tests.edge.test_supervisor import FakeProcess

from fordstone.cli.tiers import CENTER, EDGE, HUB, PHASE_TEXT, LineRouter, Schedule
from fordstone.cli.view.view import TWO, LineView, LogView, View, describe_progress
from fordstone.edge.agent.supervisor import Job, Supervisor
from fordstone.protocol.progress import Away, HeldBack, Progress, Report, describe_late
from fordstone.protocol.retry import AT_A_TERMINAL

URL = "http://127.0.0.1:4711"
TIERED = """
from fordstone import Pipeline
from fordstone.connectors import files

p = Pipeline("two-tiers")
rows = p.source("rows", files("in/*.jsonl"), schema={"device": "string", "ts": "timestamp", "temp": "double"}, time="ts")
rows.to_center().sink("out", files("out/all", format="jsonl"))
"""


class Stage:
    """A schedule whose processes end when the test says so."""

    def __init__(self, *, bounded: bool = False) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self.now_us = 0
        self.url: str | None = None
        self.supervisor = Supervisor(
            spawn=self.spawn, monotonic_us=lambda: self.now_us, policy=AT_A_TERMINAL, chance=lambda: 1.0
        )
        self.schedule = Schedule(
            self.supervisor,
            hub=lambda listen: Job(name=HUB, command=("hub", listen)),
            halves=lambda url: {name: Job(name=name, command=(name, url)) for name in (EDGE, CENTER)},
            ready=lambda: self.url,
            one_by_one=bounded,
        )
        self.schedule.step()

    def spawn(self, name: str, command: Sequence[str]) -> FakeProcess:
        self.processes[name] = FakeProcess(name=name, command=tuple(command), pid=len(self.processes) + 1)
        return self.processes[name]

    def step(self, seconds: float = 0.0) -> None:
        self.now_us += int(seconds * 1e6)
        for _ in range(3):
            self.schedule.step()

    def ready(self) -> None:
        self.url = URL
        self.step()

    def end(self, name: str, code: int = 0) -> None:
        self.processes[name].code = code
        self.step()

    @property
    def stopping(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.heard and process.code is None]


def test_the_halves_start_when_the_hub_listens_and_know_where():
    stage = Stage()
    stage.step()
    assert list(stage.processes) == [HUB]
    stage.ready()
    assert stage.processes[EDGE].command == (EDGE, URL)
    assert stage.processes[CENTER].command == (CENTER, URL)


def test_on_a_stop_the_edge_ends_first_then_the_center_then_the_hub():
    stage = Stage()
    stage.ready()
    stage.schedule.stop()
    stage.step()
    assert stage.stopping == [EDGE]
    stage.schedule.stop()
    stage.end(EDGE)
    assert stage.stopping == [CENTER]
    stage.end(CENTER)
    assert stage.stopping == [HUB]
    assert stage.schedule.phase == "stopping hub"
    stage.end(HUB)
    assert (stage.schedule.phase, stage.schedule.failed) == ("over", None)


def test_on_a_stop_before_the_hub_listens_nothing_else_is_started():
    stage = Stage()
    stage.schedule.stop()
    stage.url = URL
    stage.step()
    assert stage.stopping == [HUB]
    stage.end(HUB)
    assert (stage.schedule.phase, list(stage.processes)) == ("over", [HUB])


def test_a_bounded_run_is_the_edge_to_its_end_then_the_center():
    stage = Stage(bounded=True)
    stage.ready()
    assert list(stage.processes) == [HUB, EDGE]
    stage.end(EDGE)
    assert list(stage.processes) == [HUB, EDGE, CENTER]
    assert stage.stopping == []
    stage.end(CENTER)
    assert stage.stopping == [HUB]
    stage.end(HUB)
    assert stage.schedule.phase == "over"


def test_a_bounded_run_that_is_stopped_starts_no_center():
    stage = Stage(bounded=True)
    stage.ready()
    stage.schedule.stop()
    stage.end(EDGE)
    stage.end(HUB)
    assert (stage.schedule.phase, CENTER in stage.processes) == ("over", False)


@pytest.mark.parametrize("part", [EDGE, CENTER])
def test_a_part_that_fails_stops_the_rest_in_order(part: str):
    stage = Stage()
    stage.ready()
    stage.end(part, 1)
    other = CENTER if part == EDGE else EDGE
    assert stage.stopping == [other]
    stage.end(other)
    stage.end(HUB)
    assert (stage.schedule.phase, stage.schedule.failed) == ("over", part)


def test_a_hub_that_is_killed_comes_back_at_the_same_place():
    stage = Stage()
    stage.ready()
    assert stage.processes[HUB].command == ("hub", "127.0.0.1:0")
    stage.end(HUB, -9)
    stage.step(1)
    assert stage.processes[HUB].command == ("hub", "127.0.0.1:4711")
    assert stage.schedule.phase == "running"


def event(name: str, **facts: object) -> str:
    return json.dumps({"at": "2026-01-31T12:00:01.000Z", "level": "INFO", "event": name} | facts)


def progress(**facts: Any) -> Progress:
    return msgspec.structs.replace(PROGRESS, watermark_us=None, rows_in=0, rows_out=0, epoch=0, **facts)


TWO_TIERS: dict[str, Any] = {
    "pipeline": "cold-chain",
    "names": TWO,
    "monotonic_us": lambda: 0,
    "wall_us": lambda: 0,
}


def test_lines_of_children_are_routed_by_what_they_are(capsys: pytest.CaptureFixture[str]):
    view = LineView(**TWO_TIERS)
    router = LineRouter(view, verbose=False)
    facts = {name: value for name, value in msgspec.to_builtins(progress()).items() if value is not None}
    router.on_line(EDGE, "err", event("pipeline progress", **facts | {"rows_in": 10}))
    router.on_line(EDGE, "err", event("checkpoint sealed", level="INFO"))
    router.on_line(EDGE, "err", event("checkpoint damaged", level="WARNING", epoch=41))
    router.on_line(EDGE, "err", event("pipeline progress", rows_in="many"))
    router.on_line(CENTER, "err", "Traceback (most recent call last):")
    router.on_line(CENTER, "out", "a row")
    router.on_line(CENTER, "err", event("command failed", level="ERROR", problem="no file matches"))
    router.on_line(CENTER, "err", event("pipeline over", **facts, outcome="ended"))
    printed = capsys.readouterr()
    assert printed.out == "a row\n"
    assert printed.err.splitlines() == [
        "edge: 12:00:01 WARNING checkpoint damaged epoch=41",
        "edge: 12:00:01 INFO pipeline progress rows_in=many",
        "center: Traceback (most recent call last):",
    ]
    assert [(name, one.rows_in) for name, one, _ in view.running()] == [(EDGE, 10)]
    assert view.parts[CENTER].report is not None
    assert router.error_of(CENTER) == "no file matches"


def test_the_table_has_one_row_per_part():
    now_us = [0]
    view = View(pipeline="cold-chain", names=TWO, monotonic_us=lambda: now_us[0], wall_us=lambda: 2_000_000)
    for now_us[0] in (0, 1_000_000):
        facts = {"rows_in": now_us[0] // 2_000, "rows_out": 2, "epoch": 3, "outbox_epochs": 2, "outbox_bytes": 1200}
        view.show(msgspec.structs.replace(PROGRESS, watermark_us=0, **facts), EDGE)
    view.note("starting Spark ...", CENTER)
    assert view.table().text("  ").splitlines() == [
        "  part    rows/s  rows in  rows out  late  epoch  outbox             lag",
        "  edge       500      500         2     0      3  2 epochs, 1.20 kB  2.00 s",
        "  center                                                                     starting Spark ...",
    ]


def test_a_part_that_is_over_shows_its_outcome_and_no_problem():
    view = View(**TWO_TIERS)
    view.show(progress(hub_problem="the hub is\naway"), EDGE)
    assert view.problems() == ["edge: the hub is away"]
    for stopping, shown in ((True, "stopped"), (False, "caught up")):
        last = progress(hub_problem="the hub is away", stopping=stopping)
        view.end(Report(pipeline="cold-chain", outcome="stopped", progress=last), EDGE)
        assert view.problems() == []
        assert view.table().rows[0][-1] == shown


def test_a_source_that_is_away_is_shown_with_its_name():
    view = View(**TWO_TIERS)
    away = Away(role="source", step="rows", kind="mqtt", problem="broker b:1883\nis away")
    view.show(progress(away=(away,)), EDGE)
    assert view.problems() == ["edge: source rows (mqtt) waits: broker b:1883 is away"]
    assert "source rows (mqtt) waits: broker b:1883 is away" in describe_progress(
        progress(away=(away,)), 0, 0, bounded=False
    )


def test_a_closed_standard_output_is_noticed_and_children_are_still_read(monkeypatch: pytest.MonkeyPatch):
    router = LineRouter(LineView(**TWO_TIERS), verbose=False)

    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    router.on_line(CENTER, "out", "a row")
    assert router.stdout_closed
    router.on_line(CENTER, "err", event("command failed", problem="x"))
    assert router.error_of(CENTER) == "x"


def test_a_terminal_shows_phase_problems_and_the_table():
    from rich.console import Console

    from fordstone.cli.view.live import LiveView

    console = Console(width=100, record=True, file=io.StringIO())
    view = LiveView(**TWO_TIERS, console=console)
    view.show(progress(hub_problem="the hub is away", rows_late=7), EDGE)
    view.phase(PHASE_TEXT["stopping edge"], URL)
    console.print(view.drawn())
    text = console.export_text()
    assert "edge: the hub is away" in text
    assert "stopping: the edge finishes its epoch" in text
    assert f"cold-chain  hub {URL}" in text
    assert any(line.split()[:5] == ["edge", "0", "0", "0", "7"] for line in text.splitlines())


EDGE_WAITS = HeldBack(source="readings", partition="attic.jsonl", lag_us=90_000_000, silent_us=40_000_000)
CENTER_WAITS = HeldBack(source="readings", partition="gateway-7", lag_us=7_200_000_000, is_node=True)


def test_below_the_table_is_what_each_part_waits_for():
    from rich.console import Console

    from fordstone.cli.view.live import LiveView

    console = Console(width=110, record=True, file=io.StringIO())
    view = LiveView(**TWO_TIERS, console=console)
    view.show(progress(held_back=EDGE_WAITS), EDGE)
    view.show(progress(held_back=CENTER_WAITS), CENTER)
    console.print(view.drawn())
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert [line.split()[0] for line in lines[-4:-2]] == [EDGE, CENTER]
    assert lines[-2:] == [
        "  edge: time waits for attic.jsonl of readings, which lags by 1 min 30 s and has had no rows for 40.0 s",
        "  center: time waits for node gateway-7, which lags by 2 h",
    ]


def test_what_a_part_waits_for_comes_through_its_log_lines(capsys: pytest.CaptureFixture[str]):
    LogView(pipeline="cold-chain", every_us=1).show(progress(held_back=CENTER_WAITS))
    view = LineView(**TWO_TIERS)
    LineRouter(view, verbose=False).on_line(CENTER, "err", capsys.readouterr().err.strip())
    assert view.lines()[0].endswith("time waits for node gateway-7, which lags by 2 h")


def test_the_summary_explains_the_late_rows_of_each_part():
    view = View(**TWO_TIERS)
    for name, rows_late, lateness_us in ((EDGE, 7, {"readings": 0}), (CENTER, 0, {})):
        late = describe_late(13_000_000, lateness_us) if rows_late else None
        facts = progress(rows_late=rows_late, late=late, stopping=True)
        view.end(Report(pipeline="cold-chain", outcome="stopped", progress=facts), name)
    assert view.summary(took_us=2_000_000, stopped=True).splitlines() == [
        "cold-chain stopped; the next run resumes from here.",
        "  part    rows in  rows out  late  epoch  outbox",
        "  edge          0         0     7      0  empty   stopped",
        "  center        0         0     0      0          stopped",
        '  late at the edge: up to 13s too late; lateness="13s" at source readings would have counted them',
        "  took 2.00 s",
    ]


def test_the_summary_of_a_run_that_was_stopped_at_once_has_no_empty_table():
    assert View(**TWO_TIERS).summary(took_us=1_000_000, stopped=True).splitlines() == [
        "cold-chain stopped; the next run resumes from here.",
        "  took 1.00 s",
    ]


def test_lines_for_a_log_file_show_phases_and_stalls(capsys: pytest.CaptureFixture[str]):
    view = LineView(**TWO_TIERS)
    view.phase(PHASE_TEXT["hub"], None)
    view.phase(PHASE_TEXT["running"], URL)
    view.phase(PHASE_TEXT["running"], URL)
    view.note("starting Spark ...", CENTER)
    view.show(progress(stalled="the disk is full"), EDGE)
    view.phase(PHASE_TEXT["stopping edge"], URL)
    view.phase(PHASE_TEXT["stopping edge"], URL)
    assert capsys.readouterr().err.splitlines() == [
        "cold-chain: starting the hub ...",
        f"cold-chain: the hub listens at {URL}",
        "cold-chain: center: starting Spark ...",
        "cold-chain: stopping: the edge finishes its epoch and sends what it has (again to stop at once)",
        "cold-chain: edge: STALLED: the disk is full",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--on", "spark"], "Choose the center's engine with --center spark|local."),
        (["--hub", "http://127.0.0.1:1"], "--hub: this goes with --part edge or --part center."),
        (["--take-over"], "--take-over: this goes with --part edge"),
        (["--from-checkpoint", "x"], "Run the center alone"),
        (["--health", "0"], "--health: this pipeline has two tiers"),
        (["--center", "local", "--master", "local[2]"], "--master goes with --center spark, not with --center local."),
        (["--part", "edge"], "the edge part of a pipeline needs a hub: give --hub URL, or set FORDSTONE_HUB."),
        (["--part", "center"], "the center part of a pipeline needs a hub"),
        (["--part", "edge", "--on", "spark", "--hub", URL], "--on spark goes with --part center"),
        (["--part", "edge", "--center", "local", "--hub", URL], "--center: with --part edge no center runs here."),
        (["--part", "center", "--outbox-max", "1GB", "--hub", URL], "--outbox-max: this goes with --part edge"),
        (["--part", "edge", "--hub", "hub.example"], "hub 'hub.example' is not an address"),
        (["--part", "edge", "--hub", URL, "--outbox-max", "many"], "--outbox-max many: this is not a size"),
        (["--part", "edge", "--hub", URL, "--token-file", "nowhere"], "--token-file nowhere: cannot be read"),
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
