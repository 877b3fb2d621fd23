"""The families of aggregates: what a plan may ask for, and which operator a step becomes.

The operator depends on the kind of window and on whether the step reads partial rows. The operators are in `running` and
in `operators.window`; how partial rows are made and merged is in `partial`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, assert_never

import msgspec
import polars as pl

from fordstone.errors import PipelineError, PlanError, SchemaError
from fordstone.lang.aggregates import Aggregate, parse_aggregate, user_aggregate
from fordstone.lang.duration import human_us
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.fragment import Fragments
from fordstone.operators.aggregate.partial import ROWS, Partials
from fordstone.operators.aggregate.running import Combine, EpochCombine, Merging, RunningAggregate, crossing_schema
from fordstone.operators.base import Combines, Family, Operator, OperatorContext, Stays, keys_text, stream_details
from fordstone.operators.window.count import CountAggregate
from fordstone.operators.window.panes import Closing, PaneGrid
from fordstone.operators.window.session import ExpiringAggregate, SessionAggregate
from fordstone.operators.window.sliding import SlidingAggregate
from fordstone.operators.window.tumbling import WindowAggregate
from fordstone.plan import plan as p
from fordstone.plan.plan import Count, Session, Sliding, Tumbling, Window
from fordstone.plan.stream_type import (
    TIMESTAMP,
    WINDOW_END,
    WINDOW_START,
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    key_columns,
    late_rows,
    needs_time,
    plain_keys,
)

SPAN_MAX_US: Final = 2**62
"""Maximum span: the end of a window that begins at any time is still a time."""
WINDOWS_PER_ROW_MAX: Final = 100_000
"""Maximum number of windows that one row counts for: each has a result of its own for every key."""


def check_aligned(step: str, window: Tumbling | Sliding) -> None:
    """Refuse windows without length, windows that do not move on, and windows that hardly do."""
    spans = {"size": window.size_us}
    if isinstance(window, Sliding):
        spans["slide"] = window.slide_us
    for what, span_us in spans.items():
        if not 0 < span_us < SPAN_MAX_US:
            raise PipelineError(
                f"step {step}: the {what} of a window must be longer than zero (and shorter than {human_us(SPAN_MAX_US)}), "
                f"and this is {human_us(span_us)}. "
                'Write tumbling("1m"), or sliding("1m", every="10s").'
            )
    if isinstance(window, Sliding) and window.size_us > WINDOWS_PER_ROW_MAX * window.slide_us:
        raise PipelineError(
            f"step {step}: a row would count for {-(-window.size_us // window.slide_us):,} windows of {human_us(window.size_us)} "
            f"every {human_us(window.slide_us)}; {WINDOWS_PER_ROW_MAX:,} are the most. Let windows begin less often (every=)."
        )


def check_early(step: str, window: Window | None, early_us: int) -> None:
    """Refuse early results where there is nothing to be early for, or no window that has a beginning and an end in advance."""
    if window is None:
        raise PipelineError(
            f"step {step}: early= is only for windows. A running aggregate emits the newest result of every key at each epoch anyway. Leave early= out."
        )
    if not isinstance(window, Tumbling | Sliding):
        raise PipelineError(
            f"step {step}: early results are for tumbling and sliding windows, whose bounds are known before they close. "
            "Leave early= out for sessions and windows by count."
        )
    if early_us <= 0:
        raise PipelineError(
            f"step {step}: early={human_us(early_us)} must be longer than zero. It is the interval between provisional results."
        )


def check_allowed_lateness(step: str, window: Window | None, allowed_us: int) -> None:
    """Refuse an allowed lateness where there is no window that could be kept after its end."""
    if window is None:
        raise PipelineError(
            f"step {step}: allowed_lateness= is only for windows. A running aggregate counts every row, however late. Leave it out."
        )
    if not isinstance(window, Tumbling | Sliding):
        what = "A session that is over" if isinstance(window, Session) else "A window of rows that is full"
        raise PipelineError(
            f"step {step}: allowed_lateness= is for tumbling and sliding windows. {what} cannot be corrected: one more row could change "
            'the bounds of this window and of all that follow. Use a longer lateness= at the source, such as lateness="1m", so that '
            "results wait for late rows."
        )
    if not 0 < allowed_us < SPAN_MAX_US:
        raise PipelineError(
            f"step {step}: allowed_lateness={human_us(allowed_us)} must be longer than zero, and shorter than {human_us(SPAN_MAX_US)}. "
            "It is how long after its end a window is kept for late rows."
        )


def check_ttl(step: p.Aggregate, stream: StreamType) -> None:
    """Refuse to forget keys where windows do so, where there is no time to forget them by, or where there are no keys."""
    if step.window is not None:
        raise PipelineError(
            f"step {step.name}: ttl= is for aggregates without a window. A window forgets its keys when it closes. Leave ttl= out."
        )
    if not step.keys:
        raise PipelineError(f"step {step.name}: ttl= forgets keys, and there is none. Leave it out, or use group_by.")
    if not 0 < (step.ttl_us or 0) < SPAN_MAX_US:
        raise PipelineError(
            f"step {step.name}: ttl={human_us(step.ttl_us or 0)} must be longer than zero, and shorter than {human_us(SPAN_MAX_US)}. "
            "It is how long a key without rows is remembered."
        )
    needs_time(step, stream, "ttl=")


ROWS_MAX: Final = 2**31
"""The panes of a window lie in one array."""


def check_unaligned(step: str, window: Session | Count) -> None:
    """Refuse gaps that no session could end by, windows without rows, and windows that do not move on."""
    if isinstance(window, Session):
        if not 0 < window.gap_us < SPAN_MAX_US:
            raise PipelineError(
                f"step {step}: the gap of a session must be longer than zero (and shorter than {human_us(SPAN_MAX_US)}), and this "
                f'is {human_us(window.gap_us)}. Give the silence after which a session is over: session("30s").'
            )
        return
    for what, rows in (("size", window.size), ("every", window.slide)):
        if not 1 <= rows <= ROWS_MAX:
            raise PipelineError(
                f"step {step}: windows by count need 1 to {ROWS_MAX:,} rows, and {what} is {rows:,}. "
                "Write by_count(100), or by_count(100, every=10) for a window of 100 rows at every tenth."
            )


def rows_of(step: p.Aggregate, types: Types) -> StreamType:
    """The rows that the aggregates of a step are about: its input, or what partial rows of its input were made of."""
    stream, below = types[step.input], step.merges
    if below is None:
        return stream
    if step.needs_rows:
        raise PipelineError(
            f"step {step.name}: sessions, windows by count and ttl= need the rows themselves, not partial rows."
        )
    missing = [name for name in step.keys if name not in stream.schema]
    if not any(name.startswith(ROWS) for name in stream.schema):
        missing.append(ROWS)
    if missing:
        raise PipelineError(
            f"step {step.name} merges partial rows, but {step.input} has no column {', '.join(missing)}. "
            "The plan is not valid: such steps are made when a pipeline of two tiers is split. Build the plan again from the pipeline."
        )
    time = None if below.time is None else EventTime(column=below.time, shift_us=below.shift_us)
    return StreamType(schema=Schema.stored(below.schema), time=time, row_wise=False)


def aggregates(step: p.Aggregate | p.Combine, schema: Schema) -> tuple[Aggregate, ...]:
    """The parsed aggregates of a step."""
    return tuple(_parsed(given, schema) for given in step.aggregates)


def _parsed(given: p.NamedAggregate, schema: Schema) -> Aggregate:
    user = given.user
    if user is None:
        return parse_aggregate(given.sql, schema, given.name)
    state = tuple((name, DataType.parse(kind)) for name, kind in user.state.items())
    result = DataType.parse(user.result)
    return user_aggregate(given.name, user.path, user.arguments, schema, kind=result, state=state)


def _aggregated(step: p.Aggregate, stream: StreamType) -> StreamType:
    append_only(step, stream, "an aggregate")
    if step.early_us is not None:
        check_early(step.name, step.window, step.early_us)
    if step.allowed_lateness_us:
        check_allowed_lateness(step.name, step.window, step.allowed_lateness_us)
    if step.ttl_us is not None:
        check_ttl(step, stream)
    plain_keys(step.keys, stream.schema)
    columns: dict[str, str | DataType] = key_columns(step.keys, stream.schema)
    if not step.aggregates:
        raise PipelineError(f"step {step.name}: agg() needs at least one aggregate, such as n='count(*)'.")
    if step.window is not None:
        _windowable(step, stream)
        columns |= {WINDOW_START: TIMESTAMP, WINDOW_END: TIMESTAMP}
    for aggregate in aggregates(step, stream.schema):
        if aggregate.name in columns:
            raise SchemaError(f"column {aggregate.name!r} is given twice. Name the aggregate differently.")
        columns[aggregate.name] = aggregate.type
        for call in aggregate.calls:
            if call.declared is not None and call.declared.needs_time:
                needs_time(step, stream, f"{call.function}(x)")
    schema = Schema.of(columns)
    if step.window is None:
        return StreamType(schema=schema, upsert_key=step.keys, row_wise=False, looped=stream.looped)
    # A result counts as the last instant of its window: then a window of windows holds exactly those that lie in it.
    # A window by count ends with its last row, and not after it.
    time = EventTime(column=WINDOW_END, shift_us=0 if isinstance(step.window, Count) else -1, also=_start(step.window))
    return StreamType(schema=schema, time=time, row_wise=False, windowed=True)


def _start(window: Window) -> EventTime | None:
    """The start of windows of one length, as the time of their results."""
    return (
        EventTime(column=WINDOW_START, shift_us=window.size_us - 1) if isinstance(window, Tumbling | Sliding) else None
    )


def _windowable(step: p.Aggregate, stream: StreamType) -> None:
    if isinstance(step.window, Session | Count):
        check_unaligned(step.name, step.window)
    elif step.window is not None:
        check_aligned(step.name, step.window)
    needs_time(step, stream, "a window by time")
    for reserved in (WINDOW_START, WINDOW_END):
        if reserved in step.keys:
            raise SchemaError(f"group_by: {reserved!r} is a column that the window itself adds. Rename that key.")


MEANING_CHARS: Final = 8
"""Length of the digest: enough to distinguish two versions of one step."""


class AggregateFamily(Family[p.Aggregate]):
    """Aggregates by key: running, or by window."""

    steps = (p.Aggregate,)

    def check(self, step: p.Aggregate, types: Types) -> Derived:
        stream = rows_of(step, types)
        main = _aggregated(step, stream)
        if step.window is None and step.ttl_us is None:
            return {p.Input(step.name): main}
        # A step that merges partial rows has no late rows: they were judged and counted where the partial rows were made.
        late = late_rows(step, stream) if step.merges is None else {}
        if step.early_us is None and not step.allowed_lateness_us:
            return {p.Input(step.name): main} | late
        # Until a window closes its results are provisional, and replace each other.
        key = (*step.keys, WINDOW_START, WINDOW_END)
        provisional = StreamType(schema=main.schema, upsert_key=key, row_wise=False)
        # The watermark has passed a window that was kept after its end: its result would be late for a step by event time.
        final = replace(main, time=None) if step.allowed_lateness_us else main
        return {p.Input(step.name): provisional, p.Input(step.name, "final"): final} | late

    def make(self, step: p.Aggregate, context: OperatorContext) -> Operator:
        made = _of_window(step, context)
        return made if step.merges is None else Merging(made, partials_of(step, context))

    def has_feeder(self, step: p.Aggregate, plan: p.Plan) -> bool:
        return combines(step, plan)

    def make_feeder(self, step: p.Aggregate, index: int, context: OperatorContext) -> Operator | None:  # noqa: ARG002 - one input
        return make_combiner(step, context) if combines(step, context.plan) else None

    def title(self, step: p.Aggregate) -> str:
        return f"{_kind(step)} {keys_text(step.keys)}{'' if step.merges is None else ', merged from partial rows'}"

    def describe(self, step: p.Aggregate, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each
        yield "computes", ", ".join(given.sql for given in step.aggregates)
        if step.early_us is not None:
            yield "early", f"provisional results about every {human_us(step.early_us)}, at barriers"
        if step.allowed_lateness_us:
            kept = human_us(step.allowed_lateness_us)
            yield "late rows", f"correct a window for {kept} after its end, at barriers; then its result is final"
        yield from stream_details(step, types, columns=True)
        yield "keeps", _kept(step)

    def digest(self, step: p.Aggregate, types: Types) -> object:
        """What is kept of rows is the same whether they came as rows or as partial rows (`merges`)."""
        schema = rows_of(step, types).schema
        keys = [(key, str(schema[key])) for key in step.keys]
        calls = [call for found in aggregates(step, schema) for call in found.calls]
        kinds = [(call.sql, str(call.type), str(call.argument.type) if call.argument else "") for call in calls]
        meaning: list[object] = ["aggregate", keys, step.window, step.aggregates, kinds]
        # What changed since the last results is a state of its own, and rows are kept with the time at which their window closes.
        early = [] if step.early_us is None else ["early"]
        allowed = [["allowed lateness", step.allowed_lateness_us]] if step.allowed_lateness_us else []
        ttl = [] if step.ttl_us is None else [["ttl", step.ttl_us]]
        return [*meaning, *early, *allowed, *ttl]

    def push_down(self, step: p.Aggregate, plan: p.Plan, types: Types) -> Combines | Stays:
        if isinstance(step.window, p.Session):
            return Stays(
                reason=f"the sessions of {step.name} need the rows themselves: where one ends is known only over all nodes"
            )
        if step.ttl_us is not None:
            return Stays(
                reason=f"{step.name} forgets silent keys: which rows begin again is known only over the rows of all nodes"
            )
        if isinstance(step.window, p.Count):
            return Stays(reason=f"the windows of {step.name} count rows in order of time, over all nodes")
        if not combines(step, plan):
            return Stays(reason=f"late rows of {step.name} are wanted as they came")
        try:
            return Combines(
                step=step, schema=crossing_schema(partials_of(step, OperatorContext(plan=plan, types=types)))
            )
        except SchemaError as error:
            return Stays(reason=f"partial rows of {step.name} cannot cross: {error}")

    def columns_read(self, step: p.Aggregate, schema: Schema, needed: Callable[[], frozenset[str]]) -> frozenset[str]:  # noqa: ARG002 - results have other columns
        return frozenset(step.keys).union(*(aggregate.columns for aggregate in aggregates(step, schema)))


class CombineFamily(Family[p.Combine]):
    """Partial rows, made below the cut (rule 9). `planner.split` makes these steps."""

    steps = (p.Combine,)
    fed = True
    stays = "{step} is below the cut"

    def check(self, step: p.Combine, types: Types) -> Derived:  # noqa: ARG002 - columns are in the step
        return {p.Input(step.name): StreamType(schema=Schema.stored(step.schema), row_wise=False)}

    def make(self, step: p.Combine, context: OperatorContext) -> Operator:
        return EpochCombine(partials_of(step, context))

    def make_feeder(self, step: p.Combine, index: int, context: OperatorContext) -> Operator:  # noqa: ARG002 - one input
        return make_combiner(step, context)

    def title(self, step: p.Combine) -> str:
        lead = "a " if step.window is None else ""
        return f"partial rows of {lead}{_kind(step)} {keys_text(step.keys)}, once per epoch"

    def describe(self, step: p.Combine, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - only the aggregates
        yield "computes", ", ".join(given.sql for given in step.aggregates)

    def digest(self, step: p.Combine, types: Types) -> object:  # noqa: ARG002 - no state
        return None


def combines(step: p.Aggregate, plan: p.Plan) -> bool:
    """Whether partial rows may be made before the shuffle (rule 9).

    Not for sessions, counts and keys that are forgotten, which need the rows themselves; nor where late rows are read as they came; nor where the
    input is partial rows.
    """
    if step.merges is not None or step.needs_rows:
        return False
    return not plan.has_late_reader(step.name)


def _of_window(step: p.Aggregate, context: OperatorContext) -> Operator:
    # Whether partial rows come: of a combiner before the shuffle, or of nodes.
    combined, state = step.merges is not None or combines(step, context.plan), context.state
    match step.window:
        case None:
            at_barriers = context.plan.guarantee == "exactly_once"
            if step.ttl_us is not None:
                fragments = _fragments(step, context)
                return ExpiringAggregate(fragments, ttl_us=step.ttl_us, at_barriers=at_barriers, state=state)
            return RunningAggregate(partials_of(step, context), combined=combined, at_barriers=at_barriers, state=state)
        case p.Tumbling():
            return WindowAggregate(
                partials_of(step, context),
                Closing(PaneGrid.of(step.window), step.allowed_lateness_us),
                combined=combined,
                early_us=step.early_us,
                state=state,
            )
        case p.Sliding():
            return SlidingAggregate(
                partials_of(step, context),
                Closing(PaneGrid.of(step.window), step.allowed_lateness_us),
                combined=combined,
                early_us=step.early_us,
                counted=_counted(step, rows_of(step, context.types)),
                state=state,
            )
        case p.Session():
            return SessionAggregate(_fragments(step, context), gap_us=step.window.gap_us, state=state)
        case p.Count():
            return CountAggregate(_fragments(step, context), step.window, state=state)
        case _:
            assert_never(step.window)


def make_combiner(step: p.Aggregate | p.Combine, context: OperatorContext) -> Combine:
    """The operator that makes partial rows before the shuffle, if `combines` allows it."""
    return Combine(
        partials_of(step, context),
        closing=_closing(step),
        counted=_counted(step, context.types[step.input]),
    )


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
    """A digest of what partial rows mean: which rows, and what of them. Names of columns do not distinguish sum(x) from sum(y)."""
    calls = [call for found in parsed for call in found.calls]
    meaning = [
        [(key, str(stream.schema[key])) for key in step.keys],
        step.window,
        stream.time and (stream.time.column, stream.time.shift_us),
        [(call.sql, [str(argument.type) for argument in call.arguments]) for call in calls],
    ]
    return hashlib.sha256(msgspec.json.encode(meaning, order="deterministic")).hexdigest()[:MEANING_CHARS]


def _cut(window: p.Window | None) -> p.Tumbling | None:
    """What the time of a row decides about its partial row: its window, or the pane of its windows."""
    match window:
        case p.Tumbling():
            return window
        case p.Sliding():
            return p.panes(window)
        case None | p.Session() | p.Count():
            return None
        case _:
            assert_never(window)


def _closing(step: p.Aggregate | p.Combine) -> Closing | None:
    """When the windows of a step close; None: it has none that do by time alone."""
    if not isinstance(step.window, p.Tumbling | p.Sliding):
        return None
    return Closing(PaneGrid.of(step.window), step.allowed_lateness_us)


def _counted(step: p.Aggregate | p.Combine, stream: StreamType) -> pl.Expr | None:
    """Which rows count at all; None: all do, because windows leave no gaps."""
    if not isinstance(step.window, p.Sliding):
        return None
    time = _time(step, stream)
    return PaneGrid(step.window).in_window(pl.col(time.column).to_physical() + time.shift_us)


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


def _kind(step: p.Aggregate | p.Combine) -> str:
    match step.window:
        case None:
            return "running aggregate"
        case p.Tumbling():
            return f"{human_us(step.window.size_us)} windows{_shifted(step.window.offset_us)}"
        case p.Sliding():
            gap_us = step.window.slide_us - step.window.size_us
            between = f" (with gaps of {human_us(gap_us)}, where rows count for none)" if gap_us > 0 else ""
            every = f"{human_us(step.window.size_us)} windows every {human_us(step.window.slide_us)}"
            return every + between + _shifted(step.window.offset_us)
        case p.Session():
            return f"sessions that end after a gap of {human_us(step.window.gap_us)}"
        case p.Count():
            every = "" if step.window.slide == step.window.size else f" every {step.window.slide:,}"
            gap = step.window.slide - step.window.size
            between = f" (with gaps of {gap:,}, where rows count for none)" if gap > 0 else ""
            return f"windows of {step.window.size:,} rows{every}{between}"
        case _:
            assert_never(step.window)


def _shifted(offset_us: int) -> str:
    return f" shifted by {human_us(offset_us)}" if offset_us else ""


def _kept(step: p.Aggregate) -> str:
    match step.window:
        case None if step.ttl_us is not None:
            return f"the rows that wait for time, and one row per key that had rows in the last {human_us(step.ttl_us)}"
        case None:
            return "one row per key" if step.keys else "one row"
        case p.Sliding(size_us=size_us, slide_us=slide_us) if slide_us < size_us:
            return "partial aggregates of the panes of open windows, which these share"
        case p.Session():
            return "partial aggregates of sessions that may go on"
        case p.Count():
            return "the rows that wait for time, a count per key, and partial aggregates of open windows"
        case _:
            return "partial aggregates of open windows"
