"""GROUP BY: keys, a window, aggregates, HAVING, and what SELECT makes of them.

The aggregates of a query become one `agg` step. A `select` is added after it only where SELECT wants other columns, or
others in another order, than that step gives.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Final

from sqlglot import exp

from fordstone.api.graph import graph_of
from fordstone.api.sql.over import number_of, sort_text
from fordstone.api.sql.scope import HELPERS, Scope, call_of, column, column_name, named, window_of
from fordstone.api.stream import Grouped, Stream
from fordstone.lang.aggregates import AGGREGATE_NAMES, parse_aggregate
from fordstone.lang.dialect import offset_of
from fordstone.lang.expression import parse, parse_predicate
from fordstone.lang.sql.parser import NO_LIMIT, NO_SORTING
from fordstone.lang.sql.syntax import Expr, Limited, Select, SqlError, WindowCall, Windowed, placed
from fordstone.plan import plan as p
from fordstone.plan.ids import free_name
from fordstone.plan.plan import Window
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START

_TAKEN: Final = frozenset(inspect.signature(Grouped.agg).parameters)
"""Names that `agg` has for itself: an aggregate with this name is renamed after the step."""
_BOUNDS: Final = (WINDOW_START, WINDOW_END)
_COUNT: Final = exp.Anonymous(this="count", expressions=[exp.Star()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An expression of SELECT without its AS."""

    tree: exp.Expr
    alias: str | None
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """What rows are grouped by: an expression, and the column that it stands in."""

    tree: exp.Expr
    name: str
    computed: str | None = None
    """SQL with AS, if the column has to be made first."""


def is_aggregate(node: exp.Expr) -> bool:
    """Whether a node calls an aggregate."""
    return isinstance(node, exp.Anonymous) and str(node.args["this"]).lower() in AGGREGATE_NAMES


def has_aggregate(tree: exp.Expr) -> bool:
    """Whether an aggregate is called anywhere in it; one with OVER is not: it stands beside rows."""
    beside_rows = (exp.Window, exp.IgnoreNulls, exp.RespectNulls)
    return any(is_aggregate(node) and not isinstance(node.parent, beside_rows) for node in tree.walk())


def grouped(
    stream: Stream, scope: Scope, select: Select, items: list[Item], windowed: Windowed | None, name: str | None
) -> Stream:
    """The aggregated stream of a SELECT, WHERE already done; its last step is called `name`."""
    items = [replace(item, tree=scope.resolved(item.tree)) for item in items]
    return _Grouping(stream, scope, select, items, windowed).build(name)


