from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from decimal import Decimal
from unittest.mock import Mock

import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import types as t

from fordstone.epochs import untrusted
from fordstone.epochs.run_file import COMPRESSIONS, Compression, encode_run
from fordstone.epochs.untrusted import decode_untrusted
from fordstone.errors import NodeQuarantinedError, RejectedRunError, SchemaError
from fordstone.spark.formats import rows as hub_rows
from fordstone.spark.formats.rows import (
    RunRows,
    arrow_columns,
    decode_rows,
    plain_type,
    record_batches,
    spark_columns,
    stored_columns,
)
from fordstone.spark.formats.source import HubStreamReader, RunShare
from fordstone.state.base import RunRef

EVERY = pl.DataFrame(
    {
        "b": [True, None, False],
        "i8": pl.Series([-128, None, 127], dtype=pl.Int8),
        "i16": pl.Series([1, None, -1], dtype=pl.Int16),
        "i32": pl.Series([1, None, -1], dtype=pl.Int32),
        "i64": [2**63 - 1, None, -(2**63)],
        "f32": pl.Series([0.1, None, float("nan")], dtype=pl.Float32),
        "f64": [float("nan"), None, -0.0],
        "s": ["ä", None, ""],
        "bin": [b"\x00", None, b""],
        "d": [dt.date(1969, 12, 31), None, dt.date(2024, 2, 29)],
        "ts": pl.Series([-1, None, 2**50]).cast(pl.Datetime("us", "UTC")),
        "dec": pl.Series([Decimal("-1.50"), None, Decimal("99999999.99")], dtype=pl.Decimal(10, 2)),
        "arr": [["x", None], None, []],
        "nested": [[[1.5], None], [], None],
        "decs": pl.Series([[Decimal("0.1")], None, []], dtype=pl.List(pl.Decimal(38, 1))),
    }
)

NESTED = pl.DataFrame(
    {
        "id": [1, 2, 3, 4],
        "place": [{"room": "a", "at": [{"x": 1.5, "y": None}, None]}, {"room": None, "at": []}, None, {"room": "", "at": None}],
        "limits": [{"low": {"value": -1, "since": dt.date(2024, 2, 29)}, "high": None}, {}, {"": {"value": None, "since": None}}, None],
        "faults": [[{"code": 7, "tags": {"a": ["x", None]}}, None], [], None, [{"code": None, "tags": {}}]],
    },
    schema={
        "id": pl.Int64(),
        "place": pl.Struct({"room": pl.String(), "at": pl.List(pl.Struct({"x": pl.Float64(), "y": pl.Float64()}))}),
        "limits": pl.Map(pl.String(), pl.Struct({"value": pl.Int64(), "since": pl.Date()})),
        "faults": pl.List(pl.Struct({"code": pl.Int64(), "tags": pl.Map(pl.String(), pl.List(pl.String()))})),
    },
)  # fmt: skip
"""Structs, maps and arrays of structs, with nulls at every level."""
NESTED_TYPES = (
    "struct<id:bigint,place:struct<room:string,at:array<struct<x:double,y:double>>>,"
    "limits:map<string,struct<value:bigint,since:date>>,"
    "faults:array<struct<code:bigint,tags:map<string,array<string>>>>>"
)


def run(frame: pl.DataFrame, compression: Compression = "lz4", **constants: object) -> RunRows:
    values = {name: pa.scalar(value) for name, value in constants.items()}
    ref, data = encode_run(frame, compression)
    stored = decode_untrusted(bytes(data), ref)
    return RunRows(frame=stored, where="epoch 1 of node a", constants=values)


def columns_of(frame: pl.DataFrame) -> t.StructType:
    ref, data = encode_run(frame, "lz4")
    return spark_columns(stored_columns(bytes(data), ref))


def arrow_of(frame: pl.DataFrame) -> pa.Schema:
    return arrow_columns(columns_of(frame))


