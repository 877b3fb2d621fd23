from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.place import Invoke

from fordstone.cli.plan_interval import option

FAST = """
from fordstone import Pipeline, tumbling
from fordstone.connectors import files, generator

p = Pipeline("fast")
rows = p.source("rows", generator(step="100us"), schema={"device": "string", "ts": "timestamp"}, time="ts")
rows.group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("out", files("out/fast", format="jsonl"))
"""


def test_a_known_cost_gives_a_table_with_the_best_interval_marked(invoke: Invoke):
    result = invoke("plan-interval", "--cost", "20ms", "--failure-every", "1d")
    assert result.exit_code == 0
    assert "A checkpoint costs 20.0 ms; something fails every 1 d." in result.stdout
    (chosen,) = [line for line in result.stdout.splitlines() if line.startswith("*  ")]
    assert chosen.split()[1] == "58.8s"
    assert "Use it with --interval 58.8s" in result.stdout


def test_a_recovery_goal_bounds_the_interval(invoke: Invoke):
    body = json.loads(
        invoke("plan-interval", "--cost", "20ms", "--recovery-goal", "10s", "--restore", "2s", "--json").stdout
    )
    assert body["choice"]["interval_us"] == 8_000_000
    assert body["choice"]["because"] == "the recovery-time goal"
    assert [row["interval_us"] for row in body["intervals"] if row["chosen"]] == [8_000_000]
    assert body["choice"]["recovery_us"] == 10_000_000


def test_what_is_stored_is_measured_without_a_touch(invoke: Invoke, place: Path):
    assert invoke("run", "flow.py", "--bounded", "--interval", "1ms").exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in (place / "state").rglob("*")}
    result = invoke("plan-interval", "--state", "state", "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)["facts"]
    assert facts["cost_us"] > 0
    assert facts["restore_us"] > 0
    assert {path: path.stat().st_mtime_ns for path in (place / "state").rglob("*")} == before
    assert "encoded again here" in invoke("plan-interval", "--state", "state").stdout


def test_a_pipeline_is_measured_with_and_without_checkpoints_and_leaves_nothing_behind(invoke: Invoke, place: Path):
    (place / "fast.py").write_text(FAST)
    result = invoke("plan-interval", "--measure", "fast.py", "--seconds", "1.2", "--json")
    assert result.exit_code == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["facts"]["cost_us"] > 0
    assert [row["interval_us"] for row in body["intervals"] if row["measured"] is not None] == [
        100_000,
        250_000,
        1_000_000,
    ]
    assert "running without checkpoints for 1.2 s" in result.stderr
    assert sorted(path.name for path in place.iterdir() if path.name != "__pycache__") == ["fast.py", "flow.py", "in"]


def test_input_too_short_to_measure_says_so(invoke: Invoke):
    result = invoke("plan-interval", "--measure", "flow.py", "--seconds", "0.5")
    assert result.exit_code == 1
    assert "the input is too short to measure" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--state DIR, --measure FILE or --cost SPAN, one of them"),
        (["--cost", "1s", "--state", "x"], "one of them"),
        (["--cost", "soon"], "--cost: 'soon' is not a span of time"),
        (["--cost", "1s", "--failure-every", "0s"], "--failure-every: '0s' must be longer than zero"),
        (["--state", "nowhere"], "there is no state directory nowhere"),
    ],
)
def test_what_cannot_be_meant_is_a_misuse(invoke: Invoke, options: list[str], said: str):
    result = invoke("plan-interval", *options)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("interval_us", "text"),
    [(100_000, "100ms"), (4_640_000, "4.64s"), (60_000_000, "1m"), (5_400_000_000, "1h30m"), (75_500_000, "75.5s")],
)
def test_an_interval_is_written_as_the_option_takes_it(interval_us: int, text: str):
    assert option(interval_us) == text
