"""Put an engine together: channels, chains, tasks, with the state of a checkpoint loaded.

State is found by step name and key group, so a checkpoint may be restored with another number of subtasks.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

import polars as pl

from fordstone.connectors.base import (
    Capability,
    Home,
    OpenContext,
    Sink,
    SinkDelayedError,
    SinkStream,
    Source,
    SourceOptions,
    close_sources,
)
from fordstone.connectors.files.settings import dead_letter_files
from fordstone.connectors.lookup_table import read_table
from fordstone.connectors.refreshed_table import RefreshedTables
from fordstone.connectors.registry import capabilities, open_sink, open_source
from fordstone.edge.config import RunConfig, default_state_bytes
from fordstone.edge.engine.channel import Channel
from fordstone.edge.engine.gate import Gate
from fordstone.edge.engine.recovery import check_plan
from fordstone.edge.engine.sealing import Identity, OutputRules, waits_for_seal
from fordstone.edge.engine.source_task import ReadingTask, Reservations, SourceSetup
from fordstone.edge.engine.task import LoopTask, Output, Reports, StreamTask, Task, TaskParts
from fordstone.edge.link.owner import Ownership
from fordstone.epochs.manifest import ChannelLog, Manifest, PartitionCut, StateRuns
from fordstone.epochs.store import CheckpointStore
from fordstone.lang.duration import TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import MAIN, OP, Functions, Operator, OperatorContext
from fordstone.operators.dead_letter import DEAD, DEAD_LETTERS, LETTER_SCHEMA
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.operators.rowwise import tag_branch
from fordstone.plan import plan as p
from fordstone.plan.ids import TaskId
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.graph import Edge, Graph, Vertex, VertexKind, build_graph, steps_with_ids
from fordstone.runtime.assignment import assign, readers
from fordstone.runtime.chain import Chain, Link, Outlet
from fordstone.runtime.clock import Clock
from fordstone.runtime.snapshot import Batch, Item, Watermark
from fordstone.state.backends import state_backends
from fordstone.state.base import Piece, RunRef, State
from fordstone.state.key_group import key_groups, owners
from fordstone.state.working import WorkingFiles
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import Failpoints, NoFailpoints
from fordstone.storage.remote import DiskRemote

READ_TOGETHER_BYTES: Final = 8 * 1024 * 1024
READERS_MAX: Final = 4
CROSSING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of rows for the center that wait in one outlet; well below what one blob at the hub may have."""


class Steppable(Protocol):
    """What a scheduler runs."""

    wake: Callable[[], None]

    @property
    def idle_wait_us(self) -> int | None:
        """Time to sleep after a step that did nothing; None: until woken."""
        ...

    def step(self) -> bool:
        """Do one small thing; return whether anything was done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The outside world that a run is handed; a simulation hands it its own."""

    clock: Clock
    disk: Disk
    failpoints: Failpoints = field(default_factory=NoFailpoints)
    choose: Callable[[int], int] | None = None
    """Which channel a gate looks at first; None: in turn."""
    dead_letters: Callable[[str], Sink] | None = None
    """Opens the sink for the rows that a step sets aside; None: files below the state directory."""
    opener: Callable[[Job], ConnectorOpener] | None = None
    """Opens sources and sinks; None: as the plan says."""
    keeps_state: bool = True
    """Whether a later run may resume: the disk stays."""
    wait: Callable[[float], object] = time.sleep
    """Waits for seconds, before and while the engine runs. A true value: the process was asked to stop."""


