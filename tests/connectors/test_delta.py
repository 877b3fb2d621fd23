"""Delta tables: an epoch is one commit, made once, also with other writers; keys and types are kept exactly."""

import datetime as dt
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import polars as pl
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from polars.testing import assert_frame_equal

from fordstone import Pipeline
from fordstone.connectors import delta, generator
from fordstone.connectors.base import Sink, SinkStream
from fordstone.connectors.delta.sink import COMMIT_TRIES_MAX, DeltaSink
from fordstone.connectors.registry import open_sink, sink_delivery
from fordstone.errors import ConfigError, FencedError, SinkError
from fordstone.lang.schema import Schema
from fordstone.protocol.lease import Fence

SCHEMA = Schema.of({"device": "string", "n": "bigint"})
STREAM = SinkStream(step="results", schema=SCHEMA)
UPSERTS = SinkStream(step="results", schema=SCHEMA, upsert_key=("device",))


def opened(path: Path, stream: SinkStream = STREAM, app: str | None = None) -> Sink:
    return open_sink(delta(str(path), app=app), stream)


def frame(*numbers: int) -> pl.DataFrame:
    return pl.DataFrame({"device": [f"d{number % 3}" for number in numbers], "n": list(numbers)}, schema=SCHEMA.polars)


def changes(*found: tuple[Any, int, str]) -> pl.DataFrame:
    return pl.DataFrame(list(found), schema=SCHEMA.polars | {"__op": pl.String}, orient="row")


def seen(path: Path) -> pl.DataFrame:
    return pl.DataFrame(DeltaTable(path).scan())


def numbers(path: Path) -> list[int]:
    return sorted(seen(path)["n"].to_list())


def between(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object], times: int = 1) -> list[int]:
    """Let somebody else do something after the sink has looked at the table and before it commits."""
    left = [times]
    for name in ("_append", "_merge"):
        plain = getattr(DeltaSink, name)

        def overtaken(self: DeltaSink, *args: Any, plain: Any = plain) -> None:
            if left[0]:
                left[0] -= 1
                meanwhile()
            plain(self, *args)

        monkeypatch.setattr(DeltaSink, name, overtaken)
    return left


# Once


