"""Which columns of a stream anybody reads: the others need not cross.

Pure. A step that does not say which columns it reads, or whose state would change with them, reads all: users' functions,
sinks, unions (which compare schemas), joins, patterns and whatever keeps whole rows.
"""

from __future__ import annotations

from fordstone.model import plan as p
from fordstone.model.aggregating import aggregates
from fordstone.model.expression import parse_predicate
from fordstone.model.schema import Schema
from fordstone.model.stream import exploded_columns, projection
from fordstone.model.stream_type import StreamType, Types


def columns_read(plan: p.Plan, types: Types, stream: p.Input) -> tuple[str, ...]:
    """The columns of a stream that its readers need, in their order: never none, and the time is always among them."""
    given = types[stream]
    needed = _needed(plan, types, stream)
    if given.time is not None:
        needed = needed | {given.time.column}
    return tuple(name for name in given.schema if name in needed) or given.schema.names()[:1]


def _needed(plan: p.Plan, types: Types, stream: p.Input) -> frozenset[str]:
    readers = [step for step, read in plan.consumers(stream.step) if read.port == stream.port]
    every = frozenset(types[stream].schema)
    if not readers:
        return every  # whoever reads the hub's stream without this pipeline
    return frozenset[str]().union(*(_read(plan, types, step, types[stream], every) for step in readers))


def _read(plan: p.Plan, types: Types, step: p.Step, stream: StreamType, every: frozenset[str]) -> frozenset[str]:
    """What one step needs of its input, for itself and for what stands behind it."""
    schema = stream.schema
    match step:
        case p.Filter():
            return _needed(plan, types, p.Input(step.name)) | set(parse_predicate(step.predicate, schema).columns)
        case p.Select():
            return frozenset(name for column in projection(step, schema) for name in column.columns)
        case p.WithColumns():
            behind = _needed(plan, types, p.Input(step.name))
            # The others are the columns of before, as they were.
            computed = [
                column
                for column in projection(step, schema)
                if column.columns != (column.name,) or not column.is_column
            ]
            replaced = {column.name for column in computed}
            return (behind - replaced) & every | {name for column in computed for name in column.columns}
        case p.Explode():
            array, _ = exploded_columns(step, schema)
            return (_needed(plan, types, p.Input(step.name)) - {array.name}) & every | set(array.columns)
        case p.Aggregate() if not any(read.port == "late" for _, read in plan.consumers(step.name)):
            return _aggregated(step, schema)
        case _:
            return every


def _aggregated(step: p.Aggregate, schema: Schema) -> frozenset[str]:
    found = {name for aggregate in aggregates(step, schema) for name in aggregate.columns}
    return frozenset(found | set(step.keys))
