"""Turn a complete attempt into a manifest: write its runs and what was in flight, then describe all of it.

Used by the live writer and by replay. Durability of the manifest itself, and all that follows it, is theirs. What crosses to the
hub (which sinks, under which stream, with which watermark) is added to the record before the seal: the outbox needs nothing else.

Invariant: every run that a manifest names has been written before the manifest is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import polars as pl

from fordstone.connectors.base import Capability
from fordstone.connectors.registry import capabilities
from fordstone.edge.engine.source_task import source_cut
from fordstone.epochs.manifest import ChannelLog, Cut, LoggedItem, Manifest, Segment, SourceCut, StateRuns, TaskCut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import ConfigError, PipelineError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.plan import plan as p
from fordstone.plan.ids import Attempt
from fordstone.plan.stream_type import StreamType
from fordstone.planner.graph import Graph, VertexKind
from fordstone.runtime.snapshot import Batch, FrozenSource, Item, TaskSnapshot, Watermark
from fordstone.state.base import Piece, RunRef

Outputs = Mapping[str, Sequence[Piece]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """A complete attempt: the snapshots of all tasks."""

    attempt: Attempt
    snapshots: tuple[TaskSnapshot, ...]
    ended: bool = False
    """Every source has ended: nothing can follow."""
    last: bool = False
    bounded: bool = False
    overtakes: bool = False
    now_us: int = 0

    @property
    def pause_us(self) -> int:
        return max((snapshot.pause_us for snapshot in self.snapshots), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What is the same in every manifest of a run."""

    pipeline: str
    node: str
    mode: str
    parallelism: int
    plan_digest: str
    step_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """Which outputs wait for the seal, and the key by which rows of an output replace each other."""

    sinks: tuple[str, ...]
    keys: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, plan: p.Plan, types: Mapping[p.Input, StreamType]) -> OutputRules:
        names: list[str] = []
        for step in plan.steps:
            if isinstance(step, p.Sink) and waits_for_seal(plan, step):
                names.append(step.name)
            if step.has_dead_letters:
                names.append(DEAD_LETTERS + step.name)
        keys = {step.name: types[step.input].upsert_key for step in plan.steps if isinstance(step, p.Sink)}
        return cls(sinks=tuple(names), keys={name: key for name, key in keys.items() if key is not None})

    def outputs(self, sealing: Sealing) -> dict[str, list[Piece]]:
        """What came out for each sink since the last seal. A key that changed several times is in it once (rule 15)."""
        found = {
            name: [piece for snapshot in sealing.snapshots for piece in snapshot.outputs.get(name, ())]
            for name in self.sinks
        }
        for name, key in self.keys.items():
            if len(found.get(name, ())) > 1:
                merged = pl.concat([piece.frame() for piece in found[name]])
                found[name] = [Piece(latest_rows(merged, key), keep=True)]
        return found


def waits_for_seal(plan: p.Plan, sink: p.Sink) -> bool:
    """Whether rows of a sink wait for the seal. Those for the center do, whatever the guarantee."""
    return Capability.CROSSES in capabilities(sink.connector) or (
        plan.guarantee == "exactly_once" and sink.release == "commit"
    )


def latest_rows(frame: pl.DataFrame, key: tuple[str, ...]) -> pl.DataFrame:
    """The last row of each key; without key columns, the last row of all."""
    return frame.unique(key, keep="last", maintain_order=True) if key else frame.tail(1)


