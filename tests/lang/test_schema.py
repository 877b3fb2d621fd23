"""Types and schemas: how they are written, read, and mapped to Polars."""

from __future__ import annotations

import polars as pl
import pytest

from fordstone.errors import SchemaError
from fordstone.lang.schema import TYPE_DEPTH_MAX, DataType, Schema


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("double", "double"),
        (" Decimal ( 10 , 2 ) ", "decimal(10,2)"),
        ("decimal", "decimal(10,0)"),
        ("ARRAY<Int>", "array<int>"),
        ("map<string,struct<X:double>>", "map<string, struct<X: double>>"),
        ("struct<a DOUBLE, `b c`: array<map<int,string>>>", "struct<a: double, `b c`: array<map<int, string>>>"),
        ("struct<`a``b`:text>", "struct<`a``b`: string>"),
        ("struct<a:int,A:int>", "struct<a: int, A: int>"),
    ],
)
def test_a_type_is_read_as_spark_writes_it(text: str, canonical: str) -> None:
    found = DataType.parse(text)
    assert str(found) == canonical
    assert DataType.parse(canonical) == found
    assert DataType.from_polars(found.polars) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("doble", "Did you mean double"),
        ("array<strng>", "unknown type 'strng' in 'array<strng>'. Did you mean string"),
        ("array<int", "'>' is missing"),
        ("array<int>>", "'>' was not expected"),
        ("struct<>", "a name with its type is missing"),
        ("struct<a>", "a type is missing"),
        ("struct<a: int, a: int>", "two are named 'a'"),
        ("map<int>", "a map has a key and a value"),
        ("map<array<int>, int>", "the keys of a map are plain values"),
        ("decimal(39)", "1 to 38 digits"),
        ("", "a type is missing"),
        ("array<" * (TYPE_DEPTH_MAX + 1) + "int" + ">" * (TYPE_DEPTH_MAX + 1), "nested too deeply"),
    ],
)
def test_a_mistake_in_a_type_is_named(text: str, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        DataType.parse(text)
    assert says in str(caught.value)


def test_a_struct_can_be_given_as_a_dict() -> None:
    assert Schema.of({"s": {"a": "double", "b": {"c": "int"}}}) == Schema.of(
        {"s": "struct<a: double, b: struct<c: int>>"}
    )


def test_a_schema_is_read_from_text() -> None:
    assert Schema.parse("d string, `x y` struct<a: int>").to_dict() == {"d": "string", "x y": "struct<a: int>"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": int}, "column 'a': write the type by its name in Spark: 'bigint' for int."),
        ({"a": ["int"]}, "column 'a': ['int'] is not a type"),
        ({"a": "what"}, "column 'a': unknown type 'what'"),
        (["a"], "is not a schema. Give names and types"),
    ],
)
def test_what_is_not_a_type_is_refused_with_its_column(given: object, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema.of(given)  # type: ignore[arg-type]  # that is the mistake
    assert says in str(caught.value)


def test_maps_and_structs_are_those_of_polars() -> None:
    kind = DataType.parse("struct<a: int, m: map<string, array<double>>>")
    assert kind.polars == pl.Struct({"a": pl.Int32, "m": pl.Map(pl.String, pl.List(pl.Float64))})
