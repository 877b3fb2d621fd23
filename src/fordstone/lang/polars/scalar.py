"""Terms over single values: what a pattern asks of one row and the rows before it.

A term becomes a Python function of two sequences, the slots and the values of a row. Values are plain: timestamps are
microseconds, dates days, decimals text, floats doubles; lists of them likewise. Nothing is lost by that. Arithmetic of whole
numbers and doubles, comparison and logic are done here; every other function is handed to its Polars lowering, for a frame of
one row: slow, and the same by construction. `tests/lang/test_scalar.py` compares the two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import polars as pl

from fordstone.lang.polars.lower import lower
from fordstone.lang.schema import TIMESTAMP, DataType
from fordstone.lang.term import DAY_TIME, DAYS, Call, Column, Literal, Term


def plain_type(kind: DataType) -> pl.DataType:
    """The Polars type of the plain form."""
    if kind.element is not None:
        return pl.List(plain_type(kind.element))
    if kind.name == "map":
        return pl.Map(plain_type(kind.field("key")), plain_type(kind.field("value")))
    if kind.name == "struct":
        return pl.Struct({name: plain_type(inner) for name, inner in kind.fields})
    match kind.name:
        case "timestamp":
            return pl.Int64()
        case "date":
            return pl.Int32()
        case "decimal":
            return pl.String()
        case "float":
            return pl.Float64()
        case name if name.startswith("interval"):
            return pl.Int64()
        case _:
            return kind.polars


def as_plain(column: pl.Expr, kind: DataType) -> pl.Expr:
    """A typed column in plain form."""
    plain = plain_type(kind)
    return column if not kind.name.startswith("interval") and plain == kind.polars else column.cast(plain)


def as_typed(column: pl.Expr, kind: DataType) -> pl.Expr:
    """A plain column as its type."""
    if kind.name.startswith("interval") or plain_type(kind) == kind.polars:
        return column
    return column.cast(kind.polars)


def plain_value(literal: Literal) -> Any:
    """A constant in plain form."""
    value = literal.value
    if isinstance(value, Decimal):
        return f"{value:f}"
    return float(value) if literal.type.is_float and isinstance(value, int | float) else value


Values = Sequence[Any]
Scalar = Callable[[Values, Values], Any]
"""Of the slots and of the values of the row."""

_WIDTHS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_COMPARED: Final = frozenset(
    {"boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary", "date", "timestamp"}
)


def scalar_of(term: Term, source: Callable[[str], Scalar]) -> Scalar:
    """The function of a term. `source` gives the function of a column."""
    if isinstance(term, Column):
        return source(term.name)
    if isinstance(term, Literal):
        value = plain_value(term)
        return lambda _slots, _values: value
    args = [scalar_of(arg, source) for arg in term.args]
    found = _native(term, args)
    return _lowered(term, args) if found is None else found


def _native(term: Call, args: Sequence[Scalar]) -> Scalar | None:
    """The function of a call, where it is one of those written here."""
    kinds = [arg.type for arg in term.args]
    name = term.function
    if name in _LOGIC:
        return _LOGIC[name](args)
    if name in {"+", "-"} and term.type == kinds[0] == TIMESTAMP and kinds[1] in {DAY_TIME, DAYS}:
        return _wrapped(_ARITHMETIC[name], args, 64)
    if any(kind.name not in _COMPARED for kind in kinds):
        return None
    if name in _COMPARISONS:
        return _on_values((_COMPARISONS if any(kind.is_float for kind in kinds) else _WITHOUT_NAN)[name], args)
    if name in _ARITHMETIC and term.type.name in _WIDTHS:
        return _wrapped(_ARITHMETIC[name], args, _WIDTHS[term.type.name])
    if name in _ARITHMETIC and term.type.name == "double":
        return _on_values(_ARITHMETIC[name], args)
    if name == "/" and term.type.name == "double":
        return _on_values(lambda left, right: None if right == 0 else left / right, args)
    if name == "cast" and kinds[0].is_integer and term.type.name == "double":
        return _on_values(float, args)
    if name == "cast" and kinds[0].is_integer and _WIDTHS.get(term.type.name, 0) >= _WIDTHS[kinds[0].name]:
        return args[0]
    return None


# Logic with three values


def _decided(args: Sequence[Scalar], *, by: bool) -> Scalar:
    """AND is decided by one value that is false, OR by one that is true."""
    left, right = args

    def run(slots: Values, values: Values) -> bool | None:
        first: bool | None = left(slots, values)
        if first is by:
            return by
        second: bool | None = right(slots, values)
        return by if second is by else None if first is None or second is None else not by

    return run


def _case(args: Sequence[Scalar]) -> Scalar:
    branches, default = list(zip(args[:-1:2], args[1:-1:2], strict=True)), args[-1]

    def run(slots: Values, values: Values) -> Any:
        for when, then in branches:
            if when(slots, values) is True:
                return then(slots, values)
        return default(slots, values)

    return run


def _coalesce(args: Sequence[Scalar]) -> Scalar:
    def run(slots: Values, values: Values) -> Any:
        for arg in args:
            if (found := arg(slots, values)) is not None:
                return found
        return None

    return run


_LOGIC: Final[dict[str, Callable[[Sequence[Scalar]], Scalar]]] = {
    "and": lambda args: _decided(args, by=False),
    "or": lambda args: _decided(args, by=True),
    "not": lambda args: _on_values(operator.not_, args),
    "isnull": lambda args: lambda slots, values: args[0](slots, values) is None,
    "isnotnull": lambda args: lambda slots, values: args[0](slots, values) is not None,
    "case": _case,
    "coalesce": _coalesce,
}

# Comparison: NaN equals itself and is greater than any number


def _equal(left: Any, right: Any) -> bool:
    return bool(left == right) or (left != left and right != right)  # noqa: PLR0124 - only NaN differs from itself


def less(left: Any, right: Any) -> bool:
    """Whether one value comes before another; NaN comes last."""
    return bool(left < right) or (right != right and left == left)  # noqa: PLR0124 - only NaN differs from itself


_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": _equal,
    "<>": lambda left, right: not _equal(left, right),
    "<": less,
    ">": lambda left, right: less(right, left),
    "<=": lambda left, right: not less(right, left),
    ">=": lambda left, right: not less(left, right),
}
_WITHOUT_NAN: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
# Arithmetic

_ARITHMETIC: Final[dict[str, Callable[..., Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "negative": operator.neg,
    "abs": abs,
}


def wrapped(value: int, width: int = 64) -> int:
    """Wrap a whole number to this number of bits."""
    half = 1 << (width - 1)
    return value if -half <= value < half else (value + half) % (1 << width) - half


def _wrapped(compute: Callable[..., int], args: Sequence[Scalar], width: int) -> Scalar:
    return _on_values(lambda *given: wrapped(compute(*given), width), args)


def _on_values(compute: Callable[..., Any], args: Sequence[Scalar]) -> Scalar:
    """A function of one or two values, null where one of them is null."""
    if len(args) == 1:
        (only,) = args

        def run_one(slots: Values, values: Values) -> Any:
            found = only(slots, values)
            return None if found is None else compute(found)

        return run_one
    left, right = args

    def run(slots: Values, values: Values) -> Any:
        first, second = left(slots, values), right(slots, values)
        return None if first is None or second is None else compute(first, second)

    return run


def _lowered(term: Call, args: Sequence[Scalar]) -> Scalar:
    """By Polars, for a frame of one row."""
    given = {f"a{at}": arg for at, arg in enumerate(term.args) if not isinstance(arg, Literal)}
    columns = tuple(arg if isinstance(arg, Literal) else Column(f"a{at}", arg.type) for at, arg in enumerate(term.args))
    typed = [as_typed(pl.col(name), arg.type).alias(name) for name, arg in given.items()]
    found = as_plain(lower(Call(term.function, columns, term.type, term.implicit)), term.type).alias("found")
    types = {name: plain_type(arg.type) for name, arg in given.items()}

    def run(slots: Values, values: Values) -> Any:
        row = {name: [args[int(name[1:])](slots, values)] for name in types}
        frame = pl.DataFrame(row, schema=types, strict=False) if types else pl.DataFrame({"a": [0]})
        return frame.select(typed or pl.col("a")).select(found).item(0, 0)

    return run
