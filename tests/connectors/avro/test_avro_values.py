"""Values of Avro: read and written as fastavro does, and safe whatever bytes come."""

from __future__ import annotations

import datetime as dt
import io
import json
import math
import random
import time
import tracemalloc
from decimal import Decimal
from typing import Any

import fastavro
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fordstone.connectors.avro.decode import Decoder
from fordstone.connectors.avro.encode import Encoder
from fordstone.connectors.avro.schema import AvroSchemaError, parse, schema_of
from fordstone.connectors.registered import MismatchError, UnfitError
from fordstone.lang.schema import DataType, Schema

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def record(**fields: Any) -> str:
    return json.dumps(
        {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}
    )


def written(schema: str, *rows: dict[str, Any]) -> list[bytes]:
    """As another tool writes them."""
    parsed = fastavro.parse_schema(json.loads(schema))
    values = []
    for row in rows:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, parsed, row)
        values.append(buffer.getvalue())
    return values


def read(schema: str, columns: dict[str, str], values: list[bytes], reader: str | None = None) -> list[dict[str, Any]]:
    decoder = Decoder(parse(schema), Schema.of(columns), None if reader is None else parse(reader))
    found = decoder.decode(values)
    assert not found.failed
    return found.frame.to_dicts()


# Types.

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "smallint": st.integers(-(1 << 15), (1 << 15) - 1),
    "int": st.integers(-(1 << 31), (1 << 31) - 1),
    "bigint": st.integers(-(1 << 63), (1 << 63) - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(st.characters(exclude_categories=["Cs"])),
    "binary": st.binary(),
    "date": st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31)),
    "timestamp": st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 1, 1)).map(lambda at: at.replace(tzinfo=dt.UTC)),
    "decimal(9,2)": st.integers(-(10**9) + 1, 10**9 - 1).map(lambda number: Decimal(number).scaleb(-2)),
    "decimal(38,10)": st.integers(-(10**38) + 1, 10**38 - 1).map(lambda number: Decimal(f"{number}E-10")),
}


def _kinds() -> st.SearchStrategy[str]:
    plain = st.sampled_from(sorted(_VALUES))
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            inner.map(lambda one: f"array<{one}>"),
            inner.map(lambda one: f"map<string, {one}>"),
            st.tuples(inner, inner).map(lambda two: f"struct<a: {two[0]}, b: {two[1]}>"),
        ),
        max_leaves=5,
    )


def _value(kind: DataType) -> st.SearchStrategy[Any]:
    if kind.element is not None:
        found: st.SearchStrategy[Any] = st.lists(_value(kind.element), max_size=4)
    elif kind.name == "map":
        found = st.dictionaries(_VALUES["string"], _value(kind.field("value")), max_size=3)
    elif kind.name == "struct":
        found = st.fixed_dictionaries({name: _value(part) for name, part in kind.fields})
    else:
        found = _VALUES[str(kind)]
    return st.none() | found


@st.composite
def tables(draw: st.DrawFn) -> tuple[Schema, list[dict[str, Any]]]:
    kinds = draw(st.lists(_kinds(), min_size=1, max_size=4))
    schema = Schema.of({f"c{number}": kind for number, kind in enumerate(kinds)})
    row = st.fixed_dictionaries({name: _value(kind) for name, kind in schema.items()})
    return schema, draw(st.lists(row, max_size=6))


@settings(deadline=None)
@given(tables())
def test_rows_come_back_and_fastavro_reads_and_writes_the_same_bytes(table: tuple[Schema, list[dict[str, Any]]]):
    schema, rows = table
    text = schema_of(schema, "rows")
    frame = pl.DataFrame(rows, schema=schema.polars)
    values = Encoder(parse(text), schema).encode(frame)
    found = Decoder(parse(text), schema).decode(values)
    assert not found.failed
    assert found.frame.equals(frame)
    parsed = fastavro.parse_schema(json.loads(text))
    theirs = [fastavro.schemaless_reader(io.BytesIO(value), parsed) for value in values]
    assert pl.DataFrame(theirs, schema=schema.polars).equals(frame)
    assert Decoder(parse(text), schema).decode(written(text, *frame.to_dicts())).frame.equals(frame)


