"""Aggregates: the table of them, and aggregate expressions.

An aggregate is declared in `AGGREGATES` (what it takes, what comes out, what may be done with its parts, a line for the docs);
what is kept for it stands in `operators.aggregate` under the same name. `sum(x) / count(*)` is two calls and a finish,
`__a0 / __a1`: the operators keep and merge the calls, each on its own, and `finish` runs once per result row. A user's own
aggregate is a call of its import path (`user_aggregate`).
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from sqlglot import exp

from fordstone.errors import ExpressionError
from fordstone.lang.dialect import offset_of, quoted_name
from fordstone.lang.expression import PARSED_MAX, Checker, Expression, checked, expression_of, parse, split_alias
from fordstone.lang.schema import BIGINT, DECIMAL_DIGITS_MAX, DOUBLE, NULL, ClashError, DataType, Schema
from fordstone.lang.term import Call, Column, Literal, Term, render, written_call

Invertible = typing.Literal["always", "exact", "never"]
"""Whether rows can be taken out again by subtraction: always, for integers and decimals, or never."""
HLL_LG_K: Final = 12
KLL_K: Final = 200
LAG_MAX: Final = 100_000
"""Maximum number of rows that lag looks back: they are kept for every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A constant number after an aggregate's argument."""

    name: str
    check: Callable[[float], str | None]
    """What is wrong with a value, as the end of a sentence that begins with the value; None: nothing."""
    default: float | None = None
    """None: it must be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateFunction:
    """One aggregate: `accepts` gives the argument as it is kept and the result type, or raises `ClashError`."""

    name: str
    signature: str
    about: str
    example: str
    accepts: Callable[[Term], tuple[Term, DataType]]
    mergeable: bool = True
    """Parts of the rows, made anywhere and merged in any order, give the result of all the rows."""
    invertible: Invertible = "never"
    star: bool = False
    by: bool = False
    """It takes a second argument, which says which row's value counts."""
    over_only: bool = False
    """It needs rows in order, so it is known with `over` only."""
    options: tuple[Option, ...] = ()
    needs_time: bool = False
    """Which value is first or last is a question of event time."""
    repeats: bool = True
    """The same rows give the same result however they were batched, floats within rounding; else within a stated error."""


def _count(argument: Term) -> tuple[Term, DataType]:
    return argument, BIGINT


def _sum(argument: Term) -> tuple[Term, DataType]:
    kind = argument.type
    if kind == NULL:
        return Call("cast", (argument,), DOUBLE), DOUBLE
    _needs_number(kind)
    if kind.name == "decimal":
        return argument, DataType("decimal", precision=min(kind.precision + 10, DECIMAL_DIGITS_MAX), scale=kind.scale)
    return argument, BIGINT if kind.is_integer else DOUBLE


def _mean(argument: Term) -> tuple[Term, DataType]:
    if argument.type != NULL:
        _needs_number(argument.type)
    # The cast is written, so that Spark, too, takes the mean of doubles.
    return (Call("cast", (argument,), DOUBLE) if argument.type.name in {"decimal", "null"} else argument), DOUBLE


def _double(argument: Term) -> tuple[Term, DataType]:
    if argument.type != NULL:
        _needs_number(argument.type)
    return (argument if argument.type == DOUBLE else Call("cast", (argument,), DOUBLE)), DOUBLE


def _extreme(argument: Term) -> tuple[Term, DataType]:
    if argument.type.is_nested:
        raise ClashError(f"{argument.type.name}s have no least or greatest.")
    return argument, argument.type


def _ordered(argument: Term) -> tuple[Term, DataType]:
    if argument.type.contains("array") or argument.type.contains("map"):
        raise ClashError(f"{argument.type} cannot be put in order here; take a part, or write to_json(...).")
    return argument, argument.type


def _collected(argument: Term) -> tuple[Term, DataType]:
    return argument, DataType("array", element=_ordered(argument)[1])


def _distinct(argument: Term) -> tuple[Term, DataType]:
    if argument.type.is_nested:
        raise ClashError(f"{argument.type.name}s cannot be counted as values; take a part, or write to_json(...).")
    return argument, BIGINT


def _truth(argument: Term) -> tuple[Term, DataType]:
    if argument.type == NULL:
        return Call("cast", (argument,), DataType("boolean")), DOUBLE
    if argument.type.name != "boolean":
        raise ClashError(
            f"a condition is needed here, but this is {argument.type}; write what makes it a success, as in x > 0."
        )
    return argument, DOUBLE


