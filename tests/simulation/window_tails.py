"""Windows at the end of a random pipeline: sliding, session and by count, with aggregates that go by order or keep values."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from tests.simulation.query_tails import VALUES, values_of
from tests.simulation.rows import Row, SimulationError, check_equal, in_order, second_of
from tests.simulation.tails import MORE, OUT, STEP, Given, Sinks, Tail, attach_sinks, by_key

from fordstone.api.stream import Stream
from fordstone.api.windows import by_count, session, sliding
from fordstone.plan.plan import Window

# By count, rows of one time are ordered by what is read, in this order: so, by id.
AGGREGATES: Final = {
    "total": "sum(id)",
    "rows": "count(*)",
    "earliest": "first(n)",
    "newest": "last(n)",
    "spread": "var_pop(id)",
    **VALUES,
    "ids": "collect(id)",
}
_COLUMNS: Final = ("k", "window_start", "window_end", *AGGREGATES)
Opened = tuple[int, int, int, list[Row]]
"""Of a window: its key, start, end and rows."""


@dataclass(frozen=True, slots=True)
class WindowTail(Tail):
    """A window of some kind, with all aggregates."""

    early_us: int | None
    """How often early results come."""
    allowed: int
    """How long a window is kept after its end, in seconds."""

    @property
    def replaces(self) -> bool:
        """Whether results replace each other."""
        return self.early_us is not None or self.allowed > 0

    @abstractmethod
    def window(self) -> Window:
        """The window, as a pipeline declares it."""

    @abstractmethod
    def is_late(self, row: Row, watermark: int) -> bool:
        """Whether a row lies in windows all of which are closed for it."""

    @abstractmethod
    def windows(self, k: int, rows: list[Row], watermarks: Mapping[int, int]) -> Iterator[Opened]:
        """The windows of a key, of its rows in order of time, each judged by its watermark."""

    @abstractmethod
    def check_members(self, rows: list[Row], found: list[Opened]) -> None:
        """Check which of the rows that were not late are in which windows, where it is not known what they were judged by."""

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        early = None if self.early_us is None else f"{self.early_us}us"
        allowed = f"{self.allowed}s" if self.allowed else None
        grouped = stream.group_by("k").window(self.window(), early=early, allowed_lateness=allowed)
        made = grouped.agg(name=STEP, **AGGREGATES)
        attach_sinks(sinks, made, late=made.late, more=made.final() if self.replaces else None)

    def judge(self, given: Given) -> None:
        """Each window once, as it must be; and the last early result of each is the same."""
        rows = in_order(given.in_time(given.rows, is_late=self.is_late))
        final = list(_whole(given.found(MORE if self.replaces else OUT, *_COLUMNS)))
        known = given.watermarks
        if known is None:
            by_id = {row.id: row for row in rows}
            opened = [(k, start, end, [by_id[one] for one in ids]) for k, start, end, *_, ids in final]
            self.check_members(rows, opened)
        else:
            opened = [one for k, some in by_key(rows).items() for one in self.windows(k, some, known)]
        wanted = Counter(_shown(*one) for one in opened)
        check_equal("windows of the tail", Counter(final), wanted)
        if self.replaces:
            latest = {one[:3]: one for one in _whole(given.found(OUT, *_COLUMNS))}
            check_equal("last results of the tail", Counter(latest.values()), wanted)

    def counted(self, given: Given) -> Counter[int] | None:
        """What windows have collected."""
        return Counter(one for (ids,) in given.found(MORE if self.replaces else OUT, "ids") for one in ids)


def _shown(k: int, start: int, end: int, rows: list[Row]) -> tuple[Any, ...]:
    """A window with its aggregates. The variance, of whole numbers, is a whole number times the count's square."""
    ids = [row.id for row in rows]
    by_time = sorted((row.second, row.n) for row in rows)
    total, count = sum(ids), len(rows)
    spread = count * sum(one * one for one in ids) - total * total
    return k, start, end, total, count, by_time[0][1], by_time[-1][1], spread, *values_of(rows), tuple(ids)


