"""Values in plain form: what Python code and a checkpoint's bytes hold in place of typed columns.

Timestamps are microseconds, dates days, decimals text, floats doubles; lists of them likewise. Nothing is lost: the plain
form of a value, typed again, is the value.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import polars as pl

from fordstone.model.schema import DataType
from fordstone.model.term import Literal


def plain_type(kind: DataType) -> pl.DataType:
    """The Polars type of the plain form."""
    if kind.element is not None:
        return pl.List(plain_type(kind.element))
    match kind.name:
        case "timestamp":
            return pl.Int64()
        case "date":
            return pl.Int32()
        case "decimal":
            return pl.String()
        case "float":
            return pl.Float64()
        case name if name.startswith("interval"):
            return pl.Int64()
        case _:
            return kind.polars


def as_plain(column: pl.Expr, kind: DataType) -> pl.Expr:
    """A typed column in plain form."""
    plain = plain_type(kind)
    return column if not kind.name.startswith("interval") and plain == kind.polars else column.cast(plain)


def as_typed(column: pl.Expr, kind: DataType) -> pl.Expr:
    """A plain column as its type."""
    if kind.name.startswith("interval") or plain_type(kind) == kind.polars:
        return column
    return column.cast(kind.polars)


def plain_value(literal: Literal) -> Any:
    """A constant in plain form."""
    value = literal.value
    if isinstance(value, Decimal):
        return f"{value:f}"
    return float(value) if literal.type.is_float and isinstance(value, int | float) else value
