"""Patterns and functions with state and timers at the end of a random pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from tests.simulation.rows import Row, SimulationError, check_equal, in_order, second_of
from tests.simulation.tails import MORE, OUT, STEP, Given, Sinks, Tail, attach_sinks, by_key

from fordstone.api.pattern import Pattern
from fordstone.api.process import Context, KeyedFunction, ListState, MapState, Timer, ValueState
from fordstone.api.stream import Stream

WITHIN_S: Final = 6
SILENCE_S: Final = 3
RECENT_S: Final = 5
FORGET_AT: Final = 4
"""At which count a timer forgets the key."""
TICK_US: Final = 3_000
"""In the simulation's time."""
PatternKind = Literal["strict", "relaxed", "absent"]


@dataclass(frozen=True, slots=True)
class MatchTail(Tail):
    """A pattern of two stages: right after each other, anywhere within a time, or the second must not come."""

    kind: PatternKind
    skip: Literal["past_last", "next"]

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        start = Pattern(STEP).start("a", "n = 0")
        measures = {"one": "a.id", "other": "b.id"}
        match self.kind:
            case "strict":
                pattern = start.next("b", "n > 1")
            case "relaxed":
                pattern = start.then("b", "n = 3").within(f"{WITHIN_S}s")
            case "absent":
                pattern = start.not_followed_by("b", "n = 3").within(f"{WITHIN_S}s")
                measures = {"one": "a.id", "other": "a.id"}
        found = stream.group_by("k").match(pattern, measures, skip=self.skip, order=["id"], name=STEP)
        attach_sinks(sinks, found, late=found.late, more=found.timeouts if self.kind == "relaxed" else None)

    def judge(self, given: Given) -> None:
        """All matches, and all that ran out of time."""
        pairs: Counter[tuple[int, int]] = Counter()
        over: Counter[int] = Counter()
        for rows in by_key(in_order(given.in_time(given.rows))).values():
            if self.kind == "relaxed":
                self._relaxed(rows, pairs, over)
            elif self.kind == "strict":
                pairs.update((a.id, b.id) for a, b in pairwise(rows) if a.n == 0 and b.n > 1)
            else:
                pairs.update((a.id, a.id) for at, a in enumerate(rows) if a.n == 0 and _next_three(rows, at) is None)
        check_equal("matches of the tail", Counter(given.found(OUT, "one", "other")), pairs)
        if self.kind == "relaxed":
            check_equal("time-outs of the tail", given.ids(MORE, "one"), over)

    def _relaxed(self, rows: list[Row], pairs: Counter[tuple[int, int]], over: Counter[int]) -> None:
        free_from = 0
        for at, a in enumerate(rows):
            if a.n != 0 or at < free_from:
                continue
            found = _next_three(rows, at)
            if found is None:
                over[a.id] += 1
                continue
            pairs[a.id, rows[found].id] += 1
            if self.skip == "past_last":
                free_from = found + 1


def _next_three(rows: list[Row], at: int) -> int | None:
    """Return where the first row with `n` = 3 follows another, within `WITHIN_S` seconds."""
    for later in range(at + 1, len(rows)):
        if rows[later].n == 3 and rows[later].second < rows[at].second + WITHIN_S:
            return later
    return None


_NUMBERED: Final = {"k": "bigint", "id": "bigint", "number": "bigint", "at": "timestamp", "rang": "boolean"}
_REMEMBERED: Final = _NUMBERED | {"same": "bigint", "recent": "bigint"}


