"""Say what a plan does before it runs: which steps run together, what is shuffled, what is kept, what each path guarantees.

Text for people, Mermaid for documents; the same plan always gives the same text. How steps are fused is decided in
`edge.graph`, what a path guarantees in `connectors.guarantee`: this module only words it. Reads nothing but the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fordstone.errors import ConfigError
from fordstone.operators.registry import family_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Types
from fordstone.planner.check import stream_types
from fordstone.planner.graph import Edge, Graph, Vertex, build_graph
from fordstone.planner.guarantee import path_guarantees

PORT_WORDS: Final = {
    "main": "rows",
    "late": "late rows",
    "timeout": "what ran out of time",
    "final": "final results",
}
BARRIERS: Final = {
    "aligned": "aligned: a task waits for the barrier on every input",
    "unaligned": "unaligned: barriers overtake rows, which become part of the checkpoint",
    "blocking": "blocking: sources stop until the checkpoint is sealed",
}


def explain(plan: p.Plan, *, format: str = "text", parallelism: int = 1) -> str:  # noqa: A002 - the word users expect
    """Word a plan. `format` is `"text"` or `"mermaid"`. Called by `Pipeline.explain` and the command line."""
    graph, types = build_graph(plan, parallelism), stream_types(plan)
    if format == "text":
        return _text(plan, graph, types)
    if format == "mermaid":
        return _mermaid(plan, graph)
    raise ConfigError(f"format={format!r}: a plan is explained as 'text' or 'mermaid'.")


def title(step: p.Step) -> str:
    """What a step does, in one line."""
    return family_of(step).title(step)


def details(plan: p.Plan, step: p.Step, types: Types) -> Iterator[tuple[str, str]]:
    """What more there is to say of a step: labels and texts."""
    return family_of(step).describe(step, plan, types)


def port_lead(stream: p.Input) -> str:
    """Begins the line of a step that reads another port than the main one."""
    return "" if stream.port == "main" else f"{PORT_WORDS[stream.port]}: "


def crossing(plan: p.Plan, edge: Edge) -> str:
    """What travels along an edge between tasks."""
    target = plan.step(edge.target)
    combined = edge.feeder and isinstance(target, p.Aggregate | p.Combine)
    partial = combined or (isinstance(target, p.Aggregate) and target.merges is not None)
    what = PORT_WORDS[edge.port] if edge.port != "main" else "partial aggregates" if partial else "rows"
    if edge.back:
        return f"{what}, back to the loop's head"
    if edge.keys is None:
        return what
    keys = target.keyed_by[edge.index]
    text = f"{what}, shuffled by {', '.join(keys)}" if keys else f"{what}, all to one subtask"
    if combined:
        return f"{text} (combined first)"
    late_wanted = isinstance(target, p.Aggregate) and plan.has_late_reader(target.name)
    return f"{text} (not combined first: late rows are wanted as they came)" if late_wanted else text


# As text.


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A line of text, what belongs to it, and what follows from it. `spark.explain` draws with it, too."""

    title: str
    details: tuple[tuple[str, str], ...] = ()
    children: tuple[Node, ...] = ()


def _text(plan: p.Plan, graph: Graph, types: Types) -> str:
    lines = [
        f"pipeline {plan.pipeline}",
        f"  guarantee  {plan.guarantee}",
        f"  barriers   {BARRIERS[plan.mode]}",
        f"  runs       on the edge, as {_count(len(graph.vertices), 'task')}",
    ]
    lines += [*_tasks(plan, graph, types), "", "guarantees", *guarantees(plan)]
    return "\n".join(lines) + "\n"


def tasks(plan: p.Plan, *, parallelism: int = 1) -> list[str]:
    """The tasks of a plan, an empty line before each: for those who word more than one plan (`tiers.explain`)."""
    return _tasks(plan, build_graph(plan, parallelism), stream_types(plan))


def _tasks(plan: p.Plan, graph: Graph, types: Types) -> list[str]:
    lines: list[str] = []
    for vertex in graph.vertices:
        lines += ["", _task_title(vertex), *drawn(_node(plan, graph, types, vertex, vertex.name, ""))]
    return lines


