"""Keyed functions against a plain model: sorted rows, timers in a list, state in dicts; whatever the batches and restores.

And timers, one thing at a time.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.process_model import (
    EPOCH,
    OUT_SCHEMA,
    US,
    again,
    barrier,
    calls,
    expected,
    frame,
    made,
    rounds,
    rows_out,
    telling,
    texts,
    us,
)
from tests.operators.subtasks import Subtasks, bits, shown

from fordstone import KeyedFunction
from fordstone.errors import TaskError
from fordstone.lang.duration import TIME_MAX_US
from fordstone.operators.process import cells as state_cells
from fordstone.operators.process import step as process
from fordstone.operators.process import store as keyed_store


@examples(120)
@given(
    happens=rounds,
    chunk_items=st.sampled_from([1, 2, 64]),
    entries_max=st.sampled_from([0, 2, 50_000]),
)
def test_ordered_functions_see_and_give_what_a_plain_model_does(happens, chunk_items, entries_max):
    with (
        patch.object(state_cells, "CHUNK_ITEMS", chunk_items),
        patch.object(state_cells, "CHUNKS_FEW", 1),
        patch.object(keyed_store, "ENTRIES_MAX", entries_max),
    ):
        subtasks = Subtasks(make=made, frame=frame)
        happened = subtasks.live_through(happens)
        assert shown(subtasks.out) == expected(happened.taken, subtasks.watermark_us)
        subtasks.watermark(TIME_MAX_US)
    assert shown(subtasks.out) == expected(happened.taken, TIME_MAX_US)
    assert shown(subtasks.late) == Counter(tuple(map(bits, row)) for row in happened.late)


# Timers.


def test_a_timer_comes_after_the_rows_of_its_time_and_before_later_ones():
    def tell(self, row, ctx):
        if row["op"] == "set":
            ctx.set_timer("t", after=2 * US)
        return f"row {row['op']} {us(ctx.time)}"

    operator = made(telling(tell, lambda self, timer, ctx: f"timer {us(timer.time)}"), out=OUT_SCHEMA)
    rows = [("a", 3, "late", 0), ("a", 1, "set", 0), ("a", 4, "last", 0), ("a", 2, "between", 0)]
    assert texts(operator, *rows) == ["row set 1", "row between 2", "row late 3", "timer 3", "row last 4"]


def test_a_timer_waits_until_the_watermark_has_passed_its_time():
    operator = made(
        telling(lambda self, row, ctx: ctx.set_timer(at=EPOCH + 9 * US), lambda self, timer, ctx: "fired"),
        out=OUT_SCHEMA,
    )
    calls(operator, ("a", 1, "", 0))
    assert operator.on_watermark(9) == []
    assert len(rows_out(operator.on_watermark(10))) == 1
    assert operator.on_watermark(TIME_MAX_US) == []


def test_a_timer_that_sets_itself_again_for_ever_is_an_error_at_the_end_and_ended_tells_it_when_to_stop():
    def again_(self, timer, ctx):
        ctx.set_timer(after=1 * US)

    operator = made(telling(lambda self, row, ctx: ctx.set_timer(after=1 * US), again_), out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 0))
    with (
        patch.object(process, "END_TIMERS_MAX", 50),
        pytest.raises(TaskError, match=r"step fn, key 'a': the input has ended.*not ctx.ended"),
    ):
        operator.on_watermark(TIME_MAX_US)

    def until_the_end(self, timer, ctx):
        if not ctx.ended:
            ctx.set_timer(after=1 * US)
        return ctx.ended

    def begin(self, row, ctx):
        assert not ctx.ended
        if row["op"] == "begin":
            ctx.set_timer(after=1 * US)

    operator = made(telling(begin, until_the_end), out=OUT_SCHEMA)
    # Between rows the end has not come, even if all rows are there.
    assert texts(operator, ("a", 1, "begin", 0), ("a", 4, "", 0)) == ["False", "False", "True"]


def test_a_timer_set_by_a_timer_must_be_later():
    operator = made(
        telling(
            lambda self, row, ctx: ctx.set_timer("one", after="1s"),
            lambda self, timer, ctx: ctx.set_timer("two", at=timer.time),
        ),
        out=OUT_SCHEMA,
    )
    calls(operator, ("a", 1, "", 0))
    with pytest.raises(TaskError, match=r"step fn, key 'a': set_timer\('two'\).*Set a later time"):
        operator.on_watermark(TIME_MAX_US)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "either at= or after="),
        ({"at": EPOCH, "after": "1s"}, "either at= or after="),
        ({"at": dt.datetime(2024, 1, 1)}, "datetime with a time zone"),
        ({"after": "soon"}, "not a span of time"),
        ({"after": "-1s"}, "not a span of time"),
        ({"after": -US}, "must not be negative"),
        ({"name": 3, "after": "1s"}, "name is a string"),
    ],
)
def test_timers_that_make_no_sense_are_refused_with_step_and_key(wrong, says):
    operator = made(telling(lambda self, row, ctx: ctx.set_timer(**wrong)), out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 0))
    with pytest.raises(TaskError, match=rf"step fn, key 'a': set_timer.*{says}"):
        operator.on_watermark(TIME_MAX_US)


# Timers by the clock.


def ringing(span: Any) -> type[KeyedFunction]:
    return telling(
        lambda self, row, ctx: ctx.set_timer("ring", clock=True, **span), lambda self, timer, ctx: us(timer.time)
    )


def test_timers_by_the_clock_count_from_the_barrier_and_ring_at_one():
    function = ringing({"after": 10 * US})
    operator = made(function, out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 0))
    operator.on_watermark(5)
    assert barrier(operator, 100) == []
    operator = again(operator, function, 5, out=OUT_SCHEMA)
    assert barrier(operator, 109) == []
    # Event time has come to 5, and that is what rows given now carry.
    assert rows_out(barrier(operator, 110)) == [("timer", 5, "110")]
    assert barrier(operator, 200) == []


def test_timers_by_the_clock_can_be_set_for_a_time_and_taken_back_and_do_not_ring_when_time_has_ended():
    operator = made(ringing({"at": EPOCH + 50 * US}), out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 0), ("b", 1, "", 0))
    operator.on_watermark(5)
    assert barrier(operator, 49) == []
    assert sorted(rows_out(barrier(operator, 60))) == [("timer", 5, "50"), ("timer", 5, "50")]
    calls(operator, ("a", 6, "", 0))
    operator.on_watermark(TIME_MAX_US)
    assert barrier(operator, 10**9) == []

    def set_and_delete(self, row, ctx):
        ctx.set_timer("ring", clock=True, after="0s")
        ctx.delete_timer("ring", clock=True)
        ctx.delete_timer("none")

    operator = made(telling(set_and_delete), out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 0))
    operator.on_watermark(5)
    assert barrier(operator, 10) == barrier(operator, 10**9) == []


def test_a_clock_timer_that_sets_itself_rings_once_a_barrier():
    def ring(self, timer, ctx):
        ctx.set_timer(timer.name, at=timer.time, clock=True)
        return us(timer.time)

    operator = made(telling(lambda self, row, ctx: ctx.set_timer(at=EPOCH, clock=True), ring), out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 0))
    operator.on_watermark(5)
    assert [len(rows_out(barrier(operator, now))) for now in (1, 2, 3)] == [1, 1, 1]
