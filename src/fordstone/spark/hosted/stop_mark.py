"""The mark by which a running query is told to begin no further batch: `fordstone/stop` below its checkpoint location.

Spark can only break a query off. The process that plans its batches, beside the driver or on a Connect server, looks for
the mark before each; when it stands, there is nothing more to do, and the query can be stopped between two batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fsspec


@dataclass(frozen=True, slots=True)
class StopMark:
    """The mark of one query."""

    checkpoint: str

    def put(self) -> None:
        """Begin no further batch."""
        fs, path = self._place()
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, b"")

    def take_away(self) -> None:
        """Go on. Called before a query starts: one that was killed may have left its mark."""
        fs, path = self._place()
        if fs.exists(path):
            fs.rm_file(path)

    def stands(self) -> bool:
        """Whether to stop. Asked once a batch."""
        fs, path = self._place()
        fs.invalidate_cache()
        return bool(fs.exists(path))

    def _place(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(f"{self.checkpoint.rstrip('/')}/fordstone/stop")
        return fs, str(path)
