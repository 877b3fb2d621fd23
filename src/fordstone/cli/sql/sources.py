"""The sources and tables of `fordstone sql`: from `--source`, `--table`, `--schema`, `--time`, and from the files themselves.

The columns of files are inferred from a sample of text, or read from the file's own schema. What was inferred is printed. Rows that
do not fit are rejected and counted, as always.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import polars as pl

from fordstone.cli import format as fmt
from fordstone.cli.errors import UsageError
from fordstone.connectors import files
from fordstone.connectors.base import SourceOptions, options_of
from fordstone.connectors.files.bytes import open_bytes
from fordstone.connectors.files.cells import DATE_LENGTH, parse_times
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.files.source import FileSource
from fordstone.errors import SchemaError, SourceError
from fordstone.lang.schema import RESERVED_PREFIX, DataType, Schema
from fordstone.plan.stream_type import TIMESTAMP

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline
    from fordstone.plan.plan import ConnectorSpec


SAMPLE_BYTES: Final = 1 << 18
"""Size of the sample at the beginning of a text file."""
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
    """The columns found, and those that cannot be read with the reason."""

    columns: dict[str, str]
    left_out: dict[str, str]


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
                f"{path}: the format cannot be inferred from the suffix. Give --format jsonl, csv, parquet or arrow."
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
            left_out[name] = "contains objects"
        else:
            typed[name] = guess
    for name in [name for name in typed if name.startswith(RESERVED_PREFIX) or not name]:
        del typed[name]
        left_out[name] = f"has a reserved name (names that begin with {RESERVED_PREFIX})"
    return Inferred(columns=typed, left_out=left_out)


def _own_schema(path: Path, kind: str) -> pl.Schema:
    try:
        return pl.Schema(pl.read_parquet_schema(path) if kind == "parquet" else pl.read_ipc_schema(path))
    except (pl.exceptions.PolarsError, OSError, pl.exceptions.PanicException) as error:
        raise SourceError(
            f"{path} cannot be read as {kind}: {str(error).partition(chr(10))[0]}. Is the file damaged? If it has another format, give --format."
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


EXAMPLE: Final = "--source readings='in/*.jsonl'"
_OPEN: Final = "<("
_CLOSED: Final = ">)"


def add_sources(
    pipeline: Pipeline,
    sources: Sequence[str],
    tables: Sequence[str],
    schemas: Sequence[str],
    times: Sequence[str],
    *,
    lateness: str,
    follow: bool,
    **file_options: Any,
) -> list[str]:
    """Declare the sources and tables, given as `NAME=PATTERN`; return a line about each that shows what was inferred.

    `file_options`: the options of `files` for all of them.
    """
    if not sources:
        raise UsageError(f"no source was given. Give the files that a name in FROM stands for: {EXAMPLE}")
    patterns, table_patterns = _by_name(sources, "--source"), _by_name(tables, "--table")
    for name in table_patterns:
        if name in patterns:
            raise UsageError(f"--table {name}: there is a source of that name. Give one of them another name.")
    both = patterns | table_patterns
    declared = {name: _columns(text) for name, text in _for_each(schemas, both, "--schema").items()}
    event_times = _for_each(times, patterns, "--time")
    lines = []
    for name, pattern in patterns.items():
        found = _found(name, pattern, declared.get(name, {}), follow=follow, **file_options)
        moments = [column for column, kind in found.columns.items() if DataType.parse(kind) == TIMESTAMP]
        time = event_times.get(name, moments[0] if len(moments) == 1 else None)
        pipeline.source(name, found.spec, schema=found.columns, time=time, lateness=lateness)
        lines.append(_describe(name, found, time, moments))
    for name, pattern in table_patterns.items():
        found = _found(name, pattern, declared.get(name, {}), follow=False, **file_options)
        pipeline.table(name, found.spec, schema=found.columns)
        lines.append(_describe(name, found, None, ()))
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The files that a pattern matches, and their columns."""

    spec: ConnectorSpec
    paths: list[Path]
    columns: dict[str, str]
    left_out: dict[str, str]


