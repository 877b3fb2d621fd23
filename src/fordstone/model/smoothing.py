"""What an ewma step gives: its input's rows with means beside them."""

from __future__ import annotations

from fordstone.errors import PipelineError, SchemaError
from fordstone.model import plan as p
from fordstone.model.expression import Expression, parse_double
from fordstone.model.schema import DataType, Schema
from fordstone.model.stream_type import Derived, StreamType, Types, append_only, late_rows, needs_time, plain_keys


def derive_ewma(step: p.Ewma, types: Types) -> Derived:
    """The streams of an ewma step, by port."""
    stream = types[step.input]
    return {p.Input(step.name): _smoothed(step, stream), **late_rows(step, stream)}


def smoothed(step: p.Ewma, schema: Schema) -> tuple[Expression, ...]:
    """What each new column of a step smooths, as doubles, named as the column is."""
    return tuple(parse_double(column, schema) for column in step.columns)


def _smoothed(step: p.Ewma, stream: StreamType) -> StreamType:
    append_only(step, stream, "ewma")
    time = needs_time(step, stream, "ewma")
    if (step.alpha is None) == (step.half_life_us is None):
        raise PipelineError(
            f"step {step.name}: ewma needs either alpha= (the weight of the newest value) "
            "or half_life= (after how long a value counts half), and not both."
        )
    if step.half_life_us is not None and step.half_life_us <= 0:
        raise PipelineError(
            f"step {step.name}: half_life={step.half_life_us}us must be longer than zero. "
            "It is the time after which a value counts half."
        )
    if step.alpha is not None and not 0 < step.alpha <= 1:
        raise PipelineError(
            f"step {step.name}: alpha={step.alpha} must be above 0 and at most 1. It is the weight of the newest value."
        )
    plain_keys(step.keys, stream.schema)
    if not step.columns:
        raise PipelineError(f"step {step.name}: ewma() needs at least one column, such as smooth='temp'.")
    columns: dict[str, str | DataType] = dict(stream.schema)
    for column in smoothed(step, stream.schema):
        if column.name in columns:
            raise SchemaError(f"there is a column {column.name!r} already. Name the new one differently.")
        columns[column.name] = column.type
    return StreamType(schema=Schema.of(columns), time=time, row_wise=False)
