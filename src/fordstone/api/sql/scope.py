"""What a query can name: the columns of its tables, by what they are called in the stream, and its windows.

TUMBLE, HOP and SESSION become windows of the stream once it is clear that they go by its event time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlglot import exp

from fordstone.api.stream import Stream
from fordstone.api.windows import session, sliding, tumbling
from fordstone.lang.constants import interval
from fordstone.lang.dialect import offset_of
from fordstone.lang.schema import ClashError
from fordstone.lang.sql.syntax import Expr, SqlError, WindowCall, WindowKind, placed
from fordstone.lang.term import YEAR_MONTH
from fordstone.plan.plan import Window
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START, EventTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A table of FROM: what it is called, and its columns by the name that the query uses."""

    name: str | None
    columns: Mapping[str, str]
    """To the names that the columns have in the stream: a join renames those of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The tables of one SELECT."""

    text: str
    members: tuple[Member, ...]

    def fail(self, message: str, at: int | None) -> SqlError:
        return SqlError(message, text=self.text, offset=at)

    def resolved(self, tree: exp.Expr) -> exp.Expr:
        """The tree with every column by its name in the stream, and functions in lower case. The given tree is not changed.

        Names that no table has are left for the checker, which suggests similar ones.
        """
        tree = tree.copy()
        for node in list(tree.walk()):
            if isinstance(node, exp.Anonymous):
                node.set("this", str(node.args["this"]).lower())
            if isinstance(node, exp.Column) and not isinstance(node.args["this"], exp.Star):
                found = self._resolve(node)
                if node is tree:
                    tree = found
                else:
                    node.replace(found)
        return tree

    def condition(self, given: Expr) -> exp.Expr:
        """A condition, resolved. It has no name: AS is refused."""
        if isinstance(given.tree, exp.Alias):
            raise self.fail("this was not expected here: a condition has no name.", offset_of(given.tree.args["alias"]))
        return self.resolved(given.tree)

    def columns_of(self, table: str, at: int) -> Mapping[str, str]:
        """The columns of the table that is called so."""
        for member in self.members:
            if member.name == table:
                return member.columns
        names = [member.name for member in self.members if member.name is not None]
        there = f"There {'is' if len(names) == 1 else 'are'} {', '.join(names)}." if names else "It has no name here."
        raise self.fail(f"there is no stream {table!r} in FROM. {there}", at)

    def _resolve(self, node: exp.Column) -> exp.Expr:
        """`temp` or `r.temp`, and fields of it: a name before a dot is a stream if that has the column, or else a column."""
        at = offset_of(node)
        parts = [node.args[part] for part in ("catalog", "db", "table", "this") if node.args.get(part) is not None]
        if not all(isinstance(part, exp.Identifier) for part in parts):
            raise self.fail("this is not the name of a column; write it in backticks if it is meant as one.", at)
        first, *others = (str(part.args["this"]) for part in parts)
        member = next((member for member in self.members if others and member.name == first), None)
        if member is not None and others[0] in member.columns:
            actual, taken = member.columns[others[0]], 2
        elif not others or any(first in member.columns for member in self.members):
            actual, taken = self._unqualified(first, at), 1
        else:
            columns = self.columns_of(first, at or 0)
            raise self.fail(f"there is no column {others[0]!r} in {first}. Columns are: {', '.join(columns)}.", at)
        made = exp.Identifier(this=actual, quoted=True)
        made.meta.update(parts[taken - 1].meta)
        if "start" in parts[0].meta:
            made.meta["start"] = parts[0].meta["start"]
        found: exp.Expr = exp.Column(this=made)
        for part in parts[taken:]:
            found = exp.Dot(this=found, expression=part.copy())
        return found

    def _unqualified(self, name: str, at: int | None) -> str:
        having = [member for member in self.members if name in member.columns]
        if len(having) > 1:
            options = " or ".join(f"{member.name}.{name}" for member in having)
            raise self.fail(f"column {name!r} is in several streams. Write {options}.", at)
        return having[0].columns[name] if having else name


def column_name(tree: exp.Expr) -> str | None:
    """The name of a resolved tree that is a column and nothing else."""
    if not isinstance(tree, exp.Column) or not isinstance(tree.args["this"], exp.Identifier):
        return None
    return str(tree.args["this"].args["this"])


def column(name: str) -> exp.Expr:
    """A column by its name in the stream."""
    return exp.Column(this=exp.Identifier(this=name, quoted=True))


def named(tree: exp.Expr, name: str) -> exp.Expr:
    """The tree AS a name."""
    return exp.Alias(this=tree, alias=exp.Identifier(this=name, quoted=True))


def conjuncts(tree: exp.Expr) -> Iterator[exp.Expr]:
    """The conditions that AND joins."""
    if isinstance(tree, exp.Paren):
        yield from conjuncts(tree.args["this"])
    elif isinstance(tree, exp.And):
        yield from conjuncts(tree.args["this"])
        yield from conjuncts(tree.args["expression"])
    else:
        yield tree


def event_time(stream: Stream, scope: Scope, what: str, at: int, *, side: str | None = None) -> EventTime:
    """Where the rows of a stream carry their time, which `what` needs."""
    time = stream._type.time  # noqa: SLF001 - our own class
    if time is None:
        raise scope.fail(
            f'{what} needs event time, and {side or stream.name} has none. Declare it at the source (time="ts", or --time on the '
            "command line) and keep that column on the way, or assign it with .with_time(expression).",
            at,
        )
    return time


