"""Windows at the end of a random pipeline: sliding, session and by count, with aggregates that go by order or keep values."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.rows import Row, SimulationError, check_equal, in_order, second_of
from tests.simulation.tails import MORE, OUT, STEP, Given, Sinks, Tail, attach_sinks, by_key

from fordstone.api.stream import Stream, by_count, session, sliding
from fordstone.plan.plan import Window

# By count, rows of one time are ordered by what is read, in this order: so, by id.
AGGREGATES: Final = {
    "total": "sum(id)",
    "rows": "count(*)",
    "earliest": "first(n)",
    "newest": "last(n)",
    "spread": "var_pop(id)",
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

    @abstractmethod
    def window(self) -> Window:
        """The window, as a pipeline declares it."""

    @abstractmethod
    def windows(self, k: int, rows: list[Row]) -> Iterator[Opened]:
        """The windows of a key, of its rows in their order."""

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        early = None if self.early_us is None else f"{self.early_us}us"
        made = stream.group_by("k").window(self.window(), early=early).agg(name=STEP, **AGGREGATES)
        attach_sinks(sinks, made, late=made.late, more=None if early is None else made.final())

    def judge(self, given: Given) -> None:
        """Each window once, as it must be; and the last early result of each is the same."""
        rows = in_order(given.in_time(given.rows))
        wanted = Counter(_shown(*one) for k, some in by_key(rows).items() for one in self.windows(k, some))
        if self.early_us is None:
            check_equal("windows of the tail", Counter(_whole(given.found(OUT, *_COLUMNS))), wanted)
            return
        check_equal("final windows of the tail", Counter(_whole(given.found(MORE, *_COLUMNS))), wanted)
        latest = {one[:3]: one for one in _whole(given.found(OUT, *_COLUMNS))}
        check_equal("last early results of the tail", Counter(latest.values()), wanted)

    def counted(self, given: Given) -> Counter[int] | None:
        """What windows have collected."""
        return Counter(one for (ids,) in given.found(OUT if self.early_us is None else MORE, "ids") for one in ids)


def _shown(k: int, start: int, end: int, rows: list[Row]) -> tuple[Any, ...]:
    """A window with its aggregates. The variance, of whole numbers, is a whole number times the count's square."""
    ids = [row.id for row in rows]
    by_time = sorted((row.second, row.n) for row in rows)
    total, count = sum(ids), len(rows)
    spread = count * sum(one * one for one in ids) - total * total
    return k, start, end, total, count, by_time[0][1], by_time[-1][1], spread, tuple(ids)


def _whole(found: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for k, start, end, total, count, earliest, newest, spread, ids in found:
        scaled = spread * count * count
        if abs(scaled - round(scaled)) > 1e-3:
            raise SimulationError(f"window of {ids}: a variance of {spread}")
        yield k, second_of(start), second_of(end), total, count, earliest, newest, round(scaled), tuple(ids)


@dataclass(frozen=True, slots=True)
class SlidingTail(WindowTail):
    """Windows that overlap, or leave gaps."""

    size: int
    every: int
    offset: int

    def window(self) -> Window:
        """By time."""
        return sliding(f"{self.size}s", every=f"{self.every}s", offset=f"{self.offset}s")

    def windows(self, k: int, rows: list[Row]) -> Iterator[Opened]:
        """Every start that any row lies after, near enough."""
        starts = {
            start
            for row in rows
            for start in range(row.second - self.size + 1, row.second + 1)
            if (start - self.offset) % self.every == 0
        }
        for start in starts:
            yield k, start, start + self.size, [row for row in rows if start <= row.second < start + self.size]

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

    def windows(self, k: int, rows: list[Row]) -> Iterator[Opened]:
        """Cut wherever there is a gap."""
        cuts = [at for at in range(1, len(rows)) if rows[at].second - rows[at - 1].second >= self.gap]
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            some = rows[start:stop]
            yield k, some[0].second, some[-1].second + self.gap, some


@dataclass(frozen=True, slots=True)
class CountTail(WindowTail):
    """A number of rows."""

    size: int
    every: int

    def window(self) -> Window:
        """By count."""
        return by_count(self.size, every=self.every)

    def windows(self, k: int, rows: list[Row]) -> Iterator[Opened]:
        """Those that fill."""
        for start in range(0, len(rows) - self.size + 1, self.every):
            some = rows[start : start + self.size]
            yield k, some[0].second, some[-1].second, some

    def counted(self, given: Given) -> Counter[int] | None:
        """Nothing: what does not fill is not emitted."""
        del given
        return None
