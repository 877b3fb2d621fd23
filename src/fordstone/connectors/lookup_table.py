"""The tables of lookups: read whole through a connector, or stored in the plan itself (the kind `inline`, for small ones).

A few tables are cached for the life of the process, because on Spark every task of every micro-batch makes new operators. They are keyed
by their settings, and by the sizes and times of their files; tables of other systems by the start of the engine, so that all
subtasks of a process look rows up in the same rows.

Values of `inline` are plain JSON: times and dates as ISO-8601 text, decimals as text, binary as base64, and numbers that JSON lacks
(NaN, infinities) as text too. Reads as bounded input does, from one partition.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

import msgspec
import polars as pl

from fordstone.connectors.base import (
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Source,
    SourceOptions,
    live_of,
)
from fordstone.connectors.files.source import FileSource
from fordstone.connectors.memory import MemoryKind, memory
from fordstone.connectors.registry import open_source
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import DataType, Schema
from fordstone.plan.ids import Position

INLINE: Final = "inline"
BYTES_MAX: Final = 1 << 20
"""A plan is stored, sent and compared whole: larger tables belong in files."""


_VALUES: Final = {"binary": bytes, "decimal": Decimal, "date": date, "timestamp": datetime}
"""The types whose values JSON holds as text."""


class InlineKind(ConnectorKind):
    """The kind `inline`."""

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        return MemoryKind().open_source(memory([_decoded(spec, options.schema)]), options, context)


def inline_spec(frame: pl.DataFrame) -> ConnectorSpec:
    """Rows as a connector. Raises `ConfigError` for more than a plan should hold."""
    columns = {name: [_plain(value) for value in frame.get_column(name).to_list()] for name in frame.columns}
    size = len(msgspec.json.encode(columns))
    if size > BYTES_MAX:
        raise ConfigError(
            f"{frame.height:,} rows of {size:,} bytes are too many to stand in a plan, which holds {BYTES_MAX:,} bytes at most. "
            'Write them to a file and give that: files("table.parquet").'
        )
    return ConnectorSpec(kind=INLINE, options={"columns": columns})


def _decoded(spec: ConnectorSpec, schema: Schema) -> pl.DataFrame:
    given = spec.options.get("columns")
    if not isinstance(given, Mapping) or not all(name in given for name in schema):
        raise ConfigError(f"connector {INLINE!r}: options has no column lists for {', '.join(schema)}.")
    columns: dict[str, Sequence[Any]] = {
        name: [_valued(value, kind) for value in given[name]] for name, kind in schema.items()
    }
    return pl.DataFrame(columns, schema=schema.polars)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else msgspec.to_builtins(value)


def _valued(value: Any, kind: DataType) -> Any:
    if value is None:
        return None
    if kind.element is not None:
        return [_valued(one, kind.element) for one in value]
    if kind.name == "map":
        key = kind.field("key")
        typed = int if key.is_integer else bool if key.name == "boolean" else _VALUES.get(key.name, str)
        # In JSON, names are text.
        return {
            msgspec.convert(name, typed, strict=False): _valued(one, kind.field("value")) for name, one in value.items()
        }
    if kind.name == "struct":
        return {name: _valued(value.get(name), inner) for name, inner in kind.fields}
    return float(value) if kind.is_float else msgspec.convert(value, _VALUES.get(kind.name, Any))


TABLES_KEPT: Final = 8
_READ_ROWS: Final = 1 << 16

_READING: Final = threading.Lock()
"""Held while a table of another system is read, so that it is read once."""

Stamp = tuple[str, int, int]
"""A file, its size, and when it was last changed."""


def read_table(spec: ConnectorSpec, schema: Schema, *, start: str = "") -> pl.DataFrame:
    """All rows. Raises `SourceError` if some cannot be read: a table with holes would answer wrongly in silence.

    `start`: of the engine; within one the rows of a table of another system are those that were read first. Empty: they are read now.
    """
    if spec.kind == INLINE:
        return _kept(msgspec.json.encode(spec), schema, ())
    source = open_source(spec, SourceOptions(schema=schema, bounded=True))
    with closing(source):
        if isinstance(source, FileSource):
            stats = [(path, path.stat()) for path in map(source.path_of, source.partitions())]
            stamps = tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)
            return _kept(msgspec.json.encode(spec), schema, stamps)
        if not start or live_of(spec) is not None:
            return _read_all(source, schema)
    with _READING:
        return _kept(msgspec.json.encode(spec), schema, ((start, 0, 0),))


@lru_cache(maxsize=TABLES_KEPT)
def _kept(spec: bytes, schema: Schema, stamps: tuple[Stamp, ...]) -> pl.DataFrame:
    del stamps  # only tell whether the rows are still those that were read
    with closing(
        open_source(msgspec.json.decode(spec, type=ConnectorSpec), SourceOptions(schema=schema, bounded=True))
    ) as source:
        return _read_all(source, schema)


def _read_all(source: Source, schema: Schema) -> pl.DataFrame:
    frames = [schema.empty()]
    for partition in source.partitions():
        reader = source.open(partition, Position(0), with_positions=False)
        try:
            while (chunk := reader.read(_READ_ROWS)) is not None:
                if chunk.rejected:
                    bad = chunk.rejected[0]
                    raise SourceError(
                        f"{partition} at {bad.position}: {bad.reason}: {bad.text[:200]}\n"
                        "A table must be whole: correct that row, or leave it out."
                    )
                frames.append(chunk.frame)
                if chunk.ended:
                    break
        finally:
            reader.close()
    return pl.concat(frames, rechunk=True)
