"""Row-wise steps: filter, projections, flat_map, user functions of rows and batches, and unions. None of them has state.

Rows that carry an id (`ROW_ID`) or an operation (`OP`) keep it; if a row becomes several, each gets an ordinal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from fordstone.errors import PipelineError, SchemaError, TaskError
from fordstone.lang.expression import Expression, expand, parse, parse_predicate
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema
from fordstone.operators.base import (
    DELETE,
    OP,
    ROW_ID,
    UPSERT,
    Family,
    Moves,
    Operator,
    OperatorContext,
    Stateless,
    Stays,
    resolve_function,
)
from fordstone.operators.describe import function_text, stream_details
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP, WINDOW_END, Derived, StreamType, Types, append_only, shown

Record = dict[str, Any]


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


def exploded_columns(step: p.Explode, schema: Schema) -> tuple[Expression, Schema]:
    """The array expression, and the schema with a column of its elements."""
    array = parse(step.expression, schema)
    if array.type.element is None:
        raise SchemaError(f"flat_map needs an array to take apart; {array.sql} has type {array.type}.")
    columns = {name: kind for name, kind in schema.items() if name != array.name}
    return array, Schema.of(columns | {array.name: array.type.element})


class PassOn(Stateless):
    """Gives rows on as they are: sources, unions and loop heads."""

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame


class TagBranch(Stateless):
    """Marks the ids of rows with the branch of a union that they come along: the same row may come along several."""

    def __init__(self, branch: int) -> None:
        self._id = pl.format("{}~{}", ROW_ID, pl.lit(branch)).alias(ROW_ID)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows, with ids that no other branch gives."""
        return frame.with_columns(self._id) if ROW_ID in frame.columns else frame


class FilterRows(Stateless):
    """Keeps the rows for which a condition is true."""

    def __init__(self, predicate: Expression, schema: Schema) -> None:
        self._predicate = to_polars(predicate, schema)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows for which it is true; neither false nor null."""
        return frame.filter(self._predicate)


class FilterUpserts(Stateless):
    """A filter on rows that replace each other: a key whose row no longer passes is deleted (rule 8)."""

    def __init__(self, predicate: Expression, schema: Schema) -> None:
        passes = to_polars(predicate, schema).fill_null(value=False)
        self._op = pl.when(passes & (pl.col(OP) == UPSERT)).then(pl.lit(UPSERT)).otherwise(pl.lit(DELETE)).alias(OP)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Every row, with what it does to its key."""
        return frame.with_columns(self._op)


class Project(Stateless):
    """New columns in place of the old."""

    def __init__(self, columns: Sequence[Expression], schema: Schema) -> None:
        self._columns = [to_polars(column, schema) for column in columns]

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The columns, and what the row carries beside them."""
        return frame.select(*self._columns, *carried(frame))


class ExplodeRows(Stateless):
    """A row for each element of an array. A null or empty array gives none."""

    def __init__(self, array: Expression, schema: Schema, out: Schema) -> None:
        self._array = to_polars(array, schema)
        self._name = array.name
        self._columns = list(out)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        lists = frame.with_columns(self._array)
        lists = lists.filter(pl.col(self._name).list.len() > 0)
        if ROW_ID not in frame.columns:
            return lists.explode(self._name).select(self._columns)
        ordinals = pl.int_ranges(0, pl.col(self._name).list.len()).alias("__n")
        rows = lists.with_columns(ordinals).explode(self._name, "__n")
        return rows.select(*self._columns, pl.format("{}.{}", ROW_ID, "__n").alias(ROW_ID))


class MapRecords(Stateless):
    """A user's function of one record, giving one or many."""

    def __init__(self, step: str, function: Callable[[Record], Any], out: Schema, *, many: bool) -> None:
        self._step = step
        self._function = function
        self._out = out
        self._many = many

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The records that come of each row, in order."""
        ids = frame[ROW_ID].to_list() if ROW_ID in frame.columns else None
        found: list[Record] = []
        found_ids: list[str] = []
        for index, record in enumerate(frame.drop(ROW_ID, strict=False).iter_rows(named=True)):
            given: Iterable[Record] = self._function(record) if self._many else (self._function(record),)
            for ordinal, made in enumerate(given):
                if not isinstance(made, dict):
                    raise TaskError(
                        f"step {self._step}: the function gave {type(made).__name__} {made!r}; records are dicts."
                    )
                found.append(made)
                if ids is not None:
                    found_ids.append(f"{ids[index]}.{ordinal}" if self._many else ids[index])
        out = frame_of(found, self._out, self._step)
        return out if ids is None else out.with_columns(pl.Series(ROW_ID, found_ids, dtype=pl.String()))


class MapBatches(Stateless):
    """A user's function of a frame."""

    def __init__(self, step: str, function: Callable[[pl.DataFrame], pl.DataFrame], out: Schema) -> None:
        self._step = step
        self._function = function
        self._out = out

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """What the function gave, checked against the declared schema."""
        # Other steps may hold this frame; what the function does to its own in place is its own business.
        given = self._function(frame.clone().drop(ROW_ID, strict=False))
        if not isinstance(given, pl.DataFrame):
            raise TaskError(
                f"step {self._step}: map_batches gave {type(given).__name__}; it must give a Polars DataFrame."
            )
        missing = [name for name in self._out if name not in given.columns]
        if missing:
            raise SchemaError(
                f"step {self._step}: map_batches gave columns {', '.join(given.columns)}; "
                f"{', '.join(missing)} of the declared schema is missing. Give it, or declare schema=."
            )
        try:
            return given.select(pl.col(name).cast(kind.polars) for name, kind in self._out.items())
        except pl.exceptions.PolarsError as error:
            raise SchemaError(
                f"step {self._step}: map_batches gave values that are not of the declared type: {error}"
            ) from error