class Numbering(KeyedFunction):
    """Numbers the rows of a key, and those with the same `n`. Silence is reported, and a number high enough forgotten with it."""

    seen = ValueState("bigint")
    by_n = MapState("bigint", "bigint")
    recent = ListState("bigint", ttl=f"{RECENT_S}s")

    def process(self, row: Mapping[str, Any], ctx: Context) -> Iterator[dict[str, Any]]:
        """Number a row, and move the timer."""
        number, same = self.seen.get(0) + 1, self.by_n.get(row["n"], 0) + 1
        self.seen.set(number)
        self.by_n[row["n"]] = same
        self.recent.append(row["id"])
        ctx.set_timer("silence", after=f"{SILENCE_S}s")
        numbered = {"k": ctx.key, "id": row["id"], "number": number, "at": ctx.time, "rang": False}
        yield numbered | {"same": same, "recent": sum(self.recent)}

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[dict[str, Any]]:
        """Report, and perhaps forget."""
        number = self.seen.get()
        if number >= FORGET_AT:
            self.seen.clear()
            self.by_n.clear()
        numbered = {"k": ctx.key, "id": None, "number": number, "at": timer.time, "rang": True}
        yield numbered | {"same": len(self.by_n), "recent": sum(self.recent)}


class Ticking(KeyedFunction):
    """Numbers the rows of a key, and reports the number once the clock has gone on."""

    seen = ValueState("bigint")

    def process(self, row: Mapping[str, Any], ctx: Context) -> Iterator[dict[str, Any]]:
        """Number a row, and move the timer."""
        number = self.seen.get(0) + 1
        self.seen.set(number)
        ctx.set_timer("tick", after=f"{TICK_US}us", clock=True)
        yield {"k": ctx.key, "id": row["id"], "number": number, "at": ctx.time, "rang": False}

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[dict[str, Any]]:
        """Report the number."""
        yield {"k": ctx.key, "id": None, "number": self.seen.get(), "at": timer.time, "rang": True}


@dataclass(frozen=True, slots=True)
class ProcessTail(Tail):
    """A function with a value and a timer."""

    by_clock: bool

    @property
    def goes_by_barriers(self) -> bool:
        """Timers by the clock do."""
        return self.by_clock

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        function, schema = (Ticking, _NUMBERED) if self.by_clock else (Numbering, _REMEMBERED)
        made = stream.group_by("k").process(function, schema=schema, name=STEP)
        attach_sinks(sinks, made, late=made.late)

    def judge(self, given: Given) -> None:
        """Rows with their numbers, and when timers rang. Those by the clock ring once for a number, if at all."""
        rows = by_key(in_order(given.in_time(given.rows)))
        if not self.by_clock:
            reported = Counter((*one[:3], second_of(one[3]), *one[4:]) for one in given.found(OUT, *_REMEMBERED))
            check_equal("rows of the tail", reported, Counter(one for k in rows for one in _numbered(k, rows[k])))
            return
        found = given.found(OUT, "k", "id", "number", "rang")
        numbers = {(row.k, row.id, at) for some in rows.values() for at, row in enumerate(some, 1)}
        check_equal("rows numbered", Counter(one[:3] for one in found if not one[3]), Counter(numbers))
        rang = Counter((k, number) for k, _, number, rang in found if rang)
        wrong = {one: count for one, count in rang.items() if count > 1 or not 0 < one[1] <= len(rows.get(one[0], ()))}
        if wrong:
            raise SimulationError(f"timers by the clock reported {wrong}")

    def counted(self, given: Given) -> Counter[int] | None:
        """Every row is reported."""
        return given.ids(OUT)


def _numbered(k: int, rows: list[Row]) -> Iterator[tuple[Any, ...]]:
    since: list[Row] = []
    for at, row in enumerate(rows):
        since.append(row)
        same = sum(one.n == row.n for one in since)
        yield k, row.id, len(since), row.second, False, same, _recent(rows[: at + 1], row.second)
        rings = row.second + SILENCE_S
        if at + 1 == len(rows) or rows[at + 1].second > rings:
            over = len(since) >= FORGET_AT
            kinds = 0 if over else len({one.n for one in since})
            yield k, None, len(since), rings, True, kinds, _recent(rows[: at + 1], rings)
            since = [] if over else since


def _recent(rows: list[Row], second: int) -> int:
    return sum(row.id for row in rows if row.second > second - RECENT_S)
