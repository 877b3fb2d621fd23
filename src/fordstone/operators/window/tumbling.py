"""Windows that close with time: what tumbling and sliding ones have in common, and the tumbling ones.

A window's result is emitted when the watermark passes its end. With `early_us` there are provisional results before: at a barrier, about
once per `early_us` by the clock, one for each window that changed since the last time. With an allowed lateness a window is kept that long
after its end: its result is emitted at the first barrier after its end, and again at each barrier at which it has changed (rule 15). In both
cases results on the main port replace each other by key and window; the final port has the last result of each window, when it closes.

State is partial rows of windows that are not closed, and the names (key and window) of those that changed since their last result.
Results at barriers depend on the rows up to the barrier alone, so that a replay gives the same epochs.

A row is late when all of its windows are closed for it (rule 6): by the watermark of its own source partition, or by the operator's,
which is greater only where idleness let time pass it. So a window that closes here was closed for no row that is still to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.aggregate.partial import END, Partials
from fordstone.operators.base import (
    FINAL,
    OP,
    ROW_ID,
    ROW_WATERMARK,
    UPSERT,
    Emit,
    Emits,
    Moment,
    Operator,
    by_watermark,
    late_emit,
    pass_on,
)
from fordstone.operators.window.panes import Closing
from fordstone.state.base import State, StateBackend, Timeline

FIRST: Final = "__first"
"""When the first window that a pane is in closes."""
LAST: Final = "__last"
"""When the last window that a pane is in closes."""


class WindowAggregate(Operator):
    """Tumbling windows: one row per key and window, when the window closes. Base of the sliding ones."""

    def __init__(
        self,
        partials: Partials,
        closing: Closing,
        *,
        combined: bool,
        early_us: int | None = None,
        counted: pl.Expr | None = None,
        state: StateBackend,
    ) -> None:
        """`combined`: input is partial rows of a combiner; else rows, and late ones leave on the late port as they came.

        `counted`: which rows count at all, where windows leave gaps (null for none).
        """
        self._partials = partials
        self._closing = closing
        self._grid = closing.grid
        self._combined = combined
        self._early_us = early_us
        self._counted = counted
        self._named = (*partials.state_key, END)
        self._first = FIRST if closing.allowed_us or not self._closes_at_end else END
        """The column that says when partial rows are due."""
        self._open = state.timeline(partials.state_key, time_column=self._first, merge_rows=self._merge_rows)
        self._early = self._names(state)
        """What changed since the last early results; without such, always empty and no part of the state."""
        self._early_waits = early_us is not None
        """Whether there may be something in it."""
        self._early_due_us: int | None = None
        self._corrected = self._names(state)
        """What changed since the last barrier in windows that had a result by then; likewise, without allowed lateness."""
        self._watermark_us = TIME_MIN_US
        self._shown_us: int | None = None

    @property
    def _closes_at_end(self) -> bool:
        """Whether the end of a pane is the end of its first window."""
        return True

    @property
    def _replaces(self) -> bool:
        return self._early_us is not None or self._closing.allowed_us > 0

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Take rows in. Those that are late leave as they came, and so do rows without a time."""
        if self._combined:
            return self._take(frame, frame.get_column(END), late=late)
        timeless = self._partials.timeless(frame)
        emits = []
        if timeless is not None:
            emits = [late_emit(frame.filter(timeless), pl.Series(dtype=pl.Int64))]
            frame = frame.filter(~timeless)
        if self._counted is not None:
            frame = frame.filter(self._counted)
        return [*emits, *self._take(frame, self._partials.ends(frame), late=late)] if frame.height else emits

    def _take(self, frame: pl.DataFrame, ends: pl.Series, *, late: bool) -> Emits:
        partial_rows = pass_on if self._combined else self._partials.of_rows
        if not late and self._grid.first(ends).min() > self._closing.closed_us(self._watermark_us):  # type: ignore[operator]  # an Int64 without nulls
            self._add(partial_rows(frame))
            return []
        here = pl.repeat(self._watermark_us, frame.height, dtype=pl.Int64, eager=True)
        watermarks = frame.get_column(ROW_WATERMARK).clip(self._watermark_us) if late else here
        judged = self._closing.judge(frame, ends, watermarks)
        if judged.whole.height:
            self._add(partial_rows(judged.whole))
        if judged.partly.height:
            last_closed = pl.col(ROW_WATERMARK) - self._closing.allowed_us
            self._add_partly(by_watermark(partial_rows)(judged.partly).with_columns(last_closed))
        return [] if judged.late is None else [judged.late]

    def on_watermark(self, watermark_us: int) -> Emits:
        self._shown_until()
        self._watermark_us = watermark_us
        emits = self._results(self._without_due(self._open.close(watermark_us)))
        self._close_names()
        return emits

    def on_barrier(self, moment: Moment) -> Emits:
        closed_us, shown_us = self._closing.closed_us(self._watermark_us), self._shown_until()
        found = []
        if self._closing.allowed_us:
            if self._grid.window_at(self._watermark_us) > max(shown_us, closed_us):
                found.append(self._windows_between(max(shown_us, closed_us), self._watermark_us))
            found.append(self._changed(self._corrected.drain(), closed_us, shown_us))
            self._shown_us = self._watermark_us
        if self._early_us is not None and moment.passes(self._early_us):
            found.append(self._changed(self._early.drain(), self._watermark_us, TIME_MAX_US))
            self._early_waits = False
        if self._early_us is not None:
            self._early_due_us = (moment.now_us // self._early_us + 1) * self._early_us
        rows = [frame for frame in found if frame.height]
        return [Emit(_upserts(self._finish(pl.concat(rows))))] if rows else []

    def clock_due_us(self) -> int | None:
        return self._early_due_us if self._early_waits else None

    def states(self) -> Mapping[str, State]:
        found: dict[str, State] = {"windows": self._open}
        if self._early_us is not None:
            found["early"] = self._early
        if self._closing.allowed_us:
            found["corrected"] = self._corrected
        return found

    # What sliding windows do otherwise.

    def _add_partly(self, partials: pl.DataFrame) -> None:
        """Take in partial rows that count for windows that end after `ROW_WATERMARK` only."""
        raise AssertionError(f"a tumbling window is open or closed, but {partials.height} rows are in between")

    def _windows_between(self, after_us: int, until_us: int, wanted: pl.DataFrame | None = None) -> pl.DataFrame:
        """Partial rows of the windows that end in (`after_us`, `until_us`], one per key and window.

        `wanted`: only these will be used, so that others need not be made.
        """
        del wanted
        rows = self._without_due(self._open.scan())
        return rows.filter(_between(after_us, until_us)) if rows.height else rows

    def _finish(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Results of partial rows, one per key and window."""
        return self._partials.finish(rows)

    # Shared steps.

    def _add(self, partials: pl.DataFrame) -> None:
        """Take in partial rows whose first window is not closed."""
        self._open.add(self._with_due(partials))
        self._note_changed(partials)

    def _note_changed(self, partials: pl.DataFrame) -> None:
        """Note which windows have changed. `ROW_WATERMARK`, where there is one: those up to it have not."""
        if not self._replaces:
            return
        after = pl.col(ROW_WATERMARK) if ROW_WATERMARK in partials.columns else pl.lit(TIME_MIN_US, dtype=pl.Int64)
        last = self._grid.last(pl.col(END)) + self._closing.allowed_us
        names = partials.select(*self._named, after.alias(ROW_WATERMARK), last.alias(LAST))
        if self._early_us is not None:
            self._early_waits = True
            self._early.add(names)
        if self._closing.allowed_us and self._grid.first(int(names.get_column(END).min())) <= self._shown_until():  # type: ignore[arg-type]  # an Int64 without nulls
            self._corrected.add(names.filter(self._grid.first(pl.col(END)) <= self._shown_until()))

    def _changed(self, names: pl.DataFrame, after_us: int, until_us: int) -> pl.DataFrame:
        """Partial rows of the windows in (`after_us`, `until_us`] that the names are about."""
        wanted = self._wanted(names, after_us, until_us)
        if not wanted.height:
            return wanted
        ends = wanted.get_column(END)
        rows = self._windows_between(int(ends.min()) - 1, int(ends.max()), wanted)  # type: ignore[arg-type]  # an Int64 without nulls
        return only(rows, wanted, self._named)

    def _wanted(self, names: pl.DataFrame, after_us: int, until_us: int) -> pl.DataFrame:
        """The keys and ends of windows in (`after_us`, `until_us`] that the names are about, each once."""
        if not names.height:
            return names
        if not self._grid.overlaps:
            windows = names.select(*self._partials.state_key, self._grid.first(pl.col(END)))
            return windows.filter(_between(after_us, until_us))
        ends = names.get_column(END)
        # No further than there are windows: so that nothing overflows.
        after_us = max(after_us, self._grid.first(int(ends.min())) - 1)  # type: ignore[arg-type]  # an Int64 without nulls
        until_us = min(until_us, self._grid.last(int(ends.max())))  # type: ignore[arg-type]  # as above
        return (
            self._grid.spread(names.drop(LAST), after_us, until_us).unique() if after_us < until_us else names.clear()
        )

    def _results(self, rows: pl.DataFrame) -> Emits:
        """The final results of windows. Those of a key are in order of time, so a sink that keeps one row per key ends with the newest."""
        if not rows.height:
            return []
        rows = rows if rows.get_column(END).is_sorted() else rows.sort(END)
        results = self._finish(rows)
        if not self._replaces:
            return [Emit(results)]
        unseen = self._unseen(rows)
        main = results if unseen is rows else self._finish(unseen)
        return [*([Emit(_upserts(main))] if main.height else []), Emit(results, port=FINAL)]

    def _unseen(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Which windows that close now have no result as they are: one that was kept after its end has, unless it changed since."""
        ends, shown_us = rows.get_column(END), self._shown_until()
        first_us, last_us = int(ends.min()), int(ends.max())  # type: ignore[arg-type]  # an Int64 without nulls
        if not self._closing.allowed_us or first_us > shown_us:
            return rows
        changed = self._wanted(self._corrected.scan(), first_us - 1, min(last_us, shown_us))
        unseen = [rows.filter(ends > shown_us), *([only(rows, changed, self._named)] if changed.height else [])]
        return pl.concat(unseen)

    def _shown_until(self) -> int:
        """The watermark at the last barrier: windows that end up to it have had a result. After a restore, the states have it."""
        if self._shown_us is None:
            timelines = [state for state in self.states().values() if isinstance(state, Timeline)]
            self._shown_us = max(timeline.closed_us for timeline in timelines)
        return self._shown_us

    def _close_names(self) -> None:
        self._early.drop(self._watermark_us)
        self._corrected.drop(self._watermark_us)

    def _names(self, state: StateBackend) -> Timeline:
        return state.timeline(self._partials.state_key, time_column=LAST, merge_rows=self._merge_names)

    def _merge_names(self, names: pl.DataFrame) -> pl.DataFrame:
        """One per key and pane: a window has changed if it ends after any of the watermarks."""
        if not self._grid.overlaps:
            # A pane is a window: the other columns are equal, too.
            parts = self._partials.by_end(names) if names.height else None
            if parts is None:
                return names.unique(self._named)
            return pl.concat([part.unique(self._partials.state_key) for part in parts])
        return names.group_by(self._named).agg(pl.col(ROW_WATERMARK).min(), pl.col(LAST).first())

    def _merge_rows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Merge partial rows, keeping the column that says when they are due. Pure, called on any thread."""
        return self._with_due(self._partials.merge(rows))

    def _with_due(self, partials: pl.DataFrame) -> pl.DataFrame:
        if self._first == END:
            return partials
        return partials.with_columns((self._grid.first(pl.col(END)) + self._closing.allowed_us).alias(FIRST))

    def _without_due(self, rows: pl.DataFrame) -> pl.DataFrame:
        # A timeline that never had rows has no columns either.
        return rows.drop(FIRST) if self._first == FIRST and rows.width else rows


def _between(after_us: int, until_us: int) -> pl.Expr:
    return pl.col(END).is_between(after_us, until_us, closed="right")


def only(rows: pl.DataFrame, wanted: pl.DataFrame, by: tuple[str, ...]) -> pl.DataFrame:
    """The rows whose like is in `wanted`, which has no others than there are in `rows`, and none twice. Nulls are alike."""
    if rows.height == wanted.height:
        return rows
    return rows.join(wanted.select(by), on=list(by), how="semi", nulls_equal=True)


def _upserts(results: pl.DataFrame) -> pl.DataFrame:
    """Results that replace those before them. They have no ids: only their order distinguishes versions of a row."""
    return results.drop(ROW_ID, strict=False).with_columns(pl.lit(UPSERT).alias(OP))
