"""Fragments: partial aggregates of rows of a key that belong together by where they stand, not by an aligned window.

A fragment is a stretch of the rows of one key in order of time: rows that follow each other by less than a gap (sessions),
or a number of consecutive rows (count windows). The caller says which fragment each row is of, by number; the fragment then has the
key, the times of its first and last row, and what `Partials` keeps of its rows.

Leaves to the operators where stretches begin and end. Pure; may be used by any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from fordstone.lang.aggregates import Aggregate
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.partial import ONE, Partials, normalised_key, row_ids
from fordstone.operators.base import Functions
from fordstone.operators.row_order import Numbers
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START, EventTime

FRAGMENT: Final = "__fragment"
"""Which fragment a row or partial row is of: numbers from 0 on that mean nothing outside of one call."""
FIRST: Final = "__first"
LAST: Final = "__last"
_TIMESTAMP: Final = pl.Datetime("us", "UTC")


class Fragments:
    """How one aggregate step makes, merges and finishes fragments."""

    def __init__(
        self,
        keys: Sequence[str],
        aggregates: Sequence[Aggregate],
        schema: Schema,
        *,
        time: EventTime,
        step: str = "",
        with_id: bool = False,
        functions: Functions | None = None,
    ) -> None:
        """`schema` is the input's. `with_id`: results carry ids that a replay gives again. `functions`: as `Partials` has it."""
        numbered = Schema((*schema.columns, (FRAGMENT, DataType("bigint"))))
        self._partials = Partials((FRAGMENT,), aggregates, numbered, time=time, step=step, functions=functions)
        self.rows = schema
        """The columns of rows."""
        self.time = time
        self.read = tuple(dict.fromkeys(name for aggregate in aggregates for name in aggregate.columns))
        """The columns that the aggregates read."""
        self._key_columns = [normalised_key(name, schema[name]) for name in keys]
        self._floats = any(schema[name].is_float for name in keys)
        self._step = step
        self._with_id = with_id
        self.keys = tuple(keys)
        self.state_key = self.keys or (ONE,)
        self.key_types = {name: schema[name].polars for name in keys} or {ONE: pl.Int8()}
        self.values = self._partials.value_columns()
        """What is kept of rows, beside their key and times."""
        self.schema: dict[str, pl.DataType] = (
            self.key_types
            | {FIRST: pl.Int64(), LAST: pl.Int64()}
            | {name: self._partials.schema[name] for name in self.values}
        )
        """The columns of a fragment."""

    def keys_of(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The key of each row; equal keys look equal."""
        if not self.keys:
            return pl.DataFrame({ONE: pl.repeat(0, frame.height, dtype=pl.Int8, eager=True)})
        # A query takes longer than the rest, on small batches.
        return frame.select(self._key_columns) if self._floats else frame[list(self.keys)]

    def of_rows(self, frame: pl.DataFrame, numbers: Numbers) -> pl.DataFrame:
        """What is kept of rows: one partial row for each fragment number, by number. `numbers` are all from 0 on."""
        return self._by_number(self._partials.of_rows(_numbered(frame, numbers)))

    def merge(self, values: pl.DataFrame, numbers: Numbers) -> pl.DataFrame:
        """One partial row for each fragment number, by number, of partial rows (other columns are passed over)."""
        kept = pl.DataFrame([values.get_column(name) for name in self.values])
        return self._by_number(self._partials.merge(_numbered(kept, numbers)))

    def _by_number(self, partials: pl.DataFrame) -> pl.DataFrame:
        order = partials.get_column(FRAGMENT)
        kept = pl.DataFrame([partials.get_column(name) for name in self.values])
        if order.is_sorted():
            return kept
        # Where each number stands: quicker than to sort, for they are all there.
        places = np.empty(order.len(), dtype=np.int64)
        places[order.to_numpy()] = np.arange(order.len())
        return kept[places]

    def finish(
        self, values: pl.DataFrame, *, keys: pl.DataFrame, starts: Numbers, ends: Numbers, windows: Numbers
    ) -> pl.DataFrame:
        """The result rows of merged partial rows. `windows`: a value that identifies a window of its key, the same on every replay."""
        times = [
            pl.Series(WINDOW_START, starts).cast(_TIMESTAMP),
            pl.Series(WINDOW_END, ends).cast(_TIMESTAMP),
        ]
        rows = pl.DataFrame([*(keys.get_column(name) for name in self.keys), *times, *self._results(values)])
        if not self._with_id:
            return rows
        return rows.with_columns(
            row_ids(self._step, keys.with_columns(pl.Series(FRAGMENT, windows)), self.keys, FRAGMENT)
        )

    def finish_running(self, fragments: pl.DataFrame) -> pl.DataFrame:
        """The result rows of fragments, without the bounds of a window."""
        keys = [fragments.get_column(name) for name in self.keys]
        return pl.DataFrame([*keys, *self._results(fragments)])

    def _results(self, values: pl.DataFrame) -> list[pl.Series]:
        kept = pl.DataFrame([values.get_column(name) for name in self.values])
        return self._partials.finish(_numbered(kept, np.arange(kept.height))).get_columns()[1:]


def _numbered(frame: pl.DataFrame, numbers: Numbers) -> pl.DataFrame:
    """The frame with fragment numbers. Where they ascend, grouping by them is a matter of slices."""
    series = pl.Series(FRAGMENT, numbers)
    ascend = bool((numbers[1:] >= numbers[:-1]).all())
    return frame.hstack([series.set_sorted() if ascend else series])
