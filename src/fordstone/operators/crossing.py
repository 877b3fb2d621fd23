"""The steps between edge and center. `planner.split` replaces them with sources and sinks, so no engine ever runs one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.schema import Schema
from fordstone.operators.base import Family, Operator, OperatorContext, Stays
from fordstone.operators.describe import stream_details
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Derived, StreamType, Types, append_only, plain_keys, shown

T = TypeVar("T", bound=p.ToCenter | p.Control | p.ToEdges)


class _TierFamily(Family[T]):
    """What the steps between the tiers have in common: they are never run, and stay where they are."""

    def make(self, step: T, context: OperatorContext) -> Operator:  # noqa: ARG002 - never run
        raise PipelineError(f"step {step.name} is between the tiers: split the plan before running it.")

    def describe(self, step: T, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - as all three
        return stream_details(step, types)


class ToCenterFamily(_TierFamily[p.ToCenter]):
    """The cut."""

    steps = (p.ToCenter,)

    def check(self, step: p.ToCenter, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "to_center")
        if stream.looped:
            raise PipelineError(f"step {step.name}: to_center is not possible inside or below a loop.")
        return {p.Input(step.name): replace(stream, row_wise=False, windowed=False, id_step=None)}

    def check_plan(self, step: p.ToCenter, plan: p.Plan, types: Types) -> None:  # noqa: ARG002 - only the mode counts
        if plan.mode == "unaligned":
            raise PipelineError(
                f"step {step.name}: in mode 'unaligned' what is in flight at a barrier is in the checkpoint and not among the "
                "rows of its epoch, so the time sent to the center would be ahead of them. Use mode='aligned'."
            )

    def title(self, step: p.ToCenter) -> str:  # noqa: ARG002 - all are alike
        return "to the center"

    def push_down(self, step: p.ToCenter, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002 - there is one cut
        return Stays(reason=f"{step.name} is at the center")


class ControlFamily(_TierFamily[p.Control]):
    """A table that the center keeps and every node has a copy of."""

    steps = (p.Control,)

    def check(self, step: p.Control, types: Types) -> Derived:  # noqa: ARG002 - it reads nothing
        """Rows that replace each other by the key."""
        schema = Schema.of(step.schema)
        if not step.keys:
            raise PipelineError(f"control {step.name}: name the column that rows replace each other by: key=.")
        plain_keys(step.keys, schema, what="key")
        return {p.Input(step.name): StreamType(schema=schema, upsert_key=step.keys, row_wise=False, table=True)}

    def title(self, step: p.Control) -> str:
        return f"control table by {', '.join(step.keys)}"

    def push_down(self, step: p.Control, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002 - it reads nothing
        return Stays(reason=f"{step.name} is at the center")


class ToEdgesFamily(_TierFamily[p.ToEdges]):
    """Rows of the center that become rows of a control table."""

    steps = (p.ToEdges,)

    def check(self, step: p.ToEdges, types: Types) -> Derived:
        return {p.Input(step.name): types[step.input]}

    def check_plan(self, step: p.ToEdges, plan: p.Plan, types: Types) -> None:
        """The control table is declared once, with these columns, and has one writer."""
        _check_to_edges(plan, step, types)

    def title(self, step: p.ToEdges) -> str:
        return f"to the edges as {step.control}"

    def push_down(self, step: p.ToEdges, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002 - never
        return Stays(reason=f"{step.name} publishes the rows themselves")


def _check_to_edges(plan: p.Plan, step: p.ToEdges, types: Types) -> None:
    tables = {table.name: table for table in plan.steps if isinstance(table, p.Control)}
    table = tables.get(step.control)
    if table is None:
        known = f" Declared are: {', '.join(tables)}." if tables else ""
        raise PipelineError(
            f"to_edges({step.control!r}): there is no such control table. Declare it: "
            f"p.control({step.control!r}, schema=..., key=...).{known}"
        )
    twice = [other.name for other in plan.steps if isinstance(other, p.ToEdges) and other.control == step.control]
    if len(twice) > 1:
        raise PipelineError(
            f"to_edges({step.control!r}) is there twice: a control table has one writer. Unite the streams."
        )
    given, wanted = types[step.input], Schema.of(table.schema)
    if dict(given.schema) != dict(wanted):
        raise SchemaError(
            f"to_edges({step.control!r}): the rows do not have the table's columns.\n"
            f"  given:  {shown(given.schema)}\n  wanted: {shown(wanted)}"
        )
    if given.upsert_key is not None and given.upsert_key != table.keys:
        raise PipelineError(
            f"to_edges({step.control!r}): rows replace each other by ({', '.join(given.upsert_key)}), and the table's by "
            f"({', '.join(table.keys)}). After a window, .final() gives the last result of each."
        )
