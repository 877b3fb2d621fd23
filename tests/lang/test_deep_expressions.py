"""Expressions that are nested so deeply that going through them would run out of stack: refused, and never a crash."""

from __future__ import annotations

import pytest

from fordstone import Pipeline
from fordstone.connectors import memory
from fordstone.errors import ExpressionError, FordstoneError
from fordstone.lang.dialect import DEPTH_MAX, read
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, StreamType
from fordstone.planner.check import derive

DEEP = {
    "parentheses": "(" * 5_000 + "x > 1" + ")" * 5_000,
    "chain": " AND ".join(["x > 1"] * 3_000),
    "sum": "+".join(["x"] * 3_000) + " > 1",
    "not": "NOT " * 3_000 + "x > 1",
    "case": "CASE WHEN x > 1 THEN TRUE ELSE " * 500 + "FALSE" + " END" * 500,
}
STREAM = StreamType(schema=Schema.of({"ts": "timestamp", "x": "double"}), time=EventTime(column="ts"))


@pytest.mark.parametrize("kind", DEEP)
def test_a_filter_that_is_nested_too_deeply_is_refused(kind):
    rows = Pipeline("deep").source("rows", memory([]), schema={"x": "double"})
    with pytest.raises(ExpressionError, match="nested too deeply"):
        rows.filter(DEEP[kind])


@pytest.mark.parametrize("kind", DEEP)
def test_a_pattern_of_a_plan_that_is_nested_too_deeply_is_refused(kind):
    stages = (p.Stage(name="a", predicate=DEEP[kind]),)
    step = p.Match(name="m", input=p.Input("rows"), keys=(), pattern="p", stages=stages, measures=("count(*) AS n",))
    with pytest.raises(FordstoneError, match="nested too deeply"):
        derive(step, {p.Input("rows"): STREAM})


def test_an_expression_as_deep_as_may_be_is_read():
    chain = " AND ".join(["x"] * (DEPTH_MAX - 1))
    assert read(chain).sql() == chain
    with pytest.raises(ExpressionError, match="nested too deeply"):
        read(f"{chain} AND x")


def test_many_alternatives_are_not_deep():
    read(f"x IN ({', '.join(map(str, range(5_000)))})")
