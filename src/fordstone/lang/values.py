"""Python values of declared types: what a user's code gives, checked and brought into the form in which it is kept.

A value that does not fit its type is an error with a reason, never null and never another value.
"""

from __future__ import annotations

import datetime as dt
import operator
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation, localcontext
from numbers import Real
from types import NoneType
from typing import Any, Final
from zoneinfo import ZoneInfo

import polars as pl

from fordstone.errors import SchemaError
from fordstone.lang.schema import DataType, Schema

Coercion = Callable[[Any], Any]

UTC: Final = ZoneInfo("UTC")
"""The zone of the times that Polars gives: the same object, so that it is recognised at once."""
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=UTC)
UNFIT: Final = (TypeError, ValueError, OverflowError)
"""What a coercion raises for a value that has no such form."""
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_DIGITS_MAX: Final = 80
_FLOAT: Final = struct.Struct("f")


def coercion(kind: DataType, *, as_read: bool = False) -> Coercion:
    """Return a function that gives a value in the form of the type, or raises one of `UNFIT`.

    `as_read`: as files are read. A time without a zone is UTC, times and dates may be ISO-8601 text, and digits that a decimal type
    lacks are rounded half up.
    """
    if kind.element is not None:
        return _array(coercion(kind.element, as_read=as_read))
    if kind.name == "map":
        return _map(coercion(kind.field("key"), as_read=as_read), coercion(kind.field("value"), as_read=as_read))
    if kind.name == "struct":
        return _struct({name: coercion(inner, as_read=as_read) for name, inner in kind.fields})
    if kind.is_integer:
        return _integer(kind)
    if kind.name == "decimal":
        return _decimal(kind, rounds=as_read)
    return (_AS_READ.get(kind.name) if as_read else None) or _PLAIN[kind.name]


def frame_of_columns(columns: Mapping[str, list[Any]], schema: Schema) -> pl.DataFrame:
    """Python values, by column, as a frame. Nothing but None becomes null.

    Raises:
        UnfitError: a value does not fit its column.
    """
    return pl.DataFrame([_series(name, columns[name], kind) for name, kind in schema.items()])


def _series(name: str, values: list[Any], kind: DataType) -> pl.Series:
    if set(map(type, values)) <= {_EXACT.get(kind.name), NoneType}:
        with suppress(pl.exceptions.PolarsError, OverflowError, TypeError):
            return pl.Series(name, values, dtype=kind.polars, strict=True)
    coerce = coercion(kind, as_read=True)
    made: list[Any] = []
    try:
        # What was extended by before an error stays: it says which value it was.
        made.extend(None if value is None else coerce(value) for value in values)
    except UNFIT as error:
        raise UnfitError(len(made), name, error) from None
    if kind.name != "timestamp":
        return pl.Series(name, made, dtype=kind.polars, strict=True)
    # Polars looks up the zone of every time; without a zone this is three times as quick.
    plain = [None if time is None else time.replace(tzinfo=None) for time in made]
    return pl.Series(name, plain, dtype=pl.Datetime("us"), strict=True).dt.replace_time_zone("UTC")


class UnfitError(SchemaError):
    """A value that does not fit its column: which row, by its number from 0, and which column."""

    def __init__(self, row: int, column: str, problem: Exception) -> None:
        super().__init__(f"column {column}: {problem}")
        self.row = row
        self.column = column


def microseconds_of(time: Any) -> int:
    """A time of a user's as microseconds since 1970. Raises `TypeError` unless it is a datetime with a time zone."""
    if not isinstance(time, dt.datetime) or time.tzinfo is None:
        raise TypeError(f"{time!r} is not a datetime with a time zone")
    return (time - EPOCH) // _MICROSECOND


LEAST_US: Final = microseconds_of(dt.datetime(1, 1, 1, tzinfo=UTC))
MOST_US: Final = microseconds_of(dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC))
"""The times that Python has: the years 1 to 9999."""


