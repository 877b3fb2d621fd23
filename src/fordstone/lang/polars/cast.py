"""CAST on Polars with Spark's meaning: what cannot be read is null, integers wrap, floats are cut off and held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import polars as pl

from fordstone.lang.polars import times as time
from fordstone.lang.polars.let import let
from fordstone.lang.polars.numbers import (
    EDGE_SPACE,
    cut_off,
    decimal_text,
    divided,
    float_text,
    rescaled,
    saturated,
    scaled,
    to_decimal,
    unscaled,
    whole,
)
from fordstone.lang.schema import DataType

_TRUE: Final = ["t", "true", "y", "yes", "1"]
_FALSE: Final = ["f", "false", "n", "no", "0"]
_WHOLE: Final = r"^([+-]?)([0-9]*)(?:\.[0-9]*)?$"
_ONLY_DIGITS: Final = r"^[+-]?[0-9]+$"
_FLOAT: Final = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[dDfF]?$"
_INFINITE: Final = r"^([+-]?)inf(?:inity)?$"
_SECOND_US: Final = 1_000_000
_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def cast(value: pl.Expr, source: DataType, to: DataType) -> pl.Expr:
    """The value as another type."""
    if source == to:
        return value
    if source.name == "null":
        return value.cast(to.polars)
    if to.is_nested:
        return _by_part(value, source, to, cast)
    if to.name == "string":
        return _to_text(value, source)
    if source.name == "string":
        return _from_text(value, to)
    if to.name == "boolean":
        return _to_boolean(value, source)
    if to.name == "timestamp":
        return _to_timestamp(value, source)
    if to.name == "date":
        return time.timestamp_to_date(value)
    if source.name == "timestamp":
        return _from_timestamp(value, to)
    if to.name == "decimal":
        return _to_decimal(value, source, to)
    if source.name == "decimal":
        return _from_decimal(value, source, to)
    if to.is_integer:
        return _to_integer(value, source, to)
    return value.cast(to.polars)


def try_cast(value: pl.Expr, source: DataType, to: DataType) -> pl.Expr:
    """As `cast`, but by Spark's ANSI rules: what does not fit is null and never wraps, and text is read more strictly."""
    if source.is_nested and source != to:
        return _by_part(value, source, to, try_cast)
    if to.is_integer and source.name == "string":
        text = value.str.strip_chars(EDGE_SPACE)
        strict = let(lambda text: pl.when(text.str.contains(_ONLY_DIGITS)).then(text), text=text)
        return _text_to_integer(strict, to)
    if to.is_integer and source.is_float:
        return cast(_inside(value.cast(pl.Float64), to), DataType("double"), to)
    if to.is_integer and source.name == "decimal":
        return cut_off(unscaled(value), 10**source.scale).cast(to.polars, strict=False)
    if to.is_integer and source.is_integer:
        return value.cast(to.polars, strict=False)
    if to.name == "string" and source.name == "decimal":
        return value.cast(pl.String)
    return cast(value, source, to)


def _by_part(
    value: pl.Expr, source: DataType, to: DataType, cast: Callable[[pl.Expr, DataType, DataType], pl.Expr]
) -> pl.Expr:
    """An array with its elements cast, or a struct or map with each field cast to that at its place."""
    if source.element is not None and to.element is not None:
        return value.list.eval(cast(pl.element(), source.element, to.element))

    def fields(value: pl.Expr) -> pl.Expr:
        pairs = zip(source.fields, to.fields, strict=True)
        return pl.struct(
            *(cast(value.struct.field(name), kind, other).alias(called) for (name, kind), (called, other) in pairs)
        )

    if to.name == "map":
        return value.map.entries().list.eval(fields(pl.element())).list.to_map()
    return let(lambda value: pl.when(value.is_not_null()).then(fields(value)), value=value)


def _inside(value: pl.Expr, to: DataType) -> pl.Expr:
    """A double, or null if it is beyond an integer type."""
    limit = float(2 ** (_BITS[to.name] - 1))
    # Spark compares with the largest value as a double, which for a bigint is one more than it.
    most = limit if to.name == "bigint" else limit - 1
    return let(lambda value: pl.when((value.floor() <= most) & (value.ceil() >= -limit)).then(value), value=value)


def _to_text(value: pl.Expr, source: DataType) -> pl.Expr:
    if source.is_float:
        return float_text(value)
    match source.name:
        case "decimal":
            return decimal_text(value, source)
        case "timestamp":
            return time.timestamp_text(value)
        case "date":
            return time.date_text(value)
        case _:
            return value.cast(pl.String)


def _from_text(value: pl.Expr, to: DataType) -> pl.Expr:
    if to.name == "timestamp":
        return time.read_timestamp(value)
    if to.name == "date":
        return time.read_date(value)
    if to.name == "binary":
        return value.cast(pl.Binary)
    text = value.str.strip_chars(EDGE_SPACE)
    if to.name == "boolean":
        return let(_truth, low=text.str.to_lowercase())
    if to.name == "decimal":
        return to_decimal(text, to)
    if to.is_float:
        return _text_to_float(text, to.polars)
    return _text_to_integer(text, to)


def _truth(low: pl.Expr) -> pl.Expr:
    return pl.when(low.is_in(_TRUE)).then(True).when(low.is_in(_FALSE)).then(False)  # noqa: FBT003 - literals


