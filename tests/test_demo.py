"""The demo's oracle finds what is lost, doubled or wrong; its report opens by itself; and the demo finds nothing."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import polars as pl
import pytest
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
START_US = 1_767_225_600_000_000


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def reading(device: str, seq: int, second: float, temp: float) -> dict[str, Any]:
    return {"device": device, "seq": seq, "us": int(START_US + second * 1e6), "temp": temp}


WRITTEN = [reading("a", 1, 1, 2.0), reading("a", 2, 9, 4.0), reading("a", 3, 12, 9.0), reading("b", 4, 3, 5.0)]


def result(device: str, second: int, n: int, values: tuple[float, float, float]) -> dict[str, Any]:
    return {"device": device, "second": second, "n": n, "mean": values[0], "low": values[1], "top": values[2]}


RIGHT = [
    result("a", 0, 2, (3.0, 2.0, 4.0)),
    result("a", 10, 1, (9.0, 9.0, 9.0)),
    result("b", 0, 1, (5.0, 5.0, 5.0)),
]


def write_epoch(directory: Path, epoch: int, results: list[dict[str, Any]]) -> None:
    folder = directory / f"epoch-{epoch:012d}"
    folder.mkdir(parents=True)
    start = (pl.lit(START_US) + pl.col("second") * 1_000_000).cast(pl.Datetime("us", "UTC")).alias("window_start")
    pl.DataFrame(results).with_columns(start).drop("second").write_parquet(folder / "part-0.parquet")


def test_a_later_result_of_a_window_counts_in_place_of_the_earlier(script, tmp_path):
    write_epoch(tmp_path, 1, [result("a", 0, 1, (2.0, 2.0, 2.0)), RIGHT[1]])
    write_epoch(tmp_path, 2, [RIGHT[0], RIGHT[2]])
    verdict = script("demo_oracle").judge_windows(pl.DataFrame(WRITTEN), tmp_path)
    assert verdict.good
    assert (verdict.produced, verdict.counted, verdict.windows) == (4, 4, 3)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (RIGHT[:2], (1, 0, 0)),
        ([*RIGHT, result("c", 0, 2, (1.0, 1.0, 1.0))], (0, 2, 0)),
        ([RIGHT[0] | {"n": 3}, *RIGHT[1:]], (0, 1, 0)),
        ([RIGHT[0] | {"n": 1}, RIGHT[1] | {"n": 2}, RIGHT[2]], (1, 1, 0)),
        ([RIGHT[0] | {"mean": 3.1}, *RIGHT[1:]], (0, 0, 1)),
        ([], (4, 0, 0)),
    ],
)
def test_every_row_that_is_lost_doubled_or_wrong_is_found(script, tmp_path, results, expected):
    if results:
        write_epoch(tmp_path, 1, results)
    verdict = script("demo_oracle").judge_windows(pl.DataFrame(WRITTEN), tmp_path)
    assert (verdict.lost, verdict.doubled, verdict.wrong) == expected
    assert not verdict.good


def test_alarms_are_known_by_their_id_and_must_have_a_cause(script, tmp_path):
    cause = {"device": "a", "seq": 3, "temp": 9.0, "high": 8.0}
    rows = [
        cause | {"__id": "x:1:0"},
        cause | {"__id": "x:1:0"},
        cause | {"__id": "x:2:0", "high": 9.5},
        cause | {"__id": "x:3:0", "seq": 77},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"device": "torn'
    (tmp_path / "rows-1.jsonl").write_text(text)
    alarms = script("demo_oracle").judge_alarms(pl.DataFrame(WRITTEN), [tmp_path])
    assert (alarms.alarms, alarms.again, alarms.unfounded) == (3, 1, 2)


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [str(value) for name, value in attrs if name in {"src", "href"}]


def test_the_report_needs_nothing_from_outside_and_escapes_what_it_is_given(script, tmp_path):
    report = script("demo_report")
    report.write_report(
        tmp_path / "report.html",
        title="<b>",
        outcome=report.Outcome(text="2 doubled <b>", good=False),
        text="&",
        sketch=report.Sketch(gateways=["g<1", "g2"], devices=3, engine="Spark"),
        figures=[report.Figure(name="lost", value="0", zero=True), report.Figure(name="doubled", value="2", zero=True)],
        plots=[
            report.Plot(title="p", text="t", axis="<s>", lines=[report.Line(name="<i>", points=[(0, 1), (5, 3)])]),
            report.Plot(title="none", text="t", axis="rows", lines=[report.Line(name="n", points=[])]),
        ],
        faults=[report.Fault(part="g<1", what="killed", begins=1, ends=99)],
    )
    page = (tmp_path / "report.html").read_text()
    parser = Links()
    parser.feed(page)
    assert not parser.outside
    assert parser.tags.count("svg") == 2
    assert "b" not in parser.tags
    assert 'class="number zero">0<' in page
    assert 'class="number bad">2<' in page
    assert "Nothing was measured" in page
    assert '<p class="verdict failed">2 doubled &lt;b&gt;</p>' in page
    assert "killed from 1 to 99 s" in page
    assert "seconds since the devices began" in page


def test_delays_and_samples_count_from_when_the_devices_begin(script, tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    watch_module = script("demo_watch")
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    fleet = script("demo_fleet").make_fleet(tmp_path, gateways=1, devices=2, rate=5.0, seed=1, local=True)
    watch = watch_module.Watch(fleet)
    try:
        for clock.now in (0.0, 20.0, 40.0):
            watch.look()
        assert watch.lag == []
        watch.start()
        fleet.gateways[0].devices.write_until(1.0)
        watch.look()
        clock.now = 43.0
        write_epoch(fleet.center.folder / "out" / "per_device", 1, [result("a", 0, 10, (1.0, 1.0, 1.0))])
        watch.look()
    finally:
        watch.close()
        fleet.close()
    assert watch.center_seconds == [3.0] * 10
    assert [second for second, _ in watch.lag] == [0.0, 3.0]
    assert (watch.seconds, watch.writing_seconds) == (43.0, 3.0)


@pytest.mark.parametrize(("local", "engine"), [(True, "the edge engine"), (False, "Spark")])
def test_the_view_names_the_engine_of_the_center_that_runs(script, tmp_path, local, engine):
    fleet = script("demo_fleet").make_fleet(tmp_path, gateways=1, devices=2, rate=5.0, seed=1, local=local)
    watch = script("demo_watch").Watch(fleet)
    try:
        console = Console(record=True, width=100, file=io.StringIO())
        console.print(script("demo_view").View(console, fleet, watch, seconds=1.0)._picture())
    finally:
        watch.close()
        fleet.close()
    shown = console.export_text()
    assert f"center ({engine})" in shown
    assert ("Spark" in shown) is not local


@pytest.mark.parametrize(("most", "axis"), [(0, (1, 1)), (1, (1.0, 0.5)), (97, (100, 50)), (2001, (3000, 1000))])
def test_axes_end_at_round_numbers_above_what_they_show(script, most, axis):
    assert script("demo_report")._scale(most) == pytest.approx(axis)


@pytest.mark.full  # the README runs it with Spark
def test_a_short_demo_without_spark_kills_cuts_and_finds_nothing_lost_or_doubled(tmp_path):
    command = [sys.executable, str(SCRIPTS / "demo.py"), "--seed", "3", "--seconds", "30", "--devices", "20"]
    command += ["--center", "local", "--out", str(tmp_path / "demo")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kill -9") == 2
    assert "is cut" in done.stdout
    assert "0 lost, 0 doubled of " in done.stdout
    assert "2 kills, 1 network cut. Seed: 3." in done.stdout
    assert "Spark" not in done.stdout
    assert (tmp_path / "demo" / "report.html").exists()
