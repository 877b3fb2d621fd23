"""Sources and sinks in memory, for tests and notebooks.

The spec that goes into a plan carries the live object beside its fields, not among them: the plan's JSON says only
`memory`, and a plan read back from JSON cannot be run, which the error explains. Positions are row numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.base import (
    About,
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
from fordstone.connectors.compare import same_rows
from fordstone.connectors.files.rows import latest_rows
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, NotInstalledError, SchemaError, SinkError, SourceError
from fordstone.lang.choices import did_you_mean
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.values import UnfitError, frame_of_columns
from fordstone.plan.ids import PartitionId, Position

Row = Mapping[str, Any] | Sequence[Any]
"""A row by names, or its values in the schema's order. Times may be ISO-8601 text."""
Rows = pl.DataFrame | Sequence[Row]
_T = TypeVar("_T")
_UNFIT = (pl.exceptions.PolarsError, TypeError, OverflowError, ValueError)
"""What Polars raises for a value that does not fit its column."""
_SHOWN_MAX: Final = 80
_IDENTITY_ROWS: Final = 64
"""Number of rows before a position by which other rows are noticed."""
_A_SOURCE: Final = "that is no source of rows. Give a list of rows, a frame of Polars, pandas or Arrow, a list of partitions, or a generator."


def memory(live: object) -> ConnectorSpec:
    """Rows of this process, as a source: `memory([{"n": 1}, {"n": 2}])`, `memory(frame)`, `memory(generator)`.

    A source is made of a list of rows, a frame (Polars, pandas, Arrow), a list of partitions (each a list of rows or a frame), or a generator
    or async generator of rows or frames. A row is a mapping by names, or a tuple in the schema's order. A `MemorySource` is
    filled while it is read; a `MemorySink` keeps what it is given.
    """
    if not isinstance(live, MemorySource | MemorySink):
        live = _source_of(live)
    return LiveSpec.around(live, kind="memory")


def _source_of(given: object) -> MemorySource:
    if (frame := frame_of(given)) is not None:
        return MemorySource([frame])
    if isinstance(given, Iterator | AsyncIterator):
        from fordstone.connectors.feed import FedSource  # noqa: PLC0415 - it is a memory source

        return FedSource(given)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        hint = " Call it: memory(rows())." if callable(given) else ""
        raise ConfigError(f"memory({_short(given)}): {_A_SOURCE}{hint}")
    items = list(given)
    rows = [_is_row(item) for item in items]
    if items and all(rows):
        return MemorySource([items])
    if any(rows):
        raise ConfigError(
            f"memory([...]): item {rows.index(True)} is a row, and item {rows.index(False)} is not. Give a list of rows, or a list of "
            "partitions, each of which is a list of rows or a frame."
        )
    return MemorySource(items)


def frame_of(given: object) -> pl.DataFrame | None:
    """A frame of any library as one of Polars; None if it is none."""
    if isinstance(given, pl.DataFrame):
        return given
    if isinstance(given, pl.LazyFrame):
        return given.collect()
    if isinstance(given, pl.Series):
        return None
    library = type(given).__module__.partition(".")[0]
    try:
        if library == "pandas" and hasattr(given, "columns"):
            return pl.from_pandas(given)
        if hasattr(given, "__arrow_c_stream__"):
            return pl.DataFrame(given)
    except ImportError as error:
        raise NotInstalledError(
            f"memory({_short(given)}): reading a frame of {library} needs pyarrow. Install it: pip install pyarrow."
        ) from error
    return None


def rows_of_item(item: object) -> Rows:
    """What a generator gives: a row, a list of rows, or a frame."""
    return [item] if _is_row(item) else checked_rows(item, "memory(generator)")  # type: ignore[list-item]  # it is a row


def checked_rows(given: object, where: str) -> Rows:
    """A frame, or a list of rows, as they are kept."""
    if (frame := frame_of(given)) is not None:
        return frame
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigError(f"{where}: {_short(given)} is neither a list of rows nor a frame.")
    rows = list(given)
    for number, row in enumerate(rows):
        if isinstance(row, str | bytes) or not isinstance(row, Mapping | Sequence):
            raise ConfigError(
                f"{where}: row {number} is {_short(row)}. A row is a mapping such as {{'device': 'a'}}, or a tuple of values."
            )
    return rows


def _is_row(item: object) -> bool:
    """Whether an item of a list is a row; else it is a partition. A tuple is a row, unless it begins with one."""
    return isinstance(item, Mapping) or (
        isinstance(item, tuple) and bool(item) and not isinstance(item[0], Mapping | tuple)
    )


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


