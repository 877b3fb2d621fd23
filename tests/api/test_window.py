"""Windows as they are written: what they add to a plan, and what is refused where it is written."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from fordstone import by_count, session, sliding, tumbling
from fordstone.connectors import files
from fordstone.errors import ConfigError, PipelineError, SchemaError
from fordstone.plan import plan as p
from fordstone.plan.plan import Sliding, Tumbling
from fordstone.plan.stream_type import EventTime
from fordstone.planner.check import stream_types

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double", "window_end": "timestamp"}


def test_spans_are_text_or_timedelta_and_offsets_are_within_the_slide():
    assert sliding("60s", every="10s") == Sliding(60_000_000, 10_000_000)
    assert sliding(timedelta(minutes=1), every=timedelta(seconds=10), offset="25s").offset_us == 5_000_000
    assert tumbling("10s", offset="25s").offset_us == 5_000_000
    assert sliding("10s", every="1m").slide_us == 60_000_000


@pytest.mark.parametrize("span", ["0s", timedelta(0), timedelta(seconds=-1)])
def test_windows_without_length_are_refused(span, grouped):
    for make in (lambda: tumbling(span), lambda: sliding(span, every="1s"), lambda: sliding("1s", every=span)):
        with pytest.raises(ConfigError, match="must be longer than zero"):
            make()
    with pytest.raises(ConfigError, match=r"early: .* must be longer than zero"):
        grouped.window(tumbling("1s"), early=span).agg(n="count(*)")


@pytest.mark.parametrize(
    "window",
    [Tumbling(0), Tumbling(-5), Sliding(0, 5), Sliding(5, 0), Sliding(5, -1), Sliding(2**62, 2**61), Tumbling(2**62)],
)
def test_a_plan_with_windows_that_cannot_be_is_refused(window, pipeline, grouped):
    grouped.window(tumbling("1s")).agg(name="step", n="count(*)").sink("out", files("out", format="jsonl"))
    plan = pipeline.plan()
    steps = [msgspec.structs.replace(step, window=window) if step.name == "step" else step for step in plan.steps]
    with pytest.raises(PipelineError, match=r"step step: the (size|slide) of a window must be longer than zero"):
        stream_types(msgspec.structs.replace(plan, steps=tuple(steps)))


def test_windows_that_hardly_move_on_are_refused(grouped):
    grouped.window(sliding("1d", every="1s")).agg(n="count(*)")
    with pytest.raises(
        PipelineError, match=r"would count for 86,400,000 windows of 1d every 1ms; 100,000 are the most"
    ):
        grouped.window(sliding("1d", every="1ms")).agg(n="count(*)")


def test_what_is_no_window_is_refused(grouped):
    with pytest.raises(PipelineError, match=r"'10s'\): that is not a window. Write tumbling"):
        grouped.window("10s")


def test_windows_need_event_time_and_their_own_column_names(pipeline, readings):
    timeless = pipeline.source("timeless", files("in/*.jsonl"), schema=SCHEMA)
    for window in (tumbling("1s"), sliding("2s", every="1s")):
        with pytest.raises(PipelineError, match=r"needs event time, and timeless has none.*time=\"ts\""):
            timeless.group_by("device").window(window).agg(n="count(*)")
        with pytest.raises(SchemaError, match=r"'window_end' is a column that the window itself adds\. Rename"):
            readings.group_by("window_end").window(window).agg(n="count(*)")
        with pytest.raises(SchemaError, match="'window_start' is given twice"):
            readings.group_by("device").window(window).agg(window_start="count(*)")


def test_early_results_replace_each_other_and_the_final_ones_are_as_without(pipeline, grouped):
    plain = grouped.window(sliding("1m", every="10s")).agg(name="plain", n="count(*)")
    early = grouped.window(sliding("1m", every="10s"), early="1s").agg(name="early", n="count(*)")
    early.sink("out", files("out", format="jsonl"))
    early.late.sink("late", files("late", format="jsonl"))
    early.final().sink("final", files("final", format="jsonl"))
    plain.sink("plain_out", files("plain", format="jsonl"))
    types = stream_types(p.read_plan(pipeline.plan().to_json()))
    assert types[p.Input("early")].upsert_key == ("device", "window_start", "window_end")
    assert types[p.Input("early")].time is None
    final, without = types[p.Input("early", "final")], types[p.Input("plain")]
    assert (final.time, final.upsert_key) == (EventTime(column="window_end", shift_us=-1), None)
    assert (final.schema, final.windowed) == (without.schema, without.windowed)


def test_what_needs_final_rows_says_where_they_are(grouped):
    early = grouped.window(tumbling("1m"), early="1s").agg(n="count(*)")
    with pytest.raises(
        PipelineError, match=r"cannot take rows that replace each other.*\.final\(\) has only the last result"
    ):
        early.group_by().agg(n="sum(n)")
    early.final().group_by().window(tumbling("1h")).agg(n="sum(n)")


def test_final_stands_right_after_a_window_with_early_results(grouped):
    early = grouped.window(tumbling("1m"), early="1s").agg(n="count(*)")
    for stream in (early.filter("n > 1"), early.select("*"), grouped.agg(n="count(*)")):
        with pytest.raises(
            PipelineError, match=r"no final results of its own. Call \.final\(\) directly after a window"
        ):
            stream.final()
    for stream in (grouped.window(tumbling("1m")).agg(n="count(*)"), early.final(), early.late):
        with pytest.raises(PipelineError, match="not needed here"):
            stream.final()


@pytest.mark.parametrize("window", [session("5s"), by_count(5)])
def test_windows_whose_bounds_are_not_known_have_no_early_results(window, grouped):
    with pytest.raises(PipelineError, match="early results are for tumbling and sliding windows"):
        grouped.window(window, early="1s").agg(n="count(*)")


def test_early_results_without_a_window_or_without_length_are_refused_in_a_plan(pipeline, grouped):
    grouped.agg(name="running", n="count(*)").sink("out", files("out", format="jsonl"))
    plan = pipeline.plan()
    for changes, match in (
        ({"early_us": 5}, "early= is only for windows"),
        ({"early_us": 0, "window": Tumbling(5)}, "early=0s must be longer than zero"),
    ):
        steps = [msgspec.structs.replace(s, **changes) if s.name == "running" else s for s in plan.steps]
        with pytest.raises(PipelineError, match=match):
            stream_types(msgspec.structs.replace(plan, steps=tuple(steps)))


def test_provisional_results_have_no_ids_that_a_replay_gives_again(grouped):
    early = grouped.window(tumbling("1m"), early="1s").agg(n="count(*)")
    early.final().sink("final", files("final", format="jsonl"), release="at_once")
    with pytest.raises(PipelineError, match="have no ids that a replay gives again"):
        early.sink("out", files("out", format="jsonl"), release="at_once")


def test_ttl_is_for_running_aggregates_by_key_with_event_time(pipeline, grouped):
    kept = grouped.agg(n="count(*)", ttl="7 days")
    assert list(kept.schema) == ["device", "n"]
    untimed = pipeline.source("untimed", files("x/*.jsonl"), schema={"device": "string"})
    for refused, match in (
        (lambda: grouped.window(tumbling("1m")).agg(n="count(*)", ttl="1d"), "ttl= is for aggregates without a window"),
        (lambda: untimed.group_by("device").agg(n="count(*)", ttl="1d"), "event time"),
        (lambda: untimed.group_by().agg(n="count(*)", ttl="1d"), "ttl= forgets keys, and there is none"),
    ):
        with pytest.raises(PipelineError, match=match):
            refused()
    with pytest.raises(ConfigError, match=r"ttl: .* must be longer than zero"):
        grouped.agg(n="count(*)", ttl="0s")
