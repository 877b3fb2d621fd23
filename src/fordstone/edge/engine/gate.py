"""The gate: takes items off a task's input channels, and keeps time and barriers in order.

What a barrier does is judged in `protocol.alignment`; the gate moves items, logs what is in flight when the cut needs
it, and works out the task's watermark: the least over its channels, idle ones left out, never going back
(`protocol.partitions.reached_us`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fordstone.edge.engine.channel import Channel
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.plan.ids import Attempt
from fordstone.protocol.alignment import Alignment, Arrival, Overtaking
from fordstone.protocol.partitions import reached_us
from fordstone.runtime.snapshot import Barrier, Batch, Item, Probe, Watermark

FORWARD_EVERY: Final = 4
"""At the head of a busy loop: number of items from the loop per item of new input."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch to work on."""

    batch: Batch
    back: bool = False


@dataclass(frozen=True, slots=True)
class TimeMoved:
    """The task's watermark has grown, or it has become idle or busy again."""

    us: int
    idle: bool


@dataclass(frozen=True, slots=True)
class CutHere:
    """Freeze the state now and pass the barrier on. `logging`: acknowledge only when `InFlight` comes."""

    barrier: Barrier
    logging: bool


@dataclass(frozen=True, slots=True)
class InFlight:
    """What was in flight at the cut, by channel."""

    attempt: Attempt
    logs: Mapping[str, tuple[Item, ...]]


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe has come on every channel (at a loop's head: around the loop)."""

    probe: Probe


@dataclass(frozen=True, slots=True)
class Moved:
    """Something was taken, and there is nothing for the task to do about it."""


GateEvent = Rows | TimeMoved | CutHere | InFlight | Probed | Moved


class Gate:
    """The input side of one task. `back` names the channels that close a loop."""

    def __init__(
        self,
        channels: Sequence[Channel],
        *,
        hold: bool,
        back: frozenset[int] = frozenset(),
        choose: Callable[[int], int] | None = None,
    ) -> None:
        self.channels = tuple(channels)
        self._back = back
        self._hold = hold
        self._choose = choose
        self._turn = 0
        self._backs = 0
        self._replaying = sum(len(channels[index]) for index in back)
        """How many items that a checkpoint had logged in the loop are still to be taken."""
        self._alignment = Alignment(len(channels), hold=hold, back=back)
        self._overtaking = Overtaking(len(channels))
        self._newest = Attempt(0)
        self._logs: dict[int, list[Item]] = {}
        self._loop_log: list[Item] | None = None
        self._ready: GateEvent | None = None
        self._times = [TIME_MIN_US] * len(channels)
        self._idle = [False] * len(channels)
        self._idle_changed = False
        self._idle_next = [False] * len(channels)
        """As the barriers that have come declare it for the time after the cut."""
        self._ended_next_us = TIME_MIN_US
        self._probed: dict[int, set[int]] = {}
        self.watermark_us = TIME_MIN_US
        self._ended_us = TIME_MIN_US
        """The furthest that a partition ended, of all channels."""
        self.idle = False
        self.forward_ended = False

    def restore(self, times_us: Mapping[str, int], floor_us: int) -> None:
        """Restore the watermarks of a checkpoint; `floor_us` for channels it does not have."""
        self._times = [times_us.get(channel.name, floor_us) for channel in self.channels]
        self.watermark_us = max(floor_us, min((self._times[i] for i in self._forward()), default=TIME_MIN_US))

    def times_us(self) -> dict[str, int]:
        return {channel.name: time for channel, time in zip(self.channels, self._times, strict=True)}

    def next(self, *, urgent_only: bool = False) -> GateEvent | None:
        """The next thing to do, or None. `urgent_only`: overtaking barriers alone, for a task whose output is blocked."""
        if self._ready is not None:
            event, self._ready = self._ready, None
            return event
        for index, channel in enumerate(self.channels):
            overtaken = channel.overtaken()
            if overtaken is not None:
                return self._on_overtaking(index, *overtaken)
        if urgent_only:
            return None
        if self._idle_changed:
            self._idle_changed = False
            moved = self._work_out_time()
            if isinstance(moved, TimeMoved):
                return moved
        for index in self._order():
            if self._alignment.held(index):
                continue
            item = self.channels[index].take()
            if item is not None:
                return self._on_item(index, item)
        return None

    def _forward(self) -> list[int]:
        return [index for index in range(len(self.channels)) if index not in self._back]

    def _order(self) -> list[int]:
        count = len(self.channels)
        if self._choose is not None:
            self._turn = self._choose(count)
        else:
            self._turn = (self._turn + 1) % count
        order = [(self._turn + i) % count for i in range(count)]
        if not self._back:
            return order
        # What comes back goes first, which keeps the loop short and replays what a checkpoint had logged before new
        # input; but now and then input is let in, or barriers would never come through a busy loop.
        self._backs = (self._backs + 1) % FORWARD_EVERY
        forward_first = self._backs == 0 and not self._replaying
        return sorted(order, key=lambda index: (index not in self._back) != forward_first)

    def _on_item(self, index: int, item: Item) -> GateEvent:
        if not isinstance(item, Barrier | Probe):
            if self._overtaking.logging(index):
                self._logs[index].append(item)
            if index in self._back and isinstance(item, Batch):
                self._replaying = max(self._replaying - 1, 0)
                if self._loop_log is not None:
                    self._loop_log.append(item)
        match item:
            case Batch():
                return Rows(item, back=index in self._back)
            case Watermark():
                return self._on_watermark(index, item)
            case Barrier():
                return self._on_barrier(index, item)
            case Probe():
                return self._on_probe(index, item)

    def _on_watermark(self, index: int, mark: Watermark) -> GateEvent:
        if index in self._back:
            return Moved()
        self._times[index] = max(self._times[index], mark.us)
        self._idle[index] = mark.idle
        self._ended_us = max(self._ended_us, mark.ended_us)
        return self._work_out_time()

    def _busy(self) -> list[int]:
        """The watermarks that time goes by."""
        forward = self._forward()
        self.forward_ended = all(self._times[i] == TIME_MAX_US for i in forward)
        busy = [self._times[i] for i in forward if not self._idle[i]]
        # What has ended does not make time end for what is only idle.
        return [] if busy and min(busy) == TIME_MAX_US and not self.forward_ended else busy

    def _is_idle(self, busy: list[int]) -> bool:
        """Whether nothing comes from this task. Time that moves on to where partitions ended may close windows first."""
        return not busy and self._ended_us <= self.watermark_us

    def _work_out_time(self) -> GateEvent:
        busy = self._busy()
        idle = self._is_idle(busy)
        grown = reached_us(self.watermark_us, waited=busy, ended=[self._ended_us])
        if grown == self.watermark_us and idle == self.idle:
            return Moved()
        self.watermark_us, self.idle = grown, idle
        return TimeMoved(grown, idle)

    def _on_barrier(self, index: int, barrier: Barrier) -> GateEvent:
        if barrier.attempt > self._newest:
            self._newest = barrier.attempt
            self._overtaking.abandon()
            self._loop_log = None
        self._idle_next[index] = barrier.idle
        self._ended_next_us = max(self._ended_next_us, barrier.ended_us)
        match self._alignment.arrive(index, barrier.attempt):
            case Arrival.SNAPSHOT:
                if self._back:
                    self._loop_log = []
                if self._hold:
                    # Without holding back, a channel may have said more about itself since its barrier.
                    for forward in self._forward():
                        self._idle[forward] = self._idle_next[forward]
                self._ended_us = max(self._ended_us, self._ended_next_us)
                # Time moves after the cut: windows that close by it belong to the next epoch, and so does the watermark.
                self._idle_changed = True
                passed = replace(barrier, idle=self._is_idle(self._busy()), ended_us=TIME_MIN_US)
                return CutHere(passed, logging=bool(self._back))
            case Arrival.RETURNED if self._loop_log is not None:
                log, self._loop_log = tuple(self._loop_log), None
                return InFlight(barrier.attempt, {self.channels[index].name: log})
            case _:
                return Moved()

    def _on_overtaking(self, index: int, barrier: Barrier, overtook: tuple[Item, ...]) -> GateEvent:
        if barrier.attempt < self._newest:
            return Moved()
        self._newest = barrier.attempt
        moving: list[Item] = [item for item in overtook if not isinstance(item, Barrier | Probe)]
        match self._overtaking.arrive(index, barrier.attempt):
            case Arrival.SNAPSHOT:
                self._logs = {i: [] for i in range(len(self.channels))}
                self._logs[index] = moving
                if self._overtaking.complete:
                    self._ready = self._in_flight(barrier.attempt)
                return CutHere(barrier, logging=True)
            case Arrival.LOGGED:
                self._logs[index] += moving
                return self._in_flight(barrier.attempt)
            case _:
                if index in self._logs:
                    self._logs[index] += moving
                return Moved()

    def _in_flight(self, attempt: Attempt) -> InFlight:
        logs, self._logs = self._logs, {}
        return InFlight(attempt, {self.channels[i].name: tuple(items) for i, items in logs.items() if items})

    def _on_probe(self, index: int, probe: Probe) -> GateEvent:
        if self._back:
            return Probed(probe) if index in self._back else Moved()
        come = self._probed.setdefault(probe.number, set())
        come.add(index)
        if len(come) < len(self.channels):
            return Moved()
        self._probed = {number: seen for number, seen in self._probed.items() if number > probe.number}
        return Probed(probe)
