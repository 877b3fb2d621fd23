"""JOIN ... ON: the equal columns, the bound on time, and conditions beside them, for `Stream.join`.

A stream is joined with a table (`Stream.lookup`) or a control table (`Stream.join_control`) by equal columns alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from sqlglot import exp

from fordstone.api.sql.scope import Member, Scope, column, column_name, conjuncts, event_time, shifted_column
from fordstone.api.stream import Stream
from fordstone.api.table import ControlTable, LookupTable
from fordstone.errors import SchemaError
from fordstone.lang.dialect import offset_of, quoted_name
from fordstone.lang.expression import parse, parse_predicate
from fordstone.lang.schema import Schema
from fordstone.lang.sql.syntax import Join, placed
from fordstone.operators.join.sides import JoinColumns, join_columns
from fordstone.plan.ids import free_name
from fordstone.plan.stream_type import EventTime

LEFT: Final = "left:"
RIGHT: Final = "right:"
"""Columns in ON are resolved to a side and a name, so that each condition says which rows it looks at."""
_FLIPPED: Final = {">=": "<=", "<=": ">=", ">": "<", "<": ">", "=": "="}
_COMPARED: Final[dict[type[exp.Expr], str]] = {exp.GTE: ">=", exp.LTE: "<=", exp.GT: ">", exp.LT: "<", exp.EQ: "="}
_SUFFIXES_MAX: Final = 100


@dataclass(slots=True, kw_only=True)
class _On:
    """What ON says: right time less left time lies from `from_us` to `to_us`."""

    keys: dict[str, str] = field(default_factory=dict)
    """From left columns to right ones."""
    from_us: int | None = None
    to_us: int | None = None
    others: list[exp.Expr] = field(default_factory=list)


Table = LookupTable | ControlTable
"""What a stream is joined with by key alone."""


def joined(left: Stream, scope: Scope, right: Stream, member: Member, join: Join) -> tuple[Stream, Scope]:
    """The joined stream, and the columns that can be named of it."""
    return _Joining(left, scope, right, member, join).build()


def joined_table(left: Stream, scope: Scope, table: Table, member: Member, join: Join) -> tuple[Stream, Scope]:
    """The stream joined with a table, and the columns that can be named of it."""
    return _TableJoining(left, scope, table, member, join).build()


class _Sides:
    """The two sides of a join: what can be named of them, the equal columns of ON, and the names of columns after the join."""

    def __init__(self, left: Stream, scope: Scope, right: Stream | Table, member: Member, join: Join) -> None:
        self._left = left
        self._right_schema = right.schema
        self._scope = scope
        self._member = member
        self._join = join
        self._text = scope.text
        if member.name is not None and any(member.name == other.name for other in scope.members):
            raise self._scope.fail(
                f"two streams in FROM are called {member.name}. Give one another name with AS.", join.table.at
            )
        self._both = Scope(
            text=scope.text, members=(*(_marked(one, LEFT) for one in scope.members), _marked(member, RIGHT))
        )

    def _read_key(self, part: exp.Expr, found: _On) -> bool:
        if not isinstance(part, exp.EQ):
            return False
        named = [column_name(part.args[side]) for side in ("this", "expression")]
        sides = {_side(name): name for name in named if name is not None}
        if set(sides) != {LEFT, RIGHT}:
            return False
        left, right = sides[LEFT].removeprefix(LEFT), sides[RIGHT].removeprefix(RIGHT)
        if found.keys.get(left, right) != right or (left not in found.keys and right in found.keys.values()):
            return False
        if left not in self._left.schema or right not in self._right_schema:
            return False
        found.keys[left] = right
        return True

    def _filtered(self, stream: Stream, conditions: list[exp.Expr]) -> Stream:
        tree = conditions[0]
        for further in conditions[1:]:
            tree = exp.And(this=exp.Paren(this=tree), expression=exp.Paren(this=further))
        with placed(self._text, self._join.on.at):
            parse(tree, stream.schema, text=self._text)
            return stream.filter(parse_predicate(tree, stream.schema).sql)

    def _columns(self, on: _On) -> tuple[JoinColumns, str]:
        """The names of the columns after the join, with the first suffix that makes all names different."""
        with placed(self._text, self._join.at):
            for count in range(1, _SUFFIXES_MAX):
                suffix = "_right" if count == 1 else f"_right_{count}"
                try:
                    found = join_columns(
                        self._left.schema, self._right_schema, tuple(on.keys), tuple(on.keys.values()), suffix=suffix
                    )
                except SchemaError:
                    if count + 1 == _SUFFIXES_MAX or not _clashes(self._left.schema, self._right_schema, suffix):
                        raise
                else:
                    return found, suffix
        raise AssertionError("the last suffix raises")

    def _named(self, stream: Stream, columns: JoinColumns, after: list[exp.Expr]) -> tuple[Stream, Scope]:
        """The joined stream, filtered by the conditions that remain, and what can be named of it."""
        names = {**columns.right, **columns.merged}
        shown = {given: names[actual] for given, actual in self._member.columns.items()}
        if after:
            stream = self._filtered(stream, [_unmarked(one, names) for one in after])
        member = Member(name=self._member.name, columns=shown)
        return stream, Scope(text=self._text, members=(*self._scope.members, member))


class _TableJoining(_Sides):
    """Builds one join with a table: rows of the stream find their row by key, at any time."""

    def __init__(self, left: Stream, scope: Scope, table: Table, member: Member, join: Join) -> None:
        super().__init__(left, scope, table, member, join)
        self._table = table

    def build(self) -> tuple[Stream, Scope]:
        """Look the rows up; other conditions of an inner join are applied after it."""
        how, name = self._join.how, self._table.name
        if how not in {"inner", "left"}:
            raise self._scope.fail(
                f"{how.upper()} JOIN with a table is not supported: a stream has no end, so it is never known that a row of {name} "
                "has no partner. Use JOIN or LEFT JOIN.",
                self._join.at,
            )
        on = _On()
        for part in conjuncts(self._both.condition(self._join.on)):
            if not self._read_key(part, on):
                on.others.append(part)
        if not on.keys:
            raise self._scope.fail(
                f"ON names no columns that are equal. Rows find theirs in {name} by key: r.device = {self._member.name}.device.",
                self._join.on.at,
            )
        if how == "left" and on.others:
            raise self._scope.fail(
                "ON of a LEFT JOIN with a table holds equal columns only. Write this in WHERE, or with CASE in SELECT.",
                offset_of(on.others[0]) or self._join.on.at,
            )
        self._keep_apart(on)
        columns, suffix = self._columns(on)
        with placed(self._text, self._join.at):
            stream = (
                self._left.lookup(self._table, on=on.keys, how=how, suffix=suffix)
                if isinstance(self._table, LookupTable)
                else self._left.join_control(self._table, on=on.keys, how=how, suffix=suffix)
            )
        return self._named(stream, columns, on.others)

    def _keep_apart(self, on: _On) -> None:
        """In a left join t.k is null where the stream's k is not: keys of one name must not become one column."""
        shared = [name for name, other in on.keys.items() if name == other]
        if self._join.how == "inner" or not shared:
            return
        taken = {*self._left.schema, *self._right_schema}
        copies = {name: free_name(f"{name}_key", taken) for name in shared}
        self._left = self._left.with_columns(
            *(f"{quoted_name(name)} AS {quoted_name(copy)}" for name, copy in copies.items())
        )
        on.keys = {copies.get(left, left): right for left, right in on.keys.items()}


