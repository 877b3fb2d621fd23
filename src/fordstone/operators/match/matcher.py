"""Matching the rows of one key: which first rows are followed, what becomes of each, and when matches are output.

A candidate is all that began with one first row. It holds threads: a node, and one way on that it waits for, in order of
preference; every row is offered to every thread. With `skip="none"` every path to the end is a match. Otherwise there is at most
one: the first that is complete (`earliest`), or the most preferred, once no better one can come (`preferred`). Then, of threads in
the same state, only the most preferred is kept: otherwise `A+ B+ C` would have one for each way to split a streak.

If every first row may have a match of its own (`skip` none and next), all candidates advance together (`OverlappingMatcher`). If a
match decides which rows may begin the next one, one candidate is followed at a time (`SequentialMatcher`): the rows after its first
are held until it is decided, and offered again to the next. The states of threads that came to nothing are remembered at every
`STRIDE`-th row: a later candidate that is in no other state there is dropped.

Rows that fulfil no condition are not seen here; `gap` reports them where they matter. Invariants: candidates are in order of their
first row; matches, and the times at which they are decided, are a function of the key's rows and of the watermark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Literal

import msgspec

from fordstone.lang.duration import TIME_MAX_US
from fordstone.operators.match.automaton import (
    END,
    Automaton,
    Node,
    Row,
    Test,
    Way,
    states_with,
)

Thread = tuple[Node, Way]
ThreadState = tuple[int, int, int, bool, bytes]
"""Where a thread stands: its stage, its way on, how often its stage has taken rows as far as that matters, whether it has
just taken one, and what conditions read of its rows. Threads in the same state at one row continue alike."""
FEW_THREADS: Final = 8
"""Maximum number of threads that are not searched for equal ones."""
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a pattern is gone through."""

    automaton: Automaton
    within_us: int | None
    skip: Literal["none", "next", "past_last", "first", "last"]
    skip_to: int | None
    """A stage that takes rows, by number."""
    preferred: bool
    threads_max: int


class Candidate:
    """All that began with one row."""

    __slots__ = ("accepted", "decided", "found", "row", "threads", "visited")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.threads: list[Thread] = []
        self.found: Node | None = None
        """The best match so far, where there is one at most."""
        self.accepted: list[Node] = []
        """Matches not yet output, where all count."""
        self.decided = False
        """Nothing more comes of it."""
        self.visited: dict[int, set[ThreadState]] = {}
        """Where its threads stood after rows at some places. Empty once it ended otherwise than by the rows it was offered."""


