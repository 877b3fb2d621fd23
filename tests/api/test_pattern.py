"""What `match` adds to a plan, and what it refuses where it is written."""

from __future__ import annotations

import msgspec
import pytest

from fordstone import Pattern, col, tumbling
from fordstone.connectors import files
from fordstone.errors import ConfigError, ExpressionError, PipelineError, SchemaError
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime
from fordstone.planner.check import stream_types

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double", "n": "bigint", "tags": "array<string>"}
ONE = Pattern("one").start("a", "temp > 80")
TWO = ONE.then("b", "temp > a.temp")


def test_a_match_has_the_keys_and_then_the_measures(grouped):
    found = grouped.match(TWO, measures={"from": "first(a.ts)", "peak": "max(b.temp)", "n": "count(*)"})
    assert found.schema.to_dict() == {"device": "string", "from": "timestamp", "peak": "double", "n": "bigint"}
    assert found.name == "match_device"


def test_all_rows_have_the_columns_of_the_input_and_then_the_measures(grouped):
    found = grouped.match(TWO, measures={"stage": "classifier()", "number": "match_number()"}, rows="all")
    assert found.schema.to_dict() == SCHEMA | {"stage": "string", "number": "bigint"}


def test_time_outs_say_when_it_began_and_how_far_it_came(grouped):
    found = grouped.match(TWO.within("5s"), measures={"peak": "max(b.temp)"})
    wanted = {"device": "string", "match_start": "timestamp", "stages": "string", "peak": "double"}
    assert found.timeouts.schema.to_dict() == wanted
    assert found.late.schema.to_dict() == SCHEMA


def test_without_within_there_are_no_time_outs(grouped):
    with pytest.raises(PipelineError, match=r"no time-outs.*within"):
        _ = grouped.match(TWO, measures={"n": "count(*)"}).timeouts


def test_a_stream_without_keys_is_gone_through_as_a_whole(readings):
    assert readings.match(TWO, measures={"n": "count(*)"}).schema.to_dict() == {"n": "bigint"}
    with pytest.raises(PipelineError, match="needs at least one measure"):
        readings.match(TWO)


def test_matches_have_event_time_where_a_measure_says_when_they_were_decided(pipeline, grouped):
    at_once = grouped.match(TWO, measures={"at": "match_time()"}, skip="next", name="at_once")
    waits = grouped.match(TWO, measures={"at": "match_time()"}, name="waits")
    bounded = grouped.match(TWO.within("5s"), measures={"at": "match_time()"}, name="bounded")
    for stream in (at_once, waits, bounded):
        stream.sink(f"{stream.name}_out", files(stream.name, format="jsonl"))
    types = stream_types(p.read_plan(pipeline.plan().to_json()))
    assert types[p.Input("at_once")].time == types[p.Input("bounded")].time == EventTime(column="at")
    assert types[p.Input("waits")].time is None
    assert types[p.Input("bounded", "timeout")].time == EventTime(column="match_start", shift_us=5_000_000)
    bounded.group_by("device").window(tumbling("1h")).agg(n="count(*)")


def test_text_and_built_conditions_make_the_same_step(pipeline, grouped):
    grouped.match(ONE, measures={"n": "count(*)"}, name="one")
    grouped.match(Pattern("one").start("a", col("temp") > 80), measures={"n": "count(*)"}, name="two")
    one, two = pipeline._graph.steps[-2:]
    assert msgspec.structs.replace(two, name="one") == one


def test_a_pattern_is_a_value_and_every_method_gives_another(grouped):
    base = Pattern("p").start("a", "temp > 80")
    longer = base.then("b", "temp > 90").within("1s")
    assert ([stage.name for stage in base.stages], base.within_us) == (["a"], None)
    assert ([stage.name for stage in longer.stages], longer.within_us) == (["a", "b"], 1_000_000)


