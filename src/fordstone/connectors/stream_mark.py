"""`_stream.json`: what a directory of output files holds, so that it can be read back and is never mixed up."""

from __future__ import annotations

from typing import Final

import msgspec

from fordstone.connectors.connector import SinkStream
from fordstone.connectors.file_settings import FileFormat, FileSettings
from fordstone.errors import SinkError
from fordstone.model.schema import DataType, Schema

OP: Final = "__op"
EPOCH: Final = "__epoch"
UPSERT: Final = "upsert"
DELETE: Final = "delete"
EPOCH_PREFIX: Final = "epoch-"
PART_PREFIX: Final = "part-"
ROWS_PREFIX: Final = "rows-"
TEMPORARY_PREFIX: Final = ".tmp-"
MARK_NAME: Final = "_stream.json"
MARK_VERSION: Final = 1


class StreamMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written once, by whoever makes the directory."""

    version: int = MARK_VERSION
    step: str
    format: FileFormat
    columns: dict[str, str]
    upsert_key: tuple[str, ...] | None = None
    delimiter: str = ","

    @classmethod
    def of(cls, settings: FileSettings, stream: SinkStream, file_format: FileFormat) -> StreamMark:
        """The mark of a stream that goes to files."""
        return cls(
            step=stream.step,
            format=file_format,
            columns=stream.schema.to_dict(),
            upsert_key=stream.upsert_key,
            delimiter=settings.delimiter or ",",
        )

    @property
    def schema(self) -> Schema:
        """The declared columns."""
        return Schema(tuple((name, DataType.parse(kind)) for name, kind in self.columns.items()))

    def to_json(self) -> bytes:
        """The file's bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def disagreement(self, other: StreamMark) -> str | None:
        """Where two marks differ in what counts, in words."""
        for what in ("format", "columns", "upsert_key", "delimiter"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs or (what == "columns" and list(mine) != list(theirs)):
                return f"{what} {theirs!r} instead of {mine!r}"
        return None


def read_mark(data: bytes, *, where: str) -> StreamMark:
    """Read a mark back; raises `SinkError` if that is not what it is."""
    try:
        mark = msgspec.json.decode(data, type=StreamMark)
    except msgspec.DecodeError as error:
        raise SinkError(
            f"{where}/{MARK_NAME} cannot be read: {error}. Restore it, or move the directory away."
        ) from error
    if mark.version > MARK_VERSION:
        raise SinkError(
            f"{where}/{MARK_NAME} has version {mark.version}; this release reads up to {MARK_VERSION}. Use a newer release."
        )
    return mark