def decoded(frame: pl.DataFrame, target: pa.Schema, **constants: object) -> list[pa.RecordBatch]:
    """The batches of a run of which only the target's columns are decoded."""
    ref, data = encode_run(frame, "lz4")
    values = {name: pa.scalar(value) for name, value in constants.items()}
    return list(
        record_batches([decode_rows(bytes(data), ref, target, where="epoch 1 of node a", constants=values)], target)
    )


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_type_comes_out_as_it_went_in_nulls_and_nans_included(compression):
    target = arrow_of(EVERY)
    (batch,) = record_batches([run(EVERY, compression)], target)
    assert batch.schema.equals(target)
    back = pl.DataFrame(batch)
    assert back.equals(EVERY)
    assert [math.isnan(value) for value in (back["f64"][0], back["f32"][2])] == [True, True]
    assert math.copysign(1, back["f64"][2]) == -1


def test_sparks_types_are_those_of_the_schema():
    columns = columns_of(EVERY)
    assert [field.dataType.simpleString() for field in columns] == [
        "boolean",
        "tinyint",
        "smallint",
        "int",
        "bigint",
        "float",
        "double",
        "string",
        "binary",
        "date",
        "timestamp",
        "decimal(10,2)",
        "array<string>",
        "array<array<double>>",
        "array<decimal(38,1)>",
    ]


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        (pa.string_view(), pa.string()),
        (pa.large_string(), pa.string()),
        (pa.binary_view(), pa.binary()),
        (pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("us", "UTC")),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.large_list(pa.string_view()), pa.list_(pa.string())),
        (pa.struct([("a", pa.uint64())]), pa.struct([("a", pa.decimal128(20, 0))])),
        (pa.uint32(), pa.int64()),
    ],
)
def test_what_spark_does_not_take_has_a_plain_type(stored, plain):
    assert plain_type(stored) == plain


def test_large_unsigned_numbers_are_values_to_spark():
    frame = pl.DataFrame({"u": pl.Series([2**64 - 1, None], dtype=pl.UInt64)})
    (batch,) = record_batches([run(frame)], arrow_of(frame))
    assert batch.to_pylist() == [{"u": Decimal(2**64 - 1)}, {"u": None}]


def test_small_runs_are_joined_and_large_ones_cut(monkeypatch):
    monkeypatch.setattr(hub_rows, "BATCH_ROWS_MIN", 100)
    monkeypatch.setattr(hub_rows, "BATCH_ROWS_MAX", 200)
    frames = [
        pl.DataFrame({"x": range(start, start + rows)}) for start, rows in [(0, 10), (10, 60), (70, 50), (120, 900)]
    ]
    batches = list(record_batches([run(frame) for frame in frames], arrow_of(frames[0])))
    assert [value for batch in batches for value in batch.column(0).to_pylist()] == list(range(1020))
    assert all(100 <= batch.num_rows <= 200 for batch in batches)


def test_runs_that_wait_to_be_joined_take_little_memory(monkeypatch):
    """A task reads thousands of epochs with a few rows each, and a batch alone takes kilobytes."""
    monkeypatch.setattr(hub_rows, "SMALL_BATCHES_MAX", 10)
    target = pa.schema([("x", pa.int64()), ("_epoch", pa.int64())])
    one, before, taken = run(pl.DataFrame({"x": [1]}), _epoch=1), pa.total_allocated_bytes(), list[int]()

    def runs() -> Iterator[RunRows]:
        for _ in range(1_000):
            taken.append(pa.total_allocated_bytes() - before)
            yield one

    (batch,) = record_batches(runs(), target)
    assert batch.num_rows == 1_000
    assert max(taken) < 1_000 * 32, "a buffer of each run takes 64 bytes at least"


def test_columns_of_the_run_itself_stand_beside_its_rows():
    target = pa.schema([("x", pa.int64()), ("_node", pa.string()), ("_epoch", pa.int64())])
    runs = [run(pl.DataFrame({"x": [1]}), _node="a", _epoch=1), run(pl.DataFrame({"x": [2, 3]}), _node="b", _epoch=7)]
    (batch,) = record_batches(runs, target)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [(1, "a", 1), (2, "b", 7), (3, "b", 7)]


def test_a_query_may_read_some_columns_in_another_order_or_none_at_all():
    frame = pl.DataFrame({"a": [1, 2], "b": ["x", "y"], "c": [0.5, None]})
    (some,) = decoded(frame, pa.schema([("c", pa.float64()), ("a", pa.int64())]))
    assert some.to_pylist() == [{"c": 0.5, "a": 1}, {"c": None, "a": 2}]
    (none,) = decoded(frame, pa.schema([("_epoch", pa.int64())]), _epoch=4)
    assert none.column(0).to_pylist() == [4, 4]


