"""Aggregates without windows, and partial rows on their way to the center. Windows are in `operators.window`.

`Combine` makes partial rows of each batch before the shuffle; the keyed step merges them. `RunningAggregate` emits one row per changed key
at barriers (rule 15). `EpochCombine` runs below the cut: it merges as it receives, and emits all it has at a barrier, so that it has no
state (rule 9). At the center the operator that takes rows at the edge merges the partial rows; `Merging` brings them into its form.

Partial rows cross as columns of our types (`crossing_schema`). The name of the column that counts rows contains a digest of what the rows
mean: if nodes and center run two versions of a pipeline, columns are missing, rather than sums of one thing added to those of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.partial import ROWS, Partials
from fordstone.operators.base import (
    OP,
    ROW_WATERMARK,
    UPSERT,
    Emit,
    Emits,
    Moment,
    Operator,
    Stateless,
    by_watermark,
    late_emit,
)
from fordstone.operators.window.panes import Closing
from fordstone.state.base import FOUND, State, StateBackend

SHRINK_LEAST: Final = 0.5
"""A combiner that leaves more than this share of the rows is not worth its work."""
OPEN_ROWS_MIN: Final = 16 * 1024
OPEN_RATIO: Final = 2
"""A running aggregate merges partial rows within an epoch when their number exceeds this multiple of the keys."""
SPLIT_ROWS: Final = 16 * 1024
"""Batches of fewer rows are not worth splitting by window."""
TRY_AGAIN_EVERY: Final = 64
"""Number of batches passed on as they are before the combiner tries again."""


class Combine(Stateless):
    """Makes partial rows of each batch. Stateless: what it learns about its input only decides how, not what."""

    def __init__(self, partials: Partials, *, closing: Closing | None, counted: pl.Expr | None = None) -> None:
        """`closing`: late rows leave on the late port, to be counted; None, of running aggregates: all rows count.

        `counted`: which rows count at all, where windows leave gaps; null for none.
        """
        super().__init__(self._partial_rows)
        self._counted = counted
        self._partials = partials
        self._closing = closing
        self._skip = 0

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Partial rows, one per key and window; or one per row, where few rows share a key.

        Those of sliding windows some of which were closed for their rows go on as late ones, by the end of the last closed one.
        """
        timeless = self._partials.timeless(frame)
        emits: Emits = []
        if timeless is not None:
            emits.append(late_emit(frame.filter(timeless), pl.Series(dtype=pl.Int64)))
            frame = frame.filter(~timeless)
        if self._counted is not None:
            frame = frame.filter(self._counted)
        if late and self._closing is not None and frame.height:
            judged = self._closing.judge(frame, self._partials.ends(frame), frame.get_column(ROW_WATERMARK))
            emits += [] if judged.late is None else [judged.late]
            if judged.partly.height:
                emits.append(Emit(by_watermark(self._partials.of_rows)(judged.partly), late=True))
            frame = judged.whole
        return [*emits, self._made(frame)] if frame.height else emits

    def _made(self, frame: pl.DataFrame) -> Emit:
        if self._skip > 0:
            self._skip -= 1
            return Emit(self._partials.of_rows_unmerged(frame))
        out = self._partial_rows(frame)
        if out.height > SHRINK_LEAST * frame.height and frame.height > TRY_AGAIN_EVERY:
            self._skip = TRY_AGAIN_EVERY
        return Emit(out)

    def _partial_rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        """One per key and window. Of rows of two windows, grouping by the key alone, twice, takes two thirds of the time."""
        if self._closing is None or frame.height < SPLIT_ROWS or self._partials.only_end(frame) is not None:
            return self._partials.of_rows(frame)
        ends = self._partials.ends(frame)
        is_low = ends == ends.min()
        if not (is_low | (ends == ends.max())).all():
            return self._partials.of_rows(frame)
        return pl.concat([self._partials.of_rows(frame.filter(part)) for part in (is_low, ~is_low)])


