"""Rows of runs as Spark takes them: runs in, record batches of one exact schema out. No pandas, no Python objects.

Runs come from holders of tokens, so `epochs.untrusted` decodes them, as everywhere.

Invariants: every value is the stored one, nulls and NaNs included, or the cast fails; only requested columns of a compressed
run are decompressed; batches are neither tiny nor huge, however the runs are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import polars as pl
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from fordstone.epochs.ipc import FILE_MAGIC
from fordstone.epochs.untrusted import DecodeBudget, check_run, decode_untrusted
from fordstone.errors import RejectedRunError, SchemaError
from fordstone.state.base import RunRef

BATCH_ROWS_MIN: Final = 1 << 16
"""Smaller batches are joined: each costs a message to the JVM."""
BATCH_ROWS_MAX: Final = 1 << 18
BATCH_BYTES: Final = 32 << 20
"""A batch of this size is sent, however few its rows."""
SMALL_BATCHES_MAX: Final = 256
"""As many batches of small runs are joined into one that is held in their place: each takes kilobytes, however few its rows."""
_WIDER: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
}
_DIGITS_MAX: Final = 38


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """The rows of one run, and the columns that have one value for all of them."""

    frame: pl.DataFrame
    where: str
    """For messages: where the run comes from."""
    constants: Mapping[str, pa.Scalar] = field(default_factory=dict)
    advice: str = ""
    """For messages about columns that do not fit: what to do if the run is wrong, and not the query."""


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The one Arrow type that Spark takes for values of this type: no views, large types or nanoseconds."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(kind.precision, _DIGITS_MAX), kind.scale)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(part.name, plain_type(part.type)) for part in kind])
    return _WIDER.get(kind, kind)


def spark_columns(stored: pa.Schema) -> StructType:
    """The columns of a run, as Spark has them."""
    plain = pa.schema([pa.field(column.name, plain_type(column.type)) for column in stored])
    try:
        return from_arrow_schema(plain, prefer_timestamp_ntz=True)
    except Exception as error:
        raise SchemaError(f"Spark has no type for a column of {plain}: {error}") from error


def arrow_columns(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects for rows of these columns."""
    return to_arrow_schema(schema, timezone="UTC")


def check_metadata(columns: StructType, metadata: StructType) -> None:
    """Check that no column has a name that a source uses for where a row comes from."""
    taken = [name for name in metadata.fieldNames() if name in columns.fieldNames()]
    if taken:
        raise SchemaError(
            f"there is a column {taken[0]!r} already, a name that this source uses for where a row comes from. Set option 'metadata' "
            "to 'false' to read the one that is there."
        )


def stored_columns(data: bytes, ref: RunRef) -> pa.Schema:
    """The columns of a run, without its rows. `data` has the digest of `ref`."""
    check_run(data, ref)
    source = pa.BufferReader(data)
    try:
        return (pa.ipc.open_file(source) if data.startswith(FILE_MAGIC) else pa.ipc.open_stream(source)).schema
    except (pa.ArrowInvalid, OSError) as error:
        raise RejectedRunError(f"the columns of run {ref.digest[:12]}… cannot be read: {error}.") from error


def decode_rows(
    data: bytes,
    ref: RunRef,
    target: pa.Schema,
    *,
    where: str,
    constants: Mapping[str, pa.Scalar],
    advice: str = "",
    budget: DecodeBudget | None = None,
) -> RunRows:
    """The rows of a run, of which only the columns of the target are decoded.

    Raises:
        SchemaError: The run lacks a column.
        RejectedRunError: The run is not what it must be.
    """
    wanted = [column.name for column in target if column.name not in constants]
    try:
        there = check_run(data, ref).columns
        missing = [name for name in wanted if name not in there]
        if missing:
            raise SchemaError(
                f"{where} has no column {', '.join(map(repr, missing))}; it has {', '.join(there)}. "
                f"Read it with a schema of columns that all epochs have: .schema(...). {advice}".rstrip()
            )
        frame = decode_untrusted(data, ref, dict.fromkeys(wanted or there[:1]), budget=budget)
    except RejectedRunError as error:
        raise RejectedRunError(f"{where}: {error}") from error
    return RunRows(frame=frame, where=where, constants=constants, advice=advice)


def record_batches(runs: Iterable[RunRows], target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of the runs in order, as batches of exactly these columns.

    Raises:
        SchemaError: A run has values that do not fit the type of their column.
    """
    held: list[pa.RecordBatch] = []
    joined = rows = size_bytes = 0
    for run in runs:
        for stored in run.frame.to_arrow(compat_level=pl.CompatLevel.newest()).to_batches():
            if not stored.num_rows:
                continue
            held.append(_exact(stored, run, target))
            rows += stored.num_rows
            size_bytes += held[-1].nbytes
            if rows >= BATCH_ROWS_MIN or size_bytes >= BATCH_BYTES:
                yield from _joined(held)
                held, joined, rows, size_bytes = [], 0, 0, 0
            elif len(held) - joined == SMALL_BATCHES_MAX:
                held[joined:] = [pa.concat_batches(held[joined:])]
                joined += 1
    if held:
        yield from _joined(held)


def _joined(held: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    whole = held[0] if len(held) == 1 else pa.concat_batches(held)
    # As many slices as the rows need, and no more than the bytes need; of equal size, so that none is tiny.
    count = max(-(-whole.num_rows // BATCH_ROWS_MAX), -(-whole.nbytes // (2 * BATCH_BYTES)))
    rows = -(-whole.num_rows // min(count, whole.num_rows))
    for start in range(0, whole.num_rows, rows):
        yield whole.slice(start, rows)


def _exact(stored: pa.RecordBatch, run: RunRows, target: pa.Schema) -> pa.RecordBatch:
    columns = []
    for column in target:
        if column.name in run.constants:
            columns.append(_repeated(run.constants[column.name], stored.num_rows, column))
            continue
        values = stored.column(stored.schema.get_field_index(column.name))
        if values.type != column.type:
            values = _cast(values, column, run)
        columns.append(values)
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _cast(values: pa.Array, column: pa.Field, run: RunRows) -> pa.Array:
    try:
        return values.cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"column {column.name!r} of {run.where} is {values.type}, and the query reads it as {column.type}: {error}. "
            f"Give the type that the pipeline has, or leave the schema out. {run.advice}".rstrip()
        ) from error


def _repeated(value: pa.Scalar, rows: int, column: pa.Field) -> pa.Array:
    return pa.repeat(value.cast(column.type), rows)
