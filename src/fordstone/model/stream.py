"""What the stream behind each step looks like, and whether the step may stand there.

`derive` is the only judge of a plan: the builder asks it step by step, so that a mistake is an error where it was
written, and a plan read from a file is judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, assert_never

from fordstone.errors import ExpressionError, PipelineError, SchemaError
from fordstone.model import plan as p
from fordstone.model.aggregate import Aggregate, parse_aggregate
from fordstone.model.expression import Expression, expand, parse, parse_double, parse_predicate
from fordstone.model.schema import DataType, Schema

WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
_TIMESTAMP: Final = DataType("timestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTime:
    """Where a stream's rows carry their time: a column, and what to add to it."""

    column: str
    shift_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamType:
    """What is known of a stream before a row has moved."""

    schema: Schema
    time: EventTime | None = None
    upsert_key: tuple[str, ...] | None = None
    """None: an append stream. Else rows replace each other by this key."""
    row_wise: bool = True
    """Every row comes of one input row, by position: it can be given an id that a replay gives again."""
    windowed: bool = False
    """Every row comes of one key and window of the step `id_step`."""
    id_step: str | None = None
    looped: bool = False
    """Inside or below a loop: there is no event time here."""


def derive(step: p.Step, types: Mapping[p.Input, StreamType]) -> dict[p.Input, StreamType]:
    """The streams that `step` gives out, by port; raises `PipelineError` if it may not stand behind its inputs."""
    try:
        return {p.Input(step.name): main for main in [_main(step, types)]} | _late(step, types)
    except ExpressionError as error:
        raise error if error.step else error.at_step(step.name) from None
    except SchemaError as error:
        raise SchemaError(f"step {step.name}: {error}") from None


def stream_types(plan: p.Plan) -> dict[p.Input, StreamType]:
    """Judge a whole plan. Names are unique, inputs exist, and every step may stand where it stands."""
    types: dict[p.Input, StreamType] = {}
    seen: set[str] = set()
    for step in plan.steps:
        if step.name in seen:
            raise PipelineError(f"two steps are named {step.name!r}. Give one of them another name=.")
        seen.add(step.name)
        for stream in step.inputs:
            if stream not in types:
                raise PipelineError(f"step {step.name} reads {stream}, which no step before it gives.")
        types |= derive(step, types)
        check_rules(plan, step, types)
    for step in plan.steps:
        if isinstance(step, p.Loop):
            check_feedback(step, types)
    return types


def check_rules(plan: p.Plan, step: p.Step, types: Mapping[p.Input, StreamType]) -> None:
    """What depends on the plan's guarantee and mode: releases at once (rule 13) and loops (rule 17)."""
    if isinstance(step, p.Loop) and plan.mode == "unaligned":
        raise PipelineError(f"step {step.name}: a loop cannot be snapshot in mode 'unaligned'. Use mode='aligned'.")
    if not isinstance(step, p.Sink) or step.release != "at_once":
        return
    if plan.guarantee != "exactly_once":
        raise PipelineError(
            f"sink {step.name}: release='at_once' belongs to exactly_once; {plan.guarantee} sends at once anyway."
        )
    if plan.mode != "aligned":
        raise PipelineError(
            f"sink {step.name}: release='at_once' needs mode='aligned', so that ids are the same on replay."
        )
    stream = types[step.input]
    if stream.looped:
        raise PipelineError(f"sink {step.name}: release='at_once' cannot stand below a loop. Use release='commit'.")
    if stream.upsert_key is not None:
        raise PipelineError(
            f"sink {step.name}: running results have no ids that a replay gives again. Use release='commit'."
        )
    if not (stream.row_wise or stream.windowed):
        raise PipelineError(
            f"sink {step.name}: rows behind map_batches and ewma have no ids that a replay gives again. "
            "Use release='commit', or map instead of map_batches."
        )


def check_feedback(step: p.Loop, types: Mapping[p.Input, StreamType]) -> None:
    """What comes back must look like what went in."""
    if step.feedback not in types:
        raise PipelineError(f"loop {step.name}: its feedback {step.feedback} is not a step of this pipeline.")
    went, came = types[step.input].schema, types[step.feedback].schema
    if dict(went) != dict(came) or types[step.feedback].upsert_key is not None:
        raise PipelineError(
            f"loop {step.name}: what comes back must have the columns that went in.\n"
            f"  went in: {_shown(went)}\n  comes back: {_shown(came)}"
        )


