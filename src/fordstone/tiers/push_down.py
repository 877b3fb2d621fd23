"""What may run below the cut although it was written above it, and why no more may (rule 9).

From the cut upwards: row-wise steps that give the same for the same row go below, as far as that makes less cross. Where an
aggregate comes next whose partial rows merge, they all go below, and rows become partial rows. Pure; `split` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fordstone.errors import SchemaError
from fordstone.model import plan as p
from fordstone.model import windows as w
from fordstone.model.expression import Expression, parse_predicate
from fordstone.model.schema import Schema
from fordstone.model.stream import exploded_columns, projection
from fordstone.model.stream_type import Types
from fordstone.operators.combine import crossing_schema
from fordstone.operators.setting import OperatorSetting
from fordstone.operators.windows import combines, partials_of
from fordstone.tiers.saving import row_bytes

Movable = p.Filter | p.Select | p.WithColumns | p.Explode


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDown:
    """What goes below one cut."""

    steps: tuple[Movable, ...]
    """As they were written, nearest to the cut first."""
    aggregate: p.Aggregate | None = None
    """Whose partial rows are made below, behind the steps."""
    partial: Schema | None = None
    """The columns of these."""
    reason: str
    """Why not more, as a clause."""


NOTHING: Final = PushDown(steps=(), reason="push-down is switched off")


def push_down(plan: p.Plan, types: Types, cut: p.ToCenter) -> PushDown:
    """Judge what stands above a cut of a checked plan."""
    passed: list[Movable] = []
    at = cut.name
    while True:
        readers = plan.consumers(at)
        if len(readers) != 1:
            return _trimmed(types, cut, passed, _several(at, [step.name for step, _ in readers]))
        step = readers[0][0]
        if isinstance(step, p.Aggregate):
            found = _partial(plan, types, step)
            if isinstance(found, Schema):
                done = f"{step.name} is over the rows of all nodes, so its results, and what is made of them, are the center's"
                return PushDown(steps=tuple(passed), aggregate=step, partial=found, reason=done)
            return _trimmed(types, cut, passed, found)
        if not isinstance(step, Movable):
            return _trimmed(types, cut, passed, _stays(step))
        if not all(column.deterministic for column in _expressions(step, types)):
            return _trimmed(types, cut, passed, f"{step.name} may give something else for the same row")
        passed.append(step)
        at = step.name


def _expressions(step: Movable, types: Types) -> list[Expression]:
    schema = types[step.input].schema
    match step:
        case p.Filter():
            return [parse_predicate(step.predicate, schema)]
        case p.Explode():
            return [exploded_columns(step, schema)[0]]
        case _:
            return projection(step, schema)


def _trimmed(types: Types, cut: p.ToCenter, passed: list[Movable], reason: str) -> PushDown:
    """Without an aggregate at their end, steps go below only as far as they make rows fewer, or narrower."""
    kept, width = 0, row_bytes(types[p.Input(cut.name)].schema)
    for count, step in enumerate(passed, start=1):
        if isinstance(step, p.Explode):
            reason = f"{step.name} makes several rows of one, and {reason}"
            break
        found = row_bytes(types[p.Input(step.name)].schema)
        if isinstance(step, p.Filter) or found <= width:
            kept, width = count, found
    else:
        if kept < len(passed):
            reason = f"{passed[kept].name} would only make rows wider, and {reason}"
    return PushDown(steps=tuple(passed[:kept]), reason=reason)


def _several(at: str, readers: list[str]) -> str:
    if not readers:
        return f"nothing of this pipeline reads {at} at the center: the rows are kept at the hub as they are"
    return f"{at} is read by {', '.join(readers)}, and each needs the rows"


def _partial(plan: p.Plan, types: Types, step: p.Aggregate) -> Schema | str:
    """The columns of an aggregate's partial rows, or why there may be none."""
    match step.window:
        case w.Session():
            return f"the sessions of {step.name} need the rows themselves: where one ends is known only over all nodes"
        case w.Count():
            return f"the windows of {step.name} count rows in order of time, over all nodes"
        case _:
            pass
    if not combines(step, plan):
        return f"late rows of {step.name} are wanted as they came"
    try:
        return crossing_schema(partials_of(step, OperatorSetting(plan=plan, types=types)))
    except SchemaError as error:
        return f"partial rows of {step.name} cannot cross: {error}"


def _stays(step: p.Step) -> str:  # noqa: PLR0912 - one line a kind of step
    """Why a step stays where it was written."""
    match step:
        case p.Function():
            return f"{step.name} is a function of yours: who wrote it above the cut may count on running there"
        case p.Process():
            return f"{step.name} is a function of yours with state by key, over the rows of all nodes"
        case p.Ewma():
            return f"{step.name} takes rows in order of time, over all nodes"
        case p.Match():
            return f"the pattern {step.name} takes rows in order of time, over all nodes"
        case p.Deduplicate():
            return f"{step.name} drops what another node may have sent before"
        case p.Join():
            return f"{step.name} joins rows that other nodes may have"
        case p.Lookup():
            return f"{step.name} reads a table at the center"
        case p.LookupLatest():
            return f"{step.name} looks rows up in a stream at the center"
        case p.Union():
            return f"{step.name} unites it with other streams"
        case p.Loop():
            return f"{step.name} begins a loop at the center"
        case p.Sink():
            return f"{step.name} writes the rows themselves"
        case p.ToEdges():
            return f"{step.name} publishes the rows themselves"
        case _:
            return f"{step.name} stands at the center"
