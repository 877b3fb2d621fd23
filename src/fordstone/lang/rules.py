"""The type rules that the functions of `model.functions` are declared with.

A rule takes checked arguments, casts them to what the function works on, and gives them back with the type of the
result. It raises `ClashError` if they do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fordstone.lang.coercion import (
    BIGINT,
    BINARY,
    BOOLEAN,
    DATE,
    DOUBLE,
    INT,
    NULL,
    STRING,
    TIMESTAMP,
    ClashError,
    arithmetic,
    common,
    comparable,
    text_of,
)
from fordstone.lang.like import check_like, check_separator, extracting, plain_text, replacing, rust_regex
from fordstone.lang.schema import DECIMAL_DIGITS_MAX, DataType
from fordstone.lang.term import DAY_TIME, DAYS, YEAR_MONTH, Call, Literal, Term, cast

Resolved = tuple[tuple[Term, ...], DataType]
_JAVA_DIGITS: Final = 34
"""Scala's decimals are rounded to this number of digits when negated, and Spark stops the query if the result does not fit."""
_PADDED_CHARS_MAX: Final = 10_000
_SPANS: Final = frozenset({DAY_TIME, DAYS, YEAR_MONTH})
Rule = Callable[[Sequence[Term]], Resolved]


def numeric(operator: str) -> Rule:
    """Arithmetic on numbers, or on a time and an interval."""

    def rule(args: Sequence[Term]) -> Resolved:
        left, right = args
        if operator in {"+", "-"} and _is_time(left.type, right.type):
            return _time_arithmetic(operator, left, right)
        one, two, result = arithmetic(operator, left, right)
        return (cast(left, one), cast(right, two)), result

    return rule


def _is_time(*kinds: DataType) -> bool:
    return any(kind in {TIMESTAMP, DATE, *_SPANS} for kind in kinds)


def _time_arithmetic(operator: str, left: Term, right: Term) -> Resolved:
    if operator == "+" and not _is_moment(left.type) and _is_moment(right.type):
        left, right = right, left
    if left.type in _SPANS and right.type in _SPANS:
        if (left.type == YEAR_MONTH) != (right.type == YEAR_MONTH):
            raise ClashError("an interval is of months and years, or of weeks, days and less, but not both.")
        return (left, right), left.type if left.type == right.type else DAY_TIME
    if not _is_moment(left.type):
        raise ClashError(f"{operator!r} cannot join {left.type} and {right.type}.")
    if _is_moment(right.type) or right.type == STRING:
        raise ClashError(
            f"{operator!r} cannot join {left.type} and {right.type}; for a difference in microseconds write "
            "unix_micros(a) - unix_micros(b)."
        )
    if right.type in {YEAR_MONTH, DAYS}:
        return (left, right), left.type
    if right.type == DAY_TIME:
        return (cast(left, TIMESTAMP), right), TIMESTAMP
    if left.type == DATE and right.type.name in {"tinyint", "smallint", "int"}:
        return (left, cast(right, INT)), DATE
    raise ClashError(f"{operator!r} cannot join {left.type} and {right.type}; write an INTERVAL.", 1)


def _is_moment(kind: DataType) -> bool:
    return kind in {TIMESTAMP, DATE}


def comparison(args: Sequence[Term]) -> Resolved:
    """Two values that can be compared."""
    shared = comparable(args[0], args[1])
    return (cast(args[0], shared), cast(args[1], shared)), BOOLEAN


def logic(args: Sequence[Term]) -> Resolved:
    """Conditions."""
    for at, arg in enumerate(args):
        if arg.type not in {BOOLEAN, NULL}:
            raise ClashError(f"a condition is needed here, but this is {arg.type}.", at)
    return tuple(cast(arg, BOOLEAN) for arg in args), BOOLEAN


def anything(result: DataType) -> Rule:
    """Arguments of any type."""
    return lambda args: (tuple(args), result)


def membership(args: Sequence[Term]) -> Resolved:
    """A value and options of a common type."""
    shared = common(args, strings=True)
    return tuple(cast(arg, shared) for arg in args), BOOLEAN


def branches(args: Sequence[Term]) -> Resolved:
    """Arguments are condition, value, condition, value, ..., otherwise."""
    conditions, values = args[0:-1:2], [*args[1:-1:2], args[-1]]
    for at, condition in enumerate(conditions):
        if condition.type not in {BOOLEAN, NULL}:
            raise ClashError(f"a condition is needed here, but this is {condition.type}.", 2 * at)
    shared = common(values, strings=True)
    out: list[Term] = []
    for condition, value in zip(conditions, values[:-1], strict=True):
        # Spark refuses a bare NULL as a condition here, so the cast is written.
        out.append(condition if condition.type == BOOLEAN else Call("cast", (condition,), BOOLEAN))
        out.append(cast(value, shared))
    return (*out, cast(values[-1], shared)), shared


def same(args: Sequence[Term]) -> Resolved:
    """Arguments of a common type, which is the result's."""
    shared = common(args, strings=True)
    return tuple(cast(arg, shared) for arg in args), shared


