"""Decide what may be read while the state is larger than its limit. Pure.

State shrinks only when time moves on. So above the limit only the partitions that hold the watermark back are read: what the others would
bring could only be kept. Sources without event time are not read, and from `HARD_SHARE` of the limit nothing is: then the rows that were
read have not let the state shrink, and more of them would only fill the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fordstone.lang.duration import human_us
from fordstone.protocol.progress import WaitedFor

RESUME_SHARE: Final = 0.9
"""Reading is unlimited again below this share of the limit, so that it does not change with every epoch."""
HARD_SHARE: Final = 1.25
"""Nothing is read above this share of the limit."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLimit:
    """What is read while the state is too large."""

    until_us: int | None
    """Only partitions whose watermark is not after this one are read; None: nothing is."""
    size: str
    """For the user: how large the state is, and its limit."""
    reason: str
    """The same, with what is waited for, and what to do."""

    def allows(self, watermark_us: int | None) -> bool:
        """Whether a partition with this watermark is read; None: its source has no event time."""
        return self.until_us is not None and watermark_us is not None and watermark_us <= self.until_us


def reading_limit(
    state_bytes: int, bytes_max: int, waited_for: Iterable[WaitedFor], *, limited: bool, timed: bool
) -> ReadingLimit | None:
    """Judge the size of the state; None: everything is read.

    `waited_for`: without partitions of which no more is to be read. `limited`: whether there was a limit before. `timed`: whether a
    source has event time.
    """
    if state_bytes <= bytes_max * (RESUME_SHARE if limited else 1.0):
        return None
    least = min(waited_for, key=lambda one: one.watermark_us, default=None)
    size = f"the state has {_mib(state_bytes)}, and its limit is {_mib(bytes_max)} (--state-max)"
    cure = "Windows, lateness, ttl= and within= decide how long rows and keys are kept; or raise the limit, if there is memory."
    until_us = None
    if state_bytes > bytes_max * HARD_SHARE:
        why = f"Nothing is read above {HARD_SHARE} times the limit: the rows that were read beyond it have not let the state shrink."
    elif not timed:
        why = "Nothing is read: no source has event time, so no window ends and no key is forgotten by it."
    elif least is None:
        why = "Only what holds time back is read, and no partition does: all are idle, or were read to their end. The next rows of one move time on."
    else:
        until_us = least.watermark_us
        what = "node" if least.is_node else f"partition of source {least.source}"
        silent = (
            "" if least.silent_us is None else f", silent for {human_us(least.silent_us // 1_000_000 * 1_000_000)},"
        )
        why = (
            f"Only what holds time back is read: {what} {least.partition}{silent} comes first. If it stays silent, give its source "
            "idle_after=."
        )
    return ReadingLimit(until_us=until_us, size=size, reason=f"{size}. {why} {cure}")


def describe_stop(limit: ReadingLimit) -> str:
    """Explain why a run that was to end with its input stops before."""
    return (
        f"{limit.size}. There is input left, but nothing more may be read, and what was read no longer lets the state shrink. The epochs "
        "up to here are sealed, so with the same --state directory a run with a larger --state-max continues from here. Windows, "
        "lateness, ttl= and within= decide how long rows and keys are kept."
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.{0 if size_bytes >= 10 * _MIB else 1}f} MiB"
