"""Sliding windows: of one size, beginning at a fixed interval; they overlap, or leave gaps.

Rows are kept by pane, one partial row per key and pane. A pane is as long as the greatest common divisor of size and slide, so that
every window is a whole number of panes. Panes whose first window is open take rows. When that closes, the pane is final; it stays until
its last window has closed, and windows are put together from final panes alone. Three ways lead from panes to windows:

- *At once*: a row for each pane and window it is in, then one merge. For windows of few panes nothing is quicker.
- *Subtracting*: the sum of the last window, plus the panes that come in, less those that leave. Only for aggregates that
  give rows back exactly: counts, sums of integers (which wrap) and of decimals.
- *Two stacks*: for all others. Nothing is ever taken back, so no rounding, NaN or infinity remains. The front stack has,
  for windows to come, the merged panes from their start up to a turning point; what came after that is merged at the
  back. A window is one of the front with the back. When the front is used up, the panes at hand become the new front.

Late (rule 6): a row counts for each of its windows that is open for it, and is late if there is none. Partial rows of which some windows
were closed are kept apart from the panes (`_partly`), with the end of the last closed one, and are merged into each later window when that
is emitted. Rows in the gaps between windows count for none and are not late.

Invariants: a final pane never changes; open and final panes are different ones; what `Slider` and `PaneStore` hold beside the state is
derived from it when a window closes, and not before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import polars as pl

from fordstone.operators.aggregate.partial import END, ROWS, Partials
from fordstone.operators.base import Emits, by_watermark, pass_on
from fordstone.operators.window.panes import Closing, PaneGrid
from fordstone.operators.window.tumbling import LAST, WindowAggregate
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START
from fordstone.state.base import State, StateBackend

Merge = Callable[[pl.DataFrame], pl.DataFrame]


class PaneStore:
    """Merged partial rows by pane, oldest first."""

    def __init__(self, grid: PaneGrid, rows: pl.DataFrame) -> None:
        """`rows`: one per key and pane; perhaps without columns, if there are none."""
        self._grid = grid
        self._ends: list[int] = []
        self._frames: dict[int, pl.DataFrame] = {}
        self.add(rows)

    def add(self, rows: pl.DataFrame) -> None:
        if not rows.height:
            return
        for frame in rows.partition_by(END, maintain_order=False):
            end = int(frame.get_column(END)[0])
            insort(self._ends, end)
            self._frames[end] = frame

    def between(self, after_us: int, until_us: int) -> list[pl.DataFrame]:
        ends = self._ends[bisect_right(self._ends, after_us) : bisect_right(self._ends, until_us)]
        return [self._frames[end] for end in ends]

    def forget(self, until_us: int) -> None:
        count = bisect_right(self._ends, until_us)
        for end in self._ends[:count]:
            del self._frames[end]
        del self._ends[:count]

    def windows(self, after_us: int, until_us: int) -> Iterator[tuple[int, int]]:
        """The ends in (`after_us`, `until_us`] of windows that hold a pane, in order: the first and the last of those that
        hold the same panes. Costs what it gives.
        """
        grid = self._grid
        due_us = grid.window_at(after_us) + grid.window.slide_us
        while (index := bisect_left(self._ends, due_us, key=grid.last)) < len(self._ends):
            due_us = max(due_us, grid.first(self._ends[index]))
            if due_us > until_us:
                return
            same_us = min(grid.last(self._ends[index]), grid.window_at(until_us))
            coming = bisect_right(self._ends, due_us, lo=index, key=grid.first)
            if coming < len(self._ends):
                same_us = min(same_us, grid.first(self._ends[coming]) - grid.window.slide_us)
            yield due_us, same_us
            due_us = same_us + grid.window.slide_us


class Slider(ABC):
    """Puts together one window after the other."""

    def __init__(self, grid: PaneGrid, merge: Merge) -> None:
        self._grid = grid
        self._merge_rows = merge
        self.at_us: int | None = None
        """The end of the window that was given, or skipped, last."""

    @abstractmethod
    def window(self, store: PaneStore, end_us: int, *, until_us: int | None) -> pl.DataFrame:
        """One partial row per key that has rows in the window, `end_us` as their END.

        Called with growing ends. Windows left out in between hold no pane. `until_us`: no window after this one will be
        asked for; None: it may. The store has all panes of this window and of the one before.
        """

    def skip(self, windows: int) -> None:
        """The next windows hold the same panes as the one that was given last, and will not be asked for."""
        if self.at_us is not None:
            self.at_us += windows * self._grid.window.slide_us

    def _merged(self, end_us: int, frames: Sequence[pl.DataFrame | None]) -> pl.DataFrame | None:
        given = [frame for frame in frames if frame is not None and frame.height]
        if not given:
            return None
        rows = pl.concat(given).with_columns(pl.lit(end_us, dtype=pl.Int64).alias(END))
        return rows if len(given) == 1 else self._merge_rows(rows).select(rows.columns)


class Subtracting(Slider):
    """The last window plus what comes in, less what leaves."""

    def __init__(self, grid: PaneGrid, merge: Merge, *, key: Sequence[str]) -> None:
        super().__init__(grid, merge)
        self._taken_out = [(-pl.all().exclude(*key, END))]
        self._totals: pl.DataFrame | None = None

    def window(self, store: PaneStore, end_us: int, *, until_us: int | None) -> pl.DataFrame:  # noqa: ARG002 - nothing is made in advance
        size_us, at_us = self._grid.window.size_us, self.at_us
        if at_us is None or at_us <= end_us - size_us:
            frames: list[pl.DataFrame | None] = [*store.between(end_us - size_us, end_us)]
        else:
            leaving = [pane.with_columns(self._taken_out) for pane in store.between(at_us - size_us, end_us - size_us)]
            frames = [self._totals, *store.between(at_us, end_us), *leaving]
        totals = self._merged(end_us, frames)
        if totals is None:
            raise LookupError(f"the window that ends at {end_us} holds no pane")
        self._totals, self.at_us = totals.filter(pl.col(ROWS) > 0), end_us
        return self._totals


class TwoStacks(Slider):
    """Windows of the front stack, each with what is at the back."""

    def __init__(self, grid: PaneGrid, merge: Merge) -> None:
        super().__init__(grid, merge)
        self._front: list[pl.DataFrame | None] = []
        """For the windows to come, the next one last: their panes up to the turning point, merged."""
        self._back: pl.DataFrame | None = None
        """The panes after the turning point, merged."""

    def window(self, store: PaneStore, end_us: int, *, until_us: int | None) -> pl.DataFrame:
        if self.at_us is None or end_us != self.at_us + self._grid.window.slide_us or not self._front:
            self._turn(store, end_us, until_us)
        else:
            self._back = self._merged(end_us, [self._back, *store.between(self.at_us, end_us)])
        self.at_us = end_us
        found = self._merged(end_us, [self._front.pop(), self._back])
        if found is None:
            raise LookupError(f"the window that ends at {end_us} holds no pane")
        return found

    def skip(self, windows: int) -> None:
        super().skip(windows)
        if windows:
            del self._front[-windows:]

    def _turn(self, store: PaneStore, end_us: int, until_us: int | None) -> None:
        """Make the panes of this window the new front: for it, and for those to come that begin before it ends."""
        size_us, slide_us = self._grid.window.size_us, self._grid.window.slide_us
        last_us = end_us + (size_us - 1) // slide_us * slide_us
        ends = range(end_us, (last_us if until_us is None else min(last_us, until_us)) + 1, slide_us)
        self._front, self._back = [], None
        merged, from_us = None, end_us
        for window_us in reversed(ends):
            if coming := store.between(window_us - size_us, from_us):
                merged = self._merged(end_us, [*coming, merged])
            from_us = window_us - size_us
            self._front.append(merged)


AT_ONCE_PANES: Final = 8
"""Maximum number of panes of a window that is merged from all of them: with few, that is quicker than bookkeeping."""
WINDOWS_ALIKE: Final = 1_000
"""Maximum number of windows with the same panes that are emitted as one frame."""
SPREAD_ROWS: Final = 1_000_000
"""Maximum number of partial rows made at once from panes: many windows that close together are taken in parts."""


class SlidingAggregate(WindowAggregate):
    """One row per key and window, when the window closes."""

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
        """`partials` cuts by panes."""
        self._grid = closing.grid
        super().__init__(partials, closing, combined=combined, early_us=early_us, counted=counted, state=state)
        # There is one row per key and final pane: nothing to merge.
        self._final = state.timeline(partials.state_key, time_column=LAST, merge_rows=pass_on)
        self._partly = state.timeline(partials.state_key, time_column=LAST, merge_rows=self._merge_partly)
        """Partial rows of rows that came after the first of their windows had closed, with `ROW_WATERMARK`."""
        self._store: PaneStore | None = None
        """The final panes, where windows are put together one by one; None before the first window closes."""
        self._slider = self._new_slider()

    @property
    def _closes_at_end(self) -> bool:
        return self._grid.whole

    def on_watermark(self, watermark_us: int) -> Emits:
        self._shown_until()
        before_us = self._closing.closed_us(max(self._watermark_us, self._final.closed_us))
        self._watermark_us = watermark_us
        due_us = self._grid.window_at(self._closing.closed_us(watermark_us))
        if due_us <= self._grid.window_at(before_us):
            return []
        closed = self._without_due(self._open.close(watermark_us))
        if self._grid.overlaps:
            windows = self._with_partly(list(self._windows(closed, before_us, due_us)), before_us, due_us)
            self._final.drop(watermark_us)
            self._partly.drop(watermark_us)
            self._final.add(self._lasting(closed))
        else:
            windows = [self._only_windows(closed)]
        emits = [emit for rows in windows for emit in self._results(rows)]
        self._close_names()
        return emits

    def states(self) -> Mapping[str, State]:
        return {**super().states(), "panes": self._final, "partly": self._partly}

    def _lasting(self, closed: pl.DataFrame) -> pl.DataFrame:
        """The panes that windows to come need, with LAST."""
        if not closed.height:
            return closed
        ends, closed_us = closed.get_column(END), self._closing.closed_us(self._watermark_us)
        least_us, most_us = (self._grid.last(int(end)) for end in (ends.min(), ends.max()))  # type: ignore[arg-type]  # an Int64 without nulls
        if most_us <= closed_us:
            return closed.clear()
        last = pl.lit(most_us, dtype=pl.Int64) if least_us == most_us else self._grid.last(pl.col(END))
        kept = closed if least_us > closed_us else closed.filter(last > closed_us)
        return kept.with_columns((last + self._closing.allowed_us).alias(LAST))

    def _add(self, partials: pl.DataFrame) -> None:
        if not self._grid.whole:
            partials = partials.with_columns(self._grid.shared(pl.col(END)).alias(END))
        super()._add(partials)

    def _add_partly(self, partials: pl.DataFrame) -> None:
        self._partly.add(self._with_last(partials))
        self._note_changed(partials)

    def _merge_partly(self, rows: pl.DataFrame) -> pl.DataFrame:
        return self._with_last(by_watermark(self._partials.merge)(rows))

    def _with_last(self, partials: pl.DataFrame) -> pl.DataFrame:
        return partials.with_columns((self._grid.last(pl.col(END)) + self._closing.allowed_us).alias(LAST))

    def _with_partly(self, windows: list[pl.DataFrame], after_us: int, until_us: int) -> list[pl.DataFrame]:
        """Partial rows of windows that end in (`after_us`, `until_us`], with what rows that came late add to them."""
        partly = self._partly.scan()
        if not partly.height:
            return windows
        ends = partly.get_column(END)
        after_us = max(after_us, self._grid.first(int(ends.min())) - 1)  # type: ignore[arg-type]  # an Int64 without nulls
        until_us = min(until_us, self._grid.last(int(ends.max())))  # type: ignore[arg-type]  # as above
        spread = self._grid.spread(partly, after_us, until_us) if after_us < until_us else partly.clear()
        found = [frame.select(list(self._partials.schema)) for frame in (*windows, spread) if frame.height]
        return [self._partials.merge(pl.concat(found)).select(found[0].columns)] if spread.height else windows

    def _finish(self, rows: pl.DataFrame) -> pl.DataFrame:
        results = self._partials.finish(rows)
        starts = (rows.get_column(END) - self._grid.window.size_us).cast(results.schema[WINDOW_END])
        return results.replace_column(results.get_column_index(WINDOW_START), starts.alias(WINDOW_START))

    def _windows_between(self, after_us: int, until_us: int, wanted: pl.DataFrame | None = None) -> pl.DataFrame:
        panes = self._together(self._open.scan(), self._final.scan())
        if wanted is not None and panes.height:
            key = list(self._partials.state_key)
            panes = panes.join(wanted.select(key), on=key, how="semi", nulls_equal=True)
        if not self._grid.overlaps:
            panes = self._only_windows(panes)
            between = pl.col(END).is_between(after_us, until_us, closed="right")
            found = [panes.filter(between)] if panes.height else []
        elif self._at_once:
            found = list(self._spread(panes, after_us, until_us)) if panes.height else []
        else:
            store, slider = PaneStore(self._grid, panes), self._new_slider()
            found = list(self._one_by_one(store, slider, (after_us, until_us), until_us))
        found = self._with_partly(found, after_us, until_us)
        return pl.concat(found) if found else pl.DataFrame()

    @property
    def _at_once(self) -> bool:
        return self._grid.panes_per_window <= AT_ONCE_PANES

    def _windows(self, closed: pl.DataFrame, after_us: int, until_us: int) -> Iterator[pl.DataFrame]:
        """Partial rows of the windows that end in (`after_us`, `until_us`], one per key and window, earlier windows first."""
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
        elif panes.height * grid.windows_per_pane > SPREAD_ROWS:
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
        return self._partials.merge(panes.with_columns(pl.lit(end_us, dtype=pl.Int64).alias(END))).select(panes.columns)

    def _only_windows(self, panes: pl.DataFrame) -> pl.DataFrame:
        """Where windows do not overlap, a pane is a window, but for the gap at its end."""
        return panes.with_columns(self._grid.first(pl.col(END))).sort(END) if panes.height else panes

    def _new_slider(self) -> Slider:
        if self._partials.invertible:
            return Subtracting(self._grid, self._partials.merge, key=self._partials.state_key)
        return TwoStacks(self._grid, self._partials.merge)


def _alike(rows: pl.DataFrame, ends_us: range) -> pl.DataFrame:
    ends = pl.DataFrame({END: pl.Series(list(ends_us), dtype=pl.Int64)})
    return ends.join(rows.drop(END), how="cross", maintain_order="left_right").select(rows.columns)
