"""Source tasks: read partitions, judge lateness, tell the time, and begin epochs.

What is in an epoch is decided by positions alone: partitions join, fall idle and come back at barriers only, so that
an epoch can be computed again from its recorded cut (rule 1). So do those that end while others may come. Of several
partitions, the one furthest behind in time is read next (rule 21).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final, Protocol

import polars as pl

from fordstone.connectors.base import Chunk, Source
from fordstone.edge.engine.share import BarrierOrder, Followed, Share
from fordstone.edge.engine.task import Task, TaskParts
from fordstone.epochs.manifest import PartitionCut, SourceCut
from fordstone.errors import StorageError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.plan.ids import PartitionId, Position
from fordstone.runtime.dead_letters import DeadLetters
from fordstone.runtime.outlet import Outlet
from fordstone.runtime.partition import Partition, has_event_time, limit_us, row_ids
from fordstone.runtime.snapshot import Barrier, FrozenSource
from fordstone.storage.disk import FatalStorageError

log = logging.getLogger(__name__)

POLL_FIRST_US: Final = 1_000
POLL_MAX_US: Final = 20_000
LOOK_EVERY_US: Final = 50_000
"""How often silent and idle partitions are looked at while others are read."""


class Reservation(Protocol):
    """For at-most-once: positions are durably marked as used before their rows move."""

    def reserve(self, step: str, partition: str, position: int, time_us: int) -> None:
        """After this returns, a restart begins behind `position`, with time at `time_us` at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetup:
    """What a source task is made with."""

    step: p.Source
    source: Source
    batch_rows: int
    with_ids: bool
    bounded: bool
    dead_letters: Outlet
    reservation: Reservation | None = None
    pauses_after_barrier: bool = False
    """Blocking mode: read nothing until the attempt is over."""
    partitions: Mapping[str, PartitionCut] = field(default_factory=dict)
    joining: tuple[PartitionId, ...] = ()
    """Partitions that were found at the start."""
    watermark_us: int = TIME_MIN_US
    following: bool = False
    before_us: int = 0
    """The time by the clock at which the last epoch ended."""


