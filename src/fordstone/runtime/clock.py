"""The clock, which is handed to all code that needs the time, so that a simulation can replace it."""

from __future__ import annotations

from typing import Protocol

from fordstone.storage.clock import monotonic_clock_us, wall_clock_us


class Clock(Protocol):
    """A source of time."""

    def wall_us(self) -> int:
        """Microseconds since 1970-01-01 UTC, by the machine's clock."""
        ...

    def monotonic_us(self) -> int:
        """Microseconds on a clock that never goes back."""
        ...


class SystemClock:
    """The machine's clock."""

    def wall_us(self) -> int:
        return wall_clock_us()

    def monotonic_us(self) -> int:
        return monotonic_clock_us()
