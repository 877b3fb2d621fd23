"""The bytes of output files: encoding the rows of one stream, and reading them back with their exact types.

The sink and the writers of parts, in any process, encode here, so that equal rows give equal bytes. `rows` and `latest` read a
sink's whole directory back.

Text formats: times are ISO-8601 in UTC, binary is base64. JSON has no NaN and no infinity: they are written as the texts "NaN",
"Infinity" and "-Infinity", as Spark writes them. CSV writes null as nothing and the empty text as `""`.
"""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import polars as pl
from polars.datatypes import DataTypeClass

from fordstone.connectors.base import SinkStream
from fordstone.connectors.files.bytes import HeldBytes
from fordstone.connectors.files.cells import check_flat, json_types
from fordstone.connectors.files.formats import CsvRows, JsonLines
from fordstone.connectors.files.lines import LineReader
from fordstone.connectors.files.settings import LINE_BYTES_MOST, FileFormat, FileSettings
from fordstone.errors import ConfigError, SchemaError, SinkError, SourceError
from fordstone.lang.python_times import fits_python, python_bounds
from fordstone.lang.schema import RESERVED_PREFIX, DataType, Schema
from fordstone.storage.remote import FsspecRemote, local_path, open_filesystem

OP: Final = "__op"
EPOCH: Final = "__epoch"
UPSERT: Final = "upsert"
DELETE: Final = "delete"
EPOCH_PREFIX: Final = "epoch-"
PART_PREFIX: Final = "part-"
ROWS_PREFIX: Final = "rows-"
MARK_NAME: Final = "_stream.json"
MARK_VERSION: Final = 1


class StreamMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a directory of output files holds, so that it can be read back. Written once, by the process that makes the directory."""

    version: int = MARK_VERSION
    step: str
    format: FileFormat
    columns: dict[str, str]
    upsert_key: tuple[str, ...] | None = None
    delimiter: Annotated[str, msgspec.Meta(min_length=1, max_length=1)] = ","

    @property
    def schema(self) -> Schema:
        return Schema(tuple((name, DataType.parse(kind)) for name, kind in self.columns.items()))

    def to_json(self) -> bytes:
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(where, str(error)) from error
    if mark.version > MARK_VERSION:
        raise SinkError(
            f"{where}/{MARK_NAME} has version {mark.version}; this release reads up to {MARK_VERSION}. Use a newer release."
        )
    try:
        schema = mark.schema
    except SchemaError as error:
        raise _unreadable(where, str(error).removesuffix(".")) from error
    unknown = [name for name in mark.upsert_key or () if name not in schema]
    if unknown:
        raise _unreadable(where, f"it has no column {unknown[0]!r}, which its key names")
    return mark


def _unreadable(where: str, problem: str) -> SinkError:
    return SinkError(f"{where}/{MARK_NAME} cannot be read: {problem}. Restore it, or move the directory away.")


Compression = Literal["zstd", "lz4", "none"]
_TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%S%.6fZ"


def encoded(
    frame: pl.DataFrame,
    file_format: FileFormat,
    *,
    header: bool = True,
    delimiter: str = ",",
    compression: Compression = "zstd",
) -> bytes:
    """The file's bytes. `header` counts for CSV only."""
    target = io.BytesIO()
    if file_format == "jsonl":
        return _json_lines(_plain(frame))
    if file_format == "csv":
        _plain(frame).write_csv(target, include_header=header, separator=delimiter, datetime_format=_TIME_FORMAT)
    elif file_format == "parquet":
        frame.write_parquet(target, compression="uncompressed" if compression == "none" else compression)
    else:
        frame.write_ipc(target, compression="uncompressed" if compression == "none" else compression)
    return target.getvalue()


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns that a text format can hold: bytes as base64, and null for times before the year 1 or after 9999, which no reader takes."""
    changed = [pl.col(name).bin.encode("base64") for name, kind in frame.schema.items() if kind == pl.Binary]
    changed += [
        _leaves(pl.col(one.name), one.dtype, _writable_time).alias(one.name) for one in frame if not fits_python(one)
    ]
    return frame.with_columns(changed) if changed else frame


def _writable_time(value: pl.Expr, kind: _Kind) -> pl.Expr | None:
    if not isinstance(kind, pl.Date | pl.Datetime):
        return None
    return pl.when(value.cast(pl.Int64).is_between(*python_bounds(kind))).then(value)


_WORDS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MARK_TRIES_MAX: Final = 100
_Kind = pl.DataType | DataTypeClass
_Marks = dict[_Kind, dict[str, float]]
"""By the type of a column: the number that holds the place of each word until the rows are text."""


def _json_lines(frame: pl.DataFrame) -> bytes:
    """Rows as JSON lines. Polars writes null for NaN and infinities: numbers that occur nowhere else hold their places."""
    plain = _ndjson(frame)
    if not any(_has_words(column) for column in frame.iter_columns()):
        return plain
    marks: _Marks = {kind: {} for kind in (pl.Float64(), pl.Float32())}
    texts: dict[bytes, str] = {}
    for kind, mine in marks.items():
        for word in _WORDS:
            number, text = _unused_number(kind, plain, texts)
            mine[word] = number
            texts[text] = word
    marked = partial(_marked, marks=marks)
    written = _ndjson(
        frame.select(_leaves(pl.col(name), kind, marked).alias(name) for name, kind in frame.schema.items())
    )
    for text, word in texts.items():
        written = written.replace(text, b'"%b"' % word.encode())
    return written


def _ndjson(frame: pl.DataFrame) -> bytes:
    target = io.BytesIO()
    frame.write_ndjson(target)
    return target.getvalue()


def _has_words(values: pl.Series) -> bool:
    """Whether a column holds NaN or an infinity, also inside of its values."""
    kind = values.dtype
    if kind.is_float():
        return not values.is_finite().all()
    if isinstance(kind, pl.List):
        return _has_float(kind) and _has_words(values.explode())
    if isinstance(kind, pl.Map):
        return _has_float(kind) and _has_words(values.to_frame().select(pl.first().map.values()).to_series())
    return isinstance(kind, pl.Struct) and any(_has_words(values.struct.field(field.name)) for field in kind.fields)


def _has_float(kind: _Kind) -> bool:
    if isinstance(kind, pl.List):
        return _has_float(kind.inner)
    if isinstance(kind, pl.Map):
        return _has_float(kind.value)
    return kind.is_float() or (isinstance(kind, pl.Struct) and any(_has_float(field.dtype) for field in kind.fields))


def _marked(value: pl.Expr, kind: _Kind, marks: _Marks) -> pl.Expr | None:
    """The values with marks in place of NaN and infinities; None: the type has no such values."""
    if kind not in marks:
        return None
    numbers = {word: pl.lit(number, dtype=kind) for word, number in marks[kind].items()}
    made = pl.when(value.is_nan()).then(numbers["NaN"]).when(value == math.inf).then(numbers["Infinity"])
    return made.when(value == -math.inf).then(numbers["-Infinity"]).otherwise(value)


def _leaves(value: pl.Expr, kind: _Kind, change: Callable[[pl.Expr, _Kind], pl.Expr | None]) -> pl.Expr:
    """The values with others in place of those that are no lists, maps or structs, also inside of these. Keys of maps stay."""
    if isinstance(kind, pl.List):
        return value.list.eval(_leaves(pl.element(), kind.inner, change))
    if isinstance(kind, pl.Map):
        entry = pl.element().struct
        pair = pl.struct(entry.field("key"), _leaves(entry.field("value"), kind.value, change))
        return value.map.entries().list.eval(pair).list.to_map()
    if isinstance(kind, pl.Struct):
        fields = [_leaves(value.struct.field(one.name), one.dtype, change).alias(one.name) for one in kind.fields]
        return pl.when(value.is_not_null()).then(pl.struct(fields))
    changed = change(value, kind)
    return value if changed is None else changed


def _unused_number(kind: _Kind, plain: bytes, used: Collection[bytes]) -> tuple[float, bytes]:
    """A number of the type, and its text, which does not occur in these rows."""
    bits, exponent = (52, -900) if kind == pl.Float64 else (23, -100)
    for _ in range(_MARK_TRIES_MAX):
        number = (1 + secrets.randbelow(1 << bits) / (1 << bits)) * 2.0**exponent
        text = (
            _ndjson(pl.DataFrame({"x": pl.Series([number], dtype=kind)}))
            .strip()
            .removeprefix(b'{"x":')
            .removesuffix(b"}")
        )
        if text not in plain and not any(text in other or other in text for other in used):
            return number, text
    raise SinkError(f"no number was found that these rows do not have; {_MARK_TRIES_MAX} were tried.")


_ROWS_AT_ONCE: Final = 1 << 17
_Read = Callable[[str], bytes]


def file_rows(data: bytes, mark: StreamMark, *, where: str, torn: bool = False) -> pl.DataFrame:
    """The rows of one file's bytes. `torn`: a last line without its newline was never finished, and is left out.

    Raises `SinkError` if they are not what a sink writes.
    """
    try:
        if mark.format == "parquet":
            return pl.read_parquet(io.BytesIO(data))
        if mark.format == "arrow":
            return pl.read_ipc(io.BytesIO(data))
        return _text_rows(data, mark, where=where, torn=torn)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, SourceError) as error:
        raise SinkError(f"{where} is damaged: {str(error).partition(chr(10))[0]}.") from error


def _text_rows(data: bytes, mark: StreamMark, *, where: str, torn: bool) -> pl.DataFrame:
    schema = _with_own_columns(data, mark, where=where)
    line_format: JsonLines | CsvRows = JsonLines(schema, time_unit="us")
    if mark.format == "csv":
        line_format = CsvRows(Path(where), schema, delimiter=mark.delimiter, header=True, time_unit="us")
    if torn:
        ends = line_format.ends(data)
        data = data[: ends[-1] + 1] if ends.size else b""
    reader = LineReader(
        HeldBytes(data), line_format, schema, 0, bounded=True, with_positions=False, line_bytes_max=LINE_BYTES_MOST
    )
    frames = [schema.empty()]
    while (chunk := reader.read(_ROWS_AT_ONCE)) is not None:
        if chunk.rejected:
            raise SinkError(f"{where} is damaged at byte {chunk.rejected[0].position}: {chunk.rejected[0].reason}.")
        frames.append(chunk.frame)
        if chunk.ended:
            break
    return pl.concat(frames)


def _with_own_columns(data: bytes, mark: StreamMark, *, where: str) -> Schema:
    """The declared columns, and those of ours that the first line names."""
    first = data.partition(b"\n")[0]
    try:
        if mark.format == "jsonl":
            names = list(msgspec.json.decode(first, type=dict[str, msgspec.Raw])) if first else []
        else:
            names = first.decode().strip().split(mark.delimiter)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SinkError(f"{where} is damaged in its first line: {error}.") from error
    own = [name for name in names if name.startswith(RESERVED_PREFIX) and name not in mark.columns]
    return Schema(
        mark.schema.columns + tuple((name, DataType("bigint" if name == EPOCH else "string")) for name in own)
    )


class SinkRows:
    """Turns rows of a stream into a file's bytes and back. Made once an opening; refuses what the format cannot hold."""

    def __init__(self, settings: FileSettings, stream: SinkStream) -> None:
        self.format = _format(settings, stream)
        self.mark = StreamMark(
            step=stream.step,
            format=self.format,
            columns=stream.schema.to_dict(),
            upsert_key=stream.upsert_key,
            delimiter=settings.delimiter or ",",
        )
        self._where = settings.path
        self._stream = stream
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
        return encoded(frame, self.format, header=header, delimiter=self.mark.delimiter, compression=self._compression)

    def decoded(self, files: Iterable[tuple[str, bytes]]) -> pl.DataFrame:
        """The rows of whole files, given by name and bytes, in the order of the files."""
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
        check_flat(stream.schema, where=f"sink {stream.step}", instead="Write it as text with to_json(...).")
        if len(stream.schema) == 1:
            raise SinkError(
                f"sink {stream.step}: CSV of one column cannot tell null from a blank line. Use jsonl, parquet or arrow."
            )
    unknown = [name for name in stream.upsert_key or () if name not in stream.schema]
    if unknown:
        raise SinkError(f"sink {stream.step}: the key column {unknown[0]!r} is not among {', '.join(stream.schema)}.")
    return settings.format


