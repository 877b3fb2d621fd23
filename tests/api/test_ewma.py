"""What `ewma` adds to a plan, and what it refuses where it is written."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from fordstone import col, tumbling
from fordstone.connectors import files, generator
from fordstone.errors import ConfigError, ExpressionError, PipelineError, SchemaError
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime
from fordstone.planner.check import stream_types

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double", "n": "bigint", "tags": "array<string>"}


def test_a_stream_gets_the_new_columns_as_doubles_after_its_own(grouped):
    smooth = grouped.ewma(smooth="temp", whole="n * 2", alpha=0.2)
    assert smooth.schema.to_dict() == SCHEMA | {"smooth": "double", "whole": "double"}
    assert smooth.name == "ewma_device"
    assert grouped.ewma(smooth="temp", alpha=0.2, name="again").name == "again"


def test_text_and_built_expressions_make_the_same_step(pipeline, grouped):
    grouped.ewma(smooth="temp - 1", whole="n", alpha=1, name="one")
    grouped.ewma(smooth=col("temp") - 1, whole=col("n").as_("whole"), alpha=1.0, name="two")
    one, two = pipeline._graph.steps[-2:]
    assert msgspec.structs.replace(two, name="one") == one
    assert one.columns == ("temp - 1 AS smooth", "CAST(n AS DOUBLE) AS whole")


def test_the_stream_is_append_keeps_its_time_and_has_no_ids(pipeline, grouped):
    smooth = grouped.ewma(smooth="temp", alpha=0.2)
    smooth.sink("out", files("out", format="jsonl"))
    smooth.late.sink("late", files("late", format="jsonl"))
    types = stream_types(p.read_plan(pipeline.plan().to_json()))
    stream, late = types[p.Input("ewma_device")], types[p.Input("ewma_device", "late")]
    assert (stream.time, stream.upsert_key, stream.row_wise) == (EventTime(column="ts"), None, False)
    assert (late.time, late.schema.to_dict()) == (None, SCHEMA)
    with pytest.raises(PipelineError, match=r"have no ids.*release='commit'"):
        smooth.sink("now", files("now", format="jsonl"), release="at_once")


def test_a_plan_with_it_reads_back_to_the_same_plan(pipeline, grouped):
    grouped.ewma(smooth="temp", alpha=0.1).sink("out", files("out", format="jsonl"))
    plan = pipeline.plan()
    assert p.read_plan(plan.to_json()) == plan
    assert p.read_plan(plan.to_json()).digest() == plan.digest()


def test_after_windows_the_time_stays_that_of_the_windows(pipeline, grouped):
    means = grouped.window(tumbling("10s")).agg(mean="avg(temp)")
    means.group_by("device").ewma(smooth="mean", alpha=0.5, name="s").sink("out", files("out", format="jsonl"))
    stream = stream_types(pipeline.plan())[p.Input("s")]
    assert (stream.time, stream.windowed) == (EventTime(column="window_end", shift_us=-1), False)


def test_windows_and_another_ewma_may_follow(grouped):
    smooth = grouped.ewma(smooth="temp", alpha=0.2)
    smooth.group_by("device").ewma(twice="smooth", alpha=0.2)
    smooth.group_by("device").window(tumbling("10s")).agg(top="max(smooth)")


@pytest.mark.parametrize("alpha", [0, -0.2, 1.0000001, 2, float("nan"), float("inf")])
def test_alpha_lies_above_nought_and_not_above_one(grouped, alpha):
    with pytest.raises(PipelineError, match=r"step ewma_device: alpha=.* above 0 and at most 1"):
        grouped.ewma(smooth="temp", alpha=alpha)


@pytest.mark.parametrize("alpha", [True, "0.2", col("n")])
def test_alpha_is_a_number(grouped, alpha: Any):
    with pytest.raises(PipelineError, match="is not a number"):
        grouped.ewma(smooth="temp", alpha=alpha)


def test_a_half_life_takes_the_place_of_alpha(pipeline, grouped):
    smooth = grouped.ewma(smooth="temp", half_life="30s")
    step = pipeline._graph.steps[-1]
    assert (step.alpha, step.half_life_us) == (None, 30_000_000)
    assert smooth.schema.to_dict() == SCHEMA | {"smooth": "double"}
    grouped.ewma(smooth="temp", half_life=timedelta(minutes=1), name="slow")
    assert pipeline._graph.steps[-1].half_life_us == 60_000_000


def test_either_alpha_or_a_half_life_is_given(grouped):
    with pytest.raises(PipelineError, match=r"either alpha= .* or half_life= .* not both"):
        grouped.ewma(smooth="temp")
    with pytest.raises(PipelineError, match=r"either alpha= .* or half_life= .* not both"):
        grouped.ewma(smooth="temp", alpha=0.5, half_life="1s")


@pytest.mark.parametrize(
    ("half_life", "says"),
    [("0s", "longer than zero"), (timedelta(seconds=-1), "longer than zero"), ("5", "not a span"), (5, "not a span")],
)
def test_a_half_life_is_a_span_of_time_longer_than_zero(grouped, half_life: Any, says):
    with pytest.raises(ConfigError, match=f"half_life: .* {says}"):
        grouped.ewma(smooth="temp", half_life=half_life)


def test_a_bad_half_life_in_a_stored_plan_is_refused_too(pipeline, grouped):
    grouped.ewma(smooth="temp", half_life="5us").sink("out", files("out", format="jsonl"))
    stored = p.read_plan(pipeline.plan().to_json().replace(b'"half_life_us":5', b'"half_life_us":-5'))
    with pytest.raises(PipelineError, match=r"half_life=-5us must be longer than zero"):
        stream_types(stored)


def test_a_bad_alpha_in_a_stored_plan_is_refused_too(pipeline, grouped):
    grouped.ewma(smooth="temp", alpha=0.25).sink("out", files("out", format="jsonl"))
    stored = p.read_plan(pipeline.plan().to_json().replace(b'"alpha":0.25', b'"alpha":1.25'))
    with pytest.raises(PipelineError, match=r"alpha=1.25"):
        stream_types(stored)


def test_it_needs_event_time(pipeline):
    stream = pipeline.source("rows", generator(rows=3), schema={"n": "bigint"})
    with pytest.raises(PipelineError, match=r"ewma needs event time, and rows has none.*time="):
        stream.group_by("n").ewma(s="n", alpha=0.5)


def test_it_cannot_stand_below_a_loop(readings):
    with pytest.raises(PipelineError, match="none inside or below a loop"):
        readings.iterate(lambda rows: (rows, rows)).group_by("device").ewma(s="temp", alpha=0.5)


def test_it_cannot_take_rows_that_replace_each_other(grouped):
    running = grouped.agg(n="count(*)")
    with pytest.raises(PipelineError, match="ewma cannot take rows that replace each other"):
        running.group_by("device").ewma(s="n", alpha=0.5)


def test_it_has_no_windows(grouped):
    with pytest.raises(PipelineError, match="no windows"):
        grouped.window(tumbling("1s")).ewma(s="temp", alpha=0.5)


def test_names_that_clash_are_refused(grouped):
    with pytest.raises(SchemaError, match="a column 'temp' already"):
        grouped.ewma(temp="temp", alpha=0.5)
    with pytest.raises(ExpressionError, match="'a' and also AS b"):
        grouped.ewma(a="temp AS b", alpha=0.5)
    with pytest.raises(SchemaError, match="reserved"):
        grouped.ewma(__s="temp", alpha=0.5)


@pytest.mark.parametrize(("sql", "kind"), [("device", "string"), ("ts", "timestamp"), ("temp > 1", "boolean")])
def test_what_is_not_a_number_is_refused_with_its_place(grouped, sql, kind):
    with pytest.raises(ExpressionError, match=f"step ewma_device: a number is needed here, but this is {kind}"):
        grouped.ewma(s=sql, alpha=0.5)


def test_at_least_one_column_and_known_keys_are_needed(readings):
    with pytest.raises(PipelineError, match="at least one column"):
        readings.group_by("device").ewma(alpha=0.5)
    with pytest.raises(SchemaError, match="no column 'nobody'"):
        readings.group_by("nobody").ewma(s="temp", alpha=0.5)
    with pytest.raises(SchemaError, match="array"):
        readings.group_by("tags").ewma(s="temp", alpha=0.5)


def test_a_mistake_leaves_the_pipeline_as_it_was(pipeline, grouped):
    before = list(pipeline._graph.steps)
    with pytest.raises(PipelineError):
        grouped.ewma(smooth="temp", alpha=3)
    assert pipeline._graph.steps == before


def test_streams_without_late_rows_say_who_has_them(readings):
    with pytest.raises(PipelineError, match="only steps that wait for time have, such as windows and ewma"):
        _ = readings.late
