"""What `agg(...)` takes: an aggregate expression, or a use of a user's own aggregator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlglot import exp

from fordstone.api.column import Column
from fordstone.errors import PipelineError
from fordstone.lang.aggregates import parse_aggregate
from fordstone.lang.expression import parse
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.user import Aggregator, AggregatorCall
from fordstone.plan import plan as p

Aggregated = str | Column | AggregatorCall
"""An aggregate expression as SQL text or built, or `MyAggregator.of(...)`."""


def named_aggregate(
    name: str, wanted: Aggregated | type, schema: Schema, register: Callable[[Callable[..., Any]], str]
) -> p.NamedAggregate:
    """One output column of an aggregate step, checked. `register` gives the import path of a class.

    Raises:
        ExpressionError, PipelineError: what is wrong, and where.
    """
    if isinstance(wanted, AggregatorCall):
        return _user(name, wanted, schema, register)
    if isinstance(wanted, type) and issubclass(wanted, Aggregator):
        raise PipelineError(f"{name}={wanted.__name__}: say what it is over: {wanted.__name__}.of('column').")
    return p.NamedAggregate(name, parse_aggregate(_given(name, wanted), schema, name).sql)


def _user(
    name: str, wanted: AggregatorCall, schema: Schema, register: Callable[[Callable[..., Any]], str]
) -> p.NamedAggregate:
    aggregator = wanted.aggregator
    called = f"{name}={aggregator.__name__}.of(...)"
    if not wanted.arguments:
        raise PipelineError(f"{called}: give at least one column or expression.")
    state, result = getattr(aggregator, "state", None), getattr(aggregator, "result", None)
    if not isinstance(state, Mapping) or not state:
        raise PipelineError(f"{called}: the class needs state, such as state = {{'total': 'double'}}.")
    if not isinstance(result, str):
        raise PipelineError(f"{called}: the class needs the type of its result, such as result = 'double'.")
    unknown = ", ".join(column for column in aggregator.init if column not in state)
    if unknown:
        raise PipelineError(f"{called}: init names {unknown}, which is not in state.")
    arguments = tuple(parse(_given(name, argument), schema).sql for argument in wanted.arguments)
    user = p.UserAggregate(
        path=register(aggregator),
        arguments=arguments,
        state={column: str(DataType.parse(kind)) for column, kind in state.items()},
        result=str(DataType.parse(result)),
    )
    return p.NamedAggregate(name, f"{aggregator.__name__}({', '.join(arguments)})", user)


def _given(name: str, expression: object) -> str | exp.Expr:
    if isinstance(expression, Column):
        return expression.tree
    if not isinstance(expression, str):
        raise PipelineError(
            f"{name}: {expression!r} is not an expression. Write SQL text, build it from col(...), or use an Aggregator."
        )
    return expression
