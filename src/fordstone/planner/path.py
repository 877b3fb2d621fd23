"""What each path guarantees from end to end, whether or not it goes through the hub."""

from __future__ import annotations

from dataclasses import replace

from fordstone.connectors.base import Delivery
from fordstone.connectors.registry import source_delivery
from fordstone.plan import plan as p
from fordstone.planner.guarantee import PathGuarantee, path_guarantees

_WEAKEST_FIRST = (Delivery.AT_MOST_ONCE, Delivery.AT_LEAST_ONCE, Delivery.EXACTLY_ONCE)


def end_to_end(plan: p.Plan) -> list[PathGuarantee]:
    """Every source, with every sink and control table that its rows come to."""
    found = [_through_the_hub(plan, path) for path in path_guarantees(plan)]
    for step in plan.steps:
        if isinstance(step, p.ToEdges):
            found += [_to_table(plan, source, step) for source in _sources(plan, step)]
    return found


def _through_the_hub(plan: p.Plan, path: PathGuarantee) -> PathGuarantee:
    crosses = any(isinstance(step, p.ToCenter) for step in _upstream(plan, plan.step(path.sink)))
    if not crosses or path.gives != Delivery.EXACTLY_ONCE:
        return path
    return replace(path, why="replay, one commit per epoch, and the hub takes each epoch of a node once")


def _to_table(plan: p.Plan, source: p.Source, step: p.ToEdges) -> PathGuarantee:
    own, given = Delivery(plan.guarantee), source_delivery(source.connector)
    gives = min(own, given, key=_WEAKEST_FIRST.index)
    why = "the hub takes each epoch and each version of the table once; nodes take versions over at barriers"
    if gives != Delivery.EXACTLY_ONCE:
        weak = gives == own
        why = f"the pipeline is {own}" if weak else f"source {source.name} ({source.connector.kind}) gives no more"
    return PathGuarantee(source=source.name, sink=f"control {step.control}", gives=gives, why=why)


def _sources(plan: p.Plan, step: p.Step) -> list[p.Source]:
    found = [other for other in _upstream(plan, step) if isinstance(other, p.Source)]
    return sorted(found, key=lambda source: source.name)


def _upstream(plan: p.Plan, step: p.Step) -> list[p.Step]:
    """The steps that a step's rows come through."""
    names, todo = set[str](), [stream.step for stream in step.inputs]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo += [stream.step for stream in plan.step(name).inputs]
    return [other for other in plan.steps if other.name in names]
