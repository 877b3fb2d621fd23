"""Times moved between UTC and the wall clock of a zone, as Spark does with `from_utc_timestamp` and `to_utc_timestamp`.

The offsets are those of Polars' own zone database, which ends with the year 2099. Java's rules go on for ever: a later year has the
offsets of one before 2100 that begins on the same day of the week and is a leap year or not alike.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from functools import lru_cache
from typing import Final

import polars as pl

from fordstone.lang.polars.let import let
from fordstone.lang.polars.times import DAY_US, WRITABLE_DAYS, days_of, micros, stamp
from fordstone.lang.time_format import fixed_offset_us

_NAIVE: Final = pl.Datetime("us")
_LAST_YEAR: Final = 2099
_CYCLE_YEARS: Final = range(_LAST_YEAR - 27, _LAST_YEAR + 1)
_EPOCH: Final = date(1970, 1, 1)


def from_utc(value: pl.Expr, zone: str) -> pl.Expr:
    """What the clock of a zone shows at a time."""
    offset_us = fixed_offset_us(zone)
    if offset_us is not None:
        return stamp(micros(value) + offset_us)

    def moved(time: pl.Expr, near: pl.Expr) -> pl.Expr:
        return time + micros(stamp(near).dt.convert_time_zone(zone).dt.replace_time_zone(None)) - near

    return stamp(_with_near(value, lambda time, near: let(moved, time=time, near=near)))


def to_utc(value: pl.Expr, zone: str) -> pl.Expr:
    """The time at which the clock of a zone shows this.

    Of a time that it shows twice it is the first; one that it skips is as if the clock had not been put forward yet.
    """
    offset_us = fixed_offset_us(zone)
    if offset_us is not None:
        return stamp(micros(value) - offset_us)

    def moved(time: pl.Expr, near: pl.Expr) -> pl.Expr:
        shown = micros(near.cast(_NAIVE).dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null"))
        day_before = (near - DAY_US).cast(_NAIVE).dt.replace_time_zone(zone, ambiguous="latest", non_existent="null")
        return time + pl.coalesce(shown, micros(day_before) + DAY_US) - near

    return stamp(_with_near(value, lambda time, near: let(moved, time=time, near=near)))


def _with_near(value: pl.Expr, body: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> pl.Expr:
    """`body` with the microseconds of a time, and with those of the same time in a year that the database has."""

    def near(time: pl.Expr, year: pl.Expr) -> pl.Expr:
        one = pl.lit(1, dtype=pl.Int64())
        first = days_of(year, one, one)
        kind = (first + 3) % 7 * 2 + ((days_of(year + 1, one, one) - first) == 366).cast(pl.Int64)  # noqa: PLR2004 - a leap year
        same = kind.replace_strict(_first_days(), default=None, return_dtype=pl.Int64)
        return body(time, pl.when(year > _LAST_YEAR).then(time - (first - same) * DAY_US).otherwise(time))

    def inside(time: pl.Expr) -> pl.Expr:
        writable = pl.when(time.is_between(-WRITABLE_DAYS * DAY_US, WRITABLE_DAYS * DAY_US)).then(time)
        return let(lambda time: let(near, time=time, year=stamp(time).dt.year().cast(pl.Int64)), time=writable)

    return let(inside, time=micros(value))


@lru_cache(maxsize=1)
def _first_days() -> dict[int, int]:
    """By kind of year (the weekday that it begins with, and whether it is a leap year), the first day of the last such year."""
    found = {}
    for year in _CYCLE_YEARS:
        first = date(year, 1, 1)
        leap = (date(year + 1, 1, 1) - first).days == 366  # noqa: PLR2004 - a leap year
        found[first.weekday() * 2 + leap] = (first - _EPOCH).days
    return found
