"""Panes and windows by time: which panes make up which windows, and which windows are closed for a row (rule 6).

A window of `[start, end)` is closed for a row when its end, plus the lateness that is allowed, is not after the watermark that the row
carries. Used before the shuffle, where partial rows are made, and after it, where they are kept. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import polars as pl

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.aggregate.partial import END
from fordstone.operators.base import ROW_WATERMARK, Emit, late_emit
from fordstone.operators.row_order import Numbers
from fordstone.plan.plan import Sliding, Tumbling, panes

COPIES_MAX: Final = 16
"""Maximum number of windows per pane for which panes are spread window by window."""
_Time = TypeVar("_Time", int, pl.Expr, pl.Series)


@dataclass(frozen=True, slots=True)
class PaneGrid:
    """Which panes make up which windows. Panes and windows are both named by their ends."""

    window: Sliding

    @classmethod
    def of(cls, window: Sliding | Tumbling) -> PaneGrid:
        if isinstance(window, Sliding):
            return cls(window)
        return cls(Sliding(window.size_us, window.size_us, window.offset_us))

    @property
    def pane_us(self) -> int:
        """The length of a pane; of windows that do not overlap, the slide."""
        return panes(self.window).size_us

    @property
    def panes_per_window(self) -> int:
        """How many panes a window has, those in the same windows taken for one (`shared`)."""
        return self.windows_per_pane * (1 if self.pane_us == self.window.slide_us else 2)

    @property
    def windows_per_pane(self) -> int:
        """How many windows a pane is in, at most."""
        return -(-self.window.size_us // self.window.slide_us)

    @property
    def overlaps(self) -> bool:
        return self.window.slide_us < self.window.size_us

    @property
    def whole(self) -> bool:
        """Whether a window ends with every pane: then a pane's end is the end of its first window."""
        return self.overlaps and self.pane_us == self.window.slide_us

    def window_at(self, bound_us: _Time) -> _Time:
        """The last end of a window that is not after `bound_us`."""
        phase_us = self._phase_us
        return phase_us + (bound_us - phase_us) // self.window.slide_us * self.window.slide_us

    def first(self, end: _Time) -> _Time:
        """The end of the first window that holds a pane."""
        if self.whole:
            return end
        if not self.overlaps:
            gap_us = self.window.slide_us - self.window.size_us
            return end - gap_us if gap_us else end
        slide_us, phase_us = self.window.slide_us, self._phase_us
        return (end - phase_us + (slide_us - 1)) // slide_us * slide_us + phase_us

    def last(self, end: _Time) -> _Time:
        """The end of the last window that holds a pane."""
        if not self.overlaps:
            return self.first(end)
        slide_us, phase_us = self.window.slide_us, self._phase_us
        return (end + (self.window.size_us - self.pane_us - phase_us)) // slide_us * slide_us + phase_us

    def shared(self, end: pl.Expr) -> pl.Expr:
        """The end of the longest stretch of panes that are in the same windows as this one: it may stand for them all.

        Where the slide divides the size that is the pane itself. Else there are two panes per slide instead of what may be very many.
        """
        slide_us, offset_us = self.window.slide_us, self.window.offset_us
        if self.whole or not self.overlaps:
            return end
        start = (end - offset_us + (slide_us - 1)) // slide_us * slide_us + offset_us
        return pl.min_horizontal(self.first(end), start)

    def in_window(self, at: pl.Expr) -> pl.Expr | None:
        """Whether a time (in microseconds) lies in any window; None: all do."""
        if self.window.slide_us <= self.window.size_us:
            return None
        since = at - self.window.offset_us
        return since - since // self.window.slide_us * self.window.slide_us < self.window.size_us

    @property
    def _phase_us(self) -> int:
        return (self.window.offset_us + self.window.size_us) % self.window.slide_us

    def spread(self, rows: pl.DataFrame, after_us: int, until_us: int) -> pl.DataFrame:
        """Partial rows of panes, once for each window they are in that ends in (`after_us`, `until_us`]; END says which.

        Rows with a `ROW_WATERMARK`, which they lose, only count for windows that end after it.
        """
        if ROW_WATERMARK in rows.columns:
            spread = self._spread(rows, after_us, until_us)
            return spread.filter(pl.col(END) > pl.col(ROW_WATERMARK)).drop(ROW_WATERMARK)
        return self._spread(rows, after_us, until_us)

    def _spread(self, rows: pl.DataFrame, after_us: int, until_us: int) -> pl.DataFrame:
        ends = rows.get_column(END)
        first, last = self.first(ends), self.last(ends)
        if self.windows_per_pane > COPIES_MAX:
            return self._spread_by_row(rows, first.to_numpy(), last.to_numpy(), (after_us, until_us))
        copies = []
        for index in range(self.windows_per_pane):
            end = first + index * self.window.slide_us
            found = (end > after_us) & (end <= until_us) & (end <= last)
            copy = rows.with_columns(end.alias(END))
            copies.append(copy if found.all() else copy.filter(found))
        return pl.concat(copies)

    def _spread_by_row(
        self, rows: pl.DataFrame, first: Numbers, last: Numbers, between: tuple[int, int]
    ) -> pl.DataFrame:
        slide_us = self.window.slide_us
        first = np.maximum(first, self.window_at(between[0]) + slide_us)
        last = np.minimum(last, self.window_at(between[1]))
        counts = np.maximum((last - first) // slide_us + 1, 0)
        of = np.repeat(np.arange(rows.height), counts)
        nth = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows[of].with_columns(pl.Series(END, first[of] + nth * slide_us, dtype=pl.Int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Rows, or partial rows, by which of their windows are open for them."""

    whole: pl.DataFrame
    """All of them are."""
    partly: pl.DataFrame
    """Some are. `ROW_WATERMARK` is the least at which those that are closed were so: few values for many rows."""
    late: Emit | None
    """None is: they leave on the late port."""


@dataclass(frozen=True, slots=True)
class Closing:
    """When windows close."""

    grid: PaneGrid
    """Of tumbling windows, each pane is a window."""
    allowed_us: int = 0
    """How long after its end a window is kept for rows that come late."""

    def closed_us(self, watermark_us: int) -> int:
        """Windows that end up to there are closed at a watermark."""
        if watermark_us == TIME_MAX_US:
            return TIME_MAX_US
        return max(watermark_us - self.allowed_us, TIME_MIN_US)

    def judge(self, frame: pl.DataFrame, ends: pl.Series, watermarks: pl.Series) -> Judged:
        """Sort rows out. `ends`: of the pane that each lies in; `watermarks`: what each is judged by, Int64 without nulls."""
        closed = watermarks - self.allowed_us
        last = self.grid.last(ends)
        is_whole, is_late = self.grid.first(ends) > closed, last <= closed
        is_partly = ~(is_whole | is_late)
        plain = frame.drop(ROW_WATERMARK, strict=False)
        least = self.grid.window_at(closed.filter(is_partly)) + self.allowed_us
        partly = plain.filter(is_partly).with_columns(least.alias(ROW_WATERMARK))
        late = late_emit(plain.filter(is_late), (closed - last).filter(is_late) + 1) if is_late.any() else None
        return Judged(whole=plain.filter(is_whole), partly=partly, late=late)
