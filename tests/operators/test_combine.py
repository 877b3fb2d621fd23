"""Partial rows of nodes, merged at the center, mean what all the rows mean together: rule 10, however rows are cut up.

Rows are assigned to nodes, batches and epochs at random; each node combines an epoch and forgets it; the center merges what
crosses, is frozen, restored and rescaled on the way. Against a plain loop, and against the same step fed with rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any, ClassVar

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.subtasks import Row, Subtasks, below, frozen, restored
from tests.operators.window_rows import (
    ANY,
    EXACT,
    SCHEMA,
    frame,
    results_of,
    rows_of_any_kind,
    shown,
    windows,
    windows_of,
)

from fordstone import Aggregator, Pipeline
from fordstone.connectors.memory import memory
from fordstone.errors import PipelineError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.partial import ROWS
from fordstone.operators.aggregate.running import OPEN_RATIO, OPEN_ROWS_MIN, EpochCombine
from fordstone.operators.base import (
    FINAL,
    LATE,
    MAIN,
    OP,
    ROW_WATERMARK,
    Emits,
    Functions,
    Moment,
    Operator,
    OperatorContext,
)
from fordstone.operators.registry import has_feeder, make_feeder, make_operator
from fordstone.plan import plan as p
from fordstone.plan.plan import Sliding, Tumbling
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.split import split

NODES = 3
EVERY_KIND = {
    "first": "first(x)", "last": "last(d)", "var": "variance(i)", "dev": "stddev_pop(i)", "different": "count_distinct(i)",
    "rough": "count_distinct(k, 8)", "mid": "median(x)", "high": "quantile(x, 0.9, 20)", "all": "collect(i)",
    "sd": "sum(d)", "mean_d": "avg(d)", "mix": "sum(i) / count(*) + max(x)", "p": "beta_mean(x > 0)", "lo": "min(d)",
    "exact": "count(DISTINCT i)", "once": "sum(DISTINCT d)", "mean_once": "avg(DISTINCT i)", "at": "max_by(k, i)", "least_at": "min_by(i, x)",
}  # fmt: skip
tame_rows = st.tuples(
    st.sampled_from(["a", "b", "é", None]),
    st.integers(-30, 30),
    st.none() | st.integers(-9, 9).map(float),
    st.none() | st.integers(-9, 9),
    st.none(),
)


class Widest(Aggregator):
    """The distance between the least and the greatest."""

    state: ClassVar = {"least": "double", "greatest": "double"}
    result = "double"

    def add(self, *values: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"least": values[0].min(), "greatest": values[0].max()}

    def merge(self, *state: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"least": state[0].min(), "greatest": state[1].max()}

    def finish(self, *state: pl.Expr) -> pl.Expr:
        return state[1] - state[0]


def pipeline_of(
    window: Sliding | Tumbling | None,
    aggregates: Mapping[str, Any],
    *,
    cut: bool,
    early_us: int | None = None,
    allowed_us: int = 0,
    keys: Sequence[str] = ("k",),
) -> Pipeline:
    pipeline = Pipeline("fleet")
    rows = pipeline.source("rows", memory([]), schema=SCHEMA, time="ts")
    grouped = (rows.to_center(name="cut") if cut else rows).group_by(*keys)
    early = None if early_us is None else timedelta(microseconds=early_us)
    if window is not None:
        allowed = timedelta(microseconds=allowed_us) if allowed_us else None
        grouped = grouped.window(window, early=early, allowed_lateness=allowed)
    stream = grouped.agg(name="step", **aggregates)
    stream.sink("out", memory([]))
    return pipeline


def setting_of(plan: p.Plan, functions: Functions | None = None) -> OperatorContext:
    return OperatorContext(plan=plan, types=stream_types(plan), functions=functions or {})


@dataclass
class Fleet:
    """Nodes that combine, and a center that merges."""

    pipeline: Pipeline
    rng: Random
    crossed: int = 0
    late: int = 0
    clock_us: int = 0
    writes: bool = True
    """State is written at barriers of the center."""
    beyond_us: Sequence[int] = ()
    """How far the watermarks of rows below them may be beyond the time of each; none: all rows are in time."""
    judged: list[tuple[Row, int]] = field(default_factory=list)
    """Each row, and the watermark that it was judged by."""

    def __post_init__(self) -> None:
        tiers = split(self.pipeline.plan())
        assert tiers.center is not None
        (combine,) = (step for step in tiers.edge.steps if isinstance(step, p.Combine))
        step = tiers.center.step("step")
        assert isinstance(step, p.Aggregate)
        assert step.merges is not None
        assert not has_feeder(step, tiers.center)
        self.edge = setting_of(tiers.edge, self.pipeline.functions)
        self.center = setting_of(tiers.center, self.pipeline.functions)
        self.crossing = self.center.types[p.Input("cut")].schema.polars
        assert make_feeder(step, 0, self.center) is None
        self.nodes = [self._node(combine) for _ in range(NODES)]
        key = ("k",) if step.keys else ("__all",)
        as_it_came: Any = lambda rows: rows  # noqa: E731 - partial rows come as frames
        self.subtasks = Subtasks(make=lambda: make_operator(step, self.center), frame=as_it_came, keys=key)
        self.subtasks.barrier = self._center_barrier  # type: ignore[method-assign,assignment]  # restores end an epoch, too

    def _node(self, combine: p.Combine) -> tuple[Operator, Operator]:
        feeder = make_feeder(combine, 0, self.edge)
        assert feeder is not None
        return feeder, make_operator(combine, self.edge)

    def batch(self, node: int, rows: Sequence[Row], *, watermarks: Sequence[int] | None = None) -> None:
        feeder, operator = self.nodes[node]
        given = frame(rows) if watermarks is None else below(frame(rows), watermarks)
        for emit in feeder.on_batch(given, late=watermarks is not None):
            if emit.port == LATE:
                self.late += emit.frame.height
            else:
                assert operator.on_batch(emit.frame, late=emit.late) == []

    def barrier(self, node: int) -> None:
        """An epoch of a node ends, and crosses."""
        _, operator = self.nodes[node]
        for emit in operator.on_barrier(self._moment()):
            assert emit.port == MAIN
            hidden = {ROW_WATERMARK: pl.Int64()} if emit.late else {}
            assert emit.frame.schema == self.crossing | hidden
            named = {"k", "__all", "__end", ROW_WATERMARK}
            assert emit.frame.height == emit.frame.select(set(emit.frame.columns) & named).n_unique()
            self.crossed += emit.frame.height
            self.subtasks.frames(emit.frame, late=emit.late)
        assert operator.states() == {}
        assert operator.on_barrier(self._moment()) == []

    def _moment(self) -> Moment:
        self.clock_us += 1
        return Moment(now_us=self.clock_us, before_us=self.clock_us - 1)

    def _center_barrier(self) -> None:
        if self.writes:
            Subtasks.barrier(self.subtasks, self._moment())
        else:
            for operator in self.subtasks.operators:
                self.subtasks._take(operator.on_barrier(self._moment()))

    def live(self, assigned: Sequence[Sequence[Row]], *, restores: bool = True) -> None:
        """Give each node its rows, in batches and epochs of any size; time goes on as far as every node has come."""
        left = [list(rows) for rows in assigned]
        while any(left):
            node = self.rng.choice([at for at, rows in enumerate(left) if rows])
            count = self.rng.randint(1, len(left[node]))
            some = left[node][:count]
            late = self.beyond_us and all(row[1] is not None for row in some) and self.rng.random() < 0.5
            watermarks = [row[1] + self.rng.choice(self.beyond_us) if late else TIME_MIN_US for row in some]
            self.batch(node, some, watermarks=watermarks if late else None)
            self.judged += zip(some, watermarks, strict=True)
            del left[node][:count]
            for other in range(NODES):
                if self.rng.random() < 0.4:
                    self.barrier(other)
            if self.rng.random() < 0.3:
                self.subtasks.barrier()
            if restores and self.rng.random() < 0.3:
                self.subtasks.restore(self.rng.randint(1, 3) if self.subtasks.keys != ("__all",) else 1)
        for node in range(NODES):
            self.barrier(node)
        self.subtasks.barrier()


def deal(rows: Sequence[Row], rng: Random) -> list[list[Row]]:
    assigned: list[list[Row]] = [[] for _ in range(NODES)]
    for row in rows:
        rng.choice(assigned).append(row)
    return assigned


def of_rows(pipeline: Pipeline, rows: Sequence[Row]) -> Operator:
    """The same step, without a cut, that has taken all rows at once."""
    plan = pipeline.plan()
    step, setting = plan.step("step"), setting_of(plan, pipeline.functions)
    assert isinstance(step, p.Aggregate)
    feeder, operator = make_feeder(step, 0, setting), make_operator(step, setting)
    assert feeder is not None
    for emit in feeder.on_batch(frame(rows), late=False):
        operator.on_batch(emit.frame, late=False)
    return operator


def latest(frames: Sequence[pl.DataFrame], key: Sequence[str]) -> pl.DataFrame:
    """What stands in the end, where rows replace each other."""
    rows = pl.concat(frames).drop(OP, strict=False)
    return rows.unique(key, keep="last", maintain_order=True) if key else rows.tail(1)


def assert_same(one: pl.DataFrame, other: pl.DataFrame, key: Sequence[str]) -> None:
    """Rule 10: floats within a tolerance, the rest exactly."""
    assert one.schema == other.schema
    ordered = [found.sort(list(key)).rows() if key else found.rows() for found in (one, other)]
    assert len(ordered[0]) == len(ordered[1])
    for left, right in zip(*ordered, strict=True):
        assert [_near(value) for value in left] == [_near(value) for value in right]


def _near(value: Any) -> Any:
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True) if math.isfinite(value) else repr(value)
    return value


@examples(40)
@given(
    window=windows | st.builds(Tumbling, st.integers(1, 24), st.just(0)),
    rows=st.lists(rows_of_any_kind, max_size=40),
    early_us=st.none() | st.integers(1, 3),
    allowed_us=st.sampled_from([0, 0, 2, 9]),
    aggregates=st.sampled_from([EXACT, ANY]),
    seed=st.integers(0, 2**32),
)
def test_windows_of_partial_rows_are_those_of_all_rows(window, rows, early_us, allowed_us, aggregates, seed):
    rng = Random(seed)
    pipeline = pipeline_of(window, aggregates, cut=True, early_us=early_us, allowed_us=allowed_us)
    fleet = Fleet(pipeline, rng, beyond_us=(1, 3, 12))
    fleet.live(deal(rows, rng))
    fleet.subtasks.watermark(TIME_MAX_US)
    held: dict[tuple[Any, int], list[Row]] = {}
    late = 0
    for row, watermark_us in fleet.judged:
        ends = [] if row[1] is None else windows_of(row[1], window)
        for end in ends:
            if end + allowed_us > watermark_us:
                held.setdefault((row[0], end), []).append(row)
        late += row[1] is None or (bool(ends) and ends[-1] + allowed_us <= watermark_us)
    names = list(aggregates)
    wanted = results_of(held, window, names, TIME_MAX_US)
    # Above the cut windows always have early results: the last word on each is on its own port.
    assert shown(fleet.subtasks.ports.get(FINAL, []), names) == wanted
    assert fleet.late == late
    assert not fleet.subtasks.ports.get(LATE)
    if held and fleet.subtasks.out:
        last = latest(fleet.subtasks.out, ("k", "window_start", "window_end"))
        assert shown([last], names) == wanted


@examples(30)
@given(
    window=st.none() | windows | st.builds(Tumbling, st.integers(1, 24), st.just(0)),
    rows=st.lists(tame_rows, min_size=1, max_size=40),
    keys=st.sampled_from([("k",), ()]),
    seed=st.integers(0, 2**32),
)
def test_every_kind_of_aggregate_merges_into_what_it_is_over_all_rows(window, rows, keys, seed):
    rng = Random(seed)
    aggregates = EVERY_KIND | {"own": Widest.of("x")}
    fleet = Fleet(pipeline_of(window, aggregates, cut=True, keys=keys), rng)
    fleet.live(deal(rows, rng))
    reference = of_rows(pipeline_of(window, aggregates, cut=False, keys=keys), rows)
    if window is None:
        (wanted,) = (emit.frame for emit in reference.on_barrier(Moment(now_us=1, before_us=0)))
        assert_same(latest(fleet.subtasks.out, keys), latest([wanted], keys), keys)
        return
    fleet.subtasks.watermark(TIME_MAX_US)
    found = fleet.subtasks.ports.get(FINAL, [])
    results = [emit.frame for emit in reference.on_watermark(TIME_MAX_US)]
    assert bool(found) == bool(results)
    if results:
        assert_same(pl.concat(found), pl.concat(results), [*keys, "window_start"])


@examples(20)
@given(
    window=st.none() | windows | st.builds(Tumbling, st.integers(1, 24), st.just(0)),
    rows=st.lists(tame_rows, min_size=1, max_size=30),
    seed=st.integers(0, 2**32),
)
def test_pushed_down_or_not_the_state_is_the_same_and_one_goes_on_from_the_other(window, rows, seed):
    rng = Random(seed)
    early_us = None if window is None else 1_000_000
    pushed = pipeline_of(window, EVERY_KIND, cut=True, early_us=early_us)
    plain = pipeline_of(window, EVERY_KIND, cut=False, early_us=early_us)
    fleet = Fleet(pushed, rng, writes=False)
    plan = plain.plan()
    digests = step_digests(plan, stream_types(plan))
    assert step_digests(fleet.center.plan, fleet.center.types)["step"] == digests["step"]

    before, after = rows[: len(rows) // 2 + 1], rows[len(rows) // 2 + 1 :]
    taken = of_rows(plain, before)
    taken.on_barrier(Moment(now_us=1, before_us=0))
    fleet.live(deal(before, rng), restores=False)
    (merging,) = fleet.subtasks.operators
    for name, state in merging.states().items():
        pieces = [piece.frame().schema for piece in state.freeze()]
        others = [piece.frame().schema for piece in taken.states()[name].freeze()]
        assert set(map(str, pieces)) == set(map(str, others))

    # What was kept of rows is taken over by who merges partial rows.
    fleet.subtasks.operators = [restored(taken, fleet.subtasks.make(), fleet.subtasks.watermark_us)]
    fleet.subtasks.ports.clear()
    fleet.writes = True
    fleet.live(deal(after, rng))
    wanted = of_rows(plain, rows)
    if window is None:
        (result,) = (emit.frame for emit in wanted.on_barrier(Moment(now_us=1, before_us=0)))
        if after:
            now = latest(fleet.subtasks.out, ("k",))
            assert_same(now, result.drop(OP).join(now, on="k", how="semi", nulls_equal=True), ("k",))
        return
    fleet.subtasks.watermark(TIME_MAX_US)
    results = [emit.frame for emit in wanted.on_watermark(TIME_MAX_US) if emit.port == FINAL]
    assert bool(results) == bool(fleet.subtasks.ports.get(FINAL))
    if results:
        assert_same(pl.concat(fleet.subtasks.ports[FINAL]), pl.concat(results), ("k", "window_start"))


def row_counts(crossing: pl.DataFrame) -> pl.Series:
    """How many rows each partial row stands for."""
    return crossing.select(pl.selectors.starts_with(f"{ROWS}_")).to_series()


class Combined:
    """A combiner below the cut, after its feeder."""

    def __init__(self, window: Sliding | Tumbling | None, aggregates: Mapping[str, str]) -> None:
        setting = setting_of(split(pipeline_of(window, aggregates, cut=True).plan()).edge)
        step = setting.plan.step("step_partials")
        feeder, operator = make_feeder(step, 0, setting), make_operator(step, setting)
        assert feeder is not None
        assert isinstance(operator, EpochCombine)
        self.feeder, self.operator = feeder, operator

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        fed = self.feeder.on_batch(frame, late=late)
        out = [emit for emit in fed if emit.port == LATE]
        for emit in fed:
            if emit.port != LATE:
                out += self.operator.on_batch(emit.frame, late=emit.late)
        return out

    def on_barrier(self) -> Emits:
        return self.operator.on_barrier(Moment(now_us=1, before_us=0))


def test_late_rows_leave_windows_as_they_came_and_count_where_there_are_none():
    rows = [("a", 5, 1.0, 1, None), ("a", None, 2.0, 2, None)]
    windowed = Combined(Tumbling(10), {"n": "count(*)"})
    for watermark_us in (10, TIME_MAX_US):
        timeless, late = windowed.on_batch(below(frame(rows), watermark_us), late=True)
        assert [(emit.port, emit.frame.rows()) for emit in (timeless, late)] == [
            (LATE, frame(rows[1:]).rows()),
            (LATE, frame(rows[:1]).rows()),
        ]
    for rows_given, is_late in ((frame(rows), False), (below(frame(rows), 9), True)):
        assert [(emit.port, emit.frame.height) for emit in windowed.on_batch(rows_given, late=is_late)] == [(LATE, 1)]
    (emit,) = windowed.on_barrier()
    assert emit.frame.rows() == [("a", 10, 2)]

    running = Combined(None, {"n": "count(*)"})
    running.on_batch(below(frame(rows[:1])), late=True)
    (emit,) = running.on_barrier()
    assert emit.frame.rows() == [("a", 1)]


def test_rows_in_the_gaps_between_windows_do_not_cross_and_are_not_late():
    combine = Combined(Sliding(2, 10), {"n": "count(*)"})
    rows = [("a", time, 1.0, 1, None) for time in range(20)]
    assert combine.on_batch(frame(rows), late=False) == []
    (emit,) = combine.on_barrier()
    assert row_counts(emit.frame).sum() == sum(bool(windows_of(time, Sliding(2, 10))) for time in range(20)) == 4


def test_memory_follows_keys_and_not_rows():
    combine = Combined(Tumbling(1_000_000), {"n": "count(*)", "s": "sum(i)"})
    one = pl.concat([frame([(key, 5, 1.0, 1, None)]) for key in "abcdefgh"] * 500)
    held = []
    for _ in range(60):
        combine.on_batch(one, late=False)
        held.append(len(combine.operator._open))
    assert max(held) <= max(OPEN_ROWS_MIN, OPEN_RATIO * 8) + one.height
    (emit,) = combine.on_barrier()
    assert row_counts(emit.frame).to_list() == [500 * 60] * 8
    assert len(combine.operator._open) == 0


def test_partial_rows_of_a_window_that_has_closed_are_late_and_counted_by_their_rows():
    fleet = Fleet(pipeline_of(Tumbling(10), {"n": "count(*)"}, cut=True), Random(0))
    fleet.subtasks.watermark(10)
    fleet.batch(0, [("a", 5, 1.0, 1, None), ("a", 6, 1.0, 1, None), ("a", 15, 1.0, 1, None)])
    fleet.barrier(0)
    assert [late.get_column(ROWS).to_list() for late in fleet.subtasks.ports[LATE]] == [[2]]
    fleet.subtasks.watermark(20)
    assert [row[-1] for out in fleet.subtasks.ports[FINAL] for row in out.rows()] == [1]


def test_what_crosses_has_only_types_of_ours_and_comes_back_as_it_was_kept():
    fleet = Fleet(pipeline_of(None, {"mid": "quantile(x, 0.5, 8)"}, cut=True), Random(0), writes=False)
    schema = Schema.stored(dict(fleet.edge.plan.step("step_partials").schema))  # type: ignore[union-attr]  # a Combine
    assert str(schema["__kll8_levels0"]) == "array<tinyint>"
    fleet.batch(0, [("a", at, float(at), 1, None) for at in range(500)])
    fleet.barrier(0)
    fleet.subtasks.barrier()
    (piece,) = (piece for operator in fleet.subtasks.operators for piece in frozen(operator))
    assert piece.frame().schema["__kll8_levels0"] == pl.List(pl.UInt8)
    assert fleet.subtasks.out[-1].row(0)[1] == pytest.approx(250, abs=100)


def test_sessions_cannot_be_merged_from_partial_rows():
    from fordstone.plan.plan import Session

    tiers = split(pipeline_of(Tumbling(10), {"n": "count(*)"}, cut=True).plan())
    assert tiers.center is not None
    steps = tuple(
        p.Aggregate(
            name=step.name,
            input=step.input,
            keys=step.keys,
            window=Session(5),
            aggregates=step.aggregates,
            merges=step.merges,
        )
        if isinstance(step, p.Aggregate)
        else step
        for step in tiers.center.steps
    )
    with pytest.raises(PipelineError, match="need the rows themselves"):
        stream_types(p.Plan(pipeline="fleet", steps=steps))


def test_partial_rows_must_be_such():
    tiers = split(pipeline_of(Tumbling(10), {"n": "count(*)"}, cut=True).plan())
    assert tiers.center is not None
    source = p.Source(name="cut", connector=p.ConnectorSpec("memory"), schema=SCHEMA, time="ts")
    with pytest.raises(PipelineError, match="has no column __rows"):
        stream_types(p.Plan(pipeline="fleet", steps=(source, *tiers.center.steps[1:])))


def test_an_epoch_gives_the_same_partial_rows_however_its_rows_came():
    rows = [("ab"[at % 2], at % 25, float(at % 7), at, None) for at in range(200)]
    found = []
    for size in (1, 7, 200):
        combine = Combined(Tumbling(10), EXACT)
        for at in range(0, len(rows), size):
            combine.on_batch(frame(rows[at : at + size]), late=False)
        (emit,) = combine.on_barrier()
        found.append(Counter(emit.frame.rows()))
    assert found[0] == found[1] == found[2]
    assert max(found[0].values()) == 1
