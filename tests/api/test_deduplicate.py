"""What `deduplicate` adds to a plan, and what it refuses where it is written."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fordstone import tumbling
from fordstone.connectors import files, generator
from fordstone.errors import ConfigError, PipelineError, SchemaError
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime
from fordstone.planner.check import stream_types

SCHEMA = {"id": "string", "device": "string", "ts": "timestamp", "tags": "array<string>"}


@pytest.fixture
def events(pipeline):
    return pipeline.source("events", files("in/*.jsonl"), schema=SCHEMA, time="ts", lateness="5s")


def test_rows_keep_their_columns_and_their_time(pipeline, events):
    once = events.deduplicate("id", "device", within="1h")
    assert (once.name, once.schema) == ("deduplicate", events.schema)
    assert pipeline._graph.steps[-1] == p.Deduplicate(
        name="deduplicate", input=p.Input("events"), keys=("id", "device"), within_us=3_600_000_000
    )
    once.group_by("device").window(tumbling("10s")).agg(n="count(*)")
    once.late.sink("late", files("late", format="jsonl"))
    assert once.late.schema == events.schema


def test_a_span_may_be_a_timedelta_and_the_step_may_be_named(pipeline, events):
    events.deduplicate("id", within=timedelta(minutes=1), name="once")
    step = pipeline._graph.steps[-1]
    assert (step.name, step.within_us) == ("once", 60_000_000)


def test_after_windows_the_time_stays_that_of_the_windows(pipeline, events):
    counts = events.group_by("device").window(tumbling("10s")).agg(n="count(*)")
    counts.deduplicate("device", "n", within="1m", name="once").sink("out", files("out", format="jsonl"))
    stream = stream_types(pipeline.plan())[p.Input("once")]
    assert (stream.time, stream.windowed) == (EventTime(column="window_end", shift_us=-1), False)


def test_a_plan_with_it_reads_back_to_the_same_plan(pipeline, events):
    events.deduplicate("id", within="1h").sink("out", files("out", format="jsonl"))
    plan = pipeline.plan()
    assert p.read_plan(plan.to_json()) == plan


@pytest.mark.parametrize("within", ["0s", "0us", timedelta(0), timedelta(seconds=-1)])
def test_the_span_is_longer_than_zero(events, within):
    with pytest.raises(ConfigError, match=r"within: .* must be longer than zero"):
        events.deduplicate("id", within=within)


@pytest.mark.parametrize("within", [5, None, "soon", "5"])
def test_the_span_has_a_unit(events, within: Any):
    with pytest.raises(ConfigError, match=r"within: .* is not a span of time"):
        events.deduplicate("id", within=within)


@pytest.mark.parametrize("within_us", [b"0", b"-5"])
def test_a_bad_span_in_a_stored_plan_is_refused_too(pipeline, events, within_us):
    events.deduplicate("id", within="5us").sink("out", files("out", format="jsonl"))
    stored = p.read_plan(pipeline.plan().to_json().replace(b'"within_us":5', b'"within_us":' + within_us))
    with pytest.raises(PipelineError, match=r"step deduplicate: within=.* longer than zero"):
        stream_types(stored)


def test_it_needs_keys_that_exist_and_can_be_compared(events):
    with pytest.raises(PipelineError, match="at least one column to tell rows apart by"):
        events.deduplicate(within="1h")
    with pytest.raises(SchemaError, match="no column 'nobody'"):
        events.deduplicate("nobody", within="1h")
    with pytest.raises(SchemaError, match="deduplicate: column 'tags' is array<string>, which cannot be a key"):
        events.deduplicate("tags", within="1h")


def test_it_needs_event_time(pipeline):
    stream = pipeline.source("rows", generator(rows=3), schema={"n": "bigint"})
    with pytest.raises(PipelineError, match=r"deduplicate needs event time, and rows has none.*time="):
        stream.deduplicate("n", within="1h")


def test_it_cannot_take_rows_that_replace_each_other(events):
    running = events.group_by("id").agg(n="count(*)")
    with pytest.raises(PipelineError, match="deduplicate cannot take rows that replace each other"):
        running.deduplicate("id", within="1h")


def test_its_rows_have_no_ids_to_release_at_once_with(events):
    with pytest.raises(PipelineError, match=r"release='commit'"):
        events.deduplicate("id", within="1h").sink("now", files("now", format="jsonl"), release="at_once")
