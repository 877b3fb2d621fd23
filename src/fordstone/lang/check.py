"""From sqlglot trees to checked terms: names looked up, types worked out, everything unsupported refused.

One `Checker` reads one expression. It leaves types to `model.rules`, constants to `model.constants`, and decides what
each node of the tree means. Where Spark and sqlglot would group operators differently, parentheses are demanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlglot import exp

from fordstone.errors import ExpressionError, SchemaError
from fordstone.lang import constants
from fordstone.lang.coercion import NULL, STRING, ClashError, castable, try_castable
from fordstone.lang.dialect import DIALECT, offset_of
from fordstone.lang.functions import ALIASES, FUNCTIONS, SYNTAX
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.term import Call, Column, Literal, Term

AGGREGATES_ELSEWHERE: Final = frozenset(
    {
        "count", "sum", "avg", "mean", "min", "max", "first", "last", "stddev", "variance", "collect_list",
        "collect_set", "approx_count_distinct", "percentile", "median", "any_value", "var_samp", "var_pop", "stddev_samp", "stddev_pop",
        "collect", "count_distinct", "quantile", "beta_mean", "beta_low", "beta_high",
    }
)  # fmt: skip
"""Names that are aggregates: in a row-wise place the error says so rather than that they do not exist."""

_BINARY: Final[dict[type[exp.Expr], str]] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.NullSafeEQ: "<=>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.And: "and",
    exp.Or: "or",
}
_PREDICATES: Final = (
    exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.NullSafeNEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.Is, exp.In, exp.Between,
    exp.Like, exp.ILike, exp.RegexpLike, exp.Escape,
)  # fmt: skip
_LOOSE: Final = (*_PREDICATES, exp.Not, exp.And, exp.Or)
_TYPE_NAMES: Final = frozenset(
    {"boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "string", "binary", "date", "timestamp"}
)  # fmt: skip
_CLOCK: Final = frozenset(
    {"now", "current_timestamp", "current_date", "curdate", "localtimestamp", "rand", "random", "uuid"}
)
_PARTS: Final = {
    "year": "year", "quarter": "quarter", "month": "month", "week": "weekofyear", "day": "day", "dow": "dayofweek",
    "dayofweek": "dayofweek", "doy": "dayofyear", "hour": "hour", "minute": "minute",
}  # fmt: skip

Reader = Callable[[exp.Anonymous], Term]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker:
    """Reads one expression against a schema.

    `text` is what the user wrote, for errors. `aggregate`, if given, is asked for every call of an aggregate, and
    columns may then stand only inside such calls.
    """

    text: str
    schema: Schema
    aggregate: Reader | None = None
    aggregate_names: frozenset[str] = frozenset()

    def fail(self, message: str, node: exp.Expr) -> ExpressionError:
        """The error to raise, with the caret under `node`."""
        return ExpressionError(message, text=self.text, offset=offset_of(node))

    def check(self, node: exp.Expr) -> Term:
        """The term that a node of the tree means."""
        if (name := _BINARY.get(type(node))) is not None:
            return self._binary(name, node)
        method = _METHODS.get(type(node))
        if method is None:
            raise self._refuse(node)
        found: Term = getattr(self, method)(node)
        return found

    def call(self, name: str, nodes: Sequence[exp.Expr], node: exp.Expr) -> Term:
        """A call of a function of the table, its arguments still trees."""
        return self.resolve(name, [self.check(arg) for arg in nodes], node, nodes)

    def resolve(self, name: str, args: Sequence[Term], node: exp.Expr, nodes: Sequence[exp.Expr] = ()) -> Term:
        """A call of a function of the table, its arguments already terms."""
        function = FUNCTIONS[name]
        if len(args) < function.fewest or (function.most is not None and len(args) > function.most):
            raise self.fail(f"{name} is called with {len(args)} arguments; it is written {function.signature}.", node)
        try:
            resolved, kind = function.rule(args)
        except ClashError as clash:
            at = clash.argument
            raise self.fail(clash.message, nodes[at] if at is not None and at < len(nodes) else node) from None
        return Call(name, resolved, kind)

    # Operators

    def _binary(self, name: str, node: exp.Expr) -> Term:
        left, right = node.args["this"], node.args["expression"]
        if isinstance(node, _PREDICATES):
            self._no_loose_operand(left, right)
        return self.call(name, [left, right], node)

    def _no_loose_operand(self, *nodes: exp.Expr) -> None:
        for node in nodes:
            if isinstance(node, _LOOSE):
                raise self.fail("put parentheses around this condition; without them it can be read in two ways.", node)

    def _pipes(self, node: exp.Expr) -> Term:
        for side in (node.args["this"], node.args["expression"]):
            if isinstance(side, (exp.Add, exp.Sub)):
                raise self.fail("put parentheses around this sum; || binds as strongly as + and -.", side)
        self._no_loose_operand(node.args["this"], node.args["expression"])
        return self.call("concat", [node.args["this"], node.args["expression"]], node)

    def _not(self, node: exp.Expr) -> Term:
        inner = node.args["this"]
        if isinstance(inner, exp.Is) and isinstance(inner.args["expression"], exp.Null):
            self._no_loose_operand(inner.args["this"])
            return self.call("isnotnull", [inner.args["this"]], node)
        return self.call("not", [inner], node)

    def _negative(self, node: exp.Expr) -> Term:
        try:
            literal = constants.negative_literal(node.args["this"])
        except ClashError as clash:
            raise self.fail(clash.message, node) from None
        except SchemaError:
            literal = None  # a type that is none; said below
        return literal if literal is not None else self.call("negative", [node.args["this"]], node)

    def _is(self, node: exp.Expr) -> Term:
        value, what = node.args["this"], node.args["expression"]
        self._no_loose_operand(value)
        if isinstance(what, exp.Null):
            return self.call("isnull", [value], node)
        if isinstance(what, exp.Boolean):
            return self.call("<=>", [value, what], node)
        raise self._refuse(node)

    def _distinct_from(self, node: exp.Expr) -> Term:
        return self.resolve("not", [self._binary("<=>", node)], node)

    def _in(self, node: exp.Expr) -> Term:
        options = node.args.get("expressions")
        if not options:
            raise self._refuse(node.args.get("query") or node)
        self._no_loose_operand(node.args["this"])
        return self.call("in", [node.args["this"], *options], node)

    def _between(self, node: exp.Expr) -> Term:
        value, low, high = node.args["this"], node.args["low"], node.args["high"]
        if node.args.get("symmetric"):
            raise self._refuse(node)
        self._no_loose_operand(value, low, high)
        return self.resolve("and", [self.call(">=", [value, low], node), self.call("<=", [value, high], node)], node)

    def _like(self, node: exp.Expr) -> Term:
        escape = []
        like = node
        if isinstance(node, exp.Escape):
            like, escape = node.args["this"], [node.args["expression"]]
        if not isinstance(like, exp.Like | exp.ILike):
            raise self._refuse(like)
        args = [like.args["this"], like.args["expression"]]
        self._no_loose_operand(*args)
        terms = [self.check(arg) for arg in (*args, *escape)]
        if isinstance(like, exp.ILike):
            terms[0] = self.resolve("lower", terms[:1], node, args)
            if isinstance(pattern := terms[1], Literal) and isinstance(pattern.value, str):
                terms[1] = Literal(pattern.value.lower(), STRING)
        found = self.resolve("like", terms, node, [*args, *escape])
        return self.resolve("not", [found], node) if like.args.get("negate") else found

    def _rlike(self, node: exp.Expr) -> Term:
        if node.args.get("flag"):
            raise self._refuse(node)
        args = [node.args["this"], node.args["expression"]]
        self._no_loose_operand(*args)
        found = self.call("rlike", args, node)
        return self.resolve("not", [found], node) if node.args.get("negate") else found

    # Choice

    def _case(self, node: exp.Expr) -> Term:
        value, nodes, terms = node.args.get("this"), [], []
        for branch in node.args["ifs"]:
            when, then = branch.args["this"], branch.args["true"]
            terms.append(self.check(when) if value is None else self.call("=", [value, when], when))
            terms.append(self.check(then))
            nodes += [when, then]
        default = node.args.get("default")
        terms.append(Literal(None, NULL) if default is None else self.check(default))
        nodes.append(node if default is None else default)
        return self.resolve("case", terms, node, nodes)

    def _if(self, node: exp.Expr) -> Term:
        parts = [node.args["this"], node.args["true"]]
        default = node.args.get("false")
        terms = [self.check(part) for part in parts]
        terms.append(Literal(None, NULL) if default is None else self.check(default))
        return self.resolve("case", terms, node, [*parts, default or node])

    def _nullif(self, args: Sequence[exp.Expr], node: exp.Expr) -> Term:
        if len(args) != 2:  # noqa: PLR2004 - two by its meaning
            raise self.fail(f"nullif is called with {len(args)} arguments; it is written nullif(a, b).", node)
        value = self.check(args[0])
        equal = self.call("=", args, node)
        return self.resolve("case", [equal, Literal(None, NULL), value], node)

    def _nvl2(self, args: Sequence[exp.Expr], node: exp.Expr) -> Term:
        if len(args) != 3:  # noqa: PLR2004 - three by its meaning
            raise self.fail(
                f"nvl2 is called with {len(args)} arguments; it is written nvl2(a, if_not_null, if_null).", node
            )
        test = self.call("isnotnull", args[:1], node)
        return self.resolve("case", [test, self.check(args[1]), self.check(args[2])], node, args)

    # Names, constants, casts

    def _column(self, node: exp.Expr) -> Term:
        if node.args.get("table") is not None:
            raise self.fail("columns are named without a table here.", node)
        inner = node.args["this"]
        if isinstance(inner, exp.Star):
            raise self._refuse(inner)
        name = str(inner.args["this"])
        if self.aggregate is not None:
            raise self.fail(f"column {name!r} stands outside of an aggregate; write for instance max({name}).", node)
        for column, kind in self.schema.columns:
            if column == name:
                return Column(name, kind)
        raise self.fail(f"there is no column {name!r}.{self._nearest(name)}", node)

    def _nearest(self, name: str) -> str:
        from difflib import get_close_matches  # noqa: PLC0415 - only on the way to an error

        lowered = {column.lower(): column for column in self.schema}
        if near := get_close_matches(name.lower(), lowered, n=1, cutoff=0.6):
            return f" Did you mean {lowered[near[0]]!r}?"
        return f" Columns are: {', '.join(self.schema)}."

    def _constant(self, node: exp.Expr) -> Term:
        try:
            return constants.literal(node, self.text)
        except ClashError as clash:
            raise self.fail(clash.message, node) from None

    def _cast(self, node: exp.Expr) -> Term:
        if node.args.get("format") or node.args.get("action"):
            raise self._refuse(node)
        kind = self._type(node.args["to"], node)
        inner = node.args["this"]
        if node.args.get("safe"):
            return self._try_cast_to(inner, kind, node)
        return self._cast_to(inner, kind, node, strict=not isinstance(node, exp.TryCast))

    def _cast_to(self, inner: exp.Expr, kind: DataType, node: exp.Expr, *, strict: bool = False) -> Term:
        term = self.check(inner)
        if not castable(term.type, kind):
            raise self.fail(f"{term.type} cannot be cast to {kind}.", node)
        if isinstance(term, Literal):
            try:
                folded = constants.typed_literal(inner, term, kind, strict=strict)
            except ClashError as clash:
                raise self.fail(clash.message, inner) from None
            if folded is not None:
                return folded
        return Call("cast", (term,), kind)

    def _try_cast_to(self, inner: exp.Expr, kind: DataType, node: exp.Expr) -> Term:
        term = self.check(inner)
        if not try_castable(term.type, kind):
            raise self.fail(f"{term.type} cannot be cast to {kind} by TRY_CAST; write CAST.", node)
        return Call("try_cast", (term,), kind)

    def _type(self, to: exp.Expr, node: exp.Expr) -> DataType:
        name = to.sql(dialect=DIALECT)
        try:
            return DataType.parse(name)
        except SchemaError as error:
            raise self.fail(str(error), node) from None

    def _paren(self, node: exp.Expr) -> Term:
        return self.check(node.args["this"])

    def _bracket(self, node: exp.Expr) -> Term:
        indexes = node.args["expressions"]
        if len(indexes) != 1 or node.args.get("offset"):
            raise self._refuse(node)
        return self.call("element", [node.args["this"], indexes[0]], node)

    # Functions

    def _trim(self, node: exp.Expr) -> Term:
        name = {"LEADING": "ltrim", "TRAILING": "rtrim"}.get(str(node.args.get("position") or "").upper(), "trim")
        chars = node.args.get("expression")
        return self.call(name, [node.args["this"], *([] if chars is None else [chars])], node)

    def _substring(self, node: exp.Expr) -> Term:
        parts = [node.args.get(part) for part in ("this", "start", "length")]
        return self.call("substring", [part for part in parts if part is not None], node)

    def _extract(self, node: exp.Expr) -> Term:
        part = node.args["this"].name.lower()
        name = _PARTS.get(part.removesuffix("s"), _PARTS.get(part))
        if name is None:
            hint = " Write second(ts) for whole seconds." if part.startswith("sec") else ""
            message = f"{part!r} cannot be extracted; there are {', '.join(_PARTS)}.{hint}"
            raise ExpressionError(message, text=self.text, offset=max(self.text.lower().find(part), 0))
        return self.call(name, [node.args["expression"]], node)

    def _anonymous(self, node: exp.Expr) -> Term:
        name, args = str(node.args["this"]).lower(), list(node.args.get("expressions") or [])
        if self.aggregate is not None and name in self.aggregate_names and isinstance(node, exp.Anonymous):
            return self.aggregate(node)
        if name in {"nullif", "nvl2"}:
            return self._nullif(args, node) if name == "nullif" else self._nvl2(args, node)
        if name in _TYPE_NAMES and len(args) == 1:
            return self._cast_to(args[0], DataType.parse(name), node)
        if name in {"ltrim", "rtrim"}:
            args.reverse()  # the characters come first in the call, the text first in the term
        if name in _CLOCK:
            raise self.fail("the clock and chance have no place in an expression; results must repeat.", node)
        name = ALIASES.get(name, name)
        if name in FUNCTIONS and (name not in SYNTAX or name == "%"):
            return self.call(name, args, node)
        if name in AGGREGATES_ELSEWHERE and self.aggregate is not None:
            there_are = ", ".join(sorted(self.aggregate_names))
            raise self.fail(f"{name} is not one of the aggregates here, which are {there_are}.", node)
        if name in AGGREGATES_ELSEWHERE:
            raise self.fail(f"{name} is an aggregate; aggregates belong in agg(...), after group_by and window.", node)
        raise self._unknown_function(name, node)

    def _unknown_function(self, name: str, node: exp.Expr) -> ExpressionError:
        from difflib import get_close_matches  # noqa: PLC0415 - only on the way to an error

        known = sorted({*FUNCTIONS, *ALIASES, "nullif", "nvl2", "if", *self.aggregate_names} - SYNTAX)
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f"Did you mean {near[0]}?" if near else f"Functions are: {', '.join(known)}."
        return self.fail(f"there is no function {name}. {hint}", node)

    def _refuse(self, node: exp.Expr) -> ExpressionError:
        kinds: tuple[tuple[type[exp.Expr] | tuple[type[exp.Expr], ...], str], ...] = (
            (exp.Window, "window functions (OVER) are not expressions here; use .window(...) on the stream."),
            ((exp.Query, exp.Subquery, exp.Exists), "subqueries are not supported."),
            (exp.Star, "* stands only alone in select, or in count(*)."),
            (exp.Alias, "AS stands only at the end of an expression."),
            (exp.Filter, "FILTER is not supported; write CASE WHEN inside the aggregate."),
            (exp.Distinct, "DISTINCT is not supported here."),
            (
                (exp.CurrentTimestamp, exp.CurrentDate),
                "the clock cannot be read in an expression; results must repeat.",
            ),
        )
        for kind, message in kinds:
            if isinstance(node, kind):
                return self.fail(message, node)
        return self.fail(f"{node.sql(dialect=DIALECT)!r} is not supported.", node)


_METHODS: Final[dict[type[exp.Expr], str]] = {
    exp.DPipe: "_pipes",
    exp.Not: "_not",
    exp.Neg: "_negative",
    exp.Is: "_is",
    exp.NullSafeNEQ: "_distinct_from",
    exp.In: "_in",
    exp.Between: "_between",
    exp.Like: "_like",
    exp.ILike: "_like",
    exp.Escape: "_like",
    exp.RegexpLike: "_rlike",
    exp.Case: "_case",
    exp.If: "_if",
    exp.Column: "_column",
    exp.Literal: "_constant",
    exp.RawString: "_constant",
    exp.Concat: "_constant",
    exp.Boolean: "_constant",
    exp.Null: "_constant",
    exp.HexString: "_constant",
    exp.Interval: "_constant",
    exp.Cast: "_cast",
    exp.TryCast: "_cast",
    exp.Paren: "_paren",
    exp.Bracket: "_bracket",
    exp.Trim: "_trim",
    exp.Substring: "_substring",
    exp.Extract: "_extract",
    exp.Anonymous: "_anonymous",
}
"""Which method of `Checker` reads which node."""