def test_a_column_that_a_run_lacks_is_named_with_those_it_has():
    with pytest.raises(SchemaError, match=r"epoch 1 of node a has no column 'y'; it has x"):
        decoded(pl.DataFrame({"x": [1]}), pa.schema([("y", pa.int64())]))


def test_a_value_that_does_not_fit_the_querys_type_is_an_error_and_not_another_value():
    wider = pa.schema([("x", pa.int64())])
    (batch,) = record_batches([run(pl.DataFrame({"x": pl.Series([1], dtype=pl.Int32)}))], wider)
    assert batch.column(0).to_pylist() == [1]
    with pytest.raises(SchemaError, match="column 'x' of epoch 1 of node a"):
        list(record_batches([run(pl.DataFrame({"x": [2**40]}))], pa.schema([("x", pa.int32())])))


def test_bytes_that_are_no_arrow_are_refused():
    ref = RunRef(digest="0" * 64, size_bytes=16, rows=1)
    with pytest.raises(RejectedRunError, match=r"epoch 1 of node a: run 0+… is rejected: it is not Arrow IPC"):
        decode_rows(b"sixteen bytes ..", ref, pa.schema([("x", pa.int64())]), where="epoch 1 of node a", constants={})


def test_forged_text_is_rejected_before_it_reaches_arrow():
    _, whole = encode_run(pl.DataFrame({"x": ["a text longer than a view holds"]}), "none")
    data = bytes(whole).replace(b"text longer", b"\xff" * 11)
    assert data != bytes(whole)
    ref = RunRef(digest="0" * 64, size_bytes=len(data), rows=1)
    with pytest.raises(RejectedRunError, match=r"epoch 1 of node a: run 0+… is rejected: it cannot be decoded"):
        decode_rows(data, ref, pa.schema([("x", pa.string())]), where="epoch 1 of node a", constants={})


def test_one_run_that_an_epoch_names_often_may_become_no_more_than_an_epoch_may(monkeypatch):
    monkeypatch.setattr(untrusted, "EPOCH_BYTES_FREE", 1)
    ref, data = encode_run(pl.DataFrame({"x": pl.repeat(0, 1_000, eager=True)}), "zstd")
    reader, rejected = Mock(), []
    reader.retry = lambda call: call()
    reader.blob = lambda *_: bytes(data)

    def quarantined(error, *_):
        rejected.append((error.node, error.epoch))
        return NodeQuarantinedError(str(error))

    reader.quarantined = quarantined
    setting = Mock(pipeline="p", stream="s", metadata=False, consumer=None, reader=lambda: reader)
    hub = HubStreamReader(setting, t.StructType([t.StructField("x", t.LongType())]))

    def rows(*epochs: int) -> int:
        reads = [("a", epoch, ref) for epoch in epochs]
        return sum(batch.num_rows for batch in hub.read(RunShare(reads, None)))

    assert rows(*range(1, 101)) == 100_000
    with pytest.raises(NodeQuarantinedError, match="the rows of its epoch become more than"):
        rows(*[7] * 100)
    assert rejected == [("a", 7)]


def test_no_rows_are_no_batches():
    assert (
        list(record_batches([run(pl.DataFrame({"x": []}, schema={"x": pl.Int64}))], pa.schema([("x", pa.int64())])))
        == []
    )


def test_the_schema_that_spark_expects_is_the_one_that_is_given():
    schema = t.StructType(
        [t.StructField("x", t.ArrayType(t.DecimalType(38, 1))), t.StructField("t", t.TimestampType())]
    )
    assert arrow_columns(schema).field("t").type == pa.timestamp("us", "UTC")


def test_structs_and_maps_are_those_of_spark():
    columns = columns_of(NESTED)
    assert columns.simpleString() == NESTED_TYPES
    (batch,) = record_batches([run(NESTED)], arrow_columns(columns))
    assert pl.DataFrame(batch).to_dict(as_series=False) == NESTED.to_dict(as_series=False)
