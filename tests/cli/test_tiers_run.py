"""`fordstone run` of a pipeline of two tiers, as the real processes that it is; the center without a JVM. On Spark it runs in the how-to page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from tests import waiting
from tests.cli.place import SECONDS_MAX, finish, start
from tests.edge.test_supervisor import gone
from tests.examples import rest

from fordstone.cli.example import boxes
from fordstone.connectors import latest, rows

EXAMPLES = Path(__file__).parents[2] / "examples"
"""A hub that was killed comes back at once, but nodes ask for it again only after a while, on a busy machine after a long one."""
LOCAL = ["--center", "local", "--interval", "200ms"]
DEVICES = 4
Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A working directory with the example and a minute of input."""
    shutil.copy(EXAMPLES / "cold_chain.py", tmp_path / "chain.py")
    devices(tmp_path, 60)
    return tmp_path


@pytest.fixture
def run(chain: Path) -> Iterator[Run]:
    """Start `fordstone run` there; what is left of it goes with the test."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*more: str) -> subprocess.Popen[str]:
        processes.append(start(chain, "run", "chain.py", *LOCAL, *more))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate(timeout=SECONDS_MAX)


def devices(place: Path, seconds: int, *, after: int = 0) -> None:
    words = ["--devices", str(DEVICES), "--seconds", str(seconds), "--after", str(after), "--into", str(place / "in")]
    CliRunner().invoke(boxes, words, catch_exceptions=False)


def oracle(place: Path) -> pl.DataFrame:
    """What the center should have found: the same over all rows, in plain Polars."""
    read = pl.concat([pl.read_ndjson(file) for file in sorted((place / "in").glob("*.jsonl"))])
    timed = read.with_columns(pl.col("ts").str.to_datetime(time_zone="UTC", time_unit="us").dt.truncate("10s"))
    return timed.group_by("device", "ts").agg(n=pl.len(), top=pl.col("temp").max()).sort("device", "ts")


def found(place: Path) -> pl.DataFrame:
    try:
        table = latest(place / "out" / "per_device")
    except Exception:  # noqa: BLE001 - nothing has come out yet
        return pl.DataFrame({"n": pl.Series([], dtype=pl.Int64)})
    if "device" not in table.columns:
        return pl.DataFrame({"n": pl.Series([], dtype=pl.Int64)})
    return table.select("device", ts="window_start", n="n", top="top").sort("device", "ts")


def same(place: Path) -> bool:
    ours, theirs = found(place), oracle(place)
    return ours.rows() == theirs.rows() if "ts" in ours.columns else False


def until(met: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    """Wait for something that the processes do."""

    def ended() -> object:
        process.send_signal(signal.SIGTERM)
        return finish(process)

    waiting.until(met, what, alive=lambda: process.poll() is None, report=ended)


def child(process: subprocess.Popen[str], word: str) -> int:
    """The process id of the child that runs this part."""
    wanted = ["--part", word] if word != "hub" else ["hub", "--listen"]
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if wanted in ([one, two] for one, two in pairwise(words)):
            return int(pid)
    raise AssertionError(f"no child runs the {word}")


def test_a_bounded_run_gives_what_one_query_over_all_rows_gives(chain: Path, run: Run):
    code, out, err = finish(run("--bounded"))
    assert code == 0, err
    assert out == ""
    assert same(chain), f"{found(chain)}\n{oracle(chain)}"
    assert "cold-chain ended: all input was read." in err
    assert f"  edge        {60 * DEVICES}" in err
    code, _, err = finish(run("--bounded"))
    assert (code, "cold-chain had ended already" in err) == (0, True), err


def test_available_now_goes_on_with_every_run_and_fresh_starts_all_parts_over(chain: Path, run: Run):
    for after, seconds in ((0, 60), (60, 30)):
        if after:
            devices(chain, seconds, after=after)
        code, _, err = finish(run("--available-now"))
        assert code == 0, err
        assert "cold-chain read everything there is; the next run resumes from here." in err
        assert same(chain), f"{found(chain)}\n{oracle(chain)}"
    code, _, err = finish(run("--available-now", "--fresh", "--yes"))
    assert code == 0, err
    assert all(f"  state: state/{part} -> state/{part}.old-1" in err for part in ("hub", "edge", "center"))
    assert "  output of sink per_device: out/per_device -> out/per_device.old-1" in err
    assert f"  edge        {90 * DEVICES}" in err
    assert same(chain), f"{found(chain)}\n{oracle(chain)}"


def test_it_goes_on_where_it_was_after_a_stop_and_nothing_is_counted_twice(chain: Path, run: Run):
    first = run()
    until(lambda: same(chain), first, "all rows were at the center")
    first.send_signal(signal.SIGTERM)
    code, _, err = finish(first)
    assert code == 0, err
    assert "cold-chain stopped; the next run resumes from here." in err
    devices(chain, 30, after=60)
    second = run()
    until(lambda: same(chain), second, "what came meanwhile was at the center too")
    second.send_signal(signal.SIGINT)
    assert finish(second)[0] == 0


def test_the_loop_closes_thresholds_of_the_center_make_alarms_at_the_edge(chain: Path, run: Run):
    process = run()
    until(lambda: same(chain), process, "all rows were at the center")
    second = 60

    def alarmed() -> bool:
        nonlocal second
        devices(chain, 10, after=second)
        second += 10
        return bool(rows(chain / "out" / "alarms").height)

    until(alarmed, process, "there was an alarm")
    alarms = rows(chain / "out" / "alarms")
    assert (alarms["temp"] > alarms["threshold"]).all()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0


@pytest.mark.parametrize("word", ["hub", *rest("edge", "center")])
def test_a_part_that_is_killed_comes_back_and_the_results_are_the_same(chain: Path, run: Run, word: str):
    process = run()
    until(lambda: same(chain), process, "all rows were at the center")
    os.kill(child(process, word), signal.SIGKILL)
    devices(chain, 30, after=60)
    until(lambda: same(chain), process, "what came after the kill was at the center too")
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0, err


def test_machines_read_progress_of_each_part_and_a_report(chain: Path, run: Run):
    code, out, err = finish(run("--bounded", "--json"))
    assert (code, err) == (0, "")
    events: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert events[0]["event"] == "hub"
    report = events[-1]
    assert (report["event"], report["outcome"]) == ("report", "ended")
    assert report["parts"]["edge"]["rows_in"] == 60 * DEVICES
    assert report["parts"]["center"]["outcome"] == "ended"


def test_what_a_part_says_as_it_fails_reaches_the_person(chain: Path, run: Run):
    shutil.rmtree(chain / "in")
    code, _, err = finish(run("--bounded"))
    assert code == 1
    assert "error: the edge part failed, and the rest was stopped: no file matches 'in/*.jsonl'" in err
    assert [word for word in ("Traceback", "given up", "the center finishes") if word in err] == []


def test_nothing_outlives_a_run_that_is_killed(chain: Path, run: Run):
    process = run()
    until(lambda: same(chain), process, "all rows were at the center")
    children = [child(process, word) for word in ("hub", "edge", "center")]
    process.kill()
    assert all(gone(pid) for pid in children)
    again = run()
    devices(chain, 30, after=60)
    until(lambda: same(chain), again, "the next run went on")
    again.send_signal(signal.SIGTERM)
    assert finish(again)[0] == 0
