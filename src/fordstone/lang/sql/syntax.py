"""A query as it was read: what stands in which clause, and where. Names are not looked up yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sqlglot import exp


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name and where it stands."""

    text: str
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expr:
    """An expression: the tree carries the places of its parts."""

    tree: exp.Expr
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """`*`, `t.*`, or `* EXCEPT (a, b)` in a SELECT list."""

    at: int
    table: Name | None = None
    less: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A stream by name; `port` is `late` and the like."""

    name: Name
    port: Name | None = None
    alias: Name | None = None

    @property
    def at(self) -> int:
        """Where the name stands."""
        return self.name.at


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A query in parentheses."""

    query: Query
    at: int
    alias: Name | None = None


WindowKind = Literal["TUMBLE", "HOP", "SESSION"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCall:
    """TUMBLE, HOP or SESSION with a time column and spans, wherever it was written."""

    kind: WindowKind
    time: Expr
    spans: tuple[Expr, ...]
    """Size; slide and size; or gap. Then perhaps the offset."""
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """TABLE(TUMBLE(TABLE t, DESCRIPTOR(ts), ...)): rows with the windows they lie in."""

    table: Named | Derived
    window: WindowCall
    partition: tuple[Expr, ...] | None
    at: int
    alias: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternPart:
    """A variable of PATTERN with its quantifier. `times_max` None: without bound."""

    name: Name
    times_min: int = 1
    times_max: int | None = 1
    greedy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """MATCH_RECOGNIZE over a table."""

    table: Named | Derived
    partition: tuple[Expr, ...]
    order: tuple[Expr, ...]
    measures: tuple[Expr, ...]
    all_rows: bool
    skip: Literal["past_last", "next", "first", "last"]
    skip_to: Name | None
    pattern: tuple[PatternPart, ...]
    within: Expr | None
    define: tuple[tuple[Name, Expr], ...]
    at: int
    alias: Name | None = None


Table = Named | Derived | Windowed | Matched
JoinHow = Literal["inner", "left", "right", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A further table of FROM, and how it is joined."""

    table: Table
    how: JoinHow
    on: Expr
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """One SELECT with its clauses."""

    items: tuple[Expr | Star, ...]
    table: Table
    joins: tuple[Join, ...] = ()
    where: Expr | None = None
    group: tuple[Expr, ...] | None = None
    having: Expr | None = None
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """SELECTs united, with the queries that WITH names before them."""

    parts: tuple[Select | Query, ...]
    named: tuple[tuple[Name, Query], ...] = field(default=())
    at: int
