"""Sources and sinks in memory, for tests and notebooks.

The spec that goes into a plan carries the live object beside its fields, not among them: the plan's JSON says only
`memory`, and a plan read back from JSON cannot be run, which the error explains. Positions are row numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.base import (
    Capability,
    Chunk,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    LiveSpec,
    OpenContext,
    Reader,
    Rejected,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
    live_of,
)
from fordstone.errors import ConfigError, SchemaError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position

Row = Mapping[str, Any] | Sequence[Any]
"""A row by names, or its values in the schema's order. Times may be ISO-8601 text."""
Rows = pl.DataFrame | Sequence[Row]
_T = TypeVar("_T")
_UNFIT = (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError)
"""What Polars raises for a value that does not fit its column."""


def memory(live: MemorySource | MemorySink | Sequence[Rows]) -> ConnectorSpec:
    """A connector to an object in this process. A plain list of partitions makes a `MemorySource` of them."""
    if not isinstance(live, MemorySource | MemorySink):
        live = MemorySource(live)
    return LiveSpec.around(live, kind="memory")


class MemorySource:
    """Partitions of rows that a test holds in its hand. May be added to and ended while it is read, from any thread."""

    def __init__(self, partitions: Sequence[Rows] = ()) -> None:
        self._lock = threading.Lock()
        self._pieces: list[list[Rows]] = []
        self._ended: list[bool] = []
        for rows in partitions:
            self.append(self.add_partition(), rows)

    def add_partition(self) -> int:
        """Begin another partition and give its number."""
        with self._lock:
            self._pieces.append([])
            self._ended.append(False)
            return len(self._pieces) - 1

    def append(self, partition: int, rows: Rows) -> None:
        with self._lock:
            if self._ended[partition]:
                raise ConfigError(f"memory partition {partition} has ended: rows can no longer be appended.")
            self._pieces[partition].append(rows if isinstance(rows, pl.DataFrame) else list(rows))

    def end(self, partition: int | None = None) -> None:
        """Say that nothing more will come in a partition, or in all of them."""
        with self._lock:
            for number in range(len(self._ended)) if partition is None else (partition,):
                self._ended[number] = True

    def partition_count(self) -> int:
        with self._lock:
            return len(self._pieces)

    def pieces(self, partition: int, first: int) -> tuple[list[Rows], bool]:
        """What was appended from the `first`-th piece on, and whether the partition has ended."""
        with self._lock:
            return self._pieces[partition][first:], self._ended[partition]


class MemorySink:
    """Keeps what comes: `released` by epoch, once; `written` in order. A run with another state, or none, clears it first."""

    def __init__(self) -> None:
        self.released: dict[int, pl.DataFrame] = {}
        self.written: list[pl.DataFrame] = []
        self.stream: SinkStream | None = None
        self.repeated = 0
        """How many releases came for an epoch that was there already."""

    def clear(self) -> None:
        """Forget all rows."""
        self.released.clear()
        self.written.clear()
        self.repeated = 0

    def frames(self) -> list[pl.DataFrame]:
        return [*(self.released[epoch] for epoch in sorted(self.released)), *self.written]

    def rows(self) -> pl.DataFrame:
        """All rows: released ones in epoch order, then written ones."""
        frames = [frame for frame in self.frames() if frame.height or frame.width]
        if frames:
            return pl.concat(frames, how="diagonal")
        return self.stream.schema.empty() if self.stream is not None else pl.DataFrame()


class MemoryKind(ConnectorKind):
    """The kind `memory`."""

    capabilities = frozenset({Capability.IN_PROCESS})

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        del context
        return _OpenSource(_live(spec, MemorySource), options)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        del context
        return _OpenSink(_live(spec, MemorySink), stream)


def _live(spec: ConnectorSpec, kind: type[_T]) -> _T:
    live = live_of(spec)
    if live is None:
        raise ConfigError(
            "connector 'memory': its rows live only in the process that declared the pipeline, and this plan was read back from JSON.\n"
            "Use files(...) or another connector for what is stored or deployed."
        )
    if not isinstance(live, kind):
        raise ConfigError(
            f"connector 'memory': it carries a {type(live).__name__}, but a {kind.__name__} is needed here."
        )
    return live


class _OpenSource(Source):
    def __init__(self, live: MemorySource, options: SourceOptions) -> None:
        self._live = live
        self._options = options

    def partitions(self) -> Sequence[PartitionId]:
        return [PartitionId(f"memory-{number:06d}") for number in range(self._live.partition_count())]

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        if partition not in self.partitions():
            raise SourceError(
                f"memory source: there is no partition {partition!r}; there are {self._live.partition_count()}."
            )
        return _MemoryReader(
            self._live, int(partition.removeprefix("memory-")), position, self._options, with_positions=with_positions
        )