class _Joining(_Sides):
    """Builds one join of two streams."""

    def __init__(self, left: Stream, scope: Scope, right: Stream, member: Member, join: Join) -> None:
        super().__init__(left, scope, right, member, join)
        self._right = right

    def build(self) -> tuple[Stream, Scope]:
        """Conditions on one side are filters before the join where that means the same; other conditions of an inner join are applied after it."""
        what, at = "a join of streams", self._join.at
        times = (
            event_time(self._left, self._scope, what, at, side="the left side"),
            event_time(self._right, self._scope, what, at, side="the right side"),
        )
        on = self._read(times)
        if not on.keys:
            raise self._scope.fail(
                "ON names no columns that are equal. Add for instance a.device = b.device.", self._join.on.at
            )
        between = self._between(on, times)
        after = self._filter_before(on.others)
        on = self._kept_apart(on)
        columns, suffix = self._columns(on)
        same = all(one == other for one, other in on.keys.items())
        with placed(self._text, self._join.at):
            keys = tuple(on.keys)
            stream = self._left.join(
                self._right,
                on=(keys[0] if len(keys) == 1 else keys) if same else on.keys,
                between=between,
                how=self._join.how,
                suffix=suffix,
            )
        return self._named(stream, columns, after)

    # ON

    def _read(self, times: tuple[EventTime, EventTime]) -> _On:
        found = _On()
        for part in conjuncts(self._both.condition(self._join.on)):
            for one in _split_between(part):
                if not self._read_bound(one, times, found) and not self._read_key(one, found):
                    found.others.append(one)
        return found

    def _read_bound(self, part: exp.Expr, times: tuple[EventTime, EventTime], found: _On) -> bool:
        """Take in a comparison of the two times, if it is one."""
        sign = _COMPARED.get(type(part))
        if sign is None:
            return False
        one, other = (self._shifted(part.args[side], times) for side in ("this", "expression"))
        if one is None or other is None or one[0] == other[0]:
            return False
        if one[0] == LEFT:
            one, other, sign = other, one, _FLIPPED[sign]
        # right + a <sign> left + b  is  right - left <sign> b - a, in terms of the columns; times may be shifted against those.
        apart_us = other[1] - one[1] + times[1].shift_us - times[0].shift_us
        if sign in {">=", ">", "="}:
            least = apart_us + (sign == ">")
            found.from_us = least if found.from_us is None else max(found.from_us, least)
        if sign in {"<=", "<", "="}:
            most = apart_us - (sign == "<")
            found.to_us = most if found.to_us is None else min(found.to_us, most)
        return True

    def _shifted(self, tree: exp.Expr, times: tuple[EventTime, EventTime]) -> tuple[str, int] | None:
        """A side's time and what is added to it, if the expression is that."""
        found = shifted_column(tree, self._text)
        for side, time in zip((LEFT, RIGHT), times, strict=True):
            if found is not None and found[0] == side + time.column:
                return side, found[1]
        return None

    def _between(self, on: _On, times: tuple[EventTime, EventTime]) -> tuple[timedelta, timedelta]:
        if on.from_us is None or on.to_us is None:
            only = "" if on.from_us is None and on.to_us is None else " on both sides"
            names = [member.name for member in (self._scope.members[0], self._member)]
            left, right = (
                f"{name}.{time.column}" if name else time.column for name, time in zip(names, times, strict=True)
            )
            raise self._scope.fail(
                f"a join of streams needs a bound on time{only}, or it would have to keep every row for good. Add to ON how far "
                f"apart rows may be, for instance:\n  AND {right} BETWEEN {left} - INTERVAL '5' SECOND AND {left} + INTERVAL '10' SECOND",
                self._join.on.at,
            )
        if on.from_us > on.to_us:
            raise self._scope.fail(
                "no rows can be this far apart: the bound on time begins after it ends.", self._join.on.at
            )
        return timedelta(microseconds=on.from_us), timedelta(microseconds=on.to_us)

    # Conditions beside keys and time

    def _filter_before(self, conditions: list[exp.Expr]) -> list[exp.Expr]:
        """Filter the sides by what looks at one of them only; return the conditions that remain for after the join."""
        how, after = self._join.how, []
        for condition in conditions:
            sides = {_side(name) for name in _columns(condition)}
            if sides == {RIGHT} and how in {"inner", "left"}:
                self._right = self._filtered(self._right, [_unmarked(condition, {})])
            elif sides == {LEFT} and how in {"inner", "right"}:
                self._left = self._filtered(self._left, [_unmarked(condition, {})])
            elif how == "inner":
                after.append(condition)
            else:
                other = {"left": "the right stream", "right": "the left stream"}.get(how)
                conditions_too = f", and conditions on {other}" if other else ""
                raise self._scope.fail(
                    f"ON of a {how.upper()} JOIN holds equal columns, the bound on time{conditions_too}. This is something else; "
                    "filter in a query of its own, or in WHERE.",
                    offset_of(condition) or self._join.on.at,
                )
        return after

    def _kept_apart(self, on: _On) -> _On:
        """In an outer join b.k is null where a.k is not: keys of one name must not become one column."""
        shared = [name for name, other in on.keys.items() if name == other]
        if self._join.how == "inner" or not shared:
            return on
        taken = {*self._left.schema, *self._right.schema}
        renamed = {name: free_name(f"{name}_right", taken) for name in shared}
        self._right = self._right.select(
            *(f"{quoted_name(name)} AS {quoted_name(renamed[name])}" if name in renamed else quoted_name(name) for name in self._right.schema)
        )  # fmt: skip
        columns = {given: renamed.get(actual, actual) for given, actual in self._member.columns.items()}
        self._member = Member(name=self._member.name, columns=columns)
        on.keys = {left: renamed.get(right, right) for left, right in on.keys.items()}
        self._right_schema = self._right.schema
        return on


