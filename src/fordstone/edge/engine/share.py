"""A source task's share of the partitions: which there are, where they stand, and how recorded epochs are followed.

Partitions join, fall idle and come back at barriers only, and at a start. What changed at a barrier whose attempt was
given up, or at a start, is a stage of the epoch: it is recorded with the positions at that moment, so that the epoch
can be computed again stage by stage (rule 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from fordstone.connectors.base import Idleness
from fordstone.epochs.manifest import PartitionCut
from fordstone.plan.ids import Attempt, PartitionId, Position
from fordstone.runtime.partition import Partition
from fordstone.runtime.snapshot import Barrier

Stage = Mapping[str, PartitionCut]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierOrder:
    """What the coordinator puts into a source: the barrier, partitions that join behind it, or the epoch to follow."""

    barrier: Barrier
    joining: tuple[PartitionId, ...] = ()
    follow: Stage | None = None
    """The recorded cut, as far as it concerns this task."""
    stages: tuple[Stage, ...] = ()
    """With `follow`: what changed within the recorded epoch, in order."""
    bounded: bool = False
    """With `follow`: whether input was bounded then."""


class Followed(Enum):
    """How far a recorded epoch has been followed."""

    READING = "reading"
    STAGE = "stage"
    """A stage was reached and taken up just now."""
    REACHED = "reached"


class Share:
    """The partitions that one source task reads. Used by that task alone."""

    def __init__(self, partitions: Mapping[str, PartitionCut], *, now_us: int) -> None:
        self.partitions = {name: Partition.restored(name, cut, now_us=now_us) for name, cut in partitions.items()}
        self._stages: list[tuple[Attempt | None, Stage]] = []
        self._order: BarrierOrder | None = None
        self._stage = 0

    def start(
        self, joining: Sequence[PartitionId], *, bounded: bool, watermark_us: int, limit_us: int, now_us: int
    ) -> None:
        """Begin to read freely: after a start, or when recorded epochs have been followed to their end."""
        for partition in self.partitions.values():
            # What had ended may have grown since; and of bounded input nothing is waited for.
            if partition.done or (partition.idle and bounded):
                partition.idle = partition.done = False
                partition.floor_us = max(partition.floor_us, watermark_us)
        self.join(joining, watermark_us=watermark_us, now_us=now_us)
        self.limit(limit_us)
        self._stages.append((None, self.cuts()))

    def join(self, names: Sequence[PartitionId], *, watermark_us: int, now_us: int) -> None:
        """Take partitions in; of them, rows older than the watermark are late."""
        for name in names:
            if name not in self.partitions:
                self.partitions[name] = Partition(name=name, floor_us=watermark_us, heard_us=now_us)

    def change_idleness(
        self,
        after_us: int | None,
        outlook: Callable[[PartitionId, Position], Idleness],
        *,
        watermark_us: int,
        now_us: int,
    ) -> None:
        """At a barrier: silent partitions fall idle, and idle ones with rows waiting come back."""
        for partition in self.partitions.values():
            if partition.done:
                continue
            if partition.idle and partition.stashed is not None:
                partition.idle = False
                partition.floor_us = max(partition.floor_us, watermark_us)
                partition.heard_us = now_us
            elif not partition.idle:
                means = outlook(PartitionId(partition.name), Position(partition.position))
                if means is Idleness.UNKNOWN:
                    partition.heard_us = now_us
                silent = after_us is not None and now_us - partition.heard_us >= after_us
                partition.idle = silent or means is Idleness.FINISHED

    def limit(self, limit_us: int) -> None:
        """At a barrier: from here on, rows above this time are too far ahead of the clock."""
        for partition in self.partitions.values():
            partition.limit_us = limit_us

    def close_ended(self) -> None:
        """At a barrier: what was read to its end is done."""
        for partition in self.partitions.values():
            if partition.ended:
                partition.done, partition.ended = True, False

    def cuts(self) -> dict[str, PartitionCut]:
        """Where the partitions stand. May be asked from any thread, for a rough answer."""
        return {name: partition.cut() for name, partition in list(self.partitions.items())}

    def freeze_stages(self, attempt: Attempt, committed: Attempt) -> tuple[Stage, ...]:
        """The stages of the epoch that ends with this attempt, if it is sealed; and begin the next stage.

        What was recorded up to an attempt that has been sealed belongs to that epoch.
        """
        named = [(attempt if since is None else since, stage) for since, stage in self._stages]
        self._stages = [(since, stage) for since, stage in named if since > committed]
        found = tuple(stage for _, stage in self._stages)
        self._stages.append((attempt, self.cuts()))
        return found

    def follow(self, order: BarrierOrder, *, now_us: int) -> Followed:
        """Say how far to read, and take up the next stage of the recorded epoch when it has been reached."""
        if order is not self._order:
            self._order, self._stage = order, 0
        if self._stage < len(order.stages):
            stage = order.stages[self._stage]
            if not self._aim(stage):
                return Followed.READING
            self._stage += 1
            self.take_up(stage, now_us=now_us)
            return Followed.STAGE
        return Followed.REACHED if self._aim(order.follow or {}) else Followed.READING

    def take_up(self, stage: Stage, *, now_us: int) -> None:
        """Be as was recorded."""
        for name, cut in stage.items():
            partition = self.partitions.get(name)
            if partition is None:
                partition = self.partitions[name] = Partition.restored(name, cut, now_us=now_us)
            partition.idle, partition.done, partition.target = cut.idle, cut.done, None
            partition.floor_us, partition.limit_us = cut.floor_us, cut.limit_us

    def _aim(self, stage: Stage) -> bool:
        """Read up to these positions; says whether all are reached. Partitions that are not known join there."""
        known = [(self.partitions[name], cut) for name, cut in stage.items() if name in self.partitions]
        for partition, cut in known:
            partition.target = cut.position
        return all(partition.position >= cut.position for partition, cut in known)
