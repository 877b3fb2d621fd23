"""The live engine: one run of a pipeline from a checkpoint until it ends, fails or is stopped.

It owns the tasks, the coordinator and the writer, and has no threads: a scheduler steps what `steppables` returns. Restarting
after a failure means a new engine. Sealed epochs whose checkpoints were lost are replayed before (`edge.engine.replay`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import polars as pl

from fordstone.connectors.base import ReadPlan, Sink, Source, close_sources
from fordstone.edge.config import default_state_bytes
from fordstone.edge.engine.assembly import Environment, Job, Parts, Steppable, assemble, assigned_partitions
from fordstone.edge.engine.coordinator import Coordinator, SourceShare
from fordstone.edge.engine.recovery import Resumption, without_end
from fordstone.edge.engine.release import LocalReleaseLog, Retention, SinkRelease
from fordstone.edge.engine.sealing import Crossing, Sealing, check_tiers, waits_for_seal
from fordstone.edge.engine.source_task import LiveSetup, Reservations, SourceSetup, SourceTask
from fordstone.edge.engine.state_guard import StateGuard
from fordstone.edge.engine.task import LoopTask, Task, TaskParts
from fordstone.edge.engine.writer import Stages, Writer
from fordstone.edge.link.outbox import Outbox
from fordstone.epochs.manifest import Cut, PartitionCut
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US, positive_us
from fordstone.operators.dead_letter import DEAD_LETTERS, LETTER_SCHEMA
from fordstone.plan import plan as p
from fordstone.plan.ids import Attempt, PartitionId, TaskId
from fordstone.protocol.interval import IntervalFacts, choose
from fordstone.protocol.pacing import PILED_UP_EPOCHS, Pace, idle_interval_us
from fordstone.protocol.progress import Progress, WaitedFor, describe_late, held_back
from fordstone.runtime.assignment import assign_new
from fordstone.runtime.available import check_nothing_new, read_targets
from fordstone.runtime.clock import Clock
from fordstone.runtime.partition import has_event_time, has_limit, lateness_of
from fordstone.runtime.snapshot import TaskSnapshot
from fordstone.runtime.waits import sink_away, sources_away

log = logging.getLogger(__name__)

LOOK_EVERY_US: Final = 500_000
"""Minimum interval between two looks: there may be thousands of files."""


class ReadSoFar:
    """Reads the positions of source tasks, from outside their threads."""

    def __init__(self, sources: Mapping[str, Source], tasks: Sequence[Task], clock: Clock) -> None:
        self._sources = sources
        self._tasks = [task for task in tasks if isinstance(task, SourceTask)]
        self._clock = clock
        self._looked_us: int | None = None
        self._found: tuple[float | None, int | None] = (None, None)

    def look(self, *, refresh: bool = False) -> tuple[float | None, int | None]:
        """The share that was read and the size of all input, if they are known. `refresh`: do not use the last result."""
        now_us = self._clock.monotonic_us()
        if refresh or self._looked_us is None or now_us - self._looked_us >= LOOK_EVERY_US:
            self._looked_us = now_us
            self._found = self._weighed()
        return self._found

    def _weighed(self) -> tuple[float | None, int | None]:
        shares = [source.share_read(self._cuts(name)) for name, source in self._sources.items()]
        sizes = [source.size_bytes() for source in self._sources.values()]
        total_bytes = None if None in sizes else sum(size for size in sizes if size is not None)
        if not shares or None in shares:
            return None, total_bytes
        weights = [size or 0 for size in sizes] if total_bytes else [1] * len(shares)
        read = sum((share or 0.0) * weight for share, weight in zip(shares, weights, strict=True))
        return read / sum(weights), total_bytes

    def _cuts(self, source: str) -> dict[str, PartitionCut]:
        cuts: dict[str, PartitionCut] = {}
        for task in self._tasks:
            if task.id.rpartition("/")[0] == source:
                cuts |= task.cuts()
        return cuts


__all__ = ["Engine", "Environment", "Steppable"]


class Engine:
    """One run. Raises while it is made if the checkpoint does not fit the plan."""

    def __init__(
        self,
        job: Job,
        resumption: Resumption,
        *,
        outbox: Outbox | None = None,
        take_lease: Callable[[], None] | None = None,
    ) -> None:
        """`outbox`: where sealed epochs wait for the hub; needed if a sink sends rows to the center.

        `take_lease` is called before sinks are opened. With a take-over, nothing is released under a generation that is not known to be
        granted.
        """
        plan, config, environment = job.plan, job.config, job.environment
        check_tiers(plan, has_hub=outbox is not None)
        self._job, self.plan, self.config, self.environment, self.store = job, plan, config, environment, job.store
        self.resumption = replace(resumption, manifest=without_end(resumption.manifest, plan))
        self._interval_us = config.interval_us or 1_000_000
        self._timeout_us = positive_us(config.checkpoint_timeout, what="checkpoint_timeout")
        self._began_us = environment.clock.monotonic_us()
        self._load_steps = self._job.load_steps(resumption.manifest)
        self._reservations = (
            Reservations(environment.disk, self._job.home) if plan.guarantee == "at_most_once" else None
        )
        self.sources = self._job.open_sources()
        with ExitStack() as on_failure:
            on_failure.callback(job.working_files.clear)
            on_failure.callback(close_sources, self.sources.values())
            self._crossing = Crossing(plan, self._job.graph)
            self._outbox = outbox
            if outbox is not None:
                outbox.begin(resumption.next_epoch - 1, crosses=bool(self._crossing.streams))
            if take_lease is not None:
                take_lease()
            self._state_guard = StateGuard(
                environment.clock,
                bytes_max=config.state_bytes_max or default_state_bytes(),
                waited_for=lambda: [one for task in self._source_tasks() for one in task.still_read()],
                timed=any(isinstance(step, p.Source) and has_event_time(step) for step in plan.steps),
                must_end=config.bounded or config.available_now,
            )
            self._released_rows = self._epochs_without_output = 0
            self.writer = self._make_writer()
            on_failure.callback(self.writer.close)
            self.coordinator, self.tasks = self._make_tasks()
            self._state_guard.tasks = self.tasks
            self._read_so_far = ReadSoFar(self.sources, self.tasks, environment.clock)
            on_failure.pop_all()

    # What a scheduler and its caller use.

    def steppables(self) -> list[Steppable]:
        return [*self.tasks, self.coordinator, self.writer]

    @property
    def over(self) -> bool:
        """Whether the run is to end. A stop does not wait for a sink that is away: the next start releases the sealed epoch."""
        return self.coordinator.over or (self.coordinator.stopping and self.writer.waits_for_sink)

    @property
    def time_has_ended(self) -> bool:
        """Whether the checkpoint is that of an ended run with event time: windows are closed, so nothing can follow.

        Without event time nothing was closed, and a run over input that has grown since resumes.
        """
        manifest = self.resumption.manifest
        timed = any(isinstance(step, p.Source) and has_event_time(step) for step in self.plan.steps)
        return manifest is not None and manifest.cut.ended and timed

    @property
    def input_has_ended(self) -> bool:
        """Whether there can be no more input than there is: it is bounded, or all sources have ended."""
        return self.config.bounded or all(source.ended() for source in self._streams().values())

    def check_nothing_new(self) -> None:
        """Raise if there is input that the run which has ended did not read."""
        manifest = self.resumption.manifest
        if manifest is not None:
            check_nothing_new(self.plan.pipeline, manifest.cut, self._streams())

    def _streams(self) -> dict[str, Source]:
        """The sources without control tables."""
        tables = {step.name for step in self.plan.steps if isinstance(step, p.Source) and step.replaces}
        return {name: source for name, source in self.sources.items() if name not in tables}

    @property
    def ended(self) -> bool:
        return self.coordinator.over and all(
            task.finished for task in self.tasks if isinstance(task, SourceTask | LoopTask)
        )

    def release_again(self) -> None:
        """Release what the checkpoint's epoch had sealed, in case the crash came between the seal and the sinks.

        `DamagedError` if its rows are damaged.
        """
        manifest = self.resumption.manifest
        if manifest is None:
            return
        if self._outbox is not None and self.plan.guarantee == "exactly_once":
            self._outbox.check(manifest.cut)
        self.writer.stages.sinks.release_again(manifest, self._job.store)

    def stop(self) -> None:
        self.coordinator.stop()

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self._job.working_files.clear)
            closing.callback(close_sources, self.sources.values())
            closing.callback(self.writer.close)
            closing.callback(self._job.tables.close)
            for task in self.tasks:
                closing.callback(task.close)

    def progress(self, *, restarts: int = 0) -> Progress:
        sources = self._source_tasks()
        marks = [task.watermark_us for task in sources if task.watermark_us > TIME_MIN_US]
        last = self.writer.last
        direct = sum(outlet.rows for task in self.tasks for outlet in task.chain.outlets if not outlet.waits)
        rows_late = sum(task.chain.late_rows for task in self.tasks)
        late_by_us = max((task.chain.late_by_us for task in self.tasks), default=0)
        troubles = {name: source.trouble() for name, source in self.sources.items()}
        hub_problem, away = sources_away(self.plan, troubles)
        if self.writer.waits_for_sink:
            away = (*away, sink_away(self.plan, self.writer.stages.sinks.last, self.writer.stall or ""))
        limit = self._state_guard.limit
        share, size_bytes = self._read_so_far.look(refresh=self.over) if self.config.bounded else (None, None)
        return Progress(
            pipeline=self.plan.pipeline,
            epoch=self.writer.epoch,
            rows_in=sum(task.rows_in for task in sources),
            rows_out=self.writer.released_rows + direct,
            rows_late=rows_late,
            late=describe_late(late_by_us, lateness_of(self.plan)) if rows_late else None,
            held_back=held_back(self._waited_for()),
            rows_rejected=sum(task.rejected_rows for task in sources),
            rejected=next((task.first_rejected for task in sources if task.first_rejected), None),
            rows_failed=sum(task.chain.failed_rows for task in self.tasks),
            watermark_us=min(marks, default=None),
            state_bytes=self._state_guard.state_bytes(),
            checkpoints=self.writer.sealed_count,
            given_up=self.coordinator.given_up,
            checkpoint_us=last.took_us if last is not None else None,
            checkpoint_bytes=last.size_bytes if last is not None else None,
            pause_us=last.pause_us if last is not None else None,
            interval_us=self._interval_us,
            restarts=restarts,
            stalled=self.writer.stall or (None if limit is None else limit.reason),
            waits_for=self.writer.stalled_by or (None if limit is None else "state"),
            elapsed_us=self.environment.clock.monotonic_us() - self._began_us,
            share=share,
            read_bytes=round(share * size_bytes) if share is not None and size_bytes is not None else None,
            total_bytes=size_bytes,
            stopping=self.coordinator.stopping,
            hub_problem=hub_problem,
            away=away,
            not_read=tuple(node for one in troubles.values() for node in one.not_read),
        )

    # Sealing and release.

    def _make_writer(self) -> Writer:
        job = self._job
        acks = any(type(source).ack is not Source.ack for source in self.sources.values())
        acks = acks or any(isinstance(step, p.Lookup) and step.refresh_us is not None for step in self.plan.steps)
        stages = Stages(
            store=job.store,
            release_log=LocalReleaseLog(job.store),
            crossing=self._crossing,
            outbox=self._outbox,
            sinks=SinkRelease(self._waiting_sinks(), self.environment.failpoints),
            retention=Retention(job.store, outbox=self._outbox, ack=self._acknowledge if acks else None),
        )
        return Writer(
            stages,
            job.identity,
            job.rules,
            self.environment.clock,
            next_epoch=self.resumption.next_epoch,
            committed=self._on_committed,
            stalled=self._on_stalled,
        )

    def _waiting_sinks(self) -> dict[str, tuple[Sink, pl.Schema]]:
        connectors = self._job.connectors
        sinks: dict[str, tuple[Sink, pl.Schema]] = {}
        for step in self.plan.steps:
            if isinstance(step, p.Sink) and waits_for_seal(self.plan, step) and step.name not in self._crossing.streams:
                sink = connectors.sink(step, resumes_after=self.resumption.next_epoch - 1)
                sinks[step.name] = (sink, self._job.sink_schema(step))
            if step.has_dead_letters:
                sinks[DEAD_LETTERS + step.name] = (connectors.dead_letters(step.name), LETTER_SCHEMA.polars)
        return sinks

    def _acknowledge(self, cut: Cut) -> None:
        """Acknowledge positions to the sources, which may then remove the rows before them, and the time to refreshed tables."""
        self._job.tables.ack(cut.now_us)
        for name, source in self.sources.items():
            if name in cut.sources:
                source.ack(cut.sources[name].partitions)

    def _on_stalled(self) -> None:
        self.coordinator.stalled()

    def _on_committed(self, sealing: Sealing) -> None:
        if self.config.interval_us is None and self.writer.last is not None:
            self._interval_us = self._chosen_interval_us()
        self._state_guard.committed()
        before, self._released_rows = self._released_rows, self.writer.stages.sinks.released_rows
        self._epochs_without_output = self._epochs_without_output + 1 if self._released_rows == before else 0
        self.coordinator.committed(sealing)

    def _piled_up(self) -> bool:
        """As in `PacingFacts`; called by the coordinator."""
        if self._outbox is None or self._outbox.epochs < PILED_UP_EPOCHS:
            return False
        if self._epochs_without_output < self.config.keep:
            return False
        outlets = [outlet for task in self.tasks for outlet in task.chain.outlets]
        return not any(outlet.has_waiting and outlet.sink not in self._crossing.streams for outlet in outlets)

    def _source_tasks(self) -> list[SourceTask]:
        return [task for task in self.tasks if isinstance(task, SourceTask)]

    def _waited_for(self) -> list[WaitedFor]:
        return [one for task in self._source_tasks() for one in task.waited_for()]

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

    # Tasks.

    def _make_tasks(self) -> tuple[Coordinator, list[Task]]:
        job, config, clock = self._job, self.config, self.environment.clock
        manifest = self.resumption.manifest
        before_us = manifest.cut.now_us if manifest is not None else 0
        job.tables.begin(before_us)
        known = {
            name: assigned_partitions(job, manifest, self._load_steps, name, reserved=self._reservations)
            for name in self.sources
        }
        for name, source in self.sources.items():
            source.restore({partition: cut for share in known[name] for partition, cut in share.items()})
        there = {name: source.partitions() for name, source in self.sources.items()}
        joining = {
            name: assign_new(
                there[name],
                {partition for share in known[name] for partition in share},
                [len(share) for share in known[name]],
            )
            for name in self.sources
        }

        def live_source(parts: TaskParts, setup: SourceSetup) -> SourceTask:
            may_go = not (config.bounded or setup.step.declares_time)
            mine = joining[setup.step.name][int(parts.id.rpartition("/")[2])]
            live = LiveSetup(
                bounded=config.bounded,
                joining=mine,
                gone=frozenset(setup.partitions.keys() - set(there[setup.step.name])) if may_go else frozenset(),
                reservation=self._reservations,
                pauses_after_barrier=self.plan.mode == "blocking" and self.plan.guarantee == "exactly_once",
                before_us=before_us,
                targets=self._targets(setup, mine) if config.available_now else None,
                state_guard=self._state_guard,
            )
            return SourceTask(parts, setup, live)

        reports = _Reports()
        parts = Parts(
            job=job,
            manifest=manifest,
            load_steps=self._load_steps,
            sources=self.sources,
            partitions=known,
            reports=reports,
            make_source=live_source,
            reserved_us=self._reserved_us(),
        )
        tasks = assemble(parts)
        idle_interval = self._idle_interval_us()
        coordinator = Coordinator(
            pace=lambda: Pace(
                interval_us=self._interval_us, timeout_us=self._timeout_us, idle_interval_us=idle_interval
            ),
            clock=clock,
            tasks=frozenset(task.id for task in tasks),
            ends=frozenset(task.id for task in tasks if isinstance(task, SourceTask | LoopTask)),
            sources=self._shares(tasks, known, joining),
            submit=self.writer.submit,
            first_attempt=Attempt(manifest.attempt + 1 if manifest is not None else 1),
            overtakes=self.plan.mode == "unaligned" and self.plan.guarantee == "exactly_once",
            bounded=config.bounded,
            available_now=config.available_now,
            before_us=before_us,
            moved=lambda: any(task.moved for task in tasks),
            idle_after=config.keep,
            piled_up=self._piled_up,
        )
        reports.coordinator = coordinator
        return coordinator, tasks

    def _idle_interval_us(self) -> int:
        sources = [step for step in self.plan.steps if isinstance(step, p.Source)]
        limited = [step for step in sources if has_limit(step, bounded=self.config.bounded)]
        sinks = [step for step in self.plan.steps if step.name in self._crossing.streams]
        options = [step.connector.options for step in sinks if isinstance(step, p.Sink)]
        return idle_interval_us(
            max_ahead_us=[step.max_ahead_us for step in limited if step.max_ahead_us is not None],
            offline_us=[int(found) for one in options if (found := one.get("offline_us")) is not None],
        )

    def _targets(self, setup: SourceSetup, joining: tuple[PartitionId, ...]) -> dict[str, ReadPlan]:
        if setup.step.replaces:
            return {}  # a control table: what the hub has now is fetched after this, and read as it comes
        return read_targets(setup.source, setup.partitions, joining)

    def _shares(
        self,
        tasks: list[Task],
        known: Mapping[str, list[dict[str, PartitionCut]]],
        joining: Mapping[str, list[tuple[PartitionId, ...]]],
    ) -> dict[str, SourceShare]:
        home = self._job.graph.home
        return {
            name: SourceShare(
                source=source,
                tasks=tuple(
                    task for task in tasks if isinstance(task, SourceTask) and home[name] == task.id.rpartition("/")[0]
                ),
                known={partition for share in (*known[name], *joining[name]) for partition in share},
            )
            for name, source in self.sources.items()
        }

    def _reserved_us(self) -> dict[str, int]:
        if self._reservations is None:
            return {}
        sources = [step for step in self.plan.steps if isinstance(step, p.Source)]
        return {
            step.name: TIME_MAX_US if step.replaces else self._reservations.time_us(step.name, step.lateness_us)
            for step in sources
        }


class _Reports:
    """Passes the reports of tasks on to the coordinator, which is made after them."""

    coordinator: Coordinator

    def acknowledge(self, snapshot: TaskSnapshot) -> None:
        self.coordinator.acknowledge(snapshot)

    def request_barrier(self) -> None:
        self.coordinator.request_barrier()

    def outlet_full(self) -> None:
        self.coordinator.outlet_full()

    def finished(self, task: TaskId) -> None:
        self.coordinator.finished(task)
