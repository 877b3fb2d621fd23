"""Fields, keys and JSON text in expressions: what is refused, how it is written, and what Spark was not asked."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

from fordstone.api.column import col
from fordstone.errors import ExpressionError
from fordstone.lang.expression import parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema

SCHEMA = Schema.of(
    {
        "s": "struct<name: string, at: struct<x: double>>",
        "m": "map<string, int>",
        "l": "array<struct<p: int>>",
        "t": "string",
        "i": "int",
    }
)


def values(text: str, **columns: list[Any]) -> list[Any]:
    schema = Schema(tuple((name, kind) for name, kind in SCHEMA.columns if name in columns))
    frame = pl.DataFrame(columns, schema=schema.polars)
    return frame.select(to_polars(parse(text, schema), schema)).to_series().to_list()


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("s.nme", "nme", "there is no field 'nme' in this struct. Did you mean 'name'?"),
        ("s.at.zz", "zz", "Fields are: x."),
        ("l.q", "q", "there is no field 'q'"),
        ("t.x", "t.x", "write get_json_object(..., '$.x') if it holds JSON"),
        ("t['x']", "t['x']", "an array or a map is needed here, but this is string; write from_json(...)"),
        ("zz.a", "zz.a", "there is no column 'zz'"),
        ("r.i", "r.i", "columns are named without a table here"),
        ("s[i]", "i]", "a field of a struct is named by a literal"),
        ("m[1]", "1]", "the keys of the map are string, but this is int"),
        ("s = s", "s = s", "structs cannot be compared; compare their parts"),
        ("m IN (m)", "m IN", "maps cannot be compared"),
        ("greatest(l, l)", "greatest", "arrays have no greatest or least"),
        ("concat(s, '')", "s, ''", "text is needed here, but this is struct"),
        ("CAST(s AS STRING)", "s AS", "cannot be cast to string"),
        ("CAST(m AS MAP<INT, INT>)", "m AS", "cannot be cast"),
        ("hash(m)", "m)", "has no hash"),
        ("struct(i, i)", "i)", "two fields are called 'i'"),
        ("map('a')", "map", "map is called with 1 arguments"),
        ("map(l, 1)", "l, 1", "the keys of a map are plain values"),
        ("element_at(l, 0)", "0)", "positions are counted from 1"),
        ("explode(l)", "explode", "explode makes several rows of one; write flat_map(...)"),
        ("to_json(i)", "i)", "a struct, map or array is needed here"),
        ("get_json_object(t, 'a')", "'a'", "it begins with $"),
        ("get_json_object(t, '$.a[*]')", "'$", "* is not supported"),
        ("get_json_object(t, t)", "t)", "must be a string literal"),
        ("from_json(t, 'a whatever')", "'a", "unknown type 'whatever'"),
        ("from_json(t, 'map<int, int>')", "'map", "the names in JSON are text"),
    ],
)
def test_a_mistake_is_refused_with_the_caret_under_it(text: str, place: str, says: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text, SCHEMA)
    assert says in caught.value.message
    assert caught.value.offset == text.rindex(place)


@pytest.mark.parametrize(
    ("text", "sql", "name"),
    [
        ("s.at.x", "s.at.x", "x"),
        ("s['name']", "s.name", "name"),
        ("m.k", "m['k']", "m['k']"),
        ("l[0].p AS q", "l[0].p AS q", "q"),
        ("struct(i, s.name, 1)", "named_struct('i', i, 'name', s.name, 'col3', 1)", None),
        ("CASE WHEN i = 1 THEN s END.name", "(CASE WHEN i = 1 THEN s END).name", "name"),
        ("CAST(s AS STRUCT<A: STRING, b: STRUCT<C: INT>>)", "CAST(s AS struct<A: string, b: struct<C: int>>)", None),
        ("array(s)[0].at", "array(s)[0].at", "at"),
    ],
)
def test_what_is_written_reads_back_as_the_same(text: str, sql: str, name: str | None) -> None:
    found = parse(text, SCHEMA)
    assert (found.sql, found.name) == (sql, name or sql)
    assert parse(found.sql, SCHEMA) == found


def test_a_column_with_a_dot_in_its_name_is_not_a_field() -> None:
    schema = Schema.of({"a.b": "int", "a": "struct<b: string>"})
    assert parse("`a.b`", schema).type.name == "int"
    assert parse("a.b", schema).type.name == "string"


def test_columns_are_built_with_fields_and_keys() -> None:
    assert parse(col("s").field("at").field("x").tree, SCHEMA).sql == "s.at.x"
    assert parse(col("s")["name"].tree, SCHEMA).sql == "s.name"
    assert parse((col("m")["k"] + 1).tree, SCHEMA).sql == "m['k'] + 1"
    assert parse(col("l")[0].field("p").as_("q").tree, SCHEMA).sql == "l[0].p AS q"


def test_a_map_with_a_null_or_repeated_key_is_null() -> None:
    assert values("map(t, 1, 'a', 2)", t=["b", "a", None]) == [{"b": 1, "a": 2}, None, None]


@pytest.mark.parametrize(
    "text", ["{'a': 1}", '{"a": 1} x', '{"a": NaN}', "[" * 5000, '{"a": "\\ud800"}', '{"a": 1e99999999}', "\x00"]
)
def test_text_that_is_no_json_is_null_and_never_stops(text: str) -> None:
    assert values("get_json_object(t, '$.a')", t=[text, None]) == [None, None] or "1e9" in text
    assert values("from_json(t, 'a INT')", t=[text, None]) == [{"a": None}, None]
    assert values("from_json(t, 'map<string, int>')", t=[text]) == [None]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("map<string, int>", [{"a": 1, "b": None}, None, {}, None, {"a": 2}]),
        ("map<string, map<string, int>>", [{"a": {"x": 1}, "b": None, "c": {}}, {}, None]),
        ("struct<m: map<string, int>, n: int>", [{"m": {"a": 1}, "n": 2}, {"m": None, "n": 3}, None, {"m": {}, "n": None}]),
        ("map<string, struct<m: map<string, int>>>", [{"a": {"m": {"b": 1}}, "c": None}, {"d": {"m": None}}]),
        ("array<map<string, int>>", [[{"a": 1}, {}, None], [], None]),
        ("map<string, int>", [None, None]),
        ("map<string, int>", [{}]),
    ],
)  # fmt: skip
def test_maps_in_json_text_keep_their_rows_nulls_and_order(kind: str, found: list[Any]) -> None:
    texts = [None if value is None else json.dumps(value) for value in found]
    assert values(f"from_json(t, '{kind}')", t=texts) == found


def test_json_text_of_control_characters_is_read_back() -> None:
    texts = ["".join(map(chr, range(1, 64))), '"\\/', "\u2028é日😀"]
    assert values("get_json_object(to_json(struct(t)), '$.t')", t=texts) == texts


@pytest.mark.parametrize("us", [2**63 - 1, -(2**63)])
def test_json_text_of_a_time_that_polars_cannot_write_is_null(us: int) -> None:
    schema = Schema.of({"at": "timestamp", "n": "bigint"})
    frame = pl.DataFrame({"at": [us, 0], "n": [1, 2]}).cast({"at": pl.Datetime("us", "UTC")})
    text = frame.select(to_polars(parse("to_json(struct(at, n))", schema), schema)).to_series()
    assert text.to_list() == ['{"n":1}', '{"at":"1970-01-01T00:00:00.000Z","n":2}']
