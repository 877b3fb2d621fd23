"""Numbers as decimal digits: what is needed to write floats as Java does, and to read decimals out of text and floats.

A number is taken apart into its sign, its significant digits and where the point stands: 0.DIGITS times 10 to the
power of `point`. All three are null where the text is no number; zero has no digits. Everything is done on whole columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import polars as pl

from fordstone.model.schema import DECIMAL_DIGITS_MAX, DataType
from fordstone.operators.lowering_decimal import one_if, scaled, signed, whole
from fordstone.operators.lowering_let import let

_NUMBER: Final = r"^([+-]?)([0-9]*)\.?([0-9]*)(?:[eE]([+-]?[0-9]+))?$"
_HAS_DIGIT: Final = r"^[+-]?\.?[0-9]"
_ROOM: Final = DECIMAL_DIGITS_MAX + 1
_DOUBLE_DIGITS: Final = 17
_PLAIN_PLACES: Final = 6
"""A decimal with more zeros than this after the point is written with an exponent."""

EDGE_SPACE: Final = "".join(map(chr, [*range(0x21), 0x7F]))
"""What Spark cuts off both ends of text before it reads a number, a time or a condition."""

Body = Callable[[pl.Expr, pl.Expr, pl.Expr], pl.Expr]
"""Takes sign (whether negative), digits and point."""


def _count(text: pl.Expr) -> pl.Expr:
    return text.str.len_chars().cast(pl.Int64)


def taken_apart(text: pl.Expr, body: Body) -> pl.Expr:
    """The body, on the numbers in a text."""

    def matched(text: pl.Expr) -> pl.Expr:
        return pl.when(text.str.contains(_HAS_DIGIT)).then(text).str.extract_groups(_NUMBER)

    def joined(parts: pl.Expr) -> pl.Expr:
        sign, before, after, power = (parts.struct.field(str(at)) for at in range(1, 5))
        # Java reads no exponent beyond 32 bits.
        shift = (
            pl.when(power.is_null()).then(0).otherwise(power.str.strip_chars_start("+").cast(pl.Int32, strict=False))
        )
        return let(_pointed, negative=sign == "-", before=before, every=before + after, shift=shift.cast(pl.Int64))

    def _pointed(negative: pl.Expr, before: pl.Expr, every: pl.Expr, shift: pl.Expr) -> pl.Expr:
        digits = pl.when(shift.is_not_null()).then(every.str.strip_chars_start("0"))
        point = _count(before) - _count(every) + shift
        return let(_body, negative=negative, digits=digits, point=point)

    def _body(negative: pl.Expr, digits: pl.Expr, point: pl.Expr) -> pl.Expr:
        return let(body, negative=negative, digits=digits, point=point + _count(digits))

    return let(joined, parts=let(matched, text=text))


def _cut(negative: pl.Expr, digits: pl.Expr, point: pl.Expr, places: int) -> pl.Expr:
    """The number times 10 to the power of `places`, rounded half away from zero, as 128 bits; null if it has no room."""

    def kept(negative: pl.Expr, digits: pl.Expr, count: pl.Expr, inside: pl.Expr) -> pl.Expr:
        head = digits.str.slice(0, inside).str.pad_start(1, "0").cast(pl.Int128, strict=False)
        up = one_if((count >= 0) & (digits.str.slice(inside, 1) >= "5"))
        return signed(head + up, negative)

    fits = (point + places <= DECIMAL_DIGITS_MAX) | (digits == "")
    return let(
        kept,
        negative=negative,
        digits=pl.when(fits).then(digits.str.pad_end(_ROOM, "0")),
        count=point + places,
        inside=(point + places).clip(0, DECIMAL_DIGITS_MAX),
    )


def to_decimal(text: pl.Expr, kind: DataType) -> pl.Expr:
    """Text as the nearest decimal; null if it is no number or does not fit."""
    return scaled(taken_apart(text, lambda negative, digits, point: _cut(negative, digits, point, kind.scale)), kind)


def rounded_by_digits(value: pl.Expr, places: int) -> pl.Expr:
    """A double rounded half away from zero by its digits, for places where doubles are not exact."""

    def rounded(value: pl.Expr) -> pl.Expr:
        def cut(negative: pl.Expr, digits: pl.Expr, point: pl.Expr) -> pl.Expr:
            room = pl.when(point + places <= _DOUBLE_DIGITS).then(point)  # beyond it there is nothing to round
            return _cut(negative, digits, room, places)

        text = taken_apart(value.cast(pl.String), cut).cast(pl.String) + pl.lit(f"e{-places}")
        return pl.coalesce(text.cast(pl.Float64, strict=False), value)

    return let(rounded, value=value)


def float_text(value: pl.Expr) -> pl.Expr:
    """A float as Java writes it: the shortest digits, with an exponent below 0.001 and from 10 million on."""

    def science(negative: pl.Expr, digits: pl.Expr, point: pl.Expr) -> pl.Expr:
        rest = digits.str.strip_chars_end("0").str.slice(1)
        tail = pl.when(rest == "").then(pl.lit("0")).otherwise(rest)
        sign = pl.when(negative).then(pl.lit("-")).otherwise(pl.lit(""))
        return pl.concat_str(sign, digits.str.slice(0, 1), pl.lit("."), tail, pl.lit("E"), (point - 1).cast(pl.String))

    def written(value: pl.Expr, text: pl.Expr) -> pl.Expr:
        size = value.abs()
        plain = (size == 0) | ((size >= 1e-3) & (size < 1e7))  # noqa: PLR2004 - Java's limits
        infinite = pl.when(value > 0).then(pl.lit("Infinity")).otherwise(pl.lit("-Infinity"))
        return (
            pl.when(value.is_nan()).then(pl.lit("NaN"))
            .when(value.is_infinite()).then(infinite)
            .when(plain).then(text)
            .otherwise(taken_apart(text, science))
        )  # fmt: skip

    return let(lambda value: let(written, value=value, text=value.cast(pl.String)), value=value)


def decimal_text(value: pl.Expr, kind: DataType) -> pl.Expr:
    """A decimal as Java writes it: plain, except that very small ones have an exponent."""
    if kind.scale <= _PLAIN_PLACES:
        return value.cast(pl.String)

    def written(plain: pl.Expr, stored: pl.Expr, size: pl.Expr) -> pl.Expr:
        exponent = _count(size) - 1 - kind.scale
        rest = size.str.slice(1)
        tail = pl.when(rest == "").then(pl.lit("")).otherwise("." + rest)
        sign = pl.when(stored < whole(0)).then(pl.lit("-")).otherwise(pl.lit(""))
        science = pl.concat_str(sign, size.str.slice(0, 1), tail, pl.lit("E"), exponent.cast(pl.String))
        return pl.when(exponent < -_PLAIN_PLACES).then(science).otherwise(plain)

    return let(
        lambda value: let(
            written,
            plain=value.cast(pl.String),
            stored=value.to_physical(),
            size=value.to_physical().abs().cast(pl.String),
        ),
        value=value,
    )