def _text_to_integer(text: pl.Expr, to: DataType) -> pl.Expr:
    """Digits after a point are checked and dropped; a lone point is 0, as in Spark."""

    def read(text: pl.Expr) -> pl.Expr:
        return let(both, text=text, quick=text.cast(to.polars, strict=False))

    def both(text: pl.Expr, quick: pl.Expr) -> pl.Expr:
        # What Polars reads, Spark reads alike; only the rest goes through the pattern.
        rest = pl.when(quick.is_null() & text.str.contains("[0-9.]")).then(text).str.extract_groups(_WHOLE)
        return pl.coalesce(quick, let(joined, parts=rest).cast(to.polars, strict=False))

    def joined(parts: pl.Expr) -> pl.Expr:
        digits = parts.struct.field("2").str.strip_chars_start("0").str.pad_start(1, "0")
        return parts.struct.field("1").str.replace("+", "", literal=True) + digits

    return let(read, text=text)


def _text_to_float(text: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    def read(text: pl.Expr) -> pl.Expr:
        return let(both, text=text, quick=text.cast(dtype, strict=False))

    def both(text: pl.Expr, quick: pl.Expr) -> pl.Expr:
        # What Polars reads as a finite number, Spark reads alike; names and suffixes are looked at by pattern.
        rest = pl.when(quick.is_finite().fill_null(value=False).not_()).then(text)
        return pl.when(quick.is_finite()).then(quick).otherwise(let(named, text=rest))

    def named(text: pl.Expr) -> pl.Expr:
        number = pl.when(text.str.contains(_FLOAT)).then(text.str.strip_chars_end("dDfF"))
        low = text.str.to_lowercase()
        return let(spelled, number=number.cast(dtype, strict=False), low=low, infinite=low.str.extract(_INFINITE, 1))

    def spelled(number: pl.Expr, low: pl.Expr, infinite: pl.Expr) -> pl.Expr:
        return (
            pl.when(low == "nan").then(pl.lit(float("nan"), dtype=dtype))
            .when(infinite == "-").then(pl.lit(float("-inf"), dtype=dtype))
            .when(infinite.is_not_null()).then(pl.lit(float("inf"), dtype=dtype))
            .otherwise(number)
        )  # fmt: skip

    return let(read, text=text)


def _to_boolean(value: pl.Expr, source: DataType) -> pl.Expr:
    if source.name == "decimal":
        return unscaled(value) != whole(0)
    return (time.micros(value) if source.name == "timestamp" else value) != 0


def _to_timestamp(value: pl.Expr, source: DataType) -> pl.Expr:
    if source.name == "date":
        return time.date_to_timestamp(value)
    if source.name == "boolean":
        return time.stamp(value.cast(pl.Int64))
    if source.is_float:
        finite = let(lambda value: pl.when(value.is_finite()).then(value), value=value.cast(pl.Float64))
        return time.stamp(saturated(finite * 1e6))
    if source.name == "decimal":
        wide = unscaled(value)
        if source.scale < 6:  # noqa: PLR2004 - microseconds have six places
            wide = rescaled(wide, source.scale, 6)
        elif source.scale > 6:  # noqa: PLR2004 - as above
            wide = cut_off(wide, 10 ** (source.scale - 6))
        return time.stamp(wide.cast(pl.Int64, wrap_numerical=True))
    wide = value.cast(pl.Int128) * whole(_SECOND_US)
    held = wide.clip(whole(-(2**63)), whole(2**63 - 1))
    return time.stamp(held.cast(pl.Int64))


def _from_timestamp(value: pl.Expr, to: DataType) -> pl.Expr:
    micros = time.micros(value)
    if to.is_integer:
        seconds = micros // _SECOND_US
        return seconds.cast(to.polars, strict=False)
    if to.name == "decimal":
        return scaled(rescaled(micros.cast(pl.Int128), 6, to.scale), to)
    return divided(micros.cast(pl.Float64), pl.lit(1e6)).cast(to.polars)


def _to_decimal(value: pl.Expr, source: DataType, to: DataType) -> pl.Expr:
    if source.is_float:
        return to_decimal(value.cast(pl.Float64).cast(pl.String), to)
    if source.name == "decimal":
        return scaled(rescaled(unscaled(value), source.scale, to.scale), to)
    return scaled(rescaled(value.cast(pl.Int128), 0, to.scale), to)


def _from_decimal(value: pl.Expr, source: DataType, to: DataType) -> pl.Expr:
    if to.is_float:
        # By way of the digits, which gives the nearest float; dividing the stored integer would round twice.
        return value.cast(pl.String).cast(to.polars, strict=False)
    return cut_off(unscaled(value), 10**source.scale).cast(to.polars, wrap_numerical=True)


def _to_integer(value: pl.Expr, source: DataType, to: DataType) -> pl.Expr:
    if not source.is_float:
        return value.cast(to.polars, wrap_numerical=True)
    if to.name == "bigint":
        return saturated(value.cast(pl.Float64))
    held = saturated(value.cast(pl.Float64), -(2**31), 2**31 - 1, pl.Int32())
    return held.cast(to.polars, wrap_numerical=True)  # smaller types go by way of an int, as in Java
