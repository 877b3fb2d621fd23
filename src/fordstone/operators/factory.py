"""Make the operator of a plan's step. The only place that knows both; both engines come here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fordstone.errors import PlanError
from fordstone.model import plan as p
from fordstone.model.expression import parse_predicate
from fordstone.model.schema import Schema
from fordstone.model.stream import StreamType, aggregates, exploded_columns, projection, smoothed
from fordstone.operators.aggregate import Combine, RunningAggregate, WindowAggregate
from fordstone.operators.ewma import Ewma
from fordstone.operators.operator import OP, ROW_ID, Operator
from fordstone.operators.partial import Partials
from fordstone.operators.rowwise import (
    ExplodeRows,
    FilterRows,
    FilterUpserts,
    LetOut,
    MapBatches,
    MapRecords,
    PassOn,
    Project,
)

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSetting:
    """What beside the step itself decides how it runs."""

    plan: p.Plan
    types: Mapping[p.Input, StreamType]
    functions: Functions = field(default_factory=dict)
    with_ids: frozenset[str] = frozenset()
    """Steps whose rows must carry ids, because a sink releases them at once."""


def make_operator(step: p.Step, setting: OperatorSetting) -> Operator:
    """The operator of one subtask of a step. Each call gives a fresh one."""
    if not step.inputs:
        return PassOn()
    stream = setting.types[step.inputs[0]]
    schema = stream.schema
    match step:
        case p.Filter():
            predicate = parse_predicate(step.predicate, schema)
            return FilterRows(predicate, schema) if stream.upsert_key is None else FilterUpserts(predicate, schema)
        case p.Select() | p.WithColumns():
            return Project(projection(step, schema), schema)
        case p.Explode():
            array, out = exploded_columns(step, schema)
            return ExplodeRows(array, schema, out)
        case p.Function():
            return _function(step, setting.functions)
        case p.Aggregate():
            combined = combines(step, setting.plan)
            partials = partials_of(step, setting)
            if step.window is not None:
                return WindowAggregate(partials, combined=combined)
            return RunningAggregate(partials, combined=combined, at_barriers=setting.plan.guarantee == "exactly_once")
        case p.Ewma():
            return _ewma(step, stream)
        case p.Sink():
            hidden = [OP] if stream.upsert_key is not None else [ROW_ID] if step.release == "at_once" else []
            return LetOut(schema, hidden=hidden)
        case _:
            return PassOn()


def make_combiner(step: p.Aggregate, setting: OperatorSetting) -> Operator:
    """What runs before the shuffle of an aggregate that `combines`."""
    return Combine(partials_of(step, setting), drops_late=step.window is not None)


def combines(step: p.Aggregate, plan: p.Plan) -> bool:
    """Whether partial rows may be made before the shuffle: not where somebody wants the late rows as they came (rule 9)."""
    return not any(stream.port == "late" for _, stream in plan.consumers(step.name))


def partials_of(step: p.Aggregate, setting: OperatorSetting) -> Partials:
    """How an aggregate step makes, merges and finishes partial rows."""
    stream = setting.types[step.input]
    return Partials(
        step.keys,
        aggregates(step, stream.schema),
        stream.schema,
        window=step.window,
        time=stream.time,
        step=step.name,
        with_id=step.name in setting.with_ids,
    )


def _ewma(step: p.Ewma, stream: StreamType) -> Operator:
    if stream.time is None:
        raise PlanError(f"step {step.name}: ewma needs event time, and {step.input} has none.")
    return Ewma(step.keys, smoothed(step, stream.schema), stream.schema, alpha=step.alpha, time=stream.time)


def _function(step: p.Function, functions: Functions) -> Operator:
    function = resolve_function(step.path, functions)
    out = Schema.of(step.schema)
    if step.kind == "map_batches":
        return MapBatches(step.name, function, out)
    return MapRecords(step.name, function, out, many=step.kind == "flat_map")


def resolve_function(path: str, known: Functions) -> Callable[..., Any]:
    """The function of that path: as this process knows it, or imported."""
    if path in known:
        return known[path]
    if path.startswith(p.LOCAL_FUNCTION):
        raise PlanError(
            f"function {path.split(':')[1]} was written in place (a lambda, or inside another function or the main script), "
            "so only the process that built the pipeline has it. Move it to the top level of a module to deploy it."
        )
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"function {path} cannot be imported: {error}. Put its module on the path of this process."
        ) from error
    if not callable(found):
        raise PlanError(f"{path} is not a function.")
    return found  # type: ignore[no-any-return]  # callable, checked above
