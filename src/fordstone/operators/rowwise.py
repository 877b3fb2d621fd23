"""The last step below the cut: rows on their way to the center, each with the edge's word on whether it is late.

Stateless steps: filter, projections, flat_map, user functions, and steps that only pass rows on.

Rows that carry an id (`ROW_ID`) or an operation (`OP`) keep it on the way; a row that becomes several gets an ordinal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import polars as pl

from fordstone.errors import SchemaError, TaskError
from fordstone.lang.expression import Expression, expand, parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema
from fordstone.operators.base import DELETE, OP, ROW_ID, UPSERT, Emit, Emits, Stateless
from fordstone.plan import plan as p

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
        """The rows."""
        return frame


class TagBranch(Stateless):
    """Marks the ids of rows with the branch of a union that they come along: the same row may come along several."""

    def __init__(self, branch: int) -> None:
        self._id = pl.format("{}~{}", ROW_ID, pl.lit(branch)).alias(ROW_ID)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows, with ids that no other branch gives."""
        return frame.with_columns(self._id) if ROW_ID in frame.columns else frame


class ToSink(Stateless):
    """The last step before a sink: the declared columns in order, and of the hidden ones those that the sink is to see."""

    def __init__(self, schema: Schema, *, hidden: Sequence[str]) -> None:
        self._columns = [*schema, *hidden]

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows as the sink takes them."""
        return frame.select(self._columns)


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
        """The rows, element by element."""
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


LATE_MARK: Final = "__late"
"""A Boolean column beside the declared ones."""


class ToHub(Stateless):
    """The declared columns in order, and whether the row is late. Partial rows have no such mark: none of them is."""

    def __init__(self, schema: Schema, *, hidden: Sequence[str], partial: bool) -> None:
        self._columns = [*schema, *hidden]
        self._partial = partial

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Mark, and drop what is empty."""
        out = self.apply(frame)
        if not self._partial:
            out = out.with_columns(pl.lit(late).alias(LATE_MARK))
        return [Emit(out, late=late)] if out.height else []

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows as they are declared."""
        return frame.select(self._columns)
