"""`_stream.json`: what a directory of output files holds, so that it can be read back and is never mixed up.

The options of `files(...)`: checked while the pipeline is built, read again where it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from fordstone.connectors.base import ConnectorSpec, SinkStream
from fordstone.connectors.files.bytes import PACKED_SUFFIXES
from fordstone.errors import ConfigError, SinkError
from fordstone.lang.schema import DataType, Schema

FileFormat = Literal["jsonl", "csv", "parquet", "arrow"]
LINE_BYTES_MAX: Final = 1 << 20
LINE_BYTES_MOST: Final = 1 << 30
_ENDINGS: Final[dict[str, FileFormat]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
}
_ALIASES: Final = {"ndjson": "jsonl", "json": "jsonl", "tsv": "csv", "ipc": "arrow", "feather": "arrow"}


class FileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    path: str
    """For a source a file or a pattern (`in/**/*.jsonl`), for a sink a directory."""
    format: FileFormat | None = None
    """For a source: by each file's ending if left out. A sink needs it."""
    delimiter: str | None = None
    """Of CSV: a comma, or a tab for `.tsv`, if left out."""
    header: bool = True
    """Whether CSV files begin with the names of their columns; else they have the schema's, in order."""
    time_unit: Literal["s", "ms", "us"] = "us"
    """What numbers in timestamp columns of text files count."""
    line_bytes_max: int = LINE_BYTES_MAX
    """Longer lines are rejected."""
    compression: Literal["zstd", "lz4", "none"] = "zstd"
    """Of the Parquet and Arrow files that a sink writes."""
    sync: bool = True
    """Whether rows that a sink emits at once are on the disk before the next step; without, a power cut may lose some."""

    def format_of(self, path: Path) -> FileFormat | None:
        """The format of one file: as given, or by its ending."""
        plain = path.with_suffix("") if path.suffix in PACKED_SUFFIXES else path
        return self.format or _ENDINGS.get(plain.suffix.lower())

    def delimiter_of(self, path: Path) -> str:
        """The delimiter of one CSV file."""
        return self.delimiter or ("\t" if ".tsv" in path.suffixes else ",")


def files_spec(options: dict[str, Any]) -> ConnectorSpec:
    """Check the options and make the spec."""
    kept = {name: value for name, value in options.items() if value is not None}
    if isinstance(kept.get("format"), str):
        kept["format"] = _ALIASES.get(kept["format"].lower(), kept["format"].lower())
    spec = ConnectorSpec(kind="files", options=kept)
    file_settings(spec)
    return spec


def file_settings(spec: ConnectorSpec) -> FileSettings:
    """The options of a spec, checked."""
    try:
        settings = msgspec.convert(spec.options, FileSettings)
    except msgspec.ValidationError as error:
        names = ", ".join(FileSettings.__struct_fields__)
        raise ConfigError(f"files({spec.options.get('path', '')!r}): {error}. Options are: {names}.") from error
    if not settings.path:
        raise ConfigError("files(''): give a file, a pattern such as 'in/*.jsonl', or for a sink a directory.")
    if "://" in settings.path:
        raise ConfigError(
            f"files({settings.path!r}): only local paths can be read and written. Mount or copy it, or use another connector for the system."
        )
    if settings.delimiter is not None and (len(settings.delimiter.encode()) != 1 or settings.delimiter in '"\r\n'):
        raise ConfigError(
            f"files({settings.path!r}): delimiter={settings.delimiter!r} must be one character other than a quote or a newline."
        )
    if not 1 <= settings.line_bytes_max <= LINE_BYTES_MOST:
        raise ConfigError(
            f"files({settings.path!r}): line_bytes_max={settings.line_bytes_max} must be between 1 and {LINE_BYTES_MOST}."
        )
    return settings


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
    """Written once, by the process that makes the directory."""

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
