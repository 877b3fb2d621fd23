"""Reading back what a file sink wrote: its rows, or of a changelog the latest row of each key."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from fordstone.connectors.file_rows import file_rows
from fordstone.connectors.stream_mark import (
    DELETE,
    EPOCH,
    EPOCH_PREFIX,
    MARK_NAME,
    OP,
    ROWS_PREFIX,
    StreamMark,
    read_mark,
)
from fordstone.errors import SinkError


def rows(path: str | Path) -> pl.DataFrame:
    """All rows in a sink's directory: those of epochs in their order, then those that were let out at once.

    Of a changelog these are the changes, with `__op` and `__epoch`.
    """
    directory = Path(path)
    return _rows(directory, _mark(directory))


def latest(path: str | Path) -> pl.DataFrame:
    """The latest row of each key in a changelog's directory, less the keys that were deleted."""
    directory = Path(path)
    mark = _mark(directory)
    if mark.upsert_key is None:
        raise SinkError(f"{directory} is no changelog: {mark.step} only appends rows. Read it with rows(...).")
    changes = _rows(directory, mark)
    if OP not in changes.columns:
        return changes
    last = changes.unique(subset=list(mark.upsert_key), keep="last", maintain_order=True)
    return last.filter(pl.col(OP) != DELETE).drop(OP, EPOCH)


def _mark(directory: Path) -> StreamMark:
    try:
        return read_mark((directory / MARK_NAME).read_bytes(), where=str(directory))
    except OSError as error:
        raise SinkError(f"{directory} is not the directory of a file sink: it has no {MARK_NAME}.") from error


def _rows(directory: Path, mark: StreamMark) -> pl.DataFrame:
    frames = [mark.schema.empty()]
    for prefix in (EPOCH_PREFIX, ROWS_PREFIX):
        for file in sorted(directory.glob(f"{prefix}*.{mark.format}")):
            frames.append(file_rows(file.read_bytes(), mark, where=str(file), torn=prefix == ROWS_PREFIX))
    return pl.concat(frames, how="diagonal") if len(frames) > 1 else frames[0]
