"""A directory of output files: whole epochs or nothing, once, whatever happens in between."""

from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from fordstone.connectors import files, latest, rows
from fordstone.connectors.base import Sink, SinkStream, SourceOptions, options_of
from fordstone.connectors.files.rows import MARK_NAME, latest_of, rows_of
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.files.sink import FileSink
from fordstone.connectors.registry import open_sink, open_source
from fordstone.errors import ConfigError, FordstoneError, SchemaError, SinkError, StorageError
from fordstone.lang.schema import Schema
from fordstone.testing.contracts.connector import read_all
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

SCHEMA = Schema.of({"device": "string", "n": "bigint"})
STREAM = SinkStream(step="results", schema=SCHEMA)
UPSERTS = SinkStream(step="results", schema=SCHEMA, upsert_key=("device",))
FORMATS = ["jsonl", "csv", "parquet", "arrow"]


def frame(*numbers: int, **more: Any) -> pl.DataFrame:
    base = pl.DataFrame({"device": [f"d{number % 3}" for number in numbers], "n": list(numbers)}, schema=SCHEMA.polars)
    return base.with_columns(**{name: pl.lit(value) for name, value in more.items()})


def opened(path: Path, file_format: str = "jsonl", stream: SinkStream = STREAM, **options: Any) -> Sink:
    return open_sink(files(str(path), format=file_format, **options), stream)


def on_disk(disk: MemoryDisk, file_format: str, stream: SinkStream = STREAM) -> FileSink:
    return FileSink(options_of(files("out", format=file_format), FileSettings), stream, disk)


def seen(disk: MemoryDisk) -> list[int]:
    return rows_of(disk.list(""), disk.read, where="out")["n"].to_list()


def test_no_name_of_unfinished_work_ends_as_output_does() -> None:
    for file_format in FORMATS:
        disk = MemoryDisk()
        sink = on_disk(disk, file_format)
        disk.cut_after = disk.changes + 2  # create, fsync: the rename is missing
        with pytest.raises(PowerCut):
            sink.release(1, frame(1))
        assert [name for name in disk.list("") if name.startswith(".tmp-")]
        assert not [name for name in disk.list("") if name.endswith(file_format)]


def visible(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if not file.name.startswith((".", "_")))


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_epoch_is_one_file_named_by_its_number(tmp_path: Path, file_format: str) -> None:
    sink = opened(tmp_path / "out", file_format)
    sink.release(1, frame(1, 2))
    sink.release(2, frame())
    sink.release(1_000_000, frame(3))
    assert visible(tmp_path / "out") == [f"epoch-000000000001.{file_format}", f"epoch-000001000000.{file_format}"]


def test_an_epoch_that_is_there_with_other_rows_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    for file_format in FORMATS:
        sink = opened(tmp_path / file_format, file_format)
        sink.release(1, frame(1, 2))
        for other in (frame(1, 3), frame(1), frame()):
            with pytest.raises(SinkError, match=r"already has epoch 1 .* other rows"):
                sink.release(1, other)
        assert rows(tmp_path / file_format)["n"].to_list() == [1, 2]


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_epoch_that_was_computed_again_may_come_in_another_order(tmp_path: Path, file_format: str) -> None:
    sink = opened(tmp_path / "out", file_format)
    sink.release(1, frame(1, 2, 2, 3))
    sink.release(1, frame(2, 3, 1, 2))
    with pytest.raises(SinkError, match="other rows"):
        sink.release(1, frame(1, 2, 3, 3))
    assert rows(tmp_path / "out")["n"].to_list() == [1, 2, 2, 3]


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_an_epoch_is_recognised_by_its_rows_not_by_its_bytes(tmp_path: Path, file_format: str) -> None:
    opened(tmp_path / "out", file_format, compression="none").release(1, frame(*range(50)))
    opened(tmp_path / "out", file_format, compression="zstd").release(1, frame(*range(50)))
    assert rows(tmp_path / "out").height == 50


