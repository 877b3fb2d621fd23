"""Deliberate faults in the protocol. The suites must catch every one of them: a suite that does not is worth nothing.

Each mutant is a context manager that breaks one thing while it is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import msgspec
import polars as pl
from tests.simulation.sink_files import OUTPUT

from fordstone.edge.engine import assembly, coordinator, engine, replay, source_task
from fordstone.edge.engine.channel import Channel
from fordstone.edge.engine.gate import Gate, InFlight
from fordstone.edge.engine.source_task import SourceTask
from fordstone.edge.engine.writer import Writer
from fordstone.epochs import store as store_module
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.aggregate.running import Combine
from fordstone.operators.base import ROW_WATERMARK, Emits
from fordstone.operators.window.panes import Closing, Judged
from fordstone.operators.window.tumbling import WindowAggregate
from fordstone.plan.ids import Attempt
from fordstone.protocol.alignment import Alignment
from fordstone.protocol.retention import Retention, decide_retention
from fordstone.runtime.chain import Outlet
from fordstone.runtime.snapshot import Barrier, Batch, Item, TaskSnapshot
from fordstone.testing.memory_disk import MemoryDisk


@contextmanager
def no_alignment() -> Iterator[None]:
    """Gates hold nothing back."""
    with patch.object(Alignment, "held", lambda *_: False):
        yield


@contextmanager
def barrier_overtakes() -> Iterator[None]:
    """In aligned mode too, the barrier passes the rows that stand before it in a channel."""
    append = Channel._append

    def jump(self: Channel, item: Item) -> None:
        append(self, item)
        if isinstance(item, Barrier):
            self._items.rotate(1)

    with patch.object(Channel, "_append", jump):
        yield


@contextmanager
def manifest_before_runs() -> Iterator[None]:
    """The manifest is durable before the runs that it names."""
    fsync, fsync_dir = MemoryDisk.fsync, MemoryDisk.fsync_dir

    def lazy_fsync(self: MemoryDisk, path: str) -> None:
        if "/runs/" not in path:
            fsync(self, path)

    def lazy_fsync_dir(self: MemoryDisk, path: str) -> None:
        if not path.endswith("/runs"):
            fsync_dir(self, path)

    with patch.object(MemoryDisk, "fsync", lazy_fsync), patch.object(MemoryDisk, "fsync_dir", lazy_fsync_dir):
        yield


@contextmanager
def acknowledge_before_fsync() -> Iterator[None]:
    """Output leaves although the manifest may still be lost."""
    fsync, fsync_dir = MemoryDisk.fsync, MemoryDisk.fsync_dir

    def lazy_fsync(self: MemoryDisk, path: str) -> None:
        if "/manifests/" not in path:
            fsync(self, path)

    def lazy_fsync_dir(self: MemoryDisk, path: str) -> None:
        if not path.endswith("/manifests"):
            fsync_dir(self, path)

    with patch.object(MemoryDisk, "fsync", lazy_fsync), patch.object(MemoryDisk, "fsync_dir", lazy_fsync_dir):
        yield


@contextmanager
def output_is_not_synced() -> Iterator[None]:
    """The file sink takes an epoch for released although its file may still be lost."""
    fsync, fsync_dir = MemoryDisk.fsync, MemoryDisk.fsync_dir

    def lazy_fsync(self: MemoryDisk, path: str) -> None:
        if not path.startswith(OUTPUT):
            fsync(self, path)

    def lazy_fsync_dir(self: MemoryDisk, path: str) -> None:
        if not path.startswith(OUTPUT):
            fsync_dir(self, path)

    with patch.object(MemoryDisk, "fsync", lazy_fsync), patch.object(MemoryDisk, "fsync_dir", lazy_fsync_dir):
        yield


@contextmanager
def retention_drops_named_runs() -> Iterator[None]:
    """Runs go as soon as the newest manifest does not name them, although an older one is kept."""
    decide = decide_retention

    def greedy(manifests: Mapping[int, frozenset[str]], runs: set[str], **more: Any) -> Retention:
        decision = decide(manifests, runs, **more)
        newest = manifests[max(manifests)] if manifests else frozenset()
        return replace(decision, remove_runs=tuple(sorted(set(runs) - newest - set(more["held"]))))

    with patch.object(store_module, "decide_retention", greedy):
        yield


@contextmanager
def loop_log_not_saved() -> Iterator[None]:
    """What is inside a loop at the barrier is forgotten."""
    original = Gate.next

    def forgetful(self: Gate, *, urgent_only: bool = False) -> object:
        event = original(self, urgent_only=urgent_only)
        return InFlight(event.attempt, {}) if isinstance(event, InFlight) else event

    with patch.object(Gate, "next", forgetful):
        yield


@contextmanager
def positions_after_the_barrier() -> Iterator[None]:
    """A source's position is taken after it has read on, instead of at the barrier."""
    original = SourceTask._cut

    def late(self: SourceTask, barrier: Barrier, *, logging: bool) -> None:
        reports, self._reports = self._reports, _Held()  # type: ignore[assignment]
        original(self, barrier, logging=logging)
        held, self._reports = self._reports, reports
        self._read()
        for snapshot in held.snapshots:  # type: ignore[attr-defined]
            reports.acknowledge(replace(snapshot, source=replace(snapshot.source, partitions=self.cuts())))

    with patch.object(SourceTask, "_cut", late):
        yield


