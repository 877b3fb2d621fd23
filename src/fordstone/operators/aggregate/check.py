"""What an aggregate step gives: its columns, its time, its late rows, and whether its results replace each other.

What makes sense for windows that are not cut by the clock: sessions, and windows by count.

What makes sense for windows that are cut by the clock, tumbling and sliding, and for early results of windows.
"""

from __future__ import annotations

from typing import Final

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.aggregates import Aggregate, parse_aggregate, user_aggregate
from fordstone.lang.duration import human_us
from fordstone.lang.schema import DataType, Schema
from fordstone.plan import plan as p
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
)
from fordstone.plan.windows import Count, Session, Sliding, Tumbling, Window

SPAN_MAX_US: Final = 2**62
"""A window behind any time still ends at a time."""
WINDOWS_A_ROW_MAX: Final = 100_000
"""A row counts for at most so many windows: each gives a result of its own for every key."""


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
    if isinstance(window, Sliding) and window.size_us > WINDOWS_A_ROW_MAX * window.slide_us:
        raise PipelineError(
            f"step {step}: a row would count for {-(-window.size_us // window.slide_us):,} windows of {human_us(window.size_us)} "
            f"every {human_us(window.slide_us)}; {WINDOWS_A_ROW_MAX:,} are the most. Let windows begin less often (every=)."
        )


def check_early(step: str, window: Window | None, early_us: int) -> None:
    """Refuse early results where there is nothing to be early for, or no window that has a beginning and an end in advance."""
    if window is None:
        raise PipelineError(
            f"step {step}: early= belongs to windows. A running aggregate gives every key's newest result at each epoch anyway."
        )
    if not isinstance(window, Tumbling | Sliding):
        raise PipelineError(
            f"step {step}: early results are for tumbling and sliding windows, whose bounds are known before they close. "
            "Leave early= out for sessions and windows by count."
        )
    if early_us <= 0:
        raise PipelineError(
            f"step {step}: early={human_us(early_us)} must be longer than zero. It says how often, at most, provisional results come."
        )


GAP_MAX_US: Final = 2**62
"""A gap behind any time is still a time."""
ROWS_MAX: Final = 2**31
"""The panes of a window lie in one array."""


def check_session(step: str, window: Session) -> None:
    """Refuse gaps that no session could end by."""
    if window.gap_us <= 0:
        raise PipelineError(
            f"step {step}: the gap of a session must be longer than zero, and this is {human_us(window.gap_us)}. "
            'Give the silence after which a session is over: session("30s").'
        )
    if window.gap_us >= GAP_MAX_US:
        raise PipelineError(
            f"step {step}: no session could end by a gap of {human_us(window.gap_us)}. Give a shorter one."
        )


def check_count(step: str, window: Count) -> None:
    """Refuse windows without rows, and windows that do not move on."""
    for what, rows in (("size", window.size), ("every", window.slide)):
        if not 1 <= rows <= ROWS_MAX:
            raise PipelineError(
                f"step {step}: windows by count need 1 to {ROWS_MAX:,} rows, and {what} is {rows:,}. "
                "Write by_count(100), or by_count(100, every=10) for a window of 100 rows at every tenth."
            )


PARTIAL_ROWS: Final = "__rows"
"""Of a partial row: how many rows it stands for. On its way to the center, what it says stands behind the name."""


def derive_aggregate(step: p.Aggregate, types: Types) -> Derived:
    """The streams of an aggregate step, by port."""
    stream = rows_of(step, types)
    main = _aggregated(step, stream)
    if step.window is None:
        return {p.Input(step.name): main}
    # Who merges partial rows has no late rows to show: those were told apart, and counted, where the partial rows were made.
    late = late_rows(step, stream) if step.merges is None else {}
    if step.early_us is None:
        return {p.Input(step.name): main} | late
    # Until a window closes its results are provisional, and replace each other.
    key = (*step.keys, WINDOW_START, WINDOW_END)
    early = StreamType(schema=main.schema, upsert_key=key, row_wise=False)
    return {p.Input(step.name): early, p.Input(step.name, "final"): main} | late


def rows_of(step: p.Aggregate, types: Types) -> StreamType:
    """The rows that the aggregates of a step are about: its input, or what partial rows of its input were made of."""
    stream, below = types[step.input], step.merges
    if below is None:
        return stream
    if isinstance(step.window, Session | Count):
        raise PipelineError(
            f"step {step.name}: windows of sessions and by count need the rows themselves, not partial rows."
        )
    missing = [name for name in step.keys if name not in stream.schema]
    if not any(name.startswith(PARTIAL_ROWS) for name in stream.schema):
        missing.append(PARTIAL_ROWS)
    if missing:
        raise PipelineError(
            f"step {step.name} merges partial rows, but {step.input} has no column {', '.join(missing)}. "
            "`tiers.split` makes such steps; they are not written by hand."
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
    time = EventTime(column=WINDOW_END, shift_us=0 if isinstance(step.window, Count) else -1)
    return StreamType(schema=schema, time=time, row_wise=False, windowed=True, id_step=step.name)


def _windowable(step: p.Aggregate, stream: StreamType) -> None:
    if isinstance(step.window, Session):
        check_session(step.name, step.window)
    if isinstance(step.window, Count):
        check_count(step.name, step.window)
    if isinstance(step.window, Tumbling | Sliding):
        check_aligned(step.name, step.window)
    needs_time(step, stream, "a window by time")
    for reserved in (WINDOW_START, WINDOW_END):
        if reserved in step.keys:
            raise SchemaError(f"group_by: {reserved!r} is given out by the window itself. Rename that key.")
