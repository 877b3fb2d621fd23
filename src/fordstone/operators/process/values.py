"""What a user's function puts into state, brought into the one form in which it would be read back.

A value lies in memory for a while and in a column afterwards: a function must not see the difference. So each value is
checked and brought into the form of its declared type when it is set.

Invariant: for every coercion c, reading c(x) back from a Polars column of the type gives c(x).
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation, localcontext
from itertools import chain
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl

from fordstone.lang.schema import DataType

Coercion = Callable[[Any], Any]

UTC: Final = ZoneInfo("UTC")
"""The zone of the times that Polars gives: the same object, so that it is recognised at once."""
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_DIGITS_MAX: Final = 80
_OWNER: Final = "__owner"
_FLOAT: Final = struct.Struct("f")


def coercion(kind: DataType) -> Coercion:
    """Gives a value in the form of the type; raises `TypeError` or `ValueError` for what has none."""
    if kind.element is not None:
        return _array(coercion(kind.element))
    if kind.is_integer:
        return _integer(kind)
    if kind.name == "decimal":
        return _decimal(kind)
    return _PLAIN[kind.name]


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


def series_of(name: str, values: list[Any], dtype: pl.DataType) -> pl.Series:
    """A column of Python objects."""
    if not isinstance(dtype, pl.List):
        return pl.Series(name, values, dtype=dtype, strict=True)
    # Polars makes a series of its own of every list, which takes ten times as long as to make one of all and to cut it.
    flat = series_of(name, list(chain.from_iterable(values)), dtype.inner)  # type: ignore[arg-type]  # a type, not a class
    sizes = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    if (sizes == 1).all() and not flat.dtype.is_nested():
        return flat.reshape((-1, 1)).arr.to_list()
    owners = pl.Series(_OWNER, np.repeat(np.arange(sizes.size), sizes)).set_sorted()
    lists = pl.DataFrame([owners, flat]).group_by(_OWNER, maintain_order=True).agg(name).get_column(name)
    if lists.len() == sizes.size:
        return lists
    places = pl.Series(np.cumsum(sizes > 0) - 1).zip_with(pl.Series(sizes > 0), pl.Series([None], dtype=pl.Int64))
    return lists.gather(places).fill_null(pl.Series([[]], dtype=dtype))


def _integer(kind: DataType) -> Coercion:
    bits = _BITS[kind.name]
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1

    def coerce(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{value!r} is not a whole number")
            value = int(value)
        if least <= value <= most:
            return value  # type: ignore[no-any-return]  # a whole number, checked above
        raise ValueError(f"{value} does not fit into {kind}")

    return coerce


def _double(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _float(value: Any) -> float:
    rounded: float = _FLOAT.unpack(_FLOAT.pack(_double(value)))[0]
    return rounded


def _decimal(kind: DataType) -> Coercion:
    step = Decimal(1).scaleb(-kind.scale)
    limit = Decimal(10) ** (kind.precision - kind.scale)

    def coerce(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, Decimal | int):
            raise TypeError(f"{value!r} is not a Decimal")
        with localcontext(prec=_DIGITS_MAX):
            try:
                exact = Decimal(value).quantize(step)
            except InvalidOperation:
                raise ValueError(f"{value} does not fit into {kind}") from None
        if exact != value or not -limit < exact < limit:
            raise ValueError(f"{value} does not fit into {kind} exactly")
        return exact

    return coerce


def _array(element: Coercion) -> Coercion:
    def coerce(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{value!r} is not a list")
        return [None if one is None else element(one) for one in value]

    return coerce


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return str(value)


def _binary(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} is not bytes")
    return bytes(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither True nor False")
    return value


def _date(value: Any) -> dt.date:
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise TypeError(f"{value!r} is not a date")
    return value


def _timestamp(value: Any) -> dt.datetime:
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise TypeError(f"{value!r} is not a datetime with a time zone")
    return value if value.tzinfo is UTC else value.astimezone(UTC)


_PLAIN: Final[dict[str, Coercion]] = {
    "double": _double,
    "float": _float,
    "string": _string,
    "binary": _binary,
    "boolean": _boolean,
    "date": _date,
    "timestamp": _timestamp,
}
