"""What of an epoch crosses to the hub: which sinks, under which stream, with which watermark at the barrier.

It is added to the record of the epoch before the seal, so that the outbox needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fordstone.connectors.base import Capability
from fordstone.connectors.registry import capabilities
from fordstone.epochs.manifest import Cut, Segment, TaskCut
from fordstone.errors import ConfigError, PipelineError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.planner.graph import Graph, VertexKind


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
            f"pipeline {plan.pipeline} sends rows to the center ({', '.join(crossing_streams(plan))}), and nobody said through which hub. "
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
