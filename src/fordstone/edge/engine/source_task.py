"""Source tasks: read partitions, judge lateness, announce time, and begin epochs.

What is in an epoch is decided by positions alone: partitions join, become idle, become active and end at barriers only, so that
an epoch can be replayed from its recorded cut (rule 1). Of several partitions, the one with the oldest time is read next (rule 21).

`ReadingTask` is what every source task does; `SourceTask` is the live one. The one that replays is in `edge.engine.replay`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

import msgspec

from fordstone.connectors.base import Chunk, ReadPlan, Source
from fordstone.edge.engine.state_guard import StateGuard
from fordstone.edge.engine.task import Task, TaskParts
from fordstone.epochs.manifest import PartitionCut, SourceCut
from fordstone.errors import CheckpointError, GoneError, StorageError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.clock import pipeline_clock_us
from fordstone.protocol.partitions import Follower, SourceState, reached_us, source_state
from fordstone.protocol.progress import WaitedFor
from fordstone.runtime.chain import Outlet
from fordstone.runtime.intake import Intake
from fordstone.runtime.partition import (
    DeadLetters,
    Partition,
    Share,
    ended_us,
    has_event_time,
    limit_us,
    read_from,
    row_ids,
)
from fordstone.runtime.snapshot import Barrier, FrozenSource
from fordstone.storage.disk import Disk, FatalStorageError
from fordstone.storage.journal import Journal, seal

log = logging.getLogger(__name__)

POLL_FIRST_US: Final = 1_000
POLL_MAX_US: Final = 20_000
LOOK_EVERY_US: Final = 50_000
"""Interval at which silent and idle partitions are looked at while others are read."""
LOOK_IDLE_US: Final = 1_000_000
"""Interval at which idle partitions are looked at where silence makes none idle. There may be thousands of rolled files."""


REWRITE_AFTER_LINES: Final = 10_000


class _Reserved(msgspec.Struct, frozen=True, array_like=True):
    step: str
    partition: str
    position: int
    time_us: int
    """The newest time before the position."""

    def line(self) -> bytes:
        return seal("reserved", self)


_RESERVED: Final = msgspec.json.Decoder(_Reserved)


class Reservations:
    """For at-most-once: the position that a source has read to is durable before the rows move on.

    A restart begins after the reserved positions, so no row is processed twice. Rows between the last checkpoint and the crash
    are lost. The journal is synced line by line, and rewritten when it grows long.
    """

    def __init__(self, disk: Disk, base: str) -> None:
        self._lock = threading.Lock()
        self._reserved: dict[tuple[str, str], _Reserved] = {}
        self._lines = 0
        disk.make_dirs(base)
        self._journal = Journal(disk, f"{base}/reserved.jsonl")
        lines = self._journal.read()
        # A torn last line is left out: the rows that it reserved had not moved yet.
        for record in lines:
            self._remember(record.decode(_RESERVED))
        if lines.damaged_lines:
            raise CheckpointError(
                f"{self._journal.path}: {lines.damaged_lines} lines are damaged, so rows that were read before might be read "
                "again, which at_most_once rules out. Restore the file from a copy, or start with an empty state directory."
            )
        self._rewrite()

    def reserve(self, step: str, partition: str, position: int, time_us: int) -> None:
        """After this returns, a restart begins after `position`, and outputs no window again that ends before `time_us`.

        At the end of bounded input: partition "", position 0, `TIME_MAX_US`.
        """
        reserved = _Reserved(step, partition, position, time_us)
        with self._lock:
            self._remember(reserved)
            self._lines += 1
            if self._lines >= REWRITE_AFTER_LINES:
                self._rewrite()
            else:
                self._journal.append(reserved.line())

    def beyond(self, step: str, partitions: dict[str, PartitionCut]) -> dict[str, PartitionCut]:
        """The partitions of a checkpoint, moved on to what has been reserved since."""
        moved = dict(partitions)
        for (source, partition), reserved in self._reserved.items():
            if source != step or not partition:
                continue
            cut = moved.get(partition, PartitionCut(position=0))
            moved[partition] = msgspec.structs.replace(
                cut,
                position=max(cut.position, reserved.position),
                max_time_us=max(cut.max_time_us, reserved.time_us),
            )
        return moved

    def time_us(self, step: str, lateness_us: int) -> int:
        """The largest watermark that a source may have announced."""
        times = [reserved.time_us for (source, _), reserved in self._reserved.items() if source == step]
        newest_us = max(times, default=TIME_MIN_US)
        return newest_us if newest_us in {TIME_MIN_US, TIME_MAX_US} else newest_us - lateness_us

    def _remember(self, reserved: _Reserved) -> None:
        self._reserved[reserved.step, reserved.partition] = reserved

    def _rewrite(self) -> None:
        self._journal.rewrite(reserved.line() for reserved in self._reserved.values())
        self._lines = len(self._reserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetup:
    """What a source task is made with."""

    step: p.Source
    source: Source
    batch_rows: int
    with_ids: bool
    dead_letters: Outlet
    partitions: Mapping[str, PartitionCut] = field(default_factory=dict)
    watermark_us: int = TIME_MIN_US


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSetup:
    """What a live source task needs besides."""

    bounded: bool
    joining: tuple[PartitionId, ...] = ()
    """Partitions that were found at the start."""
    gone: frozenset[str] = frozenset()
    """Partitions of the checkpoint that are not there any more."""
    reservation: Reservations | None = None
    pauses_after_barrier: bool = False
    """Blocking mode: read nothing until the attempt is over."""
    before_us: int = 0
    """The wall clock at the end of the last epoch."""
    targets: Mapping[str, ReadPlan] | None = None
    """Read each partition up to here and no further; None: read whatever comes."""
    state_guard: StateGuard | None = None
    """Says what may be read when the state is too large; None: it has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierOrder:
    """What the coordinator puts into a source: the barrier, and which partitions of the source change there."""

    barrier: Barrier
    joining: tuple[PartitionId, ...] = ()
    """Those that this task reads after it."""
    gone: frozenset[str] = frozenset()
    """Those that are not there any more."""
    followers: Mapping[str, Follower] = field(default_factory=dict)
    """Those that a later one continues, with that one."""


