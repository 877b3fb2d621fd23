"""Patterns, one thing at a time: order, keys, measures, all rows, limits, what is kept."""

from __future__ import annotations

import datetime as dt
import logging
import math
from decimal import Decimal

import polars as pl
import pytest
from tests.operators.pattern_rows import SCHEMA, STREAM, frame, matches, of, run, step_of, timeouts, word
from tests.operators.subtasks import EPOCH, Subtasks, below, restored

from fordstone.api.pattern import MatchOptions, Pattern, match_step
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import LATE, Moment
from fordstone.operators.match.check import derive_match
from fordstone.operators.match.step import MatchRows
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, StreamType
from fordstone.state.base import Table
from fordstone.state.memory import IN_MEMORY

ABC = Pattern("abc").start("a", of("a")).then("b", of("b")).then("c", of("c"))
BARRIER = Moment(now_us=1, before_us=0)


def kept_keys(operator: MatchRows) -> pl.Series:
    """The keys with something kept, in the step's table."""
    table = operator.states()["open"]
    assert isinstance(table, Table)
    return table.scan()["k"]


def test_an_optional_stage_may_be_left_out():
    pattern = Pattern("p").start("a", of("a")).then("b", of("b"), optional=True).then("c", of("c"))
    assert matches(pattern, "a b c", skip="none") == ["a b c", "a c"]
    assert matches(pattern, "a c", skip="none") == ["a c"]
    pairs = Pattern("p").start("a", of("a")).then("b", of("b"), times=2, optional=True).then("c", of("c"))
    assert matches(pairs, "a b1 c", skip="none") == ["a c"]
    assert matches(pairs, "a b1 b2 c", skip="none") == ["a b1 b2 c", "a c"]


def test_the_first_stage_may_be_left_out_too():
    pattern = Pattern("p").start("a", of("a"), optional=True).next("b", of("b"))
    assert matches(pattern, "a b1 d b2", skip="next") == ["a b1", "b1", "b2"]
    assert matches(pattern, "a b1 d b2") == ["a b1", "b2"]


def test_times_count_rows():
    def pattern(times):
        return Pattern("p").start("a", of("a"), times=times, consecutive=True).next("c", of("c"))

    assert matches(pattern(2), "a1 a2 a3 c", skip="none") == ["a2 a3 c"]
    assert matches(pattern((2, 3)), "a1 a2 a3 c", skip="none") == ["a1 a2 a3 c", "a2 a3 c"]
    assert matches(pattern((2, None)), "a1 a2 a3 a4 c", skip="next") == ["a1 a2 a3 a4 c", "a2 a3 a4 c", "a3 a4 c"]


def test_a_reluctant_loop_takes_no_row_with_which_it_could_be_left():
    pattern = Pattern("p").start("s", of("s")).next("b", of("bc"), one_or_more=True, consecutive=True, reluctant=True)
    pattern = pattern.next("c", of("c"))
    assert matches(pattern, "s b1 c1 c2 c3", skip="none") == ["s b1 c1"]


def test_rows_of_one_time_are_ordered_by_order_and_then_by_what_is_read():
    pattern = Pattern("p").start("a", "name = 'a'").next("b", "name = 'b'")
    rows = [("k", 5, "b", 1.0), ("k", 5, "a", 2.0)]
    assert run(step_of(pattern, {"n": "count(*)"}), rows)["main"]["n"].to_list() == [2]
    assert "main" not in run(step_of(pattern, {"n": "count(*)"}, order="x"), rows)


def test_a_row_between_ends_what_needs_the_next_one_wherever_batches_and_watermarks_are_cut():
    pattern = Pattern("p").start("a", of("a")).next("b", of("b"))
    for rows, found in (("a d b", 0), ("a b", 1)):
        for restores in (False, True):
            operator = MatchRows(step_of(pattern, {"n": "count(*)"}), STREAM, state=IN_MEMORY)
            emits = []
            for row in word(rows):
                operator.on_batch(frame([row]), late=False)
                emits += operator.on_watermark(row[1] + 1)
                operator.on_barrier(BARRIER)
                if restores:
                    operator = restored(
                        operator, MatchRows(step_of(pattern, {"n": "count(*)"}), STREAM, state=IN_MEMORY), row[1] + 1
                    )
            assert len(emits) == found


def test_late_rows_and_rows_without_a_time_leave_as_they_came():
    operator = MatchRows(step_of(ABC, {"n": "count(*)"}), STREAM, state=IN_MEMORY)
    operator.on_watermark(10)
    (emit,) = operator.on_batch(frame([("k", None, "a", 1.0), ("k", 9, "z", 2.0), ("k", 10, "a", 3.0)]), late=False)
    assert (emit.port, emit.frame["x"].to_list(), emit.frame.columns) == (LATE, [1.0, 2.0], list(SCHEMA))
    (emit,) = operator.on_batch(below(frame([("k", 11, "b", 1.0)])), late=True)
    assert (emit.port, emit.frame.height) == (LATE, 1)


