"""What `agg(...)` takes and refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import polars as pl
import pytest

from fordstone import (
    Aggregator,
    Pipeline,
    Stream,
    col,
    collect,
    count_distinct,
    first,
    last,
    median,
    quantile,
    stddev,
    variance,
)
from fordstone.connectors.memory import memory
from fordstone.errors import ExpressionError, PipelineError, SchemaError
from fordstone.lang.aggregates import parse_aggregate
from fordstone.plan.plan import Aggregate

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "s": "string"}


class Total(Aggregator):
    """A sum."""

    state: ClassVar[Mapping[str, str]] = {"total": "double"}
    result = "double"

    def add(self, *values: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"total": values[0].sum()}

    def merge(self, *state: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"total": state[0].sum()}

    def finish(self, *state: pl.Expr) -> pl.Expr:
        return state[0]


def rows(time: str | None = "ts") -> Stream:
    return Pipeline("p").source("rows", memory([[]]), schema=SCHEMA, time=time)


@pytest.mark.parametrize(
    ("built", "text"),
    [
        (first("x"), "first(x)"), (last(col("x") * 2), "last(x * 2)"), (variance("x"), "variance(x)"), (stddev("x"), "stddev(x)"),
        (count_distinct("s"), "count_distinct(s)"), (count_distinct("s", lgk=14), "count_distinct(s, 14)"), (median("x"), "median(x)"),
        (quantile("x", 0.9), "quantile(x, 0.9D)"), (quantile("x", 1, k=400), "quantile(x, 1, 400)"), (collect("s"), "collect(s)"),
    ],
)  # fmt: skip
def test_what_is_built_is_what_is_written(built: Any, text: str) -> None:
    schema = rows().schema
    assert parse_aggregate(built.tree, schema, "r") == parse_aggregate(text, schema, "r")


@pytest.mark.parametrize("text", ["first(x)", "last(x)"])
def test_first_and_last_need_event_time(text: str) -> None:
    with pytest.raises(PipelineError, match=r"needs event time, and rows has none.\s+Declare it at the source"):
        rows(time=None).group_by("k").agg(r=text)


def test_what_needs_no_time_runs_without() -> None:
    found = rows(time=None).group_by("k").agg(a="collect(x)", b="median(x)", c="count_distinct(s)", d="variance(x)")
    assert {name: str(kind) for name, kind in found.schema.items()} == {
        "k": "string", "a": "array<double>", "b": "double", "c": "bigint", "d": "double",
    }  # fmt: skip


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_a_quantile_outside_of_0_and_1_is_refused(q: float) -> None:
    with pytest.raises(ExpressionError, match="q of quantile does not lie between 0 and 1"):
        rows().group_by("k").agg(r=quantile("x", q))


def test_an_own_aggregate_stands_in_the_plan_by_path_with_its_state() -> None:
    stream = rows()
    found = stream.group_by("k").agg(r=Total.of(col("x") + 1), n="count(*)")
    found.sink("out", memory([]))
    (step,) = [step for step in stream.pipeline.plan().steps if isinstance(step, Aggregate)]
    user = step.aggregates[0].user
    assert user is not None
    assert (user.path, user.arguments) == (f"{__name__}:Total", ("x + 1",))
    assert (user.state, user.result) == ({"total": "double"}, "double")
    assert str(found.schema["r"]) == "double"
    assert stream.pipeline.functions[user.path] is Total


def attribute(name: str, value: Any) -> type[Aggregator]:
    return type("Odd", (Total,), {name: value})


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (Total, PipelineError, r"say what it is over: Total.of\('column'\)"),
        (Total.of(), PipelineError, "give at least one column"),
        (Total.of(3), PipelineError, "3 is not an expression"),
        (3, PipelineError, "3 is not an expression"),
        (Total.of("nope"), ExpressionError, "no column 'nope'"),
        (attribute("state", {}).of("x"), PipelineError, "the class needs state"),
        (attribute("result", None).of("x"), PipelineError, "needs the type of its result"),
        (attribute("init", {"other": 1}).of("x"), PipelineError, "init names other, which is not in state"),
        (attribute("state", {"total": "complex"}).of("x"), SchemaError, "unknown type 'complex'"),
        (attribute("result", "complex").of("x"), SchemaError, "unknown type 'complex'"),
    ],
)
def test_a_mistake_with_an_own_aggregate_is_said(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        rows().group_by("k").agg(r=given)
