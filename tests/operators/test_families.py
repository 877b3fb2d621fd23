"""What holds for every family of operators: each step has one, and states come from the backend that was handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from fordstone import KeyedFunction, Pattern, Pipeline, Stream, ValueState, by_count, session, sliding, tumbling
from fordstone.connectors import MemorySink, memory
from fordstone.operators.base import OperatorContext
from fordstone.operators.registry import FAMILIES, make_operator
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.state.base import State
from fordstone.state.memory import MemoryBackend

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}


class Recording(MemoryBackend):
    """Remembers which states it has made."""

    def __init__(self) -> None:
        self.made: list[State] = []
        self.indexes = 0

    def table(self, *args: Any, **kwargs: Any) -> Any:
        return self._kept(super().table(*args, **kwargs))

    def timeline(self, *args: Any, **kwargs: Any) -> Any:
        return self._kept(super().timeline(*args, **kwargs))

    def buffer(self, *args: Any, **kwargs: Any) -> Any:
        return self._kept(super().buffer(*args, **kwargs))

    def search_buffer(self, *args: Any, **kwargs: Any) -> Any:
        return self._kept(super().search_buffer(*args, **kwargs))

    def key_index(self, *args: Any, **kwargs: Any) -> Any:
        self.indexes += 1
        return super().key_index(*args, **kwargs)

    def _kept(self, state: State) -> State:
        self.made.append(state)
        return state


class Count(KeyedFunction):
    seen = ValueState("bigint")

    def process(self, row, context):
        yield row


STATEFUL: dict[str, Callable[[Stream, Stream], Stream]] = {
    "running": lambda rows, _: rows.group_by("k").agg(n="count(*)"),
    "tumbling": lambda rows, _: rows.group_by("k").window(tumbling("1s"), early="1s").agg(n="count(*)"),
    "sliding": lambda rows, _: rows.group_by("k").window(sliding("4s", every="1s"), early="1s").agg(n="count(*)"),
    "session": lambda rows, _: rows.group_by("k").window(session("1s")).agg(n="count(*)"),
    "count": lambda rows, _: rows.group_by("k").window(by_count(4, every=2)).agg(n="count(*)"),
    "ewma": lambda rows, _: rows.group_by("k").ewma(alpha=0.5, y="x"),
    "deduplicate": lambda rows, _: rows.deduplicate("k", within="1s"),
    "distinct": lambda rows, _: rows.select("k", "x").distinct(),
    "distinct_in_time": lambda rows, _: rows.distinct(),
    "over": lambda rows, _: rows.group_by("k").over(rows=2, y="sum(x)"),
    "running_top": lambda rows, _: rows.top(2, by="x DESC", per="k"),
    "top": lambda rows, _: rows.top(2, by="x DESC", per=["k", "ts"]),
    "join": lambda rows, other: rows.join(other, on="k", between=("0s", "1s"), how="full"),
    "lookup": lambda rows, other: rows.join_latest(other, on="k"),
    "match": lambda rows, _: rows.group_by("k").match(
        Pattern("p").start("a", "x > 1").then("b", "x < 1"), measures={"n": "count(*)"}
    ),
    "process": lambda rows, _: rows.group_by("k").process(Count, schema=SCHEMA),
}


@pytest.mark.parametrize("family", STATEFUL)
def test_every_state_of_an_operator_was_made_by_the_backend_of_its_context(family):
    pipeline = Pipeline("p")
    rows, other = (pipeline.source(name, memory([[]]), schema=SCHEMA, time="ts") for name in ("rows", "other"))
    made = STATEFUL[family](rows, other)
    made.sink("out", memory(MemorySink()))
    plan, backend = pipeline.plan(), Recording()
    context = OperatorContext(plan=plan, types=stream_types(plan), functions=pipeline.functions, state=backend)
    states = make_operator(plan.step(made.name), context).states()
    assert states
    assert all(any(state is made for made in backend.made) for state in states.values())
    assert (backend.indexes > 0) is (family == "deduplicate")


def test_every_kind_of_step_has_exactly_one_family():
    served = [kind for family in FAMILIES for kind in family.steps]
    assert sorted(kind.__name__ for kind in served) == sorted(kind.__name__ for kind in get_args(p.Step))
