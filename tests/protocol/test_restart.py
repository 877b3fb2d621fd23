from __future__ import annotations

from fordstone.protocol.retry import RestartAfter, RestartPolicy, Stop, decide_restart

POLICY = RestartPolicy(failures_max=3, wait_first_us=100, wait_max_us=300, forgiven_after_us=10_000)


def test_the_wait_doubles_up_to_its_bound_and_then_it_stops():
    waits = [decide_restart(POLICY, failures=count, lasted_us=0, chance=1.0) for count in range(4)]
    assert waits == [RestartAfter(100, 1), RestartAfter(200, 2), RestartAfter(300, 3), Stop(4)]


def test_a_run_that_lasted_forgives_the_failures_before_it():
    assert decide_restart(POLICY, failures=3, lasted_us=10_000, chance=1.0) == RestartAfter(100, 1)


def test_a_night_of_failures_makes_no_huge_number():
    patient = RestartPolicy(failures_max=10**9)
    assert decide_restart(patient, failures=10**6, lasted_us=0, chance=1.0) == RestartAfter(
        patient.wait_max_us, 10**6 + 1
    )


def test_restarts_of_many_nodes_are_spread():
    assert decide_restart(POLICY, failures=1, lasted_us=0, chance=0.0) == RestartAfter(100, 2)
    assert decide_restart(POLICY, failures=1, lasted_us=0, chance=0.5) == RestartAfter(150, 2)


def test_a_failure_that_repeats_stops_at_the_second_time_unless_a_long_run_lies_between():
    assert decide_restart(POLICY, failures=0, lasted_us=0, chance=1.0, repeated=True) == RestartAfter(100, 1)
    assert decide_restart(POLICY, failures=1, lasted_us=0, chance=1.0, repeated=True) == Stop(2)
    assert decide_restart(POLICY, failures=1, lasted_us=10_000, chance=1.0, repeated=True) == RestartAfter(100, 1)
