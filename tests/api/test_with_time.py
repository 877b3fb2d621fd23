"""Where event time may be assigned, and what the errors say where it may not."""

from __future__ import annotations

import pytest

from fordstone import KeyedFunction, Pipeline, Stream, col, tumbling
from fordstone.connectors import files
from fordstone.errors import ConfigError, FordstoneError, PipelineError
from fordstone.plan import plan as p
from fordstone.plan.plan import read_plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.split import split

SCHEMA = {"k": "string", "t": "string", "ms": "bigint", "tags": "array<string>"}


@pytest.fixture
def rows(pipeline: Pipeline) -> Stream:
    return pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA)


class Echo(KeyedFunction):
    """Gives each row back."""

    def process(self, row, ctx):
        yield {"t": row["t"]}


def sink(stream: Stream, name: str = "out") -> None:
    stream.sink(name, files(f"out/{name}", format="jsonl"))


@pytest.mark.parametrize(
    ("expression", "column"),
    [
        ("to_timestamp(t) AS ts", "ts"),
        ("to_timestamp(t)", "event_time"),
        ("timestamp_micros(ms * 1000) AS t", "t"),
        (col("t").cast("timestamp").as_("at"), "at"),
    ],
)
def test_the_expression_becomes_a_column_that_is_the_time(rows: Stream, expression: object, column: str):
    timed = rows.with_time(expression)  # type: ignore[arg-type]  # str and Column
    assert str(timed.schema[column]) == "timestamp"
    assert list(timed.schema) == [*SCHEMA, *([] if column in SCHEMA else [column])]
    sink(timed.group_by("k").window(tumbling("1m")).agg(n="count(*)"))


def test_a_column_that_is_there_is_used_as_it_is(pipeline: Pipeline):
    rows = pipeline.source("rows", files("in/*.jsonl"), schema={"ts": "timestamp"})
    timed = rows.with_time("ts")
    assert list(timed.schema) == ["ts"]
    sink(timed.group_by().window(tumbling("1m")).agg(n="count(*)"))


def test_it_may_stand_after_every_step_that_looks_at_each_row_alone(rows: Stream):
    table = [{"k": "a", "site": "north"}]
    timed = (
        rows.filter("k IS NOT NULL")
        .select("k", "t", "tags")
        .with_columns("upper(k) AS u")
        .flat_map("tags AS tag")
        .lookup(table, on="k")
        .map(lambda row: row)
        .map_batches(lambda frame: frame)
        .with_time("to_timestamp(t) AS ts", lateness="5s", max_ahead=None, idle_after="1m")
    )
    sink(timed.group_by("tag").window(tumbling("1m")).agg(n="count(*)"))
    (source,) = (step for step in timed.pipeline.plan().steps if isinstance(step, p.Source))
    assert (source.timed_by, source.lateness_us, source.max_ahead_us, source.idle_after_us) == (
        timed.name,
        5_000_000,
        None,
        60_000_000,
    )


def test_steps_before_it_keep_working_without_event_time(rows: Stream):
    all_rows = rows.filter("k IS NOT NULL")
    sink(all_rows.with_time("to_timestamp(t)"))
    sink(all_rows.group_by("k").agg(n="count(*)"), "counts")
    with pytest.raises(PipelineError, match=r"filter has none.*\.with_time\(expression\)"):
        all_rows.group_by("k").window(tumbling("1m")).agg(n="count(*)")


def timed_twice(rows: Stream) -> object:
    return rows.with_time("to_timestamp(t) AS ts").with_time("to_timestamp(t)")


