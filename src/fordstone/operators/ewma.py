"""EWMA: every row with exponentially weighted means of its key's rows up to it, in order of time.

Rows wait in a buffer until the watermark passes them; then each gets, for every column that is smoothed, the mean of the
values of its key so far, with weights that shrink by count of values (alpha) or by time (half-life). The first value is
the first mean. A null value leaves the mean as it is, and its row carries that; NaN stays NaN.

The order of rows is that of `row_order`; the recursion itself is in `recurrence`.

Invariants: a mean is a function of its key's rows in order, to the last bit, whatever the batches, barriers, watermarks
and restores; a row is given out once, or leaves on the late port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from fordstone.errors import PlanError
from fordstone.model import plan as p
from fordstone.model.expression import Expression
from fordstone.model.schema import Schema
from fordstone.model.smoothing import smoothed
from fordstone.model.stream_type import EventTime
from fordstone.operators.lowering import to_polars
from fordstone.operators.operator import Emit, Emits, Moment, Operator
from fordstone.operators.recurrence import Decaying, Doubles, Mask, Means, Rows, Values, smooth, smooth_by_time
from fordstone.operators.row_order import KeyedRows, WaitingRows
from fordstone.operators.setting import OperatorSetting
from fordstone.state.state import State
from fordstone.state.table import Table


def make_ewma(step: p.Ewma, setting: OperatorSetting) -> Operator:
    """The operator of an ewma step."""
    stream = setting.types[step.input]
    if stream.time is None:
        raise PlanError(f"step {step.name}: ewma needs event time, and {step.input} has none.")
    columns = smoothed(step, stream.schema)
    return Ewma(step.keys, columns, stream.schema, alpha=step.alpha, half_life_us=step.half_life_us, time=stream.time)


class Ewma(Operator):
    """Smooths columns of rows by key."""

    def __init__(
        self,
        keys: Sequence[str],
        columns: Sequence[Expression],
        schema: Schema,
        *,
        alpha: float | None = None,
        half_life_us: int | None = None,
        time: EventTime,
    ) -> None:
        """`columns`: what to smooth, as doubles, named as the new columns are. `schema` is the input's.

        One of `alpha` and `half_life_us` is given.
        """
        self._columns = [to_polars(column, schema) for column in columns]
        self._new = [column.name for column in columns]
        smoother = _ByTime if half_life_us is not None else _ByCount
        self._smoothers = [smoother(index, half_life_us or alpha or 1.0) for index in range(len(columns))]
        read = [name for column in columns for name in column.columns]
        self._waiting = WaitingRows(keys, schema, time=time, read=read)
        kept = {name: kind for smoother in self._smoothers for name, kind in smoother.kept.items()}
        self._table = Table(self._waiting.key, schema=self._waiting.key_types | kept)

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Let rows wait."""
        return self._waiting.take(frame, late=late)

    def on_watermark(self, watermark_us: int) -> Emits:
        """Give out the rows below it, by time."""
        rows = self._waiting.release(watermark_us)
        return [Emit(self._with_means(rows))] if rows.height else []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        """Nothing: results come with time."""
        return []

    def states(self) -> Mapping[str, State]:
        """The rows that wait, and the means of each key."""
        return {"waiting": self._waiting.state, "means": self._table}

    def _with_means(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows, ordered by time, with the new columns."""
        found = self._waiting.by_key(rows)
        values, before = found.rows.select(self._columns), self._table.get(found.keys)
        times_us = self._waiting.times(found.rows)
        new, after = [], []
        for name, smoother in zip(self._new, self._smoothers, strict=True):
            given = _by_key(values.get_column(name), found.by_key)
            out, then = smoother.smooth(given, times_us, found, before)
            new.append(_by_row(name, out, found.by_key))
            after += then
        self._table.put(found.keys.with_columns(after))
        return found.rows[self._waiting.names].with_columns(new)


class _ByCount:
    """The newest value counts `alpha`. One number a key is kept: the mean, null before the first value."""

    def __init__(self, index: int, alpha: float) -> None:
        self._mean = f"__s{index}"
        self._alpha = alpha
        self.kept: dict[str, pl.DataType] = {self._mean: pl.Float64()}

    def smooth(
        self,
        values: Values,
        times_us: Rows,  # noqa: ARG002 - values count, not time
        found: KeyedRows,
        before: pl.DataFrame,
    ) -> tuple[Values, list[pl.Series]]:
        """The means at each row, and what is then kept of each key."""
        out, then = smooth(values, found.counts, _means(before.get_column(self._mean)), self._alpha)
        return out, [_series(self._mean, then.values, then.known)]


class _ByTime:
    """Values count by their age. Kept of a key: the mean, its weight, and the time of the last value."""

    def __init__(self, index: int, half_life_us: float) -> None:
        self._mean, self._weight, self._time = f"__s{index}", f"__w{index}", f"__t{index}"
        self._half_life_us = int(half_life_us)
        self.kept: dict[str, pl.DataType] = {
            self._mean: pl.Float64(),
            self._weight: pl.Float64(),
            self._time: pl.Int64(),
        }

    def smooth(
        self, values: Values, times_us: Rows, found: KeyedRows, before: pl.DataFrame
    ) -> tuple[Values, list[pl.Series]]:
        """The means at each row, and what is then kept of each key."""
        so_far = Decaying(
            means=_means(before.get_column(self._mean)),
            weights=before.get_column(self._weight).to_numpy(),
            times_us=before.get_column(self._time).fill_null(0).to_numpy(),
        )
        times_us = times_us.take(found.by_key)
        out, then = smooth_by_time(values, times_us, found.counts, so_far, self._half_life_us)
        known = then.means.known
        return out, [
            _series(self._mean, then.means.values, known),
            _series(self._weight, then.weights, known),
            _series(self._time, then.times_us, known),
        ]


def _means(series: pl.Series) -> Means:
    return Means(values=series.to_numpy(), known=series.is_not_null().to_numpy())


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


def _series(name: str, values: Doubles | Rows, valid: Mask | None) -> pl.Series:
    series = pl.Series(name, values)
    if valid is None or valid.all():
        return series
    return series.zip_with(pl.Series(valid), pl.Series(name, [None], dtype=series.dtype))