@pytest.mark.slow
@pytest.mark.parametrize("file_format", FORMATS)
def test_power_may_go_before_any_change_and_no_epoch_is_lost_torn_or_repeated(file_format: str) -> None:
    epochs = {1: frame(1, 2), 2: frame(3), 3: frame(), 4: frame(4, 5, 6)}
    cuts = 0
    for cut_after in range(60):
        for seed in range(4):
            disk = MemoryDisk()
            disk.cut_after = cut_after
            released = 0
            try:
                sink = on_disk(disk, file_format)
                for epoch, part in epochs.items():
                    sink.release(epoch, part)
                    released = epoch
            except PowerCut:
                cuts += 1
            disk.crash(Random(seed))
            sink = on_disk(disk, file_format)
            assert not [name for name in disk.list("") if name.startswith(".tmp")]
            for epoch in range(max(released, 1), 5):
                sink.release(epoch, epochs[epoch])
            assert seen(disk) == [1, 2, 3, 4, 5, 6]
    assert cuts > 20


def test_an_epoch_found_after_a_kill_is_durable_before_release_returns() -> None:
    fates = []
    for seed in range(20):
        disk = MemoryDisk()
        sink = on_disk(disk, "jsonl")
        disk.cut_after = disk.changes + 3  # create, fsync, rename: only the directory's sync is missing
        with pytest.raises(PowerCut):
            sink.release(1, frame(1))
        disk.kill()
        on_disk(disk, "jsonl").release(1, frame(1))
        disk.crash(Random(seed))
        fates.append(seen(disk))
    assert fates == [[1]] * 20


@pytest.mark.parametrize("file_format", FORMATS)
def test_rows_released_at_once_survive_a_power_cut_when_write_has_returned(file_format: str) -> None:
    cuts = 0
    for cut_after in range(40):
        disk = MemoryDisk()
        disk.cut_after = cut_after
        written: list[int] = []
        try:
            sink = on_disk(disk, file_format)
            for number in range(5):
                sink.write(frame(number, number + 100))
                written += [number, number + 100]
        except PowerCut:
            cuts += 1
        disk.crash(Random(cut_after))
        on_disk(disk, file_format).write(frame(999))
        found = seen(disk)
        assert found[: len(written)] == written
        assert found[-1] == 999
    assert cuts > 10


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("operation", ["create", "fsync", "rename"])
def test_a_disk_that_refuses_leaves_no_part_of_an_epoch_visible(file_format: str, operation: Any) -> None:
    disk = MemoryDisk()
    sink = on_disk(disk, file_format)
    sink.release(1, frame(1))
    disk.fail_next(operation, {"create": "full", "fsync": "sync", "rename": "read-only"}[operation])  # type: ignore[arg-type]
    with pytest.raises(StorageError):
        sink.release(2, frame(*range(100)))
    assert disk.failures == 1
    assert seen(disk) == [1]
    if operation != "fsync":  # after a failed sync the process must stop
        sink.release(2, frame(2))
        assert seen(disk) == [1, 2]
        assert not [name for name in disk.list("") if name.startswith(".tmp")]


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("first", [True, False])
def test_a_full_disk_while_rows_are_released_tears_no_later_row(file_format: str, first: bool) -> None:
    disk = MemoryDisk()
    sink = on_disk(disk, file_format)
    sink.write(frame(1, 2)) if not first else sink._claimed()
    disk.fail_next("create" if first or file_format in {"parquet", "arrow"} else "append", "full")
    with pytest.raises(StorageError):
        sink.write(frame(*range(10, 60)))
    assert disk.failures == 1
    sink.write(frame(3))
    found = seen(disk)
    assert found[-1] == 3
    if file_format in {"parquet", "arrow"}:
        assert found == ([3] if first else [1, 2, 3])


def test_what_a_crash_left_half_done_is_removed_when_the_sink_is_opened(tmp_path: Path) -> None:
    sink = opened(tmp_path / "out")
    (tmp_path / "out" / ".tmp-epoch-000000000001.jsonl").write_text("half")
    sink = opened(tmp_path / "out")
    assert not (tmp_path / "out" / ".tmp-epoch-000000000001.jsonl").exists()
    sink.release(1, frame(1))
    assert rows(tmp_path / "out")["n"].to_list() == [1]


def test_a_torn_last_line_is_not_read_back(tmp_path: Path) -> None:
    for file_format in ("jsonl", "csv"):
        sink = opened(tmp_path / file_format, file_format)
        sink.write(pl.DataFrame({"device": ["two\nlines"], "n": [1]}))
        (file,) = (tmp_path / file_format).glob("rows-*")
        whole = file.read_bytes()
        for length in range(len(whole)):
            record = whole if file_format == "jsonl" else whole.partition(b"\n")[2]
            file.write_bytes(whole + record[: length % len(record)])
            assert rows(tmp_path / file_format)["n"].to_list() == [1], length


