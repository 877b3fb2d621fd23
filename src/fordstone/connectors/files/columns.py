"""The columns that files have: inferred for a first look, and compared with those that a schema declares.

Text files are sampled at their beginning; Parquet and Arrow files say their columns themselves. What stands further on in a file, or in
other files, is not looked at: rows that do not fit are rejected when they are read, as always.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import polars as pl

from fordstone.connectors.files.bytes import open_bytes
from fordstone.connectors.files.cells import DATE_LENGTH, parse_times
from fordstone.connectors.files.settings import TABLES, FileSettings
from fordstone.errors import SchemaError, SourceError
from fordstone.lang.schema import RESERVED_PREFIX, DataType, Schema, struct_of

TimeUnit = Literal["s", "ms", "us"]
SAMPLE_BYTES: Final = 1 << 18
"""Size of the sample at the beginning of a text file."""
SAMPLE_FILES: Final = 5
SAMPLE_ROWS: Final = 2_000
_BIGINT: Final = range(-(1 << 63), 1 << 63)
_WHOLE: Final = re.compile(r"[+-]?\d{1,18}")
_LEADING_ZERO: Final = re.compile(r"[+-]?0\d")
_REAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|infinity)|nan", re.IGNORECASE)
_TIME_NAME: Final = re.compile(r"(?i)(?:^|_)(?:ts|time|timestamp|datetime|at)$|timestamp$|Time$|At$")
"""Names of columns in which large numbers are probably times."""
_UNIT_RANGES: Final[dict[TimeUnit, tuple[float, float]]] = {"s": (1e9, 4e9), "ms": (1e12, 4e12), "us": (1e15, 4e15)}
"""The years 2001 to 2096 in each unit."""
_UNSIGNED: Final[dict[type[pl.DataType], str]] = {
    pl.UInt8: "smallint",
    pl.UInt16: "int",
    pl.UInt32: "bigint",
    pl.UInt64: "decimal(20,0)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """The columns found, and those that cannot be read with the reason."""

    columns: dict[str, str]
    left_out: dict[str, str]
    time_unit: TimeUnit | None = None
    """What the numbers in a timestamp column probably count, if there is such a column."""


def infer(paths: Sequence[Path], settings: FileSettings) -> Inferred:
    """Infer the columns of files from the first few of them."""
    columns: dict[str, list[Any]] = {}
    typed: dict[str, str] = {}
    left_out: dict[str, str] = {}
    nonempty = [path for path in paths if path.stat().st_size] or list(paths)
    for path in nonempty[:SAMPLE_FILES]:
        kind = settings.format_of(path)
        if kind is None:
            raise SourceError(
                f"{path}: the format cannot be inferred from the suffix. Give it: --format (format=) jsonl, csv, parquet or arrow."
            )
        if kind in TABLES:
            for name, dtype in _own_schema(path, kind).items():
                _take_typed(name, dtype, typed, left_out)
        else:
            delimiter = settings.delimiter_of(path)
            rows = _json_rows(_head(path)) if kind == "jsonl" else _csv_rows(_head(path), delimiter)
            for row in rows:
                for name, value in row.items():
                    columns.setdefault(name, []).append(value)
    unit: TimeUnit | None = None
    for name, values in columns.items():
        guess = _type_of(values)
        if guess == "bigint" and (counted := _unit_of(name, values)) is not None and unit in {None, counted}:
            guess, unit = "timestamp", counted
        if guess is None:
            left_out[name] = "contains objects without names"
        else:
            typed[name] = guess
    for name in [name for name in typed if name.startswith(RESERVED_PREFIX) or not name]:
        del typed[name]
        left_out[name] = f"has a reserved name (names that begin with {RESERVED_PREFIX})"
    return Inferred(columns=typed, left_out=left_out, time_unit=unit)


def _own_schema(path: Path, kind: str) -> pl.Schema:
    try:
        if kind == "parquet":
            return pl.scan_parquet(path, glob=False, hive_partitioning=False).collect_schema()
        return pl.Schema(pl.read_ipc_schema(path))
    except (pl.exceptions.PolarsError, OSError, pl.exceptions.PanicException) as error:
        raise SourceError(
            f"{path} cannot be read as {kind}: {str(error).partition(chr(10))[0]}. Is the file damaged? If it has another format, give that."
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
    """Return whole lines from the beginning of a text file."""
    data = open_bytes(path)
    try:
        head = data.at(0, SAMPLE_BYTES)
    finally:
        data.close()
    if len(head) == SAMPLE_BYTES and b"\n" in head:
        head = head[: head.rindex(b"\n")]
    return head.removeprefix(b"\xef\xbb\xbf")


def _json_rows(head: bytes) -> Iterable[dict[str, Any]]:
    """Yield the JSON objects; other lines are ignored."""
    for line in head.splitlines()[:SAMPLE_ROWS]:
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def _csv_rows(head: bytes, delimiter: str) -> Iterable[dict[str, Any]]:
    """Yield rows by the names in the first line, with empty fields as nulls and typed values where a whole column fits the type."""
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
    # 007 is an identifier, not a number.
    if given and not any(_LEADING_ZERO.match(text) for text in given):
        for shape, kind in ((_WHOLE, int), (_REAL, float)):
            if all(shape.fullmatch(text) for text in given):
                return [kind(text) if text else None for text in texts]
    return [text or None for text in texts]


def _type_of(values: Sequence[Any]) -> str | None:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {dict}:
        return _struct_type([value for value in values if value is not None])
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


def _struct_type(values: Sequence[dict[str, Any]]) -> str | None:
    """A struct of all fields that were seen."""
    fields: dict[str, list[Any]] = {}
    for value in values:
        for name, one in value.items():
            fields.setdefault(name, []).append(one)
    kinds = {name: _type_of(given) for name, given in fields.items() if name}
    known = {name: DataType.parse(kind) for name, kind in kinds.items() if kind is not None}
    return str(struct_of(known)) if known else None


def _unit_of(name: str, values: Sequence[Any]) -> TimeUnit | None:
    given = [value for value in values if value is not None]
    if not _TIME_NAME.search(name) or not given:
        return None
    return next(
        (unit for unit, (least, most) in _UNIT_RANGES.items() if least <= min(given) and max(given) < most), None
    )


def _text_type(texts: list[str]) -> str:
    if not parse_times(pl.Series(texts, dtype=pl.String))[1].all():
        return "string"
    return "date" if all(len(text) == DATE_LENGTH for text in texts) else "timestamp"


def schema_text(found: Inferred) -> str:
    """The columns as they are pasted into a pipeline."""
    lines = [f"    {_quoted(name)}: {_quoted(kind)}," for name, kind in found.columns.items()]
    lines += [f"    # {_quoted(name)} is left out: it {why}." for name, why in found.left_out.items()]
    text = "\n".join(["schema={", *lines, "},"])
    if found.time_unit not in {None, "us"}:
        text += f'\n# and time_unit="{found.time_unit}" in files(...): what the numbers in the timestamp column count.'
    return text


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def check_declared(path: Path, settings: FileSettings, schema: Schema, *, where: str) -> bool:
    """Check that the beginning of a file has every declared column in one row at least; False: it has no rows yet.

    `where` is how the error names the file.

    Raises:
        SourceError: With the names that the data has.
    """
    names = _names(path, settings)
    missing = [name for name in schema if name not in names]
    if not names or not missing:
        return bool(names)
    lowered = {name.lower(): name for name in names}
    near = get_close_matches(missing[0].lower(), lowered, n=1, cutoff=0.5)
    hint = f" Did you mean {lowered[near[0]]!r}?" if near else ""
    raise SourceError(
        f"{where}: no row has column {missing[0]!r}, which the schema declares.{hint} The data has: {', '.join(names)}.\n"
        'Correct the schema; or, if the column may be missing, say files(..., missing="null").'
    )


def _names(path: Path, settings: FileSettings) -> list[str]:
    """The columns at the beginning of a file; none if it cannot be read, which is an error when it is read."""
    kind = settings.format_of(path)
    try:
        if kind in TABLES:
            return list(_own_schema(path, str(kind)))
        if kind == "jsonl":
            return list(dict.fromkeys(name for row in _json_rows(_head(path)) for name in row))
        return _header(_head(path), settings.delimiter_of(path)) if kind == "csv" and settings.header else []
    except (SourceError, csv.Error, OSError):
        return []


def _header(head: bytes, delimiter: str) -> list[str]:
    first = next(csv.reader(io.StringIO(head.decode(errors="replace"), newline=""), delimiter=delimiter), [])
    return [] if b"\n" not in head else first