class Draft:
    """An epoch on its way to a manifest. Do all of `work`, then ask for `manifest`."""

    def __init__(self, store: CheckpointStore, sealing: Sealing, outputs: Outputs) -> None:
        self._store = store
        self._sealing = sealing
        self._outputs = outputs
        self._logs: list[ChannelLog] = []
        states = [piece for snapshot in sealing.snapshots for state in snapshot.states for piece in state.pieces]
        written = [*states, *(piece for pieces in outputs.values() for piece in pieces)]
        self._new = [piece for piece in written if piece.ref is None]

    @property
    def new_runs(self) -> int:
        return len(self._new)

    @property
    def new_bytes(self) -> int:
        return sum(piece.ref.size_bytes for piece in self._new if piece.ref is not None)

    def work(self) -> Iterator[Callable[[], object]]:
        """The disk work, piece by piece. Each may be tried again after `StorageError`."""
        for piece in self._new:
            yield lambda piece=piece: piece.written(self._store.write_run(piece.frame()))  # type: ignore[misc]
        for snapshot in self._sealing.snapshots:
            for channel, items in snapshot.in_flight.items():
                yield lambda c=channel, i=items: self._logs.append(ChannelLog(c, self._logged(i)))  # type: ignore[misc]

    def cut(self, epoch: int) -> Cut:
        """What decided this epoch, as it was computed."""
        sealing = self._sealing
        in_loops = any(item.run is not None for log in self._logs for item in log.items)
        return Cut(
            epoch=epoch,
            sources=self._sources(),
            segments=self.segments(),
            # Unaligned, or with rows in a loop: replayed, it outputs more.
            overtaking=sealing.overtakes or in_loops,
            bounded=sealing.bounded,
            ended=sealing.ended,
            now_us=sealing.now_us,
        )

    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(name, _refs(pieces)) for name, pieces in self._outputs.items())

    def tasks(self) -> tuple[TaskCut, ...]:
        return tuple(
            TaskCut(snapshot.task, dict(snapshot.times_us), snapshot.watermark_us, snapshot.finished)
            for snapshot in self._sealing.snapshots
        )

    def manifest(
        self,
        identity: Identity,
        cut: Cut,
        tasks: tuple[TaskCut, ...],
        *,
        created_us: int,
        pending: tuple[Segment, ...] = (),
    ) -> Manifest:
        return Manifest(
            pipeline=identity.pipeline,
            node=identity.node,
            epoch=cut.epoch,
            attempt=self._sealing.attempt,
            mode=identity.mode,
            parallelism=identity.parallelism,
            plan_digest=identity.plan_digest,
            step_digests=dict(identity.step_digests),
            created_us=created_us,
            cut=cut,
            tasks=tasks,
            states=tuple(
                StateRuns(state.step, state.name, state.subtask, _refs(state.pieces))
                for snapshot in self._sealing.snapshots
                for state in snapshot.states
            ),
            channels=tuple(self._logs),
            pending=pending,
        )

    def _sources(self) -> dict[str, SourceCut]:
        shares: dict[str, list[FrozenSource]] = {}
        for snapshot in self._sealing.snapshots:
            if snapshot.source is not None:
                shares.setdefault(snapshot.source.step, []).append(snapshot.source)
        return {name: source_cut(parts) for name, parts in shares.items()}

    def _logged(self, items: Sequence[Item]) -> tuple[LoggedItem, ...]:
        found = []
        for item in items:
            if isinstance(item, Batch):
                found.append(LoggedItem(kind="late" if item.late else "batch", run=self._store.write_run(item.frame)))
            elif isinstance(item, Watermark):
                logged = LoggedItem(kind="watermark", watermark_us=item.us, idle=item.idle, ended_us=item.ended_us)
                found.append(logged)
        return tuple(found)


def _refs(pieces: Sequence[Piece]) -> tuple[RunRef, ...]:
    refs = tuple(piece.ref for piece in pieces if piece.ref is not None)
    if len(refs) != len(pieces):
        raise AssertionError("a piece was not written before its manifest")
    return refs


def crossing_streams(plan: p.Plan) -> dict[str, str]:
    """The sinks whose rows cross, and the streams that they become."""
    return {
        step.name: str(step.connector.options.get("stream", step.name))
        for step in plan.steps
        if isinstance(step, p.Sink) and Capability.CROSSES in capabilities(step.connector)
    }


