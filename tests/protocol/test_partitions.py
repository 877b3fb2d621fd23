from __future__ import annotations

from dataclasses import replace

import pytest

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.protocol.partitions import (
    Change,
    Follower,
    PartitionFacts,
    SeriesMember,
    SeriesPlace,
    SourceState,
    decide,
    followers,
    joined_floor_us,
    partition_watermark_us,
    reached_us,
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


@pytest.mark.parametrize(
    ("before", "waited", "ended", "reached"),
    [
        # The least that is waited for, whatever ended.
        (5, [9, 7], [], 7),
        (5, [9, 7], [20], 7),
        (5, [TIME_MIN_US, 7], [20], 5),
        (5, [3], [20], 5),
        # Nothing is waited for: the furthest that ended.
        (5, [], [9, 20, 7], 20),
        (5, [], [3], 5),
        (5, [], [TIME_MIN_US], 5),
        # All are idle.
        (5, [], [], 5),
        (TIME_MIN_US, [], [], TIME_MIN_US),
    ],
)
def test_how_far_time_has_come_where_watermarks_meet(
    before: int, waited: list[int], ended: list[int], reached: int
) -> None:
    assert reached_us(before, waited=waited, ended=ended) == reached


H, DAY = 60, 24 * 60


def file(
    name: str, first: int | None = None, last: int | None = None, *, at_end: bool = True, beside: str = ""
) -> SeriesMember:
    """A file of a series by its name up to a dot, with rows from `first` to `last`."""
    series, _, order = name.partition(".")
    return SeriesMember(
        partition=name,
        places=(SeriesPlace(series=series, order=order),),
        first_us=TIME_MAX_US if first is None else first,
        max_time_us=TIME_MIN_US if last is None else last,
        at_end=at_end,
        grew_beside=beside,
    )


ROLLED = [file("a.2", 20, 29), file("a.0", 0, 9), file("a.1", 10, 19)]


@pytest.mark.parametrize(
    ("members", "lateness_us", "found"),
    [
        # In any order; only the newest of each series is not continued.
        (ROLLED, 0, {"a.0": 10, "a.1": 20}),
        ([file("a.0", 0, 9), file("a.1", 9, 19)], 0, {"a.0": 9}),
        ([file("a.0", 0, 9), file("b.1", 10, 19)], 0, {}),
        ([file("a.0", 0, 9)], 0, {}),
        # Out of order at the seam, by as much as the lateness.
        ([file("a.0", 0, 10), file("a.1", 8, 19)], 0, {}),
        ([file("a.0", 0, 10), file("a.1", 8, 19)], 2, {"a.0": 8}),
        # Files that had no rows yet say nothing, but those before and after them do.
        ([file("a.0", 0, 9), file("a.1")], 0, {}),
        ([file("a.0", 0, 9), file("a.1"), file("a.2", 20, 29)], 0, {"a.0": 20, "a.1": 20}),
        # Devices: two that overlap show that none of them is continued.
        ([file("d.1", 0, 50), file("d.2", 0, 60)], 0, {}),
        ([file("d.1", 0, 50), file("d.2", 0, 60)], 1000, {}),
        ([file("d.1", 0, 50), file("d.2", 60, 70), file("d.3", 10, 90)], 0, {}),
        ([file("d.1", 0, 50), file("d.2", 60, 90), file("d.3", 65, 90)], 0, {}),
        ([file("d.1", 50, 90), file("d.2", 0, 40)], 0, {}),
        # One that grew although a later one had rows is not continued, unless the series is certain. Rows that are older than its
        # newest overlap it then.
        ([file("d.1", 0, 50, beside="d.2"), file("d.2", 60, 90)], 0, {}),
        ([file("d.1", 0, 50, beside="d.2"), file("d.2", 60, 90), file("d.3", 100, 120)], 0, {"d.2": 100}),
        ([*ROLLED, file("a.3", 30, 39), file("a.4", 40, 49, beside="a.5"), file("a.5", 48, 59)], 5, {}),
        (
            [*ROLLED, file("a.3", 30, 39, beside="a.4"), file("a.4", 40, 49)],
            5,
            {"a.0": 10, "a.1": 20, "a.2": 30, "a.3": 40},
        ),
        # It grew beside a file of another series.
        ([file("d.1", 0, 50, beside="e.1"), file("d.2", 60, 90)], 0, {"d.1": 60}),
    ],
)
def test_which_partitions_another_one_continues(members: list[SeriesMember], lateness_us: int, found: dict[str, int]):
    assert {name: one.first_us for name, one in followers(members, lateness_us).items()} == found


@pytest.mark.parametrize(
    ("members", "certain"),
    [
        (ROLLED, True),
        # A long pause does not matter, once the series is certain; and two files, or one pause that is short, do not make it so.
        ([*ROLLED, file("a.3", 500, 509)], True),
        ([file("a.0", 0, 9), file("a.1", 10, 19)], False),
        ([file("a.0", 0, 9), file("a.1", 10, 19), file("a.2", 500, 509)], False),
        ([file("d.1", 0, 9), file("d.2", 500, 509), file("d.3", 1000, 1009)], False),
        # A pause as long as what the file covers is short; one that is longer is not.
        ([file("a.0", 0, 10), file("a.1", 20, 30), file("a.2", 40, 50)], True),
        ([file("a.0", 0, 10), file("a.1", 21, 30), file("a.2", 40, 50)], False),
        ([file("a.0", 0, 0), file("a.1", 1, 1), file("a.2", 2, 2)], False),
        # Of files that are not read to their end it is not known whether they overlap.
        ([file("a.0", 0, 9), file("a.1", 10, 19, at_end=False), file("a.2", 20, 29)], False),
        # Devices that grow, where their clocks make them look like rolled files for a moment.
        ([file("d.1", 0, 9), file("d.2", 10, 19, beside="d.3"), file("d.3", 20, 29)], False),
    ],
)
def test_a_series_is_certain_when_three_files_follow_one_another_closely(members: list[SeriesMember], certain: bool):
    assert {one.certain for one in followers(members, 0).values()} == {certain}


def test_in_a_declared_series_each_later_partition_continues_the_earlier_ones():
    declared = SeriesPlace(series="a", order="0", declared=True)
    members = [
        SeriesMember(partition="a.0", places=(declared,), first_us=0, max_time_us=50),
        SeriesMember(partition="a.1", places=(replace(declared, order="1"),)),
    ]
    assert followers(members, 0) == {"a.0": Follower(partition="a.1", first_us=TIME_MAX_US, certain=True)}


def test_a_partition_is_continued_in_any_series_that_its_times_confirm():
    """`2026-01-01/dev-1` and `2026-01-01/dev-2` overlap; `2026-01-02/dev-1` continues the first."""

    def day(device: int, number: int) -> SeriesMember:
        places = (
            SeriesPlace(series=f"{number}/dev-#", order=str(device)),
            SeriesPlace(series=f"#/dev-{device}", order=str(number)),
            SeriesPlace(series="#/dev-#", order=f"{number}/{device}"),
        )
        return SeriesMember(
            partition=f"{number}/dev-{device}",
            places=places,
            first_us=number * DAY,
            max_time_us=(number + 1) * DAY - 1,
            at_end=True,
        )

    members = [day(device, number) for device in (1, 2) for number in (1, 2, 3)]
    assert followers(members, H) == {
        f"{n}/dev-{device}": Follower(partition=f"{n + 1}/dev-{device}", first_us=(n + 1) * DAY, certain=True)
        for n in (1, 2)
        for device in (1, 2)
    }
