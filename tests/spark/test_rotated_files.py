"""Files that are rotated, replaced or truncated while a pipeline runs or is down, on both engines: each row is read once, or it is an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import polars as pl
import pytest
from tests.spark.both_engines import Engine, engine_fixture
from tests.spark.micro import MicroSpark

from fordstone import Pipeline
from fordstone.connectors import files, rows
from fordstone.connectors.files import identity
from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.errors import SourceError
from fordstone.plan.plan import Plan

__all__ = ["engine_fixture"]


def add(path: Path, numbers: Iterable[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        text = ("" if path.exists() and path.stat().st_size else "n\n") + "".join(f"{n}\n" for n in numbers)
    else:
        text = "".join(json.dumps({"n": n}) + "\n" for n in numbers)
    with path.open("a") as file:
        file.write(text)


def reading(root: Path, pattern: str = "app.log*") -> Plan:
    pipeline = Pipeline("rotated")
    ending = None if pattern.endswith((".csv", ".parquet")) else "jsonl"
    source = pipeline.source("src", files(str(root / "in" / pattern), format=ending), schema={"n": "bigint"})
    source.sink("out", files(str(root / "out"), format="jsonl"))
    return pipeline.plan()


def read(root: Path) -> list[int]:
    return sorted(rows(root / "out")["n"].to_list())


def rename(log: Path) -> None:
    """As logrotate does: the oldest goes last."""
    for age in range(5, 0, -1):
        old = log.with_name(f"{log.name}.{age}")
        if old.exists():
            old.rename(log.with_name(f"{log.name}.{age + 1}"))
    log.rename(log.with_name(f"{log.name}.1"))


def copy_and_truncate(log: Path) -> None:
    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    with log.open("r+") as file:
        file.truncate(0)


@pytest.fixture(name="down", params=[False, True], ids=["while it runs", "while it is down"])
def down_fixture(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("pattern", ["app.log*", "app.log"])
@pytest.mark.parametrize("rotate", [rename, copy_and_truncate])
def test_each_row_of_a_rotated_log_is_read_once(
    engine: Engine, tmp_path: Path, pattern: str, rotate: Callable[[Path], None], down: bool
):
    plan, log = reading(tmp_path, pattern), tmp_path / "in/app.log"
    add(log, range(100))
    engine.run(plan)
    if down:
        engine.restart()
    add(log, range(100, 110))
    rotate(log)
    add(log, range(110, 300))
    engine.run(plan)
    assert read(tmp_path) == list(range(300))
    if rotate is rename:  # a program that still has the old file open
        add(log.with_name("app.log.1"), range(300, 310))
    add(log, range(310, 320))
    engine.run(plan)
    wanted = {*range(320)} - (set() if rotate is rename else {*range(300, 310)})
    assert read(tmp_path) == sorted(wanted)


def test_a_log_that_is_rotated_again_and_again_is_read_once(engine: Engine, tmp_path: Path, down: bool):
    plan, log = reading(tmp_path), tmp_path / "in/app.log"
    for turn in range(4):
        add(log, range(turn * 20, turn * 20 + 20))
        engine.run(plan)
        if down:
            engine.restart()
        rename(log)
    engine.run(plan)
    assert read(tmp_path) == list(range(80))


def test_a_log_that_is_being_copied_is_not_read_twice(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "COPY_SECONDS", 3600)
    plan, log = reading(tmp_path), tmp_path / "in/app.log"
    add(log, range(100))
    engine.run(plan)
    data = log.read_bytes()
    (tmp_path / "in/app.log.1").write_bytes(data[:500])
    engine.run(plan)
    (tmp_path / "in/app.log.1").write_bytes(data)
    engine.run(plan)
    log.write_bytes(b"")
    engine.run(plan)
    add(log, range(100, 105))
    engine.run(plan)
    assert read(tmp_path) == list(range(105))


def test_a_rotated_log_that_begins_as_the_newest_does_is_read_after_a_moment(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan, log = reading(tmp_path), tmp_path / "in/app.log"
    add(log, [1, 1, 2])
    add(log.with_name("app.log.1"), [1])
    monkeypatch.setattr(identity, "COPY_SECONDS", 3600)
    engine.run(plan)
    assert read(tmp_path) == [1, 1, 2]
    monkeypatch.setattr(identity, "COPY_SECONDS", 0)
    engine.restart()
    engine.run(plan)
    assert read(tmp_path) == [1, 1, 1, 2]


def test_bounded_input_has_all_rotated_logs_even_if_they_are_equal(tmp_path: Path):
    for name in ("app.log", "app.log.1", "app.log.2"):
        add(tmp_path / "in" / name, [1])
    spark_root = tmp_path / "spark"
    shutil.copytree(tmp_path / "in", spark_root / "in")
    run(reading(tmp_path), {}, RunConfig(node="n", bounded=True, state=str(tmp_path / "state")))
    MicroSpark().run_batch(reading(spark_root), state=spark_root / "state")
    assert read(tmp_path) == read(spark_root) == [1, 1, 1]


def test_a_file_that_was_replaced_by_other_content_is_an_error_that_names_both(
    engine: Engine, tmp_path: Path, down: bool
):
    plan, file = reading(tmp_path, "*.csv"), tmp_path / "in/a.csv"
    add(file, range(50))
    engine.run(plan)
    if down:
        engine.restart()
    (tmp_path / "new").write_text("n\n" + "".join(f"{n}\n" for n in range(1000, 1200)))
    (tmp_path / "new").replace(file)
    with pytest.raises(
        SourceError, match=r"a\.csv is another file than the one that was read up to byte 142.*\n.*is not there"
    ):
        engine.run(plan)
    assert read(tmp_path) == list(range(50))


def test_a_file_that_was_truncated_without_a_copy_is_an_error(engine: Engine, tmp_path: Path, down: bool):
    plan, file = reading(tmp_path, "*.csv"), tmp_path / "in/a.csv"
    add(file, range(50))
    engine.run(plan)
    if down:
        engine.restart()
    file.write_text("n\n1\n")
    with pytest.raises(SourceError, match=r"a\.csv shrank: it has 4 bytes, and 142 had been read"):
        engine.run(plan)


def test_a_file_that_was_replaced_by_a_longer_copy_of_itself_is_read_on(engine: Engine, tmp_path: Path, down: bool):
    """As editors and rsync do."""
    plan, file = reading(tmp_path, "*.csv"), tmp_path / "in/a.csv"
    add(file, range(50))
    engine.run(plan)
    if down:
        engine.restart()
    shutil.copyfile(file, tmp_path / "copy.csv")
    add(tmp_path / "copy.csv", range(50, 60))
    (tmp_path / "copy.csv").replace(file)
    engine.run(plan)
    assert read(tmp_path) == list(range(60))


def test_a_table_of_other_rows_under_the_name_of_one_that_was_read_is_read_from_its_start(
    engine: Engine, tmp_path: Path
):
    plan, file = reading(tmp_path, "*.parquet"), tmp_path / "in/a.parquet"
    file.parent.mkdir()
    pl.DataFrame({"n": [1, 2, 3]}).write_parquet(file)
    engine.run(plan)
    engine.restart()
    pl.DataFrame({"n": [11, 12, 13, 14]}).write_parquet(file)
    engine.run(plan)
    assert read(tmp_path) == [1, 2, 3, 11, 12, 13, 14]


def test_a_copy_that_differs_before_its_last_bytes_is_not_taken_for_the_file(
    engine: Engine, tmp_path: Path, down: bool
):
    plan, log = reading(tmp_path), tmp_path / "in/app.log"
    add(log, [1, *[7] * 2000])
    engine.run(plan)
    if down:
        engine.restart()
    log.write_bytes(b"")
    add(log.with_name("app.log.1"), [2, *[7] * 2000])
    with pytest.raises(SourceError, match=r"app\.log shrank"):
        engine.run(plan)
    assert read(tmp_path) == [1, *[7] * 2000]
