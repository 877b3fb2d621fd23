"""Values of Protobuf: .proto texts, columns that go together with them or do not, and bytes from elsewhere."""

from __future__ import annotations

import datetime as dt
import re
from contextlib import suppress
from decimal import Decimal
from typing import Any

import polars as pl
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from fordstone.connectors.protobuf.messages import ProtobufCodec, _messages, schema_of
from fordstone.connectors.protobuf.text import ProtoError, file_of
from fordstone.connectors.registered import DecodedValues, MismatchError, UnfitError
from fordstone.connectors.schema_registry import RegisteredSchema
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
ORDER = """
syntax = "proto3";
package shop; // orders
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
import "confluent/meta.proto";
option java_package = "com.shop";
/* the first message */
message Order {
  reserved 4, 8 to 9;
  option (a.b) = { c: "}" };
  int64 id = 1 [(confluent.field_meta) = { doc: "the ; number" }, deprecated = true];
  optional string note = 2;
  repeated Item items = 3;
  map<string, Item> by_name = 5;
  oneof paid { string card = 6; Kind kind = 7; }
  google.protobuf.Timestamp at = 10;
  google.protobuf.Int64Value count = 11;
  uint64 big = 12;
  message Item { double price = 1; sint32 n = 2; }
  message Other { string text = 1; }
  enum Kind { option allow_alias = true; NONE = 0; CASH = 1; COINS = 1; }
}
service Shop { rpc Put(Order) returns (stream Order) { option (x) = { y: 1 }; } }
message Second { .shop.Order.Item item = 1; shop.Order.Kind kind = 2; }
"""


def registered(text: str, **references: str) -> RegisteredSchema:
    return RegisteredSchema(id=1, kind="PROTOBUF", text=text, references=references)


def codec(columns: dict[str, str], text: str | None = None, message: str | None = None) -> ProtobufCodec:
    return ProtobufCodec(Schema.of(columns), text, message=message, where="here")


def message(text: str, number: int = 0, **fields: Any) -> bytes:
    """The bytes of a message, as other producers make them."""
    return bytes(GetMessageClass(_messages(file_of(text, {}))[number])(**fields).SerializeToString())


def read(text: str, columns: dict[str, str], values: list[bytes], own: str | None = None) -> DecodedValues:
    return codec(columns, own).reader(registered(text))(values)


def rows(text: str, columns: dict[str, str], values: list[bytes], own: str | None = None) -> list[dict[str, Any]]:
    found = read(text, columns, values, own)
    assert not found.failed
    return found.frame.to_dicts()


def test_fields_are_columns():
    value = message(
        ORDER,
        id=7,
        items=[{"price": 1.5, "n": -2}],
        kind=1,
        at={"seconds": 3, "nanos": 5_000},
        count={"value": 9},
        big=1 << 40,
    )
    columns = {
        "id": "bigint",
        "note": "string",
        "items": "array<struct<price: double, n: int>>",
        "by_name": "map<string, struct<price: double>>",
        "card": "string",
        "kind": "string",
        "at": "timestamp",
        "count": "bigint",
        "big": "bigint",
        "nowhere": "double",
    }
    (row,) = rows(ORDER, columns, [b"\0" + value])
    assert row == {
        "id": 7,
        "note": None,
        "items": [{"price": 1.5, "n": -2}],
        "by_name": {},
        "card": None,
        "kind": "COINS",
        "at": EPOCH + dt.timedelta(seconds=3, microseconds=5),
        "count": 9,
        "big": 1 << 40,
        "nowhere": None,
    }


def test_a_value_says_which_message_of_its_schema_it_is():
    second = message(ORDER, 1, item={"price": 2.5})
    assert rows(ORDER, {"item": "struct<price: double>"}, [bytes([2, 2]) + second]) == [{"item": {"price": 2.5}}]
    item = bytes([4, 0, 0]) + b"\x09" + b"\0" * 6 + b"\xf0\x3f"  # Order.Item
    other = bytes([4, 0, 2]) + b"\x0a\x01x"  # Order.Other: the entries of maps have no place
    found = read(ORDER, {"price": "double", "text": "string"}, [item, other])
    assert found.frame.rows() == [(1.0, None), (0.0, "x")] or found.frame.rows() == [(1.0, None), (None, "x")]
    assert [bytes([4, 0, 2])[:3]] == [
        codec({"text": "string"}, message="Order.Other").writer(registered(ORDER))(pl.DataFrame({"text": ["x"]}), b"")[
            0
        ][:3]
    ]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"id": "int"}, "id is int64, which cannot be read as int"),
        ({"id": "string"}, "id is int64"),
        ({"note": "binary"}, "note is string"),
        ({"items": "array<int>"}, r"items\[\] is shop.Order.Item"),
        ({"items": "int"}, "items is repeated shop.Order.Item"),
        ({"by_name": "array<string>"}, "by_name is map<string, shop.Order.Item>"),
        ({"at": "bigint"}, "at is google.protobuf.Timestamp"),
        ({"big": "int"}, "big is uint64"),
        ({"items": "array<struct<price: int>>"}, r"items\[\].price is double"),
    ],
)
def test_types_that_do_not_go_together_are_named(columns: dict[str, str], reason: str):
    found = read(ORDER, columns, [b"\0"])
    assert re.search(reason, found.failed[0])
    assert found.frame.is_empty()


