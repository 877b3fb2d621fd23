"""Constants in an expression: numbers, text, timestamps, dates and intervals, from sqlglot nodes to literals.

Follows Spark: `1` is an int (a bigint or decimal if it does not fit), `1.5` a decimal, `1e3` and `1.5D` doubles.
A cast of a written number to a type that holds it is that number, so that `1.5D` and `CAST(1.5 AS DOUBLE)` are the same.
"""

from __future__ import annotations

import re
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Final

from sqlglot import exp

from fordstone.lang.dialect import DIALECT
from fordstone.lang.rules import literal_decimal
from fordstone.lang.schema import BINARY, BOOLEAN, DECIMAL_DIGITS_MAX, DOUBLE, NULL, STRING, ClashError, DataType
from fordstone.lang.term import DAY_TIME, DAYS, YEAR_MONTH, Literal

_WHOLE: Final = re.compile(r"[+-]?\d+")
_BOUNDS: Final = {"tinyint": 2**7, "smallint": 2**15, "int": 2**31, "bigint": 2**63}
_SPELLED: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


NODES: Final = (exp.Null, exp.Boolean, exp.HexString, exp.RawString, exp.Concat, exp.Interval, exp.Literal)
"""The nodes that `literal` reads."""


def number(text: str) -> Literal:
    """A number as written, with the type that Spark gives it."""
    if _WHOLE.fullmatch(text):
        value = int(text)
        for name in ("int", "bigint"):
            if -_BOUNDS[name] <= value < _BOUNDS[name]:
                return Literal(value, DataType(name))
    if "e" in text.lower():
        return Literal(float(text), DOUBLE)
    exact = Decimal(text)
    return Literal(exact, literal_decimal(exact))


def literal(node: exp.Expr, text: str) -> Literal:
    """The constant that a node is.

    Raises:
        ClashError: if it is none that is supported.
    """
    match node:
        case exp.Null():
            return Literal(None, NULL)
        case exp.Boolean():
            return Literal(bool(node.args["this"]), BOOLEAN)
        case exp.HexString():
            try:
                return Literal(bytes.fromhex(str(node.args["this"])), BINARY)
            except ValueError:
                raise ClashError("bytes are written X'0A1B', two digits each.") from None
        case exp.RawString():
            return Literal(str(node.args["this"]), STRING)
        case exp.Concat():
            return _adjacent(node, text)
        case exp.Interval():
            return interval(node)
        case exp.Literal() if not node.is_string:
            return number(str(node.args["this"]))
        case exp.Literal():
            return Literal(_clean(str(node.args["this"])), STRING)
        case _:
            raise ClashError("this is not a constant.")


def _clean(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ClashError("the text has half of a surrogate pair, which is not a character.") from None
    return value


def _adjacent(node: exp.Concat, text: str) -> Literal:
    """String literals side by side: a doubled quote is a quote, otherwise they are joined."""
    parts = node.args["expressions"]
    if not all(isinstance(part, exp.Literal) and part.is_string for part in parts):
        raise ClashError("this concatenation was parsed by another dialect; parse it with the one of fordstone.")
    out = str(parts[0].args["this"])
    # Only the first literal has its place; those of the others are found from the tokens.
    tokens = [token for token in DIALECT.tokenize(text) if token.start >= parts[0].meta.get("start", len(text))]
    for at, part in enumerate(parts[1:]):
        if at + 1 < len(tokens):
            end, start = tokens[at].end, tokens[at + 1].start
            out += text[start] if start == end + 1 and text[start] == text[end] else ""
        out += str(part.args["this"])
    return Literal(_clean(out), STRING)


def negative_literal(node: exp.Expr) -> Literal | None:
    """The negative number, if a minus sign stands before a written number, with or without a suffix such as D or L."""
    if isinstance(node, exp.Literal) and not node.is_string:
        return number("-" + str(node.args["this"]))
    if not (isinstance(node, exp.Cast) and isinstance(node.args["this"], exp.Literal)) or node.args.get("safe"):
        return None
    inner = node.args["this"]
    kind = DataType.parse(node.args["to"].sql(dialect=DIALECT))
    found = typed_literal(inner, literal(inner, ""), kind, strict=False) if kind.is_numeric else None
    if found is None or not isinstance(found.value, (int, float, Decimal)):
        return None
    # `-` would round a long decimal to the digits of Python's context.
    return Literal(found.value.copy_negate() if isinstance(found.value, Decimal) else -found.value, kind)


def typed_literal(node: exp.Expr, found: Literal, kind: DataType, *, strict: bool) -> Literal | None:
    """A constant as another type, if it is the same value there; None leaves the cast to run time.

    `node` is where it was written. With `strict` (the forms `TIMESTAMP '...'` and `DATE '...'`), text that cannot be
    read is an error.
    """
    if isinstance(found.value, str):
        return _from_text(found.value, kind, strict=strict)
    if not found.type.is_numeric or found.value is None:
        return None
    # A cast of a whole number to another whole type is not a literal to Spark, but `3L` is.
    if kind.is_integer and not (isinstance(node, exp.Literal) and _has_suffix(node)):
        return None
    return _same_value(found, kind)


def _from_text(text: str, kind: DataType, *, strict: bool) -> Literal | None:
    if kind.name in {"timestamp", "date"}:
        moment = read_timestamp(text) if kind.name == "timestamp" else read_date(text)
        if moment is None and strict:
            raise ClashError(f"{text!r} is not a {kind.name}; write for instance '2024-05-06 07:08:09'.")
        return None if moment is None else Literal(moment, kind)
    if kind.is_float and text in _SPELLED:
        return Literal(_SPELLED[text], kind)
    if kind.name == "decimal" and len(text) <= DECIMAL_DIGITS_MAX and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
        exact = Decimal(text)
        return Literal(exact, kind) if literal_decimal(exact) == kind else None
    return None


def _has_suffix(node: exp.Literal) -> bool:
    width = node.meta.get("end", 0) - node.meta.get("start", 0) + 1
    return width > len(str(node.args["this"])) and "end" in node.meta


def _same_value(found: Literal, kind: DataType) -> Literal | None:
    value = found.value
    if found.type == kind:
        return found
    if kind.name == "double":
        return Literal(float(value), kind)  # type: ignore[arg-type]
    if kind.name == "float":
        return Literal(single(float(value)), kind)  # type: ignore[arg-type]
    if isinstance(value, int) and kind.name in _BOUNDS and -_BOUNDS[kind.name] <= value < _BOUNDS[kind.name]:
        return Literal(value, kind)
    return None


def single(value: float) -> float:
    """The nearest 32-bit float."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


# Times

TIMESTAMP_PATTERN: Final = (
    r"^([+-]?[0-9]{4,6})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T]([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{1,2})"
    r"(?:\.([0-9]*))?[ ]*(?:Z|(?:UTC|GMT|UT)?(?:([+-])(?:([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{2}))?)?"
    r"|([0-9]{2})([0-9]{2})([0-9]{2})?))?)?)?)?)?)?)?$"
)
"""What Spark reads as a timestamp: year, month, day, hour, minute, second, fraction, and the zone in two spellings."""
DATE_PATTERN: Final = r"(?s)^([+-]?[0-9]{4,7})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T].*)?)?)?$"
"""What Spark reads as a date."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ZONE_MAX: Final = timedelta(hours=18)


def read_timestamp(text: str) -> int | None:
    """Microseconds since 1970 UTC; None if the text is not a timestamp of the years 1 to 9999."""
    found = re.fullmatch(TIMESTAMP_PATTERN, text.strip(" "))
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()[:6])
    month, day = (1 if part is None else int(part) for part in found.groups()[1:3])
    micros = int((found[7] or "0").ljust(6, "0")[:6])
    hours, minutes, seconds = (int(found[at] or found[at + 3] or 0) for at in (9, 10, 11))
    zone = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if zone > _ZONE_MAX or max(minutes, seconds) > 59:  # noqa: PLR2004 - the clock
        return None
    try:
        moment = datetime(year, month, day, hour, minute, second, micros, tzinfo=UTC)
    except ValueError:
        return None
    return (moment - _EPOCH - (-zone if found[8] == "-" else zone)) // timedelta(microseconds=1)


