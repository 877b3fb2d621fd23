"""Column types as Spark has them and as Arrow batches must have them on the way to Spark."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import types as t

from fordstone.lang.schema import DataType, Schema

_SPARK: Final[dict[str, t.DataType]] = {
    "boolean": t.BooleanType(),
    "tinyint": t.ByteType(),
    "smallint": t.ShortType(),
    "int": t.IntegerType(),
    "bigint": t.LongType(),
    "float": t.FloatType(),
    "double": t.DoubleType(),
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "date": t.DateType(),
    "timestamp": t.TimestampType(),
    "null": t.NullType(),
}
_ARROW: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "null": pa.null(),
}


def spark_type(kind: DataType) -> t.DataType:
    """The type of a Spark column that holds the same values."""
    if kind.element is not None:
        return t.ArrayType(spark_type(kind.element))
    if kind.name == "decimal":
        return t.DecimalType(kind.precision, kind.scale)
    return _SPARK[kind.name]


def spark_schema(schema: Schema) -> t.StructType:
    """The columns of a Spark frame."""
    return t.StructType([t.StructField(name, spark_type(kind)) for name, kind in schema.items()])


def arrow_type(kind: DataType) -> pa.DataType:
    """The one Arrow type that Spark takes for it: no large or view types, no dictionaries, no nanoseconds."""
    if kind.element is not None:
        return pa.list_(arrow_type(kind.element))
    if kind.name == "decimal":
        return pa.decimal128(kind.precision, kind.scale)
    return _ARROW[kind.name]


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of an Arrow batch for Spark."""
    return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in schema.items()])
