"""From the columns that a text parser gives to the columns that the schema declares.

JSON gives numbers and booleans typed, and the rest as text; CSV gives text only. A value that does not fit its type marks its
row as bad, with a reason; it never becomes null. Null stays null. What one value becomes does not depend on others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.connectors.files.iso_time import parse_dates, parse_times
from fordstone.errors import SchemaError
from fordstone.lang.schema import DataType, Schema

TIME_UNITS_US: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""What numbers in a timestamp column may count."""
TIME_MIN_US: Final = -62_135_596_800_000_000
TIME_MAX_US: Final = 253_402_300_799_999_999
"""The years 1 to 9999: what lies beyond is a number in the wrong unit."""
SHOWN_MAX: Final = 60
"""How much of a bad value a reason shows."""

_JSON_TYPES: Final = {
    **dict.fromkeys(("string", "timestamp", "date", "decimal", "binary"), pl.String()),
    **dict.fromkeys(("tinyint", "smallint"), pl.Int32()),  # the parser knows none smaller
}
_TRUTHS: Final = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Columns in the declared types, and which rows are bad, with one reason each."""

    frame: pl.DataFrame
    bad: dict[int, str]


def json_types(schema: Schema) -> pl.Schema:
    """What to ask of the JSON parser: numbers and booleans strictly typed, the rest as text. Refuses what it cannot give."""
    types: dict[str, pl.DataType] = {}
    for name, kind in schema.items():
        innermost = kind
        while innermost.element is not None:
            innermost = innermost.element
        if kind.element is not None and innermost.name in {"decimal", "binary", "null"}:
            raise SchemaError(f"column {name!r}: JSON lines cannot hold {kind}. Use array<string>, parquet or arrow.")
        if kind.name != "null":
            types[name] = _JSON_TYPES.get(kind.name, kind.polars)
    return pl.Schema(types)


def check_flat(schema: Schema, *, where: str) -> None:
    """Refuse what a CSV file cannot hold."""
    for name, kind in schema.items():
        if kind.element is not None:
            raise SchemaError(f"{where}: column {name!r} is {kind}, and CSV has no lists. Use jsonl, parquet or arrow.")


def from_json(read: pl.DataFrame, schema: Schema, *, time_unit: str) -> Cells:
    """Finish what the JSON parser gave."""
    return _finish(read, schema, lambda kind: _JSON.get(kind.name, _as_it_is), time_unit)


def from_text(read: pl.DataFrame, schema: Schema, *, time_unit: str) -> Cells:
    """Turn columns of text (those that there are) into the declared types."""
    return _finish(read, schema, lambda kind: _CSV.get(kind.name, _as_it_is), time_unit)


_Convert = Callable[[pl.Series, DataType, str], tuple[pl.Series, pl.Series | None]]
"""A column and its type; gives the new column and which values do not fit."""


def _finish(read: pl.DataFrame, schema: Schema, pick: Callable[[DataType], _Convert], time_unit: str) -> Cells:
    columns, bad = [], dict[int, str]()
    for name, kind in schema.items():
        if name not in read.columns or kind.name == "null":
            columns.append(pl.Series(name, dtype=kind.polars).extend_constant(None, read.height))
            continue
        given = read.get_column(name)
        column, unfit = pick(kind)(given, kind, time_unit)
        columns.append(column.alias(name))
        if unfit is not None and unfit.any():
            for place in unfit.arg_true().to_list():
                bad.setdefault(place, reason(name, given[place], kind))
    return Cells(frame=pl.DataFrame(columns), bad=bad)


def reason(column: str, value: object, kind: DataType) -> str:
    """Why a value does not fit."""
    shown = repr(value)
    return f"column {column}: {shown if len(shown) <= SHOWN_MAX else shown[:SHOWN_MAX] + '...'} is not a {kind}"


def _as_it_is(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, None]:
    del kind, time_unit
    return given, None


def _lost(given: pl.Series, made: pl.Series) -> pl.Series | None:
    return made.is_null() & given.is_not_null() if made.null_count() > given.null_count() else None


def _json_float(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
    """JSON has no infinity: one that came out was a number too large for the type."""
    del kind, time_unit
    return given, given.is_infinite().fill_null(value=False)


def timestamps(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
    """ISO-8601 text, or numbers as text, counted in `time_unit`."""
    micros, fine = parse_times(given)
    made = pl.Series(micros)
    if not fine.all():
        numbers = _numbers_us(given, TIME_UNITS_US[time_unit])
        made = pl.select(pl.when(pl.Series(fine)).then(made).otherwise(numbers)).to_series()
    smallest, largest = made.min(), made.max()
    if smallest is not None and (smallest < TIME_MIN_US or largest > TIME_MAX_US):  # type: ignore[operator]
        made = made.set(~made.is_between(TIME_MIN_US, TIME_MAX_US), None)
    return made.cast(kind.polars), _lost(given, made)


def _numbers_us(given: pl.Series, unit_us: int) -> pl.Series:
    whole = given.cast(pl.Int64, strict=False)
    limit = TIME_MAX_US // unit_us
    made = whole.set(~whole.is_between(-limit, limit), None) * unit_us
    if made.null_count() > given.null_count():
        # With a fraction: take whole units and the rest apart, so that the microseconds of a large number stay.
        broken = given.cast(pl.Float64, strict=False)
        broken = broken.set(~broken.abs().is_between(0, limit), None)
        units = broken.floor()
        rest = units.cast(pl.Int64) * unit_us + ((broken - units) * unit_us).round().cast(pl.Int64)
        made = pl.select(pl.when(made.is_null()).then(rest).otherwise(made)).to_series()
    return made


def _dates(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
    del kind, time_unit
    days, fine = parse_dates(given)
    made = pl.Series(days).cast(pl.Int32)
    if not fine.all():
        made = made.set(~pl.Series(fine), None)
    return made.cast(pl.Date), _lost(given, made)


def _cast(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
    del time_unit
    made = given.cast(kind.polars, strict=False)
    return made, _lost(given, made)


def _base64(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
    del kind, time_unit
    made = given.str.decode("base64", strict=False)
    return made, _lost(given, made)


def _csv_float(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
    """`inf` may be written out; a number so large that it became infinite does not fit."""
    made, unfit = _cast(given, kind, time_unit)
    if made.is_infinite().any():
        overflown = (made.is_infinite() & ~given.str.contains("(?i)inf")).fill_null(value=False)
        unfit = overflown if unfit is None else unfit | overflown
    return made, unfit


def _csv_boolean(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
    del kind, time_unit
    made = given.str.to_lowercase().replace_strict(_TRUTHS, default=None, return_dtype=pl.Boolean)
    return made, _lost(given, made)


def _empty_is_null(convert: _Convert) -> _Convert:
    """In CSV an empty field is null even in quotes, unless the column is text."""

    def converted(given: pl.Series, kind: DataType, time_unit: str) -> tuple[pl.Series, pl.Series | None]:
        empty = given == ""
        return convert(given.set(empty, None) if empty.any() else given, kind, time_unit)

    return converted


_JSON: Final[dict[str, _Convert]] = {
    "timestamp": timestamps,
    "date": _dates,
    "decimal": _cast,
    "binary": _base64,
    "float": _json_float,
    "tinyint": _cast,
    "smallint": _cast,
}
_CSV: Final[dict[str, _Convert]] = {
    "timestamp": _empty_is_null(timestamps),
    "date": _empty_is_null(_dates),
    "decimal": _empty_is_null(_cast),
    "binary": _base64,
    "float": _empty_is_null(_csv_float),
    "double": _empty_is_null(_csv_float),
    "boolean": _empty_is_null(_csv_boolean),
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), _empty_is_null(_cast)),
}
