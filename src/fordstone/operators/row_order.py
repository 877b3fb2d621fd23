"""The order of rows for operators that depend on it, and the rows that wait until no earlier one can come.

Order: time, then the columns that the operator reads, then all others; nulls first, NaN last, -0.0 before 0.0. Rows that
are equal in all of these are equal, so that results never depend on how rows came.

Leaves to the operator what it makes of the rows, and what it keeps beside them.

Invariants: a row is released once, when the watermark has passed it, or leaves on the late port as it came; what is
released, and in which order the rows of a key stand, is a function of the rows taken in and of the watermark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.lang.duration import TIME_MIN_US
from fordstone.lang.polars.times import microseconds
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.partial import ONE
from fordstone.operators.base import ROW_WATERMARK, Emits, Moment, Operator, late_emit
from fordstone.plan.stream_type import EventTime
from fordstone.state.base import StateBackend

Numbers = npt.NDArray[np.int64]

TIME: Final = "__time"
"""The time of a row, where that is not just a column's value."""
_ROW: Final = "__row"
_TIE: Final = "__tie"
_COUNT: Final = "__count"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """Where the rows of each key stand in a frame."""

    keys: pl.DataFrame
    """One row per key: the key columns, or `ONE` where there are none."""
    counts: Numbers
    """Rows per key, none of them 0."""
    by_key: Numbers
    """The numbers of the rows, those of one key together (as in `keys`), and as they stood before among themselves."""

    def begins(self) -> npt.NDArray[np.bool_]:
        """For each of `by_key`, whether it is the first of its key."""
        found = np.zeros(self.by_key.size, dtype=np.bool_)
        found[np.cumsum(self.counts) - self.counts] = True
        return found

    def key_numbers(self) -> Numbers:
        """For each of `by_key`, the row of its key in `keys`."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    def by_row(self, values: Numbers) -> Numbers:
        """Values in the order of `by_key`, put where their rows stand."""
        found = np.empty_like(values)
        found[self.by_key] = values
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRows(Keyed):
    """Rows in order of time, those of one key and one time in order among themselves; and where those of each key stand."""

    rows: pl.DataFrame
    """The input's columns, and `TIME` where the time is shifted."""


def key_expressions(keys: Sequence[str]) -> list[pl.Expr]:
    """The columns that rows belong together by: never none."""
    return [pl.col(name) for name in keys] or [pl.lit(0, dtype=pl.Int8).alias(ONE)]


def keyed(rows: pl.DataFrame, keys: Sequence[pl.Expr], *, in_order: bool = False) -> Keyed:
    """Bring rows (at least one) together by key. `in_order`: keys stand in the order of their first rows."""
    count = pl.len().cast(pl.Int64).alias(_COUNT)
    groups = rows.with_row_index(_ROW).group_by(keys, maintain_order=in_order).agg(count, _ROW)
    return Keyed(
        keys=groups.drop(_COUNT, _ROW),
        counts=groups.get_column(_COUNT).to_numpy(),
        by_key=groups.get_column(_ROW).explode().cast(pl.Int64).to_numpy(),
    )


