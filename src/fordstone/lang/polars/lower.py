"""From checked expressions to Polars expressions that mean what Spark means, and never stop a query.

Called once per expression at start-up. The result has exactly the declared type and name, and one value per row of the
frame it is evaluated on. Arithmetic, comparison, choice and numbers are here; casts, text, time and values with parts in the
modules next to this one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Final

import polars as pl

from fordstone.lang.expression import Expression
from fordstone.lang.polars import cast as casts
from fordstone.lang.polars import hash as hashes
from fordstone.lang.polars import nested, numbers, text, time_format, zones
from fordstone.lang.polars import times as time
from fordstone.lang.polars.let import let
from fordstone.lang.rules import text_of
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.term import DAYS, YEAR_MONTH, Call, Column, Literal, Term
from fordstone.lang.time_format import USUAL_FORMAT, Part, parse_format

Lowered = Callable[[Call, Sequence[pl.Expr]], pl.Expr]


def to_polars(expression: Expression, schema: Schema) -> pl.Expr:
    """The Polars expression: of type `expression.type.polars`, named `expression.name`.

    `schema` is what the frame has; the expression was parsed against it.
    """
    missing = [name for name in expression.columns if name not in schema]
    if missing:
        raise KeyError(f"{expression.sql!r} reads {missing}, which the frame does not have")
    found = lower(expression.term)
    if not expression.columns:
        found = pl.repeat(found, pl.len(), dtype=expression.type.polars)  # a constant has as many rows as the frame
    elif not _is_full(expression.term):
        found = _beside(pl.col(expression.columns[0]), found)
    return found.alias(expression.name)


def _is_full(term: Term) -> bool:
    """Whether the lowered term surely has a value for every row."""
    if not isinstance(term, Call):
        return isinstance(term, Column)
    plain = term.function in _FULL and not any(arg.type.name == "decimal" for arg in term.args)
    return plain and any(map(_is_full, term.args))


def _beside(column: pl.Expr, found: pl.Expr) -> pl.Expr:
    """The same values, as many as the column has.

    Where no row meets a condition, Polars may hand on a constant branch of `when` as a single row, and then fails
    because it is not as long as the frame. In a struct, a single row is repeated.
    """
    return pl.struct(column.alias("length"), found.alias("value")).struct.field("value")


def lower(term: Term) -> pl.Expr:
    """The Polars expression of one term."""
    if isinstance(term, Column):
        return pl.col(term.name)
    if isinstance(term, Literal):
        return _literal(term)
    lowered = LOWERED[term.function]
    args = [lower(arg) for arg in term.args]
    computed = {f"arg{at}": args[at] for at, arg in enumerate(term.args) if isinstance(arg, Call)}
    if not computed or _mentions_once(term):
        return lowered(term, args)
    # What is computed is bound, so that it is computed once however often the function mentions it.
    literals = [isinstance(arg, Literal) for arg in term.args]
    bound = {f"arg{at}": arg for at, arg in enumerate(args) if not literals[at]}

    def body(**fields: pl.Expr) -> pl.Expr:
        return lowered(term, [fields.get(f"arg{at}", arg) for at, arg in enumerate(args)])

    return let(body, **bound)


def _mentions_once(call: Call) -> bool:
    """Whether the lowered function mentions each argument only once."""
    if call.function in {"+", "-", "*", "/"}:
        return call.type.is_numeric  # moving a time by months looks at it several times
    return call.function in _ONCE


def _literal(literal: Literal) -> pl.Expr:
    value, kind = literal.value, literal.type
    if kind.name.startswith("interval"):
        return pl.lit(value, dtype=pl.Int64())
    if kind.name == "timestamp" and value is not None:
        return pl.lit(value, dtype=pl.Int64()).cast(kind.polars)
    if kind.name == "date" and value is not None:
        return pl.lit(value, dtype=pl.Int32()).cast(kind.polars)
    return pl.lit(value, dtype=kind.polars)


# Arithmetic

_OPERATORS: Final = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "%": numbers.integer_remainder,
}


def _arithmetic(name: str) -> Lowered:
    def lowered(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
        left, right = args
        kinds = (call.args[0].type, call.args[1].type, call.type)
        if call.type.name == "decimal":
            return numbers.decimal_arithmetic(name, left, right, kinds)
        if call.type.name in {"date", "timestamp"}:
            return _moved(name, left, right, kinds)
        if name == "/":
            return numbers.divided(left, right)
        if name == "%" and call.type.is_float:
            return numbers.float_remainder(left, right, call.type.polars)
        found: pl.Expr = _OPERATORS[name](left, right)
        return found

    return lowered


def _moved(name: str, left: pl.Expr, right: pl.Expr, kinds: tuple[DataType, DataType, DataType]) -> pl.Expr:
    by = right.cast(pl.Int64) if name == "+" else -right.cast(pl.Int64)
    if kinds[1] == YEAR_MONTH:
        return time.shift_months(left, by, kinds[2])
    return time.shift(left, by, kinds[2], whole_days=kinds[1] == DAYS)


def _negative(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    if call.type.name == "decimal":
        return numbers.scaled(numbers.negated(numbers.unscaled(args[0])), call.type)
    return -args[0]


def _abs(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    if call.type.name == "decimal":
        return numbers.scaled(numbers.unscaled(args[0]).abs(), call.type)
    return args[0].abs()


def _round(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    kind = call.args[0].type
    places = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], Literal) else 0
    places = places if isinstance(places, int) else 0
    if kind.name == "decimal":
        return numbers.rounded_decimal(args[0], kind, places, call.type)
    if kind.is_float:
        return numbers.rounded(args[0], places, kind.polars)
    return numbers.rounded_integer(args[0], places, kind.polars)


def _whole(*, up: bool) -> Lowered:
    def lowered(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
        kind = call.args[0].type
        if kind.name == "decimal":
            return (numbers.decimal_ceil if up else numbers.decimal_floor)(args[0], kind, call.type)
        if kind.is_integer:
            return args[0].cast(pl.Int64)
        return numbers.saturated(args[0].ceil() if up else args[0].floor())

    return lowered


# Logic


def _infix(compare: Callable[[pl.Expr, pl.Expr], pl.Expr]) -> Lowered:
    return lambda _, args: compare(args[0], args[1])


def _in(_: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    return reduce(operator.or_, [args[0] == option for option in args[1:]])


def _case(_: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    out = args[-1]
    for at in range(len(args) - 3, -1, -2):
        out = pl.when(args[at]).then(args[at + 1]).otherwise(out)
    return out


def _extreme(*, greatest: bool) -> Lowered:
    def pick(best: pl.Expr, other: pl.Expr) -> pl.Expr:
        wins = (other > best) if greatest else (other < best)
        return pl.when(best.is_null() | wins).then(other).otherwise(best)

    return lambda _, args: reduce(pick, args)


def _pattern(call: Call, *, reads: bool) -> tuple[Part, ...]:
    return parse_format(text_of(call.args[1]) if call.args[1:] else USUAL_FORMAT, reads=reads)


def _read_as(call: Call, args: Sequence[pl.Expr], read: Callable[[tuple[Part, ...], pl.Expr], pl.Expr]) -> pl.Expr:
    return read(_pattern(call, reads=True), args[0]) if args[1:] else args[0]  # else the argument is cast by its rule


def _timestamp_seconds(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    if not call.args[0].type.is_float:
        return time.stamp(time.counted(args[0], 1_000_000))
    return let(lambda x: time.stamp(pl.when(x.is_finite()).then(numbers.saturated(x * 1e6))), x=args[0])


def _unix_timestamp(call: Call, args: Sequence[pl.Expr]) -> pl.Expr:
    found = args[0]
    if call.args[0].type.name == "string":
        found = time_format.read_timestamp_as(_pattern(call, reads=True), found)
    # Spark cuts a fraction off towards zero.
    return let(lambda us: (us + pl.when(us < 0).then(999_999).otherwise(0)) // 1_000_000, us=time.micros(found))


_DATE_PARTS: Final = (
    "year", "quarter", "month", "weekofyear", "day", "dayofweek", "weekday", "dayofyear", "hour", "minute", "second",
)  # fmt: skip

_FULL: Final = frozenset(
    {
        "+", "-", "*", "/", "=", "<>", "<=>", "<", "<=", ">", ">=", "and", "or", "not", "isnull", "isnotnull", "lower", "upper",
        "length", "like", "rlike", "abs", "sqrt", "exp", "sign", "isnan", "unix_micros", "unix_millis", "unix_seconds",
        "field", "map_keys", "map_values",
    }
)  # fmt: skip
"""Functions that are lowered without `when`."""
_ONCE: Final = frozenset(
    {
        "=", "<>", "<=>", "<", "<=", ">", ">=", "and", "or", "not", "isnull", "isnotnull", "coalesce", "case", "cast",
        "try_cast", "concat", "lower", "upper", "length", "replace", "like", "rlike", "size", "negative", "abs", "sqrt", "exp",
        "sign", "isnan", "to_timestamp", "to_date", "unix_micros", "unix_millis", "unix_seconds", "timestamp_micros", "floor",
        "ceil", "round", "log2", "log10", "regexp_replace", "startswith", "endswith", "contains", "concat_ws", "reverse", "hash",
        "xxhash64", "date_add", "date_sub", "datediff", "field", "named_struct", "array", "map_keys", "map_values",
        "get_json_object", "from_json", "to_json", "unix_timestamp", "from_utc_timestamp", "to_utc_timestamp", "timestamp_millis",
        "timestamp_seconds",
    }
)  # fmt: skip
"""Functions that mention each argument once, or bind it themselves. All others have computed arguments bound for them."""

LOWERED: Final[dict[str, Lowered]] = {
    **{name: _arithmetic(name) for name in ("+", "-", "*", "/", "%")},
    "negative": _negative,
    "=": _infix(operator.eq),
    "<>": _infix(operator.ne),
    "<=>": _infix(pl.Expr.eq_missing),
    "<": _infix(operator.lt),
    "<=": _infix(operator.le),
    ">": _infix(operator.gt),
    ">=": _infix(operator.ge),
    "and": _infix(operator.and_),
    "or": _infix(operator.or_),
    "not": lambda _, args: ~args[0],
    "isnull": lambda _, args: args[0].is_null(),
    "isnotnull": lambda _, args: args[0].is_not_null(),
    "in": _in,
    "case": _case,
    "coalesce": lambda _, args: pl.coalesce(*args),
    "greatest": _extreme(greatest=True),
    "least": _extreme(greatest=False),
    "cast": lambda call, args: casts.cast(args[0], call.args[0].type, call.type),
    "try_cast": lambda call, args: casts.try_cast(args[0], call.args[0].type, call.type),
    "concat": lambda _, args: pl.concat_str(args) if len(args) > 1 else args[0],
    "lower": lambda _, args: args[0].str.to_lowercase(),
    "upper": lambda _, args: args[0].str.to_uppercase(),
    **{name: (lambda call, args: text.trim(call.function, args)) for name in ("trim", "ltrim", "rtrim")},
    "substring": lambda _, args: text.substring(args),
    "length": lambda _, args: args[0].str.len_chars().cast(pl.Int32),
    "replace": text.replace,
    "split": text.split,
    "split_part": text.split_part,
    "like": text.like,
    "rlike": text.rlike,
    "regexp_replace": text.regexp_replace,
    "regexp_extract": text.regexp_extract,
    "instr": lambda _, args: text.instr(args),
    "startswith": lambda _, args: args[0].str.starts_with(args[1]),
    "endswith": lambda _, args: args[0].str.ends_with(args[1]),
    "contains": lambda _, args: args[0].str.contains(args[1], literal=True),
    "left": lambda _, args: text.substring([args[0], pl.lit(1), args[1]]),
    "right": lambda _, args: text.right(args),
    "lpad": text.pad,
    "rpad": text.pad,
    "concat_ws": text.concat_ws,
    "reverse": lambda _, args: text.reverse(args[0]),
    "hash": lambda _, args: hashes.hashed(hashes.MURMUR3, args),
    "xxhash64": lambda _, args: hashes.hashed(hashes.XXH64, args),
    "size": nested.size,
    "element": nested.element,
    "element_at": nested.element_at,
    "field": nested.field,
    "named_struct": nested.struct,
    "array": nested.array,
    "map": nested.map_,
    "map_keys": lambda _, args: args[0].map.keys(),
    "map_values": lambda _, args: args[0].map.values(),
    "get_json_object": nested.get_json_object,
    "from_json": nested.from_json,
    "to_json": nested.to_json,
    "abs": _abs,
    "round": _round,
    "floor": _whole(up=False),
    "ceil": _whole(up=True),
    "sqrt": lambda _, args: args[0].sqrt(),
    "exp": lambda _, args: args[0].exp(),
    "ln": lambda _, args: numbers.ln(args[0]),
    "log10": lambda _, args: numbers.log10(args[0]),
    "log2": lambda _, args: numbers.log2(args[0]),
    "pow": lambda _, args: numbers.power(args[0], args[1]),
    "sign": lambda _, args: args[0].sign(),
    "isnan": lambda _, args: args[0].is_nan().fill_null(value=False),
    "date_trunc": lambda call, args: time.truncate(text_of(call.args[0]), args[1]),
    **{name: (lambda call, args: time.part(call.function, args[0])) for name in _DATE_PARTS},
    "date_add": lambda _, args: time.shift_days(args[0], args[1]),
    "date_sub": lambda _, args: time.shift_days(args[0], -args[1]),
    "datediff": lambda _, args: time.days_between(args[0], args[1]),
    "to_timestamp": lambda call, args: _read_as(call, args, time_format.read_timestamp_as),
    "to_date": lambda call, args: _read_as(call, args, time_format.read_date_as),
    "date_format": lambda call, args: time_format.write_as(_pattern(call, reads=False), args[0]),
    "from_unixtime": lambda call, args: time_format.write_as(
        _pattern(call, reads=False), time.stamp(args[0] * 1_000_000)
    ),
    "unix_timestamp": _unix_timestamp,
    "from_utc_timestamp": lambda call, args: zones.from_utc(args[0], text_of(call.args[1])),
    "to_utc_timestamp": lambda call, args: zones.to_utc(args[0], text_of(call.args[1])),
    "unix_micros": lambda _, args: time.micros(args[0]),
    "unix_millis": lambda _, args: time.micros(args[0]) // 1_000,
    "unix_seconds": lambda _, args: time.micros(args[0]) // 1_000_000,
    "timestamp_micros": lambda _, args: time.stamp(args[0]),
    "timestamp_millis": lambda _, args: time.stamp(time.counted(args[0], 1_000)),
    "timestamp_seconds": _timestamp_seconds,
}
