"""Decimals on Polars with Spark's precision, scale and rounding.

Polars rounds and scales decimals by rules of its own and stops on division by zero. So the work is done on the unscaled
128-bit integers, where it is exact and wraps, and what does not fit the result type becomes null. The type rules
(`model.coercion.decimal_result`) only let through what fits into 128 bits on the way.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import polars as pl

from fordstone.model.schema import DECIMAL_DIGITS_MAX, DataType

_SAFE_PRODUCT: Final = 1.5e38
"""Beyond 38 digits and still far from where 128 bits wrap (1.7e38)."""


def whole(value: int) -> pl.Expr:
    """A 128-bit constant."""
    return pl.lit(value, dtype=pl.Int128())


def negated(value: pl.Expr) -> pl.Expr:
    """A 128-bit integer with the other sign; Polars has no minus sign for them."""
    return whole(0) - value


def unscaled(value: pl.Expr) -> pl.Expr:
    """The integer that a decimal stores."""
    return value.to_physical()


def scaled(value: pl.Expr, kind: DataType) -> pl.Expr:
    """The decimal that stores an integer; null if it has too many digits."""
    limit = 10**kind.precision - 1
    fits = pl.when((value >= whole(-limit)) & (value <= whole(limit))).then(value)
    found = fits.cast(pl.Decimal(DECIMAL_DIGITS_MAX, 0))
    if kind.scale:
        unit = pl.lit(Decimal(1).scaleb(-kind.scale), dtype=pl.Decimal(DECIMAL_DIGITS_MAX, kind.scale))
        found = found * unit
    return found.cast(kind.polars)


def rescaled(value: pl.Expr, before: int, after: int) -> pl.Expr:
    """An unscaled integer at another scale, rounded half away from zero; null if it has no room."""
    if after == before:
        return value
    if after < before:
        return rounded_quotient(value, whole(10 ** (before - after)))
    factor = 10 ** (after - before)
    limit = (10**DECIMAL_DIGITS_MAX - 1) // factor
    return pl.when((value >= whole(-limit)) & (value <= whole(limit))).then(value * whole(factor))


def rounded_quotient(value: pl.Expr, by: pl.Expr) -> pl.Expr:
    """Integer division rounded half away from zero; null if `by` is zero."""
    size, unit = value.abs(), by.abs()
    rest = size % unit
    # rest >= unit - rest, and not 2 * rest >= unit, which could wrap
    quotient = size // unit + pl.when(rest >= unit - rest).then(whole(1)).otherwise(whole(0))
    return pl.when((value < 0) != (by < 0)).then(negated(quotient)).otherwise(quotient)


def truncated_remainder(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The remainder with the sign of `left`; null if `right` is zero."""
    rest = left.abs() % right.abs()
    return pl.when(left < 0).then(negated(rest)).otherwise(rest)


def arithmetic(name: str, left: pl.Expr, right: pl.Expr, kinds: tuple[DataType, DataType, DataType]) -> pl.Expr:
    """`+ - * / %` on decimals; `kinds` are the types of both sides and of the result."""
    one, two, result = kinds
    a, b = unscaled(left), unscaled(right)
    if name == "*":
        product = a * b
        if one.precision + two.precision > DECIMAL_DIGITS_MAX:
            estimate = a.cast(pl.Float64) * b.cast(pl.Float64)
            product = pl.when(estimate.abs() < _SAFE_PRODUCT).then(product)
        return scaled(product, result)
    if name == "/":
        shift = result.scale - one.scale + two.scale
        if shift < 0:
            return scaled(rounded_quotient(a, b * whole(10**-shift)), result)
        if one.precision + shift <= DECIMAL_DIGITS_MAX:
            return scaled(rounded_quotient(a * whole(10**shift), b), result)
        return scaled(_long_quotient(a, b, shift), result)
    scale = max(one.scale, two.scale)
    a, b = rescaled(a, one.scale, scale), rescaled(b, two.scale, scale)
    if name == "%":
        return scaled(rescaled(truncated_remainder(a, b), scale, result.scale), result)
    b = b if name == "+" else negated(b)
    if result.scale == scale:
        return scaled(a + b, result)
    return scaled(_narrowed_sum(a, b, 10 ** (scale - result.scale)), result)


def _long_quotient(a: pl.Expr, b: pl.Expr, shift: int) -> pl.Expr:
    """A * 10**shift / b, where a * 10**shift may not fit into 128 bits: the whole part first, then the rest."""
    size, unit = a.abs(), b.abs()
    total = rescaled(size // unit, 0, shift) + rounded_quotient(size % unit * whole(10**shift), unit)
    return pl.when((a < 0) != (b < 0)).then(negated(total)).otherwise(total)


def _narrowed_sum(a: pl.Expr, b: pl.Expr, unit: int) -> pl.Expr:
    """(a + b) / unit, rounded half away from zero, where a + b itself may not fit into 128 bits."""
    size = whole(unit)
    rest = a % size + b % size
    low = rest % size
    total = a // size + b // size + rest // size
    # `total` is rounded down and `low` is what was cut off, so below zero a half stays where it is.
    half_up = pl.when(total < 0).then(low * 2 > unit).otherwise(low * 2 >= unit)
    return total + pl.when(half_up).then(whole(1)).otherwise(whole(0))


def rounded(value: pl.Expr, kind: DataType, places: int, result: DataType) -> pl.Expr:
    """Rounded half away from zero to `places` after the point (before it, if negative)."""
    if places >= kind.scale:
        return value.cast(result.polars)
    cut = kind.scale - places
    if cut > DECIMAL_DIGITS_MAX:
        return pl.when(value.is_not_null()).then(pl.lit(Decimal(0), dtype=result.polars))
    kept = rounded_quotient(unscaled(value), whole(10**cut))
    return scaled(kept * whole(10 ** max(-places, 0)), result)


def downwards(value: pl.Expr, kind: DataType, result: DataType, *, up: bool) -> pl.Expr:
    """Floor, or ceiling with `up`."""
    unit = whole(10**kind.scale)
    floor = unscaled(value) // unit
    return scaled(negated(negated(unscaled(value)) // unit) if up else floor, result)
