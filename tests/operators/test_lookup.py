"""Lookups against plain dictionaries: static tables row by row, control streams epoch by epoch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import Batch, Row, Subtasks, below, bits, events_of, rank, shown

from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.connectors.lookup_table import read_table
from fordstone.errors import SourceError
from fordstone.operators.base import ROW_ID, Emits, Moment, Operator, OperatorContext
from fordstone.operators.join.lookup import LookupLatest
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.planner.check import stream_types
from fordstone.state.key_group import split_by_owner

KEYS = ["a", "b", "é", None]
CONTROL, ROWS = 1, 0
BARRIER = Moment(now_us=1, before_us=0)


def setting_of(pipeline: Pipeline) -> OperatorContext:
    plan = pipeline.plan()
    return OperatorContext(plan=plan, types=stream_types(plan), read_table=read_table)


# Static tables.


def looked_up(
    table: Any, frame: pl.DataFrame, *, key: str = "string", how: str = "left", on: Any = "k"
) -> pl.DataFrame:
    pipeline = Pipeline("lookups")
    rows = pipeline.source("rows", memory([]), schema={"k": key, "x": "bigint"})
    rows.lookup(table, on=on, how=how).sink("out", memory(MemorySink()))
    setting = setting_of(pipeline)
    operator = make_operator(setting.plan.step("lookup"), setting)
    frame = frame.cast({"k": setting.types[setting.plan.step("lookup").inputs[0]].schema["k"].polars})
    emits = operator.on_batch(frame, late=False)
    return emits[0].frame if emits else frame.clear()


def test_rows_get_the_columns_of_their_key_in_their_order_and_nulls_where_there_is_none():
    frame = pl.DataFrame({"k": ["b", None, "a", "zz", "b"], "x": [1, 2, 3, 4, 5]})
    table = [
        {"k": "a", "site": "north", "x": 10},
        {"k": "b", "site": None, "x": 20},
        {"k": None, "site": "no", "x": 30},
    ]
    assert looked_up(table, frame).rows() == [
        ("b", 1, None, 20),
        (None, 2, None, None),
        ("a", 3, "north", 10),
        ("zz", 4, None, None),
        ("b", 5, None, 20),
    ]
    assert looked_up(table, frame).columns == ["k", "x", "site", "x_right"]
    assert looked_up(table, frame, how="inner").get_column("x").to_list() == [1, 3, 5]
    assert looked_up([{"k": "q", "site": "s"}], frame, how="inner").height == 0


def test_a_key_of_another_name_is_a_column_that_is_null_where_nothing_was_found():
    frame = pl.DataFrame({"k": ["a", "b"], "x": [1, 2]})
    assert looked_up([{"id": "a"}], frame, on={"k": "id"}).rows() == [("a", 1, "a"), ("b", 2, None)]


def test_keys_with_a_fraction_and_of_other_widths_are_found_and_stay_as_they_were():
    frame = pl.DataFrame({"k": [-0.0, math.nan, 0.0, None], "x": [1, 2, 3, 4]})
    found = looked_up([{"k": 0.0, "s": "zero"}, {"k": -math.nan, "s": "nan"}], frame, key="double")
    assert found.get_column("s").to_list() == ["zero", "nan", "zero", None]
    assert [bits(k) for k in found.get_column("k")] == [bits(k) for k in frame.get_column("k")]
    narrow = looked_up(
        [{"k": 2**40, "s": "far"}, {"k": 7, "s": "near"}], pl.DataFrame({"k": [7], "x": [1]}), key="smallint"
    )
    assert narrow.schema["k"] == pl.Int64
    assert narrow.rows() == [(7, 1, "near")]


def test_rows_keep_the_ids_that_they_carry():
    frame = pl.DataFrame({"k": ["a", "b"], "x": [1, 2], ROW_ID: ["i", "j"]})
    assert looked_up([{"k": "b", "s": 1}], frame, how="inner").get_column(ROW_ID).to_list() == ["j"]


@pytest.mark.parametrize(
    "table", [[{"k": "a", "s": 1}, {"k": "b", "s": 2}, {"k": "a", "s": 3}], [{"k": "a", "s": 1}] * 2]
)
def test_a_key_that_stands_twice_in_the_table_is_an_error_that_names_it(table):
    with pytest.raises(SourceError, match="step lookup: the table of the lookup has more than one row for k='a'"):
        looked_up(table, pl.DataFrame({"k": ["b"], "x": [1]}))


def test_the_table_is_read_once_and_only_when_rows_come():
    pipeline = Pipeline("lookups")
    rows = pipeline.source("rows", memory([]), schema={"k": "string"})
    rows.lookup([{"k": "a", "s": 1}], on="k").sink("out", memory(MemorySink()))
    plan, read = pipeline.plan(), []

    def reading(spec: Any, schema: Any) -> pl.DataFrame:
        read.append(spec)
        return read_table(spec, schema)

    setting = OperatorContext(plan=plan, types=stream_types(plan), read_table=reading)
    operator = make_operator(plan.step("lookup"), setting)
    assert not read
    for _ in range(3):
        operator.on_batch(pl.DataFrame({"k": ["a"]}), late=False)
    assert len(read) == 1


# Control streams.


def latest_setting(*, timed: bool, wait: bool, how: str) -> OperatorContext:
    pipeline = Pipeline("latest")
    rows = pipeline.source("rows", memory([]), schema={"k": "string", "x": "bigint"})
    columns = {"k": "string", "ts": "timestamp", "v": "double", "tags": "array<string>"}
    control = pipeline.source("control", memory([]), schema=columns, time="ts" if timed else None)
    rows.join_latest(control, on="k", how=how, wait=wait).sink("out", memory(MemorySink()))
    return setting_of(pipeline)


class Sides(Subtasks):
    """Subtasks of a lookup in a control stream: rows are (side, key, time, value); of side `ROWS` the value alone counts."""

    setting: OperatorContext

    def batch(self, rows: Sequence[Row], *, late: bool = False, watermarks: Sequence[int] = ()) -> None:
        step = self.setting.plan.step("join_latest")
        for side in (ROWS, CONTROL):
            mine = [row for row in rows if row[0] == side]
            if not mine:
                continue
            schema = self.setting.types[step.inputs[side]].schema.polars
            given = [(k, v) for _, k, _, v in mine] if side == ROWS else [(k, t, v, [str(v)]) for _, k, t, v in mine]
            plain = {name: pl.Int64() if name in {"ts", "x"} else kind for name, kind in schema.items()}
            frame = pl.DataFrame(given, schema=plain, orient="row", strict=False).cast(schema)
            feeder = make_feeder(step, side, self.setting)
            assert feeder is not None
            (fed,) = feeder.on_batch(frame, late=late)
            parts = split_by_owner(fed.frame, ["__k0"], self.parallelism)
            for operator, part in zip(self.operators, parts, strict=True):
                if part.height:
                    self._take(operator.on_batch(part, late=False))


def sides(setting: OperatorContext) -> Sides:
    def make() -> Operator:
        return make_operator(setting.plan.step("join_latest"), setting)

    found = Sides(make=make, frame=pl.DataFrame, time_at=2)
    found.setting = setting
    return found


one_row = st.tuples(
    st.sampled_from([ROWS, CONTROL]),
    st.sampled_from(KEYS),
    st.one_of(st.integers(0, 3), st.none()),
    st.sampled_from([1, 2, 3, 4]),
)


@examples(60)
@given(
    happens=events_of(st.lists(one_row, min_size=1, max_size=8), steps=[1]),
    timed=st.booleans(),
    wait=st.booleans(),
    how=st.sampled_from(["left", "inner"]),
)
def test_rows_meet_the_newest_control_row_as_of_their_epoch(happens, timed, wait, how):
    subtasks = sides(latest_setting(timed=timed, wait=wait, how=how))
    known: dict[Any, Row] = {}
    expected: Counter[Any] = Counter()
    rows: list[Row] = []
    control: list[Row] = []

    def answer() -> None:
        for _, k, _, x in rows:
            found = known.get(k)
            if found is not None or how == "left":
                _, _, t, v = found or (None,) * 4
                tags = None if found is None else [str(v)]
                expected[tuple(map(bits, (k, x, t, None if v is None else float(v), tags)))] += 1
        rows.clear()

    def epoch_ends() -> None:
        if not wait:
            answer()
        # Of one epoch: the largest time, then the largest columns; without a time the columns alone.
        for row in sorted(control, key=lambda row: (rank(row[2]), rank(float(row[3])))):
            before = known.get(row[1])
            older = before is not None and timed and rank(row[2]) < rank(before[2])
            if row[1] is not None and not older:
                known[row[1]] = row
        control.clear()
        answer()

    for event in [*happens, None]:
        if isinstance(event, Batch):
            for row in event.rows:
                (control if row[0] == CONTROL else rows).append(row)
            subtasks.batch(event.rows)
        elif event is None:
            subtasks.barrier()
            epoch_ends()
        elif type(event).__name__ == "Restore":
            subtasks.restore(event.parallelism)
            epoch_ends()
        elif type(event).__name__ == "Barrier":
            subtasks.barrier()
            epoch_ends()
        else:
            subtasks.watermark(max(subtasks.watermark_us, 0) + 1)
    assert shown(subtasks.out) == expected


def test_rows_that_do_not_wait_stay_late_and_pass_at_once():
    setting = latest_setting(timed=True, wait=False, how="left")
    step = setting.plan.step("join_latest")
    operator, feeder = make_operator(step, setting), make_feeder(step, ROWS, setting)
    assert isinstance(operator, LookupLatest)
    assert feeder is not None
    (fed,) = feeder.on_batch(below(pl.DataFrame({"k": ["a"], "x": [1]}), 7), late=True)
    (emit,) = operator.on_batch(fed.frame, late=fed.late)
    assert emit.late
    assert emit.frame.rows() == [("a", 1, None, None, None, 7)]
    assert operator.on_barrier(BARRIER) == []


def test_nothing_waits_beyond_a_barrier():
    setting = latest_setting(timed=False, wait=True, how="left")
    step = setting.plan.step("join_latest")
    operator, feeder = make_operator(step, setting), make_feeder(step, ROWS, setting)
    assert feeder is not None
    emits: Emits = []
    for fed in feeder.on_batch(pl.DataFrame({"k": ["a"], "x": [1]}), late=False):
        emits += operator.on_batch(fed.frame, late=False)
    assert emits == []
    assert [emit.frame.height for emit in operator.on_barrier(BARRIER)] == [1]
    assert operator.on_barrier(BARRIER) == []
    assert [len(state.freeze()) for state in operator.states().values()] == [0]
