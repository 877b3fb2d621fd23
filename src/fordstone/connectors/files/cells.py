"""Converts the columns that a text parser returns into the columns that the schema declares.

JSON gives numbers and booleans typed, and the rest as text; CSV gives text only. A value that does not fit its type marks its
row as bad, with a reason; it never becomes null. Null stays null. The result of a value does not depend on its neighbours.

Times are ISO-8601 text, parsed column-wise to microseconds since 1970 UTC; no format is guessed from the first value.
`YYYY-MM-DD`, then optionally `T` (or a blank) and `HH:MM`, `:SS`, a fraction of one to nine digits (cut to microseconds),
and `Z`, `+HH`, `+HHMM` or `+HH:MM`. Without an offset the text is UTC. Second 60 is the next minute's second 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.errors import SchemaError
from fordstone.lang.polars.numbers import to_decimal
from fordstone.lang.schema import DataType, Schema
from fordstone.protocol.time_unit import describe_unit, wrong_unit

Micros = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_Bytes = npt.NDArray[np.uint8]
_Small = npt.NDArray[np.int32]

DATE_LENGTH: Final = 10
MINUTE_LENGTH: Final = 16
SECOND_LENGTH: Final = 19
FRACTION_DIGITS_MAX: Final = 9
LENGTH_MAX: Final = SECOND_LENGTH + 1 + FRACTION_DIGITS_MAX + 6
_TEXTS_AT_ONCE: Final = 1 << 14
"""Number of values per step, so that they stay in the processor's cache."""
_MICROSECOND_DIGITS: Final = 6
_DAYS_BEFORE: Final = np.array([0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 0, 0, 0, 0], dtype=np.int32)
_DAYS_IN: Final = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 0, 0, 0, 0], dtype=np.int32)
_FEBRUARY: Final = 2
_MONTH_MAX: Final = 12
_DAY_HOURS: Final = 24
_HOUR_MINUTES: Final = 60
_SECOND_MAX: Final = 60
_DIGIT_MAX: Final = 9
_HOURS_ONLY: Final = 3
"""The length of an offset such as `+02`."""
_DAYS_TO_1970: Final = 719_162
"""Days from 0001-01-01 to 1970-01-01."""
DAY_US: Final = 86_400_000_000


def parse_times(texts: pl.Series) -> tuple[Micros, Flags]:
    """Microseconds of each text, and whether it is a time at all. Nulls are not."""
    return _by_length(texts, lambda length: DATE_LENGTH <= length <= LENGTH_MAX, _times_of_length)


def parse_dates(texts: pl.Series) -> tuple[Micros, Flags]:
    """Days since 1970 of each `YYYY-MM-DD`, and whether it is one. Nulls are not."""
    return _by_length(texts, lambda length: length == DATE_LENGTH, lambda table: _days(_digits(table), table))


def _by_length(
    texts: pl.Series, wanted: Callable[[int], bool], parse: Callable[[_Bytes], tuple[Micros, Flags]]
) -> tuple[Micros, Flags]:
    if len(texts) > _TEXTS_AT_ONCE:
        starts = range(0, len(texts), _TEXTS_AT_ONCE)
        parts = [_by_length(texts.slice(start, _TEXTS_AT_ONCE), wanted, parse) for start in starts]
        return np.concatenate([values for values, _ in parts]), np.concatenate([fine for _, fine in parts])
    lengths = texts.str.len_bytes().fill_null(0)
    values = np.zeros(len(texts), dtype=np.int64)
    fine = np.zeros(len(texts), dtype=np.bool_)
    shortest, longest = lengths.min(), lengths.max()
    if shortest == longest:
        return parse(_table(texts, int(longest))) if longest is not None and wanted(int(longest)) else (values, fine)  # type: ignore[arg-type]
    for length in filter(wanted, lengths.unique().to_list()):
        places = (lengths == length).arg_true()
        values[places], fine[places] = parse(_table(texts.gather(places), length))
    return values, fine


def _table(texts: pl.Series, length: int) -> _Bytes:
    """Texts of one length, one row per character: what works on a character then runs over memory in order."""
    joined = np.frombuffer(texts.str.join("").item().encode(), dtype=np.uint8)
    return np.ascontiguousarray(joined.reshape(len(texts), length).T)


