"""What each path from a source to a sink guarantees: as much as its weakest part.

Pure: looks at the plan and at what connectors say of themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from fordstone.connectors.base import Delivery
from fordstone.connectors.registry import sink_delivery, source_delivery
from fordstone.plan import plan as p

_STRENGTH = {Delivery.AT_MOST_ONCE: 0, Delivery.AT_LEAST_ONCE: 1, Delivery.EXACTLY_ONCE: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathGuarantee:
    """What one path gives, and which part decides it."""

    source: str
    sink: str
    gives: Delivery
    why: str


def path_guarantees(plan: p.Plan) -> list[PathGuarantee]:
    """Every source and sink that are joined, with the guarantee between them."""
    return [
        _between(plan, source, sink)
        for sink in plan.steps
        if isinstance(sink, p.Sink)
        for source in _sources(plan, sink)
    ]


def _sources(plan: p.Plan, sink: p.Sink) -> list[p.Source]:
    steps = {step.name: step for step in plan.steps}
    found, seen, todo = [], set(), [sink.input.step]
    while todo:
        name = todo.pop()
        if name in seen or name not in steps:
            continue
        seen.add(name)
        step = steps[name]
        if isinstance(step, p.Source):
            found.append(step)
        todo += [stream.step for stream in step.inputs]
    return sorted(found, key=lambda step: step.name)


def _between(plan: p.Plan, source: p.Source, sink: p.Sink) -> PathGuarantee:
    parts = [
        (Delivery(plan.guarantee), f"the pipeline is {plan.guarantee}"),
        (source_delivery(source.connector), f"source {source.name} ({source.connector.kind}) gives no more"),
        (
            sink_delivery(sink.connector),
            f"sink {sink.name} ({sink.connector.kind}) cannot tell what it has already shown",
        ),
    ]
    if plan.guarantee == "exactly_once" and sink.release == "at_once":
        parts.append((Delivery.EXACTLY_ONCE, "rows carry ids (__id) by which the receiver drops what it has seen"))
        if _STRENGTH[parts[2][0]] < _STRENGTH[Delivery.EXACTLY_ONCE]:
            parts.pop(2)
    weakest = min(parts, key=lambda part: _STRENGTH[part[0]])
    why = (
        weakest[1]
        if weakest[0] != Delivery.EXACTLY_ONCE
        else parts[-1][1]
        if sink.release == "at_once"
        else "replay and one commit per epoch"
    )
    return PathGuarantee(source=source.name, sink=sink.name, gives=weakest[0], why=why)