class Transitions:
    """Begins and advances candidates. The same for all keys."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._automaton = rules.automaton
        self._initial = rules.automaton.initial
        self.merges = rules.skip != "none" and not rules.automaton.beating
        """Whether threads that stand alike are as good as one, the most preferred."""

    def begin(self, row: Row) -> Candidate | None:
        candidate = Candidate(row)
        beaten = 0
        for way in self._automaton.first:
            until = self._automaton.stages[way.target].until
            if beaten & way.bit or (until is not None and _holds(until, self._initial, row)):
                continue
            node = self._taken(None, way.target, row)
            if node is None:
                continue
            beaten |= way.beats
            if self._grow(candidate, node, candidate.threads):
                break
        if not candidate.threads and candidate.found is None and not candidate.accepted:
            return None
        self._judge(candidate)
        return candidate

    def offer(self, candidate: Candidate, row: Row) -> None:
        """Let every thread of a candidate take a row, wait on, or end."""
        kept: list[Thread] = []
        for node, way in candidate.threads:
            if node.alive & way.bit and self._offer_thread(candidate, node, way, row, kept):
                break
        candidate.threads = self._distinct(kept, row) if self.merges and len(kept) > FEW_THREADS else kept
        self._judge(candidate)

    def thread_states(self, candidate: Candidate, row: Row) -> set[ThreadState]:
        """Where the threads of a candidate stand after a row that it was offered, or began with."""
        return {self._thread_state(node, way, row) for node, way in candidate.threads}

    def gap(self, candidate: Candidate) -> None:
        """A row has come right after the last one that was offered, and fulfils no condition."""
        kept: list[Thread] = []
        for node, way in candidate.threads:
            if not node.alive & way.bit:
                continue
            if way.target == END and not way.not_between:
                node.alive &= ~way.beats
                if self._accept(candidate, node):
                    break
            elif not way.strict:
                kept.append((node, way))
        candidate.threads = kept
        self._judge(candidate)

    def time_out(self, candidate: Candidate) -> list[Node]:
        """The time of a candidate is over: what only waited for that is a match. Return the partial matches that timed out."""
        waited = False
        left: dict[int, Node] = {}
        for node, way in candidate.threads:
            if not node.alive & way.bit:
                continue
            if way.target == END:
                waited = True
                if self._accept(candidate, node):
                    break
            elif not any(other.ends_now for other in node.ways):
                left[id(node)] = node
        self.give_up(candidate)
        if waited or candidate.found is not None:
            return []
        nodes = list(left.values())
        return nodes if self._rules.skip == "none" else sorted(nodes, key=lambda node: -node.depth)[:1]

    def give_up(self, candidate: Candidate) -> None:
        """Nothing more can come: what is found so far counts."""
        candidate.threads = []
        candidate.visited = {}
        candidate.decided = True

    def _judge(self, candidate: Candidate) -> None:
        if candidate.decided or not candidate.threads:
            candidate.threads = []
            candidate.decided = True

    def _distinct(self, threads: Sequence[Thread], row: Row) -> list[Thread]:
        """Of threads that stand alike the first. On a timeout the longest is emitted, so each length counts there."""
        by_depth = self._rules.within_us is not None
        found: dict[tuple[ThreadState, int], Thread] = {}
        for node, way in threads:
            found.setdefault((self._thread_state(node, way, row), node.depth if by_depth else 0), (node, way))
        return list(found.values())

    def _thread_state(self, node: Node, way: Way, row: Row) -> ThreadState:
        rule, reads = self._automaton.stages[node.stage], self._automaton.reads
        count = min(node.count, rule.times_min) if rule.times_max is None else node.count
        known = _ENCODER.encode([node.states[slot] for slot in reads]) if reads else b""
        return node.stage, way.index, count, node.row.place == row.place, known

    def _offer_thread(self, candidate: Candidate, node: Node, way: Way, row: Row, kept: list[Thread]) -> bool:
        """Offer a row to one thread, and add what comes of it to `kept`. True: nothing after it counts."""
        if way.target == END:
            if _holds_any(way, node, row):
                return False
            if way.not_between:
                kept.append((node, way))
                return False
            node.alive &= ~way.beats
            return self._accept(candidate, node)
        if way.strict and row.place != node.row.place + 1:
            return False
        until = self._automaton.stages[way.target].until
        if until is not None and _holds(until, node.states, row):
            return False
        child = self._taken(node, way.target, row)
        stays = way.every if child is not None else not way.strict
        if child is not None:
            if way.not_next and row.place == node.row.place + 1 and _any(way.not_next, node, row):
                return False
            node.alive &= ~way.beats
            if self._grow(candidate, child, kept):
                return True
        if stays and not (way.guarded and _holds_any(way, node, row)):
            kept.append((node, way))
        return False

    def _taken(self, node: Node | None, target: int, row: Row) -> Node | None:
        rule = self._automaton.stages[target]
        test = rule.test
        if row.bits & test.bit != test.bit:
            return None
        states = self._initial if node is None else node.states
        after = states_with(rule, states, row.values)
        if test.rest is not None and test.rest(after if test.own_row else states, row.values) is not True:
            return None
        return Node(self._automaton, node, target, row, after)

    def _grow(self, candidate: Candidate, node: Node, kept: list[Thread]) -> bool:
        """Add the threads of a new node. True: nothing after it counts."""
        for way in node.ways:
            if way.ends_now:
                node.alive &= ~way.beats
                if self._accept(candidate, node):
                    return True
            elif node.alive & way.bit:
                kept.append((node, way))
        return False

    def _accept(self, candidate: Candidate, node: Node) -> bool:
        """A match. True: nothing later in the order of preference counts."""
        if self._rules.skip == "none":
            candidate.accepted.append(node)
            return False
        candidate.found = node
        if not self._rules.preferred:
            candidate.decided = True
        return True


def _holds(test: Test, states: Sequence[object], row: Row) -> bool:
    return row.bits & test.bit == test.bit and (test.rest is None or test.rest(states, row.values) is True)


def _any(tests: Sequence[Test], node: Node, row: Row) -> bool:
    return any(_holds(test, node.states, row) for test in tests)


def _holds_any(way: Way, node: Node, row: Row) -> bool:
    """Whether a row that was not taken is one that must not be on this way."""
    return _any(way.not_between, node, row) or (row.place == node.row.place + 1 and _any(way.not_next, node, row))


_place = attrgetter("place")
GAP: Final = -1
"""The bits of a row that stands for others, which fulfil no condition."""
STRIDE: Final = 16
THREAD_STATES_MAX: Final = 100_000
"""Maximum number of thread states remembered of a candidate, and of those before it. What is forgotten costs no more than time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A match, or (`timed_out`) a partial match whose time was over."""

    node: Node
    decided_us: int
    timed_out: bool = False
    number: int = 0
    """Ordinal of this match within its key."""


class Matcher(ABC):
    """The candidates of one key."""

    __slots__ = ("_rules", "_transitions", "candidates", "dropped", "found", "held", "matches", "places")

    def __init__(self, rules: Rules, transitions: Transitions) -> None:
        self._rules = rules
        self._transitions = transitions
        self.candidates: list[Candidate] = []
        """What is undecided."""
        self.held: list[Row] = []
        """Rows that are gone through again for the next start; with gaps among them."""
        self.places = 0
        """The place of the key's next row."""
        self.matches = 0
        self.found: list[Found] = []
        """What was found and not yet taken away."""
        self.dropped = 0
        """Number of partial matches dropped because there were too many."""

    @property
    def deadline_us(self) -> int | None:
        """When the oldest candidate times out."""
        if self._rules.within_us is None or not self.candidates:
            return None
        return min(self.candidates[0].row.time_us + self._rules.within_us, TIME_MAX_US)

    @abstractmethod
    def take(self, row: Row) -> None:
        """Take in the next row that fulfils a condition; time has been passed up to it, and gaps before it are known."""

    @abstractmethod
    def gap(self, place: int, time_us: int) -> None:
        """A row has come right after the last one that was taken in, and fulfils no condition."""

    @abstractmethod
    def end(self) -> None:
        """No row comes any more at all: what is best so far counts, as of its own last row."""

    @abstractmethod
    def _settle(self, time_us: int | None) -> None:
        """Output what is decided, and drop it."""

    def pass_time(self, time_us: int) -> None:
        """No row before this time comes any more: candidates that are too old time out."""
        while (over_us := self.deadline_us) is not None and over_us <= time_us:
            nodes = self._transitions.time_out(self.candidates[0])
            self.found += [Found(node=node, decided_us=over_us, timed_out=True) for node in nodes]
            self._settle(over_us)

    def _give(self, candidate: Candidate, time_us: int | None) -> None:
        nodes, candidate.accepted = candidate.accepted, []
        if candidate.decided and candidate.found is not None:
            nodes.append(candidate.found)
        for node in nodes:
            self.matches += 1
            decided_us = node.row.time_us if time_us is None else time_us
            self.found.append(Found(node=node, decided_us=decided_us, number=self.matches))


