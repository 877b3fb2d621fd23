"""What must come of a pipeline, worked out row by row in plain Python.

Shares nothing with what it judges: no Polars, no operators, no expressions. A graph of nodes takes the rows of each batch,
then hears how far time has come, as the design says it (section 6, rules 6, 8, 10, 21). A bounded run is one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

Record = dict[str, Any]
Time = Callable[[Record], int]
NEVER = -math.inf
ALWAYS = math.inf
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


def us_of(time: datetime) -> int:
    return (time - EPOCH) // _US


def time_of(us: int) -> datetime:
    return EPOCH + us * _US


class Node:
    """One step. `sources` are those whose time is the time here. Rows come with the watermark of their partition (rule 6)."""

    def __init__(self, sources: frozenset[str]) -> None:
        self.sources = sources
        self.next: list[Node] = []
        self.late_next: list[Node] = []
        self.us: float = NEVER

    def push(self, row: Record, *, watermark: float) -> None:
        self.give(row, watermark=watermark)

    def give(self, row: Record, *, watermark: float = NEVER) -> None:
        for node in self.next:
            node.push(dict(row), watermark=watermark)

    def give_late(self, row: Record) -> None:
        for node in self.late_next:
            node.push(dict(row), watermark=NEVER)

    def on_time(self, us: float) -> None:
        self.us = us


class Rowwise(Node):
    """Any number of rows for each."""

    def __init__(self, sources: frozenset[str], rows_of: Callable[[Record], Iterable[Record]]) -> None:
        super().__init__(sources)
        self._rows_of = rows_of

    def push(self, row: Record, *, watermark: float) -> None:
        for made in self._rows_of(row):
            self.give(made, watermark=watermark)


class Windows(Node):
    """Tumbling windows by time."""

    def __init__(
        self,
        sources: frozenset[str],
        keys: Sequence[str],
        aggregates: Mapping[str, Callable[[list[Record]], Any]],
        *,
        size_us: int,
        offset_us: int,
        time: Time,
    ) -> None:
        super().__init__(sources)
        self._keys, self._aggregates, self._time = tuple(keys), aggregates, time
        self._size_us, self._offset_us = size_us, offset_us
        self._open: dict[tuple[int, tuple[Any, ...]], list[Record]] = {}

    def push(self, row: Record, *, watermark: float) -> None:
        end = (self._time(row) - self._offset_us) // self._size_us * self._size_us + self._offset_us + self._size_us
        if end <= max(watermark, self.us):
            self.give_late(row)
        else:
            self._open.setdefault((end, key_of(row, self._keys)), []).append(row)

    def on_time(self, us: float) -> None:
        self.us = us
        for end, key in [at for at in self._open if at[0] <= us]:
            rows = self._open.pop((end, key))
            shown = {name: shown_key(rows[0][name]) for name in self._keys}
            made = {name: aggregate(rows) for name, aggregate in self._aggregates.items()}
            self.give(
                shown | {"window_start": time_of(end - self._size_us), "window_end": time_of(end)} | made,
            )


class Running(Node):
    """One row per key over all its rows. The nodes after it judge only the last one."""

    def __init__(
        self,
        sources: frozenset[str],
        keys: Sequence[str],
        aggregates: Mapping[str, Callable[[list[Record]], Any]],
    ) -> None:
        super().__init__(sources)
        self._keys, self._aggregates = tuple(keys), aggregates
        self._rows: dict[tuple[Any, ...], list[Record]] = {}

    def push(self, row: Record, *, watermark: float) -> None:
        self._rows.setdefault(key_of(row, self._keys), []).append(row)

    def finish(self) -> None:
        """Give the last row of each key."""
        for rows in self._rows.values():
            shown = {name: shown_key(rows[0][name]) for name in self._keys}
            self.give(shown | {name: aggregate(rows) for name, aggregate in self._aggregates.items()})


class Collected(Node):
    """A sink."""

    def __init__(self, sources: frozenset[str], columns: Sequence[str]) -> None:
        super().__init__(sources)
        self.columns = tuple(columns)
        self.rows: list[tuple[Any, ...]] = []

    def push(self, row: Record, *, watermark: float) -> None:
        self.rows.append(tuple(row[name] for name in self.columns))


# Sources and time.


@dataclass
class _Partition:
    floor_us: float
    max_us: float = NEVER
    idle: bool = False
    done: bool = False


@dataclass
class _Source:
    lateness_us: int
    time: str | None
    head: Node
    partitions: dict[str, _Partition] = field(default_factory=dict)
    us: float = NEVER
    idle: bool = False
    dead: int = 0
    """Rows without a time."""

    def take(self, name: str, row: Record) -> None:
        partition = self.partitions[name]
        if self.time is None:
            self.head.push(dict(row), watermark=NEVER)
            return
        if row[self.time] is None:
            self.dead += 1
            return
        us = us_of(row[self.time])
        watermark = max(partition.max_us - self.lateness_us, partition.floor_us)
        partition.max_us = max(partition.max_us, us)
        self.head.push(dict(row), watermark=watermark)

    def tell(self, *, ended: bool) -> None:
        open_ = [one for one in self.partitions.values() if not one.done]
        if ended:
            self.us, self.idle = ALWAYS, False
            return
        busy = [max(one.max_us - self.lateness_us, one.floor_us) for one in open_ if not one.idle]
        self.idle = not busy
        if busy and self.time is not None:
            self.us = max(self.us, min(busy))


@dataclass(frozen=True, kw_only=True)
class Read:
    """Rows of one partition, and what became of it before them and with them."""

    source: str
    partition: str
    change: str | None = None
    """`"joins"`, `"idle"` or `"back"`."""
    rows: Sequence[Record] = ()
    ended: bool = False


class Oracle:
    """A graph of nodes, in an order in which each stands after its inputs."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._sources: dict[str, _Source] = {}
        self.sinks: dict[str, Collected] = {}

    def add(self, node: Node, *, after: Iterable[Node] = (), late_of: Node | None = None) -> None:
        self._nodes.append(node)
        for before in after:
            before.next.append(node)
        if late_of is not None:
            late_of.late_next.append(node)

    def source(self, name: str, head: Node, *, lateness_us: int, time: str | None) -> None:
        self.add(head)
        self._sources[name] = _Source(lateness_us, time, head)

    def batch(self, reads: Iterable[Read], ended: Iterable[str] = ()) -> None:
        """Take a batch. `ended`: sources that end for good with it."""
        reads = list(reads)
        for read in reads:
            source = self._sources[read.source]
            if read.change == "joins":
                source.partitions[read.partition] = _Partition(floor_us=source.us)
            partition = source.partitions[read.partition]
            if read.change == "back":
                partition.idle, partition.done = False, False
                partition.floor_us = max(partition.floor_us, source.us)
            partition.idle = partition.idle or read.change == "idle"
            for row in read.rows:
                source.take(read.partition, row)
        over = set(ended)
        for name, source in self._sources.items():
            source.tell(ended=name in over or source.us == ALWAYS)
        for read in reads:
            # The time of a file that never grows counts once more, with its last rows.
            partition = self._sources[read.source].partitions[read.partition]
            partition.done = partition.done or read.ended
        for node in self._nodes:
            waited = [self._sources[name].us for name in node.sources if not self._sources[name].idle]
            us = min(waited, default=NEVER)
            if us > node.us:
                node.on_time(us)

    def dead_letters(self) -> dict[str, int]:
        """How many rows had no time, by source."""
        return {name: source.dead for name, source in self._sources.items()}

    def finish(self) -> None:
        """Nothing more comes: running results are what they are."""
        for node in self._nodes:
            if isinstance(node, Running):
                node.finish()


