"""The benchmark of checkpoint intervals measures a pipeline beside its real run and leaves nothing but its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SECONDS_MAX = 300
FAST = """
from fordstone import Pipeline, tumbling
from fordstone.connectors import files, generator

p = Pipeline("fast")
rows = p.source("rows", generator({rows}step="100us"), schema={{"device": "string", "ts": "timestamp"}}, time="ts")
rows.group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("out", files("out/fast", format="jsonl"))
"""


def measured(home: Path, *words: str, rows: str = "") -> subprocess.CompletedProcess[str]:
    (home / "fast.py").write_text(FAST.format(rows=rows))
    command = [sys.executable, "-B", str(BENCH / "interval.py"), "fast.py", "--directory", str(home), *words]
    return subprocess.run(command, cwd=home, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)


@pytest.mark.full
def test_a_pipeline_is_measured_with_and_without_checkpoints(tmp_path: Path) -> None:
    done = measured(tmp_path, "--seconds", "1.2", "--recovery-goal", "10s", "--json", "found.json")
    assert done.returncode == 0, done.stderr
    body = json.loads((tmp_path / "found.json").read_text())
    assert body["facts"]["cost_us"] > 0
    assert [row["interval_us"] for row in body["intervals"] if row["measured"] is not None] == [
        100_000,
        250_000,
        1_000_000,
    ]
    (chosen,) = [row["interval_us"] for row in body["intervals"] if row["chosen"]]
    assert chosen == body["choice"]["interval_us"] <= 10_000_000
    assert sum(line.startswith("*  ") for line in done.stdout.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast.py", "found.json"]


def test_input_too_short_to_measure_is_an_error(tmp_path: Path) -> None:
    done = measured(tmp_path, "--seconds", "0.5", rows="rows=100, ")
    assert done.returncode == 1
    assert "the input is too short to measure" in done.stderr