def _main(step: p.Step, types: Mapping[p.Input, StreamType]) -> StreamType:
    match step:
        case p.Source():
            return _source(step)
        case p.Filter():
            parse_predicate(step.predicate, types[step.input].schema)
            return types[step.input]
        case p.Select() | p.WithColumns():
            return _projected(step, types[step.input])
        case p.Explode():
            return _exploded(step, types[step.input])
        case p.Function():
            return _function(step, types[step.input])
        case p.Union():
            return _united(step, [types[stream] for stream in step.streams])
        case p.Aggregate():
            return _aggregated(step, types[step.input])
        case p.Ewma():
            return _smoothed(step, types[step.input])
        case p.Loop():
            stream = types[step.input]
            _append_only(step, stream, "a loop")
            return replace(stream, time=None, row_wise=False, windowed=False, looped=True)
        case p.Sink():
            return types[step.input]
        case _:
            assert_never(step)


def _late(step: p.Step, types: Mapping[p.Input, StreamType]) -> dict[p.Input, StreamType]:
    if isinstance(step, p.Ewma) or (isinstance(step, p.Aggregate) and step.window is not None):
        return {p.Input(step.name, "late"): replace(types[step.input], time=None, row_wise=False, windowed=False)}
    return {}


def _source(step: p.Source) -> StreamType:
    schema = Schema.of(step.schema)
    if step.time is None:
        return StreamType(schema=schema)
    if step.time not in schema:
        raise SchemaError(f"time={step.time!r} is not a column. Columns are: {', '.join(schema)}.")
    if schema[step.time] != _TIMESTAMP:
        raise SchemaError(f"time={step.time!r} has type {schema[step.time]}; event time needs a timestamp.")
    return StreamType(schema=schema, time=EventTime(column=step.time))


def projection(step: p.Select | p.WithColumns, schema: Schema) -> list[Expression]:
    """Every output column of a projection, in order."""
    parsed = expand(step.columns, schema)
    if isinstance(step, p.Select):
        return parsed
    new = {expression.name: expression for expression in parsed}
    kept = [new.pop(name) if name in new else parse(_quoted(name), schema) for name in schema]
    return [*kept, *new.values()]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _projected(step: p.Select | p.WithColumns, stream: StreamType) -> StreamType:
    columns = projection(step, stream.schema)
    schema = Schema.of({column.name: column.type for column in columns})
    passed = {column.columns[0]: column.name for column in reversed(columns) if column.is_column}
    time = stream.time
    if time is not None:
        time = replace(time, column=passed[time.column]) if time.column in passed else None
    key = stream.upsert_key
    if key is not None:
        lost = [name for name in key if name not in passed]
        if lost:
            raise PipelineError(
                f"step {step.name}: rows of {step.input} replace each other by key ({', '.join(key)}); "
                f"a select must keep {', '.join(lost)} unchanged."
            )
        key = tuple(passed[name] for name in key)
    deterministic = all(column.deterministic for column in columns)
    return replace(
        stream,
        schema=schema,
        time=time,
        upsert_key=key,
        row_wise=stream.row_wise and deterministic,
        windowed=stream.windowed and deterministic,
    )


def exploded_columns(step: p.Explode, schema: Schema) -> tuple[Expression, Schema]:
    """The array expression, and the schema with a column of its elements."""
    array = parse(step.expression, schema)
    if array.type.element is None:
        raise SchemaError(f"flat_map needs an array to take apart; {array.sql} has type {array.type}.")
    columns = {name: kind for name, kind in schema.items() if name != array.name}
    return array, Schema.of(columns | {array.name: array.type.element})


def _exploded(step: p.Explode, stream: StreamType) -> StreamType:
    _append_only(step, stream, "flat_map")
    array, schema = exploded_columns(step, stream.schema)
    time = stream.time if stream.time is None or stream.time.column != array.name else None
    return replace(stream, schema=schema, time=time, windowed=False, row_wise=stream.row_wise)


def _function(step: p.Function, stream: StreamType) -> StreamType:
    _append_only(step, stream, step.kind)
    schema = Schema.of(step.schema)
    time = stream.time
    if time is not None and schema.get(time.column) != _TIMESTAMP:
        time = None
    return replace(
        stream, schema=schema, time=time, windowed=False, row_wise=stream.row_wise and step.kind != "map_batches"
    )


