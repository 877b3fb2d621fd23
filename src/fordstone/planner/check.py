"""Check a plan: what the stream after each step looks like, and whether the step may read its inputs.

The builder calls `derive` step by step, so that a mistake is an error where it was written; a plan read from a file is checked
by the same rules. What one kind of step allows is in its family (`operators.registry`); here are the rules between steps: names,
inputs, feedback, and which tier a stream is in. Streams begin at the edge; `to_center` takes them to the center, and only a
control table brings rows back, at barriers (rule 14).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec

from fordstone.connectors.registry import place, reads_from
from fordstone.errors import ConfigError, ExpressionError, PipelineError, SchemaError
from fordstone.lang.dialect import TOO_DEEP
from fordstone.operators.registry import family_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Derived, Types, shown


def derive(step: p.Step, types: Types) -> Derived:
    """Return the streams of a step by port; raise `PipelineError` if it cannot read its inputs."""
    try:
        central = is_central(step, types)
        return {at: replace(stream, central=central) for at, stream in family_of(step).check(step, types).items()}
    except ExpressionError as error:
        raise error if error.step else error.at_step(step.name) from None
    except SchemaError as error:
        raise SchemaError(f"step {step.name}: {error}") from None
    except RecursionError:
        raise PipelineError(f"step {step.name}: {TOO_DEEP}") from None


def stream_types(plan: p.Plan) -> Derived:
    """Check a whole plan and return the types of all its streams."""
    types: Derived = {}
    seen: set[str] = set()
    for step in plan.steps:
        if step.name in seen:
            raise PipelineError(f"two steps are named {step.name!r}. Give one of them another name=.")
        seen.add(step.name)
        for stream in step.inputs:
            if stream not in types:
                raise PipelineError(f"step {step.name} reads {stream}, which no step before it gives.")
        types |= derive(step, types)
        check_rules(plan, step, types)
    for step in plan.steps:
        if isinstance(step, p.Loop):
            check_feedback(step, types)
    return types


def check_rules(plan: p.Plan, step: p.Step, types: Types) -> None:
    """Check what depends on more than a step's inputs: guarantee, mode, other steps."""
    family_of(step).check_plan(step, plan, types)
    check_places(plan, step)


def check_places(plan: p.Plan, step: p.Step) -> None:
    """Refuse a sink that writes where another one writes, or where a source of the pipeline reads."""
    for other in plan.steps:
        if (
            not (isinstance(step, p.Sink | p.Source) and isinstance(other, p.Sink | p.Source))
            or other.name == step.name
        ):
            continue
        if isinstance(step, p.Sink) and isinstance(other, p.Sink):
            where = place(step.connector)
            if where is not None and where == place(other.connector):
                raise ConfigError(
                    f"sinks {other.name} and {step.name} both write to {step.connector.options['path']}. Give each a directory of its own."
                )
        for source, sink in ((step, other), (other, step)):
            reads = isinstance(source, p.Source) and isinstance(sink, p.Sink) and not source.declares_time
            if reads and reads_from(source.connector, sink.connector):
                raise ConfigError(
                    f"source {source.name} would read what sink {sink.name} writes: {source.connector.options['path']} matches files "
                    f"in {sink.connector.options['path']}. Give the sink another directory, or narrow the pattern."
                )


def check_feedback(step: p.Loop, types: Types) -> None:
    """Check that the rows that come back have the columns of those that went in."""
    if step.feedback not in types:
        raise PipelineError(f"loop {step.name}: its feedback {step.feedback} is not a step of this pipeline.")
    went, came = types[step.input].schema, types[step.feedback].schema
    if dict(went) != dict(came) or types[step.feedback].upsert_key is not None:
        raise PipelineError(
            f"loop {step.name}: what comes back must have the columns that went in.\n"
            f"  went in: {shown(went)}\n  comes back: {shown(came)}"
        )


def is_central(step: p.Step, types: Types) -> bool:
    """Whether the streams of a step are at the center; raises `PipelineError` where the tiers would be mixed."""
    above = [stream for stream in step.inputs if types[stream].central]
    table = next((stream for stream in step.inputs if types[stream].table and stream not in step.table_inputs), None)
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


def step_digests(plan: p.Plan, types: Types) -> dict[str, str]:
    """Return the digest of what the state of each step depends on: if it changed, stored state of the step cannot be used.

    Sources count: their state is their positions.
    """
    meanings = {step.name: family_of(step).digest(step, types) for step in plan.steps}
    return {
        name: hashlib.sha256(msgspec.json.encode(meaning, order="deterministic")).hexdigest()
        for name, meaning in meanings.items()
        if meaning is not None
    }
