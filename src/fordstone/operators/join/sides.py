"""The two sides of a join or a lookup: which columns they have in common, what rows look like on their way, and their time.

Keys are compared in one type: equal types, or whole numbers of any width; null equals nothing, NaN equals NaN, and -0.0 equals 0.0
(floats are compared by normalised bits). A key column with the same name on both sides is one column of the result, in that type; every
other right column follows the left ones, with a suffix if the left has its name. Before the shuffle a feeder renames keys to `__k0..`,
adds the time in a column named for the side, and gives the other columns the names of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.choices import check_word
from fordstone.lang.duration import UNIT_US
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.base import ROW_ID, ROW_WATERMARK
from fordstone.plan import plan as p
from fordstone.plan.plan import join_keys
from fordstone.plan.stream_type import EventTime, StreamType, plain_keys

BOUND_MAX_US: Final = 1_000_000 * UNIT_US["d"]
"""Maximum bound of a join, about 2,700 years: a time plus a bound must be a valid timestamp."""
_WIDTHS: Final = ("tinyint", "smallint", "int", "bigint")
HOWS: Final = ("inner", "left", "right", "full")
LOOKUP_HOWS: Final = ("inner", "left")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinColumns:
    """The columns of a join or a lookup."""

    schema: Schema
    """Of the result: the left columns, then the right ones."""
    key_types: tuple[DataType, ...]
    """In which keys are compared."""
    right: dict[str, str]
    """From the names of right columns to theirs in the result; those in `merged` are left out."""
    merged: dict[str, str]
    """Right key columns that are one with a left column: from their names to its."""


def join_columns(
    left: Schema, right: Schema, left_keys: Sequence[str], right_keys: Sequence[str], *, suffix: str
) -> JoinColumns:
    """Work out the columns. Raises `SchemaError` for keys that cannot be compared and names that clash."""
    if not left_keys:
        raise SchemaError('on= names no column. Name those that must be equal: on="device", or on={"device": "id"}.')
    if not isinstance(suffix, str):
        raise SchemaError(f"suffix={suffix!r} is not text.")
    for side, keys, schema in (("left", left_keys, left), ("right", right_keys, right)):
        plain_keys(keys, schema, what=f"on (the {side} side)")
    pairs = dict(zip(right_keys, left_keys, strict=True))
    types = tuple(_common(a, left[a], b, right[b]) for b, a in pairs.items())
    merged = {b: a for b, a in pairs.items() if a == b}
    columns = dict(left.items())
    columns |= {name: kind for name, kind in zip(left_keys, types, strict=True) if name in merged}
    taken: dict[str, str] = {}
    for name, kind in right.items():
        if name in merged:
            continue
        out = name if name not in left else name + suffix
        if out in columns:
            raise SchemaError(
                f"the right column {name!r} would become {out!r}, which is there already. "
                "Give another suffix=, or rename it with select first."
            )
        columns[out] = kind
        taken[name] = out
    return JoinColumns(schema=Schema.of(columns), key_types=types, right=taken, merged=merged)


def _common(left: str, one: DataType, right: str, other: DataType) -> DataType:
    if one == other:
        return one
    if one.is_integer and other.is_integer:
        return max(one, other, key=lambda kind: _WIDTHS.index(kind.name))
    raise SchemaError(
        f"on: {left!r} has type {one} on the left and {right!r} has type {other} on the right. "
        f"Cast one of them first: .with_columns({f'CAST({right} AS {one}) AS {right}'!r})."
    )


def holds_us(step: p.Join) -> tuple[int, int]:
    """How long after its own time a row of each side is kept, because a partner or a pair may come."""
    return max(step.to_us, 0), max(-step.from_us, 0)


def pair_time(step: p.Join, columns: JoinColumns, left: StreamType, right: StreamType) -> EventTime | None:
    """The time of what a join gives: never below the watermark at which it is emitted.

    A pair comes with the later of its rows. Where the bounds say which that is, its time is the pair's. Else it is the left
    time (in a right join: the right one) and as much as the other row may be later. A full join has none: either side of
    its rows may be missing.
    """
    if left.time is None or right.time is None or step.how == "full":
        return None
    left_hold_us, right_hold_us = holds_us(step)
    right_column = (columns.right | columns.merged)[right.time.column]
    if step.how == "right" or (step.how == "inner" and left_hold_us and not right_hold_us):
        return EventTime(column=right_column, shift_us=right.time.shift_us + right_hold_us)
    return EventTime(column=left.time.column, shift_us=left.time.shift_us + left_hold_us)


def lookup_columns(step: p.Lookup, schema: Schema) -> JoinColumns:
    """The columns of a lookup in a table."""
    return join_columns(schema, Schema.of(step.schema), step.keys, step.table_keys, suffix=step.suffix)


def check_how(step: p.Join | p.Lookup | p.LookupLatest, known: Sequence[str]) -> None:
    """Reject other ways to join than these."""
    check_word("how", step.how, known, where=f"step {step.name}: ", error=PipelineError)


def keys_details(left: Sequence[str], right: Sequence[str], unmatched: str) -> Iterator[tuple[str, str]]:
    """Describe which columns must be equal, and what becomes of rows without a partner."""
    yield "on", ", ".join(one if one == other else f"{one} = {other}" for one, other in zip(left, right, strict=True))
    yield "unmatched rows", unmatched


def with_hidden(
    made: pl.DataFrame, rows: pl.DataFrame, hidden: Sequence[str] = (ROW_ID, ROW_WATERMARK)
) -> pl.DataFrame:
    """What was made of each row, with those of the hidden columns that the rows have."""
    return made.with_columns(rows.get_column(name) for name in hidden if name in rows.columns)


LEFT: Final = "__left"
RIGHT: Final = "__right"
"""Of rows of that side: until when they are kept, in microseconds: their time plus a duration. Null: no time."""


class Side:
    """How rows of one side travel. Made from the plan alone, on the feeding side and in the operator alike."""

    def __init__(
        self,
        columns: JoinColumns,
        schema: Schema,
        keys: Sequence[str],
        *,
        mark: str,
        time: EventTime | None,
        hold_us: int = 0,
    ) -> None:
        """`schema` and `keys`: of the side's own stream. `hold_us`: how long after its time a row is kept."""
        self.mark = mark
        self.hold_us = hold_us
        self.keys = join_keys(len(keys))
        self.key_types: dict[str, pl.DataType] = {}
        """Of the key columns on their way."""
        names = {name: name for name in schema} if mark == LEFT else columns.right | columns.merged
        self._out = columns.schema.polars
        self._taken: dict[str, pl.Expr] = {}
        self._floats: dict[str, str] = {}
        source: dict[str, str] = {}
        for key, name, kind in zip(keys, self.keys, columns.key_types, strict=True):
            self.key_types[name] = pl.Int64() if kind.is_float else kind.polars
            if kind.is_float:
                self._floats[name] = key
            else:
                self._taken[name] = pl.col(key).cast(kind.polars).alias(name)
                source[names[key]] = name
        self._mark = _kept_until(time, hold_us).alias(mark)
        for name in schema:
            if names[name] not in source:
                self._taken[names[name]] = pl.col(name).alias(names[name])
        self._shown = {name: source.get(name, name) for name in names.values()}
        """From columns of the result to those of rows on their way."""
        self.key_columns = tuple(names[key] for key in keys)
        """The key columns in the result."""

    def carried(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Rows of the side's stream as they travel."""
        keys = [float_bits(frame.get_column(column)).alias(name) for name, column in self._floats.items()]
        return frame.select(*self._taken.values(), self._mark).with_columns(keys)

    def shown(self, frame: pl.DataFrame, *, only: Sequence[str] | None = None) -> dict[str, pl.Series]:
        """The columns of the result that rows on their way give, or some of them; in no order."""
        columns = {}
        for name in self._shown if only is None else only:
            series = frame.get_column(self._shown[name])
            kind = self._out[name]
            columns[name] = (series if series.dtype == kind else series.cast(kind)).alias(name)
        return columns

    def alone(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Rows on their way as rows of the result, with nothing on the other side."""
        return filled(self.shown(frame), self._out, frame.height)

    def source(self, name: str) -> str:
        return self._shown[name]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._shown)


def float_bits(values: pl.Series) -> pl.Series:
    """Numbers as whole numbers that are equal where the numbers are, all NaN and both zeros being one each."""
    numbers = values.cast(pl.Float64).fill_null(0.0).to_numpy() + 0.0
    numbers[np.isnan(numbers)] = np.nan
    bits = pl.Series(values.name, numbers.view(np.int64))
    return bits.zip_with(values.is_not_null(), pl.Series([None], dtype=pl.Int64)) if values.null_count() else bits


def filled(columns: Mapping[str, pl.Series], schema: Mapping[str, pl.DataType], height: int) -> pl.DataFrame:
    """A frame of a schema: the given columns, and null in the others."""
    return pl.DataFrame(
        [
            columns[name] if name in columns else pl.Series(name, [None], dtype=kind).new_from_index(0, height)
            for name, kind in schema.items()
        ]
    )


def _kept_until(time: EventTime | None, hold_us: int) -> pl.Expr:
    if time is None:
        return pl.lit(None, dtype=pl.Int64)
    return pl.col(time.column).cast(pl.Int64) + (time.shift_us + hold_us)
