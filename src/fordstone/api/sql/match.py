"""MATCH_RECOGNIZE as a step of the plan: rows that follow each other at once, and of one first row the match that SQL prefers."""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from fordstone.api.graph import graph_of
from fordstone.api.sql.scope import Scope, column_name, event_time, span_us
from fordstone.api.stream import Stream, keyed_name
from fordstone.errors import ExpressionError
from fordstone.lang.dialect import DIALECT, offset_of, quoted_name, read
from fordstone.lang.sql.syntax import Expr, Matched, Name, PatternPart, SqlError, placed
from fordstone.plan import plan as p

_ELSEWHERE: Final = {
    "prev": "PREV is not supported. Write LAST(A.x, 1) for the row before the last one of A.",
    "next": "NEXT is not supported: a row is judged before the next one comes. Write FIRST(A.x, 1) for the second row of A.",
    "match_proctime": "MATCH_PROCTIME is not supported: the current time would give other results on replay. Use MATCH_ROWTIME().",
}
_RENAMED: Final = {"match_rowtime": "match_time"}


def matched(stream: Stream, scope: Scope, match: Matched) -> Stream:
    """The matches of a stream."""
    return _Matching(stream, scope, match).build()


class _Matching:
    """Builds one MATCH_RECOGNIZE."""

    def __init__(self, stream: Stream, scope: Scope, match: Matched) -> None:
        self._stream = stream
        self._scope = scope
        self._match = match
        self._written: list[tuple[str, exp.Expr, int]] = []
        """Every expression as the plan has it, its tree, and its place in the query."""
        self._variables: dict[str, str] = {}
        """From variables in capitals to how PATTERN writes them: SQL does not tell them apart by case."""
        for part in match.pattern:
            if part.name.text.upper() in self._variables:
                raise self._scope.fail(
                    f"{part.name.text} stands twice in the pattern. Give each place its own variable.", part.name.at
                )
            self._variables[part.name.text.upper()] = part.name.text

    def build(self) -> Stream:
        keys = tuple(self._column(key, "PARTITION BY") for key in self._match.partition)
        order = self._order()
        conditions = {self._variable(name): self._text(given) for name, given in self._match.define}
        graph = graph_of(self._stream)
        step = p.Match(
            name=graph.name_for(keyed_name("match", keys), None),
            input=self._stream._at,  # noqa: SLF001 - our own class
            keys=keys,
            pattern="match",
            stages=tuple(_stage(part, conditions.get(part.name.text)) for part in self._match.pattern),
            within_us=None if self._match.within is None else span_us(self._match.within, self._scope.text),
            skip=self._match.skip,
            skip_to=None if self._match.skip_to is None else self._variable(self._match.skip_to),
            choose="preferred",
            own_row=True,
            measures=tuple(self._measure(given) for given in self._match.measures),
            all_rows=self._match.all_rows,
            order=order,
        )  # fmt: skip
        with placed(self._scope.text, self._match.pattern[0].name.at):
            try:
                return Stream(graph, graph.add(step))
            except ExpressionError as error:
                raise self._in_query(error) from None

    def _column(self, given: Expr, clause: str) -> str:
        name = column_name(self._scope.resolved(given.tree))
        if name is None:
            raise self._scope.fail(f"{clause} names columns here. Compute others in a query in FROM.", given.at)
        if name not in self._stream.schema:
            raise self._scope.fail(
                f"there is no column {name!r}. Columns are: {', '.join(self._stream.schema)}.", given.at
            )
        return name

    def _order(self) -> tuple[str, ...]:
        first, *others = self._match.order
        time = event_time(self._stream, self._scope, "MATCH_RECOGNIZE", first.at)
        if self._column(first, "ORDER BY") != time.column:
            raise self._scope.fail(
                f"rows are taken in order of the stream's event time: ORDER BY begins with {time.column}.", first.at
            )
        return tuple(self._column(one, "ORDER BY") for one in others)

    def _variable(self, name: Name) -> str:
        found = self._variables.get(name.text.upper())
        if found is None:
            raise self._scope.fail(
                f"{name.text} is not in the pattern. Its variables are {', '.join(self._variables.values())}.", name.at
            )
        return found

    def _measure(self, given: Expr) -> str:
        if not isinstance(given.tree, exp.Alias):
            raise self._scope.fail("a measure needs a name: add AS.", given.at)
        return self._text(given)

    def _text(self, given: Expr) -> str:
        """An expression as the plan has it: variables as PATTERN writes them, names quoted where they must be."""
        tree = given.tree.copy()
        for node in list(tree.walk()):
            if isinstance(node, exp.Anonymous):
                name = str(node.args["this"]).lower()
                if name in _ELSEWHERE:
                    raise self._scope.fail(_ELSEWHERE[name], offset_of(node))
                node.set("this", _RENAMED.get(name, name))
            elif isinstance(node, exp.Column):
                self._resolve(node)
        alias = tree.args["alias"] if isinstance(tree, exp.Alias) else None
        body = tree.args["this"] if isinstance(tree, exp.Alias) else tree
        text = body.sql(dialect=DIALECT, normalize_functions=False)
        if alias is not None:
            text = f"{text} AS {quoted_name(str(alias.args['this']))}"
        self._written.append((text, given.tree, given.at))
        return text

    def _resolve(self, node: exp.Column) -> None:
        table, inner, at = node.args.get("table"), node.args["this"], offset_of(node)
        (member,) = self._scope.members
        if table is not None:
            name = str(table.args["this"])
            if name.upper() in self._variables:
                node.set("table", _identifier(self._variables[name.upper()]))
            elif name == member.name:
                node.set("table", None)
            else:
                variables = ", ".join(self._variables.values())
                hint = f" A field of column {name} is written ({name}).{node.name}." if name in member.columns else ""
                raise self._scope.fail(f"{name} is not in the pattern. Its variables are {variables}.{hint}", at)
        if not isinstance(inner, exp.Identifier | exp.Star):
            raise self._scope.fail("this is not the name of a column; write it in backticks if it is meant as one.", at)
        if isinstance(inner, exp.Identifier):
            actual = str(inner.args["this"])
            node.set("this", _identifier(member.columns.get(actual, actual)))

    def _in_query(self, error: ExpressionError) -> SqlError:
        """The error at its place in the query: the expression was written again, word for word."""
        for text, tree, at in self._written:
            if text == error.text:
                place = at if error.offset is None else _place(tree, text, error.offset)
                return self._scope.fail(error.message, at if place is None else place)
        return self._scope.fail(error.message, self._match.pattern[0].name.at)


def _identifier(name: str) -> exp.Identifier:
    """A name, quoted where it must be: plans are read by people, too."""
    return exp.Identifier(this=name, quoted=quoted_name(name) != name)


def _place(tree: exp.Expr, text: str, offset: int) -> int | None:
    """Where in the query the node stands that stands at `offset` in what was written of the tree."""
    for given, again in zip(tree.walk(), read(text).walk(), strict=False):
        if again.meta.get("start") == offset and "start" in given.meta:
            return int(given.meta["start"])
    return None


def _stage(part: PatternPart, predicate: str | None) -> p.Stage:
    return p.Stage(
        name=part.name.text,
        predicate=predicate,
        follows="next",
        times_min=max(part.times_min, 1),
        times_max=part.times_max,
        optional=part.times_min == 0,
        repeats="next",
        quantifier="greedy" if part.greedy else "reluctant",
    )