class ReadingTask(Task):
    """Reads its share of a source's partitions. Subclasses decide when to read what, and when a barrier passes."""

    def __init__(self, parts: TaskParts, setup: SourceSetup) -> None:
        super().__init__(parts)
        self._setup = setup
        self._step = setup.step
        self._timeless = bool(setup.step.replaces)
        """A control table: it never holds the watermark back."""
        self._share = Share(setup.partitions, now_us=parts.clock.monotonic_us())
        self._watermark_us = setup.watermark_us
        self._idle = False
        self._ended_us = TIME_MIN_US
        self._announced = False
        self._bounded = False
        """Whether a partition that was read to its end has ended for good."""
        self._dead_letters = DeadLetters(setup.step, setup.dead_letters)
        self._intake = Intake(setup.step, parts.chain, self._dead_letters, before_judging=self._before_judging)

    @property
    def rejected_rows(self) -> int:
        return self._dead_letters.rows

    @property
    def first_rejected(self) -> str | None:
        """Why the first rejected row is none."""
        return self._dead_letters.first

    @property
    def source_step(self) -> p.Source:
        return self._step

    @property
    def partition_count(self) -> int:
        return len(self._share.partitions)

    @property
    def watermark_us(self) -> int:
        return self._watermark_us

    def cuts(self) -> dict[str, PartitionCut]:
        """The positions of the partitions about now: for progress bars, so callable from any thread."""
        return self._share.cuts()

    def waited_for(self) -> list[WaitedFor]:
        """The partitions that the watermark waits for; callable from any thread, as `cuts`."""
        step, now_us = self._step, self._clock.monotonic_us()
        if not has_event_time(step) or self._timeless:
            return []
        return [
            WaitedFor(
                step.name, q.name, q.watermark_us(step.lateness_us), step.declares_time, max(0, now_us - q.heard_us)
            )
            for q in tuple(self._share.partitions.values())
            if not (q.done or q.idle)
        ]

    def ends(self) -> frozenset[str]:
        """The partitions that were read to their end about now; callable from any thread, as `cuts`."""
        partitions = tuple(self._share.partitions.values())
        return frozenset(q.name for q in partitions if q.at_end or q.idle or q.done)

    def reads(self, partition: str) -> bool:
        return partition in self._share.partitions

    def close(self) -> None:
        super().close()
        for partition in self._share.partitions.values():
            partition.close()

    # Reading.

    def _readable(self) -> list[Partition]:
        """The active partitions, the one with the oldest time first."""
        active = [q for q in self._share.partitions.values() if not (q.done or q.ended or q.idle)]
        return sorted(active, key=lambda q: (q.watermark_us(self._step.lateness_us), q.reads))

    def _chunk(self, partition: Partition, until: int | None = None) -> Chunk | None:
        if partition.stashed is not None:
            stashed, partition.stashed = partition.stashed, None
            return stashed
        if partition.reader is None:
            partition.reader = self._setup.source.open(
                PartitionId(partition.name), Position(partition.position), with_positions=self._setup.with_ids
            )
        chunk = partition.reader.read(self._setup.batch_rows, None if until is None else Position(until))
        partition.at_end = chunk is None
        return chunk

    def _take(self, partition: Partition, chunk: Chunk) -> None:
        """Push the rows of a chunk through the chain. The caller announces the time afterwards."""
        self.moved = True
        start, partition.position = partition.position, int(chunk.position)
        partition.reads += 1
        self._dead_letters.take(partition.name, chunk.rejected)
        frame = chunk.frame
        if self._setup.with_ids and chunk.row_positions is not None:
            frame = frame.with_columns(row_ids(self._step.name, partition.name, chunk.row_positions))
        before, all_ahead = self._dead_letters.rows, False
        if frame.height or self._step.declares_time:
            with read_from(self._step.name, partition.name, start, partition.position):
                all_ahead = self._intake.take(partition, chunk, frame)
        # A row without a time is rejected, and not counted as read as well.
        self.rows_in += max(0, frame.height - (self._dead_letters.rows - before))
        if not all_ahead:
            # A partition whose clock is wrong counts as silent: it must not hold the others back for ever.
            partition.heard_us = self._clock.monotonic_us()

    def _before_judging(self, partition: Partition, step: p.Source, chunk: Chunk) -> None:
        """Rows have their time from a step of the chain, and are judged next."""

    # Time and barriers.

    def _announce_time(self) -> None:
        """Announce the watermark if it has grown, or idleness if it has changed."""
        state = self._state()
        if state is SourceState.ENDED:
            if not self.finished:
                self.finished = True
                self._watermark_us = TIME_MAX_US
                self.chain.on_watermark(TIME_MAX_US)
                self._announce(TIME_MAX_US, idle=False)
                self._reports.finished(self.id)
            return
        idle = state is SourceState.IDLE
        grown, ended = self._watermark_us, TIME_MIN_US
        if has_event_time(self._step):
            partitions = self._share.partitions.values()
            ended = ended_us(self._step, partitions, bounded=self._bounded)
            active = [q for q in partitions if not (idle or q.done or q.idle)]
            grown = reached_us(grown, waited=[q.watermark_us(self._step.lateness_us) for q in active], ended=[ended])
        moved, changed = grown > self._watermark_us, idle != self._idle or ended != self._ended_us
        if moved or changed or not self._announced:
            self._announced = True
            self._watermark_us, self._idle, self._ended_us = grown, idle, ended
            if moved:
                self.chain.on_watermark(grown)
            if grown > TIME_MIN_US or idle or changed:
                self._announce(grown, idle=idle, ended_us=ended)

    def _state(self) -> SourceState:
        partitions = self._share.partitions.values()
        return source_state(((q.idle or self._timeless, q.done) for q in partitions), bounded=self._bounded)

    def _pass_barrier(self, barrier: Barrier) -> None:
        """Cut here. Changes of partitions that were made at the barrier count in the time after it."""
        idle = self._state() is not SourceState.OPEN
        ended = ended_us(self._step, self._share.partitions.values(), bounded=self._bounded)
        self._cut(replace(barrier, idle=idle and not self.finished, ended_us=ended), logging=False)
        self._announce_time()

    def _times_us(self) -> dict[str, int]:
        return {name: q.watermark_us(self._step.lateness_us) for name, q in self._share.partitions.items()}

    def _freeze_source(self, barrier: Barrier) -> FrozenSource:
        return FrozenSource(
            step=self._step.name,
            partitions=self._share.cuts(),
            watermark_us=self._watermark_us,
            stages=self._share.freeze_stages(barrier.attempt, barrier.committed),
        )


