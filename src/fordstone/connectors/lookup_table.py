"""Read a whole table through a connector, for lookups.

Tables in files and in the plan are kept for the life of the process, a few of them, by what they are: their settings, and the
sizes and times of their files. On Spark every task of every micro-batch makes new operators, and asks again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import ConnectorSpec, Source, SourceOptions
from fordstone.connectors.files.source import FileSource
from fordstone.connectors.inline import KIND as INLINE
from fordstone.connectors.registry import open_source
from fordstone.errors import SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position

TABLES_KEPT: Final = 8
_READ_ROWS: Final = 1 << 16

Stamp = tuple[str, int, int]
"""A file, its size, and when it was last changed."""


def read_table(spec: ConnectorSpec, schema: Schema) -> pl.DataFrame:
    """All rows. Raises `SourceError` if some cannot be read: a table with holes would answer wrongly in silence."""
    source = open_source(spec, SourceOptions(schema=schema, bounded=True))
    if isinstance(source, FileSource):
        stats = [(path, path.stat()) for path in map(source.path_of, source.partitions())]
        stamps = tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)
        return _kept(msgspec.json.encode(spec), schema, stamps)
    if spec.kind == INLINE:
        return _kept(msgspec.json.encode(spec), schema, ())
    return _read(source, schema)


@lru_cache(maxsize=TABLES_KEPT)
def _kept(spec: bytes, schema: Schema, stamps: tuple[Stamp, ...]) -> pl.DataFrame:
    del stamps  # only tell whether the files are still those that were read
    return _read(
        open_source(msgspec.json.decode(spec, type=ConnectorSpec), SourceOptions(schema=schema, bounded=True)), schema
    )


def _read(source: Source, schema: Schema) -> pl.DataFrame:
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
