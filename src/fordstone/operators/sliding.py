"""Sliding windows: of one size, one beginning every so often; they overlap, or leave gaps.

Rows are kept by pane (`panes`), one partial row a key and pane however many windows it counts for. Panes whose first window
is open take rows. When that closes, the pane is final; it stays until its last window has closed, and windows are put
together from final panes alone. A window is given out for keys that have rows in it.

Late (rule 6): a row counts for all of its windows or for none. Once the first of them has closed, the row is late as a
whole, although others may be open: so rows in = rows counted + rows late, and windows that share a pane agree on it. Lateness
proper is judged at the source; here it only comes of idleness. Rows in the gaps between windows count for none and are
not late.

Early results: a pane that becomes final before they are due has changed windows that are still open. Which panes those are
is kept (`_touched`) until early results have been given.

Invariants: a final pane never changes; open and final panes are different ones; what `panes.Slider` and `PaneStore` hold
beside the state is made from it when a window closes, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import polars as pl

from fordstone.model.aggregating import WINDOW_END, WINDOW_START
from fordstone.operators.operator import Emits
from fordstone.operators.panes import FIRST, LAST, PaneGrid, PaneStore, Slider, Subtracting, TwoStacks
from fordstone.operators.partial import END, Partials
from fordstone.operators.window import WindowOperator, only
from fordstone.state.runs import Runs
from fordstone.state.state import State

AT_ONCE_PANES: Final = 8
"""Windows of up to so many panes are merged from all of them: with few, that is quicker than any bookkeeping."""
WINDOWS_ALIKE: Final = 1_000
"""So many windows that hold the same panes at most are given out in one piece."""
SPREAD_ROWS: Final = 1_000_000
"""So many partial rows at most are made at once of those of panes: many windows that close together are taken in parts."""


class SlidingAggregate(WindowOperator):
    """One row a key and window, when the window closes."""

    def __init__(
        self,
        partials: Partials,
        grid: PaneGrid,
        *,
        combined: bool,
        inverts: bool,
        early_us: int | None = None,
        counted: pl.Expr | None = None,
    ) -> None:
        """`partials` cuts by panes. `inverts`: all that is kept of rows can be subtracted exactly."""
        due = END if grid.whole else FIRST
        super().__init__(partials, combined=combined, due=due, early_us=early_us, counted=counted)
        self._grid = grid
        self._inverts = inverts
        self._final = Runs(partials.state_key, time_column=LAST, combine_rows=_as_they_are)
        self._touched = Runs(partials.state_key, time_column=LAST, combine_rows=_as_they_are)
        """Which final panes came since the last early results: windows to come have changed by them."""
        self._store: PaneStore | None = None
        """The final panes, where windows are put together one by one; None before the first window closes."""
        self._slider = self._new_slider()

    def on_watermark(self, watermark_us: int) -> Emits:
        """Close the windows that end at or before it."""
        before_us = max(self._watermark_us, self._final.closed_us)
        self._watermark_us = watermark_us
        due_us = self._grid.window_at(watermark_us)
        if due_us <= self._grid.window_at(before_us):
            return []
        closed = self._closed(watermark_us).drop(FIRST, strict=False)
        if not self._grid.overlaps:
            return self._results(self._only_windows(closed))
        windows = list(self._windows(closed, before_us, due_us))
        self._final.close(watermark_us)
        self._touched.close(watermark_us)
        self._final.add(self._lasting(closed))
        return [emit for rows in windows for emit in self._results(rows)]

    def states(self) -> Mapping[str, State]:
        """The open panes (in two parts with early results), and the final ones."""
        found = {**super().states(), "panes": self._final}
        return found if self._early_us is None else {**found, "touched": self._touched}

    def _changed_before(self) -> pl.DataFrame:
        return self._touched.drain()

    def _on_changed_closed(self, changed: pl.DataFrame) -> None:
        self._touched.add(self._lasting(changed.select(self._named)))

    def _lasting(self, closed: pl.DataFrame) -> pl.DataFrame:
        """The panes that windows to come need, with LAST."""
        if not closed.height:
            return closed
        ends, watermark_us = closed.get_column(END), self._watermark_us
        least_us, most_us = (self._grid.last(int(end)) for end in (ends.min(), ends.max()))  # type: ignore[arg-type]  # an Int64 without nulls
        if most_us <= watermark_us:
            return closed.clear()
        last = pl.lit(most_us, dtype=pl.Int64) if least_us == most_us else self._grid.last(pl.col(END))
        kept = closed.with_columns(last.alias(LAST))
        return kept if least_us > watermark_us else kept.filter(pl.col(LAST) > watermark_us)

    def _due(self, ends: pl.Series) -> pl.Series:
        return self._grid.first(ends)

    def _fold(self, rows: pl.DataFrame) -> pl.DataFrame:
        return self._with_first(self._partials.merge(rows))

    def _add(self, partials: pl.DataFrame) -> None:
        if not self._grid.whole:
            partials = partials.with_columns(self._grid.shared(pl.col(END)).alias(END))
        self._hold(self._with_first(partials))

    def _finish(self, rows: pl.DataFrame) -> pl.DataFrame:
        results = self._partials.finish(rows)
        starts = (rows.get_column(END) - self._grid.window.size_us).cast(results.schema[WINDOW_END])
        return results.replace_column(results.get_column_index(WINDOW_START), starts.alias(WINDOW_START))

    def _provisional(self, changed: pl.DataFrame) -> pl.DataFrame:
        key = self._partials.state_key
        panes = self._together(self._open.scan(), self._final.scan())
        if not self._grid.overlaps:
            return self._only_windows(only(panes, changed, self._named))
        keys = changed.select(key).unique()
        if keys.height < panes.select(pl.struct(key).n_unique()).item():
            panes = panes.join(keys, on=list(key), how="semi", nulls_equal=True)
        ends = changed.get_column(END)
        closed_us = max(self._watermark_us, self._final.closed_us)
        after_us = max(self._grid.first(int(ends.min())) - 1, closed_us)  # type: ignore[arg-type]  # an Int64 without nulls
        until_us = self._grid.last(int(ends.max()))  # type: ignore[arg-type]  # as above
        wanted = self._grid.spread(changed, after_us, until_us).unique()
        if self._at_once:
            found = list(self._spread(panes, after_us, until_us))
        else:
            store, slider = PaneStore(self._grid, panes), self._new_slider()
            found = list(self._one_by_one(store, slider, (after_us, until_us), until_us))
        return only(pl.concat(found), wanted, self._named)

    @property
    def _at_once(self) -> bool:
        return self._grid.panes_a_window <= AT_ONCE_PANES

    def _windows(self, closed: pl.DataFrame, after_us: int, until_us: int) -> Iterator[pl.DataFrame]:
        """Partial rows of the windows that end in (`after_us`, `until_us`], one a key and window, earlier windows first."""
        if self._at_once:
            panes = self._together(self._final.scan(), closed)
            if panes.height and until_us == self._grid.window_at(after_us) + self._grid.window.slide_us:
                # The usual case. Panes that are final, or become so now, and are needed still are all in this window.
                yield self._one_window(panes, until_us)
            elif panes.height:
                yield from self._spread(panes, after_us, until_us)
            return
        # The first time after a restore, and on Spark that is every time, no work is done for windows to come.
        last_us = until_us if self._store is None else None
        if self._store is None:
            self._store = PaneStore(self._grid, self._together(self._final.scan()))
        self._store.add(closed)
        yield from self._one_by_one(self._store, self._slider, (after_us, until_us), last_us)
        if (done_us := self._slider.at_us) is not None:
            self._store.forget(done_us - self._grid.window.size_us)

    def _one_by_one(
        self, store: PaneStore, slider: Slider, between_us: tuple[int, int], last_us: int | None
    ) -> Iterator[pl.DataFrame]:
        """The windows in between, put together one after the other, those that hold the same panes at once."""
        slide_us = self._grid.window.slide_us
        for first_us, same_us in store.windows(*between_us):
            found = slider.window(store, first_us, until_us=last_us)
            slider.skip((same_us - first_us) // slide_us)
            for end_us in range(first_us, same_us + 1, WINDOWS_ALIKE * slide_us):
                until_us = min(same_us, end_us + (WINDOWS_ALIKE - 1) * slide_us)
                yield found if end_us == until_us == first_us else _alike(found, range(end_us, until_us + 1, slide_us))

    def _spread(self, panes: pl.DataFrame, after_us: int, until_us: int) -> Iterator[pl.DataFrame]:
        """Merge the windows that end in (`after_us`, `until_us`] from the panes, all at once or in parts."""
        grid = self._grid
        first, last = grid.first(panes.get_column(END)), grid.last(panes.get_column(END))
        inside = (first <= until_us) & (last > after_us)
        if not inside.all():
            panes, first, last = panes.filter(inside), first.filter(inside), last.filter(inside)
        if not panes.height:
            return
        due_us = max(grid.window_at(after_us) + grid.window.slide_us, int(first.min()))  # type: ignore[arg-type]  # an Int64 without nulls
        until_us = min(grid.window_at(until_us), int(last.max()))  # type: ignore[arg-type]  # as above
        if due_us == until_us:
            yield self._one_window(panes, until_us)
        elif panes.height * grid.windows_a_pane > SPREAD_ROWS:
            # Between windows in the middle of what there is; or of the time, should that be one pane.
            middle_us = grid.window_at(int(first.median()))  # type: ignore[arg-type]  # as above
            if not due_us <= middle_us < until_us:
                middle_us = grid.window_at((due_us + until_us - 1) // 2)
            yield from self._spread(panes, due_us - 1, middle_us)
            yield from self._spread(panes, middle_us, until_us)
        else:
            windows = grid.spread(panes, due_us - 1, until_us)
            yield self._partials.merge(windows).select(panes.columns).sort(END)

    def _together(self, *frames: pl.DataFrame) -> pl.DataFrame:
        """Partial rows of all, without the columns that say when they are due. No columns at all, if there are no rows."""
        found = [frame.select(list(self._partials.schema)) for frame in frames if frame.height]
        return pl.concat(found) if found else pl.DataFrame()

    def _one_window(self, panes: pl.DataFrame, end_us: int) -> pl.DataFrame:
        """All panes as one window."""
        return self._partials.merge(panes.with_columns(pl.lit(end_us, dtype=pl.Int64).alias(END))).select(panes.columns)

    def _only_windows(self, panes: pl.DataFrame) -> pl.DataFrame:
        """Where windows do not overlap, a pane is a window, but for the gap at its end."""
        return panes.with_columns(self._grid.first(pl.col(END))).sort(END) if panes.height else panes

    def _with_first(self, partials: pl.DataFrame) -> pl.DataFrame:
        return partials if self._grid.whole else partials.with_columns(self._grid.first(pl.col(END)).alias(FIRST))

    def _new_slider(self) -> Slider:
        if self._inverts:
            return Subtracting(self._grid, self._partials.merge, key=self._partials.state_key)
        return TwoStacks(self._grid, self._partials.merge)


def _alike(rows: pl.DataFrame, ends_us: range) -> pl.DataFrame:
    """Partial rows of one window as those of windows that hold the same panes."""
    ends = pl.DataFrame({END: pl.Series(list(ends_us), dtype=pl.Int64)})
    return ends.join(rows.drop(END), how="cross", maintain_order="left_right").select(rows.columns)


def _as_they_are(rows: pl.DataFrame) -> pl.DataFrame:
    """There is one row a key and final pane: nothing to fold."""
    return rows
