"""What of a sealed epoch is sent to the hub: from a manifest to the entry in the outbox.

The rows are runs already. This module finds out which of them cross, and the watermark of each stream at the barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from fordstone.connectors.base import Capability
from fordstone.connectors.registry import capabilities
from fordstone.edge.link.outbox import Found, Outbox
from fordstone.epochs.manifest import Cut, Manifest, TaskCut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, ConfigError, DamagedError, PipelineError
from fordstone.hub.messages import ENDED_US, EpochEntry, StreamSegment
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.planner.graph import Graph, VertexKind, build_graph


def crossing_streams(plan: p.Plan) -> dict[str, str]:
    """The sinks whose rows cross, and the streams that they become."""
    return {
        step.name: str(step.connector.options.get("stream", step.name))
        for step in plan.steps
        if isinstance(step, p.Sink) and Capability.CROSSES in capabilities(step.connector)
    }


def check_tiers(plan: p.Plan, outbox: Outbox | None) -> None:
    """Refuse what is not for one engine alone."""
    if plan.tiered:
        raise PipelineError(
            f"pipeline {plan.pipeline} has two tiers, so no engine runs it as it is. On one machine: fordstone run FILE. On several: "
            "fordstone edge FILE on each node and fordstone center FILE at the center, with a hub between them."
        )
    if crossing_streams(plan) and outbox is None:
        raise ConfigError(
            f"pipeline {plan.pipeline} sends rows to the center ({', '.join(crossing_streams(plan))}), and nobody said through which hub. "
            "Give its address (--hub URL)."
        )


class Crossing:
    """The writer's side of the hub. Called by the writer's thread only."""

    def __init__(self, outbox: Outbox, plan: p.Plan, graph: Graph) -> None:
        self.outbox = outbox
        self._exact = plan.guarantee == "exactly_once"
        self._streams = crossing_streams(plan)
        self._plan = plan
        self._homes = {sink: graph.vertex(graph.home[sink]) for sink in self._streams}
        self._controls = {
            step.name: str(step.connector.options.get("control", step.name))
            for step in plan.steps
            if isinstance(step, p.Source) and Capability.FEEDS_BACK in capabilities(step.connector)
        }

    @property
    def sinks(self) -> AbstractSet[str]:
        """The sinks whose rows cross."""
        return self._streams.keys()

    def make_room(self, manifest: Manifest) -> None:
        """Before the seal: `StorageError` while what it brings does not fit into the outbox."""
        segments = [segment for segment in manifest.segments if segment.sink in self._streams]
        self.outbox.make_room(sum(run.size_bytes for segment in segments for run in segment.runs))

    def sealed(self, manifest: Manifest) -> int:
        """After the seal: put the epoch into the outbox, durably; return the number of its rows, 0 if it was there already."""
        if manifest.epoch <= self.outbox.newest:
            return 0
        entry = self.entry(manifest)
        self.outbox.add(entry)
        return sum(run.rows for segment in entry.streams.values() for run in segment.runs)

    def check(self, manifest: Manifest, store: CheckpointStore) -> None:
        """At a start: read the rows of the newest epoch if they wait for the hub. `DamagedError`: the epoch has to be replayed.

        Later it could not be: an epoch is replayed only as long as no later one is sealed.
        """
        if manifest.epoch <= self.outbox.sent or not self._exact:
            return
        for segment in manifest.segments:
            for run in segment.runs if segment.sink in self._streams else ():
                if (fault := store.run_fault(run, deep=True)) is not None:
                    raise DamagedError(f"what epoch {manifest.epoch} has for the hub is damaged: {fault}")

    def replayed(self, manifest: Manifest, store: CheckpointStore) -> None:
        """After an epoch was replayed: what waits for the hub stays as it is, unless its rows are damaged."""
        waiting = self.outbox.entry(manifest.epoch)
        if waiting is None:
            return
        runs = [run for segment in waiting.streams.values() for run in segment.runs]
        again = self.entry(manifest)
        if again.streams != waiting.streams and any(store.run_fault(run, deep=True) for run in runs):
            self.outbox.replace(again)

    def entry(self, manifest: Manifest) -> EpochEntry:
        """The entry of an epoch: the same whenever it is made from its manifest."""
        return self._entry(manifest.cut, lambda sink: self._watermark_us(sink, manifest))

    def finder(self, store: CheckpointStore) -> Callable[[int], Found | None]:
        """Return a function with which the outbox restores an entry that it has lost: from the manifest, else from the cut log."""
        cuts: dict[int, Cut] | None = None

        def find(epoch: int) -> Found | None:
            nonlocal cuts
            if not self._streams:
                # Such a pipeline may have run without a hub in between, and nothing was lost by it.
                return Found(EpochEntry(epoch=epoch, streams={}, created_us=0), exact=False)
            try:
                return self._whole(Found(self.entry(store.manifest(epoch)), exact=True), store)
            except CheckpointError:
                cuts = store.cuts() if cuts is None else cuts
            if epoch not in cuts or not self._streams.keys() <= {segment.sink for segment in cuts[epoch].segments}:
                return None
            # Only the manifest records the watermark of a stream that does not come from a source. Not to move it is always right.
            least = {sink: self._source_us(sink, cuts[epoch]) for sink in self._streams}
            return self._whole(Found(self._entry(cuts[epoch], lambda sink: least[sink]), exact=False), store)

        return find

    def _whole(self, found: Found, store: CheckpointStore) -> Found | None:
        runs = [run for segment in found.entry.streams.values() for run in segment.runs]
        return None if any(store.run_fault(run) is not None for run in runs) else found

    def _entry(self, cut: Cut, watermark_us: Callable[[str], int]) -> EpochEntry:
        runs = {segment.sink: segment.runs for segment in cut.segments}
        return EpochEntry(
            epoch=cut.epoch,
            streams={
                stream: StreamSegment(
                    runs=runs.get(sink, ()), watermark_us=ENDED_US if cut.ended else watermark_us(sink)
                )
                for sink, stream in self._streams.items()
            },
            # The clock at the barrier rather than at the seal: the cut records it, so the entry can be restored.
            created_us=cut.now_us,
            ended=cut.ended,
            controls={control: self._position(cut, source) for source, control in self._controls.items()},
        )

    def _watermark_us(self, sink: str, manifest: Manifest) -> int:
        vertex = self._homes[sink]
        times_us = {
            task.task: task.watermark_us for task in manifest.tasks if task.task.rpartition("/")[0] == vertex.name
        }
        # Idle tasks do not hold the watermark back, as at a gate. If all are idle, it stays.
        busy = times_us.keys() & self._busy(manifest)
        if vertex.kind is VertexKind.SOURCE and not busy:
            return self._source_us(sink, manifest.cut)
        return min((times_us[task] for task in busy or times_us), default=TIME_MIN_US)

    def _busy(self, manifest: Manifest) -> set[str]:
        """The tasks that receive rows with a time: from sources with a partition that is neither idle nor done."""
        cuts = {task.task: task for task in manifest.tasks}
        # The epoch may have been computed by another number of subtasks than run now.
        graph = build_graph(self._plan, manifest.parallelism)
        found: set[str] = set()
        for vertex in graph.vertices:  # in the plan's order: the inputs of a vertex come before it
            edges = graph.into(vertex.name)
            for number in range(vertex.parallelism):
                task = f"{vertex.name}/{number}"
                if vertex.kind is VertexKind.SOURCE:
                    comes = vertex.name not in self._controls and _reads(cuts.get(task), manifest.cut, vertex.name)
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

    def _source_us(self, sink: str, cut: Cut) -> int:
        source = cut.sources.get(self._homes[sink].name)
        return source.watermark_us if source is not None else TIME_MIN_US

    @staticmethod
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
