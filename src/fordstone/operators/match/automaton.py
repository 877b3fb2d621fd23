"""A pattern as an automaton: how a partial match may continue, and what is kept of the rows that stages have taken.

A partial match (`Node`) is the rows taken so far, each by a stage. It continues by options: another row of its stage, the first row
of a later one, or the end of the match. Options stand in order of preference: a stage that is greedy would rather take
another row, a reluctant one rather move on; what is optional is rather taken. Every match is thereby a path, and matches
of one first row have an order: the order in which backtracking would find them.

With `choose="earliest"` all paths count, but for what `beats` rules out: a greedy stage is not left at or after a row that it could
have taken, and a reluctant one takes no row at or after one with which it could have been left.

The states of slots are plain data and never change: taking a row makes a new one. Means and sums go row by row from the first, so they
are the same however often a match was stored in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from typing import Any, Final

import msgspec

from fordstone.lang.polars.scalar import Scalar, less, wrapped
from fordstone.operators.match.check import Slot
from fordstone.plan import plan as p

Take = Callable[[Any, Any], Any]
"""The state after a row: of the state before it, and the value of the slot's argument in it."""
Read = Callable[[Any], Any]
_EXACT: Final = Context(prec=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How a slot is kept. `value` is which of a row's values it takes; None: none, it counts rows."""

    stage: int | None
    value: int | None
    start: Any
    take: Take
    read: Read


def kept(slot: Slot, value: int | None) -> Kept:
    """How a slot is kept."""
    start, take, read = _KINDS[slot.function](slot)
    return Kept(stage=slot.stage, value=value, start=start, take=take, read=read)


def _itself(state: Any) -> Any:
    return state


def _last(slot: Slot) -> tuple[Any, Take, Read]:
    if not slot.offset:
        return None, lambda _, value: value, _itself
    most = slot.offset + 1
    return (), lambda state, value: (*state, value)[-most:], lambda state: state[0] if len(state) == most else None


def _first(slot: Slot) -> tuple[Any, Take, Read]:
    most = slot.offset + 1
    return (
        (),
        lambda state, value: state if len(state) == most else (*state, value),
        lambda state: state[-1] if len(state) == most else None,
    )


def _count(slot: Slot) -> tuple[Any, Take, Read]:
    if slot.argument is None:
        return 0, lambda state, _: state + 1, _itself
    return 0, lambda state, value: state + (value is not None), _itself


def _sum(slot: Slot) -> tuple[Any, Take, Read]:
    if slot.type.name == "decimal":
        return None, _add_decimal, lambda state: _fitting(state, slot.type.precision)
    add: Take = (lambda state, value: wrapped(state + value)) if slot.type.is_integer else lambda a, b: a + b
    return None, lambda state, value: _skipping_nulls(add, state, value), _itself


def _add_decimal(state: Decimal | None, value: str | None) -> Decimal | None:
    if value is None:
        return state
    return Decimal(value) if state is None else _EXACT.add(state, Decimal(value))


def _fitting(state: Decimal | None, precision: int) -> str | None:
    if state is None or len(state.as_tuple().digits) > precision:
        return None
    return f"{state:f}"


def _mean(_: Slot) -> tuple[Any, Take, Read]:
    def take(state: tuple[float, int], value: float | None) -> tuple[float, int]:
        return state if value is None else (state[0] + value, state[1] + 1)

    return (0.0, 0), take, lambda state: state[0] / state[1] if state[1] else None


def _extreme(slot: Slot, *, greatest: bool) -> tuple[Any, Take, Read]:
    of: Read = Decimal if slot.type.name == "decimal" else _itself  # decimals are kept as text

    def best(state: Any, value: Any) -> Any:
        wins = less(of(state), of(value)) if greatest else less(of(value), of(state))
        return value if wins else state

    return None, lambda state, value: _skipping_nulls(best, state, value), _itself


def _skipping_nulls(take: Take, state: Any, value: Any) -> Any:
    return state if value is None else value if state is None else take(state, value)


_KINDS: Final[dict[str, Callable[[Slot], tuple[Any, Take, Read]]]] = {
    "last": _last,
    "first": _first,
    "count": _count,
    "sum": _sum,
    "mean": _mean,
    "min": lambda slot: _extreme(slot, greatest=False),
    "max": lambda slot: _extreme(slot, greatest=True),
}


END: Final = -1
"""The target of the option that ends the match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A condition: `bit` is set in a row's bits where the row alone fulfils its part (0: it has none); `rest` says the rest."""

    bit: int
    rest: Scalar | None = None
    own_row: bool = False
    """Whether the rest sees the row as taken already by its stage."""
    reads: tuple[int, ...] = ()
    """The slots that the rest asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way on. The fields from `index` on depend on the other ways of the node: `_Building.ways` sets them."""

    target: int
    strict: bool = False
    every: bool = False
    """Whether it stays an option after it was taken, for later rows."""
    not_next: tuple[Test, ...] = ()
    """What the next row must not be."""
    not_between: tuple[Test, ...] = ()
    """What no row on the way may be."""
    index: int = 0
    bit: int = 0
    """Its own in the mask of a node's ways."""
    beats: int = 0
    """The bits of the ways that end when it is taken."""
    guarded: bool = False
    ends_now: bool = False
    """The match ends as soon as there is this way."""


Ways = tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRule:
    """A stage that takes rows. `open` are the ways on while it may take more or not, `needy` while it must, `full` when it may not."""

    name: str
    test: Test
    until: Test | None
    times_min: int
    times_max: int | None
    needy: Ways
    open: Ways
    full: Ways
    slots: tuple[tuple[int, Kept], ...]
    """The slots that a row of this stage changes."""

    def ways(self, count: int) -> Ways:
        """The ways on of a partial match whose last `count` rows are of this stage."""
        if count < self.times_min:
            return self.needy
        return self.full if self.times_max is not None and count >= self.times_max else self.open


@dataclass(frozen=True, slots=True, kw_only=True)
class Automaton:
    """A pattern, ready to be walked through."""

    stages: tuple[StageRule, ...]
    first: Ways
    slots: tuple[Kept, ...]
    initial: tuple[Any, ...]
    """The states of the slots before any row."""
    start_bits: tuple[int, ...]
    """A row may be the first of a match only if all of one of these bits are set in its bits."""
    later_bits: tuple[int, ...]
    """A row may matter to a partial match only if all of one of these are; where rows need not be adjacent."""
    adjacent: bool
    """Whether it matters which rows follow each other at once."""
    reads: tuple[int, ...]
    """The slots that conditions read: partial matches in the same stage that agree on these continue alike."""
    beating: bool
    """Whether some option beats others: then how a partial match continues depends on what its rows were offered to before."""
    known: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    """What was found out about bits: whether a row may begin a match, and whether it may matter to one that has begun."""

    def role(self, bits: int) -> tuple[bool, bool]:
        """Whether a row with these bits may begin a match, and whether it may matter to one that has begun."""
        if bits not in self.known:
            self.known[bits] = (
                any(bits & bit == bit for bit in self.start_bits),
                self.adjacent or any(bits & bit == bit for bit in self.later_bits),
            )
        return self.known[bits]


@dataclass(slots=True)
class _Building:
    """Options in order of preference, with what each beats as a set of places in the list."""

    options: list[Way] = field(default_factory=list)
    beats: list[set[int]] = field(default_factory=list)

    def before(self, other: _Building, *, beating: bool) -> _Building:
        """These options, then the other ones; `beating`: each of these beats all of those."""
        shift = len(self.options)
        later = {shift + at for at in range(len(other.options))}
        mine = [beats | later if beating else beats for beats in self.beats]
        return _Building(
            [*self.options, *other.options], [*mine, *({shift + at for at in beats} for beats in other.beats)]
        )

    def ways(self) -> Ways:
        found = []
        for index, (option, beats) in enumerate(zip(self.options, self.beats, strict=True)):
            guarded = bool(option.not_next or option.not_between)
            ends_now, mask = option.target == END and not guarded, sum(1 << at for at in beats)
            found.append(replace(option, index=index, bit=1 << index, beats=mask, guarded=guarded, ends_now=ends_now))
        return tuple(found)


class _Compiler:
    def __init__(self, step: p.Match, tests: Sequence[Test], untils: Sequence[Test | None]) -> None:
        self._step = step
        self._tests = tests
        self._untils = untils
        self._taking = [at for at, stage in enumerate(step.stages) if not stage.negated]

    def leave(self, number: int) -> _Building:
        """The ways on after the stage that takes rows as number `number - 1` (0: from the beginning)."""
        not_next: list[Test] = []
        not_between: list[Test] = []
        before = self._taking[number - 1] + 1 if number else 0
        until = self._taking[number] if number < len(self._taking) else len(self._step.stages)
        for at in range(before, until):
            (not_next if self._step.stages[at].follows == "next" else not_between).append(self._tests[at])
        return self._guarded(self._enter(number), not_next, not_between)

    def _enter(self, number: int) -> _Building:
        if number == len(self._taking):
            return _Building([Way(target=END)], [set()])
        stage = self._step.stages[self._taking[number]]
        taken = self.option(number, stage.follows)
        if not stage.optional:
            return taken
        return self._choice(stage, taken, self.leave(number + 1))

    def option(self, number: int, contiguity: p.Contiguity) -> _Building:
        return _Building([Way(target=number, strict=contiguity == "next", every=contiguity == "any")], [set()])

    def _choice(self, stage: p.Stage, more: _Building, on: _Building) -> _Building:
        beating = self._step.choose == "earliest" and stage.quantifier != "each"
        if stage.quantifier == "reluctant":
            return on.before(more, beating=beating)
        return more.before(on, beating=beating)

    def _guarded(self, found: _Building, not_next: Sequence[Test], not_between: Sequence[Test]) -> _Building:
        if not not_next and not not_between:
            return found
        options = [
            replace(option, not_next=(*not_next, *option.not_next), not_between=(*not_between, *option.not_between))
            for option in found.options
        ]
        return _Building(options, found.beats)

    def rule(self, number: int, slots: Sequence[Kept]) -> StageRule:
        at = self._taking[number]
        stage = self._step.stages[at]
        more, on = self.option(number, stage.repeats), self.leave(number + 1)
        return StageRule(
            name=stage.name,
            test=self._tests[at],
            until=self._untils[at],
            times_min=stage.times_min,
            times_max=stage.times_max,
            needy=more.ways(),
            open=self._choice(stage, more, on).ways(),
            full=on.ways(),
            slots=tuple((index, slot) for index, slot in enumerate(slots) if slot.stage in {None, at}),
        )

    def automaton(self, slots: Sequence[Kept]) -> Automaton:
        stages = tuple(self.rule(number, slots) for number in range(len(self._taking)))
        first = self.leave(0).ways()
        later = [way for stage in stages for way in (*stage.needy, *stage.open, *stage.full)]
        tests = [test for way in later for test in (*way.not_next, *way.not_between)]
        tests += [stages[way.target].test for way in later if way.target != END]
        tests += [stage.until for stage in stages if stage.until is not None]
        follows = [stage.follows for stage in self._step.stages[1:]]
        repeats = [stage.repeats for stage in self._step.stages if stage.times_max != 1]
        asked = [*self._tests, *(until for until in self._untils if until is not None)]
        return Automaton(
            stages=stages,
            first=first,
            slots=tuple(slots),
            initial=tuple(slot.start for slot in slots),
            start_bits=tuple(dict.fromkeys(stages[way.target].test.bit for way in first)),
            later_bits=tuple(dict.fromkeys(test.bit for test in tests)),
            adjacent="next" in {*follows, *repeats},
            reads=tuple(sorted({slot for test in asked for slot in test.reads})),
            beating=any(way.beats for way in (*first, *later)),
        )


def compile_pattern(
    step: p.Match, tests: Sequence[Test], untils: Sequence[Test | None], slots: Sequence[Kept]
) -> Automaton:
    """The automaton of a pattern; `tests` and `untils` stand beside the plan's stages."""
    return _Compiler(step, tests, untils).automaton(slots)


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A row that fulfils at least one condition. `place`: its ordinal among the rows of its key."""

    place: int
    time_us: int
    bits: int
    values: tuple[Any, ...]


class Node:
    """A partial match: the rows of its parent, and one more."""

    __slots__ = ("alive", "count", "depth", "parent", "row", "stage", "states", "ways")

    def __init__(
        self, automaton: Automaton, parent: Node | None, stage: int, row: Row, states: tuple[Any, ...]
    ) -> None:
        self.parent = parent
        self.stage = stage
        self.row = row
        self.states = states
        self.count: int = parent.count + 1 if parent is not None and parent.stage == stage else 1
        self.depth: int = parent.depth + 1 if parent is not None else 1
        """How many rows it has."""
        self.ways = automaton.stages[stage].ways(self.count)
        self.alive = -1
        """Which of the ways are still open, as far as other ways have ended them."""

    def path(self) -> list[Node]:
        found = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


def states_with(rule: StageRule, states: tuple[Any, ...], values: Sequence[Any]) -> tuple[Any, ...]:
    """The states of the slots after a row that a stage takes."""
    if not rule.slots:
        return states
    found = list(states)
    for index, slot in rule.slots:
        found[index] = slot.take(found[index], None if slot.value is None else values[slot.value])
    return tuple(found)
