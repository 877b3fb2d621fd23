"""Epochs that several processes write: whole or not at all, whatever stops whom, and readable by everybody's tools."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import polars as pl
import pytest

from fordstone.connectors import files, latest, rows
from fordstone.connectors.base import Part, PartedSink, PartWriter, SinkStream, options_of
from fordstone.connectors.files.rows import MARK_NAME, SinkRows, rows_of
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.files.sink import FilePartWriter, FileSink
from fordstone.connectors.registry import open_parts, open_sink
from fordstone.errors import SinkError, StorageError
from fordstone.lang.schema import Schema
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

SCHEMA = Schema.of({"device": "string", "n": "bigint"})
STREAM = SinkStream(step="results", schema=SCHEMA)
UPSERTS = SinkStream(step="results", schema=SCHEMA, upsert_key=("device",))
FORMATS = ["jsonl", "csv", "parquet", "arrow"]


def frame(*numbers: int) -> pl.DataFrame:
    return pl.DataFrame({"device": [f"d{number % 3}" for number in numbers], "n": list(numbers)}, schema=SCHEMA.polars)


def opened(path: Path, file_format: str = "jsonl", stream: SinkStream = STREAM) -> tuple[PartedSink, PartWriter]:
    spec = files(str(path), format=file_format)
    sink = open_sink(spec, stream)
    writer = open_parts(spec, stream)
    assert isinstance(sink, PartedSink)
    assert writer is not None
    return sink, writer


def on_disk(disk: MemoryDisk, file_format: str = "jsonl") -> tuple[FileSink, FilePartWriter]:
    settings = options_of(files("out", format=file_format), FileSettings)
    return FileSink(settings, STREAM, disk), FilePartWriter(SinkRows(settings, STREAM), disk, where="out")


def release(sink: PartedSink, writer: PartWriter, epoch: int, attempt: str, parts: Sequence[Sequence[int]]) -> None:
    written = [writer.write(epoch, attempt, number, frame(*part)) for number, part in enumerate(parts)]
    sink.release_parts(epoch, attempt, written)


def seen(disk: MemoryDisk) -> list[int]:
    names = list(disk.list(""))
    for epoch in disk.list(""):
        names += [f"{epoch}/{part}" for part in disk.list(epoch)]
    return rows_of(names, disk.read, where="out")["n"].to_list()


def below(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.name != MARK_NAME)


def test_a_machine_that_sees_another_directory_writes_no_parts(tmp_path: Path) -> None:
    spec = files(str(tmp_path / "out"), format="jsonl")
    open_sink(spec, STREAM)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    with pytest.raises(
        SinkError, match=r"this machine sees another directory(.|\n)*a directory that all of them share"
    ):
        open_parts(spec, STREAM)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_epoch_in_parts_is_one_directory_named_by_its_number(tmp_path: Path, file_format: str) -> None:
    sink, writer = opened(tmp_path / "out", file_format)
    release(sink, writer, 1, "a", [[1, 2], [], [3]])
    release(sink, writer, 2, "a", [[], []])
    sink.release(3, frame(4))
    assert below(tmp_path / "out") == [
        "epoch-000000000001",
        f"epoch-000000000001/part-000000-a.{file_format}",
        f"epoch-000000000001/part-000002-a.{file_format}",
        f"epoch-000000000003.{file_format}",
    ]
    assert rows(tmp_path / "out")["n"].to_list() == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
@pytest.mark.parametrize("fate", ["crash", "kill"])
def test_power_or_processes_may_go_before_any_change_and_no_epoch_is_lost_torn_or_repeated(
    file_format: str, fate: str
) -> None:
    epochs = {1: [[1, 2], [3]], 2: [[4]], 3: [], 4: [[], [5, 6], [7]]}
    cuts = 0
    for cut_after in range(75):
        for seed in range(4 if fate == "crash" else 1):
            disk = MemoryDisk()
            disk.cut_after = cut_after
            released = 0
            try:
                sink, writer = on_disk(disk, file_format)
                for epoch, parts in epochs.items():
                    writer.write(epoch, "first", 9, frame(99))
                    release(sink, writer, epoch, "first", parts)
                    released = epoch
            except PowerCut:
                cuts += 1
            disk.crash(Random(seed)) if fate == "crash" else disk.kill()
            sink, writer = on_disk(disk, file_format)
            assert not [name for name in disk.list("") if name.startswith(".tmp")]
            before = seen(disk)
            for epoch in range(max(released, 1), 5):
                release(sink, writer, epoch, "second", list(reversed(epochs[epoch])))
            assert sorted(seen(disk)) == [1, 2, 3, 4, 5, 6, 7], (cut_after, seed, before)
            assert not [name for name in disk.list("") if name.startswith(".tmp")]
    assert cuts > 50


def test_an_epoch_found_after_a_kill_is_durable_before_release_returns() -> None:
    fates = []
    for seed in range(20):
        disk = MemoryDisk()
        sink, writer = on_disk(disk)
        part = writer.write(1, "a", 0, frame(1))
        disk.cut_after = disk.changes + 5  # seal, its sync, the part's name, its sync, the epoch's: without its sync
        with pytest.raises(PowerCut):
            sink.release_parts(1, "a", [part])
        assert disk.exists("epoch-000000000001")
        disk.kill()
        release(*on_disk(disk), 1, "b", [[1]])
        disk.crash(Random(seed))
        fates.append(seen(disk))
    assert fates == [[1]] * 20


@pytest.mark.parametrize("operation", ["rename", "remove", "remove_dir"])
@pytest.mark.parametrize("after", range(4))
def test_a_disk_that_refuses_may_be_asked_again_with_the_same_attempt(operation: Any, after: int) -> None:
    disk = MemoryDisk()
    sink, writer = on_disk(disk)
    release(sink, writer, 1, "a", [[1]])
    writer.write(2, "old", 0, frame(9))
    parts = [writer.write(2, "a", number, frame(number)) for number in (2, 3)]
    writer.write(2, "a", 7, frame(9))
    disk.fail_next(operation, "read-only", after=after)
    try:
        sink.release_parts(2, "a", parts)
    except StorageError:
        assert seen(disk) == [1]
        sink.release_parts(2, "a", parts)
    assert seen(disk) == [1, 2, 3]
    on_disk(disk)
    assert list(disk.list("")) == [MARK_NAME, "epoch-000000000001", "epoch-000000000002"]


@pytest.mark.parametrize("operation", ["create", "fsync", "rename", "fsync_dir"])
def test_a_part_that_could_not_be_written_leaves_nothing_and_may_be_written_again(operation: Any) -> None:
    disk = MemoryDisk()
    sink, writer = on_disk(disk)
    fault: Any = {"create": "full", "rename": "read-only"}.get(operation, "sync")
    disk.fail_next(operation, fault)
    with pytest.raises(StorageError):
        writer.write(1, "a", 0, frame(*range(50)))
    assert disk.failures == 1
    if fault == "sync":
        disk.kill()  # after a failed sync the process must stop; another one does its work
    else:
        assert not [name for name in disk.list("") if name.startswith(".tmp-") and not name.startswith(".tmp-epoch-")]
    sink.release_parts(1, "a", [writer.write(1, "a", 0, frame(1))])
    assert seen(disk) == [1]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("file_format", FORMATS)
def test_an_epoch_that_is_there_with_other_rows_is_an_error_and_stays_as_it_is(
    tmp_path: Path, file_format: str, whole: bool
) -> None:
    sink, writer = opened(tmp_path / "out", file_format)
    sink.release(1, frame(1, 2, 2)) if whole else release(sink, writer, 1, "a", [[1], [2, 2]])
    for number, other in enumerate(([[1, 2]], [[1], [2, 3]], [[1], [1], [2]], [[1, 2, 2, 2]], [])):
        with pytest.raises(SinkError, match=r"already has epoch 1 .*other rows"):
            release(sink, writer, 1, f"b{number}", other)
        with pytest.raises(SinkError, match=r"already has epoch 1 .*other rows"):
            sink.release(1, frame(*(value for part in other for value in part)))
    assert rows(tmp_path / "out")["n"].to_list() == [1, 2, 2]
    sink, writer = opened(tmp_path / "out", file_format)
    release(sink, writer, 1, "c", [[2], [2, 1]])
    sink.release(1, frame(2, 1, 2))
    assert len([name for name in below(tmp_path / "out") if "/" not in name]) == 1


def test_a_straggler_cannot_add_to_an_epoch_that_is_being_released() -> None:
    disk = MemoryDisk()
    sink, writer = on_disk(disk)

    def bring(old: str, new: str, *, replace: bool = True) -> None:
        if new == "epoch-000000000001":  # a try that nobody waits for
            writer.write(1, "a", 5, frame(99))
        rename(old, new, replace=replace)

    rename = disk.rename
    part = writer.write(1, "a", 0, frame(1))
    disk.rename = bring  # type: ignore[method-assign]
    sink.release_parts(1, "a", [part])
    assert seen(disk) == [1]


def test_a_try_that_is_overtaken_by_the_release_fails_and_leaves_nothing() -> None:
    disk = MemoryDisk()
    sink, writer = on_disk(disk)
    fsync = disk.fsync
    parts = [writer.write(1, "a", 0, frame(1))]

    def overtaken(path: str) -> None:
        fsync(path)
        disk.fsync = fsync  # type: ignore[method-assign]
        sink.release_parts(1, "a", parts)

    disk.fsync = overtaken  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="part 0 of epoch 1 came too late"):
        writer.write(1, "a", 0, frame(1))
    assert list(disk.list("")) == [MARK_NAME, "epoch-000000000001"]
    assert seen(disk) == [1]


def test_of_two_tries_at_once_one_whole_part_stays() -> None:
    disk = MemoryDisk()
    sink, writer = on_disk(disk)
    rename = disk.rename

    def meanwhile(old: str, new: str, *, replace: bool = True) -> None:
        disk.rename = rename  # type: ignore[method-assign]
        writer.write(1, "a", 0, frame(2, 1))
        rename(old, new, replace=replace)

    disk.rename = meanwhile  # type: ignore[method-assign]
    part = writer.write(1, "a", 0, frame(1, 2))
    sink.release_parts(1, "a", [part])
    assert seen(disk) == [1, 2]


def test_a_part_that_is_gone_is_an_error_that_says_which(tmp_path: Path) -> None:
    sink, writer = opened(tmp_path / "out")
    part = writer.write(1, "a", 3, frame(1))
    opened(tmp_path / "out")  # sweeps
    with pytest.raises(SinkError, match=r"part-000003-a.jsonl of epoch 1 is gone"):
        sink.release_parts(1, "a", [part])
    with pytest.raises(SinkError, match=r"passwd of epoch 1 is gone"):
        sink.release_parts(1, "a", [Part(name="../../etc/passwd", rows=1)])
    assert below(tmp_path / "out") == []


def test_a_writer_sweeps_nothing_and_makes_no_directory(tmp_path: Path) -> None:
    sink, writer = opened(tmp_path / "out")
    part = writer.write(1, "a", 0, frame(1))
    spec = files(str(tmp_path / "out"), format="jsonl")
    other = open_parts(spec, STREAM)
    assert other is not None
    sink.release_parts(1, "a", [part, other.write(1, "a", 1, frame(2))])
    assert rows(tmp_path / "out")["n"].to_list() == [1, 2]
    with pytest.raises(SinkError, match=r"no _stream.json here.*\n.*share"):
        open_parts(files(str(tmp_path / "elsewhere"), format="jsonl"), STREAM)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(SinkError, match="another stream"):
        open_parts(spec, UPSERTS)


def test_an_attempt_with_a_name_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    _, writer = opened(tmp_path / "out")
    for attempt in ("", "../x", "a/b", "a b"):
        with pytest.raises(ValueError, match="attempt"):
            writer.write(1, attempt, 0, frame(1))


@pytest.mark.slow
def test_parts_are_written_by_another_process(tmp_path: Path) -> None:
    sink, _ = opened(tmp_path / "out", "parquet")
    script = (
        "import sys, polars as pl\n"
        "from fordstone.connectors import files\n"
        "from fordstone.connectors.base import SinkStream\n"
        "from fordstone.connectors.registry import open_parts\n"
        "from fordstone.lang.schema import Schema\n"
        "stream = SinkStream(step='results', schema=Schema.of({'device': 'string', 'n': 'bigint'}))\n"
        "writer = open_parts(files(sys.argv[1], format='parquet'), stream)\n"
        "part = writer.write(1, 'a', int(sys.argv[2]), pl.DataFrame({'device': ['x'], 'n': [int(sys.argv[2])]}))\n"
        "print(part.name, part.rows)\n"
    )
    parts = []
    for number in range(2):
        command = [sys.executable, "-c", script, str(tmp_path / "out"), str(number)]
        name, count = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        parts.append(Part(name=name, rows=int(count)))
    sink.release_parts(1, "a", parts)
    assert rows(tmp_path / "out")["n"].to_list() == [0, 1]


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_latest_view_reads_whole_epochs_and_epochs_in_parts(tmp_path: Path, file_format: str) -> None:
    sink, writer = opened(tmp_path / "out", file_format, UPSERTS)

    def changes(*found: tuple[str, int, str]) -> pl.DataFrame:
        return pl.DataFrame(list(found), schema=SCHEMA.polars | {"__op": pl.String}, orient="row")

    sink.release(1, changes(("a", 1, "upsert"), ("b", 1, "upsert"), ("c", 1, "upsert")))
    parts = [
        writer.write(2, "x", 0, changes(("a", 2, "upsert"))),
        writer.write(2, "x", 1, changes(("b", 2, "delete"), ("d", 2, "upsert"))),
    ]
    sink.release_parts(2, "x", parts)
    sink.release(3, changes(("d", 3, "upsert")))
    found = rows(tmp_path / "out")
    assert found.columns == ["device", "n", "__op", "__epoch"]
    assert found["__epoch"].to_list() == [1, 1, 1, 2, 2, 2, 3]
    assert sorted(latest(tmp_path / "out").rows()) == [("a", 2), ("c", 1), ("d", 3)]


def test_released_parts_are_read_by_anybodys_parquet_reader_and_staged_ones_by_nobodys(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sink, writer = opened(out, "parquet")
    sink.release(1, frame(1))
    release(sink, writer, 2, "a", [[2], [3]])
    writer.write(3, "a", 0, frame(99))
    assert sorted(pl.read_parquet(out / "**/*.parquet")["n"].to_list()) == [1, 2, 3]
    assert sorted(pd.read_parquet(out)["n"].tolist()) == [1, 2, 3]
    staged = [name for name in below(out) if not name.startswith("epoch-")]
    assert staged
    # Spark, Hive, Arrow and others leave out names that begin so.
    assert all(name.startswith((".", "_")) for name in staged)