def test_with_a_schema_of_ones_own_fields_are_found_by_their_numbers():
    own = 'syntax = "proto3"; message Mine { int64 number = 1; string remark = 2; int64 late = 40; }'
    value = b"\0" + message(ORDER, id=7, note="n")
    columns = {"number": "bigint", "remark": "string", "late": "bigint"}
    assert rows(ORDER, columns, [value], own) == [{"number": 7, "remark": "n", "late": 0}]
    for other, reason in {
        "int32 number = 1;": "number is int64, and int32 in the schema given with schema=",
        "sint64 number = 1;": "number is int64, and sint64",
        "repeated int64 number = 1;": "number is int64, and repeated int64",
        "message I { string price = 1; } repeated I items = 3;": "items.price is double, and string",
    }.items():
        found = read(ORDER, {"number": "bigint"}, [value], f'syntax = "proto3"; message Mine {{ {other} }}')
        assert reason in found.failed[0]
    with pytest.raises(ConfigError, match=r"schema=\.\.\.: it has no message 'Nope'"):
        codec(columns, own, "Nope")


def test_numbers_that_do_not_fit_fail_alone():
    text = 'syntax = "proto3"; enum E { A = 0; } message M { uint64 u = 1; int32 i = 2; E e = 3; }'
    values = [b"\0" + message(text, u=1 << 63), b"\0" + message(text, i=300), b"\0" + message(text, e=5), b"\0"]
    found = read(text, {"u": "bigint", "i": "tinyint", "e": "string"}, values)
    assert found.failed == {0: "u has more than 64 bits", 1: "i has more than 8 bits", 2: "e is 5, which has no name in the schema"}  # fmt: skip
    assert found.frame.rows() == [(0, 0, "A")]
    assert found.good.tolist() == [3]


# Texts.


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no message"),
        ("message", "ends too early"),
        ("message M { int64 id 1; }", "'1' where '=' was expected"),
        ("message M { int64 id = x; }", "'x' where a number was expected"),
        ("message M { Missing a = 1; }", "not valid"),
        ("message M { int32 a = 1; int32 b = 1; }", "not valid"),
        ('import "a.proto"; message M {}', "imports 'a.proto', which the registry does not have"),
        ('syntax = "proto4"; message M {}', "syntax 'proto4' is not known"),
        ("message M " + "{ message M " * 100, "nested more than 32 deep"),
        ("message M { repeated group G = 1 {} }", "has a group"),
        ("\x00", "no .proto text"),
        ('{"type": "record"}', "no message|too early"),
    ],
)
def test_what_is_no_schema_says_why(text: str, reason: str):
    with pytest.raises((ProtoError, MismatchError), match=reason):
        codec({"a": "int"}).reader(registered(text))


@settings(deadline=None)
@given(
    st.integers(0, len(ORDER) - 1), st.integers(0, 30), st.sampled_from(["", "{", "}", ";", '"', "int64", "=", "\x00"])
)
def test_a_damaged_text_is_a_schema_or_an_error_of_the_schema(at: int, cut: int, put: str):
    with suppress(ProtoError, MismatchError):
        codec({"nowhere": "int"}).reader(registered(ORDER[:at] + put + ORDER[at + cut :]))


def test_a_text_may_use_others():
    item = 'syntax = "proto3"; package a; message Item { int32 n = 1; }'
    text = 'syntax = "proto3"; import "item.proto"; message M { a.Item item = 1; }'
    schema = RegisteredSchema(id=1, kind="PROTOBUF", text=text, references={"item.proto": item})
    found = codec({"item": "struct<n: int>"}).reader(schema)([b"\0\x0a\x02\x08\x07"])
    assert found.frame.to_dicts() == [{"item": {"n": 7}}]


# Writing.

COLUMNS = {
    "l": "array<struct<a: int, b: string>>",
    "m": "map<string, struct<x: double>>",
    "mm": "map<int, bigint>",
    "d": "decimal(9,2)",
    "on": "date",
    "at": "timestamp",
    "s": "struct<z: array<bigint>>",
    "b": "binary",
    "f": "float",
    "t": "boolean",
    "i": "smallint",
}
_INTS = st.none() | st.integers(-(1 << 31), (1 << 31) - 1)
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_ROWS = st.fixed_dictionaries(
    {
        "l": st.lists(st.fixed_dictionaries({"a": _INTS, "b": st.none() | _TEXTS}), max_size=3),
        "m": st.dictionaries(_TEXTS, st.fixed_dictionaries({"x": st.none() | st.floats(allow_nan=False)}), max_size=2),
        "mm": st.dictionaries(st.integers(-5, 5), st.integers(-(1 << 63), (1 << 63) - 1), max_size=2),
        "d": st.none() | st.integers(-(10**9) + 1, 10**9 - 1).map(lambda number: Decimal(number).scaleb(-2)),
        "on": st.none() | st.dates(dt.date(1, 1, 1)),
        "at": st.none() | st.datetimes(dt.datetime(1, 1, 1)).map(lambda at: at.replace(tzinfo=dt.UTC)),
        "s": st.none() | st.fixed_dictionaries({"z": st.lists(st.integers(-9, 9), max_size=3)}),
        "b": st.none() | st.binary(),
        "f": st.none() | st.floats(width=32, allow_nan=False),
        "t": st.none() | st.booleans(),
        "i": st.none() | st.integers(-(1 << 15), (1 << 15) - 1),
    }
)