@pytest.mark.parametrize("file_format", FORMATS)
def test_two_sinks_of_one_directory_do_not_write_over_each_other(tmp_path: Path, file_format: str) -> None:
    first, second = opened(tmp_path / "out", file_format), opened(tmp_path / "out", file_format)
    for number in range(3):
        first.write(frame(number))
        second.write(frame(number + 10))
    assert sorted(rows(tmp_path / "out")["n"].to_list()) == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_type_comes_back_as_it_was(tmp_path: Path, file_format: str) -> None:
    kinds = {
        "t": "boolean", "a": "tinyint", "b": "smallint", "c": "int", "d": "bigint", "e": "float", "f": "double",
        "g": "string", "h": "binary", "i": "date", "j": "timestamp", "k": "decimal(20,3)",
    }  # fmt: skip
    if file_format != "csv":
        kinds["l"] = "array<bigint>"
    schema = Schema.of(kinds)
    import datetime as dt

    values: dict[str, list[Any]] = {
        "t": [True, False, None],
        "a": [-128, 127, None],
        "b": [-32768, 32767, None],
        "c": [-(2**31), 2**31 - 1, None],
        "d": [-(2**63), 2**63 - 1, None],
        "e": [0.1, -1.5e38, None],
        "f": [0.1, 5e-324, None],
        "g": ['a"b,c\nd\r\ne\té\x00\U0001f9ca', "", None],
        "h": [b"\x00\xff\n", b"", None],
        "i": [dt.date(1, 1, 1), dt.date(9999, 12, 31), None],
        "j": [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC), None],
        "k": [Decimal("-99999999999999999.999"), Decimal("0.001"), None],
        "l": [[1, None], [], None],
    }
    written = pl.DataFrame({name: values[name] for name in kinds}, schema=schema.polars)
    sink = opened(tmp_path / "out", file_format, SinkStream(step="all", schema=schema))
    sink.release(1, written)
    sink.write(written)
    sink.close()
    assert_frame_equal(rows(tmp_path / "out"), pl.concat([written, written]))


NAN, INF = float("nan"), float("inf")
NOT_IN_JSON = {
    "x": ("double", [NAN, INF, -INF, None, 1.5, 1e300]),
    "f": ("float", [0.1, NAN, INF, -INF, None, 3e38]),
    "l": ("array<double>", [[NAN, None, 1.0], [], None, [INF], [-INF, -INF], [0.0]]),
    "s": ("struct<a: float, b: string>", [{"a": NAN, "b": "NaN"}, None, {"a": -INF, "b": None}, *[{"a": 1.0, "b": '"Infinity"'}] * 3]),
    "m": ("map<string, array<double>>", [{"NaN": [NAN]}, {}, None, {"k": [INF, 1.0], "l": [-INF]}, {"k": []}, {"k": None}]),
    "t": ("string", ["NaN", "Infinity", '{"x":NaN}', None, "-Infinity", ""]),
}  # fmt: skip


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("column", [*NOT_IN_JSON, "all"])
def test_numbers_that_json_does_not_have_are_read_back_as_they_were(
    tmp_path: Path, file_format: str, column: str
) -> None:
    chosen = NOT_IN_JSON if column == "all" else {column: NOT_IN_JSON[column], "n": ("int", list(range(6)))}
    schema = Schema.of({name: kind for name, (kind, _) in chosen.items()})
    written = pl.DataFrame({name: values for name, (_, values) in chosen.items()}, schema=schema.polars)
    sink = opened(tmp_path / "out", file_format, SinkStream(step="x", schema=schema))
    sink.release(1, written)
    sink.write(written)
    sink.close()
    assert_frame_equal(rows(tmp_path / "out"), pl.concat([written, written]))
    source = open_source(
        files(str(tmp_path / f"out/*.{file_format}"), format=file_format), SourceOptions(schema=schema, bounded=True)
    )
    for partition in source.partitions():
        assert_frame_equal(read_all(source, partition, schema).rows, written)