class SourceTask(Task):
    """Reads its share of a source's partitions."""

    def __init__(self, parts: TaskParts, setup: SourceSetup) -> None:
        super().__init__(parts)
        self._setup = setup
        self._step = setup.step
        self._timeless = bool(setup.step.replaces)
        """A control table: it holds nobody's time back, ever."""
        self._share = Share(setup.partitions, now_us=parts.clock.monotonic_us())
        self._orders: deque[BarrierOrder] = deque()
        self._ends = setup.bounded and not setup.following
        """Whether what has been read to its end has ended for good."""
        self._watermark_us = setup.watermark_us
        self._idle = False
        self._announced = False
        self._joining: tuple[PartitionId, ...] = setup.joining
        self._paused = False
        self._held = setup.following
        self._asked = False
        self._looked_us = parts.clock.monotonic_us()
        self._refused = False
        self._before_us = setup.before_us
        self._poll_us = POLL_FIRST_US
        self._dead_letters = DeadLetters(setup.step, setup.dead_letters)

    # What the coordinator calls, from its own thread.

    def inject(self, order: BarrierOrder) -> None:
        """Put a barrier in; it is taken up at the next step."""
        self._orders.append(order)
        self.wake()

    def pause(self, *, paused: bool) -> None:
        """Stop or go on reading. Barriers pass all the same."""
        self._paused = paused
        self.wake()

    def go_live(self, joining: tuple[PartitionId, ...]) -> None:
        """The recorded cuts have been followed to their end: read on freely, these partitions too."""
        self._joining = joining
        self._announced = False
        self._held = False
        self.wake()

    @property
    def rejected_rows(self) -> int:
        """How many rows could not be read."""
        return self._dead_letters.rows

    @property
    def partition_count(self) -> int:
        """How many partitions this task reads."""
        return len(self._share.partitions)

    def cuts(self) -> dict[str, PartitionCut]:
        """Where the partitions stand about now: for progress bars, so it may be asked from any thread."""
        return self._share.cuts()

    def reads(self, partition: str) -> bool:
        """Whether the partition is one of this task's."""
        return partition in self._share.partitions

    # What the scheduler calls.

    @property
    def watermark_us(self) -> int:
        """What was last announced."""
        return self._watermark_us

    @property
    def idle_wait_us(self) -> int | None:
        """Poll for new rows, less often the longer none came."""
        return None if self.finished else self._poll_us

    def step(self) -> bool:
        """Pass queued output on, take up a barrier, or read a chunk."""
        blocked = not self._flush()
        if not self._announced and not blocked and (self._orders or not self._held):
            # Before anything else, barriers too: how an epoch begins must not depend on who was quicker.
            self._start()
            self._flush()
            return True
        if self._orders and self._announced and (not blocked or self._orders[0].barrier.overtakes):
            followed = self._follow(self._orders[0])
            if followed is Followed.REACHED:
                self._take_order(self._orders.popleft())
            if followed is not Followed.READING:
                self._flush()
                return True
        if blocked or self.ended:
            return False
        if self._paused or not self._announced or (self._held and not self._orders):
            return False
        did = self._read()
        self._poll_us = POLL_FIRST_US if did else min(self._poll_us * 2, POLL_MAX_US)
        if did:
            self._flush()
        return did

    def close(self) -> None:
        """Close readers and outlets."""
        super().close()
        for partition in self._share.partitions.values():
            if partition.reader is not None:
                partition.reader.close()

    # Barriers.

    def _follow(self, order: BarrierOrder) -> Followed:
        """Whether the barrier's place has come: at once, or when what a recorded cut demands has been read."""
        if order.follow is None:
            return Followed.REACHED
        self._ends = order.bounded
        followed = self._share.follow(order, now_us=self._clock.monotonic_us())
        if followed is Followed.STAGE and self._announced:
            self._tell_time()
        return followed

    def _take_order(self, order: BarrierOrder) -> None:
        now_us = self._clock.monotonic_us()
        if order.follow is None:
            self._look_at_idle()
            self._share.close_ended()
            self._share.change_idleness(
                self._step.idle_after_us,
                self._setup.source.idleness,
                watermark_us=self._watermark_us,
                now_us=now_us,
            )
            self._share.join(order.joining, watermark_us=self._watermark_us, now_us=now_us)
            # It stands in the cut, and if this attempt is given up, in the stage that begins here.
            self._share.limit(limit_us(self._step, order.barrier.now_us, bounded=self._setup.bounded))
        else:
            if order.bounded:
                for name, cut in order.follow.items():
                    if name in self._share.partitions:
                        self._share.partitions[name].done = cut.done
                self._tell_time()
            self._share.take_up(order.follow, now_us=now_us)
        self._paused = self._paused or (self._setup.pauses_after_barrier and not order.barrier.last)
        self._asked = False
        self._before_us = order.barrier.now_us
        idle = self._timeless or all(q.idle or q.done for q in self._share.partitions.values())
        self._cut(replace(order.barrier, idle=idle and not self.finished), logging=False)
        self._tell_time()

    def _start(self) -> None:
        """Begin reading: after a start, or when recorded epochs have been followed to their end."""
        if self._held:
            self._follow(self._orders[0])
        else:
            self.finished, self._ends = False, self._setup.bounded
            if not has_event_time(self._step):
                self._watermark_us = TIME_MIN_US
            self._share.start(
                self._joining,
                bounded=self._setup.bounded,
                watermark_us=self._watermark_us,
                # As at barriers: the clock never goes back.
                limit_us=limit_us(self._step, max(self._clock.wall_us(), self._before_us), bounded=self._setup.bounded),
                now_us=self._clock.monotonic_us(),
            )
        self._tell_time()
        self._announced = True

    # Reading.

    def _read(self) -> bool:
        """Read one chunk of the partition that is furthest behind and has something."""
        lateness_us = self._step.lateness_us
        if self._clock.monotonic_us() - self._looked_us >= LOOK_EVERY_US and self._look_at_silence():
            return True
        active = [q for q in self._share.partitions.values() if not (q.done or q.ended or q.idle)]
        active.sort(key=lambda q: (q.watermark_us(lateness_us), q.reads))
        for partition in active:
            if partition.target is not None and partition.position >= partition.target:
                continue
            chunk = self._chunk(partition)
            if chunk is None:
                continue
            if not self._reserved(partition, chunk):
                partition.stashed = chunk
                return False
            self._take(partition, chunk)
            return True
        return self._look_at_silence()

    def _reserved(self, partition: Partition, chunk: Chunk) -> bool:
        """For at-most-once: mark the rows as used before they move; False: the disk refuses, so they stay."""
        if self._setup.reservation is None or self._timeless:
            # A table's rows may come again: they replace each other by version.
            return True
        reserved = self._reserve(partition.name, int(chunk.position), partition.newest_us(self._step, chunk))
        others = [q for q in self._share.partitions.values() if q is not partition and not q.done]
        if reserved and chunk.ended and not others:
            # The last of it: time goes to its end, and every window comes out.
            return self._reserve("", 0, TIME_MAX_US)
        return reserved

    def _reserve(self, partition: str, position: int, time_us: int) -> bool:
        try:
            if self._setup.reservation is not None:
                self._setup.reservation.reserve(self._step.name, partition, position, time_us)
        except FatalStorageError:
            raise
        except StorageError as error:
            if not self._refused:
                log.warning("nothing is read", extra={"source": self._step.name, "problem": str(error)})
            self._refused = True
            return False
        self._refused = False
        return True

    def _chunk(self, partition: Partition) -> Chunk | None:
        if partition.stashed is not None:
            chunk, partition.stashed = partition.stashed, None
            return chunk
        if partition.reader is None:
            source = self._setup.source
            partition.reader = source.open(
                PartitionId(partition.name), Position(partition.position), with_positions=self._setup.with_ids
            )
        until = None if partition.target is None else Position(partition.target)
        return partition.reader.read(self._setup.batch_rows, until)

    def _look_at_idle(self) -> None:
        """See whether idle partitions have rows again. They are kept until a barrier lets the partition back in."""
        for partition in self._share.partitions.values():
            if partition.idle and not partition.done and partition.stashed is None:
                partition.stashed = self._chunk(partition)

    def _look_at_silence(self) -> bool:
        """Ask for a barrier when a partition has fallen silent, or an idle one has rows again."""
        after_us = self._step.idle_after_us
        self._looked_us = now_us = self._clock.monotonic_us()
        if after_us is None or self._asked or self._held:
            return False
        self._look_at_idle()
        for partition in self._share.partitions.values():
            silent = not partition.idle and now_us - partition.heard_us >= after_us
            if not partition.done and (silent or partition.stashed is not None):
                self._asked = True
                self._reports.request_barrier()
                return True
        return False

    def _take(self, partition: Partition, chunk: Chunk) -> None:
        partition.position = int(chunk.position)
        partition.reads += 1
        self._dead_letters.take(partition.name, chunk.rejected)
        frame = chunk.frame
        self.rows_in += frame.height
        if self._setup.with_ids and chunk.row_positions is not None:
            frame = frame.with_columns(row_ids(self._step.name, partition.name, chunk.row_positions))
        ahead = self._judge_and_push(partition, chunk, frame) if frame.height or self._step.declares_time else 0
        if not ahead or ahead < frame.height:
            # One whose clock is wrong is as good as silent: it must not hold the others back for ever.
            partition.heard_us = self._clock.monotonic_us()
        if chunk.ended and not self._held:
            # While a recorded cut is followed, it says which partitions had ended by then. Of input that goes on, what has ended
            # counts up to the barrier: then all tasks behind hear of it at one place, and of its time at all.
            partition.done, partition.ended = self._ends, not self._ends
        self._tell_time()

    def _judge_and_push(self, partition: Partition, chunk: Chunk, frame: pl.DataFrame) -> int:
        """Gives how many rows were too far ahead."""
        judged = partition.judged(self._step, chunk, frame)
        if judged.untimed is not None:
            self._dead_letters.take_timeless(partition.name, partition.position, judged.untimed)
        if judged.in_time.height:
            self.chain.push(judged.in_time, late=False)
        if judged.late is not None:
            self.chain.push(judged.late, late=True)
        return judged.ahead

    # Time.

    def _tell_time(self) -> None:
        """Announce the watermark if it has grown, or idleness if it has changed."""
        open_ = [q for q in self._share.partitions.values() if not q.done]
        if not open_ and self._ends:
            if not self.finished:
                self.finished = True
                self._watermark_us = TIME_MAX_US
                self.chain.on_watermark(TIME_MAX_US)
                self._announce(TIME_MAX_US, idle=False)
                self._reports.finished(self.id)
            return
        busy = [q.watermark_us(self._step.lateness_us) for q in open_ if not (q.idle or self._timeless)]
        idle = not busy
        grown = max(self._watermark_us, min(busy)) if busy and has_event_time(self._step) else self._watermark_us
        if grown > self._watermark_us or idle != self._idle or not self._announced:
            self._announced = True
            moved, changed = grown > self._watermark_us, idle != self._idle
            self._watermark_us, self._idle = grown, idle
            if moved:
                self.chain.on_watermark(grown)
            if grown > TIME_MIN_US or idle or changed:
                self._announce(grown, idle=idle)

    def _times_us(self) -> dict[str, int]:
        return {name: q.watermark_us(self._step.lateness_us) for name, q in self._share.partitions.items()}

    def _freeze_source(self, barrier: Barrier) -> FrozenSource:
        return FrozenSource(
            step=self._step.name,
            partitions=self._share.cuts(),
            watermark_us=self._watermark_us,
            stages=self._share.freeze_stages(barrier.attempt, barrier.committed),
        )


def source_cut(parts: Sequence[FrozenSource]) -> SourceCut:
    """One source's cut, from all its tasks' shares. All of them saw the same barriers, so their stages go together."""
    partitions: dict[str, PartitionCut] = {}
    for part in parts:
        partitions |= part.partitions
    stages = [
        {name: cut for stage in shares for name, cut in sorted(stage.items())}
        for shares in zip_longest(*(part.stages for part in parts), fillvalue={})
    ]
    return SourceCut(
        partitions=dict(sorted(partitions.items())),
        watermark_us=min((part.watermark_us for part in parts), default=TIME_MIN_US),
        stages=tuple(stages),
    )
