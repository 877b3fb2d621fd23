"""State backends by name: where the state of a step is kept while it runs. Checkpoints are the same with each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import polars as pl

from fordstone.plan.plan import StateKind
from fordstone.state.base import Buffer, SearchBuffer, StateBackend, Table, Timeline
from fordstone.state.file import rows_on_disk
from fordstone.state.memory import IN_MEMORY, MemoryBackend
from fordstone.state.rocksdb import RocksCache, RocksTable, check_installed
from fordstone.state.timeline import MemoryBuffer, MemorySearchBuffer, MemoryTimeline
from fordstone.state.working import WorkingFiles


class FileBackend(MemoryBackend):
    """Rows that wait for time are in files; tables are in memory."""

    def __init__(self, files: WorkingFiles, *, cache_bytes: int) -> None:
        """`cache_bytes`: of what was read last, for all states together."""
        self._files = files
        self._on_disk = rows_on_disk(files, cache_bytes=cache_bytes)

    def timeline(
        self, key: Sequence[str], *, time_column: str | None, merge_rows: Callable[[pl.DataFrame], pl.DataFrame]
    ) -> Timeline:
        return MemoryTimeline(key, time_column=time_column, merge_rows=merge_rows, on_disk=self._on_disk)

    def buffer(self, key: Sequence[str], *, time_column: str) -> Buffer:
        return MemoryBuffer(key, time_column=time_column, on_disk=self._on_disk)

    def search_buffer(self, key: Sequence[str], *, time_column: str) -> SearchBuffer:
        return MemorySearchBuffer(key, time_column=time_column, on_disk=self._on_disk)


class RocksBackend(FileBackend):
    """Tables are in RocksDB, and rows that wait for time in files."""

    def __init__(self, files: WorkingFiles, *, cache_bytes: int) -> None:
        super().__init__(files, cache_bytes=cache_bytes // 2)
        self._cache = RocksCache(cache_bytes)

    def table(self, key: Sequence[str], *, schema: Mapping[str, pl.DataType], sub_key: Sequence[str] = ()) -> Table:
        return RocksTable(key, schema=schema, sub_key=sub_key, files=self._files, cache=self._cache)


CACHE_SHARE: Final = 8
"""The caches have one in this many of the bytes that state may have in memory,"""
CACHE_BYTES_MIN: Final = 16 * 1024 * 1024
CACHE_BYTES_MAX: Final = 256 * 1024 * 1024
"""within these bounds: a larger one gains little over the system's own cache of files."""


def state_backends(
    kinds: Iterable[StateKind], files: WorkingFiles, *, state_bytes_max: int
) -> dict[StateKind, StateBackend]:
    """Make the backends of these kinds. Raises `NotInstalledError` if a package is missing."""
    cache_bytes = min(max(state_bytes_max // CACHE_SHARE, CACHE_BYTES_MIN), CACHE_BYTES_MAX)
    found: dict[StateKind, StateBackend] = {}
    for kind in set(kinds):
        if kind == "memory":
            found[kind] = IN_MEMORY
        elif kind == "file":
            found[kind] = FileBackend(files, cache_bytes=cache_bytes)
        else:
            check_installed()
            found[kind] = RocksBackend(files, cache_bytes=cache_bytes)
    return found