@pytest.mark.parametrize("far_us", [253_402_300_800_000_000, -62_135_596_800_000_001, 2**63 - 1])
@pytest.mark.parametrize("file_format", ["jsonl", "csv"])
def test_a_time_that_no_reader_of_text_takes_is_null_in_it(tmp_path: Path, file_format: str, far_us: int) -> None:
    kinds = {"n": "int", "at": "timestamp", "day": "date"}
    if file_format == "jsonl":
        kinds |= {"l": "array<timestamp>", "s": "struct<at: timestamp>", "m": "map<string, timestamp>"}
    schema = Schema.of(kinds)
    far, near = (pl.Series([us], dtype=pl.Int64).cast(pl.Datetime("us", "UTC")) for us in (far_us, 0))

    def frame(at: pl.Series, day: int) -> pl.DataFrame:
        made = {
            "n": pl.Series([1]),
            "at": at,
            "day": pl.Series([day], dtype=pl.Int32).cast(pl.Date),
            "l": at.to_frame("x").select(pl.concat_list("x")).to_series(),
            "s": at.to_frame("at").to_struct(),
            "m": pl.DataFrame({"l": [[{"key": "k"}]], "at": at})
            .select(pl.concat_list(pl.struct(key=pl.lit("k"), value="at")).list.to_map())
            .to_series(),
        }
        return pl.DataFrame({name: made[name] for name in kinds}).cast(pl.Schema(schema.polars))

    sink = opened(tmp_path / "out", file_format, SinkStream(step="all", schema=schema))
    for _ in range(2):
        sink.release(1, pl.concat([frame(far, 2**31 - 1), frame(near, 0)]))
    sink.close()
    read = rows(tmp_path / "out")
    assert read.slice(1).equals(frame(near, 0))
    nested = {"l": [None], "s": {"at": None}, "m": {"k": None}} if file_format == "jsonl" else {}
    assert read.row(0, named=True) == {"n": 1, "at": None, "day": None, **nested}


def test_json_lines_have_the_words_that_spark_writes(tmp_path: Path) -> None:
    schema = Schema.of({"x": "double", "l": "array<float>"})
    sink = opened(tmp_path / "out", "jsonl", SinkStream(step="x", schema=schema))
    sink.release(1, pl.DataFrame({"x": [NAN, INF, -INF, None], "l": [[NAN, 0.5], [], None, [-INF]]}))
    assert (tmp_path / "out" / "epoch-000000000001.jsonl").read_text().splitlines() == [
        '{"x":"NaN","l":["NaN",0.5]}',
        '{"x":"Infinity","l":[]}',
        '{"x":"-Infinity","l":null}',
        '{"x":null,"l":["-Infinity"]}',
    ]


@pytest.mark.parametrize("file_format", FORMATS)
def test_keys_that_are_no_finite_numbers_stay_apart(tmp_path: Path, file_format: str) -> None:
    schema = Schema.of({"k": "double", "n": "bigint"})
    sink = opened(tmp_path / "out", file_format, SinkStream(step="x", schema=schema, upsert_key=("k",)))
    keys = [NAN, None, 1.0, INF, -INF]
    for epoch in (1, 2):
        sink.release(epoch, pl.DataFrame({"k": keys, "n": [epoch * 10 + number for number in range(5)]}))
    found = latest(tmp_path / "out").sort("n")
    assert [str(key) for key in found["k"].to_list()] == ["nan", "None", "1.0", "inf", "-inf"]
    assert found["n"].to_list() == [20, 21, 22, 23, 24]


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_latest_view_follows_a_model(tmp_path: Path, file_format: str) -> None:
    rng = Random(5)
    model: dict[str, int] = {}
    sink = opened(tmp_path / "out", file_format, UPSERTS)
    for epoch in range(1, 30):
        changes = []
        for _ in range(rng.randint(0, 5)):
            key, value = f"d{rng.randint(0, 4)}", rng.randint(0, 1000)
            if key in model and rng.random() < 0.4:
                changes.append((key, model.pop(key), "delete"))
            else:
                model[key] = value
                changes.append((key, value, "upsert"))
        sink.release(epoch, pl.DataFrame(changes, schema=SCHEMA.polars | {"__op": pl.String}, orient="row"))
    view = latest(tmp_path / "out")
    assert view.schema == SCHEMA.polars
    assert dict(view.sort("device").iter_rows()) == dict(sorted(model.items()))
    changes_seen = rows(tmp_path / "out")
    assert changes_seen.columns == ["device", "n", "__op", "__epoch"]
    assert changes_seen["__epoch"].is_sorted()


