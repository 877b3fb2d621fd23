"""Make the operator of a plan's step. The only place that knows both; both engines come here."""

from __future__ import annotations

from fordstone.errors import PlanError
from fordstone.model import plan as p
from fordstone.model.aggregating import aggregates
from fordstone.model.expression import parse_predicate
from fordstone.model.schema import Schema
from fordstone.model.smoothing import smoothed
from fordstone.model.stream import exploded_columns, projection
from fordstone.model.stream_type import StreamType
from fordstone.model.windows import Tumbling
from fordstone.operators.aggregate import Combine, RunningAggregate, WindowAggregate
from fordstone.operators.deduplicate import make_deduplicate
from fordstone.operators.ewma import Ewma
from fordstone.operators.join import make_join, make_join_side
from fordstone.operators.lookup import make_lookup, make_lookup_latest, make_lookup_side
from fordstone.operators.match import make_match
from fordstone.operators.operator import OP, ROW_ID, Operator
from fordstone.operators.partial import Partials
from fordstone.operators.process import make_process
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
from fordstone.operators.setting import Functions, OperatorSetting, resolve_function


def make_operator(step: p.Step, setting: OperatorSetting) -> Operator:
    """The operator of one subtask of a step. Each call gives a fresh one."""
    match step:
        case p.Aggregate():
            return _aggregate(step, setting)
        case p.Ewma():
            return _ewma(step, setting.types[step.input])
        case p.Deduplicate():
            return make_deduplicate(step, setting)
        case p.Join():
            return make_join(step, setting)
        case p.Lookup():
            return make_lookup(step, setting)
        case p.LookupLatest():
            return make_lookup_latest(step, setting)
        case p.Match():
            return make_match(step, setting)
        case p.Process():
            return make_process(step, setting)
        case _:
            return _row_wise(step, setting)


def make_feeder(step: p.KeyedStep, index: int, setting: OperatorSetting) -> Operator | None:
    """What runs before the shuffle into one input of a step, on the feeding side: stateless. None: rows go as they are."""
    match step:
        case p.Aggregate() if combines(step, setting.plan):
            return Combine(partials_of(step, setting), drops_late=step.window is not None)
        case p.Join():
            return make_join_side(step, index, setting)
        case p.LookupLatest():
            return make_lookup_side(step, index, setting)
        case _:
            return None


def has_feeder(step: p.KeyedStep, plan: p.Plan) -> bool:
    """Whether something runs before the shuffle into a step."""
    return isinstance(step, p.Join | p.LookupLatest) or (isinstance(step, p.Aggregate) and combines(step, plan))


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
        window=step.window if isinstance(step.window, Tumbling) else None,
        time=stream.time,
        step=step.name,
        with_id=step.name in setting.with_ids,
    )


def _row_wise(step: p.Step, setting: OperatorSetting) -> Operator:
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
        case p.Sink():
            hidden = [OP] if stream.upsert_key is not None else [ROW_ID] if step.release == "at_once" else []
            return LetOut(schema, hidden=hidden)
        case _:
            return PassOn()


def _aggregate(step: p.Aggregate, setting: OperatorSetting) -> Operator:
    combined = combines(step, setting.plan)
    partials = partials_of(step, setting)
    if step.window is not None:
        return WindowAggregate(partials, combined=combined)
    return RunningAggregate(partials, combined=combined, at_barriers=setting.plan.guarantee == "exactly_once")


def _ewma(step: p.Ewma, stream: StreamType) -> Operator:
    if stream.time is None:
        raise PlanError(f"step {step.name}: ewma needs event time, and {step.input} has none.")
    return Ewma(step.keys, smoothed(step, stream.schema), stream.schema, alpha=step.alpha or 1.0, time=stream.time)


def _function(step: p.Function, functions: Functions) -> Operator:
    function = resolve_function(step.path, functions)
    out = Schema.of(step.schema)
    if step.kind == "map_batches":
        return MapBatches(step.name, function, out)
    return MapRecords(step.name, function, out, many=step.kind == "flat_map")
