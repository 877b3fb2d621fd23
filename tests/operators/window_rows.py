"""Windows by time: rows for them, a plain loop that finds what lies in each, and subtasks after a combiner.

For the tests of tumbling and sliding windows, with and without early results.
"""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import polars as pl
from hypothesis import strategies as st
from tests.operators.subtasks import (
    Barrier,
    Batch,
    Event,
    Restore,
    Row,
    Subtasks,
    Watermark,
    below,
    bits,
    events_of,
    frame_of,
)

from fordstone import Pipeline
from fordstone.connectors.memory import memory
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.partial import ROWS
from fordstone.operators.base import MAIN, Moment, OperatorContext
from fordstone.operators.registry import make_feeder, make_operator
from fordstone.plan import plan as p
from fordstone.plan.plan import Sliding, Tumbling
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START
from fordstone.planner.check import stream_types

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "i": "bigint", "d": "decimal(10,2)"}
EXACT = {"n": "count(*)", "known": "count(i)", "s": "sum(i)", "sd": "sum(d)"}
ANY = EXACT | {"sx": "sum(x)", "lo": "min(x)", "hi": "max(x)", "mean": "avg(x)"}

floats = st.one_of(st.none(), st.integers(-99, 99).map(float), st.sampled_from([math.nan, math.inf, -math.inf]))
integers = st.one_of(st.none(), st.integers(-9, 9), st.sampled_from([2**63 - 1, -(2**63)]))
decimals = st.one_of(st.none(), st.integers(-999, 999).map(lambda cents: Decimal(cents) / 100))
rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "a", "b", "é", "", None]),
    st.one_of(st.integers(-30, 30), st.integers(-9, 9), st.none(), st.integers(-(10**15), 10**15)),
    floats,
    integers,
    decimals,
)
batches = st.lists(rows_of_any_kind, min_size=1, max_size=10)
slides = st.one_of(st.integers(1, 12), st.integers(1, 2))
"""With short slides windows have many panes, and are put together one after the other."""
windows = st.builds(Sliding, st.integers(1, 24), slides, st.integers(0, 11)).map(
    lambda found: Sliding(found.size_us, found.slide_us, found.offset_us % found.slide_us)
)


def planned(
    window: Sliding | Tumbling,
    aggregates: dict[str, str],
    *,
    late: bool = False,
    early_us: int | None = None,
    allowed_us: int = 0,
    keys: Any = ("k",),
) -> tuple[p.Aggregate, OperatorContext]:
    """The step, as a pipeline has it."""
    pipeline = Pipeline("windows")
    source = pipeline.source("rows", memory([]), schema=SCHEMA, time="ts")
    early = None if early_us is None else dt.timedelta(microseconds=early_us)
    allowed = dt.timedelta(microseconds=allowed_us) if allowed_us else None
    stream = source.group_by(*keys).window(window, early=early, allowed_lateness=allowed).agg(name="step", **aggregates)
    stream.sink("out", memory([]))
    if late:
        stream.late.sink("late", memory([]))
    plan = pipeline.plan()
    step = plan.step("step")
    assert isinstance(step, p.Aggregate)
    return step, OperatorContext(plan=plan, types=stream_types(plan))


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    return frame_of(rows, Schema.of(SCHEMA))


# The oracle: every row in every window that it lies in, by definition.