def test_rows_that_no_condition_wants_are_not_kept_where_it_does_not_matter_that_they_came():
    operator = MatchRows(step_of(ABC, {"n": "count(*)"}), STREAM, state=IN_MEMORY)
    operator.on_batch(frame([("k", at, "z", 1.0) for at in range(50)] + [("k", 60, "b", 1.0)]), late=False)
    assert sum(piece.frame().height for piece in operator.states()["waiting"].freeze()) == 1


def test_a_key_without_open_candidates_has_nothing_kept():
    operator = MatchRows(step_of(ABC.within("10us"), {"n": "count(*)"}), STREAM, state=IN_MEMORY)
    operator.on_batch(
        frame([("k", 0, "a", 1.0), ("l", 1, "a", 1.0), ("l", 2, "b", 1.0), ("m", 0, "b", 1.0)]), late=False
    )
    operator.on_watermark(5)
    operator.on_barrier(BARRIER)
    assert kept_keys(operator).sort().to_list() == ["k", "l"]
    operator.on_watermark(10)
    operator.on_barrier(BARRIER)
    assert kept_keys(operator).to_list() == ["l"]
    operator.on_watermark(11)
    operator.on_barrier(BARRIER)
    assert kept_keys(operator).to_list() == []


def test_what_was_loaded_runs_out_of_time_though_no_row_comes():
    step = step_of(ABC.within("10us"), {"n": "count(*)"})
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    operator.on_batch(frame([("k", 0, "a", 1.0), (None, 3, "a", 1.0)]), late=False)
    operator.on_watermark(5)
    operator.on_barrier(BARRIER)
    fresh = restored(operator, MatchRows(step, STREAM, state=IN_MEMORY), 5)
    assert fresh.on_watermark(9) == []
    (emit,) = fresh.on_watermark(10)
    assert emit.frame.select("k", "stages", "n").rows() == [("k", "a", 1)]
    (emit,) = fresh.on_watermark(13)
    assert emit.frame.select("k", "stages", "n").rows() == [(None, "a", 1)]


# Measures


def test_measures_are_worked_out_over_the_rows_of_each_stage():
    pattern = Pattern("p").start("a", of("a")).then("b", of("b"), times=(1, 3), greedy=True).then("c", of("c"))
    measures = {
        "f": "first(b.x)", "l": "last(b.x)", "l1": "last(b.x, 1)", "f2": "first(b.name, 2)", "n": "count(b.x)", "rows": "count(*)",
        "s": "sum(b.x * 2)", "m": "avg(b.x)", "lo": "min(b.name)", "hi": "max(b.ts)", "all": "sum(x)", "c": "c.x - a.x",
        "x": "x", "who": "classifier()",
    }  # fmt: skip
    rows = [("k", 0, "a", 1.0), ("k", 1, "b1", 4.0), ("k", 2, "b2", None), ("k", 3, "b3", 7.0), ("k", 4, "c", 9.0)]
    (found,) = run(step_of(pattern, measures), rows)["main"].rows(named=True)
    at = EPOCH + dt.timedelta(microseconds=3)
    assert found == {
        "k": "k", "f": 4.0, "l": 7.0, "l1": None, "f2": "b3", "n": 2, "rows": 5, "s": 22.0, "m": 5.5, "lo": "b1", "hi": at,
        "all": 21.0, "c": 8.0, "x": 9.0, "who": "c",
    }  # fmt: skip


def test_a_stage_that_took_no_row_has_no_values():
    pattern = Pattern("p").start("a", of("a")).then("b", of("b"), optional=True).then("c", of("c"))
    measures = {"f": "first(b.x)", "l": "b.x", "n": "count(b.*)", "s": "sum(b.x)", "m": "avg(b.x)", "hi": "max(b.x)"}
    (found,) = run(step_of(pattern, measures), word("a c"))["main"].rows()
    assert found == ("k", None, None, 0, None, None, None)


def test_with_all_rows_measures_run_unless_they_are_final():
    measures = {
        "n": "count(*)",
        "whole": "final(count(*))",
        "peak": "running(max(x))",
        "stage": "classifier()",
        "m": "match_number()",
    }
    out = run(step_of(ABC, measures, rows="all"), word("a b c a b c"))["main"]
    assert out.columns == [*SCHEMA, *measures]
    assert out.drop("k", "ts").rows() == [
        ("a", 0.0, 1, 3, 0.0, "a", 1), ("b", 1.0, 2, 3, 1.0, "b", 1), ("c", 2.0, 3, 3, 2.0, "c", 1),
        ("a", 3.0, 1, 3, 3.0, "a", 2), ("b", 4.0, 2, 3, 4.0, "b", 2), ("c", 5.0, 3, 3, 5.0, "c", 2),
    ]  # fmt: skip