class _OpenPartials:
    """The partial rows of an epoch. They are merged as they come, so that memory follows the number of keys."""

    def __init__(self, partials: Partials) -> None:
        self._merge = by_watermark(partials.merge)
        self._frames: list[pl.DataFrame] = []
        self._new_rows = 0
        """Since they were last merged."""
        self._merged_rows = 0

    def add(self, rows: pl.DataFrame) -> None:
        self._frames.append(rows)
        self._new_rows += rows.height
        if self._new_rows > max(OPEN_ROWS_MIN, OPEN_RATIO * self._merged_rows):
            # Before the barrier comes, which would have to wait for it.
            merged = self._merged()
            self._frames, self._new_rows, self._merged_rows = [merged], 0, merged.height

    def drain(self) -> pl.DataFrame | None:
        """Give all of them merged, and forget them; None: there are none."""
        merged = self._merged() if self._frames else None
        self._frames, self._new_rows, self._merged_rows = [], 0, 0
        return merged

    def _merged(self) -> pl.DataFrame:
        rows = pl.concat(self._frames)
        return self._merge(rows).select(rows.columns)

    def __len__(self) -> int:
        return self._merged_rows + self._new_rows


class RunningAggregate(Operator):
    """One row per key over all its rows so far, emitted again when it has changed."""

    def __init__(self, partials: Partials, *, combined: bool, at_barriers: bool, state: StateBackend) -> None:
        """`at_barriers`: results are emitted once per epoch; else with every batch, for pipelines without exactly-once."""
        self._partials = partials
        self._combined = combined
        self._at_barriers = at_barriers
        self._table = state.table(partials.state_key, schema=partials.schema)
        self._open = _OpenPartials(partials)

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:  # noqa: ARG002 - without windows no row is late
        self._open.add(frame if self._combined else self._partials.of_rows(frame))
        return [] if self._at_barriers else self._emit_changed()

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - results do not wait for time
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        return self._emit_changed()

    def states(self) -> Mapping[str, State]:
        return {"totals": self._table}

    def _emit_changed(self) -> Emits:
        changed = self._open.drain()
        if changed is None:
            return []
        known = self._table.get(changed.select(self._partials.state_key))
        before = known.filter(pl.col(FOUND)).select(changed.columns)
        if before.height:
            changed = self._partials.merge(pl.concat([before, changed]))
        self._table.put(changed)
        return [Emit(self._partials.finish(changed).with_columns(pl.lit(UPSERT).alias(OP)))]


def crossing_schema(partials: Partials) -> Schema:
    """The columns of partial rows as they cross. Raises `SchemaError` where one of them has no type that may."""
    names = _crossing_names(partials)
    return Schema(
        tuple((names.get(name, name), DataType.from_polars(_signed(kind))) for name, kind in partials.schema.items())
    )


def _crossing_names(partials: Partials) -> dict[str, str]:
    return {ROWS: f"{ROWS}_{partials.meaning}"}


class EpochCombine(Operator):
    """Merges the partial rows of an epoch. Never has state at a barrier."""

    def __init__(self, partials: Partials) -> None:
        self._names = _crossing_names(partials)
        self._crossing = crossing_schema(partials).polars
        self._open = _OpenPartials(partials)
        self._partly = _OpenPartials(partials)
        """Those for which some windows were closed, with `ROW_WATERMARK`."""

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        (self._partly if late else self._open).add(frame)
        return []

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - windows close at the center
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        found = ((self._open.drain(), False), (self._partly.drain(), True))
        return [
            Emit(_cast(rows.rename(self._names), self._crossing), late=late) for rows, late in found if rows is not None
        ]

    def states(self) -> Mapping[str, State]:
        return {}


class Merging(Operator):
    """An aggregate whose partial rows have crossed: brings them into the form that it keeps."""

    def __init__(self, aggregate: Operator, partials: Partials) -> None:
        self._aggregate = aggregate
        self._kept = partials.schema
        self._names = {crossing: name for name, crossing in _crossing_names(partials).items()}

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        rows = frame.rename(self._names).select(*self._kept, *([ROW_WATERMARK] if late else []))
        return self._aggregate.on_batch(_cast(rows, self._kept), late=late)

    def on_watermark(self, watermark_us: int) -> Emits:
        return self._aggregate.on_watermark(watermark_us)

    def on_barrier(self, moment: Moment) -> Emits:
        return self._aggregate.on_barrier(moment)

    def clock_due_us(self) -> int | None:
        return self._aggregate.clock_due_us()

    def states(self) -> Mapping[str, State]:
        return self._aggregate.states()


def _signed(kind: pl.DataType) -> pl.DataType:
    if isinstance(kind, pl.List):
        return pl.List(_signed(kind.inner))  # type: ignore[arg-type]  # an instance, as in every schema of a frame
    return pl.Int8() if kind == pl.UInt8() else kind  # levels of a sketch: there are fewer than 64


def _cast(frame: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    changed = {name: kind for name, kind in schema.items() if frame.schema[name] != kind}
    return frame.cast(changed) if changed else frame  # type: ignore[arg-type]  # names to types
