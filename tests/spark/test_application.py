"""How a command's Spark is started, with a stand-in for it. On a real one: test_cli."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.core.context import SparkContext

from fordstone.errors import ConfigError, FordstoneError
from fordstone.spark.session import application as module
from fordstone.spark.session.application import application, belonging, packed


class FakeSpark:
    """A session, its context, and a memory of what was done to them."""

    def __init__(self, master: str) -> None:
        self.master = master
        self.stopped = 0
        self.files: list[str] = []
        self.started: dict[str, Any] = {}
        self.import_path: str | None = None

    @property
    def sparkContext(self) -> FakeSpark:  # noqa: N802 - Spark's name
        return self

    def addPyFile(self, path: str) -> None:  # noqa: N802 - Spark's name
        assert Path(path).exists()
        self.files.append(path)

    def stop(self) -> None:
        self.stopped += 1

    def session(self, **given: Any) -> FakeSpark:
        self.started, self.import_path = given, os.environ.get("PYTHONPATH")
        return self


def stand_in(monkeypatch: pytest.MonkeyPatch, master: str, *, running: bool = False) -> FakeSpark:
    fake = FakeSpark(master)
    monkeypatch.setattr(module, "session", fake.session)
    monkeypatch.setattr(module, "java_gone", lambda spark: False)
    monkeypatch.setattr(SparkContext, "_active_spark_context", fake if running else None)
    # Set and taken away, so that what a command sets is gone after the test.
    for name in ("PYTHONPATH", "PYSPARK_PYTHON"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "flow.py").touch()
    return tmp_path / "flow.py"


def test_workers_of_this_machine_import_from_beside_the_file(monkeypatch: pytest.MonkeyPatch, file: Path):
    fake = stand_in(monkeypatch, "local[2]")
    with application(name="x", file=file):
        assert fake.import_path == str(file.parent)
        assert fake.files == []
    assert "PYTHONPATH" not in os.environ
    assert fake.stopped == 1


def test_what_the_user_had_on_the_import_path_stays_there(monkeypatch: pytest.MonkeyPatch, file: Path):
    fake = stand_in(monkeypatch, "local[2]")
    monkeypatch.setenv("PYTHONPATH", "theirs")
    with application(name="x", file=file):
        assert fake.import_path == f"{file.parent}{os.pathsep}theirs"
    assert os.environ["PYTHONPATH"] == "theirs"


@pytest.mark.parametrize(("master", "running"), [("spark://center:7077", False), ("local[2]", True)])
def test_workers_that_do_not_inherit_the_import_path_are_sent_the_file(
    monkeypatch: pytest.MonkeyPatch, file: Path, master: str, running: bool
):
    fake = stand_in(monkeypatch, master, running=running)
    with application(name="x", file=file):
        (sent,) = fake.files
        assert Path(sent).name.startswith("flow-")
    assert fake.stopped == (0 if running else 1), "a Spark that was there before stays"


def test_the_python_of_workers_is_set_where_spark_looks_for_it(monkeypatch: pytest.MonkeyPatch):
    fake = stand_in(monkeypatch, "spark://center:7077")
    with application(name="x", master="spark://center:7077", config={"spark.pyspark.python": "./env/bin/python"}):
        assert os.environ["PYSPARK_PYTHON"] == "./env/bin/python"
    assert fake.started["config"]["spark.executorEnv.POLARS_MAX_THREADS"] == os.environ["POLARS_MAX_THREADS"]


def test_a_spark_connect_server_is_refused_with_the_way_to_use_it(monkeypatch: pytest.MonkeyPatch):
    fake = stand_in(monkeypatch, "")
    with pytest.raises(ConfigError, match=r"session\(remote=...\)"), application(name="x", master="sc://center:15002"):
        pass
    assert fake.started == {}


def test_a_spark_that_does_not_start_says_why_without_the_stack_of_java(monkeypatch: pytest.MonkeyPatch):
    def fail(**_: object) -> None:
        raise Py4JError(
            "An error occurred while calling None.JavaSparkContext.\n: SparkException: All masters are unresponsive!\n\tat a.B(C:1)\n"
        )

    stand_in(monkeypatch, "")
    monkeypatch.setattr(module, "session", fail)
    with (
        pytest.raises(FordstoneError, match=r"with master spark://x:1: SparkException: All masters are unresponsive!$"),
        application(name="x", master="spark://x:1"),
    ):
        pass


def made_module(name: str, *, file: Path | None = None, path: Path | None = None) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = str(file) if file is not None else None
    if path is not None:
        made.__path__ = [str(path)]
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A pipeline's file with modules beside it, environments below it, and things that are no code."""
    for name in ("flow.py", "beside.py", "not-a-module.py", "parts/__init__.py", "parts/deep/lazy.py", "spaces/one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"name = {name!r}\n")
    for name in (".venv/lib/polars.py", "env/pyvenv.cfg", "env/lib/polars.py", "fordstone/errors.py", "parts/data.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(place: Path, modules: dict[str, ModuleType]) -> list[str]:
    return [path.relative_to(place).as_posix() for path in belonging(place / "flow.py", modules)]


def test_everything_belongs_to_the_file_that_could_be_imported_from_beside_it(place: Path):
    assert names(place, {}) == ["beside.py", "flow.py", "parts/__init__.py", "parts/deep/lazy.py", "spaces/one.py"]


def test_beside_very_much_only_what_was_imported_belongs_to_the_file(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LOOKED_AT_MAX", 3)
    assert names(place, {}) == ["flow.py"]
    library = place / "env" / "lib"
    loaded = {
        "flow": made_module("flow", file=place / "flow.py"),
        "parts": made_module("parts", file=place / "parts" / "__init__.py", path=place / "parts"),
        "spaces": made_module("spaces", path=place / "spaces"),
        "spaces.one": made_module("spaces.one", file=place / "spaces" / "one.py"),
        "polars": made_module("polars", file=library / "polars.py"),
        "fordstone": made_module("fordstone", path=place / "fordstone"),
        "native": made_module("native", file=place / "native.so"),
        "sys": sys,
    }
    assert names(place, loaded) == ["flow.py", "parts/__init__.py", "parts/deep/lazy.py", "spaces/one.py"]


def test_an_archive_can_be_imported_from_and_the_same_files_give_the_same_bytes(place: Path, tmp_path: Path):
    files = [place / "flow.py", place / "parts" / "__init__.py", place / "parts" / "deep" / "lazy.py"]
    data = packed(place, files)
    files[0].touch()
    assert packed(place, files) == data
    (tmp_path / "sent.zip").write_bytes(data)
    code = "import flow, parts.deep.lazy; print(flow.name, parts.deep.lazy.name)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={"PYTHONPATH": str(tmp_path / "sent.zip")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "flow.py parts/deep/lazy.py\n"


def test_more_than_anybody_can_mean_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SHIPPED_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="too many to send to Spark's workers"):
        packed(place, [place / "flow.py"])
