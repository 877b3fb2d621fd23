"""Which slot a key has: a hash index over key columns, for whole batches at once.

Open addressing in one NumPy array. A bucket holds 31 bits of the hash and the slot; a batch is searched by comparing
these for all its keys at a time, and the keys that are found are compared with the stored ones, all at a time again.

Leaves to others: what lies in the slots. The hash is only for this process: it may change with any version and never
leaves memory (`key_group` has the stable one).

Invariants: two keys have the same slot exactly if they are equal, where null equals null, every NaN every other, and
0.0 equals -0.0; a slot stays with its key until the key is removed; freed slots are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.state.base import KeyIndex
from fordstone.state.column import Cells, Slots, column_of

MISSING: Final = -1
BUCKETS_MIN: Final = 64
# A bucket is 0 when empty, negative when its key was removed, else the tag above `slot + 1`. Tags are never 0.
_EMPTY: Final = 0
_REMOVED: Final = -1
_CLAIM: Final = -2
_SLOT_BITS: Final = 32
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1
_TAG_LOW_BIT: Final = 1 << 30

Hashes = npt.NDArray[np.uint64]


def _tags(hashes: Hashes) -> Slots:
    """The bits of a hash that stand in its bucket: other ones than those that choose it."""
    return (hashes >> np.uint64(_SLOT_BITS + 2)).view(np.int64) | _TAG_LOW_BIT


class MemoryKeyIndex(KeyIndex):
    """Keys to dense slots by open addressing."""

    def __init__(
        self, schema: Mapping[str, pl.DataType], *, hash_keys: Callable[[pl.DataFrame], Hashes] | None = None
    ) -> None:
        """`schema`: the key columns, at least one. `hash_keys` is there for tests: equal keys have equal hashes."""
        if not schema:
            raise ValueError("a key has at least one column")
        self._schema = pl.Schema(schema)
        self._floats = {name for name, dtype in self._schema.items() if dtype.is_float()}
        self._hash_keys = hash_keys
        self.columns = [column_of(name, dtype) for name, dtype in self._schema.items()]
        self._buckets: Slots = np.zeros(BUCKETS_MIN, dtype=np.int64)
        self._used = 0
        """Buckets that are not empty, removed keys included."""
        self._hashes: Hashes = np.zeros(0, dtype=np.uint64)
        self._live: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._end = 0
        """Slots from here on were never used."""
        self._free: list[Slots] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        return self._live.size

    def live_slots(self) -> Slots:
        return np.flatnonzero(self._live[: self._end])

    def is_live(self, slots: Slots) -> npt.NDArray[np.bool_]:
        live: npt.NDArray[np.bool_] = self._live.take(slots)
        return live

    def find(self, keys: pl.DataFrame) -> Slots:
        """The slot of each key; `MISSING` where there is none. Keys may repeat."""
        return self._search(*self._read(keys))[0]

    def insert(self, keys: pl.DataFrame) -> tuple[Slots, Slots]:
        cells, hashes = self._read(keys)
        slots, at = self._search(cells, hashes)
        missing = np.flatnonzero(slots == MISSING)
        if not missing.size:
            return slots, missing
        if 2 * (self._used + missing.size) > self._buckets.size:
            self._rehash(self._count + missing.size, self.live_slots())
            _, at[missing] = self._search([cell.take(missing) for cell in cells], hashes[missing])
        fresh = []
        while missing.size:
            # Of all keys that want an empty bucket the last to write gets it; the others look again, and those that
            # are the same key find it there.
            claims = _CLAIM - np.arange(missing.size)
            buckets = at[missing]
            self._buckets[buckets] = claims
            won = self._buckets[buckets] == claims
            winners = missing[won]
            given = self._settle(winners, buckets[won], [cell.take(winners) for cell in cells], hashes[winners])
            slots[winners] = given
            fresh.append(given)
            missing = missing[~won]
            if missing.size:
                slots[missing], at[missing] = self._search(
                    [cell.take(missing) for cell in cells], hashes[missing], at[missing]
                )
                missing = missing[slots[missing] == MISSING]
        return slots, np.concatenate(fresh)

    def fill(self, keys: pl.DataFrame) -> Slots:
        if self._end:
            raise ValueError("only an empty index is filled")
        cells, hashes = self._read(keys)
        slots = self._allot(keys.height)
        self._hashes[slots] = hashes
        self._live[slots] = True
        self._count = slots.size
        for column, cell in zip(self.columns, cells, strict=True):
            column.put(slots, cell)
        self._rehash(self._count, slots)
        return slots

    def remove(self, keys: pl.DataFrame) -> Slots:
        """Forget keys; gives the slots they had, without repetition. Unknown keys are passed over."""
        slots, at = self._search(*self._read(keys))
        gone, first = np.unique(slots, return_index=True)
        known = gone != MISSING
        removed: Slots = gone[known]
        self._buckets[at[first[known]]] = _REMOVED
        self._live[removed] = False
        if removed.size:
            self._free.append(removed)
        self._count -= removed.size
        return removed

    def size_bytes(self) -> int:
        own = self._buckets.nbytes + self._hashes.nbytes + self._live.nbytes
        return own + sum(column.size_bytes() for column in self.columns)

    def _read(self, keys: pl.DataFrame) -> tuple[list[Cells], Hashes]:
        series = [keys.get_column(name) for name in self._schema]
        for column in series:
            if column.dtype != self._schema[column.name]:
                wanted = self._schema[column.name]
                raise TypeError(
                    f"key column {column.name!r} is {column.dtype}, the index was made for {wanted}; cast it."
                )
        cells = [column.cells(one) for column, one in zip(self.columns, series, strict=True)]
        if self._floats:
            cells = [_one_form(cell) if cell.series.name in self._floats else cell for cell in cells]
        if self._hash_keys is not None:
            return cells, self._hash_keys(pl.DataFrame(series))
        return cells, pl.DataFrame(series).hash_rows().to_numpy()

    def _search(self, cells: list[Cells], hashes: Hashes, start: Slots | None = None) -> tuple[Slots, Slots]:
        """The slot of each key or `MISSING`, and the bucket where its search ended: its own, or an empty one."""
        mask = self._buckets.size - 1
        at = (hashes & np.uint64(mask)).view(np.int64) if start is None else start
        tags = _tags(hashes)
        found = self._buckets.take(at)
        going = np.flatnonzero(((found >> _SLOT_BITS) != tags) & (found != _EMPTY))
        while True:
            while going.size:
                step = (at[going] + 1) & mask
                at[going] = step
                entry = self._buckets.take(step)
                found[going] = entry
                going = going[((entry >> _SLOT_BITS) != tags[going]) & (entry != _EMPTY)]
            seen = found != _EMPTY
            slots = (found & _SLOT_MASK) - 1
            if seen.all():
                same = self._equal(slots, cells)
                if same.all():
                    return slots, at
                going = np.flatnonzero(~same)
            else:
                rows = np.flatnonzero(seen)
                same = self._equal(slots[rows], [cell.take(rows) for cell in cells])
                if same.all():
                    return slots, at
                going = rows[~same]
            # Another key with the same tag: step over it. What was found for the rest is found again at once.
            at[going] = (at[going] + 1) & mask
            found[going] = self._buckets.take(at[going])
            going = going[((found[going] >> _SLOT_BITS) != tags[going]) & (found[going] != _EMPTY)]

    def _equal(self, slots: Slots, cells: list[Cells]) -> npt.NDArray[np.bool_]:
        same = self.columns[0].equal(slots, cells[0])
        for column, cell in zip(self.columns[1:], cells[1:], strict=True):
            same &= column.equal(slots, cell)
        return same

    def _settle(self, winners: Slots, buckets: Slots, cells: list[Cells], hashes: Hashes) -> Slots:
        given = self._allot(winners.size)
        self._buckets[buckets] = (_tags(hashes) << _SLOT_BITS) | (given + 1)
        self._used += winners.size
        self._hashes[given] = hashes
        self._live[given] = True
        self._count += winners.size
        for column, cell in zip(self.columns, cells, strict=True):
            column.put(given, cell)
        return given

    def _allot(self, count: int) -> Slots:
        parts = []
        while count and self._free:
            part = self._free.pop()
            if part.size > count:
                self._free.append(part[count:])
                part = part[:count]
            parts.append(part)
            count -= part.size
        if count:
            end = self._end + count
            if end > self._live.size:
                self._make_room(end)
            parts.append(np.arange(self._end, end))
            self._end = end
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, dtype=np.int64)])

    def _make_room(self, needed: int) -> None:
        capacity = max(2 * self._live.size, needed, BUCKETS_MIN)
        for column in self.columns:
            column.grow(capacity)
        self._hashes = np.concatenate([self._hashes, np.zeros(capacity - self._hashes.size, dtype=np.uint64)])
        self._live = np.concatenate([self._live, np.zeros(capacity - self._live.size, dtype=np.bool_)])

    def _rehash(self, keys: int, slots: Slots) -> None:
        """Rebuild the buckets from the slots in use, with room for this number of keys."""
        # Full to 3/8 at most, so that the next time (at 1/2) is far off even if keys come and go.
        size = max(BUCKETS_MIN, 1 << (keys * 8 // 3).bit_length())
        mask = size - 1
        buckets = np.zeros(size, dtype=np.int64)
        hashes = self._hashes[slots]
        entries = (_tags(hashes) << _SLOT_BITS) | (slots + 1)
        at = (hashes & np.uint64(mask)).view(np.int64)
        buckets[at] = entries
        while True:
            # The last to write got the bucket; the others go on to the next one that is empty.
            waiting = np.flatnonzero(buckets.take(at) != entries)
            if not waiting.size:
                break
            entries, at = entries[waiting], (at[waiting] + 1) & mask
            free = buckets.take(at) == _EMPTY
            buckets[at[free]] = entries[free]
        self._buckets = buckets
        self._used = self._count


def _one_form(cells: Cells) -> Cells:
    """Floats with one zero and one NaN. (Polars would optimise `x + 0.0` away.)"""
    if cells.values is None:
        return cells
    values: npt.NDArray[Any] = np.add(cells.values, 0.0)
    values[np.isnan(values)] = np.nan
    return Cells(cells.series, values, cells.valid)
