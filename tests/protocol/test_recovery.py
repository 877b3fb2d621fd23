from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.recovery import CannotResume, CheckpointFact, Resume, StartEmpty, decide_recovery


def local(epoch: Any, problem: Any = None) -> Any:
    return CheckpointFact(epoch=epoch, problem=problem)


def remote(epoch: Any, problem: Any = None) -> Any:
    return CheckpointFact(epoch=epoch, where="remote", problem=problem)


BAD = "its digest is wrong"

TABLE = {
    "nothing was ever sealed": ([], {1, 2}, StartEmpty()),
    "the newest is whole": ([local(1), local(2), local(3)], set(), Resume(epoch=3, where="local")),
    "only a remote copy is left": ([remote(5)], set(), Resume(epoch=5, where="remote")),
    "local is preferred at the same epoch": ([remote(5), local(5)], set(), Resume(epoch=5, where="local")),
    "a newer remote wins over an older local": ([local(4), remote(5)], set(), Resume(epoch=5, where="remote")),
    "a damaged older one is reported and does no harm": (
        [local(1, BAD), local(2)],
        set(),
        Resume(epoch=2, where="local", damaged=(local(1, BAD),)),
    ),
    "the newest is damaged and replayed": (
        [local(2), local(3, BAD)],
        {3},
        Resume(epoch=2, where="local", replay=(3,), damaged=(local(3, BAD),)),
    ),
    "a whole remote copy saves the replay": (
        [local(2), local(3, BAD), remote(3)],
        set(),
        Resume(epoch=3, where="remote", damaged=(local(3, BAD),)),
    ),
    "a damaged remote copy seals its epoch too": (
        [local(2), remote(3, BAD)],
        {3},
        Resume(epoch=2, where="local", replay=(3,), damaged=(remote(3, BAD),)),
    ),
    "several are replayed in order": (
        [local(2), local(3, BAD), local(4, BAD), local(5, BAD)],
        {1, 2, 3, 4, 5, 6},
        Resume(epoch=2, where="local", replay=(3, 4, 5), damaged=(local(3, BAD), local(4, BAD), local(5, BAD))),
    ),
    "epochs without any manifest in between are replayed too": (
        [local(2), local(5, BAD)],
        {3, 4, 5},
        Resume(epoch=2, where="local", replay=(3, 4, 5), damaged=(local(5, BAD),)),
    ),
    "none is whole but every cut is there": (
        [local(1, BAD), local(2, BAD)],
        {1, 2},
        Resume(epoch=0, where="empty", replay=(1, 2), damaged=(local(1, BAD), local(2, BAD))),
    ),
}


@pytest.mark.parametrize(("facts", "cuts", "expected"), TABLE.values(), ids=TABLE.keys())
def test_the_facts_decide(facts: Any, cuts: Any, expected: Any) -> None:
    assert decide_recovery(facts, cuts) == expected
    assert decide_recovery(reversed(facts), cuts) == expected


@pytest.mark.parametrize(
    ("facts", "cuts", "whole", "sealed", "missing"),
    [
        ([local(2), local(3, BAD)], {1, 2, 4}, 2, 3, ((3, 3),)),
        ([local(2), local(6, BAD)], {4}, 2, 6, ((3, 3), (5, 6))),
        ([local(1, BAD)], set(), 0, 1, ((1, 1),)),
        ([local(9, BAD)], {8, 9}, 0, 9, ((1, 7),)),
        ([remote(3, BAD), local(2)], {2}, 2, 3, ((3, 3),)),
    ],
)
def test_a_sealed_epoch_that_can_be_neither_read_nor_rebuilt_stops_the_node(
    facts: Any, cuts: Any, whole: Any, sealed: Any, missing: Any
) -> None:
    decision = decide_recovery(facts, cuts)
    assert isinstance(decision, CannotResume)
    assert (decision.newest_whole, decision.newest_sealed, decision.missing_cuts) == (whole, sealed, missing)
    for first, last in missing:
        assert (f"{first} to {last}" if first != last else str(first)) in decision.reason
    assert BAD in decision.reason


def test_new_work_starts_after_what_is_sealed() -> None:
    assert Resume(epoch=4, where="local").next_epoch == 5
    assert Resume(epoch=4, where="local", replay=(5, 6)).next_epoch == 7


def test_an_absurd_epoch_costs_neither_time_nor_memory() -> None:
    """A stray file named 999999999999.json once made a tuple of as many numbers."""
    decision = decide_recovery([local(3), local(10**12 - 1, BAD)], {4, 5})
    assert isinstance(decision, CannotResume)
    assert decision.missing_cuts == ((6, 10**12 - 1),)


def test_many_gaps_are_described_shortly() -> None:
    decision = decide_recovery([local(1000, BAD)], set(range(0, 1000, 2)))
    assert isinstance(decision, CannotResume)
    assert "492 more stretches" in decision.reason


FACTS = st.lists(
    st.builds(
        CheckpointFact,
        epoch=st.integers(1, 12),
        where=st.sampled_from(["local", "remote"]),
        problem=st.sampled_from([None, BAD]),
    ),
    max_size=8,
    unique_by=lambda fact: (fact.epoch, fact.where),
)


@given(facts=FACTS, cuts=st.sets(st.integers(1, 12)))
def test_whatever_the_facts_no_sealed_epoch_is_done_again_and_none_is_skipped(facts: Any, cuts: Any) -> None:
    decision = decide_recovery(facts, cuts)
    sealed = {fact.epoch for fact in facts}
    whole = {(fact.epoch, fact.where) for fact in facts if fact.problem is None}
    match decision:
        case StartEmpty():
            assert not sealed
        case Resume():
            assert decision.next_epoch == max(sealed) + 1
            assert (decision.epoch, decision.where) in whole or (decision.epoch, decision.where) == (0, "empty")
            assert decision.epoch == max((epoch for epoch, _ in whole), default=0)
            assert list(decision.replay) == list(range(decision.epoch + 1, max(sealed) + 1))
            assert set(decision.replay) <= cuts
            assert set(decision.damaged) == {fact for fact in facts if fact.problem}
        case CannotResume():
            assert any(epoch not in cuts for epoch in range(decision.newest_whole + 1, max(sealed) + 1))
            missing = [epoch for first, last in decision.missing_cuts for epoch in range(first, last + 1)]
            assert missing == [
                epoch for epoch in range(decision.newest_whole + 1, max(sealed) + 1) if epoch not in cuts
            ]
