"""Numbers on Polars with Java's results: division, remainder, rounding, floor and ceiling, powers and logarithms.

Where Polars has no exact counterpart (remainder of floats, logarithm to base 10) NumPy works on whole columns.
The functions here mention their arguments several times; `operators.lowering` binds what is not a plain column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from fordstone.operators.lowering_decimal import signed, whole
from fordstone.operators.lowering_digits import rounded_by_digits
from fordstone.operators.lowering_let import let

_EXACT: Final = float(2**52)
"""From here on a double has no digits after the point."""
_PLACES: Final = 15
"""Up to so many places a power of ten and its multiples are exact as doubles."""
_I64_DIGITS: Final = 19
_I64_MIN: Final = -(2**63)
_I64_MAX: Final = 2**63 - 1


def saturated(value: pl.Expr, low: int = _I64_MIN, high: int = _I64_MAX, dtype: pl.DataType | None = None) -> pl.Expr:
    """A float as an integer as Java casts: cut off, held at the ends, NaN is 0."""
    to = dtype if dtype is not None else pl.Int64()

    def held(value: pl.Expr) -> pl.Expr:
        return (
            pl.when(value.is_nan()).then(pl.lit(0, dtype=to))
            .when(value >= float(high)).then(pl.lit(high, dtype=to))
            .when(value <= float(low)).then(pl.lit(low, dtype=to))
            .otherwise(value.cast(to, strict=False))
        )  # fmt: skip

    return let(held, value=value)


def divided(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The quotient of two columns; null if `right` is zero."""
    return left / pl.when(right != 0).then(right)


def divided_by(left: pl.Expr, right: float | pl.Expr, like: pl.Expr) -> pl.Expr:
    """The quotient by a constant other than zero, correctly rounded; `like` is any column of the same length.

    Polars divides a column by a constant as a product with the reciprocal, which is off by a bit now and then. So the
    constant is made a column first.
    """
    return left / _column_of(right, like)


def _column_of(value: float | pl.Expr, like: pl.Expr) -> pl.Expr:
    """A constant as a column that Polars does not see through."""
    return pl.when(like.is_null()).then(value).otherwise(value)


def integer_remainder(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The remainder with the sign of `left`; null if `right` is zero."""
    divisor = right if right.meta.is_literal() else pl.when(right != 0).then(right)
    floored = left % divisor  # by a zero that is written out, Polars itself gives null
    crossed = (floored != 0) & ((left < 0) != (right < 0))
    return pl.when(crossed).then(floored - right).otherwise(floored)


def float_remainder(left: pl.Expr, right: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """The exact remainder with the sign of `left`; null if `right` is zero."""
    found = pl.map_batches([left, right], _fmod, return_dtype=dtype, is_elementwise=True)
    return pl.when(left.is_not_null() & (right != 0)).then(found)


def _fmod(columns: Sequence[pl.Series]) -> pl.Series:
    left, right = (column.to_numpy() for column in columns)
    with np.errstate(all="ignore"):
        return pl.Series(np.fmod(left, right).astype(left.dtype, copy=False))


def log10(value: pl.Expr) -> pl.Expr:
    """Logarithm to base 10 of positive numbers; Polars would give 2.9999999999999996 for 1000."""
    return pl.when(value > 0).then(value.map_batches(_log10, return_dtype=pl.Float64(), is_elementwise=True))


def _log10(column: pl.Series) -> pl.Series:
    with np.errstate(all="ignore"):
        return pl.Series(np.log10(column.to_numpy()))


def ln(value: pl.Expr) -> pl.Expr:
    """Natural logarithm; null if not positive, NaN of NaN."""
    return pl.when(value > 0).then(value.log())


def log2(value: pl.Expr) -> pl.Expr:
    """Logarithm to base 2, as the quotient that Spark takes."""
    return pl.when(value > 0).then(divided_by(value.log(), math.log(2.0), value))


def power(base: pl.Expr, exponent: pl.Expr) -> pl.Expr:
    """Java's power: unlike C's, 1 to NaN or to infinity is NaN."""
    undefined = exponent.is_nan() | ((base.abs() == 1.0) & exponent.is_infinite())
    found = base.pow(exponent)
    return pl.when(undefined & base.is_not_null()).then(pl.lit(math.nan)).otherwise(found)


def rounded(value: pl.Expr, places: int, dtype: pl.DataType) -> pl.Expr:
    """A float rounded half away from zero by the decimal digits that it shows, so that 1.005 gives 1.01."""
    double = value.cast(pl.Float64)
    if abs(places) > _PLACES:
        return let(_without_negative_zero, value=rounded_by_digits(double, places)).cast(dtype)
    unit = 10.0 ** abs(places)
    size = double.abs()
    shifted = size * unit if places >= 0 else divided_by(size, unit, value)
    below = shifted.floor()
    # The double nearest to the decimal half way between `below` and the next: equal to it means a half is shown.
    half = divided_by(below * 2 + 1, 2 * unit, value) if places >= 0 else (below + 0.5) * unit
    count = below + (size >= half).cast(pl.Float64)
    near = divided_by(count, unit, value) if places >= 0 else count * unit
    found = pl.when(shifted >= _EXACT).then(size).otherwise(near)
    sign = 1.0 - 2.0 * (double < 0).cast(pl.Float64)
    # What is rounded by its decimal digits has no negative zero; adding zero takes its sign away.
    return (found * sign + _column_of(0.0, value)).cast(dtype)


def _without_negative_zero(value: pl.Expr) -> pl.Expr:
    return pl.when(value == 0).then(0.0).otherwise(value)


def rounded_integer(value: pl.Expr, places: int, dtype: pl.DataType) -> pl.Expr:
    """An integer rounded before the point; wraps where the result does not fit."""
    if places >= 0:
        return value
    if -places > _I64_DIGITS:
        return pl.when(value.is_not_null()).then(pl.lit(0, dtype=dtype))
    unit = whole(10**-places)

    def counted(value: pl.Expr) -> pl.Expr:
        return signed((value.abs() + unit // 2) // unit * unit, value < 0)

    return let(counted, value=value.cast(pl.Int128)).cast(dtype, wrap_numerical=True)
