"""Find out which columns files have: from a sample of text, or from what the file says of itself.

A guess, which the command says aloud. Rows that do not fit it are rejected and counted, as always.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from fordstone.connectors.file_bytes import open_bytes
from fordstone.connectors.file_settings import FileSettings
from fordstone.connectors.iso_time import DATE_LENGTH, parse_times
from fordstone.errors import SchemaError, SourceError
from fordstone.model.schema import RESERVED_PREFIX, DataType

SAMPLE_BYTES: Final = 1 << 18
"""So much is read of the beginning of a text file."""
SAMPLE_FILES: Final = 5
SAMPLE_ROWS: Final = 2_000
_BIGINT: Final = range(-(1 << 63), 1 << 63)
_WHOLE: Final = re.compile(r"[+-]?\d{1,18}")
_LEADING_ZERO: Final = re.compile(r"[+-]?0\d")
_REAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|infinity)|nan", re.IGNORECASE)
_UNSIGNED: Final[dict[type[pl.DataType], str]] = {
    pl.UInt8: "smallint",
    pl.UInt16: "int",
    pl.UInt32: "bigint",
    pl.UInt64: "decimal(20,0)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """The columns found, and those that cannot be read, with the reason."""

    columns: dict[str, str]
    left_out: dict[str, str]


def infer(paths: Sequence[Path], settings: FileSettings) -> Inferred:
    """The columns of files: the first few of them are looked at."""
    columns: dict[str, list[Any]] = {}
    typed: dict[str, str] = {}
    left_out: dict[str, str] = {}
    telling = [path for path in paths if path.stat().st_size] or list(paths)
    for path in telling[:SAMPLE_FILES]:
        kind = settings.format_of(path)
        if kind is None:
            raise SourceError(
                f"{path}: its ending does not tell the format. Say --format jsonl, csv, parquet or arrow."
            )
        if kind in {"parquet", "arrow"}:
            for name, dtype in _own_schema(path, kind).items():
                _take_typed(name, dtype, typed, left_out)
        else:
            delimiter = settings.delimiter_of(path)
            rows = _json_rows(_head(path)) if kind == "jsonl" else _csv_rows(_head(path), delimiter)
            for row in rows:
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
    for name, values in columns.items():
        guess = _type_of(values)
        if guess is None:
            left_out[name] = "holds objects"
        else:
            typed[name] = guess
    for name in [name for name in typed if name.startswith(RESERVED_PREFIX) or not name]:
        del typed[name]
        left_out[name] = f"names that begin with {RESERVED_PREFIX} are reserved"
    return Inferred(columns=typed, left_out=left_out)


def _own_schema(path: Path, kind: str) -> pl.Schema:
    try:
        return pl.Schema(pl.read_parquet_schema(path) if kind == "parquet" else pl.read_ipc_schema(path))
    except (pl.exceptions.PolarsError, OSError, pl.exceptions.PanicException) as error:
        raise SourceError(
            f"{path} cannot be read as {kind}: {str(error).partition(chr(10))[0]}. Get the file again, or say --format."
        ) from error


def _take_typed(name: str, dtype: pl.DataType, typed: dict[str, str], left_out: dict[str, str]) -> None:
    if name in typed:
        return
    if isinstance(dtype, pl.Categorical | pl.Enum):
        typed[name] = "string"
    elif type(dtype) in _UNSIGNED:
        typed[name] = _UNSIGNED[type(dtype)]
    else:
        try:
            typed[name] = str(DataType.from_polars(dtype))
        except SchemaError:
            left_out[name] = f"is {dtype}"


def _head(path: Path) -> bytes:
    """Whole lines from the beginning of a text file."""
    data = open_bytes(path)
    try:
        head = data.at(0, SAMPLE_BYTES)
    finally:
        data.close()
    if len(head) == SAMPLE_BYTES and b"\n" in head:
        head = head[: head.rindex(b"\n")]
    return head.removeprefix(b"\xef\xbb\xbf")


def _json_rows(head: bytes) -> Iterable[dict[str, Any]]:
    """The objects of the lines; others are none of a guess's business."""
    for line in head.splitlines()[:SAMPLE_ROWS]:
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def _csv_rows(head: bytes, delimiter: str) -> Iterable[dict[str, Any]]:
    """Rows by the names in the first line, nulls for nothing, and values as Python's where all of them are."""
    reader = csv.reader(io.StringIO(head.decode(errors="replace"), newline=""), delimiter=delimiter)
    try:
        names = next(reader, [])
        rows = [row for row, _ in zip(reader, range(SAMPLE_ROWS), strict=False) if len(row) == len(names)]
    except csv.Error:
        return
    columns = [_valued([row[place] for row in rows]) for place in range(len(names))]
    if not rows:
        yield dict.fromkeys(names)
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _valued(texts: list[str]) -> list[Any]:
    given = [text for text in texts if text]
    if given and all(text.lower() in {"true", "false"} for text in given):
        return [text.lower() == "true" if text else None for text in texts]
    # 007 is a name, not a number.
    if given and not any(_LEADING_ZERO.match(text) for text in given):
        for shape, kind in ((_WHOLE, int), (_REAL, float)):
            if all(shape.fullmatch(text) for text in given):
                return [kind(text) if text else None for text in texts]
    return [text or None for text in texts]


def _type_of(values: Sequence[Any]) -> str | None:
    """The type that holds all the values; None: there is none."""
    kinds = {type(value) for value in values if value is not None}
    if dict in kinds:
        return None
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "bigint" if all(value is None or value in _BIGINT for value in values) else "double"
    if kinds and kinds <= {int, float}:
        return "double"
    if kinds == {str}:
        return _text_type([value for value in values if value is not None])
    if kinds == {list}:
        element = _type_of([one for value in values if value is not None for one in value])
        return None if element is None else f"array<{element}>"
    return "string"


def _text_type(texts: list[str]) -> str:
    if not parse_times(pl.Series(texts, dtype=pl.String))[1].all():
        return "string"
    return "date" if all(len(text) == DATE_LENGTH for text in texts) else "timestamp"
