from __future__ import annotations

from dataclasses import replace

import pytest

from fordstone.protocol.pacing import Begin, GiveUp, Pace, PacingFacts, Seal, Wait, decide

PACE = Pace(interval_us=1_000, timeout_us=5_000)
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
        ({"running": True, "missing": 0}, Seal()),
        ({"running": True, "missing": 2, "stopping": True}, Wait(14_500)),
        ({"committing": True, "stopping": True}, Wait(11_000)),
    ],
)
def test_what_the_facts_call_for(change, decision):
    assert decide(PACE, replace(REST, **change)) == decision
