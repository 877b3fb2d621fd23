"""Reading back what a file sink wrote: its rows, or of a changelog the latest row of each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import polars as pl

from fordstone.connectors.files.rows import file_rows
from fordstone.connectors.files.settings import (
    DELETE,
    EPOCH,
    EPOCH_PREFIX,
    MARK_NAME,
    OP,
    PART_PREFIX,
    ROWS_PREFIX,
    StreamMark,
    read_mark,
)
from fordstone.errors import SinkError


def rows(path: str | Path) -> pl.DataFrame:
    """All rows in a sink's directory: those of epochs in their order, then those that were emitted at once.

    Of a changelog these are the changes, with `__op` and `__epoch`.
    """
    return rows_of(_names(Path(path)), lambda name: (Path(path) / name).read_bytes(), where=str(path))


def latest(path: str | Path) -> pl.DataFrame:
    """The latest row of each key in a changelog's directory, less the keys that were deleted."""
    return latest_of(_names(Path(path)), lambda name: (Path(path) / name).read_bytes(), where=str(path))


def rows_of(names: Iterable[str], read: Callable[[str], bytes], *, where: str) -> pl.DataFrame:
    """As `rows`, of a directory with files of these names, wherever it lies; parts are `<epoch>/<part>`."""
    return _all_rows(names, read, _mark(names, read, where), where)


def latest_of(names: Iterable[str], read: Callable[[str], bytes], *, where: str) -> pl.DataFrame:
    """As `latest`, of a directory with these names, wherever it lies."""
    mark = _mark(names, read, where)
    if mark.upsert_key is None:
        raise SinkError(f"{where} is no changelog: {mark.step} only appends rows. Read it with rows(...).")
    changes = _all_rows(names, read, mark, where)
    if OP not in changes.columns:
        return changes
    # Without a key there is one row, the last.
    key = list(mark.upsert_key)
    last = changes.unique(subset=key, keep="last", maintain_order=True) if key else changes.tail(1)
    return last.filter(pl.col(OP) != DELETE).drop(OP, EPOCH)


def _names(directory: Path) -> list[str]:
    try:
        files = [file.name for file in directory.iterdir()]
        return files + [str(part.relative_to(directory)) for part in directory.glob(f"{EPOCH_PREFIX}*/{PART_PREFIX}*")]
    except OSError as error:
        raise SinkError(f"{directory} cannot be read: {error.strerror}.") from error


def _mark(names: Iterable[str], read: Callable[[str], bytes], where: str) -> StreamMark:
    if MARK_NAME not in names:
        raise SinkError(f"{where} is not the directory of a file sink: it has no {MARK_NAME}.")
    return read_mark(read(MARK_NAME), where=where)


def _all_rows(names: Iterable[str], read: Callable[[str], bytes], mark: StreamMark, where: str) -> pl.DataFrame:
    frames = [mark.schema.empty()]
    for prefix in (EPOCH_PREFIX, ROWS_PREFIX):
        chosen = sorted(name for name in names if name.startswith(prefix) and name.endswith(f".{mark.format}"))
        frames += [file_rows(read(name), mark, where=f"{where}/{name}", torn=prefix == ROWS_PREFIX) for name in chosen]
    return pl.concat(frames, how="diagonal") if len(frames) > 1 else frames[0]
