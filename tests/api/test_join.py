"""Joins and lookups as they are written: what they give, and what the errors say."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import polars as pl
import pytest

from fordstone import Pipeline, Stream, tumbling
from fordstone.connectors import MemorySink, files, memory, stdout
from fordstone.connectors.lookup_table import BYTES_MAX
from fordstone.errors import ConfigError, FordstoneError, PipelineError, SchemaError
from fordstone.plan import plan as p
from fordstone.plan.plan import read_plan
from fordstone.plan.stream_type import EventTime
from fordstone.planner.check import stream_types

READINGS = {"device": "string", "ts": "timestamp", "temp": "double"}
DEVICES = {"id": "string", "site": "string"}
BETWEEN = ("-5s", "10s")


def source(pipeline: Pipeline, name: str, *, time: str | None = "ts", **columns: str) -> Stream:
    return pipeline.source(name, memory([]), schema=columns or READINGS, time=time)


def two(**right: str) -> tuple[Stream, Stream]:
    pipeline = Pipeline("joins")
    return source(pipeline, "left"), source(pipeline, "right", **right)


def time_of(stream: Stream) -> EventTime | None:
    return stream._graph.types[stream._at].time


# What comes of them.


def test_right_columns_follow_the_left_with_a_suffix_where_names_clash():
    left, right = two(device="string", ts="timestamp", site="string")
    assert list(left.join(right, on="device", between=BETWEEN).schema) == ["device", "ts", "temp", "ts_right", "site"]
    joined = left.join(right, on=["device"], between=BETWEEN, suffix="_there")
    assert list(joined.schema) == ["device", "ts", "temp", "ts_there", "site"]
    assert list(joined.late.schema) == list(joined.schema)
    assert time_of(joined.late) is None


def test_keys_of_other_names_stay_two_columns():
    left, right = two(id="string", ts="timestamp")
    assert list(left.join(right, on={"device": "id"}, between=BETWEEN).schema) == [
        "device",
        "ts",
        "temp",
        "id",
        "ts_right",
    ]


@pytest.mark.parametrize(
    ("how", "between", "column", "shift_s"),
    [
        ("inner", ("-5s", "0s"), "ts", 0),
        ("inner", ("-5s", "-1s"), "ts", 0),
        ("inner", ("0s", "10s"), "ts_right", 0),
        ("inner", ("-5s", "10s"), "ts", 10),
        ("left", ("0s", "10s"), "ts", 10),
        ("left", ("-5s", "-1s"), "ts", 0),
        ("right", ("-5s", "10s"), "ts_right", 5),
        ("right", ("1s", "10s"), "ts_right", 0),
    ],
)
def test_the_time_of_a_pair_is_that_of_its_later_row_or_the_latest_it_may_have(how, between, column, shift_s):
    left, right = two()
    joined = left.join(right, on="device", between=between, how=how)
    assert time_of(joined) == EventTime(column=column, shift_us=shift_s * 1_000_000)


def test_a_full_join_has_no_time_and_a_window_after_it_is_refused():
    left, right = two()
    joined = left.join(right, on="device", between=BETWEEN, how="full")
    assert time_of(joined) is None
    with pytest.raises(PipelineError, match="needs event time, and join has none"):
        joined.group_by("device").window(tumbling("10s")).agg(n="count(*)")


def test_bounds_may_be_spans_and_huge():
    left, right = two()
    joined = left.join(right, on="device", between=(timedelta(days=-900_000), "2h"))
    step = joined._graph.draft().step("join")
    assert isinstance(step, p.Join)
    assert (step.from_us, step.to_us) == (-900_000 * 86_400_000_000, 7_200_000_000)


def test_a_stream_may_be_joined_with_itself():
    left, _ = two()
    joined = left.join(left, on="device", between=("1us", "10s"))
    assert list(joined.schema) == ["device", "ts", "temp", "ts_right", "temp_right"]


def test_a_lookup_keeps_time_and_ids_and_rows_in_the_plan_survive_it():
    left, _ = two()
    rows = [
        {"device": "a", "b": b"\xff", "d": Decimal("1.50"), "f": math.nan, "t": datetime(2026, 1, 1, tzinfo=UTC),
         "day": date(2026, 1, 2), "tags": ["x", None], "n": None}
    ]  # fmt: skip
    schema = {"device": "string", "b": "binary", "d": "decimal(5,2)", "f": "double", "t": "timestamp", "day": "date",
              "tags": "array<string>", "n": "int"}  # fmt: skip
    found = left.lookup(rows, on="device", schema=schema)
    assert time_of(found) == EventTime(column="ts")
    found.sink("out", stdout(), release="at_once")
    plan = left.pipeline.plan()
    step = read_plan(plan.to_json()).step("lookup")
    assert isinstance(step, p.Lookup)
    assert step == plan.step("lookup")
    assert stream_types(read_plan(plan.to_json()))[p.Input("lookup")].schema == found.schema


def test_columns_of_given_rows_are_inferred_from_their_values():
    left, _ = two()
    assert list(left.lookup([{"device": "a", "n": 1}], on="device").schema.items())[-1][0] == "n"
    frame = pl.DataFrame({"device": ["a"], "at": [datetime(2026, 1, 1)]})
    assert str(left.lookup(frame, on="device").schema["at"]) == "timestamp"


def test_join_latest_has_no_time_unless_rows_do_not_wait_and_the_control_stream_has_one():
    left, right = two()
    assert time_of(left.join_latest(right, on="device")) is None
    assert time_of(left.join_latest(right, on="device", wait=False)) == EventTime(column="ts")
    timeless = source(left.pipeline, "limits", time=None, device="string", limit="double")
    assert time_of(left.join_latest(timeless, on="device", wait=False)) is None


# What is refused.

Build = Callable[[Stream, Stream], Any]


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda a, b: a.join(b, on="device"), PipelineError, r'keep every row for good. Add .* between=\("-5s", "10s"\)'),
        (lambda a, b: a.join(b, on="device", between="5s"), PipelineError, "is not a pair"),
        (lambda a, b: a.join(b, on="device", between=("5s",)), PipelineError, "is not a pair"),
        (lambda a, b: a.join(b, on="device", between=("5s", "-5s")), PipelineError, "begins after it ends"),
        (lambda a, b: a.join(b, on="device", between=("5", "6s")), ConfigError, "step join: between: '5' is not a span"),
        (lambda a, b: a.join(b, on="device", between=("0s", timedelta.max)), PipelineError, "a bound in between= is longer than 1000000d, the maximum"),
        (lambda a, b: a.join(b, on="device", between=BETWEEN, how="outer"), PipelineError, "how='outer' must be 'inner', 'left'"),
        (lambda a, b: a.join(b, on="nope", between=BETWEEN), SchemaError, r"step join: on \(the left side\): there is no column 'nope'"),
        (lambda a, b: a.join(b, on={"device": "nope"}, between=BETWEEN), SchemaError, r"on \(the right side\): there is no"),
        (lambda a, b: a.join(b, on=[], between=BETWEEN), SchemaError, "on= names no column"),
        (lambda a, b: a.join(b, on=["device", "device"], between=BETWEEN), SchemaError, "left side. names a column twice"),
        (lambda a, b: a.join(b, on=5, between=BETWEEN), PipelineError, "on=5 does not name columns"),
        (lambda a, b: a.join(b, on={"device": "temp"}, between=BETWEEN), SchemaError, r"'device' has type string .* 'temp' has type double"),
        (lambda a, b: a.join(b, on="device", between=BETWEEN, suffix=""), SchemaError, "'ts' would become 'ts', which is there already"),
        (lambda a, b: a.join([1], on="device", between=BETWEEN), PipelineError, r"\[1\] is not a stream"),
        (lambda a, b: a.join(source(Pipeline("other"), "x"), on="device", between=BETWEEN), PipelineError, "x belongs to another pipeline"),
        (lambda a, b: a.join(b.group_by("device").agg(n="count(*)"), on="device", between=BETWEEN), PipelineError, "a join cannot take rows that replace"),
        (lambda a, b: a.join(b.select("device"), on="device", between=BETWEEN), PipelineError, "a join needs event time, and select has none"),
        (lambda a, b: a.lookup(files("x.csv"), on="device"), PipelineError, "step lookup: a lookup needs the columns of its table"),
        (lambda a, b: a.lookup(stdout(), on="device", schema=DEVICES), PipelineError, "cannot be read from"),
        (lambda a, b: a.lookup(memory(iter([])), on="device", schema=DEVICES), PipelineError, "a generator is not a table.* Give its rows as a list"),
        (lambda a, b: a.lookup("x.csv", on="device"), PipelineError, r"'x.csv' is not a table. Give files"),
        (lambda a, b: a.lookup(b, on="device"), PipelineError, "is not a table"),
        (lambda a, b: a.lookup([], on="device"), PipelineError, "a table without rows has no columns"),
        (lambda a, b: a.lookup([{"device": 1}], on="device"), SchemaError, "Cast one of them first"),
        (lambda a, b: a.lookup([{"device": "x"}], on="device", schema={"device": "int"}), PipelineError, "A table must be whole"),
        (lambda a, b: a.lookup([{"device": "x" * BYTES_MAX}], on="device"), PipelineError, r"too many to stand in a plan.*files\("),
        (lambda a, b: a.lookup([{"device": "a"}], on="device", how="right"), PipelineError, "how='right' must be 'inner' or 'left'"),
        (lambda a, b: a.join_latest(b.group_by("device").agg(n="count(*)"), on="device"), PipelineError, "the control stream of join_latest cannot take"),
        (lambda a, b: a.iterate(lambda s: (s, s.join_latest(s, on="device"))), PipelineError, "is not possible inside or below a loop"),
        (lambda a, b: a.iterate(lambda s: (s, s.join(s, on="device", between=BETWEEN))), PipelineError, "there is none inside or below a loop"),
        (lambda a, b: a.join(b, on="device", between=BETWEEN).sink("o", memory(MemorySink()), release="at_once"), PipelineError, "release='commit'"),
        (lambda a, b: a.join_latest(b, on="device", wait=False).sink("o", memory(MemorySink()), release="at_once"), PipelineError, "release='commit'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_words(build: Build, error: type[FordstoneError], says: str):
    with pytest.raises(error, match=says):
        build(*two())


def test_join_latest_needs_barriers_that_overtake_nothing():
    left = source(Pipeline("joins", mode="unaligned"), "left")
    with pytest.raises(PipelineError, match=r"step join_latest: .* Use mode='aligned'"):
        left.join_latest(left, on="device")


def test_a_table_in_memory_becomes_part_of_the_plan():
    left, _ = two()
    left.lookup(memory([[("a", 1)], [("b", 2)]]), on="device", schema={"device": "string", "n": "int"}).sink(
        "o", stdout()
    )
    step = left.pipeline.plan().step("lookup")
    assert isinstance(step, p.Lookup)
    assert step.table.options == {"columns": {"device": ["a", "b"], "n": [1, 2]}}


def test_arrays_are_no_keys():
    pipeline = Pipeline("joins")
    left = source(pipeline, "left", tags="array<string>", ts="timestamp")
    with pytest.raises(SchemaError, match="'tags' is array<string>, which cannot be a key"):
        left.join(left, on="tags", between=BETWEEN)
