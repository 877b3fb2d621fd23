"""Sessions: one row for each stretch of a key's rows that follow each other by less than a gap, when the gap has passed.

A session is closed for a row when its last row plus the gap is not after the watermark of the row's own source partition (rule 6). So rows
are taken in the order of their *turn*: their time, or that watermark where it is more. A row opens a new session if the largest time
before it in that order is the gap or more before its turn, else it belongs to the session that is open. It is late if its time plus the
gap is not after that watermark: even a session of its own would be closed.

A batch is cut into fragments: rows of one key, each less than the gap after the one before, and of rows below their watermark those with
the same one. Fragments wait in a buffer until the watermark passes their turn. Then they are joined, key by key, with the session of that
key that is open, if there is one. A session closes when the watermark has reached its last row plus the gap; what has begun and not closed
lies in a table. One row per key is enough: a session begins at a turn by which the one before was closed. And a row below its watermark
touches the open session: both its time and the session's last row lie less than the gap before its turn, and not after it.
No fragments are made before the shuffle: one that idleness overtook in part could no longer be taken apart.

A running aggregate that forgets silent keys (`ttl=`) is the same: of each key the newest session, emitted while it is open.

Timers say which open sessions may be due, so that a watermark costs what it closes and not what is open. Invariants: the turns of fragments in
the buffer are at the watermark or after it; sessions in the table began before it and are not due; every session in the table has
one timer, not after it is due. Timers are made from the table after a restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.lang.duration import TIME_MIN_US
from fordstone.lang.polars.times import microseconds
from fordstone.operators.aggregate.fragment import FIRST, LAST, Fragments
from fordstone.operators.base import OP, ROW_WATERMARK, UPSERT, Emit, Emits, Moment, Operator, late_emit
from fordstone.operators.row_order import Numbers, key_expressions, keyed
from fordstone.state.base import FOUND, State, StateBackend, Timeline

_DUE: Final = "__due"
_TURN: Final = "__turn"
"""By what fragments are ordered: the time of the first row, or its watermark where that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advanced:
    """The sessions of the keys that a watermark concerned, those of one key in order of time."""

    sessions: pl.DataFrame
    of_key: Numbers
    """The number of each session's key."""
    is_open: npt.NDArray[np.bool_]
    grown: Numbers
    """The numbers of keys that had new rows."""

    def closed(self) -> pl.DataFrame:
        return self.sessions[np.flatnonzero(~self.is_open)]

    def newest(self) -> pl.DataFrame:
        """The last session of each key that had new rows."""
        last: Numbers = np.zeros(int(self.of_key.max(initial=-1)) + 1, dtype=np.int64)
        last[self.of_key] = np.arange(self.of_key.size)
        return self.sessions[last.take(self.grown)]


