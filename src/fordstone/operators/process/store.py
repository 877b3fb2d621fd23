"""The state of a keyed function: tables by key, and Python objects for the keys in use. Timers are part of it.

A batch asks for the entries of all its keys at once; those that are not in memory are read from the tables together. Changed
entries are written back, column-wise, at barriers and when there are too many in memory: a checkpoint holds what changed,
and nothing is stored as Python objects.

Invariants: after `write_back` the tables are the whole state; an entry in memory is never older than the tables.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final

import numpy as np
import polars as pl

from fordstone.operators.process.cells import NOT_YET_US, Cell, CellKind, ListCell, MapCell, ValueCell, series_of
from fordstone.state.base import FOUND, State, StateBackend, Table

NEVER_US: Final = 2**63 - 1
STALE_MAX: Final = 32
"""Maximum number of outdated entries in the heap of times, beyond the number of timers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A timer that fires: the argument of `on_timer`."""

    name: str
    time: dt.datetime
    """For when it was set: event time, or the time by the clock."""
    clock: bool


class Timers:
    """The timers of one key that go by event time, or those that go by the clock."""

    __slots__ = ("_heap", "after_us", "at_us", "changed", "set_us")

    def __init__(self, names: Iterable[str] = (), ats_us: Iterable[int] = (), sets_us: Iterable[int] = ()) -> None:
        self.at_us = dict(zip(names, ats_us, strict=True))
        self.set_us = dict(zip(self.at_us, sets_us, strict=True))
        """The event time at which each was set."""
        self.after_us: dict[str, int] = {}
        """Those that count from the next barrier on: how long."""
        self.changed = False
        self._heap = [(at_us, name) for name, at_us in self.at_us.items()]
        heapify(self._heap)

    def saved(self) -> tuple[Any, ...]:
        """All of it, to go back to."""
        return dict(self.at_us), dict(self.set_us), dict(self.after_us), self.changed, list(self._heap)

    def restore(self, saved: tuple[Any, ...]) -> None:
        self.at_us, self.set_us, self.after_us, self.changed, self._heap = saved

    def set(self, name: str, at_us: int, now_us: int) -> None:
        """Set a timer, in place of one of that name."""
        self.after_us.pop(name, None)
        self.at_us[name] = at_us
        self.set_us[name] = now_us
        self.changed = True
        heappush(self._heap, (at_us, name))
        if len(self._heap) > 2 * len(self.at_us) + STALE_MAX:
            # A timer that is set again and again, after another that stays, would leave all its times there.
            self._heap = [(at_us, name) for name, at_us in self.at_us.items()]
            heapify(self._heap)

    def set_after(self, name: str, span_us: int, now_us: int) -> None:
        """Set a timer that counts from the next barrier on."""
        self.delete(name)
        self.after_us[name] = span_us
        self.set_us[name] = now_us

    def settle(self, now_us: int) -> None:
        """The barrier is here: what counts from it has a time."""
        for name, span_us in self.after_us.items():
            self.at_us[name] = now_us + span_us
            heappush(self._heap, (now_us + span_us, name))
            self.changed = True
        self.after_us = {}

    def delete(self, name: str) -> None:
        """Take a timer back, if there is one."""
        if self.after_us.pop(name, None) is not None or self.at_us.pop(name, None) is not None:
            self.set_us.pop(name, None)
            self.changed = True

    @property
    def least_us(self) -> int:
        heap = self._heap
        while heap and self.at_us.get(heap[0][1]) != heap[0][0]:
            heappop(heap)  # it was set again, or deleted
        return heap[0][0] if heap else NEVER_US

    def next_below(self, bound_us: int) -> str | None:
        """The name of the next one that is due below a time."""
        return self._heap[0][1] if self.least_us < bound_us else None

    def due(self, now_us: int) -> list[tuple[int, str]]:
        """All that are due at a time, in order."""
        return sorted((at_us, name) for name, at_us in self.at_us.items() if at_us <= now_us)


Key = tuple[Any, ...]

ENTRIES_MAX: Final = 50_000
"""Maximum number of entries in memory; above it, those not in use are evicted."""
_VALUE: Final = "__value"
_AT: Final = "__at"
"""When the value was written, or the oldest of a chunk."""
_CHUNK: Final = "__chunk"
_CHUNKS: Final = "__chunks"
_KEYS: Final = "__keys"
_VALUES: Final = "__values"
_ATS: Final = "__ats"
_NAMES: Final = "__names"
_SETS: Final = "__sets"
_LEAST: Final = "__least"


class Entry:
    """What is known of one key."""

    __slots__ = ("cells", "clocks", "key", "timers")

    def __init__(self, key: Key, cells: list[Cell]) -> None:
        self.key = key
        self.cells = cells
        self.timers: Timers | None = None
        """By event time."""
        self.clocks: Timers | None = None

    def saved(self) -> tuple[Any, ...]:
        """All that is known, to go back to."""
        timers = [(one, None if one is None else one.saved()) for one in (self.timers, self.clocks)]
        return [cell.saved() for cell in self.cells], *timers

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back: nothing that was done since has happened."""
        cells, (self.timers, timers), (self.clocks, clocks) = saved
        for cell, before in zip(self.cells, cells, strict=True):
            cell.restore(before)
        for now, then in ((self.timers, timers), (self.clocks, clocks)):
            if now is not None:
                now.restore(then)


