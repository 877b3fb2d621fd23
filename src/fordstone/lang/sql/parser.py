"""The grammar of queries: from text to `syntax`. Refuses, with the place, what is SQL but not supported here.

`Tokens` goes through the tokens of a query and finds where an expression ends; parsing it is left to `lang.dialect`. A keyword ends
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
from fordstone.lang.aggregates import without_filters
from fordstone.lang.dialect import read_part, tokens_of
from fordstone.lang.expression import split_alias
from fordstone.lang.sql.syntax import (
    Derived,
    Expr,
    Join,
    JoinHow,
    Limited,
    Matched,
    Name,
    Named,
    PatternPart,
    Query,
    Select,
    Sorted,
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
_SORTED: Final = (
    "a stream has no end, so its rows cannot be sorted as a whole. Sort where you read the result. The first rows of each window are "
    "ORDER BY ... LIMIT after GROUP BY with TUMBLE or HOP."
)
NO_SORTING: Final = f"ORDER BY is not supported here: {_SORTED}"
NO_LIMIT: Final = (
    "LIMIT is not supported here: a stream has no end. Take as many rows as you need where you read the result."
)
_REFUSED_CLAUSES: Final = {
    "SORT BY": _SORTED,
    "CLUSTER BY": _SORTED,
    "DISTRIBUTE BY": "rows are brought together by GROUP BY.",
    "OFFSET": "a stream has no end. Skip rows where you read the result.",
    "FETCH": "write LIMIT, after GROUP BY with a window and ORDER BY.",
    "WINDOW": "write what the window is after each OVER: OVER (PARTITION BY ... ORDER BY ...).",
    "LATERAL": "write SELECT *, explode(items) AS item FROM ... as a query in FROM.",
    "PIVOT": "write an aggregate with CASE WHEN for each column.",
    "UNPIVOT": "write a SELECT for each column, and UNION ALL.",
    "TABLESAMPLE": "filter by a hash of a column instead: WHERE abs(hash(id)) % 10 = 0.",
    "FOR": "a table is joined as it is, and a control table as it was when the epoch began: leave FOR SYSTEM_TIME out.",
    "EXCEPT": "only UNION is.",
    "MINUS": "only UNION is.",
    "INTERSECT": "join the two streams within a time instead: JOIN ... ON.",
    "INTO": "use stream.sink(...) on what the query gives.",
}
_CLAUSE_WORDS: Final = frozenset(
    {
        "FROM",
        "WHERE",
        "GROUP BY",
        "HAVING",
        "QUALIFY",
        "UNION",
        "MATCH_RECOGNIZE",
        "USING",
        "ON",
        "ORDER BY",
        "LIMIT",
        *_REFUSED_CLAUSES,
    }
)
_RESERVED: Final = frozenset({"FROM", "WHERE", "GROUP BY", "HAVING", "QUALIFY", "UNION", "ORDER BY"})
"""Clauses that begin wherever the word stands, even where an operand is missing before it."""
_NO_SUBQUERY: Final = "subqueries in expressions are not supported. Join the two streams (JOIN ... ON), or write the query in FROM or WITH."
_REFUSED: Final = {
    ("(", "SELECT"): _NO_SUBQUERY,
    ("(", "WITH"): _NO_SUBQUERY,
}
"""Tokens in a row that begin what an expression here cannot have."""


class Tokens:
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

    def sees(self, *tokens: str) -> bool:
        return all(self.word(ahead) == word for ahead, word in enumerate(tokens))

    def take(self, *tokens: str) -> bool:
        if not self.sees(*tokens):
            return False
        self._at += len(tokens)
        return True

    def need(self, *tokens: str, why: str = "") -> None:
        for word in tokens:
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
            return Expr(tree=without_filters(read_part(part, self.text), self.text), at=int(part[0].start))
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


def _match(tokens: Tokens, table: Named | Derived, at: int) -> Matched:
    tokens.need("MATCH_RECOGNIZE", "(")
    partition = tokens.listed(lambda: _expression(tokens)) if tokens.take("PARTITION BY") else ()
    order_at = tokens.place
    if not tokens.take("ORDER BY"):
        raise tokens.fail(
            "ORDER BY is missing: MATCH_RECOGNIZE takes rows in order of the stream's event time.", order_at
        )
    order = tokens.listed(lambda: _ordered(tokens))
    measures = tokens.listed(lambda: _measure(tokens)) if tokens.take("MEASURES") else ()
    all_rows = _rows_per_match(tokens)
    skip, skip_to = _skip(tokens)
    tokens.need("PATTERN", "(", why="It defines which rows follow each other, as in PATTERN (A B+ C).")
    pattern = _pattern(tokens)
    within = _expression(tokens) if tokens.take("WITHIN") else None
    if tokens.sees("SUBSET"):
        raise tokens.fail("SUBSET is not supported. Name the variables one by one in MEASURES and DEFINE.")
    define = _define(tokens) if tokens.take("DEFINE") else ()
    tokens.need(")")
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


def _expression(tokens: Tokens, *stops: str) -> Expr:
    return tokens.expression(*_MATCH_CLAUSES, *stops, all_clauses=False)


def _ordered(tokens: Tokens) -> Expr:
    found = _expression(tokens, "ASC", "DESC", "NULLS")
    if tokens.sees("DESC") or tokens.sees("NULLS"):
        raise tokens.fail("rows are taken in order of time, nulls first. Leave this out.")
    tokens.take("ASC")
    return found


def _measure(tokens: Tokens) -> Expr:
    """An expression with AS; FINAL or RUNNING before it becomes a call of it, inside of its AS."""
    mode = tokens.word()
    if mode not in {"FINAL", "RUNNING"} or tokens.word(1) in {"(", ".", "AS", ","}:
        return _expression(tokens)
    tokens.take(mode)
    given = _expression(tokens)
    body, alias = split_alias(given.tree)
    made: exp.Expr = exp.Anonymous(this=mode.lower(), expressions=[body.copy()])
    if alias is not None:
        made = exp.Alias(this=made, alias=given.tree.args["alias"].copy())
    return Expr(tree=made, at=given.at)


def _rows_per_match(tokens: Tokens) -> bool:
    if tokens.take("ONE"):
        tokens.need("ROW", "PER", "MATCH")
        return False
    if not tokens.take("ALL"):
        return False
    tokens.need("ROWS", "PER", "MATCH")
    if tokens.word() in {"SHOW", "OMIT", "WITH"}:
        raise tokens.fail("ALL ROWS PER MATCH takes no options here: there are no empty matches.")
    return True


def _skip(tokens: Tokens) -> tuple[_Skip, Name | None]:
    if not tokens.take("AFTER"):
        return "past_last", None
    tokens.need("MATCH", "SKIP")
    if tokens.take("PAST"):
        tokens.need("LAST", "ROW")
        return "past_last", None
    tokens.need("TO")
    if tokens.take("NEXT"):
        tokens.need("ROW")
        return "next", None
    which: _Skip = "last"
    if tokens.word() in {"FIRST", "LAST"} and tokens.word(1) not in {"PATTERN", ""}:
        which = "first" if tokens.take("FIRST") else "last"
        tokens.take("LAST")
    return which, tokens.name("a variable of the pattern")


def _pattern(tokens: Tokens) -> tuple[PatternPart, ...]:
    """The variables with their quantifiers, up to the closing bracket. Alternatives and groups are refused."""
    parts: list[PatternPart] = []
    while not tokens.take(")"):
        if tokens.over():
            raise tokens.fail("the pattern lacks its ')'.")
        _refuse_in_pattern(tokens)
        name = tokens.name("a variable of the pattern")
        if name.text.upper() == "PERMUTE" and tokens.sees("("):
            raise tokens.fail("PERMUTE is not supported in a pattern. Write the order that you look for.", name.at)
        least, most = _quantifier(tokens)
        parts.append(PatternPart(name=name, times_min=least, times_max=most, greedy=not _reluctant(tokens)))
    if not parts:
        raise tokens.fail("the pattern is empty; write for instance PATTERN (A B+ C).")
    return tuple(parts)


def _refuse_in_pattern(tokens: Tokens) -> None:
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
    if tokens.word() in refused:
        raise tokens.fail(refused[tokens.word()])


def _quantifier(tokens: Tokens) -> tuple[int, int | None]:
    if tokens.take("*"):
        return 0, None
    if tokens.take("+"):
        return 1, None
    if tokens.take("?") or tokens.sees("??"):
        return 0, 1  # two question marks are one word, which the caller that parses reluctance takes
    if tokens.sees("{") and tokens.word(1) != "-":
        return _braces(tokens)
    return 1, 1


def _braces(tokens: Tokens) -> tuple[int, int | None]:
    at = tokens.place
    tokens.take("{")
    least = most = tokens.number()
    if not tokens.sees("}"):
        tokens.need(",")
        most = tokens.number()
    if least is None and most is None:
        raise tokens.fail("a number is missing between these braces.", at)
    tokens.need("}")
    found = least or 0, most
    if most is not None and (most < found[0] or most == 0):
        raise tokens.fail("this repetition is impossible: the second number is at least the first, and at least 1.", at)
    if max(found[0], most or 0) > TIMES_MOST:
        raise tokens.fail(f"at most {TIMES_MOST:,} rows may be asked for.", at)
    return found


def _reluctant(tokens: Tokens) -> bool:
    if tokens.take("??"):
        return True
    if tokens.sees("+") or tokens.sees("*"):
        raise tokens.fail("one quantifier follows another.")
    return tokens.take("?")


def _define(tokens: Tokens) -> tuple[tuple[Name, Expr], ...]:
    defined: set[str] = set()

    def definition() -> tuple[Name, Expr]:
        name = tokens.name("a variable of the pattern")
        tokens.need("AS")
        if name.text.upper() in defined:
            raise tokens.fail(f"{name.text} is defined twice.", name.at)
        defined.add(name.text.upper())
        return name, tokens.expression(all_clauses=False)

    return tokens.listed(definition)


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


def _windowed(tokens: Tokens, table: Callable[[], Named | Derived]) -> Windowed:
    at = tokens.place
    wrapped = tokens.take("TABLE", "(")
    kind = tokens.word()
    if kind not in WINDOW_FUNCTIONS:
        raise tokens.fail(f"{', '.join(WINDOW_FUNCTIONS[:-1])} or {WINDOW_FUNCTIONS[-1]} was expected here.")
    tokens.need(kind, "(")
    _named(tokens, "DATA")
    tokens.take("TABLE")
    inner = table()
    partition = _partition(tokens, kind)
    tokens.need(",", why=f"It is written {SIGNATURES[kind]}.")
    _named(tokens, "TIMECOL")
    tokens.need("DESCRIPTOR", "(", why=f"It is written {SIGNATURES[kind]}.")
    time = tokens.expression()
    tokens.need(")")
    spans = _spans(tokens, kind)
    tokens.need(")")
    if wrapped:
        tokens.need(")")
    call = WindowCall(kind=cast("WindowKind", kind), time=time, spans=spans, at=at)
    return Windowed(table=inner, window=call, partition=partition, at=at)


def _named(tokens: Tokens, name: str) -> None:
    """An argument may be written with its name: SIZE => INTERVAL '10' SECOND."""
    if tokens.word(1) == "=>":
        tokens.need(name, "=>")


def _partition(tokens: Tokens, kind: str) -> tuple[Expr, ...] | None:
    if not tokens.sees("PARTITION BY"):
        return None
    if kind != "SESSION":
        raise tokens.fail(f"{kind} has no PARTITION BY: its windows do not depend on the rows. Leave it out.")
    tokens.take("PARTITION BY")
    if tokens.take("("):
        listed = tokens.listed(tokens.expression)
        tokens.need(")")
        return listed
    keys = [tokens.expression()]
    # A further column, or the next argument, may follow the comma.
    while tokens.sees(",") and tokens.word(1) != "DESCRIPTOR" and tokens.word(2) != "=>":
        tokens.take(",")
        keys.append(tokens.expression())
    return tuple(keys)


def _spans(tokens: Tokens, kind: str) -> tuple[Expr, ...]:
    names = SPAN_NAMES[kind]
    least = len(names) - ("OFFSET" in names)
    given: dict[str, Expr] = {}
    while tokens.take(","):
        if len(given) == len(names):
            raise tokens.fail(f"{kind} has no further argument. It is written {SIGNATURES[kind]}.")
        name = next(name for name in names if name not in given)
        if tokens.word(1) == "=>":
            name = tokens.word()
            if name not in names or name in given:
                raise tokens.fail(f"{kind} has {', '.join(names)}, each once.")
            tokens.need(name, "=>")
        given[name] = tokens.expression()
    if len([name for name in names[:least] if name in given]) < least:
        raise tokens.fail(f"an argument of {kind} is missing here. It is written {SIGNATURES[kind]}.")
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
    tokens = Tokens(text)
    if tokens.over():
        raise tokens.fail("the query is empty. Write for instance: SELECT device, temp FROM readings WHERE temp > 20")
    _refuse_statements(tokens)
    query = _query(tokens, 0)
    tokens.take(";")
    if not tokens.over():
        _stray(tokens)
    return query


def read_order(text: str) -> tuple[Sorted, ...]:
    """Read what follows ORDER BY: `n DESC, device`.

    Raises:
        SqlError: with the place of what is wrong.
    """
    tokens = Tokens(text)
    found = tokens.listed(lambda: _sorted(tokens))
    if not tokens.over():
        _stray(tokens)
    return found


def _sorted(tokens: Tokens) -> Sorted:
    """An expression and how to sort by it; nulls are less than anything, as in Spark, unless NULLS says otherwise."""
    by = tokens.expression("ASC", "DESC", "NULLS")
    if isinstance(by.tree, exp.Alias):
        raise tokens.fail("a part of ORDER BY has no name of its own.", by.at)
    descending = tokens.take("DESC")
    if not descending:
        tokens.take("ASC")
    nulls_first = not descending
    if tokens.take("NULLS"):
        nulls_first = tokens.take("FIRST")
        if not nulls_first:
            tokens.need("LAST")
    return Sorted(by=by, descending=descending, nulls_first=nulls_first)


def _limited(tokens: Tokens) -> Limited | None:
    at = tokens.place
    order = tokens.listed(lambda: _sorted(tokens)) if tokens.take("ORDER BY") else ()
    rows: int | None = None
    if tokens.take("LIMIT"):
        place = tokens.place
        rows = tokens.number()
        if not rows:
            raise tokens.fail("LIMIT is a whole number of at least 1, written out.", place)
    return Limited(order=order, rows=rows, at=at) if order or rows else None


def _refuse_statements(tokens: Tokens) -> None:
    first = tokens.word()
    if first not in {"SELECT", "WITH", "("}:
        what = f"{first} is not supported" if first[:1].isalpha() else "a query was expected"
        raise tokens.fail(f"{what}: a query begins with SELECT or WITH. {_STATEMENTS.get(first, '')}".rstrip())


def _query(tokens: Tokens, depth: int) -> Query:
    """SELECT ... UNION ALL SELECT ..., with WITH before it."""
    if depth > DEPTH_MAX:
        raise tokens.fail(f"more than {DEPTH_MAX} queries stand inside each other.")
    at = tokens.place
    named: tuple[tuple[Name, Query], ...] = ()
    if tokens.take("WITH"):
        if tokens.sees("RECURSIVE") and not tokens.word(1) == "AS":
            raise tokens.fail("WITH RECURSIVE is not supported. Use Stream.iterate for loops.")
        named = tokens.listed(lambda: _named_query(tokens, depth))
    parts: list[Select | Query] = [_part(tokens, depth)]
    distinct: set[int] = set()
    while tokens.take("UNION"):
        if not tokens.take("ALL"):
            tokens.take("DISTINCT")
            distinct.add(len(parts))
        if tokens.sees("BY"):
            raise tokens.fail("UNION BY NAME is not supported. List the columns in the same order.")
        parts.append(_part(tokens, depth))
    limited = _limited(tokens)
    if tokens.word() in _REFUSED_CLAUSES:
        _refuse_clause(tokens)
    if limited is not None:
        (first, *others) = parts
        if others or isinstance(first, Query):
            raise tokens.fail(NO_SORTING if limited.order else NO_LIMIT, limited.at)
        parts = [replace(first, limited=limited)]
    return Query(parts=tuple(parts), distinct=frozenset(distinct), named=named, at=at)


def _named_query(tokens: Tokens, depth: int) -> tuple[Name, Query]:
    name = tokens.name("the name of a query")
    if tokens.sees("("):
        raise tokens.fail("column names after the name of a query are not supported. Write AS in its SELECT.")
    tokens.need("AS", "(")
    query = _query(tokens, depth + 1)
    tokens.need(")")
    return name, query


def _part(tokens: Tokens, depth: int) -> Select | Query:
    if tokens.take("("):
        query = _query(tokens, depth + 1)
        tokens.need(")")
        return query
    return _select(tokens, depth)


def _select(tokens: Tokens, depth: int) -> Select:
    at = tokens.place
    tokens.need("SELECT")
    distinct = tokens.sees("DISTINCT") and tokens.word(1) not in {",", "FROM", ""}
    if distinct:
        tokens.take("DISTINCT")
        if tokens.sees("ON", "("):
            raise tokens.fail(
                "DISTINCT ON is not supported. Use ROW_NUMBER() OVER (...), and WHERE in a query outside."
            )
    else:
        tokens.take("ALL")
    items = tokens.listed(lambda: _item(tokens))
    if not tokens.take("FROM"):
        if tokens.over() or tokens.word() in {")", "UNION", ";"}:
            raise tokens.fail("FROM is missing: a query reads a stream.")
        _stray(tokens)
    table = _table(tokens, depth)
    joins: list[Join] = []
    while (join := _join(tokens, depth)) is not None:
        joins.append(join)
    where = tokens.expression() if tokens.take("WHERE") else None
    group = _group(tokens) if tokens.take("GROUP BY") else None
    having = tokens.expression() if tokens.take("HAVING") else None
    qualify = tokens.expression() if tokens.take("QUALIFY") else None
    if tokens.word() in _REFUSED_CLAUSES:
        _refuse_clause(tokens)
    return Select(
        items=items,
        table=table,
        joins=tuple(joins),
        where=where,
        group=group,
        having=having,
        qualify=qualify,
        distinct=distinct,
        at=at,
    )


def _item(tokens: Tokens) -> Expr | Star:
    at = tokens.place
    if tokens.take("*"):
        less: tuple[Name, ...] = ()
        if tokens.sees("EXCEPT", "(") and tokens.word(2) not in {"SELECT", "WITH"}:
            tokens.need("EXCEPT", "(")
            less = tokens.listed(lambda: tokens.name("a column"))
            tokens.need(")")
        return Star(at=at, less=less)
    if tokens.word(1) == "." and tokens.word(2) == "*":
        table = tokens.name("a stream")
        tokens.need(".", "*")
        return Star(at=at, table=table)
    return tokens.expression()


def _group(tokens: Tokens) -> tuple[Expr, ...]:
    for word in ("ROLLUP", "CUBE", "GROUPING", "ALL"):
        if tokens.sees(word) and (word != "ALL" or tokens.word(1) in {"", ")", ";", "HAVING"}):
            raise tokens.fail(f"GROUP BY {word} is not supported. List the columns.")
    if tokens.sees("(", ")"):
        raise tokens.fail("GROUP BY () is not supported. Leave GROUP BY out: aggregates alone make one group.")
    keys = tokens.listed(tokens.expression)
    if tokens.word() == "WITH":
        raise tokens.fail("GROUP BY ... WITH is not supported. List the columns.")
    return keys


def _table(tokens: Tokens, depth: int) -> Table:
    at = tokens.place
    table: Table
    if tokens.sees("TABLE", "(") or (tokens.word() in WINDOW_FUNCTIONS and tokens.word(1) == "("):
        table = _windowed(tokens, lambda: _plain_table(tokens, depth))
    else:
        table = _plain_table(tokens, depth)
    if tokens.word() in _REFUSED_CLAUSES:
        _refuse_clause(tokens)
    alias = None if tokens.sees("MATCH_RECOGNIZE") else tokens.alias()
    if tokens.sees("MATCH_RECOGNIZE"):
        if not isinstance(table, Named | Derived):
            raise tokens.fail("MATCH_RECOGNIZE takes rows of a stream, not windows.")
        table = _match(tokens, replace(table, alias=alias), at)
        alias = tokens.alias()
    if alias is not None and tokens.sees("("):
        raise tokens.fail("column names after a table name are not supported. Write AS in SELECT.")
    return table if alias is None else replace(table, alias=alias)


def _plain_table(tokens: Tokens, depth: int) -> Named | Derived:
    at = tokens.place
    if tokens.take("("):
        if tokens.word() not in {"SELECT", "WITH", "("}:
            raise tokens.fail("a query was expected in these parentheses. Joins are written one after the other.")
        query = _query(tokens, depth + 1)
        tokens.need(")")
        return Derived(query=query, at=at)
    if tokens.sees("VALUES"):
        raise tokens.fail("VALUES is not supported. Rows come from sources.")
    if tokens.sees("LATERAL"):
        _refuse_clause(tokens)
    name = tokens.name("the name of a stream")
    if tokens.sees("("):
        raise tokens.fail(f"there is no table function {name.text}. There are {', '.join(WINDOW_FUNCTIONS)}.", name.at)
    port = tokens.name("the name of a port") if tokens.take(".") else None
    return Named(name=name, port=port)


def _join(tokens: Tokens, depth: int) -> Join | None:
    at = tokens.place
    if tokens.sees(","):
        raise tokens.fail(
            "several streams in FROM are joined with JOIN ... ON. ON names the columns that are equal, and the bounds on time."
        )
    if tokens.word() not in _JOIN_WORDS:
        return None
    if tokens.word() in {"CROSS", "NATURAL"}:
        raise tokens.fail(
            f"{tokens.word()} JOIN is not supported. Write JOIN ... ON with the columns that are equal and the bounds on time."
        )
    how = tokens.word() if tokens.word() in {"LEFT", "RIGHT", "FULL"} else "INNER"
    tokens.take(how)
    if tokens.word() in {"SEMI", "ANTI"}:
        kind = f"{tokens.word()} JOIN" if how == "INNER" else f"{how} {tokens.word()} JOIN"
        raise tokens.fail(f"{kind} is not supported. There are inner, left, right and full ones.")
    if how != "INNER":
        tokens.take("OUTER")
    tokens.need("JOIN")
    table = _table(tokens, depth)
    if tokens.sees("USING"):
        raise tokens.fail("USING is not supported. Write ON, with the columns that are equal and the bounds on time.")
    tokens.need("ON", why="It names the columns that are equal, and the bounds on time.")
    return Join(table=table, how=cast("JoinHow", how.lower()), on=tokens.expression(*_JOIN_WORDS), at=at)


def _refuse_clause(tokens: Tokens) -> NoReturn:
    word = tokens.word()
    raise tokens.fail(f"{word} is not supported: {_REFUSED_CLAUSES[word]}")


def _stray(tokens: Tokens) -> NoReturn:
    if tokens.word() in _REFUSED_CLAUSES:
        _refuse_clause(tokens)
    if tokens.sees(";"):
        raise tokens.fail("one query was expected.")
    if tokens.word() in {"SELECT", "INSERT", "DROP", "CREATE", "DELETE", "UPDATE"}:
        raise tokens.fail("one query was expected; another statement begins here.")
    raise tokens.fail("this was not expected here.")