def _whole(found: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for k, start, end, total, count, earliest, newest, spread, *values, ids in found:
        scaled = spread * count * count
        if abs(scaled - round(scaled)) > 1e-3:
            raise SimulationError(f"window of {ids}: a variance of {spread}")
        yield k, second_of(start), second_of(end), total, count, earliest, newest, round(scaled), *values, tuple(ids)


@dataclass(frozen=True, slots=True)
class SlidingTail(WindowTail):
    """Windows that overlap, or leave gaps."""

    size: int
    every: int
    offset: int

    def window(self) -> Window:
        """By time."""
        return sliding(f"{self.size}s", every=f"{self.every}s", offset=f"{self.offset}s")

    def ends(self, row: Row) -> list[int]:
        """The ends of the windows that a row lies in."""
        starts = range(row.second - self.size + 1, row.second + 1)
        return [start + self.size for start in starts if (start - self.offset) % self.every == 0]

    def is_late(self, row: Row, watermark: int) -> bool:
        """A row in a gap is not."""
        ends = self.ends(row)
        return bool(ends) and max(ends) + self.allowed <= watermark

    def windows(self, k: int, rows: list[Row], watermarks: Mapping[int, int]) -> Iterator[Opened]:
        """A row counts in each of its windows that is open for it."""
        found: dict[int, list[Row]] = {}
        for row in rows:
            for end in self.ends(row):
                if end + self.allowed > watermarks[row.id]:
                    found.setdefault(end, []).append(row)
        for end, some in found.items():
            yield k, end - self.size, end, some

    def check_members(self, rows: list[Row], found: list[Opened]) -> None:
        """Each row is in the last of its windows, and in all that follow one that it is in."""
        held = Counter((row.id, end) for _, _, end, some in found for row in some)
        for row in rows:
            ends = self.ends(row)
            mine = [held.pop((row.id, end), 0) for end in ends]
            check_equal(f"windows {ends} of row {row.id}, of which {mine}", mine, sorted(mine))
            check_equal(f"last window of row {row.id}", mine[-1:], [1] * bool(ends))
        check_equal("rows in windows that they do not lie in", held, Counter())

    def counted(self, given: Given) -> Counter[int] | None:
        """As others, unless rows fall into gaps."""
        return None if self.every > self.size else super(SlidingTail, self).counted(given)

    def counts_max(self) -> int:
        """A row is in several."""
        return -(-self.size // self.every)


@dataclass(frozen=True, slots=True)
class SessionTail(WindowTail):
    """Rows that follow each other closely."""

    gap: int

    def window(self) -> Window:
        """By activity."""
        return session(f"{self.gap}s")

    def is_late(self, row: Row, watermark: int) -> bool:
        """Even a session of its own would be closed."""
        return row.second + self.gap <= watermark

    def windows(self, k: int, rows: list[Row], watermarks: Mapping[int, int]) -> Iterator[Opened]:
        """Row by row, as time lets them in: a session is closed for a row when it ends at or before its watermark."""
        some: list[Row] = []
        for turn, row in sorted(((max(row.second, watermarks[row.id]), row) for row in rows), key=lambda one: one[0]):
            if some and max(one.second for one in some) + self.gap <= turn:
                yield self._session(k, some)
                some = []
            some.append(row)
        yield self._session(k, some)

    def check_members(self, rows: list[Row], found: list[Opened]) -> None:
        """Each row is in one session, and none of these has a gap."""
        held = Counter(row.id for _, _, _, some in found for row in some)
        check_equal("rows in sessions", held, Counter(row.id for row in rows))
        for k, start, end, some in found:
            check_equal("a session", (k, start, end, some), self._session(k, some))
            gaps = [after.second - before.second for before, after in pairwise(in_order(some))]
            check_equal(f"gaps of session {start}", [gap for gap in gaps if gap >= self.gap], [])

    def _session(self, k: int, rows: list[Row]) -> Opened:
        some = in_order(rows)
        return k, some[0].second, some[-1].second + self.gap, some


@dataclass(frozen=True, slots=True)
class CountTail(WindowTail):
    """A number of rows."""

    size: int
    every: int

    def window(self) -> Window:
        """By count."""
        return by_count(self.size, every=self.every)

    def is_late(self, row: Row, watermark: int) -> bool:
        """Rows are counted in order."""
        return row.second < watermark

    def check_members(self, rows: list[Row], found: list[Opened]) -> None:
        """Of rows that were not late, nothing more need be known."""
        wanted = [one for k, some in by_key(rows).items() for one in self.windows(k, some, {})]
        check_equal("windows by count", sorted(found, key=str), sorted(wanted, key=str))

    def windows(self, k: int, rows: list[Row], watermarks: Mapping[int, int]) -> Iterator[Opened]:
        """Those that fill."""
        del watermarks
        for start in range(0, len(rows) - self.size + 1, self.every):
            some = rows[start : start + self.size]
            yield k, some[0].second, some[-1].second, some

    def counted(self, given: Given) -> Counter[int] | None:
        """Nothing: what does not fill is not emitted."""
        del given
        return None


@dataclass(frozen=True, slots=True)
class ForgettingTail(Tail):
    """A running aggregate that forgets keys which were silent: the newest session of each key, kept up to date."""

    ttl: int

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        made = stream.group_by("k").agg(name=STEP, ttl=f"{self.ttl}s", c="count(*)", total="sum(id)")
        attach_sinks(sinks, made, late=made.late)

    def judge(self, given: Given) -> None:
        """The last result of each key has the rows since it was silent, where it is known what rows were judged by."""
        sessions = SessionTail(early_us=None, allowed=0, gap=self.ttl)
        rows = in_order(given.in_time(given.rows, is_late=sessions.is_late))
        if given.watermarks is None:
            return
        wanted = {}
        for k, some in by_key(rows).items():
            *_, newest = sessions.windows(k, some, given.watermarks)
            wanted[k] = (k, len(newest[3]), sum(row.id for row in newest[3]))
        latest = {one[0]: one for one in given.found(OUT, "k", "c", "total")}
        check_equal("last results of the tail", latest, wanted)
