"""Say what a plan does before it runs: which steps run together, what is shuffled, what is kept, what each path guarantees.

Text for people, Mermaid for documents; the same plan always gives the same text. How steps are fused is decided in
`edge.graph`, what a path guarantees in `connectors.guarantee`: this module only words it. Reads nothing but the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from fordstone.connectors.guarantee import path_guarantees
from fordstone.edge.graph import Edge, Graph, Vertex, build_graph
from fordstone.errors import ConfigError
from fordstone.model import plan as p
from fordstone.model.duration import human_us
from fordstone.model.schema import Schema
from fordstone.model.stream import StreamType, stream_types

_FIRST_OPTIONS: Final = ("path", "url", "topic")
"""Shown without their name: they say which thing of its kind the connector means."""
_SECRETS: Final = ("password", "secret", "token", "credential")
_BARRIERS: Final = {
    "aligned": "aligned: a task waits for the barrier on every input",
    "unaligned": "unaligned: barriers overtake rows, which become part of the checkpoint",
    "blocking": "blocking: sources stop until the checkpoint is sealed",
}

Types = Mapping[p.Input, StreamType]


def explain(plan: p.Plan, *, format: str = "text", parallelism: int = 1) -> str:  # noqa: A002 - the word users expect
    """Word a plan. `format` is `"text"` or `"mermaid"`. Called by `Pipeline.explain` and the command line."""
    graph, types = build_graph(plan, parallelism), stream_types(plan)
    if format == "text":
        return _text(plan, graph, types)
    if format == "mermaid":
        return _mermaid(plan, graph)
    raise ConfigError(f"format={format!r}: a plan is explained as 'text' or 'mermaid'.")


# What a step is, in words.


def title(step: p.Step) -> str:
    """What a step does, in one line."""
    match step:
        case p.Source():
            return f"source {_connector(step.connector)}"
        case p.Filter():
            return f"keep rows where {step.predicate}"
        case p.Select():
            return f"select {', '.join(step.columns)}"
        case p.WithColumns():
            return f"add {', '.join(step.columns)}"
        case p.Explode():
            return f"a row for each element of {step.expression}"
        case p.Function():
            return f"{step.kind} {_function(step.path)}"
        case p.Union():
            return f"union of {', '.join(map(str, step.streams))}"
        case p.Aggregate():
            return f"{_kind(step)} {_over(step.keys)}"
        case p.Ewma():
            return f"exponentially weighted mean {_over(step.keys)}, alpha {step.alpha}"
        case p.Loop():
            return f"loop, fed back from {step.feedback}"
        case p.Sink():
            return f"sink {_connector(step.connector)}"
        case _:
            assert_never(step)


def _kind(step: p.Aggregate) -> str:
    if step.window is None:
        return "running aggregate"
    shift = f" shifted by {human_us(step.window.offset_us)}" if step.window.offset_us else ""
    return f"{human_us(step.window.size_us)} windows{shift}"


def _over(keys: tuple[str, ...]) -> str:
    return f"for each {', '.join(keys)}" if keys else "over all rows"


def details(plan: p.Plan, step: p.Step, types: Types) -> Iterator[tuple[str, str]]:
    """What more there is to say of a step: a label and a text each."""
    stream = types[p.Input(step.name)]
    if isinstance(step, p.Aggregate):
        yield "computes", ", ".join(given.sql for given in step.aggregates)
    if isinstance(step, p.Ewma):
        yield "smooths", ", ".join(step.columns)
    if not isinstance(step, p.Sink):
        before = types[step.inputs[0]] if step.inputs else None
        if before is None or before.schema != stream.schema or isinstance(step, p.Aggregate):
            yield "columns", _columns(stream.schema)
        if before is None or before.time != stream.time:
            yield "time", _time(step, stream)
        if stream.upsert_key is not None and (before is None or before.upsert_key != stream.upsert_key):
            yield "rows", _replacing(stream.upsert_key)
    if isinstance(step, p.Source):
        yield "bad rows", "go to the dead letters" if step.on_error == "keep" else "stop the pipeline"
    if isinstance(step, p.Sink):
        yield "releases", _release(plan, step)
    if (kept := _kept(plan, step)) is not None:
        yield "keeps", kept


def _time(step: p.Step, stream: StreamType) -> str:
    if stream.time is None:
        return "none"
    text = stream.time.column
    if isinstance(step, p.Source):
        text += f", rows may be {human_us(step.lateness_us)} behind" if step.lateness_us else ", in order"
        if step.idle_after_us is not None:
            text += f"; a partition silent for {human_us(step.idle_after_us)} is not waited for"
    return text


def _replacing(key: tuple[str, ...]) -> str:
    return f"replace each other by {', '.join(key)}" if key else "each replaces the one before"


def _kept(plan: p.Plan, step: p.Step) -> str | None:
    """What of a step is in a checkpoint."""
    match step:
        case p.Source():
            return "the position of every partition"
        case p.Aggregate(window=None):
            return "one row a key" if step.keys else "one row"
        case p.Aggregate():
            return "partial aggregates of open windows"
        case p.Ewma():
            return "the rows that wait for time, and one number a key and column"
        case p.Loop() if plan.guarantee == "exactly_once":
            return "rows that are on their way back at a barrier"
        case _:
            return None


def _release(plan: p.Plan, sink: p.Sink) -> str:
    if plan.guarantee != "exactly_once":
        return "at once"
    return "when the epoch is sealed" if sink.release == "commit" else "at once, with ids (__id) to deduplicate by"


def _connector(spec: p.ConnectorSpec) -> str:
    """A connector as it would be written, secrets left out."""
    shown = {
        name: "***" if any(word in name.lower() for word in _SECRETS) else value for name, value in spec.options.items()
    }
    first = [repr(shown.pop(name)) for name in _FIRST_OPTIONS if name in shown]
    return f"{spec.kind}({', '.join([*first, *(f'{name}={value!r}' for name, value in shown.items())])})"


def _function(path: str) -> str:
    if not path.startswith(p.LOCAL_FUNCTION):
        return path
    return f"{path.split(':')[1]} (written in place: runs in this process only)"


def _columns(schema: Schema) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in schema.items())


def crossing(plan: p.Plan, edge: Edge) -> str:
    """What travels along an edge between tasks."""
    what = "late rows" if edge.port == "late" else "rows" if edge.combiner is None else "partial aggregates"
    if edge.back:
        return f"{what}, back to the loop's head"
    if edge.keys is None:
        return what
    text = f"{what}, shuffled by {', '.join(edge.keys)}" if edge.keys else f"{what}, all to one subtask"
    if edge.combiner is not None:
        return f"{text} (combined first)"
    late_wanted = isinstance(plan.step(edge.target), p.Aggregate)
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
        f"  barriers   {_BARRIERS[plan.mode]}",
        f"  runs       on the edge, as {_count(len(graph.vertices), 'task')}",
    ]
    for vertex in graph.vertices:
        lines += ["", _task_title(vertex), *drawn(_node(plan, graph, types, vertex, vertex.name, ""))]
    lines += ["", "guarantees", *guarantees(plan)]
    return "\n".join(lines) + "\n"


def _task_title(vertex: Vertex) -> str:
    times = f" x{vertex.parallelism}" if vertex.parallelism > 1 else ""
    fused = f": {len(vertex.steps)} steps fused" if len(vertex.steps) > 1 else ""
    return f"task {vertex.name}{times}{fused}"


def _node(plan: p.Plan, graph: Graph, types: Types, vertex: Vertex, name: str, port: str) -> Node:
    """A step and what is fused behind it."""
    step = plan.step(name)
    inside = [
        _node(plan, graph, types, vertex, consumer.name, "late rows: " if stream.port == "late" else "")
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
    ids = {step.name: f"s{number}" for number, step in enumerate(plan.steps)}
    lines = ["flowchart TD"]
    for number, vertex in enumerate(graph.vertices):
        lines.append(f'  subgraph t{number}["{_quoted(_task_title(vertex))}"]')
        lines += [f"    {ids[name]}{_shape(plan.step(name))}" for name in vertex.steps]
        lines.append("  end")
    lines += [f'  {ids[edge.step]} ==>|"{_quoted(crossing(plan, edge))}"| {ids[edge.target]}' for edge in graph.edges]
    for step in plan.steps:
        for stream in step.inputs:
            if graph.home[step.name] == graph.home[stream.step]:
                label = '|"late rows"|' if stream.port == "late" else ""
                lines.append(f"  {ids[stream.step]} -->{label} {ids[step.name]}")
    return "\n".join([*lines, *_mermaid_guarantees(plan)]) + "\n"


def _mermaid_guarantees(plan: p.Plan) -> Sequence[str]:
    """Comments: a reader of the source sees them, the drawing stays clean."""
    return [f"  %% {path.source} → {path.sink}: {path.gives}: {path.why}" for path in path_guarantees(plan)]


def _shape(step: p.Step) -> str:
    label = f'"{_quoted(step.name)}<br/>{_quoted(title(step))}"'
    if isinstance(step, p.Source | p.Sink):
        return f"[/{label}/]"
    return f"[({label})]" if isinstance(step, p.Aggregate | p.Ewma | p.Loop) else f"[{label}]"


def _quoted(text: str) -> str:
    """Text inside a quoted label, where Mermaid reads '#...;' as a character."""
    for char, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("\n", " ")):
        text = text.replace(char, code)
    return text
