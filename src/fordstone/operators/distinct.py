"""Distinct rows: each row once, however often it comes.

With event time, equal rows have one time: they wait until the watermark passes it, and nothing is kept after that, since a row that comes later is
late. Without event time a row is emitted when it first comes, and every distinct row is kept for good.

Invariant: what is emitted does not depend on the order of rows, because rows that are equal in all columns are the same. Null equals null, NaN
equals NaN, and -0.0 is 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import polars as pl

from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.partial import normalised_key
from fordstone.operators.base import Emit, Emits, Family, Moment, Operator, OperatorContext, Stateless, stream_details
from fordstone.operators.row_order import OrderedOperator, WaitingRows
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Derived, EventTime, StreamType, Types, append_only, late_rows, plain_keys
from fordstone.state.base import FOUND, State, StateBackend

_SEEN: Final = "__seen"


class DistinctInTime(OrderedOperator):
    """Emits the distinct rows of each time once the watermark has passed it."""

    def __init__(self, schema: Schema, *, time: EventTime, state: StateBackend) -> None:
        self._waiting = WaitingRows(list(schema), schema, time=time, state=state)

    def on_watermark(self, watermark_us: int) -> Emits:
        rows = self._waiting.release(watermark_us)
        return [Emit(rows.select(self._waiting.names).unique(maintain_order=True))] if rows.height else []

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state}


class DistinctSoFar(Operator):
    """Emits a row when it first comes."""

    def __init__(self, schema: Schema, *, state: StateBackend) -> None:
        self._names = list(schema)
        self._seen = state.table(self._names, schema={**schema.polars, _SEEN: pl.Int8()})

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:  # noqa: ARG002 - without time no row is late
        rows = frame.select(self._names).unique(maintain_order=True)
        new = rows.filter(~self._seen.get(rows).get_column(FOUND))
        if not new.height:
            return []
        self._seen.put(new.with_columns(pl.lit(1, dtype=pl.Int8).alias(_SEEN)))
        return [Emit(new)]

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - nothing waits for time
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - nothing waits for the clock
        return []

    def states(self) -> Mapping[str, State]:
        return {"seen": self._seen}


class DistinctFamily(Family[p.Distinct]):
    """Each row once."""

    steps = (p.Distinct,)
    fed = True
    stays = "{step} drops what another node may have sent before"

    def check(self, step: p.Distinct, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "distinct")
        plain_keys(step.keys, stream.schema, what="distinct")
        found = StreamType(schema=stream.schema, time=stream.time, row_wise=False, looped=stream.looped)
        late = {} if stream.time is None else late_rows(step, stream)
        return {p.Input(step.name): found, **late}

    def make(self, step: p.Distinct, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        if stream.time is None:
            return DistinctSoFar(stream.schema, state=context.state)
        return DistinctInTime(stream.schema, time=stream.time, state=context.state)

    def make_feeder(self, step: p.Distinct, index: int, context: OperatorContext) -> Operator:  # noqa: ARG002 - one input
        schema = context.types[step.input].schema
        floats = [normalised_key(name, kind) for name, kind in schema.items() if kind.is_float]
        return Stateless(lambda frame: frame.with_columns(floats) if floats else frame)

    def title(self, step: p.Distinct) -> str:  # noqa: ARG002 - one kind
        return "distinct rows"

    def describe(self, step: p.Distinct, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield from stream_details(step, types)
        timed = types[step.input].time is not None
        yield (
            "keeps",
            "the rows that wait for time" if timed else "every distinct row, for good: there is no event time",
        )
