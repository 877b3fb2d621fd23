"""EWMA: every row with exponentially weighted means of its key's rows up to it, in order of time.

Rows wait in a buffer until the watermark passes them; then each gets, for every column that is smoothed,
`s = alpha * x + (1 - alpha) * s` over the values of its key so far. The first value is the first mean. A null value
leaves the mean as it is, and its row carries that; NaN stays NaN.

Order: time, then the columns that are read, then all others; nulls first, NaN last, -0.0 before 0.0. Rows that are equal
in all of these are equal, so that results never depend on how rows came. The recursion itself is in `recurrence`.

Invariants: a mean is a function of its key's rows in order, to the last bit, whatever the batches, barriers, watermarks
and restores; a row is given out once, or leaves on the late port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl

from fordstone.model.expression import Expression
from fordstone.model.manifest import TIME_MIN_US
from fordstone.model.schema import Schema
from fordstone.model.stream_type import EventTime
from fordstone.operators.lowering import to_polars
from fordstone.operators.operator import LATE, Emit, Emits, Moment, Operator
from fordstone.operators.partial import ONE
from fordstone.operators.recurrence import Doubles, Mask, Means, Rows, Values, smooth
from fordstone.state.buffer import Buffer
from fordstone.state.microseconds import microseconds
from fordstone.state.state import State
from fordstone.state.table import Table

TIME: Final = "__time"
"""The time of a row, where that is not just a column's value."""
_ROW: Final = "__row"
_TIE: Final = "__tie"


class Ewma(Operator):
    """Smooths columns of rows by key."""

    def __init__(
        self, keys: Sequence[str], columns: Sequence[Expression], schema: Schema, *, alpha: float, time: EventTime
    ) -> None:
        """`columns`: what to smooth, as doubles, named as the new columns are. `schema` is the input's."""
        self._alpha = alpha
        self._names = list(schema)
        self._key = tuple(keys) or (ONE,)
        self._key_columns = [pl.col(name) for name in keys] or [pl.lit(0, dtype=pl.Int8).alias(ONE)]
        self._columns = [to_polars(column, schema) for column in columns]
        self._new = [column.name for column in columns]
        self._means = [f"__s{index}" for index in range(len(columns))]
        self._shifted = None if not time.shift_us else (pl.col(time.column).cast(pl.Int64) + time.shift_us).alias(TIME)
        self._time = TIME if time.shift_us else time.column
        read = dict.fromkeys(name for column in columns for name in column.columns)
        self._order = _order([*read, *(name for name in schema if name not in read)], schema)
        key_types = {name: schema[name].polars for name in keys} or {ONE: pl.Int8()}
        self._buffer = Buffer(keys, time_column=self._time)
        self._table = Table(self._key, schema=key_types | dict.fromkeys(self._means, pl.Float64()))
        self._watermark_us = TIME_MIN_US + 1

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Let rows wait. Rows that idleness overtook are late, and so are rows without a time."""
        rows = frame.select(self._names)
        if late:
            return [Emit(rows, port=LATE)]
        timed = rows if self._shifted is None else rows.with_columns(self._shifted)
        times = microseconds(timed.get_column(self._time))
        if not times.null_count() and times.min() >= self._watermark_us:  # type: ignore[operator]  # an Int64 without nulls
            self._buffer.add(timed)
            return []
        in_time = (times >= self._watermark_us).fill_null(value=False)
        self._buffer.add(timed.filter(in_time))
        return [Emit(rows.filter(~in_time), port=LATE)]

    def on_watermark(self, watermark_us: int) -> Emits:
        """Give out the rows below it, by time."""
        self._watermark_us = watermark_us
        rows = self._buffer.release(watermark_us)
        return [Emit(self._with_means(rows))] if rows.height else []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        """Nothing: results come with time."""
        return []

    def states(self) -> Mapping[str, State]:
        """The rows that wait, and the means of each key."""
        return {"waiting": self._buffer, "means": self._table}

    def _with_means(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows, ordered by time, with the new columns."""
        groups = rows.with_row_index(_ROW).select(_ROW, *self._key_columns).group_by(self._key).agg(_ROW)
        keys, counts = groups.select(self._key), groups.get_column(_ROW).list.len().cast(pl.Int64).to_numpy()
        by_key = groups.get_column(_ROW).explode().cast(pl.Int64).to_numpy()
        rows = self._ties_in_order(rows, by_key, counts)
        values, before = rows.select(self._columns), self._table.get(keys)
        new, after = [], []
        for name, mean in zip(self._new, self._means, strict=True):
            known = before.get_column(mean)
            out, then = smooth(
                _by_key(values.get_column(name), by_key),
                counts,
                Means(values=known.to_numpy(), known=known.is_not_null().to_numpy()),
                self._alpha,
            )
            new.append(_by_row(name, out, by_key))
            after.append(_series(mean, then.values, then.known))
        self._table.put(keys.with_columns(after))
        return rows.select(self._names).with_columns(new)

    def _ties_in_order(self, rows: pl.DataFrame, by_key: Rows, counts: Rows) -> pl.DataFrame:
        """The rows, with those of one key and one time in order among themselves.

        `by_key` are the numbers of the rows, those of one key together. Only rows of one key and one time are compared by
        their columns: mostly that is none, or few, and comparing all takes several times as long as all the rest.
        """
        times = microseconds(rows.get_column(self._time)).to_numpy().take(by_key)
        as_before = np.zeros(times.size + 1, dtype=np.bool_)
        np.equal(times[1:], times[:-1], out=as_before[1:-1])
        as_before[np.cumsum(counts)] = False
        if not as_before.any():
            return rows
        tied = np.flatnonzero(as_before[1:] | as_before[:-1])
        places = by_key[tied]
        ties = pl.DataFrame({_ROW: places, _TIE: np.cumsum(~as_before[:-1])[tied]})
        compared = pl.concat([rows.select(self._names)[places], ties], how="horizontal")
        order = np.arange(rows.height)
        order[places] = compared.sort(_TIE, *self._order).get_column(_ROW).to_numpy()
        return rows[order]


def _order(names: Sequence[str], schema: Schema) -> list[pl.Expr]:
    """By what rows of equal key and time are ordered: no two that differ compare as equal."""
    order = []
    for name in names:
        order.append(pl.col(name))
        if schema[name].is_float:  # Polars takes -0.0 and 0.0 for equal
            order.append((pl.lit(1.0) / pl.col(name)) > 0)
    return order


def _by_key(series: pl.Series, by_key: Rows) -> Values:
    """The values of rows, those of one key together."""
    valid = series.is_not_null().to_numpy().take(by_key) if series.null_count() else None
    return Values(values=series.to_numpy().take(by_key), valid=valid)


def _by_row(name: str, found: Values, by_key: Rows) -> pl.Series:
    """Values by key, put where their rows stand."""
    values = np.empty_like(found.values)
    values[by_key] = found.values
    if found.valid is None:
        return _series(name, values, None)
    valid = np.empty_like(found.valid)
    valid[by_key] = found.valid
    return _series(name, values, valid)


def _series(name: str, values: Doubles, valid: Mask | None) -> pl.Series:
    series = pl.Series(name, values)
    if valid is None or valid.all():
        return series
    return series.zip_with(pl.Series(valid), pl.Series(name, [None], dtype=pl.Float64()))
