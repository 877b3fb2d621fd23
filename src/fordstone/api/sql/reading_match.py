"""The grammar of MATCH_RECOGNIZE, and of the patterns in it."""

from __future__ import annotations

from typing import Final, Literal

from sqlglot import exp

from fordstone.api.sql.syntax import Derived, Expr, Matched, Name, Named, PatternPart
from fordstone.api.sql.words import Words

_CLAUSES: Final = (
    "ORDER BY", "MEASURES", "ONE", "ALL", "AFTER", "PATTERN", "WITHIN", "SUBSET", "DEFINE", "STRATEGY", "PARTITION BY",
)  # fmt: skip
TIMES_MOST: Final = 1_000_000
"""No quantifier may ask for more rows."""
_Skip = Literal["past_last", "next", "first", "last"]


def read_match(words: Words, table: Named | Derived, at: int) -> Matched:
    """Read what follows the table, from MATCH_RECOGNIZE on."""
    words.need("MATCH_RECOGNIZE", "(")
    partition = _listed(words) if words.take("PARTITION BY") else ()
    order_at = words.place
    if not words.take("ORDER BY"):
        raise words.fail(
            "ORDER BY is missing: MATCH_RECOGNIZE takes rows in order of the stream's event time.", order_at
        )
    order = _ordered(words)
    measures = _measures(words) if words.take("MEASURES") else ()
    all_rows = _rows_per_match(words)
    skip, skip_to = _skip(words)
    words.need("PATTERN", "(", why="It says which rows follow each other, as in PATTERN (A B+ C).")
    pattern = _pattern(words)
    within = words.expression(*_CLAUSES, all_clauses=False) if words.take("WITHIN") else None
    if words.sees("SUBSET"):
        raise words.fail("SUBSET is not supported. Name the variables one by one in MEASURES and DEFINE.")
    define = _define(words) if words.take("DEFINE") else ()
    words.need(")")
    return Matched(
        table=table,
        partition=partition,
        order=order,
        measures=measures,
        all_rows=all_rows,
        skip=skip,
        skip_to=skip_to,
        pattern=pattern,
        within=within,
        define=define,
        at=at,
    )


def _listed(words: Words) -> tuple[Expr, ...]:
    found = [words.expression(*_CLAUSES, all_clauses=False)]
    while words.take(","):
        found.append(words.expression(*_CLAUSES, all_clauses=False))
    return tuple(found)


def _ordered(words: Words) -> tuple[Expr, ...]:
    found = []
    while True:
        found.append(words.expression(*_CLAUSES, "ASC", "DESC", "NULLS", all_clauses=False))
        if words.sees("DESC") or words.sees("NULLS"):
            raise words.fail("rows are taken in order of time, nulls first. Leave this out.")
        words.take("ASC")
        if not words.take(","):
            return tuple(found)


def _measures(words: Words) -> tuple[Expr, ...]:
    """Expressions with AS; FINAL and RUNNING before one are written as calls of it."""
    found = []
    while True:
        mode = (
            words.word()
            if words.word() in {"FINAL", "RUNNING"} and words.word(1) not in {"(", ".", "AS", ","}
            else None
        )
        if mode is not None:
            words.take(mode)
        given = words.expression(*_CLAUSES, all_clauses=False)
        if mode is not None:
            given = Expr(tree=_called(mode.lower(), given.tree), at=given.at)
        found.append(given)
        if not words.take(","):
            return tuple(found)


def _called(name: str, tree: exp.Expr) -> exp.Expr:
    """The function of an expression, inside of its AS."""
    if isinstance(tree, exp.Alias):
        made = tree.copy()
        made.set("this", exp.Anonymous(this=name, expressions=[tree.args["this"].copy()]))
        return made
    return exp.Anonymous(this=name, expressions=[tree.copy()])


def _rows_per_match(words: Words) -> bool:
    if words.take("ONE"):
        words.need("ROW")
        words.need("PER")
        words.need("MATCH")
        return False
    if not words.take("ALL"):
        return False
    words.need("ROWS")
    words.need("PER")
    words.need("MATCH")
    if words.word() in {"SHOW", "OMIT", "WITH"}:
        raise words.fail("ALL ROWS PER MATCH stands alone here: there are no empty matches.")
    return True