class OverlappingMatcher(Matcher):
    """Every first row is followed at once."""

    __slots__ = ()

    def take(self, row: Row) -> None:
        begins, matters = self._rules.automaton.role(row.bits)
        if matters and self.candidates:
            for candidate in self.candidates:
                self._transitions.offer(candidate, row)
            self._settle(row.time_us)
        if begins and (fresh := self._transitions.begin(row)) is not None:
            self.candidates.append(fresh)
            if fresh.decided or fresh.accepted:
                self._settle(row.time_us)
            # Each candidate has a thread at least, so few candidates are few threads, mostly.
            if len(self.candidates) > self._rules.threads_max:
                self._evict(row.time_us)
        if matters:
            self._evict(row.time_us)

    def gap(self, place: int, time_us: int) -> None:  # noqa: ARG002 - rows are not held here
        for candidate in self.candidates:
            self._transitions.gap(candidate)
        self._settle(time_us)

    def end(self) -> None:
        for candidate in self.candidates:
            self._transitions.give_up(candidate)
        self._settle(None)

    def _settle(self, time_us: int | None) -> None:
        for candidate in self.candidates:
            if candidate.decided or candidate.accepted:
                self._give(candidate, time_us)
        self.candidates = [candidate for candidate in self.candidates if not candidate.decided]

    def _evict(self, time_us: int) -> None:
        """Where there are too many threads, those of the oldest go."""
        excess = sum(len(candidate.threads) for candidate in self.candidates) - self._rules.threads_max
        if excess <= 0:
            return
        for candidate in self.candidates:
            evicted = min(excess, len(candidate.threads))
            excess -= evicted
            self.dropped += evicted
            candidate.threads = candidate.threads[: len(candidate.threads) - evicted]
            if not candidate.threads:
                self._transitions.give_up(candidate)
        self._settle(time_us)


