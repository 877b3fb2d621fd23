"""Tasks: step functions over input channels, without a thread or a clock of their own.

A scheduler calls `step` again and again; each call does one small thing and returns whether it did anything. A task whose output
is blocked does nothing more until there is room, so its own input fills up: back-pressure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, assert_never

import polars as pl

from fordstone.edge.engine.channel import Channel
from fordstone.edge.engine.gate import CutHere, Gate, GateEvent, InFlight, Moved, Probed, Rows, TimeMoved
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.base import Moment
from fordstone.plan.ids import TaskId
from fordstone.runtime.chain import Chain
from fordstone.runtime.clock import Clock
from fordstone.runtime.snapshot import Barrier, Batch, FrozenSource, Item, Probe, TaskSnapshot, Watermark
from fordstone.state.key_group import split_by_owner

PAUSES_KEPT: Final = 4096


class Reports(Protocol):
    """What a task reports to the coordinator. Called on the task's thread; must return at once."""

    def acknowledge(self, snapshot: TaskSnapshot) -> None:
        """A task's part of an attempt is complete."""
        ...

    def request_barrier(self) -> None:
        """A task would like the next epoch to begin soon."""
        ...

    def outlet_full(self) -> None:
        """The output that waits for a seal has reached its maximum: read nothing more before the seal."""
        ...

    def finished(self, task: TaskId) -> None:
        """A source has ended, or a loop is empty."""
        ...