class SourceTask(ReadingTask):
    """Reads as rows come, and cuts where the coordinator's barriers reach it."""

    def __init__(self, parts: TaskParts, setup: SourceSetup, live: LiveSetup) -> None:
        super().__init__(parts, setup)
        self._live = live
        self._bounded = live.bounded
        self._orders: deque[BarrierOrder] = deque()
        self._paused = False
        self._asked = False
        self._refused = False
        self._all_ended = False
        self.caught_up = False
        """Whether everything up to the targets has been read. Read by the coordinator, too."""
        self._looked_us = self._looked_at_idle_us = parts.clock.monotonic_us()
        self._poll_us = POLL_FIRST_US

    # Called by the coordinator, on its own thread.

    def inject(self, order: BarrierOrder) -> None:
        """Queue a barrier; it passes at the next step."""
        self._orders.append(order)
        self.wake()

    def pause(self, *, paused: bool) -> None:
        """Stop or resume reading. Barriers pass all the same."""
        self._paused = paused
        self.wake()

    def end_input(self) -> None:
        """All sources have ended, and the last sealed epoch has all their rows: from here on, input is as bounded input at its end."""
        self._all_ended = True
        self.wake()

    def still_read(self) -> list[WaitedFor]:
        """Of the partitions that the watermark waits for, those that have not been read up to their targets; callable from any thread."""
        at_targets = {q.name for q in tuple(self._share.partitions.values()) if self._at_target(q)}
        return [one for one in self.waited_for() if one.partition not in at_targets]

    # Called by the scheduler.

    @property
    def idle_wait_us(self) -> int | None:
        return None if self.finished else self._poll_us

    def step(self) -> bool:
        blocked = not self._flush()
        if not self._announced and not blocked:
            # Before anything else, barriers too: how an epoch begins must not depend on which thread was quicker.
            self._start()
            self._flush()
            return True
        if self._all_ended and not self.finished:
            # Before any barrier: a replay of the epoch, which is recorded as one of bounded input, comes to this end as well.
            return not blocked and self._end()
        if self._orders and self._announced and (not blocked or self._orders[0].barrier.overtakes):
            self._take_order(self._orders.popleft())
            self._flush()
            return True
        if blocked or self.ended or self._paused:
            return False
        did = self._read()
        if not did and not self.caught_up and self._has_caught_up():
            self.caught_up = True
            self._reports.request_barrier()
        self._poll_us = POLL_FIRST_US if did else min(self._poll_us * 2, POLL_MAX_US)
        if did:
            self._flush()
        return did

    def _start(self) -> None:
        if not has_event_time(self._step):
            self._watermark_us = TIME_MIN_US
        wall_us = self._clock.wall_us()
        self._share.start(
            self._live.joining,
            gone=self._live.gone,
            with_rows=None if self._live.targets is None else self._with_rows(),
            bounded=self._bounded,
            watermark_us=self._watermark_us,
            limit_us=self._limit_us(wall_us, pipeline_clock_us(wall_us, before_us=self._live.before_us, elapsed_us=0)),
            now_us=self._clock.monotonic_us(),
        )
        self._announce_time()
        self._announced = True

    def _limit_us(self, wall_us: int, clock_us: int) -> int:
        return limit_us(
            self._step, wall_us=wall_us, clock_us=clock_us, watermark_us=self._watermark_us, bounded=self._bounded
        )

    def _end(self) -> bool:
        """Let time go to its end. Rows of a control table that were not read change nothing any more."""
        if self._live.reservation is not None and not self._timeless and not self._reserve("", 0, TIME_MAX_US):
            return False
        self._bounded = True
        for partition in self._share.partitions.values():
            partition.idle, partition.done = False, True
        self._announce_time()
        self._flush()
        return True

    def _take_order(self, order: BarrierOrder) -> None:
        now_us = self._clock.monotonic_us()
        self._share.close_gone(order.gone)
        self._look_at_idle()
        continued = self._look_at_continued(order.followers)
        self._share.identify()
        self._share.close_ended()
        self._share.change_idleness(
            self._step.idle_after_us,
            self._setup.source.idleness,
            continued=continued,
            bounded=self._bounded,
            watermark_us=self._watermark_us,
            now_us=now_us,
        )
        self._share.join(order.joining, watermark_us=self._watermark_us, now_us=now_us)
        # It is recorded in the cut, and if this attempt is given up, in the stage that begins here.
        self._share.limit(self._limit_us(order.barrier.wall_us, order.barrier.now_us))
        self._paused = self._paused or (self._live.pauses_after_barrier and not order.barrier.last)
        self._asked = False
        self._pass_barrier(order.barrier)

    # Reading.

    def _read(self) -> bool:
        if self._clock.monotonic_us() - self._looked_us >= LOOK_EVERY_US and self._look_at_silence():
            return True
        guard = self._live.state_guard
        limit = None if self._timeless or guard is None else guard.look()
        for partition in self._readable():
            if self._at_target(partition):
                partition.at_end = True
                continue
            if guard is not None and limit is not None and not limit.allows(self._time_of(partition)):
                guard.refuses(limit, self._reports.request_barrier)
                break  # the others are further ahead
            until = self._until(partition)
            chunk = self._chunk(partition, until)
            if chunk is None:
                continue
            if not self._reserved(partition, chunk):
                partition.stashed = chunk
                return False
            self._take(partition, chunk)
            if chunk.ended:
                # Of input that continues, the end counts from the barrier on: all later tasks see it at one place.
                partition.done, partition.ended = self._bounded, not self._bounded
                if partition.ended and self._setup.source.ended():
                    self._reports.request_barrier()
            self._announce_time()
            return True
        return self._look_at_silence()

    def _at_target(self, partition: Partition) -> bool:
        until = self._until(partition)
        return until is not None and partition.position >= until

    def _time_of(self, partition: Partition) -> int | None:
        """The watermark of a partition; None without event time."""
        return partition.watermark_us(self._step.lateness_us) if has_event_time(self._step) else None

    def _until(self, partition: Partition) -> int | None:
        target = None if self._live.targets is None else self._live.targets.get(partition.name)
        return None if target is None else int(target.position)

    def _with_rows(self) -> frozenset[str]:
        """The partitions that have rows before their targets."""
        partitions, targets = self._share.partitions, self._live.targets or {}
        return frozenset(
            name for name, plan in targets.items() if name in partitions and plan.position > partitions[name].position
        )

    def _has_caught_up(self) -> bool:
        """Whether all partitions were read up to their targets. Those that end there are ended."""
        if self._live.targets is None or self._with_rows():
            return False
        for name, partition in self._share.partitions.items():
            plan = self._live.targets.get(name)
            if plan is not None and plan.ended and not (partition.done or partition.idle):
                partition.ended = True
        return True

    def _look_at_idle(self) -> None:
        """See whether idle partitions have rows again. These are kept until a barrier makes the partition active."""
        if self._live.targets is not None:
            return
        for partition in self._share.partitions.values():
            if partition.idle and not partition.done and partition.stashed is None and self._may_have_rows(partition):
                partition.stashed = self._chunk(partition)

    def _may_have_rows(self, partition: Partition) -> bool:
        """Without opening idle partitions of a series: rolled files are many."""
        source, name, at = self._setup.source, PartitionId(partition.name), Position(partition.position)
        if partition.reader is not None or not source.series(name):
            return True
        try:
            return source.plan_read(name, at, 1).position > at
        except GoneError:
            return False  # it was read to its end; the next barrier closes it

    def _look_at_continued(self, followers: Mapping[str, Follower]) -> set[str]:
        """Return the partitions that another one continues, and that are finished."""
        found = set()
        source = self._setup.source
        for partition in self._share.partitions.values():
            active = not (partition.idle or partition.done or partition.ended)
            follower = followers.get(partition.name)
            if not active or partition.stashed is not None or follower is None:
                continue
            if not partition.is_continued_at(follower.first_us, self._step.lateness_us):
                continue
            available_now = self._live.targets is not None
            if available_now and not self.caught_up:
                continue
            partition.stashed = None if available_now else self._chunk(partition)
            if partition.stashed is None:
                end = source.plan_rest(PartitionId(partition.name), Position(partition.position))
                finished = follower.certain or source.is_quiet(PartitionId(partition.name))
                if end == partition.position:
                    partition.note_follower(follower.partition)
                    if finished:
                        found.add(partition.name)
                elif end is not None and finished and not available_now:
                    partition.stashed = self._chunk(partition, end)
        return found

    def _look_at_silence(self) -> bool:
        """Request a barrier when a partition has become silent, or an idle one has rows again."""
        after_us = self._step.idle_after_us
        self._looked_us = now_us = self._clock.monotonic_us()
        if self._asked or self._bounded or (after_us is None and now_us - self._looked_at_idle_us < LOOK_IDLE_US):
            return False
        self._looked_at_idle_us = now_us
        self._look_at_idle()
        for partition in self._share.partitions.values():
            silent = after_us is not None and not partition.idle and now_us - partition.heard_us >= after_us
            if not partition.done and (silent or partition.stashed is not None):
                self._asked = True
                self._reports.request_barrier()
                return True
        return False

    # At-most-once.

    def _reserved(self, partition: Partition, chunk: Chunk) -> bool:
        """Mark the rows as used before they move; False: the disk refuses, so they stay."""
        if self._live.reservation is None or self._timeless:
            # Rows of a control table may come again: they replace each other by version.
            return True
        reserved = self._reserve(partition.name, int(chunk.position), partition.newest_us(self._step, chunk))
        others = [q for q in self._share.partitions.values() if q is not partition and not q.done]
        if reserved and chunk.ended and not others and self._bounded:
            # The last chunk: time moves to its end, and every window comes out.
            return self._reserve("", 0, TIME_MAX_US)
        return reserved

    def _before_judging(self, partition: Partition, step: p.Source, chunk: Chunk) -> None:
        # The position was reserved before the rows had their time. They cannot be read again: a disk that refuses stops the run.
        if self._live.reservation is not None:
            newest_us = partition.newest_us(step, chunk)
            self._live.reservation.reserve(self._step.name, partition.name, partition.position, newest_us)

    def _reserve(self, partition: str, position: int, time_us: int) -> bool:
        try:
            if self._live.reservation is not None:
                self._live.reservation.reserve(self._step.name, partition, position, time_us)
        except FatalStorageError:
            raise
        except StorageError as error:
            if not self._refused:
                log.warning(
                    "reading paused, position not durable", extra={"source": self._step.name, "problem": str(error)}
                )
            self._refused = True
            return False
        self._refused = False
        return True


def source_cut(parts: Sequence[FrozenSource]) -> SourceCut:
    """One source's cut, from the shares of all its tasks. All of them saw the same barriers, so their stages correspond."""
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