class SessionAggregate(Operator):
    """One row per key and session, when the session closes."""

    def __init__(self, fragments: Fragments, *, gap_us: int, state: StateBackend) -> None:
        self._fragments = fragments
        self._gap_us = gap_us
        self._time = fragments.time
        self._names = list(fragments.rows)
        self._key = list(self._fragments.state_key)
        self._columns = list(self._fragments.schema)
        self._state = state
        self._waiting = state.buffer(self._key, time_column=_TURN)
        self._open = state.table(self._key, schema=self._fragments.schema)
        self._timers: Timeline | None = None
        self._watermark_us = TIME_MIN_US + 1
        none = np.zeros(0, dtype=np.int64)
        self._nothing = _Advanced(
            sessions=pl.DataFrame(schema=fragments.schema), of_key=none, is_open=none.astype(np.bool_), grown=none
        )

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Make fragments of rows. Rows without a time are late. Rows that idleness overtook have the operator's watermark."""
        rows = frame if frame.columns == self._names else frame.select(self._names)
        times = microseconds(rows.get_column(self._time.column))
        if self._time.shift_us:
            times = times + self._time.shift_us
        if not late and not times.null_count() and times.min() >= self._watermark_us:  # type: ignore[operator]  # an Int64 without nulls
            self._wait(rows, times)
            return []
        given = frame.get_column(ROW_WATERMARK) if late else pl.Series([TIME_MIN_US]).new_from_index(0, rows.height)
        watermarks = given.clip(self._watermark_us)
        in_time = (times >= watermarks).fill_null(value=False)
        counts = (times + self._gap_us > watermarks).fill_null(value=False)
        if in_time.any():
            self._wait(rows.filter(in_time), times.filter(in_time))
        below = counts & ~in_time
        if below.any():
            self._wait(rows.filter(below), times.filter(below), turns=watermarks.filter(below))
        if counts.all():
            return []
        return [late_emit(rows.filter(~counts), (watermarks - times - self._gap_us + 1).filter(~counts))]

    def _wait(self, rows: pl.DataFrame, times: pl.Series, *, turns: pl.Series | None = None) -> None:
        """Let fragments of rows wait; None: the turn of each row is its time."""
        fragments = self._cut(rows, times, turns)
        turn = pl.col(FIRST if turns is None else _TURN).alias(_TURN)
        self._waiting.add(fragments.select(*self._columns, turn))

    def on_watermark(self, watermark_us: int) -> Emits:
        closed = self._advance(watermark_us).closed()
        return [Emit(self._finished(closed))] if closed.height else []

    def _advance(self, watermark_us: int) -> _Advanced:
        """Take the rows that the watermark has passed, and forget the sessions that it has closed."""
        self._watermark_us = watermark_us
        timers = self._made_timers() if self._timers is None else self._timers
        begun, rung = self._waiting.release(watermark_us), timers.close(watermark_us)
        if not begun.height and not rung.height:
            return self._nothing
        both = pl.concat([frame[self._key] for frame in (begun, rung) if frame.height], rechunk=True)
        at = keyed(both, key_expressions(self._key))
        of_row = at.by_row(at.key_numbers())
        rings = np.zeros(at.counts.size, dtype=np.bool_)
        rings[of_row[begun.height :]] = True
        known = self._open.get(at.keys)
        was_open = known.get_column(FOUND).to_numpy()
        opened = np.flatnonzero(was_open)
        # What is open stands before what comes, so its own turn makes no difference.
        before = known[self._columns][opened].with_columns(pl.col(FIRST).alias(_TURN))
        parts = [before, *([begun] if begun.height else [])]
        of_part = np.concatenate([opened, of_row[: begun.height]])
        sessions, of_key = self._joined(pl.concat(parts, rechunk=True), of_part)
        is_open = sessions.get_column(LAST).to_numpy() + self._gap_us > watermark_us
        still, open_keys = sessions[np.flatnonzero(is_open)], of_key[is_open]
        self._open.put(still)
        over = was_open.copy()
        over[open_keys] = False
        self._open.delete(at.keys[np.flatnonzero(over)])
        # A session that was open and whose timer has not come has it still.
        unarmed = (rings | ~was_open)[open_keys]
        timers.add(self._due(still[np.flatnonzero(unarmed)]))
        return _Advanced(sessions=sessions, of_key=of_key, is_open=is_open, grown=np.unique(of_row[: begun.height]))

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        return []

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting, "open": self._open}

    def _made_timers(self) -> Timeline:
        self._timers = self._state.timeline(self._key, time_column=_DUE, merge_rows=lambda rows: rows)
        if len(self._open):
            self._timers.add(self._due(self._open.scan()))
        return self._timers

    def _due(self, sessions: pl.DataFrame) -> pl.DataFrame:
        due = sessions.get_column(LAST) + self._gap_us
        return sessions[self._key].hstack([due.alias(_DUE)])

    def _cut(self, rows: pl.DataFrame, times: pl.Series, turns: pl.Series | None) -> pl.DataFrame:
        """Fragments; of rows with turns of their own, one per key and turn: all lie less than the gap before it."""
        keys = self._fragments.keys_of(rows)
        if turns is not None:
            keys = keys.with_columns(turns.alias(_TURN))
        order: Numbers | None = None
        if not times.is_sorted():
            order = times.arg_sort().cast(pl.Int64).to_numpy()
            keys = keys[order]
        at = keyed(keys, key_expressions(keys.columns))
        by_row = at.by_key if order is None else order.take(at.by_key)
        when = times.to_numpy().take(by_row)
        begins = at.begins()
        begins[1:] |= when[1:] - when[:-1] >= self._gap_us
        starts = np.flatnonzero(begins)
        numbers = np.empty_like(by_row)
        numbers[by_row] = np.cumsum(begins) - 1
        values = self._fragments.of_rows(rows, numbers)
        lasts = when[np.append(starts[1:], when.size) - 1]
        return self._framed(at.keys[at.key_numbers()[starts]], when[starts], lasts, values)

    def _joined(self, parts: pl.DataFrame, of_part: Numbers) -> tuple[pl.DataFrame, Numbers]:
        """Open sessions and fragments, as the fewest of them, each with its key's number.

        `of_part`: the numbers of the keys. Parts of one key are in order of their turns.
        """
        order = of_part.argsort(kind="stable")
        keys = of_part[order]
        turns = parts.get_column(_TURN).to_numpy()[order]
        so_far = _greatest_so_far(parts.get_column(LAST).to_numpy()[order], keys)
        begins = np.ones(order.size, dtype=np.bool_)
        begins[1:] = (keys[1:] != keys[:-1]) | (turns[1:] - so_far[:-1] >= self._gap_us)
        if begins.all():
            return parts.drop(_TURN), of_part
        starts = np.flatnonzero(begins)
        numbers = np.empty_like(order)
        numbers[order] = np.cumsum(begins) - 1
        values = self._fragments.merge(parts, numbers)
        firsts = np.minimum.reduceat(parts.get_column(FIRST).to_numpy()[order], starts)
        lasts = so_far[np.append(starts[1:], so_far.size) - 1]
        return self._framed(parts[self._key][order[starts]], firsts, lasts, values), keys[starts]

    def _framed(self, keys: pl.DataFrame, firsts: Numbers, lasts: Numbers, values: pl.DataFrame) -> pl.DataFrame:
        times = [pl.Series(FIRST, firsts), pl.Series(LAST, lasts)]
        return pl.DataFrame([*keys.get_columns(), *times, *values.get_columns()])

    def _finished(self, closed: pl.DataFrame) -> pl.DataFrame:
        ends = closed.get_column(LAST).to_numpy() + self._gap_us
        starts = closed.get_column(FIRST).to_numpy()
        return self._fragments.finish(closed, keys=closed, starts=starts, ends=ends, windows=ends)