def test_an_epoch_that_comes_again_makes_no_commit(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t")
    sink.release(1, frame(1, 2))
    sink.release(2, frame())
    sink.release(3, frame(3))
    version = DeltaTable(tmp_path / "t").version()
    for again in (sink, opened(tmp_path / "t")):
        again.release(3, frame(3))
        again.release(3, frame(3).reverse())
    assert DeltaTable(tmp_path / "t").version() == version == 2
    assert numbers(tmp_path / "t") == [1, 2, 3]


@pytest.mark.parametrize("other", [frame(1, 3), frame(1), frame(1, 2, 2), frame()])
def test_an_epoch_that_is_there_with_other_rows_is_an_error_that_names_the_way_out(
    tmp_path: Path, other: pl.DataFrame
) -> None:
    opened(tmp_path / "t").release(1, frame(1, 2))
    with pytest.raises(SinkError, match=r"(?s)already has epoch 1 of 'results', with other rows.*app="):
        opened(tmp_path / "t").release(1, other)
    assert numbers(tmp_path / "t") == [1, 2]


def test_two_pipelines_with_the_same_name_for_their_sinks_do_not_skip_each_other_in_silence(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "t"), opened(tmp_path / "t")
    one.release(1, frame(1))
    other.release(2, frame(2))
    one.release(3, frame(3))
    with pytest.raises(SinkError, match=r"already has epoch 3.* other rows"):
        other.release(3, frame(4))
    other.release(9, frame(9))
    with pytest.raises(SinkError, match=r"(?s)already has epoch 9.*rows of epoch 4 were not written.*app="):
        one.release(4, frame(5))
    one.release(4, frame())
    assert numbers(tmp_path / "t") == [1, 2, 3, 9]


def test_two_pipelines_with_names_of_their_own_share_a_table(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "t", app="one"), opened(tmp_path / "t", app="other")
    for epoch in (1, 2):
        for _ in range(2):
            one.release(epoch, frame(epoch))
            other.release(epoch, frame(epoch + 10))
    assert numbers(tmp_path / "t") == [1, 2, 11, 12]


def test_an_epoch_that_was_computed_again_may_have_other_floats_in_another_order(tmp_path: Path) -> None:
    schema = Schema.of({"k": "string", "x": "double", "l": "array<double>"})
    sink = opened(tmp_path / "t", SinkStream(step="s", schema=schema))
    rows = pl.DataFrame({"k": ["a", "b", None], "x": [0.1 + 0.2, None, math.nan], "l": [[0.3], [], None]})
    sink.release(1, rows)
    sink.release(1, rows.reverse().with_columns(x=pl.col("x") - 1e-15))
    with pytest.raises(SinkError, match="other rows"):
        sink.release(1, rows.with_columns(k=pl.lit("a")))
    assert seen(tmp_path / "t").height == 3


def test_an_epoch_whose_history_was_cleaned_away_is_known_by_its_number(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t")
    sink.release(1, frame(1))
    sink.release(2, frame(2))
    DeltaTable(tmp_path / "t").create_checkpoint()
    for version in (0, 1):
        (tmp_path / "t" / "_delta_log" / f"{version:020d}.json").unlink()
    os.truncate(tmp_path / "t" / "_delta_log" / f"{2:020d}.json", 0)
    opened(tmp_path / "t").release(2, frame(2))
    assert numbers(tmp_path / "t") == [1, 2]


def test_a_commit_that_power_left_empty_is_made_again(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t")
    sink.release(1, frame(1))
    sink.release(2, frame(2))
    os.truncate(tmp_path / "t" / "_delta_log" / f"{2:020d}.json", 0)
    opened(tmp_path / "t").release(2, frame(2))
    assert numbers(tmp_path / "t") == [1, 2]


def test_a_data_file_that_power_left_short_is_reported_when_the_table_is_opened(tmp_path: Path) -> None:
    opened(tmp_path / "t").release(1, frame(1))
    (file,) = (tmp_path / "t").glob("*.parquet")
    os.truncate(file, 3)
    with pytest.raises(SinkError, match=rf"damaged: {file.name} has 3 bytes, and version 1 says.*\n.*version 0"):
        opened(tmp_path / "t")


@pytest.mark.slow
def test_what_was_released_is_synced_data_and_log_and_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path / "t")
    synced: set[str] = set()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for epoch in range(1, 101):
        sink.release(epoch, frame(epoch))
    table = tmp_path / "t"
    files = {str(file) for file in table.rglob("*") if not file.name.startswith(f"{0:020d}")}
    assert any(file.endswith(".checkpoint.parquet") for file in files)
    assert files <= synced
    assert str(table) in synced
    synced.clear()
    opened(tmp_path / "t").release(100, frame(100))
    assert f"{table}/_delta_log/{100:020d}.json" in synced


def test_what_stands_in_a_commit_is_the_same_in_every_release(tmp_path: Path) -> None:
    schema = Schema.of({"k": "string", "n": "bigint", "t": "timestamp", "d": "decimal(10,2)", "x": "double"})
    rows = pl.DataFrame(
        {
            "k": ["a", None],
            "n": [1, -5],
            "t": [dt.datetime(2026, 1, 1, tzinfo=dt.UTC), None],
            "d": ["1.25", None],
            "x": [1.5, 2],
        },
        schema_overrides={"d": pl.Decimal(10, 2)},
        strict=False,
    )
    opened(tmp_path / "t", SinkStream(step="s", schema=schema, upsert_key=("k",))).release(7, rows)
    table = DeltaTable(tmp_path / "t")
    assert msgspec.json.decode(table.history(1)[0]["fordstone"]) == {
        "app": "s",
        "epoch": 7,
        "rows": 2,
        "digest": "617e2eee12fab782",
        "bits": "706ffba4efac7546",
        "writer": {"pipeline": "", "node": "", "holder": "", "start": "", "hub": 0, "local": 0},
    }
    assert table.transaction_version("s") == 7
    assert table.metadata().configuration == {"fordstone.key": '["k"]'}


# Others who write


@pytest.mark.parametrize("stream", [STREAM, UPSERTS])
def test_rows_that_another_brings_meanwhile_are_kept_and_the_epoch_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: SinkStream
) -> None:
    sink = opened(tmp_path / "t", stream)
    sink.release(1, frame(1, 2))
    other = DeltaTable(tmp_path / "t")
    between(monkeypatch, lambda: write_deltalake(other, frame(100), mode="append"), times=2)
    sink.release(2, frame(4, 5))
    # Appending does not mind. A merge is made again, twice, and replaces what has come with its key.
    assert numbers(tmp_path / "t") == ([1, 2, 4, 5, 100] if stream is STREAM else [4, 4, 4, 5])
    assert DeltaTable(tmp_path / "t").transaction_version("results") == 2


def test_a_table_that_is_compacted_meanwhile_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = opened(tmp_path / "t", UPSERTS)
    for epoch in range(1, 5):
        sink.release(epoch, changes((f"k{epoch}", epoch, "upsert"), (None, epoch, "upsert")))

    def tidy() -> None:
        table = DeltaTable(tmp_path / "t")
        write_deltalake(table, changes(("x", 7, "upsert")).drop("__op"), mode="append")
        table.optimize.compact()

    between(monkeypatch, tidy)
    sink.release(5, changes(("k1", 50, "upsert"), (None, 50, "delete")))
    wanted = {"k1": 50, "k2": 2, "k3": 3, "k4": 4, "x": 7}
    assert dict(seen(tmp_path / "t").iter_rows()) == wanted


@pytest.mark.parametrize("stream", [STREAM, UPSERTS])
def test_a_twin_that_commits_the_same_epoch_first_is_found_and_nothing_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: SinkStream
) -> None:
    sink, twin = opened(tmp_path / "t", stream), opened(tmp_path / "t", stream)
    left = between(monkeypatch, lambda: twin.release(1, frame(1, 2)))
    sink.release(1, frame(1, 2))
    assert left == [0]
    assert numbers(tmp_path / "t") == [1, 2]
    assert DeltaTable(tmp_path / "t").version() == 1


