"""Going through the rows of one key: which first rows are followed, and when what is found is given out.

Where every first row may have a match of its own (`skip` none and next), starts go side by side (`SideBySide`). Where a match
decides which rows may begin the next one (`past_last`, `first`, `last`), one start is followed at a time (`InTurn`): the rows
behind its first are held until it is decided, and gone through again for the next. So a long match costs each row once,
and what began inside of it costs nothing. Where threads of a start that came to nothing stood is remembered at every
`STRIDE`-th row: a later start that stands nowhere else there comes to nothing as well, and is not followed any further.

Rows that fulfil no condition are never seen here. Where it matters that they were there, `gap` says so.

Invariants: starts are in order of their first row; what is found, and the time at which it counts as decided, is a function of
the key's rows and of the watermark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fordstone.lang.duration import TIME_MAX_US
from fordstone.operators.match.automaton import Node, Row
from fordstone.operators.match.candidate import Going, Rules, Standing, Start

GAP: Final = -1
"""The bits of a row that stands for others, which fulfil no condition."""
STRIDE: Final = 16
STANDINGS_MAX: Final = 100_000
"""About so much is remembered of a start, and of those before it. What is forgotten costs no more than time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A match, or (`ran_out`) a beginning whose time was over."""

    node: Node
    decided_us: int
    ran_out: bool = False
    number: int = 0
    """The how-manieth match of its key."""


class KeyMatcher(ABC):
    """The beginnings of one key."""

    __slots__ = ("_going", "_rules", "dropped", "found", "held", "matches", "places", "starts")

    def __init__(self, rules: Rules, going: Going) -> None:
        self._rules = rules
        self._going = going
        self.starts: list[Start] = []
        """What is undecided."""
        self.held: list[Row] = []
        """Rows that are gone through again for the next start; with gaps among them."""
        self.places = 0
        """The place of the key's next row."""
        self.matches = 0
        self.found: list[Found] = []
        """What was found and not yet taken away."""
        self.dropped = 0
        """How many beginnings gave way because there were too many."""

    @property
    def deadline_us(self) -> int | None:
        """When the oldest start runs out of time."""
        if self._rules.within_us is None or not self.starts:
            return None
        return min(self.starts[0].row.time_us + self._rules.within_us, TIME_MAX_US)

    @abstractmethod
    def take(self, row: Row) -> None:
        """Take in the next row that fulfils a condition; time has been passed up to it, and gaps before it are known."""

    @abstractmethod
    def gap(self, place: int, time_us: int) -> None:
        """A row has come right behind the last one that was taken in, and fulfils no condition."""

    @abstractmethod
    def end(self) -> None:
        """No row comes any more at all: what is best so far counts, as of its own last row."""

    @abstractmethod
    def _settle(self, time_us: int | None) -> None:
        """Give out and let go of what is decided."""

    def pass_time(self, time_us: int) -> None:
        """No row before this time comes any more: starts that are too old run out."""
        while (over_us := self.deadline_us) is not None and over_us <= time_us:
            nodes = self._going.run_out(self.starts[0])
            self.found += [Found(node=node, decided_us=over_us, ran_out=True) for node in nodes]
            self._settle(over_us)

    def _give(self, start: Start, time_us: int | None) -> None:
        """Give out the matches of a start."""
        nodes, start.accepted = start.accepted, []
        if start.decided and start.found is not None:
            nodes.append(start.found)
        for node in nodes:
            self.matches += 1
            decided_us = node.row.time_us if time_us is None else time_us
            self.found.append(Found(node=node, decided_us=decided_us, number=self.matches))


class SideBySide(KeyMatcher):
    """Every first row is followed at once."""

    __slots__ = ()

    def take(self, row: Row) -> None:
        """Offer the row to all starts, and let it begin one."""
        begins, matters = self._rules.automaton.role(row.bits)
        if matters and self.starts:
            for start in self.starts:
                self._going.offer(start, row)
            self._settle(row.time_us)
        if begins and (fresh := self._going.begin(row)) is not None:
            self.starts.append(fresh)
            if fresh.decided or fresh.accepted:
                self._settle(row.time_us)
            # Each start has a thread at least, so few starts are few threads, mostly.
            if len(self.starts) > self._rules.threads_max:
                self._give_way(row.time_us)
        if matters:
            self._give_way(row.time_us)

    def gap(self, place: int, time_us: int) -> None:  # noqa: ARG002 - rows are not held here
        """Tell all starts."""
        for start in self.starts:
            self._going.gap(start)
        self._settle(time_us)

    def end(self) -> None:
        """All at once."""
        for start in self.starts:
            self._going.give_up(start)
        self._settle(None)

    def _settle(self, time_us: int | None) -> None:
        for start in self.starts:
            if start.decided or start.accepted:
                self._give(start, time_us)
        self.starts = [start for start in self.starts if not start.decided]

    def _give_way(self, time_us: int) -> None:
        """Where there are too many threads, those of the oldest go."""
        excess = sum(len(start.threads) for start in self.starts) - self._rules.threads_max
        if excess <= 0:
            return
        for start in self.starts:
            going = min(excess, len(start.threads))
            excess -= going
            self.dropped += going
            start.threads = start.threads[: len(start.threads) - going]
            if not start.threads:
                self._going.give_up(start)
        self._settle(time_us)


