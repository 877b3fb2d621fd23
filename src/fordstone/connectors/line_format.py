"""The seam between reading lines and understanding them: what a text format must tell `LineReader`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.cells import Cells
from fordstone.connectors.file_bytes import FileBytes

Offsets = npt.NDArray[np.int64]
NEWLINE: Final = 10
BOM: Final = b"\xef\xbb\xbf"
PARSER_ERRORS: Final = (pl.exceptions.PolarsError, pl.exceptions.PanicException)


class MalformedError(Exception):
    """At least one record of a block cannot be parsed; a closer look will show which. Never leaves the reader."""


class LineFormat(ABC):
    """Knows one file's records. What it makes of a record may not depend on the records around it."""

    @abstractmethod
    def begin(self, data: FileBytes, limit: int | None, *, complete: bool) -> int | None:
        """Where the first record starts; None if the file does not say yet. Called before each read until it answers.

        `limit` is where the file ends, if it does; `complete`: it will not grow.
        """

    @property
    @abstractmethod
    def ends_at_every_newline(self) -> bool:
        """Whether a newline ends a record wherever it stands, so that one can be found without what lies before it."""

    @abstractmethod
    def ends(self, data: bytes) -> Offsets:
        """Where the records end: the offsets of those newlines that are not part of a value. `data` starts a record."""

    @abstractmethod
    def blank(self, record: bytes) -> bool:
        """Whether to skip this record. One without bytes, or with a carriage return alone, always is."""

    @abstractmethod
    def parse(self, data: bytes, records: int) -> pl.DataFrame:
        """Parse whole records, all at once; one row each. Raises `MalformedError` if any one is not as it should be."""

    @abstractmethod
    def judge(self, record: bytes) -> str | None:
        """Why `parse` would surely refuse this record, if that can be told cheaply; None leaves it to `parse`."""

    @abstractmethod
    def finish(self, frame: pl.DataFrame) -> Cells:
        """Give parsed columns their declared types."""


def newlines(data: bytes) -> Offsets:
    """The offset of every newline."""
    return np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == NEWLINE)