class _Grouping:
    """Builds one GROUP BY."""

    def __init__(
        self, stream: Stream, scope: Scope, select: Select, items: list[Item], windowed: Windowed | None
    ) -> None:
        self._stream = stream
        self._scope = scope
        self._select = select
        self._items = items
        self._windowed = windowed
        self._call: WindowCall | None = windowed.window if windowed is not None else None
        self._keys: list[_Key] = []
        self._aggregates: dict[str, exp.Expr] = {}
        """Resolved trees by the name of their column."""
        self._outputs: dict[str, exp.Expr] = {}
        """What SELECT's names mean after the aggregation."""

    def build(self, name: str | None) -> Stream:
        self._read_keys()
        window = None if self._call is None else window_of(self._call, self._stream, self._scope)
        for item in self._items:
            self._outputs[self._output_name(item)] = self._output(item)
        if len(self._outputs) < len(self._items):
            self._refuse_twice()
        given_having = self._select.having
        having = None
        if given_having is not None:
            having = self._after_aggregation(self._scope.condition(given_having), names=self._outputs)
        limited = self._select.limited
        order = [] if limited is None else self._order(limited, window)
        if not self._aggregates:
            self._aggregate(_COUNT.copy(), None)
        self._check_key_kept(window)
        given = [*(key.name for key in self._keys), *(_BOUNDS if window is not None else ()), *self._aggregates]
        selects = bool(order) or [(column_name(tree), shown) for shown, tree in self._outputs.items()] != [
            (one, one) for one in given
        ]
        steps = self._aggregated(window, None if selects or having is not None else name)
        if having is not None:
            with placed(self._scope.text, given_having.at if given_having is not None else None):
                predicate = parse_predicate(having, steps.schema).sql
                steps = steps.filter(predicate, name=None if selects else name)
        if limited is not None:
            steps = self._first(steps, limited, order)
        if not selects:
            return steps
        made = []
        for (shown, tree), item in zip(self._outputs.items(), self._items, strict=True):
            with placed(self._scope.text, item.at):
                made.append(parse(named(tree, shown), steps.schema).sql)
        with placed(self._scope.text, self._select.at):
            return steps.select(*made, name=name)

    # Keys

    def _read_keys(self) -> None:
        bounded = False
        for given in self._select.group or ():
            call = call_of(given.tree, given.at, self._scope.text)
            if call is not None:
                if self._call is not None:
                    raise self._scope.fail("there is a window already; a query has one.", given.at)
                self._call = call
                continue
            tree = self._key_tree(given)
            if self._windowed is not None and column_name(tree) in _BOUNDS:
                bounded = True
                continue
            if has_aggregate(tree):
                raise self._scope.fail(
                    "rows are grouped before they are aggregated: no aggregate stands in GROUP BY.", given.at
                )
            if all(tree != key.tree for key in self._keys):
                self._keys.append(self._key(tree, given.at))
        if self._windowed is not None:
            if not bounded:
                raise self._scope.fail(
                    "the windows are missing in GROUP BY: add window_start, window_end.",
                    self._select.group[0].at if self._select.group else self._windowed.at,
                )
            self._check_partition(self._windowed)

    def _key_tree(self, given: Expr) -> exp.Expr:
        """The expression that a part of GROUP BY means: itself, an item by its number, or one by its name."""
        tree = given.tree
        if isinstance(tree, exp.Alias):
            raise self._scope.fail("a part of GROUP BY has no name of its own. Give it one in SELECT.", given.at)
        number = number_of(tree)
        if number is not None:
            return self._items[self._item_at(number, given.at)].tree
        resolved = self._scope.resolved(tree)
        name = column_name(resolved)
        if name is not None and name not in self._stream.schema and not (self._windowed and name in _BOUNDS):
            for item in self._items:
                if item.alias == name:
                    return item.tree
        return resolved

    def _key(self, tree: exp.Expr, at: int) -> _Key:
        with placed(self._scope.text, at):
            found = parse(tree, self._stream.schema, text=self._scope.text)
        if found.is_column:
            return _Key(tree=tree, name=found.name)
        wanted = next((item.alias for item in self._items if item.alias is not None and item.tree == tree), None)
        taken = {*self._stream.schema, *(key.name for key in self._keys), *_BOUNDS}
        name = wanted if wanted is not None and wanted not in taken else free_name(found.name, taken)
        return _Key(tree=tree, name=name, computed=parse(named(tree.copy(), name), self._stream.schema).sql)

    def _check_partition(self, windowed: Windowed) -> None:
        """Sessions are those of each key: what they are partitioned by is what rows are grouped by."""
        if windowed.window.kind != "SESSION":
            return
        parts = [self._scope.resolved(part.tree) for part in windowed.partition or ()]
        keys = [key.tree for key in self._keys]
        if any(part not in keys for part in parts) or any(key not in parts for key in keys):
            names = ", ".join(key.name for key in self._keys)
            raise self._scope.fail(
                "sessions are found for each group. "
                + (
                    f"Write PARTITION BY {names}, as in GROUP BY."
                    if names
                    else "Leave PARTITION BY out, or group by it."
                ),
                windowed.partition[0].at if windowed.partition else windowed.at,
            )

    # What SELECT and HAVING say

    def _output_name(self, item: Item) -> str:
        if item.alias is not None:
            return item.alias
        if (name := column_name(item.tree)) is not None:
            return name
        if isinstance(item.tree, exp.Anonymous) and (helper := HELPERS.get(str(item.tree.args["this"]))):
            return helper[1]
        with placed(self._scope.text, item.at):
            if self._is_whole(item.tree):
                return parse_aggregate(item.tree, self._stream.schema, text=self._scope.text).name
            for key in self._keys:
                if key.tree == item.tree:
                    return key.name
            if not has_aggregate(item.tree):
                return parse(item.tree, self._stream.schema, text=self._scope.text).name
        raise self._scope.fail("this needs a name: add AS.", item.at)

    def _output(self, item: Item) -> exp.Expr:
        if self._is_whole(item.tree):
            return column(self._aggregate(item.tree, item.alias))
        return self._after_aggregation(item.tree)

    def _is_whole(self, tree: exp.Expr) -> bool:
        """Whether an expression is of aggregates alone, so that `agg` takes it as it is."""
        if not has_aggregate(tree):
            return False
        outside = tree.walk(prune=is_aggregate)
        return not any(
            isinstance(node, exp.Column) or self._is_helper(node) or any(node == key.tree for key in self._keys)
            for node in outside
            if not is_aggregate(node)
        )

    def _after_aggregation(self, tree: exp.Expr, names: dict[str, exp.Expr] | None = None) -> exp.Expr:
        """An expression of rows as one of what the aggregation gives."""

        def change(node: exp.Expr) -> exp.Expr:
            for key in self._keys:
                if node == key.tree:
                    return column(key.name)
            if is_aggregate(node):
                return column(self._aggregate(node, None))
            if self._is_helper(node):
                return column(self._bound(node))
            name = column_name(node)
            if name is None:
                return node
            if self._call is not None and name in _BOUNDS:
                return column(name)
            if names is not None and name in names:
                return exp.Paren(this=names[name].copy())
            raise self._outside(name, node)

        return tree.transform(change)

    def _outside(self, name: str, node: exp.Expr) -> SqlError:
        if name in _BOUNDS and name not in self._stream.schema:
            return self._scope.fail(
                f"{name} belongs to a window. Add TUMBLE, HOP or SESSION to GROUP BY.", offset_of(node)
            )
        with placed(self._scope.text, offset_of(node)):
            # A name or a function that does not exist is the nearer mistake.
            parse(node, self._stream.schema, text=self._scope.text)
            if isinstance(node.parent, exp.Anonymous) and not is_aggregate(node.parent):
                parse(node.parent, self._stream.schema, text=self._scope.text)
        return self._scope.fail(
            f"column {name!r} is neither in GROUP BY nor inside an aggregate. Add it to GROUP BY, or write for instance max({name}).",
            offset_of(node),
        )

    def _is_helper(self, node: exp.Expr) -> bool:
        return isinstance(node, exp.Anonymous) and str(node.args["this"]).lower() in HELPERS

    def _bound(self, node: exp.Expr) -> str:
        """The column that TUMBLE_START and the like mean; their arguments are those of the window in GROUP BY."""
        name = str(node.args["this"]).lower()
        kind, bound = HELPERS[name]
        at = offset_of(node)
        if self._call is None or self._call.kind != kind:
            raise self._scope.fail(f"{name.upper()} needs {kind} in GROUP BY.", at)
        given = [self._scope.resolved(arg) for arg in node.args.get("expressions") or ()]
        window = [self._scope.resolved(part.tree) for part in (self._call.time, *self._call.spans)]
        if given and given != window:
            raise self._scope.fail(
                f"{name.upper()} has the arguments of {kind} in GROUP BY, or none; these are others.", at
            )
        return bound

    def _aggregate(self, tree: exp.Expr, wanted: str | None) -> str:
        """The column of an aggregate: one that is there already, or a new one."""
        for name, known in self._aggregates.items():
            if known == tree and wanted in {None, name}:
                return name
        self._refuse_nested(tree)
        with placed(self._scope.text, offset_of(tree)):
            found = parse_aggregate(tree, self._stream.schema, text=self._scope.text)
        taken = {*(key.name for key in self._keys), *self._aggregates, *_TAKEN, *_BOUNDS}
        name = wanted if wanted is not None and wanted not in taken else free_name(found.name, taken)
        self._aggregates[name] = tree
        return name

    def _refuse_nested(self, tree: exp.Expr) -> None:
        for outer in filter(is_aggregate, tree.walk()):
            for node in outer.walk():
                if node is not outer and is_aggregate(node):
                    raise self._scope.fail(
                        "an aggregate stands inside another. Aggregate in a query in FROM, and aggregate that again.",
                        offset_of(node),
                    )

    # ORDER BY ... LIMIT

    def _order(self, limited: Limited, window: Window | None) -> list[exp.Expr]:
        """What ORDER BY sorts by, as expressions of what the aggregation gives."""
        if not isinstance(window, p.Tumbling | p.Sliding):
            raise self._scope.fail(NO_SORTING if limited.order else NO_LIMIT, limited.at)
        if limited.rows is None:
            raise self._scope.fail(
                "ORDER BY needs LIMIT: with a window, ORDER BY ... LIMIT 3 gives the first three rows of each window.",
                limited.at,
            )
        if not limited.order:
            raise self._scope.fail(
                "LIMIT needs ORDER BY before it, which says which rows of each window come first.", limited.at
            )
        return [self._sorted_by(key.by) for key in limited.order]

    def _sorted_by(self, given: Expr) -> exp.Expr:
        """What a part of ORDER BY means: an item of SELECT by its number, or an expression."""
        number = number_of(given.tree)
        if number is None:
            return self._after_aggregation(self._scope.resolved(given.tree), names=self._outputs)
        return list(self._outputs.values())[self._item_at(number, given.at)]

    def _item_at(self, number: int, at: int) -> int:
        """The place of an item of SELECT, from 0, by its number, from 1."""
        if not 1 <= number <= len(self._items):
            raise self._scope.fail(f"SELECT has no item {number}.", at)
        return number - 1

    def _first(self, results: Stream, limited: Limited, order: list[exp.Expr]) -> Stream:
        """The first results of each window; their number is in a column that SELECT leaves out."""
        by = []
        for key, tree in zip(limited.order, order, strict=True):
            with placed(self._scope.text, key.by.at):
                by.append(sort_text(parse(tree, results.schema).sql, key.descending, key.nulls_first))
        with placed(self._scope.text, limited.at):
            rank = free_name("rank", set(results.schema))
            return results.top(limited.rows, by=by, per=_BOUNDS, column=rank)

    # Steps

    def _aggregated(self, window: Window | None, name: str | None) -> Stream:
        stream = self._stream
        made = [key.computed for key in self._keys if key.computed is not None]
        with placed(self._scope.text, self._select.group[0].at if self._select.group else self._select.at):
            if made:
                stream = stream.with_columns(*made)
            groups = stream.group_by(*(key.name for key in self._keys))
            if window is not None:
                groups = groups.window(window)
            written = {
                given: parse_aggregate(tree, self._stream.schema).sql for given, tree in self._aggregates.items()
            }
            results = groups.agg(name=name, **written)
            # At the center windows have provisional results too, which replace each other; a query gives each window once.
            return results.final() if p.Input(results.name, "final") in graph_of(results).types else results

    def _check_key_kept(self, window: Window | None) -> None:
        shown = {column_name(tree) for tree in self._outputs.values()}
        lost = [key.name for key in self._keys if key.name not in shown]
        if window is None and lost:
            raise self._scope.fail(
                f"without a window, results replace each other by {', '.join(key.name for key in self._keys)}, so SELECT must "
                f"list {', '.join(lost)}. Add it, or a window to GROUP BY.",
                self._select.at,
            )

    def _refuse_twice(self) -> None:
        seen: set[str] = set()
        for item in self._items:
            name = self._output_name(item)
            if name in seen:
                raise self._scope.fail(f"two columns are called {name!r}. Rename one with AS.", item.at)
            seen.add(name)