def read_date(text: str) -> int | None:
    """Days since 1970; None if the text is not a date of the years 1 to 9999."""
    found = re.fullmatch(DATE_PATTERN, text.strip(" "))
    if found is None:
        return None
    try:
        day = date(int(found[1]), int(found[2] or 1), int(found[3] or 1))
    except ValueError:
        return None
    return (day - _EPOCH.date()).days


# Intervals

_MICROS: Final = {
    "microsecond": 1, "millisecond": 1_000, "second": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000,
    "day": 86_400_000_000, "week": 7 * 86_400_000_000,
}  # fmt: skip
_MONTHS: Final = {"month": 1, "year": 12}
_AMOUNT: Final = re.compile(r"\s*([+-]?)\s*(\d+(?:\.\d{1,9})?)\s*")
_PAIR: Final = re.compile(r"([+-]?\s*\d+(?:\.\d{1,9})?)\s+([A-Za-z]+)")


def interval(node: exp.Interval) -> Literal:
    """An interval literal: of months, or of microseconds; never both."""
    value, unit = node.args.get("this"), node.args.get("unit")
    negative = isinstance(value, exp.Neg)
    if negative:
        value = value.args["this"]  # type: ignore[union-attr]
    if not isinstance(value, exp.Literal):
        raise ClashError("the amount of an INTERVAL is a number written out, such as INTERVAL '10' SECOND.")
    text = str(value.args["this"])
    if isinstance(unit, exp.IntervalSpan):
        raise ClashError("write INTERVAL '1 day 2 hours' instead of INTERVAL ... DAY TO HOUR.")
    pairs = [(text, unit.name)] if unit is not None else _PAIR.findall(text)
    if not pairs or (unit is None and _PAIR.sub("", text).strip()):
        raise ClashError(f"{text!r} is not an interval; write for instance INTERVAL '10' SECOND.")
    found = [_span(amount, name) for amount, name in pairs]
    kinds = {kind for _, kind in found}
    if YEAR_MONTH in kinds and len(kinds) > 1:
        raise ClashError("an interval is of months and years, or of weeks, days and less, but not both.")
    total = sum(amount for amount, _ in found)
    return Literal(-total if negative else total, DAY_TIME if DAY_TIME in kinds else found[0][1])


def _span(text: str, unit: str) -> tuple[int, DataType]:
    amount = _AMOUNT.fullmatch(text)
    name = unit.lower().removesuffix("s")
    if amount is None or name not in {**_MICROS, **_MONTHS}:
        units = ", ".join([*_MICROS, *_MONTHS])
        raise ClashError(f"{text!r} {unit} is not an interval; units are {units}.")
    exact = Decimal(amount[1] + amount[2])
    size = _MICROS.get(name) or _MONTHS[name]
    if exact != int(exact) and name != "second":
        raise ClashError("only seconds may have a fraction in an interval.")
    kind = YEAR_MONTH if name in _MONTHS else DAYS if name in {"day", "week"} else DAY_TIME
    return int(exact * size), kind
