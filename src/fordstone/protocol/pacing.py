"""Decide what the coordinator does next about checkpoints: begin one, seal it, give it up, or wait.

Pure: the coordinator gathers the facts and carries the decision out. One attempt at a time; the next begins only when
the one before has been sealed or given up. A pipeline in which nothing happens seals an epoch only now and then: each one is stored,
sent and kept by the hub. So does one whose epochs pile up, because the hub is away, as long as no sink of the node waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

IDLE_INTERVAL_US: Final = 60_000_000
"""The interval between checkpoints while nothing happens, unless a shorter one is needed."""
PILED_UP_EPOCHS: Final = 1_000
"""From this number of epochs on that wait for the hub, it does not matter to the center that the next ones are longer."""
AHEAD_SHARE: Final = 60
"""The clock that rows are compared with (rule 7) is read at barriers: it may be late by one part in this number of `max_ahead`."""
TIMEOUT_DOUBLINGS_MAX: Final = 10
"""The timeout of an attempt doubles with each one before it that was given up, so that one succeeds however short it is."""
OFFLINE_SHARE: Final = 4
"""The center hears of a node at its epochs: it does at least this number of times before the node counts as offline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The interval between checkpoints, and the timeout of one after which none was given up."""

    interval_us: int
    timeout_us: int
    idle_interval_us: int = 0
    """The interval while nothing happens; 0, or less than the interval: that is not made longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingFacts:
    """The state of checkpointing now."""

    now_us: int
    started_us: int
    """When the last attempt began, or the engine if there was none."""
    running: bool
    """An attempt's barriers are under way."""
    missing: int
    """How many tasks have not acknowledged it."""
    committing: bool
    """The writer is making an attempt durable."""
    requested: bool
    """A barrier was requested as soon as possible."""
    drained: bool
    """Every source has ended and every loop is empty."""
    stopping: bool
    """A stop was requested."""
    given_up: int = 0
    """How many attempts were given up since the last one that was sealed."""
    idle: bool = False
    """Nothing has happened in the last epochs, nor since: no row came, no time moved, no partition came or went, and nothing is due by the
    clock."""
    piled_up: bool = False
    """`PILED_UP_EPOCHS` wait for the hub; the last ones had no rows for sinks of this node, and none wait there now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Put a barrier into every source. `last`: the pipeline ends after it."""

    last: bool


@dataclass(frozen=True, slots=True)
class Seal:
    """All tasks have acknowledged: make it durable and commit."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The attempt timed out: abandon it. The next one includes what it had frozen."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before this time, unless an event comes."""

    until_us: int


PacingDecision = Begin | Seal | GiveUp | Wait


def decide(pace: Pace, facts: PacingFacts) -> PacingDecision:
    """Decide what to do about checkpoints now."""
    if facts.committing:
        return Wait(facts.now_us + pace.interval_us)
    if facts.running:
        if facts.missing == 0:
            return Seal()
        deadline_us = facts.started_us + (pace.timeout_us << min(facts.given_up, TIMEOUT_DOUBLINGS_MAX))
        return GiveUp() if facts.now_us >= deadline_us else Wait(deadline_us)
    if facts.drained or facts.stopping:
        return Begin(last=True)
    due_us = facts.started_us + pace.interval_us
    idle_until_us = facts.started_us + max(pace.interval_us, pace.idle_interval_us)
    if facts.requested or facts.now_us >= (idle_until_us if facts.idle or facts.piled_up else due_us):
        return Begin(last=False)
    # Meanwhile it is looked at as often as ever whether something has happened.
    return Wait(due_us if facts.now_us < due_us else min(facts.now_us + pace.interval_us, idle_until_us))


def idle_interval_us(*, max_ahead_us: Iterable[int], offline_us: Iterable[int]) -> int:
    """Return the interval while nothing happens. `max_ahead_us`: of the sources that have one; `offline_us`: of the streams to the center."""
    ahead = (span_us // AHEAD_SHARE for span_us in max_ahead_us)
    offline = (span_us // OFFLINE_SHARE for span_us in offline_us)
    return min([IDLE_INTERVAL_US, *ahead, *offline])
