"""Numbers as decimal digits: what is needed to write floats as Java does, and to read decimals out of text and floats.

A number is taken apart into its sign, its significant digits and where the point stands: 0.DIGITS times 10 to the
power of `point`. Everything is done on whole columns of strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.model.schema import DECIMAL_DIGITS_MAX, DataType
from fordstone.operators.lowering_decimal import negated, scaled, whole

_NUMBER: Final = r"^([+-]?)([0-9]*)\.?([0-9]*)(?:[eE]([+-]?[0-9]+))?$"
_HAS_DIGIT: Final = r"^[+-]?\.?[0-9]"
_ROOM: Final = DECIMAL_DIGITS_MAX + 1

EDGE_SPACE: Final = "".join(map(chr, [*range(0x21), 0x7F]))
"""What Spark cuts off both ends of text before it reads a number, a time or a condition."""


@dataclass(frozen=True, slots=True)
class Digits:
    """A column of numbers, taken apart. All are null where the text is no number; zero has no digits."""

    negative: pl.Expr
    digits: pl.Expr
    point: pl.Expr


def digits_of(text: pl.Expr) -> Digits:
    """Take numbers in text apart."""
    parts = pl.when(text.str.contains(_HAS_DIGIT)).then(text).str.extract_groups(_NUMBER)
    sign, before, after, power = (parts.struct.field(str(at)) for at in range(1, 5))
    # Java reads no exponent beyond 32 bits.
    exponent = pl.when(power.is_null()).then(0).otherwise(power.str.strip_chars_start("+").cast(pl.Int32, strict=False))
    every = pl.when(exponent.is_not_null()).then(before + after)
    digits = every.str.strip_chars_start("0")
    leading = every.str.len_chars().cast(pl.Int64) - digits.str.len_chars().cast(pl.Int64)
    point = before.str.len_chars().cast(pl.Int64) - leading + exponent.cast(pl.Int64)
    return Digits(negative=sign == "-", digits=digits, point=point)


def _cut(number: Digits, places: int) -> pl.Expr:
    """The number times 10 to the power of `places`, rounded half away from zero, as 128 bits; null if it has no room."""
    count = number.point + places
    padded = number.digits.str.pad_end(_ROOM, "0")
    inside = count.clip(0, DECIMAL_DIGITS_MAX)
    kept = padded.str.slice(0, inside).str.pad_start(1, "0").cast(pl.Int128, strict=False)
    up = (count >= 0) & (padded.str.slice(inside, 1) >= "5")
    size = pl.when(count >= 0).then(kept).otherwise(whole(0)) + pl.when(up).then(whole(1)).otherwise(whole(0))
    fits = (count <= DECIMAL_DIGITS_MAX) | (number.digits == "")
    signed = pl.when(number.negative).then(negated(size)).otherwise(size)
    return pl.when(fits & number.digits.is_not_null()).then(signed)


def to_decimal(number: Digits, kind: DataType) -> pl.Expr:
    """The decimal nearest to the number; null if it does not fit."""
    return scaled(_cut(number, kind.scale), kind)


def rounded_by_digits(number: Digits, value: pl.Expr, places: int) -> pl.Expr:
    """A double rounded half away from zero by its digits, for places where doubles are not exact."""
    cut = _cut(number, places)
    text = cut.cast(pl.String) + pl.lit(f"e{-places}")
    whole_already = value.is_nan() | value.is_infinite() | (number.point + places > 17)  # noqa: PLR2004 - digits of a double
    return pl.when(whole_already).then(value).otherwise(text.cast(pl.Float64, strict=False))


def float_text(value: pl.Expr) -> pl.Expr:
    """A float as Java writes it: the shortest digits, with an exponent below 0.001 and from 10 million on."""
    text = value.cast(pl.String)
    number = digits_of(text)
    exponent = number.point - 1
    first, rest = number.digits.str.slice(0, 1), number.digits.str.strip_chars_end("0").str.slice(1)
    mantissa = first + "." + pl.when(rest == "").then(pl.lit("0")).otherwise(rest)
    science = (
        pl.when(number.negative).then(pl.lit("-")).otherwise(pl.lit("")) + mantissa + "E" + exponent.cast(pl.String)
    )
    size = value.abs()
    return (
        pl.when(value.is_nan()).then(pl.lit("NaN"))
        .when(value.is_infinite()).then(pl.when(value > 0).then(pl.lit("Infinity")).otherwise(pl.lit("-Infinity")))
        .when((size == 0) | ((size >= 1e-3) & (size < 1e7))).then(text)  # noqa: PLR2004 - Java's limits
        .otherwise(science)
    )  # fmt: skip


def decimal_text(value: pl.Expr, kind: DataType) -> pl.Expr:
    """A decimal as Java writes it: plain, except that very small ones have an exponent."""
    plain = value.cast(pl.String)
    if kind.scale <= 6:  # noqa: PLR2004 - Java's limit
        return plain
    stored = value.to_physical()
    size = stored.abs().cast(pl.String)
    exponent = size.str.len_chars().cast(pl.Int64) - 1 - kind.scale
    rest = size.str.slice(1)
    mantissa = size.str.slice(0, 1) + pl.when(rest == "").then(pl.lit("")).otherwise("." + rest)
    sign = pl.when(stored < 0).then(pl.lit("-")).otherwise(pl.lit(""))
    return pl.when(exponent < -6).then(sign + mantissa + "E" + exponent.cast(pl.String)).otherwise(plain)  # noqa: PLR2004 - Java's limit
