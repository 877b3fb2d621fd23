"""What keyed functions remember and give, one thing at a time."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import polars as pl
import pytest
from tests.operators.process_model import (
    EPOCH,
    OUT_SCHEMA,
    US,
    again,
    barrier,
    calls,
    frame,
    made,
    rows_out,
    telling,
    texts,
    us,
)
from tests.operators.subtasks import below

from fordstone import KeyedFunction, ListState, MapState, ValueState
from fordstone.errors import SchemaError, TaskError
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import LATE
from fordstone.plan.stream_type import EventTime

# Without order, and without time.


class Counting(KeyedFunction):
    n = ValueState("bigint", ttl=10 * US)
    all = ListState("bigint", ttl=10 * US)
    by_op = MapState("string", "bigint", ttl=10 * US)

    def process(self, row, ctx):
        self.n.set(self.n.get(0) + 1)
        self.all.append(row["x"])
        self.by_op[row["op"]] = row["x"]
        yield {"k": row["k"], "n": self.n.get(), "all": self.all.get(), "ops": list(self.by_op)}


COUNTED = {"k": "string", "n": "bigint", "all": "array<bigint>", "ops": "array<string>"}


def test_without_event_time_rows_are_taken_as_they_come_and_a_ttl_goes_by_the_clock_at_barriers():
    options: dict[str, Any] = {"out": COUNTED, "time": None, "ordered": False}
    operator = made(Counting, **options)
    assert rows_out(operator.on_batch(frame([("a", 9, "p", 1), ("b", 1, "p", 2), ("a", 2, "q", 3)]), late=False)) == [
        ("a", 1, [1], ["p"]),
        ("b", 1, [2], ["p"]),
        ("a", 2, [1, 3], ["p", "q"]),
    ]
    barrier(operator, 100)
    operator = again(operator, Counting, TIME_MAX_US, **options)
    assert rows_out(operator.on_batch(below(frame([("a", 9, "q", 4)])), late=True)) == [("a", 3, [1, 3, 4], ["p", "q"])]
    barrier(operator, 105)
    operator = again(operator, Counting, TIME_MAX_US, **options)
    barrier(operator, 109)
    assert rows_out(operator.on_batch(frame([("b", 9, "p", 5)]), late=False)) == [("b", 2, [2, 5], ["p"])]
    barrier(operator, 110)
    # What was written at 100 has gone, what was written later has not.
    assert rows_out(operator.on_batch(frame([("a", 9, "r", 6), ("b", 1, "r", 7)]), late=False)) == [
        ("a", 4, [4, 6], ["q", "r"]),
        ("b", 3, [5, 7], ["p", "r"]),
    ]
    barrier(operator, 10**6)
    barrier(operator, 10**7)
    assert {
        name: sum(piece.frame().height for piece in state.freeze()) for name, state in operator.states().items()
    } == {
        "state_n": 0,
        "state_all": 0,
        "state_by_op": 0,
        "timers": 0,
        "clocks": 0,
    }


def test_event_timers_need_event_time():
    operator = made(telling(lambda self, row, ctx: ctx.set_timer(after="1s")), out=OUT_SCHEMA, time=None, ordered=False)
    with pytest.raises(TaskError, match=r"no event time.*clock=True"):
        operator.on_batch(frame([("a", 1, "", 0)]), late=False)


def test_unordered_rows_with_time_come_at_once_and_late_ones_leave():
    operator = made(
        telling(
            lambda self, row, ctx: ctx.set_timer("t", at=EPOCH + 1 * US) or us(ctx.time),
            lambda self, timer, ctx: us(timer.time),
        ),
        out=OUT_SCHEMA,
        ordered=False,
    )
    assert [row[2] for row in rows_out(operator.on_batch(frame([("a", 5, "", 0), ("b", 2, "", 0)]), late=False))] == [
        "2",
        "5",
    ]
    assert [row[2] for row in rows_out(operator.on_watermark(4))] == ["1", "1"]
    (late, main) = operator.on_batch(frame([("a", 3, "", 0), ("a", None, "", 0), ("a", 6, "", 0)]), late=False)
    assert (late.port, late.frame.height, main.frame.height) == (LATE, 2, 1)
    (late,) = operator.on_batch(below(frame([("a", 9, "", 0)])), late=True)
    assert late.port == LATE
    # A time that has passed is as soon as possible: what it gives must not be late for the next step.
    assert [row[2] for row in rows_out(operator.on_watermark(9))] == ["4"]


# State.


def test_expired_state_goes_from_storage_when_its_time_has_passed():
    operator = made()
    calls(operator, *[(f"k{n}", 1, op, n) for n in range(9) for op in ("set", "append", "put")])
    operator.on_watermark(3)
    barrier(operator)
    held = {name: len(state) for name, state in operator.states().items() if name.startswith("state_")}  # type: ignore[arg-type]
    assert held == {"state_value": 9, "state_seen": 9, "state_pairs": 9, "state_kept": 9}
    operator.on_watermark(50)
    barrier(operator)
    held = {name: len(state) for name, state in operator.states().items() if name.startswith("state_")}  # type: ignore[arg-type]
    assert held == {"state_value": 0, "state_seen": 0, "state_pairs": 0, "state_kept": 9}


def test_a_checkpoint_holds_the_chunks_that_changed_and_no_more():
    class Long(KeyedFunction):
        items = ListState("bigint")
        by_name = MapState("bigint", "bigint")

        def process(self, row, ctx):
            for number in range(row["x"]):
                self.items.append(number)
                self.by_name[number] = number
            if row["op"] == "one":
                self.by_name[0] = 5

    operator = made(Long, out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 1000), ("b", 1, "", 3))
    operator.on_watermark(2)
    barrier(operator)
    for state in operator.states().values():
        state.freeze()
    calls(operator, ("a", 2, "one", 0))
    operator.on_watermark(3)
    barrier(operator)
    pieces = {name: state.freeze() for name, state in operator.states().items()}
    assert [piece.frame().height for piece in pieces["state_items"]] == [17]
    assert [piece.frame().height for piece in pieces["state_by_name"]] == [17, 1]


def test_what_is_read_back_is_what_was_set_whether_or_not_it_was_written_meanwhile():
    class Kinds(KeyedFunction):
        f = ValueState("float")
        d = ValueState("double")
        money = ValueState("decimal(10,2)")
        when = ValueState("timestamp")
        tags = ValueState("array<float>")

        def process(self, row, ctx):
            if row["op"] == "set":
                self.f.set(0.1)
                self.d.set(3)
                self.money.set(7)
                self.when.set(dt.datetime(2024, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2))))
                self.tags.set((0.1, None, 2))
            self.tags.get().append(9)  # its own copy
            values = [self.f.get(), self.d.get(), self.money.get(), self.when.get(), self.tags.get()]
            yield {"k": "a", "ts": row["ts"], "text": repr(values)}

    operator = made(Kinds, out=OUT_SCHEMA)
    calls(operator, ("a", 1, "set", 0), ("a", 2, "", 0))
    at_once = [row[2] for row in rows_out(operator.on_watermark(3))]
    barrier(operator)
    operator = again(operator, Kinds, 3, out=OUT_SCHEMA)
    assert {*at_once, *texts(operator, ("a", 4, "", 0))} == {at_once[0]}
    assert "Decimal('7.00')" in at_once[0]
    assert "0.10000000149011612" in at_once[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda self: self.value.set("warm"), r"state value is not of its declared type: 'warm' is not a number"),
        (lambda self: self.value.set(value=True), "True is not a number"),
        (lambda self: self.items.append(None), "None is not a string"),
        (lambda self: self.items.set(["a", 1]), "1 is not a string"),
        (lambda self: self.by_name.get(1), "the key given to state by_name"),
        (lambda self: self.by_name.__setitem__("a", [2**70]), "does not fit into bigint"),
        (lambda self: self.by_name.__setitem__("a", "b"), "is not a list"),
    ],
)
def test_values_of_another_type_are_refused_with_step_key_and_state(change, says):
    operator = made(telling(lambda self, row, ctx: change(self)), out=OUT_SCHEMA)
    calls(operator, ("a", 1, "", 0))
    with pytest.raises(SchemaError, match=rf"step fn, key 'a': .*{says}"):
        operator.on_watermark(TIME_MAX_US)


def test_nan_and_both_zeros_are_one_key_each():
    schema = Schema.of({"x": "double", "ts": "timestamp", "i": "bigint"})

    class Count(KeyedFunction):
        n = ValueState("bigint")

        def process(self, row, ctx):
            self.n.set(self.n.get(0) + 1)
            return {"text": f"{ctx.key} {self.n.get()}"}

    options: dict[str, Any] = {"keys": ("x",), "schema": schema, "out": {"text": "string"}}
    operator = made(Count, **options)

    def some(*xs: float) -> pl.DataFrame:
        return pl.DataFrame([(x, EPOCH + 5 * US, 1) for x in xs], schema=schema.polars, orient="row")

    operator.on_batch(some(0.0, math.nan, -0.0, -math.nan), late=False)
    assert sorted(rows_out(operator.on_watermark(6))) == [("0.0 1",), ("0.0 2",), ("nan 1",), ("nan 2",)]
    barrier(operator)
    operator = again(operator, Count, 4, **options)
    operator.on_batch(some(-0.0, math.nan), late=False)
    assert sorted(rows_out(operator.on_watermark(6))) == [("0.0 3",), ("nan 3",)]


def test_without_a_key_there_is_one_group_and_with_several_the_key_is_a_tuple():
    rows = [("a", 1, "p", 0), ("b", 2, "q", 0)]
    tell = telling(lambda self, row, ctx: self.value.set(self.value.get(0) + 1) or f"{ctx.key} {self.value.get()}")
    assert texts(made(tell, keys=(), out=OUT_SCHEMA), *rows) == ["() 1.0", "() 2.0"]
    assert texts(made(tell, keys=("k", "op"), out=OUT_SCHEMA), *rows) == ["('a', 'p') 1.0", "('b', 'q') 1.0"]


# What is emitted.


@pytest.mark.parametrize(
    ("gives", "error", "says"),
    [
        (
            lambda ctx: [{"k": "a", "ts": ctx.time, "text": "x", "more": 1}],
            SchemaError,
            "step fn: the function gave more",
        ),
        (lambda ctx: [{"k": 1, "ts": ctx.time, "text": "x"}], SchemaError, "not of the declared type"),
        (lambda ctx: ["text"], TaskError, "step fn: the function gave str 'text'; records are dicts"),
        (lambda ctx: [{"k": "a", "text": "x"}], SchemaError, "whose ts is missing: it would be late"),
        (
            lambda ctx: [{"k": "a", "ts": ctx.time - US, "text": "x"}],
            SchemaError,
            "whose ts is before 1970-01-01 00:00:00.000005",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(gives, error, says):
    class Gives(KeyedFunction):
        def process(self, row, ctx):
            return gives(ctx)

    operator = made(Gives, out=OUT_SCHEMA)
    calls(operator, ("a", 5, "", 0))
    with pytest.raises(error, match=says):
        operator.on_watermark(TIME_MAX_US)


def test_missing_columns_are_null_and_later_times_are_allowed():
    class Gives(KeyedFunction):
        def process(self, row, ctx):
            return [{"ts": ctx.time + US}, {"ts": ctx.time, "k": "b", "text": "x"}]

    operator = made(Gives, out=OUT_SCHEMA)
    calls(operator, ("a", 5, "", 0))
    assert rows_out(operator.on_watermark(TIME_MAX_US)) == [(None, 6, None), ("b", 5, "x")]


def test_times_of_window_results_are_those_of_their_column():
    function = telling(
        lambda self, row, ctx: ctx.set_timer(at=ctx.time) or us(ctx.time), lambda self, timer, ctx: us(timer.time)
    )
    operator = made(function, out=OUT_SCHEMA, time=EventTime(column="ts", shift_us=-1))
    calls(operator, ("a", 10, "", 0))
    assert operator.on_watermark(9) == []
    assert rows_out(operator.on_watermark(10)) == [("a", 10, "10"), ("timer", 10, "10")]


def test_errors_of_the_function_carry_step_key_and_row():
    def fail(self, row, ctx):
        raise RuntimeError("the sensor table is locked")

    operator = made(telling(fail), out=OUT_SCHEMA)
    calls(operator, ("a", 5, "", 0))
    with pytest.raises(RuntimeError, match="locked") as caught:
        operator.on_watermark(TIME_MAX_US)
    (note,) = caught.value.__notes__
    assert note.startswith("in step fn, process() for key 'a', on row {'k': 'a'")

    operator = made(telling(lambda self, row, ctx: ctx.set_timer("t", after="0s"), fail), out=OUT_SCHEMA)
    calls(operator, ("a", 5, "", 0), ("a", 6, "", 0))
    with pytest.raises(RuntimeError) as caught:
        operator.on_watermark(TIME_MAX_US)
    (note,) = caught.value.__notes__
    assert note == "in step fn, on_timer() for key 'a', timer 't' of 1970-01-01 00:00:00.000005+00:00"


def test_a_function_is_not_made_before_there_is_something_to_do():
    class Costly(Counting):
        def __init__(self) -> None:
            raise AssertionError("made")

    operator = made(Costly, out=COUNTED)
    operator.on_watermark(5)
    barrier(operator)
    assert set(operator.states()) == {
        "waiting",
        "identified",
        "state_n",
        "state_all",
        "state_by_op",
        "timers",
        "clocks",
    }
    calls(operator, ("a", 6, "", 0))
    with pytest.raises(AssertionError, match="made"):
        operator.on_watermark(7)
