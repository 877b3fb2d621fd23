"""A plan as Spark's own DataFrames: its file reader, SQL expressions, aggregates and watermarks.

Which plans can be, and where results then differ from the edge engine's, is said by `choice`; starting queries and writing
to sinks is `query`'s work. Expressions are handed over as the canonical SQL text that both engines are tested with; users'
functions run through our own operators.

Spark's watermark begins at 1970 and drops what lies before it, so windows of a stream are computed on times that are moved
far into the future by a whole number of windows, and moved back behind it.
"""

from __future__ import annotations

from functools import reduce
from typing import Final, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses

from fordstone.errors import ConfigError
from fordstone.lang.dialect import quoted_name
from fordstone.lang.expression import Expression, parse_predicate
from fordstone.lang.term import render
from fordstone.operators.aggregate.check import WINDOW_END, WINDOW_START, aggregates
from fordstone.operators.base import DELETE, OP, UPSERT, Functions
from fordstone.operators.rowwise import exploded_columns, projection
from fordstone.plan import plan as p
from fordstone.plan.stream_type import StreamType
from fordstone.plan.windows import Tumbling
from fordstone.planner.check import stream_types
from fordstone.runtime.partition import TIME_BOUND_US
from fordstone.spark.native.choice import choose, sink_streams, upstream
from fordstone.spark.native.column_types import spark_schema, spark_type
from fordstone.spark.native.function_rows import function_rows
from fordstone.spark.native.parquet import read_parquet
from fordstone.spark.session.settings import MEANING

TIME: Final = "__time"
"""On the way to a window of a stream: the row's time, moved, with Spark's watermark."""
_WINDOW: Final = "__window"
_ALL: Final = "__all"
"""Stands for the key where there is none: Spark gives a row for no rows at all where it groups by nothing."""
_NEEDED: Final = ("spark.sql.ansi.enabled", "spark.sql.session.timeZone", "spark.sql.caseSensitive")
_MILLISECOND_US: Final = 1000


def lower(
    plan: p.Plan, spark: SparkSession, *, functions: Functions, streaming: bool, files_max: int | None = None
) -> dict[p.Input, DataFrame]:
    """A frame for every stream that a sink reads: the declared columns, and `__op` where rows replace each other.

    Called once a run. `files_max`: so many new files of each source a micro-batch at most.

    Raises:
        ConfigError: Spark's own operators cannot do it, or the session would give expressions another meaning.
        SourceError: a file that is there cannot be read as declared.
    """
    choose(plan, native="always", streaming=streaming)
    for name in _NEEDED:
        if str(spark.conf.get(name)).lower() != MEANING[name].lower():
            raise ConfigError(
                f"this session has {name}={spark.conf.get(name)}, and the plan's meaning needs {MEANING[name]}. "
                "Use a session of fordstone.spark.session.session(), or hand yours to fordstone.spark.prepared()."
            )
    types = stream_types(plan)
    found = {}
    for stream in sink_streams(plan):
        lowering = _Lowering(plan, types, spark, functions, stream, streaming=streaming, files_max=files_max)
        found[stream] = lowering.let_out()
    return found


def output_mode(plan: p.Plan, stream: p.Input) -> Literal["append", "update"]:
    """The mode in which a query of that stream is started."""
    return "append" if stream_types(plan)[stream].upsert_key is None else "update"


