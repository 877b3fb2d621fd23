from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import urllib3
from tests.cli.place import LIVE, Invoke, event_with, finish, read_rows, start, write_rows

from fordstone.errors import FencedError
from fordstone.protocol.retry import Stop


def first_event(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The first line of `run --json`: from then on the pipeline is running."""
    return event_with(process, "epoch", 0)


def test_bounded_input_is_read_to_its_end_and_summed_up_on_standard_error(invoke: Invoke, place: Path):
    result = invoke("run", "flow.py", "--bounded")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "cold-chain ended: all input was read." in result.stderr
    assert "  rows in   100" in result.stderr
    assert "started from the beginning" in result.stderr
    assert len(read_rows(place / "out" / "hot")) == 59


def test_running_again_says_that_nothing_is_left(invoke: Invoke):
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    result = invoke("run", "flow.py", "--bounded")
    assert result.exit_code == 0
    assert "cold-chain had ended already" in result.stderr


def test_bounded_again_with_new_input_fails_and_names_what_helps(invoke: Invoke, place: Path):
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    write_rows(place / "in" / "b.jsonl", range(100, 120))
    result = invoke("run", "flow.py", "--bounded")
    assert result.exit_code == 1
    assert "Source readings has new input since, in b.jsonl" in result.stderr
    assert "add --fresh" in result.stderr
    assert "use --available-now (available_now=True) instead of --bounded" in result.stderr


def test_available_now_reads_what_is_new_with_every_run(invoke: Invoke, place: Path):
    first = invoke("run", "flow.py", "--available-now")
    assert (first.exit_code, len(read_rows(place / "out" / "hot"))) == (0, 59)
    assert "cold-chain read everything there is; the next run resumes from here." in first.stderr
    write_rows(place / "in" / "a.jsonl", range(100, 120))
    second = invoke("run", "flow.py", "--available-now")
    assert "  rows in   20" in second.stderr
    assert len(read_rows(place / "out" / "hot")) == 79


def test_fresh_sets_state_and_outputs_aside_and_says_where(invoke: Invoke, place: Path):
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    for number in (1, 2):
        write_rows(place / "in" / f"b{number}.jsonl", range(100 * number, 100 * number + 20))
        result = invoke("run", "flow.py", "--bounded", "--fresh", "--yes")
        assert result.exit_code == 0, result.stderr
        assert f"  state: state/cold-chain/node -> state/cold-chain/node.old-{number}" in result.stderr
        assert f"  output of sink hot: out/hot -> out/hot.old-{number}" in result.stderr
        assert "started from the beginning" in result.stderr
        assert len(read_rows(place / "out" / "hot")) == 59 + 20 * number
    assert len(read_rows(place / "out" / "hot.old-1")) == 59, "nothing was deleted"
    assert len(read_rows(place / "out" / "hot.old-2")) == 79


def test_fresh_asks_and_without_a_terminal_it_needs_yes(invoke: Invoke, place: Path):
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    refused = invoke("run", "flow.py", "--bounded", "--fresh")
    assert (refused.exit_code, "there is no terminal to ask at. Add --yes." in refused.stderr) == (2, True)
    code, said = answered(place, "n", "run", "flow.py", "--bounded", "--fresh")
    assert (code, "nothing was set aside, and nothing was run." in said) == (1, True), said
    assert not (place / "out" / "hot.old-1").exists()
    code, said = answered(place, "y", "run", "flow.py", "--bounded", "--fresh")
    assert (code, "output of sink hot: out/hot -> out/hot.old-1" in said) == (0, True), said
    assert (place / "out" / "hot.old-1").exists()


def answered(place: Path, answer: str, *args: str) -> tuple[int, str]:
    """Run the command at a terminal and type an answer: exit code and standard error."""
    master, terminal = pty.openpty()
    try:
        os.write(master, f"{answer}\n".encode())
        code, _, err = finish(start(place, *args, stdin=terminal))
    finally:
        os.close(master)
        os.close(terminal)
    return code, err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--yes"], "--yes goes with --fresh."),
        (["--fresh", "--yes", "--remote", "memory://x"], "the run would resume from the copies there"),
        (["--fresh", "--yes", "--part", "edge", "--hub", "http://127.0.0.1:1"], "--fresh does not go with --part edge"),
    ],
)
def test_fresh_is_refused_where_old_state_would_come_back(invoke: Invoke, given: list[str], says: str):
    result = invoke("run", "flow.py", "--bounded", *given)
    assert (result.exit_code, says in result.stderr) == (2, True), result.stderr


def test_fresh_leaves_everything_while_another_process_runs(invoke: Invoke, place: Path):
    (place / "live.py").write_text(LIVE)
    process = start(place, "run", "live.py", "--json", "--interval", "100ms")
    try:
        event_with(process, "epoch", 1)
        result = invoke("run", "live.py", "--fresh", "--yes")
        assert (result.exit_code, "is still running" in result.stderr) == (1, True), result.stderr
        assert not list(place.rglob("*.old-1"))
    finally:
        process.send_signal(signal.SIGTERM)
        finish(process)


def test_an_output_that_cannot_be_renamed_is_named(invoke: Invoke, place: Path):
    text = (place / "flow.py").read_text()
    (place / "flow.py").write_text(
        text + "from fordstone.connectors import delta\nreadings.sink('d', delta('s3://b/t'))\n"
    )
    result = invoke("run", "flow.py", "--bounded", "--fresh", "--yes")
    assert result.exit_code == 1
    assert "the output of sink d is at s3://b/t, which cannot be renamed from here" in result.stderr


def test_json_prints_nothing_but_the_report_to_standard_output(invoke: Invoke):
    result = invoke("run", "flow.py", "--bounded", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["event"], report["outcome"], report["progress"]["rows_in"]) == ("report", "ended", 100)
    assert report["progress"]["share"] == 1.0
    assert report["progress"]["read_bytes"] == report["progress"]["total_bytes"] > 0


def test_json_ends_with_an_error_line_when_the_run_fails(invoke: Invoke, place: Path):
    (place / "in" / "a.jsonl").unlink()
    result = invoke("run", "flow.py", "--bounded", "--json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)
    assert (error["event"], error["error"]) == ("error", "SourceError")
    assert "no file matches 'in/*.jsonl'" in error["message"]
    assert "no file matches" in result.stderr


def test_json_refuses_a_sink_that_prints_to_standard_output(invoke: Invoke, place: Path):
    (place / "flow.py").write_text(
        (place / "flow.py").read_text() + "from fordstone.connectors import stdout\nreadings.sink('shown', stdout())\n"
    )
    result = invoke("run", "flow.py", "--bounded", "--json")
    assert result.exit_code == 2
    assert "sink shown prints there" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parallelism", "0"], "parallelism=0"),
        (["--interval", "5parsecs"], "interval: '5parsecs' is not a span of time"),
        (["--node", "../x"], "node '../x'"),
        (["--keep", "0"], "keep=0"),
        (["--compression", "rar"], "'rar' is not one of"),
        (["--frobnicate"], "No such option"),
        (["--health", "1:2:3"], "--health '1:2:3' is not HOST:PORT"),
    ],
)
def test_an_option_that_makes_no_sense_is_a_misuse(invoke: Invoke, place: Path, options: list[str], said: str):
    result = invoke("run", "flow.py", "--bounded", *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (place / "state").exists()


def test_rejected_rows_are_counted_apart_and_the_summary_says_where_they_are(invoke: Invoke, place: Path):
    with (place / "in" / "a.jsonl").open("a") as file:
        file.write('{"device": \n{"device": "d1", "ts": "yesterday"}\n')
    result = invoke("run", "flow.py", "--bounded", "--state", "kept")
    assert result.exit_code == 0
    assert "rejected    2  in kept/cold-chain/node/dead-letters" in result.stderr
    letters = read_rows(place / "kept" / "cold-chain" / "node" / "dead-letters" / "readings")
    assert [letter["text"] for letter in letters] == ['{"device": ', '{"device": "d1", "ts": "yesterday"}']
    windows = len(read_rows(place / "out" / "per_device"))
    assert f"rows out   {59 + windows}\n" in result.stderr, "dead letters are not output"


def test_a_changed_pipeline_says_what_no_longer_matches(invoke: Invoke, place: Path):
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    (place / "flow.py").write_text((place / "flow.py").read_text().replace('n="count(*)"', 'n="sum(temp)"'))
    result = invoke("run", "flow.py", "--bounded")
    assert result.exit_code == 1
    assert "changed: agg_device" in result.stderr
    assert "--allow-new-state" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_an_exception_in_a_function_of_the_user_is_traced_in_their_code_only(place: Path):
    (place / "steps.py").write_text(
        (place / "flow.py").read_text()
        + "\ndef warm(row):\n    return row['tmep']\n\nreadings.map(warm).sink('warm', files('out/warm', format='jsonl'))\n"
    )
    code, _, err = finish(start(place, "run", "steps.py", "--bounded"))
    assert code == 1
    assert "step map: function warm raised KeyError: 'tmep', twice for the same row:" in err
    assert '{"device": "d0", "ts": "2026-01-01T00:00:00+00:00", "temp": 0.0}' in err
    assert "The row was read from source readings, a.jsonl, between positions 0 and " in err
    assert 'on_error="dead_letter"' in err
    assert "steps.py\", line 14, in warm\n    return row['tmep']" in err
    assert err.count("line 14, in warm") == 1
    assert "fordstone/edge" not in err
    assert "pipeline failed" not in err, "a restart would not help"
    assert "Traceback" not in err


def test_a_bug_of_ours_shows_everything(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fordstone.edge.run.OsDisk", None)
    result = invoke("run", "flow.py", "--bounded")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "fordstone/edge/run.py" in result.stderr
    assert "This is a bug in fordstone" in result.stderr


def test_a_system_that_stays_away_is_an_error_and_no_bug(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    away = ConnectionError("Redis at localhost:6379 does not answer")
    monkeypatch.setattr("fordstone.edge.run._run_once", Mock(side_effect=away))
    monkeypatch.setattr("fordstone.edge.run.decide_restart", Mock(return_value=Stop(failures=6)))
    result = invoke("run", "flow.py", "--bounded")
    assert result.exit_code == 1
    assert "pipeline cold-chain failed 6 times in a row; the last time: ConnectionError('Redis at" in result.stderr
    assert "Traceback" not in result.stderr
    assert "bug" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_epoch_and_stops_cleanly(place: Path, number: signal.Signals):
    (place / "live.py").write_text(LIVE)
    process = start(place, "run", "live.py", "--json", "--interval", "100ms")
    first_event(process)
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    assert (report["event"], report["outcome"]) == ("report", "stopped")
    assert report["progress"]["stopping"] is True


@pytest.mark.slow
def test_after_a_kill_the_same_command_goes_on_from_the_last_checkpoint(place: Path):
    (place / "live.py").write_text(LIVE)
    process = start(place, "run", "live.py", "--json", "--interval", "100ms")
    sealed = event_with(process, "epoch", 2)
    process.kill()
    finish(process)
    process = start(place, "run", "live.py", "--json", "--interval", "100ms")
    first_event(process)
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert code == 0
    assert json.loads(out.splitlines()[-1])["resumed_from"] >= sealed["epoch"]


@pytest.mark.slow
def test_a_second_process_on_one_state_directory_is_refused_naming_the_first(place: Path, invoke: Invoke):
    (place / "live.py").write_text(LIVE)
    process = start(place, "run", "live.py", "--json")
    first_event(process)
    result = invoke("run", "live.py")
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert result.exit_code == 1
    assert f"belongs to process {process.pid}, which is still running" in result.stderr


@pytest.mark.slow
def test_polars_gets_a_thread_a_subtask_unless_the_user_chose(place: Path):
    (place / "flow.py").write_text(
        (place / "flow.py").read_text() + "import polars, sys\nprint(polars.thread_pool_size(), file=sys.stderr)\n"
    )
    for options, chosen, threads in (
        ([], {}, "1"),
        (["--parallelism", "2"], {}, "2"),
        ([], {"POLARS_MAX_THREADS": "3"}, "3"),
    ):
        code, _, err = finish(
            start(place, "run", "flow.py", "--bounded", "--state", f"state-{threads}", *options, **chosen)
        )
        shutil.rmtree(place / "out")
        assert code == 0, err
        assert err.splitlines()[0] == threads


@pytest.mark.slow
def test_rows_that_come_later_are_read_when_input_is_not_bounded(place: Path):
    process = start(place, "run", "flow.py", "--json", "--interval", "100ms")
    event_with(process, "epoch", 1)
    write_rows(place / "in" / "b.jsonl", range(100, 150))
    event_with(process, "rows_in", 150)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0, err
    assert len(read_rows(place / "out" / "hot")) == 109


def test_a_run_answers_probes_with_its_newest_epoch(place: Path):
    process = start(place, "run", "flow.py", "--interval", "100ms", "--logs", "json", "-v", "--health", "0")
    assert process.stderr is not None
    lines = (json.loads(line) for line in process.stderr)
    url = next(line["url"] for line in lines if line["event"] == "health served")
    epoch = next(line["epoch"] for line in lines if line["event"] == "epoch sealed")
    found: dict[str, Any] = {"epoch": None}
    while (found["epoch"] or 0) < epoch:  # progress is taken some milliseconds after the seal
        found = urllib3.request("GET", f"{url}/healthz", retries=False).json()["pipelines"][0]
    assert (found["pipeline"], found["state"], found["problem"]) == ("cold-chain", "running", None)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0


def test_with_json_logs_standard_error_has_nothing_but_log_lines(invoke: Invoke, place: Path):
    result = invoke("run", "flow.py", "--bounded", "--logs", "json")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert (result.exit_code, result.stdout) == (0, "")
    assert (lines[-1]["event"], lines[-1]["outcome"], lines[-1]["rows_in"]) == ("pipeline over", "ended", 100)
    (place / "in" / "a.jsonl").unlink()
    shutil.rmtree(place / "out")
    result = invoke("run", "flow.py", "--bounded", "--state", "other", "--logs", "json")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert result.exit_code == 1
    assert (lines[-1]["event"], lines[-1]["pipeline"]) == ("command failed", "cold-chain")
    assert "no file matches 'in/*.jsonl'" in lines[-1]["problem"]


def test_a_pipeline_that_somebody_else_has_taken_over_ends_with_a_code_of_its_own(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
):
    def shut_out(*_: object, **__: object) -> None:
        raise FencedError("generation 2.1 owns pipeline cold-chain on node gateway.")

    monkeypatch.setattr("fordstone.edge.run._run_once", shut_out)
    result = invoke("run", "flow.py", "--bounded")
    assert result.exit_code == 3
    assert result.stderr == "error: generation 2.1 owns pipeline cold-chain on node gateway.\n"
