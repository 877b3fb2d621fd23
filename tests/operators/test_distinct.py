"""Distinct rows against a set: whatever the batches, watermarks, barriers, restores and subtasks."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operators.subtasks import Subtasks, bits, events_of, frame_of, held_rows, shown

from fordstone import FordstoneError, Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.distinct import DistinctInTime, DistinctSoFar
from fordstone.plan.stream_type import EventTime
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "x": "double"})
rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "b", None]), st.one_of(st.integers(-2, 2), st.none()), st.sampled_from([None, 1.0, math.nan])
)
events = events_of(st.lists(rows_of_any_kind, min_size=1, max_size=8), steps=(1, 1, 2))


@given(events=events)
def test_in_time_every_row_comes_once_when_the_watermark_has_passed_it(events):
    subtasks = Subtasks(
        lambda: DistinctInTime(SCHEMA, time=EventTime(column="ts"), state=IN_MEMORY),
        lambda rows: frame_of(rows, SCHEMA),
        keys=list(SCHEMA),
    )
    subtasks.check(events, lambda rows: Counter({tuple(map(bits, row)) for row in rows}))
    assert all(not sum(held_rows(one).values()) for one in subtasks.operators), "nothing is kept when time has passed"


@given(events=events)
def test_without_time_every_row_comes_once(events):
    subtasks = Subtasks(
        lambda: DistinctSoFar(SCHEMA, state=IN_MEMORY), lambda rows: frame_of(rows, SCHEMA), keys=list(SCHEMA)
    )
    happened = subtasks.live_through(events)
    subtasks.watermark(TIME_MAX_US)
    rows = [*happened.taken, *happened.late]
    assert shown(subtasks.out) == Counter({tuple(map(bits, row)) for row in rows})


def test_both_zeros_are_one_value_over_all_subtasks():
    made = Pipeline("p")
    rows = [{"x": 0.0}, {"x": -0.0}, {"x": math.nan}, {"x": -math.nan}, {"x": None}, {"x": None}]
    found = MemorySink()
    made.source("rows", memory([rows, rows]), schema={"x": "double"}).distinct().sink("out", memory(found))
    made.run(bounded=True, parallelism=3)
    assert sorted(map(str, found.rows()["x"].to_list())) == ["0.0", "None", "nan"]


def test_rows_that_replace_each_other_and_arrays_are_refused():
    made = Pipeline("p")
    rows = made.source("rows", memory([]), schema={"k": "string", "a": "array<int>"})
    with pytest.raises(FordstoneError, match="distinct: column 'a' is array<int>"):
        rows.distinct()
    with pytest.raises(FordstoneError, match="distinct cannot take rows that replace each other"):
        rows.group_by("k").agg(n="count(*)").distinct()


def test_explain_says_that_all_is_kept_without_event_time():
    made = Pipeline("p")
    made.source("rows", memory([]), schema={"k": "string"}).distinct().sink("out", memory(MemorySink()))
    assert "every distinct row, for good" in made.explain()