def extreme(args: Sequence[Term]) -> Resolved:
    """Arguments of a common type that has an order."""
    shared = common(args, strings=False)
    if shared.element is not None:
        raise ClashError("arrays have no greatest or least.")
    return tuple(cast(arg, shared) for arg in args), shared


def as_text(term: Term, at: int) -> Term:
    """A term as text; numbers, times and booleans are written out as Spark writes them."""
    if term.type.element is not None or term.type in {*_SPANS, BINARY}:
        raise ClashError(f"text is needed here, but this is {term.type}.", at)
    return cast(term, STRING)


def takes(result: DataType, *wanted: DataType) -> Rule:
    """Arguments of given types: text takes anything that can be written out, double and int take numbers."""

    def rule(args: Sequence[Term]) -> Resolved:
        out = []
        for at, (arg, kind) in enumerate(zip(args, wanted, strict=False)):
            if kind == STRING:
                out.append(as_text(arg, at))
            else:
                out.append(_as_kind(arg, kind, at))
        return tuple(out), result

    return rule


def _as_kind(arg: Term, kind: DataType, at: int) -> Term:
    fits = arg.type in {kind, NULL}
    if kind == DOUBLE:
        fits = fits or arg.type.is_numeric
    elif kind in {BIGINT, INT}:
        fits = fits or arg.type.is_integer
    elif kind == TIMESTAMP:
        fits = fits or arg.type in {DATE, STRING}
    elif kind == DATE:
        fits = fits or arg.type in {TIMESTAMP, STRING}
    if not fits:
        raise ClashError(f"{kind} is needed here, but this is {arg.type}.", at)
    return cast(arg, kind)


def like(args: Sequence[Term]) -> Resolved:
    """Text and a LIKE pattern, perhaps with an escape, written out."""
    out, result = takes(BOOLEAN, STRING, STRING)(args)
    escape = "\\"
    if len(args) > 2:  # noqa: PLR2004 - the escape is the third
        escape = _known(args, 2)
        out = (*out, args[2])
    check_like(_known(args, 1), escape)
    return out, result


def _known(args: Sequence[Term], at: int) -> str:
    try:
        return text_of(args[at])
    except ClashError as error:
        raise ClashError(error.message, at) from None


def regex(args: Sequence[Term]) -> Resolved:
    """Text and a regular expression that is written out."""
    out = takes(BOOLEAN, STRING, STRING)(args)
    _checked(rust_regex, _known(args, 1))
    return out


def separated(args: Sequence[Term]) -> Resolved:
    """Text, a regular expression and perhaps a limit, all but the text written out."""
    out = takes(TEXT_ARRAY, STRING, STRING, INT)(args)
    _checked(check_separator, _known(args, 1))
    if len(args) > 2 and _whole(args, 2) > 0 and plain_text(_known(args, 1)) is None:  # noqa: PLR2004 - the limit is the third
        raise ClashError("a limit goes only with a separator that has no special characters.", 2)
    return out


def _checked(check: Callable[[str], object], pattern: str, last: int = 2) -> None:
    try:
        check(pattern)
    except ClashError as clash:
        raise ClashError(clash.message, min(clash.argument or 1, last)) from None


def split_part(args: Sequence[Term]) -> Resolved:
    """Text, a separator and a number that is not 0."""
    out = takes(STRING, STRING, STRING, INT)(args)
    _known(args, 1)
    if _whole(args, 2) == 0:
        raise ClashError("parts are counted from 1, or from -1 backwards.", 2)
    return out


def replaced(args: Sequence[Term]) -> Resolved:
    """Text, what to look for and what to put there, the latter two written out."""
    for at in range(1, len(args)):
        _known(args, at)
    return takes(STRING, STRING, STRING, STRING)(args)


def substituted(args: Sequence[Term]) -> Resolved:
    """Text, a regular expression and what to put in the place of matches, the latter two written out."""
    by = _known(args, 2)
    _checked(lambda pattern: replacing(pattern, by), _known(args, 1))
    return takes(STRING, STRING, STRING, STRING)(args)


def extracted(args: Sequence[Term]) -> Resolved:
    """Text, a regular expression and perhaps the number of a group, the latter two written out."""
    group = _whole(args, 2) if len(args) > 2 else 1  # noqa: PLR2004 - the group is the third
    _checked(lambda pattern: extracting(pattern, group), _known(args, 1), len(args) - 1)
    return takes(STRING, STRING, STRING, INT)(args)


def padded(args: Sequence[Term]) -> Resolved:
    """Text, a length and perhaps what to fill up with, the latter two written out."""
    if _whole(args, 1) > _PADDED_CHARS_MAX:
        raise ClashError(f"text is filled up to at most {_PADDED_CHARS_MAX} characters.", 1)
    for at in range(2, len(args)):
        _known(args, at)
    return takes(STRING, STRING, INT, STRING)(args)


def joined(args: Sequence[Term]) -> Resolved:
    """A separator, written out, and any number of values, all written out as text."""
    _known(args, 0)
    return texts(args)