def test_many_rows_are_read_as_few_are():
    kinds = {"n": "bigint", "l": "array<struct<a: string, b: array<int>>>", "m": "map<string, bigint>"}
    drawn = random.Random(3)
    rows = [
        {
            "n": drawn.choice([None, drawn.randrange(-(1 << 40), 1 << 40)]),
            "l": [
                {"a": "x" * drawn.randrange(4), "b": list(range(drawn.randrange(5)))} for _ in range(drawn.randrange(4))
            ],
            "m": {f"k{number}": number for number in range(drawn.randrange(3))},
        }
        for _ in range(2_000)
    ]
    text = schema_of(Schema.of(kinds), "rows")
    values = written(text, *rows)
    assert read(text, kinds, values) == rows
    assert [row for value in values[:50] for row in read(text, kinds, [value])] == rows[:50]
    assert read(text, {"n": "bigint"}, values) == [{"n": row["n"]} for row in rows]  # the others are passed


def test_an_array_may_come_in_blocks_with_their_sizes():
    text = record(l={"type": "array", "items": "int"}, n="int")
    value = bytes([3, 4, 2, 4, 2, 6, 0, 14])  # two items in a block of two bytes, one more, the end
    values = [value] * 1_000
    assert read(text, {"l": "array<int>", "n": "int"}, values) == [{"l": [1, 2, 3], "n": 7}] * 1_000
    assert read(text, {"n": "int"}, values[:1]) == [{"n": 7}]


@pytest.mark.parametrize(
    ("kind", "value", "column", "wanted"),
    [
        ("int", 7, "bigint", 7),
        ("int", 7, "float", 7.0),
        ("int", 7, "tinyint", 7),
        ("long", 7, "double", 7.0),
        ("float", 0.5, "double", 0.5),
        ("string", "ä", "binary", "ä".encode()),
        ("bytes", "ä".encode(), "string", "ä"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "string", "B"),
        ({"type": "fixed", "name": "F", "size": 2}, b"ab", "binary", b"ab"),
        ({"type": "long", "logicalType": "timestamp-millis"}, 1_500, "timestamp", EPOCH + dt.timedelta(seconds=1.5)),
        ({"type": "long", "logicalType": "timestamp-micros"}, 1_500, "timestamp", EPOCH + dt.timedelta(microseconds=1500)),
        ({"type": "long", "logicalType": "timestamp-micros"}, 1_500, "bigint", 1_500),
        ({"type": "int", "logicalType": "date"}, 1, "date", dt.date(1970, 1, 2)),
        ({"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}, b"\x01\x00", "decimal(9,3)", Decimal("2.560")),
        ({"type": "fixed", "name": "D", "size": 20, "logicalType": "decimal", "precision": 6, "scale": 2}, b"\xff" * 20, "decimal(6,2)", Decimal("-0.01")),
        (["null", "int", "long"], 1 << 40, "bigint", 1 << 40),
        (["null", "long"], None, "bigint", None),
        ("null", None, "string", None),
    ],
)  # fmt: skip
def test_a_type_is_read_as_one_that_it_promotes_to(kind: Any, value: Any, column: str, wanted: Any):
    plain = json.loads(json.dumps(kind).replace("logicalType", "noLogicalType"))
    values = written(record(a=plain), {"a": value})
    assert read(record(a=kind), {"a": column}, values) == [{"a": wanted}]


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("long", "int"),
        ("string", "bigint"),
        ("double", "bigint"),
        ("long", "timestamp"),
        ("double", "float"),
        ({"type": "array", "items": "int"}, "int"),
        ({"type": "array", "items": "string"}, "array<int>"),
        ({"type": "map", "values": "string"}, "map<string, int>"),
        (["null", "string"], "int"),
        ({"type": "long", "logicalType": "time-micros"}, "timestamp"),
    ],
)
def test_types_that_do_not_go_together_are_named(kind: Any, column: str):
    with pytest.raises(MismatchError, match=r"^a.* cannot be read as"):
        Decoder(parse(record(a=kind)), Schema.of({"a": column}))


def test_a_branch_that_does_not_fit_fails_its_values_alone():
    text = record(a=["long", "string"])
    values = written(text, {"a": 1}, {"a": "x"}, {"a": 2})
    found = Decoder(parse(text), Schema.of({"a": "bigint"})).decode(values)
    assert found.frame.get_column("a").to_list() == [1, 2]
    assert found.good.tolist() == [0, 2]
    assert found.failed == {1: "a is string, which cannot be read as bigint"}