class SequentialMatcher(Matcher):
    """One first row is followed after the other."""

    __slots__ = ("_dead",)

    def __init__(self, rules: Rules, transitions: Transitions) -> None:
        super().__init__(rules, transitions)
        self._dead: dict[int, set[ThreadState]] = {}
        """Where threads stood, at some places, of which nothing came. Saves work and decides nothing; no part of the state."""

    def take(self, row: Row) -> None:
        if self.candidates:
            self.held.append(row)
        self._go(row)
        if self.candidates and self.candidates[0].decided:
            self._settle(row.time_us)
        if self.candidates and len(self.held) + len(self.candidates[0].threads) > self._rules.threads_max:
            self._evict(row.time_us)

    def gap(self, place: int, time_us: int) -> None:
        if self.candidates:
            self.take(Row(place, time_us, GAP, ()))

    def end(self) -> None:
        while self.candidates:
            self._transitions.give_up(self.candidates[0])
            self._settle(None)

    def _go(self, row: Row) -> None:
        if row.bits == GAP:
            for candidate in self.candidates:
                self._transitions.gap(candidate)
            return
        begins, matters = self._rules.automaton.role(row.bits)
        if self.candidates:
            if matters:
                self._transitions.offer(self.candidates[0], row)
        elif begins and (fresh := self._transitions.begin(row)) is not None:
            self.candidates.append(fresh)
        if self.candidates and row.place % STRIDE == 0 and self._transitions.merges:
            self._track(self.candidates[0], row)

    def _track(self, candidate: Candidate, row: Row) -> None:
        """Remember where the candidate stands; drop it where that has come to nothing before."""
        if candidate.decided or len(candidate.threads) * (len(candidate.visited) + 1) > THREAD_STATES_MAX:
            return
        stands = self._transitions.thread_states(candidate, row)
        if stands <= self._dead.get(row.place, set()):
            candidate.threads, candidate.decided = [], True
        else:
            candidate.visited[row.place] = stands

    def _learn(self, candidate: Candidate) -> None:
        """The candidate is decided: nothing will come of where it stood, if nothing came of it by its rows alone."""
        if candidate.found is not None or not candidate.visited:
            return
        if sum(map(len, self._dead.values())) > THREAD_STATES_MAX:
            self._dead = {}
        for place, stands in candidate.visited.items():
            self._dead.setdefault(place, set()).update(stands)

    def _settle(self, time_us: int | None) -> None:
        """Output what is decided, and go through the rows that are held again, from where the next may begin."""
        rows, at = self.held, 0
        while True:
            if self.candidates and self.candidates[0].decided:
                candidate = self.candidates.pop()
                self._learn(candidate)
                self._give(candidate, time_us)
                at = bisect_left(rows, self._next_place(candidate), key=_place)
            if at == len(rows):
                break
            self._go(rows[at])
            at += 1
        self._hold(rows)

    def _hold(self, rows: list[Row]) -> None:
        """Hold the rows after the first of the candidate."""
        self.held = rows[bisect_left(rows, self.candidates[0].row.place + 1, key=_place) :] if self.candidates else []
        first = self.held[0].place if self.held else None
        self._dead = {} if first is None else {at: stood for at, stood in self._dead.items() if at >= first}

    def _next_place(self, candidate: Candidate) -> int:
        """The place from which on there may be another match after this candidate."""
        following, node = candidate.row.place + 1, candidate.found
        if node is None:
            return following
        if self._rules.skip == "past_last":
            return node.row.place + 1
        places = [part.row.place for part in node.path() if part.stage == self._rules.skip_to]
        if not places:
            return following
        return max(following, places[0] if self._rules.skip == "first" else places[-1])

    def _evict(self, time_us: int) -> None:
        """Too many rows are held: drop the candidate, and all that might begin in the older half of them."""
        threads_max = self._rules.threads_max
        if len(self.candidates[0].threads) > threads_max:
            candidate = self.candidates[0]
            self.dropped += len(candidate.threads) - threads_max
            candidate.threads, candidate.visited = candidate.threads[:threads_max], {}
        while self.candidates and len(self.held) + len(self.candidates[0].threads) > threads_max:
            before = len(self.held)
            self.held = self.held[-max(threads_max // 2, 1) :]
            self.dropped += 1 + before - len(self.held)
            self._transitions.give_up(self.candidates[0])
            self._settle(time_us)


def matcher_of(rules: Rules, transitions: Transitions) -> Matcher:
    """A matcher for a key."""
    return (
        OverlappingMatcher(rules, transitions)
        if rules.skip in {"none", "next"}
        else SequentialMatcher(rules, transitions)
    )


Times = Callable[[int], int]
"""The time of the key's row at a place."""


def walk(matcher: Matcher, rows: Sequence[Row], places: int, times: Times, *, adjacent: bool) -> None:
    """Take in the rows of a key that fulfil a condition, in order; `places`: the place after all of its rows so far."""
    expected = matcher.places
    for row in rows:
        if matcher.candidates:
            if adjacent and row.place > expected:
                _pass_gap(matcher, expected, times(expected))
            matcher.pass_time(row.time_us)
        matcher.take(row)
        expected = row.place + 1
    if adjacent and matcher.candidates and places > expected:
        _pass_gap(matcher, expected, times(expected))
    matcher.places = places


def _pass_gap(matcher: Matcher, place: int, time_us: int) -> None:
    matcher.pass_time(time_us)
    matcher.gap(place, time_us)
