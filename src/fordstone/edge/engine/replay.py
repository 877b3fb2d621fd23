"""Replay: compute sealed epochs again from their recorded cuts, and compare them with what was sealed (rule 1).

A driver of its own beside the live one: on one thread, without coordinator and writer. Its sources read exactly from one cut to the
next, through the recorded stages; everything in flight is processed; then a barrier passes, and the epoch is committed again with
the output that it had. The live engine starts from the checkpoint that this leaves.

The same output means: the same rows in any order; floats within a tolerance, since sums of floats depend on their order (rule
10). An unaligned epoch had rows in flight that came out later. Replayed, it outputs those too: they are the extra rows, which the
manifest keeps as pending for the next epoch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import close_sources
from fordstone.connectors.compare import difference
from fordstone.edge.engine.assembly import Job, Parts, assemble, assigned_partitions
from fordstone.edge.engine.recovery import Resumption, SealedRows, without_end
from fordstone.edge.engine.sealing import Draft, Sealing, latest_rows
from fordstone.edge.engine.source_task import ReadingTask, SourceSetup
from fordstone.edge.engine.task import Task, TaskParts
from fordstone.edge.link.outbox import entry_of
from fordstone.epochs.manifest import Cut, Manifest, Segment, SourceCut
from fordstone.errors import CheckpointError, ReplayError, StorageError
from fordstone.lang.aggregates import AGGREGATES
from fordstone.lang.python_times import shown_row
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.family import aggregates, rows_of
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.plan import plan as p
from fordstone.plan.ids import Attempt, TaskId
from fordstone.plan.stream_type import StreamType
from fordstone.protocol.retry import DISK_RETRY_US
from fordstone.runtime.partition import Partition, Stage
from fordstone.runtime.snapshot import Barrier, TaskSnapshot
from fordstone.storage.disk import FatalStorageError

log = logging.getLogger(__name__)

INPUT_POLL_SECONDS: Final = 0.02


def replay(job: Job, resumption: Resumption) -> Resumption:
    """Replay what recovery found; return where the live engine begins. `DamagedError` if the checkpoint cannot be loaded."""
    if not resumption.replay:
        return resumption
    driver = Replay(job, resumption.manifest)
    manifest = resumption.manifest
    try:
        driver.restore(resumption.replay[-1])
        for cut in resumption.replay:
            manifest = driver.advance(cut, resumption.sealed[cut.epoch])
    finally:
        driver.close()
    return replace(resumption, manifest=manifest, sealed={})


class Replay:
    """Moves the state of a job from one recorded cut to the next. Used by one thread."""

    def __init__(self, job: Job, manifest: Manifest | None) -> None:
        """`manifest`: the checkpoint to begin from; None: nothing."""
        self._job = job
        self._nondeterministic = nondeterministic_sinks(job.plan, job.types)
        self._sources = job.open_sources()
        self._attempt = Attempt(0)
        self._before_us = 0
        self._tasks: list[Task] = []
        self._known: dict[str, set[str]] = {}
        self._acknowledged: dict[TaskId, TaskSnapshot] = {}
        self._replayed: Manifest | None = None
        self._newest: Cut | None = None
        try:
            self._load(manifest)
        except BaseException:
            self.close()
            raise

    def restore(self, cut: Cut) -> None:
        """Give the sources the newest cut there is: partitions that join in a replayed epoch are in it."""
        self._newest = cut
        for name, source in self._sources.items():
            if name in cut.sources:
                source.restore(cut.sources[name].partitions)

    def advance(self, cut: Cut, sealed: SealedRows) -> Manifest:
        """Compute the epoch that ends with this cut, compare it with what was sealed, and commit it in its old place.

        Raises `ReplayError` if it comes out different, and then nothing has changed.
        """
        staged = any(source.stages for source in cut.sources.values())
        if self._replayed is not None and (staged or self._replayed.cut.ended):
            # A run may have started in this epoch: what it read and announced began with the checkpoint before it.
            self._load_again(self._replayed)
        self._attempt = Attempt(self._attempt + 1)
        sources = [task for task in self._tasks if isinstance(task, ReplaySourceTask)]
        for task in sources:
            task.begin(self._recorded(cut, task))
        self._settle(lambda: all(task.reached for task in sources))
        for task in sources:
            task.end_input()
        # Loops are empty now, and have ended if their input has.
        self._settle(lambda: True)
        barrier = Barrier(
            attempt=self._attempt,
            committed=Attempt(self._attempt - 1),
            now_us=cut.now_us,
            before_us=self._before_us,
        )
        for task in sources:
            task.pass_barrier(barrier)
        self._settle(lambda: len(self._acknowledged) == len(self._tasks))
        manifest = self._commit(cut, sealed)
        self._before_us = cut.now_us
        self._acknowledged = {}
        self._replayed = manifest
        log.info("epoch replayed", extra={"epoch": cut.epoch})
        return manifest

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(close_sources, self._sources.values())
            self._close_tasks()

    # What tasks report.

    def acknowledge(self, snapshot: TaskSnapshot) -> None:
        self._acknowledged[snapshot.task] = snapshot

    def request_barrier(self) -> None:
        """Ignored: a recorded epoch ends where it ended."""

    def outlet_full(self) -> None:
        """Ignored, likewise."""

    def finished(self, task: TaskId) -> None:
        """Ignored: the cut records the end."""

    # How.

    def _close_tasks(self) -> None:
        for task in self._tasks:
            task.close()
        self._job.working_files.clear()

    def _load_again(self, manifest: Manifest) -> None:
        self._close_tasks()
        self._load(manifest)
        if self._newest is not None:
            self.restore(self._newest)

    def _load(self, manifest: Manifest | None) -> None:
        job, manifest = self._job, without_end(manifest, self._job.plan)
        load_steps = job.load_steps(manifest)
        partitions = {name: assigned_partitions(job, manifest, load_steps, name) for name in self._sources}
        for name, shares in partitions.items():
            self._sources[name].restore({one: cut for share in shares for one, cut in share.items()})
        parts = Parts(
            job=job,
            manifest=manifest,
            load_steps=load_steps,
            sources=self._sources,
            partitions=partitions,
            reports=self,
            make_source=ReplaySourceTask,
        )
        self._tasks = assemble(parts)
        self._known = {name: {one for share in shares for one in share} for name, shares in partitions.items()}
        self._attempt = Attempt(manifest.attempt if manifest is not None else 0)
        self._before_us = manifest.cut.now_us if manifest is not None else 0

    def _recorded(self, cut: Cut, task: ReplaySourceTask) -> Recorded:
        """What of a recorded epoch this task reads. The first subtask reads the partitions that joined."""
        name, _, subtask = task.id.rpartition("/")
        source = cut.sources.get(name, SourceCut(partitions={}))
        names = {one for stage in (*source.stages, source.partitions) for one in stage}
        mine = {one for one in names if task.reads(one) or (subtask == "0" and one not in self._known[name])}
        return Recorded(
            stages=tuple({one: at for one, at in stage.items() if one in mine} for stage in source.stages),
            end={one: at for one, at in source.partitions.items() if one in mine},
            bounded=cut.bounded,
        )

    def _settle(self, until: Callable[[], bool]) -> None:
        """Step the tasks until nothing is in flight and `until` holds."""
        while True:
            if self._round():
                continue
            if until() and not any(task.in_flight for task in self._tasks):
                return
            self._wait(INPUT_POLL_SECONDS)

    def _round(self) -> bool:
        choose = self._job.environment.choose
        if choose is not None:
            for _ in self._tasks:
                self._tasks[choose(len(self._tasks))].step()
        did = [task.step() for task in self._tasks]
        return any(did)

    def _commit(self, cut: Cut, sealed: SealedRows) -> Manifest:
        job = self._job
        sealing = Sealing(
            attempt=self._attempt,
            snapshots=tuple(self._acknowledged[task] for task in sorted(self._acknowledged)),
        )
        outputs = job.rules.outputs(sealing)
        extra = {
            name: extra_rows(
                cut,
                name,
                sealed.get(name),
                [piece.frame() for piece in pieces],
                key=job.rules.keys.get(name),
                nondeterministic=name in self._nondeterministic,
            )
            for name, pieces in outputs.items()
        }
        # What was sealed stays as it is. Only output that is damaged is replaced.
        whole = {segment.sink: segment for segment in cut.segments if sealed.get(segment.sink) is not None}
        draft = Draft(job.store, sealing, {name: pieces for name, pieces in outputs.items() if name not in whole})
        for work in draft.work():
            self._until_written(work)
        again = {segment.sink: segment for segment in draft.segments()}
        pending: list[Segment] = []
        for name, frames in extra.items():
            if frames:
                self._until_written(
                    lambda name=name, frames=frames: pending.append(  # type: ignore[misc]
                        Segment(name, tuple(job.store.write_run(frame) for frame in frames))
                    )
                )
        cut = restated(cut, [whole.get(name) or again[name] for name in outputs])
        created_us = job.environment.clock.wall_us()
        manifest = draft.manifest(job.identity, cut, draft.tasks(), created_us=created_us, pending=tuple(pending))
        self._until_written(lambda: job.store.commit(manifest, sealed_before=True))
        for task in self._tasks:
            for outlet in task.chain.outlets if task.id.endswith("/0") else ():
                outlet.restore(extra.get(outlet.sink, ()))
        return manifest

    def _until_written(self, work: Callable[[], object]) -> None:
        while True:
            try:
                work()
            except FatalStorageError:
                raise
            except StorageError as error:
                log.warning("replay waits for the disk", extra={"problem": str(error)})
                self._wait(DISK_RETRY_US / 1e6)
            else:
                return

    def _wait(self, seconds: float) -> None:
        if self._job.environment.wait(seconds):
            raise CheckpointError(
                f"pipeline {self._job.plan.pipeline} was stopped before its sealed epochs had been replayed. Nothing is lost: the next "
                "start replays them."
            )


def restated(cut: Cut, segments: Sequence[Segment]) -> Cut:
    """The record of an epoch whose output is stored in these runs now: its streams and their watermarks stay."""
    before = {segment.sink: segment for segment in cut.segments}
    now = tuple(
        msgspec.structs.replace(before[segment.sink], runs=segment.runs) if segment.sink in before else segment
        for segment in segments
    )
    changed = any(segment.stream is not None and segment != before[segment.sink] for segment in now)
    sealed_as = cut.sealed_as or (entry_of(cut).digest() if changed else None)
    return msgspec.structs.replace(cut, segments=now, sealed_as=sealed_as)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One task's share of a recorded epoch."""

    stages: tuple[Stage, ...]
    """Where partitions changed within the epoch, in order."""
    end: Stage
    bounded: bool
    """Whether input was bounded then."""


