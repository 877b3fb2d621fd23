"""Cells: the state of one key of a keyed function, as Python objects while the function works on that key.

A cell is what the user's function finds under the name of a state; values are coerced to their declared type. `store` makes
cells from columns and writes changed ones back. Lists and maps lie in chunks, so that a change to a large one writes a chunk.

Invariants: a function sees the same whether a cell was in memory all along or was just read back (order of lists and maps
included); a value that has outlived its ttl is not seen, whether or not it has been removed from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
import polars as pl

from fordstone.errors import SchemaError
from fordstone.lang.values import UNFIT, Coercion

_OWNER: Final = "__owner"


def series_of(name: str, values: list[Any], dtype: pl.DataType) -> pl.Series:
    """A column of Python objects."""
    if not isinstance(dtype, pl.List):
        return pl.Series(name, values, dtype=dtype, strict=True)
    # Polars makes a series of its own of every list, which takes ten times as long as to make one of all and to cut it.
    flat = series_of(name, list(chain.from_iterable(values)), dtype.inner)  # type: ignore[arg-type]  # a type, not a class
    sizes = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    if (sizes == 1).all() and not flat.dtype.is_nested():
        return flat.reshape((-1, 1)).arr.to_list()
    owners = pl.Series(_OWNER, np.repeat(np.arange(sizes.size), sizes)).set_sorted()
    lists = pl.DataFrame([owners, flat]).group_by(_OWNER, maintain_order=True).agg(name).get_column(name)
    if lists.len() == sizes.size:
        return lists
    places = pl.Series(np.cumsum(sizes > 0) - 1).zip_with(pl.Series(sizes > 0), pl.Series([None], dtype=pl.Int64))
    return lists.gather(places).fill_null(pl.Series([[]], dtype=dtype))


def copied(value: Any) -> Any:
    """A value that nobody else holds, and its parts likewise."""
    if isinstance(value, list):
        return [copied(one) for one in value]
    return {name: copied(one) for name, one in value.items()} if isinstance(value, dict) else value


CHUNK_ITEMS: Final = 64
CHUNKS_FEW: Final = 4
"""Up to this number, chunks are not compacted, however empty they are."""
NOT_YET_US: Final = -(2**63)
"""The time of a write by the clock, before the barrier has brought the time of the clock."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """Where a function is at the moment: which key, and when. One for all cells of an operator."""

    key: Any = ()
    now_us: int = NOT_YET_US
    """Event time; `NOT_YET_US` on streams without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKind:
    """What the cells of one state have in common."""

    step: str
    name: str
    kind: Literal["value", "list", "map"]
    scene: Scene
    coerce: Coercion
    coerce_key: Coercion | None = None
    ttl_us: int | None = None
    by_clock: bool = False
    """The ttl goes by the clock: then what is too old goes at barriers, and is seen until then."""
    copies: bool = False
    """Values can be changed in place, so a read returns a copy."""
    hides_after_us: int | None = field(init=False)
    """After how long a value is not seen any more, by event time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hides_after_us", None if self.by_clock else self.ttl_us)

    def value(self, given: Any) -> Any:
        """A value in the form in which it is kept."""
        try:
            return self.coerce(given)
        except UNFIT as error:
            raise self.wrong("value", error) from None

    def map_key(self, given: Any) -> Any:
        """A map's key in the form in which it is kept."""
        try:
            return given if self.coerce_key is None else self.coerce_key(given)
        except UNFIT as error:
            raise self.wrong("key", error) from None

    def wrong(self, what: str, error: Exception) -> SchemaError:
        """The error for something that is not of the declared type."""
        return SchemaError(
            f"step {self.step}, key {self.scene.key!r}: the {what} given to state {self.name} is not of its declared "
            f"type: {error}."
        )


