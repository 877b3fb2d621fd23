"""Type rules: which types go together, and what comes out. Spark's rules with ANSI mode off.

The functions of `functions` are declared with these rules. A rule takes checked arguments, casts them to what the function
works on, and returns them with the type of the result; it raises `ClashError` if they do not fit. One thing is stricter than
Spark: a string in arithmetic is an error, where Spark would read it as a double without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from difflib import get_close_matches
from typing import Final

from fordstone.errors import SchemaError
from fordstone.lang.like import check_like, check_separator, extracting, plain_text, replacing, rust_regex
from fordstone.lang.schema import (
    BIGINT,
    BINARY,
    BOOLEAN,
    DATE,
    DECIMAL_DIGITS_MAX,
    DOUBLE,
    INT,
    NULL,
    STRING,
    TIMESTAMP,
    ClashError,
    DataType,
    Schema,
    struct_of,
)
from fordstone.lang.term import DAY_TIME, DAYS, YEAR_MONTH, Call, Literal, Term, cast
from fordstone.lang.time_format import fixed_offset_us, parse_format

_NESTED_TEXT: Final = re.compile(r"\s*(?:struct|map|array)\s*<", re.IGNORECASE)
_WIDENING: Final = ("tinyint", "smallint", "int", "bigint", "float", "double")
_INTEGER_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_SCALE_KEPT: Final = 6
"""Digits after the point that a decimal result keeps when all do not fit."""


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
    if left.fields and [name for name, _ in left.fields] == [name for name, _ in right.fields]:
        return _tightest_fields(left, right)
    return None


def _tightest_fields(left: DataType, right: DataType) -> DataType | None:
    """Structs with fields of the same names, or maps."""
    found = []
    for (name, one), (_, other) in zip(left.fields, right.fields, strict=True):
        wider = tightest(one, other)
        if wider is None or left.name != right.name:
            return None
        found.append((name, wider))
    return DataType(left.name, fields=tuple(found))


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
            place = next(at for at, one in enumerate(terms) if one is term)
            raise ClashError(f"{found} and {term.type} have no common type; cast one of them.", place)
        found = wider
    return found


def comparable(left: Term, right: Term) -> DataType:
    """The type in which two values are compared; text is read as the other side's type, as Spark does."""
    kinds = (left.type, right.type)
    shared = tightest(*kinds)
    if shared is not None and shared.is_nested:
        raise ClashError(
            f"{shared.name}s cannot be compared; compare their parts, such as a.x = b.x, or to_json of both."
        )
    if shared is not None and shared.name.startswith("interval"):
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
    if source.is_nested or to.is_nested:
        return _castable_parts(source, to, castable)
    if source.name == "binary" or to.name == "binary":
        return source.name == "string" and to.name == "binary"  # bytes need not be text, so not the other way
    if source.name == "date" or to.name == "date":
        return {source.name, to.name} <= {"date", "timestamp", "string"}
    if to.name == "timestamp" or source.name == "timestamp":
        return (source.name in _TO_ALL or to.name in _TO_ALL) and not to.name.startswith("interval")
    return source.name in _TO_ALL and to.name in _TO_ALL


def _castable_parts(source: DataType, to: DataType, castable: Callable[[DataType, DataType], bool]) -> bool:
    """Whether each part of one nested type can be cast to that of the other: fields by their place. Keys may only widen."""
    if source.name != to.name or len(source.parts) != len(to.parts):
        return False
    if source.name == "map" and tightest(source.field("key"), to.field("key")) != to.field("key"):
        return False
    return all(castable(one, other) for one, other in zip(source.parts, to.parts, strict=True))


def try_castable(source: DataType, to: DataType) -> bool:
    """Whether TRY_CAST is allowed: less than CAST, because ANSI rules have no casts between numbers and times."""
    if source.is_nested and to.is_nested:
        return _castable_parts(source, to, try_castable)
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


Resolved = tuple[tuple[Term, ...], DataType]
_JAVA_DIGITS: Final = 34
"""Scala's decimals are rounded to this number of digits when negated, and Spark stops the query if the result does not fit."""
_PADDED_CHARS_MAX: Final = 10_000
_SPANS: Final = frozenset({DAY_TIME, DAYS, YEAR_MONTH})
Rule = Callable[[Sequence[Term]], Resolved]


def written_out(rule: Rule, *places: int) -> Rule:
    """The rule, where the arguments at these places are string literals."""

    def checked(args: Sequence[Term]) -> Resolved:
        for at in places:
            if at < len(args):
                _known(args, at)
        return rule(args)

    return checked


