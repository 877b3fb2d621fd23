from __future__ import annotations

import pytest

from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.partitions import (
    Change,
    PartitionFacts,
    SourceState,
    decide,
    joined_floor_us,
    partition_watermark_us,
    source_state,
)

IDLE_AFTER_US = 100


@pytest.mark.parametrize(
    ("facts", "change"),
    [
        # Read now.
        ({}, Change.NONE),
        ({"silent_us": 99}, Change.NONE),
        ({"silent_us": 100}, Change.IDLE),
        ({"silent_us": 100, "starting": True}, Change.IDLE),
        ({"silent_us": 100, "has_rows": True}, Change.NONE),
        ({"silent_us": 100, "bounded": True}, Change.NONE),
        ({"silent_us": 100, "unknown": True}, Change.NONE),
        ({"finished": True}, Change.IDLE),
        ({"finished": True, "has_rows": True}, Change.NONE),
        ({"finished": True, "bounded": True}, Change.NONE),
        # Idle.
        ({"idle": True}, Change.NONE),
        ({"idle": True, "silent_us": 100}, Change.NONE),
        ({"idle": True, "finished": True}, Change.NONE),
        ({"idle": True, "starting": True}, Change.NONE),
        ({"idle": True, "has_rows": True}, Change.RETURN),
        ({"idle": True, "bounded": True}, Change.RETURN),
        # Done.
        ({"done": True}, Change.NONE),
        ({"done": True, "has_rows": True}, Change.NONE),
        ({"done": True, "starting": True}, Change.NONE),
        ({"done": True, "starting": True, "has_rows": True}, Change.RETURN),
        ({"done": True, "starting": True, "bounded": True}, Change.NONE),
        ({"done": True, "silent_us": 100}, Change.NONE),
    ],
)
def test_what_becomes_of_a_partition(facts: dict[str, bool], change: Change) -> None:
    assert decide(PartitionFacts(**facts), IDLE_AFTER_US) is change


def test_without_idle_after_only_the_source_makes_a_partition_idle() -> None:
    assert decide(PartitionFacts(silent_us=1 << 60), None) is Change.NONE
    assert decide(PartitionFacts(finished=True), None) is Change.IDLE


@pytest.mark.parametrize(
    ("floor_us", "source_us", "expected"),
    [(TIME_MIN_US, 7, 7), (5, 7, 7), (9, 7, 9), (TIME_MIN_US, TIME_MIN_US, TIME_MIN_US)],
)
def test_a_partition_that_joins_or_returns_has_the_watermark_of_its_source_as_floor(
    floor_us: int, source_us: int, expected: int
) -> None:
    assert joined_floor_us(floor_us, source_us) == expected


@pytest.mark.parametrize(
    ("max_time_us", "floor_us", "expected"),
    [(TIME_MIN_US, TIME_MIN_US, TIME_MIN_US), (TIME_MIN_US, 3, 3), (20, 3, 10), (12, 3, 3)],
)
def test_time_of_a_partition_is_its_largest_less_the_lateness_and_never_below_the_floor(
    max_time_us: int, floor_us: int, expected: int
) -> None:
    assert partition_watermark_us(max_time_us, floor_us, 10) == expected


READ, IDLE, DONE = (False, False), (True, False), (False, True)


@pytest.mark.parametrize(
    ("partitions", "unbounded", "bounded"),
    [
        ([], SourceState.IDLE, SourceState.ENDED),
        ([READ], SourceState.OPEN, SourceState.OPEN),
        ([IDLE], SourceState.IDLE, SourceState.IDLE),
        ([DONE], SourceState.IDLE, SourceState.ENDED),
        ([READ, IDLE], SourceState.OPEN, SourceState.OPEN),
        ([READ, DONE], SourceState.OPEN, SourceState.OPEN),
        ([IDLE, DONE], SourceState.IDLE, SourceState.IDLE),
        ([DONE, DONE], SourceState.IDLE, SourceState.ENDED),
    ],
)
def test_what_a_source_waits_for(
    partitions: list[tuple[bool, bool]], unbounded: SourceState, bounded: SourceState
) -> None:
    assert source_state(partitions, bounded=False) is unbounded
    assert source_state(partitions, bounded=True) is bounded
