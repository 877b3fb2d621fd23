"""`run --on spark`, `center` and `checkpoints import-spark` with everything of Spark's replaced: what is passed on, shown and refused.

The same commands on a real Spark are in tests/spark/test_cli.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import urllib3
from tests.cli.place import Invoke
from tests.cli.test_view import PROGRESS

from fordstone.cli.options import EngineOption
from fordstone.cli.run import center, run
from fordstone.edge.config import RunConfig
from fordstone.errors import SourceError, TaskError
from fordstone.protocol.progress import Progress, Report
from fordstone.runtime.health import HealthServer
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.state_transfer import Imported

BOTH = ["state", "node", "interval", "allow_new_state", "batch_rows", "bounded"]


@dataclass
class FakeSpark:
    """Remembers how it was started, and what was run on it."""

    sessions: list[dict[str, Any]] = field(default_factory=list)
    configs: list[SparkConfig] = field(default_factory=list)
    imports: list[tuple[Any, ...]] = field(default_factory=list)
    ended: int = 0
    on_failure: Callable[[], None] | None = None
    run: Callable[[], Report] = lambda: Report(pipeline="cold-chain", outcome="ended", progress=PROGRESS)


@pytest.fixture
def spark_stand_in(monkeypatch: pytest.MonkeyPatch) -> FakeSpark:
    fake = FakeSpark()

    @contextmanager
    def application(**given: Any) -> Iterator[FakeSpark]:
        fake.sessions.append(given)
        try:
            yield fake
        finally:
            fake.ended += 1

    def run_plan(
        plan: object,
        functions: object,
        config: SparkConfig,
        *,
        spark: FakeSpark,
        on_progress: Callable[[Progress], None],
        on_failure: Callable[[], None] | None,
    ) -> Report:
        assert spark is fake
        fake.configs.append(config)
        fake.on_failure = on_failure
        on_progress(PROGRESS)
        return fake.run()

    def export(spark: FakeSpark, checkpoint: str, state: str, *, node: str) -> Imported:
        fake.imports.append((checkpoint, state, node))
        return Imported(pipeline="cold-chain", epoch=41, runs=2, size_bytes=1_250_000, rows=1_000)

    monkeypatch.setattr(importlib.import_module("fordstone.spark.session.application"), "application", application)
    # By way of the module table: the package has a function of the same name.
    monkeypatch.setattr(importlib.import_module("fordstone.spark.run"), "run_plan", run_plan)
    monkeypatch.setattr(importlib.import_module("fordstone.spark.hosted.state_transfer"), "import_spark", export)
    return fake


def test_a_person_sees_that_spark_starts_then_what_came_of_the_run(invoke: Invoke, spark_stand_in: FakeSpark):
    result = invoke("run", "flow.py", "--on", "spark", "--bounded")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[:2] == ["cold-chain: starting Spark ...", "cold-chain: running as a batch job ..."]
    assert "cold-chain ended: all input was read." in lines
    assert spark_stand_in.ended == 1, "Spark was started by the command and ends with it"


def test_probes_are_answered_while_spark_runs_and_after_a_failure(
    invoke: Invoke, spark_stand_in: FakeSpark, monkeypatch: pytest.MonkeyPatch
):
    servers: list[HealthServer] = []
    monkeypatch.setattr(
        HealthServer, "__enter__", lambda self, enter=HealthServer.__enter__: servers.append(enter(self))
    )
    answers = []

    def run() -> Report:
        found = urllib3.request("GET", f"{servers[0].url}/readyz", retries=False)
        answers.append((found.status, found.json()["pipelines"][0]["state"]))
        assert spark_stand_in.on_failure is not None
        spark_stand_in.on_failure()
        found = urllib3.request("GET", f"{servers[0].url}/readyz", retries=False)
        answers.append((found.status, found.json()["pipelines"][0]["state"]))
        return Report(pipeline="cold-chain", outcome="ended", progress=PROGRESS)

    spark_stand_in.run = run
    result = invoke("center", "flow.py", "--health", "127.0.0.1:0")
    assert result.exit_code == 0, result.stderr
    assert answers == [(200, "running"), (503, "restarting")]


def test_json_has_no_line_for_people(invoke: Invoke, spark_stand_in: FakeSpark):
    result = invoke("run", "flow.py", "--on", "spark", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert (report["event"], report["outcome"], report["progress"]["rows_in"]) == ("report", "ended", 1_000)


def test_options_reach_the_session_and_the_query(invoke: Invoke, place: Path, spark_stand_in: FakeSpark):
    given = (
        "--master spark://center:7077 --memory 4g --conf spark.cores.max=8 --conf spark.a=b=c --shards 16 "
        "--rows-max 1000 --available-now --from-checkpoint edge --state kept --node gateway --interval 5s --batch-rows 10 "
        "--allow-new-state -v"
    )
    result = invoke("run", "flow.py", "--on", "spark", *given.split())
    assert result.exit_code == 0, result.stderr
    (session,) = spark_stand_in.sessions
    assert session == {
        "name": "fordstone cold-chain",
        "master": "spark://center:7077",
        "memory": "4g",
        "log_level": "WARN",
        "config": {"spark.cores.max": "8", "spark.a": "b=c"},
        "file": place / "flow.py",
    }
    assert spark_stand_in.configs == [
        SparkConfig(
            state="kept",
            available_now=True,
            interval="5s",
            shards=16,
            rows_max=1000,
            batch_rows=10,
            from_checkpoint="edge",
            node="gateway",
            allow_new_state=True,
        )
    ]


def test_center_is_a_run_on_spark_without_an_end(invoke: Invoke, spark_stand_in: FakeSpark):
    given = ["--master", "local[4]", "--state", "kept"]
    assert invoke("center", "flow.py", *given).exit_code == 0
    assert invoke("run", "flow.py", "--on", "spark", *given).exit_code == 0
    assert spark_stand_in.sessions[0] == spark_stand_in.sessions[1]
    assert spark_stand_in.configs[0] == spark_stand_in.configs[1] == SparkConfig(state="kept")
    assert "No such option" in invoke("center", "flow.py", "--bounded").stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--on", "spark", "--parallelism", "1"],
            "--parallelism goes with --on edge, not with --on spark. On Spark, --master",
        ),
        (["--on", "spark", "--keep", "5"], "--keep goes with --on edge"),
        (["--on", "spark", "--remote", "s3://b"], "--state may be a URL"),
        (["--on", "spark", "--interval", "auto"], "--interval auto goes with --on edge"),
        (["--on", "spark", "--allow-new-state"], "--allow-new-state needs --from-checkpoint on Spark"),
        (["--on", "spark", "--bounded", "--available-now"], "cannot both be set"),
        (["--on", "spark", "--shards", "1000"], "shards=1000"),
        (["--on", "spark", "--conf", "spark.ui.enabled"], "write NAME=VALUE"),
        (["--on", "spark", "--conf", "ui=1"], "write NAME=VALUE"),
        (["--master", "local[2]"], "--master goes with --on spark, not with --on edge. The edge runs in this process"),
        (["--on", "edge", "--bounded", "--available-now"], "cannot both be set"),
        (["--from-checkpoint", "state"], "--from-checkpoint goes with --on spark"),
        (["--conf", "spark.ui.enabled=true"], "--conf goes with --on spark"),
        (["--on", "flink"], "'flink' is not one of"),
    ],
)
def test_what_the_engine_cannot_do_is_a_misuse_before_anything_starts(
    invoke: Invoke, place: Path, spark_stand_in: FakeSpark, given: list[str], said: str
):
    result = invoke("run", "flow.py", *given)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert spark_stand_in.sessions == []
    assert not (place / "state").exists()


def test_every_option_of_one_engine_is_refused_by_the_other(invoke: Invoke):
    options = [option for option in run.params if isinstance(option, EngineOption)]
    assert {option.engine for option in options} == {"edge", "spark"}
    for option in options:
        other = {"edge": "spark", "spark": "edge"}[option.engine]
        value = option.type.choices[0] if isinstance(option.type, click.Choice) else "1"
        result = invoke("run", "flow.py", "--on", other, option.opts[0], *([] if option.is_flag else [value]))
        assert result.exit_code == 2
        said = f"error: {option.opts[0]} goes with --on {option.engine}, not with --on {other}. {option.otherwise}\n"
        assert result.stderr == said
        assert re.match(r"[A-Z].*\.$", option.otherwise), "the other way is a sentence"


@pytest.mark.parametrize(("engine", "kind"), [("edge", RunConfig), ("spark", SparkConfig)])
def test_defaults_of_options_are_those_of_the_configuration(engine: str, kind: type[RunConfig | SparkConfig]):
    # From Python, a run of the edge engine without a directory keeps nothing; the command line always has one.
    defaults = kind(state="state")
    for option in run.params:
        ours = not isinstance(option, EngineOption) or option.engine == engine
        if ours and option.name in {one.name for one in dataclasses.fields(kind)}:
            assert option.get_default(click.Context(run)) == getattr(defaults, option.name or ""), option.name
    known = {option.name for option in run.params}
    assert known >= set(BOTH)
    assert {one.name for one in dataclasses.fields(SparkConfig)} <= known, "every option of SparkConfig can be given"


def test_help_lists_the_options_of_each_engine_apart(invoke: Invoke):
    shared, edge, spark = re.split(r"Options with --on \w+:", invoke("run", "--help").stdout)
    assert "--state DIR" in shared
    assert "FILE[:NAME]\n" not in shared.partition("Options:")[2]
    assert "--parallelism N" in edge
    assert "--available-now" in shared
    assert "--shards N" in spark
    assert "--part [edge|center]" in spark.partition("Options of two tiers:")[2]
    assert {option.name for option in run.params} - {option.name for option in center.params} == {
        "bounded",
        "fresh",
        "yes",
        "part",
        "center_on",
        "outbox_max",
        "outbox_full",
        "hub_state",
        "take_over",
    }
    assert {option.name for option in center.params} <= {option.name for option in run.params}


def test_an_error_reported_by_spark_is_shown_without_a_traceback(invoke: Invoke, spark_stand_in: FakeSpark):
    def fail() -> Report:
        raise SourceError("source readings: no file matches 'in/*.jsonl'.")

    spark_stand_in.run = fail
    result = invoke("run", "flow.py", "--on", "spark", "--json")
    assert result.exit_code == 1
    assert result.stderr == "error: source readings: no file matches 'in/*.jsonl'.\n"
    assert json.loads(result.stdout)["error"] == "SourceError"
    assert spark_stand_in.ended == 1


def test_an_exception_in_a_worker_is_traced_in_the_users_code_only(invoke: Invoke, spark_stand_in: FakeSpark):
    class WorkerError(Exception):
        """As Spark raises it."""

    WorkerError.__module__ = "pyspark.errors.exceptions.captured"
    text = (
        'terminated with exception: Traceback (most recent call last):\n  File "/x/pyspark/sql/utils.py", line 1, in call\n    raise\n'
        'PythonException: Traceback (most recent call last):\n  File "/opt/fordstone/operators/rowwise.py", line 9, in apply\n    f(row)\n'
        '  File "/tmp/s/flow-1f.zip/flow.py", line 14, in warm\n    return row["tmep"]\n           ~~~^^^^^^^^\n'
        "KeyError: 'tmep'\nin step map, on a batch of 2 rows\n SQLSTATE: 39000\n=== Streaming Query ===\nLogical Plan:\nx\n"
    )

    def fail() -> Report:
        raise TaskError("pipeline cold-chain failed 6 times in a row on Spark") from WorkerError(text)

    spark_stand_in.run = fail
    result = invoke("run", "flow.py", "--on", "spark")
    assert result.exit_code == 1
    assert result.stderr.partition("error: ")[2] == (
        'pipeline cold-chain failed 6 times in a row on Spark\n\n  File "flow.py", line 14, in warm\n    return row["tmep"]\n'
        "           ~~~^^^^^^^^\nKeyError: 'tmep'\nin step map, on a batch of 2 rows\n"
    )


def test_what_was_there_is_read_and_more_may_come(invoke: Invoke, spark_stand_in: FakeSpark):
    spark_stand_in.run = lambda: Report(pipeline="cold-chain", outcome="stopped", progress=PROGRESS)
    said = invoke("run", "flow.py", "--on", "spark", "--available-now").stderr
    assert "cold-chain read everything there is; the next run resumes from here." in said
    stopped = msgspec.structs.replace(PROGRESS, stopping=True)
    spark_stand_in.run = lambda: Report(pipeline="cold-chain", outcome="stopped", progress=stopped)
    said = invoke("run", "flow.py", "--on", "spark").stderr
    assert "cold-chain stopped; the next run resumes from here." in said


def test_a_batch_job_that_is_done_says_how_to_read_on(invoke: Invoke, spark_stand_in: FakeSpark):
    spark_stand_in.run = lambda: Report(pipeline="cold-chain", outcome="already_ended", progress=PROGRESS)
    said = invoke("run", "flow.py", "--on", "spark", "--bounded").stderr
    assert "had ended already: there is nothing left to read" in said
    assert "--fresh" in said
    assert "--available-now instead of --bounded" in said


def query_at(path: Path) -> Path:
    (path / "fordstone").mkdir(parents=True)
    (path / "fordstone" / "query.json").write_text("{}")
    return path


def test_the_state_of_a_query_is_imported_by_its_state_directory_or_by_its_own(
    invoke: Invoke, place: Path, spark_stand_in: FakeSpark
):
    query = query_at(place / "center" / "cold-chain" / "_spark")
    for given in ("center", "center/cold-chain", "center/cold-chain/_spark"):
        result = invoke("checkpoints", "import-spark", given, "--state", "edge", "--node", "gateway")
        assert result.exit_code == 0, result.stderr
        assert result.stdout == (
            "checkpoint 41 of pipeline cold-chain on node gateway written: 1,000 rows of state in 2 runs, 1.25 MB. "
            "`fordstone run FILE --state edge` resumes from it.\n"
        )
        assert result.stderr == "starting Spark ...\n"
    assert spark_stand_in.imports == [(str(query), "edge", "gateway")] * 3


def test_an_import_for_machines_is_one_line(invoke: Invoke, place: Path, spark_stand_in: FakeSpark):
    query_at(place / "state" / "cold-chain" / "_spark")
    result = invoke("checkpoints", "import-spark", "state", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "pipeline": "cold-chain",
        "node": "node",
        "epoch": 41,
        "runs": 2,
        "size_bytes": 1_250_000,
        "rows": 1_000,
    }


def test_a_url_is_taken_as_it_is(invoke: Invoke, spark_stand_in: FakeSpark):
    assert invoke("checkpoints", "import-spark", "s3://center/cold-chain/_spark").exit_code == 0
    assert spark_stand_in.imports == [("s3://center/cold-chain/_spark", "state", "node")]


def test_an_import_of_nothing_or_of_several_is_a_misuse(invoke: Invoke, place: Path, spark_stand_in: FakeSpark):
    (place / "empty").mkdir()
    for pipeline in ("hot", "cold"):
        query_at(place / "center" / pipeline / "_spark")
    for given, said in (
        ("nowhere", "there is no directory nowhere"),
        ("empty", "empty has no state of a Spark query"),
        ("center", "several queries. Give one of:\n    center/cold/_spark\n    center/hot/_spark"),
    ):
        result = invoke("checkpoints", "import-spark", given)
        assert result.exit_code == 2
        assert said in result.stderr
    assert spark_stand_in.sessions == []


def test_the_directory_of_a_query_is_not_taken_for_a_node(invoke: Invoke, place: Path):
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    query = query_at(place / "state" / "cold-chain" / "_spark")
    (query / "manifests").mkdir()
    result = invoke("checkpoints", "ls", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["node"] == "node"


def test_a_state_directory_of_spark_alone_says_how_to_import_it(invoke: Invoke, place: Path):
    query_at(place / "state" / "cold-chain" / "_spark")
    result = invoke("checkpoints", "ls")
    assert result.exit_code == 2
    assert "fordstone checkpoints import-spark state/cold-chain/_spark --state state" in result.stderr