def numeric(operator: str) -> Rule:
    """Arithmetic on numbers, or on a time and an interval."""

    def rule(args: Sequence[Term]) -> Resolved:
        left, right = args
        if operator in {"+", "-"} and {left.type, right.type} & {TIMESTAMP, DATE, *_SPANS}:
            return _time_arithmetic(operator, left, right)
        one, two, result = arithmetic(operator, left, right)
        return (cast(left, one), cast(right, two)), result

    return rule


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
    _needs_conditions(args, 1)
    return tuple(cast(arg, BOOLEAN) for arg in args), BOOLEAN


def _needs_conditions(args: Sequence[Term], apart: int) -> None:
    for at, arg in enumerate(args):
        if arg.type not in {BOOLEAN, NULL}:
            raise ClashError(f"a condition is needed here, but this is {arg.type}.", apart * at)


def anything(result: DataType) -> Rule:
    """Arguments of any type."""
    return lambda args: (tuple(args), result)


def membership(args: Sequence[Term]) -> Resolved:
    """A value and options of a common type."""
    shared = common(args, strings=True)
    if shared.fields:
        raise ClashError(f"{shared.name}s cannot be compared; compare their parts.", 0)
    return tuple(cast(arg, shared) for arg in args), BOOLEAN


def branches(args: Sequence[Term]) -> Resolved:
    """Arguments are condition, value, condition, value, ..., otherwise."""
    conditions, values = args[0:-1:2], [*args[1:-1:2], args[-1]]
    _needs_conditions(conditions, 2)
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
    if shared.is_nested:
        raise ClashError(f"{shared.name}s have no greatest or least.")
    return tuple(cast(arg, shared) for arg in args), shared


def _as_text(term: Term, at: int) -> Term:
    if term.type.is_nested or term.type in {*_SPANS, BINARY}:
        hint = "; write to_json(...)" if term.type.is_nested else ""
        raise ClashError(f"text is needed here, but this is {term.type}{hint}.", at)
    return cast(term, STRING)


def takes(result: DataType, *wanted: DataType) -> Rule:
    """Arguments of given types: text takes anything that can be written out, double and int take numbers."""

    def rule(args: Sequence[Term]) -> Resolved:
        return tuple(_as_kind(arg, kind, at) for at, (arg, kind) in enumerate(zip(args, wanted, strict=False))), result

    return rule


def _as_kind(arg: Term, kind: DataType, at: int) -> Term:
    if kind == STRING:
        return _as_text(arg, at)
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
    check_like(_known(args, 1), _known(args, 2) if args[2:] else "\\")
    return (*out, *args[2:]), result


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
    if args[2:] and _whole(args, 2) > 0 and plain_text(_known(args, 1)) is None:
        raise ClashError("a limit goes only with a separator that has no special characters.", 2)
    return out


def _checked(check: Callable[[str], object], pattern: str, last: int = 2) -> None:
    try:
        check(pattern)
    except ClashError as clash:
        raise ClashError(clash.message, min(clash.argument or 1, last)) from None


def split_part(args: Sequence[Term]) -> Resolved:
    """Text, a separator and a number that is not 0."""
    if _whole(args, 2) == 0:
        raise ClashError("parts are counted from 1, or from -1 backwards.", 2)
    return written_out(takes(STRING, STRING, STRING, INT), 1)(args)


def substituted(args: Sequence[Term]) -> Resolved:
    """Text, a regular expression and what to put in the place of matches, the latter two written out."""
    by = _known(args, 2)
    _checked(lambda pattern: replacing(pattern, by), _known(args, 1))
    return takes(STRING, STRING, STRING, STRING)(args)


def extracted(args: Sequence[Term]) -> Resolved:
    """Text, a regular expression and perhaps the number of a group, the latter two written out."""
    group = _whole(args, 2) if args[2:] else 1
    _checked(lambda pattern: extracting(pattern, group), _known(args, 1), len(args) - 1)
    return takes(STRING, STRING, STRING, INT)(args)


def padded(args: Sequence[Term]) -> Resolved:
    """Text, a length and perhaps what to fill up with, the latter two written out."""
    if _whole(args, 1) > _PADDED_CHARS_MAX:
        raise ClashError(f"text is filled up to at most {_PADDED_CHARS_MAX} characters.", 1)
    return written_out(takes(STRING, STRING, INT, STRING), 2)(args)