def _times_of_length(table: _Bytes) -> tuple[Micros, Flags]:
    length, count = table.shape
    offsets = _offset_lengths(table)
    kinds = np.flatnonzero(np.bincount(offsets, minlength=1)).tolist()
    if len(kinds) == 1:
        return _times(table, length - kinds[0])
    values, fine = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    for kind in kinds:
        places = np.flatnonzero(offsets == kind)
        values[places], fine[places] = _times(table[:, places], length - kind)
    return values, fine


def _offset_lengths(table: _Bytes) -> npt.NDArray[np.int8]:
    """How many characters at the end are the offset from UTC."""
    found = np.zeros(table.shape[1], dtype=np.int8)
    if table.shape[0] <= MINUTE_LENGTH:
        return found

    def signed(row: _Bytes) -> Flags:
        either: Flags = (row == ord("+")) | (row == ord("-"))
        return either

    found[signed(table[-3])] = 3
    found[signed(table[-5])] = 5
    found[signed(table[-6]) & (table[-3] == ord(":"))] = 6
    found[(table[-1] == ord("Z")) | (table[-1] == ord("z"))] = 1
    return found


def _times(table: _Bytes, core: int) -> tuple[Micros, Flags]:
    """Texts of one shape: `core` characters of local time, the rest the offset."""
    count = table.shape[1]
    digits = _digits(table)
    values, fine = _days(digits, table)
    values *= DAY_US
    if core == DATE_LENGTH:
        return values, fine
    if (
        core not in {MINUTE_LENGTH, SECOND_LENGTH}
        and not SECOND_LENGTH + 1 < core <= SECOND_LENGTH + 1 + FRACTION_DIGITS_MAX
    ):
        return values, np.zeros(count, dtype=np.bool_)
    fine &= (table[10] == ord("T")) | (table[10] == ord(" ")) | (table[10] == ord("t"))
    fine &= table[13] == ord(":")
    hours, minutes = _number(digits, 11, 13, fine), _number(digits, 14, 16, fine)
    fine &= (hours < _DAY_HOURS) & (minutes < _HOUR_MINUTES)
    seconds = hours * 3600 + minutes * 60
    if core >= SECOND_LENGTH:
        second = _number(digits, 17, 19, fine)
        fine &= (table[16] == ord(":")) & (second <= _SECOND_MAX)
        seconds += second
    values += (seconds - _offset_seconds(table, digits, core, fine)) * np.int64(1_000_000)
    if core > SECOND_LENGTH:
        fine &= (table[19] == ord(".")) | (table[19] == ord(","))
        _number(digits, 20, core, fine)
        kept = min(core, 20 + _MICROSECOND_DIGITS)
        values += _number(digits, 20, kept, fine) * 10 ** (_MICROSECOND_DIGITS - (kept - 20))
    return values, fine


def _offset_seconds(table: _Bytes, digits: _Bytes, core: int, fine: Flags) -> _Small | int:
    length = table.shape[0] - core
    if length <= 1:
        return 0
    hours = _number(digits, core + 1, core + 3, fine)
    minutes = (
        _number(digits, table.shape[0] - 2, table.shape[0], fine) if length > _HOURS_ONLY else np.zeros_like(hours)
    )
    fine &= (hours < _DAY_HOURS) & (minutes < _HOUR_MINUTES)
    span = hours * 3600 + minutes * 60
    return np.where(table[core] == ord("-"), -span, span)


def _digits(table: _Bytes) -> _Bytes:
    return table - np.uint8(ord("0"))


def _number(digits: _Bytes, start: int, stop: int, fine: Flags) -> _Small:
    """The number that at most nine digits write; clears `fine` where one is no digit."""
    fine &= digits[start:stop].max(axis=0) <= _DIGIT_MAX
    total: _Small = digits[start].astype(np.int32)
    for place in range(start + 1, stop):
        total *= 10
        total += digits[place]
    return total