class Job:
    """A plan and all that is needed to run it: what the live engine and the replay have in common."""

    def __init__(
        self,
        plan: p.Plan,
        functions: Functions,
        config: RunConfig,
        environment: Environment,
        store: CheckpointStore,
        ownership: Ownership | None = None,
    ) -> None:
        """`ownership`: of this start; begun here if it is left out."""
        self.plan = plan
        self.config = config
        self.environment = environment
        self.store = store
        self.types = stream_types(plan)
        self.graph = build_graph(plan, config.parallelism)
        self.home = f"{store.pipeline}/{store.node}"
        self.rules = OutputRules.of(plan, self.types)
        self.ownership = ownership or Ownership(environment.disk, self.home)
        self.tables = RefreshedTables(lambda: DiskRemote(environment.disk), self.home)
        self.working_files = WorkingFiles(None if config.state is None else config.directory / self.home / "working")
        self.setting = OperatorContext(
            plan=plan,
            types=self.types,
            functions=functions,
            read_table=partial(read_table, start=self.ownership.owner.start),
            open_table=self.tables.open,
            backends=state_backends(
                (plan.state_of(step.name) for step in plan.steps if step.shuffles is not None),
                self.working_files,
                state_bytes_max=config.state_bytes_max or default_state_bytes(),
            ),
            with_ids=steps_with_ids(plan),
        )
        self.identity = Identity(
            pipeline=store.pipeline,
            node=store.node,
            mode=plan.mode,
            parallelism=config.parallelism,
            plan_digest=plan.digest(),
            step_digests=step_digests(plan, self.types),
        )
        self.connectors = (environment.opener or ConnectorOpener)(self)

    def open_sources(self) -> dict[str, Source]:
        """Open the sources of the plan; the caller closes them."""
        sources: dict[str, Source] = {}
        try:
            for step in self.plan.steps:
                if isinstance(step, p.Source):
                    sources[step.name] = self.connectors.source(step)
        except BaseException:
            close_sources(sources.values())
            raise
        return sources

    def sink_schema(self, step: p.Sink) -> pl.Schema:
        stream = self.types[step.input]
        columns = dict(stream.schema.polars)
        return pl.Schema(columns | {OP: pl.String()} if stream.upsert_key is not None else columns)

    def load_steps(self, manifest: Manifest | None) -> frozenset[str]:
        """The steps whose state is loaded from a checkpoint; `PlanMismatchError` if it does not fit the plan."""
        if manifest is None:
            return frozenset()
        return check_plan(
            manifest,
            self.identity.plan_digest,
            self.identity.step_digests,
            parallelism=self.config.parallelism,
            allow_new_state=self.config.allow_new_state,
        )


