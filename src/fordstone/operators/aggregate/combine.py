"""Partial rows on their way to the center: one for each key and window (or pane) that changed in an epoch (rule 9).

`EpochCombine` stands below the cut. It merges as it takes, so that its memory follows the number of keys and not that of
rows; at a barrier it gives out all it has and forgets, so that there is nothing to keep in a checkpoint. What merges the
partial rows at the center is the same operator that takes rows at the edge; `Merging` only brings them into its form.

Partial rows cross as columns of our types (`crossing_schema`): small whole numbers without sign, which sketches count their
levels with, travel with one. The column that counts rows has a digest of what they say in its name: nodes and center may for a
while run two versions of a pipeline, and then columns are missing, rather than sums of one thing added to those of another.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.partial import ROWS, Partials
from fordstone.operators.aggregate.running import OPEN_RATIO, OPEN_ROWS_MIN, Combine
from fordstone.operators.base import LATE, Emit, Emits, Moment, Operator
from fordstone.state.base import State

_SIGNED: Mapping[pl.DataType, pl.DataType] = {pl.UInt8(): pl.Int8()}
"""Levels of a sketch: there are fewer than 64."""


def crossing_schema(partials: Partials) -> Schema:
    """The columns of partial rows as they cross. Raises `SchemaError` where one of them has no type that may."""
    names = _crossing_names(partials)
    return Schema(
        tuple((names.get(name, name), DataType.from_polars(_signed(kind))) for name, kind in partials.schema.items())
    )


def _crossing_names(partials: Partials) -> dict[str, str]:
    return {ROWS: f"{ROWS}_{partials.meaning}"}


class EpochCombine(Operator):
    """Merges the rows of an epoch into partial rows. Never has state at a barrier."""

    def __init__(self, partials: Partials, *, rows: Combine | None = None) -> None:
        """`rows`: makes partial rows of the input; None: a feeder has done so before the shuffle."""
        self._partials = partials
        self._rows = rows
        self._names = _crossing_names(partials)
        self._crossing = crossing_schema(partials).polars
        self._open: list[pl.DataFrame] = []
        self._open_rows = 0
        """Since they were last merged."""
        self._merged_rows = 0

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Take rows in. Late ones, and those without a time, leave on the late port where there are windows."""
        if self._rows is None:
            self._take(frame)
            return []
        out: Emits = []
        for emit in self._rows.on_batch(frame, late=late):
            if emit.port == LATE:
                out.append(emit)
            else:
                self._take(emit.frame)
        return out

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - windows close at the center
        """Nothing waits for time: an epoch's rows cross with the epoch."""
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - results do not wait for the clock
        """One partial row for each key and window of the epoch."""
        if not self._open:
            return []
        merged = self._merged()
        self._open, self._open_rows, self._merged_rows = [], 0, 0
        return [Emit(_cast(merged.rename(self._names), self._crossing))]

    def states(self) -> Mapping[str, State]:
        """None."""
        return {}

    def rows_held(self) -> int:
        """How many partial rows are in memory."""
        return self._merged_rows + self._open_rows

    def _take(self, partials: pl.DataFrame) -> None:
        self._open.append(partials)
        self._open_rows += partials.height
        if self._open_rows > max(OPEN_ROWS_MIN, OPEN_RATIO * self._merged_rows):
            merged = self._merged()
            self._open, self._open_rows, self._merged_rows = [merged], 0, merged.height

    def _merged(self) -> pl.DataFrame:
        return self._partials.merge(pl.concat(self._open)).select(list(self._partials.schema))


class Merging(Operator):
    """An aggregate whose partial rows have crossed: brings them into the form that it keeps."""

    def __init__(self, aggregate: Operator, partials: Partials) -> None:
        self._aggregate = aggregate
        self._kept = partials.schema
        self._names = {crossing: name for name, crossing in _crossing_names(partials).items()}

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Take partial rows in. Those of windows that have closed leave on the late port."""
        rows = frame.rename(self._names).select(list(self._kept))
        return self._aggregate.on_batch(_cast(rows, self._kept), late=late)

    def on_watermark(self, watermark_us: int) -> Emits:
        """As the aggregate does."""
        return self._aggregate.on_watermark(watermark_us)

    def on_barrier(self, moment: Moment) -> Emits:
        """As the aggregate does."""
        return self._aggregate.on_barrier(moment)

    def states(self) -> Mapping[str, State]:
        """Those of the aggregate: state does not tell whether rows or partial rows came."""
        return self._aggregate.states()


def _signed(kind: pl.DataType) -> pl.DataType:
    if isinstance(kind, pl.List):
        return pl.List(_signed(kind.inner))  # type: ignore[arg-type]  # an instance, as in every schema of a frame
    return _SIGNED.get(kind, kind)


def _cast(frame: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    changed = {name: kind for name, kind in schema.items() if frame.schema[name] != kind}
    return frame.cast(changed) if changed else frame  # type: ignore[arg-type]  # names to types
