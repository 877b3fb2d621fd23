"""Mistakes are errors where they are written, and the error says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from fordstone import Pipeline, col, count, mean, tumbling
from fordstone.connectors import files, generator, stdout
from fordstone.connectors.memory import MemorySink, memory
from fordstone.errors import ConfigError, ExpressionError, PipelineError, PlanError, SchemaError
from fordstone.operators.base import resolve_function
from fordstone.plan.plan import Input, read_plan
from fordstone.planner.check import stream_types

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double"}


def top_level(record):
    return record


def test_an_unknown_column_is_named_with_its_step_and_a_caret_under_it(readings):
    with pytest.raises(ExpressionError) as caught:
        readings.filter("temp > 1 AND tmp < 3", name="hot")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("step hot:")
    assert "temp" in lines[0]
    assert lines[1] == "  temp > 1 AND tmp < 3"
    assert lines[2].index("^") == lines[1].index("tmp <")


def test_a_mistake_leaves_the_pipeline_as_it_was(pipeline, readings):
    before = list(pipeline._graph.steps)
    with pytest.raises(PipelineError):
        readings.select("nothing")
    assert pipeline._graph.steps == before
    readings.select("temp").sink("out", memory(MemorySink()))
    assert pipeline.plan()


def test_text_and_built_expressions_make_the_same_plan():
    plans = []
    written: tuple[Any, Any] = ("temp > 3", {"n": "count(*)", "m": "avg(temp)"})
    built: tuple[Any, Any] = (col("temp") > 3, {"n": count(), "m": mean("temp")})
    for predicate, aggregate in (written, built):
        pipeline = Pipeline("same")
        stream = pipeline.source("readings", files("in/*.jsonl"), schema=SCHEMA, time="ts")
        stream.filter(predicate).group_by("device").window(tumbling("10s")).agg(**aggregate).sink(
            "out", files("out", format="jsonl")
        )
        plans.append(pipeline.plan())
    assert plans[0] == plans[1]


def test_a_plan_reads_back_to_the_same_plan(pipeline, readings):
    late = (
        readings.with_columns("temp * 2 AS twice")
        .group_by("device")
        .window(tumbling("10s", offset="3s"))
        .agg(n="count(*)")
    )
    late.late.sink("late", files("late", format="jsonl"))
    late.sink("out", files("out", format="parquet"))
    readings.map(top_level).flat_map("split(device, '-') AS part").union(
        readings.flat_map("split(device, '/') AS part")
    ).sink("parts", stdout())
    readings.iterate(lambda s: (s.filter("temp > 9"), s.filter("temp <= 9"))).sink("looped", stdout())
    plan = pipeline.plan()
    again = read_plan(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()
    assert list(stream_types(again)) == list(stream_types(plan))


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"pipeline":"x","steps":[{"op":"nonsense","name":"a"}]}']
)
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(PlanError):
        read_plan(data)


def test_a_plan_of_another_version_is_refused(pipeline, readings):
    readings.sink("out", stdout())
    with pytest.raises(PlanError, match="version 99"):
        read_plan(pipeline.plan().to_json().replace(b'"version":1', b'"version":99'))


def test_the_order_of_columns_survives_the_plan(pipeline, readings):
    readings.select("*").sink("out", stdout())
    types = stream_types(read_plan(pipeline.plan().to_json()))
    assert types[Input("readings")].schema.names() == ("device", "ts", "temp")


def test_a_window_without_event_time_says_where_to_declare_it(pipeline):
    stream = pipeline.source("rows", generator(rows=3), schema={"n": "bigint"})
    with pytest.raises(PipelineError, match="time="):
        stream.group_by("n").window(tumbling("10s")).agg(c="count(*)")


def test_a_select_that_drops_the_time_column_drops_event_time(readings):
    with pytest.raises(PipelineError, match="event time"):
        readings.select("device").group_by("device").window(tumbling("10s")).agg(n="count(*)")


def test_a_renamed_time_column_is_still_event_time(readings):
    renamed = readings.select("device", "ts AS at").group_by("device").window(tumbling("10s")).agg(n="count(*)")
    assert "window_start" in renamed.schema


def test_running_results_cannot_be_aggregated_but_may_be_filtered_and_selected(readings):
    running = readings.group_by("device").agg(n="count(*)")
    with pytest.raises(PipelineError, match="replace each other by key"):
        running.group_by("n").agg(c="count(*)")
    with pytest.raises(PipelineError, match="keep device unchanged"):
        running.select("n")
    kept = running.filter("n > 2").select("device AS d", "n")
    assert kept._type.upsert_key == ("d",)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda s: s.group_by("nothing").agg(n="count(*)"), "no column 'nothing'"),
        (lambda s: s.group_by("device", "device").agg(n="count(*)"), "group_by names a column twice: device, device"),
        (lambda s: s.group_by("device", "device").ewma(slow="temp", alpha=0.5), "names a column twice"),
        (lambda s: s.deduplicate("device", "device", within="1s"), "deduplicate names a column twice"),
        (lambda s: s.group_by("device").agg(), "at least one aggregate"),
        (lambda s: s.group_by("device").agg(device="count(*)"), "given twice"),
        (lambda s: s.group_by("device").agg(n="temp"), "stands outside of an aggregate"),
        (lambda s: s.select(), "Name at least one"),
        (lambda s: s.select("temp", "temp * 2 AS temp"), "called 'temp'"),
        (lambda s: s.flat_map("temp AS x"), "needs an array"),
        (lambda s: s.filter("temp"), "a condition is needed"),
        (lambda s: s.filter(7), "not an expression"),
        (lambda s: s.late, "no late rows"),
        (lambda s: s.union(s.select("device")), "one schema"),
        (lambda s: s.map("not a function"), "not a function"),
        (lambda s: s.iterate(lambda inner: inner), "pair of streams"),
        (lambda s: s.iterate(lambda inner: (inner.select("temp"), inner)), "columns that went in"),
        (lambda s: s.iterate(lambda inner: (inner, s)), "from inside"),
        (lambda s: s.iterate(lambda inner: (inner.union(s), inner)), "from outside"),
        (
            lambda s: s.iterate(lambda i: (i, i)).group_by("device").window(tumbling("1s")).agg(n="count(*)"),
            "below a loop",
        ),
        (lambda s: s.sink("../out", stdout()), "a name has"),
    ],
)
def test_a_mistake_is_an_error_that_says_so(readings, mistake, says):
    with pytest.raises(PipelineError, match=says):
        mistake(readings)


@pytest.mark.parametrize("size", ["0s", "10", "", "-5s", "ten seconds", 10])
def test_a_window_of_no_length_is_refused(size):
    with pytest.raises(ConfigError, match="tumbling size"):
        tumbling(size)


def test_two_steps_of_one_name_are_refused(readings):
    readings.filter("temp > 1", name="hot")
    with pytest.raises(PipelineError, match="two steps are named 'hot'"):
        readings.filter("temp > 2", name="hot")


def test_a_loop_cannot_be_unaligned():
    stream = Pipeline("loop", mode="unaligned").source("rows", generator(rows=3), schema={"n": "bigint"})
    with pytest.raises(PipelineError, match="mode='aligned'"):
        stream.iterate(lambda s: (s, s))


def test_release_at_once_needs_ids_that_a_replay_gives_again(readings):
    with pytest.raises(PipelineError, match="map_batches"):
        readings.map_batches(lambda frame: frame).sink("out", stdout(), release="at_once")
    with pytest.raises(PipelineError, match="running results"):
        readings.group_by("device").agg(n="count(*)").sink("out", stdout(), release="at_once")
    with pytest.raises(PipelineError, match="below a loop"):
        readings.iterate(lambda s: (s, s)).sink("out", stdout(), release="at_once")
    readings.filter("temp > 1").sink("rows", stdout(), release="at_once")
    readings.group_by("device").window(tumbling("1s")).agg(n="count(*)").sink("windows", stdout(), release="at_once")


def test_asking_for_more_than_a_path_gives_is_an_error():
    strict = Pipeline("strict", guarantee="exactly_once")
    stream = strict.source("rows", generator(rows=3), schema={"n": "bigint"})
    with pytest.raises(PipelineError, match="at_least_once"):
        stream.sink("out", stdout())
    stream.sink("kept", files("out", format="jsonl"))


def test_a_time_column_must_be_a_timestamp(pipeline):
    with pytest.raises(SchemaError, match="needs a timestamp"):
        pipeline.source("rows", generator(rows=1), schema={"n": "bigint"}, time="n")
    with pytest.raises(SchemaError, match="not a column"):
        pipeline.source("rows", generator(rows=1), schema={"n": "bigint"}, time="ts")


def test_a_pipeline_without_a_sink_does_nothing_and_says_so(pipeline, readings):
    with pytest.raises(PipelineError, match="no sink"):
        pipeline.plan()


def test_a_top_level_function_has_an_import_path_and_a_lambda_has_none(pipeline, readings):
    path = pipeline._graph.register(top_level)
    assert path == f"{__name__}:top_level"
    local = pipeline._graph.register(lambda record: record)
    with pytest.raises(PlanError, match="Move it to the top level"):
        resolve_function(local, {})
    assert resolve_function(path, {}) is top_level or callable(resolve_function(path, {}))


def test_a_function_that_cannot_be_imported_says_which():
    with pytest.raises(PlanError, match="no_such_module:f"):
        resolve_function("no_such_module:f", {})


def test_what_completes_on_pipelines_and_streams_is_for_users(pipeline, readings):
    internal = {"add", "add_loop", "building", "has", "name_for", "register", "type_of"}
    assert not internal & {*dir(pipeline), *dir(readings), *dir(readings.group_by("device"))}
