"""Operators side by side, fed, frozen, restored and rescaled as an engine would; and values that compare to the last bit.

Used by the tests of operators that wait for the watermark: draw `events_of(batches)`, let `Subtasks.live_through` them, and
compare `shown(subtasks.out)` with an oracle over the rows that were `taken`.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import duckdb
import polars as pl
import pytest
from hypothesis import strategies as st

from fordstone.lang.aggregates import parse_aggregate
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.fragment import Fragments
from fordstone.operators.base import LATE, MAIN, ROW_WATERMARK, Emits, Moment, Operator
from fordstone.plan.stream_type import EventTime
from fordstone.state.base import Piece
from fordstone.state.key_group import split_by_owner
from fordstone.testing.contracts.state import Shelf

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
Row = tuple[Any, ...]
AnyOperator = TypeVar("AnyOperator", bound=Operator)


def bits(value: Any) -> Any:
    """A value that is equal only to the same one, signs of zero included; every NaN is one."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    return tuple(map(bits, value)) if isinstance(value, list) else value


def rank(value: Any) -> tuple[Any, ...]:
    """Nulls first, NaN last, -0.0 before 0.0."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (2,) if math.isnan(value) else (1, value, math.copysign(1, value))
    return (1, tuple(map(rank, value))) if isinstance(value, list) else (1, value)


def shown(frames: Sequence[pl.DataFrame]) -> Counter[Any]:
    """The rows of frames, with times in microseconds."""
    found: Counter[Any] = Counter()
    for one in frames:
        plain = one.with_columns(pl.col(pl.Datetime).cast(pl.Int64))
        found.update(tuple(map(bits, row)) for row in plain.iter_rows())
    return found


def frame_of(rows: Sequence[Row], schema: Schema) -> pl.DataFrame:
    """A frame of rows, with times in microseconds at place 1."""
    times = [None if row[1] is None else EPOCH + dt.timedelta(microseconds=row[1]) for row in rows]
    given = [(row[0], time, *row[2:]) for row, time in zip(rows, times, strict=True)]
    return pl.DataFrame(given, schema=schema.polars, orient="row")


def fragments_of(
    aggregates: Mapping[str, str],
    schema: Schema,
    *,
    step: str,
    keys: Sequence[str] = ("k",),
    shift_us: int = 0,
    with_id: bool = False,
) -> Fragments:
    """The aggregates of a step, named as given, by the time `ts`."""
    parsed = [parse_aggregate(sql, schema, name) for name, sql in aggregates.items()]
    return Fragments(keys, parsed, schema, time=EventTime(column="ts", shift_us=shift_us), step=step, with_id=with_id)


# What is done to the operators.


def below(frame: pl.DataFrame, watermarks: Sequence[int] | int = TIME_MAX_US) -> pl.DataFrame:
    """Rows as the source sends those below their watermark; by default one that every window is closed at."""
    given = [watermarks] * frame.height if isinstance(watermarks, int) else watermarks
    return frame.with_columns(pl.Series(ROW_WATERMARK, given, dtype=pl.Int64))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows come; `late`: they are below the watermark of their partition, which had come so far beyond the time of each."""

    rows: list[Row]
    late: bool = False
    beyond_us: int = 1

    def watermarks(self, reached_us: int, time_at: int = 1) -> list[int]:
        """The watermark that each row is judged by; `reached_us`: the operator's."""
        times = [row[time_at] for row in self.rows]
        return [reached_us if at is None or not self.late else max(at + self.beyond_us, reached_us) for at in times]


@dataclass(frozen=True, slots=True)
class Watermark:
    """Time goes on by that many microseconds."""

    by: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """An epoch ends."""


@dataclass(frozen=True, slots=True)
class Restore:
    """An epoch ends, and fresh operators go on from what was frozen, perhaps more or fewer of them."""

    parallelism: int


Event = Batch | Watermark | Barrier | Restore


