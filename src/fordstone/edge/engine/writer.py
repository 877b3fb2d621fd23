"""The writer: makes complete attempts durable, seals them, and lets their output go.

Stepped like a task, on a thread of its own, so that no task waits for a disk. The order is what makes it exact: runs,
then cut and manifest (the seal), then sinks, then retention.

Invariants: nothing leaves before its epoch is sealed; an epoch's number is given here, without gaps; a full disk stops
reading, never acknowledges, and is tried again; a failed sync ends the process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import Sink
from fordstone.edge.engine.coordinator import Sealing
from fordstone.edge.engine.crossing import Crossing
from fordstone.edge.engine.replay import SealedRows, latest_rows, left_over
from fordstone.edge.engine.source_task import source_cut
from fordstone.epochs.compaction import merge_state
from fordstone.epochs.manifest import ChannelLog, Cut, LoggedItem, Manifest, Segment, StateRuns, TaskCut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, StorageError
from fordstone.plan.ids import Epoch
from fordstone.runtime.clock import Clock
from fordstone.runtime.dead_letters import DEAD_LETTERS
from fordstone.runtime.snapshot import Batch, FrozenSource, FrozenState, Item, Watermark
from fordstone.state.base import Piece, RunRef
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.failpoint import Failpoints

log = logging.getLogger(__name__)

RETRY_US: Final = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What stands in every manifest of a run."""

    pipeline: str
    node: str
    mode: str
    parallelism: int
    plan_digest: str
    step_digests: Mapping[str, str]


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
    """The longest that a task stood still at the barrier."""


