"""Numbers on Polars with Java's results: decimals, division, remainder, rounding, logarithms, and numbers as text.

Polars rounds and scales decimals by rules of its own and stops on division by zero. So decimals are computed on the unscaled
128-bit integers, where it is exact and wraps, and what does not fit the result type becomes null. The type rules
(`rules.decimal_result`) only let through what fits into 128 bits on the way. Where Polars is not exact NumPy works on whole
columns: Polars divides by a constant as a product with its reciprocal (which is off by a bit now and then, and not in a batch
of one row), has no remainder as in Java, and takes the logarithm of 1000 to base 10 to be 2.9999999999999996.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

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
        return let(lambda value: signed(_half_up(value.abs(), unit), value < 0), value=value)
    return let(lambda value, by: signed(_half_up(value.abs(), by.abs()), (value < 0) != (by < 0)), value=value, by=by)


def _half_up(size: pl.Expr, unit: pl.Expr) -> pl.Expr:
    rest = size % unit
    # rest >= unit - rest, and not 2 * rest >= unit, which could wrap
    return size // unit + one_if(rest >= unit - rest)


def cut_off(value: pl.Expr, unit: int) -> pl.Expr:
    """Integer division towards zero."""
    return let(lambda value: signed(value.abs() // whole(unit), value < 0), value=value)


def _decimal_remainder(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The remainder with the sign of `left`; null if `right` is zero."""
    return let(lambda left, right: signed(left.abs() % right.abs(), left < 0), left=left, right=right)


def decimal_arithmetic(name: str, left: pl.Expr, right: pl.Expr, kinds: tuple[DataType, DataType, DataType]) -> pl.Expr:
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
        return scaled(rescaled(_decimal_remainder(a, b), scale, result.scale), result)
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


def rounded_decimal(value: pl.Expr, kind: DataType, places: int, result: DataType) -> pl.Expr:
    """Rounded half away from zero to `places` after the point (before it, if negative)."""
    if places >= kind.scale:
        return value.cast(result.polars)
    cut = kind.scale - places
    if cut > DECIMAL_DIGITS_MAX:
        return pl.when(value.is_not_null()).then(pl.lit(Decimal(0), dtype=result.polars))
    kept = rounded_quotient(unscaled(value), 10**cut)
    return scaled(kept * whole(10 ** max(-places, 0)), result)


def decimal_floor(value: pl.Expr, kind: DataType, result: DataType) -> pl.Expr:
    """The next whole number downwards."""
    return scaled(unscaled(value) // whole(10**kind.scale), result)


def decimal_ceil(value: pl.Expr, kind: DataType, result: DataType) -> pl.Expr:
    """The next whole number upwards."""
    return scaled(negated(negated(unscaled(value)) // whole(10**kind.scale)), result)


# Numbers as decimal digits: what is needed to write floats as Java does, and to read decimals out of text and floats. A number
# is taken apart into its sign, its significant digits and where the point stands: 0.DIGITS times 10 to the power of `point`.
# All three are null where the text is no number; zero has no digits.

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


Floats = NDArray[Any]
"""A column of floats; what is null is NaN."""

_EXACT: Final = float(2**52)
"""From here on a double has no digits after the point."""
_PLACES: Final = 15
"""Maximum number of places at which a power of ten and its multiples are exact as doubles."""
_I64_DIGITS: Final = 19
_I64_MIN: Final = -(2**63)
_I64_MAX: Final = 2**63 - 1


def _by_numpy(
    function: Callable[..., tuple[Floats, NDArray[Any] | None]], *args: pl.Expr, dtype: pl.DataType
) -> pl.Expr:
    """A function of whole float columns, which gives the results and where they are null besides.

    Null arguments give null. Columns are of one length, or of length one.
    """

    def run(columns: Sequence[pl.Series]) -> pl.Series:
        with np.errstate(all="ignore"):
            found, void = function(*(column.to_numpy() for column in columns))
        out = pl.Series(found, dtype=dtype)
        masks = [column.is_null() for column in columns if column.null_count()]
        if void is not None and void.any():
            masks.append(pl.Series(void))
        for mask in masks:
            out = out.zip_with(
                ~mask if len(mask) == len(out) else ~mask.new_from_index(0, len(out)), out.clear(len(out))
            )
        return out

    return pl.map_batches(args, run, return_dtype=dtype, is_elementwise=True)


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
    """The quotient of doubles, correctly rounded; null if `right` is zero."""
    return _by_numpy(lambda left, right: (left / right, right == 0), left, right, dtype=pl.Float64())


def integer_remainder(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """The remainder with the sign of `left`; null if `right` is zero."""
    divisor = right if right.meta.is_literal() else pl.when(right != 0).then(right)
    floored = left % divisor  # by a zero that is written out, Polars itself gives null
    crossed = (floored != 0) & ((left < 0) != (right < 0))
    return pl.when(crossed).then(floored - right).otherwise(floored)


def float_remainder(left: pl.Expr, right: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """The exact remainder with the sign of `left`; null if `right` is zero."""
    return _by_numpy(lambda left, right: (np.fmod(left, right), right == 0), left, right, dtype=dtype)


def log10(value: pl.Expr) -> pl.Expr:
    """Logarithm to base 10; null if not positive, NaN of NaN."""
    return _by_numpy(lambda value: (np.log10(value), value <= 0), value, dtype=pl.Float64())


def ln(value: pl.Expr) -> pl.Expr:
    """Natural logarithm; null if not positive, NaN of NaN."""
    return pl.when(value > 0).then(value.log())


def log2(value: pl.Expr) -> pl.Expr:
    """Logarithm to base 2, as the quotient that Spark takes."""
    return divided(ln(value), pl.lit(math.log(2.0)))


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
    return _by_numpy(lambda value: (_rounded(value, places), None), double, dtype=pl.Float64()).cast(dtype)


def _rounded(value: Floats, places: int) -> Floats:
    size, unit = np.abs(value), 10.0 ** abs(places)
    shifted = size * unit if places >= 0 else size / unit
    below = np.floor(shifted)
    # The double nearest to the decimal half way between `below` and the next: equal to it means a half is shown.
    half = (below * 2 + 1) / (2 * unit) if places >= 0 else (below + 0.5) * unit
    count = below + (size >= half)
    near = np.where(shifted < _EXACT, count / unit if places >= 0 else count * unit, size)
    # What is rounded by its decimal digits has no negative zero; adding zero takes its sign away.
    return np.where(value < 0, -near, near) + 0.0


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
