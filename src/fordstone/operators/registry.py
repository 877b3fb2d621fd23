"""Make the operator of a plan's step. The only place that knows both; both engines come here."""

from __future__ import annotations

from fordstone.lang.expression import parse_predicate
from fordstone.lang.schema import Schema
from fordstone.operators.base import OP, ROW_ID, Functions, Operator, OperatorContext, resolve_function
from fordstone.operators.deduplicate import make_deduplicate
from fordstone.operators.ewma import make_ewma
from fordstone.operators.join.interval import make_join, make_join_side
from fordstone.operators.join.lookup import make_lookup, make_lookup_latest, make_lookup_side
from fordstone.operators.match.step import make_match
from fordstone.operators.process.step import make_process
from fordstone.operators.rowwise import (
    ExplodeRows,
    FilterRows,
    FilterUpserts,
    MapBatches,
    MapRecords,
    PassOn,
    Project,
    ToHub,
    ToSink,
    exploded_columns,
    projection,
)
from fordstone.operators.window.registry import combines, make_aggregate, make_combiner, make_epoch_combine
from fordstone.plan import plan as p


def make_operator(step: p.Step, context: OperatorContext) -> Operator:
    """The operator of one subtask of a step. Each call gives a fresh one."""
    match step:
        case p.Aggregate():
            return make_aggregate(step, context)
        case p.Combine():
            return make_epoch_combine(step, context)
        case p.Ewma():
            return make_ewma(step, context)
        case p.Deduplicate():
            return make_deduplicate(step, context)
        case p.Join():
            return make_join(step, context)
        case p.Lookup():
            return make_lookup(step, context)
        case p.LookupLatest():
            return make_lookup_latest(step, context)
        case p.Match():
            return make_match(step, context)
        case p.Process():
            return make_process(step, context)
        case _:
            return _row_wise(step, context)


def make_feeder(step: p.KeyedStep, index: int, context: OperatorContext) -> Operator | None:
    """What runs before the shuffle into one input of a step, on the feeding side: stateless. None: rows go as they are."""
    match step:
        case p.Aggregate() if combines(step, context.plan):
            return make_combiner(step, context)
        case p.Combine():
            return make_combiner(step, context)
        case p.Join():
            return make_join_side(step, index, context)
        case p.LookupLatest():
            return make_lookup_side(step, index, context)
        case _:
            return None


def has_feeder(step: p.KeyedStep, plan: p.Plan) -> bool:
    """Whether something runs before the shuffle into a step."""
    return isinstance(step, p.Combine | p.Join | p.LookupLatest) or (
        isinstance(step, p.Aggregate) and combines(step, plan)
    )


def _row_wise(step: p.Step, context: OperatorContext) -> Operator:
    if not step.inputs:
        return PassOn()
    stream = context.types[step.inputs[0]]
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
            return _function(step, context.functions)
        case p.Sink():
            hidden = [OP] if stream.upsert_key is not None else [ROW_ID] if step.release == "at_once" else []
            if step.connector.kind == "center":
                return ToHub(schema, hidden=hidden, partial=isinstance(context.plan.step(step.input.step), p.Combine))
            return ToSink(schema, hidden=hidden)
        case _:
            return PassOn()


def _function(step: p.Function, functions: Functions) -> Operator:
    function = resolve_function(step.path, functions)
    out = Schema.of(step.schema)
    if step.kind == "map_batches":
        return MapBatches(step.name, function, out)
    return MapRecords(step.name, function, out, many=step.kind == "flat_map")
