"""Frames to the bytes of one file.

Text formats: times are ISO-8601 in UTC, binary is base64, JSON has no NaN and no infinity (they become null). CSV writes
null as nothing and the empty text as `""`.
"""

from __future__ import annotations

import io
from typing import Final, Literal

import polars as pl

from fordstone.connectors.file_settings import FileFormat

Compression = Literal["zstd", "lz4", "none"]
_TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%S%.6fZ"


def encoded(
    frame: pl.DataFrame,
    file_format: FileFormat,
    *,
    header: bool = True,
    delimiter: str = ",",
    compression: Compression = "zstd",
) -> bytes:
    """The file's bytes. `header` counts for CSV only."""
    target = io.BytesIO()
    if file_format == "jsonl":
        _plain(frame).write_ndjson(target)
    elif file_format == "csv":
        _plain(frame).write_csv(target, include_header=header, separator=delimiter, datetime_format=_TIME_FORMAT)
    elif file_format == "parquet":
        frame.write_parquet(target, compression="uncompressed" if compression == "none" else compression)
    else:
        frame.write_ipc(target, compression="uncompressed" if compression == "none" else compression)
    return target.getvalue()


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns that a text format can hold."""
    changed = [pl.col(name).bin.encode("base64") for name, kind in frame.schema.items() if kind == pl.Binary]
    return frame.with_columns(changed) if changed else frame
