"""Which types go together, and what comes out: Spark's rules with ANSI mode off.

Pure functions of types and terms. One thing is stricter than Spark: a string in arithmetic is an error, where Spark
would read it as a double without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from fordstone.lang.schema import DECIMAL_DIGITS_MAX, DataType
from fordstone.lang.term import Call, Literal, Term

BOOLEAN: Final = DataType("boolean")
INT: Final = DataType("int")
BIGINT: Final = DataType("bigint")
DOUBLE: Final = DataType("double")
STRING: Final = DataType("string")
BINARY: Final = DataType("binary")
DATE: Final = DataType("date")
TIMESTAMP: Final = DataType("timestamp")
NULL: Final = DataType("null")

_WIDENING: Final = ("tinyint", "smallint", "int", "bigint", "float", "double")
_INTEGER_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_SCALE_KEPT: Final = 6
"""Digits after the point that a decimal result keeps when all do not fit."""


class ClashError(Exception):
    """Types that do not go together. `argument` is which one is at fault, if it is one."""

    def __init__(self, message: str, argument: int | None = None) -> None:
        self.message = message
        self.argument = argument
        super().__init__(message)


def decimal(precision: int, scale: int) -> DataType:
    """A decimal type; where it would need more than 38 digits, digits after the point are given up first."""
    if precision <= DECIMAL_DIGITS_MAX:
        return DataType("decimal", precision=precision, scale=scale)
    whole = precision - scale
    kept = max(DECIMAL_DIGITS_MAX - whole, min(scale, _SCALE_KEPT))
    return DataType("decimal", precision=DECIMAL_DIGITS_MAX, scale=kept)


def as_decimal(term: Term) -> DataType:
    """The decimal type that holds an integer or decimal term; a whole-number literal takes only the digits it has."""
    if isinstance(term, Literal) and isinstance(term.value, int):
        return DataType("decimal", precision=max(len(str(abs(term.value))), 1))
    return widest_decimal(term.type)


def widest_decimal(kind: DataType) -> DataType:
    """The decimal type that holds every value of an integer or decimal type."""
    return kind if kind.name == "decimal" else DataType("decimal", precision=_INTEGER_DIGITS[kind.name])


def literal_decimal(value: Decimal) -> DataType:
    """The type of a decimal literal: just the digits that are written."""
    _, digits, exponent = value.as_tuple()
    scale = max(-int(exponent), 0)
    precision = max(len(digits) + max(int(exponent), 0), scale, 1)
    if precision > DECIMAL_DIGITS_MAX:
        raise ClashError(f"{value} has {precision} digits; a decimal has at most {DECIMAL_DIGITS_MAX}.")
    return DataType("decimal", precision=precision, scale=scale)


def tightest(left: DataType, right: DataType) -> DataType | None:
    """The type both become without loss of meaning, strings aside; None if there is none."""
    if right in {left, NULL}:
        return left
    if left == NULL:
        return right
    if {left.name, right.name} == {"date", "timestamp"}:
        return TIMESTAMP
    if left.is_numeric and right.is_numeric:
        if "decimal" in {left.name, right.name}:
            return DOUBLE if left.is_float or right.is_float else _wider_decimal(left, right)
        return DataType(max(left.name, right.name, key=_WIDENING.index))
    if left.element is not None and right.element is not None:
        inner = tightest(left.element, right.element)
        return None if inner is None else DataType("array", element=inner)
    return None


def _wider_decimal(left: DataType, right: DataType) -> DataType:
    one, two = widest_decimal(left), widest_decimal(right)
    scale = max(one.scale, two.scale)
    whole = max(one.precision - one.scale, two.precision - two.scale)
    if whole + scale > DECIMAL_DIGITS_MAX:
        scale = max(DECIMAL_DIGITS_MAX - whole, 0)  # digits before the point come first
    return DataType("decimal", precision=min(whole + scale, DECIMAL_DIGITS_MAX), scale=scale)


def common(terms: Sequence[Term], *, strings: bool) -> DataType:
    """The type that several branches share (CASE, coalesce, IN); with `strings`, anything mixed with text becomes text."""
    found = NULL
    # Spark looks at strings first, so that the order of mixed branches does not matter.
    for term in sorted(terms, key=lambda term: term.type != STRING) if strings else terms:
        wider = tightest(found, term.type)
        if wider is None and strings and STRING in {found, term.type}:
            other = term.type if found == STRING else found
            wider = STRING if other.is_numeric or other.name in {"date", "timestamp"} else None
        if wider is None:
            raise ClashError(f"{found} and {term.type} have no common type; cast one of them.", _index(terms, term))
        found = wider
    return found


def _index(terms: Sequence[Term], wanted: Term) -> int:
    return next(at for at, term in enumerate(terms) if term is wanted)


def comparable(left: Term, right: Term) -> DataType:
    """The type in which two values are compared; text is read as the other side's type, as Spark does."""
    kinds = (left.type, right.type)
    shared = tightest(*kinds)
    if shared is not None and (shared.name.startswith("interval") or shared.element is not None):
        shared = None
    if shared is None and STRING in kinds:
        other = kinds[1] if kinds[0] == STRING else kinds[0]
        if other.name == "decimal":
            return DOUBLE
        if other.is_numeric or other.name in {"boolean", "date", "timestamp"}:
            return other
    if shared is None:
        raise ClashError(f"{kinds[0]} cannot be compared with {kinds[1]}; cast one of them.")
    return shared