class _MemoryReader(Reader):
    """Turns each appended piece into a frame once; hands out slices. Drops what was read: readers never go back."""

    def __init__(
        self, live: MemorySource, number: int, position: int, options: SourceOptions, *, with_positions: bool
    ) -> None:
        self._live = live
        self._number = number
        self._position = position
        self._schema = options.schema
        self._bounded = options.bounded
        self._with_positions = with_positions
        self._made: deque[_Made] = deque()
        self._taken = 0
        """How many pieces were taken over from the source; `_made` holds those of them that are not read yet."""
        self._rows = 0

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        ended = self._take_new()
        if self._position > self._rows:
            raise SourceError(
                f"memory partition {self._number} has {self._rows} rows, but reading should continue at {self._position}.\n"
                f"The source was replaced by a shorter one: start with an empty state directory."
            )
        stop = min(self._rows, self._position + max(1, rows_max), self._rows if until is None else until)
        at_end = ended and stop >= self._rows
        if stop <= self._position and not at_end:
            return None
        parts = self._parts(stop)
        self._position = max(stop, self._position)
        return Chunk(
            frame=pl.concat([part.frame for part in parts]) if parts else self._schema.empty(),
            position=Position(self._position),
            row_positions=_positions(parts) if self._with_positions else None,
            rejected=tuple(rejected for part in parts for rejected in part.rejected),
            ended=at_end,
        )

    def close(self) -> None:
        self._made.clear()

    def _take_new(self) -> bool:
        pieces, ended = self._live.pieces(self._number, self._taken)
        for rows in pieces:
            made = _Made.of(rows, self._rows, self._schema)
            self._made.append(made)
            self._taken += 1
            self._rows += made.count
        return ended or self._bounded

    def _parts(self, stop: int) -> list[_Made]:
        """What lies between the position and `stop`. Costs what it gives, however much was appended in all."""
        parts = []
        while self._made and self._made[0].first < stop:
            made = self._made[0]
            if made.first + made.count > self._position:
                parts.append(made.slice(self._position, stop))
            if made.first + made.count > stop:
                break
            self._made.popleft()
        return parts


@dataclass(frozen=True, slots=True)
class _Made:
    """One piece as a frame: the good rows with their numbers, and the rejected ones."""

    first: int
    count: int
    frame: pl.DataFrame
    numbers: npt.NDArray[np.int64]
    rejected: tuple[Rejected, ...] = ()

    @classmethod
    def of(cls, rows: Rows, first: int, schema: Schema) -> _Made:
        numbers = np.arange(first, first + len(rows))
        if isinstance(rows, pl.DataFrame):
            return cls(first, len(rows), _fitted(rows, schema), numbers)
        records = [_record(row, schema) for row in rows]
        try:
            return cls(first, len(rows), pl.DataFrame(records, schema=schema.polars, orient="row"), numbers)
        except _UNFIT:
            return cls._row_by_row(records, first, schema)

    @classmethod
    def _row_by_row(cls, records: list[tuple[Any, ...]], first: int, schema: Schema) -> _Made:
        frames, numbers, rejected = [schema.empty()], [], []
        for number, record in enumerate(records, first):
            try:
                frames.append(pl.DataFrame([record], schema=schema.polars, orient="row"))
                numbers.append(number)
            except _UNFIT as error:
                rejected.append(Rejected(position=number, text=repr(record), reason=str(error).partition("\n")[0]))
        return cls(first, len(records), pl.concat(frames), np.array(numbers, dtype=np.int64), tuple(rejected))

    def slice(self, start: int, stop: int) -> _Made:
        """The rows from `start` to before `stop`, as far as they are here."""
        begin, end = np.searchsorted(self.numbers, (start, stop)).tolist()
        rejected = tuple(one for one in self.rejected if start <= one.position < stop)
        return _Made(start, stop - start, self.frame.slice(begin, end - begin), self.numbers[begin:end], rejected)


def _positions(parts: Sequence[_Made]) -> pl.Series:
    return pl.Series(np.concatenate([np.zeros(0, dtype=np.int64), *(part.numbers for part in parts)]))


def _fitted(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    if frame.schema == schema.polars:
        return frame
    missing = [name for name in schema if name not in frame.columns]
    if len(missing) == len(schema):
        raise SchemaError(f"memory source: the frame has columns {frame.columns}, none of the declared {list(schema)}.")
    columns = [pl.lit(None).alias(name) if name in missing else pl.col(name) for name in schema]
    try:
        return frame.select(columns).cast(schema.polars)
    except pl.exceptions.PolarsError as error:
        raise SchemaError(
            f"memory source: a frame does not have the declared types: {str(error).partition(chr(10))[0]}."
        ) from error


def _record(row: Row, schema: Schema) -> tuple[Any, ...]:
    if isinstance(row, Mapping):
        row = [row.get(name) for name in schema]
    if len(row) != len(schema):
        return tuple(row)  # rejected where it is turned into a frame
    return tuple(
        _time(value) if schema[name].name == "timestamp" else value for name, value in zip(schema, row, strict=True)
    )


def _time(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return value
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    return value


class _OpenSink(Sink):
    def __init__(self, live: MemorySink, stream: SinkStream) -> None:
        self._live = live
        if live.stream is not None and live.stream.owner != stream.owner:
            live.clear()
        live.stream = stream

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        if epoch in self._live.released:
            self._live.repeated += 1
        else:
            self._live.released[epoch] = frame

    def write(self, frame: pl.DataFrame) -> None:
        self._live.written.append(frame)

    def close(self) -> None:
        """The rows stay with the `MemorySink`."""
