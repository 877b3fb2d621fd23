"""Windows that close with time: what tumbling and sliding ones have in common, and the tumbling ones.

A window's result is emitted when the watermark passes its end. With `early_us` there are provisional results before: at
a barrier, about once per `early_us` by the clock, one for each window that changed since the last time (rule 15). Then results on
the main port replace each other by key and window, the closing one being the last; the final port has the closing ones only.

State is partial rows of open windows. With early results they lie in two parts, those of before the last early results and
those since, so that what changed is known after a restart as well, and a replay gives the same rows.

A row is late if it would have to change a result that was emitted as the last one. A row below the watermark whose window
is open still counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import polars as pl

from fordstone.lang.duration import TIME_MIN_US
from fordstone.operators.aggregate.partial import END, Partials
from fordstone.operators.base import FINAL, LATE, OP, ROW_ID, UPSERT, Emit, Emits, Moment, Operator, pass_on
from fordstone.state.base import State, StateBackend


class WindowAggregate(Operator):
    """Tumbling windows: one row per key and window, when the window closes. Base of the sliding ones."""

    def __init__(
        self,
        partials: Partials,
        *,
        combined: bool,
        due: str = END,
        early_us: int | None = None,
        counted: pl.Expr | None = None,
        state: StateBackend,
    ) -> None:
        """`combined`: input is partial rows of a combiner; else rows, and late ones leave on the late port as they came.

        `due`: the column that says when partial rows are closed. `counted`: which rows count at all (null for none).
        """
        self._partials = partials
        self._combined = combined
        self._early_us = early_us
        self._counted = counted
        self._open = state.timeline(partials.state_key, time_column=due, merge_rows=self._merge_rows)
        self._changed = state.timeline(partials.state_key, time_column=due, merge_rows=self._merge_rows)
        """What came since the last early results; without such, always empty and no part of the state."""
        self._named = (*partials.state_key, END)
        self._watermark_us = TIME_MIN_US

    def on_watermark(self, watermark_us: int) -> Emits:
        self._watermark_us = watermark_us
        return self._results(self._closed(watermark_us))

    def _due(self, ends: pl.Series) -> pl.Series:
        """When rows whose partial rows have these ends are closed: from then on they are late."""
        return ends

    def _merge_rows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Merge partial rows, keeping the column that says when they are due. Pure, called on any thread."""
        return self._partials.merge(rows)

    def _provisional(self, changed: pl.DataFrame) -> pl.DataFrame:
        """Partial rows, one for each key and open window that any of `changed` counts for: keys and ends, none twice."""
        return only(self._open.scan(), changed, self._named)

    def _changed_before(self) -> pl.DataFrame:
        """What changed since the last early results and is not among the open partial rows any more, though windows are open."""
        return pl.DataFrame()

    def _on_changed_closed(self, changed: pl.DataFrame) -> None:
        """Partial rows have been closed that came since the last early results."""

    def _finish(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Results of partial rows, one per key and window."""
        return self._partials.finish(rows)

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Take rows in. Rows of a window that idleness let close already are late, and so are rows without a time."""
        if late:
            return [Emit(frame, port=LATE)]
        if self._combined:
            return self._judge(frame, frame.get_column(END), pass_on)
        timeless = self._partials.timeless(frame)
        if timeless is not None:
            in_time = frame.filter(~timeless)
            return [Emit(frame.filter(timeless), port=LATE), *(self._judge_rows(in_time) if in_time.height else [])]
        return self._judge_rows(frame)

    def on_barrier(self, moment: Moment) -> Emits:
        if self._early_us is None or not moment.passes(self._early_us):
            return []
        changed = self._changed.drain()
        self._open.add(changed)
        named = [frame.select(self._named) for frame in (changed, self._changed_before()) if frame.height]
        return [Emit(_upserts(self._finish(self._provisional(pl.concat(named)))))] if named else []

    def states(self) -> Mapping[str, State]:
        return {"windows": self._open} if self._early_us is None else {"windows": self._open, "changed": self._changed}

    def _add(self, partials: pl.DataFrame) -> None:
        """Take in partial rows that are not due yet."""
        (self._open if self._early_us is None else self._changed).add(partials)

    def _closed(self, watermark_us: int) -> pl.DataFrame:
        """Remove and give, merged, the partial rows that are due. Perhaps without columns, if there are none."""
        closed = self._open.close(watermark_us)
        if self._early_us is None:
            return closed
        changed = self._changed.close(watermark_us)
        if changed.height:
            self._on_changed_closed(changed)
        found = [frame for frame in (closed, changed) if frame.height]
        if not found:
            return closed
        return found[0] if len(found) == 1 else self._merge_rows(pl.concat(found)).select(found[0].columns)

    def _results(self, rows: pl.DataFrame) -> Emits:
        """The final results of windows. Those of a key are in order of time, so a sink that keeps one row per key ends with the newest."""
        if not rows.height:
            return []
        results = self._finish(rows if rows.get_column(END).is_sorted() else rows.sort(END))
        if self._early_us is None:
            return [Emit(results)]
        return [Emit(_upserts(results)), Emit(results, port=FINAL)]

    def _judge_rows(self, frame: pl.DataFrame) -> Emits:
        if self._counted is not None:
            frame = frame.filter(self._counted)
            if not frame.height:
                return []
        return self._judge(frame, self._partials.ends(frame), self._partials.of_rows)

    def _judge(
        self, frame: pl.DataFrame, ends: pl.Series, partial_rows: Callable[[pl.DataFrame], pl.DataFrame]
    ) -> Emits:
        """Take rows or partial rows in, or let them leave as they came."""
        due = self._due(ends)
        if due.min() > self._watermark_us:  # type: ignore[operator]  # an Int64 without nulls
            self._add(partial_rows(frame))
            return []
        is_open = due > self._watermark_us
        if is_open.any():
            self._add(partial_rows(frame.filter(is_open)))
        return [Emit(frame.filter(~is_open), port=LATE)]


def only(rows: pl.DataFrame, wanted: pl.DataFrame, by: tuple[str, ...]) -> pl.DataFrame:
    """The rows whose like is in `wanted`, which has no others than there are in `rows`, and none twice. Nulls are alike."""
    if rows.height == wanted.height:
        return rows
    return rows.join(wanted.select(by), on=list(by), how="semi", nulls_equal=True)


def _upserts(results: pl.DataFrame) -> pl.DataFrame:
    """Results that replace those before them. They have no ids: only their order distinguishes versions of a row."""
    return results.drop(ROW_ID, strict=False).with_columns(pl.lit(UPSERT).alias(OP))
