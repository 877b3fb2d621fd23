"""The grammar of queries: from text to `syntax`. Refuses, with the place, what is SQL but not supported here.

The grammar of windows in FROM: TABLE(TUMBLE(TABLE readings, DESCRIPTOR(ts), INTERVAL '10' SECOND)).

The grammar of MATCH_RECOGNIZE, and of the patterns in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal, NoReturn, cast

from sqlglot import exp

from fordstone.lang.sql.syntax import (
    Derived,
    Expr,
    Join,
    JoinHow,
    Matched,
    Name,
    Named,
    PatternPart,
    Query,
    Select,
    Star,
    Table,
    WindowCall,
    Windowed,
    WindowKind,
)
from fordstone.lang.sql.tokens import JOIN_WORDS, Words

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
        # Two question marks are one word; the caller that parses reluctance takes the second.
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
        raise words.fail("this repetition is impossible: the second number is at least the first, and at least 1.", at)
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


WINDOW_FUNCTIONS: Final = ("TUMBLE", "HOP", "SESSION")
SIGNATURES: Final = {
    "TUMBLE": "TUMBLE(TABLE t, DESCRIPTOR(ts), size [, offset])",
    "HOP": "HOP(TABLE t, DESCRIPTOR(ts), slide, size [, offset])",
    "SESSION": "SESSION(TABLE t PARTITION BY k, DESCRIPTOR(ts), gap)",
}
SPAN_NAMES: Final = {
    "TUMBLE": ("SIZE", "OFFSET"),
    "HOP": ("SLIDE", "SIZE", "OFFSET"),
    "SESSION": ("GAP",),
}


def read_windowed(words: Words, table: Callable[[], Named | Derived]) -> Windowed:
    """Read such a table; `table` reads the one inside."""
    at = words.place
    wrapped = words.take("TABLE", "(")
    kind = words.word()
    if kind not in WINDOW_FUNCTIONS:
        raise words.fail(f"{', '.join(WINDOW_FUNCTIONS[:-1])} or {WINDOW_FUNCTIONS[-1]} was expected here.")
    words.need(kind, "(")
    _named(words, "DATA")
    words.take("TABLE")
    inner = table()
    partition = _partition(words, kind)
    words.need(",", why=f"It is written {SIGNATURES[kind]}.")
    _named(words, "TIMECOL")
    words.need("DESCRIPTOR", "(", why=f"It is written {SIGNATURES[kind]}.")
    time = words.expression()
    words.need(")")
    spans = _spans(words, kind)
    words.need(")")
    if wrapped:
        words.need(")")
    call = WindowCall(kind=cast("WindowKind", kind), time=time, spans=spans, at=at)
    return Windowed(table=inner, window=call, partition=partition, at=at)


def _named(words: Words, name: str) -> None:
    """An argument may be written with its name: SIZE => INTERVAL '10' SECOND."""
    if words.word(1) != "=>":
        return
    words.need(name, "=>")


def _partition(words: Words, kind: str) -> tuple[Expr, ...] | None:
    if not words.sees("PARTITION BY"):
        return None
    if kind != "SESSION":
        raise words.fail(f"{kind} has no PARTITION BY: its windows do not depend on the rows. Leave it out.")
    words.take("PARTITION BY")
    if words.take("("):
        keys = [words.expression()]
        while words.take(","):
            keys.append(words.expression())
        words.need(")")
        return tuple(keys)
    keys = [words.expression()]
    # A further column, or the next argument, may follow the comma.
    while words.sees(",") and words.word(1) != "DESCRIPTOR" and words.word(2) != "=>":
        words.take(",")
        keys.append(words.expression())
    return tuple(keys)


def _spans(words: Words, kind: str) -> tuple[Expr, ...]:
    names = SPAN_NAMES[kind]
    least = len(names) - ("OFFSET" in names)
    given: dict[str, Expr] = {}
    while words.take(","):
        if len(given) == len(names):
            raise words.fail(f"{kind} has no further argument. It is written {SIGNATURES[kind]}.")
        name = next(name for name in names if name not in given)
        if words.word(1) == "=>":
            name = words.word()
            if name not in names or name in given:
                raise words.fail(f"{kind} has {', '.join(names)}, each once.")
            words.need(name, "=>")
        given[name] = words.expression()
    if len([name for name in names[:least] if name in given]) < least:
        raise words.fail(f"an argument of {kind} is missing here. It is written {SIGNATURES[kind]}.")
    return tuple(given[name] for name in names if name in given)


_NO_SORTING: Final = "a stream has no end, so its rows cannot be sorted as a whole. Sort where you read the result."
_NO_DISTINCT: Final = (
    "Use GROUP BY with these columns and a window, or Stream.deduplicate for the first row of each key within a time."
)
_REFUSED_CLAUSES: Final = {
    "ORDER BY": _NO_SORTING,
    "SORT BY": _NO_SORTING,
    "CLUSTER BY": _NO_SORTING,
    "DISTRIBUTE BY": "rows are brought together by GROUP BY.",
    "LIMIT": "a stream has no end. Take as many rows as you need where you read the result.",
    "OFFSET": "a stream has no end. Skip rows where you read the result.",
    "FETCH": "a stream has no end. Take as many rows as you need where you read the result.",
    "QUALIFY": "there is no OVER either. Use HAVING, or MATCH_RECOGNIZE for sequences of rows.",
    "WINDOW": "there is no OVER either. Use GROUP BY with TUMBLE, HOP or SESSION.",
    "LATERAL": "use Stream.flat_map on the stream before the query.",
    "PIVOT": "write an aggregate with CASE WHEN for each column.",
    "UNPIVOT": "write a SELECT for each column, and UNION ALL.",
    "TABLESAMPLE": "filter by a hash of a column instead: WHERE abs(hash(id)) % 10 = 0.",
    "FOR": "use Stream.lookup for a table as it was at a time.",
    "EXCEPT": "only UNION ALL is.",
    "MINUS": "only UNION ALL is.",
    "INTERSECT": "join the two streams within a time instead: JOIN ... ON.",
    "INTO": "use stream.sink(...) on what the query gives.",
}
_STATEMENTS: Final = {
    "INSERT": "To let rows out, use stream.sink(...) on what the query gives.",
    "CREATE": "Sources are declared with Pipeline.source, or --source on the command line.",
    "EXPLAIN": "Use Pipeline.explain(), or --explain on the command line.",
    "VALUES": "Rows come from sources.",
}
DEPTH_MAX: Final = 100
"""Maximum depth of nested queries."""


def read_query(text: str) -> Query:
    """Read one query.

    Raises:
        SqlError: with the place of what is wrong or not supported.
    """
    words = Words(text)
    if words.over():
        raise words.fail("the query is empty. Write for instance: SELECT device, temp FROM readings WHERE temp > 20")
    _refuse_statements(words)
    query = _query(words, 0)
    words.take(";")
    if not words.over():
        _stray(words)
    return query


def _refuse_statements(words: Words) -> None:
    first = words.word()
    if first not in {"SELECT", "WITH", "("}:
        what = f"{first} is not supported" if first[:1].isalpha() else "a query was expected"
        raise words.fail(f"{what}: a query begins with SELECT or WITH. {_STATEMENTS.get(first, '')}".rstrip())


def _query(words: Words, depth: int) -> Query:
    """SELECT ... UNION ALL SELECT ..., with WITH before it."""
    if depth > DEPTH_MAX:
        raise words.fail(f"more than {DEPTH_MAX} queries stand inside each other.")
    at = words.place
    named: list[tuple[Name, Query]] = []
    if words.take("WITH"):
        if words.sees("RECURSIVE") and not words.word(1) == "AS":
            raise words.fail("WITH RECURSIVE is not supported. Use Stream.iterate for loops.")
        named.append(_named_query(words, depth))
        while words.take(","):
            named.append(_named_query(words, depth))
    parts: list[Select | Query] = [_part(words, depth)]
    while words.sees("UNION"):
        place = words.place
        words.take("UNION")
        if not words.take("ALL"):
            raise words.fail(f"UNION without ALL is not supported. {_NO_DISTINCT}", place)
        if words.sees("BY"):
            raise words.fail("UNION ALL BY NAME is not supported. List the columns in the same order.")
        parts.append(_part(words, depth))
    if words.word() in _REFUSED_CLAUSES:
        _refuse_clause(words)
    return Query(parts=tuple(parts), named=tuple(named), at=at)


def _named_query(words: Words, depth: int) -> tuple[Name, Query]:
    name = words.name("the name of a query")
    if words.sees("("):
        raise words.fail("column names after the name of a query are not supported. Write AS in its SELECT.")
    words.need("AS")
    words.need("(")
    query = _query(words, depth + 1)
    words.need(")")
    return name, query


def _part(words: Words, depth: int) -> Select | Query:
    if words.take("("):
        query = _query(words, depth + 1)
        words.need(")")
        return query
    return _select(words, depth)


def _select(words: Words, depth: int) -> Select:
    at = words.place
    words.need("SELECT")
    if words.sees("DISTINCT") and words.word(1) not in {",", "FROM", ""}:
        raise words.fail(f"SELECT DISTINCT is not supported. {_NO_DISTINCT}")
    words.take("ALL")
    items = [_item(words)]
    while words.take(","):
        items.append(_item(words))
    if not words.take("FROM"):
        if words.over() or words.word() in {")", "UNION", ";"}:
            raise words.fail("FROM is missing: a query reads a stream.")
        _stray(words)
    table = _table(words, depth)
    joins: list[Join] = []
    while (join := _join(words, depth)) is not None:
        joins.append(join)
    where = words.expression() if words.take("WHERE") else None
    group = _group(words) if words.take("GROUP BY") else None
    having = words.expression() if words.take("HAVING") else None
    if words.word() in _REFUSED_CLAUSES:
        _refuse_clause(words)
    return Select(
        items=tuple(items), table=table, joins=tuple(joins), where=where, group=group, having=having, at=at
    )  # fmt: skip


def _item(words: Words) -> Expr | Star:
    at = words.place
    if words.take("*"):
        less: list[Name] = []
        if words.sees("EXCEPT", "(") and words.word(2) not in {"SELECT", "WITH"}:
            words.need("EXCEPT", "(")
            less.append(words.name("a column"))
            while words.take(","):
                less.append(words.name("a column"))
            words.need(")")
        return Star(at=at, less=tuple(less))
    if words.word(1) == "." and words.word(2) == "*":
        table = words.name("a stream")
        words.need(".", "*")
        return Star(at=at, table=table)
    return words.expression()


def _group(words: Words) -> tuple[Expr, ...]:
    for word in ("ROLLUP", "CUBE", "GROUPING", "ALL"):
        if words.sees(word) and (word != "ALL" or words.word(1) in {"", ")", ";", "HAVING"}):
            raise words.fail(f"GROUP BY {word} is not supported. List the columns.")
    if words.sees("(", ")"):
        raise words.fail("GROUP BY () is not supported. Leave GROUP BY out: aggregates alone make one group.")
    keys = [words.expression()]
    while words.take(","):
        keys.append(words.expression())
    if words.word() == "WITH":
        raise words.fail("GROUP BY ... WITH is not supported. List the columns.")
    return tuple(keys)


def _table(words: Words, depth: int) -> Table:
    at = words.place
    table: Table
    if words.sees("TABLE", "(") or (words.word() in WINDOW_FUNCTIONS and words.word(1) == "("):
        table = read_windowed(words, lambda: _plain_table(words, depth))
    else:
        table = _plain_table(words, depth)
    if words.word() in _REFUSED_CLAUSES:
        _refuse_clause(words)
    if words.sees("MATCH_RECOGNIZE"):
        if not isinstance(table, Named | Derived):
            raise words.fail("MATCH_RECOGNIZE takes rows of a stream, not windows.")
        table = read_match(words, table, at)
    alias = words.alias()
    if alias is not None and words.sees("("):
        raise words.fail("column names after a table name are not supported. Write AS in SELECT.")
    if alias is not None and words.sees("MATCH_RECOGNIZE"):
        if not isinstance(table, Named | Derived):
            raise words.fail("MATCH_RECOGNIZE takes rows of a stream, not windows.")
        table = read_match(words, replace(table, alias=alias), at)
        alias = words.alias()
    return _with_alias(table, alias)


def _with_alias(table: Table, alias: Name | None) -> Table:
    return table if alias is None else replace(table, alias=alias)


def _plain_table(words: Words, depth: int) -> Named | Derived:
    at = words.place
    if words.take("("):
        if words.word() not in {"SELECT", "WITH", "("}:
            raise words.fail("a query was expected in these parentheses. Joins are written one after the other.")
        query = _query(words, depth + 1)
        words.need(")")
        return Derived(query=query, at=at)
    if words.sees("VALUES"):
        raise words.fail("VALUES is not supported. Rows come from sources.")
    if words.sees("LATERAL"):
        _refuse_clause(words)
    name = words.name("the name of a stream")
    if words.sees("("):
        raise words.fail(f"there is no table function {name.text}. There are {', '.join(WINDOW_FUNCTIONS)}.", name.at)
    port = words.name("the name of a port") if words.take(".") else None
    return Named(name=name, port=port)


def _join(words: Words, depth: int) -> Join | None:
    at = words.place
    if words.sees(","):
        raise words.fail(
            "several streams in FROM are joined with JOIN ... ON, which says the columns that are equal and how far apart in time."
        )
    if words.word() not in JOIN_WORDS:
        return None
    how = "inner"
    for word in ("CROSS", "NATURAL"):
        if words.sees(word):
            raise words.fail(
                f"{word} JOIN is not supported. Write JOIN ... ON with the columns that are equal and how far apart in time."
            )
    if words.word() in {"LEFT", "RIGHT", "FULL"}:
        how = words.word().lower()
        words.take(how.upper())
        if words.word() in {"SEMI", "ANTI"}:
            raise words.fail(
                f"{how.upper()} {words.word()} JOIN is not supported. There are inner, left, right and full ones."
            )
        words.take("OUTER")
    elif words.word() in {"SEMI", "ANTI"}:
        raise words.fail(f"{words.word()} JOIN is not supported. There are inner, left, right and full ones.")
    else:
        words.take("INNER")
    words.need("JOIN")
    table = _table(words, depth)
    if words.sees("USING"):
        raise words.fail("USING is not supported. Write ON, with the columns that are equal and how far apart in time.")
    words.need("ON", why="It says the columns that are equal and how far apart in time.")
    return Join(table=table, how=cast("JoinHow", how), on=words.expression(*JOIN_WORDS), at=at)


def _refuse_clause(words: Words) -> NoReturn:
    word = words.word()
    raise words.fail(f"{word} is not supported: {_REFUSED_CLAUSES[word]}")


def _stray(words: Words) -> NoReturn:
    if words.word() in _REFUSED_CLAUSES:
        _refuse_clause(words)
    if words.sees(";"):
        raise words.fail("one query was expected.")
    if words.word() in {"SELECT", "INSERT", "DROP", "CREATE", "DELETE", "UPDATE"}:
        raise words.fail("one query was expected; another statement begins here.")
    raise words.fail("this was not expected here.")
