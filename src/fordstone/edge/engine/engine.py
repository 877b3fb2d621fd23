"""The engine: one run of a pipeline from a checkpoint until it ends, fails or is told to stop.

It owns the tasks, the coordinator and the writer, and knows nothing of threads: whoever runs it steps what
`steppables` gives. Restarting after a failure means a new engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import polars as pl

from fordstone.connectors.base import Capability, Sink, Source
from fordstone.connectors.lookup_table import read_table
from fordstone.connectors.registry import capabilities
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.assembly import Parts, assemble
from fordstone.edge.engine.connectors import ConnectorOpener
from fordstone.edge.engine.coordinator import Coordinator, Sealing, SourceShare
from fordstone.edge.engine.crossing import Crossing, check_tiers
from fordstone.edge.engine.progress import ReadSoFar
from fordstone.edge.engine.recovery import Resumption, check_plan
from fordstone.edge.engine.replay import varying_sinks
from fordstone.edge.engine.reservation import Reservations
from fordstone.edge.engine.source_task import SourceTask
from fordstone.edge.engine.task import LoopTask, Task
from fordstone.edge.engine.writer import Identity, Writer
from fordstone.edge.link.outbox import Outbox
from fordstone.epochs.manifest import Cut, PartitionCut
from fordstone.epochs.store import CheckpointStore
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US, positive_us
from fordstone.operators.base import Functions, OperatorContext
from fordstone.plan import plan as p
from fordstone.plan.ids import Attempt, PartitionId, TaskId
from fordstone.plan.stream_type import StreamType
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.graph import build_graph, steps_with_ids
from fordstone.protocol.interval import IntervalFacts, choose
from fordstone.protocol.pacing import Pace
from fordstone.runtime.assignment import assign, newcomers, readers
from fordstone.runtime.clock import Clock
from fordstone.runtime.dead_letters import DEAD_LETTER_SCHEMA, DEAD_LETTERS
from fordstone.runtime.partition import has_event_time
from fordstone.runtime.progress import Progress
from fordstone.runtime.snapshot import TaskSnapshot
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import Failpoints, NoFailpoints


class Steppable(Protocol):
    """What a scheduler runs."""

    wake: Callable[[], None]

    @property
    def idle_wait_us(self) -> int | None:
        """How long to rest after a step that did nothing; None: until woken."""
        ...

    def step(self) -> bool:
        """Do one small thing; say whether anything was done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the engine is handed of the outside world; a simulation hands it its own."""

    clock: Clock
    disk: Disk
    failpoints: Failpoints = field(default_factory=NoFailpoints)
    choose: Callable[[int], int] | None = None
    """Which channel a gate looks at first; None: in turn."""
    dead_letters: Callable[[str], Sink] | None = None
    """Opens the sink for what a source could not read; None: files below the state directory."""
    opener: Callable[..., ConnectorOpener] = ConnectorOpener
    """Opens sources and sinks."""


class Engine:
    """One run. Raises while it is made if the checkpoint does not fit the plan."""

    def __init__(
        self,
        plan: p.Plan,
        functions: Functions,
        config: RunConfig,
        environment: Environment,
        store: CheckpointStore,
        resumption: Resumption,
        *,
        outbox: Outbox | None = None,
    ) -> None:
        """`outbox`: where sealed epochs wait for the hub; needed if anything crosses."""
        check_tiers(plan, outbox)
        self.plan = plan
        self.config = config
        self.resumption = _without_end(resumption, plan)
        self.environment = environment
        self._types = stream_types(plan)
        self._interval_us = config.interval_us or 1_000_000
        self._timeout_us = positive_us(config.checkpoint_timeout, what="checkpoint_timeout")
        self._began_us = environment.clock.monotonic_us()
        self.step_digests = step_digests(plan, self._types)
        self._load_steps: frozenset[str] = frozenset()
        manifest = resumption.manifest
        if manifest is not None:
            self._load_steps = check_plan(
                manifest,
                plan.digest(),
                self.step_digests,
                parallelism=config.parallelism,
                allow_new_state=config.allow_new_state,
            )
        self._reservations = (
            Reservations(environment.disk, f"{store.pipeline}/{store.node}")
            if plan.guarantee == "at_most_once"
            else None
        )
        home = f"{store.pipeline}/{store.node}"
        self._opener = environment.opener(
            self._types,
            environment.disk,
            home,
            bounded=config.bounded,
            clock_us=environment.clock.monotonic_us,
            node=store.node,
        )
        self.sources = {step.name: self._opener.source(step) for step in plan.steps if isinstance(step, p.Source)}
        self._crossing: Crossing | None = None
        if outbox is not None:
            self._crossing = Crossing(outbox, plan, build_graph(plan, config.parallelism))
            outbox.begin(resumption.next_epoch - 1, self._crossing.finder(store), rebuilding=len(resumption.follow))
        self.writer = self._make_writer(store)
        self.coordinator, self.tasks = self._make_tasks(functions, store)
        self._read_so_far = ReadSoFar(self.sources, self.tasks, environment.clock)

    # What a scheduler and its caller use.

    def steppables(self) -> list[Steppable]:
        """Everything that wants to be stepped."""
        return [*self.tasks, self.coordinator, self.writer]

    @property
    def over(self) -> bool:
        """Whether the last epoch has been sealed and let out."""
        return self.coordinator.over

    @property
    def time_has_ended(self) -> bool:
        """Whether the checkpoint is that of an ended run with event time: windows are closed, so nothing can follow.

        Without event time nothing was closed, and a run over input that has grown since goes on.
        """
        manifest = self.resumption.manifest
        timed = any(isinstance(step, p.Source) and has_event_time(step) for step in self.plan.steps)
        return manifest is not None and manifest.cut.ended and timed and not self.resumption.follow

    @property
    def ended(self) -> bool:
        """Whether all input was read to its end."""
        return all(task.finished for task in self.tasks if isinstance(task, SourceTask | LoopTask))

    def release_again(self) -> None:
        """Let out what the checkpoint's epoch had sealed, in case the crash came between the seal and the sinks."""
        manifest = self.resumption.manifest
        if manifest is None or self.resumption.follow:
            # Epochs after it were sealed, so it had been let out; released again, what was taken away since would come back.
            return
        self.writer.cross_again(manifest)
        for segment in manifest.segments:
            if segment.sink in self.writer.sink_names:
                frames = [self._store.read_run(run) for run in segment.runs]
                self.writer.release(segment.sink, manifest.epoch, frames)
        self.writer.released_rows = 0

    def stop(self) -> None:
        """Finish the epoch and end."""
        self.coordinator.stop()

    def close(self) -> None:
        """Let go of readers and sinks."""
        for task in self.tasks:
            task.close()
        self.writer.close()

    def progress(self, *, restarts: int = 0) -> Progress:
        """How the run stands."""
        sources = [task for task in self.tasks if isinstance(task, SourceTask)]
        marks = [task.watermark_us for task in sources if task.watermark_us > TIME_MIN_US]
        last = self.writer.last
        direct = sum(outlet.rows for task in self.tasks for outlet in task.chain.outlets if not outlet.waits)
        share, size_bytes = self._read_so_far.look(anew=self.over) if self.config.bounded else (None, None)
        return Progress(
            pipeline=self.plan.pipeline,
            epoch=self.writer.epoch,
            rows_in=sum(task.rows_in for task in sources),
            rows_out=self.writer.released_rows + direct,
            rows_late=sum(task.chain.late_rows for task in self.tasks),
            rows_rejected=sum(task.rejected_rows for task in sources),
            watermark_us=min(marks, default=None),
            state_bytes=sum(task.chain.state_bytes() for task in self.tasks),
            checkpoints=self.writer.sealed_count,
            given_up=self.coordinator.given_up,
            checkpoint_us=last.took_us if last is not None else None,
            checkpoint_bytes=last.size_bytes if last is not None else None,
            pause_us=last.pause_us if last is not None else None,
            interval_us=self._interval_us,
            restarts=restarts,
            stalled=self.writer.stall,
            elapsed_us=self.environment.clock.monotonic_us() - self._began_us,
            share=share,
            read_bytes=round(share * size_bytes) if share is not None and size_bytes is not None else None,
            total_bytes=size_bytes,
            stopping=self.coordinator.stopping,
        )

    # How it is put together.

    def _make_writer(self, store: CheckpointStore) -> Writer:
        self._store = store
        plan = self.plan
        sinks: dict[str, tuple[Sink, pl.Schema]] = {}
        for step in plan.steps:
            waits = plan.guarantee == "exactly_once" and isinstance(step, p.Sink) and step.release == "commit"
            if isinstance(step, p.Sink) and waits and Capability.CROSSES not in capabilities(step.connector):
                sinks[step.name] = (self._opener.sink(step), self._opener.schema(step))
            if isinstance(step, p.Source):
                sinks[DEAD_LETTERS + step.name] = (self._dead_letters(step.name), pl.Schema(DEAD_LETTER_SCHEMA))
        identity = Identity(
            pipeline=store.pipeline,
            node=store.node,
            mode=plan.mode,
            parallelism=self.config.parallelism,
            plan_digest=plan.digest(),
            step_digests=self.step_digests,
        )
        return Writer(
            store=store,
            identity=identity,
            sinks=sinks,
            clock=self.environment.clock,
            failpoints=self.environment.failpoints,
            next_epoch=self.resumption.next_epoch - len(self.resumption.follow),
            committed=self._on_committed,
            stalled=self._on_stalled,
            sealed=self.resumption.sealed,
            keys={name: key for name, key in _upsert_keys(plan, self._types).items() if key is not None},
            varying=varying_sinks(plan, self._types),
            ack=self._let_go if any(type(one).ack is not Source.ack for one in self.sources.values()) else None,
            crossing=self._crossing,
        )

    def _let_go(self, cut: Cut) -> None:
        """Tell the sources whose far ends keep rows for us what they need not keep any longer."""
        for name, source in self.sources.items():
            if name in cut.sources:
                source.ack(cut.sources[name].partitions)

    def _on_stalled(self) -> None:
        self.coordinator.stalled()

    def _on_committed(self, sealing: Sealing) -> None:
        if self.config.interval_us is None and self.writer.last is not None:
            self._interval_us = self._chosen_interval_us()
        self.coordinator.committed(sealing)

    def _chosen_interval_us(self) -> int:
        last = self.writer.last
        cost_us = 0.0 if last is None else float(last.cpu_us + last.pause_us)
        goal = self.config.recovery_goal
        facts = IntervalFacts(
            cost_us=cost_us,
            failure_every_us=positive_us(self.config.failure_every, what="failure_every"),
            recovery_goal_us=None if goal is None else positive_us(goal, what="recovery_goal"),
        )
        return choose(facts).interval_us

    def _make_tasks(self, functions: Functions, store: CheckpointStore) -> tuple[Coordinator, list[Task]]:
        plan, config, environment = self.plan, self.config, self.environment
        graph = build_graph(plan, config.parallelism)
        setting = OperatorContext(
            plan=plan, types=self._types, functions=functions, read_table=read_table, with_ids=steps_with_ids(plan)
        )
        shares = {name: self._partitions(name) for name in self.sources}
        joining = {name: self._found(source, shares[name]) for name, source in self.sources.items()}
        reports = _Reports()
        parts = Parts(
            graph=graph,
            setting=setting,
            sources=self.sources,
            partitions=shares,
            joining=joining,
            open_sink=self._opener.sink,
            store=store,
            clock=environment.clock,
            reports=reports,
            batch_rows=config.batch_rows,
            channel_rows_max=config.channel_rows_max,
            channel_bytes_max=config.channel_bytes_max,
            waiting_bytes_max=config.waiting_bytes_max,
            bounded=config.bounded,
            following=bool(self.resumption.follow),
            manifest=self.resumption.manifest,
            load_steps=self._load_steps,
            reservation=self._reservations,
            reserved_us=self._reserved_us(),
            choose=environment.choose,
        )
        tasks = assemble(parts)
        by_source = {
            name: SourceShare(
                source=source,
                tasks=tuple(
                    task
                    for task in tasks
                    if isinstance(task, SourceTask) and graph.home[name] == task.id.rpartition("/")[0]
                ),
                known={partition for share in (*shares[name], *joining[name]) for partition in share},
            )
            for name, source in self.sources.items()
        }
        manifest = self.resumption.manifest
        coordinator = Coordinator(
            pace=lambda: Pace(interval_us=self._interval_us, timeout_us=self._timeout_us),
            clock=environment.clock,
            tasks=frozenset(task.id for task in tasks),
            ends=frozenset(task.id for task in tasks if isinstance(task, SourceTask | LoopTask)),
            sources=by_source,
            submit=self.writer.submit,
            first_attempt=Attempt(manifest.attempt + 1 if manifest is not None else 1),
            overtakes=plan.mode == "unaligned" and plan.guarantee == "exactly_once",
            bounded=config.bounded,
            follow=self.resumption.follow,
            before_us=manifest.cut.now_us if manifest is not None else 0,
        )
        reports.coordinator = coordinator
        return coordinator, tasks

    def _partitions(self, name: str) -> list[dict[str, PartitionCut]]:
        """Share the partitions of the checkpoint out to a source's subtasks."""
        manifest = self.resumption.manifest
        cut = manifest.cut.sources.get(name) if manifest is not None else None
        known: dict[str, PartitionCut] = dict(cut.partitions) if cut is not None and name in self._load_steps else {}
        if self._reservations is not None:
            known = self._reservations.beyond(name, known)
        return assign(known, self.config.parallelism, readers(manifest, name, self.config.parallelism))

    def _found(self, source: Source, known: Sequence[Mapping[str, PartitionCut]]) -> list[tuple[PartitionId, ...]]:
        """Share out the partitions that have turned up since."""
        # When what was recorded is computed again first, they join after that.
        return newcomers(() if self.resumption.follow else source.partitions(), known)

    def _reserved_us(self) -> dict[str, int]:
        if self._reservations is None:
            return {}
        sources = [step for step in self.plan.steps if isinstance(step, p.Source)]
        return {
            step.name: TIME_MAX_US if step.replaces else self._reservations.time_us(step.name, step.lateness_us)
            for step in sources
        }

    def _dead_letters(self, source: str) -> Sink:
        if self.environment.dead_letters is not None:
            return self.environment.dead_letters(source)
        return self._opener.dead_letters(self.config.state, source)


