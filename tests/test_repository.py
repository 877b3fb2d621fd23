"""What holds for the repository as a whole: sizes, what never stands in it, and that the examples run."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import polars as pl
import pytest
from tests.cli.place import finish, start
from tests.waiting import until

import fordstone
from fordstone.api.pipeline import Pipeline
from fordstone.api.stream import Grouped, Stream
from fordstone.connectors import latest, rows
from fordstone.connectors.delta.kind import DeltaSettings
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.generator import GeneratorOptions
from fordstone.edge.config import RunConfig
from fordstone.epochs.manifest import Manifest, PartitionCut
from fordstone.spark import session
from fordstone.spark.config import SparkConfig
from fordstone.storage.failpoint import FAILPOINTS

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(sys.executable).parent
EXAMPLE_SECONDS_MAX = 600

SHELL = ["scripts/bootstrap", "scripts/demo", "scripts/test", ".ci/run"]
FOLDERS = ["src", "tests", "bench", "docs", "examples", "scripts", ".ci"]
_OURS_ALONE = re.compile("|".join(["/" + "work/", "/" + "farm/", "/" + "root/", "/" + "tmp/brief"]))
_CONNECTOR_NAME = re.compile(r"(?:connector|spec)\.kind (?:==|!=|in|not in) ")
_PICKLES = re.compile(r"^\s*(?:import|from)\s+(?:c?pickle|cloudpickle|dill|marshal|shelve)\b", re.MULTILINE)


def files_of(*endings: str) -> list[Path]:
    """The repository's own text files."""
    found = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    found += [file for file in ROOT.iterdir() if file.is_file() and file.name != "uv.lock"]
    kept = [
        file
        for file in found
        if "__pycache__" not in file.parts and not file.is_relative_to(ROOT / "bench" / "results")
    ]
    return sorted(file for file in kept if not endings or file.suffix in endings)


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_nothing_is_pickled():
    assert [named(file) for file in files_of(".py") if _PICKLES.search(file.read_text())] == []


def test_no_engine_compares_the_names_of_connectors():
    engines = [
        file for file in files_of(".py") if re.match(r"src/fordstone/(edge|planner|runtime|spark)/", named(file))
    ]
    assert len(engines) > 50
    assert [named(file) for file in engines if _CONNECTOR_NAME.search(file.read_text())] == []


def test_no_path_of_one_machine_stands_in_the_tree():
    text = [file for file in files_of() if file.suffix not in {".arrow", ".parquet", ".gz", ".zst", ".png"}]
    assert [named(file) for file in text if _OURS_ALONE.search(file.read_text(errors="replace"))] == []


def test_scripts_can_be_run_and_are_plain_shell():
    for name in SHELL:
        assert os.access(ROOT / name, os.X_OK), f"{name} is not executable"
        subprocess.run(["sh", "-n", str(ROOT / name)], check=True)


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fordstone.__version__
    assert f"## {fordstone.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_tables_of_functions_in_the_docs_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "function_table.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", [Pipeline, Stream, Grouped])
def test_every_public_method_is_in_the_reference(kind: type):
    internal = {"add", "add_loop", "aggregate", "building", "has", "name_for", "register", "type_of"}
    public = [name for name, _ in inspect.getmembers(kind) if not name.startswith("_") and name not in internal]
    text = page("reference/pipeline.md")
    assert [name for name in public if f"`{name}`" not in text and f"`{name}(" not in text] == []


