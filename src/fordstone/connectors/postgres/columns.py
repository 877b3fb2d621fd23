"""The columns of a table beside those of a stream: types, what fits, and rows as the text of COPY.

Values are encoded by column, without a Python object per value. Everything is sent as text that the server reads in the same way
whatever its settings are: times with their offset, bytes as hexadecimal, nested values as JSON, arrays of plain values as arrays.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.lang.polars.nested import json_text
from fordstone.lang.schema import DataType, Schema

COPY_ROWS: Final = 1 << 16
"""How many rows are encoded at a time."""
_NEW: Final = {
    "boolean": "boolean",
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamp with time zone",
}
"""The type of a column that the sink makes."""
_FITS: Final = {
    "boolean": ("bool",),
    "tinyint": ("int2", "int4", "int8", "numeric"),
    "smallint": ("int2", "int4", "int8", "numeric"),
    "int": ("int4", "int8", "numeric"),
    "bigint": ("int8", "numeric"),
    "float": ("float4", "float8"),
    "double": ("float8",),
    "string": ("text", "varchar", "uuid", "json", "jsonb"),
    "binary": ("bytea",),
    "date": ("date",),
    "timestamp": ("timestamptz", "timestamp"),
    "decimal": ("numeric",),
}
"""The types, by the server's names, of existing columns that take every value, or say which one they do not take."""
_JSON: Final = ("jsonb", "json")
_INTEGERS: Final = ("int2", "int4", "int8")
_READ: Final = {
    "boolean": ("bool",),
    "tinyint": ("int2",),
    "smallint": ("int2",),
    "int": ("int2", "int4"),
    "bigint": _INTEGERS,
    "float": ("float4",),
    "double": ("float4", "float8", "numeric", *_INTEGERS),
    "string": ("text", "varchar", "bpchar", "name", "citext", "enum", "uuid", "json", "jsonb"),
    "binary": ("bytea",),
    "date": ("date",),
    "timestamp": ("timestamptz", "timestamp"),
    "decimal": ("numeric", *_INTEGERS),
}
"""The types of columns that are read as ours."""
_DIGITS: Final = re.compile(r"numeric\((\d+),(-?\d+)\)")
_COPY_ESCAPES: Final = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_ARRAY_ESCAPES: Final = {"\\": "\\\\", '"': '\\"'}
_TIME: Final = "%Y-%m-%d %H:%M:%S%.6f+00"
_NULL: Final = "\\N"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    kind: str
    """The name of its type, of arrays with `_` before it; of a domain that of what it is made of."""
    shown: str
    """The type as SQL writes it."""
    needed: bool
    """An inserted row must have a value for it."""

    def __str__(self) -> str:
        return f"{self.name} {self.shown}{' NOT NULL' if self.needed else ''}"


def new_type(kind: DataType) -> str | None:
    """The type of a new column; None: PostgreSQL has none."""
    if kind.name == "decimal":
        return f"numeric({kind.precision},{kind.scale})"
    if kind.element is not None and not kind.element.is_nested:
        inner = new_type(kind.element)
        return None if inner is None else f"{inner}[]"
    if kind.is_nested:
        return "jsonb"
    return _NEW.get(kind.name)


def difference(schema: Schema, table: Mapping[str, Column], *, also: Collection[str] = ()) -> str | None:
    """Where a table does not take the rows of a stream, as a clause; None: it takes them. `also`: columns that the sink fills itself."""
    for name, kind in schema.items():
        column = table.get(name)
        if column is None:
            return f"the table has no column {name!r}"
        if not _fits(kind, column):
            return f"column {name!r} is {kind} in the stream, and {column.shown} in the table"
    missing = [column for column in table.values() if column.needed and column.name not in {*schema, *also}]
    return f"the stream has no column {missing[0].name!r}, which may not be null in the table" if missing else None


def _fits(kind: DataType, column: Column) -> bool:
    if kind.is_nested and column.kind in _JSON:
        return True
    if kind.element is not None and not kind.element.is_nested:
        return column.kind.removeprefix("_") in _FITS[kind.element.name] and column.kind.startswith("_")
    if column.kind not in _FITS.get(kind.name, ()):
        return False
    digits = _DIGITS.fullmatch(column.shown)
    if digits is None:
        return True
    scale, whole = int(digits[2]), int(digits[1]) - int(digits[2])
    # Without a decimal, digits of the largest integer.
    mine = (kind.precision - kind.scale, kind.scale) if kind.name == "decimal" else (19, 0)
    return whole >= mine[0] and scale >= mine[1]


def copy_texts(rows: pl.DataFrame, schema: Schema, table: Mapping[str, Column]) -> Iterator[bytes]:
    """The rows as the text of COPY, some at a time. Columns that are not in the schema are ours, and plain."""
    cells = [
        _cell(pl.col(name), schema[name], table[name].kind in _JSON).alias(name) if name in schema else pl.col(name)
        for name in rows.columns
    ]
    for part in rows.iter_slices(COPY_ROWS):
        texts = part.select(cells).with_columns(pl.col(pl.String).str.replace_many(_COPY_ESCAPES))
        target = io.BytesIO()
        texts.write_csv(
            target,
            include_header=False,
            separator="\t",
            quote_style="never",
            null_value=_NULL,
            datetime_format=_TIME,
        )
        yield target.getvalue()


def _cell(value: pl.Expr, kind: DataType, json: bool) -> pl.Expr:  # noqa: FBT001 - of two texts
    if kind.is_nested and (json or kind.element is None or kind.element.is_nested):
        return json_text(value, kind)
    if kind.element is not None:
        return _array(value, kind.element)
    return _binary(value) if kind.name == "binary" else value


def _array(value: pl.Expr, kind: DataType) -> pl.Expr:
    element = pl.element()
    if kind.name == "string":
        text = pl.concat_str(pl.lit('"'), element.str.replace_many(_ARRAY_ESCAPES), pl.lit('"'))
    elif kind.name == "binary":
        text = pl.concat_str(pl.lit('"\\'), _binary(element), pl.lit('"'))
    elif kind.name == "timestamp":
        text = element.dt.strftime(f'"{_TIME}"')
    elif kind.name == "boolean":
        text = pl.when(element).then(pl.lit("t")).when(element.not_()).then(pl.lit("f"))
    else:
        text = element.cast(pl.String)
    return pl.concat_str(pl.lit("{"), value.list.eval(text.fill_null("NULL")).list.join(","), pl.lit("}"))


def _binary(value: pl.Expr) -> pl.Expr:
    return pl.concat_str(pl.lit("\\x"), value.bin.encode("hex"))


def cast_to(kind: DataType, column: str, there: str) -> str | None:
    """An expression that gives a column of the server's type `there` as ours; None: it cannot be read so."""
    if kind.element is not None and not kind.element.is_nested and there.removeprefix("_") in _READ[kind.element.name]:
        return f"{column}::{new_type(kind)}" if there.startswith("_") else None
    if there not in _READ.get(kind.name, ()):
        return None
    if there == "timestamp":
        return f"{column} AT TIME ZONE 'UTC'"
    return f"{column}::{new_type(kind)}"


def shown_columns(columns: Sequence[object] | Mapping[str, DataType]) -> str:
    """Columns with their types in one line, for an error that shows two such lines."""
    if isinstance(columns, Mapping):
        return ", ".join(f"{name} {kind}" for name, kind in columns.items())
    return ", ".join(map(str, columns))
