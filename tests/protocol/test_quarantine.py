from __future__ import annotations

import pytest

from fordstone.protocol.quarantine import (
    NothingToSkip,
    Readable,
    ReadLimits,
    Skip,
    SkipFacts,
    SkipTooFar,
    SkipTooShort,
    decide_skip,
    is_waived,
    open_gaps,
    readable,
)


def skips(*ranges: tuple[int, int]) -> tuple[Skip, ...]:
    return tuple(Skip(first=first, last=last) for first, last in ranges)


@pytest.mark.parametrize(
    ("position", "limits", "after", "until"),
    [
        (10, ReadLimits(), 10, None),
        # In quarantine: what is before it is read, and nothing from it on.
        (10, ReadLimits(quarantined=25), 10, 24),
        (24, ReadLimits(quarantined=25), 24, 24),
        (30, ReadLimits(quarantined=25), 30, 30),
        (0, ReadLimits(quarantined=1), 0, 0),
        # A range is passed over only by readers that have come to it.
        (10, ReadLimits(skips=skips((25, 27))), 10, 24),
        (24, ReadLimits(skips=skips((25, 27))), 27, None),
        (26, ReadLimits(skips=skips((25, 27))), 27, None),
        (27, ReadLimits(skips=skips((25, 27))), 27, None),
        (30, ReadLimits(skips=skips((25, 27))), 30, None),
        # Ranges that follow each other are passed over together, others one after the other.
        (24, ReadLimits(skips=skips((28, 30), (25, 27))), 30, None),
        (24, ReadLimits(skips=skips((25, 27), (40, 41))), 27, 39),
        (24, ReadLimits(quarantined=29, skips=skips((25, 27))), 27, 28),
        # An empty range moves nobody.
        (22, ReadLimits(skips=skips((23, 22))), 22, None),
    ],
)
def test_a_reader_goes_on_after_what_is_skipped_and_stops_before_what_is_in_quarantine(position, limits, after, until):
    assert readable(position, limits) == Readable(after=after, until=until)


def test_a_position_up_to_the_end_of_a_skip_is_not_compared_with_the_log():
    assert is_waived(22, skips((23, 22)))
    assert is_waived(10, skips((23, 27)))
    assert not is_waived(28, skips((23, 27)))
    assert not is_waived(1, ())


@pytest.mark.parametrize(
    ("facts", "until", "decision"),
    [
        (SkipFacts(head=30, quarantined=25), 25, Skip(first=25, last=25)),
        (SkipFacts(head=30, quarantined=25), 27, Skip(first=25, last=27)),
        (SkipFacts(head=30, quarantined=25), 30, Skip(first=25, last=30)),
        (SkipFacts(head=30, quarantined=25), 31, SkipTooFar(30)),
        (SkipFacts(head=30, quarantined=25), 23, SkipTooShort(24)),
        (SkipFacts(head=30, quarantined=0), 27, NothingToSkip()),
        # What was read before is other content now: it is taken for granted, and nothing is passed over.
        (SkipFacts(head=30, quarantined=23), 22, Skip(first=23, last=22)),
        (SkipFacts(head=10, quarantined=23), 22, Skip(first=23, last=22)),
        (SkipFacts(head=10, quarantined=23), 30, SkipTooFar(22)),
        # Lost epochs are passed over whole.
        (SkipFacts(head=30, quarantined=0, lost=[(11, 14)]), 14, Skip(first=11, last=14)),
        (SkipFacts(head=30, quarantined=11, lost=[(11, 14)]), 14, Skip(first=11, last=14)),
        (SkipFacts(head=30, quarantined=12, lost=[(11, 14)]), 13, SkipTooShort(14)),
        (SkipFacts(head=30, quarantined=0, lost=[(11, 14)], skips=skips((11, 14))), 20, NothingToSkip()),
        (
            SkipFacts(head=30, quarantined=0, lost=[(11, 14), (20, 21)], skips=skips((11, 14))),
            21,
            Skip(first=20, last=21),
        ),
    ],
)
def test_a_skip_begins_where_readers_stop_and_ends_where_they_can_go_on(facts, until, decision):
    assert decide_skip(facts, until) == decision


def test_a_gap_is_open_until_one_skip_covers_all_of_it():
    lost = [(3, 5), (8, 9), (12, 12)]
    assert open_gaps(lost, ()) == lost
    assert open_gaps(lost, skips((3, 4), (5, 5), (7, 9))) == [(3, 5), (12, 12)]
