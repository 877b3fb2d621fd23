"""Columns that are read and written by slot: the storage under `key_index.KeyIndex` and `table.Table`.

Fixed-width types lie in growing NumPy arrays and are written in place. The rest (text, bytes, decimals, lists) lie in a
log of immutable Polars chunks: a slot points at the row that was written last, and the log is cleared of what no slot
points at before it is more than half waste.

Leaves to others: which slot belongs to which key, and which slots are in use.

Invariants: what `frozen` captured does not change afterwards; a slot that was never written holds null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

Slots = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_Scalar = TypeVar("_Scalar", bound=np.generic)

LOG_WASTE_ROWS_MIN: Final = 65536
"""A log is not cleared for fewer wasted rows than this."""
LOG_WASTE_BYTES_MIN: Final = 16 * 1024 * 1024
"""Nor for fewer wasted bytes; but for these even if they are few rows: a list may be long."""

_PHYSICAL: Final[dict[type[pl.DataType], pl.DataType]] = {
    pl.Date: pl.Int32(),
    pl.Datetime: pl.Int64(),
    pl.Duration: pl.Int64(),
    pl.Time: pl.Int64(),
}
"""What values are stored as in an array, where that is not their own type."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of one batch in the form in which their column takes them: an array, or the series itself."""

    series: pl.Series
    values: npt.NDArray[np.generic] | None = None
    valid: Mask | None = None

    def take(self, rows: Slots) -> Cells:
        if self.values is None:
            return Cells(self.series.gather(rows))
        return Cells(self.series, self.values.take(rows), None if self.valid is None else self.valid.take(rows))


class Column(ABC):
    """One column by slot."""

    def __init__(self, name: str, dtype: pl.DataType) -> None:
        self.name = name
        self.dtype = dtype

    @abstractmethod
    def cells(self, series: pl.Series) -> Cells:
        """Bring a series of exactly this type into the form that `put` and `equal` take."""

    @abstractmethod
    def grow(self, capacity: int) -> None:
        """Make room for this many slots."""

    @abstractmethod
    def put(self, slots: Slots, cells: Cells) -> None:
        """Write one value to each slot."""

    def forget(self, slots: Slots) -> None:  # noqa: B027 - in an array there is nothing to be gained
        """These slots are not read before they are written again."""

    @abstractmethod
    def get(self, slots: Slots, *, found: Mask | None = None) -> pl.Series:
        """The value of each slot, null where `found` says no."""

    @abstractmethod
    def equal(self, slots: Slots, cells: Cells) -> Mask:
        """Whether each slot holds that value. Null equals null, NaN equals NaN, 0.0 equals -0.0."""

    @abstractmethod
    def frozen(self, slots: Slots, *, dense: bool) -> Callable[[], pl.Series]:
        """The values of these slots as they are now, to be made later on any thread. `dense`: the slots are a good part."""

    @abstractmethod
    def size_bytes(self) -> int:
        """About how much memory this takes."""


def column_of(name: str, dtype: pl.DataType) -> Column:
    """An empty column of the storage that suits its type."""
    physical = _PHYSICAL.get(type(dtype), dtype)
    fixed = physical.is_integer() or physical.is_float() or physical == pl.Boolean
    return ArrayColumn(name, dtype, physical) if fixed and physical != pl.Int128 else LogColumn(name, dtype)


def _series(name: str, dtype: pl.DataType, values: npt.NDArray[np.generic], valid: Mask | None) -> pl.Series:
    series = pl.Series(name, values)
    if series.dtype != dtype:
        series = series.cast(dtype)
    if valid is None or valid.all():
        return series
    return series.zip_with(pl.Series(valid), pl.Series(name, [None], dtype=dtype))


