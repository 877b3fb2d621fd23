"""More nodes of the oracle: one for each kind of step, row by row in plain Python. See `oracle`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.spark.oracle import Node, Record, Time, key_of, rank, shown_key, time_of

Made = Mapping[str, Callable[[list[Record]], Any]]


class Sliding(Node):
    """Windows by time that overlap, or leave gaps. A row counts in each that is open for it, and is late if none is."""

    def __init__(
        self,
        sources: frozenset[str],
        keys: Sequence[str],
        aggregates: Made,
        *,
        size_us: int,
        slide_us: int,
        offset_us: int,
        time: Time,
    ) -> None:
        super().__init__(sources)
        self._keys, self._aggregates, self._time = tuple(keys), aggregates, time
        self._size_us, self._slide_us, self._offset_us = size_us, slide_us, offset_us
        self._open: dict[tuple[int, tuple[Any, ...]], list[Record]] = {}

    def push(self, row: Record, *, watermark: float) -> None:
        us = self._time(row)
        last = (us - self._offset_us) // self._slide_us * self._slide_us + self._offset_us
        starts = [start for start in range(last, last - self._size_us, -self._slide_us) if start + self._size_us > us]
        still_open = [start for start in starts if start + self._size_us > max(watermark, self.us)]
        if starts and not still_open:
            self.give_late(row)
        for start in still_open:
            self._open.setdefault((start + self._size_us, key_of(row, self._keys)), []).append(row)

    def on_time(self, us: float) -> None:
        self.us = us
        for end, key in [at for at in self._open if at[0] <= us]:
            rows = self._open.pop((end, key))
            shown = {name: shown_key(rows[0][name]) for name in self._keys}
            made = {name: aggregate(rows) for name, aggregate in self._aggregates.items()}
            self.give(shown | {"window_start": time_of(end - self._size_us), "window_end": time_of(end)} | made)


class Waiting(Node):
    """Takes rows in order of time, then of columns, once time has passed them."""

    def __init__(self, sources: frozenset[str], columns: Sequence[str], time: Time) -> None:
        super().__init__(sources)
        self._columns, self._time = tuple(columns), time
        self._rows: list[Record] = []

    def push(self, row: Record, *, watermark: float) -> None:
        if self._time(row) < max(watermark, self.us):
            self.give_late(row)
        else:
            self._rows.append(row)

    def on_time(self, us: float) -> None:
        self.us = us
        due = [row for row in self._rows if self._time(row) < us]
        self._rows = [row for row in self._rows if self._time(row) >= us]
        due.sort(key=lambda row: (self._time(row), [rank(row[name]) for name in self._columns]))
        for row in due:
            self.take(row)

    def take(self, row: Record) -> None:
        raise NotImplementedError


class Sessions(Node):
    """Rows of a key with less than the gap between them."""

    def __init__(
        self, sources: frozenset[str], keys: Sequence[str], aggregates: Made, *, gap_us: int, time: Time
    ) -> None:
        super().__init__(sources)
        self._keys, self._aggregates, self._gap_us, self._time = tuple(keys), aggregates, gap_us, time
        self._rows: dict[tuple[Any, ...], list[tuple[float, Record]]] = {}
        """By key: rows, each with when it takes its turn."""

    def push(self, row: Record, *, watermark: float) -> None:
        us, judged_by = self._time(row), max(watermark, self.us)
        if us + self._gap_us <= judged_by:
            self.give_late(row)
        else:
            self._rows.setdefault(key_of(row, self._keys), []).append((max(us, judged_by), row))

    def on_time(self, us: float) -> None:
        self.us = us
        for key, rows in list(self._rows.items()):
            rows.sort(key=lambda one: one[0])
            sessions: list[list[tuple[float, Record]]] = []
            for turn, row in rows:
                if sessions and turn - max(self._time(one) for _, one in sessions[-1]) < self._gap_us:
                    sessions[-1].append((turn, row))
                else:
                    sessions.append([(turn, row)])
            left: list[tuple[float, Record]] = []
            for session in sessions:
                found = sorted((row for _, row in session), key=self._time)
                end = self._time(found[-1]) + self._gap_us
                if end > us:
                    left += session
                    continue
                shown = {name: shown_key(found[0][name]) for name in self._keys}
                made = {name: aggregate(found) for name, aggregate in self._aggregates.items()}
                self.give(shown | {"window_start": time_of(self._time(found[0])), "window_end": time_of(end)} | made)
            self._rows[key] = left


class Counts(Waiting):
    """Windows of a number of rows of a key."""

    def __init__(
        self,
        sources: frozenset[str],
        keys: Sequence[str],
        aggregates: Made,
        *,
        size: int,
        slide: int,
        columns: Sequence[str],
        time: Time,
    ) -> None:
        super().__init__(sources, columns, time)
        self._keys, self._aggregates, self._size, self._slide = tuple(keys), aggregates, size, slide
        self._seen: dict[tuple[Any, ...], list[Record]] = {}

    def take(self, row: Record) -> None:
        seen = self._seen.setdefault(key_of(row, self._keys), [])
        seen.append(row)
        if len(seen) >= self._size and (len(seen) - self._size) % self._slide == 0:
            rows = seen[-self._size :]
            shown = {name: shown_key(rows[0][name]) for name in self._keys}
            made = {name: aggregate(rows) for name, aggregate in self._aggregates.items()}
            ends = {"window_start": time_of(self._time(rows[0])), "window_end": time_of(self._time(rows[-1]))}
            self.give(shown | ends | made)


class First(Waiting):
    """The first row of each key within a time."""

    def __init__(
        self, sources: frozenset[str], keys: Sequence[str], *, within_us: int, columns: Sequence[str], time: Time
    ) -> None:
        super().__init__(sources, columns, time)
        self._keys, self._within_us = tuple(keys), within_us
        self._kept_us: dict[tuple[Any, ...], int] = {}

    def take(self, row: Record) -> None:
        key, us = key_of(row, self._keys), self._time(row)
        if key not in self._kept_us or us - self._kept_us[key] >= self._within_us:
            self._kept_us[key] = us
            self.give(row)


class Joined(Node):
    """Pairs of rows of two streams. Which side a row is of stands in its column `side`; see `Side`."""

    def __init__(
        self,
        sources: frozenset[str],
        *,
        how: str,
        key: str,
        from_us: int,
        to_us: int,
        times: tuple[Time, Time],
        pair: Callable[[Record | None, Record | None], Record],
    ) -> None:
        super().__init__(sources)
        self._how, self._key, self._from_us, self._to_us = how, key, from_us, to_us
        self._times, self._pair = times, pair
        self._rows: tuple[list[list[Any]], list[list[Any]]] = ([], [])
        """Of each side: a row, and whether it has had a partner."""

    def push(self, row: Record, *, watermark: float) -> None:
        side = row.pop("side")
        if self._times[side](row) < max(watermark, self.us):
            self.give_late(self._pair(row, None) if side == 0 else self._pair(None, row))
            return
        mine = [row, False]
        self._rows[side].append(mine)
        for other in self._rows[1 - side]:
            left, right = (row, other[0]) if side == 0 else (other[0], row)
            between = self._times[1](right) - self._times[0](left)
            same = row[self._key] is not None and key_of(left, (self._key,)) == key_of(right, (self._key,))
            if same and self._from_us <= between <= self._to_us:
                mine[1] = other[1] = True
                self.give(self._pair(left, right))

    def on_time(self, us: float) -> None:
        self.us = us
        until = (self._to_us, -self._from_us)
        for side, names in enumerate((("left", "full"), ("right", "full"))):
            kept = []
            for row, met in self._rows[side]:
                if self._times[side](row) + max(until[side], 0) >= us:
                    kept.append([row, met])
                elif not met and self._how in names:
                    self.give(self._pair(row, None) if side == 0 else self._pair(None, row))
            self._rows[side][:] = kept


def first_of(column: str, time: Time) -> Callable[[list[Record]], Any]:
    return lambda rows: min(rows, key=lambda row: (time(row), rank(row[column])))[column]


def last_of(column: str, time: Time) -> Callable[[list[Record]], Any]:
    return lambda rows: max(rows, key=lambda row: (time(row), rank(row[column])))[column]


def variance_of(column: str, *, less: int) -> Callable[[list[Record]], Any]:
    def found(rows: list[Record]) -> Any:
        values = [float(row[column]) for row in rows if row[column] is not None]
        if len(values) <= less:
            return None
        mean = math.fsum(values) / len(values)
        return math.fsum((value - mean) ** 2 for value in values) / (len(values) - less)

    return found


def collected(column: str, time: Time) -> Callable[[list[Record]], Any]:
    def found(rows: list[Record]) -> Any:
        ordered = sorted(rows, key=lambda row: (time(row), rank(row[column])))
        return [row[column] for row in ordered if row[column] is not None]

    return found


class Smooth(Waiting):
    """EWMA."""

    def __init__(
        self,
        sources: frozenset[str],
        keys: Sequence[str],
        *,
        alpha: float,
        read: str,
        new: str,
        columns: Sequence[str],
        time: Time,
    ) -> None:
        super().__init__(sources, [read, *(name for name in columns if name != read)], time)
        self._keys, self._alpha, self._read, self._new = tuple(keys), alpha, read, new
        self._means: dict[tuple[Any, ...], float] = {}

    def take(self, row: Record) -> None:
        key, value = key_of(row, self._keys), row[self._read]
        if value is not None:
            before = self._means.get(key)
            value = float(value)
            self._means[key] = value if before is None else self._alpha * value + (1 - self._alpha) * before
        self.give(row | {self._new: self._means.get(key)})


class HalfLife(Waiting):
    """Means whose weights halve with time."""

    def __init__(
        self,
        sources: frozenset[str],
        keys: Sequence[str],
        *,
        half_life_us: int,
        read: str,
        new: str,
        columns: Sequence[str],
        time: Time,
    ) -> None:
        super().__init__(sources, [read, *(name for name in columns if name != read)], time)
        self._keys, self._half_life_us, self._read, self._new = tuple(keys), half_life_us, read, new
        self._sums: dict[tuple[Any, ...], tuple[float, float, int]] = {}

    def take(self, row: Record) -> None:
        key, value, us = key_of(row, self._keys), row[self._read], self._time(row)
        if value is not None:
            total, weights, before_us = self._sums.get(key, (0.0, 0.0, us))
            kept = 0.5 ** ((us - before_us) / self._half_life_us)
            self._sums[key] = (total * kept + float(value), weights * kept + 1, us)
        found = self._sums.get(key)
        self.give(row | {self._new: None if found is None else found[0] / found[1]})


class Adjacent(Waiting):
    """Two rows of a key right after each other that fulfil a condition each; no row can fulfil both."""

    def __init__(
        self,
        sources: frozenset[str],
        keys: Sequence[str],
        *,
        first: Callable[[Record], bool],
        second: Callable[[Record], bool],
        pair: Callable[[Record, Record], Record],
        columns: Sequence[str],
        time: Time,
    ) -> None:
        super().__init__(sources, columns, time)
        self._keys, self._first, self._second, self._pair = tuple(keys), first, second, pair
        self._last: dict[tuple[Any, ...], Record] = {}

    def take(self, row: Record) -> None:
        key = key_of(row, self._keys)
        before = self._last.get(key)
        if before is not None and self._first(before) and self._second(row):
            self.give(self._pair(before, row))
        self._last[key] = row


class Numbered(Waiting):
    """Every row with its number in its key, and the number once more when a key has been silent for a while."""

    def __init__(
        self, sources: frozenset[str], key: str, *, silence_us: int, columns: Sequence[str], time: Time
    ) -> None:
        super().__init__(sources, columns, time)
        self._key, self._silence_us = key, silence_us
        self._counts: dict[Any, int] = {}
        self._timers: dict[Any, int] = {}

    def take(self, row: Record) -> None:
        key, us = row[self._key], self._time(row)
        if key in self._timers and self._timers[key] < us:
            self._ring(key)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._timers[key] = us + self._silence_us
        self.give({self._key: key, "number": self._counts[key], "at": time_of(us), "rang": False})

    def on_time(self, us: float) -> None:
        super().on_time(us)
        for key in [key for key, at in self._timers.items() if at < us]:
            self._ring(key)

    def _ring(self, key: Any) -> None:
        at = self._timers.pop(key)
        self.give({self._key: key, "number": self._counts[key], "at": time_of(at), "rang": True})