class _Held:
    def __init__(self) -> None:
        self.snapshots: list[TaskSnapshot] = []

    def acknowledge(self, snapshot: TaskSnapshot) -> None:
        self.snapshots.append(snapshot)


@contextmanager
def aborted_output_is_dropped() -> Iterator[None]:
    """What an attempt that was given up had frozen is not carried into the next."""
    original = Outlet.freeze

    def forget(self: Outlet, attempt: Attempt, committed: Attempt) -> object:
        self._frozen = []
        return original(self, attempt, committed)

    with patch.object(Outlet, "freeze", forget):
        yield


@contextmanager
def sealed_output_stays_pending() -> Iterator[None]:
    """What was sealed is released again with the next epoch."""
    original = Outlet.freeze

    def keep(self: Outlet, attempt: Attempt, committed: Attempt) -> object:
        del committed
        return original(self, attempt, Attempt(0))

    with patch.object(Outlet, "freeze", keep):
        yield


@contextmanager
def release_before_the_seal() -> Iterator[None]:
    """Sinks get the rows before the manifest is written."""
    original = Writer._seal

    def early(self: Writer, sealing: Any, draft: Any) -> Any:
        for name, pieces in self._rules.outputs(sealing).items():
            self.stages.sinks.release(name, self.epoch + 1, [piece.frame() for piece in pieces])
        return (yield from original(self, sealing, draft))

    with patch.object(Writer, "_seal", early):
        yield


@contextmanager
def late_below_the_watermark() -> Iterator[None]:
    """A row below its watermark is late, although its window is open."""
    original = Closing.judge

    def harsh(self: Closing, frame: pl.DataFrame, ends: pl.Series, watermarks: pl.Series) -> Judged:
        below = ROW_WATERMARK in frame.columns
        return original(self, frame, ends, pl.Series([TIME_MAX_US] * frame.height) if below else watermarks)

    with patch.object(Closing, "judge", harsh):
        yield


@contextmanager
def late_by_the_step_alone() -> Iterator[None]:
    """A row counts while the step's windows are open, although they are closed for its own partition."""
    take, made = WindowAggregate._take, Combine.on_batch

    def lenient(self: WindowAggregate, frame: pl.DataFrame, ends: pl.Series, *, late: bool) -> Emits:
        del late
        return take(self, frame.drop(ROW_WATERMARK, strict=False), ends, late=False)

    def combined(self: Combine, frame: pl.DataFrame, *, late: bool) -> Emits:
        del late
        return made(self, frame.drop(ROW_WATERMARK, strict=False), late=False)

    with patch.object(WindowAggregate, "_take", lenient), patch.object(Combine, "on_batch", combined):
        yield


@contextmanager
def unaligned_loses_a_batch() -> Iterator[None]:
    """Of what is in flight in each channel, the last batch is missing in the checkpoint."""
    original = Gate._in_flight

    def lossy(self: Gate, attempt: Attempt) -> InFlight:
        event = original(self, attempt)
        return replace(event, logs={name: _without_last_batch(items) for name, items in event.logs.items()})

    with patch.object(Gate, "_in_flight", lossy):
        yield


def _without_last_batch(items: tuple[Item, ...]) -> tuple[Item, ...]:
    last = max((place for place, item in enumerate(items) if isinstance(item, Batch)), default=len(items))
    return items[:last] + items[last + 1 :]


@contextmanager
def deduplication_forgets_at_a_rescale() -> Iterator[None]:
    """With another parallelism, keys that were seen are not loaded."""
    original = assembly._pieces

    def forgetful(store: Any, found: Any, *given: Any, rescaled: bool) -> Any:
        if rescaled and [(one.step, one.state) for one in found[:1]] == [("first_by_k", "kept")]:
            return []
        return original(store, found, *given, rescaled=rescaled)

    with patch.object(assembly, "_pieces", forgetful):
        yield


@contextmanager
def time_of_partitions_is_forgotten() -> Iterator[None]:
    """After a restart, rows are not compared with those that their partition had before."""
    original = assembly.assigned_partitions

    def timeless(*given: Any, **more: Any) -> Any:
        return [
            {name: msgspec.structs.replace(cut, max_time_us=TIME_MIN_US) for name, cut in one.items()}
            for one in original(*given, **more)
        ]

    with patch.object(engine, "assigned_partitions", timeless), patch.object(replay, "assigned_partitions", timeless):
        yield


@contextmanager
def operators_go_by_the_machines_clock() -> Iterator[None]:
    """The clock of operators goes back when somebody sets the machine's."""

    def wall(wall_us: int, *, before_us: int, elapsed_us: int) -> int:
        del before_us, elapsed_us
        return wall_us

    with patch.object(coordinator, "pipeline_clock_us", wall), patch.object(source_task, "pipeline_clock_us", wall):
        yield


MUTANTS: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {
    mutant.__name__: mutant
    for mutant in (
        no_alignment,
        barrier_overtakes,
        manifest_before_runs,
        acknowledge_before_fsync,
        output_is_not_synced,
        retention_drops_named_runs,
        loop_log_not_saved,
        positions_after_the_barrier,
        aborted_output_is_dropped,
        sealed_output_stays_pending,
        release_before_the_seal,
        late_below_the_watermark,
        late_by_the_step_alone,
        unaligned_loses_a_batch,
        deduplication_forgets_at_a_rescale,
        time_of_partitions_is_forgotten,
        operators_go_by_the_machines_clock,
    )
}
