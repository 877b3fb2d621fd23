"""Reading SQL text into sqlglot trees, and writing names.

The dialect is Spark's, except that function calls stay as they were written: sqlglot would turn `log10(x)` into
`log(10, x)` or `date_trunc(unit, ts)` with a column into one with a literal, and that changes the meaning. What a call
means is decided by `expression` alone. Trees that were parsed with another dialect are written out and read again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parser import Parser as BaseParser
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from fordstone.errors import ExpressionError, NotInstalledError

_WITH_OWN_SYNTAX: Final = ("CAST", "TRY_CAST", "EXTRACT", "TRIM", "SUBSTRING", "SUBSTR", "POSITION")


class _Parser(SparkParser):
    """Knows the functions that have a grammar of their own; all others are `exp.Anonymous`."""

    FUNCTIONS: ClassVar[dict[str, Any]] = {}
    FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
        name: parser for name, parser in SparkParser.FUNCTION_PARSERS.items() if name in _WITH_OWN_SYNTAX
    }
    ARRAY_CONSTRUCTORS: ClassVar[dict[str, Any]] = {}
    """With these, `array(a)[0]` would be read as `array(0)`."""


class Fordstone(Spark):
    """Spark SQL with function calls left as they stand."""

    Parser = _Parser

    def parser(self, **options: Any) -> BaseParser:
        try:
            return super().parser(**options)
        except TypeError as error:
            if "compiled" not in str(error):
                raise
            raise NotInstalledError(
                "sqlglot is installed with compiled parsers (sqlglot[c]), which cannot be extended. Fordstone needs those in Python: "
                "pip uninstall sqlglotc"
            ) from error


DIALECT: Final = Fordstone()
"""Parse with this what is to be handed to `parse` as a tree."""

_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SAFE_WORDS: Final = frozenset(
    {
        "temp",
        "date",
        "time",
        "timestamp",
        "key",
        "value",
        "type",
        "row",
        "range",
        "format",
        "index",
        "percent",
        "end_time",
    }
)
"""Keywords of sqlglot that are common column names and that both parsers read as such."""
_READ_AS_SYNTAX: Final = frozenset(_Parser.NO_PAREN_FUNCTION_PARSERS)


@lru_cache(maxsize=1024)
def quoted_name(name: str) -> str:
    """A column name as it is written in SQL: bare where that is unambiguous, else in backticks."""
    if _PLAIN_NAME.fullmatch(name) and name.upper() not in _READ_AS_SYNTAX:
        tokens = DIALECT.tokenize(name)
        if len(tokens) == 1 and (tokens[0].token_type is TokenType.VAR or name.lower() in _SAFE_WORDS):
            return name
    return "`" + name.replace("`", "``") + "`"


DEPTH_MAX: Final = 160
"""Maximum depth of an expression; `a AND b AND c ...` is as deep as it is long."""
TOO_DEEP: Final = (
    "the expression is nested too deeply, or has too long a chain of operators. Write x IN (...) for many alternatives, or "
    "work parts of it out in columns of their own before."
)


def read(text: str) -> exp.Expr:
    """Parse one expression.

    Raises:
        ExpressionError: if the text is not one SQL expression; the offset is where reading stopped.
    """
    if not text.strip():
        raise ExpressionError("the expression is empty.", text=text, offset=0)
    tokens = tokens_of(text)
    try:
        found = DIALECT.parser().parse(tokens, text)
    except ParseError as error:
        raise _parse_error(error, text) from None
    except RecursionError:
        raise ExpressionError(TOO_DEEP, text=text, offset=0) from None
    trees = [tree for tree in found if tree is not None]
    if len(trees) != 1:
        raise ExpressionError("one expression was expected, without a semicolon.", text=text, offset=text.find(";"))
    if _is_too_deep(trees[0]):
        raise ExpressionError(TOO_DEEP, text=text, offset=0)
    return trees[0]


def _is_too_deep(tree: exp.Expr) -> bool:
    """Whether recursion over the tree might exhaust the stack."""
    left = [(tree, 1)]
    while left:
        node, depth = left.pop()
        if depth > DEPTH_MAX:
            return True
        left += [(inner, depth + 1) for inner in node.iter_expressions()]
    return False


def tokens_of(text: str) -> list[Token]:
    """The words of a text, each with its place. Raises `ExpressionError` if a quote is never closed."""
    try:
        return list(DIALECT.tokenize(text))
    except TokenError:
        raise ExpressionError(
            "the text ends inside a quoted string or name, or a comment; close it.", text=text, offset=_open_quote(text)
        ) from None


def read_part(tokens: Sequence[Token], text: str) -> exp.Expr:
    """Parse the one expression that these tokens of `text` make, AS included. Places are those in the whole text.

    Raises:
        ExpressionError: if they do not make an expression.
    """
    try:
        found = DIALECT.parser().parse_into(exp.Expr, list(tokens), text)
    except ParseError as error:
        raise _parse_error(error, text) from None
    if len(found) != 1 or found[0] is None:
        raise ExpressionError("an expression was expected here.", text=text, offset=tokens[0].start)
    return found[0]


def _parse_error(error: ParseError, text: str) -> ExpressionError:
    first = error.errors[0] if error.errors else {}
    context, found = str(first.get("start_context", "")), str(first.get("highlight", ""))
    line, column = int(first.get("line") or 1), int(first.get("col") or 0)
    starts = [0, *(at.end() for at in re.finditer("\n", text))]
    offset = min(max(starts[min(line, len(starts)) - 1] + column - len(found), 0), len(text))
    description = str(first.get("description") or "")
    if description.startswith("Required keyword"):
        return ExpressionError(f"something is missing after {found!r}.", text=text, offset=offset)
    if description.startswith("Expecting"):
        return ExpressionError(
            f"{description.removeprefix('Expecting').strip()!r} is missing.", text=text, offset=offset
        )
    if description.startswith("Expected TYPE"):
        return ExpressionError(f"{found!r} is not a type.", text=text, offset=offset)
    where = f" after {context[-20:].strip()!r}" if context.strip() else ""
    return ExpressionError(f"{found!r} was not expected here{where}.", text=text, offset=offset)


def _open_quote(text: str) -> int:
    """Where the quote that is never closed begins."""
    open_at, quote, at = 0, "", 0
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\" and quote != "`":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"`":
            open_at, quote = at, char
        at += 1
    return open_at


def offset_of(node: exp.Expr) -> int | None:
    """Where in the text the node begins, if the tree was read from text."""
    starts = [part.meta["start"] for part in node.walk() if "start" in part.meta]
    return min(starts) if starts else None


def is_foreign(tree: exp.Expr) -> bool:
    """Whether a tree has function nodes that this dialect does not make, so that it must be written and read again."""
    own: tuple[type[exp.Expr], ...] = (
        exp.Anonymous, exp.Cast, exp.TryCast, exp.Extract, exp.Trim, exp.Substring, exp.StrPosition, exp.Case, exp.If,
        exp.And, exp.Or, exp.RegexpLike, exp.CurrentTimestamp, exp.CurrentDate, exp.Exists,
    )  # fmt: skip

    def is_own(node: exp.Expr) -> bool:
        # String literals that stand side by side are a concatenation.
        parts = node.args.get("expressions") or ()
        return isinstance(node, exp.Concat) and all(isinstance(part, exp.Literal) for part in parts)

    return any(isinstance(node, exp.Func) and not isinstance(node, own) and not is_own(node) for node in tree.walk())