class ValueCell:
    """One value, or none."""

    __slots__ = ("_kind", "at_us", "dirty", "held")

    def __init__(self, kind: CellKind, held: Any = None, at_us: int = NOT_YET_US) -> None:
        self._kind = kind
        self.held = held
        self.at_us = at_us
        self.dirty = False

    def get(self, default: Any = None) -> Any:
        """The value, or `default` if there is none."""
        held, kind = self.held, self._kind
        if held is None:
            return default
        ttl_us = kind.hides_after_us
        if ttl_us is not None and kind.scene.now_us >= self.at_us + ttl_us:
            return default
        return copied(held) if kind.copies else held

    def set(self, value: Any) -> None:
        """Remember a value; None is none."""
        kind = self._kind
        if value is None:
            self.clear()
            return
        self.held = kind.value(value)
        self.at_us = kind.scene.now_us
        self.dirty = True

    def clear(self) -> None:
        """Forget all of it."""
        if self.held is not None:
            self.held = None
            self.dirty = True

    # What the store calls.

    def saved(self) -> Any:
        """What is remembered, to go back to."""
        return self.held, self.at_us, self.dirty

    def restore(self, saved: Any) -> None:
        """Go back to what was remembered then."""
        self.held, self.at_us, self.dirty = saved

    def settle(self, now_us: int) -> None:
        """Say when that which was written since the last barrier was written."""
        if self.at_us == NOT_YET_US:
            self.at_us = now_us

    def drop(self, until_us: int) -> None:
        """Forget what was written up to `until_us`."""
        if self.at_us <= until_us:
            self.clear()


Item = tuple[Any, int]
"""A value, and when it was written."""


class _Chunked:
    """What lists and maps have in common: chunks, read when they are first needed."""

    __slots__ = ("_kind", "_read", "chunks", "dirty", "stored")

    def __init__(self, kind: CellKind, read: Callable[[], list[Any]] | None = None) -> None:
        self._kind = kind
        self._read = read
        self.chunks: list[Any] = []
        self.dirty: set[int] = set()
        """Numbers of chunks that changed."""
        self.stored = 0
        """How many chunks stand in the table."""

    def _open(self) -> None:
        if self._read is not None:
            read, self._read = self._read, None
            self.chunks = read()
            self.stored = len(self.chunks)

    def saved(self) -> Any:
        return self._read, [chunk.copy() for chunk in self.chunks], set(self.dirty), self.stored

    def restore(self, saved: Any) -> None:
        self._read, self.chunks, self.dirty, self.stored = saved

    def clear(self) -> None:
        self._open()
        if self.chunks:
            self.dirty.update(range(len(self.chunks)))
            self.chunks = []

    def _visible(self, item: Item) -> bool:
        ttl_us = self._kind.hides_after_us
        return ttl_us is None or self._kind.scene.now_us < item[1] + ttl_us

    def _room(self, empty: Any) -> Any:
        if not self.chunks or len(self.chunks[-1]) >= CHUNK_ITEMS:
            self.chunks.append(empty)
        self.dirty.add(len(self.chunks) - 1)
        return self.chunks[-1]

    def _is_sparse(self) -> bool:
        count = len(self.chunks)
        return count > CHUNKS_FEW and 2 * sum(map(len, self.chunks)) < CHUNK_ITEMS * count

    def _own(self, value: Any) -> Any:
        return copied(value) if self._kind.copies else value


class ListCell(_Chunked):
    """Values in the order in which they were appended."""

    __slots__ = ()

    def get(self) -> list[Any]:
        """All values."""
        self._open()
        return [self._own(item[0]) for chunk in self.chunks for item in chunk if self._visible(item)]

    def append(self, value: Any) -> None:
        """Remember one more."""
        kept = self._kind.value(value)
        self._open()
        self._room([]).append((kept, self._kind.scene.now_us))

    def set(self, values: Iterable[Any]) -> None:
        """Remember these instead."""
        kept = [self._kind.value(value) for value in values]
        self.clear()
        for value in kept:
            self._room([]).append((value, self._kind.scene.now_us))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        self._open()
        if self._kind.hides_after_us is None:
            return sum(map(len, self.chunks))
        return sum(self._visible(item) for chunk in self.chunks for item in chunk)

    # What the store calls.

    def settle(self, now_us: int) -> None:
        for number in self.dirty:
            if number < len(self.chunks):
                self.chunks[number] = [
                    (value, now_us if at_us == NOT_YET_US else at_us) for value, at_us in self.chunks[number]
                ]

    def drop(self, until_us: int) -> None:
        self._open()
        for number, chunk in enumerate(self.chunks):
            kept = [item for item in chunk if item[1] > until_us]
            if len(kept) < len(chunk):
                self.chunks[number] = kept
                self.dirty.add(number)

    def compact(self) -> None:
        """Rewrite the chunks when most of their room is empty."""
        if self._is_sparse():
            items = [item for chunk in self.chunks for item in chunk]
            self.dirty.update(range(len(self.chunks)))
            self.chunks = [items[start : start + CHUNK_ITEMS] for start in range(0, len(items), CHUNK_ITEMS)]

    @staticmethod
    def columns(chunk: list[Item]) -> tuple[list[Any], list[Any], list[int]]:
        """The keys (none), values and times of a chunk."""
        return [], [item[0] for item in chunk], [item[1] for item in chunk]