class ExpiringAggregate(SessionAggregate):
    """One row per key over its rows since it was last silent for the gap, emitted again when it has changed (rule 15).

    Rows count when the watermark has passed them, so that it does not depend on batches which of them begin a new session.
    """

    def __init__(self, fragments: Fragments, *, ttl_us: int, at_barriers: bool, state: StateBackend) -> None:
        """`at_barriers`: as of `RunningAggregate`."""
        super().__init__(fragments, gap_us=ttl_us, state=state)
        self._at_barriers = at_barriers
        self._changed: list[pl.DataFrame] = []

    def on_watermark(self, watermark_us: int) -> Emits:
        newest = self._advance(watermark_us).newest()
        if newest.height:
            self._changed.append(newest)
        return [] if self._at_barriers else self._emit_changed()

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        return self._emit_changed()

    def _emit_changed(self) -> Emits:
        if not self._changed:
            return []
        changed, self._changed = pl.concat(self._changed), []
        newest = changed.unique(self._key, keep="last", maintain_order=True)
        return [Emit(self._fragments.finish_running(newest).with_columns(pl.lit(UPSERT).alias(OP)))]


def _greatest_so_far(values: Numbers, keys: Numbers) -> Numbers:
    """The greatest of each value and those before it with the same key; equal keys stand together, and ascend."""
    if ((values[1:] >= values[:-1]) | (keys[1:] != keys[:-1])).all():
        return values
    known, ranks = np.unique(values, return_inverse=True)
    # As ranks they can be lifted above those of all keys before without growing too large.
    lifted = np.maximum.accumulate(ranks + keys * known.size)
    found: Numbers = known[lifted - keys * known.size]
    return found
