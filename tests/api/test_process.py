"""What `process` adds to a plan, and what it refuses where it is written."""

from __future__ import annotations

from typing import Any

import pytest
from tests.edge.process_functions import OUT_SCHEMA, Visits

from fordstone import KeyedFunction, ListState, MapState, Pipeline, ValueState, tumbling
from fordstone.connectors import files, generator
from fordstone.errors import PipelineError, SchemaError
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime
from fordstone.planner.check import stream_types

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double", "tags": "array<string>"}


def declaring(**states: Any) -> type[KeyedFunction]:
    """A class with these states."""
    return type("Declared", (KeyedFunction,), {"process": lambda self, row, ctx: None, **states})


def step_of(pipeline: Pipeline) -> p.Process:
    step = pipeline._graph.steps[-1]
    assert isinstance(step, p.Process)
    return step


def test_the_plan_names_the_class_and_holds_its_states(pipeline, grouped):
    visited = grouped.process(Visits, schema=OUT_SCHEMA)
    step = step_of(pipeline)
    assert (visited.name, visited.schema.to_dict(), step.path) == (
        "process_device",
        OUT_SCHEMA,
        "tests.edge.process_functions:Visits",
    )
    assert step.states == (
        p.KeyedState(name="n", kind="value", type="bigint"),
        p.KeyedState(name="lately", kind="list", type="bigint", ttl_us=5_000_000),
        p.KeyedState(name="counts", kind="map", key_type="bigint", type="bigint", ttl_us=30_000_000),
    )
    visited.sink("out", files("out", format="jsonl"))
    plan = pipeline.plan()
    assert p.read_plan(plan.to_json()) == plan


def test_states_of_bases_count_and_may_be_replaced(pipeline, grouped):
    class More(Visits):
        n = ValueState("double")
        more = ListState("string")
        counts = None  # type: ignore[assignment]  # no longer a state

    grouped.process(More)
    assert [(state.name, state.type) for state in step_of(pipeline).states] == [
        ("lately", "bigint"),
        ("n", "double"),
        ("more", "string"),
    ]


def test_the_stream_keeps_its_time_where_the_column_is_given_and_has_late_rows(pipeline, grouped):
    visited = grouped.process(Visits, schema=OUT_SCHEMA, name="timed")
    untimed = grouped.process(Visits, schema={"n": "bigint"}, name="untimed")
    untimed.sink("untimed_out", files("untimed", format="jsonl"))
    visited.late.sink("late", files("late", format="jsonl"))
    types = stream_types(pipeline.plan())
    assert (types[p.Input("timed")].time, types[p.Input("untimed")].time) == (EventTime(column="ts"), None)
    assert types[p.Input("timed", "late")].schema.to_dict() == SCHEMA
    with pytest.raises(PipelineError, match=r"no ids that a replay gives again"):
        visited.sink("now", files("now", format="jsonl"), release="at_once")
    visited.group_by("k").window(tumbling("10s")).agg(n="count(*)")


def test_rows_are_ordered_where_there_is_time_unless_set_otherwise(pipeline, grouped):
    ordered = []
    for options in ({}, {"ordered": False}):
        grouped.process(Visits, **options)
        ordered.append(step_of(pipeline).ordered)
    timeless = pipeline.source("rows", generator(rows=3), schema={"n": "bigint"})
    visited = timeless.group_by("n").process(Visits)
    ordered.append(step_of(pipeline).ordered)
    assert ordered == [True, False, False]
    assert visited.schema.to_dict() == {"n": "bigint"}
    with pytest.raises(PipelineError, match="has no late rows"):
        _ = visited.late
    with pytest.raises(PipelineError, match=r"process\(ordered=True\) needs event time, and rows has none"):
        timeless.group_by("n").process(Visits, ordered=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda row, ctx: None, "a class that derives from KeyedFunction; this is <function"),
        (Visits(), "this is an object of Visits"),
        (dict, "this is <class 'dict'>"),
        (None, "this is None"),
        (type("Empty", (KeyedFunction,), {}), r"Empty has no process\(row, ctx\)"),
    ],
)
def test_what_is_no_class_of_the_kind_is_refused(grouped, given, says):
    with pytest.raises(PipelineError, match=f"step process_device: .*{says}"):
        grouped.process(given)


def test_a_class_that_needs_arguments_is_refused(grouped):
    class Needs(Visits):
        def __init__(self, threshold: float, unit: str = "C") -> None:
            pass

    with pytest.raises(PipelineError, match=r"constructed in every task, as Needs\(\); it cannot need threshold"):
        grouped.process(Needs)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ({"n": ValueState("number")}, "state n: unknown type 'number'"),
        ({"n": ValueState("null")}, "nothing to remember"),
        ({"n": ValueState(float)}, "is not a type"),  # type: ignore[arg-type]
        ({"n": ValueState}, r'state n has no type. Write n = ValueState\("double"\)'),
        ({"n": ListState("array<what>")}, "state n: unknown type"),
        ({"n": MapState("double", "string")}, "double cannot be the key of a map"),
        ({"n": MapState("array<string>", "string")}, "cannot be the key of a map"),
        ({"n": ValueState("double", ttl="0s")}, "state n: ttl: '0s' must be longer than zero"),
        ({"n": ValueState("double", ttl="soon")}, "state n: ttl: 'soon' is not a span of time"),
        ({"__n": ValueState("double")}, "state __n"),
        ({"on_timer": ValueState("double")}, "KeyedFunction has a method of that name"),
    ],
)
def test_states_that_cannot_be_kept_are_refused_by_name(pipeline, grouped, states, says):
    before = list(pipeline._graph.steps)
    with pytest.raises(PipelineError, match=f"step process_device.*{says}"):
        grouped.process(declaring(**states))
    assert pipeline._graph.steps == before


def test_a_stored_plan_is_judged_by_the_same_rules(pipeline, grouped):
    grouped.process(Visits, schema=OUT_SCHEMA).sink("out", files("out", format="jsonl"))
    stored = p.read_plan(pipeline.plan().to_json().replace(b'"ttl_us":5000000', b'"ttl_us":0'))
    with pytest.raises(SchemaError, match="state lately: ttl must be longer than zero"):
        stream_types(stored)


def test_it_cannot_stand_in_loops_or_after_upserts_or_with_windows(readings, grouped):
    with pytest.raises(PipelineError, match="process is not possible inside or below a loop"):
        readings.iterate(lambda rows: (rows, rows)).group_by("device").process(Visits)
    with pytest.raises(PipelineError, match="process cannot take rows that replace each other"):
        grouped.agg(n="count(*)").group_by("device").process(Visits)
    with pytest.raises(PipelineError, match="no windows"):
        grouped.window(tumbling("1s")).process(Visits)


def test_keys_exist_and_are_plain_and_output_columns_are_not_reserved(readings, grouped):
    with pytest.raises(SchemaError, match="no column 'nobody'"):
        readings.group_by("nobody").process(Visits)
    with pytest.raises(SchemaError, match="array"):
        readings.group_by("tags").process(Visits)
    with pytest.raises(SchemaError, match="reserved"):
        grouped.process(Visits, schema={"__id": "string"})


def test_a_state_outside_of_its_function_says_where_it_lives():
    for use in (
        Visits.n.get,
        lambda: Visits.n.set(1),
        lambda: Visits.lately.append(1),
        lambda: list(Visits.lately),
        lambda: len(Visits.counts),
        lambda: Visits.counts[1],
        lambda: 1 in Visits.counts,
    ):
        with pytest.raises(PipelineError, match="has a value only while process"):
            use()