class ReplaySourceTask(ReadingTask):
    """Reads exactly what a recorded epoch had read, with the recorded floors, limits and idleness."""

    def __init__(self, parts: TaskParts, setup: SourceSetup) -> None:
        super().__init__(parts, setup)
        self._stages: deque[Stage] = deque()
        self._end: Stage | None = None

    def begin(self, recorded: Recorded) -> None:
        self._stages = deque(recorded.stages)
        self._end = recorded.end
        self._bounded = recorded.bounded

    @property
    def reached(self) -> bool:
        return self._end is not None and not self._stages and self._is_at(self._end)

    def step(self) -> bool:
        if not self._flush() or self._end is None:
            return False
        did = False
        if self._stages and self._is_at(self._stages[0]):
            self._apply(self._stages.popleft())
            did = True
        if did or not self._announced:
            self._announce_time()
            self._announced = did = True
        if not did:
            did = self._read(self._stages[0] if self._stages else self._end)
        self._flush()
        return did

    def end_input(self) -> None:
        """Of bounded input: announce the time after the partitions that had ended by then."""
        if self._bounded and self._end is not None:
            for name, cut in self._end.items():
                if name in self._share.partitions:
                    self._share.partitions[name].done = cut.done
            self._announce_time()

    def pass_barrier(self, barrier: Barrier) -> None:
        """Cut here. All of the epoch has been read."""
        if self._end is not None:
            self._apply(self._end)
        self._end = None
        self._pass_barrier(barrier)

    def _read(self, target: Stage) -> bool:
        for partition in self._readable():
            until = target.get(partition.name)
            if until is None or partition.position >= until.position:
                continue
            chunk = self._chunk(partition, until.position)
            if chunk is not None:
                # Its end is ignored: the cut records which partitions had ended.
                self._take(partition, chunk)
                self._announce_time()
                return True
        return False

    def _is_at(self, stage: Stage) -> bool:
        """Whether the partitions have been read up to here. Those that are not known yet join here."""
        known = self._share.partitions
        return all(known[name].position >= cut.position for name, cut in stage.items() if name in known)

    def _apply(self, stage: Stage) -> None:
        for name, cut in stage.items():
            partition = self._share.partitions.get(name)
            if partition is None:
                partition = self._share.partitions[name] = Partition.restored(
                    name, cut, now_us=self._clock.monotonic_us()
                )
            partition.idle, partition.done = cut.idle, cut.done
            partition.followed_by, partition.followed_at = cut.followed_by, cut.followed_at
            partition.floor_us, partition.limit_us = cut.floor_us, cut.limit_us
            partition.identity = cut.identity or partition.identity