class ConnectorOpener:
    """Opens the sources and sinks of one job. The caller closes them."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def source(self, step: p.Source) -> Source:
        options = SourceOptions(schema=Schema.stored(step.schema), bounded=self._job.config.bounded)
        return open_source(step.connector, options, self._context(step))

    def sink(self, step: p.Sink, *, resumes_after: int | None = None) -> Sink:
        """`resumes_after`: the newest sealed epoch, for a sink that waits for seals."""
        try:
            return open_sink(step.connector, self.stream(step, resumes_after=resumes_after), self._context(step))
        except SinkDelayedError as error:
            error.step = step.name
            raise

    def stream(self, step: p.Sink, *, resumes_after: int | None = None) -> SinkStream:
        """Describe the stream of a sink, and this start."""
        job, stream = self._job, self._job.types[step.input]
        owner = job.ownership.owner
        return SinkStream(
            step=step.name,
            schema=stream.schema,
            upsert_key=stream.upsert_key,
            pipeline=job.store.pipeline,
            node=job.store.node,
            owner=owner.holder,
            start=owner.start,
            generation=owner.fence,
            resumes_after=resumes_after,
            discard_later=job.config.discard_later_output,
        )

    def dead_letters(self, step: str) -> Sink:
        """Where the rows go that a step sets aside."""
        job = self._job
        if job.environment.dead_letters is not None:
            return job.environment.dead_letters(step)
        # By the disk of the state, whose directories are for its user alone.
        job.environment.disk.make_dirs(f"{job.home}/dead-letters")
        directory = job.config.directory / job.home / "dead-letters" / step
        taken = SinkStream(step=DEAD_LETTERS + step, schema=LETTER_SCHEMA)
        return open_sink(dead_letter_files(directory), taken)

    def _context(self, step: p.Source | p.Sink) -> OpenContext:
        environment, home = self._job.environment, None
        if Capability.NEEDS_HOME in capabilities(step.connector):
            home = Home(disk=environment.disk, directory=self._job.home)
        return OpenContext(
            node=self._job.store.node,
            step=step.name,
            home=home,
            keeps_state=environment.keeps_state,
            clock_us=environment.clock.monotonic_us,
        )


def assigned_partitions(
    job: Job,
    manifest: Manifest | None,
    load_steps: frozenset[str],
    source: str,
    *,
    reserved: Reservations | None = None,
) -> list[dict[str, PartitionCut]]:
    """Assign the partitions of a checkpoint to a source's subtasks."""
    cut = manifest.cut.sources.get(source) if manifest is not None else None
    known: dict[str, PartitionCut] = dict(cut.partitions) if cut is not None and source in load_steps else {}
    if reserved is not None:
        known = reserved.beyond(source, known)
    return assign(known, job.config.parallelism, readers(manifest, source, job.config.parallelism))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the tasks of a run are made of, and where they begin."""

    job: Job
    manifest: Manifest | None
    load_steps: frozenset[str]
    sources: Mapping[str, Source]
    partitions: Mapping[str, Sequence[Mapping[str, PartitionCut]]]
    """For each source, for each of its subtasks: those of the checkpoint."""
    reports: Reports
    make_source: Callable[[TaskParts, SourceSetup], ReadingTask]
    """Makes the source tasks: live or replaying ones."""
    reserved_us: Mapping[str, int] = field(default_factory=dict)
    """For at-most-once, by source: how far time may have come before the crash."""

    @property
    def plan(self) -> p.Plan:
        return self.job.plan

    @property
    def graph(self) -> Graph:
        return self.job.graph


@dataclass(slots=True)
class _Wiring:
    """The channels between tasks, by where they begin and where they end."""

    out: dict[tuple[str, int, int], list[Channel]] = field(default_factory=lambda: defaultdict(list))
    into: dict[tuple[str, int], list[tuple[Channel, bool]]] = field(default_factory=lambda: defaultdict(list))


def assemble(parts: Parts) -> list[Task]:
    """Every task, sources first, ready to be stepped."""
    wiring = _wire(parts)
    tasks: list[Task] = []
    for vertex in parts.graph.vertices:
        tasks += [_task(parts, wiring, vertex, subtask) for subtask in range(vertex.parallelism)]
    writers = {channel.name: task for task in tasks for output in task.outputs for channel in output.channels}
    for task in tasks:
        if isinstance(task, StreamTask):
            for channel in task.gate.channels:
                channel.wake_reader = _waker(task)
                channel.wake_writer = _waker(writers[channel.name])
    for task in tasks:
        if isinstance(task, StreamTask):
            task.start(mute=parts.plan.guarantee == "at_most_once")
    return sorted(tasks, key=lambda task: not isinstance(task, ReadingTask))


def _waker(task: Task) -> Callable[[], None]:
    # The scheduler sets `wake` later: look it up when it is needed.
    def wake() -> None:
        task.wake()

    return wake


def _wire(parts: Parts) -> _Wiring:
    # At-most-once replays nothing: what was in flight at the checkpoint has come out since, or is lost.
    replays = parts.manifest is not None and parts.plan.guarantee != "at_most_once"
    logs = {log.channel: log for log in parts.manifest.channels} if parts.manifest is not None and replays else {}
    wiring = _Wiring()
    for edge in parts.graph.edges:
        source, target = parts.graph.vertex(edge.source), parts.graph.vertex(edge.target)
        for i in range(source.parallelism):
            for j in _targets(edge, i, source, target):
                unbounded = {"rows_max": 2**62, "bytes_max": 2**62} if edge.back else {}
                bounds = {
                    "rows_max": parts.job.config.channel_rows_max,
                    "bytes_max": parts.job.config.channel_bytes_max,
                } | unbounded
                channel = Channel(f"{source.name}/{i}-{edge.number}-{target.name}/{j}", **bounds)
                if channel.name in logs:
                    channel.preload(_items(parts.job.store, logs[channel.name]))
                wiring.out[source.name, i, edge.number].append(channel)
                wiring.into[target.name, j].append((channel, edge.back))
    return wiring


def _targets(edge: Edge, subtask: int, source: Vertex, target: Vertex) -> Iterable[int]:
    if target.parallelism == 1:
        return (0,)
    if edge.keys:
        return range(target.parallelism)
    if source.parallelism != target.parallelism:
        raise AssertionError(
            f"edge {edge.number} joins {source.parallelism} and {target.parallelism} subtasks without keys"
        )
    return (subtask,)


def _items(store: CheckpointStore, log: ChannelLog) -> Iterable[Item]:
    for item in log.items:
        if item.run is not None:
            yield Batch(store.read_run(item.run), late=item.kind == "late")
        else:
            yield Watermark(item.watermark_us, item.idle, item.ended_us)


def _task(parts: Parts, wiring: _Wiring, vertex: Vertex, subtask: int) -> Task:
    task_id = TaskId(f"{vertex.name}/{subtask}")
    pending: deque[tuple[Channel, Item]] = deque()
    outputs = {
        edge.number: Output(wiring.out[vertex.name, subtask, edge.number], edge.keys or (), pending, back=edge.back)
        for edge in parts.graph.out_of(vertex.name)
    }
    watermark_us = _watermark_of(parts, vertex, task_id)
    unread = [Outlet(DEAD_LETTERS + vertex.name)] if vertex.kind is VertexKind.SOURCE else []
    chain = Chain(
        _links(parts, vertex, subtask, outputs, watermark_us), [vertex.steps[0]], subtask=subtask, fed_by_task=unread
    )
    if subtask == 0:
        _restore_pending(parts, chain.outlets)
    made_of = TaskParts(
        id=task_id,
        chain=chain,
        outputs=list(outputs.values()),
        pending=pending,
        reports=parts.reports,
        clock=parts.job.environment.clock,
    )
    if vertex.kind is VertexKind.SOURCE:
        return parts.make_source(made_of, _source_setup(parts, vertex.name, subtask, unread[0]))
    channels = wiring.into[vertex.name, subtask]
    back = frozenset(index for index, (_, is_back) in enumerate(channels) if is_back)
    hold = parts.plan.guarantee == "exactly_once"
    gate = Gate([channel for channel, _ in channels], hold=hold, back=back, choose=parts.job.environment.choose)
    if parts.manifest is not None:
        gate.restore(_channel_times(parts, parts.manifest, task_id, gate.channels, watermark_us), watermark_us)
    return LoopTask(made_of, gate) if vertex.kind is VertexKind.LOOP else StreamTask(made_of, gate)


def _source_setup(parts: Parts, name: str, subtask: int, dead_letters: Outlet) -> SourceSetup:
    step = parts.plan.step(name)
    if not isinstance(step, p.Source):
        raise TypeError(f"{name} is not a source")
    known = parts.manifest is not None and name in parts.load_steps
    cut = parts.manifest.cut.sources.get(name) if parts.manifest is not None and known else None
    return SourceSetup(
        step=step,
        source=parts.sources[name],
        batch_rows=parts.job.config.batch_rows,
        with_ids=name in parts.job.setting.with_ids,
        dead_letters=dead_letters,
        partitions=parts.partitions[name][subtask],
        watermark_us=cut.watermark_us if cut is not None else TIME_MIN_US,
    )


def _links(parts: Parts, vertex: Vertex, subtask: int, outputs: Mapping[int, Output], watermark_us: int) -> list[Link]:
    links: list[Link] = []
    for name in vertex.steps:
        step = parts.plan.step(name)
        began_us = parts.manifest.cut.now_us if parts.manifest is not None else 0
        operator = make_operator(step, replace(parts.job.setting, began_us=began_us))
        _load(parts, name, operator, vertex, subtask, watermark_us)
        outgoing: dict[str, list[Output]] = defaultdict(list)
        inside: dict[str, list[str]] = defaultdict(list)
        feeders: list[Link] = []
        for edge in parts.graph.out_of(vertex.name):
            if edge.step != name:
                continue
            if edge.target in parts.job.setting.with_ids and isinstance(parts.plan.step(edge.target), p.Union):
                branch = edge.number - parts.graph.into(edge.target)[0].number
                tag = f"{edge.target}/branch{branch}"
                inside[edge.port].append(tag)
                feeders.append(Link(tag, tag_branch(branch), outputs={MAIN: [outputs[edge.number]]}))
                continue
            target = parts.plan.step(edge.target)
            feeder = make_feeder(target, edge.index, parts.job.setting) if isinstance(target, p.KeyedStep) else None
            if feeder is None:
                outgoing[edge.port].append(outputs[edge.number])
                continue
            fed = f"{edge.target}/feed{edge.index}"
            inside[edge.port].append(fed)
            feeders.append(Link(fed, feeder, outputs={MAIN: [outputs[edge.number]]}))
        for consumer, stream in parts.plan.consumers(name):
            if consumer.name in vertex.steps[1:] and not _is_feedback(consumer, stream):
                inside[stream.port].append(consumer.name)
        outlets = {MAIN: [_outlet(parts, step)]} if isinstance(step, p.Sink) else {}
        if step.has_dead_letters and not isinstance(step, p.Source):
            # Those of a source are put out by its task.
            outlets = {DEAD: [Outlet(DEAD_LETTERS + name)]}
        links += [Link(name, operator, links=inside, outputs=outgoing, outlets=outlets), *feeders]
    return links


def _is_feedback(consumer: p.Step, stream: p.Input) -> bool:
    return isinstance(consumer, p.Loop) and stream == consumer.feedback


def _outlet(parts: Parts, step: p.Sink) -> Outlet:
    waits = waits_for_seal(parts.plan, step)
    bytes_max = parts.job.config.waiting_bytes_max
    crosses = Capability.CROSSES in capabilities(step.connector)
    return Outlet(
        step.name,
        write_to=None if waits else parts.job.connectors.sink(step),
        # One outlet's rows of an epoch are one blob at the hub.
        waiting_bytes_max=min(bytes_max, CROSSING_BYTES_MAX) if crosses else bytes_max,
        on_full=parts.reports.outlet_full,
    )


def _restore_pending(parts: Parts, outlets: Sequence[Outlet]) -> None:
    """Put back the output that no epoch has released yet. The first subtask has it: its rows come first in a segment."""
    pending = {} if parts.manifest is None else {segment.sink: segment.runs for segment in parts.manifest.pending}
    for outlet in outlets:
        outlet.restore(_read(parts.job.store, pending.get(outlet.sink, ())))


def _watermark_of(parts: Parts, vertex: Vertex, task: TaskId) -> int:
    """How far time had come at this vertex.

    A keyed subtask has its own, which never goes back; the least of all after rescaling, for they are equal at an aligned
    cut. Others have only seen their share of the partitions, which may be another one now, so they begin with the least.
    """
    if parts.manifest is None:
        return TIME_MIN_US
    keyed = any(edge.keys is not None for edge in parts.graph.edges if edge.target == vertex.name)
    own = [known.watermark_us for known in parts.manifest.tasks if known.task == task]
    if keyed and parts.reserved_us:
        # At-most-once: a window that may have been output since the checkpoint is lost rather than output twice.
        return max([*own, min(parts.reserved_us[step.name] for step in parts.plan.sources_of(vertex.name))])
    return own[0] if own and keyed else _least_watermark(parts.manifest, vertex)


def _least_watermark(manifest: Manifest, vertex: Vertex) -> int:
    if vertex.kind is VertexKind.SOURCE:
        cut = manifest.cut.sources.get(vertex.name)
        return cut.watermark_us if cut is not None else TIME_MIN_US
    times = (known.watermark_us for known in manifest.tasks if known.task.rpartition("/")[0] == vertex.name)
    return min(times, default=TIME_MIN_US)


def _channel_times(
    parts: Parts, manifest: Manifest, task: TaskId, channels: Sequence[Channel], floor_us: int
) -> dict[str, int]:
    """The watermark of each channel, but no more than the least of the vertex that it comes from.

    Partitions are assigned again at a start: a task that was ahead may now read one that lags. It announces its own time soon.
    """
    known = next((cut.watermarks_us for cut in manifest.tasks if cut.task == task), {})
    least = {vertex.name: _least_watermark(manifest, vertex) for vertex in parts.graph.vertices}
    return {
        channel.name: min(known.get(channel.name, floor_us), least[channel.name.partition("/")[0]])
        for channel in channels
    }


def _load(parts: Parts, step: str, operator: Operator, vertex: Vertex, subtask: int, watermark_us: int) -> None:
    states = operator.states()
    if parts.manifest is None or step not in parts.load_steps or not states:
        return
    for name, state in states.items():
        found = [runs for runs in parts.manifest.states if (runs.step, runs.state) == (step, name)]
        rescaled = len({runs.subtask for runs in found}) != vertex.parallelism
        state.load(
            _pieces(parts.job.store, found, state, vertex.parallelism, subtask, rescaled=rescaled),
            watermark_us=watermark_us,
        )


def _pieces(
    store: CheckpointStore, found: Sequence[StateRuns], state: State, parallelism: int, subtask: int, *, rescaled: bool
) -> list[Piece]:
    wanted = [
        ref
        for runs in sorted(found, key=lambda runs: runs.subtask)
        if rescaled or runs.subtask == subtask
        for ref in runs.runs
    ]
    if state.loads_lazily:
        reads = [partial(store.read_run, ref) for ref in wanted]
    else:
        reads = [partial(_given, frame) for frame in _read(store, wanted)]
    if not rescaled:
        return [Piece(make=read, ref=ref, keep=state.keeps_frames) for ref, read in zip(wanted, reads, strict=True)]
    parts = [partial(_owned, read, state.key, parallelism, subtask) for read in reads]
    if state.loads_lazily:
        return [Piece(make=part, keep=state.keeps_frames) for part in parts]
    return [Piece(mine, keep=state.keeps_frames) for part in parts if (mine := part()).height]


def _given(frame: pl.DataFrame) -> pl.DataFrame:
    return frame


def _owned(read: Callable[[], pl.DataFrame], key: Sequence[str], parallelism: int, subtask: int) -> pl.DataFrame:
    """The rows of a run whose key groups belong to a subtask."""
    frame = read()
    return frame.filter(pl.Series(owners(key_groups(frame, key), parallelism) == subtask))


def _read(store: CheckpointStore, refs: Sequence[RunRef]) -> list[pl.DataFrame]:
    """The rows of runs; large ones several at once, because digests and decoding take longer than the disk."""
    if len(refs) == 1 or sum(ref.size_bytes for ref in refs) < READ_TOGETHER_BYTES:
        return [store.read_run(ref) for ref in refs]
    with ThreadPoolExecutor(min(READERS_MAX, os.cpu_count() or 1)) as pool:
        return list(pool.map(store.read_run, refs))
