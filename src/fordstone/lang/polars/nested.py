"""Structs, maps and arrays on Polars, and JSON text of them.

A struct is a Polars struct, a map a Polars map, an array a list. JSON text is read one value at a time in Python (`lang.json`);
all the rest works on whole columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any, Final

import numpy as np
import polars as pl

from fordstone.lang.json import at_path, path_steps, reader_of
from fordstone.lang.polars import cast as casts
from fordstone.lang.polars.let import let
from fordstone.lang.polars.times import json_time_text
from fordstone.lang.rules import text_of
from fordstone.lang.schema import DataType
from fordstone.lang.term import Call

_ONE: Final = "one"


def field(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """A field of a struct, or of each struct of an array."""
    name = text_of(call.args[1])
    if call.args[0].type.element is not None:
        return args[0].list.eval(pl.element().struct.field(name))
    return args[0].struct.field(name)


def element(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """An element of an array by its index from 0, or the value of a key."""
    if call.args[0].type.name == "map":
        return args[0].map.get(args[1])
    index = pl.when(args[1] >= 0).then(args[1])  # a negative index is none; Polars would count from the end
    return args[0].list.get(index, null_on_oob=True)


def element_at(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """An element of an array by its position from 1, or from -1 backwards; or the value of a key."""
    if call.args[0].type.name == "map":
        return args[0].map.get(args[1])
    index = pl.when(args[1] > 0).then(args[1] - 1).when(args[1] < 0).then(args[1])
    return args[0].list.get(index, null_on_oob=True)


def size(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """How many elements or entries; -1 for null."""
    count = args[0].map.len() if call.args[0].type.name == "map" else args[0].list.len()
    return count.cast(pl.Int32).fill_null(-1)


def struct(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Names and values in turn."""
    names = [name for name, _ in call.type.fields]
    return pl.struct(*(value.alias(name) for name, value in zip(names, args[1::2], strict=True)))


