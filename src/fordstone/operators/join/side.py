"""One side of a step that joins two streams: the form in which its rows travel, and how they become columns of the result.

On the feeding side, before the shuffle, key columns become `__k0..` in the type that keys are compared in, the time becomes
a column named for the side, and the other columns get the names that they have in the result. So an operator that takes
rows of both sides knows by the columns which side a batch is of.

Keys: null is equal to nothing; NaN is equal to NaN, and -0.0 to 0.0: numbers with a fraction are compared by their bits,
made one for each of these, and the row carries the value itself beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl

from fordstone.lang.schema import DataType, Schema
from fordstone.operators.base import Stateless
from fordstone.operators.join.check import JoinColumns
from fordstone.plan.plan import join_keys
from fordstone.plan.stream_type import EventTime

LEFT: Final = "__left"
RIGHT: Final = "__right"
"""Of rows of that side: until when they are kept, in microseconds: their time and how long behind it. Null: no time."""


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
        """`schema` and `keys`: of the side's own stream. `hold_us`: how long behind its time a row is kept."""
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
            self.key_types[name] = compared(kind)
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
        """The column of rows on their way that gives this column of the result."""
        return self._shown[name]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the result that this side has."""
        return tuple(self._shown)


class Carry(Stateless):
    """Brings the rows of one side into the form in which they travel: the feeder of a join and of a lookup."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows; ids that they carry for others are left behind."""
        return self._side.carried(frame)


def compared(kind: DataType) -> pl.DataType:
    """The type of a key column on its way."""
    return pl.Int64() if kind.is_float else kind.polars


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