def test_numbers_that_do_not_fit_fail():
    values = written(record(a="long"), {"a": 5}, {"a": 1 << 35}, {"a": -200})
    tiny = Decoder(parse(record(a="int")), Schema.of({"a": "tinyint"})).decode(values)
    assert tiny.frame.get_column("a").to_list() == [5]
    assert set(tiny.failed) == {1, 2}
    millis = {"type": "long", "logicalType": "timestamp-millis"}
    values = written(record(a="long"), {"a": 1 << 62})
    assert Decoder(parse(record(a=millis)), Schema.of({"a": "timestamp"})).decode(values).failed == {
        0: "a time is out of range"
    }


# Changes of schemas.


def test_a_new_field_is_passed_and_a_removed_one_is_null():
    values = written(record(id="long", extra={"type": "map", "values": "string"}), {"id": 1, "extra": {"a": "b"}})
    text = record(id="long", extra={"type": "map", "values": "string"})
    assert read(text, {"id": "bigint", "gone": "string"}, values) == [{"id": 1, "gone": None}]


def test_a_removed_field_has_the_default_of_the_given_schema_and_an_old_name_is_found_by_its_alias():
    old = record(id="long", place="string")
    reader = json.dumps(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "id", "type": "long"},
                {"name": "city", "type": "string", "aliases": ["place"]},
                {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1}, "default": "\u0015"},
                {"name": "tags", "type": {"type": "array", "items": "string"}, "default": ["x"]},
                {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 1000},
            ],
        }
    )  # fmt: skip
    columns = {"id": "bigint", "city": "string", "price": "decimal(4,1)", "tags": "array<string>", "at": "timestamp"}
    values = written(old, {"id": 1, "place": "Ulm"}, {"id": 2, "place": "Jena"})
    found = read(old, columns, values, reader)
    late = EPOCH + dt.timedelta(seconds=1)
    assert found[1] == {"id": 2, "city": "Jena", "price": Decimal("2.1"), "tags": ["x"], "at": late}
    with pytest.raises(MismatchError, match="id is missing, and the schema of R given with schema= has no default"):
        Decoder(parse(record(other="int")), Schema.of({"id": "bigint"}), parse(reader))


def test_a_writer_that_renames_a_field_with_an_alias_is_still_read_by_the_old_name():
    text = json.dumps(
        {"type": "record", "name": "R", "fields": [{"name": "city", "type": "string", "aliases": ["place"]}]}
    )
    assert read(text, {"place": "string"}, written(text, {"city": "Ulm"})) == [{"place": "Ulm"}]


# Writing.


def test_rows_are_written_by_a_schema_that_is_given():
    text = json.dumps(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "note", "type": ["string", "null"], "default": "x"},
                {"name": "id", "type": "long"},
                {"name": "state", "type": {"type": "enum", "name": "S", "symbols": ["OFF", "ON"]}},
                {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
                {"name": "temp", "type": ["null", "double"], "default": None},
                {"name": "price", "type": {"type": "fixed", "name": "P", "size": 5, "logicalType": "decimal", "precision": 9, "scale": 3}},
            ],
        }
    )  # fmt: skip
    schema = Schema.of({"id": "int", "state": "string", "at": "timestamp", "price": "decimal(6,2)"})
    rows = [{"id": 3, "state": "ON", "at": EPOCH + dt.timedelta(seconds=2), "price": Decimal("-1.25")}]
    values = Encoder(parse(text), schema).encode(pl.DataFrame(rows, schema=schema.polars))
    parsed = fastavro.parse_schema(json.loads(text))
    assert fastavro.schemaless_reader(io.BytesIO(values[0]), parsed) == {
        "note": None, "id": 3, "state": "ON", "at": EPOCH + dt.timedelta(seconds=2), "temp": None, "price": Decimal("-1.250")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "column", "reason"),
    [
        ("int", "bigint", "a is int in the schema, and the column is bigint"),
        ("string", "bigint", "a is string in the schema"),
        ({"type": "array", "items": "int"}, "array<string>", r"a\[\] is int in the schema"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 1}, "decimal(9,2)", "a is bytes"),
    ],
)
def test_columns_that_a_schema_has_no_place_for_are_named(kind: Any, column: str, reason: str):
    with pytest.raises(UnfitError, match=reason):
        Encoder(parse(record(a=kind)), Schema.of({"a": column}))
    with pytest.raises(UnfitError, match="b has no field in R"):
        Encoder(parse(record(a="int")), Schema.of({"a": "int", "b": "int"}))
    with pytest.raises(UnfitError, match="field b has no column, and may not be null"):
        Encoder(parse(record(a="int", b="int")), Schema.of({"a": "int"}))


