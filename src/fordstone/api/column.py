"""Building expressions with Python operators instead of SQL text.

A `Column` holds a sqlglot tree; nothing is checked before it meets a schema. Names and values are put into the tree as
they are and never pasted into text, so any name and any text is safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Final, NoReturn

from sqlglot import exp

from fordstone.errors import ExpressionError, PipelineError
from fordstone.lang.dialect import DIALECT
from fordstone.lang.schema import DataType

Value = bool | int | float | str | bytes | Decimal | datetime | date | timedelta | None
"""What `lit` takes, and what operators take on the other side."""

_FUNCTION_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ATOMS: Final = (
    exp.Column,
    exp.Literal,
    exp.Anonymous,
    exp.Cast,
    exp.Case,
    exp.Paren,
    exp.Boolean,
    exp.Null,
    exp.Dot,
    exp.Bracket,
)


def _operator(kind: type[exp.Binary]) -> Callable[[Column, Column | Value], Column]:
    return lambda left, right: _binary(kind, left, right)


def _reflected(kind: type[exp.Binary]) -> Callable[[Column, Value], Column]:
    return lambda right, left: _binary(kind, left, right)


class Column:
    """An expression under construction. Operators build larger ones; `tree` is what the parser reads."""

    __slots__ = ("tree",)

    def __init__(self, tree: exp.Expr) -> None:
        self.tree = tree

    def as_(self, name: str) -> Column:
        """Name the result."""
        tree = self.tree.args["this"] if isinstance(self.tree, exp.Alias) else self.tree
        return Column(exp.Alias(this=tree.copy(), alias=exp.Identifier(this=name, quoted=True)))

    def cast(self, to: str | DataType) -> Column:
        """As another type; what does not fit is null."""
        kind = to if isinstance(to, DataType) else DataType.parse(to)
        return Column(exp.TryCast(this=_inner(self), to=exp.DataType.build(str(kind), dialect=DIALECT)))

    def is_null(self) -> Column:
        """Whether it is null."""
        return Column(exp.Is(this=_wrapped(self), expression=exp.Null()))

    def is_not_null(self) -> Column:
        """Whether it is not null."""
        return Column(exp.Not(this=exp.Is(this=_wrapped(self), expression=exp.Null())))

    def is_in(self, *options: Column | Value) -> Column:
        """Whether it equals one of the options."""
        if not options:
            raise ExpressionError("is_in needs at least one option.", text=str(self))
        return Column(exp.In(this=_wrapped(self), expressions=[_inner(option) for option in options]))

    def between(self, low: Column | Value, high: Column | Value) -> Column:
        """Whether it lies between the two, both included."""
        return Column(exp.Between(this=_wrapped(self), low=_wrapped(low), high=_wrapped(high)))

    def like(self, pattern: str) -> Column:
        """Whether the text matches a LIKE pattern."""
        return Column(exp.Like(this=_wrapped(self), expression=exp.Literal.string(pattern)))

    def rlike(self, pattern: str) -> Column:
        """Whether a regular expression matches a part of the text."""
        return Column(exp.RegexpLike(this=_wrapped(self), expression=exp.Literal.string(pattern)))

    def null_safe_eq(self, other: Column | Value) -> Column:
        """Equal, where null equals null."""
        return _binary(exp.NullSafeEQ, self, other)

    __add__, __radd__ = _operator(exp.Add), _reflected(exp.Add)
    __sub__, __rsub__ = _operator(exp.Sub), _reflected(exp.Sub)
    __mul__, __rmul__ = _operator(exp.Mul), _reflected(exp.Mul)
    __truediv__, __rtruediv__ = _operator(exp.Div), _reflected(exp.Div)
    __mod__, __rmod__ = _operator(exp.Mod), _reflected(exp.Mod)
    __and__, __rand__ = _operator(exp.And), _reflected(exp.And)
    __or__, __ror__ = _operator(exp.Or), _reflected(exp.Or)
    __eq__ = _operator(exp.EQ)  # type: ignore[assignment]
    __ne__ = _operator(exp.NEQ)  # type: ignore[assignment]
    __lt__ = _operator(exp.LT)
    __le__ = _operator(exp.LTE)
    __gt__ = _operator(exp.GT)
    __ge__ = _operator(exp.GTE)

    def __neg__(self) -> Column:
        return Column(exp.Neg(this=exp.Paren(this=_inner(self))))

    def __invert__(self) -> Column:
        return Column(exp.Not(this=exp.Paren(this=_inner(self))))

    def field(self, name: str) -> Column:
        """A field of a struct; of an array of structs, the array of that field."""
        return Column(exp.Dot(this=_wrapped(self), expression=exp.Identifier(this=name, quoted=True)))

    def __getitem__(self, index: Column | int | str) -> Column:
        """An element of an array by its index from 0, the value of a key of a map, or a field of a struct."""
        return Column(exp.Bracket(this=_wrapped(self), expressions=[_inner(index)]))

    def __iter__(self) -> NoReturn:
        raise TypeError("a column cannot be looped over")

    def __contains__(self, item: object) -> bool:
        raise TypeError("`in` cannot be used on a column; write .is_in(...) or .like(...)")

    def __bool__(self) -> bool:
        raise TypeError("a column has no truth value while the pipeline is built; join conditions with & | ~")

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.tree.sql(dialect=DIALECT, normalize_functions=False)

    def __repr__(self) -> str:
        return f"Column({self})"


class When(Column):
    """A CASE under construction: null where no condition holds, until `otherwise` says what else."""

    __slots__ = ()

    def when(self, condition: Column, value: Column | Value) -> When:
        """A further branch, looked at where none before it held."""
        tree = self.tree.copy()
        tree.append("ifs", exp.If(this=_inner(condition), true=_inner(value)))
        return When(tree)

    def otherwise(self, value: Column | Value) -> Column:
        """The value where no condition held."""
        tree = self.tree.copy()
        tree.set("default", _inner(value))
        return Column(tree)


def col(name: str) -> Column:
    """A column of the stream, by its exact name."""
    if not isinstance(name, str) or not name:
        raise ExpressionError("a column name is a non-empty string.", text=repr(name))
    return Column(exp.Column(this=exp.Identifier(this=name, quoted=True)))


def lit(value: Value) -> Column:
    """A constant. A Python float is a double, an int an int (or a bigint), a timedelta an interval."""
    return Column(_literal(value))


def when(condition: Column, value: Column | Value) -> When:
    """Start a choice: `when(c, a).when(d, b).otherwise(x)`."""
    return When(exp.Case(ifs=[exp.If(this=_inner(condition), true=_inner(value))]))


def fn(name: str, *args: Column | Value) -> Column:
    """Call any supported function by name: `fn("date_trunc", "hour", col("ts"))`. Plain values are constants."""
    if not _FUNCTION_NAME.fullmatch(name):
        raise ExpressionError("this is not the name of a function.", text=name)
    return Column(exp.Anonymous(this=name, expressions=[_inner(arg) for arg in args]))


def count(column: Column | str | None = None) -> Column:
    """The number of rows, or of those where the column is not null."""
    if column is None:
        return Column(exp.Anonymous(this="count", expressions=[exp.Star()]))
    return _aggregate("count", column)


def sum_(column: Column | str) -> Column:
    """The sum of a column."""
    return _aggregate("sum", column)


def mean(column: Column | str) -> Column:
    """The mean of a column."""
    return _aggregate("mean", column)


def min_(column: Column | str) -> Column:
    """The least value of a column."""
    return _aggregate("min", column)


def max_(column: Column | str) -> Column:
    """The greatest value of a column."""
    return _aggregate("max", column)


def first(column: Column | str) -> Column:
    """The value of the row with the least event time."""
    return _aggregate("first", column)


def last(column: Column | str) -> Column:
    """The value of the row with the greatest event time."""
    return _aggregate("last", column)


def variance(column: Column | str) -> Column:
    """The sample variance of a column."""
    return _aggregate("variance", column)


def stddev(column: Column | str) -> Column:
    """The sample standard deviation of a column."""
    return _aggregate("stddev", column)


def count_distinct(column: Column | str, lgk: int | None = None) -> Column:
    """The approximate number of distinct values of a column. `lgk`: the binary logarithm of the sketch's size."""
    return _aggregate("count_distinct", column, lgk)