def time_of(us: int) -> dt.datetime:
    """Microseconds since 1970 as a user sees them."""
    return EPOCH + dt.timedelta(microseconds=us)


def _integer(kind: DataType) -> Coercion:
    bits = _BITS[kind.name]
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1

    def coerce(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{value!r} is not a whole number")
            value = operator.index(value)
        if least <= value <= most:
            return value  # type: ignore[no-any-return]  # a whole number, checked above
        raise ValueError(f"{value} does not fit into {kind}")

    return coerce


def _double(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _float(value: Any) -> float:
    rounded: float = _FLOAT.unpack(_FLOAT.pack(_double(value)))[0]
    return rounded


def _decimal(kind: DataType, *, rounds: bool) -> Coercion:
    step = Decimal(1).scaleb(-kind.scale)
    limit = Decimal(10) ** (kind.precision - kind.scale)

    def coerce(value: Any) -> Decimal:
        if rounds and isinstance(value, float):
            value = Decimal(repr(float(value)))
        if isinstance(value, bool) or not isinstance(value, Decimal | int):
            raise TypeError(f"{value!r} is not a Decimal")
        with localcontext(prec=_DIGITS_MAX):
            try:
                kept = Decimal(value).quantize(step, ROUND_HALF_UP)
            except InvalidOperation:
                raise ValueError(f"{value} does not fit into {kind}") from None
        if not -limit < kept < limit:
            raise ValueError(f"{value} does not fit into {kind}")
        if kept != value and not rounds:
            raise ValueError(f"{value} does not fit into {kind} exactly")
        return kept

    return coerce


def _array(element: Coercion) -> Coercion:
    def coerce(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{value!r} is not a list")
        return [None if one is None else element(one) for one in value]

    return coerce


def _map(key: Coercion, value: Coercion) -> Coercion:
    def coerce(given: Any) -> dict[Any, Any]:
        if not isinstance(given, Mapping):
            raise TypeError(f"{given!r} is not a dict")
        return {key(name): None if one is None else value(one) for name, one in given.items()}

    return coerce


def _struct(fields: dict[str, Coercion]) -> Coercion:
    def coerce(given: Any) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise TypeError(f"{given!r} is not a dict")
        if unknown := given.keys() - fields.keys():
            raise TypeError(f"{given!r} has {unknown.pop()!r}, and the fields are {', '.join(fields)}")
        return {name: None if given.get(name) is None else field(given[name]) for name, field in fields.items()}

    return coerce


def _instance(kind: type, what: str) -> Coercion:
    def coerce(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is {what}")
        return kind(value)

    return coerce


def _date(value: Any) -> dt.date:
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise TypeError(f"{value!r} is not a date")
    return value


def _timestamp(value: Any) -> dt.datetime:
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise TypeError(f"{value!r} is not a datetime with a time zone")
    return value if value.tzinfo is UTC else value.astimezone(UTC)


def _read_date(value: Any) -> dt.date:
    return _date(_parsed(dt.date, value))


def _read_timestamp(value: Any) -> dt.datetime:
    value = _parsed(dt.datetime, value)
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return _timestamp(value)


def _parsed(kind: type[dt.date], value: Any) -> Any:
    """ISO-8601 text as a date or time; anything else, and other text, as it is."""
    try:
        return kind.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return value


_PLAIN: Final[dict[str, Coercion]] = {
    "double": _double,
    "float": _float,
    "string": _instance(str, "not a string"),
    "binary": _instance(bytes, "not bytes"),
    "boolean": _instance(bool, "neither True nor False"),
    "date": _date,
    "timestamp": _timestamp,
}
_AS_READ: Final[dict[str, Coercion]] = {"date": _read_date, "timestamp": _read_timestamp}
_EXACT: Final[dict[str, type]] = {
    "double": float,
    "string": str,
    "binary": bytes,
    "boolean": bool,
    "date": dt.date,
    **dict.fromkeys(_BITS, int),
}
"""The Python types whose values need no coercion. Whether an integer fits its bits, Polars checks."""