@pytest.mark.parametrize(
    ("kind", "column", "value", "reason"),
    [
        ("long", "bigint", None, "a is null in a row, and long in the schema"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "string", "B", "a is 'B' in a row, which is no symbol of E"),
        ({"type": "fixed", "name": "F", "size": 2}, "binary", b"abc", "a has another length than 2 bytes"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 2}, "decimal(9,2)", Decimal("10.00"), "a is 10.00 in a row"),
    ],
)  # fmt: skip
def test_a_row_that_a_schema_has_no_value_for_is_an_error(kind: Any, column: str, value: Any, reason: str):
    schema = Schema.of({"a": column})
    with pytest.raises(ValueError, match=reason):
        Encoder(parse(record(a=kind)), schema).encode(pl.DataFrame({"a": [value]}, schema=schema.polars))


def test_names_that_avro_does_not_allow_are_an_error():
    with pytest.raises(AvroSchemaError, match=r"s\.first name is no name for a field of Avro"):
        schema_of(Schema.of({"s": "struct<`first name`: int>"}), "rows")


# Schemas from elsewhere.


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ('{"type": "record", "name": "R", "fields": [{"name": "a", "type": "R"}]}', "contains itself"),
        ('{"type": "record", "name": "R", "fields": [{"name": "a", "type": "S"}]}', "no type 'S'"),
        ('{"type": "record", "name": "R"}', "no fields"),
        ('{"type": "fixed", "name": "F", "size": 99999999999}', "size over"),
        ('["int", ["null"]]', "none of them is a union"),
        ("[" * 500 + "]" * 500, "union|deep"),
        ("[" * 100_000, "not JSON|deep"),
        ("7", "a type is missing"),
        ('{"type": "record", "name": "R R", "fields": []}', "is no name"),
    ],
)
def test_what_is_no_schema_says_why(text: str, reason: str):
    with pytest.raises(AvroSchemaError, match=reason):
        parse(text)


def test_a_schema_whose_values_would_have_endless_parts_is_refused():
    inner: Any = {"type": "record", "name": "R0", "fields": [{"name": "a", "type": "null"}]}
    for number in range(1, 40):  # 2**40 fields
        fields = [{"name": "a", "type": inner}, {"name": "b", "type": f"R{number - 1}"}]
        inner = {"type": "record", "name": f"R{number}", "fields": fields}
    with pytest.raises(AvroSchemaError, match="parts"):
        parse(json.dumps(inner))


# Bytes from elsewhere.