def _skip(words: Words) -> tuple[_Skip, Name | None]:
    if not words.take("AFTER"):
        return "past_last", None
    words.need("MATCH")
    words.need("SKIP")
    if words.take("PAST"):
        words.need("LAST")
        words.need("ROW")
        return "past_last", None
    words.need("TO")
    if words.take("NEXT"):
        words.need("ROW")
        return "next", None
    if words.word() in {"FIRST", "LAST"} and words.word(1) not in {"PATTERN", ""}:
        which: _Skip = "first" if words.take("FIRST") else "last"
        if which == "last":
            words.take("LAST")
        return which, words.name("a variable of the pattern")
    return "last", words.name("a variable of the pattern")


def _pattern(words: Words) -> tuple[PatternPart, ...]:
    """The variables with their quantifiers, up to the closing bracket. Alternatives and groups are refused."""
    parts: list[PatternPart] = []
    while not words.take(")"):
        if words.over():
            raise words.fail("the pattern lacks its ')'.")
        _refuse_in_pattern(words)
        name = words.name("a variable of the pattern")
        if name.text.upper() == "PERMUTE" and words.sees("("):
            raise words.fail("PERMUTE is not supported in a pattern. Write the order that you look for.", name.at)
        least, most = _quantifier(words)
        parts.append(PatternPart(name=name, times_min=least, times_max=most, greedy=not _reluctant(words)))
    if not parts:
        raise words.fail("the pattern is empty; write for instance PATTERN (A B+ C).")
    return tuple(parts)


def _refuse_in_pattern(words: Words) -> None:
    refused = {
        "|": "alternatives (|) are not supported in a pattern. Write one condition with OR in DEFINE, or two queries and UNION ALL.",
        "||": "alternatives (|) are not supported in a pattern.",
        "(": "groups are not supported in a pattern. Give quantifiers to single variables.",
        "{": "exclusions ({- -}) are not supported in a pattern. Choose what you want in MEASURES.",
        "^": "anchors (^) are not supported in a pattern: a stream has no beginning.",
        "$": "anchors ($) are not supported in a pattern: a stream has no end.",
        ",": "variables of a pattern are separated by blanks.",
    }
    for sign in ("*", "+", "?", "??"):
        refused[sign] = f"{sign!r} has nothing to repeat before it."
    if words.word() in refused:
        raise words.fail(refused[words.word()])


def _quantifier(words: Words) -> tuple[int, int | None]:
    if words.take("*"):
        return 0, None
    if words.take("+"):
        return 1, None
    if words.sees("??") or words.sees("?"):
        # Two question marks are one word; the second is taken by whoever asks for reluctance.
        if words.sees("?"):
            words.take("?")
        return 0, 1
    if words.sees("{") and words.word(1) != "-":
        return _braces(words)
    return 1, 1


def _braces(words: Words) -> tuple[int, int | None]:
    at = words.place
    words.take("{")
    least = words.number()
    if words.take("}"):
        if least is None:
            raise words.fail("a number is missing between these braces.", at)
        most: int | None = least
    else:
        words.need(",")
        most = words.number()
        if least is None and most is None:
            raise words.fail("a number is missing between these braces.", at)
        words.need("}")
    found = least or 0, most
    if most is not None and (most < found[0] or most == 0):
        raise words.fail("so many times cannot be: the second number is at least the first, and at least 1.", at)
    if max(found[0], most or 0) > TIMES_MOST:
        raise words.fail(f"at most {TIMES_MOST:,} rows may be asked for.", at)
    return found


def _reluctant(words: Words) -> bool:
    if words.take("??"):
        return True
    if words.sees("+") or words.sees("*"):
        raise words.fail("one quantifier follows another.")
    return words.take("?")


def _define(words: Words) -> tuple[tuple[Name, Expr], ...]:
    found: list[tuple[Name, Expr]] = []
    while True:
        name = words.name("a variable of the pattern")
        words.need("AS")
        if any(name.text.upper() == known.text.upper() for known, _ in found):
            raise words.fail(f"{name.text} is defined twice.", name.at)
        found.append((name, words.expression(all_clauses=False)))
        if not words.take(","):
            return tuple(found)
