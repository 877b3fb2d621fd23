"""`with_time`: gives rows their event time after row-wise steps of one source.

Late is judged per row and source partition (rule 6), so the step runs in the source task: the steps before it run first, it computes
the time, and the task judges the rows (`runtime.intake`), as it does at the source where that has the time. The source in the plan
names the step (`Source.timed_by`) and has the lateness and what goes with it. A source has one event time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import polars as pl
from sqlglot import exp

from fordstone.errors import ExpressionError, PipelineError
from fordstone.lang.dialect import offset_of
from fordstone.lang.expression import Expression, expression_of, parse, split_alias
from fordstone.lang.schema import Schema
from fordstone.operators.base import Emits, Family, Moment, Operator, OperatorContext
from fordstone.operators.rowwise import ProjectFamily
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP, Derived, EventTime, Types, append_only
from fordstone.state.base import State

EVENT_TIME: Final = "event_time"
"""The column of an expression that has no name."""
_ROW_WISE: Final = (p.Filter, p.Select, p.WithColumns, p.Explode, p.Function, p.Lookup)
"""The steps that may stand between the source and `with_time`: each of their rows comes of one row."""
_PROJECT: Final = ProjectFamily()


class AssignTime(Operator):
    """Adds the time column. The source task sets `judge`, which takes the rows and emits those in time and those that are late."""

    def __init__(self, column: str, add_column: Operator) -> None:
        self.column = column
        self.judge: Callable[[pl.DataFrame], Emits] | None = None
        self._add_column = add_column

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        if self.judge is None or late:
            raise AssertionError("rows come to with_time in a source task, and have not been judged before")
        return [emit for timed in self._add_column.on_batch(frame, late=False) for emit in self.judge(timed.frame)]

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - nothing waits for time here
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - nothing waits for the clock here
        return []

    def states(self) -> Mapping[str, State]:
        return {}


class WithTimeFamily(Family[p.WithTime]):
    """Event time that is computed from the columns of a row."""

    steps = (p.WithTime,)
    stays = "{step} belongs to the source"

    def check(self, step: p.WithTime, types: Types) -> Derived:
        stream = types[step.input]
        if stream.looped:
            raise PipelineError(
                f"step {step.name}: there is no event time inside or below a loop, so with_time cannot stand there."
            )
        if stream.central:
            raise PipelineError(
                f"step {step.name}: event time is assigned where rows are read. Call with_time before .to_center()."
            )
        append_only(step, stream, "with_time")
        if stream.time is not None:
            raise PipelineError(
                f"step {step.name}: {step.input} has event time already, in column {stream.time.column}. Leave with_time out, or "
                "what assigned the time before."
            )
        time = parse_time(step.expression, stream.schema)
        timed = _PROJECT.check(_with_column(step), types)[p.Input(step.name)]
        return {p.Input(step.name): replace(timed, time=EventTime(column=time.name))}

    def check_plan(self, step: p.WithTime, plan: p.Plan, types: Types) -> None:  # noqa: ARG002 - only the plan counts
        source = source_of(step, plan)
        if source.timed_by != step.name:
            raise PipelineError(
                f"step {step.name}: source {source.name} has to name it as what assigns its event time."
            )

    def make(self, step: p.WithTime, context: OperatorContext) -> Operator:
        time = parse_time(step.expression, context.types[step.input].schema)
        return AssignTime(time.name, _PROJECT.make(_with_column(step), context))

    def title(self, step: p.WithTime) -> str:
        return f"event time {step.expression}"

    def digest(self, step: p.WithTime, types: Types) -> object:  # noqa: ARG002 - the columns that it reads stand in it
        """The largest times of partitions depend on the expression."""
        return ["with_time", step.expression]


def parse_time(source: str | exp.Expr, schema: Schema) -> Expression:
    """Check an expression that gives the event time. Without a name of its own it is column `event_time`."""
    found = parse(source, schema)
    text = source if isinstance(source, str) else found.sql
    if found.type != TIMESTAMP:
        raise ExpressionError(
            f"event time is a timestamp, but this is {found.type}. {_advice(found)}",
            text=text,
            offset=offset_of(found.tree) or 0,
        )
    _, alias = split_alias(found.tree)
    return found if alias is not None or found.is_column else expression_of(found.term, found.tree, EVENT_TIME)


def source_of(step: p.WithTime, plan: p.Plan) -> p.Source:
    """Return the source whose rows the step gives their time; raise `PipelineError` if it may not stand there."""
    at = plan.step(step.input.step)
    while isinstance(at, _ROW_WISE):
        at = plan.step(at.input.step)
    if isinstance(at, p.Union):
        raise PipelineError(
            f"step {step.name}: {at.name} unites streams, whose rows are late each by its own source. Call with_time on each "
            "stream before the union."
        )
    if not isinstance(at, p.Source) or at.declares_time or at.replaces:
        raise PipelineError(
            f"step {step.name}: event time is assigned to the rows of a source, before any step that brings rows together. Call "
            f"with_time before step {at.name}."
        )
    if at.time is not None or at.timed_by not in {None, step.name}:
        other = f"time={at.time!r}" if at.time is not None else f"step {at.timed_by}"
        raise PipelineError(
            f"step {step.name}: source {at.name} has its event time from {other}, and a source has only one. Leave one of them "
            "out, or declare the source twice, under two names."
        )
    return at


def _with_column(step: p.WithTime) -> p.WithColumns:
    return p.WithColumns(name=step.name, input=step.input, columns=(step.expression,))


def _advice(found: Expression) -> str:
    if found.type.is_integer:
        return "Use timestamp_seconds, timestamp_millis or timestamp_micros."
    return "Use to_timestamp(text) or to_timestamp(text, 'dd/MM/yyyy HH:mm:ss'), or CAST(... AS TIMESTAMP)."
