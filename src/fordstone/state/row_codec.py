"""Rows as bytes and back, for stores that keep keys and values as bytes.

Columns of fixed width are laid side by side by NumPy, a row after the other; what has no fixed width follows as it is, if it is one column
of text or bytes, and else as MessagePack. So most rows cost no Python code of their own but for one object each.

Invariants: `decode` returns what `encode` took, nulls and types included; with `as_key`, rows are equal exactly if their bytes are. The
bytes are for working files only: they may change with any version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

Matrix = npt.NDArray[np.uint8]
VERSION: Final = 1
"""Of the form of the bytes."""
_NUMBERS: Final[dict[type[pl.DataType], pl.DataType]] = {
    pl.Date: pl.Int32(),
    pl.Datetime: pl.Int64(),
    pl.Duration: pl.Int64(),
    pl.Time: pl.Int64(),
}
"""What times are stored as."""
_WIDE: Final = (pl.Decimal, pl.Int128, pl.UInt128)
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder().decode


class RowCodec:
    """The bytes of rows with these columns."""

    def __init__(self, schema: Mapping[str, pl.DataType], *, as_key: bool = False) -> None:
        """`as_key`: -0.0 is stored as 0.0, and each NaN as the same one."""
        self._schema = dict(schema)
        self._as_key = as_key
        self._fixed: list[_Fixed] = []
        self._loose: dict[str, pl.DataType] = {}
        """Columns without a fixed width, and what they are cast to."""
        at = -(-len(self._schema) // 8)
        for bit, (name, dtype) in enumerate(self._schema.items()):
            stored = _NUMBERS.get(type(dtype), dtype)
            if _is_fixed(stored):
                numbers = pl.Series([], dtype=stored).to_numpy().dtype
                self._fixed.append(_Fixed(name, bit, dtype, stored, numbers, at))
                at += numbers.itemsize
            else:
                self._loose[name] = _plain(dtype)
        self._width = at
        self._bare = next(iter(self._loose)) if list(self._loose.values()) in ([pl.String()], [pl.Binary()]) else None
        """The only column without a fixed width, if it is stored as it is."""

    def encode(self, frame: pl.DataFrame) -> list[bytes]:
        """Return the bytes of each row. The frame may have other columns."""
        height = frame.height
        if not height or not self._schema:
            return [b""] * height
        matrix = np.zeros((height, self._width), dtype=np.uint8)
        for bit, name in enumerate(self._schema):
            column = frame.get_column(name)
            if column.null_count():
                matrix[:, bit // 8] |= column.is_null().to_numpy().astype(np.uint8) << (bit % 8)
        for fixed in self._fixed:
            values = fixed.numbers_of(frame.get_column(fixed.name), as_key=self._as_key)
            matrix[:, fixed.at : fixed.end] = values.view(np.uint8).reshape(height, -1)
        heads: list[bytes] = matrix.view(f"V{self._width}").ravel().tolist()
        if not self._loose:
            return heads
        return [head + tail for head, tail in zip(heads, self._tails(frame), strict=True)]

    def _tails(self, frame: pl.DataFrame) -> list[bytes]:
        if self._bare is not None:
            return frame.get_column(self._bare).cast(pl.Binary()).fill_null(b"").to_list()
        columns = [frame.get_column(name).cast(plain) for name, plain in self._loose.items()]
        if self._as_key:
            columns = [_one_form(column) for column in columns]
        return [_pack(row) for row in zip(*(column.to_list() for column in columns), strict=True)]

    def decode(self, rows: Sequence[bytes]) -> pl.DataFrame:
        """Return the rows that `encode` took. Without columns, a frame without rows."""
        if not rows or not self._schema:
            return pl.DataFrame(schema=self._schema)
        width = self._width
        heads = b"".join([row[:width] for row in rows] if self._loose else rows)
        matrix = np.frombuffer(heads, dtype=np.uint8).reshape(len(rows), width)
        found = {fixed.name: fixed.series_of(matrix) for fixed in self._fixed}
        if self._bare is not None:
            tails = pl.Series(self._bare, [row[width:] for row in rows], dtype=pl.Binary())
            found[self._bare] = tails.cast(self._loose[self._bare])
        elif self._loose:
            columns = zip(*(_unpack(row[width:]) for row in rows), strict=True)
            for (name, plain), values in zip(self._loose.items(), columns, strict=True):
                found[name] = pl.Series(name, values, dtype=plain).cast(self._schema[name])
        nulls: Matrix = np.unpackbits(matrix[:, : -(-len(self._schema) // 8)], axis=1, bitorder="little")
        has_nulls = np.flatnonzero(nulls.any(axis=0)).tolist()
        return pl.DataFrame(
            [
                _with_nulls(found[name], nulls[:, bit]) if bit in has_nulls else found[name]
                for bit, name in enumerate(self._schema)
            ]
        )


class _Fixed:
    """A column of fixed width."""

    __slots__ = ("at", "bit", "dtype", "end", "name", "numbers", "stored")

    def __init__(
        self, name: str, bit: int, dtype: pl.DataType, stored: pl.DataType, numbers: np.dtype[Any], at: int
    ) -> None:
        self.name, self.bit, self.dtype, self.stored, self.numbers = name, bit, dtype, stored, numbers
        self.at, self.end = at, at + numbers.itemsize

    def numbers_of(self, column: pl.Series, *, as_key: bool) -> npt.NDArray[Any]:
        """The values as numbers, zero for null."""
        column = column.cast(self.stored)
        if column.null_count():
            column = column.fill_null(value=False if self.stored == pl.Boolean else 0)
        values = column.to_numpy()
        if as_key and values.dtype.kind == "f":
            # (Polars would optimise `x + 0.0` away.)
            values = np.add(values, 0.0)
            values[np.isnan(values)] = np.nan
        return np.ascontiguousarray(values)

    def series_of(self, matrix: Matrix) -> pl.Series:
        values = np.ascontiguousarray(matrix[:, self.at : self.end]).view(self.numbers).ravel()
        series = pl.Series(self.name, values)
        return series if series.dtype == self.dtype else series.cast(self.dtype)


def _is_fixed(dtype: pl.DataType) -> bool:
    return (dtype.is_integer() or dtype.is_float() or dtype == pl.Boolean) and not isinstance(dtype, _WIDE)


def _plain(dtype: pl.DataType) -> pl.DataType:
    """The type to cast to so that values are numbers, text, bytes, and lists and records of those."""
    if isinstance(dtype, pl.List | pl.Array):
        return pl.List(_plain(_instance(dtype.inner)))
    if isinstance(dtype, pl.Struct):
        return pl.Struct({field.name: _plain(_instance(field.dtype)) for field in dtype.fields})
    if isinstance(dtype, (*_WIDE, pl.Categorical, pl.Enum)):
        return pl.String()
    return _NUMBERS.get(type(dtype), dtype)


def _instance(dtype: Any) -> pl.DataType:
    found: pl.DataType = dtype() if isinstance(dtype, type) else dtype
    return found


def _one_form(column: pl.Series) -> pl.Series:
    """With one zero and one NaN in nested floats, too."""
    if not isinstance(column.dtype, pl.List | pl.Struct):
        return column
    values = column.to_list()
    return pl.Series(column.name, [_normal(value) for value in values], dtype=column.dtype)


def _normal(value: Any) -> Any:
    if isinstance(value, float):
        return float("nan") if value != value else value + 0.0  # noqa: PLR0124 - only NaN differs from itself
    if isinstance(value, list):
        return [_normal(one) for one in value]
    return {name: _normal(one) for name, one in value.items()} if isinstance(value, dict) else value


def _with_nulls(series: pl.Series, nulls: Matrix) -> pl.Series:
    return series.zip_with(pl.Series(nulls == 0), pl.Series(series.name, [None], dtype=series.dtype))
