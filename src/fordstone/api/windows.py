"""The windows that rows of a key are cut into: what `Grouped.window` takes."""

from __future__ import annotations

from datetime import timedelta

from fordstone.errors import ConfigError
from fordstone.lang.duration import duration_us, positive_us
from fordstone.plan import plan as p


def tumbling(size: str | timedelta, *, offset: str | timedelta = "0s") -> p.Tumbling:
    """Windows that follow each other without gap or overlap: `tumbling("10s")`.

    A window is closed-open, `[start, start + size)`, and aligned to 1970-01-01 00:00 UTC; `offset` shifts it, so
    `tumbling("1d", offset="6h")` gives days that begin at six.
    """
    size_us = positive_us(size, what="tumbling size")
    return p.Tumbling(size_us=size_us, offset_us=duration_us(offset, what="tumbling offset") % size_us)


def sliding(size: str | timedelta, *, every: str | timedelta, offset: str | timedelta = "0s") -> p.Sliding:
    """Windows of one size that start at a regular interval: `sliding("60s", every="10s")`.

    A window is closed-open, `[start, start + size)`; starts are multiples of `every` from 1970-01-01 00:00 UTC, shifted by
    `offset`. A row counts for every window that it lies in. With `every` longer than `size` there are gaps between
    windows, and rows in them count for none.
    """
    size_us, slide_us = positive_us(size, what="sliding size"), positive_us(every, what="sliding every")
    return p.Sliding(
        size_us=size_us, slide_us=slide_us, offset_us=duration_us(offset, what="sliding offset") % slide_us
    )


def session(gap: str | timedelta) -> p.Session:
    """Rows of a key that follow each other by less than `gap`: `session("30s")`.

    A session is `[first, last + gap)`: rows exactly `gap` apart are of two sessions. It is emitted when the watermark has
    reached its end.
    """
    return p.Session(gap_us=positive_us(gap, what="session gap"))


def by_count(size: int, *, every: int | None = None) -> p.Count:
    """Windows of `size` rows of a key, in order of time: `by_count(100)`, or `by_count(100, every=10)` for one at every tenth.

    A window is emitted when it has `size` rows; a window that never fills is not emitted. `window_start` and `window_end` are the
    times of its first and its last row. With `every` above `size`, the rows in between are in no window.
    """
    return p.Count(size=_rows(size, "size"), slide=_rows(size if every is None else every, "every"))


def _rows(given: object, what: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise ConfigError(f"by_count: {what}={given!r} is not a whole number of rows.")
    if given < 1:
        raise ConfigError(f"by_count: {what}={given} must be at least 1.")
    return given
