"""Decide whether event times were read in a wrong unit: milliseconds that are read as microseconds give January 1970. Pure.

A time is plausible from 1980 up to 2100. A time outside, which in a longer or shorter unit would be plausible, was read in a wrong
one. Other times, such as the 0 of a device without a clock, have no such explanation: they are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

PLAUSIBLE_US: Final = (315_532_800_000_000, 4_102_444_800_000_000)
"""From 1980 up to 2100."""
UNITS: Final = {"ns": "nanoseconds", "us": "microseconds", "ms": "milliseconds", "s": "seconds"}
"""Each is 1,000 times the one before."""
SPANS_US: Final = {
    1: (PLAUSIBLE_US[0] // 1_000, PLAUSIBLE_US[1] // 1_000),
    2: (PLAUSIBLE_US[0] // 1_000_000, PLAUSIBLE_US[1] // 1_000_000),
    -1: (PLAUSIBLE_US[0] * 1_000, PLAUSIBLE_US[1] * 1_000),
    -2: (PLAUSIBLE_US[0] * 1_000_000, PLAUSIBLE_US[1] * 1_000_000),
}
"""By the number of steps of 1,000 to a longer unit: the times that are plausible there. The last do not fit 64 bits."""
_YEAR_US: Final = 31_556_952_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongUnit:
    """A time that was read in a wrong unit."""

    time_us: int
    meant_us: int
    """The time in the right unit."""
    steps: int
    """The right unit is 1,000 times as long, to the power of this."""

    def unit(self, read_as: str) -> str | None:
        """Return the right unit of numbers that were read in this one; None: there is none."""
        place = list(UNITS).index(read_as) + self.steps
        return list(UNITS)[place] if 0 <= place < len(UNITS) else None


def wrong_unit(time_us: int) -> WrongUnit | None:
    """Judge one time; None: its unit is right, as far as one can see."""
    for steps, (first_us, end_us) in SPANS_US.items():
        if first_us <= time_us < end_us:
            meant_us = time_us * 1_000**steps if steps > 0 else time_us // 1_000**-steps
            return WrongUnit(time_us=time_us, meant_us=meant_us, steps=steps)
    return None


def describe_unit(count: int, read_as: str, found: WrongUnit) -> str:
    """Describe a number that was read in a wrong unit: what it is, what it would be, and what to do."""
    unit = found.unit(read_as)
    right = f"as {UNITS[unit]}" if unit is not None else "in another unit"
    advice = f'Use time_unit="{unit}" in the connector' if unit in {"s", "ms", "us"} else "Convert the numbers"
    return f"{count}, read as {UNITS[read_as]}, is {moment_text(found.time_us)}; {right} it is {moment_text(found.meant_us)}. {advice}"


def moment_text(time_us: int) -> str:
    """A time in UTC; of one beyond the years 1 to 9999 only the year, nearly."""
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return f"in the year {1970 + time_us // _YEAR_US:,}"
