"""The state backend in memory. Durability comes from checkpoints alone: pieces are frozen at barriers and written as runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import polars as pl

from fordstone.state.base import Buffer, KeyIndex, SearchBuffer, StateBackend, Table, Timeline
from fordstone.state.key_index import MemoryKeyIndex
from fordstone.state.table import MemoryTable
from fordstone.state.timeline import MemoryBuffer, MemorySearchBuffer, MemoryTimeline


class MemoryBackend(StateBackend):
    """Makes states that live in the memory of this process."""

    def table(self, key: Sequence[str], *, schema: Mapping[str, pl.DataType], sub_key: Sequence[str] = ()) -> Table:
        return MemoryTable(key, schema=schema, sub_key=sub_key)

    def timeline(
        self, key: Sequence[str], *, time_column: str | None, merge_rows: Callable[[pl.DataFrame], pl.DataFrame]
    ) -> Timeline:
        return MemoryTimeline(key, time_column=time_column, merge_rows=merge_rows)

    def buffer(self, key: Sequence[str], *, time_column: str) -> Buffer:
        return MemoryBuffer(key, time_column=time_column)

    def search_buffer(self, key: Sequence[str], *, time_column: str) -> SearchBuffer:
        return MemorySearchBuffer(key, time_column=time_column)

    def key_index(self, schema: Mapping[str, pl.DataType]) -> KeyIndex:
        return MemoryKeyIndex(schema)


IN_MEMORY: Final = MemoryBackend()