def quantile(column: Column | str, q: float, k: int | None = None) -> Column:
    """Approximately the value that the share `q` of a column does not exceed. `k`: the size of the sketch."""
    return _aggregate("quantile", column, q, k)


def median(column: Column | str) -> Column:
    """Approximately the median of a column."""
    return _aggregate("median", column)


def collect(column: Column | str) -> Column:
    """All values of a column, an array in order of time."""
    return _aggregate("collect", column)


def beta_mean(ok: Column | str, *, prior: tuple[float, float] = (1, 1)) -> Column:
    """The expected rate at which a condition is true. `prior`: how often true and false count as seen before."""
    return _aggregate("beta_mean", ok, *prior)


def beta_low(ok: Column | str, level: float, *, prior: tuple[float, float] = (1, 1)) -> Column:
    """The lower end of the interval in which the rate lies at which a condition is true, with the probability `level`."""
    return _aggregate("beta_low", ok, level, *prior)


def beta_high(ok: Column | str, level: float, *, prior: tuple[float, float] = (1, 1)) -> Column:
    """The upper end of the interval in which the rate lies at which a condition is true, with the probability `level`."""
    return _aggregate("beta_high", ok, level, *prior)


def expression_source(given: object, where: str = "") -> str | exp.Expr:
    """Return what the parser takes: SQL text, or the tree of a `Column`. Raises `PipelineError` for anything else."""
    if isinstance(given, Column):
        return given.tree
    if isinstance(given, str):
        return given
    lead = f"{where}: " if where else ""
    raise PipelineError(f"{lead}{given!r} is not an expression. Write SQL text, or build it from col(...).")


