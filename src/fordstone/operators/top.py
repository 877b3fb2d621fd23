"""Top-N: the first rows of each key in an order, each with its number.

Of each window: the keys have the window of the rows, that is a column that gives their event time. All rows of a window have one time,
so they wait until the watermark passes it, are numbered once, and that is final.

Order: the expressions that were given (NaN is greater than any number), then all columns, nulls first. So no two rows that differ compare
as equal, and results do not depend on how rows came.

Invariants: what is emitted for a window is a function of its rows; a row is numbered once, or leaves on the late port as it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.expression import parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema
from fordstone.operators.base import Emit, Emits, Family, Operator, OperatorContext, stream_details
from fordstone.operators.row_order import OrderedOperator, WaitingRows, total_order
from fordstone.plan import plan as p
from fordstone.plan.stream_type import (
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    late_rows,
    needs_time,
    plain_keys,
)
from fordstone.state.base import State, StateBackend

NUMBERINGS: Final = ("row_number", "rank", "dense_rank")
_PLACE: Final = "__place"
_NEW: Final = "__new"


class Ranking:
    """Puts rows of one schema in order and numbers them."""

    def __init__(self, step: p.Top, schema: Schema) -> None:
        self._step = step
        self._names = list(schema)
        self._by = [f"__by{index}" for index in range(len(step.by))]
        self._computed = [
            to_polars(parse(key.sql, schema), schema).alias(name) for key, name in zip(step.by, self._by, strict=True)
        ]
        self._rest = total_order((), schema)

    def first(self, rows: pl.DataFrame, groups: list[str]) -> pl.DataFrame:
        """The first rows of each group, in order, with their numbers."""
        keys, more = self._step.by, [False] * len(self._rest)
        ordered = rows.with_columns(self._computed).sort(
            *self._by,
            *self._rest,
            descending=[*(key.descending for key in keys), *more],
            nulls_last=[*(not key.nulls_first for key in keys), *more],
        )
        places = ordered.with_columns(pl.int_range(1, pl.len() + 1, dtype=pl.Int32).over(groups).alias(_PLACE))
        numbered = places.with_columns(self._number(places, groups).alias(self._step.column))
        if self._step.n is not None:
            numbered = numbered.filter(pl.col(self._step.column) <= self._step.n)
        return numbered.select(*self._names, self._step.column)

    def _number(self, places: pl.DataFrame, groups: list[str]) -> pl.Series:
        place = places.get_column(_PLACE)
        if self._step.numbering == "row_number":
            return place
        differs = [pl.col(name).ne_missing(pl.col(name).shift().over(groups)) for name in self._by]
        new = places.with_columns(((pl.col(_PLACE) == 1) | pl.any_horizontal(differs)).alias(_NEW))
        if self._step.numbering == "dense_rank":
            return new.select(pl.col(_NEW).cast(pl.Int32).cum_sum().over(groups)).to_series()
        return new.select(pl.when(_NEW).then(_PLACE).forward_fill().over(groups)).to_series()


class WindowTop(OrderedOperator):
    """Numbers the rows of each window when the watermark has passed it."""

    def __init__(self, step: p.Top, schema: Schema, *, time: EventTime, state: StateBackend) -> None:
        self._ranking = Ranking(step, schema)
        self._waiting = WaitingRows(step.keys, schema, time=time, state=state)
        self._groups = list(step.keys)

    def on_watermark(self, watermark_us: int) -> Emits:
        rows = self._waiting.release(watermark_us)
        if not rows.height:
            return []
        first = self._ranking.first(rows, self._groups)
        return [Emit(first.sort(self._groups, maintain_order=True))]

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state}


class TopFamily(Family[p.Top]):
    """The first rows of each key in an order."""

    steps = (p.Top,)
    stays = "{step} compares the rows of all nodes"

    def check(self, step: p.Top, types: Types) -> Derived:
        stream = types[step.input]
        plain_keys(step.keys, stream.schema, what="per")
        if step.n is not None and step.n < 1:
            raise PipelineError(
                f"step {step.name}: top({step.n}) must be at least 1. It is the number of rows per key."
            )
        if step.numbering not in NUMBERINGS:
            raise PipelineError(
                f"step {step.name}: numbering={step.numbering!r} must be one of {', '.join(map(repr, NUMBERINGS))}."
            )
        if not step.by:
            raise PipelineError(f"step {step.name}: by= names no order. Write for instance by='n DESC'.")
        for key in step.by:
            parse(key.sql, stream.schema)
        if step.column in stream.schema:
            raise SchemaError(f"there is a column {step.column!r} already. Name the new one with column=.")
        schema = Schema.of({**stream.schema, step.column: "int"})
        append_only(step, stream, "top")
        time = needs_time(step, stream, "top per window")
        if not set(time.columns) & set(step.keys):
            raise PipelineError(
                f"step {step.name}: per= has no column that gives the window of a row, such as {' or '.join(time.columns)}, so the rows "
                "of a key would never be complete. Add it to per=."
            )
        return {p.Input(step.name): StreamType(schema=schema, time=time, row_wise=False), **late_rows(step, stream)}

    def make(self, step: p.Top, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        time = needs_time(step, stream, "top per window")
        return WindowTop(step, stream.schema, time=time, state=context.state)

    def title(self, step: p.Top) -> str:
        which = "number the rows" if step.n is None else f"the first {step.n:,}" if step.n > 1 else "the first row"
        return f"{which} of each {', '.join(step.keys)}, by {', '.join(map(_written, step.by))}"

    def describe(self, step: p.Top, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield from stream_details(step, types)
        yield "keeps", "the rows that wait for time"


def _written(key: p.SortKey) -> str:
    """A sort key as it is written in SQL."""
    nulls = "" if key.nulls_first != key.descending else f" NULLS {'FIRST' if key.nulls_first else 'LAST'}"
    return f"{key.sql}{' DESC' if key.descending else ''}{nulls}"