def _clashes(left: Schema, right: Schema, suffix: str) -> bool:
    taken = {*left, *right}
    return any(name in left and name + suffix in taken for name in right)


def _side(name: str) -> str | None:
    """On which side a column of ON is; None: there is no such column."""
    return next((side for side in (LEFT, RIGHT) if name.startswith(side)), None)


def _marked(member: Member, side: str) -> Member:
    return Member(name=member.name, columns={given: side + actual for given, actual in member.columns.items()})


def _unmarked(tree: exp.Expr, right: dict[str, str]) -> exp.Expr:
    """The tree with columns as they are called on their side, or those of the right as they are called after the join."""

    def change(node: exp.Expr) -> exp.Expr:
        name = column_name(node)
        if name is None:
            return node
        bare = name.removeprefix(LEFT) if name.startswith(LEFT) else name.removeprefix(RIGHT)
        made = column(right.get(bare, bare) if name.startswith(RIGHT) else bare)
        made.args["this"].meta.update(node.args["this"].meta)
        return made

    return tree.transform(change)


def _split_between(tree: exp.Expr) -> Iterator[exp.Expr]:
    """A BETWEEN as its two halves."""
    if isinstance(tree, exp.Between) and not tree.args.get("symmetric"):
        yield exp.GTE(this=tree.args["this"].copy(), expression=tree.args["low"].copy())
        yield exp.LTE(this=tree.args["this"].copy(), expression=tree.args["high"].copy())
    else:
        yield tree


def _columns(tree: exp.Expr) -> set[str]:
    return {name for node in tree.walk() if (name := column_name(node)) is not None}
