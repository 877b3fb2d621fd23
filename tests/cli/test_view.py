from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from fordstone.cli.view.live import LiveView
from fordstone.cli.view.view import (
    JsonView,
    LineView,
    Rate,
    View,
    describe_held,
    describe_not_read,
    describe_progress,
    notices_of,
)
from fordstone.errors import SinkError
from fordstone.lang.duration import TIME_MAX_US
from fordstone.protocol.progress import HeldBack, NotRead, Progress, Report, describe_late

NOW_US = 1_767_225_610_000_000
PROGRESS = Progress(
    pipeline="cold-chain",
    epoch=41,
    rows_in=1_000,
    rows_out=10,
    rows_late=0,
    rows_rejected=0,
    watermark_us=NOW_US - 1_200_000,
    state_bytes=3_400_000,
    checkpoints=4,
    given_up=0,
    checkpoint_us=12_000,
    checkpoint_bytes=1_250_000,
    pause_us=30,
    interval_us=1_000_000,
    restarts=0,
    stalled=None,
    elapsed_us=2_000_000,
)


HELD = HeldBack(source="readings", partition="a.jsonl", lag_us=90_000_000)


class Clock:
    def __init__(self) -> None:
        self.us = 0

    def __call__(self) -> int:
        return self.us


def facts(clock: Clock, *, bounded: bool = False) -> dict[str, Any]:
    return {
        "pipeline": "cold-chain",
        "bounded": bounded,
        "dead_letters": Path("state/dead"),
        "monotonic_us": clock,
        "wall_us": lambda: NOW_US,
    }


def line_view(clock: Clock, *, bounded: bool = False) -> LineView:
    return LineView(**facts(clock, bounded=bounded))


def summary(report: Report, *, took_us: int) -> str:
    over = View(**facts(Clock()))
    over.end(report)
    return over.summary(took_us=took_us)


def test_the_line_says_speed_lag_epoch_checkpoint_and_state():
    words = describe_progress(PROGRESS, 812.4, NOW_US, bounded=False)
    assert words == ["812 rows/s", "lag 1.20 s", "epoch 41", "checkpoint 12.0 ms, 1.25 MB", "state 3.40 MB"]


def test_late_rejected_restarted_and_given_up_are_shown_once_there_are_any():
    troubled = msgspec.structs.replace(PROGRESS, rows_late=3, rows_rejected=2, restarts=1, given_up=4)
    words = describe_progress(troubled, 0, NOW_US, bounded=False)
    assert words[-4:] == ["3 late", "2 rejected", "1 restart", "4 checkpoints given up"]


def test_bounded_input_and_input_that_ended_have_no_lag():
    ended = msgspec.structs.replace(PROGRESS, watermark_us=TIME_MAX_US)
    for words in (
        describe_progress(PROGRESS, 0, NOW_US, bounded=True),
        describe_progress(ended, 0, NOW_US, bounded=False),
    ):
        assert not any("lag" in word for word in words)


def test_a_rate_is_smoothed_and_starts_over_when_counting_does():
    rate = Rate()
    assert rate(0, 0) == 0
    assert rate(1_000, 1_000_000) == pytest.approx(1_000)
    after_a_jump = rate(11_000, 2_000_000)
    assert 1_000 < after_a_jump < 10_000
    assert rate(0, 3_000_000) == after_a_jump, "a restart is not a negative speed"
    assert rate(500, 3_000_000) == after_a_jump, "no time has passed"


def test_a_stalled_pipeline_that_is_stopping_shows_both():
    both = msgspec.structs.replace(PROGRESS, stalled="the disk is full.\nMake room.", stopping=True)
    assert notices_of(both) == [
        "STALLED: the disk is full. Make room.",
        "stopping: finishing the epoch (again to stop at once)",
    ]