class WaitingRows:
    """The rows of a step that wait for the watermark. Its operator calls `take`, `release` and `by_key`; `state` is the state."""

    def __init__(
        self, keys: Sequence[str], schema: Schema, *, time: EventTime, read: Sequence[str] = (), state: StateBackend
    ) -> None:
        """`read`: by which columns, after the time, rows are ordered before all others. `schema` is the input's."""
        self.key = tuple(keys) or (ONE,)
        self.key_types = {name: schema[name].polars for name in keys} or {ONE: pl.Int8()}
        self.names = list(schema)
        self.time = TIME if time.shift_us else time.column
        """The column of the rows that `release` gives which holds their time."""
        self.state = state.buffer(keys, time_column=self.time)
        self._keys = key_expressions(keys)
        self._shifted = None if not time.shift_us else (pl.col(time.column).cast(pl.Int64) + time.shift_us).alias(TIME)
        self._order = total_order(read, schema)
        self._watermark_us = TIME_MIN_US + 1

    def take(self, frame: pl.DataFrame, *, late: bool, keep: pl.Expr | None = None) -> Emits:
        """Let rows wait. Rows that idleness overtook are late, and so are rows without a time. For `on_batch`.

        `keep`: of the rows that are in time only these wait, and the others are dropped.
        """
        # A query takes longer than the rest, on small batches.
        rows = frame if frame.columns == self.names else frame.select(self.names)
        timed = rows if self._shifted is None else rows.with_columns(self._shifted)
        times = microseconds(timed.get_column(self.time))
        if late:
            return [late_emit(rows, frame.get_column(ROW_WATERMARK) - times)]
        if not times.null_count() and times.min() >= self._watermark_us:  # type: ignore[operator]  # an Int64 without nulls
            self.state.add(timed if keep is None else timed.filter(keep))
            return []
        in_time = (times >= self._watermark_us).fill_null(value=False)
        self.state.add(timed.filter(in_time) if keep is None else timed.filter(in_time).filter(keep))
        return [late_emit(rows.filter(~in_time), self._watermark_us - times.filter(~in_time))]

    def release(self, watermark_us: int) -> pl.DataFrame:
        """The rows below it, by time; those of one time in any order (see `by_key` and `in_order`). For `on_watermark`."""
        self._watermark_us = watermark_us
        return self.state.release(watermark_us)

    def times(self, rows: pl.DataFrame) -> Numbers:
        return microseconds(rows.get_column(self.time)).to_numpy()

    def by_key(self, rows: pl.DataFrame) -> KeyedRows:
        """Released rows (at least one), in order within each key, and where each key's rows stand.

        Only rows of one key and one time are compared by their columns: mostly that is none, or few, and comparing all
        takes several times as long as all the rest.
        """
        at = keyed(rows, self._keys)
        as_before = same_as_before(self.times(rows).take(at.by_key))
        as_before[np.cumsum(at.counts)[:-1]] = False
        if as_before.any():
            rows = self.with_ties_in_order(rows, at.by_key, as_before)
        return KeyedRows(rows=rows, keys=at.keys, counts=at.counts, by_key=at.by_key)

    def with_ties_in_order(self, rows: pl.DataFrame, places: Numbers, tied: npt.NDArray[np.bool_]) -> pl.DataFrame:
        """The rows, with those that are tied to each other in order among themselves; the others stay where they are.

        `places`: numbers of rows, those that are tied beside each other; `tied`: which of these to the one before.
        """
        both = tied.copy()
        both[:-1] |= tied[1:]
        places = places[both]
        ties = pl.DataFrame({_ROW: places, _TIE: np.cumsum(~tied)[both]})
        compared = pl.concat([rows.select(self.names)[places], ties], how="horizontal")
        ordered = compared.sort(_TIE, *self._order, maintain_order=True).get_column(_ROW).to_numpy()
        if np.array_equal(ordered, places):
            # Mostly so: what was sent twice is equal in all.
            return rows
        order = np.arange(rows.height)
        order[places] = ordered
        return rows[order]


class OrderedOperator(Operator):
    """An operator that takes rows in order of time, and emits when time passes: nothing waits for the clock."""

    _waiting: WaitingRows

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        return self._waiting.take(frame, late=late)

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - as above
        return []


def total_order(read: Sequence[str], schema: Schema) -> list[pl.Expr]:
    """By what rows of equal key and time are ordered, `read` before all others: no two that differ compare as equal."""
    order = []
    for name in dict.fromkeys([*read, *schema]):
        order.append(pl.col(name))
        if schema[name].is_float:  # Polars takes -0.0 and 0.0 for equal
            order.append((pl.lit(1.0) / pl.col(name)) > 0)
    return order


def same_as_before(values: Numbers) -> npt.NDArray[np.bool_]:
    """Which values are the same as the one before."""
    found = np.zeros(values.size, dtype=np.bool_)
    np.equal(values[1:], values[:-1], out=found[1:])
    return found
