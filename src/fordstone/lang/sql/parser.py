"""The grammar of queries: from text to `syntax`. Refuses, with the place, what is SQL but not supported here.

`Words` goes through the words of a query and finds where an expression ends; parsing it is left to `lang.dialect`. A keyword ends
an expression only after an operand, so that columns may be called `offset` or `limit` where no clause can begin. Then come
MATCH_RECOGNIZE and its patterns, windows in FROM (TABLE(TUMBLE(...))), and the clauses of a query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final, Literal, NoReturn, TypeVar, cast

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from fordstone.errors import ExpressionError
from fordstone.lang.dialect import read_part, tokens_of
from fordstone.lang.expression import split_alias
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
    SqlError,
    Star,
    Table,
    WindowCall,
    Windowed,
    WindowKind,
)

T = TypeVar("T")

_QUOTED: Final = frozenset({TokenType.STRING, TokenType.IDENTIFIER, TokenType.RAW_STRING, TokenType.HEX_STRING})
_OPENING: Final = frozenset({TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE})
_CLOSING: Final = frozenset({TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE})
_SEPARATING: Final = frozenset({TokenType.COMMA, TokenType.SEMICOLON})
_OPERATORS: Final = frozenset(
    {
        "AND", "OR", "NOT", "IS", "IN", "LIKE", "ILIKE", "RLIKE", "REGEXP", "BETWEEN", "CASE", "WHEN", "THEN", "ELSE",
        "INTERVAL", "DISTINCT", "ESCAPE", "AS", "DIV", "EXISTS", "ANY", "SOME", "SELECT", "FROM", "WHERE", "ON", "BY",
    }
)  # fmt: skip
_JOIN_WORDS: Final = frozenset({"JOIN", "INNER", "LEFT", "RIGHT", "FULL", "CROSS", "NATURAL", "SEMI", "ANTI"})
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
_CLAUSE_WORDS: Final = frozenset(
    {"FROM", "WHERE", "GROUP BY", "HAVING", "UNION", "MATCH_RECOGNIZE", "USING", "ON", *_REFUSED_CLAUSES}
)
_RESERVED: Final = frozenset({"FROM", "WHERE", "GROUP BY", "HAVING", "UNION", "ORDER BY"})
"""Clauses that begin wherever the word stands, even where an operand is missing before it."""
_NO_SUBQUERY: Final = "subqueries in expressions are not supported. Join the two streams (JOIN ... ON), or write the query in FROM or WITH."
_REFUSED: Final = {
    ("(", "SELECT"): _NO_SUBQUERY,
    ("(", "WITH"): _NO_SUBQUERY,
    (
        ")",
        "OVER",
    ): "OVER is not supported. Use GROUP BY with TUMBLE, HOP or SESSION, or MATCH_RECOGNIZE for sequences of rows.",
    (
        ")",
        "FILTER",
    ): "FILTER is not supported. Write CASE WHEN inside the aggregate: count(CASE WHEN x > 0 THEN 1 END).",
}
"""Words in a row that begin what an expression here cannot have."""


class Words:
    """A place in a query. Moves forward only."""

    def __init__(self, text: str) -> None:
        try:
            self._tokens = _plain_calls(tokens_of(text))
        except ExpressionError as error:
            raise SqlError(error.message, text=text, offset=error.offset) from None
        self.text = text
        self._at = 0

    def fail(self, message: str, at: int | None = None) -> SqlError:
        """Return the error to raise, at the next word by default."""
        return SqlError(message, text=self.text, offset=self.place if at is None else at)

    @property
    def place(self) -> int:
        """The offset of the next word; at the end, the offset after the last one."""
        if self._at < len(self._tokens):
            return int(self._tokens[self._at].start)
        return len(self.text.rstrip())

    def over(self) -> bool:
        return self._at >= len(self._tokens)

    def word(self, ahead: int = 0) -> str:
        """A word to come in capitals, or a sign; nothing for quoted names, texts, and the end."""
        at = self._at + ahead
        return _word(self._tokens[at]) if 0 <= at < len(self._tokens) else ""

    def sees(self, *words: str) -> bool:
        return all(self.word(ahead) == word for ahead, word in enumerate(words))

    def take(self, *words: str) -> bool:
        if not self.sees(*words):
            return False
        self._at += len(words)
        return True

    def need(self, *words: str, why: str = "") -> None:
        for word in words:
            if not self.take(word):
                raise self.fail(f"{word} was expected here{self._instead()}.{f' {why}' if why else ''}")

    def name(self, what: str) -> Name:
        """A name: a bare word, or one in backticks."""
        if self.over():
            raise self.fail(f"{what} is missing here.")
        token = self._tokens[self._at]
        bare = token.token_type not in _QUOTED and token.text[:1].replace("_", "a").isalpha()
        if not bare and token.token_type is not TokenType.IDENTIFIER:
            quotes = " Names are quoted with backticks." if token.token_type is TokenType.STRING else ""
            raise self.fail(f"{what} was expected here{self._instead()}.{quotes}")
        if not token.text:
            raise self.fail("a name is empty.")
        self._at += 1
        return Name(text=str(token.text), at=int(token.start))

    def listed(self, read: Callable[[], T]) -> tuple[T, ...]:
        """One or more, with commas between them."""
        found = [read()]
        while self.take(","):
            found.append(read())
        return tuple(found)

    def number(self) -> int | None:
        """A whole number, if one comes next."""
        if self.over() or self._tokens[self._at].token_type is not TokenType.NUMBER:
            return None
        text = str(self._tokens[self._at].text)
        if not (text.isascii() and text.isdigit()):
            return None
        self._at += 1
        return int(text)

    def alias(self) -> Name | None:
        """AS and a name, or a name alone."""
        if self.take("AS"):
            return self.name("a name")
        if self.over() or self.word() in _CLAUSE_WORDS | _JOIN_WORDS or (self.word() and not self.word()[0].isalpha()):
            return None
        if self._tokens[self._at].token_type in _QUOTED - {TokenType.IDENTIFIER}:
            return None
        return self.name("a name")

    def expression(self, *stops: str, all_clauses: bool = True) -> Expr:
        """An expression up to a comma, a closing bracket, or a word that begins what follows; with AS if it has one."""
        begin = self._at
        self._at = self._end(frozenset(stops) | (_CLAUSE_WORDS if all_clauses else frozenset()))
        part = self._tokens[begin : self._at]
        if not part:
            raise self.fail("an expression is missing here.")
        self._refuse_queries(part)
        try:
            return Expr(tree=read_part(part, self.text), at=int(part[0].start))
        except ExpressionError as error:
            raise SqlError(error.message, text=self.text, offset=error.offset) from None

    def _end(self, stops: frozenset[str]) -> int:
        depth, at, first = 0, self._at, self._at
        while at < len(self._tokens):
            token = self._tokens[at]
            if token.token_type in _OPENING:
                depth += 1
            elif token.token_type in _CLOSING:
                if not depth:
                    break
                depth -= 1
            elif not depth and (token.token_type in _SEPARATING or self._stops(at, first, stops)):
                break
            at += 1
        return at

    def _stops(self, at: int, first: int, stops: frozenset[str]) -> bool:
        word = _word(self._tokens[at])
        if word not in stops:
            return False
        if word in _RESERVED:
            # IS DISTINCT FROM is an operator, and a name follows a dot.
            return at == first or _word(self._tokens[at - 1]) not in {"DISTINCT", "."}
        if at == first or not _ends_operand(self._tokens, at - 1):
            return False
        # left(x, 2) is a function; LEFT JOIN is not.
        following = self._tokens[at + 1].token_type if at + 1 < len(self._tokens) else None
        return word not in _JOIN_WORDS or following is not TokenType.L_PAREN

    def _refuse_queries(self, part: list[Token]) -> None:
        """What the tree no longer has the places of."""
        for before, token in pairwise(part):
            previous, word = _word(before), _word(token)
            if (previous, word) in _REFUSED:
                raise self.fail(_REFUSED[previous, word], int(token.start))

    def _instead(self) -> str:
        return f", not {self._tokens[self._at].text!r}" if not self.over() else ""


def _plain_calls(tokens: list[Token]) -> list[Token]:
    """SESSION(...) as a function like any other; to sqlglot the word is a keyword."""
    found = list(tokens)
    for at, (token, following) in enumerate(pairwise(tokens)):
        if token.token_type is TokenType.SESSION and following.token_type is TokenType.L_PAREN:
            found[at] = Token(TokenType.VAR, token.text, token.line, token.col, token.start, token.end)
    return found


def _word(token: Token) -> str:
    return "" if token.token_type in _QUOTED else " ".join(str(token.text).upper().split())


def _ends_operand(tokens: list[Token], at: int) -> bool:
    """Whether an operand may end with this word."""
    token, word = tokens[at], _word(tokens[at])
    if token.token_type is TokenType.STAR:
        # A star stands for all columns at the beginning, or after a dot; otherwise it multiplies.
        return at == 0 or _word(tokens[at - 1]) in {"SELECT", ",", ".", "ALL"}
    if token.token_type in _QUOTED | {TokenType.NUMBER, TokenType.R_PAREN, TokenType.R_BRACKET}:
        return True
    return word[:1].replace("_", "A").isalpha() and word not in _OPERATORS


# MATCH_RECOGNIZE

_MATCH_CLAUSES: Final = (
    "ORDER BY", "MEASURES", "ONE", "ALL", "AFTER", "PATTERN", "WITHIN", "SUBSET", "DEFINE", "STRATEGY", "PARTITION BY",
)  # fmt: skip
TIMES_MOST: Final = 1_000_000
"""No quantifier may ask for more rows."""
_Skip = Literal["past_last", "next", "first", "last"]


def _match(words: Words, table: Named | Derived, at: int) -> Matched:
    words.need("MATCH_RECOGNIZE", "(")
    partition = words.listed(lambda: _expression(words)) if words.take("PARTITION BY") else ()
    order_at = words.place
    if not words.take("ORDER BY"):
        raise words.fail(
            "ORDER BY is missing: MATCH_RECOGNIZE takes rows in order of the stream's event time.", order_at
        )
    order = words.listed(lambda: _ordered(words))
    measures = words.listed(lambda: _measure(words)) if words.take("MEASURES") else ()
    all_rows = _rows_per_match(words)
    skip, skip_to = _skip(words)
    words.need("PATTERN", "(", why="It defines which rows follow each other, as in PATTERN (A B+ C).")
    pattern = _pattern(words)
    within = _expression(words) if words.take("WITHIN") else None
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


def _expression(words: Words, *stops: str) -> Expr:
    return words.expression(*_MATCH_CLAUSES, *stops, all_clauses=False)


def _ordered(words: Words) -> Expr:
    found = _expression(words, "ASC", "DESC", "NULLS")
    if words.sees("DESC") or words.sees("NULLS"):
        raise words.fail("rows are taken in order of time, nulls first. Leave this out.")
    words.take("ASC")
    return found


def _measure(words: Words) -> Expr:
    """An expression with AS; FINAL or RUNNING before it becomes a call of it, inside of its AS."""
    mode = words.word()
    if mode not in {"FINAL", "RUNNING"} or words.word(1) in {"(", ".", "AS", ","}:
        return _expression(words)
    words.take(mode)
    given = _expression(words)
    body, alias = split_alias(given.tree)
    made: exp.Expr = exp.Anonymous(this=mode.lower(), expressions=[body.copy()])
    if alias is not None:
        made = exp.Alias(this=made, alias=given.tree.args["alias"].copy())
    return Expr(tree=made, at=given.at)


def _rows_per_match(words: Words) -> bool:
    if words.take("ONE"):
        words.need("ROW", "PER", "MATCH")
        return False
    if not words.take("ALL"):
        return False
    words.need("ROWS", "PER", "MATCH")
    if words.word() in {"SHOW", "OMIT", "WITH"}:
        raise words.fail("ALL ROWS PER MATCH takes no options here: there are no empty matches.")
    return True


def _skip(words: Words) -> tuple[_Skip, Name | None]:
    if not words.take("AFTER"):
        return "past_last", None
    words.need("MATCH", "SKIP")
    if words.take("PAST"):
        words.need("LAST", "ROW")
        return "past_last", None
    words.need("TO")
    if words.take("NEXT"):
        words.need("ROW")
        return "next", None
    which: _Skip = "last"
    if words.word() in {"FIRST", "LAST"} and words.word(1) not in {"PATTERN", ""}:
        which = "first" if words.take("FIRST") else "last"
        words.take("LAST")
    return which, words.name("a variable of the pattern")


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
    if words.take("?") or words.sees("??"):
        return 0, 1  # two question marks are one word, which the caller that parses reluctance takes
    if words.sees("{") and words.word(1) != "-":
        return _braces(words)
    return 1, 1


def _braces(words: Words) -> tuple[int, int | None]:
    at = words.place
    words.take("{")
    least = most = words.number()
    if not words.sees("}"):
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
    defined: set[str] = set()

    def definition() -> tuple[Name, Expr]:
        name = words.name("a variable of the pattern")
        words.need("AS")
        if name.text.upper() in defined:
            raise words.fail(f"{name.text} is defined twice.", name.at)
        defined.add(name.text.upper())
        return name, words.expression(all_clauses=False)

    return words.listed(definition)


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


def _windowed(words: Words, table: Callable[[], Named | Derived]) -> Windowed:
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
    if words.word(1) == "=>":
        words.need(name, "=>")


def _partition(words: Words, kind: str) -> tuple[Expr, ...] | None:
    if not words.sees("PARTITION BY"):
        return None
    if kind != "SESSION":
        raise words.fail(f"{kind} has no PARTITION BY: its windows do not depend on the rows. Leave it out.")
    words.take("PARTITION BY")
    if words.take("("):
        listed = words.listed(words.expression)
        words.need(")")
        return listed
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


_STATEMENTS: Final = {
    "INSERT": "To write rows to a sink, use stream.sink(...) on the result of the query.",
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
    named: tuple[tuple[Name, Query], ...] = ()
    if words.take("WITH"):
        if words.sees("RECURSIVE") and not words.word(1) == "AS":
            raise words.fail("WITH RECURSIVE is not supported. Use Stream.iterate for loops.")
        named = words.listed(lambda: _named_query(words, depth))
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
    return Query(parts=tuple(parts), named=named, at=at)


def _named_query(words: Words, depth: int) -> tuple[Name, Query]:
    name = words.name("the name of a query")
    if words.sees("("):
        raise words.fail("column names after the name of a query are not supported. Write AS in its SELECT.")
    words.need("AS", "(")
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
    items = words.listed(lambda: _item(words))
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
        items=items, table=table, joins=tuple(joins), where=where, group=group, having=having, at=at
    )  # fmt: skip


def _item(words: Words) -> Expr | Star:
    at = words.place
    if words.take("*"):
        less: tuple[Name, ...] = ()
        if words.sees("EXCEPT", "(") and words.word(2) not in {"SELECT", "WITH"}:
            words.need("EXCEPT", "(")
            less = words.listed(lambda: words.name("a column"))
            words.need(")")
        return Star(at=at, less=less)
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
    keys = words.listed(words.expression)
    if words.word() == "WITH":
        raise words.fail("GROUP BY ... WITH is not supported. List the columns.")
    return keys


def _table(words: Words, depth: int) -> Table:
    at = words.place
    table: Table
    if words.sees("TABLE", "(") or (words.word() in WINDOW_FUNCTIONS and words.word(1) == "("):
        table = _windowed(words, lambda: _plain_table(words, depth))
    else:
        table = _plain_table(words, depth)
    if words.word() in _REFUSED_CLAUSES:
        _refuse_clause(words)
    alias = None if words.sees("MATCH_RECOGNIZE") else words.alias()
    if words.sees("MATCH_RECOGNIZE"):
        if not isinstance(table, Named | Derived):
            raise words.fail("MATCH_RECOGNIZE takes rows of a stream, not windows.")
        table = _match(words, replace(table, alias=alias), at)
        alias = words.alias()
    if alias is not None and words.sees("("):
        raise words.fail("column names after a table name are not supported. Write AS in SELECT.")
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
            "several streams in FROM are joined with JOIN ... ON. ON names the columns that are equal, and the bounds on time."
        )
    if words.word() not in _JOIN_WORDS:
        return None
    if words.word() in {"CROSS", "NATURAL"}:
        raise words.fail(
            f"{words.word()} JOIN is not supported. Write JOIN ... ON with the columns that are equal and the bounds on time."
        )
    how = words.word() if words.word() in {"LEFT", "RIGHT", "FULL"} else "INNER"
    words.take(how)
    if words.word() in {"SEMI", "ANTI"}:
        kind = f"{words.word()} JOIN" if how == "INNER" else f"{how} {words.word()} JOIN"
        raise words.fail(f"{kind} is not supported. There are inner, left, right and full ones.")
    if how != "INNER":
        words.take("OUTER")
    words.need("JOIN")
    table = _table(words, depth)
    if words.sees("USING"):
        raise words.fail("USING is not supported. Write ON, with the columns that are equal and the bounds on time.")
    words.need("ON", why="It names the columns that are equal, and the bounds on time.")
    return Join(table=table, how=cast("JoinHow", how.lower()), on=words.expression(*_JOIN_WORDS), at=at)


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