# Values.


def key_of(row: Record, keys: Sequence[str]) -> tuple[Any, ...]:
    """NaN is one key, and so are both zeros."""
    return tuple("NaN" if isinstance(row[name], float) and math.isnan(row[name]) else row[name] for name in keys)


def shown_key(value: Any) -> Any:
    return 0.0 if isinstance(value, float) and value == 0 else value


def rank(value: Any) -> tuple[Any, ...]:
    """Nulls first, NaN last, -0.0 before 0.0."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (2,) if math.isnan(value) else (1, value, math.copysign(1, value))
    return (1, value)


def wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def count(column: str | None = None) -> Callable[[list[Record]], Any]:
    return lambda rows: len(rows) if column is None else len(_values(rows, column))


def total(column: str) -> Callable[[list[Record]], Any]:
    def summed(rows: list[Record]) -> Any:
        values = _values(rows, column)
        if not values:
            return None
        if isinstance(values[0], float):
            return math.fsum(values)
        return wrapped(sum(values)) if isinstance(values[0], int) else sum(values, Decimal(0))

    return summed


def mean(column: str) -> Callable[[list[Record]], Any]:
    def averaged(rows: list[Record]) -> Any:
        values = _values(rows, column)
        return math.fsum(map(float, values)) / len(values) if values else None

    return averaged


def least(column: str) -> Callable[[list[Record]], Any]:
    return lambda rows: min(_values(rows, column), key=rank, default=None)


def most(column: str) -> Callable[[list[Record]], Any]:
    return lambda rows: max(_values(rows, column), key=rank, default=None)


def _values(rows: list[Record], column: str) -> list[Any]:
    return [row[column] for row in rows if row[column] is not None]


# Comparing.


def same(found: Iterable[Sequence[Any]], wanted: Iterable[Sequence[Any]]) -> str | None:
    """None if the rows are the same, in any order, floats within a tolerance (rule 10); else what differs."""
    left, right = _grouped(found), _grouped(wanted)
    for exact in left.keys() | right.keys():
        ours, theirs = left.get(exact, []), right.get(exact, [])
        if len(ours) != len(theirs):
            return f"{exact}: found {len(ours)} times {ours[:3]}, wanted {len(theirs)} times {theirs[:3]}"
        for one, other in zip(sorted(ours, key=_ranks), sorted(theirs, key=_ranks), strict=True):
            if not all(map(_near, one, other)):
                return f"{exact}: found {one}, wanted {other}"
    return None


def _grouped(rows: Iterable[Sequence[Any]]) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in rows:
        exact = tuple("float" if isinstance(value, float) else (type(value).__name__, _plain(value)) for value in row)
        groups.setdefault(exact, []).append(tuple(value for value in row if isinstance(value, float)))
    return groups


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _ranks(values: Sequence[float]) -> list[tuple[Any, ...]]:
    return [rank(round(value, 6) if math.isfinite(value) else value) for value in values]


def _near(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-6)
