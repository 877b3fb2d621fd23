"""How the rows of one stream stand in output files: which columns, in which format.

The sink and the writers of parts, in whatever process, make their bytes here, so that they make the same ones. Where the
bytes go is left to them.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from fordstone.connectors.cells import check_flat, json_types
from fordstone.connectors.connector import SinkStream
from fordstone.connectors.encoding import encoded
from fordstone.connectors.file_rows import file_rows
from fordstone.connectors.file_settings import FileFormat, FileSettings
from fordstone.connectors.stream_mark import EPOCH, OP, UPSERT, StreamMark, read_mark
from fordstone.errors import ConfigError, SinkError
from fordstone.model.schema import RESERVED_PREFIX


class SinkRows:
    """Turns rows of a stream into a file's bytes and back. Made once an opening; refuses what the format cannot hold."""

    def __init__(self, settings: FileSettings, stream: SinkStream) -> None:
        self.format = _format(settings, stream)
        self.mark = StreamMark.of(settings, stream, self.format)
        self._where = settings.path
        self._stream = stream
        self._delimiter = settings.delimiter or ","
        self._compression = settings.compression

    def columns(self, frame: pl.DataFrame, epoch: int | None) -> pl.DataFrame:
        """The declared columns with their types, then those that begin with `__`."""
        schema = self._stream.schema
        missing = [name for name in schema if name not in frame.columns]
        if missing:
            raise SinkError(
                f"{self._where}: rows come without column {missing[0]!r}; they have {', '.join(frame.columns)}."
            )
        own = [name for name in frame.columns if name.startswith(RESERVED_PREFIX) and name not in {OP, EPOCH}]
        columns = [pl.col(name).cast(kind.polars) for name, kind in schema.items()] + [pl.col(name) for name in own]
        if self._stream.upsert_key is not None:
            columns.append(pl.col(OP).cast(pl.String) if OP in frame.columns else pl.lit(UPSERT).alias(OP))
            columns.append(pl.lit(epoch, dtype=pl.Int64).alias(EPOCH))
        return frame.select(columns)

    def encoded(self, frame: pl.DataFrame, *, header: bool = True) -> bytes:
        """The bytes of what `columns` gave."""
        return encoded(frame, self.format, header=header, delimiter=self._delimiter, compression=self._compression)

    def decoded(self, files: Iterable[tuple[str, bytes]]) -> pl.DataFrame:
        """The rows of whole files, given by name and bytes, one file behind the other."""
        frames = [file_rows(data, self.mark, where=f"{self._where}/{name}") for name, data in files]
        return pl.concat(frames, how="diagonal") if frames else self._stream.schema.empty()

    def check_mark(self, found: bytes) -> None:
        """Raise `SinkError` if a directory's mark is that of another stream."""
        difference = read_mark(found, where=self._where).disagreement(self.mark)
        if difference:
            raise SinkError(
                f"{self._where} holds the output of another stream: {self.mark.step} writes {difference}.\n"
                f"Choose another directory, or move this one away."
            )


def _format(settings: FileSettings, stream: SinkStream) -> FileFormat:
    if settings.format is None:
        raise ConfigError(
            f"sink {stream.step}: files({settings.path!r}) needs format='jsonl', 'csv', 'parquet' or 'arrow'."
        )
    if any(mark in settings.path for mark in "*?["):
        raise ConfigError(f"sink {stream.step}: files({settings.path!r}) is a pattern; a sink needs a directory.")
    if settings.format == "jsonl":
        json_types(stream.schema)
    if settings.format == "csv":
        check_flat(stream.schema, where=f"sink {stream.step}")
        if len(stream.schema) == 1:
            raise SinkError(
                f"sink {stream.step}: CSV of one column cannot tell null from a blank line. Use jsonl, parquet or arrow."
            )
    unknown = [name for name in stream.upsert_key or () if name not in stream.schema]
    if unknown:
        raise SinkError(f"sink {stream.step}: the key column {unknown[0]!r} is not among {', '.join(stream.schema)}.")
    return settings.format