def windows_of(time: int, window: Sliding | Tumbling) -> list[int]:
    """The ends of the windows that hold a time."""
    slide = window.slide_us if isinstance(window, Sliding) else window.size_us
    first = (time - window.size_us - window.offset_us) // slide - 1
    starts = [window.offset_us + slide * index for index in range(first, first + window.size_us // slide + 4)]
    return [start + window.size_us for start in starts if start <= time < start + window.size_us]


def total(values: list[Any]) -> Any:
    return sum(values) if values else None


def wrapped(value: int | None) -> int | None:
    return None if value is None else (value + 2**63) % 2**64 - 2**63


def result(rows: Sequence[Row], names: Sequence[str]) -> tuple[Any, ...]:
    xs, numbers, money = ([row[at] for row in rows if row[at] is not None] for at in (2, 3, 4))
    real = [x for x in xs if not math.isnan(x)]
    found = {
        "n": len(rows),
        "known": len(numbers),
        "s": wrapped(total(numbers)),
        "sd": total(money),
        "sx": total(xs),
        "lo": None if not xs else min(real) if real else math.nan,
        "hi": None if not xs else math.nan if len(real) < len(xs) else max(real),
        "mean": None if not xs else sum(xs) / len(xs),
    }
    return tuple(bits(found[name]) for name in names)


def by_window(rows: Sequence[Row], window: Sliding | Tumbling) -> dict[tuple[Any, int], list[Row]]:
    found: dict[tuple[Any, int], list[Row]] = {}
    for row in rows:
        for end in windows_of(row[1], window):
            found.setdefault((row[0], end), []).append(row)
    return found


def expected(rows: Sequence[Row], window: Sliding | Tumbling, names: Sequence[str], until_us: int) -> Counter[Any]:
    return results_of(by_window(rows, window), window, names, until_us)


def results_of(
    held: Mapping[tuple[Any, int], Sequence[Row]], window: Sliding | Tumbling, names: Sequence[str], until_us: int
) -> Counter[Any]:
    return Counter(
        (k, end - window.size_us, end, *result(mine, names)) for (k, end), mine in held.items() if end <= until_us
    )


def shown(frames: Sequence[pl.DataFrame], names: Sequence[str]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for one in frames:
        plain = one.select("k", pl.col(WINDOW_START, WINDOW_END).cast(pl.Int64), *names)
        found.update((*row[:3], *map(bits, row[3:])) for row in plain.iter_rows())
    return found


# What is done to the operators.


@dataclass
class Windows:
    """Subtasks of a step after its combiner, and the rows that count."""

    window: Sliding | Tumbling
    aggregates: dict[str, str]
    combined: bool = True
    early_us: int | None = None
    allowed_us: int = 0
    held: dict[tuple[Any, int], list[Row]] = field(default_factory=dict)
    """The rows that count, by key and end of their window."""
    closed: set[tuple[Any, int]] = field(default_factory=set)
    late: int = 0
    gone: int = 0
    """Rows in gaps."""
    changed: set[tuple[Any, int]] = field(default_factory=set)
    """Windows that are not closed and have changed since their last result."""
    shown_us: int = TIME_MIN_US
    """The watermark at the last barrier."""
    clock_us: int = 0

    def __post_init__(self) -> None:
        self.step, self.setting = planned(
            self.window,
            self.aggregates,
            late=not self.combined,
            early_us=self.early_us,
            allowed_us=self.allowed_us,
        )
        feeder = make_feeder(self.step, 0, self.setting)
        assert (feeder is not None) == self.combined
        self.feeder = feeder
        self.subtasks = Subtasks(make=lambda: make_operator(self.step, self.setting), frame=frame)
        self.subtasks.barrier = self.barrier  # type: ignore[method-assign,assignment]  # restores end an epoch, too

    @property
    def names(self) -> list[str]:
        return list(self.aggregates)

    def live_through(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Batch(rows=rows, late=late):
                    self.batch(rows, late=late, watermarks=event.watermarks(self.subtasks.watermark_us))
                case Watermark(by=by):
                    self.watermark(max(self.subtasks.watermark_us, -30) + by)
                case Barrier():
                    self.barrier()
                case Restore(parallelism=parallelism):
                    self.subtasks.restore(parallelism)

    def batch(self, rows: Sequence[Row], *, late: bool, watermarks: Sequence[int] | None = None) -> None:
        given = watermarks or [self.subtasks.watermark_us] * len(rows)
        for row, watermark_us in zip(rows, given, strict=True):
            ends = [] if row[1] is None else windows_of(row[1], self.window)
            still_open = [end for end in ends if end + self.allowed_us > watermark_us]
            for end in still_open:
                self.held.setdefault((row[0], end), []).append(row)
                self.changed.add((row[0], end))
            if row[1] is not None and not ends:
                self.gone += 1
            elif not still_open:
                self.late += 1
        if self.feeder is None:
            self.subtasks.batch(rows, late=late, watermarks=given)
            return
        for emit in self.feeder.on_batch(below(frame(rows), given) if late else frame(rows), late=late):
            if emit.port == MAIN:
                self.subtasks.frames(emit.frame, late=emit.late)
            else:
                self.subtasks._take([emit])

    def expected(self, until_us: int) -> Counter[Any]:
        return results_of(self.held, self.window, self.names, until_us)

    def watermark(self, us: int) -> None:
        mark = len(self.subtasks.out)
        self.subtasks.watermark(us)
        closed = {(k, end) for k, end in self.held if us == TIME_MAX_US or end + self.allowed_us <= us}
        if self.allowed_us:
            new = {one for one in closed - self.closed if one[1] > self.shown_us or one in self.changed}
            assert shown(self.subtasks.out[mark:], self.names) == self._results(new)
        self.changed -= closed
        self.closed |= closed

    def _results(self, windows: Iterable[tuple[Any, int]]) -> Counter[Any]:
        found = {window: self.held[window] for window in windows}
        return results_of(found, self.window, self.names, TIME_MAX_US)

    def barrier(self) -> None:
        moment = Moment(now_us=self.clock_us + 1, before_us=self.clock_us)
        self.clock_us += 1
        mark = len(self.subtasks.out)
        Subtasks.barrier(self.subtasks, moment)
        watermark_us = self.subtasks.watermark_us
        wanted: set[tuple[Any, int]] = set()
        if self.allowed_us:
            kept = self.held.keys() - self.closed
            wanted |= {one for one in kept if self.shown_us < one[1] <= watermark_us}
            wanted |= {one for one in self.changed if one[1] <= watermark_us}
        if self.early_us is not None and moment.passes(self.early_us):
            wanted |= {one for one in self.changed if one[1] > watermark_us}
        self.changed -= wanted
        self.shown_us = watermark_us
        assert shown(self.subtasks.out[mark:], self.names) == self._results(wanted)

    def rows_late(self) -> int:
        return sum(int(one.get_column(ROWS).sum()) if ROWS in one.columns else one.height for one in self.subtasks.late)


filled = st.builds(Batch, st.lists(rows_of_any_kind, min_size=4, max_size=16))
some = events_of(batches, steps=(1, 2, 3, 7, 20, 10**14), most=6)
happens = st.tuples(filled, some, filled, some).map(lambda parts: [parts[0], *parts[1], parts[2], *parts[3]])
