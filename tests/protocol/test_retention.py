from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.retention import Retention, decide_retention

FIVE = {1: {"a"}, 2: {"a", "b"}, 3: {"b", "c"}, 4: {"c", "d"}, 5: {"d", "e"}}
ALL = {"a", "b", "c", "d", "e"}

TABLE = {
    "the last three": ({"keep": 3}, (3, 4, 5), (1, 2), ("a",)),
    "only the newest": ({"keep": 1}, (5,), (1, 2, 3, 4), ("a", "b", "c")),
    "more than there are": ({"keep": 9}, (1, 2, 3, 4, 5), (), ()),
    "one being uploaded": ({"keep": 1, "pinned": {2}}, (2, 5), (1, 3, 4), ("c",)),
    "the newest that the hub has": ({"keep": 1, "acknowledged": 3}, (3, 5), (1, 2, 4), ("a",)),
    "the hub has nothing yet": (
        {"keep": 1, "acknowledged": 0},
        (5,),
        (1, 2, 3, 4),
        ("a", "b", "c"),
    ),
    "a run that is being written": ({"keep": 1, "held": {"a"}}, (5,), (1, 2, 3, 4), ("b", "c")),
    "a pin of what is not there": ({"keep": 1, "pinned": {77}}, (5,), (1, 2, 3, 4), ("a", "b", "c")),
}


@pytest.mark.parametrize(("options", "kept", "manifests", "runs"), TABLE.values(), ids=TABLE.keys())
def test_the_facts_decide(options: Any, kept: Any, manifests: Any, runs: Any) -> None:
    assert decide_retention(FIVE, ALL, **options) == Retention(kept=kept, remove_manifests=manifests, remove_runs=runs)


def test_runs_that_no_manifest_names_go() -> None:
    assert decide_retention({}, {"x"}, keep=3).remove_runs == ("x",)


def test_a_named_run_that_is_not_there_is_not_removed() -> None:
    assert decide_retention(FIVE, {"a"}, keep=1).remove_runs == ("a",)


def test_at_least_one_is_kept() -> None:
    with pytest.raises(ValueError, match="at least one"):
        decide_retention(FIVE, ALL, keep=0)


RUNS = st.frozensets(st.sampled_from("abcdefgh"))


@given(
    manifests=st.dictionaries(st.integers(1, 20), RUNS),
    runs=RUNS,
    keep=st.integers(1, 5),
    pinned=st.frozensets(st.integers(1, 20)),
    acknowledged=st.none() | st.integers(0, 20),
    held=RUNS,
)
def test_nothing_that_is_needed_goes_and_nothing_else_stays(
    manifests: Any, runs: Any, keep: Any, pinned: Any, acknowledged: Any, held: Any
) -> None:
    decision = decide_retention(manifests, runs, keep=keep, pinned=pinned, acknowledged=acknowledged, held=held)
    assert set(decision.kept) | set(decision.remove_manifests) == manifests.keys()
    assert set(decision.kept).isdisjoint(decision.remove_manifests)
    assert set(sorted(manifests)[-keep:]) <= set(decision.kept)
    assert pinned & manifests.keys() <= set(decision.kept)
    below = [epoch for epoch in manifests if acknowledged is not None and epoch <= acknowledged]
    assert set(decision.kept) >= set(sorted(below)[-1:])
    assert len(decision.kept) <= keep + len(pinned) + 1
    needed = held.union(*(manifests[epoch] for epoch in decision.kept))
    assert set(decision.remove_runs) == runs - needed
