"""Random pipelines: which steps, after which, with which settings; each with its oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import polars as pl
from tests.spark import oracle as o
from tests.spark import oracle_steps as steps
from tests.spark.oracle import Record
from tests.spark.pipelines import SECOND, Aggregates, Case, SinkKind, Twin

from fordstone import (
    Context,
    KeyedFunction,
    Pattern,
    Pipeline,
    Timer,
    ValueState,
    by_count,
    session,
    sliding,
)
from fordstone.connectors import ConnectorSpec


def swap_number(record: Record) -> Record:
    """A user's function, of one record."""
    return record | {"n": None if record["n"] is None else o.wrapped(-record["n"]), "k": (record["k"] or "") + "'"}


def some_copies(record: Record) -> Iterable[Record]:
    """A user's function, of one record to many."""
    return [record | {"w": str(copy)} for copy in range(record["id"] % 3)]


def not_fifths(frame: pl.DataFrame) -> pl.DataFrame:
    """A user's function, of a batch; takes rows one by one, as it must."""
    return frame.filter(pl.col("id") % 5 != 0).with_columns(w=pl.col("k"))


def rowwise(rng: Random, twin: Twin, *, ids: bool) -> Twin:
    """Some steps without state. `ids`: only those that keep the ids of rows."""
    for _ in range(rng.choice((0, 1, 1, 2))):
        twin = _one(rng.randrange(12 if ids else 13), twin)
    return twin


def _one(choice: int, twin: Twin) -> Twin:
    stream = twin.stream
    match choice:
        case 0:
            return twin.row_wise(stream.filter("n > 0"), lambda r: [r] if r["n"] is not None and r["n"] > 0 else [])
        case 1:
            return twin.row_wise(stream.filter("k IS NOT NULL"), lambda r: [r] if r["k"] is not None else [])
        case 2:
            return twin.row_wise(
                stream.filter("x >= 0"),
                lambda r: [r] if r["x"] is not None and (math.isnan(r["x"]) or r["x"] >= 0) else [],
            )
        case 3:
            return twin.row_wise(stream.filter("id % 3 <> 1"), lambda r: [r] if r["id"] % 3 != 1 else [])
        case 4:
            return twin.row_wise(
                stream.with_columns("n + 1 AS n"),
                lambda r: [r | {"n": None if r["n"] is None else o.wrapped(r["n"] + 1)}],
            )
        case 5:
            return twin.row_wise(
                stream.with_columns("coalesce(k, '?') AS k"), lambda r: [r | {"k": "?" if r["k"] is None else r["k"]}]
            )
        case 6:
            return twin.row_wise(
                stream.with_columns("x * 2 AS x"), lambda r: [r | {"x": None if r["x"] is None else r["x"] * 2}]
            )
        case 7:
            return twin.row_wise(
                stream.with_columns("concat(k, w) AS w"),
                lambda r: [r | {"w": None if r["k"] is None or r["w"] is None else r["k"] + r["w"]}],
            )
        case 8:
            return twin.row_wise(stream.select(*reversed(list(stream.schema))), lambda r: [r])
        case 9:
            return twin.row_wise(
                stream.flat_map("split(w, ' ') AS w"),
                lambda r: [r | {"w": word} for word in r["w"].split(" ")] if r["w"] is not None else [],
            )
        case 10:
            return twin.row_wise(stream.map(swap_number), lambda r: [swap_number(r)])
        case 11:
            return twin.row_wise(stream.flat_map(some_copies), some_copies)
        case _:
            return twin.row_wise(
                stream.map_batches(not_fifths), lambda r: [r | {"w": r["k"]}] if r["id"] % 5 != 0 else []
            )


def aggregates(rng: Random) -> Aggregates:
    every: Aggregates = {
        "c": ("count(*)", o.count()),
        "cn": ("count(n)", o.count("n")),
        "sn": ("sum(n)", o.total("n")),
        "sx": ("sum(x)", o.total("x")),
        "sd": ("sum(d)", o.total("d")),
        "ax": ("avg(x)", o.mean("x")),
        "ai": ("avg(id)", o.mean("id")),
        "lx": ("min(x)", o.least("x")),
        "hx": ("max(x)", o.most("x")),
        "hn": ("max(n)", o.most("n")),
        "lk": ("min(k)", o.least("k")),
        "ht": ("max(ts)", o.most("ts")),
        "hd": ("max(d)", o.most("d")),
    }
    names = rng.sample([name for name in every if name != "c"], rng.randint(1, 4))
    return {name: every[name] for name in ["c", *names]}


