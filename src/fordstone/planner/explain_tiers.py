"""Say what a plan for two tiers does before it runs: what runs where, what crosses and what that saves, who steers whom.

The words for tasks and steps are those of `explain`; where the plan is cut is decided in `split`. A caller that runs the center
on another engine (the command line: Spark) hands in its description. Reads nothing but the plan.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.planner.explain import BARRIERS, chart, quoted, tasks
from fordstone.planner.graph import build_graph
from fordstone.planner.guarantee import end_to_end
from fordstone.planner.split import Crossing, Tiers, assumptions, saving, saving_words, split

WIDTH: Final = 100
CenterWords = Callable[[p.Plan], Sequence[str]]
"""Words the center part as it would run on another engine than ours: a title, then lines."""


def explain(
    plan: p.Plan,
    *,
    format: str = "text",  # noqa: A002 - the word users expect
    parallelism: int = 1,
    center: CenterWords | None = None,
) -> str:
    """Word a plan for two tiers: `"text"`, `"mermaid"` or `"json"`. Called by `Pipeline.explain` and the command line."""
    tiers = split(plan)
    match format:
        case "text":
            return "\n".join(_text(plan, tiers, parallelism, center or _on_our_engine)) + "\n"
        case "mermaid":
            return "\n".join(_mermaid(plan, tiers, parallelism)) + "\n"
        case "json":
            return json.dumps(_json(plan, tiers), indent=2, ensure_ascii=False) + "\n"
        case _:
            raise ConfigError(f"format={format!r}: a plan is explained as 'text', 'mermaid' or 'json'.")


# As text.


def _text(plan: p.Plan, tiers: Tiers, parallelism: int, center: CenterWords) -> Iterator[str]:
    yield f"pipeline {plan.pipeline}"
    yield f"  guarantee  {plan.guarantee}"
    yield f"  barriers   {BARRIERS[plan.mode]}"
    yield "  runs       in two tiers: edge on every node, center over what all nodes sent"
    yield from _title("edge, on every node")
    yield from tasks(tiers.edge, parallelism=parallelism)
    if tiers.crossings:
        yield from _title("what crosses")
        for crossing in tiers.crossings:
            yield from ["", *_crossing(plan, crossing)]
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
    yield from [*_title("guarantees, end to end"), "", *_guarantees(plan)]


def _on_our_engine(plan: p.Plan) -> list[str]:
    return ["on our own engine", *tasks(plan)]


def _title(text: str) -> list[str]:
    return ["", f"── {text} ".ljust(WIDTH, "─")]


def _crossing(plan: p.Plan, crossing: Crossing) -> Iterator[str]:
    what = f"partial rows of {crossing.aggregate}, instead of rows" if crossing.partial else "rows"
    yield f"  {crossing.stream}: {what}"
    found = saving(crossing.before, crossing.schema, partial=crossing.partial)
    moved = [plan.step(name) for name in crossing.pushed]
    words = saving_words(
        found,
        crossing.schema,
        filters=any(isinstance(step, p.Filter) for step in moved),
        explodes=any(isinstance(step, p.Explode) for step in moved),
    )
    details = [
        ("at the cut", _columns(crossing.before)),
        ("crosses", _columns(crossing.schema) if crossing.schema != crossing.before else "the same"),
        *([("not read", ", ".join(crossing.pruned))] if crossing.pruned and not crossing.pushed else []),
        ("pushed down", _pushed(crossing)),
        ("why no more", crossing.reason),
        *zip(("saves", "", ""), words, strict=False),
    ]
    yield from _detailed(details)


def _pushed(crossing: Crossing) -> str:
    made = [f"the partial aggregates of {crossing.aggregate}"] if crossing.partial else []
    return ", ".join([*crossing.pushed, *made]) or "nothing"


def _control(plan: p.Plan, table: p.Control) -> Iterator[str]:
    yield f"  {table.name}: {_columns(Schema.of(table.schema))}"
    writers = [step for step in plan.steps if isinstance(step, p.ToEdges) and step.control == table.name]
    readers = [step.name for step, _ in plan.consumers(table.name)]
    written = f"{writers[0].name}, from {writers[0].input}, at the center" if writers else "nobody in this pipeline"
    read = f"{', '.join(readers)}, on every node: a version that came in one epoch counts from the next on"
    yield from _detailed(
        [
            ("key", f"{', '.join(table.keys)}: rows replace each other by it"),
            ("written by", written),
            ("read by", read if readers else "nobody: nodes do not fetch it"),
        ]
    )


def _guarantees(plan: p.Plan) -> Iterator[str]:
    paths = end_to_end(plan)
    ways = [f"{path.source} → {path.sink}" for path in paths]
    wide, given = max(map(len, ways), default=0), max((len(path.gives) for path in paths), default=0)
    for way, path in zip(ways, paths, strict=True):
        yield from _wrapped("  ", f"{way:<{wide}}  {path.gives:<{given}}  ", path.why)


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


def _columns(schema: Schema) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in schema.items())


# As a Mermaid flowchart.


def _mermaid(plan: p.Plan, tiers: Tiers, parallelism: int) -> Iterator[str]:
    yield "flowchart TD"
    halves = [("e", "edge, on every node", tiers.edge, parallelism)]
    if tiers.center is not None:
        halves.append(("c", "center", tiers.center, 1))
    ids: dict[str, dict[str, str]] = {}
    for tier, title, half, count in halves:
        ids[tier] = {step.name: f"{tier}s{number}" for number, step in enumerate(half.steps)}
        yield f'  subgraph {tier}["{title}"]'
        yield from (f"  {line}" for line in chart(half, build_graph(half, count), tier=tier))
        yield "  end"
    for crossing in tiers.crossings:
        what = f"{crossing.stream}: {'partial rows' if crossing.partial else 'rows'}"
        if crossing.stream in ids.get("c", {}):
            yield f'  {ids["e"][crossing.stream]} ==>|"{quoted(what)}"| {ids["c"][crossing.stream]}'
    for step in plan.steps:
        if isinstance(step, p.ToEdges) and step.control in ids["e"]:
            what = f"control table {step.control}"
            yield f'  {ids["c"][step.name]} -.->|"{quoted(what)}"| {ids["e"][step.control]}'
    for path in end_to_end(plan):
        yield f"  %% {path.source} → {path.sink}: {path.gives}: {path.why}"


# As JSON: the plan as it was written, and beside it what becomes of it.


def _json(plan: p.Plan, tiers: Tiers) -> dict[str, object]:
    return {
        **json.loads(plan.to_json()),
        "edge": json.loads(tiers.edge.to_json()),
        "center": None if tiers.center is None else json.loads(tiers.center.to_json()),
        "crossings": [_crossing_json(crossing) for crossing in tiers.crossings],
    }


def _crossing_json(crossing: Crossing) -> dict[str, object]:
    found = saving(crossing.before, crossing.schema, partial=crossing.partial)
    return {
        "stream": crossing.stream,
        "before": crossing.before.to_dict(),
        "schema": crossing.schema.to_dict(),
        "pushed": list(crossing.pushed),
        "partial": crossing.partial,
        "aggregate": crossing.aggregate,
        "reason": crossing.reason,
        "row_bytes": found.row,
        "crossing_bytes": found.crosses,
    }
