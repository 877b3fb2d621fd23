"""Interval join: pairs of rows of two streams with equal keys, whose times differ by no more than the bounds.

A pair is emitted when the second of its rows comes. A row is kept until, by the watermark, no partner can come any
more; then, in an outer join, it is emitted with nulls if none came. Whether one came depends on a row's key and time alone,
so what has matched is kept as key and time, once for any number of rows.

Why a pair is never missed: a row that is in time is not below the watermark; a row that was evicted could only have a
partner below it. Late rows leave on the late port as rows of the result with nothing on the other side.

Invariants: each pair of rows in time is emitted once, each unmatched row of an outer side once; nothing that is emitted
has a time (`operators.join.sides.pair_time`) below the watermark of that moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.errors import PipelineError, PlanError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US, human_us
from fordstone.operators.base import (
    ROW_WATERMARK,
    Emit,
    Emits,
    Family,
    Moment,
    Operator,
    OperatorContext,
    Stateless,
    late_emit,
    stream_details,
)
from fordstone.operators.join.sides import (
    BOUND_MAX_US,
    HOWS,
    LEFT,
    RIGHT,
    Side,
    check_how,
    filled,
    holds_us,
    join_columns,
    keys_details,
    pair_time,
    with_hidden,
)
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Derived, StreamType, Types, append_only, needs_time
from fordstone.state.base import Asked, State, StateBackend

Rows = npt.NDArray[np.int64]


_AFTER: Final = "__after"
"""Of what has matched: the first watermark at which its rows are evicted."""


class _Half:
    """What is kept of one side."""

    def __init__(self, side: Side, state: StateBackend, *, outer: bool) -> None:
        self.side = side
        self.rows = state.search_buffer(side.keys, time_column=side.mark)
        self.matched = state.timeline(side.keys, time_column=_AFTER, merge_rows=pl.DataFrame.unique) if outer else None

    def mark_matched(self, rows: pl.DataFrame, at: Rows | None = None) -> None:
        if self.matched is not None:
            matched = rows.select(*self.side.keys, (pl.col(self.side.mark) + 1).alias(_AFTER))
            # Duplicates are merged later; but a row that was found may have been found by many.
            self.matched.add(matched.unique() if at is None else matched[np.unique(at)])

    def evict(self, watermark_us: int) -> pl.DataFrame:
        """Drop the rows that no partner can come for; gives those that have had none, in an outer join."""
        if self.matched is None:
            self.rows.drop(watermark_us)
            return pl.DataFrame()
        rows, matched = self.rows.release(watermark_us), self.matched.close(watermark_us)
        if not rows.height or not matched.height:
            return rows
        matched = matched.with_columns((pl.col(_AFTER) - 1).alias(self.side.mark))
        return rows.join(matched, on=[*self.side.keys, self.side.mark], how="anti")

    def states(self, name: str) -> dict[str, State]:
        return {name: self.rows} | ({} if self.matched is None else {f"{name}_matched": self.matched})


class IntervalJoin(Operator):
    """Joins rows of two sides, both as their feeders give them."""

    def __init__(
        self,
        left: Side,
        right: Side,
        out: pl.Schema,
        *,
        how: p.JoinHow,
        from_us: int,
        to_us: int,
        state: StateBackend,
    ) -> None:
        """`out`: the columns of the result. Right time lies between left time + `from_us` and left time + `to_us`."""
        self._left = _Half(left, state, outer=how in {"left", "full"})
        self._right = _Half(right, state, outer=how in {"right", "full"})
        self._out = out
        self._from_us, self._to_us = from_us, to_us
        self._right_columns = [name for name in right.columns if name not in left.columns]
        self._watermark_us = TIME_MIN_US + 1

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        is_left = LEFT in frame.columns
        mine, other = (self._left, self._right) if is_left else (self._right, self._left)
        until = frame.get_column(mine.side.mark)
        if late:
            times = until - mine.side.hold_us
            return [late_emit(mine.side.alone(frame), frame.get_column(ROW_WATERMARK) - times)]
        least_us = min(self._watermark_us + mine.side.hold_us, TIME_MAX_US)
        emits = []
        if until.null_count() or until.min() < least_us:  # type: ignore[operator]  # an Int64 without nulls
            in_time = (until >= least_us).fill_null(value=False)
            late_rows = frame.filter(~in_time)
            emits.append(late_emit(mine.side.alone(late_rows), least_us - late_rows.get_column(mine.side.mark)))
            frame = frame.filter(in_time)
        if frame.height:
            emits += self._pairs(frame, mine, other, is_left=is_left)
            mine.rows.add(frame)
        return emits

    def on_watermark(self, watermark_us: int) -> Emits:
        """Evict rows; those of an outer side without a partner are emitted alone."""
        self._watermark_us = watermark_us
        alone = [(half.side, half.evict(watermark_us)) for half in (self._left, self._right)]
        return [Emit(side.alone(rows)) for side, rows in alone if rows.height]

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        return []

    def states(self) -> Mapping[str, State]:
        return self._left.states("left") | self._right.states("right")

    def _pairs(self, frame: pl.DataFrame, mine: _Half, other: _Half, *, is_left: bool) -> Emits:
        times = frame.get_column(mine.side.mark).to_numpy() - mine.side.hold_us
        least_us, most_us = (self._from_us, self._to_us) if is_left else (-self._to_us, -self._from_us)
        asked = Asked(
            keys=frame.select(mine.side.keys),
            from_us=times + (least_us + other.side.hold_us),
            to_us=times + (most_us + other.side.hold_us),
        )
        found = other.rows.search(asked)
        if found is None:
            return []
        mine.mark_matched(frame, found.asked)
        other.mark_matched(found.rows)
        rows = (frame[found.asked], found.rows)
        left, right = rows if is_left else rows[::-1]
        columns = self._left.side.shown(left) | self._right.side.shown(right, only=self._right_columns)
        return [Emit(filled(columns, self._out, found.asked.size))]


class JoinFamily(Family[p.Join]):
    """Pairs of rows of two streams with equal keys and times near each other."""

    steps = (p.Join,)
    fed = True
    stays = "{step} joins rows that other nodes may have"

    def check(self, step: p.Join, types: Types) -> Derived:
        left, right = types[step.left], types[step.right]
        check_how(step, HOWS)
        for given, stream in ((step.left, left), (step.right, right)):
            append_only(step, stream, "a join")
            needs_time(step, stream, "a join", given=given)
        if step.from_us > step.to_us:
            raise PipelineError(
                f"step {step.name}: between=({human_us(step.from_us)!r}, {human_us(step.to_us)!r}) begins after it ends. "
                "The first is the least that may be added to the left time, the second the most."
            )
        if max(abs(step.from_us), abs(step.to_us)) > BOUND_MAX_US:
            raise PipelineError(
                f"step {step.name}: a bound in between= is longer than {human_us(BOUND_MAX_US)}, the maximum. Use a shorter duration."
            )
        columns = join_columns(left.schema, right.schema, step.left_keys, step.right_keys, suffix=step.suffix)
        main = StreamType(schema=columns.schema, time=pair_time(step, columns, left, right), row_wise=False)
        late = StreamType(schema=columns.schema, row_wise=False)
        return {p.Input(step.name): main, p.Input(step.name, "late"): late}

    def make(self, step: p.Join, context: OperatorContext) -> Operator:
        left, right = _sides(step, context)
        out = context.types[p.Input(step.name)].schema.polars
        return IntervalJoin(left, right, out, how=step.how, from_us=step.from_us, to_us=step.to_us, state=context.state)

    def make_feeder(self, step: p.Join, index: int, context: OperatorContext) -> Operator:
        side = _sides(step, context)[index]
        return Stateless(lambda frame: with_hidden(side.carried(frame), frame, (ROW_WATERMARK,)))

    def title(self, step: p.Join) -> str:
        between = f"right time - left time from {human_us(step.from_us)} to {human_us(step.to_us)}"
        if step.from_us == step.to_us == 0:
            between = "of one time"
        return f"{step.how} join of {step.left} and {step.right}, {between}"

    def describe(self, step: p.Join, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        emitted = "emitted with nulls once the watermark has passed them"
        alone = {"inner": "dropped", "full": emitted}
        unmatched = alone.get(step.how, f"of the {step.how} side: {emitted}")
        yield from keys_details(step.left_keys, step.right_keys, unmatched)
        timed = types[p.Input(step.name)].time is not None
        yield from stream_details(step, types, time=None if timed else "none: rows may lack that of either side")
        matched = "" if step.how == "inner" else ", and which keys and times have matched"
        yield "keeps", f"rows of both sides, as long as a partner may come{matched}"


def _sides(step: p.Join, context: OperatorContext) -> tuple[Side, Side]:
    left, right = context.types[step.left], context.types[step.right]
    if left.time is None or right.time is None:
        raise PlanError(f"step {step.name}: a join needs event time on both sides.")
    columns = join_columns(left.schema, right.schema, step.left_keys, step.right_keys, suffix=step.suffix)
    left_hold_us, right_hold_us = holds_us(step)
    return (
        Side(columns, left.schema, step.left_keys, mark=LEFT, time=left.time, hold_us=left_hold_us),
        Side(columns, right.schema, step.right_keys, mark=RIGHT, time=right.time, hold_us=right_hold_us),
    )