def key_columns(rng: Random) -> tuple[str, ...]:
    return rng.choice(((), ("k",), ("k",), ("k",), ("n", "k"), ("x",)))


def random_case(
    seed: int,
    root: Path,
    connector: Callable[[str], ConnectorSpec],
    *,
    sources: int,
    idle_after: str | None = None,
    time: str | None = "ts",
    ids: bool = True,
) -> Case:
    """The pipeline of a seed. `ids`: some sinks release at once."""
    rng = Random(seed)
    case = Case(Pipeline(f"random-{seed}"), connector)
    heads = [
        case.source(
            f"source{number}", f"{root}/in{number}/*", lateness_s=lateness_s(seed), idle_after=idle_after, time=time
        )
        for number in range(sources)
    ]
    at_once = ids and rng.random() < 0.4
    streams = [rowwise(rng, head, ids=at_once) for head in heads]
    if at_once and rng.random() < 0.5:
        rng.choice(streams).sink("first", "at_once")
    if len(streams) > 1 or rng.random() < 0.3:
        if len(streams) == 1:
            streams.append(rng.choice((heads[0], rowwise(rng, heads[0], ids=at_once))))
        stream = streams[0].united(*streams[1:])
    else:
        stream = streams[0]
    rng.choice((stream, rowwise(rng, stream, ids=at_once))).sink("rows", "at_once" if at_once else "append")
    tails = [_running] if time is None else [_running, _windows, _windows, _smooth, *MORE]
    for number, tail in enumerate(rng.sample(tails, rng.randint(1, min(2, len(tails))))):
        tail(rng, rowwise(rng, stream, ids=False), f"t{number}", ids=ids)
    return case


def lateness_s(seed: int) -> int:
    return (0, 3, 5)[seed % 3]