def hashed(result: DataType) -> Rule:
    """Values of any type, each hashed as what it is."""

    def rule(args: Sequence[Term]) -> Resolved:
        for at, arg in enumerate(args):
            if arg.type in _SPANS:
                raise ClashError("an interval is not a value of its own and has no hash.", at)
            if arg.type.contains("struct") or arg.type.contains("map"):
                raise ClashError(f"{arg.type} has no hash; hash its fields, or to_json(...) of it.", at)
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
    places = _whole(args, 1) if len(args) > 1 else 0
    if kind.name == "decimal":
        digits = kind.precision - kind.scale + 1
        scale = min(kind.scale, max(places, 0))
        precision = digits + scale if places >= 0 else max(digits, 1 - places)
        kind = DataType("decimal", precision=min(precision, DECIMAL_DIGITS_MAX), scale=scale)
    return (arg, *args[1:]), kind


TEXT_ARRAY: Final = DataType("array", element=STRING)


def size(args: Sequence[Term]) -> Resolved:
    """An array or a map."""
    if args[0].type.name not in {"array", "map"}:
        raise ClashError(f"an array or a map is needed here, but this is {args[0].type}.", 0)
    return tuple(args), INT


def element(args: Sequence[Term]) -> Resolved:
    """An array and an index, or a map and a key."""
    kind = args[0].type
    if kind.element is not None:
        return (args[0], _as_kind(args[1], INT, 1)), kind.element
    if kind.name != "map":
        hint = "; write from_json(...) or get_json_object(...) for text" if kind == STRING else ""
        raise ClashError(f"an array or a map is needed here, but this is {kind}{hint}.", 0)
    key = kind.field("key")
    if tightest(args[1].type, key) != key:
        raise ClashError(f"the keys of the map are {key}, but this is {args[1].type}.", 1)
    return (args[0], cast(args[1], key)), kind.field("value")


def element_at(args: Sequence[Term]) -> Resolved:
    """As `element`, where 0 is no position."""
    if isinstance(args[1], Literal) and args[0].type.element is not None and args[1].value == 0:
        raise ClashError("positions are counted from 1, or from -1 backwards.", 1)
    return element(args)


def field(args: Sequence[Term]) -> Resolved:
    """A struct, or an array of structs, and the name of a field."""
    holder, name = args[0].type, _known(args, 1)
    inner = holder if holder.element is None else holder.element
    if inner.name != "struct":
        hint = f"; write get_json_object(..., '$.{name}') if it holds JSON" if holder == STRING else ""
        raise ClashError(f"a struct is needed here, but this is {holder}{hint}.", 0)
    fields = dict(inner.fields)
    if name not in fields:
        lowered = {known.lower(): known for known in fields}
        near = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
        hint = f"Did you mean {lowered[near[0]]!r}?" if near else f"Fields are: {', '.join(fields)}."
        raise ClashError(f"there is no field {name!r} in this struct. {hint}", 1)
    return tuple(args), fields[name] if holder.element is None else DataType("array", element=fields[name])


def named_struct(args: Sequence[Term]) -> Resolved:
    """Names, written out, and values in turn."""
    if len(args) % 2:
        raise ClashError("names and values stand in turn: named_struct('a', 1, 'b', x).")
    names = [_known(args, at) for at in range(0, len(args), 2)]
    for at, name in enumerate(names):
        if not name or name in names[:at]:
            raise ClashError(f"two fields are called {name!r}; rename one." if name else "a field has a name.", 2 * at)
    _needs_values(args[1::2])
    fields = tuple(zip(names, (arg.type for arg in args[1::2]), strict=True))
    return tuple(args), DataType("struct", fields=fields)


def _needs_values(args: Sequence[Term]) -> None:
    for arg in args:
        if arg.type in _SPANS:
            raise ClashError("an interval is not a value of its own; add it to a timestamp or a date.")


def array(args: Sequence[Term]) -> Resolved:
    """Values of a common type."""
    _needs_values(args)
    shared = common(args, strings=True)
    return tuple(cast(arg, shared) for arg in args), DataType("array", element=shared)


def entries(args: Sequence[Term]) -> Resolved:
    """Keys and values in turn, each of a common type."""
    if len(args) % 2:
        raise ClashError("keys and values stand in turn: map('a', 1, 'b', 2).")
    _needs_values(args)
    key, value = (common(args[at::2], strings=True) for at in (0, 1))
    if key.is_nested or key == NULL:
        raise ClashError(f"the keys of a map are plain values, such as text or numbers, and not {key}.", 0)
    kind = DataType("map", fields=(("key", key), ("value", value)))
    return tuple(cast(arg, value if at % 2 else key) for at, arg in enumerate(args)), kind


