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
from tests.spark.oracle import Collected, Node, Oracle, Read, Record, Rowwise, Running, Windows
from tests.spark.oracle_steps import Smooth

from fordstone import Pipeline, tumbling
from fordstone.api.stream import Stream
from fordstone.connectors import ConnectorSpec, files
from fordstone.connectors.files.rows import encoded
from fordstone.connectors.files.settings import FileFormat
from fordstone.lang.schema import Schema
from fordstone.plan.plan import Count, Window

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
        """The rows that end after `start` and not after `until`."""
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
        self.case.oracle.add(node, after=[twin.node for twin in (self, *others) if not twin.late])
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
            time=self.us,
        )
        self._put(node)
        out = stream.agg(**{name: sql for name, (sql, _) in made.items()})
        return Twin(self.case, out, node, time="window_end", shift_us=-1)

    def windowed(self, keys: Sequence[str], window: Window, made: Aggregates, node: Node) -> Twin:
        """Windows of any kind, with the node that says what they give."""
        self._put(node)
        out = self.stream.group_by(*keys).window(window).agg(**{name: sql for name, (sql, _) in made.items()})
        shift_us = 0 if isinstance(window, Count) else -1
        return Twin(self.case, out, node, time="window_end", shift_us=shift_us)

    def then(self, stream: Stream, node: Node, *, time: str | None, shift_us: int = 0) -> Twin:
        """Any other step, with its node."""
        self._put(node)
        return Twin(self.case, stream, node, time=time, shift_us=shift_us)

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
            time=self.us,
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

    def us(self, row: Record) -> int:
        """The time of a row of this stream."""
        assert self.time is not None
        return o.us_of(row[self.time]) + self.shift_us

    def _put(self, node: Node) -> None:
        if self.late:
            self.case.oracle.add(node, late_of=self.node)
        else:
            self.case.oracle.add(node, after=[self.node])


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
            name,
            files(pattern),
            schema=SCHEMA,
            time=time,
            lateness=f"{lateness_s}s",
            # Some rows are years ahead, and the oracle has no clock.
            max_ahead=None,
            idle_after=idle_after,
            # Their seconds are counted from 1970.
            check_time_unit=False,
        )
        node = Rowwise(frozenset({name}), lambda row: [row])
        self.oracle.source(name, node, lateness_us=lateness_s * SECOND, time=time)
        return Twin(self, stream, node, time=time)

    def placed(self, node: Node, stream: Stream) -> Twin:
        """A stream without a time, whose node has its inputs already."""
        self.oracle.add(node)
        return Twin(self, stream, node, time=None)


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
