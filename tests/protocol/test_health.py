"""What counts as healthy: a table of facts."""

from __future__ import annotations

from typing import Any

import pytest

from fordstone.protocol.health import HealthFacts, PipelineState, judge_health

S = 1_000_000
MINUTE = 60 * S
NOW = 3_600 * 24 * 10 * S
RUNNING: dict[str, Any] = {"progressed_us": NOW - S, "interval_us": S}


@pytest.mark.parametrize(
    ("facts", "state", "problem", "ready"),
    [
        ({}, "starting", None, False),
        ({"restarts": 1}, "restarting", None, False),
        ({"given_up": True}, "failed", "not started again", False),
        (RUNNING | {"given_up": True}, "failed", "not started again", False),
        (RUNNING, "running", None, True),
        (RUNNING | {"over": True}, "stopped", None, False),
        (RUNNING | {"stopping": True, "progressed_us": NOW - 4 * MINUTE}, "stopping", None, False),
        (RUNNING | {"progressed_us": NOW - 3 * MINUTE}, "running", None, True),
        (RUNNING | {"progressed_us": NOW - 4 * MINUTE}, "running", "it hangs: it has reported nothing for 4m", False),
        # A hub that is away for days, and an outbox that is full.
        (RUNNING | {"waits_for": "hub", "waits_since_us": 0}, "waiting", None, True),
        (RUNNING | {"waits_for": "hub", "unsealed_since_us": 0}, "waiting", None, True),
        (RUNNING | {"waits_for": "disk", "waits_since_us": NOW - 59 * S}, "waiting", None, True),
        (RUNNING | {"waits_for": "disk", "waits_since_us": NOW - 61 * S}, "waiting", "the disk", False),
        # A state beyond its limit: only what holds time back is read, and epochs are sealed.
        (RUNNING | {"waits_for": "state", "waits_since_us": 0}, "waiting", None, True),
        (
            RUNNING | {"waits_for": "state", "unsealed_since_us": NOW - 21 * MINUTE},
            "waiting",
            "no epoch for 21m",
            False,
        ),
        (RUNNING | {"waits_for": "sink", "unsealed_since_us": NOW - 21 * MINUTE}, "waiting", "no epoch", False),
        (RUNNING | {"unsealed_since_us": NOW - 19 * MINUTE}, "running", None, True),
        (RUNNING | {"unsealed_since_us": NOW - 21 * MINUTE}, "running", "no epoch for 21m", False),
        # An interval of an hour: 30 of them may pass.
        (RUNNING | {"unsealed_since_us": NOW - 29 * 60 * MINUTE, "interval_us": 60 * MINUTE}, "running", None, True),
        (
            RUNNING | {"unsealed_since_us": NOW - 31 * 60 * MINUTE, "interval_us": 60 * MINUTE},
            "running",
            "no ep",
            False,
        ),
    ],
)
def test_health_is_judged_by_what_a_restart_or_an_alarm_could_change(
    facts: dict[str, Any], state: PipelineState, problem: str | None, ready: bool
) -> None:
    verdict = judge_health(HealthFacts(now_us=NOW, **facts))
    assert (verdict.state, verdict.ready) == (state, ready)
    if problem is None:
        assert verdict.problem is None
    else:
        assert problem in str(verdict.problem)
