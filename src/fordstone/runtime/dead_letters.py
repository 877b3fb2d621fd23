"""Dead letters: input that is not a row, kept with its place and the reason, or a reason to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import polars as pl
from polars import selectors

from fordstone.connectors.base import Rejected
from fordstone.errors import SourceError
from fordstone.operators.base import ROW_ID
from fordstone.plan import plan as p

DEAD_LETTERS: Final = "dead-letters/"
"""Begins the name of the hidden sink that takes what a source could not read. No sink of a user's has such a name."""
DEAD_LETTER_SCHEMA: Final = {"partition": pl.String, "position": pl.Int64, "reason": pl.String, "text": pl.String}
TEXT_CHARS_MAX: Final = 4096
SHOWN_CHARS_MAX: Final = 200


class Outward(Protocol):
    """Takes dead letters out of the task."""

    def take(self, frame: pl.DataFrame) -> None: ...


class DeadLetters:
    """What one source task could not read. Released with the epoch, so each is kept exactly once."""

    def __init__(self, source: p.Source, outlet: Outward) -> None:
        self.rows = 0
        self._source = source
        self._outlet = outlet

    def take(self, partition: str, rejected: Sequence[Rejected]) -> None:
        """Keep them; raises `SourceError` instead where the source says on_error='fail'."""
        if not rejected:
            return
        if self._source.on_error == "fail":
            first = rejected[0]
            raise SourceError(
                f"source {self._source.name}: {partition} at position {first.position} is not a row: {first.reason}.\n"
                f"  {first.text[:SHOWN_CHARS_MAX]}\nMend the input, or use on_error='keep' to set such rows aside."
            )
        self.rows += len(rejected)
        rows = [(partition, row.position, row.reason, row.text[:TEXT_CHARS_MAX]) for row in rejected]
        self._outlet.take(pl.DataFrame(rows, schema=DEAD_LETTER_SCHEMA, orient="row"))

    def take_timeless(self, partition: str, position: int, frame: pl.DataFrame) -> None:
        """Keep rows whose time is null or absurd. `position` is the end of what was read with them: the nearest place that is known."""
        reason = f"column {self._source.time} (time=) is null or out of range"
        # Times as plain numbers: one that is out of range cannot be spelt as a date.
        plain = frame.drop(ROW_ID, strict=False).with_columns(selectors.datetime().cast(pl.Int64))
        texts = plain.write_ndjson().splitlines()
        self.take(partition, [Rejected(position=position, text=text, reason=reason) for text in texts])
