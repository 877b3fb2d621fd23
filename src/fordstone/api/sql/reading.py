"""The grammar of queries: from text to `syntax`. Refuses, with the place, what is SQL but not supported here."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NoReturn, cast

from fordstone.api.sql.reading_match import read_match
from fordstone.api.sql.reading_window import WINDOW_FUNCTIONS, read_windowed
from fordstone.api.sql.syntax import Derived, Expr, Join, JoinHow, Name, Named, Query, Select, Star, Table
from fordstone.api.sql.words import JOIN_WORDS, Words

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
"""So many queries may stand inside each other."""


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
        raise words.fail("names of columns behind the name of a query are not supported. Write AS in its SELECT.")
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
        raise words.fail("names of columns behind a name are not supported. Write AS in SELECT.")
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
