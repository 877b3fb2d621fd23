"""OVER in SELECT: each window function becomes a column of a step before the projection.

ROW_NUMBER, RANK and DENSE_RANK become `Stream.top`. How many rows are wanted stands in WHERE of the query outside (`rank <= 3`):
`rank_bounds` finds it there, so that only these rows are numbered and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from sqlglot import exp

from fordstone.api.sql.scope import Scope, column, column_name, conjuncts
from fordstone.api.stream import Stream
from fordstone.lang.dialect import offset_of
from fordstone.lang.expression import parse
from fordstone.lang.sql.syntax import placed
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
        high = _number(condition.args["high"])
        name = column_name(condition.args["this"])
        return None if name is None or high is None else (name, high, _number(condition.args["low"]) == 1)
    one, other = condition.args.get("this"), condition.args.get("expression")
    if isinstance(condition, exp.GT | exp.GTE):
        one, other = other, one
    if not isinstance(condition, exp.LT | exp.LTE | exp.GT | exp.GTE | exp.EQ):
        return None
    if isinstance(condition, exp.EQ) and isinstance(one, exp.Literal):
        one, other = other, one
    name, number = column_name(cast("exp.Expr", one)), _number(other)
    if name is None or number is None:
        return None
    if isinstance(condition, exp.EQ):
        return name, number, number == 1
    return name, number - isinstance(condition, exp.LT | exp.GT), True


def _number(tree: object) -> int | None:
    if not isinstance(tree, exp.Literal) or tree.is_string or not str(tree.args["this"]).isdigit():
        return None
    return int(str(tree.args["this"]))


class Overs:
    """Adds a step for each different OVER of a SELECT list."""

    def __init__(self, stream: Stream, scope: Scope, bounds: RankBounds) -> None:
        self.stream = stream
        self._scope = scope
        self._bounds = bounds
        self.made: list[tuple[exp.Expr, str]] = []
        """Window functions, and the columns that stand for them."""

    def replaced(self, tree: exp.Expr, wanted: str | None) -> exp.Expr:
        """A resolved tree with columns in the place of its window functions. `wanted`: what the whole of it is called."""
        if isinstance(tree, exp.Window):
            return column(self._column(tree, wanted, bounded=True))
        for node in list(tree.find_all(exp.Window)):
            node.replace(column(self._column(node, None, bounded=False)))
        return tree

    def _column(self, node: exp.Window, wanted: str | None, *, bounded: bool) -> str:
        for known, name in self.made:
            if known == node:
                return name
        at = offset_of(node)
        call = node.args["this"]
        function = str(call.args["this"]).lower() if isinstance(call, exp.Anonymous) else ""
        taken = set(self.stream.schema)
        name = wanted if wanted is not None and wanted not in taken else free_name(wanted or function or "over", taken)
        self.made.append((node.copy(), name))
        if node.args.get("alias") is not None:
            raise self._scope.fail(
                "OVER with the name of a window is not supported. Write OVER (PARTITION BY ... ORDER BY ...).", at
            )
        if function not in RANKS:
            raise self._scope.fail(
                f"{function or call.sql()} is not supported with OVER. There are ROW_NUMBER, RANK and DENSE_RANK.", at
            )
        if call.args.get("expressions"):
            raise self._scope.fail(f"{function.upper()} has no arguments.", at)
        n = self._bounds.most.get(wanted) if bounded and wanted is not None else None
        self._rank(node, function, name, n)
        if n is not None and wanted is not None:
            self._bounds.used.add(wanted)
        return name

    def _rank(self, node: exp.Window, function: str, name: str, n: int | None) -> None:
        at = offset_of(node)
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
                found = parse(sorted_.args["this"], self.stream.schema, text=self._scope.text)
            by.append(sort_text(found.sql, bool(sorted_.args.get("desc")), bool(sorted_.args.get("nulls_first"))))
        with placed(self._scope.text, at):
            self.stream = self.stream.top(
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
