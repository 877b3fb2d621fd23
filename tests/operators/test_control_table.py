"""Lookups in a control table against a plain dictionary: versions, deletes, epochs, and ids that pass through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connectors.control_hub import edge_plan
from tests.examples import examples
from tests.operators.subtasks import Barrier, Batch, Restore, Row, Subtasks, below, bits, events_of, shown

from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.operators.base import DELETE, OP, ROW_ID, ROW_WATERMARK, UPSERT, Moment, Operator, OperatorContext
from fordstone.operators.join.lookup import VERSION
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.planner.check import stream_types
from fordstone.state.key_group import split_by_owner

STEP = "join_control"
ROWS, CONTROL = 0, 1
BARRIER = Moment(now_us=1, before_us=0)


def setting_of(*, how: str = "left", key: str = "string", ids: bool = False) -> OperatorContext:
    pipeline = Pipeline("control")
    rows = pipeline.source("rows", memory([]), schema={"k": key, "x": "bigint"})
    table = pipeline.control("limits", schema={"v": "double", "k": "string", "tags": "array<string>"}, key="k")
    rows.join_control(table, on="k", how=how).sink("out", memory(MemorySink()))
    plan = edge_plan(pipeline)
    return OperatorContext(plan=plan, types=stream_types(plan), with_ids=frozenset({STEP}) if ids else frozenset())


def control_frame(rows: Sequence[tuple[Any, int, Any]]) -> pl.DataFrame:
    """Of (key, version, value); a value of None is a delete."""
    return pl.DataFrame(
        [
            (None if v is None else float(v), k, None if v is None else [str(v)], DELETE if v is None else UPSERT, n)
            for k, n, v in rows
        ],
        schema={"v": pl.Float64, "k": pl.String, "tags": pl.List(pl.String), OP: pl.String, VERSION: pl.Int64},
        orient="row",
    )


class Sides(Subtasks):
    """Rows are (side, key, version, value)."""

    setting: OperatorContext

    def batch(self, rows: Sequence[Row], *, late: bool = False, watermarks: Sequence[int] = ()) -> None:
        for side in (ROWS, CONTROL):
            mine = [row for row in rows if row[0] == side]
            if not mine:
                continue
            frame = (
                pl.DataFrame([(k, x) for _, k, _, x in mine], schema={"k": pl.String, "x": pl.Int64}, orient="row")
                if side == ROWS
                else control_frame([row[1:] for row in mine])
            )
            feeder = make_feeder(self.setting.plan.step(STEP), side, self.setting)
            assert feeder is not None
            (fed,) = feeder.on_batch(frame, late=late)
            for operator, part in zip(
                self.operators, split_by_owner(fed.frame, ["__k0"], self.parallelism), strict=True
            ):
                if part.height:
                    self._take(operator.on_batch(part, late=False))


def sides(setting: OperatorContext) -> Sides:
    def make() -> Operator:
        return make_operator(setting.plan.step(STEP), setting)

    found = Sides(make=make, frame=pl.DataFrame, time_at=2)
    found.setting = setting
    return found


one_row = st.tuples(
    st.sampled_from([ROWS, CONTROL, CONTROL]),
    st.sampled_from(["a", "b", "é", "c", None]),
    st.just(0),
    st.sampled_from([1, 2, 3, None]),
)


@examples(120)
@given(
    happens=events_of(st.lists(one_row, min_size=1, max_size=8), steps=[1]),
    how=st.sampled_from(["left", "inner"]),
    data=st.data(),
)
def test_rows_meet_the_table_as_it_was_when_their_epoch_began_whatever_the_order_of_versions_within_it(
    happens, how, data
):
    subtasks = sides(setting_of(how=how))
    known: dict[str, int] = {}
    expected: Counter[Any] = Counter()
    pending: list[tuple[int, str, int | None]] = []
    version = 0

    def epoch_ends() -> None:
        for _, k, v in sorted(pending, key=lambda row: row[0]):
            if v is None:
                known.pop(k, None)
            else:
                known[k] = v
        pending.clear()

    for event in [*happens, Barrier()]:
        if isinstance(event, Batch):
            given_rows = []
            for side, k, _, x in event.rows:
                if side == CONTROL:
                    version += 1
                    given_rows.append((side, k, version, x))
                    if k is not None:
                        pending.append((version, k, x))
                else:
                    given_rows.append((side, k, 0, x))
                    v = known.get(k)
                    if v is not None or how == "left":
                        tags = None if v is None else [str(v)]
                        expected[tuple(map(bits, (k, x, None if v is None else float(v), tags)))] += 1
            subtasks.batch(data.draw(st.permutations(given_rows)))
        elif isinstance(event, Barrier):
            subtasks.barrier()
            epoch_ends()
        elif isinstance(event, Restore):
            subtasks.restore(event.parallelism)
            epoch_ends()
    assert shown(subtasks.out) == expected


def fed(setting: OperatorContext, side: int, frame: pl.DataFrame, *, late: bool = False) -> pl.DataFrame:
    feeder = make_feeder(setting.plan.step(STEP), side, setting)
    assert feeder is not None
    (emit,) = feeder.on_batch(frame, late=late)
    assert emit.late == late
    return emit.frame


@pytest.mark.parametrize("how", ["left", "inner"])
def test_ids_and_lateness_pass_through(how):
    setting = setting_of(how=how, ids=True)
    operator = make_operator(setting.plan.step(STEP), setting)
    control = control_frame([("a", 1, 7)]).with_columns(pl.lit("limits:control:0").alias(ROW_ID))
    assert operator.on_batch(fed(setting, CONTROL, control), late=False) == []
    operator.on_barrier(BARRIER)
    rows = pl.DataFrame({"k": ["b", "a"], "x": [1, 2], ROW_ID: ["rows:0:1", "rows:0:2"]})
    (emit,) = operator.on_batch(fed(setting, ROWS, below(rows, [5, 6]), late=True), late=True)
    assert emit.late
    assert emit.frame.get_column(ROW_WATERMARK).to_list() == ([5, 6] if how == "left" else [6])
    found = dict(zip(emit.frame.get_column(ROW_ID).to_list(), emit.frame.get_column("v").to_list(), strict=True))
    assert found == ({"rows:0:1": None, "rows:0:2": 7.0} if how == "left" else {"rows:0:2": 7.0})


def test_rows_have_no_ids_where_nobody_asked_for_them():
    setting = setting_of()
    operator = make_operator(setting.plan.step(STEP), setting)
    rows = pl.DataFrame({"k": ["a"], "x": [1], ROW_ID: ["rows:0:1"]})
    (emit,) = operator.on_batch(fed(setting, ROWS, rows), late=False)
    assert emit.frame.columns == ["k", "x", "v", "tags"]


def test_a_delete_and_an_upsert_of_one_epoch_count_in_order_of_their_versions():
    for first, second, left in (((1, 5), (2, None), 0), ((1, None), (2, 5), 1)):
        setting = setting_of()
        for order in (1, -1):
            operator = make_operator(setting.plan.step(STEP), setting)
            for number, value in (first, second)[::order]:
                operator.on_batch(fed(setting, CONTROL, control_frame([("a", number, value)])), late=False)
            operator.on_barrier(BARRIER)
            (state,) = operator.states().values()
            assert len(state) == left  # type: ignore[arg-type]  # a table has a length


def test_a_row_that_was_deleted_stays_away_after_a_restore():
    setting = setting_of()
    subtasks = sides(setting)
    subtasks.batch([(CONTROL, "a", 1, 5), (CONTROL, "b", 1, 6)])
    subtasks.restore(2)
    subtasks.batch([(CONTROL, "a", 2, None)])
    subtasks.restore(3)
    subtasks.batch([(ROWS, "a", 0, 1), (ROWS, "b", 0, 1)])
    assert shown(subtasks.out) == shown(
        [pl.DataFrame({"k": ["a", "b"], "x": [1, 1], "v": [None, 6.0], "tags": [None, ["6"]]})]
    )
