"""Folders that are emptied and filled again between runs with `available_now`, on both engines: each row is read once, or it is an error."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from tests.spark.micro import MicroSpark

from fordstone import Pipeline
from fordstone.connectors import files, rows
from fordstone.errors import SourceError

Go = Callable[..., list[str]]
"""Reads what is there now in `in/`, and returns all that was read so far."""


@pytest.fixture(name="go", params=["edge", "spark"])
def go_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Go:
    spark = MicroSpark()
    (tmp_path / "in").mkdir()

    def go(pattern: str = "*.jsonl") -> list[str]:
        pipeline = Pipeline("removed")
        source = files(str(tmp_path / "in" / pattern), format="parquet" if pattern.endswith("parquet") else "jsonl")
        pipeline.source("src", source, schema={"e": "string"}).sink("out", files(str(tmp_path / "out"), format="jsonl"))
        if request.param == "edge":
            pipeline.run(state=tmp_path / "state", available_now=True)
        else:
            spark.start(pipeline.plan(), state=tmp_path / "state", available_now=True).run()
        return sorted(rows(tmp_path / "out")["e"].to_list())

    return go


def write(path: Path, *events: str) -> None:
    path.write_text("".join(f'{{"e":"{event}"}}\n' for event in events))


@pytest.mark.parametrize("more", [0, 2])
def test_a_new_file_that_begins_as_one_that_was_read_and_removed_is_read_from_its_start(
    go: Go, tmp_path: Path, more: int
):
    write(tmp_path / "in/1.jsonl", *["alive"] * 3)
    assert len(go()) == 3
    (tmp_path / "in/1.jsonl").unlink()
    write(tmp_path / "in/2.jsonl", *["alive"] * (3 + more))
    assert len(go()) == 6 + more


def test_a_new_table_that_equals_one_that_was_read_and_removed_is_read(go: Go, tmp_path: Path):
    pl.DataFrame({"e": ["alive"]}).write_parquet(tmp_path / "in/1.parquet")
    assert len(go("*.parquet")) == 1
    (tmp_path / "in/1.parquet").unlink()
    pl.DataFrame({"e": ["alive"]}).write_parquet(tmp_path / "in/2.parquet")
    assert len(go("*.parquet")) == 2


def test_a_new_file_that_ends_as_one_that_was_removed_is_read_from_its_start(go: Go, tmp_path: Path):
    write(tmp_path / "in/1.jsonl", "door a", *["alive"] * 400)
    go()
    (tmp_path / "in/1.jsonl").unlink()
    write(tmp_path / "in/2.jsonl", "door b", *["alive"] * 400)
    assert [event for event in go() if event != "alive"] == ["door a", "door b"]


def test_a_file_that_was_renamed_is_not_read_again(go: Go, tmp_path: Path):
    write(tmp_path / "in/1.jsonl", "a")
    go()
    (tmp_path / "in/1.jsonl").rename(tmp_path / "in/done-1.jsonl")
    write(tmp_path / "in/1.jsonl", "b")
    assert go() == ["a", "b"]


@pytest.mark.parametrize("last", ["whole", "half"])
def test_a_copy_continues_a_removed_file_only_if_that_was_not_read_to_its_end(go: Go, tmp_path: Path, last: str):
    write(tmp_path / "in/1.jsonl", "a", "b")
    if last == "half":
        with (tmp_path / "in/1.jsonl").open("a") as file:
            file.write('{"e":')
    go()
    shutil.copyfile(tmp_path / "in/1.jsonl", tmp_path / "in/2.jsonl")
    (tmp_path / "in/1.jsonl").unlink()
    with (tmp_path / "in/2.jsonl").open("a") as file:
        file.write('"c"}\n' if last == "half" else '{"e":"c"}\n')
    assert go() == (["a", "b", "c"] if last == "half" else ["a", "a", "b", "b", "c"])


def test_a_file_that_was_replaced_by_one_with_the_same_bytes_is_the_same_file(go: Go, tmp_path: Path):
    write(tmp_path / "in/1.jsonl", "a", "b")
    go()
    write(tmp_path / "in/.new", "a", "b", "c")
    (tmp_path / "in/.new").replace(tmp_path / "in/1.jsonl")
    assert go() == ["a", "b", "c"]


def rotate(log: Path, *, delayed: bool) -> None:
    """As logrotate does with `compress`, and with `delaycompress` too."""
    for age in (3, 2, 1):
        for ending in ("", ".gz"):
            old = log.with_name(f"{log.name}.{age}{ending}")
            if old.exists():
                old.rename(log.with_name(f"{log.name}.{age + 1}{ending}"))
    log.rename(log.with_name(f"{log.name}.1"))
    plain = log.with_name(f"{log.name}.{2 if delayed else 1}")
    if plain.exists():
        with gzip.open(f"{plain}.gz", "wb") as packed:
            packed.write(plain.read_bytes())
        plain.unlink()


@pytest.mark.parametrize("delayed", [True, False])
def test_a_rotated_log_that_is_compressed_after_it_was_read_is_not_read_again(go: Go, tmp_path: Path, delayed: bool):
    log = tmp_path / "in/app.log"
    for turn in range(4):
        write(log, f"{turn} a", f"{turn} b")
        assert len(go("app.log*")) == 2 * turn + 2
        rotate(log, delayed=delayed)
    assert len(go("app.log*")) == 8


def test_a_log_that_is_compressed_before_it_was_read_to_its_end_is_an_error(go: Go, tmp_path: Path):
    log = tmp_path / "in/app.log"
    write(log, "a")
    go("app.log*")
    write(log, "a", "b")
    rotate(log, delayed=False)
    with pytest.raises(SourceError, match=r"app\.log\.1\.gz: compressed files can be read only as bounded input"):
        go("app.log*")


def test_a_file_that_is_gone_and_was_longer_than_what_was_read_is_an_error(go: Go, tmp_path: Path):
    write(tmp_path / "in/1.jsonl", "a")
    with (tmp_path / "in/1.jsonl").open("a") as file:
        file.write('{"e":')
    go()
    (tmp_path / "in/1.jsonl").unlink()
    with pytest.raises(SourceError, match=r"1\.jsonl vanished"):
        go()


def test_a_file_that_is_gone_and_may_have_grown_since_it_was_read_is_logged(
    go: Go, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write(tmp_path / "in/1.jsonl", "a")
    go()
    (tmp_path / "in/1.jsonl").unlink()
    with caplog.at_level("WARNING", logger="fordstone.connectors.files.identity"):
        go()
        go()
    assert [record.__dict__["file"] for record in caplog.records if "file" in record.__dict__] == ["1.jsonl"]


def test_a_log_that_is_copied_onto_an_older_one_and_truncated_is_read_on(go: Go, tmp_path: Path):
    log, old = tmp_path / "in/app.log", tmp_path / "in/app.log.1"
    write(old, "a", "b")
    write(log, "c")
    assert go("app.log*") == ["a", "b", "c"]
    write(log, "c", "d", "e")
    shutil.copyfile(log, old)
    write(log, "f")
    assert go("app.log*") == ["a", "b", "c", "d", "e", "f"]
