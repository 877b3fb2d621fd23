from __future__ import annotations

from dataclasses import replace

import pytest

from fordstone.protocol.pacing import (
    IDLE_INTERVAL_US,
    Begin,
    GiveUp,
    Pace,
    PacingFacts,
    Seal,
    Wait,
    decide,
    idle_interval_us,
)

PACE = Pace(interval_us=1_000, timeout_us=5_000, idle_interval_us=60_000)
REST = PacingFacts(
    now_us=10_000,
    started_us=9_500,
    running=False,
    missing=0,
    committing=False,
    requested=False,
    drained=False,
    stopping=False,
)


@pytest.mark.parametrize(
    ("change", "decision"),
    [
        ({}, Wait(10_500)),
        ({"started_us": 9_000}, Begin(last=False)),
        ({"requested": True}, Begin(last=False)),
        ({"drained": True}, Begin(last=True)),
        ({"stopping": True}, Begin(last=True)),
        ({"running": True, "missing": 2}, Wait(14_500)),
        ({"running": True, "missing": 2, "started_us": 5_000}, GiveUp()),
        ({"running": True, "missing": 2, "started_us": 5_000, "given_up": 1}, Wait(15_000)),
        ({"running": True, "missing": 2, "started_us": -90_000, "given_up": 4}, GiveUp()),
        ({"running": True, "missing": 2, "given_up": 1_000}, Wait(9_500 + 5_000 * 1_024)),
        ({"running": True, "missing": 0}, Seal()),
        ({"running": True, "missing": 2, "stopping": True}, Wait(14_500)),
        ({"committing": True, "stopping": True}, Wait(11_000)),
        ({"idle": True}, Wait(10_500)),
        ({"idle": True, "started_us": 9_000}, Wait(11_000)),
        ({"idle": True, "started_us": -49_500}, Wait(10_500)),
        ({"idle": True, "started_us": -50_000}, Begin(last=False)),
        ({"piled_up": True}, Wait(10_500)),
        ({"piled_up": True, "started_us": -50_000}, Begin(last=False)),
        ({"idle": True, "requested": True}, Begin(last=False)),
        ({"idle": True, "drained": True}, Begin(last=True)),
        ({"idle": True, "stopping": True}, Begin(last=True)),
    ],
)
def test_what_the_facts_call_for(change, decision):
    assert decide(PACE, replace(REST, **change)) == decision


@pytest.mark.parametrize("idle_interval_us", [0, 999, 1_000])
def test_an_interval_that_is_longer_than_the_one_for_idle_pipelines_is_not_made_shorter(idle_interval_us):
    pace = replace(PACE, idle_interval_us=idle_interval_us)
    assert decide(pace, replace(REST, idle=True)) == Wait(10_500)
    assert decide(pace, replace(REST, idle=True, started_us=9_000)) == Begin(last=False)


@pytest.mark.parametrize(
    ("max_ahead_us", "offline_us", "interval_us"),
    [
        ([], [], IDLE_INTERVAL_US),
        ([3_600_000_000], [86_400_000_000], IDLE_INTERVAL_US),
        ([3_600_000_000, 6_000_000], [], 100_000),
        ([], [40_000_000, 86_400_000_000], 10_000_000),
    ],
)
def test_idle_pipelines_have_barriers_often_enough_for_what_goes_by_them(max_ahead_us, offline_us, interval_us):
    assert idle_interval_us(max_ahead_us=max_ahead_us, offline_us=offline_us) == interval_us