def hashed(result: DataType) -> Rule:
    """Values of any type, each hashed as what it is."""

    def rule(args: Sequence[Term]) -> Resolved:
        for at, arg in enumerate(args):
            if arg.type in _SPANS:
                raise ClashError("an interval is not a value of its own and has no hash.", at)
        return tuple(args), result

    return rule


def _whole(args: Sequence[Term], at: int) -> int:
    arg = args[at]
    value = arg.value if isinstance(arg, Literal) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ClashError("this must be a whole number written out, such as 2.", at)
    return value


def sign_kept(args: Sequence[Term]) -> Resolved:
    """A number; the result has its type."""
    (arg,) = args
    if arg.type == NULL:
        return (cast(arg, DOUBLE),), DOUBLE
    if not arg.type.is_numeric:
        raise ClashError(f"a number is needed here, but this is {arg.type}.", 0)
    if arg.type.precision > _JAVA_DIGITS:
        raise ClashError(
            f"{arg.type} has more than {_JAVA_DIGITS} digits, beyond which Spark rounds here; cast it to a narrower one.",
            0,
        )
    return (arg,), arg.type


def negative(args: Sequence[Term]) -> Resolved:
    """A number or an interval."""
    return (tuple(args), args[0].type) if args[0].type in _SPANS else sign_kept(args)


def whole(args: Sequence[Term]) -> Resolved:
    """Result of floor and ceil: bigint, except that a decimal stays one."""
    (arg,), kind = sign_kept(args)
    if kind.name == "decimal":
        if kind.scale == 0:
            return (arg,), kind
        digits = min(kind.precision - kind.scale + 1, DECIMAL_DIGITS_MAX)
        return (arg,), DataType("decimal", precision=digits)
    return (arg if kind.is_integer else cast(arg, DOUBLE),), BIGINT


def rounded(args: Sequence[Term]) -> Resolved:
    """A number, perhaps with places written out."""
    (arg,), kind = sign_kept(args[:1])
    places = 0
    if len(args) > 1:
        places = _whole(args, 1)
    if kind.name == "decimal":
        kind = _rounded_decimal(kind, places)
    return (arg, *args[1:]), kind


def _rounded_decimal(kind: DataType, places: int) -> DataType:
    whole = kind.precision - kind.scale + 1
    scale = min(kind.scale, max(places, 0))
    precision = whole + scale if places >= 0 else max(whole, 1 - places)
    return DataType("decimal", precision=min(precision, DECIMAL_DIGITS_MAX), scale=scale)


TEXT_ARRAY: Final = DataType("array", element=STRING)


def size(args: Sequence[Term]) -> Resolved:
    """An array."""
    if args[0].type.element is None:
        raise ClashError(f"an array is needed here, but this is {args[0].type}.", 0)
    return tuple(args), INT


def element(args: Sequence[Term]) -> Resolved:
    """An array and an index."""
    array, at = args
    if array.type.element is None:
        raise ClashError(f"an array is needed here, but this is {array.type}.", 0)
    return (array, _as_kind(at, INT, 1)), array.type.element


UNITS: Final = (
    "year", "quarter", "month", "week", "day", "hour", "minute", "second", "millisecond", "microsecond",
)  # fmt: skip
"""What date_trunc truncates to."""
_UNIT_ALIASES: Final = {"yyyy": "year", "yy": "year", "mon": "month", "mm": "month", "dd": "day"}


def truncated(args: Sequence[Term]) -> Resolved:
    """A unit, written out, and a timestamp."""
    written = _known(args, 0).lower()
    unit = _UNIT_ALIASES.get(written, written)
    if unit not in UNITS:
        raise ClashError(f"{written!r} is not a unit; units are {', '.join(UNITS)}.", 0)
    return (Literal(unit, STRING), _as_kind(args[1], TIMESTAMP, 1)), TIMESTAMP


def moment(kind: DataType) -> Rule:
    """Text or a time, read as a date or timestamp."""

    def rule(args: Sequence[Term]) -> Resolved:
        if args[0].type.name not in {"string", "timestamp", "date", "null"}:
            raise ClashError(f"text is needed here, but this is {args[0].type}.", 0)
        return (cast(args[0], kind),), kind

    return rule


def days_moved(args: Sequence[Term]) -> Resolved:
    """A date and a number of days that is no bigint."""
    if args[1].type == BIGINT:
        raise ClashError("the days must be an int; write CAST(... AS INT).", 1)
    return takes(DATE, DATE, INT)(args)


def texts(args: Sequence[Term]) -> Resolved:
    """Any number of values, all written out as text."""
    return tuple(as_text(arg, at) for at, arg in enumerate(args)), STRING


def moment_only(args: Sequence[Term]) -> Resolved:
    """A timestamp, and nothing that could become one; only a date is cast, and the cast is written."""
    (arg,) = args
    if arg.type == DATE:
        return (Call("cast", (arg,), TIMESTAMP),), BIGINT
    if arg.type not in {TIMESTAMP, NULL}:
        raise ClashError(f"timestamp is needed here, but this is {arg.type}; write CAST(... AS TIMESTAMP).", 0)
    return (cast(arg, TIMESTAMP),), BIGINT
