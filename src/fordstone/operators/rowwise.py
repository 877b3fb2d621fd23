"""Row-wise steps: filter, projections, flat_map, user functions (`user_function` calls them), and unions. None of them has state.

Rows that carry an id (`ROW_ID`), an operation (`OP`) or a watermark (`ROW_WATERMARK`) keep it; if a row becomes several, the id of
each gets an ordinal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.dialect import quoted_name
from fordstone.lang.expression import Expression, expand, parse, parse_predicate
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.base import (
    DELETE,
    OP,
    ROW_ID,
    ROW_WATERMARK,
    UPSERT,
    Family,
    Moves,
    Operator,
    OperatorContext,
    Stateless,
    Stays,
    function_text,
    pass_on,
    resolve_function,
    stream_details,
)
from fordstone.operators.user_function import user_function
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP, WINDOW_END, Derived, StreamType, Types, append_only, shown


def projection(step: p.Select | p.WithColumns, schema: Schema) -> list[Expression]:
    """Every output column of a projection, in order."""
    parsed = expand(step.columns, schema)
    if isinstance(step, p.Select):
        return parsed
    new = {expression.name: expression for expression in parsed}
    kept = [new.pop(name) if name in new else parse(quoted_name(name), schema) for name in schema]
    return [*kept, *new.values()]


def exploded_columns(step: p.Explode, schema: Schema) -> tuple[Expression, Schema]:
    """The array or map, and the schema with a column of its elements; an entry of a map is a struct of `key` and `value`."""
    array = parse(step.expression, schema)
    element = DataType("struct", fields=array.type.fields) if array.type.name == "map" else array.type.element
    if element is None:
        raise SchemaError(f"flat_map needs an array or a map to take apart; {array.sql} has type {array.type}.")
    columns = {name: kind for name, kind in schema.items() if name != array.name}
    return array, Schema.of(columns | {array.name: element})


def tag_branch(branch: int) -> Stateless:
    """Make what marks the ids of rows with the branch of a union that they come along: the same row may come along several."""
    tagged = pl.format("{}~{}", ROW_ID, pl.lit(branch)).alias(ROW_ID)
    return Stateless(lambda frame: frame.with_columns(tagged) if ROW_ID in frame.columns else frame)


def _explode(frame: pl.DataFrame, array: pl.Expr, name: str, columns: Sequence[str]) -> pl.DataFrame:
    lists = frame.with_columns(array).filter(pl.col(name).list.len() > 0)
    kept = [*columns, ROW_WATERMARK] if ROW_WATERMARK in frame.columns else columns
    if ROW_ID not in frame.columns:
        return lists.explode(name).select(kept)
    rows = lists.with_columns(pl.int_ranges(0, pl.col(name).list.len()).alias("__n")).explode(name, "__n")
    return rows.select(*kept, pl.format("{}.{}", ROW_ID, "__n").alias(ROW_ID))


class FilterFamily(Family[p.Filter]):
    """Keeps the rows for which a condition is true."""

    steps = (p.Filter,)

    def check(self, step: p.Filter, types: Types) -> Derived:
        parse_predicate(step.predicate, types[step.input].schema)
        return {p.Input(step.name): types[step.input]}

    def make(self, step: p.Filter, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        predicate = to_polars(parse_predicate(step.predicate, stream.schema), stream.schema)
        if stream.upsert_key is None:
            return Stateless(lambda frame: frame.filter(predicate))
        # Rows replace each other: a key whose row no longer passes is deleted (rule 8).
        passes = predicate.fill_null(value=False) & (pl.col(OP) == UPSERT)
        op = pl.when(passes).then(pl.lit(UPSERT)).otherwise(pl.lit(DELETE)).alias(OP)
        return Stateless(lambda frame: frame.with_columns(op))

    def title(self, step: p.Filter) -> str:
        return f"keep rows where {step.predicate}"

    def push_down(self, step: p.Filter, plan: p.Plan, types: Types) -> Moves | Stays:  # noqa: ARG002
        return _moves(step, [parse_predicate(step.predicate, types[step.input].schema)], Moves(rows="fewer"))

    def columns_read(self, step: p.Filter, schema: Schema, needed: Callable[[], frozenset[str]]) -> frozenset[str]:
        return needed() | set(parse_predicate(step.predicate, schema).columns)


class ProjectFamily(Family[p.Select | p.WithColumns]):
    """New columns in place of the old, or beside them."""

    steps = (p.Select, p.WithColumns)

    def check(self, step: p.Select | p.WithColumns, types: Types) -> Derived:
        """Time and the key of upserts survive if their columns are passed on unchanged."""
        stream = types[step.input]
        columns = projection(step, stream.schema)
        passed = {column.columns[0]: column.name for column in reversed(columns) if column.is_column}
        time = None if stream.time is None else stream.time.passed(passed)
        deterministic = all(column.deterministic for column in columns)
        found = replace(
            stream,
            schema=Schema.of({column.name: column.type for column in columns}),
            time=time,
            upsert_key=_passed_key(step, stream, passed),
            row_wise=stream.row_wise and deterministic,
            windowed=stream.windowed and deterministic,
        )
        return {p.Input(step.name): found}

    def make(self, step: p.Select | p.WithColumns, context: OperatorContext) -> Operator:
        schema = context.types[step.input].schema
        columns = [to_polars(column, schema) for column in projection(step, schema)]
        hidden = (ROW_ID, OP, ROW_WATERMARK)
        return Stateless(lambda frame: frame.select(*columns, *(name for name in hidden if name in frame.columns)))

    def title(self, step: p.Select | p.WithColumns) -> str:
        return f"{'select' if isinstance(step, p.Select) else 'add'} {', '.join(step.columns)}"

    def push_down(self, step: p.Select | p.WithColumns, plan: p.Plan, types: Types) -> Moves | Stays:  # noqa: ARG002
        return _moves(step, projection(step, types[step.input].schema), Moves(rows="same"))

    def columns_read(
        self, step: p.Select | p.WithColumns, schema: Schema, needed: Callable[[], frozenset[str]]
    ) -> frozenset[str]:
        """Those that expressions read; beside them `with_columns` passes on what is read later."""
        columns = projection(step, schema)
        if isinstance(step, p.Select):
            return frozenset(name for column in columns for name in column.columns)
        computed = [column for column in columns if column.columns != (column.name,) or not column.is_column]
        passed = (needed() - {column.name for column in computed}) & frozenset(schema)
        return passed | {name for column in computed for name in column.columns}


class ExplodeFamily(Family[p.Explode]):
    """One row per element of an array."""

    steps = (p.Explode,)

    def check(self, step: p.Explode, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "flat_map")
        array, schema = exploded_columns(step, stream.schema)
        time = (
            None if stream.time is None else stream.time.passed({name: name for name in schema if name != array.name})
        )
        return {p.Input(step.name): replace(stream, schema=schema, time=time, windowed=False)}

    def make(self, step: p.Explode, context: OperatorContext) -> Operator:
        schema = context.types[step.input].schema
        array, out = exploded_columns(step, schema)
        lists = to_polars(array, schema)
        if array.type.name == "map":
            lists = lists.map.entries()
        return Stateless(partial(_explode, array=lists, name=array.name, columns=list(out)))

    def title(self, step: p.Explode) -> str:
        return f"a row for each element of {step.expression}"

    def push_down(self, step: p.Explode, plan: p.Plan, types: Types) -> Moves | Stays:  # noqa: ARG002
        """If the array is deterministic; alone it makes more rows cross."""
        return _moves(step, [exploded_columns(step, types[step.input].schema)[0]], Moves(rows="more"))

    def columns_read(self, step: p.Explode, schema: Schema, needed: Callable[[], frozenset[str]]) -> frozenset[str]:
        array, _ = exploded_columns(step, schema)
        return (needed() - {array.name}) & frozenset(schema) | set(array.columns)


class FunctionFamily(Family[p.Function]):
    """A user's function of records or of batches."""

    steps = (p.Function,)
    stays = "{step} is a user function, which may depend on where it runs"

    def check(self, step: p.Function, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, step.kind)
        schema = Schema.of(step.schema)
        time = stream.time.alone if stream.time is not None and schema.get(stream.time.column) == TIMESTAMP else None
        row_wise = stream.row_wise and step.kind != "map_batches"
        return {p.Input(step.name): replace(stream, schema=schema, time=time, windowed=False, row_wise=row_wise)}

    def make(self, step: p.Function, context: OperatorContext) -> Operator:
        time = context.types[p.Input(step.name)].time
        column = None if time is None else time.column
        return user_function(step, resolve_function(step.path, context.functions), time=column)

    def title(self, step: p.Function) -> str:
        return f"{step.kind} {function_text(step.path)}"

    def describe(self, step: p.Function, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield from stream_details(step, types)
        if step.has_dead_letters:
            yield "on error", "the row goes to the dead letters"


class UnionFamily(Family[p.Union]):
    """The rows of several streams of one schema."""

    steps = (p.Union,)
    stays = "{step} unites it with other streams"

    def check(self, step: p.Union, types: Types) -> Derived:
        streams = [types[stream] for stream in step.streams]
        first = streams[0]
        for stream, given in zip(streams, step.streams, strict=True):
            append_only(step, stream, "a union")
            if dict(stream.schema) != dict(first.schema):
                raise SchemaError(
                    "a union needs streams of one schema.\n"
                    f"  {step.streams[0]}: {shown(first.schema)}\n  {given}: {shown(stream.schema)}"
                )
        # Windows of several lengths have one end, but not one start.
        time = None if first.time is None else first.time.alone
        united = StreamType(
            schema=first.schema,
            time=time if all(stream.time == time for stream in streams) else None,
            row_wise=all(stream.row_wise for stream in streams),
            looped=any(stream.looped for stream in streams),
        )
        return {p.Input(step.name): united}

    def make(self, step: p.Union, context: OperatorContext) -> Operator:  # noqa: ARG002
        return Stateless(pass_on)

    def title(self, step: p.Union) -> str:
        return f"union of {', '.join(map(str, step.streams))}"


def _moves(step: p.AnyStep, columns: Sequence[Expression], moves: Moves) -> Moves | Stays:
    """A step moves if it returns the same for the same row: an epoch that is computed again must be the same."""
    if all(column.deterministic for column in columns):
        return moves
    return Stays(reason=f"{step.name} may give something else for the same row")


def _passed_key(step: p.Select | p.WithColumns, stream: StreamType, passed: dict[str, str]) -> tuple[str, ...] | None:
    if stream.upsert_key is None:
        return None
    lost = [name for name in stream.upsert_key if name not in passed]
    if lost:
        raise PipelineError(
            f"step {step.name}: rows of {step.input} replace each other by key ({', '.join(stream.upsert_key)}); "
            f"a select must keep {', '.join(lost)} unchanged."
            + (
                " After a window, .final() gives the last result of each."
                if WINDOW_END in lost
                else " Add it to what is selected."
            )
        )
    return tuple(passed[name] for name in stream.upsert_key)