@settings(deadline=None)
@given(st.lists(_ROWS, max_size=4))
def test_rows_come_back(given_rows: list[dict[str, Any]]):
    one, schema = codec(COLUMNS), Schema.of(COLUMNS)
    frame = pl.DataFrame(given_rows, schema=schema.polars)
    kept = registered(schema_of(schema, "Rows"))
    found = one.reader(kept)(one.writer(kept)(frame, b""))
    assert not found.failed
    assert found.frame.to_dicts() == frame.to_dicts()  # maps have no order


def test_a_new_schema_keeps_names_and_numbers_of_the_one_before():
    before = 'syntax = "proto3"; package p; message Old { message In { optional int32 x = 9; } optional string b = 7; In s = 3; }'
    text = codec({"a": "int", "b": "string", "s": "struct<y: int, x: int>"}).schema_text("t-value", registered(before))
    file = file_of(text, {})
    (found,) = _messages(file)
    assert found.full_name == "p.Old"
    assert {field.name: field.number for field in found.fields} == {"a": 8, "b": 7, "s": 3}
    inner = found.fields_by_name["s"].message_type
    assert inner.name == "In"
    assert {field.name: field.number for field in inner.fields} == {"y": 10, "x": 9}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"a": "array<array<int>>"}, "no lists or maps inside"),
        ({"a": "map<double, int>"}, "keys of Protobuf's maps"),
        ({"a b": "int"}, "a b is no name"),
        ({"a": "null"}, "has no type for"),
    ],
)
def test_columns_that_protobuf_has_no_types_for_are_named(columns: dict[str, str], reason: str):
    with pytest.raises(UnfitError, match=reason):
        codec(columns).schema_text("t-value", None)


@pytest.mark.parametrize(
    ("columns", "row", "problem"),
    [
        ({"id": "string"}, None, "id is int64 in the schema, and the column is string"),
        ({"nope": "int"}, None, "nope has no field in shop.Order"),
        ({"id": "bigint"}, {"id": None}, "id is null in a row"),
        ({"items": "array<struct<n: int>>"}, {"items": [None]}, "items is null in a row, or has a null in it"),
        ({"kind": "string"}, {"kind": "GOLD"}, "kind is 'GOLD' in a row, which is no name of its enum"),
    ],
)
def test_what_a_schema_has_no_place_for_is_an_error(columns: dict[str, str], row: dict[str, Any] | None, problem: str):
    frame = pl.DataFrame([row or {}], schema=Schema.of(columns).polars if row else None)
    with pytest.raises(UnfitError if row is None else ValueError, match=problem):
        codec(columns).writer(registered(ORDER))(frame, b"")


# Bytes from elsewhere.


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff" * 20,
        bytes([2, 40]),
        bytes([1]),
        bytes([200, 1]) + b"\0" * 200,
        b"\0\x08",
        b"\0\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\0\x12\xff\xff\xff\xff\x07abc",
        b"\0\x12\x02\xc3(",
        b"\0\x1a" * 50,
        b"\0\x53" * 5_000,
    ],
)
def test_bytes_that_are_no_value_fail_and_take_no_other_with_them(value: bytes):
    good = b"\0" + message(ORDER, id=1)
    found = read(ORDER, {"id": "bigint", "note": "string"}, [good, value, good])
    assert found.frame.get_column("id").to_list() == [1, 1]
    assert list(found.failed) == [1]
    assert found.failed[1]


def test_messages_that_take_two_bytes_each_are_not_made_into_any_number_of_objects():
    good, many = b"\0" + message(ORDER, id=1), b"\0" + b"\x1a\0" * 200_000
    found = read(ORDER, {"id": "bigint", "items": "array<struct<n: int>>"}, [good, many])
    assert found.failed == {1: "items has more than 131,072 items"}
    assert found.good.tolist() == [0]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40).map(lambda value: b"\0" + value), max_size=6))
def test_what_becomes_of_a_value_does_not_depend_on_the_others(values: list[bytes]):
    columns = {"id": "bigint", "note": "string", "kind": "string", "at": "timestamp", "big": "bigint"}
    reader = codec(columns).reader(registered(ORDER))
    values = [*values, b"\0" + message(ORDER, id=1), *values]
    together = reader(values)
    kept = dict(zip(together.good.tolist(), together.frame.rows(), strict=True))
    assert sorted([*kept, *together.failed]) == list(range(len(values)))
    for number, value in enumerate(values):
        alone = reader([value])
        assert alone.failed.get(0) == together.failed.get(number)
        assert alone.frame.rows() == ([kept[number]] if number in kept else [])
