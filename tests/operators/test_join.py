"""Interval joins against DuckDB: whatever the order of rows, the batches, watermarks, barriers, restores and subtasks."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Any
from unittest.mock import patch

import duckdb
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import Row, Subtasks, below, bits, events_of, rank, restored, shown

from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.base import LATE, MAIN, ROW_ID, Emits, Moment, Operator, OperatorContext
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.state import timeline
from fordstone.state.key_group import split_by_owner

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
HOWS = ("inner", "left", "right", "full")
LEFT_SIDE, RIGHT_SIDE = 0, 1


@dataclass(frozen=True)
class Case:
    """A join of two streams with columns k, ts, v."""

    how: str
    from_us: int
    to_us: int
    key: str = "string"
    other_key: str = ""

    @property
    def step(self) -> p.Join:
        found = self.setting.plan.step("join")
        assert isinstance(found, p.Join)
        return found

    @property
    def setting(self) -> OperatorContext:
        return _setting(self)

    def operator(self) -> Operator:
        return make_operator(self.step, self.setting)

    def frame(self, side: int, rows: Sequence[Row]) -> pl.DataFrame:
        """Rows (key, time, value, side) as the stream of that side has them."""
        schema = self.setting.types[self.step.inputs[side]].schema.polars
        times = [None if row[1] is None else EPOCH + dt.timedelta(microseconds=row[1]) for row in rows]
        given = [(row[0], time, row[2]) for row, time in zip(rows, times, strict=True)]
        return pl.DataFrame(given, schema=schema, orient="row")

    def carried(self, side: int, rows: Sequence[Row]) -> pl.DataFrame:
        """Rows after the feeder of that side."""
        feeder = make_feeder(self.step, side, self.setting)
        assert feeder is not None
        (emit,) = feeder.on_batch(self.frame(side, rows), late=False)
        return emit.frame


@cache
def _setting(case: Case) -> OperatorContext:
    pipeline = Pipeline("joins")
    streams = [
        pipeline.source(name, memory([]), schema={"k": kind, "ts": "timestamp", "v": "bigint"}, time="ts")
        for name, kind in (("l", case.key), ("r", case.other_key or case.key))
    ]
    bounds = (dt.timedelta(microseconds=case.from_us), dt.timedelta(microseconds=case.to_us))
    streams[0].join(streams[1], on="k", between=bounds, how=case.how).sink("out", memory(MemorySink()))
    plan = pipeline.plan()
    return OperatorContext(plan=plan, types=stream_types(plan))


@dataclass
class Sides(Subtasks):
    """Subtasks of a join: a batch has rows of both sides, the left ones first. Asserts that no emitted row is late."""

    case: Case = field(default_factory=lambda: Case("inner", 0, 0))
    received_us: int = TIME_MIN_US
    """The last watermark, which later steps have received."""

    def batch(self, rows: Sequence[Row], *, late: bool = False, watermarks: Sequence[int] = ()) -> None:
        for side in (LEFT_SIDE, RIGHT_SIDE):
            mine = [row for row in rows if row[3] == side]
            if not mine:
                continue
            parts = split_by_owner(self.case.carried(side, mine), ["__k0"], self.parallelism)
            for operator, part in zip(self.operators, parts, strict=True):
                if part.height:
                    self._take(operator.on_batch(below(part) if late else part, late=late))

    def watermark(self, us: int) -> None:
        super().watermark(us)
        self.received_us = us

    def _take(self, emits: Emits) -> None:
        time = self.case.setting.types[p.Input("join")].time
        for emit in emits:
            if emit.port == MAIN and time is not None:
                times = emit.frame.get_column(time.column).cast(pl.Int64) + time.shift_us
                assert (times >= self.received_us).all()
        super()._take(emits)


def sides(case: Case) -> Sides:
    return Sides(make=case.operator, frame=lambda rows: case.frame(LEFT_SIDE, rows), case=case)


def joined(case: Case, rows: Sequence[Row], watermark_us: int) -> Counter[Any]:
    """The rows that have come out by that watermark, by DuckDB."""
    tables = [
        pl.DataFrame(
            [(row[0], row[1], row[2]) for row in rows if row[3] == side],
            schema={"k": kind, "t": pl.Int64, "v": pl.Int64},
            orient="row",
        )
        for side, kind in ((0, case.frame(0, []).schema["k"]), (1, case.frame(1, []).schema["k"]))
    ]
    with duckdb.connect(config={"threads": 1}) as base:
        base.register("l", tables[0].to_arrow())
        base.register("r", tables[1].to_arrow())
        found = base.sql(
            f"SELECT coalesce(l.k, r.k), l.t, l.v, r.t, r.v FROM l {case.how.upper()} JOIN r "
            f"ON l.k = r.k AND r.t BETWEEN l.t + ({case.from_us}) AND l.t + ({case.to_us}) "
            f"WHERE (l.t IS NOT NULL AND r.t IS NOT NULL) OR l.t + {max(case.to_us, 0)} < {watermark_us} "
            f"OR r.t + {max(-case.from_us, 0)} < {watermark_us}"
        ).fetchall()
    return Counter(tuple(map(bits, row)) for row in found)


def late_rows(rows: Sequence[Row]) -> Counter[Any]:
    return Counter(
        tuple(map(bits, (row[0], row[1], row[2], None, None) if row[3] == 0 else (row[0], None, None, row[1], row[2])))
        for row in rows
    )


def rows_with(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Row]]:
    times = st.one_of(st.integers(-2, 2), st.integers(-9, 9), st.none(), st.integers(-(10**12), 10**12))
    one = st.tuples(keys, times, st.sampled_from([None, 1, 2]), st.sampled_from([0, 1]))
    return st.lists(one, min_size=1, max_size=12)


few_keys = st.sampled_from(["a", "a", "b", "é", "键", "", None])
cases = st.builds(
    lambda how, one, other: Case(how, min(one, other), max(one, other)),
    st.sampled_from(HOWS),
    st.sampled_from([-7, -3, -1, 0, 1, 2, 6]),
    st.sampled_from([-6, -2, 0, 1, 3, 8]),
)


@examples(60)
@given(case=cases, happens=events_of(rows_with(few_keys)))
def test_pairs_and_rows_alone_are_those_of_one_query_over_all_rows(case, happens):
    subtasks = sides(case)
    happened = subtasks.live_through(happens)
    assert shown(subtasks.out) == joined(case, happened.taken, max(subtasks.watermark_us, -(2**61)))
    subtasks.watermark(TIME_MAX_US)
    assert shown(subtasks.out) == joined(case, happened.taken, 2**61)
    assert shown(subtasks.late) == late_rows(happened.late)


@examples(20)
@given(
    how=st.sampled_from(HOWS),
    happens=events_of(rows_with(st.sampled_from([0.0, -0.0, math.nan, -math.nan, 1.5, math.inf, None])), most=8),
)
def test_nan_is_equal_to_nan_and_the_zeros_to_each_other(how, happens):
    case = Case(how, -2, 2, key="double")
    subtasks = sides(case)
    happened = subtasks.live_through(happens)
    subtasks.watermark(TIME_MAX_US)
    assert shown(subtasks.out) == joined(case, happened.taken, 2**61)


@examples(20)
@given(how=st.sampled_from(HOWS), happens=events_of(rows_with(few_keys), most=8), shift=st.sampled_from([31, 32]))
def test_keys_that_share_a_hash_are_still_distinguished(how, happens, shift):
    case = Case(how, -3, 3)
    plain = timeline._hashes
    with patch.object(
        timeline, "_hashes", lambda keys: plain(keys) >> np.uint32(shift) if shift < 32 else plain(keys) * np.uint32(0)
    ):
        subtasks = sides(case)
        happened = subtasks.live_through(happens)
        subtasks.watermark(TIME_MAX_US)
    assert shown(subtasks.out) == joined(case, happened.taken, 2**61)


# One thing at a time.


def emitted(emits: Emits) -> list[tuple[Any, ...]]:
    assert all(emit.port == MAIN for emit in emits)
    frames = [emit.frame.with_columns(pl.col(pl.Datetime).cast(pl.Int64)) for emit in emits]
    return sorted((row for frame in frames for row in frame.rows()), key=lambda row: [*map(rank, row)])


def test_both_bounds_are_included_and_a_pair_comes_with_its_second_row():
    case = Case("inner", -5, 10)
    operator = case.operator()
    assert operator.on_batch(case.carried(0, [("a", 100, 1)]), late=False) == []
    rights = [("a", time, time) for time in (94, 95, 110, 111)]
    assert emitted(operator.on_batch(case.carried(1, rights), late=False)) == [
        ("a", 100, 1, 95, 95),
        ("a", 100, 1, 110, 110),
    ]


def test_rows_that_are_equal_in_all_columns_count_each():
    case = Case("full", 0, 0)
    operator = case.operator()
    operator.on_batch(case.carried(0, [("a", 1, 1), ("a", 1, 1), ("b", 1, 1), ("b", 1, 1)]), late=False)
    assert len(emitted(operator.on_batch(case.carried(1, [("a", 1, 2)] * 3), late=False))) == 6
    assert emitted(operator.on_watermark(TIME_MAX_US)) == [("b", 1, 1, None, None)] * 2


def test_null_keys_join_nothing_and_are_rows_alone_in_outer_joins():
    for how, alone in (("inner", 0), ("left", 1), ("right", 1), ("full", 2)):
        case = Case(how, -9, 9)
        operator = case.operator()
        assert operator.on_batch(case.carried(0, [(None, 1, 1)]), late=False) == []
        assert operator.on_batch(case.carried(1, [(None, 1, 1)]), late=False) == []
        assert len(emitted(operator.on_watermark(TIME_MAX_US))) == alone


def test_a_row_alone_is_emitted_when_time_has_passed_all_that_could_meet_it():
    case = Case("full", -5, 10)
    operator = case.operator()
    operator.on_batch(case.carried(0, [("a", 100, 1)]), late=False)
    operator.on_batch(case.carried(1, [("b", 100, 2)]), late=False)
    assert operator.on_watermark(105) == []
    assert emitted(operator.on_watermark(106)) == [("b", None, None, 100, 2)]
    assert operator.on_watermark(110) == []
    assert emitted(operator.on_watermark(111)) == [("a", 100, 1, None, None)]


def test_nothing_is_kept_of_what_time_has_passed():
    case = Case("full", -5, 10)
    operator = case.operator()
    operator.on_batch(case.carried(0, [("a", time, 1) for time in range(20)]), late=False)
    operator.on_batch(case.carried(1, [("a", time, 1) for time in range(20)]), late=False)
    operator.on_barrier(Moment(now_us=1, before_us=0))
    assert {
        name: sum(piece.frame().height for piece in state.freeze()) for name, state in operator.states().items()
    } == {
        "left": 20,
        "left_matched": 20,
        "right": 20,
        "right_matched": 20,
    }
    operator.on_watermark(40)
    assert [state.freeze() for state in operator.states().values()] == [()] * 4


def test_what_has_met_before_a_restore_is_not_emitted_alone_after_it():
    case = Case("full", 0, 10)
    operator = case.operator()
    operator.on_batch(case.carried(0, [("a", 5, 1), ("b", 5, 2)]), late=False)
    operator.on_batch(case.carried(1, [("a", 6, 3)]), late=False)
    operator.on_watermark(5)
    operator = restored(operator, case.operator(), 5)
    operator.on_watermark(5)
    assert emitted(operator.on_batch(case.carried(1, [("b", 15, 4)]), late=False)) == [("b", 5, 2, 15, 4)]
    assert operator.on_watermark(TIME_MAX_US) == []


def test_late_rows_leave_with_nothing_on_the_other_side_and_ids_are_left_behind():
    case = Case("inner", -1, 1, key="int", other_key="bigint")
    operator = case.operator()
    operator.on_watermark(10)
    (emit,) = operator.on_batch(case.carried(1, [(2**40, 9, 1), (3, None, 2), (4, 10, 3)]), late=False)
    assert (emit.port, emit.late) == (LATE, False)
    assert emit.frame.with_columns(pl.col(pl.Datetime).cast(pl.Int64)).rows() == [
        (2**40, None, None, 9, 1),
        (3, None, None, None, 2),
    ]
    feeder = make_feeder(case.step, 0, case.setting)
    assert feeder is not None
    with_ids = case.frame(0, [(4, 11, 5)]).with_columns(pl.lit("id").alias(ROW_ID))
    (fed,) = feeder.on_batch(below(with_ids, 14), late=True)
    assert fed.late
    (emit,) = operator.on_batch(fed.frame, late=True)
    assert (emit.port, emit.late_by_us) == (LATE, 3)
    assert emit.frame.columns == ["k", "ts", "v", "ts_right", "v_right"]
    (fed,) = feeder.on_batch(with_ids, late=False)
    assert emitted(operator.on_batch(fed.frame, late=False)) == [(4, 11, 5, 10, 3)]


def test_rows_older_than_the_last_watermark_are_late():
    case = Case("inner", -1, 1)
    operator = case.operator()
    operator.on_watermark(TIME_MAX_US)
    (emit,) = operator.on_batch(case.carried(0, [("a", 1, 1)]), late=False)
    assert emit.port == LATE


@pytest.mark.parametrize("how", HOWS)
def test_whole_numbers_of_any_width_are_compared(how):
    case = Case(how, 0, 0, key="tinyint", other_key="bigint")
    operator = case.operator()
    operator.on_batch(case.carried(0, [(1, 1, 1)]), late=False)
    out = operator.on_batch(case.carried(1, [(1, 1, 2), (2**40, 1, 3)]), late=False)
    assert emitted(out) == [(1, 1, 1, 1, 2)]
    assert out[0].frame.schema["k"] == pl.Int64
    alone = emitted(operator.on_watermark(TIME_MAX_US))
    assert alone == ([(2**40, None, None, 1, 3)] if how in {"right", "full"} else [])


def test_a_key_with_many_rows_costs_what_it_gives():
    case = Case("inner", 0, 1)
    operator = case.operator()
    rows = 30_000
    operator.on_batch(case.carried(0, [("a", 10 * number, number) for number in range(rows)]), late=False)
    out = emitted(
        operator.on_batch(case.carried(1, [("a", 10 * number + 1, number) for number in range(rows)]), late=False)
    )
    assert len(out) == rows
    assert all(left == right for _, _, left, _, right in out)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("boolean", True, False),
        ("float", 0.5, math.nan),
        ("binary", b"\x00", b""),
        ("date", dt.date(2026, 1, 1), dt.date(1969, 1, 1)),
        ("timestamp", EPOCH, EPOCH + dt.timedelta(microseconds=1)),
        ("decimal(30,3)", Decimal("1.500"), Decimal("-1.500")),
        ("smallint", 3, -3),
    ],
)
def test_keys_of_any_type_are_found_and_come_back_as_they_were_after_a_restore(kind, one, other):
    case = Case("full", 0, 5, key=kind)
    operator = case.operator()
    operator.on_batch(case.carried(0, [(one, 1, 1), (other, 1, 2), (None, 1, 3)]), late=False)
    operator.on_watermark(1)
    operator = restored(operator, case.operator(), 1)
    operator.on_watermark(1)
    (pair,) = operator.on_batch(case.carried(1, [(one, 2, 4)]), late=False)
    assert (pair.frame["k"].to_list(), pair.frame["v"].to_list()) == ([one], [1])
    (alone,) = operator.on_watermark(TIME_MAX_US)
    assert dict(zip(alone.frame["v"], map(bits, alone.frame["k"]), strict=True)) == {2: bits(other), 3: None}


def test_several_keys_of_other_names_and_the_time_itself_as_a_key():
    pipeline = Pipeline("joins")
    left = pipeline.source("l", memory([]), schema={"a": "string", "b": "double", "ts": "timestamp"}, time="ts")
    right = pipeline.source("r", memory([]), schema={"b": "double", "c": "string", "ts": "timestamp"}, time="ts")
    keys = {"a": "c", "b": "b", "ts": "ts"}
    left.join(right, on=keys, between=("0s", "1s"), how="right").sink("out", memory(MemorySink()))
    plan = pipeline.plan()
    setting = OperatorContext(plan=plan, types=stream_types(plan))
    step = plan.step("join")
    assert isinstance(step, p.Join)
    operator = make_operator(step, setting)
    rows = [
        pl.DataFrame({"a": ["x", "x"], "b": [-0.0, 1.0], "ts": [EPOCH, EPOCH]}),
        pl.DataFrame({"b": [0.0, 1.0], "c": ["x", "y"], "ts": [EPOCH, EPOCH]}),
    ]
    out: Emits = []
    for side, frame in enumerate(rows):
        feeder = make_feeder(step, side, setting)
        assert feeder is not None
        for fed in feeder.on_batch(frame, late=False):
            out += operator.on_batch(fed.frame, late=False)
    out += operator.on_watermark(TIME_MAX_US)
    assert out[0].frame.columns == ["a", "b", "ts", "c"]
    assert emitted(out) == [(None, 1.0, 0, "y"), ("x", -0.0, 0, "x")]
