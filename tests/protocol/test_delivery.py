from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.chain import PositionJudgement
from fordstone.protocol.delivery import (
    Accept,
    AlreadyDone,
    CommitDecision,
    CommitFacts,
    Gap,
    Missing,
    NotGranted,
    OtherContent,
    Sent,
    Stale,
    decide_commit,
)
from fordstone.protocol.lease import Fence

FITS, BEYOND, DIFFERS, UNKNOWN = PositionJudgement
NOW = Fence(2, 5)
THERE = {1: "d1", 2: "d2", 3: "d3"}


def facts(first: int, last: int, **changes: Any) -> CommitFacts:
    given_: dict[str, Any] = {
        "fence": NOW,
        "granted": NOW,
        "head": 3,
        "known": THERE,
        "sent": tuple(Sent(epoch, f"d{epoch}") for epoch in range(first, last + 1)),
    }
    return CommitFacts(**given_ | changes)


TABLE: dict[str, tuple[CommitFacts, set[str], CommitDecision]] = {
    "the next epoch": (facts(4, 4), set(), Accept(first_new=4)),
    "the next few": (facts(4, 9), set(), Accept(first_new=4)),
    "the very first": (facts(1, 1, head=0, known={}), set(), Accept(first_new=1)),
    "merged again over what is there": (facts(2, 6), set(), Accept(first_new=4)),
    "all there": (facts(2, 3), set(), AlreadyDone()),
    "all there, blobs gone since": (facts(2, 3), {"x"}, AlreadyDone()),
    "there with other content": (facts(3, 3, known={3: "other"}), set(), OtherContent(epoch=3)),
    "other content below what is new": (facts(2, 6, known={2: "d2", 3: "other"}), set(), OtherContent(epoch=3)),
    "too old to be known": (facts(1, 2, known={3: "d3"}), set(), AlreadyDone()),
    "one left out": (facts(5, 6), set(), Gap(next_epoch=4)),
    "not from the beginning": (facts(2, 2, head=0, known={}), set(), Gap(next_epoch=1)),
    "it continues what is there": (facts(4, 4, after=FITS), set(), Accept(first_new=4)),
    "it continues something else": (facts(4, 4, after=DIFFERS), set(), OtherContent(epoch=3)),
    "too old to know what it continues": (facts(2, 4, after=UNKNOWN), set(), Accept(first_new=4)),
    "after a restore": (facts(6, 7, after=BEYOND, resync=True), set(), Accept(first_new=6, lost_from=4)),
    "after a restore, nothing is lost": (facts(4, 7, after=FITS, resync=True), set(), Accept(first_new=4)),
    "after a restore, to other content": (
        facts(4, 7, after=DIFFERS, resync=True),
        set(),
        OtherContent(epoch=3),
    ),
    "after a restore, without a chain": (facts(6, 7, resync=True), set(), Gap(next_epoch=4)),
    "one left out, with a chain": (facts(6, 7, after=BEYOND), set(), Gap(next_epoch=4)),
    "blobs to come": (facts(4, 4), {"y", "x"}, Missing(digests=("x", "y"))),
    "a gap counts before blobs": (facts(5, 5), {"x"}, Gap(next_epoch=4)),
    "an older hub generation": (facts(4, 4, fence=Fence(1, 9)), set(), Stale(by=NOW)),
    "an older incarnation": (facts(4, 4, fence=Fence(2, 4)), set(), Stale(by=NOW)),
    "shut out, of what is there": (facts(3, 3, fence=Fence(1, 9)), set(), Stale(by=NOW)),
    "shut out counts before blobs": (facts(4, 4, fence=Fence(1, 9)), {"x"}, Stale(by=NOW)),
    "no lease": (facts(4, 4, granted=None), set(), NotGranted()),
    "a generation that nobody gave": (facts(4, 4, fence=Fence(3, 0)), set(), NotGranted()),
}


@pytest.mark.parametrize(("given_", "absent", "decision"), TABLE.values(), ids=TABLE.keys())
def test_the_facts_decide(given_: CommitFacts, absent: set[str], decision: CommitDecision) -> None:
    assert decide_commit(given_, absent=absent) == decision


RANGES = st.tuples(st.integers(1, 12), st.integers(0, 5))


@given(st.lists(st.tuples(RANGES, st.integers(1, 3)), max_size=60))
def test_any_order_of_ranges_gives_the_sequence_and_nothing_below_a_generation_commits(
    tries: list[tuple[tuple[int, int], int]],
) -> None:
    log: dict[int, str] = {}
    fences: list[int] = []
    granted = Fence(1, 0)
    for (first, more), hub in tries:
        granted = max(granted, Fence(hub, 0))
        decision = decide_commit(
            facts(first, first + more, fence=Fence(hub, 0), granted=granted, head=len(log), known=log), absent=()
        )
        if isinstance(decision, Accept):
            assert decision.first_new == len(log) + 1
            log |= {epoch: f"d{epoch}" for epoch in range(decision.first_new, first + more + 1)}
            fences.append(hub)
        if isinstance(decision, Gap):
            assert decision.next_epoch == len(log) + 1
    assert log == {epoch: f"d{epoch}" for epoch in range(1, len(log) + 1)}
    assert fences == sorted(fences)
