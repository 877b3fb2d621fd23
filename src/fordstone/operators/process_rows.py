"""Rows as a keyed function sees them, and the rows that it gives: from columns to records and back.

A row at a time is slow enough; so columns are taken apart and put together whole, and a row costs one dict.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final

import numpy as np
import polars as pl

from fordstone.errors import SchemaError, TaskError
from fordstone.model.schema import Schema
from fordstone.model.stream_type import EventTime
from fordstone.operators.operator import Emit, Emits
from fordstone.operators.rowwise import frame_of
from fordstone.operators.state_values import LEAST_US, MOST_US, UTC, time_of
from fordstone.state.microseconds import microseconds

Record = dict[str, Any]

ROWS_AT_ONCE: Final = 32_768
"""So many rows are Python objects at a time."""
_DAY_US: Final = 86_400_000_000
_TIMESTAMP: Final = pl.Datetime("us", "UTC")


def records_of(rows: pl.DataFrame, step: str) -> Iterator[Record]:
    """Each row as a dict. `step`: for whom, where that cannot be."""
    for column in rows.get_columns():
        if column.dtype in (_TIMESTAMP, pl.Date):
            _refuse_other_years(column, step)
    return chain.from_iterable(_records(part) for part in rows.iter_slices(ROWS_AT_ONCE))


def _records(rows: pl.DataFrame) -> list[Record]:
    names, columns = rows.columns, [column.to_list() for column in rows.get_columns()]
    return [dict(zip(names, values)) for values in zip(*columns, strict=True)]  # noqa: B905 - as many values as names; the hot loop


def _refuse_other_years(column: pl.Series, step: str) -> None:
    """Say which column it is: Polars would only say that some date is out of range, and not always in an orderly way."""
    least_us, most_us = (LEAST_US, MOST_US) if column.dtype == _TIMESTAMP else (LEAST_US // _DAY_US, MOST_US // _DAY_US)
    numbers = column.cast(pl.Int64)
    low, high = numbers.min(), numbers.max()
    if isinstance(low, int) and isinstance(high, int) and not least_us <= low <= high <= most_us:
        raise TaskError(
            f"step {step}: column {column.name} of a row lies beyond the years 1 to 9999, which Python has no time for. "
            "Filter such rows out before, or leave the column out with select."
        )


class Given:
    """The rows that a function gave during one call of its operator."""

    def __init__(self, step: str, schema: Schema, time: EventTime | None) -> None:
        """`time`: where the rows carry event time, if they do."""
        self._step = step
        self._schema = schema
        self._time = time
        self._records: list[Record] = []
        self._marks: list[int] = []
        self._frames: list[pl.DataFrame] = []
        self._frame_marks: list[int] = []

    def take(self, made: Any, mark: int) -> None:
        """Take what the function gave: a record, or any number of them. `mark`: when, or where in the input."""
        records = self._records
        if isinstance(made, dict):
            records.append(made)
            self._marks.append(mark)
        else:
            before = len(records)
            records.extend(made)
            self._marks.extend(repeat(mark, len(records) - before))
        if len(records) >= ROWS_AT_ONCE:
            self._pack()

    def emits(self, *, floor_us: int | None) -> Emits:
        """All of it, in the order of the marks. `floor_us`: no row may be before; None: before its mark."""
        self._pack()
        if not self._frames:
            return []
        frame = pl.concat(self._frames) if len(self._frames) > 1 else self._frames[0]
        marks = np.array(self._frame_marks, dtype=np.int64)
        if self._time is not None:
            self._check_times(frame, self._time, marks if floor_us is None else np.full_like(marks, floor_us))
        if len(marks) > 1 and (marks[1:] < marks[:-1]).any():
            frame = frame[marks.argsort(kind="stable")]
        return [Emit(frame)]

    def _pack(self) -> None:
        if self._records:
            self._frames.append(self._frame(self._records))
            self._frame_marks += self._marks
            self._records, self._marks = [], []

    def _frame(self, records: Sequence[Record]) -> pl.DataFrame:
        """The records as a frame: quickly if they have exactly the columns, else with a closer look."""
        schema, width = self._schema.polars, len(self._schema)
        try:
            columns = [[record[name] for record in records] for name in schema]
            if all(len(record) == width for record in records):
                return pl.DataFrame(
                    [_series(name, values, schema[name]) for name, values in zip(schema, columns, strict=True)]
                )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, pl.exceptions.PolarsError):
            pass  # whatever it is, it is said below
        for record in records:
            if not isinstance(record, dict):
                raise TaskError(
                    f"step {self._step}: the function gave {type(record).__name__} {record!r}; records are dicts."
                )
        return frame_of(records, self._schema, self._step)

    def _check_times(self, frame: pl.DataFrame, time: EventTime, floors_us: Any) -> None:
        """Refuse rows that would be late for whoever comes next."""
        times = microseconds(frame.get_column(time.column))
        early = (times + time.shift_us < pl.Series(floors_us)).fill_null(value=True)
        if early.any():
            place = int(early.arg_max() or 0)
            found, floor = frame.row(place, named=True), time_of(int(floors_us[place]) - time.shift_us)
            raise SchemaError(
                f"step {self._step}: the function gave {found!r}, whose {time.column} is "
                f"{'missing' if found[time.column] is None else f'before {floor}'}: it would be late for the next step. Give the "
                f"time of the row or timer, or a later one; or name the column differently, and it is no event time."
            )


def _series(name: str, values: list[Any], dtype: pl.DataType) -> pl.Series:
    if dtype == _TIMESTAMP:
        # Polars asks every time for its zone; without one it is three times as quick.
        plain = [value if value is None else _without_zone(value) for value in values]
        return pl.Series(name, plain, dtype=pl.Datetime("us"), strict=True).dt.replace_time_zone("UTC")
    return pl.Series(name, values, dtype=dtype, strict=True)


def _without_zone(value: Any) -> dt.datetime:
    if value.tzinfo is UTC:
        plain: dt.datetime = value.replace(tzinfo=None)
        return plain
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise TypeError(f"{value!r} is not a datetime with a time zone")
    return value.astimezone(UTC).replace(tzinfo=None)
