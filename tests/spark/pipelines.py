"""Random pipelines over random files, each built twice at once: as a pipeline, and as the oracle of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import polars as pl
from tests.spark import oracle as o
from tests.spark.oracle import Collected, Node, Oracle, Read, Record, Rowwise, Running, Smooth, Windows

from fordstone import Pipeline, tumbling
from fordstone.api.stream import Stream
from fordstone.connectors import ConnectorSpec, files
from fordstone.connectors.encoding import encoded
from fordstone.connectors.file_settings import FileFormat
from fordstone.model.schema import Schema

SCHEMA: Final = {
    "id": "bigint",
    "k": "string",
    "ts": "timestamp",
    "n": "bigint",
    "x": "double",
    "d": "decimal(12,3)",
    "w": "string",
}
COLUMNS: Final = Schema.of(SCHEMA)
SECOND: Final = 1_000_000
SinkKind = Literal["append", "upsert", "at_once"]
KEYS: Final = (None, "", "a", "b", "β", "日本", "a,b", 'q"q', " c ", "l\nl", "null")
NUMBERS: Final = (None, 0, 1, 2, -3, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63))
DOUBLES: Final = (None, 0.0, -0.0, 0.5, -1.25, 1e6, 1 / 3, math.nan)
WORDS: Final = (None, "", "a", "a b", "β b  c")


# Rows and files.


@dataclass
class File:
    """A file that is there so far, and where each of its rows ends."""

    path: Path
    rows: list[Record] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def format(self) -> FileFormat:
        ending = self.path.suffix.removeprefix(".")
        assert ending in {"jsonl", "csv", "parquet", "arrow"}
        return ending  # type: ignore[return-value]  # checked above

    @property
    def grows(self) -> bool:
        """Tables are written once."""
        return self.format in {"jsonl", "csv"} or not self.ends

    def write(self, rows: Sequence[Record]) -> None:
        """Add rows at the end; a table is written as a whole."""
        assert self.grows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        frames = [pl.DataFrame([row], schema=COLUMNS.polars, orient="row") for row in rows]
        if self.format in {"parquet", "arrow"}:
            self.path.with_name("_new").write_bytes(encoded(pl.concat([COLUMNS.empty(), *frames]), self.format))
            self.path.with_name("_new").rename(self.path)
            self.ends += range(1, len(rows) + 1)
        else:
            with self.path.open("ab") as file:
                if self.format == "csv" and not file.tell():
                    file.write(encoded(COLUMNS.empty(), "csv"))
                for frame in frames:
                    file.write(encoded(frame, self.format, header=False))
                    self.ends.append(file.tell())
        self.rows += rows

    def between(self, start: int, until: int) -> list[Record]:
        """The rows that end behind `start` and not behind `until`."""
        return [row for row, end in zip(self.rows, self.ends, strict=True) if start < end <= until]


@dataclass
class Rows:
    """Makes rows whose time moves on with some disorder, a few of them late, a few far ahead."""

    rng: Random
    lateness_s: int
    second: float
    ids: Iterable[int]
    timeless: bool = True
    wild: bool = False
    """A clock far ahead now and then."""

    def take(self, count: int, file_format: str) -> list[Record]:
        return [self._row(file_format) for _ in range(count)]

    def _row(self, file_format: str) -> Record:
        rng = self.rng
        self.second += rng.choice((0, 0, 0.000001, 1, 1, 2, 5))
        back = rng.choice((0, 0, 0, 1, self.lateness_s, self.lateness_s + 0.000001, 30))
        us = round((self.second - back) * SECOND)
        if self.wild and rng.random() < 0.02:
            us += 40 * 365 * 86_400 * SECOND
        numbers = [value for value in DOUBLES if file_format != "jsonl" or value is None or not math.isnan(value)]
        return {
            "id": next(self.ids),  # type: ignore[call-overload]
            "k": rng.choice(KEYS),
            "ts": None if self.timeless and rng.random() < 0.02 else o.time_of(us),
            "n": rng.choice(NUMBERS),
            "x": rng.choice([*numbers, rng.uniform(-10, 10)]),
            "d": rng.choice((None, Decimal("0.000"), Decimal("-12.345"), Decimal("123456789.999"), Decimal("0.001"))),
            "w": rng.choice(WORDS),
        }


# Pipelines.


@dataclass(frozen=True)
class Twin:
    """A stream, and the node that says what must be on it."""

    case: Case
    stream: Stream
    node: Node
    late: bool = False
    """It is the late port of the node."""
    time: str | None = "ts"
    shift_us: int = 0

    def row_wise(self, stream: Stream, rows_of: Callable[[Record], Iterable[Record]], **changed: Any) -> Twin:
        node = Rowwise(self.node.sources, rows_of)
        self._put(node)
        return Twin(self.case, stream, node, **({"time": self.time, "shift_us": self.shift_us} | changed))

    def united(self, *others: Twin) -> Twin:
        sources = self.node.sources.union(*(other.node.sources for other in others))
        node = Rowwise(sources, lambda row: [row])
        self.case.oracle.add(node, behind=[twin.node for twin in (self, *others) if not twin.late])
        for twin in (self, *others):
            if twin.late:
                twin.node.late_next.append(node)
        time = self.time if all(twin.time == self.time for twin in others) else None
        return Twin(self.case, self.stream.union(*(other.stream for other in others)), node, time=time)

    def window(self, keys: Sequence[str], size_s: int, offset_s: int, made: Aggregates) -> Twin:
        stream = self.stream.group_by(*keys).window(tumbling(f"{size_s}s", offset=f"{offset_s}s"))
        node = Windows(
            self.node.sources,
            keys,
            {name: twin for name, (_, twin) in made.items()},
            size_us=size_s * SECOND,
            offset_us=offset_s * SECOND,
            time=self._us,
        )
        self._put(node)
        out = stream.agg(**{name: sql for name, (sql, _) in made.items()})
        return Twin(self.case, out, node, time="window_end", shift_us=-1)

    def running(self, keys: Sequence[str], made: Aggregates) -> Twin:
        node = Running(self.node.sources, keys, {name: twin for name, (_, twin) in made.items()})
        self._put(node)
        out = self.stream.group_by(*keys).agg(**{name: sql for name, (sql, _) in made.items()})
        return Twin(self.case, out, node, time=None)

    def smooth(self, keys: Sequence[str], alpha: float, read: str, new: str) -> Twin:
        node = Smooth(
            self.node.sources,
            keys,
            alpha=alpha,
            read=read,
            new=new,
            columns=list(self.stream.schema),
            time=self._us,
        )
        self._put(node)
        out = self.stream.group_by(*keys).ewma(alpha=alpha, **{new: read})
        return Twin(self.case, out, node, time=self.time, shift_us=self.shift_us)

    @property
    def late_rows(self) -> Twin:
        return Twin(self.case, self.stream.late, self.node, late=True, time=None)

    def sink(self, name: str, kind: SinkKind = "append") -> None:
        node = Collected(self.node.sources, list(self.stream.schema))
        self._put(node)
        self.case.oracle.sinks[name] = node
        self.case.kinds[name] = kind
        upsert_key = self.stream._type.upsert_key
        self.case.keys[name] = upsert_key
        release: Literal["commit", "at_once"] = "at_once" if kind == "at_once" else "commit"
        self.stream.sink(name, self.case.connector(name), release=release)

    def _us(self, row: Record) -> int:
        assert self.time is not None
        return o.us_of(row[self.time]) + self.shift_us

    def _put(self, node: Node) -> None:
        if self.late:
            self.case.oracle.add(node, late_of=self.node)
        else:
            self.case.oracle.add(node, behind=[self.node])


Aggregates = dict[str, tuple[str, Callable[[list[Record]], Any]]]
"""By name: as SQL, and as the oracle has it."""


@dataclass
class Case:
    """A pipeline with its oracle, its files and its sinks."""

    pipeline: Pipeline
    connector: Callable[[str], ConnectorSpec]
    oracle: Oracle = field(default_factory=Oracle)
    kinds: dict[str, SinkKind] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...] | None] = field(default_factory=dict)

    def source(self, name: str, pattern: str, *, lateness_s: int, idle_after: str | None, time: str | None) -> Twin:
        stream = self.pipeline.source(
            name, files(pattern), schema=SCHEMA, time=time, lateness=f"{lateness_s}s", idle_after=idle_after
        )
        node = Rowwise(frozenset({name}), lambda row: [row])
        self.oracle.source(name, node, lateness_us=lateness_s * SECOND, time=time)
        return Twin(self, stream, node, time=time)


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
    tails = [_running] if time is None else [_running, _windows, _windows, _smooth]
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
    behind = totals.row_wise(totals.stream.filter("c % 2 = 0"), lambda r: [r] if r["c"] % 2 == 0 else [])
    if rng.random() < 0.5:
        behind.sink(f"{name}_even", "upsert")
    else:
        behind.row_wise(
            behind.stream.select("c * 10 AS c", *keys), lambda r: [{"c": r["c"] * 10} | {key: r[key] for key in keys}]
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
    """Rows and windows of rows in one stream, in a step that stands behind both."""
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


# What was read.


def read_all(files_of: dict[str, list[File]]) -> list[Read]:
    """Everything at once: bounded input."""
    return [
        Read(source=source, partition=file.path.name, change="joins", rows=file.rows, ended=True)
        for source, found in files_of.items()
        for file in found
    ]


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text)
