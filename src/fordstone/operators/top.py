"""Top-N: the first rows of each key in an order, each with its number.

Of each window: the keys have the window of the rows, that is a column that gives their event time. All rows of a window have one time,
so they wait until the watermark passes it, are numbered once, and that is final.

Of all rows so far: at a barrier one upsert for each number of a key whose row changed in the epoch (rule 15). Of rows that are only added, the
first n of each key are kept. Rows that replace each other are all kept, because one that falls back lets another in; each barrier with
changes then looks at all of them.

Order: the expressions that were given (NaN is greater than any number), then all columns, nulls first. So no two rows that differ compare
as equal, and results do not depend on how rows came.

Invariants: what is emitted for a window is a function of its rows; a row is numbered once, or leaves on the late port as it came. What is
emitted up to a barrier says which row has which number, as a function of the rows up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.expression import parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.partial import ONE
from fordstone.operators.base import (
    DELETE,
    OP,
    UPSERT,
    Emit,
    Emits,
    Family,
    Moment,
    Operator,
    OperatorContext,
    stream_details,
)
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
from fordstone.state.base import FOUND, State, StateBackend

NUMBERINGS: Final = ("row_number", "rank", "dense_rank")
_PLACE: Final = "__place"
_NEW: Final = "__new"
_HELD: Final = "__held"
_KNOWN: Final = "__known"
_BEFORE: Final = "__before"
RUNNING_MAX: Final = 10_000
"""Maximum number of rows per key that are kept up to date."""


class Ranking:
    """Puts rows of one schema in order and numbers them."""

    def __init__(self, step: p.Top, schema: Schema) -> None:
        self._step = step
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
        return numbered.select(*rows.columns, self._step.column)

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
        first = self._ranking.first(rows.select(self._waiting.names), self._groups)
        return [Emit(first.sort(self._groups, maintain_order=True))]

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state}


class RunningTop(Operator):
    """Keeps the first rows of each key, and emits what changed at barriers."""

    def __init__(self, step: p.Top, stream: StreamType, *, state: StateBackend) -> None:
        schema = stream.schema
        self._ranking = Ranking(step, schema)
        self._n, self._number = step.n or 0, step.column
        self._names = list(schema)
        self._key = list(step.keys) or [ONE]
        self._replaced_by = None if stream.upsert_key is None else list(stream.upsert_key)
        columns = schema.polars if step.keys else {**schema.polars, ONE: pl.Int8()}
        self._first = state.table(self._key, schema={**columns, step.column: pl.Int32()}, sub_key=[step.column])
        rest = [name for name in self._replaced_by or () if name not in step.keys]
        self._rows = state.table(self._key, schema={**columns, _HELD: pl.Int8()}, sub_key=rest)
        """All rows, where they replace each other; else empty and no part of the state."""
        self._open: list[pl.DataFrame] = []
        """Of this epoch. It does not outlive a barrier, so it is no state."""

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:  # noqa: ARG002 - without time no row is late
        rows = frame.select(self._names if self._replaced_by is None else [*self._names, OP])
        rows = rows.with_columns(pl.lit(0, dtype=pl.Int8).alias(ONE)) if self._key == [ONE] else rows
        if self._replaced_by is not None:
            self._open.append(rows)
        else:
            # Only these can be among the first of all.
            self._open = [self._ranked(pl.concat([*self._open, rows])).drop(self._number)]
        return []

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - results do not wait for time
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - nor for the clock
        if not self._open:
            return []
        new, self._open = pl.concat(self._open), []
        changed = new.select(self._key).unique()
        before = self._before(changed)
        if self._replaced_by is None:
            candidates = pl.concat([before.select(new.columns), new])
        else:
            candidates = self._replaced(new, changed)
        after = self._ranked(candidates)
        by = [*self._key, self._number]
        earlier = before.with_columns(pl.lit(value=True).alias(_KNOWN))
        both = after.join(earlier, on=by, how="left", nulls_equal=True, suffix=_BEFORE, maintain_order="left")
        differs = [pl.col(name).ne_missing(pl.col(name + _BEFORE)) for name in self._names if name not in self._key]
        changes = both.filter(pl.any_horizontal(pl.col(_KNOWN).is_null(), *differs)).select(after.columns)
        gone = before.join(after.select(by), on=by, how="anti", nulls_equal=True)
        self._first.put(changes)
        self._first.delete(gone)
        out = [
            frame.select(*self._names, self._number).with_columns(pl.lit(op).alias(OP))
            for frame, op in ((gone, DELETE), (changes, UPSERT))
            if frame.height
        ]
        return [Emit(pl.concat(out))] if out else []

    def states(self) -> Mapping[str, State]:
        return {"first": self._first} if self._replaced_by is None else {"first": self._first, "rows": self._rows}

    def _ranked(self, rows: pl.DataFrame) -> pl.DataFrame:
        return self._ranking.first(rows, self._key)

    def _before(self, keys: pl.DataFrame) -> pl.DataFrame:
        """The first rows of these keys as they were emitted last."""
        numbers = pl.DataFrame({self._number: pl.int_range(1, self._n + 1, dtype=pl.Int32, eager=True)})
        found = self._first.get(keys.join(numbers, how="cross"))
        return found.filter(pl.col(FOUND)).drop(FOUND)

    def _replaced(self, new: pl.DataFrame, changed: pl.DataFrame) -> pl.DataFrame:
        """Take in the last row of each key, and give all rows that compete with it."""
        last = new.unique(self._replaced_by, keep="last", maintain_order=True)
        goes = last.get_column(OP) == DELETE
        self._rows.delete(last.filter(goes))
        self._rows.put(last.filter(~goes).drop(OP).with_columns(pl.lit(1, dtype=pl.Int8).alias(_HELD)))
        return (
            self._rows.scan()
            .join(changed, on=self._key, how="semi", nulls_equal=True)
            .select([name for name in new.columns if name != OP])
        )


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
        if is_windowed(step, stream):
            append_only(step, stream, "top")
            time = needs_time(step, stream, "top per window")
            return {p.Input(step.name): StreamType(schema=schema, time=time, row_wise=False), **late_rows(step, stream)}
        self._check_running(step, stream)
        replaced_by = (*step.keys, step.column)
        running = StreamType(schema=schema, upsert_key=replaced_by, row_wise=False, looped=stream.looped)
        return {p.Input(step.name): running}

    def _check_running(self, step: p.Top, stream: StreamType) -> None:
        """Refuse what has no end, or no key."""
        windows = (
            f" Add {' or '.join(stream.time.columns)} to per= for a ranking of each window." if stream.time else ""
        )
        if step.n is None:
            raise PipelineError(
                f"step {step.name}: without a window the rows of a key are never complete, so only the first ones are numbered. Say how "
                f"many: top(3, ...), or WHERE r <= 3 outside of a query with ROW_NUMBER().{windows}"
            )
        if step.n > RUNNING_MAX:
            raise PipelineError(
                f"step {step.name}: top({step.n:,}) without a window: {RUNNING_MAX:,} rows per key are the most.{windows}"
            )
        if step.numbering != "row_number":
            raise PipelineError(
                f"step {step.name}: without a window, rows replace each other by their number, so each needs one of its own: "
                f"numbering='row_number'.{windows}"
            )
        lost = [name for name in step.keys if stream.upsert_key is not None and name not in stream.upsert_key]
        if lost:
            raise PipelineError(
                f"step {step.name}: {step.input} has rows that replace each other by ({', '.join(stream.upsert_key or ())}), so per= can name "
                f"these only, and not {', '.join(lost)}: a row could change from one ranking to another."
            )

    def make(self, step: p.Top, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        if not is_windowed(step, stream):
            return RunningTop(step, stream, state=context.state)
        time = needs_time(step, stream, "top per window")
        return WindowTop(step, stream.schema, time=time, state=context.state)

    def title(self, step: p.Top) -> str:
        which = "number the rows" if step.n is None else f"the first {step.n:,}" if step.n > 1 else "the first row"
        per = f"of each {', '.join(step.keys)}" if step.keys else "of all"
        return f"{which} {per}, by {', '.join(map(_written, step.by))}"

    def describe(self, step: p.Top, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield from stream_details(step, types)
        stream = types[step.input]
        if is_windowed(step, stream):
            yield "keeps", "the rows that wait for time"
        elif stream.upsert_key is None:
            yield "keeps", "the first rows of each key"
        else:
            yield "keeps", "all rows, because one that falls back lets another in"


def is_windowed(step: p.Top, stream: StreamType) -> bool:
    """Whether the rows of a key are complete at some time: the keys have a column that gives it."""
    return stream.time is not None and bool(set(stream.time.columns) & set(step.keys))


def _written(key: p.SortKey) -> str:
    """A sort key as it is written in SQL."""
    nulls = "" if key.nulls_first != key.descending else f" NULLS {'FIRST' if key.nulls_first else 'LAST'}"
    return f"{key.sql}{' DESC' if key.descending else ''}{nulls}"
