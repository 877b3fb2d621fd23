"""What sessions and windows by count add to a plan, and what they refuse where they are written."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from fordstone import by_count, session
from fordstone.connectors import files
from fordstone.errors import ConfigError, PipelineError
from fordstone.plan import plan as p
from fordstone.plan.plan import Count, Session, Window
from fordstone.plan.stream_type import EventTime
from fordstone.planner.check import stream_types

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double"}


def test_windows_are_what_was_asked_for():
    assert session("1m30s") == session(timedelta(seconds=90)) == Session(gap_us=90_000_000)
    assert by_count(100) == by_count(100, every=100) == Count(size=100, slide=100)
    assert by_count(100, every=10) == Count(size=100, slide=10)
    assert by_count(10, every=100) == Count(size=10, slide=100)


def test_results_have_the_key_the_window_and_the_aggregates_and_a_time_and_late_rows(pipeline, readings):
    windows = {"visits": session("30s"), "packs": by_count(10)}
    for name, window in windows.items():
        found = readings.group_by("device").window(window).agg(n="count(*)", name=name)
        columns = {"device": "string", "window_start": "timestamp", "window_end": "timestamp", "n": "bigint"}
        assert found.schema.to_dict() == columns
        found.sink(f"{name}_now", files(name, format="jsonl"), release="at_once")
        found.late.sink(f"{name}_late", files(f"{name}_late", format="jsonl"))
    types = stream_types(p.read_plan(pipeline.plan().to_json()))
    # A session lasts up to its end and not to it; a window by count ends with its last row.
    assert types[p.Input("visits")].time == EventTime(column="window_end", shift_us=-1)
    assert types[p.Input("packs")].time == EventTime(column="window_end")
    assert {types[p.Input(name, "late")].schema.to_dict() == SCHEMA for name in windows} == {True}


@pytest.mark.parametrize("gap", ["0s", "0ms", timedelta(0), timedelta(seconds=-1)])
def test_a_gap_that_is_not_longer_than_zero_is_refused(gap):
    with pytest.raises(ConfigError, match=r"session gap: .* must be longer than zero"):
        session(gap)


@pytest.mark.parametrize("gap", ["soon", "-5s", "", 5, None])
def test_a_gap_that_is_no_span_of_time_is_refused(gap):
    with pytest.raises(ConfigError, match=r"session gap: .* is not a span of time"):
        session(gap)


@pytest.mark.parametrize(
    ("size", "every", "message"),
    [
        (0, None, "by_count: size=0 must be at least 1"),
        (-3, None, "by_count: size=-3 must be at least 1"),
        (10, 0, "by_count: every=0 must be at least 1"),
        (10, -1, "by_count: every=-1 must be at least 1"),
        (2.5, None, "by_count: size=2.5 is not a whole number of rows"),
        (10.0, None, "by_count: size=10.0 is not a whole number of rows"),
        (10, 2.0, "by_count: every=2.0 is not a whole number of rows"),
        (True, None, "by_count: size=True is not a whole number of rows"),
        ("10", None, "by_count: size='10' is not a whole number of rows"),
        (None, None, "by_count: size=None is not a whole number of rows"),
    ],
)
def test_counts_that_are_no_counts_are_refused(size, every, message):
    with pytest.raises(ConfigError, match=message):
        by_count(size, every=every)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (Session(gap_us=0), r"step visits: the gap of a session must be longer than zero .*, and this is 0s.*session\(\"30s\"\)"),
        (Session(gap_us=-1), "step visits: the gap of a session must be longer than zero .*, and this is -1us"),
        (Session(gap_us=2**62), "step visits: the gap of a session must be .*shorter than"),
        (Count(size=0, slide=1), r"step visits: windows by count need 1 to 2,147,483,648 rows, and size is 0.*by_count\(100"),
        (Count(size=1, slide=0), "step visits: windows by count .* and every is 0"),
        (Count(size=2**40, slide=1), "step visits: windows by count .* and size is 1,099,511,627,776"),
    ],
)  # fmt: skip
def test_a_plan_that_says_such_windows_is_refused(pipeline, readings, window: Window, message):
    readings.group_by("device").window(session("1s")).agg(n="count(*)", name="visits")
    steps = tuple(
        msgspec.structs.replace(step, window=window) if step.name == "visits" else step
        for step in pipeline._graph.steps
    )
    readings.sink("out", files("out", format="jsonl"))
    with pytest.raises(PipelineError, match=message):
        stream_types(msgspec.structs.replace(pipeline.plan(), steps=steps))


@pytest.mark.parametrize("window", [session("5s"), by_count(5)])
def test_windows_without_event_time_are_refused(pipeline, window):
    rows = pipeline.source("plain", files("in/*.jsonl"), schema=SCHEMA)
    with pytest.raises(PipelineError, match=r"needs event time.*Declare it at the source"):
        rows.group_by("device").window(window).agg(n="count(*)")


@pytest.mark.parametrize("window", [session("5s"), by_count(5)])
def test_rows_that_replace_each_other_are_refused(readings, window):
    running = readings.group_by("device").agg(n="count(*)", ts="max(ts)")
    with pytest.raises(PipelineError, match="replace each other"):
        running.group_by("device").window(window).agg(m="count(*)")