def test_numbers_of_matches_go_on_after_a_restore():
    subtasks = Subtasks(
        make=lambda: MatchRows(step_of(ABC, {"m": "match_number()"}), STREAM, state=IN_MEMORY), frame=frame
    )
    for first in (0, 10, 20):
        subtasks.batch([("k", first + at, name, 1.0) for at, name in enumerate("abc")])
        subtasks.watermark(first + 5)
        subtasks.restore(1 + first % 3)
    assert [one["m"].to_list() for one in subtasks.out] == [[1], [2], [3]]


def test_a_match_counts_as_decided_when_its_last_row_came_or_what_kept_it_waiting_was_over():
    def at(pattern, text, **options):
        out = run(step_of(pattern, {"at": "match_time()"}, **options), word(text))
        return out["main"]["at"].cast(pl.Int64).to_list()

    assert at(ABC.within("50us"), "a@0 b@3 c@9") == [9]
    silent = Pattern("p").start("a", of("a")).not_followed_by("n", of("b")).within("10us")
    assert at(silent, "a@0 c@5") == [10]
    longest = Pattern("p").start("a", of("a"), one_or_more=True, consecutive=True, greedy=True).within("50us")
    assert at(longest, "a@0 a@1 z@7 c@9", choose="preferred") == [7]
    # The match of the second row waits until it is clear that the first has none.
    two = (
        Pattern("p")
        .start("a", "name = 'a' OR name = 'b'")
        .next("b", of("b"), times=(1, 2), consecutive=True)
        .next("c", of("c"))
    )
    assert at(two.within("50us"), "a@0 b@1 b@2 b@3 c@4") == [4]


def test_decimals_timestamps_and_arrays_are_exact_through_a_restore():
    schema = Schema.of(
        {"k": "string", "ts": "timestamp", "d": "decimal(20,4)", "l": "array<string>", "f": "float", "y": "date"}
    )
    stream = StreamType(schema=schema, time=EventTime(column="ts"))
    pattern = Pattern("p").start("a", "d > 1").then("b", "d > a.d + 0.0001 AND sum(a.d) < d").within("1h")
    measures = {"s": "sum(d)", "hi": "max(d)", "l": "first(l)", "f": "a.f", "y": "a.y", "since": "a.ts", "m": "min(d)"}
    step = match_step("m", p.Input("rows"), ("k",), pattern, measures, MatchOptions())
    derive_match(step, {p.Input("rows"): stream})
    at = dt.datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    big = Decimal("9007199254740993.0001")
    first = ("k", at, big, ["x", None], 0.1, dt.date(1969, 12, 31))
    second = ("k", at + dt.timedelta(seconds=1), big + Decimal("0.0002"), None, None, None)
    operator = MatchRows(step, stream, state=IN_MEMORY)
    operator.on_batch(pl.DataFrame([first], schema=schema.polars, orient="row"), late=False)
    watermark = int((at - EPOCH) / dt.timedelta(microseconds=1)) + 1
    operator.on_watermark(watermark)
    operator.on_barrier(BARRIER)
    operator = restored(operator, MatchRows(step, stream, state=IN_MEMORY), watermark)
    operator.on_batch(pl.DataFrame([second], schema=schema.polars, orient="row"), late=False)
    (emit,) = operator.on_watermark(TIME_MAX_US)
    (found,) = emit.frame.rows()
    assert found[:4] == ("k", big * 2 + Decimal("0.0002"), big + Decimal("0.0002"), ["x", None])
    assert found[4] == pytest.approx(0.1, abs=1e-8)
    assert found[5:] == (dt.date(1969, 12, 31), at, big)
    assert emit.frame.schema["s"] == pl.Decimal(30, 4)


# Keys


def test_without_a_key_all_rows_are_gone_through_together():
    step = step_of(ABC, {"n": "count(*)"}, keys=())
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    operator.on_batch(frame([("k", 0, "a", 1.0), ("l", 1, "b", 1.0)]), late=False)
    operator.on_watermark(2)
    operator.on_barrier(BARRIER)
    operator = restored(operator, MatchRows(step, STREAM, state=IN_MEMORY), 2)
    operator.on_batch(frame([(None, 3, "c", 1.0)]), late=False)
    (emit,) = operator.on_watermark(4)
    assert emit.frame.rows() == [(3,)]