class Output:
    """One edge out of a task: to one channel, or split by key over several."""

    def __init__(
        self, channels: Sequence[Channel], keys: Sequence[str], pending: deque[tuple[Channel, Item]], *, back: bool
    ) -> None:
        self.channels = tuple(channels)
        self.back = back
        self._keys = tuple(keys)
        self._pending = pending

    def send(self, frame: pl.DataFrame, *, late: bool) -> None:
        """Queue rows for the tasks that come next."""
        if len(self.channels) == 1:
            self._pending.append((self.channels[0], Batch(frame, late)))
            return
        for channel, part in zip(self.channels, split_by_owner(frame, self._keys, len(self.channels)), strict=True):
            if part.height:
                self._pending.append((channel, Batch(part, late)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskParts:
    """What every task is made of. `pending` is shared with the outputs, which queue into it."""

    id: TaskId
    chain: Chain
    outputs: Sequence[Output]
    pending: deque[tuple[Channel, Item]]
    reports: Reports
    clock: Clock


class Task(ABC):
    """One subtask of one vertex."""

    def __init__(self, parts: TaskParts) -> None:
        self.id = parts.id
        self.chain = parts.chain
        self.outputs = tuple(parts.outputs)
        self.wake: Callable[[], None] = lambda: None
        self.rows_in = 0
        self.pauses_us: deque[int] = deque(maxlen=PAUSES_KEPT)
        self.ended = False
        """The last barrier has passed: there is nothing more to do."""
        self._pending = parts.pending
        self._reports = parts.reports
        self._clock = parts.clock
        self._half: TaskSnapshot | None = None
        self.finished = False
        self.moved = True
        """Whether rows came or time moved since the last barrier. Read by the coordinator, too."""

    @abstractmethod
    def step(self) -> bool:
        """Do one small thing; return whether anything was done."""

    @property
    @abstractmethod
    def watermark_us(self) -> int:
        """How far time has come here."""

    @property
    def idle_wait_us(self) -> int | None:
        return None

    @property
    def in_flight(self) -> bool:
        """Whether items wait before or after this task."""
        return bool(self._pending)

    def close(self) -> None:
        self.chain.close()

    def _flush(self) -> bool:
        """Move queued output into channels, as far as there is room; return whether nothing is left."""
        while self._pending:
            channel, item = self._pending[0]
            if not channel.offer(item):
                return False
            self._pending.popleft()
        return True

    def _broadcast(self, item: Watermark | Barrier | Probe, *, back: bool = True) -> None:
        for output in self.outputs:
            if back or not output.back:
                self._pending.extend((channel, item) for channel in output.channels)

    def _announce(self, us: int, *, idle: bool, ended_us: int = TIME_MIN_US) -> None:
        self.moved = True
        self._broadcast(Watermark(us, idle, ended_us), back=False)

    def _cut(self, barrier: Barrier, *, logging: bool) -> None:
        """Freeze and pass the barrier on. `logging`: what was in flight is still to come."""
        began_us = self._clock.monotonic_us()
        self.chain.on_barrier(Moment(now_us=barrier.now_us, before_us=barrier.before_us))
        snapshot = self._freeze(barrier)
        pause_us = self._clock.monotonic_us() - began_us
        self.pauses_us.append(pause_us)
        snapshot = replace(snapshot, pause_us=pause_us)
        if barrier.overtakes:
            # What this task has already worked out counts as before the barrier; the channels take it whatever their bounds.
            while self._pending:
                channel, item = self._pending.popleft()
                channel.force(item)
            for output in self.outputs:
                for channel in output.channels:
                    channel.overtake(barrier)
        else:
            self._broadcast(barrier)
        self._half = None
        self.moved = False
        if logging:
            self._half = snapshot
        else:
            self._reports.acknowledge(snapshot)
        if barrier.last:
            self.ended = True

    def _freeze(self, barrier: Barrier) -> TaskSnapshot:
        return TaskSnapshot(
            task=self.id,
            attempt=barrier.attempt,
            states=self.chain.freeze(),
            source=self._freeze_source(barrier),
            times_us=self._times_us(),
            watermark_us=self.watermark_us,
            outputs=self.chain.freeze_outlets(barrier.attempt, barrier.committed),
            finished=self.finished,
            moved=self.moved,
            clock_due_us=self.chain.clock_due_us(),
        )

    def _freeze_source(self, barrier: Barrier) -> FrozenSource | None:  # noqa: ARG002 - sources need it
        return None

    def _times_us(self) -> dict[str, int]:
        return {}


class StreamTask(Task):
    """A task that reads channels through a gate."""

    def __init__(self, parts: TaskParts, gate: Gate) -> None:
        super().__init__(parts)
        self.gate = gate

    @property
    def watermark_us(self) -> int:
        return self.gate.watermark_us

    @property
    def in_flight(self) -> bool:
        return super().in_flight or any(len(channel) for channel in self.gate.channels)

    def start(self, *, mute: bool) -> None:
        """After a restore, announce the watermark again.

        `mute`: time may have come further than the checkpoint. What it would emit may have been output already, and is dropped.
        """
        if self.gate.watermark_us > TIME_MIN_US:
            self.chain.on_watermark(self.gate.watermark_us, mute=mute)
            self._announce(self.gate.watermark_us, idle=False)

    def step(self) -> bool:
        blocked = not self._flush()
        event = self.gate.next(urgent_only=blocked)
        if event is None:
            return False
        self._handle(event)
        self._flush()
        return True

    def _handle(self, event: GateEvent) -> None:
        match event:
            case Rows(batch=batch):
                self.moved = True
                self.rows_in += batch.frame.height
                self.chain.push(batch.frame, late=batch.late)
            case TimeMoved(us=us, idle=idle):
                self._on_time(us, idle=idle)
            case CutHere(barrier=barrier, logging=logging):
                self._cut(barrier, logging=logging)
            case InFlight(attempt=attempt, logs=logs):
                half, self._half = self._half, None
                if half is not None and half.attempt == attempt:
                    self._reports.acknowledge(replace(half, in_flight=logs))
            case Probed(probe=probe):
                self._on_probe(probe)
            case Moved():
                pass
            case _:
                assert_never(event)

    def _on_time(self, us: int, *, idle: bool) -> None:
        self.chain.on_watermark(us)
        self._announce(us, idle=idle)

    def _on_probe(self, probe: Probe) -> None:
        self._broadcast(probe)

    def _times_us(self) -> dict[str, int]:
        return self.gate.times_us()


class LoopTask(StreamTask):
    """The head of a loop. Time stops here: below, there is only the end, once the loop is empty."""

    def __init__(self, parts: TaskParts, gate: Gate) -> None:
        super().__init__(parts, gate)
        self._probe = 0
        self._probing = False
        self._came_back = False

    def start(self, *, mute: bool) -> None:
        """There is no time to announce."""

    def step(self) -> bool:
        """As a stream task; and once the input has ended, probe the loop until it is empty."""
        if super().step():
            return True
        wanted = self.gate.forward_ended and not self.finished
        if wanted and not self._probing and not self._pending:
            self._send_probe()
            self._flush()
            return True
        return False

    def _handle(self, event: GateEvent) -> None:
        if isinstance(event, Rows) and event.back:
            self._came_back = True
        super()._handle(event)

    def _on_time(self, us: int, *, idle: bool) -> None:
        """Nothing: event time ends at a loop."""

    def _on_probe(self, probe: Probe) -> None:
        if probe.number != self._probe or not self._probing:
            return
        self._probing = False
        if self._came_back or any(len(channel) for channel in self.gate.channels):
            # Sent again when there is nothing else to do: a probe must not keep other items from being taken.
            return
        self.finished = True
        self.chain.on_watermark(TIME_MAX_US)
        self._broadcast(Watermark(TIME_MAX_US))
        self._reports.finished(self.id)

    def _send_probe(self) -> None:
        self._probing, self._came_back = True, False
        self._probe += 1
        self._broadcast(Probe(self._probe))