class MapCell(_Chunked):
    """Values by key, in the order in which the keys came."""

    __slots__ = ("_where",)

    def __init__(self, kind: CellKind, read: Callable[[], list[Any]] | None = None) -> None:
        super().__init__(kind, read)
        self._where: dict[Any, int] = {}
        """Which chunk each key is in."""

    def _open(self) -> None:
        if self._read is not None:
            super()._open()
            self._where = {key: number for number, chunk in enumerate(self.chunks) for key in chunk}

    def _found(self, key: Any) -> Item | None:
        if key is None:
            return None  # a missing value of a row may be asked for; it is no key
        self._open()
        kept_key = self._kind.map_key(key)
        number = self._where.get(kept_key)
        if number is None:
            return None
        item: Item = self.chunks[number][kept_key]
        return item if self._visible(item) else None

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or `default`."""
        item = self._found(key)
        return default if item is None else self._own(item[0])

    def __getitem__(self, key: Any) -> Any:
        item = self._found(key)
        if item is None:
            raise KeyError(key)
        return self._own(item[0])

    def __contains__(self, key: Any) -> bool:
        return self._found(key) is not None

    def __setitem__(self, key: Any, value: Any) -> None:
        kept_key, kept = self._kind.map_key(key), self._kind.value(value)
        self._open()
        number = self._where.get(kept_key)
        if number is not None and not self._visible(self.chunks[number][kept_key]):
            # It had expired, so it is a new key, after all others.
            self._remove(kept_key)
            number = None
        if number is None:
            chunk = self._room({})
            self._where[kept_key] = len(self.chunks) - 1
        else:
            chunk = self.chunks[number]
            self.dirty.add(number)
        chunk[kept_key] = (kept, self._kind.scene.now_us)

    def pop(self, key: Any, default: Any = None) -> Any:
        """Forget a key, and give the value that it had, or `default`."""
        item = self._found(key)
        if item is None:
            return default
        self._remove(self._kind.map_key(key))
        return item[0]

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._remove(self._kind.map_key(key))

    def items(self) -> list[tuple[Any, Any]]:
        """All keys with their values."""
        self._open()
        return [
            (key, self._own(item[0])) for chunk in self.chunks for key, item in chunk.items() if self._visible(item)
        ]

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key, _ in self.items()])

    def __len__(self) -> int:
        self._open()
        return len(self._where) if self._kind.hides_after_us is None else len(self.items())

    def restore(self, saved: Any) -> None:
        super().restore(saved)
        self._where = {key: number for number, chunk in enumerate(self.chunks) for key in chunk}

    def clear(self) -> None:
        super().clear()
        self._where = {}

    def _remove(self, key: Any) -> None:
        number = self._where.pop(key)
        del self.chunks[number][key]
        self.dirty.add(number)

    # What the store calls.

    def settle(self, now_us: int) -> None:
        for number in self.dirty:
            if number < len(self.chunks):
                chunk = self.chunks[number]
                chunk |= {key: (value, now_us) for key, (value, at_us) in chunk.items() if at_us == NOT_YET_US}

    def drop(self, until_us: int) -> None:
        self._open()
        for key in [key for chunk in self.chunks for key, item in chunk.items() if item[1] <= until_us]:
            self._remove(key)

    def compact(self) -> None:
        if self._is_sparse():
            items = [item for chunk in self.chunks for item in chunk.items()]
            self.dirty.update(range(len(self.chunks)))
            self.chunks = [dict(items[start : start + CHUNK_ITEMS]) for start in range(0, len(items), CHUNK_ITEMS)]
            self._where = {key: number for number, chunk in enumerate(self.chunks) for key in chunk}

    @staticmethod
    def columns(chunk: dict[Any, Item]) -> tuple[list[Any], list[Any], list[int]]:
        """The keys, values and times of a chunk."""
        return list(chunk), [item[0] for item in chunk.values()], [item[1] for item in chunk.values()]


Cell = ValueCell | ListCell | MapCell