CHAIN = json.dumps(
    {
        "type": "record",
        "name": "Node",
        "fields": [
            {"name": "n", "type": "long"},
            {"name": "next", "type": ["null", "Node"]},
            {"name": "all", "type": {"type": "array", "items": "Node"}},
        ],
    }
)
WIDE = record(
    s="string",
    l={"type": "array", "items": {"type": "array", "items": "null"}},
    m={"type": "map", "values": ["null", "long", "bytes"]},
    d={"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 3},
    e={"type": "enum", "name": "E", "symbols": ["A"]},
    b="boolean",
    f={"type": "fixed", "name": "F", "size": 3},
)
WIDE_COLUMNS = {"s": "string", "l": "array<array<string>>", "m": "map<string, bigint>", "d": "decimal(38,3)", "e": "string", "b": "boolean", "f": "binary"}  # fmt: skip


def long(value: int) -> bytes:
    found = bytearray()
    left = (value << 1) ^ (value >> 63)
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def _cpu_s(run: Any) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


@pytest.mark.parametrize("count", [1, 1_000])
@pytest.mark.parametrize(
    ("schema", "columns", "value"),
    [
        (WIDE, WIDE_COLUMNS, b""),
        (WIDE, WIDE_COLUMNS, long(1 << 62)),
        (WIDE, WIDE_COLUMNS, long(-5)),
        (WIDE, WIDE_COLUMNS, b"\xff" * 40),
        (WIDE, WIDE_COLUMNS, long(0) + long(1 << 60)),
        (WIDE, WIDE_COLUMNS, long(0) + long(-(1 << 63))),
        (WIDE, WIDE_COLUMNS, long(0) + long(1) + long(100_000_000) + long(0) * 8),
        (record(a={"type": "array", "items": "null"}), {"a": "array<string>"}, long(1 << 40) + long(0)),
        (record(a={"type": "array", "items": "null"}), {"a": "array<string>"}, long(100) * 60 + long(0)),
        (record(a={"type": "array", "items": "null"}, n="int"), {"n": "int"}, long(1 << 40) + long(0) + long(1)),
        (record(a="string"), {"a": "string"}, long(3) + b"a\xffb"),
        (record(a="string"), {"a": "string"}, long(1) + b"ab"),
        (CHAIN, {"n": "bigint"}, (long(1) + long(1)) * 5_000),
        (CHAIN, {"n": "bigint"}, (long(1) + long(0) + long(1)) * 5_000),
        (CHAIN, {"n": "bigint", "next": "struct<n: bigint, next: struct<n: bigint>>"}, (long(1) + long(1)) * 500),
    ],
)  # fmt: skip
def test_bytes_that_are_no_value_fail_and_take_no_other_with_them(
    schema: str, columns: dict[str, str], value: bytes, count: int
):
    decoder = Decoder(parse(schema), Schema.of(columns))
    tracemalloc.start()
    found = decoder.decode([value] * count)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(found.failed) == list(range(count))
    assert all(found.failed.values())
    assert found.frame.schema == Schema.of(columns).polars
    assert found.frame.height == 0
    assert most < 1_000_000 + 100 * count * (len(value) + 100)


def test_a_value_of_many_megabytes_costs_what_its_bytes_cost():
    count = 400_000
    strings = long(count) + (long(1) + b"x") * count + long(0)
    longs = long(count) + long(1) * count + long(0)
    text = record(a={"type": "array", "items": "string"}, b={"type": "array", "items": "long"})
    decoder = Decoder(parse(text), Schema.of({"a": "array<string>", "b": "array<bigint>"}))
    found = decoder.decode([strings + longs])
    assert found.frame.get_column("a").list.len().to_list() == [count]
    assert found.frame.get_column("b").list.sum().to_list() == [count]
    assert _cpu_s(lambda: decoder.decode([strings + longs])) < 60


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8), st.sampled_from([(WIDE, WIDE_COLUMNS), (CHAIN, {"n": "bigint"})]))
def test_what_becomes_of_a_value_does_not_depend_on_the_others(
    values: list[bytes], given_schema: tuple[str, dict[str, str]]
):
    text, columns = given_schema
    good = written(text, {"n": 1, "next": None, "all": [], "s": "x", "l": [[]], "m": {"a": 7}, "d": b"\1", "e": "A", "b": True, "f": b"abc"})  # fmt: skip
    values = [*values, *good, *values]
    decoder = Decoder(parse(text), Schema.of(columns))
    together = decoder.decode(values)
    rows = dict(zip(together.good.tolist(), together.frame.rows(), strict=True))
    assert sorted([*rows, *together.failed]) == list(range(len(values)))
    for number, value in enumerate(values):
        alone = decoder.decode([value])
        assert alone.failed.get(0) == together.failed.get(number)
        assert alone.frame.rows() == ([rows[number]] if number in rows else [])


@settings(deadline=None)
@given(st.data())
def test_a_value_that_is_damaged_is_read_as_fastavro_reads_it_or_fails(data: st.DataObject):
    value = bytearray(written(WIDE, {"s": "abc", "l": [[None], []], "m": {"a": 7, "b": None}, "d": b"\1", "e": "A", "b": True, "f": b"abc"})[0])  # fmt: skip
    for _ in range(data.draw(st.integers(0, 2))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(value[: data.draw(st.integers(0, len(value)))])
    found = Decoder(parse(WIDE), Schema.of(WIDE_COLUMNS)).decode([damaged])
    if not found.failed:
        buffer = io.BytesIO(damaged)
        theirs: Any = fastavro.schemaless_reader(buffer, fastavro.parse_schema(json.loads(WIDE)))
        assert buffer.tell() == len(damaged)
        row = found.frame.row(0, named=True)
        assert (row["s"], row["e"], row["b"], row["f"]) == (theirs["s"], theirs["e"], theirs["b"], theirs["f"])
        assert row["l"] == theirs["l"]
        assert {key: one for key, one in theirs["m"].items() if not isinstance(one, bytes)} == row["m"]


def test_nan_and_infinities_come_back():
    schema = Schema.of({"a": "double", "b": "float"})
    rows = pl.DataFrame({"a": [math.nan, math.inf], "b": [-math.inf, math.nan]}, schema=schema.polars)
    text = schema_of(schema, "rows")
    found = Decoder(parse(text), schema).decode(Encoder(parse(text), schema).encode(rows))
    assert found.frame.equals(rows)
