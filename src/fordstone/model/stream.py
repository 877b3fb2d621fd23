"""What the stream behind each step looks like, and whether the step may stand there.

`derive` is the only judge of a plan: the builder asks it step by step, so that a mistake is an error where it was
written, and a plan read from a file is judged by the same rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from fordstone.errors import ExpressionError, PipelineError, SchemaError
from fordstone.model import plan as p
from fordstone.model.aggregating import WINDOW_END, derive_aggregate
from fordstone.model.deduplicating import derive_deduplicate
from fordstone.model.dialect import TOO_DEEP
from fordstone.model.expression import Expression, expand, parse, parse_predicate
from fordstone.model.joining import derive_join, derive_lookup
from fordstone.model.match import derive_match
from fordstone.model.processing import derive_process
from fordstone.model.schema import Schema
from fordstone.model.smoothing import derive_ewma
from fordstone.model.stream_type import TIMESTAMP, Derived, EventTime, StreamType, Types, append_only, shown
from fordstone.model.tiering import check_tiers, derive_tier, is_central


def derive(step: p.Step, types: Types) -> Derived:
    """The streams that `step` gives out, by port; raises `PipelineError` if it may not stand behind its inputs."""
    try:
        central = is_central(step, types)
        return {at: replace(stream, central=central) for at, stream in _derived(step, types).items()}
    except ExpressionError as error:
        raise error if error.step else error.at_step(step.name) from None
    except SchemaError as error:
        raise SchemaError(f"step {step.name}: {error}") from None
    except RecursionError:
        raise PipelineError(f"step {step.name}: {TOO_DEEP}") from None


def stream_types(plan: p.Plan) -> Derived:
    """Judge a whole plan. Names are unique, inputs exist, and every step may stand where it stands."""
    types: Derived = {}
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


def check_rules(plan: p.Plan, step: p.Step, types: Types) -> None:
    """What depends on the plan's guarantee and mode: releases at once (rule 13), loops (rule 17), and the tiers."""
    check_tiers(plan, step, types)
    if isinstance(step, p.Loop) and plan.mode == "unaligned":
        raise PipelineError(f"step {step.name}: a loop cannot be snapshot in mode 'unaligned'. Use mode='aligned'.")
    if isinstance(step, p.LookupLatest) and plan.mode == "unaligned":
        raise PipelineError(
            f"step {step.name}: join_latest takes control rows in at barriers, so that what a row meets depends on its epoch; "
            "in mode 'unaligned' rows change epochs when barriers overtake them. Use mode='aligned'."
        )
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


def check_feedback(step: p.Loop, types: Types) -> None:
    """What comes back must look like what went in."""
    if step.feedback not in types:
        raise PipelineError(f"loop {step.name}: its feedback {step.feedback} is not a step of this pipeline.")
    went, came = types[step.input].schema, types[step.feedback].schema
    if dict(went) != dict(came) or types[step.feedback].upsert_key is not None:
        raise PipelineError(
            f"loop {step.name}: what comes back must have the columns that went in.\n"
            f"  went in: {shown(went)}\n  comes back: {shown(came)}"
        )


def _derived(step: p.Step, types: Types) -> Derived:
    match step:
        case p.Aggregate():
            return derive_aggregate(step, types)
        case p.Ewma():
            return derive_ewma(step, types)
        case p.Deduplicate():
            return derive_deduplicate(step, types)
        case p.Join():
            return derive_join(step, types)
        case p.Lookup() | p.LookupLatest():
            return derive_lookup(step, types)
        case p.Match():
            return derive_match(step, types)
        case p.Process():
            return derive_process(step, types)
        case _:
            return {p.Input(step.name): _main(step, types)}


RowWise = (
    p.Source
    | p.Filter
    | p.Select
    | p.WithColumns
    | p.Explode
    | p.Function
    | p.Union
    | p.Combine
    | p.Loop
    | p.Sink
    | p.TierStep
)


def _main(step: RowWise, types: Types) -> StreamType:
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
        case p.Loop():
            stream = types[step.input]
            append_only(step, stream, "a loop")
            return replace(stream, time=None, row_wise=False, windowed=False, looped=True)
        case p.Sink():
            return types[step.input]
        case p.Combine():
            return StreamType(schema=Schema.stored(step.schema), row_wise=False)
        case p.ToCenter() | p.Control() | p.ToEdges():
            return derive_tier(step, types)
        case _:
            assert_never(step)


def _source(step: p.Source) -> StreamType:
    schema = Schema.stored(step.schema) if step.declares_time else Schema.of(step.schema)
    if step.replaces:
        return StreamType(schema=schema, upsert_key=step.replaces, row_wise=False, table=True)
    if step.time is None:
        return StreamType(schema=schema)
    if step.time not in schema:
        raise SchemaError(f"time={step.time!r} is not a column. Columns are: {', '.join(schema)}.")
    if schema[step.time] != TIMESTAMP:
        raise SchemaError(f"time={step.time!r} has type {schema[step.time]}; event time needs a timestamp.")
    return StreamType(schema=schema, time=EventTime(column=step.time, shift_us=step.shift_us))


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
                + (" Behind a window, .final() gives the last word on each." if WINDOW_END in lost else "")
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
    append_only(step, stream, "flat_map")
    array, schema = exploded_columns(step, stream.schema)
    time = stream.time if stream.time is None or stream.time.column != array.name else None
    return replace(stream, schema=schema, time=time, windowed=False, row_wise=stream.row_wise)


def _function(step: p.Function, stream: StreamType) -> StreamType:
    append_only(step, stream, step.kind)
    schema = Schema.of(step.schema)
    time = stream.time
    if time is not None and schema.get(time.column) != TIMESTAMP:
        time = None
    return replace(
        stream, schema=schema, time=time, windowed=False, row_wise=stream.row_wise and step.kind != "map_batches"
    )


def _united(step: p.Union, streams: list[StreamType]) -> StreamType:
    first = streams[0]
    for stream, given in zip(streams, step.streams, strict=True):
        append_only(step, stream, "a union")
        if dict(stream.schema) != dict(first.schema):
            raise SchemaError(
                f"a union needs streams of one schema.\n  {step.streams[0]}: {shown(first.schema)}\n  {given}: {shown(stream.schema)}"
            )
    time = first.time if all(stream.time == first.time for stream in streams) else None
    return StreamType(
        schema=first.schema,
        time=time,
        row_wise=all(stream.row_wise for stream in streams),
        looped=any(stream.looped for stream in streams),
    )
