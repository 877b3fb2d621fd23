from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.lease import (
    Fence,
    Granted,
    HeldByOther,
    Holding,
    LeaseDecision,
    LeaseFacts,
    NotHead,
    OlderIncarnation,
    Position,
    Superseded,
    decide_lease,
)

HEAD = Position(22, "c22")
HELD = Holding(holder="a", fence=Fence(3, 7), start="s7")
RESTORED = Holding(holder="a", fence=Fence(1003, 7), start=None)


def facts(holding: Holding | None = HELD, **changes: Any) -> LeaseFacts:
    """A later start of the holder, which has the head."""
    given_: dict[str, Any] = {"holder": "a", "local": 8, "start": "s8", "head": HEAD, "claimed": HEAD}
    given_["resync"] = holding is not None and holding.start is None  # until somebody commits
    return LeaseFacts(holding=holding, **given_ | changes)


OLD: dict[str, Any] = {"claimed": Position(15, "c15")}
OTHER: dict[str, Any] = {"claimed": Position(22, "other")}
NOTHING = Position(0, "")

TABLE: dict[str, tuple[LeaseFacts, LeaseDecision]] = {
    "nobody held it": (facts(None, head=NOTHING, claimed=NOTHING), Granted(fence=Fence(1, 8))),
    "nobody to take over from": (facts(None, head=NOTHING, take_over=True), Granted(fence=Fence(1, 8))),
    "the same start asks again": (facts(local=7, start="s7"), Granted(fence=Fence(3, 7))),
    "the same start asks again, and others have committed for it": (
        facts(local=7, start="s7", **OLD),
        Granted(fence=Fence(3, 7)),
    ),
    "the holder was started again": (facts(), Granted(fence=Fence(3, 8))),
    "it was started often in between": (facts(local=99, start="s99"), Granted(fence=Fence(3, 99))),
    "nothing was committed yet": (facts(head=NOTHING, claimed=NOTHING), Granted(fence=Fence(3, 8))),
    # A copy of the directory.
    "an old copy": (facts(local=6, start="x", **OLD), OlderIncarnation(by=Fence(3, 7))),
    "an old copy, started as often as the original": (
        facts(local=7, start="x", **OLD),
        OlderIncarnation(by=Fence(3, 7)),
    ),
    "an old copy, started more often": (facts(**OLD), NotHead(head=22)),
    "an old copy with nothing": (facts(claimed=NOTHING), NotHead(head=22)),
    "a copy that went another way": (facts(**OTHER), NotHead(head=22)),
    "a copy that says more than the hub has": (facts(claimed=Position(23, "c23")), NotHead(head=22)),
    "a copy with the head, at the same incarnation": (facts(local=7, start="x"), OlderIncarnation(by=Fence(3, 7))),
    "a copy with the head, at an older incarnation": (facts(local=6, start="x"), OlderIncarnation(by=Fence(3, 7))),
    "an old copy takes over": (facts(local=6, take_over=True, **OLD), Granted(fence=Fence(4, 6))),
    "a copy of the same incarnation takes over": (
        facts(local=7, start="x", take_over=True),
        Granted(fence=Fence(4, 7)),
    ),
    "the same start takes over from itself": (facts(local=7, start="s7", take_over=True), Granted(fence=Fence(3, 7))),
    "started again with the option left on": (facts(take_over=True), Granted(fence=Fence(3, 8))),
    # Another directory.
    "another holder": (facts(holder="b", local=99), HeldByOther(fence=Fence(3, 7))),
    "another holder takes over": (facts(holder="b", local=1, take_over=True), Granted(fence=Fence(4, 1))),
    # A hub that was restored from a backup, to epoch 22.
    "restored: the holder has more": (
        facts(RESTORED, claimed=Position(30, "c30"), restored=True),
        Granted(fence=Fence(1003, 8)),
    ),
    "restored: the holder runs since before the backup": (
        facts(RESTORED, local=7, start="s7", claimed=Position(30, "c30"), restored=True),
        Granted(fence=Fence(1003, 7)),
    ),
    "restored: the holder has the head": (facts(RESTORED, restored=True), Granted(fence=Fence(1003, 8))),
    "restored: the holder has less": (facts(RESTORED, restored=True, **OLD), NotHead(head=22)),
    "restored: other content": (facts(RESTORED, restored=True, **OTHER), NotHead(head=22)),
    "restored: more, but from another log": (facts(RESTORED, claimed=Position(30, "c30")), NotHead(head=22)),
    "restored: a copy of the directory has gone on, and this one has more": (
        facts(HELD, claimed=Position(30, "c30"), restored=True),
        NotHead(head=22),
    ),
    "restored: a copy of the directory has gone on, and this one has more and takes over": (
        facts(HELD, claimed=Position(30, "c30"), restored=True, take_over=True),
        Superseded(by=Fence(3, 7)),
    ),
    "restored: a copy of the directory has not gone on yet, and this one has more": (
        facts(HELD, claimed=Position(30, "c30"), restored=True, resync=True),
        Granted(fence=Fence(3, 8)),
    ),
    "restored: an older start": (
        facts(RESTORED, local=6, claimed=Position(30, "c30"), restored=True),
        OlderIncarnation(by=Fence(1003, 7)),
    ),
    "restored: another holder": (facts(RESTORED, holder="b", restored=True), HeldByOther(fence=Fence(1003, 7))),
    "restored: another holder, which took over after the backup, has more": (
        facts(RESTORED, holder="b", granted=4, claimed=Position(30, "c30"), restored=True, take_over=True),
        Granted(fence=Fence(1004, 8)),
    ),
    "restored twice: another holder, which took over after the backup, has more": (
        facts(
            Holding(holder="a", fence=Fence(1_794_000_000_003, 7), start=None),
            holder="b",
            granted=1_793_000_000_004,
            claimed=Position(30, "c30"),
            restored=True,
            take_over=True,
        ),
        Granted(fence=Fence(1_794_000_000_004, 8)),
    ),
    "restored: a holder that was superseded before has more": (
        facts(RESTORED, holder="b", granted=2, claimed=Position(30, "c30"), restored=True, take_over=True),
        Superseded(by=Fence(1003, 7)),
    ),
    "restored: a holder that took over beside this one has more": (
        facts(RESTORED, holder="b", granted=3, claimed=Position(30, "c30"), restored=True, take_over=True),
        Superseded(by=Fence(1003, 7)),
    ),
    "restored: another holder has gone on, and the former one has more": (
        facts(HELD, holder="b", granted=2, claimed=Position(30, "c30"), restored=True, take_over=True),
        Superseded(by=Fence(3, 7)),
    ),
    "restored: another holder has not gone on yet, and the former one has more": (
        facts(HELD, holder="b", granted=2, claimed=Position(30, "c30"), restored=True, resync=True, take_over=True),
        Granted(fence=Fence(4, 8)),
    ),
    "restored: another holder takes over": (facts(RESTORED, holder="b", take_over=True), Granted(fence=Fence(1004, 8))),
}