def rows(path: str | Path) -> pl.DataFrame:
    """All rows in a sink's directory: those of epochs in their order, then those that were emitted at once.

    Of a changelog these are the changes, with `__op` and `__epoch`.
    """
    return rows_of(*_directory(path), where=str(path))


def latest(path: str | Path) -> pl.DataFrame:
    """The latest row of each key in a changelog's directory, less the keys that were deleted."""
    return latest_of(*_directory(path), where=str(path))


def rows_of(names: Collection[str], read: _Read, *, where: str) -> pl.DataFrame:
    """As `rows`, of a directory with files of these names, wherever it lies; parts are `<epoch>/<part>`."""
    return _stored(names, read, where)[1]


def latest_of(names: Collection[str], read: _Read, *, where: str) -> pl.DataFrame:
    """As `latest`, of a directory with these names, wherever it lies."""
    mark, changes = _stored(names, read, where)
    if mark.upsert_key is None:
        raise SinkError(f"{where} is no changelog: {mark.step} only appends rows. Read it with rows(...).")
    return latest_rows(changes, mark.upsert_key)


def latest_rows(changes: pl.DataFrame, key: Sequence[str]) -> pl.DataFrame:
    """The latest row of each key of a changelog, less the keys that were deleted."""
    if OP not in changes.columns:
        return changes
    # Without a key there is one row, the last.
    last = changes.unique(subset=list(key), keep="last", maintain_order=True) if key else changes.tail(1)
    return last.filter(pl.col(OP) != DELETE).drop(OP, EPOCH, strict=False)


def _directory(place: str | Path) -> tuple[list[str], _Read]:
    local = local_path(str(place))
    if local is None:
        remote = FsspecRemote(*open_filesystem(str(place), kind="files"))
        return list(remote.walk(deep=True)), remote.get
    path = Path(local)
    try:
        found = [*path.iterdir(), *path.glob(f"{EPOCH_PREFIX}*/{PART_PREFIX}*")]
    except OSError as error:
        raise SinkError(f"{path} cannot be read: {error.strerror}.") from error
    return [str(file.relative_to(path)) for file in found], lambda name: (path / name).read_bytes()


def _stored(names: Collection[str], read: _Read, where: str) -> tuple[StreamMark, pl.DataFrame]:
    if MARK_NAME not in names:
        raise SinkError(f"{where} is not the directory of a file sink: it has no {MARK_NAME}.")
    mark = read_mark(read(MARK_NAME), where=where)
    frames = [mark.schema.empty()]
    for prefix in (EPOCH_PREFIX, ROWS_PREFIX):
        chosen = sorted(name for name in names if name.startswith(prefix) and name.endswith(f".{mark.format}"))
        frames += [file_rows(read(name), mark, where=f"{where}/{name}", torn=prefix == ROWS_PREFIX) for name in chosen]
    return mark, pl.concat(frames, how="diagonal")