def array(_: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """The values as an array."""
    return _listed(args)


def _listed(values: Sequence[pl.Expr]) -> pl.Expr:
    # Each is wrapped, because Polars would join lists, and give null for a list that is null.
    return pl.concat_list(pl.struct(value.alias(_ONE)) for value in values).list.eval(pl.element().struct.field(_ONE))


def map_(_: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Keys and values in turn; null if a key is null or there twice, for which Spark would stop."""
    keys, values = args[::2], args[1::2]
    entries = _listed(
        [pl.struct(key.alias("key"), value.alias("value")) for key, value in zip(keys, values, strict=True)]
    )
    known = reduce(and_, [key.is_not_null() for key in keys])
    apart = [one != other for at, one in enumerate(keys) for other in keys[at + 1 :]]
    return pl.when(reduce(and_, [known, *apart])).then(entries).list.to_map()


def get_json_object(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """What stands at a path in JSON text."""
    steps = path_steps(text_of(call.args[1]))
    return _by_value(args[0], lambda text: at_path(text, steps), pl.String())


def from_json(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """JSON text as a value of a type."""
    kind = call.type
    read = _by_value(args[0], reader_of(kind), read_type(kind), lambda found: _column(found, kind))
    return read.cast(kind.polars)


def read_type(kind: DataType) -> pl.DataType:
    """The type of what `lang.json.reader_of` gives: times and dates are numbers."""
    if kind.element is not None:
        return pl.List(read_type(kind.element))
    if kind.name == "map":
        return pl.Map(pl.String(), read_type(kind.field("value")))
    if kind.name == "struct":
        return pl.Struct({name: read_type(inner) for name, inner in kind.fields})
    return {"timestamp": pl.Int64(), "date": pl.Int32()}.get(kind.name, kind.polars)


def _by_value(
    texts: pl.Expr,
    read: Callable[[str], Any],
    dtype: pl.DataType,
    column: Callable[[list[Any]], pl.Series] | None = None,
) -> pl.Expr:
    def read_all(given: pl.Series) -> pl.Series:
        found = [None if text is None else read(text) for text in given.to_list()]
        made = pl.Series(found, dtype=dtype, strict=True) if column is None else column(found)
        return made.alias(given.name)

    return texts.map_batches(read_all, return_dtype=dtype, is_elementwise=True)


def _column(values: list[Any], kind: DataType) -> pl.Series:
    """Values of `read_type(kind)` as a column. Polars makes two Series for each map that it is given, so maps are taken apart first."""
    if kind.name == "map":
        return _map_column(values, kind.field("value"))
    if kind.name == "struct" and kind.contains("map"):
        fields = [
            _column([None if value is None else value[name] for value in values], inner).alias(name)
            for name, inner in kind.fields
        ]
        there = pl.Series([value is not None for value in values], dtype=pl.Boolean())
        return pl.select(pl.when(there).then(pl.struct(fields))).to_series()
    return pl.Series(values, dtype=read_type(kind), strict=True)


def _map_column(maps: list[Any], value: DataType) -> pl.Series:
    """Maps as lists of entries: all entries in one frame, gathered by the row that they are of."""
    sizes = [len(one) if one else 0 for one in maps]
    entries = pl.DataFrame(
        {
            "row": np.repeat(np.arange(len(maps)), sizes),
            "key": pl.Series([key for one in maps if one for key in one], dtype=pl.String()),
            "value": _column([inner for one in maps if one for inner in one.values()], value),
        }
    )
    lists = entries.group_by("row", maintain_order=True).agg(pl.struct("key", "value").alias("map"))
    rows = pl.DataFrame(
        {"row": np.arange(len(maps)), "null": pl.Series([one is None for one in maps], dtype=pl.Boolean())}
    )
    empty = pl.lit([], dtype=lists.schema["map"])
    found = pl.when(pl.col("null").not_()).then(pl.col("map").fill_null(empty))
    return rows.join(lists, on="row", how="left", maintain_order="left").select(found.list.to_map()).to_series()


# Values as JSON text

_ESCAPED: Final = {
    '"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f",
    **{chr(code): f"\\u{code:04X}" for code in range(32) if chr(code) not in "\n\r\t\b\f"},
}  # fmt: skip


def to_json(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    """Compact JSON; fields that are null are left out."""
    return json_text(args[0], call.args[0].type)


def json_text(value: pl.Expr, kind: DataType) -> pl.Expr:
    """A value as JSON text, as Spark's to_json writes it; null if the value is null."""
    if kind.element is not None:
        inner = json_text(pl.element(), kind.element).fill_null("null")
        return _in_brackets("[", value.list.eval(inner), "]")
    if kind.name == "map":
        # The names of JSON are text.
        name = _quoted(casts.cast(pl.element().struct.field("key"), kind.field("key"), DataType("string")))
        inner = json_text(pl.element().struct.field("value"), kind.field("value")).fill_null("null")
        return _in_brackets("{", value.map.entries().list.eval(pl.concat_str(name, pl.lit(":"), inner)), "}")
    if kind.name == "struct":
        return let(lambda value: _struct_text(value, kind), value=value)
    return _leaf_text(value, kind)


def _struct_text(value: pl.Expr, kind: DataType) -> pl.Expr:
    fields = [
        pl.concat_str(_quoted(pl.lit(name)), pl.lit(":"), json_text(value.struct.field(name), inner))
        for name, inner in kind.fields
    ]
    joined = pl.concat_str(pl.lit("{"), pl.concat_str(fields, separator=",", ignore_nulls=True), pl.lit("}"))
    return pl.when(value.is_not_null()).then(joined)


def _in_brackets(opening: str, texts: pl.Expr, closing: str) -> pl.Expr:
    return pl.concat_str(pl.lit(opening), texts.list.join(","), pl.lit(closing))


def _leaf_text(value: pl.Expr, kind: DataType) -> pl.Expr:
    text = DataType("string")
    if kind.is_float:
        finite = casts.cast(value, kind, text)
        return let(
            lambda text, number: pl.when(number.is_finite()).then(text).otherwise(_quoted(text)),
            text=finite,
            number=value,
        )
    if kind.name == "decimal":
        return value.cast(pl.String)
    if kind.name == "timestamp":
        return _quoted(json_time_text(value))
    if kind.name == "binary":
        return _quoted(value.bin.encode("base64"))
    if kind.is_integer or kind.name == "boolean":
        return value.cast(pl.String)
    return _quoted(casts.cast(value, kind, text) if kind != text else value)


def _quoted(text: pl.Expr) -> pl.Expr:
    return pl.concat_str(pl.lit('"'), text.str.replace_many(_ESCAPED), pl.lit('"'))