class ArrayColumn(Column):
    """Fixed-width values in an array, with a mask of the valid ones once there is a null."""

    def __init__(self, name: str, dtype: pl.DataType, physical: pl.DataType) -> None:
        super().__init__(name, dtype)
        self._physical = physical
        self._values: npt.NDArray[np.generic] = pl.Series([], dtype=physical).to_numpy()
        self._valid: Mask | None = None

    def cells(self, series: pl.Series) -> Cells:
        # A cast, because `to_physical` takes ten times as long to get going.
        physical = series.cast(self._physical)
        if not series.null_count():
            return Cells(series, physical.to_numpy())
        filled = physical.fill_null(value=False if series.dtype == pl.Boolean else 0)
        return Cells(series, filled.to_numpy(), series.is_not_null().to_numpy())

    def grow(self, capacity: int) -> None:
        self._values = _grown(self._values, capacity)
        if self._valid is not None:
            self._valid = _grown(self._valid, capacity)

    def put(self, slots: Slots, cells: Cells) -> None:
        if cells.values is None:
            raise TypeError(f"column {self.name!r}: cells of another kind of column")
        self._values[slots] = cells.values
        if self._valid is None and cells.valid is not None:
            self._valid = np.ones(self._values.size, dtype=np.bool_)
        if self._valid is not None:
            self._valid[slots] = True if cells.valid is None else cells.valid

    def get(self, slots: Slots, *, found: Mask | None = None) -> pl.Series:
        valid = None if self._valid is None else self._valid.take(slots)
        if found is not None:
            valid = found if valid is None else valid & found
        return _series(self.name, self.dtype, self._values.take(slots), valid)

    def equal(self, slots: Slots, cells: Cells) -> Mask:
        if cells.values is None:
            raise TypeError(f"column {self.name!r}: cells of another kind of column")
        held = self._values.take(slots)
        same: Mask = held == cells.values
        if held.dtype.kind == "f":
            same |= np.isnan(held) & np.isnan(cells.values)
        if self._valid is not None or cells.valid is not None:
            valid = True if self._valid is None else self._valid.take(slots)
            same &= valid == (True if cells.valid is None else cells.valid)
        return same

    def frozen(self, slots: Slots, *, dense: bool) -> Callable[[], pl.Series]:
        """Gather now; or, when most is wanted, copy the array now, which is faster, and gather later."""
        name, dtype = self.name, self.dtype
        if not dense:
            values = self._values.take(slots)
            valid = None if self._valid is None else self._valid.take(slots)
            return lambda: _series(name, dtype, values, valid)
        end = int(slots.max(initial=-1)) + 1
        whole = self._values[:end].copy()
        whole_valid = None if self._valid is None else self._valid[:end].copy()
        return lambda: _series(name, dtype, whole.take(slots), None if whole_valid is None else whole_valid.take(slots))

    def size_bytes(self) -> int:
        return self._values.nbytes + (0 if self._valid is None else self._valid.nbytes)


class LogColumn(Column):
    """Values of any type in a log of chunks, each over twice as long as the next; a slot holds the number of its row."""

    def __init__(self, name: str, dtype: pl.DataType) -> None:
        super().__init__(name, dtype)
        self._rows: Slots = np.full(0, -1, dtype=np.int64)
        self._chunks: list[pl.Series] = []
        self._end = 0
        self._bytes = 0
        self._kept_bytes = 0
        """Of `_bytes`, what the last clearing left."""

    def cells(self, series: pl.Series) -> Cells:
        return Cells(series)

    def grow(self, capacity: int) -> None:
        self._rows = _grown(self._rows, capacity, fill=-1)

    def put(self, slots: Slots, cells: Cells) -> None:
        count = slots.size
        if not count:
            return
        self._rows[slots] = np.arange(self._end, self._end + count)
        self._end += count
        chunk = cells.series.rename(self.name)
        self._bytes += int(chunk.estimated_size())
        while self._chunks and len(self._chunks[-1]) < 2 * len(chunk):
            chunk = pl.concat([self._chunks.pop(), chunk], rechunk=True)
        self._chunks.append(chunk)
        if (
            self._end > 2 * self._rows.size + LOG_WASTE_ROWS_MIN
            or self._bytes > 2 * self._kept_bytes + LOG_WASTE_BYTES_MIN
        ):
            self._clear_waste()

    def forget(self, slots: Slots) -> None:
        """What these point at goes with the next clearing."""
        self._rows[slots] = -1

    def _clear_waste(self) -> None:
        used = np.flatnonzero(self._rows >= 0)
        self._chunks = [self._log().gather(self._rows[used])]
        self._rows[used] = np.arange(used.size)
        self._end = used.size
        self._bytes = self._kept_bytes = int(self._chunks[0].estimated_size())

    def _log(self) -> pl.Series:
        if len(self._chunks) == 1:
            return self._chunks[0]
        return pl.concat(self._chunks, rechunk=False) if self._chunks else pl.Series(self.name, [], dtype=self.dtype)

    def get(self, slots: Slots, *, found: Mask | None = None) -> pl.Series:
        rows = self._rows.take(slots)
        return _gathered(self._log(), rows if found is None else np.where(found, rows, -1))

    def equal(self, slots: Slots, cells: Cells) -> Mask:
        return self.get(slots).eq_missing(cells.series).to_numpy()

    def frozen(self, slots: Slots, *, dense: bool) -> Callable[[], pl.Series]:  # noqa: ARG002 - chunks do not change
        log, rows = self._log(), self._rows.take(slots)
        return lambda: _gathered(log, rows)

    def size_bytes(self) -> int:
        return self._rows.nbytes + sum(int(chunk.estimated_size()) for chunk in self._chunks)


def _gathered(log: pl.Series, rows: Slots) -> pl.Series:
    known = rows >= 0
    if known.all():
        return log.gather(rows)
    numbers = pl.Series(rows).zip_with(pl.Series(known), pl.Series([None], dtype=pl.Int64))
    return (
        log.to_frame().select(pl.first().gather(numbers)).to_series()
        if len(log)
        else log.extend_constant(None, rows.size)
    )


def _grown(values: npt.NDArray[_Scalar], capacity: int, *, fill: int = 0) -> npt.NDArray[_Scalar]:
    grown = np.full(capacity, fill, dtype=values.dtype) if fill else np.zeros(capacity, dtype=values.dtype)
    grown[: values.size] = values
    return grown
