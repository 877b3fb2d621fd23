"""The commands on a real Spark: in the one of the test run where that is enough, else in a process of their own."""
# ruff: noqa: F811 - arguments have the names of the fixtures that they ask for

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.conftest import invoke, place  # noqa: F401 - fixtures
from tests.cli.place import Invoke, read_rows
from tests.docs.blocks import REPOSITORY
from tests.faults.spark_process import descendants, program
from tests.spark.cluster import standalone
from tests.spark.test_java import without_java

from fordstone.connectors import latest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 300
COMMAND = [sys.executable, "-c", "from fordstone.cli.main import main; main()"]
LIVE = """
import scale
from fordstone import Pipeline, tumbling
from fordstone.connectors import files, generator

def doubled(row):
    return row | {"temp": scale.twice(row["temp"])}

def named(row):
    from parts.lazy import name
    return {"device": name(row["device"]), "n": row["n"]}

p = Pipeline("live")
schema = {"device": "string", "ts": "timestamp", "temp": "double"}
rows = p.source("rows", generator(rate=500, keys=2, step="50ms"), schema=schema, time="ts")
windows = rows.map(doubled, schema=schema).group_by("device").window(tumbling("1s")).agg(n="count(*)")
windows.map(named, schema={"device": "string", "n": "bigint"}).sink("out", files("out/live", format="jsonl"))
"""
TOTALS = """
from fordstone import Pipeline
from fordstone.connectors import files

p = Pipeline("totals")
rows = p.source("rows", files("in/*.jsonl"), schema={"device": "string", "temp": "double"})
rows.group_by("device").agg(n="count(*)", top="max(temp)").sink("totals", files("out/totals", format="jsonl"))
"""


@pytest.mark.full  # as the README and the examples do
def test_word_count_prints_the_same_counts_on_both_engines(tmp_path: Path):
    examples = REPOSITORY / "examples"
    printed = {}
    for engine in ("edge", "spark"):
        folder = tmp_path / engine
        folder.mkdir()
        subprocess.run([*COMMAND, "example", "words"], cwd=folder, check=True)
        given = ["run", str(examples / "word_count.py"), "--bounded", "--on", engine]
        done = subprocess.run(
            [*COMMAND, *given], cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
        )
        assert done.returncode == 0, done.stderr
        assert "word-count ended: all input was read." in done.stderr
        assert ("starting Spark ..." in done.stderr) is (engine == "spark")
        printed[engine] = sorted(done.stdout.splitlines())
    assert len(printed["edge"]) > 100
    assert printed["edge"] == printed["spark"]


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A pipeline's file with modules beside it, in a directory that is not the working one."""
    code = tmp_path / "code"
    (code / "parts").mkdir(parents=True)
    (code / "live_on_spark.py").write_text(LIVE)
    (code / "scale.py").write_text("def twice(x):\n    return 2 * x\n")
    (code / "parts" / "lazy.py").write_text("def name(x):\n    return x.upper()\n")
    return code / "live_on_spark.py"


def test_on_a_machine_without_java_ctrl_c_finishes_the_epoch_and_leaves_state_that_can_be_imported(
    live: Path, invoke: Invoke, place: Path, spark: SparkSession, tmp_path: Path
):
    given = [
        "run",
        str(live),
        "--on",
        "spark",
        "--json",
        "--master",
        "local[2]",
        "--memory",
        "1g",
        "--interval",
        "200ms",
    ]
    process = subprocess.Popen(
        [*COMMAND, *given],
        cwd=place,
        env=without_java(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            event = json.loads(line)
            assert event["event"] == "progress", f"{event}\n{process.stderr.read() if process.stderr else ''}"
            if event["rows_out"] > 0:
                break
        programs = [program(pid) for pid in descendants(process.pid)]
        assert any(path.name == "java" and path.is_relative_to(sys.prefix) for path in programs), programs
        # A terminal tells the whole group: Spark's own processes must not end of it.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS_MAX)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, without_slow_workers(err)) == (0, [])
    report = json.loads(out.splitlines()[-1])
    assert (report["event"], report["outcome"], report["progress"]["stopping"]) == ("report", "stopped", True)
    assert {row["device"] for row in read_rows_of_parts(place / "out" / "live")} == {"K000000", "K000001"}

    result = invoke("checkpoints", "import-spark", "state", "--state", "edge", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["epoch"] == report["progress"]["epoch"]
    assert json.loads(invoke("checkpoints", "ls", "--state", "edge", "--json").stdout)["pipeline"] == "live"


def test_executors_of_a_cluster_get_the_file_and_what_lies_beside_it(live: Path, tmp_path: Path):
    # An executor's working directory is its own, and it inherits nothing of this process: what it has, it was sent.
    live.write_text(live.read_text().replace("rate=500", "rows=500"))
    work = tmp_path / "work"
    work.mkdir()
    with standalone(tmp_path, workers=1, cores=2) as cluster:
        given = ["center", str(live), "--master", cluster.master, "--memory", "512m", "--available-now"]
        done = subprocess.run(
            [*COMMAND, *given], cwd=work, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
        )
    assert done.returncode == 0, done.stderr
    assert "live read everything there is; the next run resumes from here." in done.stderr
    assert "rows in   500" in done.stderr
    assert {row["device"] for row in read_rows_of_parts(work / "out" / "live")} == {"K000000", "K000001"}


def without_slow_workers(log: str) -> list[str]:
    """The lines of a log, but for restarts because a Python worker needed more than the 10 s that Spark gives it to connect.

    The 10 s are fixed in Spark (`PythonWorkerFactory.createSimpleWorker`), and a busy machine may need more.
    """
    return [line for line in log.splitlines() if "Python worker failed to connect back" not in line]


def read_rows_of_parts(directory: Path) -> list[dict[str, object]]:
    return [row for folder in directory.glob("epoch-*") if folder.is_dir() for row in read_rows(folder)]


def write_numbers(file: Path, numbers: range) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"device": f"d{n % 3}", "temp": n / 2}) + "\n" for n in numbers))