def test_a_stranger_that_commits_the_same_epoch_first_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, stranger = opened(tmp_path / "t"), opened(tmp_path / "t")
    between(monkeypatch, lambda: stranger.release(1, frame(5)))
    with pytest.raises(SinkError, match=r"already has epoch 1.* other rows"):
        sink.release(1, frame(1, 2))
    assert numbers(tmp_path / "t") == [5]


def test_tries_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = opened(tmp_path / "t", UPSERTS)
    sink.release(1, frame(1))
    left = between(monkeypatch, lambda: write_deltalake(tmp_path / "t", frame(100), mode="append"), times=1000)
    with pytest.raises(SinkError, match=rf"{COMMIT_TRIES_MAX} commits in a row"):
        sink.release(2, frame(2))
    assert 1000 - left[0] == COMMIT_TRIES_MAX
    assert DeltaTable(tmp_path / "t").transaction_version("results") == 1


def test_a_table_that_is_altered_meanwhile_is_reported(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t")
    sink.release(1, frame(1))
    other = Schema.of({"device": "string", "n": "bigint", "more": "int"})
    write_deltalake(tmp_path / "t", pl.DataFrame(schema=other.polars), mode="append", schema_mode="merge")
    with pytest.raises(SinkError, match="column 'more', which the stream has not"):
        sink.release(2, frame(2))


def test_two_sinks_may_make_the_table_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = DeltaTable.create
    made: list[str] = []

    def quicker(*args: Any, **kwargs: Any) -> DeltaTable:
        if not made:
            made.append("once")
            create(*args, **kwargs)
        return create(*args, **kwargs)

    monkeypatch.setattr(DeltaTable, "create", quicker)
    opened(tmp_path / "t").release(1, frame(1))
    assert made
    assert numbers(tmp_path / "t") == [1]


# Types and keys


KINDS: dict[str, tuple[str, Sequence[Any]]] = {
    "t": ("boolean", [True, False, None]),
    "a": ("tinyint", [-128, 127, None]),
    "b": ("smallint", [-32768, 32767, None]),
    "c": ("int", [-(2**31), 2**31 - 1, None]),
    "d": ("bigint", [-(2**63), 2**63 - 1, None]),
    "e": ("float", [0.1, math.nan, None]),
    "f": ("double", [-0.0, math.nan, None]),
    "g": ("string", ['a"b,c\nd\r\n\x00\U0001f9ca', "", None]),
    "h": ("binary", [b"\x00\xff\n", b"", None]),
    "i": ("date", [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    "j": (
        "timestamp",
        [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC), None],
    ),
    "k": ("decimal(38,3)", [Decimal("-99999999999999999999999999999999999.999"), Decimal("0.001"), None]),
    "l": ("array<bigint>", [[2**63 - 1, None], [], None]),
    "m": ("array<array<timestamp>>", [[[dt.datetime(1969, 12, 31, tzinfo=dt.UTC)], None], [], None]),
}


@pytest.mark.parametrize("upserts", [False, True])
def test_every_type_comes_back_as_it_was(tmp_path: Path, upserts: bool) -> None:
    schema = Schema.of({"Key `\"'. é": "int"} | {name: kind for name, (kind, _) in KINDS.items()})
    key = next(iter(schema))
    written = pl.DataFrame(
        {key: [1, 2, 3]} | {name: values for name, (_, values) in KINDS.items()}, schema=schema.polars
    )
    stream = SinkStream(step="all", schema=schema, upsert_key=(key,) if upserts else None)
    sink = opened(tmp_path / "t", stream)
    sink.release(1, written)
    assert_frame_equal(seen(tmp_path / "t").sort(key), written)
    again = written.with_columns(pl.col(key) + (0 if upserts else 3))
    opened(tmp_path / "t", stream).release(2, again.reverse() if upserts else again)
    assert_frame_equal(seen(tmp_path / "t").sort(key), written if upserts else pl.concat([written, again]))


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
POOLS: dict[str, Sequence[Any]] = {
    "boolean": [True, False, None],
    "bigint": [-(2**63), 2**63 - 1, 2**53, 2**53 + 1, 0, None],
    "float": [0.1, math.nan, math.inf, -math.inf, 0.0, None, 1e-45],
    "double": [0.1, math.nan, math.inf, -math.inf, 0.0, None, 5e-324, 1.7976931348623157e308],
    "string": ["", "a", "a" * 40, "a" * 40 + "b", "\U0010ffff" * 40, "\x00", "'x'", '"', "NULL", None],
    "binary": [b"", b"\x00", b"\xff" * 40, b"\xff" * 41, None],
    "date": [dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1969, 12, 31), None],
    "timestamp": [*(_EPOCH + dt.timedelta(microseconds=us) for us in (-1, 0, 1, 999, 1000, 1001, 1_000_001)), None],
    "decimal(38,1)": [Decimal(10**37 - 1), Decimal("0.1"), Decimal(-(10**37 - 1)), Decimal(10**37 - 2), None],
}


@pytest.mark.parametrize("kind", POOLS)
def test_keys_of_every_type_follow_a_model_null_and_nan_included(tmp_path: Path, kind: str) -> None:
    rng = Random(kind)
    schema = Schema.of({"k": kind, "j": "int", "v": "bigint"})
    sink = opened(tmp_path / "t", SinkStream(step="s", schema=schema, upsert_key=("k", "j")))
    model: dict[tuple[str, int | None], tuple[Any, int | None, int]] = {}
    for epoch in range(1, 13):
        found = []
        for _ in range(rng.randint(1, 6)):
            key, minor, value = rng.choice(POOLS[kind]), rng.choice([0, None]), rng.randint(0, 10**6)
            op = rng.choice(["upsert", "upsert", "delete"])
            found.append((key, minor, value, op))
            model.pop((repr(key), minor), None)
            if op == "upsert":
                model[repr(key), minor] = (key, minor, value)
        sink.release(epoch, pl.DataFrame(found, schema=schema.polars | {"__op": pl.String}, orient="row"))
        wanted = pl.DataFrame(list(model.values()), schema=schema.polars, orient="row")
        assert Counter(map(repr, seen(tmp_path / "t").rows())) == Counter(map(repr, wanted.rows()))


def test_keys_are_equal_as_they_are_in_pipelines(tmp_path: Path) -> None:
    schema = Schema.of({"x": "double", "v": "int"})
    sink = opened(tmp_path / "t", SinkStream(step="s", schema=schema, upsert_key=("x",)))
    for epoch, (one, other) in enumerate([(0.0, math.nan), (-0.0, -math.nan)], start=1):
        sink.release(epoch, pl.DataFrame({"x": [one, other], "v": [epoch, epoch]}, schema=schema.polars))
    assert Counter(map(str, seen(tmp_path / "t").rows())) == Counter(["(0.0, 2)", "(nan, 2)"])


def test_a_stream_whose_key_has_no_columns_has_one_row(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t", SinkStream(step="s", schema=SCHEMA, upsert_key=()))
    for epoch in (1, 2):
        sink.release(epoch, frame(epoch, epoch + 10))
        assert numbers(tmp_path / "t") == [epoch + 10]


def test_a_table_with_partitions_of_its_own_is_kept_in_them(tmp_path: Path) -> None:
    for stream in (STREAM, UPSERTS):
        path = tmp_path / ("upserts" if stream.upsert_key else "appended")
        write_deltalake(path, frame().select("n", "device"), partition_by=["device"])
        sink = opened(path, stream)
        names = [None, "a/b %c", "é=1", "a/b %c"]
        rows = pl.DataFrame({"device": names, "n": [1, 2, 3, 4]}, schema=SCHEMA.polars)
        sink.release(1, rows)
        opened(path, stream).release(1, rows)
        assert numbers(path) == ([1, 2, 3, 4] if stream is STREAM else [1, 3, 4])
        assert len(list(path.glob("device=*"))) == 3


# Tables that do not fit


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (SinkStream(step="r", schema=Schema.of({"device": "string", "n": "int"})), r"'n' is long.*integer \(int\)"),
        (SinkStream(step="r", schema=Schema.of({"device": "string", "n": "array<int>"})), "array<integer>"),
        (SinkStream(step="r", schema=Schema.of({"device": "string", "m": "bigint"})), "no column 'm'"),
        (SinkStream(step="r", schema=Schema.of({"device": "string"})), "column 'n', which the stream has not"),
        (UPSERTS, r'appended, and those of the stream merged by \["device"\]'),
    ],
)
def test_a_table_of_another_shape_is_refused_when_it_is_opened(tmp_path: Path, stream: SinkStream, says: str) -> None:
    opened(tmp_path / "t").release(1, frame(1))
    with pytest.raises(SinkError, match=rf"(?s)cannot take the rows of sink.*{says}.*Choose another table"):
        opened(tmp_path / "t", stream)
    assert numbers(tmp_path / "t") == [1]


