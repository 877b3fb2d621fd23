"""Where streams begin and end: sources, sinks and the heads of loops. The engines move the rows; these steps compute nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.duration import human_us
from fordstone.lang.schema import Schema
from fordstone.operators.base import OP, ROW_ID, Emit, Emits, Family, Operator, OperatorContext, Stateless, Stays
from fordstone.operators.describe import connector_text, stream_details, time_text
from fordstone.operators.rowwise import PassOn
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP, Derived, EventTime, StreamType, Types, append_only

FAR_ENDS: Final = frozenset({"center", "hub", "control"})
"""Connectors between the tiers: `planner.split` makes them."""
LATE_MARK: Final = "__late"
"""A Boolean column beside the declared ones."""


class ToHub(Stateless):
    """The declared columns in order, and whether the row is late. Partial rows have no such mark: none of them is."""

    def __init__(self, schema: Schema, *, hidden: Sequence[str], partial: bool) -> None:
        self._columns = [*schema, *hidden]
        self._partial = partial

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        out = self.apply(frame)
        if not self._partial:
            out = out.with_columns(pl.lit(late).alias(LATE_MARK))
        return [Emit(out, late=late)] if out.height else []

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select(self._columns)


class ToSink(Stateless):
    """The last step before a sink: the declared columns in order, and of the hidden ones those that the sink is to see."""

    def __init__(self, schema: Schema, *, hidden: Sequence[str]) -> None:
        self._columns = [*schema, *hidden]

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select(self._columns)


class SourceFamily(Family[p.Source]):
    """Rows from outside."""

    steps = (p.Source,)

    def check(self, step: p.Source, types: Types) -> Derived:  # noqa: ARG002
        return {p.Input(step.name): _source(step)}

    def make(self, step: p.Source, context: OperatorContext) -> Operator:  # noqa: ARG002
        return PassOn()

    def title(self, step: p.Source) -> str:
        options = step.connector.options
        match step.connector.kind:
            case "hub":
                return f"what all nodes sent as {options['stream']}, from the hub"
            case "control":
                return f"this node's copy of control table {options['control']}"
            case _:
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
        return ["source", step.connector.kind, step.time]

    def push_down(self, step: p.Source, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002
        return Stays(reason=f"{step.name} is at the center")


class SinkFamily(Family[p.Sink]):
    """Rows to the outside."""

    steps = (p.Sink,)

    def check(self, step: p.Sink, types: Types) -> Derived:
        return {p.Input(step.name): types[step.input]}

    def check_plan(self, step: p.Sink, plan: p.Plan, types: Types) -> None:
        """Releases at once need ids that a replay gives again (rule 13)."""
        if step.release == "at_once":
            _check_at_once(step, plan, types[step.input])

    def make(self, step: p.Sink, context: OperatorContext) -> Operator:
        """The declared columns, and those that the sink needs beside them."""
        stream = context.types[step.input]
        hidden = [OP] if stream.upsert_key is not None else [ROW_ID] if step.release == "at_once" else []
        if step.connector.kind == "center":
            partial = isinstance(context.plan.step(step.input.step), p.Combine)
            return ToHub(stream.schema, hidden=hidden, partial=partial)
        return ToSink(stream.schema, hidden=hidden)

    def title(self, step: p.Sink) -> str:
        options = step.connector.options
        match step.connector.kind:
            case "center":
                return f"to the center as {options['stream']}, through the outbox and the hub"
            case "control":
                return f"to every node as control table {options['control']}"
            case _:
                return f"sink {connector_text(step.connector)}"

    def describe(self, step: p.Sink, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        if step.connector.kind in FAR_ENDS or (plan.guarantee == "exactly_once" and step.release == "commit"):
            yield "releases", "when the epoch is sealed"
        elif plan.guarantee == "exactly_once":
            yield "releases", "at once, with ids (__id) to deduplicate by"
        else:
            yield "releases", "at once"

    def push_down(self, step: p.Sink, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002
        return Stays(reason=f"{step.name} writes the rows themselves")


class LoopFamily(Family[p.Loop]):
    """The head of a loop."""

    steps = (p.Loop,)

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
        return PassOn()

    def title(self, step: p.Loop) -> str:
        return f"loop, fed back from {step.feedback}"

    def describe(self, step: p.Loop, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:
        yield from stream_details(step, types)
        if plan.guarantee == "exactly_once":
            yield "keeps", "rows that are on their way back at a barrier"

    def digest(self, step: p.Loop, types: Types) -> object:
        return ["loop", types[step.input].schema.to_dict()]

    def push_down(self, step: p.Loop, plan: p.Plan, types: Types) -> Stays:  # noqa: ARG002
        return Stays(reason=f"{step.name} begins a loop at the center")


def _source(step: p.Source) -> StreamType:
    schema = Schema.stored(step.schema) if step.declares_time else Schema.of(step.schema)
    if step.replaces:
        return StreamType(schema=schema, upsert_key=step.replaces, row_wise=False, table=True)
    if step.time is None:
        return StreamType(schema=schema)
    if step.time not in schema:
        raise SchemaError(f"time={step.time!r} is not a column. Columns are: {', '.join(schema)}.")
    if schema[step.time] != TIMESTAMP:
        raise SchemaError(f"time={step.time!r} has type {schema[step.time]}; event time needs a timestamp.")
    return StreamType(schema=schema, time=EventTime(column=step.time, shift_us=step.shift_us))


def _source_time(step: p.Source, stream: StreamType) -> str:
    if step.declares_time:
        column = "" if stream.time is None else f"{stream.time.column}, "
        away = "" if step.idle_after_us is None else f"; one away for {human_us(step.idle_after_us)} is not waited for"
        return f"{column}as far as every node has come{away}"
    text = time_text(stream.time)
    if stream.time is None:
        return text
    text += f", rows may be {human_us(step.lateness_us)} out of order" if step.lateness_us else ", in order"
    if step.max_ahead_us is not None:
        text += f", and {human_us(step.max_ahead_us)} ahead of the clock"
    if step.idle_after_us is not None:
        text += f"; a partition silent for {human_us(step.idle_after_us)} is not waited for"
    return text


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
            "rows after map_batches and ewma have no ids that a replay gives again. "
            "Use release='commit', or map instead of map_batches."
        )
    if wrong is not None:
        raise PipelineError(f"sink {step.name}: {wrong}")
