"""The sources of `fordstone sql`: what `--source`, `--schema`, `--time` and the files themselves say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fordstone.cli import wording
from fordstone.cli.mistakes import Misuse

if TYPE_CHECKING:
    from pathlib import Path

    from fordstone.api.pipeline import Pipeline

EXAMPLE: Final = "--source readings='in/*.jsonl'"
_OPEN: Final = "<("
_CLOSED: Final = ">)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptionsGiven:
    """What the command was given."""

    sources: Sequence[str]
    schemas: Sequence[str]
    times: Sequence[str]
    format: str | None
    delimiter: str | None
    time_unit: str
    lateness: str
    follow: bool


def add_sources(pipeline: Pipeline, given: SourceOptionsGiven) -> list[str]:
    """Declare the sources; gives a line about each, for the person to see what was guessed."""
    patterns = _by_name(given.sources)
    schemas = {name: _columns(text) for name, text in _for_each(given.schemas, patterns, "--schema").items()}
    times = _for_each(given.times, patterns, "--time")
    return [
        _add(pipeline, name, pattern, schemas.get(name, {}), times.get(name), given)
        for name, pattern in patterns.items()
    ]


def _add(
    pipeline: Pipeline,
    name: str,
    pattern: str,
    declared: dict[str, str],
    time: str | None,
    given: SourceOptionsGiven,
) -> str:
    from fordstone.cli.sql_schema import Inferred, infer
    from fordstone.connectors import files
    from fordstone.connectors.connector import SourceOptions
    from fordstone.connectors.file_settings import file_settings
    from fordstone.connectors.files import FileSource
    from fordstone.model.schema import Schema

    spec = files(pattern, given.format, delimiter=given.delimiter, time_unit=given.time_unit)
    settings = file_settings(spec)
    source = FileSource(settings, SourceOptions(schema=Schema(()), bounded=not given.follow))
    paths: list[Path] = [source.path_of(partition) for partition in source.partitions()]
    if not paths and not declared:
        raise Misuse(
            f"no file matches {pattern!r} yet, so its columns cannot be found out. Say them: --schema "
            f"'{name}=device string, ts timestamp, temp double'."
        )
    found = infer(paths, settings) if paths else Inferred(columns={}, left_out={})
    columns = {column: declared.get(column, kind) for column, kind in found.columns.items()}
    columns |= {column: kind for column, kind in declared.items() if column not in columns}
    if not columns:
        raise Misuse(
            f"no columns were found in {paths[0]}. Is it empty? Say them: --schema '{name}=device string, temp double'."
        )
    moments = [column for column, kind in columns.items() if Schema.of({column: kind})[column].name == "timestamp"]
    if time is None and len(moments) == 1:
        time = moments[0]
    pipeline.source(name, spec, schema=columns, time=time, lateness=given.lateness)
    left_out = {column: why for column, why in found.left_out.items() if column not in declared}
    return _told(name, paths, columns, time, moments, left_out)


def _told(
    name: str,
    paths: Sequence[Path],
    columns: dict[str, str],
    time: str | None,
    moments: Sequence[str],
    left_out: dict[str, str],
) -> str:
    listed = ", ".join(
        f"{column} {kind}{' (event time)' if column == time else ''}" for column, kind in columns.items()
    )
    line = f"{name}: {wording.count(len(paths), 'file')}: {listed}"
    if time is None and len(moments) > 1:
        line += f"\n  Several columns are times; say which is the event time: --time {moments[0]}"
    for column, why in left_out.items():
        line += f"\n  {column!r} is left out: it {why}."
    return line


def _by_name(sources: Sequence[str]) -> dict[str, str]:
    if not sources:
        raise Misuse(f"no source was given. Say which files a name in FROM means: {EXAMPLE}")
    found: dict[str, str] = {}
    for text in sources:
        name, equals, pattern = text.partition("=")
        if not equals or not name.strip() or not pattern.strip():
            raise Misuse(f"--source {text!r}: write NAME=PATTERN, as in {EXAMPLE}")
        if name.strip() in found:
            raise Misuse(f"--source {name.strip()} is given twice. One pattern may match many files: 'in/**/*.jsonl'.")
        found[name.strip()] = pattern.strip()
    return found


def _for_each(texts: Sequence[str], patterns: dict[str, str], option: str) -> dict[str, str]:
    """NAME=VALUE for one source, or VALUE for the only one."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.strip() in patterns:
            found[name.strip()] = value.strip()
        elif equals:
            raise Misuse(f"{option} {text!r}: there is no source {name.strip()!r}. There are: {', '.join(patterns)}.")
        elif len(patterns) == 1:
            found[next(iter(patterns))] = text.strip()
        elif option == "--time":
            found |= {name: text.strip() for name in patterns if name not in found}
        else:
            raise Misuse(
                f"{option} {text!r}: there are several sources, so say whose: {option} '{next(iter(patterns))}={text}'."
            )
    return found


def _columns(text: str) -> dict[str, str]:
    """Columns as they are written: `device string, price decimal(10,2)`; names with blanks stand in backticks."""
    from fordstone.errors import SchemaError
    from fordstone.model.schema import DataType

    found: dict[str, str] = {}
    for part in _parts(text):
        if part.startswith("`") and "`" in part[1:]:
            name, _, kind = part[1:].partition("`")
        else:
            name, _, kind = part.partition(" ")
        if not name or not kind.strip():
            raise Misuse(
                f"--schema: {part!r} is not a column with its type. Write for instance: device string, temp double"
            )
        try:
            DataType.parse(kind)
        except SchemaError as error:
            raise Misuse(f"--schema: column {name}: {error}") from error
        found[name] = kind.strip()
    return found


def _parts(text: str) -> list[str]:
    """What commas separate, outside of brackets and backticks."""
    found, depth, quoted = [""], 0, False
    for char in text:
        quoted ^= char == "`"
        depth += (char in _OPEN) - (char in _CLOSED) if not quoted else 0
        if char == "," and not depth and not quoted:
            found.append("")
        else:
            found[-1] += char
    return [part.strip() for part in found if part.strip()]