def two_times(rows: Stream) -> object:
    rows.with_time("to_timestamp(t) AS ts")
    return rows.filter("k = 'a'").with_time("timestamp_micros(ms) AS ts")


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (timed_twice, "with_time has event time already, in column ts. Leave with_time out"),
        (two_times, "source rows has its event time from step with_time, .* or declare the source twice"),
        (lambda rows: rows.union(rows).with_time("to_timestamp(t)"), "Call with_time on each stream before the union"),
        (
            lambda rows: rows.group_by("k").process(Echo, schema={"t": "string"}).with_time("to_timestamp(t)"),
            "Call with_time before step process",
        ),
        (lambda rows: rows.to_center().with_time("to_timestamp(t)"), r"Call with_time before \.to_center\(\)"),
        (
            lambda rows: rows.iterate(lambda body: (body, body)).with_time("to_timestamp(t)"),
            "no event time inside or below a loop",
        ),
        (
            lambda rows: rows.group_by("k").agg(top="max(t)").with_time("to_timestamp(top)"),
            "with_time cannot take rows that replace each other",
        ),
        (lambda rows: rows.with_time("ms"), "event time is a timestamp, but this is bigint. Use timestamp_seconds"),
        (lambda rows: rows.with_time("t"), r"but this is string. Use to_timestamp\(text\)"),
        (lambda rows: rows.with_time("to_timestamp(s)"), "there is no column"),
        (
            lambda rows: rows.with_time("to_timestamp(t)", lateness="soon"),
            "step with_time: lateness: 'soon' is not a span",
        ),
        (lambda rows: rows.with_time("to_timestamp(t)", lateness="-1s"), "lateness='-1s'|is not a span"),
        (
            lambda rows: rows.with_time("to_timestamp(t)", max_ahead="0s"),
            "step with_time: max_ahead: '0s' must be longer",
        ),
    ],
)
def test_elsewhere_it_is_an_error_that_says_what_to_do(rows: Stream, build, problem: str):
    with pytest.raises(FordstoneError, match=problem) as caught:
        build(rows)
    assert isinstance(caught.value, PipelineError | ConfigError)


def test_a_source_that_has_a_time_takes_no_other(pipeline: Pipeline):
    rows = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA | {"ts": "timestamp"}, time="ts")
    with pytest.raises(PipelineError, match="source rows has its event time from time='ts'"):
        rows.select("k", "t").with_time("to_timestamp(t)")


@pytest.mark.parametrize("option", [{"lateness": "5s"}, {"idle_after": "1m"}])
def test_options_about_the_time_are_given_where_it_is_assigned(pipeline: Pipeline, option: dict[str, str]):
    rows = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, **option)  # type: ignore[arg-type]  # one of several
    with pytest.raises(PipelineError, match=r"source rows has lateness= or idle_after=, .* Give them to with_time"):
        rows.with_time("to_timestamp(t)")


def test_what_was_refused_leaves_the_source_as_it_was(rows: Stream):
    with pytest.raises(PipelineError, match="two steps are named 'same'"):
        rows.filter("k = 'a'", name="same").with_time("to_timestamp(t)", name="same")
    sink(rows.with_time("to_timestamp(t)"))
    (source,) = (step for step in rows.pipeline.plan().steps if isinstance(step, p.Source))
    assert source.timed_by == "with_time"


def test_the_plan_is_the_same_when_it_is_read_back_and_says_where_the_time_is_from(rows: Stream):
    timed = rows.filter("k = 'a'").with_time("to_timestamp(t) AS ts", lateness="2s")
    sink(timed.group_by("k").window(tumbling("1m")).agg(n="count(*)"))
    plan = timed.pipeline.plan()
    assert read_plan(plan.to_json()) == plan
    text = timed.pipeline.explain()
    assert "time      assigned in with_time, rows may be 2s out of order, and 1h ahead of the clock" in text
    assert "with_time: event time CAST(t AS TIMESTAMP) AS ts" in text or "event time to_timestamp(t) AS ts" in text
    assert {"rows", "with_time"} <= set(step_digests(plan, stream_types(plan)))


def test_a_plan_whose_source_does_not_name_the_step_is_refused(rows: Stream):
    sink(rows.with_time("to_timestamp(t) AS ts"))
    text = rows.pipeline.plan().to_json().replace(b'"timed_by":"with_time"', b'"timed_by":null')
    with pytest.raises(PipelineError, match="source rows has to name it"):
        stream_types(read_plan(text))


def test_windows_above_the_cut_are_still_combined_below_it(rows: Stream):
    timed = rows.with_time("to_timestamp(t) AS ts")
    sink(timed.to_center().group_by("k").window(tumbling("1m")).agg(n="count(*)"))
    tiers = split(rows.pipeline.plan())
    (crossing,) = tiers.crossings
    assert crossing.partial
    assert [type(step).__name__ for step in tiers.edge.steps] == ["Source", "WithTime", "Combine", "Sink"]


def test_sql_over_a_stream_with_assigned_time_has_windows(rows: Stream):
    timed = rows.with_time("to_timestamp(t) AS ts", name="timed")
    query = "SELECT k, count(*) AS n FROM timed GROUP BY k, TUMBLE(ts, INTERVAL '1' MINUTE)"
    assert list(timed.pipeline.sql(query).schema) == ["k", "n"]
