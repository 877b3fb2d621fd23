"""Choose the checkpoint interval from what a checkpoint costs and how often things fail (Young and Daly).

Pure. With cost C and mean time between failures M, the time lost to checkpoints and replay is least at about sqrt(2·C·M)
(Young). Daly's higher-order form is used, which stays right when C is not small against M. A recovery-time goal bounds the
interval, too: at most the work of one interval is replayed after a failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

INTERVAL_MIN_US: Final = 100_000
INTERVAL_MAX_US: Final = 3_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalFacts:
    """Measurements and goals."""

    cost_us: float
    """The time that one checkpoint takes from the pipeline's work, without what happens in the background."""
    failure_every_us: float
    """The mean time between failures."""
    restore_us: float = 0.0
    """The time that a restart takes before work resumes."""
    replay_ratio: float = 1.0
    """The speed of replay relative to live reading: 1 is as fast."""
    recovery_goal_us: float | None = None
    """The time after a failure within which the pipeline should have caught up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    """The interval and its expected costs."""

    interval_us: int
    overhead: float
    """The share of time lost to checkpoints, replay and restarts."""
    recovery_us: float
    """The expected time to catch up after a failure, at worst."""
    because: str


def young_daly_us(cost_us: float, failure_every_us: float) -> float:
    """Return Daly's estimate of the best interval between checkpoints."""
    if cost_us <= 0:
        return 0.0
    if cost_us >= 2 * failure_every_us:
        return failure_every_us
    root = math.sqrt(cost_us / (2 * failure_every_us))
    return math.sqrt(2 * cost_us * failure_every_us) * (1 + root / 3 + root * root / 9) - cost_us


def overhead(interval_us: float, facts: IntervalFacts) -> float:
    """Return the expected share of time lost with this interval."""
    replay_us = interval_us / 2 / max(facts.replay_ratio, 1e-9)
    lost = facts.cost_us / max(interval_us, 1.0) + (replay_us + facts.restore_us) / facts.failure_every_us
    return min(lost, 1.0)


def choose(facts: IntervalFacts) -> IntervalChoice:
    """Choose the interval."""
    best_us = young_daly_us(facts.cost_us, facts.failure_every_us)
    because = "least time lost to checkpoints and failures"
    if facts.recovery_goal_us is not None:
        allowed_us = max(facts.recovery_goal_us - facts.restore_us, 0.0) * facts.replay_ratio
        if allowed_us < best_us:
            best_us, because = allowed_us, "the recovery-time goal"
    interval_us = int(min(max(best_us, INTERVAL_MIN_US), INTERVAL_MAX_US))
    if interval_us == INTERVAL_MIN_US and best_us < INTERVAL_MIN_US:
        because = "the shortest interval there is"
    recovery_us = facts.restore_us + interval_us / max(facts.replay_ratio, 1e-9)
    return IntervalChoice(
        interval_us=interval_us, overhead=overhead(interval_us, facts), recovery_us=recovery_us, because=because
    )
