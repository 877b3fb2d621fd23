"""Where streams begin and end, and where they cross between edge and center. The engines move the rows: nothing is computed here.

`planner.split` replaces the steps between the tiers (`to_center`, `control`, `to_edges`) with sources and sinks: no engine runs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.duration import human_us
from fordstone.lang.schema import Schema
from fordstone.operators.base import (
    OP,
    ROW_ID,
    ROW_WATERMARK,
    Emits,
    Family,
    Operator,
    OperatorContext,
    Stateless,
    connector_text,
    pass_on,
    stream_details,
    time_text,
)
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP, Derived, EventTime, StreamType, Types, append_only, plain_keys, shown


class ToHub(Stateless):
    """The last step before the hub: rows in time have a null as their watermark there."""

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        if not late:
            frame = frame.with_columns(pl.lit(None, dtype=pl.Int64).alias(ROW_WATERMARK))
        return super().on_batch(frame, late=late)


class SourceFamily(Family[p.Source]):
    """Rows from outside."""

    steps = (p.Source,)
    stays = "{step} is at the center"

    def check(self, step: p.Source, types: Types) -> Derived:  # noqa: ARG002
        at = p.Input(step.name)
        schema = Schema.stored(step.schema) if step.declares_time else Schema.of(step.schema)
        if step.replaces:
            return {at: StreamType(schema=schema, upsert_key=step.replaces, row_wise=False, table=True)}
        if step.time is None:
            return {at: StreamType(schema=schema)}
        if step.time not in schema:
            raise SchemaError(f"time={step.time!r} is not a column. Columns are: {', '.join(schema)}.")
        if schema[step.time] != TIMESTAMP:
            raise SchemaError(
                f"time={step.time!r} has type {schema[step.time]}; event time needs a timestamp. Declare the column as one, or leave time= "
                "out here and compute the time from the column with .with_time(...)."
            )
        return {at: StreamType(schema=schema, time=EventTime(column=step.time, shift_us=step.shift_us))}

    def make(self, step: p.Source, context: OperatorContext) -> Operator:  # noqa: ARG002
        return Stateless(pass_on)

    def title(self, step: p.Source) -> str:
        if step.declares_time:
            return f"what all nodes sent as {step.connector.options['stream']}, from the hub"
        if step.replaces:
            return f"this node's copy of control table {step.connector.options['control']}"
        return f"source {connector_text(step.connector)}"

    def describe(self, step: p.Source, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        yield from stream_details(step, types, time=_source_time(step, types[p.Input(step.name)]))
        if not step.declares_time and not step.replaces:
            yield "bad rows", "go to the dead letters" if step.on_error == "keep" else "stop the pipeline"
        if step.replaces:
            yield "keeps", "which version of the table it has taken"
        elif step.declares_time:
            yield "keeps", "the epoch that each node's rows were read up to"
        else:
            yield "keeps", "the position of every partition"

    def digest(self, step: p.Source, types: Types) -> object:  # noqa: ARG002
        return ["source", step.connector.kind, step.time, step.timed_by]


class SinkFamily(Family[p.Sink]):
    """Rows to the outside."""

    steps = (p.Sink,)
    stays = "{step} writes the rows themselves"

    def check(self, step: p.Sink, types: Types) -> Derived:
        return {p.Input(step.name): types[step.input]}

    def check_plan(self, step: p.Sink, plan: p.Plan, types: Types) -> None:
        """Releases at once need ids that a replay gives again (rule 13)."""
        if step.release == "at_once":
            _check_at_once(step, plan, types[step.input])

    def make(self, step: p.Sink, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        hidden = [OP] if stream.upsert_key is not None else [ROW_ID] if step.release == "at_once" else []
        columns = [*stream.schema, *hidden]
        if step.tier == "center":
            return ToHub(lambda frame: frame.select(*columns, ROW_WATERMARK))
        return Stateless(lambda frame: frame.select(columns))

    def title(self, step: p.Sink) -> str:
        if step.tier == "center":
            return f"to the center as {step.connector.options['stream']}, through the outbox and the hub"
        if step.tier == "edges":
            return f"to every node as control table {step.connector.options['control']}"
        return f"sink {connector_text(step.connector)}"

    def describe(self, step: p.Sink, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        if step.tier is not None or (plan.guarantee == "exactly_once" and step.release == "commit"):
            yield "releases", "when the epoch is sealed"
        elif plan.guarantee == "exactly_once":
            yield "releases", "at once, with ids (__id) to deduplicate by"
        else:
            yield "releases", "at once"


class LoopFamily(Family[p.Loop]):
    """The head of a loop."""

    steps = (p.Loop,)
    stays = "{step} begins a loop at the center"

    def check(self, step: p.Loop, types: Types) -> Derived:
        """Inside a loop there is no event time."""
        stream = types[step.input]
        append_only(step, stream, "a loop")
        return {p.Input(step.name): replace(stream, time=None, row_wise=False, windowed=False, looped=True)}

    def check_plan(self, step: p.Loop, plan: p.Plan, types: Types) -> None:  # noqa: ARG002
        """Aligned only (rule 17)."""
        if plan.mode == "unaligned":
            raise PipelineError(f"step {step.name}: a loop cannot be snapshot in mode 'unaligned'. Use mode='aligned'.")

    def make(self, step: p.Loop, context: OperatorContext) -> Operator:  # noqa: ARG002
        return Stateless(pass_on)

    def title(self, step: p.Loop) -> str:
        return f"loop, fed back from {step.feedback}"

    def describe(self, step: p.Loop, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:
        yield from stream_details(step, types)
        if plan.guarantee == "exactly_once":
            yield "keeps", "rows that are on their way back at a barrier"

    def digest(self, step: p.Loop, types: Types) -> object:
        return ["loop", types[step.input].schema.to_dict()]


def _source_time(step: p.Source, stream: StreamType) -> str:
    if step.declares_time:
        column = "" if stream.time is None else f"{stream.time.column}, "
        away = (
            ""
            if step.idle_after_us is None
            else f"; one away for {human_us(step.idle_after_us)} (offline=) is not waited for"
        )
        return f"{column}as far as every node has come{away}"
    text = time_text(stream.time) if step.timed_by is None else f"assigned in {step.timed_by}"
    if stream.time is None and step.timed_by is None:
        return text
    text += f", rows may be {human_us(step.lateness_us)} out of order" if step.lateness_us else ", in order"
    if step.max_ahead_us is not None:
        text += f", and {human_us(step.max_ahead_us)} ahead of the clock"
    if step.idle_after_us is not None:
        return f"{text}; a partition silent for {human_us(step.idle_after_us)} (idle_after=) is not waited for"
    return f"{text}; a silent partition holds time back (idle_after= would end that)"


def _check_at_once(step: p.Sink, plan: p.Plan, stream: StreamType) -> None:
    wrong: str | None = None
    if stream.central:
        wrong = "release='at_once' is for the edge; at the center rows come by epochs. Use release='commit'."
    elif plan.guarantee != "exactly_once":
        wrong = f"release='at_once' belongs to exactly_once; {plan.guarantee} sends at once anyway."
    elif plan.mode != "aligned":
        wrong = "release='at_once' needs mode='aligned', so that ids are the same on replay."
    elif stream.looped:
        wrong = "release='at_once' is not possible below a loop. Use release='commit'."
    elif stream.upsert_key is not None:
        wrong = "running results have no ids that a replay gives again. Use release='commit'."
    elif not (stream.row_wise or stream.windowed):
        wrong = (
            "these rows have no ids that a replay gives again: only rows of windows and of steps that look at each row alone have "
            "them. Use release='commit', or map instead of map_batches."
        )
    if wrong is not None:
        raise PipelineError(f"sink {step.name}: {wrong}")


T = TypeVar("T", bound=p.ToCenter | p.Control | p.ToEdges)


class _TierFamily(Family[T]):
    """What the steps between the tiers have in common: they are never run, and stay where they are."""

    def make(self, step: T, context: OperatorContext) -> Operator:  # noqa: ARG002 - never run
        raise PipelineError(f"step {step.name} is between the tiers: split the plan before running it.")


class ToCenterFamily(_TierFamily[p.ToCenter]):
    """The cut."""

    steps = (p.ToCenter,)
    stays = "{step} is at the center"

    def check(self, step: p.ToCenter, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "to_center")
        if stream.looped:
            raise PipelineError(f"step {step.name}: to_center is not possible inside or below a loop.")
        time = None if stream.time is None else stream.time.alone  # one column crosses as the time
        return {p.Input(step.name): replace(stream, time=time, row_wise=False, windowed=False)}

    def check_plan(self, step: p.ToCenter, plan: p.Plan, types: Types) -> None:  # noqa: ARG002 - only the mode counts
        if plan.mode == "unaligned":
            raise PipelineError(
                f"step {step.name}: in mode 'unaligned' what is in flight at a barrier is in the checkpoint and not among the "
                "rows of its epoch, so the time sent to the center would be ahead of them. Use mode='aligned'."
            )

    def title(self, step: p.ToCenter) -> str:  # noqa: ARG002 - all are alike
        return "to the center"


class ControlFamily(_TierFamily[p.Control]):
    """A table that the center keeps and every node has a copy of."""

    steps = (p.Control,)
    stays = "{step} is at the center"

    def check(self, step: p.Control, types: Types) -> Derived:  # noqa: ARG002 - it reads nothing
        schema = Schema.of(step.schema)
        if not step.keys:
            raise PipelineError(f"control {step.name}: name the column that rows replace each other by: key=.")
        plain_keys(step.keys, schema, what="key")
        return {p.Input(step.name): StreamType(schema=schema, upsert_key=step.keys, row_wise=False, table=True)}

    def title(self, step: p.Control) -> str:
        return f"control table by {', '.join(step.keys)}"


class ToEdgesFamily(_TierFamily[p.ToEdges]):
    """Rows of the center that become rows of a control table."""

    steps = (p.ToEdges,)
    stays = "{step} publishes the rows themselves"

    def check(self, step: p.ToEdges, types: Types) -> Derived:
        return {p.Input(step.name): types[step.input]}

    def check_plan(self, step: p.ToEdges, plan: p.Plan, types: Types) -> None:
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

    def title(self, step: p.ToEdges) -> str:
        return f"to the edges as {step.control}"