def _aggregate(name: str, column: Column | str, *options: float | None) -> Column:
    argument = _inner(col(column) if isinstance(column, str) else column)
    return Column(
        exp.Anonymous(this=name, expressions=[argument, *(_literal(one) for one in options if one is not None)])
    )


def _binary(kind: type[exp.Binary], left: Column | Value, right: Column | Value) -> Column:
    return Column(kind(this=_wrapped(left), expression=_wrapped(right)))


def _inner(value: Column | Value) -> exp.Expr:
    """The tree of a value, a copy, so that no node has two parents."""
    if not isinstance(value, Column):
        return _literal(value)
    if isinstance(value.tree, exp.Alias):
        raise ExpressionError("name the whole expression with as_, not a part of it.", text=str(value))
    return value.tree.copy()


def _wrapped(value: Column | Value) -> exp.Expr:
    tree = _inner(value)
    return tree if isinstance(tree, _ATOMS) else exp.Paren(this=tree)


def _literal(value: object) -> exp.Expr:
    match value:
        case None:
            return exp.Null()
        case bool():
            return exp.Boolean(this=value)
        case int():
            return _signed(exp.Literal.number(str(abs(value))), negative=value < 0)
        case float():
            return _float(value)
        case str():
            return exp.Literal.string(value)
        case bytes():
            return exp.HexString(this=value.hex())
        case Decimal() if value.is_finite():
            return _decimal(value)
        case datetime():
            if value.tzinfo is None:
                raise ExpressionError("a datetime needs a time zone, for instance tzinfo=UTC.", text=repr(value))
            return _moment(f"{value.astimezone(UTC).replace(tzinfo=None).isoformat(sep=' ')}Z", "timestamp")
        case date():
            return _moment(value.isoformat(), "date")
        case timedelta():
            micros = value // timedelta(microseconds=1)
            amount = f"{'-' if micros < 0 else ''}{abs(micros) // 1_000_000}.{abs(micros) % 1_000_000:06d}"
            return exp.Interval(this=exp.Literal.string(amount), unit=exp.Var(this="SECOND"))
        case _:
            raise ExpressionError("this is neither a column nor a constant.", text=repr(value))


def _signed(tree: exp.Expr, *, negative: bool) -> exp.Expr:
    return exp.Neg(this=tree) if negative else tree


def _float(value: float) -> exp.Expr:
    double = exp.DataType.build("double", dialect=DIALECT)
    if value - value != 0:  # NaN and the infinities
        spelled = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124 - NaN
        return exp.TryCast(this=exp.Literal.string(spelled), to=double)
    text = repr(value)
    number = exp.TryCast(this=exp.Literal.number(text.lstrip("-")), to=double)
    return _signed(number, negative=text.startswith("-"))


def _decimal(value: Decimal) -> exp.Expr:
    text = f"{value.copy_abs():f}"
    if "." in text:
        return _signed(exp.Literal.number(text), negative=value < 0)
    kind = exp.DataType.build(f"decimal({len(text)}, 0)", dialect=DIALECT)
    return exp.TryCast(this=exp.Literal.string(f"{value:f}"), to=kind)


def _moment(text: str, kind: str) -> exp.Expr:
    return exp.Cast(this=exp.Literal.string(text), to=exp.DataType.build(kind, dialect=DIALECT))