def inferred_schema(rows: Rows) -> dict[str, str]:
    """The columns and types of a frame or of rows by name."""
    if isinstance(rows, pl.DataFrame):
        frame = rows
    elif not rows:
        raise ConfigError("a table without rows has no columns. Add schema=.")
    else:
        frame = _frame_of_records([row for row in rows if isinstance(row, Mapping)], len(rows))
    return {name: str(DataType.from_polars(kind)) for name, kind in frame.schema.items()}


def _frame_of_records(records: Sequence[Mapping[str, Any]], count: int) -> pl.DataFrame:
    if len(records) < count:
        raise ConfigError("rows without names have no columns of their own. Add schema=.")
    try:
        frame = pl.DataFrame(records, infer_schema_length=None)
    except _UNFIT as error:
        raise ConfigError(f"the rows are not of one kind: {error}. Add schema=.") from error
    for name, kind in frame.schema.items():
        # Polars turns numbers into text where it finds both.
        if kind == pl.String and not all(isinstance(record.get(name), str | None) for record in records):
            raise ConfigError(f"the rows are not of one kind: column {name!r} has text and other values. Add schema=.")
    return frame


class MemorySource:
    """Partitions of rows that a test holds in its hand. May be added to and ended while it is read, from any thread.

    A bounded run reads what is there at its start. With `live=True` it reads to the end: until `end` is called. An unbounded run ends when
    `end` was called for all partitions of all its sources.
    """

    def __init__(self, partitions: Iterable[object] = (), *, live: bool = False) -> None:
        self.live = live
        self._lock = threading.Lock()
        self._pieces: list[list[Rows]] = []
        self._ended: list[bool] = []
        self._all_ended = False
        for rows in partitions:
            self.append(self.add_partition(), rows)

    @property
    def replays(self) -> bool:
        """Whether a later run finds the same rows."""
        return True

    def opened(self, position: int) -> tuple[int, int]:
        """Called by a reader that begins at `position`. Returns the first piece that is kept, and its first row."""
        del position
        return 0, 0

    def closed(self) -> None:
        """Called when a reader is closed."""

    def acknowledge(self, position: int) -> None:
        """Called when no reader of this run will begin before a position again. The rows stay, for later runs."""

    def inferred(self) -> dict[str, str]:
        """The columns and types of the rows that are there."""
        found = self._there()
        if not found:
            raise ConfigError("no rows are there yet to see their columns. Add schema=.")
        return inferred_schema(found[0])

    def check(self, schema: Schema) -> None:
        """Raise if a row that is there does not fit the schema."""
        self.check_names(schema)
        for rows in self._there():
            if rejected := _Made.of(rows, 0, schema).rejected:
                first = rejected[0]
                count = f" It is the first of {len(rejected)} rows that do not fit." if len(rejected) > 1 else ""
                raise SchemaError(f"row {first.position} does not fit the schema: {first.reason}.{count}")

    def check_names(self, schema: Schema) -> None:
        """Raise if none of the rows that are there has a column of the schema."""
        names: dict[str, None] = {}
        for rows in self._there():
            if isinstance(rows, pl.DataFrame):
                names |= dict.fromkeys(rows.columns)
                continue
            for row in rows:
                names |= dict.fromkeys(row if isinstance(row, Mapping) else schema)
        for name in schema:
            if names and name not in names:
                hint = did_you_mean(name, names) or f"The rows have: {', '.join(map(str, names))}."
                raise SchemaError(f"no row has the column {name!r}. {hint}")

    def _there(self) -> list[Rows]:
        with self._lock:
            return [rows for pieces in self._pieces for rows in pieces if len(rows)]

    def add_partition(self) -> int:
        """Begin another partition and give its number."""
        with self._lock:
            if self._all_ended:
                raise ConfigError("the memory source has ended: partitions can no longer be added.")
            self._pieces.append([])
            self._ended.append(False)
            return len(self._pieces) - 1

    def append(self, partition: int, rows: object) -> None:
        """Add rows to a partition: a list of rows, or a frame."""
        checked = checked_rows(rows, f"memory partition {partition}")
        with self._lock:
            if self._ended[partition]:
                raise ConfigError(f"memory partition {partition} has ended: rows can no longer be appended.")
            self._pieces[partition].append(checked)

    def end(self, partition: int | None = None) -> None:
        """Say that nothing more will come in a partition; without a number, in the whole source, which then takes no new partition."""
        with self._lock:
            self._all_ended = self._all_ended or partition is None
            for number in range(len(self._ended)) if partition is None else (partition,):
                self._ended[number] = True

    @property
    def ended(self) -> bool:
        """Whether nothing more will come at all: `end()` was called."""
        with self._lock:
            return self._all_ended

    def partition_count(self) -> int:
        with self._lock:
            return len(self._pieces)

    def row_count(self) -> int:
        """The number of rows of all partitions now."""
        with self._lock:
            return sum(len(rows) for pieces in self._pieces for rows in pieces)

    def pieces(self, partition: int, first: int) -> tuple[list[Rows], bool]:
        """What was appended from the `first`-th piece on, and whether the partition has ended."""
        with self._lock:
            return self._pieces[partition][first:], self._ended[partition]


