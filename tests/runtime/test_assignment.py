from __future__ import annotations

import msgspec
import pytest

from fordstone.epochs.manifest import Cut, Manifest, PartitionCut, TaskCut
from fordstone.plan.ids import PartitionId
from fordstone.runtime.assignment import assign, assign_new, balance, readers

CUTS = {name: PartitionCut(position=place) for place, name in enumerate("abcd")}


@pytest.fixture
def manifest() -> Manifest:
    """Subtask 0 had read a and d, subtask 1 b; c joined since."""
    return Manifest(
        pipeline="p",
        node="n",
        epoch=1,
        attempt=1,
        mode="unaligned",
        parallelism=2,
        plan_digest="",
        step_digests={},
        created_us=0,
        cut=Cut(epoch=1, sources={}),
        tasks=(
            TaskCut("rows/0", {"a": 5, "d": 9}),
            TaskCut("rows/1", {"b": 7}),
            TaskCut("rows2/0", {"a": 1}),
            TaskCut("sums/0", {"rows/0-0-sums/0": 5}),
        ),
    )


def test_partitions_stay_with_their_readers(manifest: Manifest) -> None:
    had = readers(manifest, "rows", 2)
    assert had == {"a": 0, "d": 0, "b": 1}
    assert [set(share) for share in assign(CUTS, 2, had)] == [{"a", "d"}, {"b", "c"}]
    assert assign(CUTS, 2, had)[1]["c"] == CUTS["c"]


def test_after_rescaling_all_are_assigned_again(manifest: Manifest) -> None:
    assert readers(manifest, "rows", 3) == {}
    assert readers(msgspec.structs.replace(manifest, parallelism=3), "rows", 2) == {}
    assert [set(share) for share in assign(CUTS, 3, {})] == [{"a", "d"}, {"b"}, {"c"}]
    assert assign(CUTS, 3, {}) == assign(dict(reversed(CUTS.items())), 3, {})


def test_new_partitions_go_to_the_subtasks_with_the_fewest() -> None:
    found = [PartitionId(name) for name in "abxyz"]
    assert assign_new(found, {"a", "b"}, [2, 0]) == [("z",), ("x", "y")]


def test_items_are_spread_evenly_by_size_and_no_task_is_empty():
    sizes = [9, 1, 1, 8, 1]
    shares = balance(sizes, 2, lambda size: size)
    assert sorted(map(sum, shares)) == [10, 10]
    assert sorted(size for share in shares for size in share) == sorted(sizes)
    assert balance([5], 8, lambda size: size) == [[5]]
    assert balance([], 8, lambda size: 0) == []
