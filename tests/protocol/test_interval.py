from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.interval import (
    INTERVAL_MAX_US,
    INTERVAL_MIN_US,
    IntervalFacts,
    choose,
    overhead,
    young_daly_us,
)

DAY_US = 86_400_000_000
FACTS = IntervalFacts(cost_us=20_000, failure_every_us=DAY_US)


def test_a_cheap_checkpoint_is_near_youngs_root():
    assert math.isclose(young_daly_us(20_000, DAY_US), math.sqrt(2 * 20_000 * DAY_US), rel_tol=1e-3)


def test_a_checkpoint_dearer_than_the_time_between_failures_waits_for_a_failure():
    assert young_daly_us(3_000_000, 1_000_000) == 1_000_000


@given(cost=st.floats(1, 1e7), every=st.floats(1e8, 1e13))
def test_no_interval_near_the_chosen_one_loses_less(cost, every):
    best = young_daly_us(cost, every)
    facts = IntervalFacts(cost_us=cost, failure_every_us=every)
    for other in (best / 3, best * 3):
        assert overhead(best, facts) <= overhead(other, facts)


def test_a_recovery_goal_shortens_the_interval():
    choice = choose(replace(FACTS, recovery_goal_us=5_000_000, restore_us=1_000_000))
    assert choice.interval_us == 4_000_000
    assert choice.because == "the recovery-time goal"
    assert choice.recovery_us <= 5_000_000


def test_replay_that_is_faster_than_live_allows_a_longer_interval():
    goal = replace(FACTS, recovery_goal_us=5_000_000, replay_ratio=10.0)
    assert choose(goal).interval_us == 50_000_000


@given(cost=st.floats(0, 1e12), every=st.floats(1, 1e15))
def test_the_interval_stays_within_its_bounds(cost, every):
    chosen = choose(IntervalFacts(cost_us=cost, failure_every_us=every))
    assert INTERVAL_MIN_US <= chosen.interval_us <= INTERVAL_MAX_US
    assert 0 <= chosen.overhead <= 1