class _Lowering:
    """The frames of one sink's stream, each made once."""

    def __init__(
        self,
        plan: p.Plan,
        types: dict[p.Input, StreamType],
        spark: SparkSession,
        functions: Functions,
        stream: p.Input,
        *,
        streaming: bool,
        files_max: int | None,
    ) -> None:
        self._plan = plan
        self._types = types
        self._spark = spark
        self._functions = functions
        self._stream = stream
        self._streaming = streaming
        self._files_max = files_max
        self._made: dict[str, DataFrame] = {}
        windows = {
            step.input: step.window.size_us
            for step in upstream(plan, stream)
            if isinstance(step, p.Aggregate) and isinstance(step.window, Tumbling)
        }
        self._moved_us: dict[str, int] = {}
        """The sources whose rows carry a moved time, and by how much."""
        for taken, size_us in windows.items() if streaming else ():
            moved_us = -(-TIME_BOUND_US // size_us) * size_us
            self._moved_us |= {other.name: moved_us for other in upstream(plan, taken) if isinstance(other, p.Source)}

    def let_out(self) -> DataFrame:
        """The stream as a sink takes it, in exactly its declared types."""
        stream, rows = self._types[self._stream], self._frame(self._stream)
        given = rows.schema
        columns = [
            F.col(quoted_name(name)).cast(spark_type(kind)).alias(name)
            if given[name].dataType != spark_type(kind)
            else F.col(quoted_name(name))
            for name, kind in stream.schema.items()
        ]
        return rows.select(*columns, *([F.col(OP)] if stream.upsert_key is not None else []))

    def _frame(self, stream: p.Input) -> DataFrame:
        if stream.step not in self._made:
            self._made[stream.step] = self._lowered(self._plan.step(stream.step))
        return self._made[stream.step]

    def _lowered(self, step: p.Step) -> DataFrame:
        if isinstance(step, p.Source):
            return self._source(step)
        if isinstance(step, p.Union):
            return self._union(step)
        stream, rows = self._types[step.inputs[0]], self._frame(step.inputs[0])
        match step:
            case p.Filter():
                return _filtered(parse_predicate(step.predicate, stream.schema), stream, rows)
            case p.Select() | p.WithColumns():
                return rows.select(*map(_column, projection(step, stream.schema)), *_hidden(rows))
            case p.Explode():
                array, schema = exploded_columns(step, stream.schema)
                kept = [F.col(quoted_name(name)) for name in schema if name != array.name]
                return rows.select(*kept, F.explode(F.expr(render(array.term))).alias(array.name), *_hidden(rows))
            case p.Function():
                apply = function_rows(self._plan.pipeline, step, stream, self._functions)
                # By place: `mapInArrow` cannot take columns whose names need quotes.
                declared = rows.select(
                    *(F.col(quoted_name(name)).alias(f"c{at}") for at, name in enumerate(stream.schema))
                )
                return declared.mapInArrow(apply, spark_schema(self._types[p.Input(step.name)].schema))
            case p.Aggregate():
                return self._aggregate(step, stream, rows)
            case _:
                raise AssertionError(f"{type(step).__name__} {step.name} was chosen to run natively")

    def _source(self, step: p.Source) -> DataFrame:
        rows = read_parquet(self._spark, step, streaming=self._streaming, files_max=self._files_max)
        if step.name not in self._moved_us or step.time is None:
            return rows
        moved = f"timestamp_micros(unix_micros({quoted_name(step.time)}) + {self._moved_us[step.name]})"
        # Spark counts in milliseconds: rounded up, so that no row is late for it that is not for us.
        lateness_ms = -(-step.lateness_us // _MILLISECOND_US)
        return rows.withColumn(TIME, F.expr(moved)).withWatermark(TIME, f"{lateness_ms} milliseconds")

    def _union(self, step: p.Union) -> DataFrame:
        frames = [self._frame(stream) for stream in step.streams]
        schema = self._types[p.Input(step.name)].schema
        hidden = [TIME] if all(TIME in frame.columns for frame in frames) else []
        # By place, in one order: the streams may name the same columns in different ones.
        ordered = [frame.select(*map(quoted_name, schema), *hidden) for frame in frames]
        return reduce(lambda one, other: one.union(other), ordered)

    def _aggregate(self, step: p.Aggregate, stream: StreamType, rows: DataFrame) -> DataFrame:
        keys = [F.col(quoted_name(name)) for name in step.keys]
        made = [F.expr(aggregate.sql).alias(aggregate.name) for aggregate in aggregates(step, stream.schema)]
        names = [F.col(quoted_name(given.name)) for given in step.aggregates]
        if step.window is None or stream.time is None:
            grouped = rows.groupBy(*keys or [F.lit(0).alias(_ALL)])
            return grouped.agg(*made).select(*keys, *names, F.lit(UPSERT).alias(OP))
        if not isinstance(step.window, Tumbling):
            raise TypeError(f"step {step.name} has windows that only our own operators make")
        size_us, offset_us = step.window.size_us, step.window.offset_us % step.window.size_us
        if self._streaming:
            time, moved_us = F.col(TIME), next(iter(self._moved_us.values()))
        else:
            time = F.expr(f"timestamp_micros(unix_micros({quoted_name(stream.time.column)}) + {stream.time.shift_us})")
            moved_us = 0
        size = f"{size_us} microseconds"
        window = F.window(time, size, size, f"{offset_us} microseconds").alias(_WINDOW)
        bounds = [
            F.expr(f"timestamp_micros(unix_micros({_WINDOW}.{end}) - {moved_us})").alias(name)
            for end, name in (("start", WINDOW_START), ("end", WINDOW_END))
        ]
        return rows.groupBy(*keys, window).agg(*made).select(*keys, *bounds, *names)


def _column(expression: Expression) -> Column:
    return F.expr(render(expression.term)).alias(expression.name)


def _hidden(rows: DataFrame) -> list[Column]:
    """The hidden columns that rows carry."""
    return [F.col(name) for name in (TIME, OP) if name in rows.columns]


def _filtered(predicate: Expression, stream: StreamType, rows: DataFrame) -> DataFrame:
    passes = F.expr(render(predicate.term))
    if stream.upsert_key is None:
        return rows.filter(passes)
    # As `FilterUpserts`: a key whose row no longer passes is deleted (rule 8).
    return rows.withColumn(OP, F.when(passes & (F.col(OP) == UPSERT), UPSERT).otherwise(DELETE))