def test_a_plain_view_speaks_every_ten_seconds(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    view = line_view(clock)
    for clock.us in range(0, 21_000_000, 50_000):
        view.show(PROGRESS)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("cold-chain: 0 rows/s · lag 1.20 s · epoch 41")


def test_a_plain_view_tells_of_a_stall_at_once_but_not_of_every_try(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    view = line_view(clock)
    for attempt in range(100):
        clock.us += 50_000
        view.show(msgspec.structs.replace(PROGRESS, stalled=f"the disk is full: {attempt}.tmp"))
    assert capsys.readouterr().err.splitlines() == ["cold-chain: STALLED: the disk is full: 0.tmp"]


def test_a_plain_view_of_bounded_input_says_how_far_it_is(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    view = line_view(clock, bounded=True)
    clock.us = 10_000_000
    view.show(msgspec.structs.replace(PROGRESS, share=0.456))
    assert capsys.readouterr().err.startswith("cold-chain: 46% · 0 rows/s")


def test_standard_error_that_nobody_reads_does_not_stop_the_pipeline(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    view = line_view(clock)
    clock.us = 10_000_000

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    view.show(PROGRESS)


def test_json_lines_come_once_a_second_and_the_report_last(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    view = JsonView(**facts(clock))
    for clock.us in range(0, 3_020_000, 50_000):
        view.show(PROGRESS)
    view.end(Report(pipeline="cold-chain", outcome="ended", progress=PROGRESS, resumed_from=40))
    view.finish()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["progress", "progress", "progress", "report"]
    assert lines[0]["rows_in"] == 1_000
    assert (lines[-1]["outcome"], lines[-1]["resumed_from"], lines[-1]["progress"]["epoch"]) == ("ended", 40, 41)


def test_a_reader_of_json_that_has_gone_stops_the_run_with_a_plain_word(monkeypatch: pytest.MonkeyPatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = Clock()
    view = JsonView(**facts(clock))
    clock.us = 2_000_000
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(SinkError, match="the reader of the progress has closed it"):
        view.show(PROGRESS)
    view.failed(SinkError("already known"))


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"lag_us": 90_000_000}, "time waits for a of readings, which lags by 1 min 30 s"),
        (
            {"lag_us": 90_000_000, "silent_us": 40_000_000},
            "time waits for a of readings, which lags by 1 min 30 s and has had no rows for 40.0 s",
        ),
        ({"lag_us": 90_000_000, "silent_us": 999_999}, "time waits for a of readings, which lags by 1 min 30 s"),
        ({"silent_us": 100_000}, "time waits for a of readings, which has had no rows yet"),
        ({"silent_us": 61_000_000}, "time waits for a of readings, which has had no rows yet, after 1 min 1 s"),
        (
            {"lag_us": 2_000_000, "silent_us": 5_000_000, "is_node": True},
            "time waits for node a, which lags by 2.00 s and has sent nothing for 5.00 s",
        ),
        ({"silent_us": 5_000_000, "is_node": True}, "time waits for node a, which has sent nothing yet, after 5.00 s"),
        ({"lag_us": 999_999, "silent_us": 90_000_000}, ""),
    ],
)
def test_what_time_waits_for_is_described_if_the_others_are_well_ahead(facts: dict[str, Any], text: str):
    assert describe_held(HeldBack(source="readings", partition="a", **facts)) == text


def test_a_plain_line_ends_with_the_partition_that_time_waits_for_unless_input_is_bounded(
    capsys: pytest.CaptureFixture[str],
):
    held = msgspec.structs.replace(PROGRESS, held_back=HELD)
    for bounded in (False, True):
        clock = Clock()
        view = line_view(clock, bounded=bounded)
        clock.us = 10_000_000
        view.show(held)
    unbounded, bounded_line = capsys.readouterr().err.splitlines()
    assert unbounded.endswith("state 3.40 MB · time waits for a.jsonl of readings, which lags by 1 min 30 s")
    assert "waits" not in bounded_line


def test_on_a_terminal_the_partition_that_time_waits_for_has_its_own_line():
    view, screen = live_view(Clock(), bounded=False, width=100)
    with view:
        view.show(msgspec.structs.replace(PROGRESS, held_back=HELD))
    lines = [line.strip() for line in screen.getvalue().splitlines()]
    assert any(line.endswith("state 3.40 MB") for line in lines)
    assert any(line.startswith("time waits for a.jsonl of readings") for line in lines)


@pytest.mark.parametrize(
    ("late_by_us", "lateness_us", "text"),
    [
        (0, {"r": 0}, "without a time, or too far ahead of the clock"),
        (1, {"r": 0}, 'up to 1us too late; lateness="1us" at source r would have counted them'),
        (1_200, {"r": 0}, 'up to 2ms too late; lateness="2ms" at source r would have counted them'),
        (61_000_000, {"r": 1}, 'up to 1m1s too late; lateness="1m2s" at source r would have counted them'),
        (
            2_000,
            {"r": 0, "s": 0},
            "up to 2ms too late; a lateness of their source that is longer by this would have counted them",
        ),
        (
            2_000,
            {},
            (
                "up to 2ms too late; a lateness of the edge's sources that is longer by this would have counted them, or a longer offline= "
                "in to_center() if their node was away"
            ),
        ),
    ],
)
def test_late_rows_are_explained(late_by_us: int, lateness_us: dict[str, int], text: str):
    assert describe_late(late_by_us, lateness_us) == text


def test_the_summary_says_what_came_of_it_and_where_the_rejected_rows_are():
    late = describe_late(12_000_001, {"readings": 5_000_000})
    progress = msgspec.structs.replace(PROGRESS, rows_rejected=2, rows_failed=3, rows_late=7, late=late)
    report = Report(pipeline="cold-chain", outcome="ended", progress=progress, resumed_from=40)
    assert summary(report, took_us=2_000_000).splitlines() == [
        "cold-chain ended: all input was read.",
        "  rows in   1,000  500 rows/s",
        "  rows out     10",
        '  late          7  up to 13s too late; lateness="18s" at source readings would have counted them',
        "  rejected      2  in state/dead",
        "  failed        3  in state/dead",
        "  epoch        41  4 checkpoints in this run, the last in 12.0 ms",
        "  restarts      0",
        "  started from checkpoint 40, took 2.00 s",
    ]


@pytest.mark.parametrize(
    ("outcome", "first"),
    [
        ("ended", "cold-chain ended: all input was read, except that of nodes in quarantine."),
        (
            "stopped",
            "cold-chain read everything there is, except that of nodes in quarantine; the next run resumes from here.",
        ),
    ],
)
def test_the_summary_names_nodes_that_were_not_read_and_the_commands(outcome: Any, first: str):
    aside = (NotRead(pipeline="cold-chain", node="truck-7", epoch=4711),)
    progress = msgspec.structs.replace(PROGRESS, not_read=aside)
    lines = summary(Report(pipeline="cold-chain", outcome=outcome, progress=progress), took_us=1).splitlines()
    assert lines[0] == first
    assert lines[-1] == (
        "  node truck-7 is in quarantine, and was not read from epoch 4711 on. `fordstone hub skip truck-7 --pipeline cold-chain --until 4711` "
        "passes over the epoch, and `fordstone hub release truck-7 --pipeline cold-chain` lets readers try it again."
    )
    assert describe_progress(progress, 0, NOW_US, bounded=False)[-1] == "1 node in quarantine"
    assert describe_not_read(aside * 3) == [lines[-1].strip()], "a node is named once"


def test_the_summary_of_a_run_that_was_stopped_says_what_time_waits_for_and_why_a_row_was_rejected():
    held = HeldBack(source="readings", partition="h00.jsonl", lag_us=118_000_000)
    progress = msgspec.structs.replace(
        PROGRESS, rows_rejected=1, rejected="column n: 'x' is not a number", held_back=held
    )
    lines = summary(Report(pipeline="fleet", outcome="stopped", progress=progress), took_us=1).splitlines()
    assert "  rejected      1  in state/dead; one of them: column n: 'x' is not a number" in lines
    assert lines[-1] == "  time waits for h00.jsonl of readings, which lags by 1 min 58 s"


def test_the_summary_of_a_run_with_nothing_to_do_says_how_to_start_over():
    report = Report(pipeline="cold-chain", outcome="already_ended", progress=PROGRESS, resumed_from=41)
    text = summary(report, took_us=1)
    assert "had ended already" in text
    assert "--fresh" in text


def live_view(clock: Clock, *, bounded: bool, width: int = 120) -> tuple[LiveView, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, height=20, highlight=False, color_system=None)
    return LiveView(**facts(clock, bounded=bounded), console=console), screen


def test_on_a_terminal_the_line_is_drawn_again_and_gone_at_the_end():
    clock = Clock()
    view, screen = live_view(clock, bounded=False)
    with view:
        view.show(PROGRESS)
        clock.us = 1_000_000
        view.show(msgspec.structs.replace(PROGRESS, rows_in=2_000, epoch=42))
    drawn = screen.getvalue()
    assert "cold-chain  0 rows/s · lag 1.20 s · epoch 41" in drawn
    assert "cold-chain  1,000 rows/s · lag 1.20 s · epoch 42" in drawn
    assert drawn.rstrip().endswith("\x1b[2K"), "the line is erased"


def test_what_takes_patience_is_a_line_and_the_run_is_timed_from_the_last_one_on(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    view = line_view(clock)
    view.note("starting Spark ...")
    clock.us = 9_000_000
    view.note("starting the query ...")
    clock.us = 11_000_000
    view.show(PROGRESS)
    view.end(Report(pipeline="cold-chain", outcome="ended", progress=PROGRESS))
    view.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["cold-chain: starting Spark ...", "cold-chain: starting the query ..."]
    assert lines[2] == "cold-chain ended: all input was read.", "ten seconds of the run are not over"
    assert lines[-1].endswith("took 2.00 s")


def test_on_a_terminal_progress_takes_the_place_of_what_takes_patience():
    clock = Clock()
    view, screen = live_view(clock, bounded=False)
    with view:
        view.note("starting Spark ...")
        assert "cold-chain  starting Spark ..." in screen.getvalue()
        view.show(PROGRESS)
    assert "cold-chain  0 rows/s" in screen.getvalue()


def test_json_says_nothing_of_what_takes_patience(capsys: pytest.CaptureFixture[str]):
    JsonView(**facts(Clock())).note("starting Spark ...")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_bounded_input_has_a_bar_with_what_is_left():
    clock = Clock()
    view, screen = live_view(clock, bounded=True)
    with view:
        view.show(msgspec.structs.replace(PROGRESS, share=0.0, read_bytes=0, total_bytes=2_000_000))
        clock.us = 10_000_000
        view.show(msgspec.structs.replace(PROGRESS, share=0.25, read_bytes=500_000, total_bytes=2_000_000))
    assert " 25% · 1,000 rows · 500 kB of 2.00 MB · 30 s left" in screen.getvalue()


def test_on_a_terminal_a_stall_is_described_in_full():
    clock = Clock()
    view, screen = live_view(clock, bounded=False, width=40)
    with view:
        view.show(msgspec.structs.replace(PROGRESS, stalled="the disk is full: could not write to state/x. Make room."))
    shown = " ".join(screen.getvalue().split())
    assert "STALLED: the disk is full:" in shown
    assert "Make room." in shown


def test_lines_printed_meanwhile_stand_above_and_are_not_wrapped():
    clock = Clock()
    view, screen = live_view(clock, bounded=False, width=40)
    before = sys.stderr
    with view:
        view.show(PROGRESS)
        print("x" * 100, file=sys.stderr)
    assert sys.stderr is before
    assert "x" * 100 in screen.getvalue()


def test_the_cursor_is_never_left_hidden():
    view, screen = live_view(Clock(), bounded=False)
    with view:
        assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")
