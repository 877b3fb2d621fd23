"""What each aggregate keeps of its argument, and how its result is worked out of that.

One row for each name in `model.aggregate_functions`. A result is an expression over the columns of its parts; where NumPy
or Python is needed, `of_columns` makes an expression of a function of whole columns. Both are called once, when the
operator is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.lang.aggregates import AggregateCall
from fordstone.operators.aggregate.beta import Doubles, beta_high, beta_low, beta_means
from fordstone.operators.aggregate.part import (
    COLLECTED,
    COUNT,
    COUNT_TRUE,
    DOUBLE_SUM,
    FIRST,
    GREATEST,
    LAST,
    LEAST,
    SPREAD,
    SUM,
    Part,
    Values,
    in_order,
)
from fordstone.operators.aggregate.sketches import Distinct, Quantiles, estimates, quantiles
from fordstone.operators.aggregate.user import UserPart
from fordstone.operators.base import Functions


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One aggregate. `parts` gives what is kept, `result` the result as an expression over the columns of these."""

    parts: Callable[[AggregateCall], tuple[Part, ...]]
    result: Callable[[AggregateCall, Values], pl.Expr]


def of_columns(
    function: Callable[[Sequence[pl.Series]], pl.Series], columns: Sequence[str], kind: pl.DataType
) -> pl.Expr:
    """A result that a function works out of whole columns of merged partial rows, all at once."""
    return pl.map_batches([pl.col(name) for name in columns], function, return_dtype=kind)


def _count(call: AggregateCall, values: Values) -> pl.Expr:  # noqa: ARG001 - all results are called alike
    return pl.col(COUNT.column(values))


def _sum(call: AggregateCall, values: Values) -> pl.Expr:
    return pl.when(_count(call, values) > 0).then(pl.col(SUM.column(values))).cast(call.type.polars)


def _mean_parts(call: AggregateCall) -> tuple[Part, ...]:
    # The sum of integers wraps; their mean is that of doubles, which do not.
    whole = call.argument is not None and call.argument.type.is_integer
    return COUNT, DOUBLE_SUM if whole else SUM


def _mean(call: AggregateCall, values: Values) -> pl.Expr:
    total = pl.col((DOUBLE_SUM if values.type.is_integer else SUM).column(values)).cast(pl.Float64)
    count = _count(call, values)
    return pl.when(count > 0).then(total / count)


def _one_zero(name: str, values: Values) -> pl.Expr:
    """A column without -0.0: of the two zeros, which are equal, neither is the least, and which one is met first is chance."""
    if not values.type.is_float:
        return pl.col(name)
    zero = pl.lit(0.0, dtype=values.type.polars)
    return pl.when(pl.col(name) == zero).then(zero).otherwise(pl.col(name))


def _variance(*, less: int) -> Callable[[AggregateCall, Values], pl.Expr]:
    def result(call: AggregateCall, values: Values) -> pl.Expr:
        count, squares = _count(call, values), pl.col(SPREAD.columns(values)[1])
        return pl.when(count > less).then(squares / (count - less))

    return result


def _deviation(*, less: int) -> Callable[[AggregateCall, Values], pl.Expr]:
    variance = _variance(less=less)
    return lambda call, values: variance(call, values).sqrt()


def _collected(call: AggregateCall, values: Values) -> pl.Expr:
    return of_columns(in_order, COLLECTED.columns(values), call.type.polars)


def _distinct(call: AggregateCall) -> Distinct:
    (lg_k,) = call.options
    return Distinct(int(lg_k))


def _estimate(call: AggregateCall, values: Values) -> pl.Expr:
    part = _distinct(call)
    return of_columns(estimates(part.lg_k), part.columns(values), pl.Int64())


def _sketch(call: AggregateCall) -> Quantiles:
    _, k = call.options
    return Quantiles(int(k))


def _quantile(call: AggregateCall, values: Values) -> pl.Expr:
    return of_columns(quantiles(call.options[0]), _sketch(call).columns(values), pl.Float64())


def _beta(function: Callable[..., Doubles]) -> Callable[[AggregateCall, Values], pl.Expr]:
    """A result worked out of how many are true and how many are false; the options end with the prior."""

    def result(call: AggregateCall, values: Values) -> pl.Expr:
        *level, a, b = call.options

        def finish(columns: Sequence[pl.Series]) -> pl.Series:
            counted, true = (column.to_numpy() for column in columns)
            return pl.Series(function(a + true, b + (counted - true), *level))

        return of_columns(finish, [COUNT.column(values), COUNT_TRUE.column(values)], pl.Float64())

    return result


def _truths(_: AggregateCall) -> tuple[Part, ...]:
    return COUNT, COUNT_TRUE


KINDS: Final[dict[str, Kind]] = {
    "count": Kind(parts=lambda _: (COUNT,), result=_count),
    "sum": Kind(parts=lambda _: (COUNT, SUM), result=_sum),
    "mean": Kind(parts=_mean_parts, result=_mean),
    "min": Kind(parts=lambda _: (LEAST,), result=lambda _, values: _one_zero(LEAST.column(values), values)),
    "max": Kind(parts=lambda _: (GREATEST,), result=lambda _, values: _one_zero(GREATEST.column(values), values)),
    "var_samp": Kind(parts=lambda _: (COUNT, SPREAD), result=_variance(less=1)),
    "var_pop": Kind(parts=lambda _: (COUNT, SPREAD), result=_variance(less=0)),
    "stddev_samp": Kind(parts=lambda _: (COUNT, SPREAD), result=_deviation(less=1)),
    "stddev_pop": Kind(parts=lambda _: (COUNT, SPREAD), result=_deviation(less=0)),
    "first": Kind(parts=lambda _: (FIRST,), result=lambda _, values: pl.col(FIRST.columns(values)[1])),
    "last": Kind(parts=lambda _: (LAST,), result=lambda _, values: pl.col(LAST.columns(values)[1])),
    "collect": Kind(parts=lambda _: (COLLECTED,), result=_collected),
    "count_distinct": Kind(parts=lambda call: (_distinct(call),), result=_estimate),
    "quantile": Kind(parts=lambda call: (_sketch(call),), result=_quantile),
    "beta_mean": Kind(parts=_truths, result=_beta(beta_means)),
    "beta_low": Kind(parts=_truths, result=_beta(beta_low)),
    "beta_high": Kind(parts=_truths, result=_beta(beta_high)),
}
"""By name; what a user's own keeps stands in `user_part`."""


def kind_of(call: AggregateCall, functions: Functions) -> Kind:
    """What a call keeps and how it finishes."""
    if call.declared is not None:
        return KINDS[call.function]
    part = UserPart(call.function, call.state, functions)
    return Kind(parts=lambda _: (part,), result=part.result)