def test_both_zeros_are_one_key_and_so_is_every_nan():
    step = step_of(ABC, {"n": "count(*)"}, keys=("x",))
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    operator.on_batch(frame([("k", 0, "a", 0.0), ("k", 1, "b", -0.0), ("k", 0, "a", math.nan)]), late=False)
    operator.on_watermark(2)
    operator.on_barrier(BARRIER)
    operator = restored(operator, MatchRows(step, STREAM, state=IN_MEMORY), 2)
    operator.on_batch(frame([("k", 3, "c", -0.0), ("k", 4, "b", -math.nan), ("k", 5, "c", math.nan)]), late=False)
    (emit,) = operator.on_watermark(TIME_MAX_US)
    found = sorted(map(str, emit.frame["x"].to_list()))
    assert found == ["0.0", "nan"]
    assert emit.frame["n"].to_list() == [3, 3]


# Limits


def test_the_oldest_candidates_are_dropped_when_there_are_too_many(caplog):
    pattern = Pattern("p").start("a", of("a")).then("c", of("c"))
    with caplog.at_level(logging.WARNING):
        assert matches(pattern, "a1 a2 a3 a4 c", skip="next", limit=2) == ["a3 c", "a4 c"]
    assert [record.message.startswith("pattern candidates dropped") for record in caplog.records] == [True]
    assert caplog.records[0].limit == 2


def test_combinations_without_end_stay_below_the_limit():
    pattern = (
        Pattern("p").start("a", of("a")).then("b", of("b"), one_or_more=True, combinations=True).then("c", of("c"))
    )
    word_of_many = " ".join(["a", *(f"b{at}" for at in range(30)), "c"])
    assert 0 < len(matches(pattern.within("1h"), word_of_many, skip="none", limit=50)) <= 50


def test_a_match_that_is_longer_than_the_limit_is_given_as_long_as_it_was():
    streak = Pattern("p").start("b", of("b"), one_or_more=True, consecutive=True, greedy=True)
    found = matches(streak, "b0 b1 b2 b3 b4 b5 b6 b7 b8 b9 z", choose="preferred", limit=4)
    assert found == ["b0 b1 b2 b3 b4", "b5 b6 b7 b8 b9"]


def test_a_match_that_was_stored_with_the_rows_that_may_begin_the_next_goes_on_as_if_nothing_had_happened():
    pattern = Pattern("p").start("a", of("a")).then("b", of("b")).then("c", of("c")).within("10us")
    subtasks = Subtasks(
        make=lambda: MatchRows(step_of(pattern, {"f": "first(x)"}), STREAM, state=IN_MEMORY), frame=frame
    )
    subtasks.batch([("k", at, name, float(at)) for at, name in enumerate("aab")])
    subtasks.watermark(5)
    subtasks.restore(2)
    subtasks.watermark(10)  # the first a has run out of time; the second goes on with the b that was held
    subtasks.batch([("k", 10, "c", 1.0)])
    subtasks.watermark(11)
    assert [one["f"].to_list() for one in subtasks.out] == [[1.0]]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("decimal(20,4)", Decimal("1.5")),
        ("binary", b"\xff\x00"),
        ("timestamp", EPOCH),
        ("date", dt.date(1969, 12, 31)),
        ("boolean", True),
    ],
)
def test_keys_of_any_type_go_through_a_restore(kind, key):
    schema = Schema.of({"k": kind, "ts": "timestamp", "x": "bigint"})
    stream = StreamType(schema=schema, time=EventTime(column="ts"))
    pattern = Pattern("p").start("a", "x = 1").then("b", "x = 2").within("1h")
    step = match_step("m", p.Input("rows"), ("k",), pattern, {"one": "1", "n": "count(*)"}, MatchOptions())
    operator = MatchRows(step, stream, state=IN_MEMORY)
    operator.on_batch(pl.DataFrame([(key, EPOCH, 1)], schema=schema.polars, orient="row"), late=False)
    operator.on_watermark(1)
    operator.on_barrier(BARRIER)
    operator = restored(operator, MatchRows(step, stream, state=IN_MEMORY), 1)
    later = EPOCH + dt.timedelta(seconds=1)
    operator.on_batch(pl.DataFrame([(key, later, 2)], schema=schema.polars, orient="row"), late=False)
    (emit,) = operator.on_watermark(TIME_MAX_US)
    assert emit.frame.rows() == [(key, 1, 2)]
    assert emit.frame.schema["k"] == schema["k"].polars


def test_dropped_candidates_do_not_time_out():
    pattern = Pattern("p").start("a", of("a")).then("c", of("c")).within("50us")
    assert timeouts(pattern, "a1 a2 a3", limit=1) == [(2, "a")]
