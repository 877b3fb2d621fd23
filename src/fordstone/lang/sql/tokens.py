"""The words of a query, one after the other: what the grammar in `reading` is written with.

Finds where an expression ends, and leaves parsing it to `lang.dialect`. A keyword ends an expression only after an
operand, so that columns may be called `offset` or `limit` where no clause can begin.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from sqlglot.tokenizer_core import Token, TokenType

from fordstone.errors import ExpressionError
from fordstone.lang.dialect import read_part, tokens_of
from fordstone.lang.sql.syntax import Expr, Name, SqlError

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
JOIN_WORDS: Final = frozenset({"JOIN", "INNER", "LEFT", "RIGHT", "FULL", "CROSS", "NATURAL", "SEMI", "ANTI"})
CLAUSES: Final = frozenset(
    {
        "FROM", "WHERE", "GROUP BY", "HAVING", "UNION", "EXCEPT", "MINUS", "INTERSECT", "ORDER BY", "SORT BY",
        "CLUSTER BY", "DISTRIBUTE BY", "LIMIT", "OFFSET", "FETCH", "QUALIFY", "WINDOW", "LATERAL", "PIVOT", "UNPIVOT",
        "TABLESAMPLE", "FOR", "MATCH_RECOGNIZE", "USING", "ON", "INTO",
    }
)  # fmt: skip
_RESERVED: Final = frozenset({"FROM", "WHERE", "GROUP BY", "HAVING", "UNION", "ORDER BY"})
"""Clauses that begin wherever the word stands, even where an operand is missing before it."""
_MISSING: Final = "an expression is missing here."


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
        """Whether nothing is left."""
        return self._at >= len(self._tokens)

    def word(self, ahead: int = 0) -> str:
        """A word to come in capitals, or a sign; nothing for quoted names, texts, and the end."""
        at = self._at + ahead
        return _word(self._tokens[at]) if 0 <= at < len(self._tokens) else ""

    def sees(self, *words: str) -> bool:
        """Whether these words come next."""
        return all(self.word(ahead) == word for ahead, word in enumerate(words))

    def take(self, *words: str) -> bool:
        """Step over these words, if they come next."""
        if not self.sees(*words):
            return False
        self._at += len(words)
        return True

    def need(self, *words: str, why: str = "") -> None:
        """Step over words that must come next."""
        if not self.take(*words):
            raise self.fail(f"{' '.join(words)} was expected here{self._instead()}.{f' {why}' if why else ''}")

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
        if self.over() or self.word() in CLAUSES | JOIN_WORDS or (self.word() and not self.word()[0].isalpha()):
            return None
        if self._tokens[self._at].token_type in _QUOTED - {TokenType.IDENTIFIER}:
            return None
        return self.name("a name")

    def expression(self, *stops: str, all_clauses: bool = True) -> Expr:
        """An expression up to a comma, a closing bracket, or a word that begins what follows; with AS if it has one."""
        begin = self._at
        self._at = self._end(frozenset(stops) | (CLAUSES if all_clauses else frozenset()))
        part = self._tokens[begin : self._at]
        if not part:
            raise self.fail(_MISSING)
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
        return word not in JOIN_WORDS or following is not TokenType.L_PAREN

    def _refuse_queries(self, part: list[Token]) -> None:
        """What the tree no longer has the places of."""
        for before, token in pairwise(part):
            word, previous = _word(token), _word(before)
            if word in {"SELECT", "WITH"} and previous == "(":
                raise self.fail(
                    "subqueries in expressions are not supported. Join the two streams (JOIN ... ON), or write the query in FROM or WITH.",
                    int(token.start),
                )
            if word == "OVER" and previous == ")":
                raise self.fail(
                    "OVER is not supported. Use GROUP BY with TUMBLE, HOP or SESSION, or MATCH_RECOGNIZE for sequences of rows.",
                    int(token.start),
                )
            if word == "FILTER" and previous == ")":
                raise self.fail(
                    "FILTER is not supported. Write CASE WHEN inside the aggregate: count(CASE WHEN x > 0 THEN 1 END).",
                    int(token.start),
                )

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