def _task_title(vertex: Vertex) -> str:
    times = f" x{vertex.parallelism}" if vertex.parallelism > 1 else ""
    fused = f": {len(vertex.steps)} steps fused" if len(vertex.steps) > 1 else ""
    return f"task {vertex.name}{times}{fused}"


def _node(plan: p.Plan, graph: Graph, types: Types, vertex: Vertex, name: str, port: str) -> Node:
    """A step and the steps fused to it."""
    step = plan.step(name)
    inside = [
        _node(plan, graph, types, vertex, consumer.name, port_lead(stream))
        for consumer, stream in plan.consumers(name)
        if graph.home[consumer.name] == vertex.name and consumer.name != vertex.name
    ]
    onward = [
        Node(title=f"→ task {edge.target}: {crossing(plan, edge)}")
        for edge in graph.out_of(vertex.name)
        if edge.step == name
    ]
    return Node(
        title=f"{port}{name}: {title(step)}", details=tuple(details(plan, step, types)), children=(*inside, *onward)
    )


def drawn(node: Node, lead: str = "  ", branch: str = "  ") -> Iterator[str]:
    """A node as lines; `branch` begins its own line, `lead` those below it."""
    yield f"{branch}{node.title}"
    bar = "│  " if node.children else "   "
    width = max((len(label) for label, _ in node.details), default=0)
    for label, text in node.details:
        yield f"{lead}{bar}{label:<{width}}  {text}"
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        yield from drawn(child, lead + ("   " if last else "│  "), lead + ("└─ " if last else "├─ "))


def guarantees(plan: p.Plan) -> list[str]:
    """A line for each path from a source to a sink."""
    paths = path_guarantees(plan)
    ways = [f"{path.source} → {path.sink}" for path in paths]
    wide, given = max(map(len, ways), default=0), max((len(path.gives) for path in paths), default=0)
    return [f"  {way:<{wide}}  {path.gives:<{given}}  {path.why}" for way, path in zip(ways, paths, strict=True)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# As a Mermaid flowchart.


def _mermaid(plan: p.Plan, graph: Graph) -> str:
    return "\n".join(["flowchart TD", *chart(plan, graph), *_mermaid_guarantees(plan)]) + "\n"


def chart(plan: p.Plan, graph: Graph, *, tier: str = "") -> list[str]:
    """The tasks, and what travels between them. `tier` begins every id: two plans may stand in one flowchart."""
    ids = {step.name: f"{tier}s{number}" for number, step in enumerate(plan.steps)}
    lines = []
    for number, vertex in enumerate(graph.vertices):
        lines.append(f'  subgraph {tier}t{number}["{quoted(_task_title(vertex))}"]')
        lines += [f"    {ids[name]}{_shape(plan.step(name))}" for name in vertex.steps]
        lines.append("  end")
    lines += [f'  {ids[edge.step]} ==>|"{quoted(crossing(plan, edge))}"| {ids[edge.target]}' for edge in graph.edges]
    for step in plan.steps:
        for stream in step.inputs:
            if graph.home[step.name] == graph.home[stream.step]:
                label = f'|"{PORT_WORDS[stream.port]}"|' if stream.port != "main" else ""
                lines.append(f"  {ids[stream.step]} -->{label} {ids[step.name]}")
    return lines


def _mermaid_guarantees(plan: p.Plan) -> Sequence[str]:
    """Comments: a reader of the source sees them, the drawing stays clean."""
    return [f"  %% {path.source} → {path.sink}: {path.gives}: {path.why}" for path in path_guarantees(plan)]


def _shape(step: p.Step) -> str:
    label = f'"{quoted(step.name)}<br/>{quoted(title(step))}"'
    if isinstance(step, p.Source | p.Sink):
        return f"[/{label}/]"
    return f"[({label})]" if isinstance(step, p.KeyedStep | p.Loop) else f"[{label}]"


def quoted(text: str) -> str:
    """Text inside a quoted label, where Mermaid reads '#...;' as a character."""
    for char, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("\n", " ")):
        text = text.replace(char, code)
    return text
