"""The last step below the cut: rows on their way to the center, each with the edge's word on whether it is late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from fordstone.model.schema import Schema
from fordstone.operators.operator import Emit, Emits, Stateless

LATE_MARK: Final = "__late"
"""A Boolean column beside the declared ones."""


class LetAcross(Stateless):
    """The declared columns in order, and whether the row is late. Partial rows have no such mark: none of them is."""

    def __init__(self, schema: Schema, *, hidden: Sequence[str], partial: bool) -> None:
        self._columns = [*schema, *hidden]
        self._partial = partial

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Mark, and drop what is empty."""
        out = self.apply(frame)
        if not self._partial:
            out = out.with_columns(pl.lit(late).alias(LATE_MARK))
        return [Emit(out, late=late)] if out.height else []

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows as they are declared."""
        return frame.select(self._columns)
