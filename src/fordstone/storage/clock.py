"""The machine's clocks. Services are handed a clock; programs hand them one of these."""

from __future__ import annotations

import time


def wall_clock_us() -> int:
    """Return microseconds since 1970-01-01 UTC, by the machine's clock."""
    return time.time_ns() // 1_000


def monotonic_clock_us() -> int:
    """Return microseconds on a clock that is never set."""
    return time.monotonic_ns() // 1_000


def boot_clock_us() -> int:
    """Return microseconds on a clock that is never set, and that also counts while the machine sleeps, where there is one."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000