def events_of(
    batches: st.SearchStrategy[list[Row]], *, steps: Sequence[int] = (1, 1, 2, 3, 5, 10**14), most: int = 14
) -> st.SearchStrategy[list[Event]]:
    """Anything that may happen. `steps`: by how much the watermark may grow."""
    one: st.SearchStrategy[Event] = st.one_of(
        st.builds(Batch, batches, st.sampled_from([False, False, True]), st.sampled_from([1, 2, 5, 15, 10**15])),
        st.builds(Watermark, st.sampled_from(list(steps))),
        st.just(Barrier()),
        st.builds(Restore, st.integers(1, 4)),
    )
    return st.lists(one, max_size=most)


@dataclass(frozen=True, slots=True)
class Happened:
    """The rows of all batches: those that were in time, and those that were not."""

    taken: list[Row] = field(default_factory=list)
    watermarks: list[int] = field(default_factory=list)
    """What each of those that were taken was judged by."""
    late: list[Row] = field(default_factory=list)


@dataclass
class Subtasks:
    """Operators side by side, fed and restored as an engine would."""

    make: Callable[[], Operator]
    frame: Callable[[Sequence[Row]], pl.DataFrame]
    """A frame of rows, with times in microseconds in the column `time_at`."""
    keys: Sequence[str] = ("k",)
    time_at: int = 1
    open_us: int = 0
    """How long after its time there is something open for a row."""
    parallelism: int = 1
    watermark_us: int = TIME_MIN_US
    shelf: Shelf = field(default_factory=Shelf)
    ports: dict[str, list[pl.DataFrame]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with fresh operators."""
        self.operators = [self.make() for _ in range(self.parallelism)]

    @property
    def out(self) -> list[pl.DataFrame]:
        """What came out on the main port."""
        return self.ports.get(MAIN, [])

    @property
    def late(self) -> list[pl.DataFrame]:
        """What came out on the late port."""
        return self.ports.get(LATE, [])

    def live_through(self, events: Sequence[Event]) -> Happened:
        """Let all of it happen. Rows without a time, and those for which nothing is open at their watermark, are late."""
        happened = Happened()
        for event in events:
            match event:
                case Batch(rows=rows, late=judged):
                    watermarks = event.watermarks(self.watermark_us, self.time_at)
                    for row, watermark_us in zip(rows, watermarks, strict=True):
                        time = row[self.time_at]
                        if time is None or time + max(self.open_us, 1) <= watermark_us:
                            happened.late.append(row)
                        else:
                            happened.taken.append(row)
                            happened.watermarks.append(watermark_us)
                    self.batch(rows, late=judged, watermarks=watermarks)
                case Watermark(by=by):
                    self.watermark(max(self.watermark_us, -8) + by)
                case Barrier():
                    self.barrier()
                case Restore(parallelism=parallelism):
                    self.restore(parallelism)
        return happened

    def check(self, events: Sequence[Event], expected: Callable[[list[Row]], Counter[Any]]) -> None:
        """Let all of it happen: out comes what is `expected` of the rows that time has passed, in the end of all of them."""
        happened = self.live_through(events)
        assert shown(self.out) == expected([row for row in happened.taken if row[self.time_at] < self.watermark_us])
        self.watermark(TIME_MAX_US)
        assert shown(self.out) == expected(happened.taken)
        assert shown(self.late) == Counter(tuple(map(bits, row)) for row in happened.late)

    def feed(self, rows: Sequence[Row], *, batch_rows: int, lag_us: int, rng: Random) -> None:
        """Give all rows in batches, the watermark so far behind the newest of them; restore now and then."""
        for at in range(0, len(rows), batch_rows):
            self.batch(rows[at : at + batch_rows])
            self.watermark(max(row[self.time_at] for row in rows[: at + batch_rows]) - lag_us)
            if rng.random() < 0.1:
                self.restore(rng.randint(1, 3))
        self.watermark(TIME_MAX_US)

    def check_query(self, sql: str, rows: Sequence[Row]) -> None:
        """What came out is what DuckDB gives over `rows`, in order, the last column within a tolerance."""
        with duckdb.connect() as connection:
            connection.register("rows", self.frame(rows).to_arrow())
            wanted = connection.execute(sql).fetchall()
        found = sorted(pl.concat(self.out).with_columns(pl.col(pl.Datetime).cast(pl.Int64)).rows())
        assert [row[:-1] for row in found] == [row[:-1] for row in wanted]
        assert [row[-1] for row in found] == pytest.approx([row[-1] for row in wanted])

    def batch(self, rows: Sequence[Row], *, late: bool = False, watermarks: Sequence[int] = ()) -> None:
        """Give each operator its share of the rows."""
        self.frames(below(self.frame(rows), watermarks) if late else self.frame(rows), late=late)

    def frames(self, frame: pl.DataFrame, *, late: bool) -> None:
        """Give each operator its share of a frame."""
        parts = split_by_owner(frame, list(self.keys), self.parallelism)
        for operator, part in zip(self.operators, parts, strict=True):
            if part.height:
                self._take(operator.on_batch(part, late=late))

    def watermark(self, us: int) -> None:
        """Time goes on to `us`."""
        self.watermark_us = us
        for operator in self.operators:
            self._take(operator.on_watermark(us))

    def barrier(self, moment: Moment = Moment(now_us=1, before_us=0)) -> None:  # noqa: B008 - a value, never changed
        """An epoch ends, and its state is written."""
        for operator in self.operators:
            self._take(operator.on_barrier(moment))
            for state in operator.states().values():
                self.shelf.write(state.freeze())

    def restore(self, parallelism: int) -> None:
        """An epoch ends, and fresh operators go on."""
        self.barrier()
        before, self.operators = self.operators, [self.make() for _ in range(parallelism)]
        for subtask, operator in enumerate(self.operators):
            for name, state in operator.states().items():
                refs = [self.shelf.write(other.states()[name].freeze()) for other in before]
                if parallelism == self.parallelism:
                    pieces = self.shelf.pieces(refs[subtask])
                else:
                    pieces = self.shelf.owned([ref for runs in refs for ref in runs], state.key, subtask, parallelism)
                state.load(pieces, watermark_us=self.watermark_us)
        self.parallelism = parallelism
        if self.watermark_us > TIME_MIN_US:
            self.watermark(self.watermark_us)

    def _take(self, emits: Emits) -> None:
        for emit in emits:
            assert emit.frame.height
            assert not emit.late
            self.ports.setdefault(emit.port, []).append(emit.frame)


def restored(operator: AnyOperator, fresh: AnyOperator, watermark_us: int) -> AnyOperator:
    """`fresh`, with what `operator` has frozen."""
    for name, state in fresh.states().items():
        pieces = [Piece(piece.frame()) for piece in operator.states()[name].freeze()]
        state.load(pieces, watermark_us=watermark_us)
    return fresh


def released(operator: Operator, watermark_us: int) -> list[Row]:
    """The rows that a watermark releases, all of them on the main port."""
    emits = operator.on_watermark(watermark_us)
    assert [emit.port for emit in emits] in ([], [MAIN])
    return list(shown([emit.frame for emit in emits]).elements())


def held_rows(operator: Operator) -> dict[str, int]:
    """How many rows a checkpoint would hold, by state."""
    return {name: sum(piece.frame().height for piece in state.freeze()) for name, state in operator.states().items()}


def frozen(operator: Operator) -> list[Piece]:
    """The pieces of all states."""
    return [piece for state in operator.states().values() for piece in state.freeze()]


def rows_written_since(before: Sequence[Piece], operator: Operator) -> int:
    """How many rows are in pieces that were not there."""
    return sum(piece.frame().height for piece in frozen(operator) if not any(piece is earlier for earlier in before))
