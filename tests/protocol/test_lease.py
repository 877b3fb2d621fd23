from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.lease import Fence, Granted, HeldByOther, Holding, OlderIncarnation, decide_lease

HELD = Holding(holder="a", fence=Fence(3, 7))

TABLE: dict[str, tuple[Holding | None, dict[str, Any], Any]] = {
    "nobody held it": (None, {"holder": "a", "local": 4}, Granted(fence=Fence(1, 4))),
    "nobody to take over from": (None, {"holder": "a", "local": 4, "take_over": True}, Granted(fence=Fence(1, 4))),
    "the holder asks again": (HELD, {"holder": "a", "local": 7}, Granted(fence=Fence(3, 7))),
    "the holder was started again": (HELD, {"holder": "a", "local": 9}, Granted(fence=Fence(3, 9))),
    "an older start of the holder": (HELD, {"holder": "a", "local": 6}, OlderIncarnation(by=Fence(3, 7))),
    "an old copy takes over": (HELD, {"holder": "a", "local": 6, "take_over": True}, Granted(fence=Fence(4, 6))),
    "the holder takes over from itself": (
        HELD,
        {"holder": "a", "local": 7, "take_over": True},
        Granted(fence=Fence(3, 7)),
    ),
    "another holder": (HELD, {"holder": "b", "local": 99}, HeldByOther(fence=Fence(3, 7))),
    "another holder takes over": (HELD, {"holder": "b", "local": 1, "take_over": True}, Granted(fence=Fence(4, 1))),
}


@pytest.mark.parametrize(("holding", "asked", "decision"), TABLE.values(), ids=TABLE.keys())
def test_the_facts_decide(holding: Holding | None, asked: dict[str, Any], decision: Any) -> None:
    assert decide_lease(holding, **asked) == decision


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=30))
def test_fences_never_go_back_and_no_two_holders_share_a_generation(asked: list[tuple[str, int, bool]]) -> None:
    holding: Holding | None = None
    owners: dict[int, str] = {}
    for holder, local, take_over in asked:
        decision = decide_lease(holding, holder=holder, local=local, take_over=take_over)
        if not isinstance(decision, Granted):
            continue
        assert holding is None or decision.fence >= holding.fence
        assert owners.setdefault(decision.fence.hub, holder) == holder
        again = Holding(holder=holder, fence=decision.fence)
        assert decide_lease(again, holder=holder, local=local, take_over=take_over) == decision, "a lost answer"
        holding = again
