"""Expressions: Spark SQL, checked and typed against a schema.

The pipeline builder calls `parse`, `parse_predicate` and `expand` once per expression; the planner reads `columns` and
`sql`; each engine translates once at start-up. An `Expression` that exists is valid for the schema it was parsed with.
`Checker` turns a sqlglot tree into a checked term: names looked up, types derived, everything unsupported refused. Where
Spark and sqlglot would group operators differently, parentheses are demanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Final, TypeVar

from sqlglot import exp

from fordstone.errors import ExpressionError, SchemaError
from fordstone.lang import constants
from fordstone.lang.choices import did_you_mean
from fordstone.lang.dialect import DIALECT, is_foreign, offset_of, quoted_name, read
from fordstone.lang.functions import ALIASES, FUNCTIONS, SYNTAX
from fordstone.lang.rules import castable, try_castable
from fordstone.lang.schema import BOOLEAN, DOUBLE, NULL, STRING, ClashError, DataType, Schema
from fordstone.lang.term import Call, Column, Literal, Term, columns_of, field_name, render

T = TypeVar("T")
ALL = "*"
"""In `expand`: every column of the schema."""
PARSED_MAX: Final = 1024
"""Maximum number of checked expressions in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A checked expression.

    `sql` is canonical: `parse(e.sql, schema) == e`. It ends in `AS name` where the name is not the derived one; the
    derived name is the column's own, or else the text. `deterministic` says that the same row always gives the same value.
    """

    sql: str
    name: str
    type: DataType
    columns: tuple[str, ...]
    deterministic: bool = True
    tree: exp.Expr = field(compare=False, repr=False)
    term: Term = field(compare=False, repr=False)

    @property
    def is_column(self) -> bool:
        """Whether this only picks a column, perhaps under another name."""
        return isinstance(self.term, Column)


def parse(source: str | exp.Expr, schema: Schema, *, text: str | None = None) -> Expression:
    """Check one expression: text, or a tree. `text`: what a tree was read from, where that is more than the expression.

    Raises:
        ExpressionError: with the text and the place of what is wrong.
    """
    if isinstance(source, str):
        return _parse_text(source, schema)
    return checked(source, text, lambda tree, text: _parse_tree(tree, schema, text))


# Every task makes its operators from the plan, on Spark in every batch: without this, most of that would be parsing.
@lru_cache(maxsize=PARSED_MAX)
def _parse_text(source: str, schema: Schema) -> Expression:
    return checked(source, None, lambda tree, text: _parse_tree(tree, schema, text))


def checked(source: str | exp.Expr, text: str | None, check: Callable[[exp.Expr, str], T]) -> T:
    """What `check` makes of an expression: it takes the tree, and the text in which errors show a place."""
    if isinstance(source, str):
        return check(read(source), source)
    if text is not None:
        return check(source, text)
    tree = with_own_functions(source)
    text = tree.sql(dialect=DIALECT, normalize_functions=False)
    try:
        return check(tree, text)
    except ExpressionError:
        check(read(text), text)  # a built tree has no places in it; the text that it writes, read again, has
        raise


def parse_predicate(source: str | exp.Expr, schema: Schema) -> Expression:
    """Check an expression that must be a condition."""
    found = parse(source, schema)
    if found.type == NULL:
        alias = None if found.name == found.sql else found.name
        return expression_of(Call("cast", (found.term,), BOOLEAN), found.tree, alias)
    if found.type != BOOLEAN:
        text = source if isinstance(source, str) else found.sql
        raise ExpressionError(
            f"a condition is needed here, but this is {found.type}.", text=text, offset=offset_of(found.tree) or 0
        )
    return found


def parse_double(source: str | exp.Expr, schema: Schema, name: str | None = None) -> Expression:
    """Check an expression whose values are taken as doubles: a number of any type. `name` is what it is called."""
    found = parse(source, schema)
    text = source if isinstance(source, str) else found.sql
    if not found.type.is_numeric and found.type != NULL:
        raise ExpressionError(
            f"a number is needed here, but this is {found.type}.", text=text, offset=offset_of(found.tree) or 0
        )
    alias = split_alias(found.tree)[1]
    if None not in {name, alias} and alias != name:
        raise ExpressionError(f"the column is called {name!r} and also AS {alias}; drop one.", text=text)
    # The cast is written, so that the plan says what is kept.
    term = found.term if found.type == DOUBLE else Call("cast", (found.term,), DOUBLE)
    return expression_of(term, found.tree, name or alias)


def expand(sources: Iterable[str | exp.Expr], schema: Schema) -> list[Expression]:
    """Check what a select lists; `*` stands for every column. Two columns of one name are an error."""
    found: list[Expression] = []
    texts: list[str] = []
    for source in sources:
        if (isinstance(source, str) and source.strip() == ALL) or isinstance(source, exp.Star):
            found += [parse(exp.column(exp.to_identifier(name, quoted=True)), schema) for name in schema]
            texts += [ALL] * len(schema)
        else:
            found.append(parse(source, schema))
            texts.append(source if isinstance(source, str) else found[-1].sql)
    seen: set[str] = set()
    for expression, text in zip(found, texts, strict=True):
        if expression.name in seen:
            raise ExpressionError(f"two columns are called {expression.name!r}; rename one with AS.", text=text)
        seen.add(expression.name)
    return found


def with_own_functions(tree: exp.Expr) -> exp.Expr:
    """The tree as this dialect reads it; trees from other parsers are written as Spark SQL and read again."""
    return read(tree.sql(dialect="spark")) if is_foreign(tree) else tree


def split_alias(tree: exp.Expr) -> tuple[exp.Expr, str | None]:
    """The expression and the name that AS gives it."""
    if isinstance(tree, exp.Alias) and isinstance(tree.args["alias"], exp.Identifier):
        return tree.args["this"], str(tree.args["alias"].args["this"])
    return tree, None


def expression_of(term: Term, tree: exp.Expr, alias: str | None) -> Expression:
    """Wrap a checked term."""
    body = render(term)
    derived = _derived_name(term) or body
    name = derived if alias is None else alias
    sql = body if name == derived else f"{body} AS {quoted_name(name)}"
    return Expression(sql=sql, name=name, type=term.type, columns=columns_of(term), tree=tree, term=term)


def _derived_name(term: Term) -> str | None:
    """The name of a column, or of a field that was taken out of one."""
    if isinstance(term, Column):
        return term.name
    return field_name(term) if isinstance(term, Call) and term.function == "field" else None


def _parse_tree(tree: exp.Expr, schema: Schema, text: str) -> Expression:
    body, alias = split_alias(tree)
    checker = Checker(text=text, schema=schema)
    term = checker.check(body)
    if term.type.name.startswith("interval"):
        raise checker.fail("an interval is not a value of its own; add it to a timestamp or a date.", body)
    if alias == "":
        raise checker.fail("the name after AS is empty.", body)
    return expression_of(term, tree, alias)


AGGREGATES_ELSEWHERE: Final = frozenset(
    {
        "count", "sum", "avg", "mean", "min", "max", "first", "last", "stddev", "variance", "collect_list",
        "collect_set", "approx_count_distinct", "percentile", "median", "any_value", "var_samp", "var_pop", "stddev_samp", "stddev_pop",
        "collect", "count_distinct", "quantile", "beta_mean", "beta_low", "beta_high",
        "max_by", "min_by", "lag", "first_value", "last_value",
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
_NAME_PARTS: Final = ("catalog", "db", "table", "this")
"""Where a sqlglot column keeps the parts of `a.b.c.d`; what follows these stands in nodes of its own."""
_CLOCK: Final = frozenset(
    {"now", "current_timestamp", "current_date", "curdate", "localtimestamp", "rand", "random", "uuid"}
)
_PARTS: Final = {
    "year": "year", "quarter": "quarter", "month": "month", "week": "weekofyear", "day": "day", "dow": "dayofweek",
    "dayofweek": "dayofweek", "doy": "dayofyear", "hour": "hour", "minute": "minute",
}  # fmt: skip

_NULL_CHOICES: Final = {"nullif": (2, "nullif(a, b)"), "nvl2": (3, "nvl2(a, if_not_null, if_null)")}

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
            literal = None  # not a type; the error is raised below
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
        return self._choice(node, node.args.get("this"), node.args["ifs"], node.args.get("default"))

    def _if(self, node: exp.Expr) -> Term:
        return self._choice(node, None, [node], node.args.get("false"))

    def _choice(
        self, node: exp.Expr, value: exp.Expr | None, branches: Sequence[exp.Expr], default: exp.Expr | None
    ) -> Term:
        nodes, terms = [], []
        for branch in branches:
            when, then = branch.args["this"], branch.args["true"]
            terms.append(self.check(when) if value is None else self.call("=", [value, when], when))
            terms.append(self.check(then))
            nodes += [when, then]
        terms.append(Literal(None, NULL) if default is None else self.check(default))
        nodes.append(node if default is None else default)
        return self.resolve("case", terms, node, nodes)

    def _null_choice(self, name: str, args: Sequence[exp.Expr], node: exp.Expr) -> Term:
        count, signature = _NULL_CHOICES[name]
        if len(args) != count:
            raise self.fail(f"{name} is called with {len(args)} arguments; it is written {signature}.", node)
        if name == "nvl2":
            test = self.call("isnotnull", args[:1], node)
            return self.resolve("case", [test, self.check(args[1]), self.check(args[2])], node, args)
        value, equal = self.check(args[0]), self.call("=", args, node)
        return self.resolve("case", [equal, Literal(None, NULL), value], node)

    # Names, constants, casts

    def _column(self, node: exp.Expr) -> Term:
        first, *fields = [node.args[part] for part in _NAME_PARTS if node.args.get(part) is not None]
        if isinstance(node.args["this"], exp.Star):
            raise self._refuse(node.args["this"])
        found = self._column_named(first, fields, node)
        for name in fields:
            found = self._field_of(found, str(name.args["this"]), node, name)
        return found

    def _column_named(self, first: exp.Expr, fields: Sequence[exp.Expr], node: exp.Expr) -> Term:
        name = str(first.args["this"])
        if fields and name not in self.schema and str(fields[0].args["this"]) in self.schema:
            raise self.fail("columns are named without a table here.", node)
        if self.aggregate is not None:
            raise self.fail(f"column {name!r} stands outside of an aggregate; write for instance max({name}).", node)
        for column, kind in self.schema.columns:
            if column == name:
                return Column(name, kind)
        raise self.fail(f"there is no column {name!r}.{self._nearest(name)}", node)

    def _dot(self, node: exp.Expr) -> Term:
        name = node.args["expression"]
        if not isinstance(name, exp.Identifier):
            raise self._refuse(node)
        return self._field_of(self.check(node.args["this"]), str(name.args["this"]), node, name)

    def _field_of(self, holder: Term, name: str, node: exp.Expr, place: exp.Expr) -> Term:
        """`a.name`: a field of a struct or of an array of them, or the value of a key of a map."""
        found = "element" if holder.type.name == "map" else "field"
        return self.resolve(found, [holder, Literal(name, STRING)], node, [node, place])

    def _nearest(self, name: str) -> str:
        columns = ", ".join(self.schema)
        return f" {did_you_mean(name, self.schema) or f'Columns are: {columns}.'}"

    def _constant(self, node: exp.Expr) -> Term:
        try:
            return constants.literal(node, self.text)
        except ClashError as clash:
            raise self.fail(clash.message, node) from None

    def _cast(self, node: exp.Expr) -> Term:
        if node.args.get("format") or node.args.get("action"):
            raise self._refuse(node)
        try:
            kind = DataType.parse(node.args["to"].sql(dialect=DIALECT))
        except SchemaError as error:
            raise self.fail(str(error), node) from None
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

    def _paren(self, node: exp.Expr) -> Term:
        return self.check(node.args["this"])

    def _bracket(self, node: exp.Expr) -> Term:
        indexes = node.args["expressions"]
        if len(indexes) != 1 or node.args.get("offset"):
            raise self._refuse(node)
        holder, index = self.check(node.args["this"]), self.check(indexes[0])
        inner = holder.type if holder.type.element is None else holder.type.element
        if inner.name == "struct" and isinstance(index, Literal) and isinstance(index.value, str):
            return self._field_of(holder, index.value, node, indexes[0])
        if holder.type.name == "struct":
            raise self.fail("a field of a struct is named by a literal: a.name or a['name'].", indexes[0])
        return self.resolve("element", [holder, index], node, [node.args["this"], indexes[0]])

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
        if name in _NULL_CHOICES:
            return self._null_choice(name, args, node)
        if name == "struct":
            return self._struct(args, node)
        if name in _TYPE_NAMES and len(args) == 1:
            return self._cast_to(args[0], DataType.parse(name), node)
        if name in {"ltrim", "rtrim"}:
            args.reverse()  # the characters come first in the call, the text first in the term
        if name in _CLOCK:
            raise self.fail(_not_repeatable(name), node)
        name = ALIASES.get(name, name)
        if name in FUNCTIONS and (name not in SYNTAX or name == "%"):
            return self.call(name, args, node)
        if name in AGGREGATES_ELSEWHERE and self.aggregate is not None:
            there_are = ", ".join(sorted(self.aggregate_names))
            raise self.fail(f"{name} is not one of the aggregates here, which are {there_are}.", node)
        if name in AGGREGATES_ELSEWHERE:
            raise self.fail(f"{name} is an aggregate; aggregates belong in agg(...), after group_by and window.", node)
        raise self._unknown_function(name, node)

    def _struct(self, nodes: Sequence[exp.Expr], node: exp.Expr) -> Term:
        """`struct(a, b + 1 AS c)`: fields are called as their columns, as AS says, or else col1, col2 and so on."""
        terms: list[Term] = []
        for at, part in enumerate(nodes):
            inner, alias = split_alias(part)
            value = self.check(inner)
            terms += [Literal(alias or _derived_name(value) or f"col{at + 1}", STRING), value]
        return self.resolve("named_struct", terms, node, [part for part in nodes for _ in range(2)])

    def _unknown_function(self, name: str, node: exp.Expr) -> ExpressionError:
        if name == "explode":
            how = "write flat_map(...), or in SQL SELECT explode(items) AS item, without aggregates, as a query in FROM"
            return self.fail(f"explode makes several rows of one; {how}.", node)
        known = sorted({*FUNCTIONS, *ALIASES, *_NULL_CHOICES, "if", "struct", *self.aggregate_names} - SYNTAX)
        near = get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]}?" if near else "All functions are in docs/reference/expressions.md."
        return self.fail(f"there is no function {name}. {hint}", node)

    def _refuse(self, node: exp.Expr) -> ExpressionError:
        kinds: tuple[tuple[type[exp.Expr] | tuple[type[exp.Expr], ...], str], ...] = (
            (
                exp.Window,
                "OVER stands only in the SELECT list of a query. In a pipeline, use group_by(...).over(...), or top(...) for ranks.",
            ),
            ((exp.Query, exp.Subquery, exp.Exists), "subqueries are not supported."),
            (exp.Star, "* stands only alone in select, or in count(*)."),
            (exp.Alias, "AS stands only at the end of an expression."),
            (exp.Filter, "FILTER stands after an aggregate."),
            (exp.Distinct, "DISTINCT is not supported here."),
            (exp.CurrentTimestamp, _not_repeatable("current_timestamp")),
            (exp.CurrentDate, _not_repeatable("current_date")),
        )
        for kind, message in kinds:
            if isinstance(node, kind):
                return self.fail(message, node)
        return self.fail(f"{node.sql(dialect=DIALECT)!r} is not supported.", node)


def _not_repeatable(name: str) -> str:
    return f"{name}() is not supported: the current time and random numbers would give other results on replay."


_METHODS: Final[dict[type[exp.Expr], str]] = {
    exp.DPipe: "_pipes",
    exp.Not: "_not",
    exp.Neg: "_negative",
    exp.Is: "_is",
    exp.NullSafeNEQ: "_distinct_from",
    exp.In: "_in",
    exp.Between: "_between",
    **dict.fromkeys((exp.Like, exp.ILike, exp.Escape), "_like"),
    exp.RegexpLike: "_rlike",
    exp.Case: "_case",
    exp.If: "_if",
    exp.Column: "_column",
    **dict.fromkeys(constants.NODES, "_constant"),
    exp.Cast: "_cast",
    exp.TryCast: "_cast",
    exp.Paren: "_paren",
    exp.Bracket: "_bracket",
    exp.Dot: "_dot",
    exp.Trim: "_trim",
    exp.Substring: "_substring",
    exp.Extract: "_extract",
    exp.Anonymous: "_anonymous",
}
"""Which method of `Checker` reads which node."""
