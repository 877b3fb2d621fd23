"""Reading one output file back, with the exact types that were written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.csv_rows import CsvRows, record_ends
from fordstone.connectors.file_bytes import HeldBytes
from fordstone.connectors.file_settings import LINE_BYTES_MOST
from fordstone.connectors.jsonl import JsonLines
from fordstone.connectors.line_format import newlines
from fordstone.connectors.lines import LineReader
from fordstone.connectors.stream_mark import EPOCH, StreamMark
from fordstone.errors import SinkError
from fordstone.model.schema import RESERVED_PREFIX, DataType, Schema

_ROWS_AT_ONCE: Final = 1 << 17


def file_rows(data: bytes, mark: StreamMark, *, where: str, torn: bool = False) -> pl.DataFrame:
    """The rows of one file's bytes. `torn`: a last line without its newline was never finished, and is left out."""
    try:
        if mark.format == "parquet":
            return pl.read_parquet(io.BytesIO(data))
        if mark.format == "arrow":
            return pl.read_ipc(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise SinkError(f"{where} is damaged: {str(error).partition(chr(10))[0]}.") from error
    if torn:
        ends = record_ends(data) if mark.format == "csv" else newlines(data)
        data = data[: ends[-1] + 1] if ends.size else b""
    return _lines(data, mark, where)


def _lines(data: bytes, mark: StreamMark, where: str) -> pl.DataFrame:
    schema = _with_own_columns(data, mark)
    if mark.format == "jsonl":
        line_format: JsonLines | CsvRows = JsonLines(schema, time_unit="us")
    else:
        line_format = CsvRows(Path(where), schema, delimiter=mark.delimiter, header=True, time_unit="us")
    reader = LineReader(
        HeldBytes(data), line_format, schema, 0, bounded=True, with_positions=False, line_bytes_max=LINE_BYTES_MOST
    )
    frames = [schema.empty()]
    while (chunk := reader.read(_ROWS_AT_ONCE)) is not None:
        if chunk.rejected:
            raise SinkError(f"{where} is damaged at byte {chunk.rejected[0].position}: {chunk.rejected[0].reason}.")
        frames.append(chunk.frame)
        if chunk.ended:
            break
    return pl.concat(frames)


def _with_own_columns(data: bytes, mark: StreamMark) -> Schema:
    """The declared columns, and those of ours that the first line names."""
    first = data.partition(b"\n")[0]
    if mark.format == "jsonl":
        names = list(msgspec.json.decode(first)) if first else []
    else:
        names = first.decode().strip().split(mark.delimiter)
    own = [name for name in names if name.startswith(RESERVED_PREFIX) and name not in mark.columns]
    return Schema(
        mark.schema.columns + tuple((name, DataType("bigint" if name == EPOCH else "string")) for name in own)
    )
