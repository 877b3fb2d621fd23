"""The writer: makes complete attempts durable, seals them, and releases their output.

Stepped like a task, on a thread of its own, so that no task waits for a disk. The order is what makes it exact: runs, then
the record and the manifest (the seal), then outbox and sinks, then retention. Each of these is in a piece of its own (`sealing`,
`release`, `link.outbox`).

Invariants: nothing is released before its epoch is sealed and final; epochs are numbered here, without gaps; a full disk stops
reading, never acknowledges, and is tried again; a failed sync ends the process.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final

from fordstone.connectors.base import SinkDelayedError
from fordstone.edge.engine.release import ReleaseLog, Retention, SinkRelease
from fordstone.edge.engine.sealing import Crossing, Draft, Identity, OutputRules, Sealing
from fordstone.edge.link.outbox import Outbox, OutboxFullError
from fordstone.epochs.manifest import Manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import StorageError
from fordstone.plan.ids import Epoch
from fordstone.protocol.health import WaitsFor
from fordstone.protocol.retry import DISK_RETRY_US, Backoff
from fordstone.runtime.clock import Clock
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.remote import StoreAwayError

log = logging.getLogger(__name__)

FINAL_POLL_US: Final = 10_000
STORE_RETRY: Final = Backoff(first_us=500_000, max_us=30_000_000)
"""The wait before a sink in a store at a URL is tried again: others may wait for the same store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the last checkpoint cost."""

    epoch: int
    took_us: int
    """From all acknowledgements to the seal."""
    cpu_us: int
    runs: int
    size_bytes: int
    """New bytes written."""
    pause_us: int
    """The longest time that a task stopped at the barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the writer takes each epoch through, in this order."""

    store: CheckpointStore
    release_log: ReleaseLog
    crossing: Crossing
    outbox: Outbox | None
    sinks: SinkRelease
    retention: Retention


class Writer:
    """Seals and releases one attempt at a time."""

    def __init__(
        self,
        stages: Stages,
        identity: Identity,
        rules: OutputRules,
        clock: Clock,
        *,
        next_epoch: int,
        committed: Callable[[Sealing], None],
        stalled: Callable[[], None],
    ) -> None:
        """`committed` is called when an epoch is released, `stalled` when the disk refuses."""
        self.wake: Callable[[], None] = lambda: None
        self.last: Written | None = None
        self.stall: str | None = None
        self.stalled_by: WaitsFor | None = None
        self.epoch = Epoch(next_epoch - 1)
        """The newest epoch that is sealed."""
        self.sealed_count = 0
        self.crossed_rows = 0
        self.stages = stages
        self._identity = identity
        self._rules = rules
        self._clock = clock
        self._committed = committed
        self._stalled = stalled
        self._jobs: deque[Sealing] = deque()
        self._work: Iterator[None] | None = None
        self._retry_at_us: int | None = None

    @property
    def released_rows(self) -> int:
        """Rows that were handed to sinks and to the outbox."""
        return self.stages.sinks.released_rows + self.crossed_rows

    def submit(self, sealing: Sealing) -> None:
        """Called by the coordinator with a complete attempt."""
        self._jobs.append(sealing)
        self.wake()

    @property
    def waits_for_sink(self) -> bool:
        """Whether the newest epoch is sealed, and its release waits for a sink that is away."""
        return self.stalled_by == "sink"

    @property
    def idle_wait_us(self) -> int | None:
        if self._retry_at_us is None:
            return None
        return max(self._retry_at_us - self._clock.monotonic_us(), 1_000)

    def step(self) -> bool:
        if self._retry_at_us is not None and self._clock.monotonic_us() < self._retry_at_us:
            return False
        self._retry_at_us = None
        if self._work is None and self._jobs:
            self._work = self._write(self._jobs.popleft())
        if self._work is not None:
            if next(self._work, self) is self:
                self._work = None
            return self._retry_at_us is None
        return self.stages.retention.merge_one()

    def close(self) -> None:
        self.stages.sinks.close()

    def _write(self, sealing: Sealing) -> Iterator[None]:
        """Take one attempt from its snapshots to its release. Yields between pieces of work."""
        outputs = self._rules.outputs(sealing)
        frames = {name: [piece.frame() for piece in pieces] for name, pieces in outputs.items()}
        manifest = yield from self._seal(sealing, Draft(self.stages.store, sealing, outputs))
        while not self.stages.release_log.is_final(manifest.epoch):
            self._retry_at_us = self._clock.monotonic_us() + FINAL_POLL_US
            yield
        if self.stages.outbox is not None:
            self.crossed_rows += self.stages.outbox.add(manifest.cut)
        sinks = self.stages.sinks
        for name in [name for name in frames if name in sinks.names]:
            yield from self._until_written(lambda name=name: sinks.release(name, manifest.epoch, frames[name]))  # type: ignore[misc]
        self._committed(sealing)
        self.stages.retention.merge_later(state for snapshot in sealing.snapshots for state in snapshot.states)
        yield
        self.stages.retention.collect(manifest.epoch)

    def _seal(self, sealing: Sealing, draft: Draft) -> Generator[None, None, Manifest]:
        began_us, cpu_ns = self._clock.monotonic_us(), time.thread_time_ns()
        for work in draft.work():
            yield from self._until_written(work)
        tasks = draft.tasks()
        cut = self.stages.crossing.add_to(draft.cut(self.epoch + 1), tasks)
        outbox = self.stages.outbox
        if outbox is not None:
            cut = outbox.continuing(cut)
        manifest = draft.manifest(self._identity, cut, tasks, created_us=self._clock.wall_us())
        if outbox is not None:
            yield from self._until_written(lambda: outbox.make_room(cut))
        yield from self._until_written(lambda: self.stages.release_log.seal(manifest))
        self.epoch = Epoch(manifest.epoch)
        self.sealed_count += 1
        self.last = Written(
            epoch=manifest.epoch,
            took_us=self._clock.monotonic_us() - began_us,
            cpu_us=(time.thread_time_ns() - cpu_ns) // 1000,
            runs=draft.new_runs,
            size_bytes=draft.new_bytes,
            pause_us=sealing.pause_us,
        )
        extra = {"epoch": manifest.epoch, "bytes": self.last.size_bytes, "took_us": self.last.took_us}
        log.info("epoch sealed", extra=extra)
        return manifest

    def _until_written(self, work: Callable[[], object]) -> Iterator[None]:
        """Do it; when the disk refuses, stop reading and try again until it succeeds."""
        for failures in itertools.count(1):
            try:
                work()
            except FatalStorageError:
                raise
            except StorageError as error:
                self.stall, self.stalled_by = str(error), _what_refused(error)
                self._stalled()
                wait_us = DISK_RETRY_US
                if isinstance(error, StoreAwayError):
                    wait_us = STORE_RETRY.wait_us(failures, chance=random.random())  # noqa: S311 - jitter
                self._retry_at_us = self._clock.monotonic_us() + wait_us
                yield
            else:
                self.stall = self.stalled_by = None
                yield
                return


def _what_refused(error: StorageError) -> WaitsFor:
    match error:
        case OutboxFullError():
            return "hub"
        case SinkDelayedError() | StoreAwayError():
            return "sink"
        case _:
            return "disk"
