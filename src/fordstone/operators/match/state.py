"""The beginnings of a key as bytes, and back: what a checkpoint holds of a pattern.

Plain values in MessagePack: the rows that are held, each once; the nodes over them, parents first; and the starts with their threads.
What follows from these (slots, counts, ways) is worked out again when read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fordstone.operators.match.automaton import Node, Row, starts, states_with
from fordstone.operators.match.candidate import Going, Rules, Start
from fordstone.operators.match.matcher import KeyMatcher, matcher_of

NONE = -1


class _Held(msgspec.Struct, frozen=True, array_like=True):
    places: int
    matches: int
    rows: list[tuple[int, int, int, tuple[Any, ...]]]
    """Place, time, bits, values."""
    nodes: list[tuple[int, int, int, int]]
    """Parent, stage, row, which ways are open."""
    starts: list[tuple[int, int, list[tuple[int, int]]]]
    """Row, match so far, threads as node and way."""
    held: list[int]
    """Rows that are gone through again."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Held)


class _Numbers:
    """Gives rows and nodes numbers, each once, parents before children."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, tuple[Any, ...]]] = []
        self.nodes: list[tuple[int, int, int, int]] = []
        self._row_at: dict[int, int] = {}
        self._node_at: dict[int, int] = {}

    def row(self, row: Row) -> int:
        """By place: a key has one row at each."""
        if row.place not in self._row_at:
            self._row_at[row.place] = len(self.rows)
            self.rows.append((row.place, row.time_us, row.bits, row.values))
        return self._row_at[row.place]

    def node(self, node: Node | None) -> int:
        fresh = []
        while node is not None and id(node) not in self._node_at:
            fresh.append(node)
            node = node.parent
        at = NONE if node is None else self._node_at[id(node)]
        for part in reversed(fresh):
            self.nodes.append((at, part.stage, self.row(part.row), part.alive))
            at = self._node_at[id(part)] = len(self.nodes) - 1
        return at


def encode(matcher: KeyMatcher) -> bytes:
    """What is held of a key."""
    numbers = _Numbers()
    begun = [
        (
            numbers.row(start.row),
            numbers.node(start.found),
            [(numbers.node(node), way.option.index) for node, way in start.threads],
        )
        for start in matcher.starts
    ]
    held = [numbers.row(row) for row in matcher.held]
    return _ENCODER.encode(
        _Held(
            places=matcher.places,
            matches=matcher.matches,
            rows=numbers.rows,
            nodes=numbers.nodes,
            starts=begun,
            held=held,
        )
    )


def decode(data: bytes, rules: Rules, going: Going) -> KeyMatcher:
    """The key as it was when `encode` wrote it."""
    stored = _DECODER.decode(data)
    rows = [Row(place, time_us, bits, values) for place, time_us, bits, values in stored.rows]
    nodes: list[Node] = []
    initial = starts(rules.automaton.slots)
    for parent, stage, row, alive in stored.nodes:
        above = None if parent == NONE else nodes[parent]
        before = initial if above is None else above.states
        states = states_with(rules.automaton.stages[stage], before, rows[row].values)
        node = Node(rules.automaton, above, stage, rows[row], states)
        node.alive = alive
        nodes.append(node)
    matcher = matcher_of(rules, going)
    matcher.places, matcher.matches = stored.places, stored.matches
    matcher.held = [rows[row] for row in stored.held]
    for row, found, threads in stored.starts:
        start = Start(rows[row])
        start.found = None if found == NONE else nodes[found]
        start.threads = [(nodes[node], nodes[node].ways[way]) for node, way in threads]
        matcher.starts.append(start)
    return matcher