class MemorySink:
    """Keeps what comes: `released` by epoch, once; `written` in order. A run that begins with nothing clears it first."""

    def __init__(self) -> None:
        self.released: dict[int, pl.DataFrame] = {}
        self.written: list[pl.DataFrame] = []
        self.stream: SinkStream | None = None
        self.repeated = 0
        """How many releases came for an epoch that was there already."""
        self.keeps_state = True
        """Whether the rows are those of runs with state."""
        self._nodes: dict[str, MemorySink] = {}

    def of_node(self, node: str) -> MemorySink:
        """The part for one of several nodes that run in this process, each with epochs of its own. Its rows are also rows of this sink."""
        return self._nodes.setdefault(node, MemorySink())

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Take in the rows of an epoch; called again for one that is there if it is unknown whether it was released."""
        if epoch not in self.released:
            self.released[epoch] = frame
            return
        there = self.released[epoch]
        if not (there.equals(frame) or same_rows(there, frame)):
            raise SinkError(
                f"the memory sink already has epoch {epoch}, with other rows than are released now. They are of another run: give this one a "
                "MemorySink of its own, or the state of that run. Nothing was changed."
            )
        self.repeated += 1

    def clear(self) -> None:
        """Forget all rows."""
        self.released.clear()
        self.written.clear()
        self.repeated = 0
        self._nodes.clear()

    def latest(self) -> pl.DataFrame:
        """The newest row of each key, without the keys that were deleted; all rows if none replaces another."""
        key = None if self.stream is None else self.stream.upsert_key
        return self.rows() if key is None else latest_rows(self.rows(), key)

    def to_pandas(self) -> Any:
        """All rows, as `rows`, in a pandas frame."""
        return to_pandas(self.rows())

    def frames(self) -> list[pl.DataFrame]:
        """The frames of `rows`."""
        own = [*(self.released[epoch] for epoch in sorted(self.released)), *self.written]
        return own + [frame for node in sorted(self._nodes) for frame in self._nodes[node].frames()]

    def rows(self) -> pl.DataFrame:
        """All rows: released ones in epoch order, then written ones; those of several nodes one node after the other."""
        frames = [frame for frame in self.frames() if frame.height or frame.width]
        if frames:
            return pl.concat(frames, how="diagonal")
        return self.stream.schema.empty() if self.stream is not None else pl.DataFrame()


def to_pandas(frame: pl.DataFrame) -> Any:
    """The frame as one of pandas, which is not among what Fordstone needs."""
    try:
        return frame.to_pandas()
    except ImportError as error:
        raise NotInstalledError(
            "to_pandas() needs pandas and pyarrow. Install them: pip install pandas pyarrow."
        ) from error


class MemoryKind(ConnectorKind):
    """The kind `memory`."""

    capabilities = frozenset({Capability.IN_PROCESS})
    about = About(
        summary="rows in this process, for notebooks and tests",
        source='memory([{"device": "a"}])',
        sink="memory(MemorySink())",
        guarantee="Exactly once within the process; what is in memory ends with it.",
        page="reference/connectors.md#memory",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        live = _live(spec, MemorySource)
        if context.keeps_state and not live.replays:
            raise ConfigError(
                "memory(generator): a generator can be read once, so no later run could resume from the state of this one. Run without "
                "state=, or put the rows into files."
            )
        return _OpenSource(live, options)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        return _OpenSink(_live(spec, MemorySink), stream, keeps_state=context.keeps_state)


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

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        for name, cut in cuts.items():
            # At most once, the position may be further than where the identity was taken.
            count = cut.identity.partition(":")[0]
            if count and self.identity(PartitionId(name), Position(int(count))) != cut.identity:
                raise SourceError(
                    f"memory source: {name} does not begin with the {count} rows that the state was made of, so it cannot be "
                    "continued with them. Run without state=, or with fresh=True."
                )

    def identity(self, partition: PartitionId, position: Position) -> str:
        number = int(partition.removeprefix("memory-"))
        if number >= self._live.partition_count():
            return ""
        pieces, _ = self._live.pieces(number, 0)
        return _identity(pieces, sum(map(len, pieces)), position, self._options.schema)

    def ended(self) -> bool:
        return self._live.ended

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        for cut in cuts.values():
            self._live.acknowledge(cut.position)


class _MemoryReader(Reader):
    """Turns each appended piece into a frame once; hands out slices. Drops what was read: readers never go back."""

    def __init__(
        self, live: MemorySource, number: int, position: int, options: SourceOptions, *, with_positions: bool
    ) -> None:
        self._live = live
        self._number = number
        self._position = position
        self._schema = options.schema
        self._bounded = options.bounded and not live.live
        self._with_positions = with_positions
        self._ended = False
        self._made: deque[_Made] = deque()
        self._taken, self._rows = live.opened(position)
        """How many pieces were taken over from the source, and their rows; `_made` holds those of them that are not read yet."""

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        if self._rows - self._position < max(1, rows_max):
            self._ended = self._take_new()
        if self._position > self._rows:
            raise SourceError(
                f"memory partition {self._number} has {self._rows} rows, but reading should continue at {self._position}.\n"
                f"The source was replaced by a shorter one: start with an empty state directory."
            )
        stop = min(self._rows, self._position + max(1, rows_max), self._rows if until is None else until)
        at_end = self._ended and stop >= self._rows
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

    def identity(self) -> str:
        if not self._live.replays:
            return ""
        pieces, _ = self._live.pieces(self._number, 0)
        return _identity(pieces[: self._taken], self._rows, self._position, self._schema)

    def close(self) -> None:
        self._made.clear()
        self._live.closed()

    def _take_new(self) -> bool:
        pieces, ended = self._live.pieces(self._number, self._taken)
        self._taken += len(pieces)
        for piece in _joined(pieces):
            made = _Made.of(piece, self._rows, self._schema)
            self._made.append(made)
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


def _joined(pieces: Sequence[Rows]) -> Iterator[Rows]:
    """The pieces, with lists of rows that follow each other as one list: rows that came one by one become one frame."""
    rows: list[Row] = []
    for piece in pieces:
        if not isinstance(piece, pl.DataFrame):
            rows += piece
            continue
        if rows:
            yield rows
            rows = []
        yield piece
    if rows:
        yield rows


@dataclass(frozen=True, slots=True)
class _Made:
    """One piece as a frame: the good rows with their numbers, and the rejected ones."""

    first: int
    count: int
    frame: pl.DataFrame
    good: npt.NDArray[np.int64] | None = None
    """The numbers of the good rows; None: all are good."""
    rejected: tuple[Rejected, ...] = ()

    @classmethod
    def of(cls, rows: Rows, first: int, schema: Schema) -> _Made:
        if isinstance(rows, pl.DataFrame):
            return cls(first, len(rows), _fitted(rows, schema))
        try:
            return cls(first, len(rows), _frame(rows, schema))
        except SchemaError:
            return cls._row_by_row(rows, first, schema)

    @classmethod
    def _row_by_row(cls, rows: Sequence[Row], first: int, schema: Schema) -> _Made:
        frames, numbers, rejected = [schema.empty()], [], []
        for number, row in enumerate(rows, first):
            try:
                frames.append(_frame([row], schema))
                numbers.append(number)
            except SchemaError as error:
                rejected.append(Rejected(position=number, text=repr(row), reason=str(error)))
        return cls(first, len(rows), pl.concat(frames), np.array(numbers, dtype=np.int64), tuple(rejected))

    def slice(self, start: int, stop: int) -> _Made:
        """The rows from `start` to before `stop`, as far as they are here."""
        start, stop = max(start, self.first), min(stop, self.first + self.count)
        if self.good is None:
            return _Made(start, stop - start, self.frame.slice(start - self.first, stop - start))
        begin, end = np.searchsorted(self.good, (start, stop)).tolist()
        rejected = tuple(one for one in self.rejected if start <= one.position < stop)
        return _Made(start, stop - start, self.frame.slice(begin, end - begin), self.good[begin:end], rejected)

    def numbers(self) -> npt.NDArray[np.int64]:
        """The numbers of the good rows."""
        return np.arange(self.first, self.first + self.count) if self.good is None else self.good


def _frame(rows: Sequence[Row], schema: Schema) -> pl.DataFrame:
    """Rows as a frame. `SchemaError` for one that does not fit."""
    values = [_values(row, schema) for row in rows]
    return frame_of_columns({name: [row[place] for row in values] for place, name in enumerate(schema)}, schema)


def _values(row: Row, schema: Schema) -> Sequence[Any]:
    if isinstance(row, Mapping):
        return [row.get(name) for name in schema]
    if len(row) != len(schema):
        raise SchemaError(f"the row {_short(row)} has {len(row)} values, and the schema {len(schema)} columns")
    return row


def _identity(pieces: Sequence[Rows], count: int, position: int, schema: Schema) -> str:
    """A digest of the last rows before a position. The pieces have `count` rows."""
    found: list[Sequence[Any]] = []
    for piece in reversed(pieces):
        end = min(len(piece), position - (count := count - len(piece)))
        if end > 0:
            start = max(0, end - (_IDENTITY_ROWS - len(found)))
            found[:0] = _as_values(piece[start:end], schema)
        if len(found) == _IDENTITY_ROWS:
            break
    digest = blake2b(repr(found).encode(errors="backslashreplace"), digest_size=8).hexdigest()
    return f"{position}:{digest}" if found else ""


def _as_values(rows: Rows, schema: Schema) -> list[Sequence[Any]]:
    if isinstance(rows, pl.DataFrame):
        # Times as plain numbers: one that is out of range cannot be a Python object.
        columns = rows.select(pl.col(name).to_physical() for name in schema if name in rows.columns)
        return list(map(list, columns.rows()))
    return [[row.get(name) for name in schema] if isinstance(row, Mapping) else list(row) for row in rows]


def _positions(parts: Sequence[_Made]) -> pl.Series:
    return pl.Series(np.concatenate([np.zeros(0, dtype=np.int64), *(part.numbers() for part in parts)]))


def _fitted(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    if frame.schema == schema.polars:
        return frame
    missing = [name for name in schema if name not in frame.columns]
    if len(missing) == len(schema):
        raise SchemaError(f"memory source: the frame has columns {frame.columns}, none of the declared {list(schema)}.")
    return frame.select(
        pl.lit(None, dtype=kind.polars).alias(name) if name in missing else _fitted_column(frame.get_column(name), kind)
        for name, kind in schema.items()
    )


def _fitted_column(column: pl.Series, kind: DataType) -> pl.Series:
    """The column in its declared type. A time without a zone is UTC; text is read as a time or a date where one is declared."""
    given, wanted = column.dtype, kind.polars
    try:
        if given == pl.Object or (given == pl.String and kind.name in {"timestamp", "date"}):
            return frame_of_columns({column.name: column.to_list()}, Schema(((column.name, kind),))).to_series()
        made = column.cast(wanted)
        if _of_one_family(given, wanted) and not (kind.is_integer and not made.cast(given).equals(column)):
            return made
    except (pl.exceptions.PolarsError, UnfitError) as error:
        problem = str(error).partition("\n")[0].rstrip(".")
        raise SchemaError(f"memory source: a frame does not have the declared types: {problem}.") from None
    raise SchemaError(
        f"memory source: column {column.name!r} of a frame is {DataType.from_polars(given)}, and not all of its values are {kind}. "
        "Cast it, or declare its type."
    )


def _of_one_family(given: pl.DataType, wanted: pl.DataType) -> bool:
    """Whether the values of one type are values of the other, where they fit."""
    if given == pl.Null or (wanted == pl.String and isinstance(given, pl.Categorical | pl.Enum)):
        return True
    return type(given) is type(wanted) or (given.is_numeric() and wanted.is_numeric()) or given.is_nested()


class _OpenSink(Sink):
    def __init__(self, live: MemorySink, stream: SinkStream, *, keeps_state: bool) -> None:
        self._live = live
        # A run with state may continue another's: state moves between engines and machines. One that begins with nothing never does.
        continues = keeps_state and live.keeps_state and stream.resumes_after != 0
        if live.stream is not None and live.stream.owner != stream.owner and not continues:
            live.clear()
        live.stream, live.keeps_state = stream, keeps_state

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        self._live.release(epoch, frame)

    def write(self, frame: pl.DataFrame) -> None:
        self._live.written.append(frame)

    def close(self) -> None:
        """The rows stay with the `MemorySink`."""
