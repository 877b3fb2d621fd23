"""OVER in SELECT: each window function becomes a column of a step before the projection.

Aggregates and LAG become `Grouped.over`. ROW_NUMBER, RANK and DENSE_RANK become `Stream.top`: how many rows are wanted stands in WHERE of the query outside (`rank <= 3`):
`rank_bounds` finds it there, so that only these rows are numbered and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from sqlglot import exp

from fordstone.api.graph import graph_of
from fordstone.api.sql.scope import Scope, column, column_name, conjuncts, event_time, span_us
from fordstone.api.stream import Stream, keyed_name
from fordstone.lang.aggregates import OVER_NAMES, Aggregate, parse_aggregate
from fordstone.lang.dialect import offset_of
from fordstone.lang.expression import parse
from fordstone.lang.sql.syntax import Expr, placed
from fordstone.plan import plan as p
from fordstone.plan.ids import free_name

RANKS: Final = frozenset({"row_number", "rank", "dense_rank"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBounds:
    """Of a query in FROM: which of its columns the query outside wants up to which number."""

    most: Mapping[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Columns that turned out to be ranks: no larger number comes."""

    def implied(self, condition: exp.Expr) -> bool:
        """Whether a condition of WHERE holds for every row that comes."""
        found = _bound(condition)
        return found is not None and found[0] in self.used and found[2] and self.most[found[0]] <= found[1]


def has_over(tree: exp.Expr) -> bool:
    """Whether a window function is called anywhere in it."""
    return tree.find(exp.Window) is not None


def rank_bounds(where: exp.Expr | None) -> RankBounds:
    """Which columns a condition bounds from above, by a number that is written out."""
    most: dict[str, int] = {}
    for condition in conjuncts(where) if where is not None else ():
        found = _bound(condition)
        if found is not None:
            most[found[0]] = min(found[1], most.get(found[0], found[1]))
    return RankBounds(most=most)


def _bound(condition: exp.Expr) -> tuple[str, int, bool] | None:
    """A column, the number that it is at most, and whether the condition says no more than that of numbers from 1 on."""
    if isinstance(condition, exp.Paren):
        return _bound(condition.args["this"])
    if isinstance(condition, exp.Between):
        high = number_of(condition.args["high"])
        name = column_name(condition.args["this"])
        return None if name is None or high is None else (name, high, number_of(condition.args["low"]) == 1)
    one, other = condition.args.get("this"), condition.args.get("expression")
    if isinstance(condition, exp.GT | exp.GTE):
        one, other = other, one
    if not isinstance(condition, exp.LT | exp.LTE | exp.GT | exp.GTE | exp.EQ):
        return None
    if isinstance(condition, exp.EQ) and isinstance(one, exp.Literal):
        one, other = other, one
    name, number = column_name(cast("exp.Expr", one)), number_of(other)
    if name is None or number is None:
        return None
    if isinstance(condition, exp.EQ):
        return name, number, number == 1
    return name, number - isinstance(condition, exp.LT | exp.GT), True


def number_of(tree: object) -> int | None:
    """The whole number that is written out, if a tree is that."""
    if not isinstance(tree, exp.Literal) or tree.is_string or not str(tree.args["this"]).isdigit():
        return None
    return int(str(tree.args["this"]))