def _running(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    keys = key_columns(rng)
    totals = twin.running(keys, aggregates(rng))
    if rng.random() < 0.7:
        totals.sink(f"{name}_all", "upsert")
    even = totals.row_wise(totals.stream.filter("c % 2 = 0"), lambda r: [r] if r["c"] % 2 == 0 else [])
    if rng.random() < 0.5:
        even.sink(f"{name}_even", "upsert")
    else:
        even.row_wise(
            even.stream.select("c * 10 AS c", *keys), lambda r: [{"c": r["c"] * 10} | {key: r[key] for key in keys}]
        ).sink(f"{name}_tens", "upsert")


def _windows(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    size_s = rng.choice((4, 10))
    keys = key_columns(rng)
    windows = twin.window(keys, size_s, rng.choice((0, 0, 1)), aggregates(rng))
    if rng.random() < 0.5:
        late = windows.late_rows
        rng.choice((late, rowwise(rng, late, ids=False))).sink(f"{name}_late")
    kind: SinkKind = "at_once" if ids and rng.random() < 0.3 else "append"
    windows.sink(f"{name}_windows", kind)
    again = tuple(key for key in keys if rng.random() < 0.5)
    sums: Aggregates = {
        "windows": ("count(*)", o.count()),
        "c": ("sum(c)", o.total("c")),
        "hc": ("max(c)", o.most("c")),
    }
    match rng.randrange(6):
        case 0:
            twice = windows.window(again, 3 * size_s, 0, sums)
            twice.sink(f"{name}_twice")
            if rng.random() < 0.5:
                twice.running((), {"c": ("sum(c)", o.total("c"))}).sink(f"{name}_twice_all", "upsert")
        case 1:
            windows.running(again, sums).sink(f"{name}_all", "upsert")
        case 2:
            windows.smooth(again, 0.25, "c", "s").sink(f"{name}_smooth")
        case 3:
            _mixed(twin, windows, name)
        case 4:
            # What came too late here, and all of it: some rows pass one keyed step, some none.
            every = twin.united(windows.late_rows)
            every.running((), {"c": ("count(*)", o.count()), "hi": ("max(id)", o.most("id"))}).sink(
                f"{name}_every", "upsert"
            )
        case _:
            pass


def _mixed(rows: Twin, windows: Twin, name: str) -> None:
    """Rows and windows of rows in one stream, in a step that stands after both."""
    counted = windows.row_wise(
        windows.stream.select("c AS n", "'w' AS of"), lambda r: [{"n": r["c"], "of": "w"}], time=None
    )
    single = rows.row_wise(rows.stream.select("'r' AS of", "id AS n"), lambda r: [{"of": "r", "n": r["id"]}], time=None)
    made: Aggregates = {"c": ("count(*)", o.count()), "sn": ("sum(n)", o.total("n"))}
    single.united(counted).running(("of",), made).sink(f"{name}_mixed", "upsert")


def _smooth(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    smooth = twin.smooth(rng.choice(((), ("k",), ("k",), ("n",))), rng.choice((0.5, 0.1, 1.0)), "x", "s")
    smooth.sink(f"{name}_smooth")
    if rng.random() < 0.5:
        smooth.late_rows.sink(f"{name}_late")
    if rng.random() < 0.5:
        made: Aggregates = {"c": ("count(*)", o.count()), "hs": ("max(s)", o.most("s")), "lx": ("min(x)", o.least("x"))}
        smooth.window(("k",), 10, 0, made).sink(f"{name}_windows")


def timed_aggregates(rng: Random, twin: Twin) -> Aggregates:
    """Aggregates, some of which go by time or keep more than sums."""
    more: Aggregates = {
        "fn": ("first(n)", steps.first_of("n", twin.us)),
        "lw": ("last(w)", steps.last_of("w", twin.us)),
        "vi": ("var_samp(id)", steps.variance_of("id", less=1)),
        "pi": ("var_pop(id)", steps.variance_of("id", less=0)),
        "ci": ("collect(id)", steps.collected("id", twin.us)),
    }
    names = rng.sample(sorted(more), rng.randint(0, 2))
    return aggregates(rng) | {name: more[name] for name in names}


def _sliding(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    keys, made = key_columns(rng), timed_aggregates(rng, twin)
    size_s, slide_s, offset_s = rng.choice(((6, 2, 0), (10, 5, 1), (5, 3, 0), (2, 7, 3), (4, 4, 0)))
    node = steps.Sliding(
        twin.node.sources,
        keys,
        {column: found for column, (_, found) in made.items()},
        size_us=size_s * SECOND,
        slide_us=slide_s * SECOND,
        offset_us=offset_s * SECOND,
        time=twin.us,
    )
    window = sliding(f"{size_s}s", every=f"{slide_s}s", offset=f"{offset_s}s")
    _attach(rng, twin.windowed(keys, window, made, node), name)


def _sessions(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    keys, made, gap_s = key_columns(rng), timed_aggregates(rng, twin), rng.choice((1, 3, 8))
    found = {column: twin_of for column, (_, twin_of) in made.items()}
    node = steps.Sessions(twin.node.sources, keys, found, gap_us=gap_s * SECOND, time=twin.us)
    _attach(rng, twin.windowed(keys, session(f"{gap_s}s"), made, node), name)


def _counts(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    keys, made = key_columns(rng), timed_aggregates(rng, twin)
    size, slide = rng.choice(((1, 1), (3, 3), (4, 1), (3, 2), (2, 5)))
    read = list(dict.fromkeys(column for sql, _ in made.values() for column in _columns_of(sql)))
    order = [*read, *(column for column in twin.stream.schema if column not in read)]
    found = {column: twin_of for column, (_, twin_of) in made.items()}
    node = steps.Counts(twin.node.sources, keys, found, size=size, slide=slide, columns=order, time=twin.us)
    _attach(rng, twin.windowed(keys, by_count(size, every=slide), made, node), name)


def _columns_of(sql: str) -> list[str]:
    inside = sql.partition("(")[2].rstrip(")")
    return [] if inside == "*" else [inside]


def _attach(rng: Random, windows: Twin, name: str) -> None:
    windows.sink(f"{name}_windows")
    if rng.random() < 0.4:
        windows.late_rows.sink(f"{name}_late")
    if rng.random() < 0.4:
        sums: Aggregates = {"windows": ("count(*)", o.count()), "c": ("sum(c)", o.total("c"))}
        windows.window((), 12, 0, sums).sink(f"{name}_twice")


def _first(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    keys, within_s = rng.choice((("k",), ("n",), ("n", "k"), ("x",))), rng.choice((1, 4, 30))
    order = list(twin.stream.schema)
    node = steps.First(twin.node.sources, keys, within_us=within_s * SECOND, columns=order, time=twin.us)
    stream = twin.stream.deduplicate(*keys, within=f"{within_s}s")
    first = twin.then(stream, node, time=twin.time, shift_us=twin.shift_us)
    first.sink(f"{name}_first")
    if rng.random() < 0.4:
        first.late_rows.sink(f"{name}_late")
    if rng.random() < 0.4:
        first.window(("k",), 10, 0, {"c": ("count(*)", o.count())}).sink(f"{name}_windows")


def _join(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    """A stream with itself, or a part of itself, beside it."""
    how = rng.choice(("inner", "inner", "left", "right", "full"))
    from_s, to_s = rng.choice(((-2, 2), (0, 3), (-4, -1), (1, 1), (0, 0)))
    other = twin.row_wise(twin.stream.filter("id % 2 = 0"), lambda row: [row] if row["id"] % 2 == 0 else [])
    columns = list(twin.stream.schema)

    def pair(left: Record | None, right: Record | None) -> Record:
        found = {column: None if left is None else left[column] for column in columns}
        more = {f"{column}_right": None if right is None else right[column] for column in columns if column != "k"}
        return found | more | {"k": (left or right or {})["k"]}

    node = steps.Joined(
        twin.node.sources,
        how=how,
        key="k",
        from_us=from_s * SECOND,
        to_us=to_s * SECOND,
        times=(twin.us, other.us),
        pair=pair,
    )
    for side, given in enumerate((twin, other)):
        given.row_wise(given.stream, partial(_marked, side)).node.next.append(node)
    stream = twin.stream.join(other.stream, on="k", between=(f"{from_s}s", f"{to_s}s"), how=how)
    joined = twin.case.placed(node, stream)
    joined.sink(f"{name}_pairs")
    if rng.random() < 0.4:
        joined.late_rows.sink(f"{name}_late")


def _marked(side: int, row: Record) -> Iterable[Record]:
    return [row | {"side": side}]


def _half_life(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    keys, half_life_s = rng.choice(((), ("k",), ("n",))), rng.choice((1, 7))
    node = steps.HalfLife(
        twin.node.sources,
        keys,
        half_life_us=half_life_s * SECOND,
        read="id",
        new="s",
        columns=list(twin.stream.schema),
        time=twin.us,
    )
    stream = twin.stream.group_by(*keys).ewma(half_life=f"{half_life_s}s", s="id")
    twin.then(stream, node, time=twin.time, shift_us=twin.shift_us).sink(f"{name}_smooth")


def _match(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    keys = rng.choice(((), ("k",), ("k",), ("n",)))
    node = steps.Adjacent(
        twin.node.sources,
        keys,
        first=lambda row: row["id"] % 3 == 0,
        second=lambda row: row["id"] % 3 != 0,
        pair=lambda one, other: {key: o.shown_key(one[key]) for key in keys} | {"one": one["id"], "other": other["id"]},
        columns=["id", *(column for column in twin.stream.schema if column != "id")],
        time=twin.us,
    )
    pattern = Pattern("adjacent").start("a", "id % 3 = 0").next("b", "id % 3 <> 0")
    stream = twin.stream.group_by(*keys).match(pattern, measures={"one": "a.id", "other": "b.id"})
    matched = twin.then(stream, node, time=None)
    matched.sink(f"{name}_matches")
    if rng.random() < 0.4:
        matched.late_rows.sink(f"{name}_late")


class CountAndWait(KeyedFunction):
    """A user's function with state and a timer."""

    seen = ValueState("bigint")

    def process(self, row: Record, ctx: Context) -> Iterable[Record]:
        number = self.seen.get(0) + 1
        self.seen.set(number)
        ctx.set_timer("silence", after="3s")
        yield {"k": row["k"], "number": number, "at": ctx.time, "rang": False}

    def on_timer(self, timer: Timer, ctx: Context) -> Iterable[Record]:
        yield {"k": ctx.key, "number": self.seen.get(), "at": timer.time, "rang": True}


def _process(rng: Random, twin: Twin, name: str, *, ids: bool) -> None:
    columns = list(twin.stream.schema)
    node = steps.Numbered(twin.node.sources, "k", silence_us=3 * SECOND, columns=columns, time=twin.us)
    schema = {"k": "string", "number": "bigint", "at": "timestamp", "rang": "boolean"}
    stream = twin.stream.group_by("k").process(CountAndWait, schema=schema)
    twin.then(stream, node, time=None).sink(f"{name}_numbers")


MORE: Final = (_sliding, _sessions, _counts, _first, _join, _half_life, _match, _process)
"""Tails of streams that have a time."""
