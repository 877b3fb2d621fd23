"""Decimals on Polars with Spark's precision, scale and rounding.

Polars rounds and scales decimals by rules of its own and stops on division by zero. So the work is done on the unscaled
128-bit integers, where it is exact and wraps, and what does not fit the result type becomes null. The type rules
(`model.coercion.decimal_result`) only let through what fits into 128 bits on the way.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import polars as pl

from fordstone.lang.polars.let import let
from fordstone.lang.schema import DECIMAL_DIGITS_MAX, DataType

_SAFE_PRODUCT: Final = 1.5e38
"""Beyond 38 digits and still far from where 128 bits wrap (1.7e38)."""


def whole(value: int) -> pl.Expr:
    """A 128-bit constant."""
    return pl.lit(value, dtype=pl.Int128())


def negated(value: pl.Expr) -> pl.Expr:
    """A 128-bit integer with the other sign; Polars has no minus sign for them."""
    return whole(0) - value


def signed(size: pl.Expr, minus: pl.Expr) -> pl.Expr:
    """A 128-bit integer with the given sign."""
    return size * pl.when(minus).then(whole(-1)).otherwise(whole(1))


def one_if(condition: pl.Expr) -> pl.Expr:
    """1 where the condition holds, 0 elsewhere (also where it is null), in 128 bits."""
    return pl.when(condition).then(whole(1)).otherwise(whole(0))


def within(value: pl.Expr, limit: int) -> pl.Expr:
    """The 128-bit integer, or null if its size is beyond the limit."""
    return let(lambda value: pl.when(value.is_between(whole(-limit), whole(limit))).then(value), value=value)


def unscaled(value: pl.Expr) -> pl.Expr:
    """The integer that a decimal stores."""
    return value.to_physical()


def scaled(value: pl.Expr, kind: DataType) -> pl.Expr:
    """The decimal that stores an integer; null if it has too many digits."""
    found = within(value, 10**kind.precision - 1).cast(pl.Decimal(DECIMAL_DIGITS_MAX, 0))
    if kind.scale:
        unit = pl.lit(Decimal(1).scaleb(-kind.scale), dtype=pl.Decimal(DECIMAL_DIGITS_MAX, kind.scale))
        found = found * unit
    return found.cast(kind.polars)


def rescaled(value: pl.Expr, before: int, after: int) -> pl.Expr:
    """An unscaled integer at another scale, rounded half away from zero; null if it has no room."""
    if after == before:
        return value
    if after < before:
        return rounded_quotient(value, 10 ** (before - after))
    factor = 10 ** (after - before)
    return within(value, (10**DECIMAL_DIGITS_MAX - 1) // factor) * whole(factor)


def rounded_quotient(value: pl.Expr, by: pl.Expr | int) -> pl.Expr:
    """Integer division rounded half away from zero; null if `by` is zero."""
    if isinstance(by, int):
        unit = whole(by)
        return let(lambda value: signed(_rounded(value.abs(), unit), value < 0), value=value)
    return let(lambda value, by: signed(_rounded(value.abs(), by.abs()), (value < 0) != (by < 0)), value=value, by=by)


def _rounded(size: pl.Expr, unit: pl.Expr) -> pl.Expr:
    rest = size % unit
    # rest >= unit - rest, and not 2 * rest >= unit, which could wrap
    return size // unit + one_if(rest >= unit - rest)


def cut_off(value: pl.Expr, unit: int) -> pl.Expr:
    """Integer division towards zero."""
    return let(lambda value: signed(value.abs() // whole(unit), value < 0), value=value)


def _remainder(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The remainder with the sign of `left`; null if `right` is zero."""
    return let(lambda left, right: signed(left.abs() % right.abs(), left < 0), left=left, right=right)


def arithmetic(name: str, left: pl.Expr, right: pl.Expr, kinds: tuple[DataType, DataType, DataType]) -> pl.Expr:
    """`+ - * / %` on decimals; `kinds` are the types of both sides and of the result."""
    one, two, result = kinds
    a, b = unscaled(left), unscaled(right)
    if name == "*":
        needs_guard = one.precision + two.precision > DECIMAL_DIGITS_MAX
        return scaled(let(_guarded_product, a=a, b=b) if needs_guard else a * b, result)
    if name == "/":
        return scaled(_quotient(a, b, one, result.scale - one.scale + two.scale), result)
    scale = max(one.scale, two.scale)
    a, b = rescaled(a, one.scale, scale), rescaled(b, two.scale, scale)
    if name == "%":
        return scaled(rescaled(_remainder(a, b), scale, result.scale), result)
    b = b if name == "+" else negated(b)
    if result.scale == scale:
        return scaled(a + b, result)
    unit = 10 ** (scale - result.scale)
    return scaled(let(lambda a, b: _narrowed_sum(a, b, unit), a=a, b=b), result)


def _guarded_product(a: pl.Expr, b: pl.Expr) -> pl.Expr:
    estimate = a.cast(pl.Float64) * b.cast(pl.Float64)
    return pl.when(estimate.abs() < _SAFE_PRODUCT).then(a * b)


def _quotient(a: pl.Expr, b: pl.Expr, one: DataType, shift: int) -> pl.Expr:
    """A * 10**shift / b, rounded half away from zero."""
    if shift < 0:
        return rounded_quotient(a, b * whole(10**-shift))
    if one.precision + shift <= DECIMAL_DIGITS_MAX:
        return rounded_quotient(a * whole(10**shift), b)

    def in_two_steps(a: pl.Expr, b: pl.Expr) -> pl.Expr:
        # a * 10**shift may not fit into 128 bits: the whole part first, then the rest, which is smaller than b.
        size, unit = a.abs(), b.abs()
        total = rescaled(size // unit, 0, shift) + rounded_quotient(size % unit * whole(10**shift), unit)
        return signed(total, (a < 0) != (b < 0))

    return let(in_two_steps, a=a, b=b)


def _narrowed_sum(a: pl.Expr, b: pl.Expr, unit: int) -> pl.Expr:
    """(a + b) / unit, rounded half away from zero, where a + b itself may not fit into 128 bits."""
    size = whole(unit)
    rest = a % size + b % size
    low = rest % size
    total = a // size + b // size + rest // size
    # `total` is rounded down and `low` is what was cut off, so below zero a half stays where it is.
    half_up = pl.when(total < 0).then(low * 2 > unit).otherwise(low * 2 >= unit)
    return total + one_if(half_up)


def rounded(value: pl.Expr, kind: DataType, places: int, result: DataType) -> pl.Expr:
    """Rounded half away from zero to `places` after the point (before it, if negative)."""
    if places >= kind.scale:
        return value.cast(result.polars)
    cut = kind.scale - places
    if cut > DECIMAL_DIGITS_MAX:
        return pl.when(value.is_not_null()).then(pl.lit(Decimal(0), dtype=result.polars))
    kept = rounded_quotient(unscaled(value), 10**cut)
    return scaled(kept * whole(10 ** max(-places, 0)), result)


def floor(value: pl.Expr, kind: DataType, result: DataType) -> pl.Expr:
    """The next whole number downwards."""
    return scaled(unscaled(value) // whole(10**kind.scale), result)


def ceil(value: pl.Expr, kind: DataType, result: DataType) -> pl.Expr:
    """The next whole number upwards."""
    return scaled(negated(negated(unscaled(value)) // whole(10**kind.scale)), result)
