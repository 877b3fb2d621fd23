"""The table in memory: one row per key, changed in place.

Key columns lie in the index, value columns beside it by the same slots. The table knows which slots changed since the
last barrier; freezing copies these rows and no others. A piece holds changed rows, at most one per key, and tombstones
for the keys that went.

Invariants: of the rows of one key, the one in the newest piece counts; a tombstone is written for every key that went
and may stand in an older piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.state.base import FOUND, SMALLEST_ROWS, Piece, PieceList, Table, pieces_to_merge
from fordstone.state.column import Cells, Slots, column_of
from fordstone.state.key_index import MISSING, MemoryKeyIndex

DELETED: Final = "__deleted"
DENSE_SHARE: Final = 4
"""If more than one slot in this many changed, whole arrays are copied: that is faster than picking."""
SORTED_SHARE: Final = 32
"""If more than one slot in this many changed, all slots are scanned, which returns the changed ones in order."""
ROWS_RATIO_MAX: Final = 3
"""Maximum ratio of rows in pieces to rows of the table: a restore reads them all."""


class MemoryTable(Table):
    """One row per key, in NumPy arrays beside a hash index."""

    def __init__(self, key: Sequence[str], *, schema: Mapping[str, pl.DataType], sub_key: Sequence[str] = ()) -> None:
        self._key = (*key, *sub_key)
        self._group_key = tuple(key)
        self._schema = pl.Schema(schema)
        self._index = MemoryKeyIndex({name: self._schema[name] for name in self._key})
        self._values = [column_of(name, dtype) for name, dtype in self._schema.items() if name not in self._key]
        self._columns = list(self._schema)
        self._pieces = PieceList()
        self._changed: list[Slots] = []
        """Slots written since the last freeze, each once (`_dirty` says which)."""
        self._gone: list[pl.DataFrame] = []
        """Keys that went since the last freeze and may stand in a piece."""
        self._dirty: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._stored: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        """Whether the key of a slot may stand in a piece."""
        self._row: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        """The last row that `put` had for a slot; only good within a call."""

    @property
    def key(self) -> tuple[str, ...]:
        return self._group_key

    @property
    def keeps_frames(self) -> bool:
        """The rows lie in the columns; written pieces are only files."""
        return False

    def __len__(self) -> int:
        return len(self._index)

    def size_bytes(self) -> int:
        return self._index.size_bytes() + sum(column.size_bytes() for column in self._values) + 6 * self._dirty.size

    def get(self, keys: pl.DataFrame) -> pl.DataFrame:
        slots = self._index.find(keys)
        found = slots != MISSING
        every = bool(found.all())
        if not len(self._index):
            values = [
                pl.Series(column.name, [None], dtype=column.dtype).new_from_index(0, slots.size)
                for column in self._values
            ]
        else:
            slots = slots if every else np.maximum(slots, 0)
            values = [column.get(slots, found=None if every else found) for column in self._values]
        columns = {column.name: column for column in (*keys.get_columns(), *values)}
        return pl.DataFrame([*(columns[name] for name in self._columns), pl.Series(FOUND, found)])

    def put(self, frame: pl.DataFrame) -> None:
        if not frame.height:
            return
        cells = self._cells(frame)
        slots, fresh = self._index.insert(frame)
        if self._index.capacity > self._dirty.size:
            self._make_room()
        rows = np.arange(slots.size, dtype=np.int32)
        self._row[slots] = rows
        last = self._row.take(slots) == rows
        if not last.all():
            kept = np.flatnonzero(last)
            slots, cells = slots[kept], [cell.take(kept) for cell in cells]
        self._write(slots, cells)
        self._stored[fresh] = False
        clean = slots[~self._dirty.take(slots)]
        self._dirty[clean] = True
        self._changed.append(clean)

    def _cells(self, frame: pl.DataFrame) -> list[Cells]:
        """The values of rows, with their types checked: before anything is written."""
        cells = []
        for column in self._values:
            series = frame.get_column(column.name)
            if series.dtype != column.dtype:
                raise TypeError(
                    f"column {column.name!r} is {series.dtype}, the table was made for {column.dtype}; cast it."
                )
            cells.append(column.cells(series))
        return cells

    def _write(self, slots: Slots, cells: Sequence[Cells]) -> None:
        for column, cell in zip(self._values, cells, strict=True):
            column.put(slots, cell)

    def delete(self, keys: pl.DataFrame) -> None:
        slots = self._index.remove(keys)
        stored = slots[self._stored.take(slots)]
        if stored.size:
            self._gone.append(pl.DataFrame([column.get(stored) for column in self._index.columns]))
        for column in self._values:
            column.forget(slots)

    def scan(self) -> pl.DataFrame:
        slots = self._index.live_slots()
        return pl.DataFrame([column.get(slots) for column in (*self._index.columns, *self._values)]).select(
            self._columns
        )

    def keys_until(self, column: str, bound: int, *, after: int | None = None) -> tuple[pl.DataFrame, int | None]:
        slots = self._index.live_slots()
        values = next(values for values in self._values if values.name == column).get(slots)
        due = (values <= bound).fill_null(value=False)
        found = slots[(due if after is None else due & (values > after)).to_numpy()]
        keys = pl.DataFrame([own.get(found) for own in self._index.columns if own.name in self._group_key])
        return keys, values.filter(~due).min()  # type: ignore[return-value]  # an Int64 column

    def freeze(self) -> tuple[Piece, ...]:
        """Copy the rows that changed into a piece; all rows, in place of all pieces, when that is hardly more."""
        changed = np.concatenate([*self._changed, np.zeros(0, dtype=np.int64)])
        if SORTED_SHARE * changed.size > self._dirty.size:
            changed = np.flatnonzero(self._dirty)
        self._dirty[changed] = False
        changed = changed[self._index.is_live(changed)]
        gone, self._changed, self._gone = self._gone, [], []
        self._stored[changed] = True
        rest = len(self._index) - changed.size
        if (changed.size or gone) and rest <= changed.size:
            changed = self._index.live_slots() if rest else changed
            self._pieces.reset([self._piece(changed, [])] if changed.size else [])
        elif changed.size or gone:
            self._pieces.append(self._piece(changed, gone))
        return self._pieces.snapshot()

    def _piece(self, slots: Slots, gone: Sequence[pl.DataFrame]) -> Piece:
        dense = DENSE_SHARE * slots.size > self._index.capacity
        columns = [column.frozen(slots, dense=dense) for column in (*self._index.columns, *self._values)]
        return Piece(make=partial(_rows, columns, self._columns, self._key, tuple(gone)))

    def load(self, pieces: Sequence[Piece], *, watermark_us: int) -> None:  # noqa: ARG002 - a table has no time
        """Read the pieces, oldest first. Pieces with a `ref` do not keep their rows in memory."""
        held = []
        for piece in pieces:
            frame = piece.frame()
            deleted = frame.get_column(DELETED)
            if deleted.any():
                self.delete(frame.filter(deleted))
                frame = frame.filter(~deleted)
            cells = self._cells(frame)
            slots = self._index.insert(frame)[0] if self._index.capacity else self._index.fill(frame)
            self._make_room()
            self._write(slots, cells)
            held.append(piece if piece.ref is None else Piece(ref=piece.ref))
        self._dirty[:] = False
        self._stored[:] = True
        self._changed, self._gone = [], []
        self._pieces.reset(held)

    def mergeable(self) -> tuple[Piece, ...]:
        """All written pieces, when most of their rows no longer count; else written neighbours of like size."""
        held = self._pieces.snapshot()
        rows = [None if piece.ref is None else piece.ref.rows for piece in held]
        written = rows.index(None) if None in rows else len(rows)
        if written > 1 and sum(count or 0 for count in rows[:written]) > ROWS_RATIO_MAX * max(
            len(self._index), SMALLEST_ROWS
        ):
            return held[:written]
        found = pieces_to_merge(rows)
        return () if found is None else held[found.start : found.stop]

    def combine(self, frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:
        """The last row of each key; without tombstones when nothing older is left for them to hide."""
        rows = last_rows(frames, self._key)
        return rows.filter(~pl.col(DELETED)) if oldest else rows

    def merged(self, old: Sequence[Piece], new: Piece) -> None:
        self._pieces.replace(old, [new])

    def _make_room(self) -> None:
        capacity = self._index.capacity
        for column in self._values:
            column.grow(capacity)
        more = np.zeros(capacity - self._dirty.size, dtype=np.bool_)
        self._dirty = np.concatenate([self._dirty, more])
        self._stored = np.concatenate([self._stored, more])
        self._row = np.zeros(capacity, dtype=np.int32)


def last_rows(frames: Sequence[pl.DataFrame], key: Sequence[str]) -> pl.DataFrame:
    """The last row of each key, or its tombstone."""
    return pl.concat(frames).unique(subset=key, keep="last", maintain_order=True)


def _rows(
    columns: Sequence[Callable[[], pl.Series]], order: Sequence[str], key: Sequence[str], gone: Sequence[pl.DataFrame]
) -> pl.DataFrame:
    """The rows of a piece: what changed, and a tombstone for every key that went and did not come back."""
    rows = pl.DataFrame([make() for make in columns]).select(order).with_columns(pl.lit(value=False).alias(DELETED))
    if not gone:
        return rows
    tombstones = pl.concat(gone).unique().join(rows.select(key), on=list(key), how="anti", nulls_equal=True)
    return pl.concat([tombstones.with_columns(pl.lit(value=True).alias(DELETED)), rows], how="diagonal").select(
        rows.columns
    )