def carried(frame: pl.DataFrame) -> list[pl.Expr]:
    """The hidden columns that rows of this frame carry."""
    return [pl.col(name) for name in (ROW_ID, OP) if name in frame.columns]


def frame_of(records: Sequence[Record], schema: Schema, step: str) -> pl.DataFrame:
    """Records as a frame of a schema; raises `SchemaError` for what does not fit."""
    for record in records:
        unknown = record.keys() - set(schema)
        if unknown:
            raise SchemaError(
                f"step {step}: the function gave {', '.join(sorted(map(str, unknown)))}, which the declared schema "
                f"({', '.join(schema)}) does not have. Declare schema=."
            )
    try:
        columns = {name: [record.get(name) for record in records] for name in schema}
        return pl.DataFrame(columns, schema=schema.polars, strict=True)
    except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(
            f"step {step}: the function gave values that are not of the declared type: {error}"
        ) from error


class FilterFamily(Family[p.Filter]):
    """Keeps the rows for which a condition is true."""

    steps = (p.Filter,)

    def check(self, step: p.Filter, types: Types) -> Derived:
        parse_predicate(step.predicate, types[step.input].schema)
        return {p.Input(step.name): types[step.input]}

    def make(self, step: p.Filter, context: OperatorContext) -> Operator:
        """Rows that replace each other are filtered by deleting."""
        stream = context.types[step.input]
        predicate = parse_predicate(step.predicate, stream.schema)
        return (FilterRows if stream.upsert_key is None else FilterUpserts)(predicate, stream.schema)

    def title(self, step: p.Filter) -> str:
        return f"keep rows where {step.predicate}"

    def describe(self, step: p.Filter, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        return stream_details(step, types)

    def push_down(self, step: p.Filter, plan: p.Plan, types: Types) -> Moves | Stays:  # noqa: ARG002
        return _moves(step, [parse_predicate(step.predicate, types[step.input].schema)], Moves(rows="fewer"))

    def columns_read(self, step: p.Filter, schema: Schema, needed: Callable[[], frozenset[str]]) -> frozenset[str]:
        """Those of the condition, and those read later."""
        return needed() | set(parse_predicate(step.predicate, schema).columns)


class ProjectFamily(Family[p.Select | p.WithColumns]):
    """New columns in place of the old, or beside them."""

    steps = (p.Select, p.WithColumns)

    def check(self, step: p.Select | p.WithColumns, types: Types) -> Derived:
        """Time and the key of upserts survive if their columns are passed on unchanged."""
        stream = types[step.input]
        columns = projection(step, stream.schema)
        passed = {column.columns[0]: column.name for column in reversed(columns) if column.is_column}
        time = stream.time
        if time is not None:
            time = replace(time, column=passed[time.column]) if time.column in passed else None
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
        return Project(projection(step, schema), schema)

    def title(self, step: p.Select | p.WithColumns) -> str:
        return f"{'select' if isinstance(step, p.Select) else 'add'} {', '.join(step.columns)}"

    def describe(self, step: p.Select | p.WithColumns, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        return stream_details(step, types)

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
        time = stream.time if stream.time is None or stream.time.column != array.name else None
        return {p.Input(step.name): replace(stream, schema=schema, time=time, windowed=False)}

    def make(self, step: p.Explode, context: OperatorContext) -> Operator:
        schema = context.types[step.input].schema
        array, out = exploded_columns(step, schema)
        return ExplodeRows(array, schema, out)

    def title(self, step: p.Explode) -> str:
        return f"a row for each element of {step.expression}"

    def describe(self, step: p.Explode, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        return stream_details(step, types)

    def push_down(self, step: p.Explode, plan: p.Plan, types: Types) -> Moves | Stays:  # noqa: ARG002
        """If the array is deterministic; alone it makes more rows cross."""
        return _moves(step, [exploded_columns(step, types[step.input].schema)[0]], Moves(rows="more"))

    def columns_read(self, step: p.Explode, schema: Schema, needed: Callable[[], frozenset[str]]) -> frozenset[str]:
        """Those of the array, and those read later."""
        array, _ = exploded_columns(step, schema)
        return (needed() - {array.name}) & frozenset(schema) | set(array.columns)


class FunctionFamily(Family[p.Function]):
    """A user's function of records or of batches."""

    steps = (p.Function,)

    def check(self, step: p.Function, types: Types) -> Derived:
        """The declared columns; time survives in a column of its name."""
        stream = types[step.input]
        append_only(step, stream, step.kind)
        schema = Schema.of(step.schema)
        time = stream.time if stream.time is not None and schema.get(stream.time.column) == TIMESTAMP else None
        row_wise = stream.row_wise and step.kind != "map_batches"
        return {p.Input(step.name): replace(stream, schema=schema, time=time, windowed=False, row_wise=row_wise)}

    def make(self, step: p.Function, context: OperatorContext) -> Operator:
        """Calls the function for each record, or each batch."""
        function = resolve_function(step.path, context.functions)
        out = Schema.of(step.schema)
        if step.kind == "map_batches":
            return MapBatches(step.name, function, out)
        return MapRecords(step.name, function, out, many=step.kind == "flat_map")

    def title(self, step: p.Function) -> str:
        return f"{step.kind} {function_text(step.path)}"

    def describe(self, step: p.Function, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        return stream_details(step, types)

    def push_down(self, step: p.Function, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002
        return Stays(reason=f"{step.name} is a function of yours, which may depend on where it runs")


class UnionFamily(Family[p.Union]):
    """The rows of several streams of one schema."""

    steps = (p.Union,)

    def check(self, step: p.Union, types: Types) -> Derived:
        """All schemas are equal; time survives if it is the same everywhere."""
        streams = [types[stream] for stream in step.streams]
        first = streams[0]
        for stream, given in zip(streams, step.streams, strict=True):
            append_only(step, stream, "a union")
            if dict(stream.schema) != dict(first.schema):
                raise SchemaError(
                    "a union needs streams of one schema.\n"
                    f"  {step.streams[0]}: {shown(first.schema)}\n  {given}: {shown(stream.schema)}"
                )
        united = StreamType(
            schema=first.schema,
            time=first.time if all(stream.time == first.time for stream in streams) else None,
            row_wise=all(stream.row_wise for stream in streams),
            looped=any(stream.looped for stream in streams),
        )
        return {p.Input(step.name): united}

    def make(self, step: p.Union, context: OperatorContext) -> Operator:  # noqa: ARG002
        return PassOn()

    def title(self, step: p.Union) -> str:
        return f"union of {', '.join(map(str, step.streams))}"

    def describe(self, step: p.Union, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        return stream_details(step, types)

    def push_down(self, step: p.Union, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002
        """Never: the other streams are at the center."""
        return Stays(reason=f"{step.name} unites it with other streams")


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
            + (" After a window, .final() gives the last result of each." if WINDOW_END in lost else "")
        )
    return tuple(passed[name] for name in stream.upsert_key)
