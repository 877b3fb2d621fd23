"""The table of aggregates: what each takes, what comes out, what may be done with its parts, and a line for the docs.

This is the one place where an aggregate is declared; what is kept for it stands in `operators.kinds` under the same
name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from fordstone.model.coercion import BIGINT, DOUBLE, NULL, ClashError
from fordstone.model.schema import DECIMAL_DIGITS_MAX, DataType
from fordstone.model.term import Call, Term

Invertible = Literal["always", "exact", "never"]
"""Whether rows can be taken out again by subtraction: always, for integers and decimals, or never."""
HLL_LG_K: Final = 12
KLL_K: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A constant number behind an aggregate's argument."""

    name: str
    check: Callable[[float], str | None]
    """What is wrong with a value, as the end of a sentence that begins with the value; None: nothing."""
    default: float | None = None
    """None: it must be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateFunction:
    """One aggregate: `accepts` gives the argument as it is kept and the result type, or raises `ClashError`."""

    name: str
    signature: str
    about: str
    example: str
    accepts: Callable[[Term], tuple[Term, DataType]]
    mergeable: bool = True
    """Parts of the rows, made anywhere and merged in any order, give the result of all the rows."""
    invertible: Invertible = "never"
    star: bool = False
    options: tuple[Option, ...] = ()
    needs_time: bool = False
    """Which value is first or last is a question of event time."""
    native: bool = True
    """Spark has an aggregate of this name that means the same."""
    repeats: bool = True
    """The same rows give the same result however they were batched, floats within rounding; else within a stated error."""


def inverts(function: AggregateFunction, kind: DataType | None) -> bool:
    """Whether an aggregate over an argument of this type can give rows back. None: there is no argument."""
    if function.invertible == "exact":
        return kind is not None and (kind.is_integer or kind.name == "decimal")
    return function.invertible == "always"


def _count(argument: Term) -> tuple[Term, DataType]:
    return argument, BIGINT


def _sum(argument: Term) -> tuple[Term, DataType]:
    kind = argument.type
    if kind == NULL:
        return Call("cast", (argument,), DOUBLE), DOUBLE
    _needs_number(kind)
    if kind.name == "decimal":
        return argument, DataType("decimal", precision=min(kind.precision + 10, DECIMAL_DIGITS_MAX), scale=kind.scale)
    return argument, BIGINT if kind.is_integer else DOUBLE


def _mean(argument: Term) -> tuple[Term, DataType]:
    if argument.type != NULL:
        _needs_number(argument.type)
    # The cast is written, so that Spark, too, takes the mean of doubles.
    return (Call("cast", (argument,), DOUBLE) if argument.type.name in {"decimal", "null"} else argument), DOUBLE


def _double(argument: Term) -> tuple[Term, DataType]:
    if argument.type != NULL:
        _needs_number(argument.type)
    return (argument if argument.type == DOUBLE else Call("cast", (argument,), DOUBLE)), DOUBLE


def _extreme(argument: Term) -> tuple[Term, DataType]:
    if argument.type.element is not None:
        raise ClashError("arrays have no least or greatest.")
    return argument, argument.type


def _ordered(argument: Term) -> tuple[Term, DataType]:
    if argument.type.element is not None:
        raise ClashError("arrays cannot be put in order here; take an element, or join them to a text.")
    return argument, argument.type


def _collected(argument: Term) -> tuple[Term, DataType]:
    kind = _ordered(argument)[1]
    return argument, DataType("array", element=kind)


def _distinct(argument: Term) -> tuple[Term, DataType]:
    if argument.type.element is not None:
        raise ClashError("arrays cannot be counted as values; take an element, or join them to a text.")
    return argument, BIGINT


def _truth(argument: Term) -> tuple[Term, DataType]:
    if argument.type == NULL:
        return Call("cast", (argument,), DataType("boolean")), DOUBLE
    if argument.type.name != "boolean":
        raise ClashError(
            f"a condition is needed here, but this is {argument.type}; write what makes it a success, as in x > 0."
        )
    return argument, DOUBLE


def _needs_number(kind: DataType) -> None:
    if not kind.is_numeric:
        raise ClashError(f"a number is needed here, but this is {kind}.")


def between(low: float, high: float) -> Callable[[float], str | None]:
    """A check for a number from low to high, both included."""
    return lambda value: None if low <= value <= high else f"does not lie between {low:g} and {high:g}"


def inside(low: float, high: float) -> Callable[[float], str | None]:
    """A check for a number between low and high, neither included."""
    return lambda value: None if low < value < high else f"is not above {low:g} and below {high:g}"


def whole(low: int, high: int) -> Callable[[float], str | None]:
    """A check for a whole number from low to high, both included."""
    return lambda value: (
        None if low <= value <= high and value == int(value) else f"is no whole number from {low} to {high}"
    )


_LG_K: Final = Option(name="lgk", check=whole(7, 21), default=HLL_LG_K)
_K: Final = Option(name="k", check=whole(8, 65535), default=KLL_K)
_PRIOR_MAX: Final = 1e15
_LEVEL: Final = Option(name="level", check=inside(0, 1))
_PRIOR: Final = (
    Option(name="a", check=inside(0, _PRIOR_MAX), default=1),
    Option(name="b", check=inside(0, _PRIOR_MAX), default=1),
)

AGGREGATES: Final[dict[str, AggregateFunction]] = {
    function.name: function
    for function in (
        AggregateFunction(
            name="count", signature="count(*) or count(x)", about="The number of rows, or of those where x is not null.",
            example="count(*)", accepts=_count, star=True, invertible="always",
        ),
        AggregateFunction(
            name="sum", signature="sum(x)", accepts=_sum, example="sum(1)", invertible="exact",
            about="The sum; null if all are null. Integers sum to a bigint and wrap, decimals gain ten digits.",
        ),
        AggregateFunction(
            name="mean", signature="avg(x)", accepts=_mean, example="avg(1)",
            about="The mean, a double (also of decimals, where Spark has a decimal). Also mean(x).",
        ),
        AggregateFunction(
            name="min", signature="min(x)", about="The least; NaN is greater than any number.", example="min(1)",
            accepts=_extreme,
        ),
        AggregateFunction(
            name="max", signature="max(x)", about="The greatest; NaN is greater than any number.", example="max(1)",
            accepts=_extreme,
        ),
        AggregateFunction(
            name="first", signature="first(x)", example="first(1)", accepts=_ordered, needs_time=True, native=False,
            about="The value of the row with the least time, which may be null; of several such rows, the least value (null is less than any).",
        ),
        AggregateFunction(
            name="last", signature="last(x)", example="last(1)", accepts=_ordered, needs_time=True, native=False,
            about="The value of the row with the greatest time, which may be null; of several such rows, the greatest value.",
        ),
        AggregateFunction(
            name="var_samp", signature="variance(x)", example="variance(1)", accepts=_double,
            about="The variance of a sample, a double; null of fewer than two values. Also var_samp(x).",
        ),
        AggregateFunction(
            name="var_pop", signature="var_pop(x)", example="var_pop(1)", accepts=_double,
            about="The variance of the whole; 0 of a single value, null of none.",
        ),
        AggregateFunction(
            name="stddev_samp", signature="stddev(x)", example="stddev(1)", accepts=_double,
            about="The standard deviation of a sample: the square root of variance(x). Also stddev_samp(x), std(x).",
        ),
        AggregateFunction(
            name="stddev_pop", signature="stddev_pop(x)", example="stddev_pop(1)", accepts=_double,
            about="The standard deviation of the whole: the square root of var_pop(x).",
        ),
        AggregateFunction(
            name="count_distinct", signature="count_distinct(x[, lgk])", example="count_distinct(1)", accepts=_distinct,
            options=(_LG_K,), native=False,
            about="About how many different values there are, nulls not counted: HyperLogLog with 2 to the power of lgk (7 to 21, 12 unless told) registers.",
        ),
        AggregateFunction(
            name="quantile", signature="quantile(x, q[, k])", example="quantile(1, 0.5)", accepts=_double, native=False,
            options=(Option(name="q", check=between(0, 1)), _K), repeats=False,
            about="About the least value that at least the share q (0 to 1) of all do not exceed, a double; nulls and NaN are not counted. Exact for up to k values (8 to 65535, 200 unless told), else a KLL sketch. median(x) is quantile(x, 0.5).",
        ),
        AggregateFunction(
            name="collect", signature="collect(x)", example="collect(1)", accepts=_collected, native=False,
            about="All values but nulls, an array in order of time and then of value; it grows with the window. Also collect_list(x).",
        ),
        AggregateFunction(
            name="beta_mean", signature="beta_mean(ok[, a, b])", example="beta_mean(1 < 2)", accepts=_truth, native=False,
            options=_PRIOR, invertible="always",
            about="The expected rate at which ok is true, a double, nulls not counted: the mean of Beta(a + true, b + false). The prior, a and b (1 and 1 unless told), counts as so many rows seen before.",
        ),
        AggregateFunction(
            name="beta_low", signature="beta_low(ok, level[, a, b])", example="beta_low(1 < 2, 0.95)", accepts=_truth,
            native=False, options=(_LEVEL, *_PRIOR), invertible="always",
            about="The lower end of the interval in which that rate lies with the probability level (above 0, below 1), as likely below it as above.",
        ),
        AggregateFunction(
            name="beta_high", signature="beta_high(ok, level[, a, b])", example="beta_high(1 < 2, 0.95)", accepts=_truth,
            native=False, options=(_LEVEL, *_PRIOR), invertible="always",
            about="The upper end of that interval.",
        ),
    )
}  # fmt: skip
AGGREGATE_ALIASES: Final = {
    "avg": "mean",
    "variance": "var_samp",
    "stddev": "stddev_samp",
    "std": "stddev_samp",
    "collect_list": "collect",
    "median": "quantile",
}
IMPLIED: Final = {"median": "0.5"}
"""Names that stand for another with this option already given."""
AGGREGATE_NAMES: Final = frozenset({*AGGREGATES, *AGGREGATE_ALIASES})
