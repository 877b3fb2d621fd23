"""What a query has given so far, in bounded memory: the last rows, and how many there were.

Results that replace each other (running aggregates) are kept by key, the one thing that grows with the result. Epochs come
from the thread of the writer; whoever shows the result asks from another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.connectors.memory import MemorySink
from fordstone.connectors.stream_mark import DELETE, OP
from fordstone.model.stream_type import TIMESTAMP, StreamType

Taker = Callable[[pl.DataFrame], None]
_MERGED_MIN: Final = 1_000
"""So many changes are kept before they are brought together with the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the rows of a result stand to each other."""

    key: tuple[str, ...] | None = None
    """By which they replace each other; None: they are appended."""
    by: tuple[str, ...] = ()
    """By which the rows of an epoch are sorted. Aggregates come in no order of their own; rows of a file stay as they are."""

    @classmethod
    def of(cls, stream: StreamType) -> Order:
        """Aggregates by time, then by the other columns."""
        if stream.row_wise:
            return cls(key=stream.upsert_key)
        plain = [name for name, kind in stream.schema.items() if kind.element is None]
        times = [name for name in plain if stream.schema[name] == TIMESTAMP]
        return cls(key=stream.upsert_key, by=(*times, *(name for name in plain if name not in times)))


class _Epochs(dict[int, pl.DataFrame]):
    """Hands the rows of each epoch on, and remembers only which epoch was the last."""

    def __init__(self, take: Taker) -> None:
        super().__init__()
        self._take = take

    def __setitem__(self, epoch: int, frame: pl.DataFrame) -> None:
        self._take(frame)
        self.clear()
        super().__setitem__(epoch, frame.clear())


class Result(MemorySink):
    """A sink in memory that keeps the end of the result. `on_rows` is called with rows that are final, as they come."""

    def __init__(self, *, order: Order, rows_kept: int, on_rows: Taker | None = None) -> None:
        super().__init__()
        self.released = _Epochs(self._take)
        self.key = order.key
        self._by = list(order.by)
        self._rows_kept = rows_kept
        self._on_rows = on_rows
        self._lock = threading.Lock()
        self._last: pl.DataFrame | None = None
        self._changes: list[pl.DataFrame] = []
        self._rows = 0

    def count(self) -> int:
        """How many rows the result has."""
        with self._lock:
            if self.key is None:
                return self._rows
            return self._merged().height

    def last(self) -> tuple[pl.DataFrame | None, int]:
        """The last rows, those that changed last at the end, and how many there are in all."""
        with self._lock:
            if self.key is None:
                return self._last, self._rows
            merged = self._merged()
            return merged.tail(self._rows_kept), merged.height

    def everything(self) -> pl.DataFrame:
        """All rows of a result by key."""
        with self._lock:
            return self._merged()

    def _take(self, frame: pl.DataFrame) -> None:
        if frame.is_empty():
            return
        if self._by:
            frame = frame.sort(self._by, maintain_order=True)
        with self._lock:
            if self.key is None:
                self._rows += frame.height
                joined = frame if self._last is None else pl.concat([self._last, frame.tail(self._rows_kept)])
                self._last = joined.tail(self._rows_kept)
            else:
                self._changes.append(frame)
                if sum(one.height for one in self._changes[1:]) > max(_MERGED_MIN, self._changes[0].height):
                    self._merged()
        if self._on_rows is not None:
            self._on_rows(frame)

    def _merged(self) -> pl.DataFrame:
        """The newest row of each key. The caller holds the lock."""
        if not self._changes:
            return pl.DataFrame() if self.stream is None else self.stream.schema.empty()
        if len(self._changes) > 1 or OP in self._changes[0].columns:
            rows = pl.concat([_with_op(one) for one in self._changes])
            rows = rows.unique(subset=list(self.key), keep="last", maintain_order=True) if self.key else rows.tail(1)
            self._changes = [rows.filter(pl.col(OP) != DELETE).drop(OP)]
        return self._changes[0]


def _with_op(frame: pl.DataFrame) -> pl.DataFrame:
    return frame if OP in frame.columns else frame.with_columns(pl.lit("upsert").alias(OP))