def _needs_number(kind: DataType) -> None:
    if not kind.is_numeric:
        raise ClashError(f"a number is needed here, but this is {kind}.")


# Checks of options: what is wrong with a value.


def _between(low: float, high: float) -> Callable[[float], str | None]:
    return lambda value: None if low <= value <= high else f"does not lie between {low:g} and {high:g}"


def _inside(low: float, high: float) -> Callable[[float], str | None]:
    return lambda value: None if low < value < high else f"is not above {low:g} and below {high:g}"


def _whole(low: int, high: int) -> Callable[[float], str | None]:
    return lambda value: (
        None if low <= value <= high and value == int(value) else f"is no whole number from {low} to {high}"
    )


_LG_K: Final = Option(name="lgk", check=_whole(7, 21), default=HLL_LG_K)
_K: Final = Option(name="k", check=_whole(8, 65535), default=KLL_K)
_LAG: Final = Option(name="n", check=_whole(1, LAG_MAX), default=1)
_PRIOR_MAX: Final = 1e15
_LEVEL: Final = Option(name="level", check=_inside(0, 1))
_PRIOR: Final = (
    Option(name="a", check=_inside(0, _PRIOR_MAX), default=1),
    Option(name="b", check=_inside(0, _PRIOR_MAX), default=1),
)