class InTurn(KeyMatcher):
    """One first row is followed after the other."""

    __slots__ = ("_dead",)

    def __init__(self, rules: Rules, going: Going) -> None:
        super().__init__(rules, going)
        self._dead: dict[int, set[Standing]] = {}
        """Where threads stood, at some places, of which nothing came. Saves work and decides nothing; no part of the state."""

    def take(self, row: Row) -> None:
        """Offer the row to the start, and hold it; or let it begin one."""
        if self.starts:
            self.held.append(row)
        self._go(row)
        if self.starts and self.starts[0].decided:
            self._settle(row.time_us)
        if self.starts and len(self.held) + len(self.starts[0].threads) > self._rules.threads_max:
            self._give_way(row.time_us)

    def gap(self, place: int, time_us: int) -> None:
        """Tell the start, and hold it."""
        if self.starts:
            self.take(Row(place, time_us, GAP, ()))

    def end(self) -> None:
        """One after the other, with the rows that are held."""
        while self.starts:
            self._going.give_up(self.starts[0])
            self._settle(None)

    def _go(self, row: Row) -> None:
        """Offer a row to the start, or let it begin one."""
        if row.bits == GAP:
            for start in self.starts:
                self._going.gap(start)
            return
        begins, matters = self._rules.automaton.role(row.bits)
        if self.starts:
            if matters:
                self._going.offer(self.starts[0], row)
        elif begins and (fresh := self._going.begin(row)) is not None:
            self.starts.append(fresh)
        if self.starts and row.place % STRIDE == 0 and self._going.merges:
            self._track(self.starts[0], row)

    def _track(self, start: Start, row: Row) -> None:
        """Remember where the start stands; let go of it where that has come to nothing before."""
        if start.decided or len(start.threads) * (len(start.trail) + 1) > STANDINGS_MAX:
            return
        stands = self._going.standings(start, row)
        if stands <= self._dead.get(row.place, set()):
            start.threads, start.decided = [], True
        else:
            start.trail[row.place] = stands

    def _learn(self, start: Start) -> None:
        """The start is decided: nothing will come of where it stood, if nothing came of it by its rows alone."""
        if start.found is not None or not start.trail:
            return
        if sum(map(len, self._dead.values())) > STANDINGS_MAX:
            self._dead = {}
        for place, stands in start.trail.items():
            self._dead.setdefault(place, set()).update(stands)

    def _settle(self, time_us: int | None) -> None:
        """Give out what is decided, and go through the rows that are held again, from where the next may begin."""
        rows, at = self.held, 0
        while True:
            if self.starts and self.starts[0].decided:
                start = self.starts.pop()
                self._learn(start)
                self._give(start, time_us)
                at = bisect_left(rows, self._goes_on(start), key=_place)
            if at == len(rows):
                break
            self._go(rows[at])
            at += 1
        self._hold(rows)

    def _hold(self, rows: list[Row]) -> None:
        """Hold the rows behind the first of the start."""
        self.held = rows[bisect_left(rows, self.starts[0].row.place + 1, key=_place) :] if self.starts else []
        first = self.held[0].place if self.held else None
        self._dead = {} if first is None else {at: stood for at, stood in self._dead.items() if at >= first}

    def _goes_on(self, start: Start) -> int:
        """The place from which on there may be another match after this start."""
        behind, node = start.row.place + 1, start.found
        if node is None:
            return behind
        if self._rules.skip == "past_last":
            return node.row.place + 1
        places = [part.row.place for part in node.path() if part.stage == self._rules.skip_to]
        if not places:
            return behind
        return max(behind, places[0] if self._rules.skip == "first" else places[-1])

    def _give_way(self, time_us: int) -> None:
        """There is too much: the start goes, and all that might begin in the older half of what is held."""
        threads_max = self._rules.threads_max
        if len(self.starts[0].threads) > threads_max:
            start = self.starts[0]
            self.dropped += len(start.threads) - threads_max
            start.threads, start.trail = start.threads[:threads_max], {}
        while self.starts and len(self.held) + len(self.starts[0].threads) > threads_max:
            before = len(self.held)
            self.held = self.held[-max(threads_max // 2, 1) :]
            self.dropped += 1 + before - len(self.held)
            self._going.give_up(self.starts[0])
            self._settle(time_us)


def matcher_of(rules: Rules, going: Going) -> KeyMatcher:
    """A matcher for a key."""
    return SideBySide(rules, going) if rules.skip in {"none", "next"} else InTurn(rules, going)


def _place(row: Row) -> int:
    return row.place


Times = Callable[[int], int]
"""The time of the key's row at a place."""


def walk(matcher: KeyMatcher, rows: Sequence[Row], places: int, times: Times, *, adjacent: bool) -> None:
    """Take in the rows of a key that fulfil a condition, in order; `places`: the place behind all of its rows so far."""
    expected = matcher.places
    for row in rows:
        if matcher.starts:
            if adjacent and row.place > expected:
                _pass_gap(matcher, expected, times(expected))
            matcher.pass_time(row.time_us)
        matcher.take(row)
        expected = row.place + 1
    if adjacent and matcher.starts and places > expected:
        _pass_gap(matcher, expected, times(expected))
    matcher.places = places


def _pass_gap(matcher: KeyMatcher, place: int, time_us: int) -> None:
    matcher.pass_time(time_us)
    matcher.gap(place, time_us)