@pytest.mark.parametrize(("given_", "decision"), TABLE.values(), ids=TABLE.keys())
def test_the_facts_decide(given_: LeaseFacts, decision: LeaseDecision) -> None:
    assert decide_lease(given_) == decision


REQUESTS = st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sampled_from("xyz"), st.booleans(), st.booleans())


@given(st.lists(REQUESTS, max_size=30))
def test_fences_never_go_back_and_no_two_starts_share_one(asked: list[tuple[str, int, str, bool, bool]]) -> None:
    holding: Holding | None = None
    holders: dict[int, str] = {}
    starts: dict[Fence, tuple[str, str]] = {}
    for holder, local, start, has_head, take_over in asked:
        claimed = HEAD if has_head else NOTHING
        request = facts(holding, holder=holder, local=local, start=start, claimed=claimed, take_over=take_over)
        decision = decide_lease(request)
        if not isinstance(decision, Granted):
            continue
        assert holding is None or decision.fence >= holding.fence
        assert holders.setdefault(decision.fence.hub, holder) == holder
        assert starts.setdefault(decision.fence, (holder, start)) == (holder, start)
        assert has_head or take_over or holding is None or (holding.holder, holding.start) == (holder, start)
        holding = Holding(holder=holder, fence=decision.fence, start=start)
        again = facts(holding, holder=holder, local=local, start=start, claimed=claimed, take_over=take_over)
        assert decide_lease(again) == decision, "a lost answer"