def _united(step: p.Union, streams: list[StreamType]) -> StreamType:
    first = streams[0]
    for stream, given in zip(streams, step.streams, strict=True):
        _append_only(step, stream, "a union")
        if dict(stream.schema) != dict(first.schema):
            raise SchemaError(
                f"a union needs streams of one schema.\n  {step.streams[0]}: {_shown(first.schema)}\n  {given}: {_shown(stream.schema)}"
            )
    time = first.time if all(stream.time == first.time for stream in streams) else None
    return StreamType(
        schema=first.schema,
        time=time,
        row_wise=all(stream.row_wise for stream in streams),
        looped=any(stream.looped for stream in streams),
    )


def aggregates(step: p.Aggregate, schema: Schema) -> tuple[Aggregate, ...]:
    """The parsed aggregates of a step."""
    return tuple(parse_aggregate(given.sql, schema, given.name) for given in step.aggregates)


def _aggregated(step: p.Aggregate, stream: StreamType) -> StreamType:
    _append_only(step, stream, "an aggregate")
    columns: dict[str, str | DataType] = _keys(step, stream.schema)
    if not step.aggregates:
        raise PipelineError(f"step {step.name}: agg() needs at least one aggregate, such as n='count(*)'.")
    if step.window is not None:
        _windowable(step, stream)
        columns |= {WINDOW_START: _TIMESTAMP, WINDOW_END: _TIMESTAMP}
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


def smoothed(step: p.Ewma, schema: Schema) -> tuple[Expression, ...]:
    """What each new column of a step smooths, as doubles, named as the column is."""
    return tuple(parse_double(column, schema) for column in step.columns)


def _smoothed(step: p.Ewma, stream: StreamType) -> StreamType:
    _append_only(step, stream, "ewma")
    time = _needs_time(step, stream, "ewma")
    if not 0 < step.alpha <= 1:
        raise PipelineError(
            f"step {step.name}: alpha={step.alpha} must be above 0 and at most 1. It is the weight of the newest value."
        )
    for key, kind in _keys(step, stream.schema).items():
        if isinstance(kind, DataType) and kind.element is not None:
            raise SchemaError(f"group_by: column {key!r} is an array, which cannot be a key here.")
    if not step.columns:
        raise PipelineError(f"step {step.name}: ewma() needs at least one column, such as smooth='temp'.")
    columns: dict[str, str | DataType] = dict(stream.schema)
    for column in smoothed(step, stream.schema):
        if column.name in columns:
            raise SchemaError(f"there is a column {column.name!r} already. Name the new one differently.")
        columns[column.name] = column.type
    return StreamType(schema=Schema.of(columns), time=time, row_wise=False)


def _keys(step: p.Aggregate | p.Ewma, schema: Schema) -> dict[str, str | DataType]:
    for key in step.keys:
        if key not in schema:
            raise SchemaError(f"group_by: there is no column {key!r}. Columns are: {', '.join(schema)}.")
    return {key: schema[key] for key in step.keys}


def _needs_time(step: p.Aggregate | p.Ewma, stream: StreamType, what: str) -> EventTime:
    if stream.looped:
        raise PipelineError(f"step {step.name}: {what} needs event time, and there is none inside or below a loop.")
    if stream.time is None:
        raise PipelineError(
            f"step {step.name}: {what} needs event time, and {step.input} has none. "
            'Declare it at the source (time="ts"), and keep that column on the way.'
        )
    return stream.time


def _windowable(step: p.Aggregate, stream: StreamType) -> None:
    _needs_time(step, stream, "a window by time")
    for reserved in (WINDOW_START, WINDOW_END):
        if reserved in step.keys:
            raise SchemaError(f"group_by: {reserved!r} is given out by the window itself. Rename that key.")


def _append_only(step: p.Step, stream: StreamType, what: str) -> None:
    if stream.upsert_key is not None:
        raise PipelineError(
            f"step {step.name}: {what} cannot take rows that replace each other by key "
            f"({', '.join(stream.upsert_key)}), as running results do. "
            "Filters, selects that keep the key, and sinks can; or use a window, whose results are final."
        )


def _shown(schema: Schema) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in schema.items())
