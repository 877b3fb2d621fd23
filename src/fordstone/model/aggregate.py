"""Aggregate expressions: calls that state is kept for, and what is worked out of their results.

`sum(x) / count(*)` is two calls and a finish, `__a0 / __a1`. The window operators keep and merge the calls, each on its
own; `finish` runs once per result row. Adding an aggregate is a row in `AGGREGATES` and its state in `operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sqlglot import exp

from fordstone.errors import ExpressionError
from fordstone.model.checking import Checker
from fordstone.model.coercion import BIGINT, DOUBLE, NULL, ClashError
from fordstone.model.dialect import DIALECT, offset_of, quoted_name, read
from fordstone.model.expression import Expression, expression_of, split_alias, with_own_functions
from fordstone.model.schema import DECIMAL_DIGITS_MAX, DataType, Schema
from fordstone.model.term import Call, Column, Term, render

RESULT_PREFIX: Final = "__a"
"""`finish` reads the result of call i as the column `__a<i>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateFunction:
    """One aggregate: `accepts` gives the argument as it is kept and the result type, or raises `ClashError`."""

    name: str
    signature: str
    about: str
    example: str
    accepts: Callable[[Term], tuple[Term, DataType]]
    star: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateCall:
    """One call that state is kept for. `argument` is None for count(*)."""

    function: str
    argument: Expression | None
    type: DataType

    @property
    def sql(self) -> str:
        """The call as it is written."""
        return f"{self.function}({'*' if self.argument is None else self.argument.sql})"


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
        """The input columns that the calls read, each once."""
        return tuple(dict.fromkeys(name for call in self.calls if call.argument for name in call.argument.columns))

    @property
    def results(self) -> Schema:
        """The columns that `finish` reads."""
        return Schema(tuple((f"{RESULT_PREFIX}{at}", call.type) for at, call in enumerate(self.calls)))


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


def _extreme(argument: Term) -> tuple[Term, DataType]:
    if argument.type.element is not None:
        raise ClashError("arrays have no least or greatest.")
    return argument, argument.type


def _needs_number(kind: DataType) -> None:
    if not kind.is_numeric:
        raise ClashError(f"a number is needed here, but this is {kind}.")


AGGREGATES: Final[dict[str, AggregateFunction]] = {
    function.name: function
    for function in (
        AggregateFunction(
            name="count", signature="count(*) or count(x)", about="The number of rows, or of those where x is not null.",
            example="count(*)", accepts=_count, star=True,
        ),
        AggregateFunction(
            name="sum", signature="sum(x)", accepts=_sum, example="sum(1)",
            about="The sum; null if all are null. Integers sum to a bigint and wrap, decimals gain ten digits.",
        ),
        AggregateFunction(
            name="mean", signature="avg(x)", accepts=_mean, example="avg(1)",
            about="The mean, a double (also of decimals, where Spark has a decimal). Also mean(x).",
        ),
        AggregateFunction(
            name="min", signature="min(x)", about="The least; NaN is greater than any number.", example="min(1)",
            accepts=_extreme,
        ),
        AggregateFunction(
            name="max", signature="max(x)", about="The greatest; NaN is greater than any number.", example="max(1)",
            accepts=_extreme,
        ),
    )
}  # fmt: skip
AGGREGATE_ALIASES: Final = {"avg": "mean"}
_NAMES: Final = frozenset({*AGGREGATES, *AGGREGATE_ALIASES})


def parse_aggregate(source: str | exp.Expr, schema: Schema, name: str | None = None) -> Aggregate:
    """Check an aggregate expression; called once for each argument of `agg(...)`.

    `name` is what the column is called; without it, what AS says, or else the text.

    Raises:
        ExpressionError: with the text and the place of what is wrong.
    """
    if isinstance(source, str):
        return _parse_tree(read(source), schema, name, source)
    tree = with_own_functions(source)
    text = tree.sql(dialect=DIALECT, normalize_functions=False)
    try:
        return _parse_tree(tree, schema, name, text)
    except ExpressionError:
        _parse_tree(read(text), schema, name, text)  # the text has places for the caret, a built tree has none
        raise


def _parse_tree(tree: exp.Expr, schema: Schema, name: str | None, text: str) -> Aggregate:
    body, alias = split_alias(tree)
    if name is not None and alias is not None and alias != name:
        raise ExpressionError(f"the column is called {name!r} and also AS {alias}; drop one.", text=text)
    calls: list[tuple[Call, AggregateCall]] = []
    rows = Checker(text=text, schema=schema)

    def keep(node: exp.Anonymous) -> Term:
        call, kept = _call(node, rows)
        if all(call != known for known, _ in calls):
            calls.append((call, kept))
        at = next(at for at, (known, _) in enumerate(calls) if known == call)
        return Column(f"{RESULT_PREFIX}{at}", kept.type)

    checker = Checker(text=text, schema=schema, aggregate=keep, aggregate_names=_NAMES)
    term = checker.check(body)
    if not calls:
        known = ", ".join(function.signature for function in AGGREGATES.values())
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


def _call(node: exp.Anonymous, rows: Checker) -> tuple[Call, AggregateCall]:
    written = str(node.args["this"]).lower()
    name = AGGREGATE_ALIASES.get(written, written)
    function, args = AGGREGATES[name], list(node.args.get("expressions") or [])
    if len(args) != 1 and not (function.star and not args):
        raise rows.fail(f"{written} is called with {len(args)} arguments; it is written {function.signature}.", node)
    if not args or (function.star and isinstance(args[0], exp.Star)):
        return Call(name, (), BIGINT), AggregateCall(function=name, argument=None, type=BIGINT)
    if isinstance(args[0], exp.Distinct):
        raise rows.fail(f"{written}(DISTINCT ...) is not supported.", args[0])
    try:
        argument, kind = function.accepts(rows.check(args[0]))
    except ClashError as clash:
        raise rows.fail(clash.message, args[0]) from None
    kept = AggregateCall(function=name, argument=expression_of(argument, args[0], None), type=kind)
    return Call(name, (argument,), kind), kept


def _written_out(term: Term, calls: list[Call]) -> Term:
    """The term with the calls in the place of their results."""
    if isinstance(term, Column):
        return calls[int(term.name.removeprefix(RESULT_PREFIX))]
    if isinstance(term, Call):
        return Call(term.function, tuple(_written_out(arg, calls) for arg in term.args), term.type, term.implicit)
    return term
