"""From a query as it was read to the streams that it means. `Pipeline.sql` calls `build`.

Every clause becomes what a person would write with `filter`, `select`, `group_by` and the like, so the plan is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, assert_never, cast

from sqlglot import exp

from fordstone.api.sql.grouping import Item, grouped, has_aggregate
from fordstone.api.sql.join import Table, joined, joined_table
from fordstone.api.sql.match import matched
from fordstone.api.sql.over import Overs, RankBounds, has_over, rank_bounds
from fordstone.api.sql.scope import HELPERS, Member, Scope, column, column_name, conjuncts, named
from fordstone.api.stream import Stream
from fordstone.api.table import ControlTable, LookupTable
from fordstone.errors import PipelineError
from fordstone.lang.dialect import offset_of, quoted_name
from fordstone.lang.expression import Expression, parse, parse_predicate, split_alias
from fordstone.lang.schema import Schema
from fordstone.lang.sql.parser import NO_LIMIT, NO_SORTING, read_query
from fordstone.lang.sql.syntax import (
    Derived,
    Expr,
    Matched,
    Name,
    Named,
    Query,
    Select,
    SqlError,
    Star,
    Windowed,
    placed,
)
from fordstone.lang.sql.syntax import Table as FromTable
from fordstone.plan import plan as p
from fordstone.plan.ids import free_name
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START

if TYPE_CHECKING:
    from fordstone.api.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A query that WITH names, built when it is first read: one that is never read adds no step."""

    query: Query
    names: Mapping[str, Stream | Table | _Pending]


Names = dict[str, "Stream | Table | _Pending"]


def build(graph: Graph, text: str, tables: Mapping[str, Stream | Table], name: str | None) -> Stream:
    """The stream that the query gives; its last step is called `name`.

    Raises:
        SqlError: with the place in the query.
    """
    if not isinstance(text, str):
        raise PipelineError(f"sql: {text!r} is not a query. Write it as text.")
    try:
        return _Builder(graph, text).query(read_query(text), dict(tables), name)
    except RecursionError:
        raise SqlError("the query is nested too deeply, or has too long a chain of operators.", text=text) from None


