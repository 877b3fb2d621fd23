"""Run a user's function on Spark's Arrow batches, through the same operator as on the edge.

Made on the driver, sent by Spark to its workers, and called there once a task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import polars as pl
import pyarrow as pa

from fordstone.lang.schema import Schema
from fordstone.operators.base import Functions, OperatorContext
from fordstone.operators.registry import make_operator
from fordstone.plan import plan as p
from fordstone.plan.stream_type import StreamType
from fordstone.spark.native.column_types import arrow_schema

Batches = Iterator[pa.RecordBatch]


def function_rows(
    pipeline: str, step: p.Function, stream: StreamType, functions: Functions
) -> Callable[[Batches], Batches]:
    """What `mapInArrow` calls for a step behind `stream`."""
    # Of the plan only this step is sent: sinks may hold what lives in the driver.
    setting = OperatorContext(
        plan=p.Plan(pipeline=pipeline, steps=()),
        types={step.input: stream},
        functions={path: function for path, function in functions.items() if path == step.path},
    )

    def apply(batches: Batches) -> Batches:
        operator = make_operator(step, setting)
        for batch in batches:
            if batch.num_rows:
                for emit in operator.on_batch(typed_frame(batch, stream.schema), late=False):
                    yield from exact_batches(emit.frame, Schema.of(step.schema))

    return apply


def typed_frame(batch: pa.RecordBatch, schema: Schema) -> pl.DataFrame:
    """A batch of Spark's as a frame with exactly these columns, which it has by place, whatever their names."""
    frame = pl.from_arrow(batch)
    if not isinstance(frame, pl.DataFrame):
        raise TypeError(f"Spark gave {type(frame).__name__}, not a batch of rows")
    frame.columns = list(schema)
    return frame.cast(schema.polars)


def exact_batches(frame: pl.DataFrame, schema: Schema) -> Batches:
    """A frame as batches of exactly the types that Spark takes."""
    table = frame.select(schema.names()).to_arrow(compat_level=pl.CompatLevel.oldest())
    yield from table.cast(arrow_schema(schema)).to_batches()
