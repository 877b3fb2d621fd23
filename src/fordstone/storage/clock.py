"""The machine's wall clock. Services are handed a clock; programs hand them this one."""

from __future__ import annotations

import time


def wall_clock_us() -> int:
    """Return microseconds since 1970-01-01 UTC, by the machine's clock."""
    return time.time_ns() // 1_000
