"""Expressions: Spark SQL, checked and typed against a schema.

The pipeline builder calls `parse`, `parse_predicate` and `expand` once per expression; the planner reads `columns` and
`sql`; each engine translates once at start-up. An `Expression` that exists is valid for the schema it was parsed with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlglot import exp

from fordstone.errors import ExpressionError
from fordstone.lang.check import Checker
from fordstone.lang.coercion import BOOLEAN, DOUBLE, NULL
from fordstone.lang.dialect import DIALECT, is_foreign, offset_of, quoted_name, read
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.term import Call, Column, Term, columns_of, render

ALL = "*"
"""In `expand`: every column of the schema."""


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
        return _parse_tree(read(source), schema, source)
    if text is not None:
        return _parse_tree(source, schema, text)
    tree = with_own_functions(source)
    text = tree.sql(dialect=DIALECT, normalize_functions=False)
    try:
        return _parse_tree(tree, schema, text)
    except ExpressionError:
        # A built tree has no places in it; the text that it writes, read again, has.
        _parse_tree(read(text), schema, text)
        raise


def parse_many(sources: Iterable[str | exp.Expr], schema: Schema) -> list[Expression]:
    """Check several expressions against one schema."""
    return [parse(source, schema) for source in sources]


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
    derived = term.name if isinstance(term, Column) else body
    name = derived if alias is None else alias
    sql = body if name == derived else f"{body} AS {quoted_name(name)}"
    return Expression(sql=sql, name=name, type=term.type, columns=columns_of(term), tree=tree, term=term)


def _parse_tree(tree: exp.Expr, schema: Schema, text: str) -> Expression:
    body, alias = split_alias(tree)
    checker = Checker(text=text, schema=schema)
    term = checker.check(body)
    if term.type.name.startswith("interval"):
        raise checker.fail("an interval is not a value of its own; add it to a timestamp or a date.", body)
    if alias == "":
        raise checker.fail("the name after AS is empty.", body)
    return expression_of(term, tree, alias)
