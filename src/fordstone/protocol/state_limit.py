"""Decide what may be read while the state is larger than its limit. Pure.

State shrinks only when time moves on. So the partitions that hold the watermark back are still read, and the others wait: what they would
bring could only be kept. If a partition that holds it back is silent, nothing is read, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fordstone.lang.duration import TIME_MIN_US, human_us
from fordstone.protocol.progress import WaitedFor

RESUME_SHARE: Final = 0.9
"""Reading is unlimited again below this share of the limit, so that it does not change with every epoch."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLimit:
    """Only partitions whose watermark is not after this one are read."""

    until_us: int
    reason: str
    """For the user: how large the state is, what is waited for, and what to do."""


def reading_limit(
    state_bytes: int, bytes_max: int, waited_for: Iterable[WaitedFor], *, limited: bool
) -> ReadingLimit | None:
    """Judge the state after an epoch; None: everything is read. `limited`: whether there was a limit before."""
    if state_bytes <= bytes_max * (RESUME_SHARE if limited else 1.0):
        return None
    least = min(waited_for, key=lambda one: one.watermark_us, default=None)
    size = f"the state has {state_bytes // _MIB:,} MiB, and its limit is {bytes_max // _MIB:,} MiB (--state-max)"
    cure = "Windows, lateness, ttl= and within= decide how long rows and keys are kept; or raise the limit, if there is memory."
    if least is None:
        return ReadingLimit(
            until_us=TIME_MIN_US, reason=f"{size}. Nothing is read, and without event time nothing is forgotten. {cure}"
        )
    what = "node" if least.is_node else f"partition of source {least.source}"
    silent = "" if least.silent_us is None else f", silent for {human_us(least.silent_us // 1_000_000 * 1_000_000)},"
    return ReadingLimit(
        until_us=least.watermark_us,
        reason=f"{size}. Only what holds time back is read: {what} {least.partition}{silent} comes first. If it stays silent, give its "
        f"source idle_after=. {cure}",
    )