def part_of_map(part: str) -> Rule:
    """A map; an array of its keys or values."""

    def rule(args: Sequence[Term]) -> Resolved:
        if args[0].type.name != "map":
            raise ClashError(f"a map is needed here, but this is {args[0].type}.", 0)
        return tuple(args), DataType("array", element=args[0].type.field(part))

    return rule


def json_path(check: Callable[[str], object]) -> Rule:
    """Text and a JSON path that is written out."""

    def rule(args: Sequence[Term]) -> Resolved:
        try:
            check(_known(args, 1))
        except ClashError as clash:
            raise ClashError(clash.message, 1) from None
        return takes(STRING, STRING, STRING)(args)

    return rule


def json_value(args: Sequence[Term]) -> Resolved:
    """Text and the type to read it as, written out: columns, or one type that has parts."""
    text = _known(args, 1)
    try:
        kind = DataType.parse(text) if _NESTED_TEXT.match(text) else struct_of(dict(Schema.parse(text).columns))
    except SchemaError as error:
        raise ClashError(str(error), 1) from None
    if any(part.name == "map" and part.field("key") != STRING for part in kind.within()):
        raise ClashError("the names in JSON are text: maps have the form map<string, ...> here.", 1)
    return (_as_kind(args[0], STRING, 0), args[1]), kind


def json_written(args: Sequence[Term]) -> Resolved:
    """A value with parts."""
    if not args[0].type.is_nested:
        raise ClashError(f"a struct, map or array is needed here, but this is {args[0].type}; write struct(...).", 0)
    return tuple(args), STRING


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


def formatted(kind: DataType) -> Rule:
    """Text or a time, read as a date or timestamp; with a pattern, which is for text alone, written out."""

    def rule(args: Sequence[Term]) -> Resolved:
        read, result = moment(kind)(args[:1])
        if not args[1:]:
            return read, result
        parse_pattern(args, 1, reads=True)
        return (args[0], args[1]) if args[0].type == STRING else read, result

    return rule


def parse_pattern(args: Sequence[Term], at: int, *, reads: bool) -> None:
    """Refuse a pattern of times that is not supported."""
    try:
        parse_format(_known(args, at), reads=reads)
    except ClashError as clash:
        raise ClashError(clash.message, at) from None


def written_as(first: DataType) -> Rule:
    """A time, or a number of seconds, and the pattern to write it by."""

    def rule(args: Sequence[Term]) -> Resolved:
        if args[1:]:
            parse_pattern(args, 1, reads=False)
        return (_as_kind(args[0], first, 0), *args[1:]), STRING

    return rule


def seconds_of(args: Sequence[Term]) -> Resolved:
    """Text, perhaps with a pattern, or a time."""
    if args[1:]:
        parse_pattern(args, 1, reads=True)
    if args[0].type == STRING:
        return tuple(args), BIGINT
    return (_as_kind(args[0], TIMESTAMP, 0),), BIGINT


def zoned(args: Sequence[Term]) -> Resolved:
    """A timestamp and a zone, written out."""
    try:
        fixed_offset_us(_known(args, 1))
    except ClashError as clash:
        raise ClashError(clash.message, 1) from None
    return (_as_kind(args[0], TIMESTAMP, 0), args[1]), TIMESTAMP


def counted_seconds(args: Sequence[Term]) -> Resolved:
    """A whole number of seconds, or a float."""
    kind = DOUBLE if args[0].type.is_float else BIGINT
    return (_as_kind(args[0], kind, 0),), TIMESTAMP


def days_moved(args: Sequence[Term]) -> Resolved:
    """A date and a number of days that is no bigint."""
    if args[1].type == BIGINT:
        raise ClashError("the days must be an int; write CAST(... AS INT).", 1)
    return takes(DATE, DATE, INT)(args)


def texts(args: Sequence[Term]) -> Resolved:
    """Any number of values, all written out as text."""
    return tuple(_as_text(arg, at) for at, arg in enumerate(args)), STRING


def moment_only(args: Sequence[Term]) -> Resolved:
    """A timestamp, and nothing that could become one; only a date is cast, and the cast is written."""
    (arg,) = args
    if arg.type == DATE:
        return (Call("cast", (arg,), TIMESTAMP),), BIGINT
    if arg.type not in {TIMESTAMP, NULL}:
        raise ClashError(f"timestamp is needed here, but this is {arg.type}; write CAST(... AS TIMESTAMP).", 0)
    return (cast(arg, TIMESTAMP),), BIGINT
