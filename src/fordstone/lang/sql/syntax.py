"""The syntax tree of a query, and the error that points into its text. Names are not looked up yet."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final, Literal

from sqlglot import exp

from fordstone.errors import ExpressionError, FordstoneError
from fordstone.lang.aggregates import AGGREGATE_NAMES

SHOWN_CHARS_MAX: Final = 96
"""Of a longer line the part around the place is shown, so that the caret stands under it in any terminal."""
_BEFORE_CHARS: Final = 60
_NO_FUNCTION: Final = re.compile(r"there is no function (?P<name>\w+)\.")
_STEP: Final = re.compile(r"step [\w.-]+: ")


class SqlError(ExpressionError):
    """A query cannot be read, names what is not there, or asks for what is not supported."""

    def render(self) -> str:
        """The message, the line of the query, and a caret; in a query of several lines also the line's number."""
        if self.offset is None:
            return self.message
        offset = min(max(self.offset, 0), len(self.text))
        begin = self.text.rfind("\n", 0, offset) + 1
        end = self.text.find("\n", offset)
        line = self.text[begin : end if end >= 0 else len(self.text)].replace("\t", " ").rstrip()
        where = f"{self.text.count(chr(10), 0, offset) + 1}: " if "\n" in self.text.strip() else ""
        line, at = _around(line, offset - begin)
        return f"{self.message}\n  {where}{line}\n  {' ' * (len(where) + _cells(line[:at]))}^"


def _around(line: str, at: int) -> tuple[str, int]:
    """The part of a line around a place, and the place in it."""
    if len(line) <= SHOWN_CHARS_MAX:
        return line, at
    first = min(max(at - _BEFORE_CHARS, 0), len(line) - SHOWN_CHARS_MAX)
    shown = line[first : first + SHOWN_CHARS_MAX]
    before, after = "... " if first else "", " ..." if first + SHOWN_CHARS_MAX < len(line) else ""
    return f"{before}{shown}{after}", at - first + len(before)


def _cells(text: str) -> int:
    """How many places of a terminal a text takes: wide characters take two, marks that join others none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


@contextmanager
def placed(text: str, offset: int | None) -> Iterator[None]:
    """Give what goes wrong inside a place in the query, unless it has one.

    An `ExpressionError` of this very text has its own place; one of another text, or none, happened at `offset`.
    """
    try:
        yield
    except SqlError:
        raise
    except ExpressionError as error:
        known = error.offset is not None and error.text == text
        raise SqlError(_hinted(error.message), text=text, offset=error.offset if known else offset) from None
    except FordstoneError as error:
        # Steps of a query have names that the person never wrote.
        raise SqlError(_STEP.sub("", str(error)), text=text, offset=offset) from None


def _hinted(message: str) -> str:
    """A function that is not found may be meant as an aggregate, which expressions of rows do not have."""
    found = _NO_FUNCTION.match(message)
    near = get_close_matches(found["name"], AGGREGATE_NAMES, n=1, cutoff=0.7) if found is not None else []
    return f"{found[0]} Did you mean {near[0]}?" if found is not None and near else message


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
class Sorted:
    """A part of ORDER BY."""

    by: Expr
    descending: bool = False
    nulls_first: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """ORDER BY ... LIMIT: the first rows of each window."""

    order: tuple[Sorted, ...]
    rows: int | None
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
    qualify: Expr | None = None
    limited: Limited | None = None
    distinct: bool = False
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """SELECTs united, with the queries that WITH names before them."""

    parts: tuple[Select | Query, ...]
    distinct: frozenset[int] = frozenset()
    """Which of `parts`, with all before them, are united without ALL: equal rows become one."""
    named: tuple[tuple[Name, Query], ...] = field(default=())
    at: int