def test_every_public_name_is_in_the_reference():
    text = page("reference/pipeline.md") + page("reference/expressions.md")
    assert [name for name in fordstone.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_argument_of_a_source_is_in_the_reference():
    arguments = inspect.signature(Pipeline.source).parameters
    (signature,) = re.findall(r"`source\((.*?)\)`", page("reference/pipeline.md"))
    documented = [part.strip(" *").partition("=")[0] for part in signature.split(",")]
    assert [name for name in documented if name] == [name for name in arguments if name != "self"]


def test_every_option_of_a_run_is_in_the_reference():
    text = page("reference/configuration.md")
    assert [field.name for field in dataclasses.fields(RunConfig) if f"| `{field.name}` |" not in text] == []


def test_every_option_of_a_run_on_spark_is_in_the_reference():
    text = page("reference/configuration.md").partition("## On Spark")[2]
    options = [field.name for field in dataclasses.fields(SparkConfig)]
    arguments = list(inspect.signature(session).parameters)
    assert [name for name in (*options, *arguments) if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("options", [DeltaSettings, FileSettings, GeneratorOptions])
def test_every_option_of_a_connector_is_in_the_reference(options: type):
    text = page("reference/connectors.md")
    internal = {"path", "damaged"}  # the first argument, and what only dead letters have
    names = [name for name in options.__struct_fields__ if name not in internal]  # type: ignore[attr-defined]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_every_field_of_a_manifest_is_in_the_reference():
    text = page("reference/checkpoint.md")
    fields = [*Manifest.__struct_fields__, *PartitionCut.__struct_fields__]
    assert [name for name in fields if f"`{name}`" not in text] == []


def test_failpoints_named_in_the_docs_exist():
    named_there = re.findall(
        r"FORDSTONE_FAILPOINT=([\w.-]+)", "".join(file.read_text() for file in (ROOT / "docs").rglob("*.md"))
    )
    assert named_there
    assert set(named_there) <= set(FAILPOINTS)


def test_every_variable_of_the_environment_is_in_the_reference():
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    named_there = set(re.findall(r"`(FORDSTONE_[A-Z_]+)`", page("reference/configuration.md")))
    assert set(re.findall(r"\"(FORDSTONE_[A-Z_]+)\"", source)) - named_there == set()


def run_example(name: str, directory: Path, *options: str) -> None:
    command = [str(PROGRAMS / "fordstone"), "run", str(ROOT / "examples" / name), "--bounded", *options]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=EXAMPLE_SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr


def make_data(directory: Path, *given: str) -> None:
    subprocess.run([str(PROGRAMS / "fordstone"), "example", *given], cwd=directory, check=True)


def test_every_example_is_tried_here():
    tried = set(re.findall(r"run_example\(\"(\w+\.py)\"", Path(__file__).read_text()))
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == tried


@pytest.mark.slow
def test_example_word_count_counts_every_word(tmp_path):
    make_data(tmp_path, "words")
    run_example("word_count.py", tmp_path)
    words = "".join(file.read_text() for file in (tmp_path / "in" / "words").iterdir()).replace('"line":', "")
    assert latest(tmp_path / "out" / "counts")["n"].sum() == len(re.findall(r"[a-z]+", words))


def test_example_kafka_word_count_counts_every_word(kafka_broker, tmp_path, monkeypatch):
    monkeypatch.setenv("KAFKA_SERVERS", kafka_broker.servers)
    with kafka_broker.topics(lines=2, counts=1):
        kafka_broker.send("lines", ["a ford stone", "a stone"])
        kafka_broker.send("lines", ["a  ford "], partition=1)
        run_example("kafka_word_count.py", tmp_path)
        newest = {one.key(): json.loads(one.value())["n"] for one in kafka_broker.messages("counts")}
    assert newest == {b"a": 3, b"ford": 2, b"stone": 2}


def test_example_plant_counts_every_reading_at_its_site(kafka_broker, postgres, tmp_path, monkeypatch):
    for name, value in (postgres.environment | {"KAFKA_SERVERS": kafka_broker.servers}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PGDATABASE", "plant_example")
    postgres.create_database("plant_example")
    with kafka_broker.topics(readings=2, alarms=1), postgres.connect("plant_example") as database:
        database.execute("CREATE TABLE devices (device text, site text)")
        database.execute("INSERT INTO devices VALUES ('a', 'north'), ('b', 'south')")
        kafka_broker.send("readings", ['{"device": "a", "temp": 20.5}', '{"device": "b", "temp": 31.5}'])
        kafka_broker.send("readings", ['{"device": "a", "temp": 19.0}'], partition=1)
        run_example("plant.py", tmp_path)
        assert database.execute("SELECT site, n FROM totals ORDER BY site").fetchall() == [("north", 2), ("south", 1)]
        assert database.execute("SELECT device, warmest FROM warmest ORDER BY device").fetchall() == [
            ("a", 20.5),
            ("b", 31.5),
        ]
        alarms = [json.loads(one.value()) for one in kafka_broker.messages("alarms")]
    assert alarms == [{"device": "b", "temp": 31.5, "site": "south"}]


@pytest.mark.slow
def test_example_cold_chain_loses_no_reading(tmp_path):
    make_data(tmp_path, "readings")
    run_example("cold_chain_edge.py", tmp_path)
    out = tmp_path / "out"
    total = latest(out / "totals")["n"].sum()
    assert 5900 < total < 6000, "some readings are implausible and left out"
    assert rows(out / "per_device")["n"].sum() + rows(out / "late").height == total
    assert rows(out / "late").height > 0
    assert rows(out / "alarms")["__id"].n_unique() == rows(out / "alarms").height > 0


@pytest.mark.slow
def test_example_cold_chain_on_two_tiers_counts_every_reading(tmp_path):
    make_data(tmp_path, "boxes", "--devices", "3", "--seconds", "40")
    run_example("cold_chain.py", tmp_path, "--center", "local")
    per_device = latest(tmp_path / "out" / "per_device")
    assert per_device["n"].sum() == 3 * 40
    assert per_device["device"].n_unique() == 3


@pytest.mark.slow
def test_example_cold_chain_on_two_tiers_raises_alarms_by_the_thresholds_of_the_center(tmp_path):
    process = start(tmp_path, "run", str(ROOT / "examples" / "cold_chain.py"), "--center", "local")
    seconds = 0

    def alarm_is_raised() -> bool:
        nonlocal seconds
        make_data(tmp_path, "boxes", "--devices", "3", "--seconds", "10", "--after", str(seconds))
        seconds += 10
        return rows(tmp_path / "out" / "alarms").height > 0 if (tmp_path / "out" / "alarms").exists() else False

    until(alarm_is_raised, "alarm", alive=lambda: process.poll() is None)
    process.terminate()
    assert finish(process)[0] == 0
    alarms = rows(tmp_path / "out" / "alarms")
    assert (alarms["temp"] > alarms["threshold"]).all()


@pytest.mark.slow
def test_example_overheat_raises_alarms_that_are_hotter_than_all_before(tmp_path):
    run_example("overheat.py", tmp_path)
    alarms = rows(tmp_path / "out" / "alarms")
    assert alarms.height > 100
    assert (alarms["peak"] > alarms["mean"]).all()
    assert rows(tmp_path / "out" / "calmed").height > 100


@pytest.mark.slow
def test_example_process_tells_of_silence_and_return_in_turn(tmp_path):
    run_example("process.py", tmp_path)
    silences = rows(tmp_path / "out" / "silence").sort("device", "ts")
    assert silences.height > 100
    for device in silences.partition_by("device"):
        # A device falls silent first, and is back only then.
        assert device["what"].to_list() == [("silent", "back")[at % 2] for at in range(device.height)]
        assert (device.filter(pl.col("what") == "back")["after"] >= 20).all()


@pytest.mark.slow
def test_example_late_rows_counts_all_rows(tmp_path):
    run_example("late_rows.py", tmp_path)
    late = rows(tmp_path / "out" / "late").height
    assert late > 0
    assert rows(tmp_path / "out" / "windows")["n"].sum() + late == 40_000


@pytest.mark.slow
def test_example_upserts_deletes_devices_that_are_no_longer_steady(tmp_path):
    run_example("upserts.py", tmp_path)
    steady = latest(tmp_path / "out" / "steady")
    assert steady.height > 0
    assert steady.filter(pl.col("span") >= 32).is_empty()
    assert (rows(tmp_path / "out" / "steady")["__op"] == "delete").any()


@pytest.mark.slow
def test_example_loop_counts_the_steps_of_each_number(tmp_path):
    run_example("loop.py", tmp_path)
    for first, steps in rows(tmp_path / "out" / "steps").iter_rows():
        number, count = first, 0
        while number != 1:
            number, count = (number // 2 if number % 2 == 0 else 3 * number + 1), count + 1
        assert steps == count


def test_every_file_that_the_architecture_page_names_exists():
    named_files = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page("architecture.md")))
    assert len(named_files) > 40
    roots = (ROOT / "src" / "fordstone", ROOT)
    assert [name for name in sorted(named_files) if not any((root / name).exists() for root in roots)] == []


def test_every_rule_that_a_source_file_refers_to_is_on_the_architecture_page():
    rules = set(re.findall(r"^(\d+)\. \*\*", page("architecture.md").partition("## The rules")[2], re.MULTILINE))
    used = {rule for file in files_of(".py") for rule in re.findall(r"\brule (\d+)\b", file.read_text())}
    assert used <= rules


def test_every_module_that_a_source_file_refers_to_exists():
    package = ROOT / "src" / "fordstone"
    # `spark.` begins the names of Spark's settings too, and epochs.jsonl is a file.
    names = {one.name for one in package.iterdir() if one.is_dir()} - {"spark"} | {"checkpoint", "model", "tiers"}
    used = {
        (first, second)
        for file in package.rglob("*.py")
        for first, second in re.findall(r"`([a-z_]+)\.([a-z_]+)[.`]", file.read_text())
        if first in names and second != "jsonl"
    }
    assert len(used) > 10
    places = {pair: package / pair[0] / pair[1] for pair in used}
    assert [
        pair for pair, place in places.items() if not place.is_dir() and not place.with_suffix(".py").exists()
    ] == []
