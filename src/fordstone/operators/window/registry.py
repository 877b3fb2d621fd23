"""Which operator an aggregate step becomes: by its kind of window, and by whether it is fed with partial rows.

Leaves to the operators what they do; `factory` comes here for every aggregate step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, assert_never

import msgspec
import polars as pl

from fordstone.errors import PlanError
from fordstone.lang.aggregates import Aggregate, AggregateCall, inverts
from fordstone.operators.aggregate.check import aggregates, rows_of
from fordstone.operators.aggregate.combine import EpochCombine, Merging
from fordstone.operators.aggregate.fragment import Fragments
from fordstone.operators.aggregate.partial import Partials
from fordstone.operators.aggregate.running import Combine, RunningAggregate
from fordstone.operators.base import Operator, OperatorContext
from fordstone.operators.window.count import CountAggregate
from fordstone.operators.window.session import SessionAggregate
from fordstone.operators.window.sliding import PaneGrid, SlidingAggregate
from fordstone.operators.window.tumbling import WindowAggregate
from fordstone.plan import plan as p
from fordstone.plan import windows as w
from fordstone.plan.stream_type import EventTime, StreamType

MEANING_CHARS: Final = 8
"""Of a digest: it tells two versions of one step apart, not all steps there are."""


def make_aggregate(step: p.Aggregate, context: OperatorContext) -> Operator:
    """The keyed operator of an aggregate step."""
    made = _of_window(step, context)
    return made if step.merges is None else Merging(made, partials_of(step, context))


def make_epoch_combine(step: p.Combine, context: OperatorContext) -> Operator:
    """The keyed operator that gives partial rows out at barriers; `make_combiner` feeds it."""
    return EpochCombine(partials_of(step, context))


def _of_window(step: p.Aggregate, context: OperatorContext) -> Operator:
    match step.window:
        case None:
            return _running(step, context)
        case w.Tumbling():
            return _tumbling(step, context)
        case w.Sliding():
            return _sliding(step, step.window, context)
        case w.Session():
            return _session(step, step.window, context)
        case w.Count():
            return _count(step, step.window, context)
        case _:
            assert_never(step.window)


def make_combiner(step: p.Aggregate | p.Combine, context: OperatorContext) -> Combine:
    """What makes partial rows before the shuffle, where `combines` says that it may."""
    return Combine(
        partials_of(step, context),
        drops_late=step.window is not None,
        counted=_counted(step, context.types[step.input]),
    )


def combines(step: p.Aggregate, plan: p.Plan) -> bool:
    """Whether partial rows may be made before the shuffle (rule 9).

    Not for sessions and counts, which need the rows themselves; nor where somebody wants the late rows as they came; nor
    where partial rows are what comes.
    """
    if step.merges is not None or isinstance(step.window, w.Session | w.Count):
        return False
    return not any(stream.port == "late" for _, stream in plan.consumers(step.name))


def partials_of(step: p.Aggregate | p.Combine, context: OperatorContext) -> Partials:
    """How an aggregate step makes, merges and finishes partial rows."""
    stream = rows_of(step, context.types) if isinstance(step, p.Aggregate) else context.types[step.input]
    parsed = aggregates(step, stream.schema)
    return Partials(
        step.keys,
        parsed,
        stream.schema,
        window=_cut(step.window),
        time=stream.time,
        step=step.name,
        with_id=step.name in context.with_ids,
        functions=context.functions,
        meaning=_meaning(step, parsed, stream),
    )


def _meaning(step: p.Aggregate | p.Combine, parsed: Sequence[Aggregate], stream: StreamType) -> str:
    """What partial rows say: of which rows, and of what of them. Names of columns do not tell sum(x) from sum(y)."""
    calls = [call for found in parsed for call in found.calls]
    said = [
        [(key, str(stream.schema[key])) for key in step.keys],
        step.window,
        stream.time and (stream.time.column, stream.time.shift_us),
        [(call.sql, [str(argument.type) for argument in call.arguments]) for call in calls],
    ]
    return hashlib.sha256(msgspec.json.encode(said, order="deterministic")).hexdigest()[:MEANING_CHARS]


def _cut(window: w.Window | None) -> w.Tumbling | None:
    """What the time of a row decides about its partial row: its window, or the pane of its windows."""
    match window:
        case w.Tumbling():
            return window
        case w.Sliding():
            return w.panes(window)
        case None | w.Session() | w.Count():
            return None
        case _:
            assert_never(window)


def _takes_partials(step: p.Aggregate, context: OperatorContext) -> bool:
    """Whether partial rows come: of a combiner before the shuffle, or of nodes."""
    return step.merges is not None or combines(step, context.plan)


def _running(step: p.Aggregate, context: OperatorContext) -> Operator:
    return RunningAggregate(
        partials_of(step, context),
        combined=_takes_partials(step, context),
        at_barriers=context.plan.guarantee == "exactly_once",
        state=context.state,
    )


def _tumbling(step: p.Aggregate, context: OperatorContext) -> Operator:
    return WindowAggregate(
        partials_of(step, context), combined=_takes_partials(step, context), early_us=step.early_us, state=context.state
    )


def _sliding(step: p.Aggregate, window: w.Sliding, context: OperatorContext) -> Operator:
    stream = rows_of(step, context.types)
    calls = [call for found in aggregates(step, stream.schema) for call in found.calls]
    return SlidingAggregate(
        partials_of(step, context),
        PaneGrid(window),
        combined=_takes_partials(step, context),
        inverts=all(_gives_back(call) for call in calls),
        early_us=step.early_us,
        counted=_counted(step, stream),
        state=context.state,
    )


def _gives_back(call: AggregateCall) -> bool:
    """Whether rows can be taken out of an aggregate again, exactly. Users' own are not asked to."""
    kind = None if call.argument is None else call.argument.type
    return call.declared is not None and inverts(call.declared, kind)


def _counted(step: p.Aggregate | p.Combine, stream: StreamType) -> pl.Expr | None:
    """Which rows count at all; None: all do, because windows leave no gaps."""
    if not isinstance(step.window, w.Sliding):
        return None
    time = _time(step, stream)
    return PaneGrid(step.window).in_window(pl.col(time.column).to_physical() + time.shift_us)


def _session(step: p.Aggregate, window: w.Session, context: OperatorContext) -> Operator:
    return SessionAggregate(_fragments(step, context), gap_us=window.gap_us, state=context.state)


def _count(step: p.Aggregate, window: w.Count, context: OperatorContext) -> Operator:
    return CountAggregate(_fragments(step, context), window, state=context.state)


def _fragments(step: p.Aggregate, context: OperatorContext) -> Fragments:
    stream = context.types[step.input]
    return Fragments(
        step.keys,
        aggregates(step, stream.schema),
        stream.schema,
        time=_time(step, stream),
        step=step.name,
        with_id=step.name in context.with_ids,
        functions=context.functions,
    )


def _time(step: p.Aggregate | p.Combine, stream: StreamType) -> EventTime:
    if stream.time is None:
        raise PlanError(f"step {step.name}: a window needs event time, and {step.input} has none.")
    return stream.time
