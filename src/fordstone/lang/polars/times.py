"""Dates and timestamps on Polars: parts, truncation, intervals, reading and writing text.

Polars stops with a panic when it truncates, shifts or formats a time beyond the year 262142. So calendar arithmetic is
done on integers here; only parts (which are null out there) come from Polars. All times are UTC microseconds.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from fordstone.lang.constants import DATE_PATTERN, TIMESTAMP_PATTERN
from fordstone.lang.polars.let import let
from fordstone.lang.polars.numbers import EDGE_SPACE
from fordstone.lang.schema import DataType


def microseconds(times: pl.Series) -> pl.Series:
    """A time column (Datetime in microseconds, or whole microseconds already) as Int64."""
    # `to_physical` of a Series goes through the query engine: twenty times as slow as this cast, which copies nothing.
    return times if times.dtype == pl.Int64 else times.cast(pl.Int64)


DAY_US: Final = 86_400_000_000
_STAMP: Final = pl.Datetime("us", "UTC")
_FIXED_US: Final = {
    "day": DAY_US, "hour": 3_600_000_000, "minute": 60_000_000, "second": 1_000_000, "millisecond": 1_000,
    "microsecond": 1,
}  # fmt: skip
_MONTHS: Final = {"month": 1, "quarter": 3, "year": 12}
WRITABLE_DAYS: Final = 95_000_000
"""Maximum distance from 1970, in days, at which Polars can format a date without a panic."""
_USUAL: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?Z?$"
_ZONE_SECONDS_MAX: Final = 18 * 3600


def micros(value: pl.Expr) -> pl.Expr:
    """A timestamp as microseconds."""
    return value.cast(pl.Int64)


def days(value: pl.Expr) -> pl.Expr:
    """A date as days."""
    return value.cast(pl.Int32).cast(pl.Int64)


def stamp(value: pl.Expr) -> pl.Expr:
    """Microseconds as a timestamp."""
    return value.cast(_STAMP)


def counted(value: pl.Expr, unit_us: int) -> pl.Expr:
    """A number of units as microseconds; null if they do not fit."""
    return (value.cast(pl.Int128) * unit_us).cast(pl.Int64, strict=False)


def date(value: pl.Expr) -> pl.Expr:
    """Days as a date."""
    return value.cast(pl.Int32, strict=False).cast(pl.Date)


def date_to_timestamp(value: pl.Expr) -> pl.Expr:
    """Midnight of a date."""
    return stamp(days(value) * DAY_US)


def timestamp_to_date(value: pl.Expr) -> pl.Expr:
    """The day of a timestamp."""
    return date(micros(value) // DAY_US)


def days_of(year: pl.Expr, month: pl.Expr, day: pl.Expr) -> pl.Expr:
    """Days since 1970 of a date of the Gregorian calendar; years begin in March so that February comes last."""
    shifted = year - pl.when(month <= 2).then(1).otherwise(0)  # noqa: PLR2004 - January and February
    era = shifted // 400
    year_of_era = shifted - era * 400
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year
    return era * 146_097 + day_of_era - 719_468


def days_in_month(year: pl.Expr, month: pl.Expr) -> pl.Expr:
    """The length of a month."""
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    return (
        pl.when(month == 2).then(pl.when(leap).then(29).otherwise(28))  # noqa: PLR2004 - February
        .when(month.is_in([4, 6, 9, 11])).then(30)
        .otherwise(31)
    ).cast(pl.Int64)  # fmt: skip


def _months(value: pl.Expr) -> pl.Expr:
    """Months since the year 0."""
    return value.dt.year().cast(pl.Int64) * 12 + value.dt.month().cast(pl.Int64) - 1


def truncate(unit: str, value: pl.Expr) -> pl.Expr:
    """Cut a timestamp down to a unit."""
    if unit in _FIXED_US:
        return stamp(micros(value) // _FIXED_US[unit] * _FIXED_US[unit])
    if unit == "week":
        # 1970-01-01 was a Thursday.
        return stamp(let(lambda day: (day - (day + 3) % 7) * DAY_US, day=micros(value) // DAY_US))
    months = _months(value) // _MONTHS[unit] * _MONTHS[unit]
    first = pl.lit(1, dtype=pl.Int64())
    return stamp(let(lambda months: days_of(months // 12, months % 12 + 1, first), months=months) * DAY_US)


def shift_months(value: pl.Expr, count: pl.Expr, kind: DataType) -> pl.Expr:
    """A date or timestamp some months on; the day is held at the end of the month."""

    def held(year: pl.Expr, month: pl.Expr, day: pl.Expr) -> pl.Expr:
        # min_horizontal ignores nulls; the other parts are null wherever the value is.
        return days_of(year, month, pl.min_horizontal(day, days_in_month(year, month)))

    def moved(months: pl.Expr, day: pl.Expr) -> pl.Expr:
        return let(held, year=months // 12, month=months % 12 + 1, day=day)

    found = let(moved, months=_months(value) + count, day=value.dt.day().cast(pl.Int64))
    return date(found) if kind.name == "date" else stamp(found * DAY_US + micros(value) % DAY_US)


def shift(value: pl.Expr, by: pl.Expr, kind: DataType, *, whole_days: bool) -> pl.Expr:
    """A date or timestamp moved by microseconds (or a date by days)."""
    if kind.name == "timestamp":
        return stamp(micros(value) + by)
    return date(days(value) + (by if not whole_days else by // DAY_US))


def shift_days(value: pl.Expr, by: pl.Expr) -> pl.Expr:
    """A date moved by days; it wraps, as the int that it is."""
    return (value.cast(pl.Int32) + by).cast(pl.Date)


def days_between(end: pl.Expr, start: pl.Expr) -> pl.Expr:
    """The days from `start` to `end`; the int wraps."""
    return end.cast(pl.Int32) - start.cast(pl.Int32)


def part(name: str, value: pl.Expr) -> pl.Expr:
    """A part of a date or timestamp, as an int."""
    match name:
        case "dayofweek":
            return (value.dt.weekday().cast(pl.Int32) % 7) + 1
        case "weekday":
            return value.dt.weekday().cast(pl.Int32) - 1
        case "dayofyear":
            return value.dt.ordinal_day().cast(pl.Int32)
        case "weekofyear":
            return value.dt.week().cast(pl.Int32)
        case "hour" | "minute" | "second":
            size, count = {"hour": (3600, 24), "minute": (60, 60), "second": (1, 60)}[name]
            return (micros(value) // (size * 1_000_000) % count).cast(pl.Int32)
        case _:
            return getattr(value.dt, name)().cast(pl.Int32)  # type: ignore[no-any-return]


def timestamp_text(value: pl.Expr) -> pl.Expr:
    """A timestamp as Spark writes it: without a fraction if it is zero, else without zeros at its end."""

    def written(time: pl.Expr) -> pl.Expr:
        writable = _writable(time)
        fraction = (time % 1_000_000).cast(pl.String).str.zfill(6).str.strip_chars_end("0")
        tail = pl.when(fraction == "").then(pl.lit("")).otherwise("." + fraction)
        return writable.dt.strftime("%Y-%m-%d %H:%M:%S") + tail

    return let(written, time=micros(value))


def json_time_text(value: pl.Expr) -> pl.Expr:
    """A timestamp as Spark writes it in JSON: in milliseconds, with its zone."""
    return _writable(micros(value)).dt.strftime("%Y-%m-%dT%H:%M:%S%.3fZ")


def _writable(time: pl.Expr) -> pl.Expr:
    """Microseconds as a timestamp; null if Polars would panic as it formats that."""
    return stamp(pl.when(time.is_between(-WRITABLE_DAYS * DAY_US, WRITABLE_DAYS * DAY_US)).then(time))


def date_text(value: pl.Expr) -> pl.Expr:
    """A date as Spark writes it."""

    def written(day: pl.Expr) -> pl.Expr:
        return date(pl.when(day.is_between(-WRITABLE_DAYS, WRITABLE_DAYS)).then(day)).dt.strftime("%Y-%m-%d")

    return let(written, day=days(value))


def read_timestamp(text: pl.Expr) -> pl.Expr:
    """Text as a timestamp; null if it is none. Named zones other than UTC are not known here."""

    def both(text: pl.Expr, usual: pl.Expr) -> pl.Expr:
        quick = _usual_form(pl.when(usual).then(text))
        rest = pl.when(usual.not_()).then(text).str.extract_groups(TIMESTAMP_PATTERN)
        return pl.coalesce(quick, let(_numbered, parts=rest))

    def trimmed(text: pl.Expr) -> pl.Expr:
        return let(both, text=text, usual=text.str.contains(_USUAL))

    return stamp(let(trimmed, text=text.str.strip_chars(EDGE_SPACE)).cast(pl.Int64, strict=False))


def _usual_form(text: pl.Expr) -> pl.Expr:
    """The form that nearly all timestamps have, cut up by position, which is many times faster than by pattern."""
    places = {"year": (0, 4), "month": (5, 2), "day": (8, 2), "hour": (11, 2), "minute": (14, 2), "second": (17, 2)}

    def cut(text: pl.Expr) -> pl.Expr:
        numbers = {name: text.str.slice(*place).cast(pl.Int64, strict=False) for name, place in places.items()}
        digits = text.str.slice(20).str.strip_chars_end("Z").str.pad_end(6, "0").str.slice(0, 6)
        return let(moment_of, **numbers, fraction=digits.cast(pl.Int64, strict=False), zone=pl.lit(0, dtype=pl.Int64()))

    return let(cut, text=text)


def _numbered(parts: pl.Expr) -> pl.Expr:
    least = {"month": 1, "day": 1, "hour": 0, "minute": 0, "second": 0}
    numbers = {name: _number(parts, at).fill_null(default) for at, (name, default) in enumerate(least.items(), start=2)}
    fraction = parts.struct.field("7").fill_null("").str.pad_end(6, "0").str.slice(0, 6).cast(pl.Int64, strict=False)
    return let(moment_of, year=_number(parts, 1), **numbers, fraction=fraction, zone=_zone_seconds(parts))


def moment_of(
    year: pl.Expr,
    month: pl.Expr,
    day: pl.Expr,
    hour: pl.Expr,
    minute: pl.Expr,
    second: pl.Expr,
    fraction: pl.Expr,
    zone: pl.Expr,
) -> pl.Expr:
    """Microseconds in 128 bits, or null if there is no such moment."""
    valid = _valid_day(year, month, day) & (hour < 24) & (minute < 60) & (second < 60)  # noqa: PLR2004 - the clock
    seconds = days_of(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second
    time = (seconds - zone).cast(pl.Int128) * 1_000_000 + fraction
    return pl.when(valid & (zone.abs() <= _ZONE_SECONDS_MAX)).then(time)


def _zone_seconds(parts: pl.Expr) -> pl.Expr:
    hours, minutes, seconds = (
        pl.coalesce(_number(parts, first), _number(parts, second), pl.lit(0, dtype=pl.Int64()))
        for first, second in ((9, 12), (10, 13), (11, 14))
    )
    size = hours * 3600 + minutes * 60 + seconds
    broken = (minutes > 59) | (seconds > 59)  # noqa: PLR2004 - the clock
    sign = pl.when(parts.struct.field("8") == "-").then(-1).otherwise(1)
    return pl.when(broken).then(_ZONE_SECONDS_MAX + 1).otherwise(size * sign)


def read_date(text: pl.Expr) -> pl.Expr:
    """Text as a date; what follows a space or a T is ignored."""

    def numbered(parts: pl.Expr) -> pl.Expr:
        month, day = _number(parts, 2).fill_null(1), _number(parts, 3).fill_null(1)
        return let(counted, year=_number(parts, 1), month=month, day=day)

    def counted(year: pl.Expr, month: pl.Expr, day: pl.Expr) -> pl.Expr:
        return pl.when(_valid_day(year, month, day)).then(days_of(year, month, day))

    return date(let(numbered, parts=text.str.strip_chars(EDGE_SPACE).str.extract_groups(DATE_PATTERN)))


def _number(parts: pl.Expr, at: int) -> pl.Expr:
    return parts.struct.field(str(at)).str.strip_chars_start("+").cast(pl.Int64, strict=False)


def _valid_day(year: pl.Expr, month: pl.Expr, day: pl.Expr) -> pl.Expr:
    in_month = (day >= 1) & (day <= days_in_month(year, month.clip(1, 12)))
    return year.is_not_null() & month.is_between(1, 12) & in_month
