"""Which columns a query can name, and what they are called in the stream that it is built on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlglot import exp

from fordstone.api.sql.errors import SqlError
from fordstone.api.stream import Stream
from fordstone.model.dialect import offset_of
from fordstone.model.stream_type import EventTime


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
        """The error to raise."""
        return SqlError(message, text=self.text, offset=at)

    def resolved(self, tree: exp.Expr) -> exp.Expr:
        """The tree with every column by its name in the stream, and functions in small letters. The given one stays as it is.

        Names that no table has are left for the checker, which knows what is near.
        """
        tree = tree.copy()
        for node in list(tree.walk()):
            if isinstance(node, exp.Anonymous):
                node.set("this", str(node.args["this"]).lower())
            if isinstance(node, exp.Column) and not isinstance(node.args["this"], exp.Star):
                self._resolve(node)
        return tree

    def columns_of(self, table: str, at: int) -> Mapping[str, str]:
        """The columns of the table that is called so."""
        for member in self.members:
            if member.name == table:
                return member.columns
        names = [member.name for member in self.members if member.name is not None]
        there = f"There {'is' if len(names) == 1 else 'are'} {', '.join(names)}." if names else "It has no name here."
        raise self.fail(f"there is no stream {table!r} in FROM. {there}", at)

    def _resolve(self, node: exp.Column) -> None:
        at = offset_of(node)
        if node.args.get("db") is not None:
            raise self.fail("a column is written with the name of its stream at most: r.temp.", at)
        identifier, table = node.args["this"], node.args.get("table")
        if not isinstance(identifier, exp.Identifier):
            raise self.fail("this is not the name of a column; write it in backticks if it is meant as one.", at)
        name = str(identifier.args["this"])
        if table is not None:
            columns = self.columns_of(str(table.args["this"]), at or 0)
            if name not in columns:
                raise self.fail(
                    f"there is no column {name!r} in {table.args['this']}. Columns are: {', '.join(columns)}.", at
                )
            actual = columns[name]
        else:
            actual = self._unqualified(name, at)
        made = exp.Identifier(this=actual, quoted=True)
        made.meta.update(identifier.meta)
        if table is not None and "start" in table.meta:
            made.meta["start"] = table.meta["start"]
        node.set("table", None)
        node.set("this", made)

    def _unqualified(self, name: str, at: int | None) -> str:
        having = [member for member in self.members if name in member.columns]
        if len(having) > 1:
            options = " or ".join(f"{member.name}.{name}" for member in having)
            raise self.fail(f"column {name!r} is in several streams. Write {options}.", at)
        return having[0].columns[name] if having else name


def plain(text: str, name: str | None, columns: Iterable[str]) -> Scope:
    """The scope of a single table."""
    return Scope(text=text, members=(Member(name=name, columns={column: column for column in columns}),))


def column_name(tree: exp.Expr) -> str | None:
    """The name of a resolved tree that is a column and nothing else."""
    if not isinstance(tree, exp.Column) or not isinstance(tree.args["this"], exp.Identifier):
        return None
    return str(tree.args["this"].args["this"])


def column(name: str) -> exp.Expr:
    """A column by its name in the stream."""
    return exp.Column(this=exp.Identifier(this=name, quoted=True))


def event_time(stream: Stream) -> EventTime | None:
    """Where the rows of a stream carry their time."""
    return stream._type.time  # noqa: SLF001 - our own class
