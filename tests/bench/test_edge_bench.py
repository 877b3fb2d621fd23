"""The edge benchmark runs, and judges by what it measured. Its sizes here are too small to say anything about speed."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SECTIONS = ("tumbling", "checkpoint_cost", "pause", "restore", "latency", "memory", "startup")
WITH_TARGET = ("checkpoint_cost", "pause", "restore", "latency", "memory", "startup")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """One tiny run of every section: the JSON and what was printed."""
    home = tmp_path_factory.mktemp("bench")
    command = [
        sys.executable,
        str(BENCH / "edge.py"),
        "--tiny",
        "--json",
        str(home / "found.json"),
        "--directory",
        str(home),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "FORDSTONE_FAILPOINT"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in home.iterdir()] == ["found.json"], "the benchmark leaves nothing behind"
    return json.loads((home / "found.json").read_text()), done.stdout


def bench_module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


@pytest.mark.full
@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_measures_something_and_prints_it(run: tuple[dict[str, Any], str], section: str) -> None:
    found, printed = run
    findings = [one for one in found["findings"] if one["section"] == section]
    assert findings
    assert all(math.isfinite(one["measured"]) for one in findings)
    assert all(one["case"] in printed for one in findings)


@pytest.mark.full
@pytest.mark.parametrize("section", WITH_TARGET)
def test_a_target_is_judged_by_the_number_beside_it(run: tuple[dict[str, Any], str], section: str) -> None:
    judged = [one for one in run[0]["findings"] if one["section"] == section and one["target"] is not None]
    assert judged
    for one in judged:
        bound, measured = one["target"]["bound"], one["measured"]
        assert one["reached"] == (measured >= bound if one["target"]["at_least"] else measured <= bound)


@pytest.mark.full
def test_the_json_says_what_machine_it_was(run: tuple[dict[str, Any], str]) -> None:
    machine = run[0]["machine"]
    assert machine["cores"] >= 1
    assert {"polars", "python", "fordstone", "load_before"} <= machine.keys()


def test_a_target_is_missed_on_one_side_and_reached_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    table = bench_module(monkeypatch, "table")
    least, most = table.at_least(0.8), table.at_most(5.0)
    assert [least.reached_by(value) for value in (0.79, 0.8, 0.9)] == [False, True, True]
    assert [most.reached_by(value) for value in (4.9, 5.0, 5.1)] == [True, True, False]


def test_results_that_differ_stop_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bench_module(monkeypatch, "edge_rows")
    same = {"rows": 10.0, "total": 5.0}
    rows.must_agree([same, {"rows": 10.0, "total": 5.0 + 1e-12}])
    with pytest.raises(AssertionError, match="total"):
        rows.must_agree([same, {"rows": 10.0, "total": 5.1}])


def test_a_worker_answers_from_a_process_with_its_own_polars_threads_and_says_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = bench_module(monkeypatch, "worker")
    with worker.Worker(threads=1) as asked:
        assert asked.ask("table.number", value=1234.5) == "1,234"
        assert asked.ask("os.getpid") != os.getpid()
        assert asked.ask("polars.thread_pool_size") == 1
        with pytest.raises(worker.WorkerError, match=r"table\.nothing failed"):
            asked.ask("table.nothing")
    assert "AttributeError" in capfd.readouterr().err