def _found(name: str, pattern: str, declared: dict[str, str], *, follow: bool, **file_options: Any) -> _Files:
    spec = files(pattern, **file_options)
    settings = options_of(spec, FileSettings)
    if settings.is_url and not declared:
        raise UsageError(
            f"the columns of files at a URL ({pattern}) are not inferred. Give them: --schema '{name}=device string, ts timestamp'."
        )
    paths: list[Path] = []
    if not settings.is_url:
        source = FileSource(settings, SourceOptions(schema=Schema(()), bounded=not follow))
        paths = [source.path_of(partition) for partition in source.partitions()]
    if not paths and not declared:
        raise UsageError(
            f"no file matches {pattern!r} yet, so its columns cannot be inferred. Give them: --schema "
            f"'{name}=device string, ts timestamp, temp double'."
        )
    found = infer(paths, settings) if paths else Inferred(columns={}, left_out={})
    columns = {column: declared.get(column, kind) for column, kind in found.columns.items()}
    columns |= {column: kind for column, kind in declared.items() if column not in columns}
    if not columns:
        raise UsageError(
            f"no columns were found in {paths[0]}. If it is empty, give them: --schema '{name}=device string, temp double'."
        )
    left_out = {column: why for column, why in found.left_out.items() if column not in declared}
    return _Files(spec=spec, paths=paths, columns=columns, left_out=left_out)


def _describe(name: str, found: _Files, time: str | None, moments: Sequence[str]) -> str:
    listed = ", ".join(
        f"{column} {kind}{' (event time)' if column == time else ''}" for column, kind in found.columns.items()
    )
    line = f"{name}: {fmt.count(len(found.paths), 'file')}: {listed}"
    if time is None and len(moments) > 1:
        line += f"\n  Several columns are timestamps; choose the event time: --time {moments[0]}"
    for column, why in found.left_out.items():
        line += f"\n  {column!r} is ignored: it {why}."
    return line


def _by_name(given: Sequence[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, pattern = text.partition("=")
        if not equals or not name.strip() or not pattern.strip():
            raise UsageError(
                f"{option} {text!r}: write NAME=PATTERN, as in {EXAMPLE if option == '--source' else '--table devices=devices.csv'}"
            )
        if name.strip() in found:
            raise UsageError(
                f"{option} {name.strip()} is given twice. One pattern may match many files: 'in/**/*.jsonl'."
            )
        found[name.strip()] = pattern.strip()
    return found


def _for_each(texts: Sequence[str], patterns: dict[str, str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE for one source, or VALUE for the only one."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.strip() in patterns:
            found[name.strip()] = value.strip()
        elif equals:
            raise UsageError(
                f"{option} {text!r}: there is no source {name.strip()!r}. There are: {', '.join(patterns)}."
            )
        elif len(patterns) == 1:
            found[next(iter(patterns))] = text.strip()
        elif option == "--time":
            found |= {name: text.strip() for name in patterns if name not in found}
        else:
            raise UsageError(
                f"{option} {text!r}: there are several sources, so name one: {option} '{next(iter(patterns))}={text}'."
            )
    return found


def _columns(text: str) -> dict[str, str]:
    """Parse `device string, price decimal(10,2)`; names with blanks are in backticks."""
    found: dict[str, str] = {}
    for part in _parts(text):
        if part.startswith("`") and "`" in part[1:]:
            name, _, kind = part[1:].partition("`")
        else:
            name, _, kind = part.partition(" ")
        if not name or not kind.strip():
            raise UsageError(
                f"--schema: {part!r} is not a column with its type. Write for instance: device string, temp double"
            )
        try:
            DataType.parse(kind)
        except SchemaError as error:
            raise UsageError(f"--schema: column {name}: {error}") from error
        found[name] = kind.strip()
    return found


def _parts(text: str) -> list[str]:
    """Split at commas outside of brackets and backticks."""
    found, depth, quoted = [""], 0, False
    for char in text:
        quoted ^= char == "`"
        depth += (char in _OPEN) - (char in _CLOSED) if not quoted else 0
        if char == "," and not depth and not quoted:
            found.append("")
        else:
            found[-1] += char
    return [part.strip() for part in found if part.strip()]
