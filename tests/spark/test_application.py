"""How a command's Spark is started, with a stand-in for it. On a real one: test_cli."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.core.context import SparkContext

from fordstone.errors import ConfigError, FordstoneError
from fordstone.spark.session import application as module
from fordstone.spark.session.application import application


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


def test_the_python_of_workers_is_told_where_spark_looks_for_it(monkeypatch: pytest.MonkeyPatch):
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