AGGREGATES: Final[dict[str, AggregateFunction]] = {
    function.name: function
    for function in (
        AggregateFunction(
            name="count", signature="count(*) or count(x)", about="The number of rows, or of those where x is not null.",
            example="count(*)", accepts=_count, star=True, invertible="always",
        ),
        AggregateFunction(
            name="sum", signature="sum(x)", accepts=_sum, example="sum(1)", invertible="exact",
            about="The sum; null if all are null. Integers sum to a bigint and wrap; decimals gain ten digits, up to 38, and a sum beyond is null.",
        ),
        AggregateFunction(
            name="mean", signature="avg(x)", accepts=_mean, example="avg(1)",
            about="The mean, a double (also of decimals, where Spark has a decimal). Also mean(x).",
        ),
        AggregateFunction(
            name="min", signature="min(x)", about="The least value; NaN is greater than any number.", example="min(1)",
            accepts=_extreme,
        ),
        AggregateFunction(
            name="max", signature="max(x)", about="The greatest value; NaN is greater than any number.", example="max(1)",
            accepts=_extreme,
        ),
        AggregateFunction(
            name="first", signature="first(x)", example="first(1)", accepts=_ordered, needs_time=True,
            about="The value of the earliest row, which may be null; of several rows with that time, the least value (null is less than any).",
        ),
        AggregateFunction(
            name="last", signature="last(x)", example="last(1)", accepts=_ordered, needs_time=True,
            about="The value of the latest row, which may be null; of several rows with that time, the greatest value.",
        ),
        AggregateFunction(
            name="var_samp", signature="variance(x)", example="variance(1)", accepts=_double,
            about="The sample variance, a double; null for fewer than two values. Also var_samp(x).",
        ),
        AggregateFunction(
            name="var_pop", signature="var_pop(x)", example="var_pop(1)", accepts=_double,
            about="The population variance; 0 for a single value, null for none.",
        ),
        AggregateFunction(
            name="stddev_samp", signature="stddev(x)", example="stddev(1)", accepts=_double,
            about="The sample standard deviation: the square root of variance(x). Also stddev_samp(x), std(x).",
        ),
        AggregateFunction(
            name="stddev_pop", signature="stddev_pop(x)", example="stddev_pop(1)", accepts=_double,
            about="The population standard deviation: the square root of var_pop(x).",
        ),
        AggregateFunction(
            name="count_distinct", signature="count_distinct(x[, lgk])", example="count_distinct(1)", accepts=_distinct,
            options=(_LG_K,),
            about="The approximate number of distinct values, without nulls: HyperLogLog with 2 to the power of lgk (7 to 21, 12 by default) registers. Also approx_count_distinct(x).",
        ),
        AggregateFunction(
            name="count distinct", signature="count(DISTINCT x)", example="count(DISTINCT 1)", accepts=_distinct,
            about="The exact number of distinct values, without nulls. All of them are kept, so it grows with their number; count_distinct(x) does not.",
        ),
        AggregateFunction(
            name="sum distinct", signature="sum(DISTINCT x)", example="sum(DISTINCT 1)", accepts=_sum,
            about="The sum of the distinct values. All of them are kept.",
        ),
        AggregateFunction(
            name="mean distinct", signature="avg(DISTINCT x)", example="avg(DISTINCT 1)", accepts=_mean,
            about="The mean of the distinct values. All of them are kept.",
        ),
        AggregateFunction(
            name="max_by", signature="max_by(x, y)", example="max_by(1, 2)", accepts=_ordered, by=True,
            about="The value of x in the row with the greatest y, which may be null; rows where y is null do not count. Of several rows with that y, the greatest x.",
        ),
        AggregateFunction(
            name="min_by", signature="min_by(x, y)", example="min_by(1, 2)", accepts=_ordered, by=True,
            about="The value of x in the row with the least y, which may be null; rows where y is null do not count. Of several rows with that y, the least x (null is less than any).",
        ),
        AggregateFunction(
            name="lag", signature="lag(x[, n])", example="lag(1)", accepts=_ordered, options=(_LAG,), over_only=True,
            about="Only with over: the value of x n rows before (1 by default) in order of time; null if there is no such row.",
        ),
        AggregateFunction(
            name="quantile", signature="quantile(x, q[, k])", example="quantile(1, 0.5)", accepts=_double,
            options=(Option(name="q", check=_between(0, 1)), _K), repeats=False,
            about="Approximately the least value that at least the share q (0 to 1) of all values do not exceed, a double; nulls and NaN are ignored. Exact for up to k values (8 to 65535, 200 by default), else a KLL sketch. median(x) is quantile(x, 0.5).",
        ),
        AggregateFunction(
            name="collect", signature="collect(x)", example="collect(1)", accepts=_collected,
            about="All values except nulls, as an array in order of time and then of value; it grows with the window. Also collect_list(x).",
        ),
        AggregateFunction(
            name="beta_mean", signature="beta_mean(ok[, a, b])", example="beta_mean(1 < 2)", accepts=_truth,
            options=_PRIOR, invertible="always",
            about="The expected rate at which ok is true, a double; nulls are ignored: the mean of Beta(a + true, b + false). The prior, a and b (1 and 1 by default), counts as that number of rows seen before.",
        ),
        AggregateFunction(
            name="beta_low", signature="beta_low(ok, level[, a, b])", example="beta_low(1 < 2, 0.95)", accepts=_truth,
            options=(_LEVEL, *_PRIOR), invertible="always",
            about="The lower end of the interval in which that rate lies with the probability level (above 0, below 1); the rate is as likely below the interval as above it.",
        ),
        AggregateFunction(
            name="beta_high", signature="beta_high(ok, level[, a, b])", example="beta_high(1 < 2, 0.95)", accepts=_truth,
            options=(_LEVEL, *_PRIOR), invertible="always",
            about="The upper end of that interval.",
        ),
    )
}  # fmt: skip
AGGREGATE_ALIASES: Final = {
    "avg": "mean",
    "variance": "var_samp",
    "stddev": "stddev_samp",
    "std": "stddev_samp",
    "collect_list": "collect",
    "approx_count_distinct": "count_distinct",
    "first_value": "first",
    "last_value": "last",
    "median": "quantile",
}
IMPLIED: Final = {"median": "0.5"}
"""Names that stand for another with this option already given."""
DISTINCT: Final = {
    "count": "count distinct",
    "sum": "sum distinct",
    "mean": "mean distinct",
    "min": "min",
    "max": "max",
}
"""What an aggregate is with DISTINCT before its argument; the least and the greatest are the same."""
AGGREGATE_NAMES: Final = frozenset({*AGGREGATES, *AGGREGATE_ALIASES} - set(DISTINCT.values()) | {"min", "max"}) - {
    function.name for function in AGGREGATES.values() if function.over_only
}
OVER_NAMES: Final = frozenset(
    {
        "count", "sum", "avg", "mean", "min", "max", "first", "first_value", "last", "last_value", "lag", "variance", "var_samp", "var_pop",
        "stddev", "std", "stddev_samp", "stddev_pop", "beta_mean", "beta_low", "beta_high",
    }
)  # fmt: skip
"""Those that are known over a frame of rows."""