def test_a_table_of_somebody_else_in_another_order_is_taken(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", frame(1).select("n", "device"))
    opened(tmp_path / "t").release(1, frame(2))
    opened(tmp_path / "t", UPSERTS, app="upserts").release(1, frame(4))
    assert sorted(seen(tmp_path / "t").select("device", "n").rows()) == [("d1", 4), ("d2", 2)]


def test_what_delta_cannot_hold_is_an_error_when_the_sink_is_opened(tmp_path: Path) -> None:
    for columns, says in (({"a": "bigint", "A": "bigint"}, "differ in case only"), ({"a": "null"}, "no type for")):
        with pytest.raises(SinkError, match=says):
            opened(tmp_path / "t", SinkStream(step="s", schema=Schema.of(columns)))
    with pytest.raises(SinkError, match="key column 'k'"):
        opened(tmp_path / "t", SinkStream(step="s", schema=SCHEMA, upsert_key=("k",)))
    with pytest.raises(SinkError, match="without column 'n'"):
        opened(tmp_path / "t").release(1, pl.DataFrame({"device": ["a"]}))


def test_a_directory_with_other_files_and_a_damaged_table_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SinkError, match=r"is not empty \(it has notes.txt\), and is not a Delta table"):
        opened(tmp_path)
    sink = opened(tmp_path / "t")
    sink.release(1, frame(1))
    os.truncate(tmp_path / "t" / "_delta_log" / f"{1:020d}.json", 30)
    with pytest.raises(SinkError, match="could not open the table"):
        opened(tmp_path / "t")
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(SinkError, match="could not"):
        sink.release(2, frame(2))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: delta(""), "directory"),
        (lambda: delta("file:///t"), "plain path"),
        (lambda: delta("t", app=" "), "app="),
        (lambda: sink_delivery(msgspec.structs.replace(delta("t"), options={"path": "t", "colour": "red"})), "colour"),
    ],
)
def test_options_that_make_no_sense_are_refused_when_the_pipeline_is_built(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_without_the_package_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['deltalake'] = None\n"
        "from fordstone.connectors import delta\n"
        "from fordstone.connectors.base import SinkStream\n"
        "from fordstone.connectors.registry import open_sink, sink_delivery\n"
        "from fordstone.errors import NotInstalledError\n"
        "from fordstone.lang.schema import Schema\n"
        "print(sink_delivery(delta('t')))\n"
        "try: open_sink(delta('t'), SinkStream(step='s', schema=Schema.of({'n': 'int'})))\n"
        "except NotInstalledError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "exactly_once"
    assert "pip install 'fordstone[delta]'" in done.stdout
    assert not (tmp_path / "t").exists()


def test_rows_with_ids_and_rows_without_go_into_one_table(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t")
    sink.release(1, frame(1))
    sink.write(frame(2).with_columns(__id=pl.lit("p:0:0")))
    sink = opened(tmp_path / "t")
    sink.write(frame(3))
    sink.release(2, frame(4))
    assert seen(tmp_path / "t").sort("n")["__id"].to_list() == [None, "p:0:0", None, None]


# With the engine


@pytest.mark.slow
def test_a_pipeline_without_pyarrow_writes_tables(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = sys.modules['pandas'] = None\n"
        "from fordstone import Pipeline\n"
        "from fordstone.connectors import delta, generator\n"
        "p = Pipeline('readings')\n"
        "readings = p.source('readings', generator(rows=100, keys=3), schema={'device': 'string', 'temp': 'double'})\n"
        "readings.sink('all', delta('all'))\n"
        "readings.group_by('device').agg(n='count(*)').sink('totals', delta('totals'))\n"
        "p.run(bounded=True)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=600)
    assert seen(tmp_path / "all").height == 100
    assert seen(tmp_path / "totals")["n"].sum() == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "failpoint", ["sink.before-release:3", "sink.released:2", "sink.released:5", "manifest.renamed:2"]
)
def test_a_pipeline_that_is_killed_around_a_release_goes_on_and_every_row_counts_once(
    tmp_path: Path, failpoint: str
) -> None:
    script = (
        "from fordstone import Pipeline\n"
        "from fordstone.connectors import delta, generator\n"
        "p = Pipeline('readings')\n"
        "source = generator(rows=4000, rate=8000, keys=5)\n"
        "readings = p.source('readings', source, schema={'device': 'string', 'n': 'bigint'})\n"
        "readings.sink('all', delta('all'))\n"
        "readings.group_by('device').agg(n='count(*)').filter('n < 700').sink('totals', delta('totals'))\n"
        "p.run(bounded=True, interval='50ms', state='state')\n"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"FORDSTONE_FAILPOINT": failpoint}
    killed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=600)
    assert killed.returncode == -9, killed.stderr.decode()
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    rows = seen(tmp_path / "all")
    assert rows.height == 4000
    counts = rows.group_by("device").len("n")
    assert Counter(seen(tmp_path / "totals").rows()) == Counter(counts.filter(pl.col("n") < 700).rows())


def test_a_pipeline_that_starts_over_on_an_old_table_says_so(tmp_path: Path) -> None:
    for run, seed in (("first", 1), ("second", 2)):
        p = Pipeline("readings")
        source = p.source("readings", generator(rows=100, seed=seed), schema={"device": "string", "n": "bigint"})
        source.sink("all", delta(str(tmp_path / "t")))
        if run == "first":
            p.run(bounded=True, state=str(tmp_path / run))
        else:
            with pytest.raises(SinkError, match=r"has epoch 1, .*another run"):
                p.run(bounded=True, state=str(tmp_path / run))
    assert seen(tmp_path / "t").height == 100


def test_a_zombie_that_kept_its_handle_cannot_commit_an_epoch_twice(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t")
    stale = DeltaTable(tmp_path / "t")
    sink.release(1, frame(1))
    properties = CommitProperties(app_transactions=[Transaction("results", 1)])
    with pytest.raises(Exception, match="Concurrent transaction"):
        write_deltalake(stale, frame(1), mode="append", commit_properties=properties)
    assert numbers(tmp_path / "t") == [1]


# Nodes, generations, and epochs that come again

READINGS = Schema.of({"w": "bigint", "n": "bigint", "mean": "double", "l": "array<double>", "s": "struct<x: float>"})


def means(*found: float, **more: Any) -> pl.DataFrame:
    rows = {"w": [10] * len(found), "n": [60] * len(found), "mean": list(found)}
    nested = {"l": [[0.5]] * len(found), "s": [{"x": 1.5}] * len(found)}
    return pl.DataFrame(rows | nested | more, schema=READINGS.polars)


def of_node(node: str, hub: int = 0, local: int = 1, **more: Any) -> SinkStream:
    given: dict[str, Any] = {"schema": SCHEMA, "owner": f"state-{node}-{hub}", "start": f"{node}-{hub}-{local}"} | more
    return SinkStream(step="results", pipeline="p", node=node, generation=Fence(hub, local), **given)


def test_two_nodes_write_windows_into_one_table_though_only_floats_differ(tmp_path: Path) -> None:
    """The review's case: of two nodes with equal keys and counts, the second one's rows were dropped."""
    one, other = (opened(tmp_path / "t", of_node(node, schema=READINGS)) for node in ("a", "b"))
    for epoch in (1, 2):
        for _ in range(2):
            one.release(epoch, means(21.5 + epoch))
            other.release(epoch, means(-3.25 - epoch))
    assert sorted(seen(tmp_path / "t")["mean"].to_list()) == [-5.25, -4.25, 22.5, 23.5]
    assert DeltaTable(tmp_path / "t").transaction_version("p/a/results") == 2


@pytest.mark.parametrize("key", [None, ("w",), ("mean",)])
@pytest.mark.parametrize(
    "other",
    [means(-3.25), means(21.5001), means(math.nan), means(21.5, l=[[0.6]]), means(21.5, l=[None]), means(21.5, s=[{"x": 2.5}])],
)  # fmt: skip
def test_an_epoch_that_comes_again_with_other_floats_is_an_error(
    tmp_path: Path, key: tuple[str, ...] | None, other: pl.DataFrame
) -> None:
    stream = SinkStream(step="s", schema=READINGS, upsert_key=key)
    sink = opened(tmp_path / "t", stream)
    sink.release(1, means(21.5))
    with pytest.raises(SinkError, match=r"already has epoch 1.* other rows"):
        sink.release(1, other)
    opened(tmp_path / "t", stream).release(1, means(21.5))
    assert seen(tmp_path / "t")["mean"].to_list() == [21.5]


def test_upserts_that_come_again_may_differ_in_the_last_bits_of_floats(tmp_path: Path) -> None:
    schema = Schema.of({"k": "string", "x": "double"})
    sink = opened(tmp_path / "t", SinkStream(step="s", schema=schema, upsert_key=("k",)))

    def rows(*found: tuple[str | None, float, str]) -> pl.DataFrame:
        return pl.DataFrame(list(found), schema=schema.polars | {"__op": pl.String}, orient="row")

    sink.release(1, rows(("a", 0.1, "upsert"), ("b", 0.2, "upsert"), (None, 0.3, "upsert")))
    last = [(None, 0.30000000000000004, "upsert"), ("b", 0.0, "delete"), ("c", 1e300, "upsert"), ("z", 0.0, "delete")]
    sink.release(2, rows(*last))
    sink.release(2, rows(*((key, number * (1 + 1e-15), op) for key, number, op in reversed(last))))
    for other in ((None, 0.31, "upsert"), (None, 0.3, "delete")):
        with pytest.raises(SinkError, match="other rows"):
            sink.release(2, rows(other, *last[1:]))
    assert dict(seen(tmp_path / "t").rows()) == {"a": 0.1, None: 0.30000000000000004, "c": 1e300}


def test_floats_that_can_no_longer_be_compared_are_an_error(tmp_path: Path) -> None:
    sink = opened(tmp_path / "t", SinkStream(step="s", schema=READINGS))
    sink.release(1, means(21.5))
    table = DeltaTable(tmp_path / "t")
    table.optimize.compact()
    write_deltalake(table, means(0.0), mode="overwrite")
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    sink.release(1, means(21.5))
    with pytest.raises(SinkError, match="earlier version"):
        sink.release(1, means(21.5 + 1e-14))


@pytest.mark.parametrize("key", [None, ("device",)])
def test_a_commit_on_its_way_fails_when_a_newer_generation_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...] | None
) -> None:
    cut_off = opened(tmp_path / "t", of_node("a", 1, upsert_key=key))
    cut_off.release(1, frame(1))
    successors: list[Sink] = []

    def take_over() -> None:
        successors.append(opened(tmp_path / "t", of_node("a", 2, upsert_key=key, resumes_after=1)))

    left = between(monkeypatch, take_over)
    with pytest.raises(FencedError, match=r"generation 2\.1"):
        cut_off.release(2, frame(90))
    assert left == [0]
    successors[0].release(2, frame(2))
    assert numbers(tmp_path / "t") == [1, 2]


