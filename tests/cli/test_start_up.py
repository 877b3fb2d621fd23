"""What a command costs before it does anything: imports, time and memory. Each in a fresh process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.place import event_with, finish, start

import fordstone

HELP_SECONDS_MAX = 0.3
HELP_TRIES = 15
IDLE_KB_MAX = 64_000
"""Of memory that is the process's own. Beside it stand the mapped pages of libraries, 40 to 66 MB of the same files: as many as the
system maps at once."""
FOREIGN = {"pyspark", "pandas", "pyarrow", "starlette", "uvicorn", "py4j"}
COMMANDS = [
    [],
    ["run"],
    ["edge"],
    ["center"],
    ["hub"],
    ["nodes"],
    ["streams"],
    ["epochs"],
    ["explain"],
    ["checkpoints"],
    ["checkpoints", "ls"],
    ["checkpoints", "show"],
    ["checkpoints", "verify"],
    ["checkpoints", "merge"],
    ["checkpoints", "import-spark"],
    ["example"],
    ["example", "words"],
    ["example", "readings"],
    ["example", "boxes"],
]
IDLE = """
from fordstone import Pipeline, tumbling
from fordstone.connectors import files

p = Pipeline("idle")
rows = p.source("rows", files("nothing/*.jsonl"), schema={"device": "string", "ts": "timestamp", "temp": "double"}, time="ts")
rows.filter("temp > 20").sink("hot", files("out/hot", format="jsonl"))
rows.group_by("device").window(tumbling("10s")).agg(n="count(*)", mean="avg(temp)").sink("out", files("out/per_device", format="parquet"))
"""


def modules_after(code: str, place: Path) -> set[str]:
    """The top-level packages that a fresh process has loaded after running some code."""
    script = f"import sys, json\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('\\n' + json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=place, capture_output=True, text=True, check=True, timeout=600
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_with_examples_and_exit_codes(invoke, command: list[str]):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:\n  fordstone " in result.stdout
    assert "Exit codes: 0 finished or stopped cleanly, 1 failed, 2 wrong usage." in result.stdout


def test_the_version_is_printed(invoke):
    assert invoke("--version").stdout == f"fordstone, version {fordstone.__version__}\n"


def test_help_loads_neither_polars_nor_the_sql_parser_nor_rich(tmp_path: Path):
    loaded = modules_after("sys.argv[1:] = ['--help']; from fordstone.cli.main import main; main()", tmp_path)
    assert "click" in loaded
    assert not loaded & {"polars", "numpy", "sqlglot", "rich", "fsspec", "msgspec", *FOREIGN}


@pytest.mark.slow
def test_running_on_the_edge_loads_no_jvm_no_pandas_and_no_rich(place: Path):
    loaded = modules_after(
        "sys.argv[1:] = ['run', 'flow.py', '--bounded']; from fordstone.cli.main import main; main()", place
    )
    assert "polars" in loaded
    assert not loaded & {"rich", *FOREIGN}


@pytest.mark.slow
def test_an_agent_loads_neither_pipelines_nor_polars(place: Path):
    words = ["edge", "flow.py", "--hub", "http://127.0.0.1:9", "--node", "a", "--keep", "0"]
    loaded = modules_after(f"sys.argv[1:] = {words}; from fordstone.cli.main import main; main()", place)
    assert "subprocess" in loaded
    assert not loaded & {"polars", "numpy", "sqlglot", "rich", "flow", *FOREIGN}


def test_help_answers_within_the_budget(tmp_path: Path):
    """Processor time, not time on the clock: other work on the machine does not change it."""
    command = [sys.executable, "-c", "from fordstone.cli.main import main; main()", "--help"]
    took = []
    for _ in range(HELP_TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=600)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if took[-1] <= HELP_SECONDS_MAX:
            return
    pytest.fail(f"the quickest of {HELP_TRIES} took {min(took):.2f} s, more than {HELP_SECONDS_MAX} s")


@pytest.mark.slow
def test_an_idle_process_stays_within_its_memory(tmp_path: Path):
    (tmp_path / "idle.py").write_text(IDLE)
    process = start(tmp_path, "run", "idle.py", "--json", "--interval", "100ms")
    event_with(process, "epoch", 1)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    process.terminate()
    code, _, err = finish(process)
    assert (code, err) == (0, "")
    assert int(status["RssAnon"].split()[0]) <= IDLE_KB_MAX


@pytest.mark.slow
def test_output_cut_off_by_head_is_not_a_traceback(place: Path):
    (place / "many.py").write_text(
        'from fordstone import Pipeline\nfrom fordstone.connectors import generator, stdout\np = Pipeline("many")\n'
        'p.source("rows", generator(rate=10_000), schema={"device": "string"}).sink("out", stdout())\n'
    )
    process = start(place, "run", "many.py", "--interval", "100ms")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["device"].startswith("k")
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert code == 1
    assert err.startswith("error: stdout: ")
    assert err.count("\n") == 1, err
