"""Which tier a stream is in, and what may cross between edge and center.

Streams begin at the edge; `to_center` takes them to the center, and nothing of the center comes back but through a control
table, at barriers (rule 14).

What the stream behind each step looks like, and whether the step may stand there.

`derive` is the only judge of a plan: the builder asks it step by step, so that a mistake is an error where it was
written, and a plan read from a file is judged by the same rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from fordstone.errors import ExpressionError, PipelineError, SchemaError
from fordstone.lang.dialect import TOO_DEEP
from fordstone.lang.expression import parse_predicate
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.check import WINDOW_END, derive_aggregate
from fordstone.operators.deduplicate import derive_deduplicate
from fordstone.operators.ewma import derive_ewma
from fordstone.operators.join.check import derive_join, derive_lookup
from fordstone.operators.match.check import derive_match
from fordstone.operators.process.step import derive_process
from fordstone.operators.rowwise import exploded_columns, projection
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP, Derived, EventTime, StreamType, Types, append_only, plain_keys, shown


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


def derive_tier(step: p.TierStep, types: Types) -> StreamType:
    """The stream of a step between the tiers."""
    match step:
        case p.ToCenter():
            stream = types[step.input]
            append_only(step, stream, "to_center")
            if stream.looped:
                raise PipelineError(f"step {step.name}: to_center cannot stand inside or below a loop.")
            return replace(stream, row_wise=False, windowed=False, id_step=None)
        case p.Control():
            schema = Schema.of(step.schema)
            if not step.keys:
                raise PipelineError(f"control {step.name}: name the column that rows replace each other by: key=.")
            plain_keys(step.keys, schema, what="key")
            return StreamType(schema=schema, upsert_key=step.keys, row_wise=False, table=True)
        case p.ToEdges():
            return types[step.input]


def is_central(step: p.Step, types: Types) -> bool:
    """Whether the streams of a step are at the center; raises `PipelineError` where the tiers would be mixed."""
    above = [stream for stream in step.inputs if types[stream].central]
    read = step.input if isinstance(step, p.LookupLatest) else None
    table = next((stream for stream in step.inputs if types[stream].table and read in {None, stream}), None)
    if table is not None:
        raise PipelineError(
            f"step {step.name}: {table} is a control table, which rows are joined with: stream.join_control({table}, on=...). "
            "Nothing else reads it."
        )
    if isinstance(step, p.ToCenter):
        if above:
            raise PipelineError(f"step {step.name}: {step.input} is at the center already. Leave .to_center() out.")
        return True
    if isinstance(step, p.ToEdges) and not above:
        raise PipelineError(
            f"to_edges({step.control!r}): {step.input} is at the edge itself. Take it to the center first: .to_center()."
        )
    if above and len(above) < len(step.inputs):
        below = ", ".join(str(stream) for stream in step.inputs if not types[stream].central)
        if any(types[stream].table for stream in step.inputs):
            raise PipelineError(
                f"step {step.name}: {', '.join(map(str, above))} is at the center, and {below} is a control table, which nodes have. "
                "Join it before .to_center(); at the center, join the stream that the table is made of (join_latest)."
            )
        raise PipelineError(
            f"step {step.name}: {', '.join(map(str, above))} is at the center and {below} at the edge. "
            "Take the latter to the center too (.to_center()); rows come back only through a control table."
        )
    return bool(above)


def check_tiers(plan: p.Plan, step: p.Step, types: Types) -> None:
    """What depends on other steps than a step's inputs."""
    if isinstance(step, p.ToEdges):
        _check_to_edges(plan, step, types)
    if isinstance(step, p.ToCenter) and plan.mode == "unaligned":
        raise PipelineError(
            f"step {step.name}: in mode 'unaligned' what is in flight at a barrier is in the checkpoint and not among the rows of "
            "its epoch, so the time told to the center would be ahead of them. Use mode='aligned'."
        )
    if isinstance(step, p.Sink) and step.release == "at_once" and types[step.input].central:
        raise PipelineError(
            f"sink {step.name}: release='at_once' is for the edge; at the center rows come by epochs. Use release='commit'."
        )


def _check_to_edges(plan: p.Plan, step: p.ToEdges, types: Types) -> None:
    tables = {table.name: table for table in plan.steps if isinstance(table, p.Control)}
    table = tables.get(step.control)
    if table is None:
        known = f" Declared are: {', '.join(tables)}." if tables else ""
        raise PipelineError(
            f"to_edges({step.control!r}): there is no such control table. Declare it: "
            f"p.control({step.control!r}, schema=..., key=...).{known}"
        )
    twice = [other.name for other in plan.steps if isinstance(other, p.ToEdges) and other.control == step.control]
    if len(twice) > 1:
        raise PipelineError(
            f"to_edges({step.control!r}) stands twice: a control table has one writer. Unite the streams."
        )
    given, wanted = types[step.input], Schema.of(table.schema)
    if dict(given.schema) != dict(wanted):
        raise SchemaError(
            f"to_edges({step.control!r}): the rows do not have the table's columns.\n"
            f"  given:  {shown(given.schema)}\n  wanted: {shown(wanted)}"
        )
    if given.upsert_key is not None and given.upsert_key != table.keys:
        raise PipelineError(
            f"to_edges({step.control!r}): rows replace each other by ({', '.join(given.upsert_key)}), and the table's by "
            f"({', '.join(table.keys)}). Behind a window, .final() gives the last word on each."
        )
