"""What an aggregate step gives: its columns, its time, its late rows, and whether its results replace each other."""

from __future__ import annotations

from typing import Final

from fordstone.errors import PipelineError, SchemaError
from fordstone.model import plan as p
from fordstone.model.aggregate import Aggregate, parse_aggregate
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

WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"


def derive_aggregate(step: p.Aggregate, types: Types) -> Derived:
    """The streams of an aggregate step, by port."""
    stream = types[step.input]
    found = {p.Input(step.name): _aggregated(step, stream)}
    return found if step.window is None else found | late_rows(step, stream)


def aggregates(step: p.Aggregate, schema: Schema) -> tuple[Aggregate, ...]:
    """The parsed aggregates of a step."""
    return tuple(parse_aggregate(given.sql, schema, given.name) for given in step.aggregates)


def _aggregated(step: p.Aggregate, stream: StreamType) -> StreamType:
    append_only(step, stream, "an aggregate")
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
    schema = Schema.of(columns)
    if step.window is None:
        return StreamType(schema=schema, upsert_key=step.keys, row_wise=False, looped=stream.looped)
    # A result counts as the last instant of its window: then a window of windows holds exactly those that lie in it.
    time = EventTime(column=WINDOW_END, shift_us=-1)
    return StreamType(schema=schema, time=time, row_wise=False, windowed=True, id_step=step.name)


def _windowable(step: p.Aggregate, stream: StreamType) -> None:
    needs_time(step, stream, "a window by time")
    for reserved in (WINDOW_START, WINDOW_END):
        if reserved in step.keys:
            raise SchemaError(f"group_by: {reserved!r} is given out by the window itself. Rename that key.")
