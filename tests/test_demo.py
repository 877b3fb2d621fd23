"""The demo's oracle finds what is lost, doubled or wrong; and the demo kills and finds nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
START_US = 1_767_225_600_000_000


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_oracle", SCRIPTS / "demo_oracle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write(directory: Path, name: str, rows: list[dict[str, Any]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


LINES = [{"line": "a b  a"}, {"line": ""}, {"line": "c"}]


@pytest.mark.parametrize(
    ("counts", "lost", "doubled"),
    [
        ({"a": 2, "b": 1, "c": 1}, 0, 0),
        ({"a": 1, "b": 1}, 2, 0),
        ({"a": 2, "b": 3, "c": 1}, 0, 2),
        ({"a": 2, "b": 1, "x": 1}, 1, 1),
    ],
)
def test_words_that_are_missing_or_too_many_are_found(oracle, tmp_path, counts, lost, doubled):
    write(tmp_path / "counts", "epoch-000000000001.jsonl", [{"word": "a", "n": 1}])
    write(tmp_path / "counts", "epoch-000000000002.jsonl", [{"word": word, "n": n} for word, n in counts.items()])
    (verdict,) = oracle.judge_words(LINES, tmp_path)
    assert (verdict.lost, verdict.doubled, verdict.good) == (lost, doubled, lost == doubled == 0)


def reading(seq: int, second: float, temp: float) -> dict[str, Any]:
    moment = pl.Series([int(START_US + second * 1e6)]).cast(pl.Datetime("us", "UTC"))[0].isoformat()
    return {"device": "box", "seq": seq, "ts": moment, "temp": temp}


GATEWAY = [reading(1, 1, 2.0), reading(2, 12, 9.0), reading(3, 7, 4.0), reading(4, 6, 5.0), reading(5, 13, 999.0)]
"""Number 4 is late by a second, number 5 is implausible, number 2 is an alarm."""


def right_output() -> dict[str, list[dict[str, Any]]]:
    return {
        "windows": [
            {"device": "box", "start": START_US, "n": 2, "mean": 3.0, "low": 2.0, "top": 4.0},
            {"device": "box", "start": START_US + 10_000_000, "n": 1, "mean": 9.0, "low": 9.0, "top": 9.0},
        ],
        "late": [GATEWAY[3]],
        "alarms": [GATEWAY[1] | {"__id": "g:1:0"}, GATEWAY[1] | {"__id": "g:1:0"}],
        "totals": [{"device": "box", "n": 4, "top": 9.0}],
    }


KEYS = {"rows in windows": "windows", "late rows": "late", "alarms at once": "alarms", "running totals": "totals"}


def judged(oracle: ModuleType, out: Path, output: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    write(out / "late", "epoch-000000000003.jsonl", output["late"])
    write(out / "alarms", "rows-000001-00000001.jsonl", output["alarms"])
    write(out / "totals", "epoch-000000000002.jsonl", output["totals"])
    (out / "per_device").mkdir(parents=True)
    frame = pl.DataFrame(output["windows"]).with_columns(
        pl.col("start").cast(pl.Datetime("us", "UTC")).alias("window_start")
    )
    frame.drop("start").write_parquet(out / "per_device" / "epoch-000000000003.parquet")
    return {verdict.output: verdict for verdict in oracle.judge_readings([GATEWAY], out)}


def test_right_readings_are_found_right_and_repeated_alarms_are_known_by_their_id(oracle, tmp_path):
    verdicts = judged(oracle, tmp_path, right_output())
    assert all(verdict.good for verdict in verdicts.values()), verdicts
    assert verdicts["alarms at once"].again == 1


@pytest.mark.parametrize(
    ("output", "change", "expected"),
    [
        ("rows in windows", lambda rows: rows[:1], ("lost", 1)),
        ("rows in windows", lambda rows: [*rows, rows[0]], ("doubled", 2)),
        ("rows in windows", lambda rows: [rows[0] | {"mean": 3.1}, rows[1]], ("wrong", 1)),
        ("late rows", lambda _: [], ("lost", 1)),
        ("late rows", lambda rows: rows * 2, ("doubled", 1)),
        ("alarms at once", lambda _: [], ("lost", 1)),
        ("alarms at once", lambda rows: [rows[0], rows[0] | {"__id": "g:2:0"}], ("doubled", 1)),
        ("running totals", lambda rows: [rows[0] | {"n": 5}], ("doubled", 1)),
        ("running totals", lambda rows: [rows[0] | {"top": 999.0}], ("wrong", 1)),
    ],
)
def test_every_fault_in_the_readings_is_found(oracle, tmp_path, output, change, expected):
    right = right_output()
    key = KEYS[output]
    verdicts = judged(oracle, tmp_path, right | {key: change(right[key])})
    what, count = expected
    assert getattr(verdicts[output], what) == count, verdicts
    assert not verdicts[output].good


def test_a_line_that_a_crash_tore_off_is_not_a_row(oracle, tmp_path):
    (tmp_path / "rows-1.jsonl").write_text('{"n": 1}\n{"n": 2')
    assert list(oracle.json_rows(tmp_path, "rows-*.jsonl")) == [{"n": 1}]


def test_the_demo_kills_both_jobs_twice_and_finds_nothing_lost_or_doubled(tmp_path):
    command = [
        sys.executable,
        str(SCRIPTS / "demo.py"),
        "--seed",
        "3",
        "--kills",
        "2",
        "--seconds",
        "2",
        "--out",
        str(tmp_path / "demo"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kill -9") == 4
    assert "Kills: 4. Lost: 0. Doubled: 0. Seed: 3." in done.stdout