def check_tiers(plan: p.Plan, *, has_hub: bool) -> None:
    """Refuse what is not for one engine alone."""
    if plan.tiered:
        raise PipelineError(
            f"pipeline {plan.pipeline} has two tiers, so no engine runs it as it is. On one machine: fordstone run FILE. On several: "
            "fordstone edge FILE on each node and fordstone center FILE at the center, with a hub between them."
        )
    if crossing_streams(plan) and not has_hub:
        raise ConfigError(
            f"pipeline {plan.pipeline} sends rows to the center ({', '.join(crossing_streams(plan))}), and no hub is given. "
            "Give its address (--hub URL)."
        )


class Crossing:
    """Finds what crosses, by the plan and its task graph."""

    def __init__(self, plan: p.Plan, graph: Graph) -> None:
        self.streams = crossing_streams(plan)
        self._graph = graph
        self._controls = {
            step.name: str(step.connector.options.get("control", step.name))
            for step in plan.steps
            if isinstance(step, p.Source) and Capability.FEEDS_BACK in capabilities(step.connector)
        }

    def add_to(self, cut: Cut, tasks: Sequence[TaskCut]) -> Cut:
        """The record with the streams and control versions of its epoch. `tasks`: where they stood at the barrier."""
        busy = self._busy(cut, tasks) if self.streams else set()

        def marked(segment: Segment) -> Segment:
            stream = self.streams.get(segment.sink)
            if stream is None:
                return segment
            watermark_us = self._watermark_us(segment.sink, cut, tasks, busy)
            return msgspec.structs.replace(segment, stream=stream, watermark_us=watermark_us)

        controls = {control: _position(cut, source) for source, control in self._controls.items()}
        return msgspec.structs.replace(cut, segments=tuple(map(marked, cut.segments)), controls=controls)

    def _watermark_us(self, sink: str, cut: Cut, tasks: Sequence[TaskCut], busy: set[str]) -> int:
        vertex = self._graph.vertex(self._graph.home[sink])
        times_us = {task.task: task.watermark_us for task in tasks if task.task.rpartition("/")[0] == vertex.name}
        # Idle tasks do not hold the watermark back, as at a gate. If all are idle, it stays.
        counted = times_us.keys() & busy
        if vertex.kind is VertexKind.SOURCE and not counted:
            source = cut.sources.get(vertex.name)
            return source.watermark_us if source is not None else TIME_MIN_US
        return min((times_us[task] for task in counted or times_us), default=TIME_MIN_US)

    def _busy(self, cut: Cut, tasks: Sequence[TaskCut]) -> set[str]:
        """The tasks that receive rows with a time: from sources with a partition that is neither idle nor done."""
        graph, cuts = self._graph, {task.task: task for task in tasks}
        found: set[str] = set()
        for vertex in graph.vertices:  # in the plan's order: the inputs of a vertex come before it
            edges = graph.into(vertex.name)
            for number in range(vertex.parallelism):
                task = f"{vertex.name}/{number}"
                if vertex.kind is VertexKind.SOURCE:
                    comes = vertex.name not in self._controls and _reads(cuts.get(task), cut, vertex.name)
                else:
                    comes = any(
                        f"{edge.source}/{other}" in found
                        for edge in edges
                        for other in range(graph.vertex(edge.source).parallelism)
                        if edge.keys is not None or vertex.parallelism == 1 or other == number
                    )
                if comes:
                    found.add(task)
        return found


def _position(cut: Cut, source: str) -> int:
    found = cut.sources.get(source)
    return max((part.position for part in found.partitions.values()), default=0) if found is not None else 0


def _reads(task: TaskCut | None, cut: Cut, source: str) -> bool:
    """Whether a source's task has partitions that are neither idle nor done."""
    if task is None or source not in cut.sources:
        return False
    partitions = cut.sources[source].partitions
    found = [partitions[name] for name in task.watermarks_us if name in partitions]
    return any(not (partition.idle or partition.done) for partition in found)