def test_the_latest_view_counts_what_was_released_at_once_and_null_keys() -> None:
    disk = MemoryDisk()
    sink = on_disk(disk, "jsonl", UPSERTS)
    sink.release(1, pl.DataFrame({"device": [None, "a"], "n": [1, 2]}, schema=SCHEMA.polars))
    sink.write(
        pl.DataFrame({"device": [None], "n": [3], "__op": ["upsert"]}, schema=SCHEMA.polars | {"__op": pl.String})
    )
    assert latest_of(disk.list(""), disk.read, where="out").rows() == [("a", 2), (None, 3)]


def test_a_view_of_rows_that_are_only_appended_is_an_error(tmp_path: Path) -> None:
    opened(tmp_path / "out")
    with pytest.raises(SinkError, match="no changelog"):
        latest(tmp_path / "out")
    assert rows(tmp_path / "out").schema == SCHEMA.polars
    with pytest.raises(SinkError, match=MARK_NAME):
        rows(tmp_path)
    with pytest.raises(SinkError, match="No such file"):
        rows(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("stream", "file_format", "says"),
    [
        (UPSERTS, "jsonl", "upsert_key"),
        (STREAM, "parquet", "format"),
        (SinkStream(step="results", schema=Schema.of({"device": "string", "n": "int"})), "jsonl", "columns"),
        (SinkStream(step="results", schema=Schema.of({"n": "bigint", "device": "string"})), "jsonl", "columns"),
    ],
)
def test_a_directory_with_the_output_of_another_stream_is_refused(
    tmp_path: Path, stream: SinkStream, file_format: str, says: str
) -> None:
    opened(tmp_path / "out")
    with pytest.raises(SinkError, match=f"another stream.*{says}"):
        opened(tmp_path / "out", file_format, stream)


def test_a_directory_whose_mark_is_gone_or_damaged_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "out").release(1, frame(1))
    mark = tmp_path / "out" / MARK_NAME
    content = mark.read_bytes()
    mark.write_bytes(content[:20])
    with pytest.raises(SinkError, match="cannot be read"):
        opened(tmp_path / "out")
    mark.write_bytes(msgspec.json.encode({**msgspec.json.decode(content), "version": 99}))
    with pytest.raises(SinkError, match="version 99"):
        opened(tmp_path / "out")
    mark.unlink()
    with pytest.raises(SinkError, match=f"no {MARK_NAME}"):
        opened(tmp_path / "out")


def test_a_damaged_output_file_is_named_when_it_is_read_back(tmp_path: Path) -> None:
    for file_format in ("jsonl", "parquet", "arrow"):
        sink = opened(tmp_path / file_format, file_format)
        sink.release(1, frame(1, 2, 3))
        (file,) = (tmp_path / file_format).glob("epoch-*")
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(SinkError, match="epoch-000000000001"):
            rows(tmp_path / file_format)


@pytest.mark.parametrize(
    ("spec", "schema", "error"),
    [
        (files("out"), SCHEMA, ConfigError),
        (files("out/*.jsonl", format="jsonl"), SCHEMA, ConfigError),
        (files("out", format="csv"), Schema.of({"x": "string", "l": "array<int>"}), SchemaError),
        (files("out", format="csv"), Schema.of({"x": "string"}), SinkError),
        (files("out", format="jsonl"), Schema.of({"x": "array<binary>"}), SchemaError),
    ],
)
def test_what_a_format_cannot_hold_is_an_error_when_the_sink_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Any, schema: Schema, error: type[FordstoneError]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=r"(?i)csv|json|format|pattern"):
        open_sink(spec, SinkStream(step="s", schema=schema))
    assert not any((tmp_path / "out").glob("epoch*")) if (tmp_path / "out").exists() else True


def test_rows_without_a_declared_column_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="without column 'n'"):
        opened(tmp_path / "out").release(1, pl.DataFrame({"device": ["a"]}))


def test_columns_that_were_not_declared_are_left_out_and_ids_are_kept(tmp_path: Path) -> None:
    sink = opened(tmp_path / "out", "csv")
    sink.write(frame(1, extra="x", __id="p:0:0"))
    sink.write(frame(2, __id="p:1:0"))
    sink.write(frame(3))
    assert rows(tmp_path / "out").rows() == [("d1", 1, "p:0:0"), ("d2", 2, "p:1:0"), ("d0", 3, None)]
    assert len(visible(tmp_path / "out")) == 2
