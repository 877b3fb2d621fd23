"""Which files may continue one another, by their names.

Numbers in a path count something: time (`h00.jsonl`, `2026-01-01/part-0.csv`) or devices (`dev-1.jsonl`). A name does not say which. So a
path is given every series that its numbers allow, and the times of the rows show which of them is one (`protocol.partitions`). Only
`app.log` beside `app.log.1` is certain by its name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from fordstone.protocol.partitions import SeriesPlace

AUTO: Final = "auto"
NONE: Final = "none"
NUMBERS_MAX: Final = 16
"""A path with more numbers than this has random ones, as in a UUID: they are no series."""
_NUMBER: Final = re.compile(r"\d+")
_ROTATED: Final = re.compile(r"(?P<base>.+?)(?:\.(?P<age>\d{1,6})|-(?P<date>\d{6,14}))?(?:\.gz|\.zst)?")
_DIGITS: Final = 20
_NEWEST: Final = 10**_DIGITS - 1


def places(name: str, series: str) -> tuple[SeriesPlace, ...]:
    """Return the series that a file may belong to. `series`: the option of that name."""
    if series == NONE:
        return ()
    return _by_numbers(name) if series == AUTO else _by_pattern(name, series)


def describe(series: str) -> str:
    """Describe for `explain` which files are a series."""
    if series == NONE:
        return "each file is waited for"
    if series == AUTO:
        return "files that differ in their numbers and follow one another in time are rolled: only the newest is waited for"
    return f"files with the same groups of {series!r} are rolled: only the newest is waited for"


def rotated_from(name: str) -> str | None:
    """Return `app.log` for `app.log.1`, `app.log.2.gz` and `app.log-20260101`; None for other names."""
    found = _ROTATED.fullmatch(name)
    return found["base"] if found is not None and found["base"] != name else None


@lru_cache(maxsize=1 << 16)
def _by_numbers(name: str) -> tuple[SeriesPlace, ...]:
    """The numbers at the end of the path, or at its start, are the order; other numbers are a part of the series' name."""
    spans = [found.span() for found in _NUMBER.finditer(name)]
    count = len(spans)
    if count > NUMBERS_MAX:
        return ()
    chosen = [spans[first:] for first in range(count)] + [spans[:last] for last in range(1, count)]
    order = _natural(name)
    numbered = [SeriesPlace(series=_without(name, numbers), order=order) for numbers in chosen]
    rotated = _ROTATED.fullmatch(name)
    if rotated is None:
        return tuple(numbered)
    whole = rotated["base"] == name
    return (
        *numbered,
        SeriesPlace(series=f"{rotated['base']} and rotated", order=_rotated_order(rotated), certain=whole),
    )


@lru_cache(maxsize=1 << 16)
def _by_pattern(name: str, pattern: str) -> tuple[SeriesPlace, ...]:
    found = re.search(pattern, name)
    if found is None:
        return ()
    rotated = _ROTATED.fullmatch(name)
    order = _natural(name) if rotated is None else f"{_natural(rotated['base'])} {_rotated_order(rotated)}"
    return (SeriesPlace(series="\0".join(group or "" for group in found.groups()), order=order, declared=True),)


def _natural(text: str) -> str:
    """Sorts as the text does, but numbers by their value."""
    return _NUMBER.sub(lambda number: number[0].zfill(_DIGITS), text)


def _without(name: str, spans: list[tuple[int, int]]) -> str:
    for start, end in reversed(spans):
        name = f"{name[:start]}#{name[end:]}"
    return name


def _rotated_order(rotated: re.Match[str]) -> str:
    """`app.log` is newer than `app.log.1`, which is newer than `app.log.2`; and newer than `app.log-20260101`."""
    if rotated["date"] is not None:
        return rotated["date"].zfill(_DIGITS)
    return str(_NEWEST - int(rotated["age"] or 0))
