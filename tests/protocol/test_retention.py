from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.retention import (
    FREE_PAGES_KEPT,
    MARKS,
    Mark,
    Retention,
    decide_retention,
    expired_mark,
    is_mark_due,
    pages_to_cut,
)

FIVE = {1: {"a"}, 2: {"a", "b"}, 3: {"b", "c"}, 4: {"c", "d"}, 5: {"d", "e"}}
ALL = {"a", "b", "c", "d", "e"}

TABLE = {
    "the last three": ({"keep": 3}, (3, 4, 5), (1, 2), ("a",)),
    "only the newest": ({"keep": 1}, (5,), (1, 2, 3, 4), ("a", "b", "c")),
    "more than there are": ({"keep": 9}, (1, 2, 3, 4, 5), (), ()),
    "one being uploaded": ({"keep": 1, "pinned": {2}}, (2, 5), (1, 3, 4), ("c",)),
    "the newest that the hub has": ({"keep": 1, "acknowledged": (3,)}, (3, 5), (1, 2, 4), ("a",)),
    "the hub has nothing yet": (
        {"keep": 1, "acknowledged": (0,)},
        (5,),
        (1, 2, 3, 4),
        ("a", "b", "c"),
    ),
    "the newest that the hub has, and the newest at the remote": (
        {"keep": 1, "acknowledged": (2, 3)},
        (2, 3, 5),
        (1, 4),
        (),
    ),
    "a run that is being written": ({"keep": 1, "held": {"a"}}, (5,), (1, 2, 3, 4), ("b", "c")),
    "a pin of what is not there": ({"keep": 1, "pinned": {77}}, (5,), (1, 2, 3, 4), ("a", "b", "c")),
}


@pytest.mark.parametrize(("options", "kept", "manifests", "runs"), TABLE.values(), ids=TABLE.keys())
def test_the_facts_decide(options: Any, kept: Any, manifests: Any, runs: Any) -> None:
    assert decide_retention(FIVE, ALL, **options) == Retention(kept=kept, remove_manifests=manifests, remove_runs=runs)


PAGES = {
    "an empty file": ((0, 0, False), 0),
    "a few free pages are used again": ((FREE_PAGES_KEPT + 10, FREE_PAGES_KEPT, False), 0),
    "a file of free pages alone": ((FREE_PAGES_KEPT + 10, FREE_PAGES_KEPT + 10, False), 10),
    "half of a large file": ((100_000, 50_000, False), 0),
    "more than half of a large file": ((100_000, 70_000, False), 20_000),
    "all while the disk is short of space": ((100_000, 50_000, True), 50_000),
    "even few then": ((10, 3, True), 3),
}


@pytest.mark.parametrize(("facts", "cut"), PAGES.values(), ids=PAGES.keys())
def test_a_log_gives_back_what_it_does_not_need(facts: tuple[int, int, bool], cut: int) -> None:
    pages, free, short = facts
    assert pages_to_cut(pages=pages, free=free, short_of_space=short) == cut


HOURS = [Mark(0, 3), Mark(10, 7), Mark(20, 7), Mark(30, 9)]
EXPIRED = {
    "no mark": ([], 100, 10, None),
    "none is old enough": (HOURS, 9, 10, None),
    "the first one just is": (HOURS, 10, 10, Mark(0, 3)),
    "the newest of those that are": (HOURS, 39, 10, Mark(20, 7)),
    "all are": (HOURS, 1_000, 10, Mark(30, 9)),
    "the time was not saved before a crash": (HOURS, 5, 10, None),
}


@pytest.mark.parametrize(("marks", "ran_us", "keep_us", "expired"), EXPIRED.values(), ids=EXPIRED.keys())
def test_commits_expire_by_the_time_that_the_hub_has_run(
    marks: list[Mark], ran_us: int, keep_us: int, expired: Mark | None
) -> None:
    assert expired_mark(marks, ran_us=ran_us, keep_us=keep_us) == expired


@pytest.mark.parametrize(
    ("marks", "ran_us", "due"),
    [([], 0, True), ([Mark(5, 1)], 5, False), ([Mark(5, 1)], 14, False), ([Mark(5, 1)], 15, True), (HOURS, 30, False)],
)
def test_a_mark_is_due_after_a_part_of_the_time(marks: list[Mark], ran_us: int, due: bool) -> None:
    assert is_mark_due(marks, ran_us=ran_us, keep_us=10 * MARKS) is due


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
    acknowledged=st.lists(st.integers(0, 20), max_size=3),
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
    for newest in acknowledged:
        assert set(decision.kept) >= set(sorted(epoch for epoch in manifests if epoch <= newest)[-1:])
    assert len(decision.kept) <= keep + len(pinned) + len(acknowledged)
    needed = held.union(*(manifests[epoch] for epoch in decision.kept))
    assert set(decision.remove_runs) == runs - needed
