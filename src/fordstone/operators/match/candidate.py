"""What becomes of one first row: its beginnings take rows, wait, end, match, or run out of time.

A start holds its beginnings as threads: a node, and one way on that it waits for, in order of preference. A row is offered to
every thread. With `skip="none"` every path to the end is a match. Else there is one at most: the first that is complete
(`earliest`), or the most preferred, once no better one can come (`preferred`). Then, of threads that stand alike and so
have the same rows before them, only the most preferred is kept: else `A+ B+ C` would have one for each way to part a streak.

Leaves to `operators.matching` which starts there are, and when what they found is given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from fordstone.operators.match.automaton import END, Automaton, Node, Option, Row, Test, Way, starts, states_with

Thread = tuple[Node, Way]
Standing = tuple[int, int, int, bool, bytes]
"""Where a thread stands: its stage, its way on, how often its stage has taken rows as far as that matters, whether it has
just taken one, and what conditions know of its rows. Threads that stand alike at one row go on alike."""
FEW_THREADS: Final = 8
"""Up to so many threads are not looked through for some that stand alike."""
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


class Start:
    """All that began with one row."""

    __slots__ = ("accepted", "decided", "found", "row", "threads", "trail")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.threads: list[Thread] = []
        self.found: Node | None = None
        """The best match so far, where there is one at most."""
        self.accepted: list[Node] = []
        """Matches that nobody has taken away yet, where all count."""
        self.decided = False
        """Nothing more comes of it."""
        self.trail: dict[int, set[Standing]] = {}
        """Where its threads stood behind rows at some places. Empty once it ended otherwise than by the rows it was offered."""


class Going:
    """Lets starts begin and go on. The same for all keys."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._automaton = rules.automaton
        self._initial = starts(rules.automaton.slots)
        self.merges = rules.skip != "none" and not rules.automaton.beating
        """Whether threads that stand alike are as good as one, the most preferred."""

    def begin(self, row: Row) -> Start | None:
        """What begins with a row; None: nothing."""
        start = Start(row)
        beaten = 0
        for way in self._automaton.first:
            until = self._automaton.stages[way.target].until
            if beaten & way.bit or (until is not None and _holds(until, self._initial, row)):
                continue
            node = self._taken(None, way.target, row)
            if node is None:
                continue
            beaten |= way.option.beats
            if self._grow(start, node, start.threads):
                break
        if not start.threads and start.found is None and not start.accepted:
            return None
        self._judge(start)
        return start

    def offer(self, start: Start, row: Row) -> None:
        """Let every thread of a start take a row, wait on, or end."""
        kept: list[Thread] = []
        for node, way in start.threads:
            if node.alive & way.bit and self._offer_thread(start, node, way, row, kept):
                break
        start.threads = self._distinct(kept, row) if self.merges and len(kept) > FEW_THREADS else kept
        self._judge(start)

    def standings(self, start: Start, row: Row) -> set[Standing]:
        """Where the threads of a start stand behind a row that it was offered, or began with."""
        return {self._standing(node, way, row) for node, way in start.threads}

    def gap(self, start: Start) -> None:
        """A row has come right behind the last one that was offered, and fulfils no condition."""
        kept: list[Thread] = []
        for node, way in start.threads:
            if not node.alive & way.bit:
                continue
            if way.target == END and not way.option.not_between:
                node.alive &= ~way.option.beats
                if self._accept(start, node):
                    break
            elif not way.strict:
                kept.append((node, way))
        start.threads = kept
        self._judge(start)

    def run_out(self, start: Start) -> list[Node]:
        """The time of a start is over: what only waited for that is a match. Gives the beginnings that came to nothing."""
        waited = False
        left: dict[int, Node] = {}
        for node, way in start.threads:
            if not node.alive & way.bit:
                continue
            if way.target == END:
                waited = True
                if self._accept(start, node):
                    break
            elif not any(other.ends_now for other in node.ways):
                left[id(node)] = node
        self.give_up(start)
        if waited or start.found is not None:
            return []
        nodes = list(left.values())
        return nodes if self._rules.skip == "none" else sorted(nodes, key=lambda node: -node.depth)[:1]

    def give_up(self, start: Start) -> None:
        """Nothing more can come: what is found so far counts."""
        start.threads = []
        start.trail = {}
        start.decided = True

    def _judge(self, start: Start) -> None:
        if start.decided or not start.threads:
            start.threads = []
            start.decided = True

    def _distinct(self, threads: Sequence[Thread], row: Row) -> list[Thread]:
        """Of threads that stand alike the first. Where time runs out the longest is shown, so each length counts there."""
        by_depth = self._rules.within_us is not None
        found: dict[tuple[Standing, int], Thread] = {}
        for node, way in threads:
            found.setdefault((self._standing(node, way, row), node.depth if by_depth else 0), (node, way))
        return list(found.values())

    def _standing(self, node: Node, way: Way, row: Row) -> Standing:
        rule, reads = self._automaton.stages[node.stage], self._automaton.reads
        count = min(node.count, rule.times_min) if rule.times_max is None else node.count
        known = _ENCODER.encode([node.states[slot] for slot in reads]) if reads else b""
        return node.stage, way.option.index, count, node.row.place == row.place, known

    def _offer_thread(self, start: Start, node: Node, way: Way, row: Row, kept: list[Thread]) -> bool:
        """Offer a row to one thread, and add what comes of it to `kept`. True: nothing behind it counts any more."""
        option = way.option
        if way.target == END:
            if _holds_any(option, node, row):
                return False
            if option.not_between:
                kept.append((node, way))
                return False
            node.alive &= ~option.beats
            return self._accept(start, node)
        if way.strict and row.place != node.row.place + 1:
            return False
        until = self._automaton.stages[way.target].until
        if until is not None and _holds(until, node.states, row):
            return False
        child = self._taken(node, way.target, row)
        stays = option.every if child is not None else not way.strict
        if child is not None:
            if option.not_next and row.place == node.row.place + 1 and _any(option.not_next, node, row):
                return False
            node.alive &= ~option.beats
            if self._grow(start, child, kept):
                return True
        if stays and not (way.guarded and _holds_any(option, node, row)):
            kept.append((node, way))
        return False

    def _taken(self, node: Node | None, target: int, row: Row) -> Node | None:
        """The node with one more row, if the stage takes it."""
        rule = self._automaton.stages[target]
        test = rule.test
        if row.bits & test.bit != test.bit:
            return None
        states = self._initial if node is None else node.states
        after = states_with(rule, states, row.values)
        if test.rest is not None and test.rest(after if test.own_row else states, row.values) is not True:
            return None
        return Node(self._automaton, node, target, row, after)

    def _grow(self, start: Start, node: Node, kept: list[Thread]) -> bool:
        """Add the threads of a new node. True: nothing behind it counts any more."""
        for way in node.ways:
            if way.ends_now:
                node.alive &= ~way.option.beats
                if self._accept(start, node):
                    return True
            elif node.alive & way.bit:
                kept.append((node, way))
        return False

    def _accept(self, start: Start, node: Node) -> bool:
        """A match. True: nothing that comes behind it in the order of preference counts any more."""
        if self._rules.skip == "none":
            start.accepted.append(node)
            return False
        start.found = node
        if not self._rules.preferred:
            start.decided = True
        return True


def _holds(test: Test, states: Sequence[object], row: Row) -> bool:
    return row.bits & test.bit == test.bit and (test.rest is None or test.rest(states, row.values) is True)


def _any(tests: Sequence[Test], node: Node, row: Row) -> bool:
    return any(_holds(test, node.states, row) for test in tests)


def _holds_any(option: Option, node: Node, row: Row) -> bool:
    """Whether a row that was not taken is one that must not be on this way."""
    return _any(option.not_between, node, row) or (row.place == node.row.place + 1 and _any(option.not_next, node, row))