def test_the_plan_says_what_was_declared(pipeline, grouped):
    pattern = (
        Pattern("p")
        .start("a", "temp > 80", one_or_more=True, consecutive=True, greedy=True)
        .not_next("x", "temp < 0")
        .then_any("b", times=(0, 3), combinations=True, reluctant=True, until="n = 1")
        .next("c", times=2)
        .within("1m")
    )
    grouped.match(pattern, measures={"n": "count(*)"}, skip=("last", "a"), order="n", limit=7)
    step = pipeline._graph.steps[-1]
    a, x, b, c = step.stages
    assert (a.times_min, a.times_max, a.repeats, a.quantifier) == (1, None, "next", "greedy")
    assert (x.negated, x.follows) == (True, "next")
    assert (b.follows, b.times_min, b.times_max, b.optional, b.repeats, b.quantifier) == (
        "any", 1, 3, True, "any", "reluctant",
    )  # fmt: skip
    assert (c.follows, c.times_min, c.times_max, c.predicate) == ("next", 2, 2, None)
    assert (step.within_us, step.skip, step.skip_to, step.order, step.partial_matches_max) == (
        60_000_000, "last", "a", ("n",), 7,
    )  # fmt: skip
    assert p.read_plan(msgspec.json.encode(p.Plan(pipeline="x", steps=(step,)))).steps == (step,)


# What can never match, and what never ends


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (Pattern("p"), r"has no stages.*start"),
        (Pattern("p").not_next("x", "n = 1"), r"begins with the negated stage 'x'|no stage that takes rows"),
        (
            Pattern("p").not_followed_by("x", "n = 1").then("a", "n = 2"),
            r"begins with the negated stage 'x'.*Begin it with start",
        ),
        (ONE.not_followed_by("x", "n = 1"), r"may end with the negated stage 'x'.*time limit. Add .within"),
        (ONE.not_next("x", "n = 1"), r"may end with the negated stage 'x'.*Add .within"),
        (
            ONE.not_next("x", "n = 1").then("b", "n = 2", optional=True),
            r"may end with the negated stage 'x'.*Add .within",
        ),
        (ONE.then("b", "FALSE"), r"can never match.*stage 'b' is never true"),
        (ONE.then("b", "temp > 1 AND NULL"), r"can never match"),
        (ONE.then("b", "n = 1", times=(3, 2)), r"can never match: at least 3 rows, but at most 2"),
        (ONE.then("b", "n = 1", times=(1, 4), until="TRUE"), r"can never match: until= of stage 'b'"),
        (ONE.then("b", "n = 1", until="n = 2"), r"takes one row; until="),
        (Pattern("p").start("a", "n = 1", optional=True), r"every stage is optional"),
        (ONE.then("b", "n = 1", one_or_more=True), r"never ends.*within.*until.*consecutive"),
        (ONE.then("a", "n = 1"), r"stage 'a': every stage needs a name of its own"),
        (
            ONE.not_followed_by("x", "TRUE").then("b"),
            r"stage 'x' is negated and has a condition that every row fulfils",
        ),
        (ONE.then("b", "n = 1", times=(1, 3), greedy=True), r"greedy and may be the last.*choose='preferred'"),
    ],
)
def test_patterns_that_can_never_match_or_never_end_are_refused(grouped, pattern, says):
    with pytest.raises(PipelineError, match=says):
        grouped.match(pattern, measures={"n": "count(*)"})


def test_an_endless_stage_is_allowed_once_something_ends_it(grouped):
    grouped.match(ONE.then("b", "n = 1", one_or_more=True, consecutive=True), {"n": "count(*)"}, name="strict")
    grouped.match(ONE.then("b", "n = 1", one_or_more=True, until="n = 2"), {"n": "count(*)"}, name="until")
    grouped.match(ONE.then("b", "n = 1", times=(1, 9)), {"n": "count(*)"}, name="bounded")
    grouped.match(ONE.then("b", "n = 1", one_or_more=True).within("1s"), {"n": "count(*)"}, name="timed")


def test_any_row_without_bound_never_ends_when_the_longest_is_wanted(grouped):
    loop = ONE.next("b", one_or_more=True, consecutive=True).next("c", "n = 1")
    grouped.match(loop, {"n": "count(*)"}, name="first")
    with pytest.raises(PipelineError, match=r"never ends: stage 'b' takes any row"):
        grouped.match(loop, {"n": "count(*)"}, choose="preferred")


