"""From a plan to the graph that runs: which steps are fused into one task, and which edges shuffle.

Stateless steps and sinks are fused to what feeds them; a keyed step, a union and a loop begin a new vertex. What a step
wants done before its shuffle, such as partial aggregates, is fused to the feeding side. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from fordstone.operators.registry import has_feeder
from fordstone.plan import plan as p


class VertexKind(Enum):
    """How a vertex takes its input."""

    SOURCE = "source"
    STREAM = "stream"
    LOOP = "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertex:
    """Steps that run together in one task, times `parallelism`. The first step gives the vertex its name."""

    name: str
    kind: VertexKind
    parallelism: int
    steps: tuple[str, ...]
    """In plan order; the first takes the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A stream from one vertex to another."""

    number: int
    source: str
    step: str
    port: str
    target: str
    keys: tuple[str, ...] | None = None
    """Rows are split by these columns; None: subtask i feeds subtask i, or all feed one."""
    index: int = 0
    """Which input of the target this is."""
    feeder: bool = False
    """Rows go through the target's feeder before they are sent."""
    back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """What runs."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    home: Mapping[str, str]
    """Which vertex each step runs in."""

    def vertex(self, name: str) -> Vertex:
        return next(vertex for vertex in self.vertices if vertex.name == name)

    def into(self, vertex: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == vertex)

    def out_of(self, vertex: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == vertex)


def build_graph(plan: p.Plan, parallelism: int) -> Graph:
    """Fuse the plan's steps into vertices of `parallelism` subtasks each."""
    looped = _inside_loops(plan)
    home: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    kinds: dict[str, VertexKind] = {}
    subtasks: dict[str, int] = {}
    edges: list[Edge] = []

    def begin(step: p.Step, kind: VertexKind, count: int) -> None:
        home[step.name], members[step.name], kinds[step.name], subtasks[step.name] = step.name, [step.name], kind, count

    def connect(stream: p.Input, target: str) -> Edge:
        edge = Edge(number=len(edges), source=home[stream.step], step=stream.step, port=stream.port, target=target)
        edges.append(edge)
        return edge

    for step in plan.steps:
        match step:
            case p.Source():
                begin(step, VertexKind.SOURCE, parallelism)
            case p.Union():
                counts = {subtasks[home[stream.step]] for stream in step.streams}
                begin(step, VertexKind.STREAM, counts.pop() if len(counts) == 1 and step.name not in looped else 1)
                for stream in step.streams:
                    connect(stream, step.name)
            case _ if step.shuffles is not None:
                keys = step.shuffles
                begin(step, VertexKind.STREAM, 1 if not all(keys) or step.name in looped else parallelism)
                fed = has_feeder(step, plan)
                for index, stream in enumerate(step.inputs):
                    edges[-1] = replace(connect(stream, step.name), keys=keys[index], index=index, feeder=fed)
            case p.Loop():
                begin(step, VertexKind.LOOP, 1)
                connect(step.input, step.name)
            case _:
                vertex = home[step.inputs[0].step]
                home[step.name] = vertex
                members[vertex].append(step.name)
    for step in plan.steps:
        if isinstance(step, p.Loop):
            edges[-1] = replace(connect(step.feedback, step.name), back=True)
    vertices = tuple(
        Vertex(name=name, kind=kinds[name], parallelism=subtasks[name], steps=tuple(steps))
        for name, steps in members.items()
    )
    return Graph(vertices=vertices, edges=tuple(edges), home=home)


def steps_with_ids(plan: p.Plan) -> frozenset[str]:
    """The steps whose rows need ids: those on the way to a sink that releases at once, back to the window or source.

    Also those on the way to a function whose failed rows are set aside, and that function itself, if each of its rows comes of one
    row of a source: by the id they are found in the input again.
    """
    sinks = [step.name for step in plan.steps if isinstance(step, p.Sink) and step.release == "at_once"]
    found = {*sinks, *(step.name for sink in sinks for step in plan.upstream(sink, stop_at=(p.Aggregate,)))}
    for step in plan.steps:
        before = plan.upstream(step.name)
        sets_aside = isinstance(step, p.Function | p.Process) and step.has_dead_letters
        if sets_aside and not any(map(_loses_ids, before)):
            found |= {step.name, *(above.name for above in before)}
    return frozenset(found)


def _loses_ids(step: p.Step) -> bool:
    batches = isinstance(step, p.Function) and step.kind == "map_batches"
    return batches or step.shuffles is not None or isinstance(step, p.Loop)


def _inside_loops(plan: p.Plan) -> frozenset[str]:
    """The steps between a loop's head and its feedback: they run as one subtask."""
    inside: set[str] = set()
    for step in plan.steps:
        if isinstance(step, p.Loop):
            back = {step.feedback.step, *(above.name for above in plan.upstream(step.feedback.step))}
            inside |= {name for name in back if step.name in {name, *(above.name for above in plan.upstream(name))}}
    return frozenset(inside)
