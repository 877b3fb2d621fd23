"""A source that makes its own rows: for demonstrations, tests and load.

A row is a pure function of (seed, partition, sequence number) and of the declared schema; the position is the sequence
number. Reading from any position, in slices of any size, on any machine, gives the same rows: random numbers are functions of
(seed, lane, column, sequence number), and only integer arithmetic decides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.base import (
    About,
    Chunk,
    ClockUs,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Reader,
    ReadPlan,
    Source,
    SourceOptions,
    checked_spec,
    options_of,
)
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.duration import duration_us, positive_us
from fordstone.lang.schema import DataType, Schema
from fordstone.plan.ids import PartitionId, Position

Words = npt.NDArray[np.uint64]

_GAMMA: Final = 0x9E3779B97F4A7C15
_WORD_MASK: Final = (1 << 64) - 1
_HALVES: Final = 8
"""Number of 16-bit numbers whose sum makes a normal number."""


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stream_key(seed: int, *names: int | str) -> int:
    """A 64-bit number that separates streams of random numbers."""
    key = seed & _WORD_MASK
    for name in names:
        for byte in str(name).encode() + b"\x00":
            key = int(_mixed(np.array([(key + byte + 1) & _WORD_MASK], dtype=np.uint64) * _GAMMA)[0])
    return key


def random_words(key: int, first: int, count: int, *, draw: int = 0) -> Words:
    """64 random bits for each of the sequence numbers `first`, `first + 1`, ...; each `draw` is another such stream."""
    sequence = np.arange(first, first + count, dtype=np.uint64)
    offset = np.array([(key + draw * 0xD1B54A32D192ED03) & _WORD_MASK], dtype=np.uint64)
    return _mixed(_mixed(sequence * _GAMMA + offset) ^ offset)


def random_below(words: Words, bound: int) -> npt.NDArray[np.int64]:
    """Whole numbers in [0, bound), spread evenly as far as 32 bits allow; `bound` is at most 2**32."""
    return (((words >> 32) * bound) >> 32).astype(np.int64)


def random_normal(key: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """About normal with mean 0 and deviation 1: the sum of eight even 16-bit numbers, which is exact in a double."""
    halves = np.stack([random_words(key, first, count, draw=draw) for draw in (1, 2)], axis=1).view(np.uint16)
    total = halves.sum(axis=1, dtype=np.int64).astype(np.float64)
    mean = _HALVES * 65535 / 2
    deviation = (_HALVES * (65536**2 - 1) / 12) ** 0.5
    normal: npt.NDArray[np.float64] = (total - mean) / deviation
    return normal


MEAN: Final = 20.0
DEVIATION: Final = 5.0
INTEGER_BELOW: Final = {"tinyint": 100, "smallint": 1_000, "int": 1_000_000, "bigint": 1_000_000_000}
KEY_DIGITS_MIN: Final = 6
KEYS_MAX: Final = 10_000_000
"""Key names are made once and kept."""
ROWS_MAX: Final = 1 << 62
PARTITIONS_MAX: Final = 100_000
_BOUND_MAX: Final = 1 << 32
_SECOND_US: Final = 1_000_000
_DAY_US: Final = 86_400 * _SECOND_US

_Column = Callable[[int, int], pl.Series]


class GeneratorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    rows: int | None = None
    """How many rows a partition has; without end if left out."""
    rate: float | None = None
    """How many rows a second a partition gives; as fast as they are asked for if left out."""
    partitions: int = 1
    seed: int = 0
    keys: int = 1000
    """How many different values a string column has."""
    start: str = "2026-01-01T00:00:00Z"
    step: str = "1ms"
    """How far event time advances from row to row."""
    disorder: str = "0s"
    """By how much a row may be earlier than its place says. With `lateness` of the same length no row is late."""

    def __post_init__(self) -> None:
        limits = (("rows", 0, ROWS_MAX), ("partitions", 1, PARTITIONS_MAX), ("keys", 1, KEYS_MAX))
        for name, least, most in limits:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"generator: {name}={value} must be between {least} and {most}.")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ConfigError(f"generator: rate={self.rate} must be more than 0 rows a second.")
        _ = self.start_us, self.step_us, self.disorder_us  # raise if they are malformed

    @property
    def start_us(self) -> int:
        try:
            start = datetime.fromisoformat(self.start)
        except ValueError as error:
            raise ConfigError(
                f"generator: start={self.start!r} is not a time. Write it as '2026-01-01T00:00:00Z'."
            ) from error
        start = start.replace(tzinfo=UTC) if start.tzinfo is None else start
        return (start - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)

    @property
    def step_us(self) -> int:
        return positive_us(self.step, what="generator step")

    @property
    def disorder_us(self) -> int:
        return duration_us(self.disorder, what="generator disorder")


def generator(
    *,
    rows: int | None = None,
    rate: float | None = None,
    partitions: int = 1,
    seed: int = 0,
    keys: int = 1000,
    start: str = "2026-01-01T00:00:00Z",
    step: str = "1ms",
    disorder: str = "0s",
) -> ConnectorSpec:
    """Rows made up on the spot, the same ones for the same seed. What a column holds follows from its declared type.

    Each partition has `rows` rows (without end if left out) and gives `rate` a second (as many as are asked for if left
    out). Text columns have `keys` different values, doubles are normal around 20, and times begin at `start` and advance
    by `step` a row, each earlier by up to `disorder`: with `lateness` of that length no row is late.
    """
    given = {
        "rows": rows,
        "rate": rate,
        "partitions": partitions,
        "seed": seed,
        "keys": keys,
        "start": start,
        "step": step,
        "disorder": disorder,
    }
    return checked_spec("generator", given, GeneratorOptions)


class GeneratorKind(ConnectorKind):
    """The kind `generator`."""

    about = About(
        summary="made-up rows, for trials and benchmarks",
        source="generator(rows=1000, keys=3)",
        guarantee="The same rows for the same seed, from any position.",
        page="reference/connectors.md#generator",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        """Rows can be made again, so replay is exact."""
        options_of(spec, GeneratorOptions)
        return Delivery.EXACTLY_ONCE

    def why_never_all_there(self, spec: ConnectorSpec) -> str | None:
        settings = options_of(spec, GeneratorOptions)
        if settings.rows is None or settings.rate is not None:
            return (
                "a generator needs rows=, and no rate=: else it has no end, or nothing is there yet when it is asked."
            )
        return None

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        settings = options_of(spec, GeneratorOptions)
        if options.bounded and settings.rows is None:
            raise SourceError(
                "generator: bounded input needs an end. Say how many rows there are: generator(rows=1000)."
            )
        return GeneratorSource(settings, options.schema, context.clock_us, bounded=options.bounded)


def _lane_name(lane: int) -> PartitionId:
    return PartitionId(f"lane-{lane:06d}")


class GeneratorSource(Source):
    """As many partitions as were asked for, each with its own rows."""

    def __init__(self, settings: GeneratorOptions, schema: Schema, clock_us: ClockUs, *, bounded: bool) -> None:
        self._settings = settings
        self._schema = schema
        self._clock_us = clock_us
        self._bounded = bounded
        self._paces: dict[PartitionId, _Pace] = {}

    def partitions(self) -> Sequence[PartitionId]:
        """`lane-000000` and so on; never more than at the start."""
        return [_lane_name(lane) for lane in range(self._settings.partitions)]

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        rows = (self._settings.rows or 0) * self._settings.partitions
        return sum(cut.position for cut in cuts.values()) / rows if rows else None

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        """Start at a sequence number; pacing counts from now."""
        lane = self._lane(partition)
        columns = {name: _column(name, kind, lane, self._settings) for name, kind in self._schema.items()}
        return GeneratorReader(self._settings, columns, position, self._clock_us, with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """By the rate, which counts from the first time it is asked. Bounded input is all there: its rate paces readers alone."""
        self._lane(partition)
        rows = self._settings.rows
        stop = min(position + max(1, rows_max), ROWS_MAX if rows is None else rows)
        if self._settings.rate is not None and not self._bounded:
            now_us = self._clock_us()
            pace = self._paces.get(partition)
            if pace is None or pace.row_at(now_us) < position:  # what was read elsewhere is not waited for
                pace = self._paces[partition] = _Pace(self._settings.rate, position, now_us)
            stop = min(stop, pace.row_at(now_us))
        stop = max(stop, position)
        return ReadPlan(position=Position(stop), ended=rows is not None and stop >= rows)

    def _lane(self, partition: PartitionId) -> int:
        number = partition.removeprefix("lane-")
        lane = int(number) if number.isdecimal() else -1
        if partition != _lane_name(lane) or not 0 <= lane < self._settings.partitions:
            raise SourceError(f"generator: there is no partition {partition!r}; there are {self._settings.partitions}.")
        return lane


class _Pace:
    """The number of rows that are due at a time, at a rate, counted from a row and a time."""

    def __init__(self, rate: float, row: int, since_us: int) -> None:
        self._rate = rate
        self._row = row
        self._since_us = since_us

    def row_at(self, now_us: int) -> int:
        return self._row + int((now_us - self._since_us) * self._rate / _SECOND_US)


class GeneratorReader(Reader):
    """Makes the rows of one partition."""

    def __init__(
        self,
        settings: GeneratorOptions,
        columns: dict[str, _Column],
        position: int,
        clock_us: ClockUs,
        *,
        with_positions: bool,
    ) -> None:
        self._settings = settings
        self._columns = columns
        self._position = position
        self._clock_us = clock_us
        self._pace = None if settings.rate is None else _Pace(settings.rate, position, clock_us())
        self._with_positions = with_positions

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        rows = self._settings.rows
        stop = self._position + max(1, rows_max)
        if until is not None:
            stop = min(stop, until)
        elif self._pace is not None:
            stop = min(stop, self._pace.row_at(self._clock_us()))
        if rows is not None:
            stop = min(stop, rows)
        ended = rows is not None and max(stop, self._position) >= rows
        if stop <= self._position and not ended:
            return None
        first, count = self._position, max(0, stop - self._position)
        self._position += count
        if until is not None and self._settings.rate is not None:
            # What is read again, or was planned by another clock, is not paced; what follows it is.
            self._pace = _Pace(self._settings.rate, self._position, self._clock_us())
        return Chunk(
            frame=pl.DataFrame([make(first, count).alias(name) for name, make in self._columns.items()]),
            position=Position(self._position),
            row_positions=pl.int_range(first, first + count, eager=True) if self._with_positions else None,
            ended=ended,
        )

    def close(self) -> None:
        """Nothing is held."""


def _column(name: str, kind: DataType, lane: int, settings: GeneratorOptions) -> _Column:
    """The function that makes one column's values for `count` sequence numbers from `first` on."""
    key = stream_key(settings.seed, lane, name)

    def below(first: int, count: int, bound: int) -> pl.Series:
        return pl.Series(random_below(random_words(key, first, count), bound))

    if kind.name in {"timestamp", "date"}:
        times_us = _times_us(key, settings)
        if kind.name == "timestamp":
            return lambda first, count: times_us(first, count).cast(kind.polars)
        return lambda first, count: (times_us(first, count) // _DAY_US).cast(pl.Int32).cast(pl.Date)
    if kind.name in {"string", "binary"}:
        names = _KeyNames(settings.keys)
        return lambda first, count: names.of(below(first, count, settings.keys)).cast(kind.polars)
    if kind.name == "boolean":
        return lambda first, count: below(first, count, 2).cast(pl.Boolean)
    if kind.is_integer:
        return lambda first, count: below(first, count, INTEGER_BELOW[kind.name]).cast(kind.polars)
    if kind.is_float:
        return lambda first, count: pl.Series(random_normal(key, first, count) * DEVIATION + MEAN).cast(kind.polars)
    if kind.name == "decimal":
        bound = min(10**kind.precision, 1_000_000)
        return lambda first, count: (below(first, count, bound).cast(pl.Decimal(38, 0)) / 10**kind.scale).cast(
            kind.polars
        )
    raise ConfigError(
        f"generator: column {name!r} has type {kind}, for which no rows can be made. Leave it out of the schema."
    )


def _times_us(key: int, settings: GeneratorOptions) -> _Column:
    start_us, step_us, disorder_us = settings.start_us, settings.step_us, settings.disorder_us

    def made(first: int, count: int) -> pl.Series:
        times = start_us + np.arange(first, first + count, dtype=np.int64) * step_us
        if disorder_us:
            times -= random_below(random_words(key, first, count), min(disorder_us + 1, _BOUND_MAX))
        return pl.Series(times)

    return made


class _KeyNames:
    """The names of keys by number. All are made once as many were asked for: a reader of a few rows needs few of many."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._digits = max(KEY_DIGITS_MIN, len(str(keys - 1)))
        self._asked = 0
        self._all: pl.Series | None = None

    def of(self, numbers: pl.Series) -> pl.Series:
        self._asked += len(numbers)
        if self._all is None and self._asked >= self._keys:
            self._all = self._made(pl.int_range(self._keys, eager=True))
        return self._made(numbers) if self._all is None else self._all.gather(numbers)

    def _made(self, numbers: pl.Series) -> pl.Series:
        texts = numbers.cast(pl.String).str.zfill(self._digits)
        return texts.to_frame("n").select("k" + pl.col("n")).to_series()