def test_a_generation_is_known_as_long_as_the_table_exists(tmp_path: Path) -> None:
    opened(tmp_path / "t", of_node("a", 2)).release(1, frame(1))
    DeltaTable(tmp_path / "t").create_checkpoint()
    for version in range(3):
        os.truncate(tmp_path / "t" / "_delta_log" / f"{version:020d}.json", 0)
    with pytest.raises(FencedError):
        opened(tmp_path / "t", of_node("a", 1, resumes_after=1))
    opened(tmp_path / "t", of_node("a", 3, resumes_after=1)).release(2, frame(2))
    assert numbers(tmp_path / "t") == [1, 2]


def test_a_start_makes_one_commit_without_rows(tmp_path: Path) -> None:
    for local in (1, 2, 3):
        sink = opened(tmp_path / "t", of_node("a", 1, local, owner="same"))
        sink.release(local, frame(local))
        sink.release(local, frame(local))
    assert DeltaTable(tmp_path / "t").version() == 6


def test_later_epochs_of_a_table_that_others_change_are_not_taken_out(tmp_path: Path) -> None:
    for node in ("a", "b", "a"):
        sink = opened(tmp_path / "t", of_node(node))
        sink.release(1, frame(1))
    sink.release(2, frame(2))
    opened(tmp_path / "t", of_node("b", 0, 2)).release(2, frame(12))
    with pytest.raises(SinkError, match=r"(?s)has epoch 2, .* only up to epoch 1.*by hand .*other writers"):
        opened(tmp_path / "t", of_node("a", 0, 2, resumes_after=1, discard_later=True))
    assert numbers(tmp_path / "t") == [1, 1, 2, 12]
    opened(tmp_path / "t", of_node("b", 0, 3, resumes_after=1, discard_later=True)).release(2, frame(22))
    assert numbers(tmp_path / "t") == [1, 1, 2, 22]
