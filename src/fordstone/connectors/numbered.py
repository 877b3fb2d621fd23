"""A source over rows that have numbers, such as those of a table that only grows: all but the query for rows is done here.

The number of a row is its position. What is asked of the system is in `NumberedSource`: the rows of a range of numbers, and where they end now.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

import polars as pl

from fordstone.connectors.base import Chunk, Reader, Rejected, Source, SourceOptions
from fordstone.errors import SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position

NO_END: Final = 1 << 62
TEXT_MAX: Final = 4096
"""How many characters of a rejected row are kept."""
_UNFIT: Final = (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError)
_1970: Final = datetime(1970, 1, 1, tzinfo=UTC)
NumberedRow: TypeAlias = tuple[Any, ...]
"""The number of a row, and the values of its columns in the order of the schema. A time is a `datetime`, or microseconds since 1970."""


class NumberedSource(Source):
    """Partitions whose rows have numbers of 0 or more.

    The system must keep two promises. A row keeps its number and its values. And no row appears below a number that could be read already, as those of
    concurrent transactions do in many databases (their numbers are drawn before they commit). Then leave the newest numbers out, in `rows` and in
    `end`, until they are certain.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.schema = options.schema
        self.bounded = options.bounded

    @abstractmethod
    def rows(self, partition: PartitionId, first: int, end: int, rows_max: int) -> Sequence[NumberedRow]:
        """Return the first `rows_max` rows with numbers from `first` up to, and without, `end`, in the order of their numbers.

        Must not wait for rows. It may be called by several threads, each for partitions of its own.
        """

    @abstractmethod
    def end(self, partition: PartitionId) -> int:
        """Return one more than the number of the last row that is there now; 0: there is none. Where bounded input ends."""

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        return NumberedReader(self, partition, position, with_positions=with_positions)


class NumberedReader(Reader):
    """Reads one partition."""

    def __init__(self, source: NumberedSource, partition: PartitionId, position: int, *, with_positions: bool) -> None:
        self._source = source
        self._partition = partition
        self._position = position
        self._with_positions = with_positions
        self._end = source.end(partition) if source.bounded else None

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        if until is not None and self._position >= until:
            return None
        stop = min(NO_END if limit is None else limit for limit in (until, self._end))
        found = self._source.rows(self._partition, self._position, stop, rows_max) if self._position < stop else ()
        if not found and stop == until:
            raise SourceError(
                f"{self._partition}: row {until - 1} was there when this read was planned, and is gone. A table that is read as a stream may grow; "
                "rows must not be removed before they were read."
            )
        if not found and self._end is None:
            return None
        self._position = found[-1][0] + 1 if found else max(self._position, stop)
        frame, numbers, rejected = _frame_of(found, self._source.schema)
        return Chunk(
            frame=frame,
            position=Position(self._position),
            row_positions=numbers if self._with_positions else None,
            rejected=rejected,
            ended=self._end is not None and self._position >= self._end,
        )

    def close(self) -> None:
        """The connection is the source's."""


def _frame_of(found: Sequence[NumberedRow], schema: Schema) -> tuple[pl.DataFrame, pl.Series, tuple[Rejected, ...]]:
    """The rows as a frame with their numbers, and those whose values do not fit the schema."""
    try:
        return _typed(found, schema), pl.Series([row[0] for row in found], dtype=pl.Int64), ()
    except _UNFIT:
        pass
    frames, numbers, rejected = [schema.empty()], [], []
    for row in found:
        try:
            frames.append(_typed([row], schema))
            numbers.append(row[0])
        except _UNFIT as error:
            why = f"row {row[0]} does not fit the schema: {str(error).partition(chr(10))[0]}"
            rejected.append(Rejected(position=row[0], text=str(row[1:])[:TEXT_MAX], reason=why))
    return pl.concat(frames), pl.Series(numbers, dtype=pl.Int64), tuple(rejected)


def _typed(rows: Sequence[NumberedRow], schema: Schema) -> pl.DataFrame:
    columns = []
    for at, (name, kind) in enumerate(schema.items(), start=1):
        values = [row[at] for row in rows]
        if kind.name == "timestamp":
            columns.append(pl.Series(name, map(_micros, values), dtype=pl.Int64).cast(kind.polars))
        else:
            columns.append(pl.Series(name, values, dtype=kind.polars))
    return pl.DataFrame(columns)


def _micros(value: Any) -> Any:
    if not isinstance(value, datetime):
        return value
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    return (aware - _1970) // timedelta(microseconds=1)
