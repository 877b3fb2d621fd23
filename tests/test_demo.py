"""The demo's oracle finds what is lost, doubled or wrong; its report opens by itself; and the demo finds nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

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
        text="&",
        figures=[report.Figure(name="lost", value="0", zero=True), report.Figure(name="doubled", value="2", zero=True)],
        plots=[
            report.Plot(title="p", text="t", unit=" s", lines=[report.Line(name="<i>", points=[(0, 1), (5, 3)])]),
            report.Plot(title="none", text="t", unit="", lines=[report.Line(name="n", points=[])]),
        ],
        faults=[report.Fault(name="x<y", begins=1, ends=99)],
    )
    page = (tmp_path / "report.html").read_text()
    parser = Links()
    parser.feed(page)
    assert not parser.outside
    assert parser.tags.count("svg") == 1
    assert "b" not in parser.tags
    assert 'class="number zero">0<' in page
    assert 'class="number bad">2<' in page
    assert "Nothing was measured" in page


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
    assert "Lost: 0. Doubled: 0. Seed: 3." in done.stdout
    assert (tmp_path / "demo" / "report.html").exists()