def nondeterministic_sinks(plan: p.Plan, types: Mapping[p.Input, StreamType]) -> frozenset[str]:
    """The sinks that a sketch whose estimates depend on the batches has a part in."""
    found: set[str] = set()
    for step in plan.steps:
        own = isinstance(step, p.Aggregate) and any(
            not AGGREGATES[call.function].repeats
            for aggregate in aggregates(step, rows_of(step, types).schema)
            for call in aggregate.calls
            if call.function in AGGREGATES
        )
        # What a sketch or a list of values looks like depends on the batches, although what is made of it may not.
        own = own or (isinstance(step, p.Combine) and any(map(_is_sketch, Schema.stored(step.schema).values())))
        if own or any(stream.step in found for stream in step.inputs):
            found.add(step.name)
    sinks = {step.name for step in plan.steps if isinstance(step, p.Sink)}
    letters = {DEAD_LETTERS + step.name for step in plan.steps if step.has_dead_letters and step.name in found}
    return frozenset(sinks & found | letters)


def _is_sketch(kind: DataType) -> bool:
    return kind.is_nested or kind.name == "binary"


def extra_rows(
    cut: Cut,
    sink: str,
    sealed: Sequence[pl.DataFrame] | None,
    replayed: Sequence[pl.DataFrame],
    *,
    key: tuple[str, ...] | None = None,
    nondeterministic: bool = False,
) -> list[pl.DataFrame]:
    """The rows that the replay gave beyond what was sealed; raises `ReplayError` where that may not be.

    `key`: rows replace each other by it, so only the last of each counts. `nondeterministic`: values may be others within what is
    promised (`nondeterministic_sinks`), so that only the number of rows can be compared.
    """
    again = pl.concat(replayed) if replayed else pl.DataFrame()
    if key is not None and again.height:
        again = latest_rows(again, key)
    rows_sealed = sum(run.rows for segment in cut.segments if segment.sink == sink for run in segment.runs)
    if sealed is None or nondeterministic:
        return _extra_rows_by_count(cut, sink, rows_sealed, again)
    if again.height == 0:
        if rows_sealed:
            raise _mismatch(cut, sink, f"{rows_sealed} rows were sealed, and the replay gave none")
        return []
    before = pl.concat(sealed) if sealed else None
    if key is not None and cut.overtaking:
        # Rows that are not as they were sealed are newer: a later epoch has sealed them, or they go out with the next.
        newer = again if before is None else difference(before, again)[1]
        return [newer] if newer.height else []
    # Where a row without a time stood is known only as nearly as the read that brought it.
    ignored = ("position",) if sink.startswith(DEAD_LETTERS) else ()
    missing, extra = difference(again.clear() if before is None else before, again, ignored=ignored)
    if missing.height:
        raise _mismatch(
            cut, sink, f"{missing.height} sealed rows are missing in the replay, such as {shown_row(missing, 0)}"
        )
    if extra.height and not cut.overtaking:
        raise _mismatch(
            cut, sink, f"the replay gave {extra.height} rows that were not sealed, such as {shown_row(extra, 0)}"
        )
    return [extra] if extra.height else []


def _extra_rows_by_count(cut: Cut, sink: str, rows_sealed: int, again: pl.DataFrame) -> list[pl.DataFrame]:
    """The same without the sealed rows: an aligned epoch gives them again, and only their number can be compared."""
    if cut.overtaking and rows_sealed:
        raise ReplayError(
            f"epoch {cut.epoch} is sealed and unaligned, and its output for sink {sink} is damaged as well as its checkpoint: what it "
            "released cannot be known. Restore the files from a copy, or start over with an empty state directory and new sinks."
        )
    if cut.overtaking:
        return [again] if again.height else []
    if again.height != rows_sealed:
        raise _mismatch(cut, sink, f"{rows_sealed} rows were sealed, and the replay gave {again.height}")
    return []


def _mismatch(cut: Cut, sink: str, what: str) -> ReplayError:
    return ReplayError(
        f"the replay of epoch {cut.epoch} gave other output for sink {sink}: {what}.\n"
        "The input has changed since, or a step is not deterministic. Restore the input, or start over with an empty state "
        "directory and new sinks."
    )
