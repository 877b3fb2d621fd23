"""The options of `files(...)`: checked while the pipeline is built, read again where it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, TypedDict, Unpack

import msgspec

from fordstone.connectors.base import ConnectorSpec, checked_spec
from fordstone.connectors.files.bytes import PACKED_SUFFIXES
from fordstone.connectors.files.series import AUTO, NONE, rotated_from
from fordstone.errors import ConfigError
from fordstone.storage.remote import local_path

FileFormat = Literal["jsonl", "csv", "parquet", "arrow"]
TABLES: Final = frozenset({"parquet", "arrow"})
"""Formats with a footer, whose files never grow. The others are text."""
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


def is_data(name: str) -> bool:
    """Whether a file of this name would be read by a pattern for one of our formats."""
    return not name.startswith((".", "_")) and Path(name).suffix.lower() in _ENDINGS


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
    series: str = AUTO
    """Which text files continue one another: "auto" by the numbers in their paths and the times of their rows, "none", or a regular
    expression whose groups name the series."""
    missing: Literal["error", "null"] = "error"
    """What a declared column is that no row at the beginning of the first file has."""
    line_bytes_max: int = LINE_BYTES_MAX
    """Longer lines are rejected."""
    compression: Literal["zstd", "lz4", "none"] = "zstd"
    """Of the Parquet and Arrow files that a sink writes."""
    sync: bool = True
    """Whether rows that a sink emits at once are on the disk before the next step; without, a power cut may lose some."""
    damaged: Literal["error", "set_aside"] = "error"
    """What a sink does with output of its own that is damaged or not its own. Only dead letters are set aside: they stop no pipeline."""

    def __post_init__(self) -> None:
        called = f"files({self.path!r})"
        if not self.path:
            raise ConfigError(f"{called}: give a file, a pattern such as 'in/*.jsonl', or for a sink a directory.")
        if self.delimiter is not None and (len(self.delimiter.encode()) != 1 or self.delimiter in '"\r\n'):
            raise ConfigError(
                f"{called}: delimiter={self.delimiter!r} must be one character other than a quote or a newline."
            )
        if self.series not in {AUTO, NONE}:
            try:
                re.compile(self.series)
            except re.error as error:
                raise ConfigError(
                    f"{called}: series={self.series!r} must be 'auto', 'none' or a regular expression whose groups name the series: "
                    f"{error}."
                ) from error
        if not 1 <= self.line_bytes_max <= LINE_BYTES_MOST:
            raise ConfigError(
                f"{called}: line_bytes_max={self.line_bytes_max} must be between 1 and {LINE_BYTES_MOST}."
            )

    @property
    def is_url(self) -> bool:
        """Whether the files are at a URL, and not on a local disk."""
        return "://" in self.path

    def format_of(self, path: Path) -> FileFormat | None:
        """The format of one file: as given, or by its ending, or that of the file that it was rotated from."""
        plain = path.with_suffix("") if path.suffix in PACKED_SUFFIXES else path
        ending = plain.suffix.lower()
        if ending not in _ENDINGS:
            ending = Path(rotated_from(plain.name) or plain.name).suffix.lower()
        return self.format or _ENDINGS.get(ending)

    def delimiter_of(self, path: Path) -> str:
        return self.delimiter or ("\t" if ".tsv" in path.suffixes else ",")


class FileOptions(TypedDict, total=False):
    """The fields of `FileSettings` beside path and format, as keyword arguments."""

    delimiter: str | None
    header: bool
    time_unit: Literal["s", "ms", "us"]
    missing: Literal["error", "null"]
    series: str
    line_bytes_max: int
    compression: Literal["zstd", "lz4", "none"]
    sync: bool


def files(path: str | Path, format: str | None = None, **options: Unpack[FileOptions]) -> ConnectorSpec:  # noqa: A002 - the word that people look for
    """Files on a local disk, or at a URL that fsspec opens: `s3://bucket/in/*.parquet`.

    As a source, `path` is a file or a pattern (`"in/*.jsonl"`, `"in/**/*.csv"`) and the format follows from each file's
    ending unless `format` says it; as a sink, `path` is a directory and `format` is needed. Formats are `jsonl`, `csv`,
    `parquet` and `arrow`. Options: see `fordstone.connectors.files.settings.FileSettings`.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"files({path!r}): give a path or a URL, as in files('in/*.jsonl').")
    if isinstance(format, str):
        format = _ALIASES.get(format.lower(), format.lower())  # noqa: A001 - as above
    local = local_path(str(path))
    return checked_spec(
        "files", {"path": str(path) if local is None else local, "format": format, **options}, FileSettings
    )


def dead_letter_files(directory: str | Path) -> ConnectorSpec:
    """The directory of a step's dead letters, as a sink."""
    given = {"path": str(directory), "format": "jsonl", "damaged": "set_aside"}
    return checked_spec("files", given, FileSettings)
