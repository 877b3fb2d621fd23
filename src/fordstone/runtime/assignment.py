"""Which subtask reads which partition of a source.

Pure. Within one number of subtasks a partition stays with its reader over restarts: what is in flight in an unaligned
checkpoint is that of its sender. After rescaling, all partitions are assigned again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TypeVar

from fordstone.epochs.manifest import Manifest, PartitionCut
from fordstone.plan.ids import PartitionId

T = TypeVar("T")


def readers(manifest: Manifest | None, source: str, parallelism: int) -> dict[str, int]:
    """Which subtask read each partition at the checkpoint; none after rescaling."""
    if manifest is None or manifest.parallelism != parallelism:
        return {}
    tasks = [(*task.task.rpartition("/"), task.watermarks_us) for task in manifest.tasks]
    return {name: int(subtask) for vertex, _, subtask, times in tasks if vertex == source for name in times}


def assign(
    partitions: Mapping[str, PartitionCut], subtasks: int, previous: Mapping[str, int]
) -> list[dict[str, PartitionCut]]:
    """Partitions stay with their previous subtask; each other one goes to the subtask with the fewest. Deterministic."""
    shares: list[dict[str, PartitionCut]] = [{} for _ in range(subtasks)]
    for name in sorted(partitions, key=lambda name: (name not in previous, name)):
        subtask = previous[name] if name in previous else min(range(subtasks), key=lambda index: len(shares[index]))
        shares[subtask][name] = partitions[name]
    return shares


def assign_new(
    found: Sequence[PartitionId], known: Container[str], loads: Sequence[int]
) -> list[tuple[PartitionId, ...]]:
    """Assign the partitions that are not `known`, each to the subtask with the least load: the partitions that it has."""
    assigned: list[tuple[PartitionId, ...]] = [() for _ in loads]
    for name in found:
        if name not in known:
            least = min(range(len(loads)), key=lambda index: loads[index] + len(assigned[index]))
            assigned[least] = (*assigned[least], name)
    return assigned


def balance(items: Sequence[T], tasks: int, size: Callable[[T], int]) -> list[list[T]]:
    """Spread items over at most `tasks` tasks: large ones first, each to the task with the least. No task is empty."""
    shares: list[list[T]] = [[] for _ in range(min(tasks, len(items)))]
    loads = [(0, number) for number in range(len(shares))]
    for item in sorted(items, key=size, reverse=True):
        load, number = heapq.heappop(loads)
        shares[number].append(item)
        heapq.heappush(loads, (load + size(item), number))
    return shares
