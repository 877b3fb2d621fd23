"""The seam of state backends: the shapes of state that an operator may ask for, and the factory that makes them.

An operator is handed a `StateBackend` and never names a class of state, so that another backend can hold the same state
elsewhere. Every shape is a `State`: the engine snapshots and restores it through that interface only. `memory` has the
backend that keeps everything in memory; `testing.contracts.state` has the suite that every backend passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.state.base import State

FOUND: Final = "__found"
"""A column that `Table.get` adds: whether the key has a row."""


class Table(State):
    """One row per key, changed in place. Called by one thread, except as `State` says."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def get(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return for each of `keys`, in order: the key, its values (null where missing), and `FOUND`. Keys may repeat."""

    @abstractmethod
    def put(self, frame: pl.DataFrame) -> None:
        """Set the rows of these keys, all columns of them. Keys should not repeat; if one does, its last row counts."""

    @abstractmethod
    def delete(self, keys: pl.DataFrame) -> None:
        """Remove the rows of these keys. Keys may repeat; those without a row are ignored."""

    @abstractmethod
    def scan(self) -> pl.DataFrame:
        """Return all rows, in any order. Costs as much as the state is large."""

    @abstractmethod
    def keys_until(self, column: str, bound: int, *, after: int | None = None) -> tuple[pl.DataFrame, int | None]:
        """Return the keys of rows whose Int64 `column` lies in (`after`, `bound`], and the least value above `bound`.

        Keys come without their sub-key and may repeat; a null lies nowhere. Reads one column of all rows at most.
        """


class Timeline(State):
    """Partial rows that are merged by key and time, and removed once their time has come. One thread, except as `State` says."""

    @property
    @abstractmethod
    def closed_us(self) -> int:
        """The bound up to which rows have been removed, before a restore as well."""

    @abstractmethod
    def add(self, frame: pl.DataFrame) -> None:
        """Add partial rows; all of them later than the last `close`. Called for every batch: does no work per key."""

    @abstractmethod
    def close(self, bound_us: int) -> pl.DataFrame:
        """Remove the rows with time <= `bound_us` and return them merged, in any order.

        Called at every watermark, with the watermark itself: after a restore all rows up to the watermark count as
        closed. Costs nothing when no row is due. Returns a frame without columns if there never were rows.
        """

    @abstractmethod
    def scan(self) -> pl.DataFrame:
        """Return all rows, merged, in any order. Costs as much as the state is large."""

    @abstractmethod
    def drain(self) -> pl.DataFrame:
        """Remove all rows and return them merged, in any order; a frame without columns if there never were rows."""


class Buffer(State):
    """Rows that wait for the watermark, and are released in order of time. One thread, except as `State` says."""

    @abstractmethod
    def add(self, frame: pl.DataFrame) -> None:
        """Add rows; none of them below the last watermark. Called for every batch."""

    @abstractmethod
    def release(self, watermark_us: int) -> pl.DataFrame:
        """Remove the rows with time < `watermark_us` and return them by time, order columns and arrival.

        The last watermark, `TIME_MAX_US`, releases all rows. Called at every watermark; costs nothing when no row is
        due. Returns a frame without columns if there never were rows.
        """

    @abstractmethod
    def scan(self) -> pl.DataFrame:
        """Return all rows, in the order in which they would be released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Keys to search for, with a range of times for each, both ends included."""

    keys: pl.DataFrame
    from_us: npt.NDArray[np.int64]
    to_us: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Pairs: the number of what was asked, and the row that was found for it."""

    asked: npt.NDArray[np.int64]
    rows: pl.DataFrame


class SearchBuffer(Buffer):
    """A buffer that can be searched by key and time."""

    @abstractmethod
    def drop(self, watermark_us: int) -> None:
        """Remove the rows with time < `watermark_us`, as `release` does, without returning them."""

    @abstractmethod
    def search(self, asked: Asked) -> Found | None:
        """Return all pairs of equal keys whose time lies in the range; None if there are none. Null equals nothing.

        Rows that were released may be found if their time is asked for.
        """


class StateBackend(ABC):
    """Makes the states of operators. Called when an operator is made, by any thread; every call makes a fresh, empty state."""

    @abstractmethod
    def table(self, key: Sequence[str], *, schema: Mapping[str, pl.DataType], sub_key: Sequence[str] = ()) -> Table:
        """Make a table with one row per `key` and `sub_key`; rows belong to key groups by `key` alone.

        `schema`: all columns with their types, key columns included; the others are the values.
        """

    @abstractmethod
    def timeline(
        self, key: Sequence[str], *, time_column: str | None, merge_rows: Callable[[pl.DataFrame], pl.DataFrame]
    ) -> Timeline:
        """Make a timeline. `time_column` (Int64 microseconds): when a row is due; None: never.

        `merge_rows` merges the partial rows of equal key (and equal time) into one, keeps the columns and their types,
        returns them in any order, and is called on any thread: it must be pure.
        """

    @abstractmethod
    def buffer(self, key: Sequence[str], *, time_column: str) -> Buffer:
        """Make a buffer. `time_column` is Datetime in microseconds, or Int64."""

    @abstractmethod
    def search_buffer(self, key: Sequence[str], *, time_column: str) -> SearchBuffer:
        """Make a buffer that can be searched. `time_column` is Int64: until when a row is kept, and what searches go by."""
