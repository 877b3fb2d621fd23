"""Times that Python has no object for. Columns have the years up to 262142, a Python `datetime` or `date` only 1 to 9999.

Polars raises for such a value where it becomes an object, or panics. So code that makes objects of rows leaves out the rows that
`beyond_python` names, and a text that only shows a row takes `shown_row`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from fordstone.lang.values import LEAST_US, MOST_US

_DAY_US: Final = 86_400_000_000
_PER_US: Final = {"ms": 1_000, "us": 1, "ns": 1}
"""By what bounds in microseconds are divided. Times in nanoseconds end long before the year 9999."""


def beyond_python(frame: pl.DataFrame) -> dict[int, str]:
    """The rows that have such a time, by their places, each with its first column that has one."""
    found: dict[int, str] = {}
    for column in frame.iter_columns():
        if fits_python(column):
            continue
        for place in _unfit_places(column):
            found.setdefault(place, column.name)
    return found


def shown_values(column: pl.Series) -> list[Any]:
    """The values as Python objects, for a text that shows them. If one of them has none, times are the numbers that are stored."""
    return (column if fits_python(column) else column.to_physical()).to_list()


def shown_row(frame: pl.DataFrame, place: int) -> dict[str, Any]:
    """One row, for a text that shows it."""
    return {column.name: shown_values(column[place : place + 1])[0] for column in frame.iter_columns()}


def _unfit_places(column: pl.Series) -> list[int]:
    if isinstance(column.dtype, pl.Date | pl.Datetime):
        within = column.cast(pl.Int64).is_between(*python_bounds(column.dtype))
        return (~within).fill_null(value=False).arg_true().to_list()
    return [place for place in range(len(column)) if not fits_python(column[place : place + 1])]


def fits_python(column: pl.Series) -> bool:
    """Whether Python has an object for each time in a column, also inside of arrays, maps and structs."""
    for part in parts_of(column, pl.Date, pl.Datetime):
        stored, (least, most) = part.cast(pl.Int64), python_bounds(part.dtype)
        if not all(least <= each <= most for each in (stored.min(), stored.max()) if each is not None):  # type: ignore[operator]  # integers
            return False
    return True


def python_bounds(dtype: pl.DataType) -> tuple[int, int]:
    """The least and the largest number that a column of this type stores for a time that Python has."""
    per_us = _PER_US[dtype.time_unit] if isinstance(dtype, pl.Datetime) else _DAY_US
    return LEAST_US // per_us, MOST_US // per_us


def parts_of(column: pl.Series, *kinds: type[pl.DataType]) -> Iterator[pl.Series]:
    """The column itself, or the values inside its arrays, maps and structs, where they are of these types."""
    dtype = column.dtype
    if isinstance(dtype, kinds):
        yield column
    elif not _contains(dtype, kinds):
        return
    elif isinstance(dtype, pl.Struct):
        for field in column.struct.unnest().iter_columns():
            yield from parts_of(field, *kinds)
    else:
        if isinstance(dtype, pl.Map):
            column = column.cast(pl.List(pl.Struct({"key": dtype.key, "value": dtype.value})))
        elif isinstance(dtype, pl.Array):
            column = column.arr.to_list()
        yield from parts_of(column.filter(column.list.len() > 0).explode(), *kinds)


def _contains(dtype: pl.DataType, kinds: tuple[type[pl.DataType], ...]) -> bool:
    if isinstance(dtype, pl.List | pl.Array):
        return _contains(dtype.inner, kinds)  # type: ignore[arg-type]
    if isinstance(dtype, pl.Map):
        return _contains(dtype.key, kinds) or _contains(dtype.value, kinds)  # type: ignore[arg-type]
    if isinstance(dtype, pl.Struct):
        return any(_contains(field.dtype, kinds) for field in dtype.fields)  # type: ignore[arg-type]
    return isinstance(dtype, kinds)
