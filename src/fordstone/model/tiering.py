"""Which tier a stream is in, and what may cross between edge and center.

Streams begin at the edge; `to_center` takes them to the center, and nothing of the center comes back but through a control
table, at barriers (rule 14).
"""

from __future__ import annotations

from dataclasses import replace

from fordstone.errors import PipelineError, SchemaError
from fordstone.model import plan as p
from fordstone.model.schema import Schema
from fordstone.model.stream_type import StreamType, Types, append_only, plain_keys, shown


def derive_tier(step: p.TierStep, types: Types) -> StreamType:
    """The stream of a step between the tiers."""
    match step:
        case p.ToCenter():
            stream = types[step.input]
            append_only(step, stream, "to_center")
            if stream.looped:
                raise PipelineError(f"step {step.name}: to_center cannot stand inside or below a loop.")
            return replace(stream, row_wise=False, windowed=False, id_step=None)
        case p.Control():
            schema = Schema.of(step.schema)
            if not step.keys:
                raise PipelineError(f"control {step.name}: name the column that rows replace each other by: key=.")
            plain_keys(step.keys, schema, what="key")
            return StreamType(schema=schema, upsert_key=step.keys, row_wise=False, table=True)
        case p.ToEdges():
            return types[step.input]


def is_central(step: p.Step, types: Types) -> bool:
    """Whether the streams of a step are at the center; raises `PipelineError` where the tiers would be mixed."""
    above = [stream for stream in step.inputs if types[stream].central]
    read = step.input if isinstance(step, p.LookupLatest) else None
    table = next((stream for stream in step.inputs if types[stream].table and read in {None, stream}), None)
    if table is not None:
        raise PipelineError(
            f"step {step.name}: {table} is a control table, which rows are joined with: stream.join_control({table}, on=...). "
            "Nothing else reads it."
        )
    if isinstance(step, p.ToCenter):
        if above:
            raise PipelineError(f"step {step.name}: {step.input} is at the center already. Leave .to_center() out.")
        return True
    if isinstance(step, p.ToEdges) and not above:
        raise PipelineError(
            f"to_edges({step.control!r}): {step.input} is at the edge itself. Take it to the center first: .to_center()."
        )
    if above and len(above) < len(step.inputs):
        below = ", ".join(str(stream) for stream in step.inputs if not types[stream].central)
        if any(types[stream].table for stream in step.inputs):
            raise PipelineError(
                f"step {step.name}: {', '.join(map(str, above))} is at the center, and {below} is a control table, which nodes have. "
                "Join it before .to_center(); at the center, join the stream that the table is made of (join_latest)."
            )
        raise PipelineError(
            f"step {step.name}: {', '.join(map(str, above))} is at the center and {below} at the edge. "
            "Take the latter to the center too (.to_center()); rows come back only through a control table."
        )
    return bool(above)


def check_tiers(plan: p.Plan, step: p.Step, types: Types) -> None:
    """What depends on other steps than a step's inputs."""
    if isinstance(step, p.ToEdges):
        _check_to_edges(plan, step, types)
    if isinstance(step, p.ToCenter) and plan.mode == "unaligned":
        raise PipelineError(
            f"step {step.name}: in mode 'unaligned' what is in flight at a barrier is in the checkpoint and not among the rows of "
            "its epoch, so the time told to the center would be ahead of them. Use mode='aligned'."
        )
    if isinstance(step, p.Sink) and step.release == "at_once" and types[step.input].central:
        raise PipelineError(
            f"sink {step.name}: release='at_once' is for the edge; at the center rows come by epochs. Use release='commit'."
        )


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
            f"to_edges({step.control!r}) stands twice: a control table has one writer. Unite the streams."
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
            f"({', '.join(table.keys)}). Behind a window, .final() gives the last word on each."
        )