class _TimedTable:
    """A table beside a bound on the times in it, so that asking for due rows mostly costs nothing."""

    def __init__(self, table: Table, schema: Mapping[str, pl.DataType]) -> None:
        self.rows = table
        self.schema = dict(schema)
        self.least_us = NOT_YET_US
        """No row of the table is due before this."""

    def keys_until(self, column: str, bound_us: int, *, after_us: int | None = None) -> pl.DataFrame | None:
        """Return the keys of rows with a time in (`after_us`, `bound_us`], or None. Called at every watermark."""
        if not len(self.rows) or bound_us < self.least_us:
            return None
        keys, least_us = self.rows.keys_until(column, bound_us, after=after_us)
        self.least_us = NEVER_US if least_us is None else least_us
        return keys if keys.height else None

    def due_us(self, after_us: int) -> int | None:
        """No row is due before this, a span after the least time; None: no row is."""
        return max(self.least_us, 0) + after_us if len(self.rows) and self.least_us < NEVER_US else None


class KeyedStore:
    """The entries of all keys of one operator."""

    def __init__(
        self,
        key_types: Mapping[str, pl.DataType],
        kinds: Sequence[tuple[CellKind, pl.DataType, pl.DataType | None]],
        state: StateBackend,
    ) -> None:
        """`kinds`: of each state what its cells have in common, the type of its values, and of a map's keys."""
        self._state = state
        self._key = tuple(key_types)
        self._key_types = dict(key_types)
        self._floats = [index for index, kind in enumerate(key_types.values()) if kind.is_float()]
        self._kinds = [kind for kind, _, _ in kinds]
        self._tables = [self._table(*kind) for kind in kinds]
        self._timers = self._made(self._key_types | _TIMERS)
        self._clocks = self._made(self._key_types | _TIMERS)
        self._entries: dict[Key, Entry] = {}
        self.touched: dict[Key, Entry] = {}
        """Entries that may have changed since they were last written back."""
        self._unlooked: dict[Key, Entry] = {}
        """Those whose event timers may have changed since `due` was last called."""
        self._soon: list[tuple[int, int, Entry]] = []
        """Entries whose event timers have changed since they were last written back, by the time of the first, and by number."""
        self._numbers = count()
        self._asked_us = NOT_YET_US
        """Up to when `due` has returned event timers."""

    def states(self) -> dict[str, State]:
        named = {f"state_{kind.name}": table.rows for kind, table in zip(self._kinds, self._tables, strict=True)}
        return {**named, "timers": self._timers.rows, "clocks": self._clocks.rows}

    def _table(self, kind: CellKind, value: pl.DataType, map_key: pl.DataType | None) -> _TimedTable:
        stamp = {_AT: pl.Int64()} if kind.ttl_us is not None else {}
        if kind.kind == "value":
            return self._made(self._key_types | {_VALUE: value} | stamp)
        columns = self._key_types | {_CHUNK: pl.Int32(), _CHUNKS: pl.Int32(), _VALUES: pl.List(value)}
        if map_key is not None:
            columns[_KEYS] = pl.List(map_key)
        if kind.ttl_us is not None:
            columns |= {_AT: pl.Int64(), _ATS: pl.List(pl.Int64())}
        return self._made(columns, sub_key=[_CHUNK])

    def _made(self, schema: Mapping[str, pl.DataType], *, sub_key: Sequence[str] = ()) -> _TimedTable:
        return _TimedTable(self._state.table(self._key, schema=schema, sub_key=sub_key), schema)

    # Entries.

    def entries(self, keys: pl.DataFrame) -> list[Entry]:
        """The entry of each key; keys do not repeat. The caller may change them."""
        names = self._tuples(keys)
        known = self._entries
        missing = [place for place, key in enumerate(names) if key not in known]
        if missing:
            wanted = keys if len(missing) == len(names) else keys[missing]
            self._read([names[place] for place in missing], wanted.select(self._key))
        found = [known[key] for key in names]
        self.touched.update(zip(names, found, strict=True))
        self._unlooked.update(zip(names, found, strict=True))
        return found

    def _tuples(self, keys: pl.DataFrame) -> list[Key]:
        columns = [keys.get_column(name).to_list() for name in self._key]
        for index in self._floats:
            # One zero and one NaN, as the tables have it.
            columns[index] = [None if x is None else math.nan if math.isnan(x) else x + 0.0 for x in columns[index]]
        return list(zip(*columns, strict=True))

    def _read(self, names: list[Key], keys: pl.DataFrame) -> None:
        columns: list[Sequence[Cell]] = []
        for kind, table in zip(self._kinds, self._tables, strict=True):
            columns.append(_values(kind, table, keys) if kind.kind == "value" else _chunked(kind, table, keys))
        cells = zip(*columns, strict=True) if columns else ((),) * len(names)
        made = [Entry(key, list(of_key)) for key, of_key in zip(names, cells, strict=True)]
        for table, attribute in ((self._timers, "timers"), (self._clocks, "clocks")):
            if not len(table.rows):
                continue
            found = table.rows.get(keys)
            for place in np.flatnonzero(found.get_column(FOUND).to_numpy()).tolist():
                row = found.row(place, named=True)
                setattr(made[place], attribute, Timers(row[_NAMES], row[_ATS], row[_SETS]))
        self._entries.update(zip(names, made, strict=True))

    def evict(self, *, settled: bool = False) -> None:
        """Evict entries if there are many, except where something counts from the next barrier on.

        `settled`: the barrier is here, so that nothing does.
        """
        if len(self._entries) <= ENTRIES_MAX:
            return
        if not settled and any(kind.by_clock and kind.ttl_us is not None for kind in self._kinds):
            return
        self.write_back()
        self._entries = {
            key: entry for key, entry in self._entries.items() if entry.clocks is not None and entry.clocks.after_us
        }
        self.touched = dict(self._entries)
        self._unlooked = dict(self._entries)

    # What is due.

    def due(self, bound_us: int, *, by_clock: bool) -> list[Entry]:
        """The entries with a timer below a time, or (by the clock) up to it. The caller may change them."""
        if by_clock:
            self._write_timers(self._clocks, "clocks")
            keys = self._clocks.keys_until(_LEAST, bound_us)
            return [] if keys is None else self.entries(keys)
        # Timers that changed since the barrier are not in the table yet: a key may have many, and this is asked often.
        for entry in self._unlooked.values():
            if entry.timers is not None and entry.timers.changed and entry.timers.at_us:
                heappush(self._soon, (entry.timers.least_us, next(self._numbers), entry))
        self._unlooked = {}
        found: dict[Key, Entry] = {}
        while self._soon and self._soon[0][0] < bound_us:
            entry = heappop(self._soon)[2]
            found[entry.key] = entry
        # Timers that were due before have fired, but the table may still have them.
        keys = self._timers.keys_until(_LEAST, bound_us - 1, after_us=self._asked_us)
        self._asked_us = bound_us - 1
        if keys is not None:
            found |= {entry.key: entry for entry in self.entries(keys)}
        self.touched |= found
        self._unlooked |= found
        return [entry for entry in found.values() if entry.timers is not None and entry.timers.least_us < bound_us]

    def forget(self, now_us: int, *, by_clock: bool, before_us: int | None) -> None:
        """Drop what has outlived its ttl. `before_us`: when that was last done; None: look whether something is due.

        By event time an expired value is not visible, so it may stay for a quarter of its ttl.
        """
        for place, (kind, table) in enumerate(zip(self._kinds, self._tables, strict=True)):
            if kind.ttl_us is None or kind.by_clock is not by_clock:
                continue
            period_us = max(1, kind.ttl_us // 4)
            if before_us is not None and before_us // period_us == now_us // period_us:
                continue
            self.write_back()
            until_us = now_us - kind.ttl_us
            keys = table.keys_until(_AT, until_us)
            if keys is not None:
                for entry in self.entries(keys.unique()):
                    entry.cells[place].drop(until_us)

    def clock_timers_due_us(self) -> int | None:
        """When the first timer by the clock is due, or earlier; None: there is none. Called after `write_back`."""
        return self._clocks.due_us(0)

    def clock_values_due_us(self) -> int | None:
        """When the first value outlives its ttl by the clock, or earlier; None: none does. Called after `write_back`."""
        timed = [
            table.due_us(kind.ttl_us)
            for kind, table in zip(self._kinds, self._tables, strict=True)
            if kind.ttl_us is not None and kind.by_clock
        ]
        return min((due_us for due_us in timed if due_us is not None), default=None)

    # Back into the tables.

    def settle(self, now_us: int) -> None:
        """The barrier is here: what was written or set by the clock since the last has a time."""
        stamped = [place for place, kind in enumerate(self._kinds) if kind.ttl_us is not None and kind.by_clock]
        for entry in self.touched.values():
            for place in stamped:
                entry.cells[place].settle(now_us)
            if entry.clocks is not None:
                entry.clocks.settle(now_us)

    def write_back(self) -> None:
        """Bring the tables up to what is in memory."""
        if not self.touched:
            return
        entries = list(self.touched.values())
        for place, (kind, table) in enumerate(zip(self._kinds, self._tables, strict=True)):
            if kind.kind == "value":
                self._write_values(table, kind, entries, place)
            else:
                self._write_chunks(table, kind, entries, place)
        self._write_timers(self._timers, "timers")
        self._write_timers(self._clocks, "clocks")
        self.touched, self._unlooked, self._soon = {}, {}, []

    def _write_values(self, table: _TimedTable, kind: CellKind, entries: list[Entry], place: int) -> None:
        kept: list[Entry] = []
        gone: list[Key] = []
        for entry in entries:
            cell: Any = entry.cells[place]
            if cell.dirty:
                cell.dirty = False
                if cell.held is None:
                    gone.append(entry.key)
                else:
                    kept.append(entry)
        cells: list[Any] = [entry.cells[place] for entry in kept]
        columns = {_VALUE: [cell.held for cell in cells]}
        if kind.ttl_us is not None:
            columns[_AT] = [cell.at_us for cell in cells]
        self._put(table, [entry.key for entry in kept], columns)
        self._delete(table, gone)

    def _write_chunks(self, table: _TimedTable, kind: CellKind, entries: list[Entry], place: int) -> None:
        keys: list[Key] = []
        gone: list[Key] = []
        columns: dict[str, list[Any]] = {_CHUNK: [], _CHUNKS: [], _VALUES: [], _KEYS: [], _ATS: [], _AT: []}
        for entry in entries:
            cell: Any = entry.cells[place]
            if not cell.dirty:
                continue
            cell.compact()
            if not any(cell.chunks):
                cell.chunks = []
            count = len(cell.chunks)
            changed = cell.dirty | ({0} if count != cell.stored else set()) | set(range(count, cell.stored))
            for number in sorted(changed):
                chunk = cell.chunks[number] if number < count else None
                if not chunk and (number or not count):
                    gone.append((*entry.key, number))
                    continue
                map_keys, values, ats_us = cell.columns(chunk)
                keys.append(entry.key)
                for column, found in (
                    (_CHUNK, number),
                    (_CHUNKS, count),
                    (_VALUES, values),
                    (_KEYS, map_keys),
                    (_ATS, ats_us),
                    (_AT, min(ats_us, default=None)),
                ):
                    columns[column].append(found)
            cell.dirty, cell.stored = set(), count
        unused = ([_KEYS] if kind.coerce_key is None else []) + ([_ATS, _AT] if kind.ttl_us is None else [])
        self._put(table, keys, {name: column for name, column in columns.items() if name not in unused})
        self._delete(table, gone, {_CHUNK: pl.Int32()})

    def _write_timers(self, table: _TimedTable, attribute: str) -> None:
        kept: list[tuple[Key, Timers]] = []
        gone: list[Key] = []
        for entry in self.touched.values():
            timers: Timers | None = getattr(entry, attribute)
            if timers is None or not timers.changed:
                continue
            timers.changed = False
            if timers.at_us:
                kept.append((entry.key, timers))
            else:
                gone.append(entry.key)
        columns: dict[str, list[Any]] = {
            _NAMES: [list(timers.at_us) for _, timers in kept],
            _ATS: [list(timers.at_us.values()) for _, timers in kept],
            _SETS: [[timers.set_us[name] for name in timers.at_us] for _, timers in kept],
            _LEAST: [timers.least_us for _, timers in kept],
        }
        self._put(table, [key for key, _ in kept], columns)
        self._delete(table, gone)

    def _put(self, table: _TimedTable, keys: list[Key], columns: dict[str, list[Any]]) -> None:
        if not keys:
            return
        schema = table.schema
        own = {name: [key[index] for key in keys] for index, name in enumerate(self._key)}
        frame = pl.DataFrame([series_of(name, values, schema[name]) for name, values in (own | columns).items()])
        table.rows.put(frame)
        for column in (_AT, _LEAST):
            if column in columns:
                table.least_us = min([table.least_us, *(at_us for at_us in columns[column] if at_us is not None)])

    def _delete(self, table: _TimedTable, keys: list[Key], more: Mapping[str, pl.DataType] = {}) -> None:
        if keys:
            types = self._key_types | dict(more)
            table.rows.delete(
                pl.DataFrame(
                    [
                        pl.Series(name, [key[index] for key in keys], dtype=dtype)
                        for index, (name, dtype) in enumerate(types.items())
                    ]
                )
            )


_TIMERS: Final[dict[str, pl.DataType]] = {
    _NAMES: pl.List(pl.String()),
    _ATS: pl.List(pl.Int64()),
    _SETS: pl.List(pl.Int64()),
    _LEAST: pl.Int64(),
}


def _values(kind: CellKind, table: _TimedTable, keys: pl.DataFrame) -> Sequence[Cell]:
    if not len(table.rows):
        return [ValueCell(kind) for _ in range(keys.height)]
    found = table.rows.get(keys)
    held = found.get_column(_VALUE).to_list()
    if kind.ttl_us is None:
        return [ValueCell(kind, value) for value in held]
    ats_us = found.get_column(_AT).fill_null(NOT_YET_US).to_list()
    return [ValueCell(kind, value, at_us) for value, at_us in zip(held, ats_us, strict=True)]


def _chunked(kind: CellKind, table: _TimedTable, keys: pl.DataFrame) -> Sequence[Cell]:
    """The cells of lists and maps. Their items are made when they are needed."""
    make = ListCell if kind.kind == "list" else MapCell
    if not len(table.rows):
        return [make(kind) for _ in range(keys.height)]
    first = table.rows.get(keys.with_columns(pl.lit(0, dtype=pl.Int32()).alias(_CHUNK)))
    counts = first.get_column(_CHUNKS).fill_null(0).cast(pl.Int64).to_numpy()
    owners = np.repeat(np.arange(counts.size), counts)
    starts = np.cumsum(counts) - counts
    numbers = np.arange(owners.size) - np.repeat(starts, counts)
    rows = table.rows.get(keys[owners].with_columns(pl.Series(_CHUNK, numbers, dtype=pl.Int32())))
    return [
        make(kind, partial(_items, kind, rows.slice(start, count))) if count else make(kind)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]


def _items(kind: CellKind, rows: pl.DataFrame) -> list[Any]:
    chunks: list[Any] = []
    values: Iterable[list[Any] | None] = rows.get_column(_VALUES).to_list()
    ats_us = rows.get_column(_ATS).to_list() if kind.ttl_us is not None else [None] * rows.height
    map_keys = rows.get_column(_KEYS).to_list() if kind.coerce_key is not None else [None] * rows.height
    for of_keys, of_values, of_ats_us in zip(map_keys, values, ats_us, strict=True):
        held = of_values or []
        items = list(zip(held, of_ats_us or [NOT_YET_US] * len(held), strict=True))
        chunks.append(
            items if of_keys is None and kind.coerce_key is None else dict(zip(of_keys or [], items, strict=True))
        )
    return chunks
