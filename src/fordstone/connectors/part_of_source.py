"""A source of which several nodes in one process read different partitions.

Partition i, counted in the order in which partitions are found, belongs to node i modulo the number of nodes. The count is kept in memory, so it
holds for one run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from fordstone.connectors.base import Idleness, Reader, ReadPlan, Source, SourceTrouble
from fordstone.epochs.manifest import PartitionCut
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.partitions import SeriesPlace


class Distribution:
    """Which node reads which partition of one source. Shared by all nodes, each on threads of its own."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._numbers: dict[PartitionId, int] = {}

    @property
    def alone(self) -> bool:
        """Whether one node reads all."""
        return self._nodes == 1

    def part(self, partitions: Sequence[PartitionId], node: int) -> list[PartitionId]:
        """Those of the partitions that a node reads. New ones are counted."""
        with self._lock:
            for partition in partitions:
                self._numbers.setdefault(partition, len(self._numbers))
            return [partition for partition in partitions if self._numbers[partition] % self._nodes == node]


class PartOfSource(Source):
    """The partitions of a source that one node reads."""

    def __init__(self, source: Source, distribution: Distribution, node: int) -> None:
        self._source = source
        self._distribution = distribution
        self._node = node

    def partitions(self) -> Sequence[PartitionId]:
        return self._distribution.part(self._source.partitions(), self._node)

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        self._source.restore(cuts)

    def expect_reads(self, reads: Mapping[PartitionId, tuple[Position, Position]]) -> None:
        self._source.expect_reads(reads)

    def identity(self, partition: PartitionId, position: Position) -> str:
        return self._source.identity(partition, position)

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        return self._source.open(partition, position, with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        return self._source.plan_read(partition, position, rows_max)

    def still_planned(self, partition: PartitionId, position: Position, until: Position) -> Position:
        return self._source.still_planned(partition, position, until)

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        return self._source.idleness(partition, position)

    def trouble(self) -> SourceTrouble:
        return self._source.trouble()

    def ended(self) -> bool:
        return self._source.ended()

    def series(self, partition: PartitionId) -> Sequence[SeriesPlace]:
        return self._source.series(partition)

    def is_quiet(self, partition: PartitionId) -> bool:
        return self._source.is_quiet(partition)

    def plan_rest(self, partition: PartitionId, position: Position) -> Position | None:
        return self._source.plan_rest(partition, position)

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        self._source.ack(cuts)

    def size_bytes(self) -> int | None:
        """Of the whole source, so that a part of several has none."""
        return self._source.size_bytes() if self._distribution.alone else None

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        """Of the whole source, too: a node that reads half of it would stop at 50 %."""
        return self._source.share_read(cuts) if self._distribution.alone else None

    def close(self) -> None:
        self._source.close()
