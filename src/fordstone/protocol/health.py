"""Judge whether a pipeline is healthy, for probes that restart its process or raise an alarm, and whether it is ready. Pure.

A pipeline is unhealthy when it does not get on although it could: it was given up, it hangs, the disk rejects writes, or rows that it has read are not
sealed. A hub that is away, for days even, is normal at the edge, and so is a start that takes long: a restart would only repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fordstone.lang.duration import human_us

PipelineState = Literal["starting", "restarting", "running", "waiting", "stopping", "stopped", "failed"]
WaitsFor = Literal["disk", "hub", "sink", "state"]
"""What has to change before a pipeline reads and seals as usual; `state`: it is larger than its limit (`protocol.state_limit`)."""

SILENT_MAX_US: Final = 180_000_000
"""A pipeline that runs reports progress at least every few seconds. After this time without, it hangs."""
DISK_WAIT_MAX_US: Final = 60_000_000
"""How long a disk may reject writes: it may be full for a moment, while others clean up."""
UNSEALED_INTERVALS: Final = 30
UNSEALED_MIN_US: Final = 1_200_000_000
"""Rows are to be sealed within this number of intervals, and this time at least: two checkpoints that timed out by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    """What is known of one pipeline. Times are those of one monotonic clock; None: it is not so."""

    now_us: int
    given_up: bool = False
    """It has failed, and nothing starts it again."""
    over: bool = False
    """It has ended as it should."""
    stopping: bool = False
    restarts: int = 0
    """How often it has failed and was started again."""
    progressed_us: int | None = None
    """When it last reported progress; None: not since it was started."""
    waits_for: WaitsFor | None = None
    waits_since_us: int = 0
    unsealed_since_us: int | None = None
    """Since when there are rows that were read and are not sealed."""
    interval_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state of a pipeline. It is healthy if there is no problem."""

    state: PipelineState
    problem: str | None = None
    """In a few fixed words, with nothing from paths, rows or errors: probes are not authenticated."""
    ready: bool = False
    """It has started, and reads and seals, or waits for something outside."""


def judge_health(facts: HealthFacts) -> Verdict:
    """Judge one pipeline."""
    if facts.given_up:
        return Verdict(state="failed", problem="it has failed and is not started again")
    if facts.over:
        return Verdict(state="stopped")
    if facts.stopping:
        return Verdict(state="stopping")
    if facts.progressed_us is None:
        return Verdict(state="restarting" if facts.restarts else "starting")
    state: PipelineState = "running" if facts.waits_for is None else "waiting"
    problem = _problem(facts, facts.now_us - facts.progressed_us)
    return Verdict(state=state, problem=problem, ready=problem is None)


def _problem(facts: HealthFacts, silent_us: int) -> str | None:
    if silent_us > SILENT_MAX_US:
        return f"it hangs: it has reported nothing for {_about(silent_us)}"
    waited_us = facts.now_us - facts.waits_since_us
    if facts.waits_for == "disk" and waited_us > DISK_WAIT_MAX_US:
        return f"the disk has rejected writes for {_about(waited_us)}"
    if facts.waits_for == "hub" or facts.unsealed_since_us is None:
        return None
    unsealed_us = facts.now_us - facts.unsealed_since_us
    if unsealed_us > max(UNSEALED_INTERVALS * facts.interval_us, UNSEALED_MIN_US):
        return f"it has read rows, and has sealed no epoch for {_about(unsealed_us)}"
    return None


def _about(span_us: int) -> str:
    return human_us(span_us // 1_000_000 * 1_000_000)
