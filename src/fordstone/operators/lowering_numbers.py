"""Numbers on Polars with Java's results: remainder, rounding, floor and ceiling, powers and logarithms.

Where Polars has no exact counterpart (remainder of floats, logarithm to base 10) NumPy works on whole columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from fordstone.operators.lowering_decimal import negated
from fordstone.operators.lowering_digits import digits_of, rounded_by_digits

_EXACT: Final = float(2**52)
"""From here on a double has no digits after the point."""
_PLACES: Final = 15
"""Up to so many places a power of ten and its multiples are exact as doubles."""
_I64_MIN: Final = -(2**63)
_I64_MAX: Final = 2**63 - 1


def null_of(dtype: pl.DataType) -> pl.Expr:
    """A null of a type."""
    return pl.lit(None, dtype=dtype)


def saturated(value: pl.Expr, low: int = _I64_MIN, high: int = _I64_MAX, dtype: pl.DataType | None = None) -> pl.Expr:
    """A float as an integer as Java casts: cut off, held at the ends, NaN is 0."""
    to = dtype if dtype is not None else pl.Int64()
    return (
        pl.when(value.is_nan()).then(pl.lit(0, dtype=to))
        .when(value >= float(high)).then(pl.lit(high, dtype=to))
        .when(value <= float(low)).then(pl.lit(low, dtype=to))
        .otherwise(value.cast(to, strict=False))
    )  # fmt: skip


def divided(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The quotient, correctly rounded; null if `right` is zero.

    Polars divides a column by a constant as a product with the reciprocal, which is off by a bit now and then. So a
    constant is made a column first.
    """
    return left / pl.when((right != 0) & left.is_not_null()).then(right)


def integer_remainder(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The remainder with the sign of `left`; null if `right` is zero."""
    floored = left % right
    crossed = (floored != 0) & ((left < 0) != (right < 0))
    return pl.when(right != 0).then(pl.when(crossed).then(floored - right).otherwise(floored))


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
    return pl.when(value > 0).then(divided(value.log(), pl.lit(math.log(2.0))))


def power(base: pl.Expr, exponent: pl.Expr) -> pl.Expr:
    """Java's power: unlike C's, 1 to NaN or to infinity is NaN."""
    undefined = exponent.is_nan() | ((base.abs() == 1.0) & exponent.is_infinite())
    found = base.pow(exponent)
    return pl.when(undefined & base.is_not_null()).then(pl.lit(math.nan)).otherwise(found)


def rounded(value: pl.Expr, places: int, dtype: pl.DataType) -> pl.Expr:
    """A float rounded half away from zero by the decimal digits that it shows, so that 1.005 gives 1.01."""
    double = value.cast(pl.Float64)
    if abs(places) > _PLACES:
        return without_negative_zero(rounded_by_digits(digits_of(double.cast(pl.String)), double, places)).cast(dtype)
    size, unit = double.abs(), 10.0 ** abs(places)
    shifted = size * unit if places >= 0 else divided(size, pl.lit(unit))
    below = shifted.floor()
    # The double nearest to the decimal half way between `below` and the next: equal to it means a half is shown.
    half = divided(below * 2 + 1, pl.lit(2 * unit)) if places >= 0 else (below + 0.5) * unit
    count = below + pl.when(size >= half).then(1.0).otherwise(0.0)
    near = divided(count, pl.lit(unit)) if places >= 0 else count * unit
    found = pl.when(shifted >= _EXACT).then(size).otherwise(near)
    return without_negative_zero(pl.when(double < 0).then(-found).otherwise(found)).cast(dtype)


def without_negative_zero(value: pl.Expr) -> pl.Expr:
    """What is rounded by its decimal digits has no negative zero."""
    return pl.when(value == 0).then(0.0).otherwise(value)


def rounded_integer(value: pl.Expr, places: int, dtype: pl.DataType) -> pl.Expr:
    """An integer rounded before the point; wraps where the result does not fit."""
    if places >= 0:
        return value
    if -places > 19:  # noqa: PLR2004 - a 64-bit integer has 19 digits
        return pl.when(value.is_not_null()).then(pl.lit(0, dtype=dtype))
    unit = pl.lit(10**-places, dtype=pl.Int128())
    wide = value.cast(pl.Int128)
    count = (wide.abs() + unit // 2) // unit * unit
    return pl.when(wide < 0).then(negated(count)).otherwise(count).cast(dtype, wrap_numerical=True)
