"""Rows of a piece in a working file: they are read when they are asked for, and not held on to."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import polars as pl

from fordstone.state.base import Piece
from fordstone.state.working import WorkingFiles, refusals


class SpilledPiece(Piece):
    """Rows that wait in a file until they are written as a run."""

    __slots__ = ("__weakref__", "_path")

    def __init__(self, rows: pl.DataFrame, files: WorkingFiles) -> None:
        self._path = files.fresh(self) / "rows.arrow"
        write_rows(rows, self._path)
        super().__init__(make=partial(read_rows, self._path))

    def frame(self) -> pl.DataFrame:
        return self.read()


def write_rows(rows: pl.DataFrame, path: Path) -> None:
    """Write a working file. It is not synced."""
    with refusals("write", path):
        # A clone: writing locks its frame (see `epochs.run_file.encode_run`).
        rows.clone().write_ipc(path, compression="lz4")


def read_rows(path: Path) -> pl.DataFrame:
    """Read a working file."""
    with refusals("read", path):
        return pl.read_ipc(path)
