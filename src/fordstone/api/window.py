"""Windows as a pipeline declares them."""

from __future__ import annotations

from datetime import timedelta

from fordstone.model.duration import duration_us, positive_us
from fordstone.model.windows import Tumbling


def tumbling(size: str | timedelta, *, offset: str | timedelta = "0s") -> Tumbling:
    """Windows that follow each other without gap or overlap: `tumbling("10s")`.

    A window is closed-open, `[start, start + size)`, and aligned to 1970-01-01 00:00 UTC; `offset` shifts it, so
    `tumbling("1d", offset="6h")` gives days that begin at six.
    """
    size_us = positive_us(size, what="tumbling size")
    return Tumbling(size_us=size_us, offset_us=duration_us(offset, what="tumbling offset") % size_us)
