"""Aggregates: a combiner before the shuffle, windows that close with time, and running results kept up to date.

The combiner makes partial rows of each batch where it was read, so that less is shuffled; the keyed step merges them.
Window results are given out once, when the watermark passes the window's end. Running results are given out at
barriers, one row for each key that changed (rule 15).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

from fordstone.model.manifest import TIME_MIN_US
from fordstone.operators.operator import LATE, OP, UPSERT, Emit, Emits, Moment, Operator
from fordstone.operators.partial import END, Partials
from fordstone.state.runs import Runs
from fordstone.state.state import State
from fordstone.state.table import FOUND, Table

SHRINK_LEAST: Final = 0.5
"""A combiner that leaves more than this share of the rows is not worth its work."""
OPEN_ROWS_MIN: Final = 16 * 1024
OPEN_RATIO: Final = 2
"""A running aggregate merges partial rows within an epoch when there are so many times more of them than keys."""
TRY_AGAIN_EVERY: Final = 64
"""After so many batches that were passed on as they are, the combiner tries again."""


class Combine(Operator):
    """Makes partial rows of each batch. Stateless: what it learns about its input only decides how, not what."""

    def __init__(self, partials: Partials, *, drops_late: bool) -> None:
        """`drops_late`: late rows leave on the late port, to be counted; running aggregates take them in."""
        self._partials = partials
        self._drops_late = drops_late
        self._skip = 0

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Partial rows, one a key and window; or one a row, where few rows share a key."""
        if late and self._drops_late:
            return [Emit(frame, port=LATE)]
        timeless = self._partials.timeless(frame)
        if timeless is not None:
            in_time = frame.filter(~timeless)
            lost = Emit(frame.filter(timeless), port=LATE)
            return [lost, *self.on_batch(in_time, late=False)] if in_time.height else [lost]
        if self._skip > 0:
            self._skip -= 1
            return [Emit(self._partials.of_rows_unmerged(frame))]
        out = self._partials.of_rows(frame)
        if out.height > SHRINK_LEAST * frame.height and frame.height > TRY_AGAIN_EVERY:
            self._skip = TRY_AGAIN_EVERY
        return [Emit(out)]

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - nothing waits for time here
        """Nothing waits."""
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        """Nothing is held."""
        return []

    def states(self) -> Mapping[str, State]:
        """None."""
        return {}


class WindowAggregate(Operator):
    """One row a key and window, when the window closes."""

    def __init__(self, partials: Partials, *, combined: bool) -> None:
        """`combined`: input is partial rows of a combiner; else rows, and late ones leave on the late port."""
        self._partials = partials
        self._combined = combined
        self._runs = Runs(partials.state_key, time_column=END, combine_rows=partials.merge)
        self._watermark_us = TIME_MIN_US

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Add rows to their windows. Rows of a window that idleness let close already are late, and so are rows without a time."""
        if late:
            return [Emit(frame, port=LATE)]
        if self._combined:
            return self._add(frame)
        timeless = self._partials.timeless(frame)
        if timeless is not None:
            in_time = frame.filter(~timeless)
            return [Emit(frame.filter(timeless), port=LATE), *(self._add_rows(in_time) if in_time.height else [])]
        return self._add_rows(frame)

    def on_watermark(self, watermark_us: int) -> Emits:
        """Close the windows that end at or before it."""
        self._watermark_us = watermark_us
        closed = self._runs.close(watermark_us)
        return [Emit(self._partials.finish(closed))] if closed.height else []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        """Nothing: results come with time."""
        return []

    def states(self) -> Mapping[str, State]:
        """The open windows."""
        return {"windows": self._runs}

    def _add(self, partials: pl.DataFrame) -> Emits:
        """Add partial rows; those of closed windows leave as late."""
        if partials.get_column(END).min() > self._watermark_us:  # type: ignore[operator]  # an Int64 without nulls
            self._runs.add(partials)
            return []
        is_open = pl.col(END) > self._watermark_us
        self._runs.add(partials.filter(is_open))
        return [Emit(partials.filter(~is_open), port=LATE)]

    def _add_rows(self, frame: pl.DataFrame) -> Emits:
        """Add rows; those of closed windows leave as they came."""
        ends = self._partials.ends(frame)
        if ends.min() > self._watermark_us:  # type: ignore[operator]  # an Int64 without nulls
            self._runs.add(self._partials.of_rows(frame))
            return []
        is_open = ends > self._watermark_us
        if is_open.any():
            self._runs.add(self._partials.of_rows(frame.filter(is_open)))
        return [Emit(frame.filter(~is_open), port=LATE)]


class RunningAggregate(Operator):
    """One row a key over all its rows so far, given out anew when it has changed."""

    def __init__(self, partials: Partials, *, combined: bool, at_barriers: bool) -> None:
        """`at_barriers`: results come once an epoch; else with every batch, for pipelines without exactly-once."""
        self._partials = partials
        self._combined = combined
        self._at_barriers = at_barriers
        self._table = Table(partials.state_key, schema=partials.schema)
        self._open: list[pl.DataFrame] = []
        self._open_rows = 0
        """Since they were last merged."""
        self._merged_rows = 0

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:  # noqa: ARG002 - without windows no row is late
        """Take rows in; late ones too."""
        partials = frame if self._combined else self._partials.of_rows(frame)
        self._open.append(partials)
        self._open_rows += partials.height
        if self._open_rows > max(OPEN_ROWS_MIN, OPEN_RATIO * self._merged_rows):
            # Before the barrier comes, which would have to wait for it.
            merged = self._partials.merge(pl.concat(self._open))
            self._open, self._open_rows, self._merged_rows = [merged], 0, merged.height
        return [] if self._at_barriers else self._emit_changed()

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - results do not wait for time
        """Nothing waits for time."""
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        """One row for each key that changed in this epoch."""
        return self._emit_changed()

    def states(self) -> Mapping[str, State]:
        """The partial row of each key."""
        return {"totals": self._table}

    def _emit_changed(self) -> Emits:
        if not self._open:
            return []
        changed = self._partials.merge(pl.concat(self._open))
        self._open, self._open_rows, self._merged_rows = [], 0, 0
        known = self._table.get(changed.select(self._partials.state_key))
        before = known.filter(pl.col(FOUND)).select(changed.columns)
        if before.height:
            changed = self._partials.merge(pl.concat([before, changed]))
        self._table.put(changed)
        return [Emit(self._partials.finish(changed).with_columns(pl.lit(UPSERT).alias(OP)))]
