"""Decide what the coordinator does next about checkpoints: begin one, seal it, give it up, or wait.

Pure: the coordinator gathers the facts and carries the decision out. One attempt at a time; the next begins only when
the one before has been sealed or given up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The interval between checkpoints, and the timeout of one."""

    interval_us: int
    timeout_us: int


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
        deadline_us = facts.started_us + pace.timeout_us
        return GiveUp() if facts.now_us >= deadline_us else Wait(deadline_us)
    if facts.drained or facts.stopping:
        return Begin(last=True)
    due_us = facts.started_us + pace.interval_us
    if facts.requested or facts.now_us >= due_us:
        return Begin(last=False)
    return Wait(due_us)
