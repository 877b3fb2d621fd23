"""A keyed function that uses everything, a plain model of it, and what tests of keyed functions call."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from hypothesis import strategies as st
from tests.operators.subtasks import Barrier, Batch, Event, Restore, Row, Watermark, bits, rank, restored

from fordstone import KeyedFunction, ListState, MapState, ValueState
from fordstone.api.process import declared_states
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import LATE, Emits, Moment, OperatorContext
from fordstone.operators.process.step import Process
from fordstone.operators.registry import make_operator
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, StreamType

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
US = dt.timedelta(microseconds=1)
SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "op": "string", "x": "bigint"})
OUT = {
    "k": "string",
    "ts": "timestamp",
    "what": "string",
    "value": "bigint",
    "seen": "array<bigint>",
    "pairs": "array<string>",
}
VALUE_TTL, LIST_TTL, MAP_TTL = 3, 5, 4


def us(time: dt.datetime | None) -> int:
    assert time is not None
    return (time - EPOCH) // US


class Everything(KeyedFunction):
    """Does what rows tell it to, and gives all that it remembers."""

    value = ValueState("bigint", ttl=VALUE_TTL * US)
    seen = ListState("bigint", ttl=LIST_TTL * US)
    pairs = MapState("string", "bigint", ttl=MAP_TTL * US)
    kept = MapState("bigint", "double")

    def process(self, row, ctx):
        assert (row["k"], row["ts"]) == (ctx.key, ctx.time)
        op, x = row["op"], row["x"]
        name = f"n{(x or 0) % 3}"
        match op:
            case "set":
                self.value.set(x)
            case "clear":
                self.value.clear()
                self.seen.clear()
            case "append" if x is not None:
                self.seen.append(x)
            case "replace":
                self.seen.set([*self.seen, 7][-3:])
            case "put" if x is not None:
                self.pairs[name] = x
                self.kept[x] = x / 2
            case "pop":
                self.pairs.pop(name)
                if x in self.kept:
                    del self.kept[x]
            case "timer":
                ctx.set_timer(name, after=((x or 0) % 5) * US)
            case "chain":
                ctx.set_timer("chain", at=ctx.time + 2 * US)
            case "past":
                ctx.set_timer("past", at=ctx.time - 9 * US)
            case "delete":
                ctx.delete_timer(name)
            case _:
                return
        yield self._all(ctx, "row")

    def on_timer(self, timer, ctx):
        assert not timer.clock
        if timer.name == "chain":
            ctx.set_timer("n1", after=1 * US)
            self.value.set(us(timer.time))
        return self._all(ctx, timer.name)

    def _all(self, ctx, what):
        pairs = [f"{key}={value}" for key, value in self.pairs.items()] + [f"{key}:{x}" for key, x in self.kept.items()]
        assert len(self.pairs) + len(self.kept) == len(pairs)
        seen = self.seen.get()
        assert len(self.seen) == len(seen)
        return {
            "k": ctx.key,
            "ts": ctx.time,
            "what": what,
            "value": self.value.get(),
            "seen": seen,
            "pairs": pairs,
        }


@dataclass
class Model:
    """The same for one key, by hand: everything with the time it was written."""

    key: Any
    out: list[tuple[Any, ...]] = field(default_factory=list)
    value: tuple[int, int] | None = None
    seen: list[tuple[int, int]] = field(default_factory=list)
    pairs: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)

    def forget(self, now: int) -> None:
        if self.value is not None and self.value[1] + VALUE_TTL <= now:
            self.value = None
        self.seen = [one for one in self.seen if one[1] + LIST_TTL > now]
        self.pairs = {key: one for key, one in self.pairs.items() if one[1] + MAP_TTL > now}

    def show(self, now: int, what: str) -> None:
        pairs = [f"{key}={x}" for key, (x, _) in self.pairs.items()] + [f"{key}:{x}" for key, x in self.kept.items()]
        value = None if self.value is None else self.value[0]
        row = (self.key, now, what, value, [x for x, _ in self.seen], pairs)
        self.out.append(tuple(map(bits, row)))

    def fire(self, below: int) -> None:
        while due := sorted((at, name) for name, at in self.timers.items() if at < below):
            at, name = due[0]
            del self.timers[name]
            self.forget(at)
            if name == "chain":
                self.timers["n1"] = at + 1
                self.value = (at, at)
            self.show(at, name)

    def row(self, now: int, op: str, x: int | None) -> None:
        self.fire(now)
        self.forget(now)
        name = f"n{(x or 0) % 3}"
        if op == "set":
            self.value = None if x is None else (x, now)
        elif op == "clear":
            self.value, self.seen = None, []
        elif op == "append" and x is not None:
            self.seen.append((x, now))
        elif op == "replace":
            self.seen = [(one, now) for one in [*(value for value, _ in self.seen), 7][-3:]]
        elif op == "put" and x is not None:
            self.pairs[name] = (x, now)
            self.kept[x] = x / 2
        elif op == "pop":
            self.pairs.pop(name, None)
            self.kept.pop(x, None)  # type: ignore[arg-type]
        elif op == "timer":
            self.timers[name] = now + (x or 0) % 5
        elif op == "chain":
            self.timers["chain"] = now + 2
        elif op == "past":
            self.timers["past"] = now
        elif op == "delete":
            self.timers.pop(name, None)
        else:
            return
        self.show(now, "row")


def expected(rows: Sequence[Row], watermark: int) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for key in {row[0] for row in rows}:
        model = Model(key)
        mine = [row for row in rows if row[0] == key and row[1] < watermark]
        for row in sorted(mine, key=lambda row: (row[1], *map(rank, row))):
            model.row(*row[1:])
        model.fire(watermark)
        found.update(model.out)
    return found


def made(
    function: Any = Everything,
    *,
    keys: Sequence[str] = ("k",),
    schema: Schema = SCHEMA,
    out: dict[str, str] | None = None,
    time: EventTime | None = EventTime(column="ts"),  # noqa: B008 - a value, never changed
    ordered: bool = True,
) -> Process:
    step = p.Process(
        name="fn",
        input=p.Input("rows"),
        keys=tuple(keys),
        path="tests:function",
        schema=out or OUT,
        ordered=ordered,
        states=declared_states(function, "fn"),
    )
    plan = p.Plan(pipeline="test", steps=(step,))
    types = {p.Input("rows"): StreamType(schema=schema, time=time)}
    operator = make_operator(step, OperatorContext(plan=plan, types=types, functions={"tests:function": function}))
    assert isinstance(operator, Process)
    return operator


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    times = [None if row[1] is None else EPOCH + row[1] * US for row in rows]
    return pl.DataFrame(
        [(row[0], time, *row[2:]) for row, time in zip(rows, times, strict=True)], schema=SCHEMA.polars, orient="row"
    )


OPS = [
    "set",
    "clear",
    "append",
    "append",
    "replace",
    "put",
    "put",
    "pop",
    "timer",
    "timer",
    "chain",
    "past",
    "delete",
    "none",
]
rows_of_any_kind = st.tuples(
    st.sampled_from(["a", "a", "a", "b", "é", None]),
    st.one_of(st.integers(-6, 12), st.integers(-6, 12), st.integers(0, 4), st.none()),
    st.sampled_from(OPS),
    st.one_of(st.none(), st.integers(0, 9)),
)
batches = st.builds(
    Batch, st.lists(rows_of_any_kind, min_size=1, max_size=10), st.sampled_from([False, False, False, False, True])
)
rounds: st.SearchStrategy[list[Event]] = st.lists(
    st.one_of(
        st.tuples(batches, st.builds(Watermark, st.sampled_from([1, 2, 3, 5]))),
        st.tuples(batches, st.builds(Watermark, st.sampled_from([2, 3])), st.builds(Restore, st.integers(1, 3))),
        st.tuples(batches, st.builds(Watermark, st.sampled_from([2, 4])), st.just(Barrier()), batches),
    ),
    max_size=6,
).map(lambda found: [event for one in found for event in one])
"""Rows come, time moves on, and between that all else may happen: so that state is there when it does."""


# For tests of one thing at a time.


def rows_out(emits: Emits) -> list[tuple[Any, ...]]:
    found = [row for emit in emits for row in emit.frame.with_columns(pl.col(pl.Datetime).cast(pl.Int64)).iter_rows()]
    assert all(emit.port != LATE for emit in emits)
    return found


def calls(operator: Process, *rows: Row) -> None:
    assert operator.on_batch(frame(rows), late=False) == []


def barrier(operator: Process, now_us: int = 1) -> Emits:
    return operator.on_barrier(Moment(now_us=now_us, before_us=0))


def again(operator: Process, function: Any, watermark_us: int, **options: Any) -> Process:
    """A fresh operator with what the old one froze."""
    fresh = restored(operator, made(function, **options), watermark_us)
    fresh.on_watermark(watermark_us)
    return fresh


OUT_SCHEMA = {"k": "string", "ts": "timestamp", "text": "string"}


def telling(
    tell: Callable[[Any, Any, Any], Any], on_timer: Callable[[Any, Any, Any], Any] | None = None
) -> type[KeyedFunction]:
    """A function that gives what `tell` says of each row."""

    class Telling(KeyedFunction):
        value = ValueState("double")
        items = ListState("string")
        by_name = MapState("string", "array<bigint>")

        def process(self, row, ctx):
            text = tell(self, row, ctx)
            return None if text is None else {"k": row["k"], "ts": ctx.time, "text": str(text)}

        def on_timer(self, timer, ctx):
            assert on_timer is not None
            text = on_timer(self, timer, ctx)
            return None if text is None else {"k": "timer", "ts": ctx.time, "text": str(text)}

    return Telling


def texts(operator: Process, *rows: Row) -> list[str]:
    calls(operator, *rows)
    return [row[2] for row in rows_out(operator.on_watermark(TIME_MAX_US))]
