"""JSON text in expressions: paths into it, its values as typed values, and values as text, by Spark's rules.

Works on one text at a time; `polars.json` calls it for columns. Nothing here stops a query: text that is not JSON gives null, or
a struct of nulls where Spark gives that. Text is read strictly, by RFC 8259: no single quotes, comments or text after the end.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from fordstone.lang.constants import read_date, read_timestamp
from fordstone.lang.schema import ClashError, DataType

PathStep = str | int
_STEP: Final = re.compile(r"\.([^.\[\]'\"*]+)|\['([^'*]+)'\]|\[\"([^\"*]+)\"\]|\[(\d+)\]")
_INTEGER_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_NAMED_FLOATS: Final = {
    "NaN": math.nan, "Infinity": math.inf, "+Infinity": math.inf, "+INF": math.inf, "INF": math.inf,
    "-Infinity": -math.inf, "-INF": -math.inf,
}  # fmt: skip
_PLAIN_MIN, _PLAIN_MAX = 1e-3, 1e7
"""Between these, Java writes a double without an exponent."""
_EXACT: Final = Context(prec=100, rounding=ROUND_HALF_UP)


def path_steps(path: str) -> tuple[PathStep, ...]:
    """The names and indexes of a path such as `$.a.b[0]['c d']`.

    Raises:
        ClashError: If it is not such a path.
    """
    if not path.startswith("$"):
        raise ClashError(f"{path!r} is not a JSON path: it begins with $, as in '$.a.b[0]'.")
    found: list[PathStep] = []
    at = 1
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            hint = "; * is not supported, use from_json and explode" if "*" in path[at:] else ""
            raise ClashError(
                f"{path[at:]!r} in the JSON path {path!r} is not a step: write .name, ['name'] or [0]{hint}."
            )
        name = step[1] or step[2] or step[3]
        found.append(int(step[4]) if name is None else name)
        at = step.end()
    return tuple(found)


def at_path(text: str, steps: tuple[PathStep, ...]) -> str | None:
    """What stands at a path: text as it is, other values as JSON text; null if there is nothing."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    for step in steps:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and step < len(value) else None
    return None if value is None and steps else text_of_value(value)


def text_of_value(value: Any) -> str:
    """A decoded value as Spark shows it: text itself, and all else as JSON."""
    return value if isinstance(value, str) else _written(value)


def _written(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float():
            return double_text(value)
        case Decimal():
            return double_text(float(value))
        case dict():
            return "{" + ",".join(f"{_quoted(name)}:{_written(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_written, value)) + "]"
        case str():
            return _quoted(value)
        case _:
            return str(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def double_text(value: float) -> str:
    """A double as Java writes it."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value == 0 or _PLAIN_MIN <= abs(value) < _PLAIN_MAX:
        plain = f"{Decimal(repr(value)):f}"
        return plain if "." in plain else f"{plain}.0"
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    shown = "".join(map(str, digits)).rstrip("0")
    return f"{'-' if sign else ''}{shown[0]}.{shown[1:] or '0'}E{len(digits) + int(exponent) - 1}"


class _MisfitError(Exception):
    """A value that is not of the wanted type."""


_Read = Callable[[Any], Any]


def reader_of(kind: DataType) -> Callable[[str], Any]:
    """What reads JSON text as values of a type, in the mode that Spark calls PERMISSIVE.

    A field that does not fit is null, and so is an array or a map with such an element; text that is not JSON, or of another
    shape, is a struct of nulls, or null if the type is no struct. Values are Python's: dates and times as numbers of days and
    microseconds, see `polars.json.read_type`.
    """
    decoder = msgspec.json.Decoder(float_hook=Decimal)
    read = _reader(kind)
    failed = dict.fromkeys((name for name, _ in kind.fields), None) if kind.name == "struct" else None
    element = kind.element
    one_is_enough = element is not None and element.name == "struct"

    def read_text(text: str) -> Any:
        if not text.strip():
            return None
        try:
            value = decoder.decode(text)
            if one_is_enough and isinstance(value, dict):
                value = [value]
            found = read(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _MisfitError):
            return failed
        return failed if found is None else found

    return read_text


def _reader(kind: DataType) -> _Read:
    if kind.element is not None:
        return _array_reader(_reader(kind.element))
    if kind.name == "map":
        return _map_reader(_reader(kind.field("value")))
    if kind.name == "struct":
        return _struct_reader({name: _reader(inner) for name, inner in kind.fields})
    return _leaf_reader(kind)


def _array_reader(element: _Read) -> _Read:
    def read(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, list):
            raise _MisfitError
        return [element(one) for one in value]

    return read


def _map_reader(inner: _Read) -> _Read:
    def read(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _MisfitError
        return {name: inner(one) for name, one in value.items()}

    return read


def _struct_reader(fields: dict[str, _Read]) -> _Read:
    def read(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _MisfitError
        return {name: _or_null(inner, value.get(name)) for name, inner in fields.items()}

    return read


def _or_null(read: _Read, value: Any) -> Any:
    try:
        return read(value)
    except _MisfitError:
        return None


def _leaf_reader(kind: DataType) -> _Read:
    leaf: Callable[[Any, DataType], Any] = _LEAVES.get(kind.name, _integer if kind.is_integer else _nothing)

    def read(value: Any) -> Any:
        return None if value is None else leaf(value, kind)

    return read


def _nothing(value: Any, kind: DataType) -> Any:
    raise _MisfitError(f"{value!r} is not of type {kind}")


def _integer(value: Any, kind: DataType) -> int:
    limit = 1 << (_INTEGER_BITS[kind.name] - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not -limit <= value < limit:
        raise _MisfitError
    return value


def _boolean(value: Any, kind: DataType) -> bool:
    del kind
    if not isinstance(value, bool):
        raise _MisfitError
    return value


def _float(value: Any, kind: DataType) -> float:
    del kind
    if isinstance(value, str) and value in _NAMED_FLOATS:
        return _NAMED_FLOATS[value]
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise _MisfitError
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _decimal(value: Any, kind: DataType) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        raise _MisfitError
    try:
        exact = _EXACT.create_decimal(value.strip() if isinstance(value, str) else value)
        found = exact.quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
    except InvalidOperation:
        raise _MisfitError from None
    if not found.is_finite() or len(found.as_tuple().digits) > kind.precision:
        raise _MisfitError
    return found


def _timestamp(value: Any, kind: DataType) -> int:
    del kind
    if isinstance(value, int) and not isinstance(value, bool):
        return value * 1_000_000
    found = read_timestamp(value) if isinstance(value, str) else None
    if found is None:
        raise _MisfitError
    return found


def _date(value: Any, kind: DataType) -> int:
    del kind
    found = read_date(value) if isinstance(value, str) else None
    if found is None:
        raise _MisfitError
    return found


def _binary(value: Any, kind: DataType) -> bytes:
    del kind
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise _MisfitError from None


_LEAVES: Final[dict[str, Callable[[Any, DataType], Any]]] = {
    "string": lambda value, _: text_of_value(value),
    "boolean": _boolean,
    "float": _float,
    "double": _float,
    "decimal": _decimal,
    "timestamp": _timestamp,
    "date": _date,
    "binary": _binary,
}
