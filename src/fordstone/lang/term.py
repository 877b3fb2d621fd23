"""The checked form of an expression: columns, literals and calls, each with its type, and how it is written as SQL.

`expression` makes terms out of sqlglot trees, `polars.lower` turns them into Polars expressions. A term is
right by construction: every argument already has the type that its function takes. Casts that the type rules added are
`implicit` and not written; the text, read again, gets the same ones. `render` writes text that reads back as the same term.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Final

from fordstone.lang.dialect import quoted_name
from fordstone.lang.schema import DataType

DAY_TIME: Final = DataType("interval day to second")
"""A span in microseconds; only inside an expression, never a column."""
DAYS: Final = DataType("interval day")
"""A span of whole days, kept in microseconds; a date moved by it stays a date."""
YEAR_MONTH: Final = DataType("interval year to month")
"""A span in months; only inside an expression, never a column."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1)

LiteralValue = bool | int | float | str | bytes | Decimal | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the input."""

    name: str
    type: DataType


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant. Timestamps are microseconds since 1970 UTC, dates days, intervals microseconds or months."""

    value: LiteralValue
    type: DataType


@dataclass(frozen=True, slots=True)
class Call:
    """A function or operator of `functions`, or a cast, with arguments of the types it takes."""

    function: str
    args: tuple[Term, ...]
    type: DataType
    implicit: bool = False


Term = Column | Literal | Call


def cast(term: Term, to: DataType) -> Term:
    """The term as another type, by a cast that is not written in the text."""
    if term.type == to:
        return term
    if isinstance(term, Literal) and term.value is None:
        return Literal(None, to)
    return Call("cast", (term,), to, implicit=True)


def walk(term: Term) -> Iterator[Term]:
    """The term and everything below it, in the order of the text."""
    yield term
    if isinstance(term, Call):
        for arg in term.args:
            yield from walk(arg)


def columns_of(term: Term) -> tuple[str, ...]:
    """The input columns that the term reads, each once, in the order of the text."""
    return tuple(dict.fromkeys(part.name for part in walk(term) if isinstance(part, Column)))


# How strongly each form binds. An operand that binds less than its place demands is put in parentheses.
_OR, _AND, _NOT, _PREDICATE, _SUM, _PRODUCT, _SIGN, _ATOM = range(1, 9)
_BINARY: Final = {
    "or": ("OR", _OR, _OR, _AND),
    "and": ("AND", _AND, _AND, _NOT),
    **{symbol: (symbol, _PREDICATE, _SUM, _SUM) for symbol in ("=", "<=>", "<>", "<", "<=", ">", ">=")},
    "rlike": ("RLIKE", _PREDICATE, _SUM, _SUM),
    "+": ("+", _SUM, _SUM, _PRODUCT),
    "-": ("-", _SUM, _SUM, _PRODUCT),
    "*": ("*", _PRODUCT, _PRODUCT, _SIGN),
    "/": ("/", _PRODUCT, _PRODUCT, _SIGN),
    "%": ("%", _PRODUCT, _PRODUCT, _SIGN),
}


def render(term: Term) -> str:
    """The term as Spark SQL that reads back as the same term."""
    return _write(term)[0]


def _write(term: Term) -> tuple[str, int]:
    if isinstance(term, Column):
        return quoted_name(term.name), _ATOM
    if isinstance(term, Literal):
        text = render_literal(term)
        return text, _SIGN if text.startswith("-") else _ATOM
    if term.function == "cast" and term.implicit:
        return _write(term.args[0])
    if term.function in _BINARY:
        symbol, own, left, right = _BINARY[term.function]
        return f"{_operand(term.args[0], left)} {symbol} {_operand(term.args[1], right)}", own
    return _write_call(term)


def field_name(term: Call) -> str:
    """The name in `a.name`."""
    return str(term.args[1].value) if isinstance(term.args[1], Literal) else ""


def _holder(term: Term) -> str:
    """What stands before a dot or a bracket."""
    text, binds = _write(term)
    return text if binds >= _ATOM and not text.startswith("CASE ") else f"({text})"


def _operand(term: Term, at_least: int) -> str:
    text, binds = _write(term)
    return text if binds >= at_least else f"({text})"


