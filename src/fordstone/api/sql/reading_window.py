"""The grammar of windows in FROM: TABLE(TUMBLE(TABLE readings, DESCRIPTOR(ts), INTERVAL '10' SECOND))."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

from fordstone.api.sql.syntax import Derived, Expr, Named, WindowCall, Windowed, WindowKind
from fordstone.api.sql.words import Words

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
    # A further column, or the next argument, may stand behind the comma.
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
