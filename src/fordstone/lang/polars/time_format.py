"""Reading and writing times by a pattern (`lang.time_format`), and moving them between zones, on Polars.

A pattern that is read becomes a regular expression: the widths are those that Java reads strictly, letters of any case. What does not fit,
or is no moment, is null. All times are UTC microseconds; zones are known when the pipeline is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import polars as pl

from fordstone.lang.polars.let import let
from fordstone.lang.polars.times import DAY_US, micros, moment_of, stamp, timestamp_to_date
from fordstone.lang.time_format import Field, Maybe, Part, Text, fields

MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
DAYS_OF_WEEK: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NAMES: Final = {"y": "year", "M": "month", "d": "day", "m": "minute", "s": "second", "S": "fraction", "a": "half"}
_OFFSETS: Final = {
    1: "[+-][0-9]{2}(?:[0-9]{2})?",
    2: "[+-][0-9]{4}",
    3: "[+-][0-9]{2}:[0-9]{2}",
    4: "[+-][0-9]{4}(?:[0-9]{2})?",
    5: "[+-][0-9]{2}:[0-9]{2}(?::[0-9]{2})?",
}
_DIGITS_MAX: Final = 18
"""What fits 64 bits."""
_SHORT: Final = 3
_PIVOT: Final = 2000
_ZERO: Final = pl.lit(0, dtype=pl.Int64())


# Reading.


def read_timestamp_as(parts: tuple[Part, ...], text: pl.Expr) -> pl.Expr:
    """Text as a timestamp by a pattern; null if it does not fit."""
    letters = {_name(field): field for field in fields(parts)}

    def numbers(groups: pl.Expr) -> pl.Expr:
        def number(name: str, default: int) -> pl.Expr:
            if name not in letters:
                return pl.lit(default, dtype=pl.Int64())
            return groups.struct.field(name).cast(pl.Int64, strict=False).fill_null(default)

        fraction = _ZERO
        if "fraction" in letters:
            digits = groups.struct.field("fraction").fill_null("").str.pad_end(6, "0").str.slice(0, 6)
            fraction = digits.cast(pl.Int64, strict=False)
        zone = _offset_seconds(groups.struct.field("zone")) if "zone" in letters else _ZERO
        found = let(
            moment_of,
            year=_year(groups, letters, number),
            month=_month(groups, letters, number),
            day=number("day", 1),
            hour=_hour(groups, letters, number),
            minute=number("minute", 0),
            second=number("second", 0),
            fraction=fraction,
            zone=zone,
        )
        return pl.when(groups.struct.field("all").is_not_null()).then(found)

    # `all` is the whole text, and null where it does not fit: a field that is null may only be missing.
    found = let(numbers, groups=text.str.extract_groups(f"(?s)^(?P<all>{_regex(parts)})$"))
    return stamp(found.cast(pl.Int64, strict=False))


def read_date_as(parts: tuple[Part, ...], text: pl.Expr) -> pl.Expr:
    """Text as a date by a pattern: the day in UTC of the timestamp that it is."""
    return timestamp_to_date(read_timestamp_as(parts, text))


Number = Callable[[str, int], pl.Expr]


def _year(groups: pl.Expr, letters: Mapping[str, Field], number: Number) -> pl.Expr:
    found = number("year", 1970)
    if "year" not in letters:
        return found
    if letters["year"].count == 2:  # noqa: PLR2004 - two digits are of this century
        found = pl.when(groups.struct.field("year").is_null()).then(1970).otherwise(found + _PIVOT)
    # Java reads no -0.
    return pl.when(~groups.struct.field("year").str.contains("^-0+$").fill_null(value=False)).then(found)


def _month(groups: pl.Expr, letters: Mapping[str, Field], number: Number) -> pl.Expr:
    if "month" not in letters or letters["month"].count < _SHORT:
        return number("month", 1)
    places = {name[:_SHORT].lower(): place for place, name in enumerate(MONTHS, start=1)}
    short = groups.struct.field("month").str.to_lowercase().str.slice(0, _SHORT)
    return short.replace_strict(places, default=None, return_dtype=pl.Int64).fill_null(1)


def _hour(groups: pl.Expr, letters: Mapping[str, Field], number: Number) -> pl.Expr:
    """The hour of the day, or 24 if it is none."""
    hour = number("hour", 0)
    letter = letters["hour"].letter if "hour" in letters else None
    given = groups.struct.field("hour").is_not_null() if letter is not None else pl.lit(value=False)
    least, most = {"H": (0, 23), "k": (1, 24), "h": (1, 12), "K": (0, 11), None: (0, 23)}[letter]
    wrong = given & ~hour.is_between(least, most)
    hour = {"k": hour % 24, "h": hour % 12}.get(letter or "", hour)
    if "half" in letters:
        half = groups.struct.field("half").str.to_lowercase()
        if letter in {"H", "k"}:
            # Both say which half of the day it is.
            wrong = wrong | (given & ((half == "pm") != (hour >= 12)).fill_null(value=False))  # noqa: PLR2004 - noon
            hour = pl.when(given | (half != "pm").fill_null(value=True)).then(hour).otherwise(12)
        else:
            hour = hour + pl.when((half == "pm").fill_null(value=False)).then(12).otherwise(0)
    return pl.when(wrong).then(24).otherwise(hour)


def _offset_seconds(text: pl.Expr) -> pl.Expr:
    """Of Z, or of +hh, +hhmm, +hh:mm and the like; more than a day if it is none."""

    def counted(digits: pl.Expr, negative: pl.Expr) -> pl.Expr:
        hours, minutes, seconds = (
            digits.str.slice(at, 2).cast(pl.Int64, strict=False).fill_null(0) for at in (0, 2, 4)
        )
        size = hours * 3600 + minutes * 60 + seconds
        broken = (minutes > 59) | (seconds > 59)  # noqa: PLR2004 - the clock
        return pl.when(broken).then(DAY_US).when(negative).then(-size).otherwise(size)

    digits = text.str.replace_all("[^0-9]", "").fill_null("")
    return let(counted, digits=digits, negative=text.str.starts_with("-").fill_null(value=False))


def _regex(parts: tuple[Part, ...]) -> str:
    return "".join(map(_part_regex, parts))


def _part_regex(part: Part) -> str:
    match part:
        case Maybe():
            return f"(?:{_regex(part.parts)})?"
        case Text():
            return f"(?i:{re.escape(part.text)})" if part.text.upper() != part.text.lower() else re.escape(part.text)
        case Field():
            return f"(?P<{_name(part)}>{_field_regex(part)})"


def _name(field: Field) -> str:
    return "hour" if field.letter in "HhKk" else "zone" if field.letter in "XxZ" else _NAMES[field.letter]


def _field_regex(field: Field) -> str:
    match field.letter:
        case "y" if field.count == 2:  # noqa: PLR2004 - two digits are of this century
            return "[0-9]{2}"
        case "y" if field.count <= _SHORT:
            return f"-?[0-9]{{{field.count},{_DIGITS_MAX}}}"
        case "y":
            # More digits than letters need a sign.
            return rf"[0-9]{{{field.count}}}|-[0-9]{{{field.count},{_DIGITS_MAX}}}|\+[0-9]{{{field.count + 1},{_DIGITS_MAX}}}"
        case "M" if field.count >= _SHORT:
            names = (name if field.count > _SHORT else name[:_SHORT] for name in MONTHS)
            return f"(?i:{'|'.join(names)})"
        case "a":
            return "(?i:AM|PM)"
        case "S":
            return f"[0-9]{{1,{field.count}}}"
        case "X":
            return f"(?i:Z)|{_OFFSETS[field.count]}"
        case "x":
            return _OFFSETS[field.count]
        case "Z":
            return f"(?i:Z)|{_OFFSETS[5]}" if field.count > _SHORT else _OFFSETS[2]
        case _:
            return "[0-9]{2}" if field.count > 1 else f"[0-9]{{1,{_DIGITS_MAX}}}"


# Writing.


def write_as(parts: tuple[Part, ...], value: pl.Expr) -> pl.Expr:
    """A timestamp written by a pattern; null where Polars has no calendar any more."""
    written = [_written(part, value) for part in _flat(parts)]
    # A constant alone would be there for null, too.
    return pl.when(value.is_not_null()).then(pl.concat_str(written) if written else pl.lit(""))


def _flat(parts: tuple[Part, ...]) -> list[Field | Text]:
    return [one for part in parts for one in (_flat(part.parts) if isinstance(part, Maybe) else [part])]


def _written(part: Field | Text, value: pl.Expr) -> pl.Expr:
    if isinstance(part, Text):
        return pl.lit(part.text)
    count = part.count
    match part.letter:
        case "y":
            return let(lambda year: _written_year(year, count), year=value.dt.year().cast(pl.Int64))
        case "M" if count >= _SHORT:
            return _named(value.dt.month(), MONTHS, short=count == _SHORT)
        case "E":
            return _named(value.dt.weekday(), DAYS_OF_WEEK, short=count <= _SHORT)
        case "a":
            return pl.when(_part_of_day(value, 12 * 3600, 2) == 1).then(pl.lit("PM")).otherwise(pl.lit("AM"))
        case "S":
            return (micros(value) % 1_000_000).cast(pl.String).str.zfill(6).str.pad_end(9, "0").str.slice(0, count)
        case "X":
            return pl.lit("Z")
        case "x" | "Z":
            usual = {1: "+00", 2: "+0000", 3: "+00:00", 4: "+0000", 5: "+00:00"}
            return pl.lit(usual[count] if part.letter == "x" else "Z" if count > _SHORT else "+0000")
        case letter:
            return _number_of(letter, value).cast(pl.String).str.zfill(count)


def _number_of(letter: str, value: pl.Expr) -> pl.Expr:
    match letter:
        case "M":
            return value.dt.month()
        case "d":
            return value.dt.day()
        case "D":
            return value.dt.ordinal_day()
        case "m":
            return _part_of_day(value, 60, 60)
        case "s":
            return _part_of_day(value, 1, 60)
        case "h":
            return (_part_of_day(value, 3600, 12) + 11) % 12 + 1
        case "K":
            return _part_of_day(value, 3600, 12)
        case "k":
            return (_part_of_day(value, 3600, 24) + 23) % 24 + 1
        case _:
            return _part_of_day(value, 3600, 24)


def _part_of_day(value: pl.Expr, seconds: int, count: int) -> pl.Expr:
    return micros(value) // (seconds * 1_000_000) % count


def _written_year(year: pl.Expr, count: int) -> pl.Expr:
    if count == 2:  # noqa: PLR2004 - two digits
        return (year.abs() % 100).cast(pl.String).str.zfill(2)
    digits = year.abs().cast(pl.String).str.zfill(count)
    plus = pl.when(year >= 10**count).then(pl.lit("+")).otherwise(pl.lit("")) if count > _SHORT else pl.lit("")
    return pl.when(year < 0).then(pl.lit("-")).otherwise(plus) + digits


def _named(number: pl.Expr, names: tuple[str, ...], *, short: bool) -> pl.Expr:
    texts = {place: name[:_SHORT] if short else name for place, name in enumerate(names, start=1)}
    return number.cast(pl.Int64).replace_strict(texts, default=None, return_dtype=pl.String)
