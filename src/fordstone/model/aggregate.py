"""Aggregate expressions: calls that state is kept for, and what is worked out of their results.

`sum(x) / count(*)` is two calls and a finish, `__a0 / __a1`. The window operators keep and merge the calls, each on its
own; `finish` runs once per result row. Adding an aggregate is a row in `model.aggregate_functions` and what is kept for
it in `operators.kinds`. A user's own aggregate is a call of its import path (`user_aggregate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlglot import exp

from fordstone.errors import ExpressionError
from fordstone.model.aggregate_functions import (
    AGGREGATE_ALIASES,
    AGGREGATE_NAMES,
    AGGREGATES,
    IMPLIED,
    AggregateFunction,
)
from fordstone.model.checking import Checker
from fordstone.model.coercion import BIGINT, ClashError
from fordstone.model.dialect import DIALECT, offset_of, quoted_name, read
from fordstone.model.expression import Expression, expression_of, parse, split_alias, with_own_functions
from fordstone.model.schema import DataType, Schema
from fordstone.model.term import Call, Column, Literal, Term, render

RESULT_PREFIX: Final = "__a"
"""`finish` reads the result of call i as the column `__a<i>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateCall:
    """One call that state is kept for. There are no `arguments` for count(*); only a user's own aggregate takes several."""

    function: str
    """Its name in `AGGREGATES`; or, with a colon in it, the import path of a user's own."""
    arguments: tuple[Expression, ...]
    options: tuple[float, ...] = ()
    """The constants behind the argument, as `AggregateFunction.options` names them, all of them."""
    state: tuple[tuple[str, DataType], ...] = ()
    """What a user's own keeps."""
    type: DataType

    @property
    def argument(self) -> Expression | None:
        """The only argument, or the first."""
        return self.arguments[0] if self.arguments else None

    @property
    def declared(self) -> AggregateFunction | None:
        """What the table says of it; None for a user's own."""
        return AGGREGATES.get(self.function)

    @property
    def sql(self) -> str:
        """The call as it is written, options left out."""
        return f"{self.function}({', '.join(argument.sql for argument in self.arguments) or '*'})"


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
        found = (argument for call in self.calls for argument in call.arguments)
        return tuple(dict.fromkeys(name for argument in found for name in argument.columns))

    @property
    def results(self) -> Schema:
        """The columns that `finish` reads."""
        return Schema(tuple((f"{RESULT_PREFIX}{at}", call.type) for at, call in enumerate(self.calls)))


def parse_aggregate(
    source: str | exp.Expr, schema: Schema, name: str | None = None, *, text: str | None = None
) -> Aggregate:
    """Check an aggregate expression; called once for each argument of `agg(...)`.

    `name` is what the column is called; without it, what AS says, or else the text. `text`: what a tree was read from.

    Raises:
        ExpressionError: with the text and the place of what is wrong.
    """
    if isinstance(source, str):
        return _parse_tree(read(source), schema, name, source)
    if text is not None:
        return _parse_tree(source, schema, name, text)
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

    checker = Checker(text=text, schema=schema, aggregate=keep, aggregate_names=AGGREGATE_NAMES)
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


def _call(node: exp.Anonymous, rows: Checker) -> tuple[Call, AggregateCall]:
    written = str(node.args["this"]).lower()
    name = AGGREGATE_ALIASES.get(written, written)
    function, args = AGGREGATES[name], list(node.args.get("expressions") or [])
    given = len(args)
    if written in IMPLIED and args:
        args.insert(1, exp.Literal.number(IMPLIED[written]))
    if (function.star and not args) or (function.star and len(args) == 1 and isinstance(args[0], exp.Star)):
        return Call(name, (), BIGINT), AggregateCall(function=name, arguments=(), type=BIGINT)
    fewest = 1 + sum(option.default is None for option in function.options)
    if not fewest <= len(args) <= 1 + len(function.options):
        raise rows.fail(f"{written} is called with {given} arguments; it is written {function.signature}.", node)
    if isinstance(args[0], exp.Distinct):
        raise rows.fail(f"{written}(DISTINCT ...) is not supported; there is count_distinct(x).", args[0])
    try:
        argument, kind = function.accepts(rows.check(args[0]))
    except ClashError as clash:
        raise rows.fail(clash.message, args[0]) from None
    constants = [_constant(node, written, at, function, rows) for at, node in enumerate(args[1:])]
    values = [float(constant.value) for constant in constants]  # type: ignore[arg-type]  # a number, checked
    left = function.options[len(values) :]
    kept = AggregateCall(
        function=name,
        arguments=(expression_of(argument, args[0], None),),
        options=(*values, *(option.default for option in left if option.default is not None)),
        type=kind,
    )
    return Call(name, (argument, *constants), kind), kept


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
