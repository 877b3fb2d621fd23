"""Decide whether, and after how long, a failed pipeline is started again.

Pure. The wait doubles with each failure in a row up to a bound; a run that lasted long enough forgives the failures before it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient to be."""

    failures_max: int = 5
    """How many failures in a row are borne before giving up."""
    wait_first_us: int = 100_000
    wait_max_us: int = 30_000_000
    forgiven_after_us: int = 60_000_000


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start again from the newest checkpoint after this wait. `failures` is the count to remember."""

    wait_us: int
    failures: int


@dataclass(frozen=True, slots=True)
class Stop:
    """It has failed too often in a row."""

    failures: int


RestartDecision = RestartAfter | Stop


def decide(policy: RestartPolicy, *, failures: int, lasted_us: int) -> RestartDecision:
    """Judge a failure: `failures` in a row before it, of a run that lasted `lasted_us`."""
    count = 1 if lasted_us >= policy.forgiven_after_us else failures + 1
    if count > policy.failures_max:
        return Stop(count)
    return RestartAfter(min(policy.wait_first_us << min(count - 1, 40), policy.wait_max_us), count)