class Writer:
    """Seals one attempt at a time."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        identity: Identity,
        sinks: Mapping[str, tuple[Sink, pl.Schema]],
        clock: Clock,
        failpoints: Failpoints,
        next_epoch: int,
        committed: Callable[[Sealing], None],
        stalled: Callable[[], None],
        sealed: Mapping[int, SealedRows] | None = None,
        keys: Mapping[str, tuple[str, ...]] | None = None,
        varying: frozenset[str] = frozenset(),
        ack: Callable[[Cut], None] | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        """`sealed`: what the epochs that are being computed again had let out. `keys`: by which rows at a sink replace each other.

        `varying`: sinks whose values may be others when computed again (`rebuild.varying_sinks`). `ack`: told, now and then,
        the cut of the oldest checkpoint that is kept: no run will ever start before it. `crossing`: what goes to the hub.
        """
        self.wake: Callable[[], None] = lambda: None
        self.last: Written | None = None
        self.stall: str | None = None
        self.epoch = Epoch(next_epoch - 1)
        self.released_rows = 0
        self.sealed_count = 0
        self._store = store
        self._identity = identity
        self._sinks = sinks
        self._clock = clock
        self._failpoints = failpoints
        self._committed = committed
        self._stalled = stalled
        self._sealed = dict(sealed or {})
        self._keys = dict(keys or {})
        self._varying = varying
        self._let_go = ack
        self._crossing = crossing
        self._carried: dict[str, list[pl.DataFrame]] = {}
        """Rows of epochs computed again that their seals had not let out yet."""
        self._acknowledged: Callable[[], int | None] = lambda: None
        self._jobs: deque[Sealing] = deque()
        self._work: Iterator[None] | None = None
        self._states: deque[FrozenState] = deque()
        self._retry_at_us: int | None = None

    @property
    def sink_names(self) -> frozenset[str]:
        """The sinks that wait for seals."""
        return frozenset(self._sinks)

    def keep_for(self, acknowledged: Callable[[], int | None]) -> None:
        """Keep the newest checkpoint that a follower has acknowledged, beside the last few."""
        self._acknowledged = acknowledged

    def submit(self, sealing: Sealing) -> None:
        """Called by the coordinator with a complete attempt."""
        self._jobs.append(sealing)
        self.wake()

    @property
    def idle_wait_us(self) -> int | None:
        """Sooner when something is to be tried again."""
        if self._retry_at_us is None:
            return None
        return max(self._retry_at_us - self._clock.monotonic_us(), 1_000)

    def step(self) -> bool:
        """Do one piece of work: a run, the seal, a sink, or a merge."""
        if self._retry_at_us is not None and self._clock.monotonic_us() < self._retry_at_us:
            return False
        self._retry_at_us = None
        if self._work is None and self._jobs:
            self._work = self._seal(self._jobs.popleft())
        if self._work is not None:
            if next(self._work, self) is self:
                self._work = None
            return self._retry_at_us is None
        return self._merge_one()

    def close(self) -> None:
        """Close the sinks."""
        for sink, _ in self._sinks.values():
            sink.close()

    def _seal(self, sealing: Sealing) -> Iterator[None]:
        began_us, cpu_ns = self._clock.monotonic_us(), time.thread_time_ns()
        outputs = {
            name: [piece for snapshot in sealing.snapshots for piece in snapshot.outputs.get(name, ())]
            for name in (*self._sinks, *(self._crossing.sinks if self._crossing is not None else ()))
        }
        if sealing.rebuilds is None:
            for name, carried in self._carried.items():
                outputs[name] = [*(Piece(frame, keep=True) for frame in carried), *outputs[name]]
        for name, key in self._keys.items():
            if len(outputs.get(name, ())) > 1:
                # A key that changed again after an attempt that was given up is let out once (rule 15).
                merged = pl.concat([piece.frame() for piece in outputs[name]])
                outputs[name] = [Piece(latest_rows(merged, key), keep=True)]
        frames = {name: [piece.frame() for piece in pieces] for name, pieces in outputs.items()}
        pieces = [piece for snapshot in sealing.snapshots for state in snapshot.states for piece in state.pieces]
        waiting = [
            piece for piece in (*pieces, *(piece for found in outputs.values() for piece in found)) if piece.ref is None
        ]
        for piece in waiting:
            yield from self._patiently(lambda piece=piece: piece.written(self._store.write_run(piece.frame())))  # type: ignore[misc]
        logs: list[ChannelLog] = []
        for snapshot in sealing.snapshots:
            for channel, items in snapshot.in_flight.items():
                yield from self._patiently(lambda c=channel, i=items: logs.append(ChannelLog(c, self._logged(i))))  # type: ignore[misc]
        manifest = self._manifest(sealing, outputs, tuple(logs))
        rebuilt = sealing.rebuilds is not None
        if sealing.rebuilds is not None:
            # What this epoch let out is final: it stands as it was sealed; what came out beyond it goes with the next.
            sealed = self._sealed[sealing.rebuilds.epoch]
            self._carried = {
                name: left_over(
                    sealing.rebuilds,
                    name,
                    sealed.get(name),
                    [*self._carried.get(name, ()), *frames[name]],
                    key=self._keys.get(name),
                    varies=name in self._varying,
                )
                for name in frames
            }
            frames = {name: frames[name] if (known := sealed.get(name)) is None else known for name in frames}
            if manifest.epoch < max(self._sealed):
                # It was let out before the next one was sealed. Released again, what was taken away since would come back.
                frames = {}
        else:
            self._carried = {}
            yield from self._patiently(lambda: self._make_room(manifest))
        if not any(self._carried.values()):
            yield from self._patiently(lambda: self._store.commit(manifest, rebuilt=rebuilt))
        # Else it stays aside until the rows that are carried are sealed too: no manifest but that of the next epoch has them.
        self.epoch = Epoch(manifest.epoch)
        self.sealed_count += 1
        self.last = Written(
            epoch=manifest.epoch,
            took_us=self._clock.monotonic_us() - began_us,
            cpu_us=(time.thread_time_ns() - cpu_ns) // 1000,
            runs=len(waiting),
            size_bytes=sum(piece.ref.size_bytes for piece in waiting if piece.ref is not None),
            pause_us=max((snapshot.pause_us for snapshot in sealing.snapshots), default=0),
        )
        log.info(
            "epoch sealed",
            extra={
                "epoch": manifest.epoch,
                "bytes": self.last.size_bytes,
                "took_us": self.last.took_us,
                "rebuilt": rebuilt,
            },
        )
        yield from self._patiently(lambda: self._cross(manifest, rebuilt=rebuilt))
        for name, found in [(name, found) for name, found in frames.items() if name in self._sinks]:
            yield from self._patiently(lambda name=name, found=found: self.release(name, manifest.epoch, found))  # type: ignore[misc]
        self._committed(sealing)
        self._states = deque(state for snapshot in sealing.snapshots for state in snapshot.states)
        yield
        self._collect()

    def release(self, name: str, epoch: int, frames: Sequence[pl.DataFrame]) -> None:
        """Let the rows of a sealed epoch out at one sink."""
        sink, schema = self._sinks[name]
        self._failpoints.hit("sink.before-release")
        # A clone: a task may hold the very frame, and writing locks it (see `checkpoint.run_file.encode_run`).
        rows = pl.concat(frames).clone() if frames else pl.DataFrame(schema=schema)
        sink.release(epoch, rows)
        if not name.startswith(DEAD_LETTERS):
            self.released_rows += rows.height
        self._failpoints.hit("sink.released")

    def cross_again(self, manifest: Manifest) -> None:
        """Put a sealed epoch into the outbox, in case the crash came between the two. `DamagedError` if its rows are damaged."""
        if self._crossing is not None:
            self._crossing.sealed(manifest)
            self._crossing.check(manifest, self._store)

    def _make_room(self, manifest: Manifest) -> None:
        if self._crossing is not None:
            self._crossing.make_room(manifest)

    def _cross(self, manifest: Manifest, *, rebuilt: bool) -> None:
        if self._crossing is None:
            return
        if rebuilt:
            self._crossing.rebuilt(manifest, self._store)
        else:
            self.released_rows += self._crossing.sealed(manifest)

    def _patiently(self, work: Callable[[], object]) -> Iterator[None]:
        """Do it; when the disk refuses, hold everything and try again until it does not."""
        while True:
            try:
                work()
            except FatalStorageError:
                raise
            except StorageError as error:
                self.stall = str(error)
                self._stalled()
                self._retry_at_us = self._clock.monotonic_us() + RETRY_US
                yield
            else:
                self.stall = None
                yield
                return

    def _collect(self) -> None:
        if self._crossing is not None and self.epoch % self._crossing.outbox.collect_every:
            return
        try:
            held = self._crossing.outbox.held() if self._crossing is not None else frozenset()
            self._store.collect(acknowledged=self._acknowledged(), held=held)
            if self._let_go is not None and (kept := self._store.epochs()):
                self._let_go(self._store.manifest(kept[0]).cut)
        except FatalStorageError:
            raise
        except (StorageError, CheckpointError) as error:
            # Nobody waits for it, and the next epoch tries again.
            log.warning("retention failed", extra={"problem": str(error)})

    def _merge_one(self) -> bool:
        """Fold some pieces of one state, while there is nothing else to do."""
        while self._states:
            frozen = self._states.popleft()
            try:
                if merge_state(self._store, frozen.state, first=frozen.pieces[0] if frozen.pieces else None):
                    return True
            except FatalStorageError:
                raise
            except StorageError:
                # Merging only saves room and time; the next checkpoint will say that the disk refuses.
                self._states.clear()
        return False

    def _manifest(
        self, sealing: Sealing, outputs: Mapping[str, Sequence[Piece]], logs: tuple[ChannelLog, ...]
    ) -> Manifest:
        epoch = sealing.rebuilds.epoch if sealing.rebuilds is not None else self.epoch + 1
        shares: dict[str, list[FrozenSource]] = {}
        for snapshot in sealing.snapshots:
            if snapshot.source is not None:
                shares.setdefault(snapshot.source.step, []).append(snapshot.source)
        segments = tuple(Segment(name, _refs(pieces)) for name, pieces in outputs.items())
        cut = Cut(
            epoch=epoch,
            sources={name: source_cut(parts) for name, parts in shares.items()},
            segments=segments,
            # Unaligned, or with rows in a loop: computed again, it would let more out.
            overtaking=sealing.overtakes or any(item.run is not None for log in logs for item in log.items),
            bounded=sealing.bounded,
            ended=sealing.ended,
            now_us=sealing.now_us,
        )
        if sealing.rebuilds is not None:
            # What is recorded stays as it is, to be followed again if need be; only output that was damaged is replaced.
            whole = {name for name, rows in self._sealed[epoch].items() if rows is not None}
            kept = {segment.sink: segment for segment in sealing.rebuilds.segments if segment.sink in whole}
            cut = msgspec.structs.replace(
                sealing.rebuilds, segments=tuple(kept.get(segment.sink, segment) for segment in segments)
            )
        states = tuple(
            StateRuns(state.step, state.name, state.subtask, _refs(state.pieces))
            for snapshot in sealing.snapshots
            for state in snapshot.states
        )
        tasks = tuple(
            TaskCut(snapshot.task, dict(snapshot.times_us), snapshot.watermark_us, snapshot.finished)
            for snapshot in sealing.snapshots
        )
        identity = self._identity
        return Manifest(
            pipeline=identity.pipeline,
            node=identity.node,
            epoch=epoch,
            attempt=sealing.attempt,
            mode=identity.mode,
            parallelism=identity.parallelism,
            plan_digest=identity.plan_digest,
            step_digests=dict(identity.step_digests),
            created_us=self._clock.wall_us(),
            cut=cut,
            tasks=tasks,
            states=states,
            channels=logs,
        )

    def _logged(self, items: Sequence[Item]) -> tuple[LoggedItem, ...]:
        found = []
        for item in items:
            if isinstance(item, Batch):
                found.append(LoggedItem(kind="late" if item.late else "batch", run=self._store.write_run(item.frame)))
            elif isinstance(item, Watermark):
                found.append(LoggedItem(kind="watermark", watermark_us=item.us, idle=item.idle))
        return tuple(found)


def _refs(pieces: Sequence[Piece]) -> tuple[RunRef, ...]:
    refs = tuple(piece.ref for piece in pieces if piece.ref is not None)
    if len(refs) != len(pieces):
        raise AssertionError("a piece was not written before its manifest")
    return refs
