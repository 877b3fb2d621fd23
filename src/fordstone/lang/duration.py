"""Spans of time as people write them: `"5s"`, `"250ms"`, `"1h30m"`, `"5 seconds"`. Kept in microseconds."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from fordstone.errors import ConfigError

TIME_MIN_US: Final = -(2**63)
"""The watermark before any row."""
TIME_MAX_US: Final = 2**63 - 1
"""The watermark after the last row."""
UNIT_US: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_WORDS: Final = {
    "microsecond": "us",
    "millisecond": "ms",
    "sec": "s",
    "second": "s",
    "min": "m",
    "minute": "m",
    "hour": "h",
    "day": "d",
    "week": "w",
}
"""Units written out; also in the plural, in any case."""
_PART: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_EXAMPLES: Final = "'5s', '1h30m' or '5 seconds'"


def duration_us(value: str | timedelta, *, what: str = "duration") -> int:
    """Read a span; `timedelta` is taken as it is. Raises `ConfigError` that names `what`."""
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if not isinstance(value, str):
        raise ConfigError(f"{what}: {value!r} is not a span of time. Write it as text with a unit: {_EXAMPLES}.")
    total, end = 0.0, 0
    text = value.strip()
    while end < len(text):
        part = _PART.match(text, end)
        unit_us = None if part is None else _unit_us(part[2])
        if part is None or unit_us is None:
            break
        total += float(part[1]) * unit_us
        end = part.end()
    if not text or end != len(text):
        units = ", ".join(UNIT_US)
        raise ConfigError(
            f"{what}: {value!r} is not a span of time. Write a number with a unit ({units}), such as {_EXAMPLES}."
        )
    return round(total)


def _unit_us(text: str) -> int | None:
    word = text.lower()
    return UNIT_US.get(text) or UNIT_US.get(_WORDS.get(word.removesuffix("s"), ""))


def positive_us(value: str | timedelta, *, what: str) -> int:
    """Read a span that must be longer than nothing."""
    span = duration_us(value, what=what)
    if span <= 0:
        raise ConfigError(f"{what}: {value!r} must be longer than zero.")
    return span


def human_us(span_us: int) -> str:
    """Write a span the shortest exact way: `"10s"`, `"1h30m"`, `"250ms"`."""
    if span_us == 0:
        return "0s"
    if span_us < 0:
        return "-" + human_us(-span_us)
    parts = []
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count, span_us = divmod(span_us, UNIT_US[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)
