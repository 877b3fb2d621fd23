"""The rows of one side of a join in memory, found by key and time.

Rows lie in pieces that are ordered by time, as in every buffer. Each piece that is searched has an index: its rows by the
hash of their key, then by time. A search costs the steps of a bisection and what it finds, however many rows a key has. An
index is made when its piece is first searched, is dropped with the piece, and is never stored.

Invariant: hashes only narrow the search down; keys are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.state.backend import Asked, Found, SearchBuffer
from fordstone.state.timeline import MemoryBuffer, OpenRows, TimedPiece, times_of

Rows = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


class MemorySearchBuffer(MemoryBuffer, SearchBuffer):
    """Rows that can be searched by key and time."""

    def __init__(self, key: Sequence[str], *, time_column: str) -> None:
        super().__init__(key, time_column=time_column)
        self._column = time_column
        self._indexes: dict[int, tuple[TimedPiece, _Index]] = {}
        """By the piece's identity, and with the piece, so that it stays what it is."""

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows, and put them in order: they are searched soon."""
        self._take(frame)
        raw, self._raw = self._raw, OpenRows()
        if raw.rows:
            self._push(raw.frames)

    def drop(self, watermark_us: int) -> None:
        self._due(self._closed_by(watermark_us))

    def search(self, asked: Asked) -> Found | None:
        pieces = [piece for piece in (*self._held(), *self._ordered) if piece.most_us > self._closed_us]
        self._indexes = {id(piece): self._indexes[id(piece)] for piece in pieces if id(piece) in self._indexes}
        least_us, most_us = int(asked.from_us.min()), int(asked.to_us.max())
        pieces = [piece for piece in pieces if piece.least_us <= most_us and piece.most_us >= least_us]
        if not pieces:
            return None
        hashes = _hashes(asked.keys)
        by_hash = (hashes >> np.uint32(16)).astype(np.uint16).argsort(kind="stable")
        if (there := _there(asked.keys)) is not None:
            by_hash = by_hash[there.take(by_hash)]
        pairs = [self._index(piece).search(hashes, asked, by_hash) for piece in pieces]
        # One call for all columns of a piece, and the rest for all pieces together: calls are what small batches cost.
        rows = [piece.frame()[at] for piece, (_, at) in zip(pieces, pairs, strict=True) if at.size]
        if not rows:
            return None
        found = Found(asked=np.concatenate([number for number, _ in pairs]), rows=pl.concat(rows))
        return _equal(found, asked.keys[found.asked])

    def _index(self, piece: TimedPiece) -> _Index:
        known = self._indexes.get(id(piece))
        if known is None:
            frame = piece.frame()
            known = self._indexes[id(piece)] = (
                piece,
                _Index(frame, self._key, times_of(frame, self._column).to_numpy()),
            )
        return known[1]


class _Index:
    """The rows of a frame that is ordered by time, by the hash of their key, then by time. Rows with a null key are left out."""

    def __init__(self, frame: pl.DataFrame, key: Sequence[str], times: Rows) -> None:
        self._times = times
        keys = frame.select(key)
        hashes = _hashes(keys)
        # Two sorts by 16 bits each, which NumPy does by radix, take a third of one by 32.
        order = hashes.astype(np.uint16).argsort(kind="stable")
        order = order[(hashes.take(order) >> np.uint32(16)).astype(np.uint16).argsort(kind="stable")]
        if (there := _there(keys)) is not None:
            order = order[there.take(order)]
        self._order = order
        # A row's number is its place in time: hash and place together are one number that ascends.
        self._codes: Rows = self._code(hashes.take(order)) + order

    def _code(self, hashes: Hashes) -> Rows:
        return hashes.astype(np.int64) * (self._times.size + 1)

    def search(self, hashes: Hashes, asked: Asked, by_hash: Rows) -> tuple[Rows, Rows]:
        """Numbers of what is asked, and of the rows that have its hash, and a time between.

        `by_hash`: what is asked, about in order of the hashes: then the search goes through memory once.
        """
        first = self._times.searchsorted(asked.from_us, "left").take(by_hash)
        until = self._times.searchsorted(asked.to_us, "right").take(by_hash)
        some = until > first
        if not some.all():
            by_hash, first, until = by_hash[some], first[some], until[some]
        codes = self._code(hashes.take(by_hash))
        start = self._codes.searchsorted(codes + first)
        counts = self._codes.searchsorted(codes + until) - start
        pairs = int(counts.sum())
        # From the start of each stretch, one after the other.
        places = np.arange(pairs) + (start - (np.cumsum(counts) - counts)).repeat(counts)
        return by_hash.repeat(counts), self._order.take(places)


def _equal(found: Found, keys: pl.DataFrame) -> Found | None:
    """Without pairs whose keys only have the same hash. `keys`: what was asked, for each pair."""
    same = np.ones(found.asked.size, dtype=np.bool_)
    for key in keys.get_columns():
        same &= (key == found.rows.get_column(key.name)).to_numpy()
    if same.all():
        return found
    return Found(asked=found.asked[same], rows=found.rows.filter(pl.Series(same))) if same.any() else None


def _hashes(keys: pl.DataFrame) -> Hashes:
    """Good for this process only: they are never stored."""
    found: Hashes = (keys.hash_rows().to_numpy() >> np.uint64(32)).astype(np.uint32)
    return found


def _there(keys: pl.DataFrame) -> Mask | None:
    """Which keys have no null; None: all."""
    if not any(column.null_count() for column in keys.get_columns()):
        return None
    there: Mask = keys.select(pl.all_horizontal(pl.all().is_not_null())).to_series().to_numpy()
    return there