class _Builder:
    """Builds one query."""

    def __init__(self, graph: Graph, text: str) -> None:
        self._graph = graph
        self._text = text
        self._built: dict[int, Stream] = {}

    def query(self, query: Query, names: Names, name: str | None, bounds: RankBounds | None = None) -> Stream:
        """The stream of a query. `bounds`: what the query outside wants of its ranks."""
        for given, inner in query.named:
            names = {**names, given.text: _Pending(query=inner, names=dict(names))}
        if len(query.parts) == 1:
            return self._part(query.parts[0], names, name, bounds)
        first, *others = [self._part(part, names, None) for part in query.parts]
        aligned = [self._aligned(first, other, part.at) for other, part in zip(others, query.parts[1:], strict=True)]
        with placed(self._text, query.parts[1].at):
            if not query.distinct:
                return first.union(*aligned, name=name)
            # What stands before the last UNION without ALL is made distinct with it, once.
            last = max(query.distinct)
            more = aligned[last:]
            once = first.union(*aligned[:last]).distinct(name=None if more else name)
            return once.union(*more, name=name) if more else once

    def _part(self, part: Select | Query, names: Names, name: str | None, bounds: RankBounds | None = None) -> Stream:
        if isinstance(part, Query):
            return self.query(part, names, name, bounds)
        return self._select(part, names, name, bounds or RankBounds())

    def _aligned(self, first: Stream, other: Stream, at: int) -> Stream:
        """Columns are united by position, under the names of the first query."""
        if len(other.schema) != len(first.schema):
            raise self._fail(
                f"UNION needs as many columns on both sides: the first query has {len(first.schema)}, this one "
                f"{len(other.schema)}.",
                at,
            )
        for (name, kind), (mine, found) in zip(first.schema.columns, other.schema.columns, strict=True):
            if kind != found:
                raise self._fail(
                    f"UNION needs the same types: {name} is {kind} in the first query, and {mine} here is {found}. Cast one "
                    f"of them: CAST({mine} AS {kind}).",
                    at,
                )
        if first.schema.names() == other.schema.names():
            return other
        pairs = zip(first.schema.names(), other.schema.names(), strict=True)
        return other.select(*(_renamed(mine, name) for name, mine in pairs))

    # FROM

    def _table(self, table: FromTable, names: Names, bounds: RankBounds | None = None) -> tuple[Stream, Member]:
        """The stream of a table, and what can be named of it."""
        alias = table.alias.text if table.alias is not None else None
        if isinstance(table, Named):
            stream = self._stream(table, names, bounds)
            return stream, _member(alias or table.name.text, stream)
        if isinstance(table, Derived):
            stream = self.query(table.query, names, None, bounds)
            return stream, _member(alias, stream)
        if isinstance(table, Windowed):
            stream, inner = self._table(table.table, names)
            columns = {**inner.columns, WINDOW_START: WINDOW_START, WINDOW_END: WINDOW_END}
            return stream, Member(name=alias or inner.name, columns=columns)
        if isinstance(table, Matched):
            below, inner = self._table(table.table, names)
            stream = matched(below, Scope(text=self._text, members=(inner,)), table)
            return stream, _member(alias or inner.name, stream)
        assert_never(table)

    def _stream(self, table: Named, names: Names, bounds: RankBounds | None = None) -> Stream:
        found = names.get(table.name.text)
        if isinstance(found, _Pending):
            if bounds is not None and self._ranks(found.query, bounds):
                # A query that wants other ranks of it has steps of its own.
                return self.query(found.query, dict(found.names), None, bounds)
            key = id(found.query)
            if key not in self._built:
                self._built[key] = self.query(found.query, dict(found.names), None)
            found = self._built[key]
        if (rows := self._lookup_table(table, names)) is not None:
            raise self._fail(
                f"{rows.name} is a table, which rows of a stream are joined with. Write the stream first: FROM readings JOIN {rows.name} ON ...",
                table.at,
            )
        steps = [step.name for step in self._graph.steps if not isinstance(step, p.Sink)]
        if found is None and table.name.text in steps:
            found = Stream(self._graph, p.Input(table.name.text))
        if found is None:
            known = sorted({*names, *steps, *self._graph.tables})
            near = get_close_matches(table.name.text, known, n=1, cutoff=0.6)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known) or 'none yet'}."
            raise self._fail(f"there is no stream {table.name.text!r}. {hint}", table.at)
        if table.port is None:
            return cast("Stream", found)
        if table.port.text not in {"late", "timeout", "final"}:
            raise self._fail(
                f"a stream has no part {table.port.text!r}. There is {table.name.text}.late, for rows that came too late.",
                table.port.at,
            )
        port = p.Input(cast("Stream", found)._at.step, cast("p.Port", table.port.text))  # noqa: SLF001 - our own class
        if port not in self._graph.types:
            raise self._fail(f"{table.name.text} has no {table.port.text} rows.", table.port.at)
        return Stream(self._graph, port)

    def _lookup_table(self, table: FromTable, names: Names) -> Table | None:
        """The table that a name means: names of the query come first, then tables and control tables of the pipeline."""
        if not isinstance(table, Named):
            return None
        found = names.get(table.name.text)
        if isinstance(found, LookupTable | ControlTable):
            return found
        if found is not None:
            return None
        if (known := self._graph.tables.get(table.name.text)) is not None:
            return known
        for step in self._graph.steps:
            if isinstance(step, p.Control) and step.name == table.name.text:
                schema = Schema.of(step.schema)
                return ControlTable(pipeline=self._graph.pipeline, name=step.name, schema=schema, keys=step.keys)
        return None

    def _ranks(self, query: Query, bounds: RankBounds) -> bool:
        """Whether a query numbers rows, and numbers up to a bound are wanted."""
        (part, *others) = query.parts
        if others or isinstance(part, Query):
            return not others and isinstance(part, Query) and self._ranks(part, bounds)
        items = [split_alias(item.tree) for item in part.items if isinstance(item, Expr)]
        return any(alias in bounds.most and has_over(tree) for tree, alias in items)

    def _from(self, select: Select, names: Names, bounds: RankBounds | None) -> tuple[Stream, Scope, Windowed | None]:
        stream, member = self._table(select.table, names, bounds)
        windowed = select.table if isinstance(select.table, Windowed) else None
        scope = Scope(text=self._text, members=(member,))
        for join in select.joins:
            if windowed is not None or isinstance(join.table, Windowed):
                raise self._fail(
                    "windows are not joined as tables. Aggregate each side in a query of its own, then join those within a time.",
                    join.at,
                )
            rows = self._lookup_table(join.table, names)
            if rows is not None and isinstance(join.table, Named):
                called = join.table.alias or join.table.name
                other = Member(name=called.text, columns={column: column for column in rows.schema})
                stream, scope = joined_table(stream, scope, rows, other, join)
                continue
            right, other = self._table(join.table, names)
            stream, scope = joined(stream, scope, right, other, join)
        return stream, scope, windowed

    # SELECT

    def _select(self, select: Select, names: Names, name: str | None, bounds: RankBounds) -> Stream:
        if select.qualify is not None:
            select = self._qualified(select, select.qualify)
        if not select.distinct:
            return self._selected(select, names, name, bounds)
        if select.limited is not None:
            raise self._fail("DISTINCT with LIMIT is not supported. Write the query with DISTINCT in FROM.", select.at)
        stream = self._selected(select, names, None, bounds)
        with placed(self._text, select.at):
            return stream.distinct(name=name)

    def _qualified(self, select: Select, condition: Expr) -> Select:
        """SELECT ... QUALIFY c as SELECT * FROM (SELECT ...) WHERE c. Window functions in c become columns inside that are left out outside."""
        items = [split_alias(item.tree) for item in select.items if isinstance(item, Expr)]
        if not has_over(condition.tree) and not any(has_over(body) for body, _ in items):
            raise self._fail(
                "QUALIFY is about window functions, such as ROW_NUMBER() OVER (...). Write WHERE.", condition.at
            )
        known = [(body, alias) for body, alias in items if alias is not None]
        hidden: list[tuple[exp.Expr, str]] = []
        where = exp.Paren(this=condition.tree.copy())
        for node in list(where.find_all(exp.Window)):
            name = next((alias for body, alias in (*known, *hidden) if body == node), None)
            if name is None:
                name = free_name(str(node.this.args["this"]).lower(), {alias for _, alias in (*known, *hidden)})
                hidden.append((node.copy(), name))
            node.replace(column(name))
        added = [Expr(tree=named(body, name), at=condition.at) for body, name in hidden]
        inner = replace(select, items=(*select.items, *added), qualify=None, distinct=False)
        table = select.table
        alias = table.alias or (table.name if isinstance(table, Named) else None)
        return Select(
            items=(Star(at=select.at, less=tuple(Name(text=name, at=condition.at) for _, name in hidden)),),
            table=Derived(
                query=Query(parts=(inner,), at=select.at), at=select.at, alias=None if select.joins else alias
            ),
            where=Expr(tree=where.this, at=condition.at),
            distinct=select.distinct,
            at=select.at,
        )

    def _selected(self, select: Select, names: Names, name: str | None, bounds: RankBounds) -> Stream:
        wanted = None if select.where is None or select.joins else rank_bounds(select.where.tree)
        stream, scope, windowed = self._from(select, names, wanted)
        if wanted is not None and wanted.used:
            select = replace(select, where=_without(select.where, wanted))
        aggregated = select.group is not None or select.having is not None or self._aggregates(select)
        if select.limited is not None and not aggregated:
            raise self._fail(NO_SORTING if select.limited.order else NO_LIMIT, select.limited.at)
        if windowed is not None and not aggregated:
            raise self._fail(
                "windows of a table are there to be aggregated. Add GROUP BY window_start, window_end and an aggregate, such "
                "as count(*).",
                windowed.at,
            )
        everything = not aggregated and self._everything(select, scope, stream)
        if select.where is not None:
            self._check_not_selected(select, select.where, stream)
            last = everything and name is not None
            stream = self._filtered(stream, scope, select.where, windowed, name if last else None)
        if aggregated:
            return grouped(stream, scope, select, self._items(select), windowed, name)
        if everything:
            return stream if name is None or select.where is not None else stream.select("*", name=name)
        return self._projected(stream, scope, select, name, bounds)

    def _aggregates(self, select: Select) -> bool:
        return any(isinstance(item, Expr) and has_aggregate(item.tree) for item in select.items)

    def _everything(self, select: Select, scope: Scope, stream: Stream) -> bool:
        """Whether SELECT gives all columns as they are, so that no step is needed."""
        only = select.items[0] if len(select.items) == 1 else None
        if not isinstance(only, Star) or only.less:
            return False
        if only.table is not None:
            scope.columns_of(only.table.text, only.at)
        # A join with a table may have added a column that has no name in the query.
        named = sum(len(member.columns) for member in scope.members) >= len(stream.schema)
        return (only.table is None and named) or len(scope.members) == 1

    def _check_not_selected(self, select: Select, where: Expr, stream: Stream) -> None:
        """Raise if WHERE names what SELECT computes after it."""
        items = (split_alias(item.tree) for item in select.items if isinstance(item, Expr))
        computed = {alias: body for body, alias in items if alias is not None and alias not in stream.schema}
        for node in where.tree.find_all(exp.Column):
            name = column_name(node)
            if name not in computed:
                continue
            instead = "Write the expression itself, or write the query in FROM, and WHERE outside of it."
            if has_over(computed[name]):
                instead = "Write QUALIFY in place of WHERE, or write the query in FROM, and WHERE outside of it."
            elif has_aggregate(computed[name]):
                instead = "Write HAVING after GROUP BY."
            raise self._fail(f"{name} is computed after WHERE, by SELECT. {instead}", offset_of(node))

    def _filtered(
        self, stream: Stream, scope: Scope, where: Expr, windowed: Windowed | None, name: str | None
    ) -> Stream:
        if has_aggregate(where.tree):
            raise self._fail(
                "WHERE looks at single rows, before they are aggregated. Write HAVING after GROUP BY.", where.at
            )
        tree = scope.condition(where)
        if windowed is not None:
            for node in tree.find_all(exp.Column):
                found = column_name(node)
                if found in {WINDOW_START, WINDOW_END} and found not in stream.schema:
                    raise self._fail(
                        f"WHERE looks at rows before they are in windows. Write {found} in HAVING.", offset_of(node)
                    )
        with placed(self._text, where.at):
            # Checked here first, so that a mistake is shown in the query.
            parse(tree, stream.schema, text=self._text)
            return stream.filter(parse_predicate(tree, stream.schema).sql, name=name)

    def _items(self, select: Select) -> list[Item]:
        found = []
        for item in select.items:
            if isinstance(item, Star):
                raise self._fail("* does not stand beside aggregates. List the columns of GROUP BY.", item.at)
            body, alias = split_alias(item.tree)
            if has_over(body):
                raise self._fail(
                    "OVER does not stand beside GROUP BY. Aggregate in a query in FROM or WITH, and write OVER outside of it.",
                    item.at,
                )
            found.append(Item(tree=body, alias=alias, at=item.at))
        return found

    def _projected(self, stream: Stream, scope: Scope, select: Select, name: str | None, bounds: RankBounds) -> Stream:
        trees: list[tuple[exp.Expr, int]] = []
        stream, exploded = self._exploded(stream, scope, select)
        overs = Overs(stream, scope, bounds)
        for item in select.items:
            if isinstance(item, Star):
                trees += [(tree, item.at) for tree in self._starred(item, scope)]
                continue
            if item.at in exploded:
                trees += [(tree, item.at) for tree in exploded[item.at]]
                continue
            tree = self._item_tree(item, scope)
            if has_over(tree):
                body, alias = split_alias(tree)
                found_tree = overs.replaced(body, alias)
                tree = found_tree if alias is None else named(found_tree, alias)
            trees.append((tree, item.at))
        stream = overs.build()
        columns: list[Expression] = []
        seen: set[str] = set()
        for tree, at in trees:
            with placed(self._text, at):
                found = parse(tree, stream.schema, text=self._text)
            if found.name in seen:
                raise self._fail(f"two columns are called {found.name!r}. Rename one with AS.", at)
            seen.add(found.name)
            columns.append(found)
        if (
            overs.made
            and name is None
            and [found.sql for found in columns] == [quoted_name(one) for one in stream.schema]
        ):
            return stream
        with placed(self._text, select.at):
            return stream.select(*(found.sql for found in columns), name=name)

    def _exploded(self, stream: Stream, scope: Scope, select: Select) -> tuple[Stream, dict[int, list[exp.Expr]]]:
        """The stream with one row per element of `explode(...)`, if it is selected, and the columns that it is, by its place."""
        calls = [item for item in select.items if isinstance(item, Expr) and _explode_of(item.tree) is not None]
        if not calls:
            return stream, {}
        if len(calls) > 1:
            raise self._fail("explode stands once in SELECT. Explode the other in a query of its own.", calls[1].at)
        (item,) = calls
        call, names = _explode_of(item.tree) or (item.tree, ())
        if len(call.args.get("expressions") or ()) != 1:
            raise self._fail("explode takes one array or map: explode(items) AS item.", item.at)
        with placed(self._text, item.at):
            given = parse(scope.resolved(call.args["expressions"][0]), stream.schema, text=self._text)
            if given.type.name not in {"array", "map"}:
                raise self._fail(f"explode needs an array or a map, but this is {given.type}.", item.at)
            parts = ("key", "value") if given.type.name == "map" else ()
            if len(names) not in {0, len(parts) or 1}:
                raise self._fail("explode of a map is two columns: explode(m) AS (k, v); of an array one.", item.at)
            element = free_name("element", set(stream.schema))
            taken = stream.flat_map(f"{given.sql} AS {quoted_name(element)}")
        if not parts:
            return taken, {item.at: [named(column(element), *(names or ("col",)))]}
        fields = [exp.Dot(this=column(element), expression=exp.Identifier(this=part, quoted=True)) for part in parts]
        return taken, {item.at: [named(tree, name) for tree, name in zip(fields, names or parts, strict=True)]}

    def _item_tree(self, item: Expr, scope: Scope) -> exp.Expr:
        body, alias = split_alias(item.tree)
        for node in body.find_all(exp.Anonymous):
            if str(node.args["this"]).lower() in HELPERS:
                raise self._fail(
                    f"{node.args['this']} belongs to a window. Add GROUP BY with the window.", offset_of(node)
                )
        tree = scope.resolved(body)
        if isinstance(body, exp.Column) and alias is None and isinstance(body.args["this"], exp.Identifier):
            # b.k is called k, whatever the join calls it.
            alias = str(body.args["this"].args["this"])
        return tree if alias is None else named(tree, alias)

    def _starred(self, star: Star, scope: Scope) -> list[exp.Expr]:
        if star.table is not None:
            return [
                named(column(actual), shown) for shown, actual in scope.columns_of(star.table.text, star.at).items()
            ]
        names = [actual for member in scope.members for actual in member.columns.values()]
        for less in star.less:
            if less.text not in names:
                raise self._fail(f"there is no column {less.text!r} to leave out.", less.at)
        left = [name for name in names if name not in {less.text for less in star.less}]
        if not left:
            raise self._fail("no column is left.", star.at)
        return [column(name) for name in left]

    def _fail(self, message: str, at: int | None) -> SqlError:
        return SqlError(message, text=self._text, offset=at)


def _without(where: Expr | None, bounds: RankBounds) -> Expr | None:
    """WHERE without the conditions that hold for every row, because only these ranks come."""
    left = [] if where is None else [one for one in conjuncts(where.tree) if not bounds.implied(one)]
    if where is None or not left:
        return None
    tree = left[0]
    for further in left[1:]:
        tree = exp.And(this=tree, expression=further)
    return Expr(tree=tree, at=where.at)


def _explode_of(tree: exp.Expr) -> tuple[exp.Expr, tuple[str, ...]] | None:
    """The call and the names that AS gives, if an item is `explode(...)`."""
    body, alias = split_alias(tree)
    names: tuple[str, ...] = () if alias is None else (alias,)
    if isinstance(tree, exp.Aliases):
        body, names = tree.this, tuple(str(name.this) for name in tree.expressions)
    is_call = isinstance(body, exp.Anonymous) and str(body.args["this"]).lower() == "explode"
    return (body, names) if is_call else None


def _member(name: str | None, stream: Stream) -> Member:
    return Member(name=name, columns={column: column for column in stream.schema})


def _renamed(old: str, new: str) -> str:
    return quoted_name(old) if old == new else f"{quoted_name(old)} AS {quoted_name(new)}"