def arithmetic(operator: str, left: Term, right: Term) -> tuple[DataType, DataType, DataType]:
    """Types of both arguments and of the result for `+ - * / %` on numbers."""
    for at, term in enumerate((left, right)):
        if not (term.type.is_numeric or term.type == NULL):
            hint = "; write CAST(... AS DOUBLE) if it holds numbers" if term.type == STRING else ""
            raise ClashError(f"{operator!r} needs numbers, but this is {term.type}{hint}.", at)
    kinds = (left.type, right.type)
    if operator == "/" and left.type == NULL:
        return DOUBLE, DOUBLE, DOUBLE  # but a decimal / NULL is a decimal
    if any(kind.name == "decimal" for kind in kinds) and not any(kind.is_float for kind in kinds):
        one = as_decimal(left if left.type != NULL else right)
        two = as_decimal(right if right.type != NULL else left)
        return one, two, decimal_result(operator, one, two)
    if operator == "/" or kinds == (NULL, NULL):
        return DOUBLE, DOUBLE, DOUBLE
    shared = tightest(*kinds) or DOUBLE
    return shared, shared, shared


def decimal_result(operator: str, one: DataType, two: DataType) -> DataType:
    """The type of a decimal result, checked to be computable in 128 bits."""
    scale = max(one.scale, two.scale)
    match operator:
        case "+" | "-":
            result = decimal(max(one.precision - one.scale, two.precision - two.scale) + scale + 1, scale)
            digits = max(kind.precision + scale - kind.scale for kind in (one, two))
        case "*":
            result = decimal(one.precision + two.precision + 1, one.scale + two.scale)
            digits = DECIMAL_DIGITS_MAX if result.scale == one.scale + two.scale else one.precision + two.precision
        case "/":
            scale = max(_SCALE_KEPT, one.scale + two.precision + 1)
            result = decimal(one.precision - one.scale + two.scale + scale, scale)
            shift = result.scale - one.scale + two.scale
            # Divided at once, or first the whole part and then the rest, which is smaller than the divisor.
            digits = max(min(one.precision, two.precision) + shift, two.precision - shift)
        case _:
            result = decimal(min(one.precision - one.scale, two.precision - two.scale) + scale, scale)
            digits = max(kind.precision + scale - kind.scale for kind in (one, two))
    if digits > DECIMAL_DIGITS_MAX:
        raise ClashError(
            f"{one} {operator} {two} needs {digits} digits on the way; a decimal has {DECIMAL_DIGITS_MAX}. "
            "Cast an operand to a narrower decimal or to double."
        )
    return result


_TO_ALL: Final = frozenset({"boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "string"})


def castable(source: DataType, to: DataType) -> bool:
    """Whether CAST is allowed. A value that does not fit is null, or wraps where Spark wraps."""
    if source in {to, NULL}:
        return True
    if source.element is not None or to.element is not None:
        return source.element is not None and to.element is not None and castable(source.element, to.element)
    if source.name == "binary" or to.name == "binary":
        return source.name == "string" and to.name == "binary"  # bytes need not be text, so not the other way
    if source.name == "date" or to.name == "date":
        return {source.name, to.name} <= {"date", "timestamp", "string"}
    if to.name == "timestamp" or source.name == "timestamp":
        return (source.name in _TO_ALL or to.name in _TO_ALL) and not to.name.startswith("interval")
    return source.name in _TO_ALL and to.name in _TO_ALL


def try_castable(source: DataType, to: DataType) -> bool:
    """Whether TRY_CAST is allowed: less than CAST, for its ANSI rules know no casts between numbers and times."""
    if source.element is not None and to.element is not None:
        return try_castable(source.element, to.element)
    times = [kind.name in {"date", "timestamp"} for kind in (source, to)]
    fits = all(times) or not any(times) or "string" in {source.name, to.name} or source == NULL
    return fits and castable(source, to)


def text_of(term: Term) -> str:
    """A string literal's value, for arguments that must be known when the pipeline is built."""
    if isinstance(term, Call) and term.implicit:
        term = term.args[0]
    if isinstance(term, Literal) and isinstance(term.value, str):
        return term.value
    raise ClashError("this must be a string literal.")
