"""The sources and tables of `fordstone sql`: from `--source`, `--table`, `--schema`, `--time`, and from the files themselves.

The columns of files are inferred from a sample of text, or read from the file's own schema. What was inferred is printed. Rows that
do not fit are rejected and counted, as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fordstone.cli import format as fmt
from fordstone.cli.errors import UsageError
from fordstone.connectors import files
from fordstone.connectors.base import SourceOptions, options_of
from fordstone.connectors.files.columns import Inferred, infer
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.files.source import FileSource
from fordstone.errors import SchemaError
from fordstone.lang.schema import DataType, Schema
from fordstone.plan.stream_type import TIMESTAMP

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline
    from fordstone.plan.plan import ConnectorSpec


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
    # Only some files were sampled, so a column may be missing in the others.
    spec = files(pattern, **{"time_unit": found.time_unit or "us", **file_options, "missing": "null"})
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
