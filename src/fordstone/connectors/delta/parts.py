"""Parts of epochs for a Delta table: Parquet files that tasks write, and the sink commits.

A part is below `_fordstone/<digest of the app>/` in the table's directory, where neither readers nor vacuum look, until the sink moves it
to the other data files and names it in a commit (`sink`). Needs Polars only, so tasks need no `deltalake`.

Invariants: each file has a name of its own, so no try overwrites the part of another; digests of parts add up to the digest of the
epoch; minima and maxima are given only where they are exact or wider than the values.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from fordstone.connectors.base import Part, PartWriter, SinkStream
from fordstone.connectors.delta.kind import DeltaSettings
from fordstone.connectors.files.rows import encoded
from fordstone.connectors.files.sink import Staging, part_name
from fordstone.connectors.released_rows import ID, appended_rows, digest_of
from fordstone.errors import SinkError
from fordstone.lang.python_times import beyond_python
from fordstone.storage.disk import OsDisk

STATS_COLUMNS_MAX: Final = 32
"""Maximum number of columns with minima and maxima: Delta's own default."""
STATS_TEXT_MAX: Final = 64
"""Maximum length of a text in the minima and maxima; a column with a longer one has none."""
_MILLISECOND: Final = dt.timedelta(milliseconds=1)


class PartNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a commit needs of a part, in `Part.note` as JSON."""

    size_bytes: int
    digest: str
    bits: str
    """As in `CommitMark`, of the rows of this part."""
    stats: str
    """Number of rows, minima, maxima and nulls, as Delta keeps them."""
    ids: bool
    """Whether the rows have a column `__id`."""


def app_of(settings: DeltaSettings, stream: SinkStream) -> str:
    """The name under which the table records the epochs of the stream."""
    return settings.app or "/".join(name for name in (stream.pipeline, stream.node, stream.step) if name)


def local_root(settings: DeltaSettings) -> Path | None:
    """The table's directory; None if it is in a store at a URL."""
    return None if "://" in settings.path else Path(settings.path).expanduser().absolute()


def staging_root(app: str) -> str:
    """Where the parts of an app are staged, below the table's directory."""
    return f"_fordstone/{hashlib.sha256(app.encode()).hexdigest()[:16]}"


def open_delta_parts(settings: DeltaSettings, stream: SinkStream) -> PartWriter | None:
    """Open a writer for a table that its sink has opened, here or on another machine; None if it takes no parts."""
    root = local_root(settings)
    if root is None or stream.upsert_key is not None:
        return None
    if not (root / "_delta_log").exists():
        raise SinkError(
            f"{root} has no _delta_log here, though its sink is open: this machine sees another directory.\n"
            f"Parts are written by several machines. Give a directory that all of them share, by its full path."
        )
    return DeltaPartWriter(settings, stream, root)


class DeltaPartWriter(PartWriter):
    """Writes parts below the directory of their app."""

    def __init__(self, settings: DeltaSettings, stream: SinkStream, root: Path) -> None:
        self._where = f"delta({settings.path!r})"
        self._schema = stream.schema
        self._staging = Staging(OsDisk(root / staging_root(app_of(settings, stream))), where=self._where)

    def write(self, epoch: int, attempt: str, number: int, frame: pl.DataFrame) -> Part:
        """Write one part, whole, or nothing; no rows, no file."""
        name = f"{part_name(attempt, number)}-{secrets.token_hex(6)}.parquet"
        if frame.is_empty():
            return Part(name=name, rows=0)
        rows = appended_rows(frame, self._schema, where=self._where)
        data = encoded(rows, "parquet")
        self._staging.put(epoch, attempt, number, name, data)
        note = PartNote(
            size_bytes=len(data),
            digest=digest_of(rows, self._schema, exact=True),
            bits=digest_of(rows, self._schema),
            stats=msgspec.json.encode(stats_of(rows)).decode(),
            ids=ID in rows.columns,
        )
        return Part(name=name, rows=rows.height, note=msgspec.json.encode(note).decode())


def stats_of(rows: pl.DataFrame) -> dict[str, Any]:
    """What readers need to leave a file out: of floats, decimals and nested values only the number of rows."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name in rows.columns[:STATS_COLUMNS_MAX]:
        column = rows[name]
        if not (column.dtype.is_integer() or column.dtype in (pl.Date, pl.String) or column.dtype == pl.Datetime):
            continue
        nulls[name] = column.null_count()
        bounds = _bounds(column)
        if bounds is not None:
            least[name], most[name] = bounds
    return {"numRecords": rows.height, "minValues": least, "maxValues": most, "nullCount": nulls}


def _bounds(column: pl.Series) -> tuple[Any, Any] | None:
    if beyond_python(column.to_frame()):
        return None
    low: Any = column.min()
    high: Any = column.max()
    if low is None or high is None:
        return None
    if isinstance(low, str):
        return (low, high) if max(len(low), len(high)) <= STATS_TEXT_MAX else None
    if isinstance(low, dt.datetime):
        try:
            return _milliseconds(low), _milliseconds(high if high.microsecond % 1000 == 0 else high + _MILLISECOND)
        except OverflowError:
            return None
    return (low.isoformat(), high.isoformat()) if isinstance(low, dt.date) else (low, high)


def _milliseconds(time: dt.datetime) -> str:
    """A time as Delta's statistics have it: microseconds are cut off."""
    return time.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
