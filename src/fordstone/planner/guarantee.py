"""What each path from a source to a sink guarantees, with or without a hub between: as much as its weakest part.

Pure: it reads the plan and the deliveries that connectors declare.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fordstone.connectors.base import Capability, Delivery
from fordstone.connectors.registry import capabilities, fences, sink_delivery, source_delivery
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
        for source in sorted(plan.sources_of(sink.name), key=lambda source: source.name)
    ]


def _between(plan: p.Plan, source: p.Source, sink: p.Sink) -> PathGuarantee:
    parts = [
        (Delivery(plan.guarantee), f"the pipeline is {plan.guarantee}"),
        (source_delivery(source.connector), f"source {source.name} ({source.connector.kind}) gives no more"),
    ]
    with_ids = plan.guarantee == "exactly_once" and sink.release == "at_once"
    if not with_ids:
        shown = f"sink {sink.name} ({sink.connector.kind}) keeps no record of emitted epochs"
        parts.append((sink_delivery(sink.connector), shown))
    gives, why = min(parts, key=lambda part: _STRENGTH[part[0]])
    if gives == Delivery.EXACTLY_ONCE:
        ids = "rows carry ids (__id) by which the receiver drops repeats"
        why = ids if with_ids else "replay and one commit per epoch" + _on_takeover(sink)
    return PathGuarantee(source=source.name, sink=sink.name, gives=gives, why=why)


def _on_takeover(sink: p.Sink) -> str:
    """What to add for a sink that other machines can write to, and that cannot refuse the one which was replaced."""
    with_ids = sink.release == "at_once"  # repeats are dropped by them
    if with_ids or Capability.IN_PROCESS in capabilities(sink.connector) or fences(sink.connector):
        return ""
    return f"; at-least-once on takeover: sink {sink.name} ({sink.connector.kind}) cannot refuse an older generation"


def end_to_end(plan: p.Plan) -> list[PathGuarantee]:
    """Every source, with every sink and control table that its rows come to."""
    found = [_through_the_hub(plan, path) for path in path_guarantees(plan)]
    for step in plan.steps:
        if isinstance(step, p.ToEdges):
            sources = sorted(plan.sources_of(step.name), key=lambda source: source.name)
            found += [_to_table(plan, source, step) for source in sources]
    return found


def _through_the_hub(plan: p.Plan, path: PathGuarantee) -> PathGuarantee:
    crosses = any(isinstance(step, p.ToCenter) for step in plan.upstream(path.sink))
    if not crosses or path.gives != Delivery.EXACTLY_ONCE:
        return path
    sink = plan.step(path.sink)
    note = _on_takeover(sink) if isinstance(sink, p.Sink) else ""
    return replace(path, why=f"replay, one commit per epoch, and the hub takes each epoch of a node once{note}")


def _to_table(plan: p.Plan, source: p.Source, step: p.ToEdges) -> PathGuarantee:
    own, given = Delivery(plan.guarantee), source_delivery(source.connector)
    gives = min(own, given, key=_STRENGTH.__getitem__)
    why = "the hub takes each epoch and each version of the table once; nodes take versions over at barriers"
    if gives != Delivery.EXACTLY_ONCE:
        weak = gives == own
        why = f"the pipeline is {own}" if weak else f"source {source.name} ({source.connector.kind}) gives no more"
    return PathGuarantee(source=source.name, sink=f"control {step.control}", gives=gives, why=why)
