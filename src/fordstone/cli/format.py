"""Numbers, sizes, spans and times as people read them, and JSON lines as machines do. Imports nothing heavy."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Final

_KILO: Final = 1000
_SIZES: Final = ("B", "kB", "MB", "GB", "TB")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_US: Final = 1_000_000
_EXACT_BELOW: Final = 10_000
"""Rates below this are written out."""


def count(number: int, noun: str | None = None) -> str:
    """`1,234,567`, or with a noun `1 row`, `2 rows`."""
    if noun is None:
        return f"{number:,}"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rate(rows_per_second: float) -> str:
    """`812 rows/s`, `24.1 M rows/s`."""
    if rows_per_second < _EXACT_BELOW:
        return f"{rows_per_second:,.0f} rows/s"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rows_per_second >= factor:
            return f"{_three_digits(rows_per_second / factor)} {unit} rows/s"
    raise AssertionError("a rate of ten thousand is above a thousand")


def size(size_bytes: int) -> str:
    """`812 B`, `1.25 MB`: powers of ten, as disks are sold."""
    value = float(size_bytes)
    for unit in _SIZES[:-1]:
        if value < _KILO:
            return f"{size_bytes} B" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= _KILO
    return f"{_three_digits(value)} {_SIZES[-1]}"


def span(span_us: float) -> str:
    """`85 us`, `12 ms`, `1.2 s`, `3 min 20 s`, `2 d 3 h`: two units at most."""
    if span_us < 0:
        return f"-{span(-span_us)}"
    if span_us < _KILO:
        return f"{span_us:.0f} us"
    if span_us < _SECOND_US:
        return f"{_three_digits(span_us / _KILO)} ms"
    seconds = span_us / _SECOND_US
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{_three_digits(seconds)} s"
    for large, small, large_seconds, small_seconds in (
        ("d", "h", 86_400, 3_600),
        ("h", "min", 3_600, 60),
        ("min", "s", 60, 1),
    ):
        if seconds >= large_seconds:
            whole, rest = divmod(int(seconds), large_seconds)
            return f"{whole} {large}" + (f" {rest // small_seconds} {small}" if rest >= small_seconds else "")
    raise AssertionError("a span above a minute has minutes")


def instant(us: int) -> str:
    """A moment in UTC, to the second: `2026-01-31 12:00:00`."""
    try:
        return (_EPOCH + timedelta(microseconds=us)).strftime("%Y-%m-%d %H:%M:%S")
    except OverflowError:
        return f"{us} us since 1970"


def share(part: float) -> str:
    """`0.031` as `3.1 %`, with the digits that count."""
    percent = part * 100
    if abs(percent) < 0.001:  # noqa: PLR2004 - too small to show
        return "0 %"
    return f"{percent:.2g} %" if abs(percent) < 10 else f"{percent:.0f} %"  # noqa: PLR2004 - two digits


def print_json(body: object) -> None:
    """Print one JSON line for machines to standard output."""
    import msgspec

    sys.stdout.write(f"{msgspec.json.encode(body).decode()}\n")
    sys.stdout.flush()


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"  # noqa: PLR2004 - digits