KINDS: Final[dict[str, WindowKind]] = {"tumble": "TUMBLE", "hop": "HOP", "session": "SESSION"}
HELPERS: Final = {
    f"{kind}_{end}": (KINDS[kind], WINDOW_START if end == "start" else WINDOW_END)
    for kind in KINDS
    for end in ("start", "end")
}
"""Functions that give a bound of the window: the kind they belong to, and the column."""
_WRITTEN: Final = {
    "TUMBLE": "TUMBLE(ts, INTERVAL '10' SECOND)",
    "HOP": "HOP(ts, INTERVAL '10' SECOND, INTERVAL '1' MINUTE), with the slide before the size",
    "SESSION": "SESSION(ts, INTERVAL '30' SECOND)",
}
_SPANS: Final = {"TUMBLE": (1, 2), "HOP": (2, 3), "SESSION": (1, 1)}


def call_of(tree: exp.Expr, at: int, text: str) -> WindowCall | None:
    """The window that a part of GROUP BY is, if it is one."""
    if not isinstance(tree, exp.Anonymous):
        return None
    name = str(tree.args["this"]).lower()
    if name in {"window", "session_window", "cumulate"}:
        raise SqlError(f"{name} is not supported. Use TUMBLE, HOP or SESSION.", text=text, offset=at)
    if name not in KINDS:
        return None
    kind = KINDS[name]
    args = list(tree.args.get("expressions") or ())
    least, most = _SPANS[kind]
    if not least + 1 <= len(args) <= most + 1:
        raise SqlError(f"{kind} is called with {len(args)} arguments. Write {_WRITTEN[kind]}.", text=text, offset=at)
    placed_args = [Expr(tree=arg, at=_place(arg, at)) for arg in args]
    return WindowCall(kind=kind, time=placed_args[0], spans=tuple(placed_args[1:]), at=at)


def window_of(call: WindowCall, stream: Stream, scope: Scope) -> Window:
    """The window, checked: its time is the stream's event time, and its spans are intervals."""
    _check_time(call, stream, scope)
    spans = [span_us(span, scope.text) for span in call.spans]
    for given, span in list(zip(call.spans, spans, strict=True))[: _SPANS[call.kind][0]]:
        if span <= 0:
            raise SqlError("a span of a window must be longer than zero.", text=scope.text, offset=given.at)
    sizes = [timedelta(microseconds=span) for span in spans]
    with placed(scope.text, call.at):
        if call.kind == "TUMBLE":
            return tumbling(sizes[0], **_offset(sizes[1:]))
        if call.kind == "HOP":
            return sliding(sizes[1], every=sizes[0], **_offset(sizes[2:]))
        return session(sizes[0])


def span_us(given: Expr, text: str) -> int:
    """The microseconds of an interval that is written out."""
    tree = given.tree
    if not isinstance(tree, exp.Interval):
        raise SqlError("an interval is needed here, such as INTERVAL '10' SECOND.", text=text, offset=given.at)
    try:
        found = interval(tree)
    except ClashError as clash:
        raise SqlError(clash.message, text=text, offset=given.at) from None
    if not isinstance(found.value, int) or found.type == YEAR_MONTH:
        raise SqlError("months and years differ in length. Write days, hours or less.", text=text, offset=given.at)
    return found.value


def _offset(given: list[timedelta]) -> dict[str, timedelta]:
    return {"offset": given[0]} if given else {}


def _place(tree: exp.Expr, otherwise: int) -> int:
    found = offset_of(tree)
    return otherwise if found is None else found


def shifted_column(tree: exp.Expr, text: str) -> tuple[str, int] | None:
    """The column of a resolved tree and the microseconds added to it, if the tree is that: `ts`, `ts + INTERVAL ...`."""
    if isinstance(tree, exp.Paren):
        return shifted_column(tree.args["this"], text)
    if (name := column_name(tree)) is not None:
        return name, 0
    if not isinstance(tree, exp.Add | exp.Sub):
        return None
    one, other = tree.args["this"], tree.args["expression"]
    if isinstance(tree, exp.Add) and isinstance(one, exp.Interval):
        one, other = other, one
    below = shifted_column(one, text) if isinstance(other, exp.Interval) else None
    if below is None:
        return None
    span = span_us(Expr(tree=other, at=_place(other, 0)), text)
    return below[0], below[1] + (span if isinstance(tree, exp.Add) else -span)


def _check_time(call: WindowCall, stream: Stream, scope: Scope) -> None:
    time = event_time(stream, scope, "a window", call.time.at)
    found = shifted_column(scope.resolved(call.time.tree), scope.text)
    if found is None:
        raise scope.fail(
            f"the first argument of {call.kind} is the column of the event time, {time.column}.", call.time.at
        )
    name, shift_us = found
    if name != time.column:
        there = "" if name in stream.schema else f", and there is no column {name!r}"
        raise scope.fail(
            f"windows go by the stream's event time, which is {time.column}{there}. Write {time.column} here, or declare "
            "another time at the source.",
            call.time.at,
        )
    if time.column == WINDOW_START and time.shift_us > 0:
        raise scope.fail(
            "windows of windows go by the end of these. Keep window_end in SELECT of the query below, and write it here.",
            call.time.at,
        )
    # A window's result counts as its last instant; a user does not write that out.
    if shift_us != time.shift_us and (shift_us, time.shift_us) != (0, -1):
        written = (
            time.column if time.shift_us in {0, -1} else f"{time.column} + INTERVAL '{_seconds(time.shift_us)}' SECOND"
        )
        later = (
            " Pairs of this join may come so late; bound it on one side only, and their time is that of the later row."
            if time.shift_us > 0
            else ""
        )
        raise scope.fail(
            f"windows go by the stream's event time, which is {written}. Write that here.{later}", call.time.at
        )


def _seconds(span_us: int) -> str:
    return f"{span_us / 1_000_000:f}".rstrip("0").rstrip(".")
