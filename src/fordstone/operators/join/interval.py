"""Interval join: pairs of rows of two streams with equal keys, whose times lie so far apart.

A pair is given out when the second of its rows comes. A row is kept until the watermark says that no partner can come any
more; then, in an outer join, it is given out alone if none came. Whether one came depends on a row's key and time alone,
so what has met is kept as key and time, once for however many rows.

Why a pair is never missed: a row that is in time is not below the watermark; a row that was let go of could only have a
partner below it. Late rows leave on the late port as rows of the result with nothing on the other side.

Invariants: each pair of rows in time is given out once, each unmet row of an outer side once; nothing that is given out
has a time (`model.joining.pair_time`) below the watermark of that moment.

The rows of one side of a join, found by key and time.

Rows lie in pieces that are ordered by time, as in every buffer. Beside each piece that is searched lies an index: its rows
by the hash of their key, then by time. A search takes the steps of a bisection and as long as what it finds, however many
rows a key has. An index is made when its piece is first searched, and goes with it: it is never stored.

Invariant: hashes only narrow the search down; keys are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.errors import PlanError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.base import LATE, Emit, Emits, Moment, Operator, OperatorSetting
from fordstone.operators.join.check import holds_us, join_columns
from fordstone.operators.join.side import LEFT, RIGHT, Carry, Side, filled
from fordstone.plan import plan as p
from fordstone.state.base import State
from fordstone.state.timeline import Buffer, OpenRows, Runs, TimedPiece, times_of

Rows = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Keys to search for, and between which times each, both included."""

    keys: pl.DataFrame
    from_us: Rows
    to_us: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Pairs: what was asked, by its number, and the row that was found for it."""

    asked: Rows
    rows: pl.DataFrame


class JoinRows(Buffer):
    """Rows that may be searched by key and time. One thread, except as `State` says."""

    def __init__(self, key: Sequence[str], *, time_column: str) -> None:
        """`time_column`: Int64; until when a row is kept, and what searches go by."""
        super().__init__(key, time_column=time_column)
        self._column = time_column
        self._indexes: dict[int, tuple[TimedPiece, _Index]] = {}
        """By the piece's identity, and with the piece, so that it stays what it is."""

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows, and put them in order: they are searched soon."""
        self._take(frame)
        raw, self._raw = self._raw, OpenRows()
        if raw.rows:
            self._push(raw.frames)

    def forget(self, watermark_us: int) -> None:
        """Drop the rows with time < `watermark_us`, as `release` does, for those who do not want them."""
        self._due(self._closed_by(watermark_us))

    def search(self, asked: Asked) -> Found | None:
        """All pairs of equal keys whose time lies between; None: there are none. Null is equal to nothing.

        Rows whose time has passed may be found as well, where somebody asks for their time.
        """
        pieces = [piece for piece in (*self._held(), *self._ordered) if piece.most_us > self._closed_us]
        self._indexes = {id(piece): self._indexes[id(piece)] for piece in pieces if id(piece) in self._indexes}
        least_us, most_us = int(asked.from_us.min()), int(asked.to_us.max())
        pieces = [piece for piece in pieces if piece.least_us <= most_us and piece.most_us >= least_us]
        if not pieces:
            return None
        hashes = _hashes(asked.keys)
        by_hash = (hashes >> np.uint32(16)).astype(np.uint16).argsort(kind="stable")
        if (there := _there(asked.keys)) is not None:
            by_hash = by_hash[there.take(by_hash)]
        pairs = [self._index(piece).search(hashes, asked, by_hash) for piece in pieces]
        # One call for all columns of a piece, and the rest for all pieces together: calls are what small batches cost.
        rows = [piece.frame()[at] for piece, (_, at) in zip(pieces, pairs, strict=True) if at.size]
        if not rows:
            return None
        found = Found(asked=np.concatenate([number for number, _ in pairs]), rows=pl.concat(rows))
        return _equal(found, asked.keys[found.asked])

    def _index(self, piece: TimedPiece) -> _Index:
        known = self._indexes.get(id(piece))
        if known is None:
            frame = piece.frame()
            known = self._indexes[id(piece)] = (
                piece,
                _Index(frame, self._key, times_of(frame, self._column).to_numpy()),
            )
        return known[1]


class _Index:
    """The rows of a frame that is ordered by time, by the hash of their key, then by time. Rows with a null key are left out."""

    def __init__(self, frame: pl.DataFrame, key: Sequence[str], times: Rows) -> None:
        self._times = times
        keys = frame.select(key)
        hashes = _hashes(keys)
        # Two sorts by 16 bits each, which NumPy does by radix, take a third of one by 32.
        order = hashes.astype(np.uint16).argsort(kind="stable")
        order = order[(hashes.take(order) >> np.uint32(16)).astype(np.uint16).argsort(kind="stable")]
        if (there := _there(keys)) is not None:
            order = order[there.take(order)]
        self._order = order
        # A row's number is its place in time: hash and place together are one number that ascends.
        self._codes: Rows = self._code(hashes.take(order)) + order

    def _code(self, hashes: Hashes) -> Rows:
        return hashes.astype(np.int64) * (self._times.size + 1)

    def search(self, hashes: Hashes, asked: Asked, by_hash: Rows) -> tuple[Rows, Rows]:
        """Numbers of what is asked, and of the rows that have its hash, and a time between.

        `by_hash`: what is asked, about in order of the hashes: then the search goes through memory once.
        """
        first = self._times.searchsorted(asked.from_us, "left").take(by_hash)
        behind = self._times.searchsorted(asked.to_us, "right").take(by_hash)
        some = behind > first
        if not some.all():
            by_hash, first, behind = by_hash[some], first[some], behind[some]
        codes = self._code(hashes.take(by_hash))
        start = self._codes.searchsorted(codes + first)
        counts = self._codes.searchsorted(codes + behind) - start
        pairs = int(counts.sum())
        # From the start of each stretch, one after the other.
        places = np.arange(pairs) + (start - (np.cumsum(counts) - counts)).repeat(counts)
        return by_hash.repeat(counts), self._order.take(places)


def _equal(found: Found, keys: pl.DataFrame) -> Found | None:
    """Without pairs whose keys only have the same hash. `keys`: what was asked, for each pair."""
    same = np.ones(found.asked.size, dtype=np.bool_)
    for key in keys.get_columns():
        same &= (key == found.rows.get_column(key.name)).to_numpy()
    if same.all():
        return found
    return Found(asked=found.asked[same], rows=found.rows.filter(pl.Series(same))) if same.any() else None


def _hashes(keys: pl.DataFrame) -> Hashes:
    """Good for this process only: they are never stored."""
    found: Hashes = (keys.hash_rows().to_numpy() >> np.uint64(32)).astype(np.uint32)
    return found


def _there(keys: pl.DataFrame) -> Mask | None:
    """Which keys have no null; None: all."""
    if not any(column.null_count() for column in keys.get_columns()):
        return None
    there: Mask = keys.select(pl.all_horizontal(pl.all().is_not_null())).to_series().to_numpy()
    return there


_BEHIND: Final = "__behind"
"""Of what has met: the first watermark at which its rows are let go of."""


class _Half:
    """What is kept of one side."""

    def __init__(self, side: Side, *, outer: bool) -> None:
        self.side = side
        self.rows = JoinRows(side.keys, time_column=side.mark)
        self.met = Runs(side.keys, time_column=_BEHIND, combine_rows=_once) if outer else None

    def meet(self, rows: pl.DataFrame, at: Rows | None = None) -> None:
        """These rows, or those of them at some places, have had a partner."""
        if self.met is not None:
            met = rows.select(*self.side.keys, (pl.col(self.side.mark) + 1).alias(_BEHIND))
            # What stands here twice is folded later; but a row that was found may have been found by many.
            self.met.add(_once(met) if at is None else met[np.unique(at)])

    def evict(self, watermark_us: int) -> pl.DataFrame:
        """Drop the rows that no partner can come for; gives those that have had none, in an outer join."""
        if self.met is None:
            self.rows.forget(watermark_us)
            return pl.DataFrame()
        rows, met = self.rows.release(watermark_us), self.met.close(watermark_us)
        if not rows.height or not met.height:
            return rows
        met = met.with_columns((pl.col(_BEHIND) - 1).alias(self.side.mark))
        return rows.join(met, on=[*self.side.keys, self.side.mark], how="anti")

    def states(self, name: str) -> dict[str, State]:
        """By name."""
        return {name: self.rows} | ({} if self.met is None else {f"{name}_met": self.met})


class IntervalJoin(Operator):
    """Joins rows of two sides, both as their feeders give them."""

    def __init__(self, left: Side, right: Side, out: pl.Schema, *, how: p.JoinHow, from_us: int, to_us: int) -> None:
        """`out`: the columns of the result. Right time lies between left time + `from_us` and left time + `to_us`."""
        self._left = _Half(left, outer=how in {"left", "full"})
        self._right = _Half(right, outer=how in {"right", "full"})
        self._out = out
        self._from_us, self._to_us = from_us, to_us
        self._right_columns = [name for name in right.columns if name not in left.columns]
        self._watermark_us = TIME_MIN_US + 1

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Give the pairs that rows of one side make with those of the other that are here, and keep the rows."""
        is_left = LEFT in frame.columns
        mine, other = (self._left, self._right) if is_left else (self._right, self._left)
        if late:
            return [Emit(mine.side.alone(frame), port=LATE)]
        until = frame.get_column(mine.side.mark)
        least_us = min(self._watermark_us + mine.side.hold_us, TIME_MAX_US)
        emits = []
        if until.null_count() or until.min() < least_us:  # type: ignore[operator]  # an Int64 without nulls
            in_time = (until >= least_us).fill_null(value=False)
            emits.append(Emit(mine.side.alone(frame.filter(~in_time)), port=LATE))
            frame = frame.filter(in_time)
        if frame.height:
            emits += self._pairs(frame, mine, other, is_left=is_left)
            mine.rows.add(frame)
        return emits

    def on_watermark(self, watermark_us: int) -> Emits:
        """Let go of rows; those of an outer side that met nobody are given out alone."""
        self._watermark_us = watermark_us
        alone = [(half.side, half.evict(watermark_us)) for half in (self._left, self._right)]
        return [Emit(side.alone(rows)) for side, rows in alone if rows.height]

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        """Nothing: results come with rows and with time."""
        return []

    def states(self) -> Mapping[str, State]:
        """The rows of both sides, and of outer sides what has met."""
        return self._left.states("left") | self._right.states("right")

    def _pairs(self, frame: pl.DataFrame, mine: _Half, other: _Half, *, is_left: bool) -> Emits:
        times = frame.get_column(mine.side.mark).to_numpy() - mine.side.hold_us
        least_us, most_us = (self._from_us, self._to_us) if is_left else (-self._to_us, -self._from_us)
        asked = Asked(
            keys=frame.select(mine.side.keys),
            from_us=times + (least_us + other.side.hold_us),
            to_us=times + (most_us + other.side.hold_us),
        )
        found = other.rows.search(asked)
        if found is None:
            return []
        mine.meet(frame, found.asked)
        other.meet(found.rows)
        rows = (frame[found.asked], found.rows)
        left, right = rows if is_left else rows[::-1]
        columns = self._left.side.shown(left) | self._right.side.shown(right, only=self._right_columns)
        return [Emit(filled(columns, self._out, found.asked.size))]


def make_join(step: p.Join, setting: OperatorSetting) -> Operator:
    """The operator of an interval join."""
    left, right = _sides(step, setting)
    out = setting.types[p.Input(step.name)].schema.polars
    return IntervalJoin(left, right, out, how=step.how, from_us=step.from_us, to_us=step.to_us)


def make_join_side(step: p.Join, index: int, setting: OperatorSetting) -> Operator:
    """What brings the rows of one side into the form that the join takes."""
    return Carry(_sides(step, setting)[index])


def _sides(step: p.Join, setting: OperatorSetting) -> tuple[Side, Side]:
    left, right = setting.types[step.left], setting.types[step.right]
    if left.time is None or right.time is None:
        raise PlanError(f"step {step.name}: a join needs event time on both sides.")
    columns = join_columns(left.schema, right.schema, step.left_keys, step.right_keys, suffix=step.suffix)
    left_hold_us, right_hold_us = holds_us(step)
    return (
        Side(columns, left.schema, step.left_keys, mark=LEFT, time=left.time, hold_us=left_hold_us),
        Side(columns, right.schema, step.right_keys, mark=RIGHT, time=right.time, hold_us=right_hold_us),
    )


def _once(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.unique()
