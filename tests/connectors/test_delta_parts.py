"""Parts of a Delta table: written by tasks, committed once by the sink, and leftovers go."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable, write_deltalake
from polars.testing import assert_frame_equal
from tests.connectors.test_delta import KINDS, SCHEMA, STREAM, UPSERTS, frame, numbers, of_node, opened, seen

from fordstone.connectors import delta
from fordstone.connectors.base import PartedSink, PartWriter, SinkStream
from fordstone.connectors.delta.sink import DeltaSink
from fordstone.connectors.registry import open_parts
from fordstone.errors import FencedError, SinkError
from fordstone.lang.schema import Schema


def parted(path: Path, stream: SinkStream = STREAM) -> tuple[PartedSink, PartWriter]:
    sink, writer = opened(path, stream), open_parts(delta(str(path)), stream)
    assert isinstance(sink, PartedSink)
    assert writer is not None
    return sink, writer


def files(path: Path) -> list[str]:
    """All files of the table but its log."""
    found = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    return sorted(str(file) for file in found if file.parts[0] != "_delta_log")


def test_a_machine_that_sees_another_directory_writes_no_parts(tmp_path: Path) -> None:
    opened(tmp_path / "t", STREAM)
    (tmp_path / "t").rename(tmp_path / "elsewhere")
    with pytest.raises(
        SinkError, match=r"this machine sees another directory(.|\n)*a directory that all of them share"
    ):
        open_parts(delta(str(tmp_path / "t")), STREAM)
    assert not (tmp_path / "t").exists()


def test_every_type_comes_back_as_it_was_from_parts_through_deltalake_and_polars(tmp_path: Path) -> None:
    schema = Schema.of({"key": "int"} | {name: kind for name, (kind, _) in KINDS.items()})
    columns = {"key": [1, 2, 3]} | {name: values for name, (_, values) in KINDS.items()}
    written = pl.DataFrame(columns, schema=schema.polars)
    sink, writer = parted(tmp_path / "t", SinkStream(step="all", schema=schema))
    sink.release_parts(1, "a", [writer.write(1, "a", n, written[n : n + 1]) for n in range(3)])
    assert_frame_equal(seen(tmp_path / "t").sort("key"), written)
    assert_frame_equal(pl.read_delta(str(tmp_path / "t")).sort("key"), written)
    sink.release(1, written)
    sink.release(2, written)
    assert pl.read_delta(str(tmp_path / "t")).height == 6


def test_a_commit_of_parts_says_the_same_as_one_of_rows(tmp_path: Path) -> None:
    sink, writer = parted(tmp_path / "parts")
    sink.release_parts(1, "a", [writer.write(1, "a", 0, frame(3, 1)), writer.write(1, "a", 1, frame(2))])
    opened(tmp_path / "whole").release(1, frame(1, 2, 3))
    one, other = (DeltaTable(tmp_path / name).history(1)[0]["fordstone"] for name in ("parts", "whole"))
    assert one == other


def test_statistics_hold_all_values_and_let_readers_leave_files_out(tmp_path: Path) -> None:
    schema = Schema.of({"n": "bigint", "t": "timestamp", "s": "string", "x": "double"})
    times = [dt.datetime(2026, 1, 1, 0, 0, 0, us, tzinfo=dt.UTC) for us in (1500, 2500)]
    rows = pl.DataFrame({"n": [5, None], "t": times, "s": ["a", "b" * 80], "x": [1.0, 2.0]}, schema=schema.polars)
    sink, writer = parted(tmp_path / "t", SinkStream(step="s", schema=schema))
    sink.release_parts(1, "a", [writer.write(1, "a", 0, rows)])
    actions = (tmp_path / "t" / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    (stats,) = [json.loads(found["add"]["stats"]) for line in actions if "add" in (found := json.loads(line))]
    assert stats == {
        "numRecords": 2,
        "minValues": {"n": 5, "t": "2026-01-01T00:00:00.001Z"},
        "maxValues": {"n": 5, "t": "2026-01-01T00:00:00.003Z"},
        "nullCount": {"n": 1, "t": 0, "s": 0},
    }
    for us in (1500, 2500):
        time = dt.datetime(2026, 1, 1, 0, 0, 0, us, tzinfo=dt.UTC)
        assert pl.scan_delta(str(tmp_path / "t")).filter(pl.col("t") == time).collect().height == 1


@pytest.mark.parametrize(("kind", "stored"), [("timestamp", 253_402_300_800_000_000), ("date", 2_932_897)])
def test_a_time_that_python_has_not_leaves_its_column_without_minimum(tmp_path: Path, kind: str, stored: int) -> None:
    schema = Schema.of({"t": kind, "n": "bigint"})
    rows = pl.DataFrame({"t": [0, stored], "n": [1, 2]}).cast(schema.polars)
    sink, writer = parted(tmp_path / "t", SinkStream(step="s", schema=schema))
    sink.release_parts(1, "a", [writer.write(1, "a", 0, rows)])
    actions = (tmp_path / "t" / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    (stats,) = [json.loads(found["add"]["stats"]) for line in actions if "add" in (found := json.loads(line))]
    assert (stats["minValues"], stats["maxValues"]) == ({"n": 1}, {"n": 2})
    assert_frame_equal(seen(tmp_path / "t"), rows)


def test_a_part_that_two_tries_wrote_counts_once_and_the_other_file_goes(tmp_path: Path) -> None:
    sink, writer = parted(tmp_path / "t")
    writer.write(1, "a", 10_000, frame(1, 2))
    parts = [writer.write(1, "a", 20_000, frame(1, 2)), writer.write(1, "a", 30_000, frame(3))]
    writer.write(1, "given-up", 0, frame(9))
    sink.release_parts(1, "a", parts)
    assert numbers(tmp_path / "t") == [1, 2, 3]
    assert files(tmp_path / "t") == sorted(part.name for part in parts)


def test_a_straggler_changes_nothing_and_its_file_goes_when_the_sink_is_opened(tmp_path: Path) -> None:
    sink, writer = parted(tmp_path / "t")
    part = writer.write(1, "a", 0, frame(1))
    sink.release_parts(1, "a", [part])
    writer.write(1, "a", 0, frame(1))
    sink.release_parts(1, "a", [part])
    writer.write(1, "a", 1, frame(1))
    assert numbers(tmp_path / "t") == [1]
    assert len(files(tmp_path / "t")) == 2
    opened(tmp_path / "t")
    assert files(tmp_path / "t") == [part.name]


@pytest.mark.parametrize("dies_in", ["_moved", "_append_files", "_sync"])
def test_a_crash_between_parts_and_commit_leaves_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    sink, writer = parted(tmp_path / "t")
    parts = [writer.write(1, "a", n, frame(n)) for n in range(3)]
    writer.write(1, "a", 7, frame(99))
    writer.write(1, "b", 0, frame(98))

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaSink, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            sink.release_parts(1, "a", parts)
    again, _ = parted(tmp_path / "t", SinkStream(step="results", schema=SCHEMA, sealed="a"))
    for _ in range(2):
        again.release_parts(1, "a", parts)
    assert numbers(tmp_path / "t") == [0, 1, 2]
    assert files(tmp_path / "t") == sorted(part.name for part in parts)


def test_parts_of_a_crash_before_the_seal_go_when_the_sink_is_opened(tmp_path: Path) -> None:
    _, writer = parted(tmp_path / "t")
    writer.write(1, "a", 0, frame(1))
    assert len(files(tmp_path / "t")) == 1
    opened(tmp_path / "t")
    assert files(tmp_path / "t") == []


def test_other_rows_under_a_known_epoch_are_refused(tmp_path: Path) -> None:
    sink, writer = parted(tmp_path / "t")
    sink.release_parts(1, "a", [writer.write(1, "a", 0, frame(1, 2))])
    for number, other in enumerate((frame(1), frame(1, 3), frame(1, 2, 2))):
        with pytest.raises(SinkError, match=r"already has epoch 1.* other rows"):
            sink.release_parts(1, f"b{number}", [writer.write(1, f"b{number}", 0, other)])
    assert numbers(tmp_path / "t") == [1, 2]


def test_a_commit_of_parts_fails_when_a_newer_generation_takes_over_and_its_files_are_in_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off, writer = parted(tmp_path / "t", of_node("a", 1))
    part = writer.write(1, "a", 0, frame(90))
    plain = DeltaSink._append_files
    successors: list[Any] = []

    def overtaken(self: DeltaSink, *args: Any) -> None:
        if not successors and args[0]:  # a claim, such as that of the successor, commits no files
            successors.append(opened(tmp_path / "t", of_node("a", 2, resumes_after=0)))
        plain(self, *args)

    monkeypatch.setattr(DeltaSink, "_append_files", overtaken)
    with pytest.raises(FencedError, match=r"generation 2\.1"):
        cut_off.release_parts(1, "a", [part])
    # The file stays, because the successor may release the same one; a vacuum removes it.
    assert len(files(tmp_path / "t")) == 1
    successors[0].release(1, frame(1))
    assert numbers(tmp_path / "t") == [1]


def test_rows_with_ids_come_in_parts_too(tmp_path: Path) -> None:
    sink, writer = parted(tmp_path / "t")
    sink.release_parts(1, "a", [writer.write(1, "a", 0, frame(1))])
    ids = frame(2).with_columns(__id=pl.lit("p:0:0"))
    sink.release_parts(2, "b", [writer.write(2, "b", 0, ids)])
    sink.release_parts(3, "c", [writer.write(3, "c", 0, frame(3))])
    assert seen(tmp_path / "t").sort("n")["__id"].to_list() == [None, "p:0:0", None]


def test_upserts_and_tables_at_a_url_have_no_parts(tmp_path: Path) -> None:
    assert open_parts(delta(str(tmp_path / "t")), UPSERTS) is None
    assert open_parts(delta("s3://bucket/table"), STREAM) is None
    sink = opened(tmp_path / "t", UPSERTS)
    assert isinstance(sink, PartedSink)
    assert not sink.takes_parts()
    with pytest.raises(SinkError, match=r"no _delta_log here.*\n.*share"):
        open_parts(delta(str(tmp_path / "elsewhere")), STREAM)
    assert not (tmp_path / "elsewhere").exists()


def test_tables_with_partitions_or_constraints_take_whole_epochs(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "partitions", frame(1), partition_by=["device"])
    DeltaTable.create(tmp_path / "constraint", schema=DeltaTable(tmp_path / "partitions").schema())
    DeltaTable(tmp_path / "constraint").alter.add_constraint({"small": "n < 10"})
    for name in ("partitions", "constraint"):
        sink = opened(tmp_path / name)
        assert isinstance(sink, PartedSink)
        assert not sink.takes_parts()
    assert parted(tmp_path / "plain")[0].takes_parts()


def test_a_constraint_that_comes_after_the_parts_is_checked(tmp_path: Path) -> None:
    sink, writer = parted(tmp_path / "t")
    good, bad = writer.write(1, "a", 0, frame(1)), writer.write(2, "b", 0, frame(50))
    DeltaTable(tmp_path / "t").alter.add_constraint({"small": "n < 10"})
    sink.release_parts(1, "a", [good])
    with pytest.raises(SinkError, match="could not write"):
        sink.release_parts(2, "b", [bad])
    assert numbers(tmp_path / "t") == [1]