def _without_end(resumption: Resumption, plan: p.Plan) -> Resumption:
    """Take the end back that a bounded run without event time had come to: more input may have come since."""
    manifest = resumption.manifest
    if manifest is None or any(isinstance(step, p.Source) and has_event_time(step) for step in plan.steps):
        return resumption
    sources = {
        name: msgspec.structs.replace(cut, watermark_us=TIME_MIN_US) for name, cut in manifest.cut.sources.items()
    }
    tasks = tuple(
        msgspec.structs.replace(task, watermarks_us={}, watermark_us=TIME_MIN_US, finished=False)
        for task in manifest.tasks
    )
    cut = msgspec.structs.replace(manifest.cut, sources=sources)
    return replace(resumption, manifest=msgspec.structs.replace(manifest, cut=cut, tasks=tasks))


class _Reports:
    """Passes what tasks say on to the coordinator, which is made after them."""

    coordinator: Coordinator

    def acknowledge(self, snapshot: TaskSnapshot) -> None:
        self.coordinator.acknowledge(snapshot)

    def request_barrier(self) -> None:
        self.coordinator.request_barrier()

    def outlet_full(self) -> None:
        self.coordinator.outlet_full()

    def finished(self, task: TaskId) -> None:
        self.coordinator.finished(task)


def _upsert_keys(plan: p.Plan, types: Mapping[p.Input, StreamType]) -> dict[str, tuple[str, ...] | None]:
    return {step.name: types[step.input].upsert_key for step in plan.steps if isinstance(step, p.Sink)}
