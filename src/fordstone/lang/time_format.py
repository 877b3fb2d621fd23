"""Patterns of dates and times, as Spark has them (those of Java's DateTimeFormatter), and zones: split into parts and checked.

What each part reads and writes on Polars is in `polars.time_format`, and what zones do in `polars.zones`. A letter, a number of letters
or a zone that is not supported is an error when the pipeline is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import polars as pl

from fordstone.lang.schema import ClashError

COUNTS: Final = {
    "y": range(1, 7), "M": range(1, 5), "d": range(1, 3), "D": range(1, 4), "E": range(1, 5), "a": range(1, 2), "H": range(1, 3),
    "h": range(1, 3), "K": range(1, 3), "k": range(1, 3), "m": range(1, 3), "s": range(1, 3), "S": range(1, 10), "X": range(1, 6),
    "x": range(1, 6), "Z": (1, 2, 3, 5),
}  # fmt: skip
"""The letters, and how often each may stand in a row."""
_WRITTEN_ONLY: Final = frozenset("DE")
"""Spark reads no day of the week, and a day of the year only where it contradicts nothing."""
_SAME: Final = {**dict.fromkeys("HhKk", "the hour"), **dict.fromkeys("XxZ", "the zone")}
_RESERVED: Final = frozenset("{}#")
USUAL_FORMAT: Final = "yyyy-MM-dd HH:mm:ss"
LIST: Final = "y M d H h K k a m s S X x Z"


@dataclass(frozen=True, slots=True)
class Field:
    """A number of equal letters: `yyyy`."""

    letter: str
    count: int


@dataclass(frozen=True, slots=True)
class Text:
    """What stands in the text as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """Parts between [ and ]: they may be missing in the text that is read."""

    parts: tuple[Part, ...]


Part = Field | Text | Maybe


@lru_cache(maxsize=256)
def parse_format(pattern: str, *, reads: bool) -> tuple[Part, ...]:
    """Split a pattern. `reads`: it is for reading text, not for writing it.

    Raises:
        ClashError: if it is none, or has letters that are not supported.
    """
    parts, end = _parts(pattern, 0, reads=reads, inside=False)
    if end != len(pattern):
        raise ClashError(f"{pattern!r} has a ] without [.")
    found: set[str] = set()
    for field in fields(parts):
        what = _SAME.get(field.letter, field.letter)
        if reads and what in found:
            raise ClashError(f"{pattern!r} reads {what} twice.")
        found.add(what)
    return parts


def fields(parts: tuple[Part, ...]) -> Iterator[Field]:
    """The fields of a pattern, in their order."""
    for part in parts:
        if isinstance(part, Maybe):
            yield from fields(part.parts)
        elif isinstance(part, Field):
            yield part


def _parts(pattern: str, at: int, *, reads: bool, inside: bool) -> tuple[tuple[Part, ...], int]:
    parts: list[Part] = []
    while at < len(pattern):
        char = pattern[at]
        if char == "]":
            break
        if char == "[":
            inner, at = _parts(pattern, at + 1, reads=reads, inside=True)
            parts.append(Maybe(inner))
            at += 1
        elif char == "'":
            text, at = _quoted(pattern, at)
            parts.append(Text(text))
        elif char.isascii() and char.isalpha():
            end = at
            while end < len(pattern) and pattern[end] == char:
                end += 1
            parts.append(_field(pattern, char, end - at, reads=reads))
            at = end
        elif char in _RESERVED:
            raise ClashError(f"{pattern!r} has {char!r}, which has no meaning in a pattern; write it in quotes.")
        else:
            parts.append(Text(char))
            at += 1
    if inside and at == len(pattern):
        raise ClashError(f"{pattern!r} has a [ without ].")
    return tuple(parts), at


def _quoted(pattern: str, at: int) -> tuple[str, int]:
    """The text in quotes, and where it ends. A doubled quote is a quote."""
    if pattern[at : at + 2] == "''":
        return "'", at + 2
    text, at = "", at + 1
    while at < len(pattern):
        if pattern[at] != "'":
            text, at = text + pattern[at], at + 1
        elif pattern[at : at + 2] == "''":
            text, at = text + "'", at + 2
        else:
            return text, at + 1
    raise ClashError(f"{pattern!r} has a quote that is not closed.")


def _field(pattern: str, letter: str, count: int, *, reads: bool) -> Field:
    if letter not in COUNTS or (reads and letter in _WRITTEN_ONLY):
        more = "" if reads else " D E"
        raise ClashError(
            f"{pattern!r} has the letter {letter}, which is not supported here. Letters are {LIST}{more}; other text stands in quotes."
        )
    if count not in COUNTS[letter]:
        allowed = ", ".join(letter * number for number in COUNTS[letter])
        raise ClashError(f"{pattern!r} has {letter * count}, which is not supported. Write {allowed}.")
    return Field(letter, count)


_FIXED: Final = re.compile(r"(?:UTC|GMT|UT|Z)?(?:([+-])([0-9]{1,2})(?::?([0-9]{1,2})(?::?([0-9]{2}))?)?)?")
_OFFSET_SECONDS_MAX: Final = 18 * 3600


@lru_cache(maxsize=256)
def fixed_offset_us(zone: str) -> int | None:
    """The offset of a zone like `+02:00`, `UTC` or `GMT-3`; None: it is a region, such as `Europe/Berlin`.

    Raises:
        ClashError: if there is no such zone.
    """
    found = _FIXED.fullmatch(zone) if zone else None
    if found is not None:
        hours, minutes, seconds = (int(found[at] or 0) for at in (2, 3, 4))
        size = hours * 3600 + minutes * 60 + seconds
        if max(minutes, seconds) < 60 and size <= _OFFSET_SECONDS_MAX:  # noqa: PLR2004 - the clock
            return (-size if found[1] == "-" else size) * 1_000_000
    elif "/" in zone:
        try:
            pl.Series([0], dtype=pl.Datetime("us")).dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
        except pl.exceptions.PolarsError:
            pass
        else:
            return None
    raise ClashError(
        f"{zone!r} is not a zone. Write a region such as 'Europe/Berlin', 'UTC', or an offset such as '+02:00'."
    )