def _days(digits: _Bytes, table: _Bytes) -> tuple[Micros, Flags]:
    """Days since 1970 of the first ten characters."""
    count = table.shape[1]
    if count > 1 and (table[:10] == table[:10, :1]).all():  # rows that follow one another are mostly of one day
        days, fine = _days(digits[:, :1], table[:, :1])
        return np.repeat(days, count), np.repeat(fine, count)
    fine = (table[4] == ord("-")) & (table[7] == ord("-"))
    year, month, day = _number(digits, 0, 4, fine), _number(digits, 5, 7, fine), _number(digits, 8, 10, fine)
    fine &= (year >= 1) & (month >= 1) & (month <= _MONTH_MAX) & (day >= 1)
    month = np.where(fine, month, 0)
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    fine &= day <= _DAYS_IN[month] + (leap & (month == _FEBRUARY))
    before = year - 1
    days = (
        before * 365 + before // 4 - before // 100 + before // 400 + _DAYS_BEFORE[month] + (leap & (month > _FEBRUARY))
    )
    return (days + day - 1 - _DAYS_TO_1970).astype(np.int64), fine


NUMBER_DIGITS_MAX: Final = 20
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
    "float": pl.Float64(),  # so that a number too large for it is not taken for an infinity
}
WORDS: Final = {"NaN": "NaN", "Infinity": "inf", "+Infinity": "inf", "-Infinity": "-inf", "+INF": "inf", "-INF": "-inf"}
"""What may stand for a number in JSON, as in Spark, and how Polars spells it."""
_TRUTHS: Final = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Columns in the declared types, and which rows are bad, with one reason each."""

    frame: pl.DataFrame
    bad: dict[int, str]


def json_types(schema: Schema, *, words: bool = False) -> pl.Schema:
    """What to ask of the JSON parser: numbers and booleans strictly typed, the rest as text. Refuses what it cannot give.

    With `words`, floats as text too: `from_words` makes numbers of them.
    """
    types: dict[str, pl.DataType] = {}
    for name, kind in schema.items():
        for part in kind.within():
            if kind.is_nested and part.name in {"binary", "null"}:
                raise SchemaError(
                    f"column {name!r}: JSON lines cannot hold {kind}. Use string in it, parquet or arrow."
                )
            if part.name == "map" and part.field("key").name != "string":
                raise SchemaError(
                    f"column {name!r}: names in JSON are text, so JSON lines cannot hold {part}. Use map<string, ...>, parquet or arrow."
                )
        if kind.name != "null":
            types[name] = _json_type(kind, words=words)
    return pl.Schema(types)


def _typed(kind: DataType) -> pl.DataType:
    return _json_type(kind, words=False)


def _json_type(kind: DataType, *, words: bool) -> pl.DataType:
    if kind.element is not None:
        return pl.List(_json_type(kind.element, words=words))
    if kind.name == "map":
        return pl.Map(pl.String(), _json_type(kind.field("value"), words=words))
    if kind.name == "struct":
        return pl.Struct({name: _json_type(inner, words=words) for name, inner in kind.fields})
    return pl.String() if words and kind.is_float else _JSON_TYPES.get(kind.name, kind.polars)


def check_flat(schema: Schema, *, where: str, instead: str) -> None:
    """Refuse what a CSV file cannot hold. `instead`: what to write."""
    for name, kind in schema.items():
        if kind.is_nested:
            raise SchemaError(
                f"{where}: column {name!r} is {kind}, and a cell of CSV is one value. {instead} Or use jsonl, parquet or arrow."
            )


def from_words(read: pl.DataFrame, schema: Schema) -> pl.DataFrame | None:
    """Turn what was read with `words` into what the parser gives without; None if some value is neither a number nor a word."""
    made = [_converted(read.get_column(name), schema[name], _WORDS, _typed) for name in read.columns]
    lost = any(lost_values(read.get_column(column.name), column) is not None for column in made)
    return None if lost else pl.DataFrame(made)


def from_json(read: pl.DataFrame, schema: Schema, *, time_unit: str) -> Cells:
    """Finish what the JSON parser gave."""
    return _finish(read, schema, _JSON, time_unit)


def from_text(read: pl.DataFrame, schema: Schema, *, time_unit: str) -> Cells:
    """Turn columns of text (those that there are) into the declared types. An empty field is null, unless the column is text."""
    blank = {
        name: pl.col(name).replace("", None)
        for name, kind in schema.items()
        if name in read.columns and kind.name not in {"string", "binary"}
    }
    return _finish(read.with_columns(**blank), schema, _CSV, time_unit)


_Convert = Callable[[pl.Series, DataType], pl.Series]
"""Gives a column its declared type. A value that does not fit becomes null."""


def _finish(read: pl.DataFrame, schema: Schema, converters: Mapping[str, _Convert], time_unit: str) -> Cells:
    columns, bad = [], dict[int, str]()
    converters = {**converters, "timestamp": lambda given, kind: _timestamps(given, kind, time_unit)}
    for name, kind in schema.items():
        if name not in read.columns or kind.name == "null":
            columns.append(pl.Series(name, dtype=kind.polars).extend_constant(None, read.height))
            continue
        given = read.get_column(name)
        made = _converted(given, kind, converters, lambda part: part.polars)
        columns.append(made.alias(name))
        lost = lost_values(given, made)
        for place in () if lost is None else lost.arg_true().to_list():
            hint = _unit_hint(given[place], time_unit) if kind.name == "timestamp" else ""
            bad.setdefault(place, reason(name, given[place], kind) + hint)
    return Cells(frame=pl.DataFrame(columns), bad=bad)


def _converted(
    given: pl.Series, kind: DataType, converters: Mapping[str, _Convert], becomes: Callable[[DataType], pl.DataType]
) -> pl.Series:
    """A column in the type that its declared one becomes, and the parts of its values likewise."""
    if kind.name in converters:
        return converters[kind.name](given, kind)
    if not any(part.name in converters for part in kind.within()):
        return given

    def part(inner: DataType, value: pl.Expr) -> pl.Expr:
        return value.map_batches(
            lambda values: _converted(values, inner, converters, becomes),
            return_dtype=becomes(inner),
            is_elementwise=True,
        )

    def fields(value: pl.Expr) -> pl.Expr:
        return pl.struct(part(inner, value.struct.field(name)).alias(name) for name, inner in kind.fields)

    column = pl.col(given.name)
    if kind.element is not None:
        made = column.list.eval(part(kind.element, pl.element()))
    elif kind.name == "map":
        made = column.map.entries().list.eval(fields(pl.element())).list.to_map()
    else:
        made = pl.when(column.is_not_null()).then(fields(column))
    return given.to_frame().select(made.alias(given.name)).to_series()


def lost_values(given: pl.Series, made: pl.Series) -> pl.Series | None:
    """In which rows a value, or a part of one, became null in the conversion; None if in none."""
    lost = made.is_null() & given.is_not_null() if made.null_count() > given.null_count() else None
    if isinstance(made.dtype, pl.Struct) and isinstance(given.dtype, pl.Struct):
        there = {field.name for field in given.dtype.fields}
        shared = [field.name for field in made.dtype.fields if field.name in there]
        inner = [lost_values(given.struct.field(name), made.struct.field(name)) for name in shared]
        return reduce(_either, inner, lost)
    if isinstance(made.dtype, pl.Map) and isinstance(given.dtype, pl.Map):
        return _either(lost, _lost_elements(_map_values(given), _map_values(made)))
    if isinstance(made.dtype, pl.List) and isinstance(given.dtype, pl.List):
        return _either(lost, _lost_elements(given, made))
    return lost


def _map_values(maps: pl.Series) -> pl.Series:
    return maps.to_frame().select(pl.first().map.values()).to_series()


def _lost_elements(given: pl.Series, made: pl.Series) -> pl.Series | None:
    lengths = given.list.len().fill_null(0)
    lost = lost_values(given.filter(lengths > 0).explode(), made.filter(lengths > 0).explode())
    if lost is None:
        return None
    found = np.zeros(len(given), dtype=np.bool_)
    found[np.repeat(np.arange(len(given)), lengths.to_numpy())[lost.to_numpy()]] = True
    return pl.Series(found)


def _either(one: pl.Series | None, other: pl.Series | None) -> pl.Series | None:
    if one is None or other is None:
        return other if one is None else one
    return one | other


def reason(column: str, value: object, kind: DataType) -> str:
    """Why a value does not fit."""
    shown = repr(value)
    return f"column {column}: {shown if len(shown) <= SHOWN_MAX else shown[:SHOWN_MAX] + '...'} is not a {kind}"


def _unit_hint(value: object, time_unit: str) -> str:
    """What to do about a number that is too large for a timestamp because its unit is a shorter one."""
    text = str(value)
    count = int(text) if text.isdecimal() and len(text) < NUMBER_DIGITS_MAX else None
    found = None if count is None else wrong_unit(count * TIME_UNITS_US[time_unit])
    return "" if count is None or found is None else f": {describe_unit(count, time_unit, found)}"


def _json_float(given: pl.Series, kind: DataType) -> pl.Series:
    """A number that becomes infinite is too large for the type."""
    made = given.cast(kind.polars)
    return made.set(made.is_infinite() & ~given.is_infinite(), None)


def _word(given: pl.Series, kind: DataType) -> pl.Series:
    del kind
    return given.replace(WORDS).cast(pl.Float64, strict=False)


def _timestamps(given: pl.Series, kind: DataType, time_unit: str) -> pl.Series:
    """ISO-8601 text, or numbers as text, counted in `time_unit`."""
    micros, fine = parse_times(given)
    made = pl.Series(micros)
    if not fine.all():
        numbers = _numbers_us(given, TIME_UNITS_US[time_unit])
        made = pl.select(pl.when(pl.Series(fine)).then(made).otherwise(numbers)).to_series()
    smallest, largest = made.min(), made.max()
    if smallest is not None and (smallest < TIME_MIN_US or largest > TIME_MAX_US):  # type: ignore[operator]
        made = made.set(~made.is_between(TIME_MIN_US, TIME_MAX_US), None)
    return made.cast(kind.polars)


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


def _dates(given: pl.Series, kind: DataType) -> pl.Series:
    days, fine = parse_dates(given)
    return pl.Series(days).cast(pl.Int32).set(~pl.Series(fine), None).cast(kind.polars)


def _cast(given: pl.Series, kind: DataType) -> pl.Series:
    return given.cast(kind.polars, strict=False)


def _decimal(given: pl.Series, kind: DataType) -> pl.Series:
    """Digits after the point that do not fit are rounded half up, as Spark's readers do; a number that is too large does not fit."""
    exact = f"^[+-]?[0-9]{{1,{kind.precision - kind.scale}}}(?:\\.[0-9]{{0,{kind.scale}}})?$"
    if kind.precision > kind.scale and given.str.contains(exact).all():
        return _cast(given, kind)
    return given.to_frame().select(to_decimal(pl.first(), kind).alias(given.name)).to_series()


def _base64(given: pl.Series, kind: DataType) -> pl.Series:
    del kind
    return given.str.decode("base64", strict=False)


def _csv_float(given: pl.Series, kind: DataType) -> pl.Series:
    """`inf` may be written out; a number so large that it became infinite does not fit."""
    made = _cast(given, kind)
    if made.is_infinite().any():
        made = made.set(made.is_infinite() & ~given.str.contains("(?i)inf"), None)
    return made


def _csv_boolean(given: pl.Series, kind: DataType) -> pl.Series:
    return given.str.to_lowercase().replace_strict(_TRUTHS, default=None, return_dtype=kind.polars)


_JSON: Final[dict[str, _Convert]] = {
    "date": _dates,
    "decimal": _decimal,
    "binary": _base64,
    "float": _json_float,
    "tinyint": _cast,
    "smallint": _cast,
}
_WORDS: Final[dict[str, _Convert]] = {"float": _word, "double": _word}
_CSV: Final[dict[str, _Convert]] = {
    "date": _dates,
    "binary": _base64,
    "boolean": _csv_boolean,
    **dict.fromkeys(("float", "double"), _csv_float),
    "decimal": _decimal,
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), _cast),
}
