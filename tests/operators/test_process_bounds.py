"""What keyed functions cost and keep over a long time, and the times that they accept."""

from __future__ import annotations

import datetime as dt
from unittest.mock import patch

import polars as pl
import pytest
from tests.operators.process_model import OUT_SCHEMA, SCHEMA, US, barrier, calls, frame, made, rows_out, telling, texts

from fordstone import KeyedFunction, ValueState
from fordstone.errors import FunctionError, TaskError
from fordstone.lang.duration import TIME_MAX_US
from fordstone.operators.process import store as keyed_store
from fordstone.operators.process.store import Timers
from fordstone.state.table import MemoryTable


class Once(KeyedFunction):
    n = ValueState("bigint", ttl=10 * US)

    def process(self, row, ctx):
        self.n.set(1)


def test_keys_that_the_clock_has_forgotten_do_not_stay_in_memory():
    operator = made(Once, out={"k": "string"}, time=None, ordered=False)
    with patch.object(keyed_store, "ENTRIES_MAX", 10):
        for epoch in range(20):
            calls(operator, *((f"{epoch} {number}", 0, "", 1) for number in range(10)))
            barrier(operator, 100 * (epoch + 1))
    assert len(operator._store._entries) <= 20


class Waiting(KeyedFunction):
    """Sets a timer that comes, and one far behind it that is put off by every row."""

    def process(self, row, ctx):
        ctx.set_timer("soon", after=5 * US)
        ctx.set_timer("later", after=100 * US)

    def on_timer(self, timer, ctx):
        return {"k": ctx.key}


def test_a_watermark_looks_at_the_timers_of_the_keys_since_the_last_and_reads_no_table_as_a_whole():
    operator = made(Waiting, out={"k": "string"})
    with patch.object(MemoryTable, "scan", side_effect=AssertionError("all rows of a table were read")):
        for number in range(30):
            calls(operator, (f"k{number}", number, "", 1))
            fired = rows_out(operator.on_watermark(number + 1))
            assert fired == ([(f"k{number - 5}",)] if number >= 5 else [])
            assert len(operator._store._unlooked) <= 1
    assert len(operator._store.touched) == 30


def test_a_timer_that_is_put_off_again_and_again_leaves_nothing_behind():
    timers = Timers()
    timers.set("first", 0, 0)
    for at_us in range(1, 10_000):
        timers.set("often", at_us, 0)
    assert len(timers._heap) < 100
    assert [timers.next_below(10**6), timers.least_us] == ["first", 0]
    timers.delete("first")
    assert [timers.next_below(10**6), timers.least_us] == ["often", 9_999]


def test_timers_are_written_at_barriers_and_not_at_every_watermark():
    operator = made(Waiting, out={"k": "string"})
    with patch.object(keyed_store.KeyedStore, "_put", side_effect=AssertionError("something was written")):
        for number in range(10):
            calls(operator, ("a", number, "", 1))
            assert rows_out(operator.on_watermark(number + 1)) == []
    barrier(operator)
    assert rows_out(operator.on_watermark(14)) == []
    assert rows_out(operator.on_watermark(15)) == [("a",)]
    assert rows_out(operator.on_watermark(109)) == []
    assert rows_out(operator.on_watermark(110)) == [("a",)]


@pytest.mark.parametrize("at_us", [253_402_300_800_000_000, -(2**62)])
def test_rows_beyond_the_years_that_python_has_are_refused_with_their_column(at_us):
    operator = made(Waiting, out={"k": "string"})
    rows = frame([("a", 0, "", 1)]).with_columns(pl.Series("ts", [at_us]).cast(SCHEMA["ts"].polars))
    operator.on_batch(rows, late=False)
    with pytest.raises(FunctionError, match=r"step fn: .* a row: column ts has a time outside the years 1 to 9999"):
        operator.on_watermark(TIME_MAX_US)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"after": "4000000d"}, "longer than 1000000d"),
        ({"after": "4000000d", "clock": True}, "longer than 1000000d"),
        (
            {"at": dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, dt.timezone(-dt.timedelta(hours=1)))},
            "after the year 9999",
        ),
    ],
)
def test_timers_for_which_there_is_no_time_are_refused_when_they_are_set(setting, says):
    function = telling(lambda self, row, ctx: ctx.set_timer("far", **setting))
    with pytest.raises(TaskError, match=says):
        texts(made(function, out=OUT_SCHEMA), ("a", 1, "", 1))