def _write_call(term: Call) -> tuple[str, int]:
    if (predicate := _written_predicate(term)) is not None:
        return predicate
    args = term.args
    match term.function:
        case "cast" | "try_cast":
            return f"{term.function.upper()}({render(args[0])} AS {_type_text(term.type)})", _ATOM
        case "negative":
            # A bare number after a minus sign would read as a negative literal.
            inner = args[0].args[0] if isinstance(args[0], Call) and args[0].implicit else args[0]
            return f"-{f'({render(inner)})' if isinstance(inner, Literal) else _operand(inner, _ATOM)}", _SIGN
        case "case":
            whens = " ".join(f"WHEN {render(args[i])} THEN {render(args[i + 1])}" for i in range(0, len(args) - 1, 2))
            last = args[-1]
            without_else = isinstance(last, Literal) and last.value is None
            return f"CASE {whens}{'' if without_else else f' ELSE {render(last)}'} END", _ATOM
        case "trim" | "ltrim" | "rtrim" if len(args) > 1:
            side = {"trim": "BOTH", "ltrim": "LEADING", "rtrim": "TRAILING"}[term.function]
            return f"trim({side} {render(args[1])} FROM {render(args[0])})", _ATOM
        case "count" if not args:
            return "count(*)", _ATOM
        case "element":
            return f"{_holder(args[0])}[{render(args[1])}]", _ATOM
        case "field":
            return f"{_holder(args[0])}.{quoted_name(field_name(term))}", _ATOM
        case name:
            return written_call(name, list(map(render, args))), _ATOM


def written_call(name: str, args: Sequence[str]) -> str:
    """A call as it is written. The name of an aggregate of different values ends in DISTINCT, which stands before its argument."""
    function, _, distinct = name.partition(" ")
    return f"{function}({f'{distinct.upper()} ' if distinct else ''}{', '.join(args)})"


def _type_text(kind: DataType) -> str:
    return str(kind) if kind.contains("struct") else str(kind).upper()  # names of fields stay as they are


def _written_predicate(term: Call) -> tuple[str, int] | None:
    args = term.args
    match term.function:
        case "not":
            return f"NOT {_operand(args[0], _NOT)}", _NOT
        case "isnull":
            return f"{_operand(args[0], _SUM)} IS NULL", _PREDICATE
        case "isnotnull":
            return f"{_operand(args[0], _SUM)} IS NOT NULL", _PREDICATE
        case "in":
            return f"{_operand(args[0], _SUM)} IN ({', '.join(map(render, args[1:]))})", _PREDICATE
        case "like":
            escape = f" ESCAPE {render(args[2])}" if len(args) > 2 else ""  # noqa: PLR2004 - the escape is the third
            return f"{_operand(args[0], _SUM)} LIKE {_operand(args[1], _SUM)}{escape}", _PREDICATE
        case _:
            return None


_SUFFIX: Final = {"bigint": "L", "smallint": "S", "tinyint": "Y"}


def render_literal(literal: Literal) -> str:
    """A constant as Spark SQL."""
    value, kind = literal.value, literal.type
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, str):
        return quoted_text(value)
    if isinstance(value, bytes):
        return f"X'{value.hex().upper()}'"
    if isinstance(value, Decimal):
        plain = f"{value:f}"
        return plain if "." in plain else f"{plain}BD"
    if isinstance(value, float):
        return _render_float(value, kind)
    match kind.name:
        case "timestamp":
            return f"TIMESTAMP '{_stamp(value)}'"
        case "date":
            return f"DATE '{_EPOCH_DAY + timedelta(days=value)}'"
        case DAYS.name:
            return f"INTERVAL '{value // _DAY_US}' DAY"
        case DAY_TIME.name:
            return _render_span(value)
        case YEAR_MONTH.name:
            return f"INTERVAL '{value}' MONTH"
        case name:
            fits_int = -(2**31) <= value < 2**31
            return f"{value}{_SUFFIX.get(name, '') if fits_int or name != 'bigint' else ''}"


def _render_float(value: float, kind: DataType) -> str:
    if value != value:  # noqa: PLR0124 - only NaN differs from itself
        return f"CAST('NaN' AS {str(kind).upper()})"
    if value in {float("inf"), float("-inf")}:
        return f"CAST('{'-' if value < 0 else ''}Infinity' AS {str(kind).upper()})"
    return f"{value!r}{'D' if kind.name == 'double' else 'F'}"


def _stamp(micros: int) -> str:
    moment = _EPOCH + timedelta(microseconds=micros)
    fraction = f".{moment.microsecond:06d}" if moment.microsecond else ""
    return f"{moment.year:04d}-{moment:%m-%d %H:%M:%S}{fraction}Z"


_DAY_US: Final = 86_400_000_000
_SPANS: Final = (("HOUR", 3_600_000_000), ("MINUTE", 60_000_000), ("SECOND", 1_000_000))


def _render_span(micros: int) -> str:
    for unit, size in _SPANS:
        if micros % size == 0:
            return f"INTERVAL '{micros // size}' {unit}"
    sign, whole = ("-" if micros < 0 else ""), abs(micros)
    return f"INTERVAL '{sign}{whole // 1_000_000}.{whole % 1_000_000:06d}' SECOND"


_ESCAPES: Final = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}
_TO_ESCAPE: Final = re.compile(r"[\\'\n\r\t\0]")


def quoted_text(text: str) -> str:
    """A string as a Spark SQL literal."""
    return "'" + _TO_ESCAPE.sub(lambda found: _ESCAPES[found[0]], text) + "'"