# Expressions


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("temp > b.temp", r"stage 'b' takes one row"),
        ("temp > c.temp", r"stage 'c' comes after 'b'"),
        ("temp > x.temp", r"stage 'x' is negated \(not_next or not_followed_by\), so it has no rows"),
        ("temp > z.temp", r"no stage 'z'.*Stages are: a"),
        ("temp > a.heat", r"no column 'heat'"),
        ("avg(a.temp - n) > 1", r"one stage"),
        ("avg(distinct a.temp) > 1", r"DISTINCT"),
        ("sum(a.device) > 1", r"a number is needed"),
        ("last(a.temp, n) > 1", r"whole number from 0"),
        ("median(a.temp) > 1", r"median"),
        ("prev(temp) > 1", r"prev.*not supported"),
        ("match_number() > 1", r"belongs in measures"),
        ("temp + 1", r"a condition is needed"),
        ("temp >", r"."),
    ],
)
def test_conditions_are_checked_with_the_place_of_what_is_wrong(grouped, condition, says):
    with pytest.raises(ExpressionError, match=says):
        grouped.match(ONE.not_next("x", "n = 9").then("b", condition).then("c", "n = 3"), {"n": "count(*)"})


@pytest.mark.parametrize(
    ("measure", "says"),
    [
        ("final(max(a.temp)) + 1", r"final.*around a whole measure"),
        ("max(a.temp) AS other", r"also AS other"),
        ("z.temp", r"no stage 'z'"),
        ("max(tags)", r"arrays have no least"),
    ],
)
def test_measures_are_checked(grouped, measure, says):
    with pytest.raises(ExpressionError, match=says):
        grouped.match(ONE, {"m": measure})


def test_a_measure_may_not_have_the_name_of_a_key_or_of_an_input_column(grouped):
    with pytest.raises(SchemaError, match="'device' is given twice"):
        grouped.match(ONE, {"device": "count(*)"})
    with pytest.raises(SchemaError, match="'temp' is given twice"):
        grouped.match(ONE, {"temp": "count(*)"}, rows="all")
    with pytest.raises(SchemaError, match="'stages' is given twice"):
        grouped.match(ONE.within("1s"), {"stages": "count(*)"})


# Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rows": "some"}, r"rows='some' must be 'one' or 'all'"),
        ({"skip": "last"}, r"skip to last of None"),
        ({"skip": ("last", "z")}, r"no such stage. Stages are: a, b"),
        ({"skip": "somewhere"}, r"skip='somewhere'"),
        ({"skip": ("next", "a")}, r"is only for skip='first'"),
        ({"choose": "best"}, r"choose='best'"),
        ({"choose": "preferred", "skip": "none"}, r"Use skip='next'"),
        ({"limit": 0}, r"limit must be at least 1"),
        ({"limit": "many"}, r"partial_matches_max"),
        ({"order": "heat"}, r"order: there is no column 'heat'"),
    ],
)
def test_options_are_checked(grouped, options, says):
    with pytest.raises(PipelineError, match=says):
        grouped.match(TWO, {"n": "count(*)"}, **options)


@pytest.mark.parametrize("times", [0.5, -1, (1, 0), "3", (1, 2, 3), True])
def test_how_many_rows_is_a_number_or_two(times):
    with pytest.raises(PipelineError, match="write how many rows"):
        ONE.then("b", "n = 1", times=times)


def test_stages_are_declared_without_contradiction():
    with pytest.raises(PipelineError, match="exclude each other"):
        ONE.then("b", greedy=True, reluctant=True)
    with pytest.raises(PipelineError, match="exclude each other"):
        ONE.then("b", consecutive=True, combinations=True)
    with pytest.raises(PipelineError, match="Drop one of them"):
        ONE.then("b", one_or_more=True, times=2)
    with pytest.raises(PipelineError, match="already has a start"):
        ONE.start("b")
    with pytest.raises(ConfigError, match="longer than zero"):
        ONE.within("0s")


def test_a_pattern_needs_event_time_and_no_window_and_plain_keys(pipeline, readings, grouped):
    untimed = readings.select("device", "temp", name="untimed")
    with pytest.raises(PipelineError, match="needs event time"):
        untimed.group_by("device").match(ONE, {"n": "count(*)"})
    with pytest.raises(PipelineError, match="has no windows"):
        grouped.window(tumbling("1s")).match(ONE, {"n": "count(*)"})
    with pytest.raises(PipelineError, match="cannot be a key"):
        readings.group_by("tags").match(ONE, {"n": "count(*)"})
    with pytest.raises(PipelineError, match="is not a pattern"):
        grouped.match("a b c", {"n": "count(*)"})
    running = grouped.agg(n="count(*)", name="running")
    with pytest.raises(PipelineError, match="replace each other"):
        running.group_by("device").match(ONE, {"n": "count(*)"})