RESULT_PREFIX: Final = "__a"
"""`finish` reads the result of call i as the column `__a<i>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateCall:
    """One call that state is kept for. There are no `arguments` for count(*), and two for max_by; a user's own takes any number."""

    function: str
    """Its name in `AGGREGATES`; or, with a colon in it, the import path of a user's own."""
    arguments: tuple[Expression, ...]
    options: tuple[float, ...] = ()
    """The constants after the argument, as `AggregateFunction.options` names them, all of them."""
    state: tuple[tuple[str, DataType], ...] = ()
    """What a user's own keeps."""
    type: DataType

    @property
    def argument(self) -> Expression | None:
        return self.arguments[0] if self.arguments else None

    @property
    def declared(self) -> AggregateFunction | None:
        """What the table says of it; None for a user's own."""
        return AGGREGATES.get(self.function)

    @property
    def sql(self) -> str:
        """The call as it is written, options left out."""
        return written_call(self.function, [argument.sql for argument in self.arguments] or ["*"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """An aggregate column. `finish` is over the columns `__a0`, `__a1`, ... and has this aggregate's name.

    `sql` is canonical: `parse_aggregate(a.sql, schema, a.name) == a`.
    """

    name: str
    sql: str
    type: DataType
    calls: tuple[AggregateCall, ...]
    finish: Expression
    tree: exp.Expr = field(compare=False, repr=False)

    @property
    def columns(self) -> tuple[str, ...]:
        found = (argument for call in self.calls for argument in call.arguments)
        return tuple(dict.fromkeys(name for argument in found for name in argument.columns))

    @property
    def results(self) -> Schema:
        """The columns that `finish` reads."""
        return Schema(tuple((f"{RESULT_PREFIX}{at}", call.type) for at, call in enumerate(self.calls)))


def parse_aggregate(
    source: str | exp.Expr, schema: Schema, name: str | None = None, *, text: str | None = None, over: bool = False
) -> Aggregate:
    """Check an aggregate expression; called once for each argument of `agg(...)`, or of `over(...)`.

    `name` is what the column is called; without it, what AS says, or else the text. `text`: what a tree was read from.

    Raises:
        ExpressionError: with the text and the place of what is wrong.
    """
    if isinstance(source, str):
        return _parse_text(source, schema, name, over=over)
    return checked(source, text, lambda tree, text: _parse_tree(tree, schema, name, text, over=over))


# As `expression.parse` does.
@lru_cache(maxsize=PARSED_MAX)
def _parse_text(source: str, schema: Schema, name: str | None, *, over: bool) -> Aggregate:
    return checked(source, None, lambda tree, text: _parse_tree(tree, schema, name, text, over=over))


def without_filters(tree: exp.Expr, text: str) -> exp.Expr:
    """The tree with CASE inside of aggregates in the place of FILTER (WHERE ...): they ignore nulls. The given tree is changed.

    Raises:
        ExpressionError: for first and last, whose value may be null.
    """
    for node in list(tree.find_all(exp.Filter)):
        call, where = node.args["this"], node.args["expression"]
        args = call.args.get("expressions") or []
        name = str(call.args["this"]).lower() if isinstance(call, exp.Anonymous) else ""
        name = AGGREGATE_ALIASES.get(name, name)
        if name not in AGGREGATE_NAMES or name in {"first", "last"} or len(args) < 1 + AGGREGATES[name].by:
            raise ExpressionError(
                f"{name or 'this'} is not supported with FILTER. Filter the rows before, or write CASE WHEN inside.",
                text=text,
                offset=offset_of(node),
            )
        chosen = args[1] if AGGREGATES[name].by else args[0]
        if isinstance(chosen, exp.Distinct):
            (chosen, *_) = chosen.expressions
        value = exp.Literal.number(1) if isinstance(chosen, exp.Star) else chosen.copy()
        chosen.replace(exp.Case(ifs=[exp.If(this=where.args["this"].copy(), true=value)]))
        tree = call.pop() if node is tree else tree
        if tree is not call:
            node.replace(call)
    return tree


def _parse_tree(tree: exp.Expr, schema: Schema, name: str | None, text: str, *, over: bool) -> Aggregate:
    if tree.find(exp.Filter) is not None:
        tree = without_filters(tree.copy(), text)
    body, alias = split_alias(tree)
    if name is not None and alias is not None and alias != name:
        raise ExpressionError(f"the column is called {name!r} and also AS {alias}; drop one.", text=text)
    calls: list[tuple[Call, AggregateCall]] = []
    rows = Checker(text=text, schema=schema)

    def keep(node: exp.Anonymous) -> Term:
        call, kept = _call(node, rows, over=over)
        if all(call != known for known, _ in calls):
            calls.append((call, kept))
        at = next(at for at, (known, _) in enumerate(calls) if known == call)
        return Column(f"{RESULT_PREFIX}{at}", kept.type)

    names = OVER_NAMES if over else AGGREGATE_NAMES
    checker = Checker(text=text, schema=schema, aggregate=keep, aggregate_names=names)
    term = checker.check(body)
    if not calls:
        known = ", ".join(function.signature for function in AGGREGATES.values() if function.name in names)
        raise ExpressionError(f"this is not an aggregate; there are {known}.", text=text, offset=offset_of(body) or 0)
    if term.type.name.startswith("interval"):
        raise checker.fail("an interval is not a value of its own; add it to a timestamp or a date.", body)
    written = render(_written_out(term, [call for call, _ in calls]))
    found = name or alias or written
    return Aggregate(
        name=found,
        sql=written if found == written else f"{written} AS {quoted_name(found)}",
        type=term.type,
        calls=tuple(kept for _, kept in calls),
        finish=expression_of(term, tree, found),
        tree=tree,
    )


def user_aggregate(
    name: str,
    path: str,
    arguments: Sequence[str | exp.Expr],
    schema: Schema,
    *,
    kind: DataType,
    state: tuple[tuple[str, DataType], ...],
) -> Aggregate:
    """A user's own aggregate: the class at an import path, over expressions. Raises as `parse_aggregate` does."""
    found = tuple(parse(argument, schema) for argument in arguments)
    call = AggregateCall(function=path, arguments=found, state=state, type=kind)
    result = exp.column(f"{RESULT_PREFIX}0")
    finish = expression_of(Column(f"{RESULT_PREFIX}0", kind), result, name)
    return Aggregate(name=name, sql=call.sql, type=kind, calls=(call,), finish=finish, tree=result)


def _call(node: exp.Anonymous, rows: Checker, *, over: bool) -> tuple[Call, AggregateCall]:
    written = str(node.args["this"]).lower()
    name = AGGREGATE_ALIASES.get(written, written)
    function, args = AGGREGATES[name], list(node.args.get("expressions") or [])
    given = len(args)
    if written in IMPLIED and args:
        args.insert(1, exp.Literal.number(IMPLIED[written]))
    if (function.star and not args) or (function.star and len(args) == 1 and isinstance(args[0], exp.Star)):
        return Call(name, (), BIGINT), AggregateCall(function=name, arguments=(), type=BIGINT)
    fewest = 1 + function.by + sum(option.default is None for option in function.options)
    if not fewest <= len(args) <= 1 + function.by + len(function.options):
        raise rows.fail(f"{written} is called with {given} arguments; it is written {function.signature}.", node)
    if isinstance(args[0], exp.Distinct):
        if over or name not in DISTINCT or len(args[0].expressions) != 1:
            raise rows.fail(
                f"{written}(DISTINCT ...) is not supported; there are count, sum, avg, min and max of one DISTINCT expression, without OVER.",
                args[0],
            )
        name, args = DISTINCT[name], list(args[0].expressions)
        function = AGGREGATES[name]
    found: list[Term] = []
    try:
        argument, kind = function.accepts(rows.check(args[0]))
    except ClashError as clash:
        raise rows.fail(clash.message, args[0]) from None
    found.append(argument)
    if function.by:
        try:
            found.append(_ordered(rows.check(args.pop(1)))[0])
        except ClashError as clash:
            raise rows.fail(clash.message, node) from None
    constants = [_constant(node, written, at, function, rows) for at, node in enumerate(args[1:])]
    values = [float(constant.value) for constant in constants]  # type: ignore[arg-type]  # a number, checked
    left = function.options[len(values) :]
    kept = AggregateCall(
        function=name,
        arguments=tuple(expression_of(term, args[0], None) for term in found),
        options=(*values, *(option.default for option in left if option.default is not None)),
        type=kind,
    )
    return Call(name, (*found, *constants), kind), kept


def _constant(node: exp.Expr, written: str, at: int, function: AggregateFunction, rows: Checker) -> Literal:
    option, term = function.options[at], rows.check(node)
    if not isinstance(term, Literal) or not term.type.is_numeric or term.value is None:
        raise rows.fail(f"{option.name} of {function.signature} is a number written out, the same for all rows.", node)
    wrong = option.check(float(term.value))
    if wrong is not None:
        raise rows.fail(f"{option.name} of {written} {wrong}.", node)
    return term


def _written_out(term: Term, calls: list[Call]) -> Term:
    """The term with the calls in the place of their results."""
    if isinstance(term, Column):
        return calls[int(term.name.removeprefix(RESULT_PREFIX))]
    if isinstance(term, Call):
        return Call(term.function, tuple(_written_out(arg, calls) for arg in term.args), term.type, term.implicit)
    return term
