"""The table of operator families: one line per family. The planner and both engines look a step's family up here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from fordstone.operators.aggregate.family import AggregateFamily, CombineFamily
from fordstone.operators.base import Family, Operator, OperatorContext
from fordstone.operators.deduplicate import DeduplicateFamily
from fordstone.operators.distinct import DistinctFamily
from fordstone.operators.endpoints import (
    ControlFamily,
    LoopFamily,
    SinkFamily,
    SourceFamily,
    ToCenterFamily,
    ToEdgesFamily,
)
from fordstone.operators.ewma import EwmaFamily
from fordstone.operators.join.interval import JoinFamily
from fordstone.operators.join.lookup import LookupFamily, LookupLatestFamily
from fordstone.operators.match.step import MatchFamily
from fordstone.operators.over import OverFamily
from fordstone.operators.process.step import ProcessFamily
from fordstone.operators.rowwise import ExplodeFamily, FilterFamily, FunctionFamily, ProjectFamily, UnionFamily
from fordstone.operators.top import TopFamily
from fordstone.operators.with_time import WithTimeFamily
from fordstone.plan import plan as p

FAMILIES: Final[tuple[Family[Any], ...]] = (
    SourceFamily(),
    FilterFamily(),
    ProjectFamily(),
    WithTimeFamily(),
    ExplodeFamily(),
    FunctionFamily(),
    UnionFamily(),
    AggregateFamily(),
    CombineFamily(),
    EwmaFamily(),
    DeduplicateFamily(),
    DistinctFamily(),
    OverFamily(),
    TopFamily(),
    JoinFamily(),
    LookupFamily(),
    LookupLatestFamily(),
    MatchFamily(),
    ProcessFamily(),
    LoopFamily(),
    SinkFamily(),
    ToCenterFamily(),
    ControlFamily(),
    ToEdgesFamily(),
)
_BY_STEP: Final = {kind: family for family in FAMILIES for kind in family.steps}


def family_of(step: p.AnyStep) -> Family[Any]:
    """Return the family that serves a step."""
    return _BY_STEP[type(step)]


def make_operator(step: p.Step, context: OperatorContext) -> Operator:
    """Make a fresh operator for one subtask of a step, with its state where the plan says, if the context has that backend."""
    backend = context.backends.get(context.plan.state_of(step.name), context.state)
    return family_of(step).make(step, replace(context, state=backend))


def make_feeder(step: p.Step, index: int, context: OperatorContext) -> Operator | None:
    """Make the stateless operator that runs before the shuffle into input `index`; None: rows are sent as they are."""
    return family_of(step).make_feeder(step, index, context)


def has_feeder(step: p.Step, plan: p.Plan) -> bool:
    """Whether an operator runs before the shuffle into a step."""
    return family_of(step).has_feeder(step, plan)
