"""What an aggregate step gives: its columns, its time, its late rows, and whether its results replace each other."""

from __future__ import annotations

from typing import Final

from fordstone.errors import PipelineError, SchemaError
from fordstone.model import plan as p
from fordstone.model.aggregate import Aggregate, parse_aggregate, user_aggregate
from fordstone.model.aligned_windows import check_aligned, check_early
from fordstone.model.schema import DataType, Schema
from fordstone.model.stream_type import (
    TIMESTAMP,
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    key_columns,
    late_rows,
    needs_time,
)
from fordstone.model.unaligned_windows import check_count, check_session
from fordstone.model.windows import Count, Session, Sliding, Tumbling

WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
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
