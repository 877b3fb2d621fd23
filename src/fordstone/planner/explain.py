"""Describe what a plan does before it runs: which steps run together, what is shuffled, kept and sent, what each path guarantees.

For two tiers also what runs where, what crosses to the center and what that saves. Text for people, Mermaid and JSON for tools;
the same plan always gives the same text. Reads nothing but the plan: what is decided is in `graph`, `split` and `guarantee`.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fordstone.connectors.registry import describe_source
from fordstone.lang.choices import check_word
from fordstone.lang.schema import Schema
from fordstone.operators.registry import family_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Types, shown
from fordstone.planner.check import stream_types
from fordstone.planner.graph import Edge, Graph, Vertex, build_graph
from fordstone.planner.guarantee import end_to_end
from fordstone.planner.split import Crossing, Tiers, assumptions, describe_saving, saving, split

PORT_NAMES: Final = {
    "main": "rows",
    "late": "late rows",
    "timeout": "candidates that timed out",
    "final": "final results",
}
BARRIERS: Final = {
    "aligned": "aligned: a task waits for the barrier on every input",
    "unaligned": "unaligned: barriers overtake rows, which become part of the checkpoint",
    "blocking": "blocking: sources stop until the checkpoint is sealed",
}


WIDTH: Final = 100
DescribeCenter = Callable[[p.Plan], Sequence[str]]
"""Describes the center part as it would run on another engine than ours: a title, then lines."""


def explain(
    plan: p.Plan,
    *,
    format: str = "text",  # noqa: A002 - the word users expect
    parallelism: int = 1,
    center: DescribeCenter | None = None,
) -> str:
    """Describe a plan as `"text"`, `"mermaid"` or `"json"`. Called by `Pipeline.explain` and the command line."""
    check_word("format", format, ("text", "mermaid", "json"))
    tiers = split(plan)
    match format:
        case "text":
            lines = (
                _tiers_text(plan, tiers, parallelism, center or _on_our_engine)
                if plan.tiered
                else _text(plan, parallelism)
            )
        case "mermaid":
            lines = _mermaid(plan, tiers, parallelism)
        case _:
            return json.dumps(_json(plan, tiers), indent=2, ensure_ascii=False) + "\n"
    return "\n".join(lines) + "\n"


def port_lead(stream: p.Input) -> str:
    """Begins the line of a step that reads another port than the main one."""
    return "" if stream.port == "main" else f"{PORT_NAMES[stream.port]}: "


def crossing(plan: p.Plan, edge: Edge) -> str:
    """What travels along an edge between tasks."""
    target = plan.step(edge.target)
    combined = edge.feeder and isinstance(target, p.Aggregate | p.Combine)
    partial = combined or (isinstance(target, p.Aggregate) and target.merges is not None)
    what = PORT_NAMES[edge.port] if edge.port != "main" else "partial aggregates" if partial else "rows"
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


def _text(plan: p.Plan, parallelism: int) -> Iterator[str]:
    count = len(build_graph(plan, parallelism).vertices)
    yield from _heading(plan, f"on the edge, as {count} task{'' if count == 1 else 's'}")
    yield from [*_tasks(plan, parallelism), "", "guarantees", *guarantees(plan)]


def _heading(plan: p.Plan, runs: str) -> Iterator[str]:
    yield f"pipeline {plan.pipeline}"
    yield f"  guarantee  {plan.guarantee}"
    yield f"  barriers   {BARRIERS[plan.mode]}"
    yield f"  runs       {runs}"


def _tasks(plan: p.Plan, parallelism: int = 1) -> Iterator[str]:
    graph, types = build_graph(plan, parallelism), stream_types(plan)
    for vertex in graph.vertices:
        yield from ["", _task_title(vertex), *drawn(_node(plan, graph, types, vertex, vertex.name, ""))]


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
    family = family_of(step)
    details = tuple(described(step, plan, types))
    return Node(title=f"{port}{name}: {family.title(step)}", details=details, children=(*inside, *onward))


STATE_TEXT: Final = {
    "memory": "in memory",
    "file": "what waits for time in files, what is kept by key in memory",
    "rocksdb": "what is kept by key in RocksDB, what waits for time in files",
}


def described(step: p.Step, plan: p.Plan, types: Types, *, on_spark: bool = False) -> Iterator[tuple[str, str]]:
    """What is said of a step: by its family, of a source with event time by its connector, and where its state is, if not in memory."""
    yield from family_of(step).describe(step, plan, types)
    kind = plan.state_of(step.name)
    if kind != "memory" and isinstance(step, p.KeyedStep) and not isinstance(step, p.Combine):
        yield "state", f"in Spark's own state store; state={kind!r} is for the edge" if on_spark else STATE_TEXT[kind]
    timed = isinstance(step, p.Source) and (step.time is not None or step.timed_by is not None)
    if isinstance(step, p.Source) and timed and not step.declares_time:
        yield from describe_source(step.connector).items()


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


def guarantees(plan: p.Plan) -> Iterator[str]:
    """A line for each path from a source to a sink or a control table."""
    paths = end_to_end(plan)
    ways = [f"{path.source} → {path.sink}" for path in paths]
    wide, given = max(map(len, ways), default=0), max((len(path.gives) for path in paths), default=0)
    for way, path in zip(ways, paths, strict=True):
        yield from _wrapped("  ", f"{way:<{wide}}  {path.gives:<{given}}  ", path.why)


def _tiers_text(plan: p.Plan, tiers: Tiers, parallelism: int, center: DescribeCenter) -> Iterator[str]:
    yield from _heading(plan, "in two tiers: edge on every node, center over what all nodes sent")
    yield from _title("edge, on every node")
    yield from _tasks(tiers.edge, parallelism)
    if tiers.crossings:
        yield from _title("what crosses")
        for crossing in tiers.crossings:
            yield from ["", *_crossing(crossing)]
        given = [schema for crossing in tiers.crossings for schema in (crossing.before, crossing.schema)]
        yield from ["", *_wrapped("  ", "", f"bytes are {assumptions(given)}")]
    if tiers.center is not None:
        title, *lines = center(tiers.center)
        yield from [*_title(f"center, {title}"), *lines]
    tables = [step for step in plan.steps if isinstance(step, p.Control)]
    if tables:
        yield from _title("control tables")
        for table in tables:
            yield from ["", *_control(plan, table)]
    yield from [*_title("guarantees, end to end"), "", *guarantees(plan)]


def _on_our_engine(plan: p.Plan) -> list[str]:
    return ["on our own engine", *_tasks(plan)]


def _title(text: str) -> list[str]:
    return ["", f"── {text} ".ljust(WIDTH, "─")]


def _crossing(crossing: Crossing) -> Iterator[str]:
    pushed = crossing.pushed
    merged = pushed.aggregate.name if pushed.aggregate is not None else None
    yield f"  {crossing.step.name}: {f'partial rows of {merged}, instead of rows' if merged else 'rows'}"
    found = saving(crossing.before, crossing.schema, partial=crossing.partial)
    lines = describe_saving(
        found,
        crossing.schema,
        filters=any(isinstance(step, p.Filter) for step in pushed.steps),
        explodes=any(isinstance(step, p.Explode) for step in pushed.steps),
    )
    made = [f"the partial aggregates of {merged}"] if merged else []
    details = [
        ("at the cut", shown(crossing.before)),
        ("crosses", shown(crossing.schema) if crossing.schema != crossing.before else "the same"),
        *([("not read", ", ".join(crossing.pruned))] if crossing.pruned and not pushed.steps else []),
        ("pushed down", ", ".join([*pushed.names, *made]) or "nothing"),
        ("why no more", pushed.reason),
        *zip(("saves", "", ""), lines, strict=False),
    ]
    yield from _detailed(details)


def _control(plan: p.Plan, table: p.Control) -> Iterator[str]:
    yield f"  {table.name}: {shown(Schema.of(table.schema))}"
    writers = [step for step in plan.steps if isinstance(step, p.ToEdges) and step.control == table.name]
    readers = [step.name for step, _ in plan.consumers(table.name)]
    written = f"{writers[0].name}, from {writers[0].input}, at the center" if writers else "no step of this pipeline"
    read = f"{', '.join(readers)}, on every node: a version that came in one epoch counts from the next on"
    yield from _detailed(
        [
            ("key", f"{', '.join(table.keys)}: rows replace each other by it"),
            ("written by", written),
            ("read by", read if readers else "no step: nodes do not fetch it"),
        ]
    )


def _detailed(details: list[tuple[str, str]]) -> Iterator[str]:
    wide = max(len(label) for label, _ in details)
    for label, text in details:
        yield from _wrapped("     ", f"{label:<{wide}}  ", text)


def _wrapped(indent: str, lead: str, text: str) -> list[str]:
    """Text after a lead, in lines that a terminal shows whole."""
    rest = " " * (len(indent) + len(lead))
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent + lead,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


# As a Mermaid flowchart.


def _chart(plan: p.Plan, graph: Graph, tier: str = "") -> list[str]:
    """The tasks, and what travels between them. `tier` begins every id: two plans may stand in one flowchart."""
    ids = {step.name: f"{tier}s{number}" for number, step in enumerate(plan.steps)}
    lines = []
    for number, vertex in enumerate(graph.vertices):
        lines.append(f'  subgraph {tier}t{number}["{_quoted(_task_title(vertex))}"]')
        lines += [f"    {ids[name]}{_shape(plan.step(name))}" for name in vertex.steps]
        lines.append("  end")
    lines += [f'  {ids[edge.step]} ==>|"{_quoted(crossing(plan, edge))}"| {ids[edge.target]}' for edge in graph.edges]
    for step in plan.steps:
        for stream in step.inputs:
            if graph.home[step.name] == graph.home[stream.step]:
                label = f'|"{PORT_NAMES[stream.port]}"|' if stream.port != "main" else ""
                lines.append(f"  {ids[stream.step]} -->{label} {ids[step.name]}")
    return lines


def _shape(step: p.Step) -> str:
    label = f'"{_quoted(step.name)}<br/>{_quoted(family_of(step).title(step))}"'
    if isinstance(step, p.Source | p.Sink):
        return f"[/{label}/]"
    return f"[({label})]" if isinstance(step, p.KeyedStep | p.Loop) else f"[{label}]"


def _quoted(text: str) -> str:
    """Text inside a quoted label, where Mermaid reads '#...;' as a character."""
    for char, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("\n", " ")):
        text = text.replace(char, code)
    return text


def _mermaid(plan: p.Plan, tiers: Tiers, parallelism: int) -> Iterator[str]:
    yield "flowchart TD"
    yield from _tiers_mermaid(plan, tiers, parallelism) if plan.tiered else _chart(plan, build_graph(plan, parallelism))
    for path in end_to_end(plan):
        # A comment: a reader of the source sees it, the drawing stays clean.
        yield f"  %% {path.source} → {path.sink}: {path.gives}: {path.why}"


def _tiers_mermaid(plan: p.Plan, tiers: Tiers, parallelism: int) -> Iterator[str]:
    halves = [("e", "edge, on every node", tiers.edge, parallelism)]
    if tiers.center is not None:
        halves.append(("c", "center", tiers.center, 1))
    ids: dict[str, dict[str, str]] = {}
    for tier, title, half, count in halves:
        ids[tier] = {step.name: f"{tier}s{number}" for number, step in enumerate(half.steps)}
        yield f'  subgraph {tier}["{title}"]'
        yield from (f"  {line}" for line in _chart(half, build_graph(half, count), tier))
        yield "  end"
    for crossing in tiers.crossings:
        what = f"{crossing.step.name}: {'partial rows' if crossing.partial else 'rows'}"
        if crossing.step.name in ids.get("c", {}):
            yield f'  {ids["e"][crossing.step.name]} ==>|"{_quoted(what)}"| {ids["c"][crossing.step.name]}'
    for step in plan.steps:
        if isinstance(step, p.ToEdges) and step.control in ids["e"]:
            what = f"control table {step.control}"
            yield f'  {ids["c"][step.name]} -.->|"{_quoted(what)}"| {ids["e"][step.control]}'


# As JSON: the plan as it was written, and beside it what becomes of it.


def _json(plan: p.Plan, tiers: Tiers) -> dict[str, object]:
    written = json.loads(plan.to_json())
    if not plan.tiered:
        return written  # type: ignore[no-any-return]
    return {
        **written,
        "edge": json.loads(tiers.edge.to_json()),
        "center": None if tiers.center is None else json.loads(tiers.center.to_json()),
        "crossings": [_crossing_json(crossing) for crossing in tiers.crossings],
    }


def _crossing_json(crossing: Crossing) -> dict[str, object]:
    found = saving(crossing.before, crossing.schema, partial=crossing.partial)
    return {
        "stream": crossing.step.name,
        "before": crossing.before.to_dict(),
        "schema": crossing.schema.to_dict(),
        "pushed": list(crossing.pushed.names),
        "partial": crossing.partial,
        "aggregate": None if crossing.pushed.aggregate is None else crossing.pushed.aggregate.name,
        "reason": crossing.pushed.reason,
        "row_bytes": found.row,
        "crossing_bytes": found.crosses,
    }