_CURRENT: Final = "CURRENT ROW"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What the functions of one `over` step have in common."""

    keys: tuple[str, ...]
    order: tuple[str, ...]
    """After the time."""
    kind: Literal["rows", "range"]
    preceding: int | None


class Overs:
    """Adds a step for each ranking, and one for the aggregates of each different frame."""

    def __init__(self, stream: Stream, scope: Scope, bounds: RankBounds) -> None:
        self._stream = stream
        self._scope = scope
        self._bounds = bounds
        self.made: list[tuple[exp.Expr, str]] = []
        """Window functions, and the columns that stand for them."""
        self._aggregates: dict[_Frame, dict[str, str]] = {}

    def replaced(self, tree: exp.Expr, wanted: str | None) -> exp.Expr:
        """A resolved tree with columns in the place of its window functions. `wanted`: what the whole of it is called."""
        if isinstance(tree, exp.Window):
            return column(self._column(tree, wanted, bounded=True))
        for node in list(tree.find_all(exp.Window)):
            node.replace(column(self._column(node, None, bounded=False)))
        return tree

    def build(self) -> Stream:
        """The stream with the columns of all of them."""
        for frame, aggregates in self._aggregates.items():
            with placed(self._scope.text, offset_of(self.made[0][0])):
                graph = graph_of(self._stream)
                at = graph.add(
                    p.Over(
                        name=graph.name_for(keyed_name("over", frame.keys), None),
                        input=self._stream._at,  # noqa: SLF001 - our own class
                        keys=frame.keys,
                        frame=frame.kind,
                        preceding=frame.preceding,
                        order=frame.order,
                        aggregates=tuple(p.NamedAggregate(name, sql) for name, sql in aggregates.items()),
                    )
                )
                self._stream = Stream(graph, at)
        return self._stream

    def _column(self, node: exp.Window, wanted: str | None, *, bounded: bool) -> str:
        for known, name in self.made:
            if known == node:
                return name
        at = offset_of(node)
        call = node.args["this"]
        function = str(call.args["this"]).lower() if isinstance(call, exp.Anonymous) else ""
        taken = {*self._stream.schema, *(name for _, name in self.made)}
        name = wanted if wanted is not None and wanted not in taken else free_name(wanted or function or "over", taken)
        if node.args.get("alias") is not None:
            raise self._scope.fail(
                "OVER with the name of a window is not supported. Write OVER (PARTITION BY ... ORDER BY ...).", at
            )
        if function in RANKS:
            n = self._bounds.most.get(wanted) if bounded and wanted is not None else None
            self._rank(node, function, name, n)
            if n is not None and wanted is not None:
                self._bounds.used.add(wanted)
        elif function in OVER_NAMES:
            with placed(self._scope.text, at):
                found = parse_aggregate(call, self._stream.schema, name, text=self._scope.text, over=True)
            self._aggregates.setdefault(self._frame(node, found), {})[name] = found.sql
        else:
            raise self._scope.fail(
                f"{function or call.sql()} is not supported with OVER. There are ROW_NUMBER, RANK, DENSE_RANK, LAG and the aggregates "
                f"{', '.join(sorted(OVER_NAMES - {'lag'}))}.",
                at,
            )
        self.made.append((node.copy(), name))
        return name

    # Frames

    def _frame(self, node: exp.Window, found: Aggregate) -> _Frame:
        order, spec = self._order(node), node.args.get("spec")
        keys = tuple(self._partition(node))
        (call, *_) = found.calls
        if call.function == "lag":
            if spec is not None:
                raise self._scope.fail("LAG counts rows by itself: leave ROWS or RANGE out.", offset_of(node))
            return _Frame(keys=keys, order=order, kind="rows", preceding=int(call.options[0]))
        if spec is None:
            return _Frame(keys=keys, order=order, kind="range", preceding=None)
        kind = str(spec.args.get("kind")).lower()
        supported = (
            kind in {"rows", "range"}
            and spec.args.get("end") in {None, _CURRENT}
            and spec.args.get("start_side") in {None, "PRECEDING"}
            and spec.args.get("exclude") is None
        )
        if not supported:
            raise self._scope.fail(
                "a frame ends at its row: write ROWS BETWEEN 2 PRECEDING AND CURRENT ROW, or RANGE BETWEEN INTERVAL '10' SECOND PRECEDING "
                "AND CURRENT ROW.",
                offset_of(node),
            )
        return _Frame(
            keys=keys,
            order=order,
            kind=cast("Literal['rows', 'range']", kind),
            preceding=self._preceding(spec.args.get("start"), kind, offset_of(node)),
        )

    def _preceding(self, start: object, kind: str, at: int | None) -> int | None:
        if start == "UNBOUNDED":
            return None
        if start == _CURRENT:
            return 0
        if kind == "range":
            tree = cast("exp.Expr", start)
            found = span_us(Expr(tree=tree, at=offset_of(tree) or at or 0), self._scope.text)
            if found < 0:
                raise self._scope.fail("a frame begins before its row: the interval must not be negative.", at)
            return found
        number = number_of(start)
        if number is None:
            raise self._scope.fail("ROWS counts rows: write a whole number before PRECEDING.", at)
        return number

    def _order(self, node: exp.Window) -> tuple[str, ...]:
        """The columns after the time by which rows are ordered."""
        at = offset_of(node)
        time = event_time(self._stream, self._scope, "OVER", at or 0)
        order = node.args.get("order")
        names = []
        for one in order.expressions if order is not None else ():
            name = column_name(one.args["this"])
            if name is None or one.args.get("desc") or not one.args.get("nulls_first"):
                raise self._scope.fail(
                    "ORDER BY names columns here, in ascending order: rows are taken in order of time.", offset_of(one)
                )
            names.append(name)
        if not names or names[0] not in time.columns:
            raise self._scope.fail(
                f"OVER needs ORDER BY {time.column}, the event time: its aggregates are over the rows up to each row.",
                at,
            )
        return tuple(names[1:])

    # Ranks

    def _rank(self, node: exp.Window, function: str, name: str, n: int | None) -> None:
        at = offset_of(node)
        if node.args["this"].args.get("expressions"):
            raise self._scope.fail(f"{function.upper()} has no arguments.", at)
        if node.args.get("spec") is not None:
            raise self._scope.fail(
                f"{function.upper()} looks at all rows of its partition: leave ROWS or RANGE out.", at
            )
        order = node.args.get("order")
        if order is None:
            raise self._scope.fail(f"{function.upper()} needs ORDER BY: it says which row is the first.", at)
        by = []
        for sorted_ in order.expressions:
            with placed(self._scope.text, offset_of(sorted_)):
                found = parse(sorted_.args["this"], self._stream.schema, text=self._scope.text)
            by.append(sort_text(found.sql, bool(sorted_.args.get("desc")), bool(sorted_.args.get("nulls_first"))))
        with placed(self._scope.text, at):
            self._stream = self._stream.top(
                n, by=by, per=self._partition(node), numbering=cast("p.Numbering", function), column=name
            )

    def _partition(self, node: exp.Window) -> list[str]:
        keys = []
        for part in node.args.get("partition_by") or ():
            name = column_name(part)
            if name is None:
                raise self._scope.fail(
                    "PARTITION BY names columns here. Give the expression a name in a query in FROM.", offset_of(part)
                )
            keys.append(name)
        return keys


def sort_text(sql: str, descending: bool, nulls_first: bool) -> str:  # noqa: FBT001 - as in the syntax tree
    """A part of ORDER BY as text."""
    return f"{sql} {'DESC' if descending else 'ASC'} NULLS {'FIRST' if nulls_first else 'LAST'}"
