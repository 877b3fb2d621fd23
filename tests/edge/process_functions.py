"""Keyed functions at the top level of a module, as a deployed pipeline has them; and rows to run them on."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from random import Random
from typing import Any

from tests.edge.runs import LATENESS_S, START, in_disorder, in_time

from fordstone import KeyedFunction, ListState, MapState, Pipeline, Stream, ValueState
from fordstone.connectors.memory import MemorySink, MemorySource, memory

SCHEMA = {"k": "string", "ts": "timestamp", "x": "bigint"}
OUT_SCHEMA = {"k": "string", "ts": "timestamp", "what": "string", "n": "bigint", "seen": "string"}


class Visits(KeyedFunction):
    """Counts the rows of a visit, which ends after four seconds of silence; remembers numbers for a while."""

    n = ValueState("bigint")
    lately = ListState("bigint", ttl="5s")
    counts = MapState("bigint", "bigint", ttl="30s")

    def process(self, row, ctx):
        self.n.set(self.n.get(0) + 1)
        if row["x"] is not None:
            self.lately.append(row["x"])
            self.counts[row["x"] % 3] = self.counts.get(row["x"] % 3, 0) + 1
        ctx.set_timer("over", after="4s")
        if row["x"] == 7:
            ctx.set_timer("seven", at=ctx.time + timedelta(seconds=1))
        if row["x"] == 8:
            ctx.delete_timer("seven")
        yield self._row(ctx, "row")

    def on_timer(self, timer, ctx):
        yield self._row(ctx, timer.name)
        if timer.name == "over":
            self.n.clear()

    def _row(self, ctx, what):
        seen = f"{self.lately.get()} {self.counts.items()}"
        return {"k": ctx.key, "ts": ctx.time, "what": what, "n": self.n.get(), "seen": seen}


class Reminders(KeyedFunction):
    """Tells by the clock of keys that have been silent, and forgets by the clock."""

    n = ValueState("bigint", ttl="20ms")

    def process(self, row, ctx):
        self.n.set(self.n.get(0) + 1)
        ctx.set_timer("silent", after="10ms", clock=True)

    def on_timer(self, timer, ctx):
        if self.n.get() is not None:
            ctx.set_timer("silent", after="10ms", clock=True)
        yield {"k": ctx.key, "n": self.n.get(), "clock": timer.time}


def record(row: tuple[str | None, int, int | None]) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), row[2])


def some_rows(seed: int, count: int) -> list[tuple[str | None, int, int | None]]:
    """Rows whose time moves on with some disorder; a few are late, many share a time."""
    rng = Random(seed)
    seconds = in_disorder(rng, count, steps=(0, 0, 1, 3))
    return [(rng.choice(["a", "b", "é", None]), second, rng.choice((None, *range(10)))) for second in seconds]


def visits(source: MemorySource, out: MemorySink, late: MemorySink | None = None, **options: Any) -> Pipeline:
    pipeline = Pipeline("visits", **options)
    rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    visited: Stream = rows.group_by("k").process(Visits, schema=OUT_SCHEMA)
    visited.sink("out", memory(out))
    if late is not None:
        visited.late.sink("late", memory(late))
    return pipeline


def by_hand(partitions: list[list[Any]]) -> tuple[Counter[Any], int]:
    """What `Visits` gives, computed without states and timers; and the number of late rows."""
    kept, late = in_time(partitions)
    found: Counter[Any] = Counter()
    for key in {row[0] for row in kept}:
        mine = sorted((row for row in kept if row[0] == key), key=lambda row: (row[1], row[2] is not None, row[2] or 0))
        n, numbers, seven = 0, [], None
        for place, (_, second, x) in enumerate(mine):
            n += 1
            numbers.append((second, x))
            seven = second + 1 if x == 7 else None if x == 8 else seven
            found[_row_of(key, second, "row", n, numbers)] += 1
            following = mine[place + 1][1] if place + 1 < len(mine) else None
            due = [(second + 4, "over")] + ([(seven, "seven")] if seven is not None else [])
            for at, name in sorted(due):
                if following is not None and at >= following:
                    continue
                found[_row_of(key, at, name, n or None, numbers)] += 1
                if name == "over":
                    n = 0
                else:
                    seven = None
    return found, late


def _row_of(key: Any, second: int, what: str, n: int | None, numbers: list[Any]) -> Any:
    lately = [x for at, x in numbers if x is not None and at + 5 > second]
    counts: dict[int, list[int]] = {}
    for at, x in numbers:
        if x is not None:
            if x % 3 in counts and counts[x % 3][1] + 30 <= at:
                del counts[x % 3]
            counts[x % 3] = [counts.get(x % 3, [0])[0] + 1, at]
    items = [(rest, count) for rest, (count, at) in counts.items() if at + 30 > second]
    return (*record((key, second, None))[:2], what, n, f"{lately} {items}")
