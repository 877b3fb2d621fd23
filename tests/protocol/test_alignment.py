from __future__ import annotations

from fordstone.plan.ids import Attempt
from fordstone.protocol.alignment import Alignment, Arrival, Overtaking


def arrivals(alignment, *pairs):
    return [alignment.arrive(channel, Attempt(attempt)) for channel, attempt in pairs]


def test_the_cut_is_where_the_last_barrier_comes():
    alignment = Alignment(3, hold=True)
    assert arrivals(alignment, (0, 1), (2, 1), (1, 1)) == [Arrival.WAITING, Arrival.WAITING, Arrival.SNAPSHOT]


def test_a_channel_is_held_from_its_barrier_until_the_last_one():
    alignment = Alignment(2, hold=True)
    alignment.arrive(0, Attempt(1))
    assert (alignment.held(0), alignment.held(1)) == (True, False)
    alignment.arrive(1, Attempt(1))
    assert (alignment.held(0), alignment.held(1)) == (False, False)


def test_without_holding_rows_of_the_next_epoch_pass():
    alignment = Alignment(2, hold=False)
    alignment.arrive(0, Attempt(1))
    assert not alignment.held(0)
    assert alignment.arrive(1, Attempt(1)) == Arrival.SNAPSHOT


def test_a_newer_attempt_releases_what_an_older_one_held():
    alignment = Alignment(3, hold=True)
    arrivals(alignment, (0, 1), (1, 1))
    assert alignment.arrive(2, Attempt(2)) == Arrival.WAITING
    assert [alignment.held(channel) for channel in range(3)] == [False, False, True]
    assert arrivals(alignment, (2, 1), (0, 2), (1, 2)) == [Arrival.STALE, Arrival.WAITING, Arrival.SNAPSHOT]


def test_a_barrier_of_a_finished_attempt_is_stale():
    alignment = Alignment(1, hold=True)
    assert arrivals(alignment, (0, 1), (0, 1)) == [Arrival.SNAPSHOT, Arrival.STALE]


def test_a_back_edge_is_not_waited_for_and_closes_the_log_when_its_barrier_returns():
    alignment = Alignment(3, hold=True, back=frozenset({2}))
    assert arrivals(alignment, (0, 1), (1, 1), (2, 1)) == [Arrival.WAITING, Arrival.SNAPSHOT, Arrival.RETURNED]
    assert not alignment.held(2)


def test_a_barrier_that_comes_around_after_its_attempt_was_given_up_is_stale():
    alignment = Alignment(2, hold=True, back=frozenset({1}))
    assert arrivals(alignment, (0, 1), (0, 2), (1, 1), (1, 2)) == [
        Arrival.SNAPSHOT,
        Arrival.SNAPSHOT,
        Arrival.STALE,
        Arrival.RETURNED,
    ]


def test_an_overtaking_barrier_snapshots_at_once_and_logs_the_other_channels():
    overtaking = Overtaking(3)
    assert overtaking.arrive(1, Attempt(1)) == Arrival.SNAPSHOT
    assert [overtaking.logging(channel) for channel in range(3)] == [True, False, True]
    assert overtaking.arrive(0, Attempt(1)) == Arrival.WAITING
    assert not overtaking.logging(0)
    assert overtaking.arrive(2, Attempt(1)) == Arrival.LOGGED
    assert overtaking.complete


def test_the_only_channel_has_nothing_to_log():
    overtaking = Overtaking(1)
    assert overtaking.arrive(0, Attempt(1)) == Arrival.SNAPSHOT
    assert overtaking.complete


def test_a_newer_overtaking_barrier_starts_over_and_the_older_is_stale():
    overtaking = Overtaking(2)
    overtaking.arrive(0, Attempt(1))
    assert overtaking.arrive(0, Attempt(2)) == Arrival.SNAPSHOT
    assert overtaking.arrive(1, Attempt(1)) == Arrival.STALE
    assert overtaking.arrive(1, Attempt(2)) == Arrival.LOGGED