@pytest.mark.full  # as the page about it does
def test_a_pipeline_moves_from_spark_to_the_edge_and_back(invoke: Invoke, place: Path, spark: SparkSession):
    (place / "in" / "a.jsonl").unlink()
    (place / "totals_both_ways.py").write_text(TOTALS)
    write_numbers(place / "in" / "a.jsonl", range(30))
    first = invoke("run", "totals_both_ways.py", "--on", "spark", "--available-now", "--state", "center", "--json")
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout.splitlines()[-1])["progress"]["rows_in"] == 30

    moved = invoke("checkpoints", "import-spark", "center", "--state", "edge")
    assert moved.exit_code == 0, moved.stderr
    assert moved.stdout.startswith("checkpoint 1 of pipeline totals on node node written: 3 rows of state in ")
    write_numbers(place / "in" / "b.jsonl", range(30, 60))
    second = invoke("run", "totals_both_ways.py", "--state", "edge", "--bounded", "--json")
    assert second.exit_code == 0, second.stderr
    assert json.loads(second.stdout.splitlines()[-1])["progress"]["rows_in"] == 30

    write_numbers(place / "in" / "c.jsonl", range(60, 90))
    back = ["--on", "spark", "--state", "back", "--from-checkpoint", "edge", "--available-now", "--json"]
    third = invoke("run", "totals_both_ways.py", *back)
    assert third.exit_code == 0, third.stderr
    report = json.loads(third.stdout.splitlines()[-1])
    assert report["progress"]["rows_in"] == 30
    assert report["resumed_from"] == json.loads(second.stdout.splitlines()[-1])["progress"]["epoch"]
    assert sorted(latest(place / "out" / "totals").rows()) == [("d0", 30, 43.5), ("d1", 30, 44.0), ("d2", 30, 44.5)]


@pytest.mark.parametrize("way", ["--bounded", "--available-now"])
def test_an_error_that_a_worker_finds_is_reported_without_a_traceback(
    invoke: Invoke, place: Path, spark: SparkSession, way: str
):
    (place / "wrong_on_spark.py").write_text(
        TOTALS.replace(
            'p = Pipeline("totals")', 'p = Pipeline("wrong")\nwrong = lambda row: {"device": row["temp"]}'
        ).replace("rows.group_by", 'rows.map(wrong, schema={"device": "string", "temp": "double"}).group_by')
    )
    result = invoke("run", "wrong_on_spark.py", "--on", "spark", way)
    assert result.exit_code == 1
    assert "error: step map: " in result.stderr
    assert "Traceback" not in result.stderr
    assert "SQLSTATE" not in result.stderr


def test_input_that_is_not_there_is_reported_before_a_job_runs(invoke: Invoke, place: Path, spark: SparkSession):
    (place / "in" / "a.jsonl").unlink()
    (place / "nothing_on_spark.py").write_text(TOTALS)
    result = invoke("run", "nothing_on_spark.py", "--on", "spark", "--bounded")
    assert result.exit_code == 1
    assert "no file matches" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_master_that_is_another_than_the_one_running_is_refused(invoke: Invoke, spark: SparkSession):
    result = invoke("run", "flow.py", "--on", "spark", "--master", "spark://elsewhere:7077")
    assert result.exit_code == 1
    assert "Spark runs in this process already, with master 'local[2]'" in result.stderr
    assert spark.range(3).count() == 3, "it was not the command's to end"
