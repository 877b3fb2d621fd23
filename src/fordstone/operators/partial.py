"""Partial aggregates: what is kept of many rows so that parts can be merged and finished.

A partial row is the key, the end of its window, and a few columns for each argument: how many rows, how many that are
not null, sum, least, greatest. Partial rows of equal key and window merge by adding, least and greatest, so any number
of them, in any order, means the same (rule 10: exact, but for sums of floats).

Meaning is Spark's: a sum of nulls alone is null, integer sums wrap at 64 bits, NaN is greater than any number and equal to
itself, 0.0 and -0.0 are one key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.model.aggregate import Aggregate, AggregateCall
from fordstone.model.aggregating import WINDOW_END, WINDOW_START
from fordstone.model.schema import DataType, Schema
from fordstone.model.stream_type import EventTime
from fordstone.model.windows import Tumbling
from fordstone.operators.lowering import to_polars
from fordstone.operators.operator import ROW_ID
from fordstone.state.microseconds import microseconds

END: Final = "__end"
"""The end of a partial row's window, Int64 microseconds."""
ROWS: Final = "__rows"
ONE: Final = "__all"
"""Stands for the key where there is none: all rows belong together."""
STREAMING_ROWS: Final = 200_000
SPLIT_ROWS: Final = 50_000
SPLIT_WINDOWS: Final = 8
_TIMESTAMP: Final = pl.Datetime("us", "UTC")


@dataclass(frozen=True, slots=True)
class _Argument:
    """One distinct argument, and which parts of it are kept."""

    index: int
    expression: pl.Expr
    type: DataType
    parts: frozenset[str]
    source: str | None
    """The input column, where the argument is just that."""

    @property
    def name(self) -> str:
        """The column that holds the values."""
        return f"__x{self.index}" if self.source is None else self.source

    def column(self, part: str) -> str:
        return f"__{part}{self.index}"


class Partials:
    """How one aggregate step makes, merges and finishes partial rows. Pure; may be used by any thread."""

    def __init__(
        self,
        keys: Sequence[str],
        aggregates: Sequence[Aggregate],
        schema: Schema,
        *,
        window: Tumbling | None = None,
        time: EventTime | None = None,
        step: str = "",
        with_id: bool = False,
    ) -> None:
        self.keys = tuple(keys)
        self.state_key = self.keys or (ONE,)
        """What partial rows belong together by, the window apart: never empty."""
        self._group = (*self.state_key, END) if window is not None else self.state_key
        self._step = step
        self._with_id = with_id
        self._window = window
        self._aggregates = tuple(aggregates)
        self._calls = tuple(dict.fromkeys(call for aggregate in aggregates for call in aggregate.calls))
        self._arguments = self._distinct_arguments(schema)
        self._key_columns = [_normalised(name, schema[name]) for name in self.keys] or [
            pl.lit(0, dtype=pl.Int8).alias(ONE)
        ]
        self._time = time
        self._computed = [
            argument.expression.alias(argument.name) for argument in self._arguments if argument.source is None
        ]
        self._finish = [self._finish_columns(aggregate) for aggregate in self._aggregates]
        self.schema = self.of_rows(schema.empty()).schema
        """The columns of partial rows."""

    def ends(self, frame: pl.DataFrame) -> pl.Series:
        """The end of each row's window."""
        return frame.select(self._end_column()).to_series()

    def of_rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Partial rows of a batch, one for each key and window in it."""
        rows = self._prepared(frame)
        exprs: list[pl.Expr] = [pl.len().cast(pl.Int64).alias(ROWS)]
        for argument in self._arguments:
            values = rows.get_column(argument.name)
            exprs += _parts(argument, nulls=values.null_count() > 0, nan="hi" in argument.parts and _has_nan(values))
        return self._grouped(rows, self._key_columns, self._only_end(rows), exprs)

    def of_rows_unmerged(self, frame: pl.DataFrame) -> pl.DataFrame:
        """A partial row for each row: cheaper, when few rows share a key."""
        rows = self._prepared(frame)
        columns = list(self._key_columns)
        if self._window is not None:
            only = self._only_end(rows)
            columns.append(self._end_column() if only is None else pl.lit(only, dtype=pl.Int64).alias(END))
        columns.append(pl.repeat(1, pl.len(), dtype=pl.Int64).alias(ROWS))
        for argument in self._arguments:
            value = pl.col(argument.name)
            single = {
                "n": value.is_not_null().cast(pl.Int64),
                "s": _summand(value, argument.type).fill_null(0),
                "f": value.cast(pl.Float64).fill_null(0),
                "lo": value,
                "hi": value,
            }
            columns += [single[part].alias(argument.column(part)) for part in _ORDER if part in argument.parts]
        return rows.select(columns)

    def merge(self, partials: pl.DataFrame) -> pl.DataFrame:
        """One partial row for each key and window."""
        exprs = [pl.col(ROWS).sum()]
        for argument in self._arguments:
            for part in _ORDER:
                if part not in argument.parts:
                    continue
                name = argument.column(part)
                if part in _SUMS:
                    exprs.append(pl.col(name).sum())
                else:
                    nan = part == "hi" and _has_nan(partials.get_column(name))
                    exprs.append(_extreme(part, pl.col(name), nan=nan))
        by = [pl.col(name) for name in self.state_key]
        if self._window is None or partials.height == 0:
            return self._grouped(partials, by, None, exprs)
        ends = partials.get_column(END)
        low, high = ends.min(), ends.max()
        if low == high:
            return self._grouped(partials, by, low, exprs)  # type: ignore[arg-type]  # an Int64 without nulls
        if partials.height >= SPLIT_ROWS and (high - low) // self._window.size_us < SPLIT_WINDOWS:  # type: ignore[operator]  # as above
            # Grouping by the key alone, window by window, takes half the time of grouping by both.
            parts = partials.partition_by(END, maintain_order=False)
            return pl.concat([self._grouped(part, by, part.get_column(END)[0], exprs) for part in parts])
        return self._grouped(partials, by, None, exprs, ends=pl.col(END))

    def _prepared(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(self._computed) if self._computed else frame

    def _end_column(self) -> pl.Expr:
        if self._window is None or self._time is None:
            raise TypeError(f"step {self._step} has no windows")
        size_us, offset_us = self._window.size_us, self._window.offset_us
        at = pl.col(self._time.column).to_physical() + (self._time.shift_us - offset_us)
        return (at // size_us * size_us + (offset_us + size_us)).alias(END)

    def _only_end(self, rows: pl.DataFrame) -> int | None:
        """The end of the window that all rows lie in, if they lie in one: then grouping by the key alone will do."""
        if self._window is None or self._time is None or rows.height == 0:
            return None
        times = microseconds(rows.get_column(self._time.column))
        ends = []
        for time in (times.min(), times.max()):
            at = int(time) + self._time.shift_us - self._window.offset_us  # type: ignore[arg-type]  # an Int64 without nulls
            ends.append(
                at // self._window.size_us * self._window.size_us + self._window.offset_us + self._window.size_us
            )
        return ends[0] if ends[0] == ends[1] else None

    def _grouped(
        self,
        frame: pl.DataFrame,
        by: list[pl.Expr],
        only_end: int | None,
        exprs: list[pl.Expr],
        ends: pl.Expr | None = None,
    ) -> pl.DataFrame:
        if self._window is not None and only_end is not None:
            exprs = [pl.lit(only_end, dtype=pl.Int64).alias(END), *exprs]
        elif self._window is not None:
            by = [*by, self._end_column() if ends is None else ends]
        if frame.height >= STREAMING_ROWS:
            # On many rows the streaming engine takes half the time, on few it takes longer.
            return frame.lazy().group_by(by).agg(exprs).collect(engine="streaming")
        return frame.group_by(by).agg(exprs)

    def columns(self) -> list[str]:
        """The columns of a partial row, in order."""
        parts = [argument.column(part) for argument in self._arguments for part in _ORDER if part in argument.parts]
        return [*self._group, ROWS, *parts]

    def value_columns(self) -> list[str]:
        """The columns that are not the key."""
        return [name for name in self.columns() if name not in self._group]

    def finish(self, partials: pl.DataFrame) -> pl.DataFrame:
        """The result rows of merged partial rows."""
        found = [partials.get_column(name) for name in self.keys]
        if self._window is not None:
            ends = partials.get_column(END)
            starts = (ends - self._window.size_us).cast(_TIMESTAMP)
            found += [starts.alias(WINDOW_START), ends.cast(_TIMESTAMP).alias(WINDOW_END)]
        for results, finish in self._finish:
            found.append(partials.select(results).select(finish).to_series())
        rows = pl.DataFrame(found)
        return rows.with_columns(self._ids(partials)) if self._with_id else rows

    def _ids(self, partials: pl.DataFrame) -> pl.Series:
        """Step, key and window: the same on every replay (rule 13), and different for different keys."""
        parts = [pl.lit(self._step), *(_spelt(partials.schema[name], pl.col(name)) for name in self.keys)]
        return partials.select(
            pl.concat_str([*parts, pl.col(END).cast(pl.String)], separator="|").alias(ROW_ID)
        ).to_series()

    def timeless(self, frame: pl.DataFrame) -> pl.Series | None:
        """Which rows have no time, if any: a user's function may have given them none."""
        if self._time is None or not frame.get_column(self._time.column).null_count():
            return None
        return frame.get_column(self._time.column).is_null()

    def _distinct_arguments(self, schema: Schema) -> tuple[_Argument, ...]:
        wanted: dict[str, tuple[AggregateCall, set[str]]] = {}
        for call in self._calls:
            if call.argument is None:
                continue
            _, parts = wanted.setdefault(call.argument.sql, (call, set()))
            parts |= _kept(call)
        found = []
        for index, (call, parts) in enumerate(wanted.values()):
            argument = call.argument
            assert argument is not None  # noqa: S101 - narrows the type; count(*) was left out above
            source = argument.columns[0] if argument.is_column else None
            found.append(_Argument(index, to_polars(argument, schema), argument.type, frozenset(parts), source))
        return tuple(found)

    def _argument_of(self, call: AggregateCall) -> _Argument:
        sqls = list(dict.fromkeys(other.argument.sql for other in self._calls if other.argument is not None))
        return self._arguments[sqls.index(call.argument.sql if call.argument is not None else "")]

    def _finish_columns(self, aggregate: Aggregate) -> tuple[list[pl.Expr], pl.Expr]:
        results = [
            self._result(call).alias(name) for call, name in zip(aggregate.calls, aggregate.results, strict=True)
        ]
        return results, to_polars(aggregate.finish, aggregate.results).alias(aggregate.name)

    def _result(self, call: AggregateCall) -> pl.Expr:
        if call.argument is None:
            return pl.col(ROWS)
        argument = self._argument_of(call)
        count = pl.col(argument.column("n")) if "n" in argument.parts else pl.lit(1)
        match call.function:
            case "count":
                return count
            case "sum":
                return pl.when(count > 0).then(pl.col(argument.column("s"))).cast(call.type.polars)
            case "mean":
                total = pl.col(argument.column("f" if argument.type.is_integer else "s")).cast(pl.Float64)
                return pl.when(count > 0).then(total / count)
            case "min":
                return pl.col(argument.column("lo"))
            case "max":
                return pl.col(argument.column("hi"))
            case other:
                raise NotImplementedError(f"aggregate {other} has no partial form")


_ORDER: Final = ("n", "s", "f", "lo", "hi")
_KEPT: Final = {
    "count": {"n"},
    "sum": {"n", "s"},
    "mean": {"n", "s"},
    "min": {"lo"},
    "max": {"hi"},
}
_SUMS: Final = frozenset({"n", "s", "f"})


def _kept(call: AggregateCall) -> set[str]:
    # The sum of integers wraps; their mean is that of doubles, which do not.
    whole = call.argument is not None and call.argument.type.is_integer
    return {"n", "f"} if call.function == "mean" and whole else _KEPT[call.function]


def _normalised(name: str, kind: DataType) -> pl.Expr:
    # Both zeros are one key, shown without a sign. (Adding 0.0 would say so too, but the optimiser takes that away.)
    if not kind.is_float:
        return pl.col(name)
    zero = pl.lit(0.0, dtype=kind.polars)
    return pl.when(pl.col(name) == zero).then(zero).otherwise(pl.col(name)).alias(name)


def _spelt(kind: pl.DataType, key: pl.Expr) -> pl.Expr:
    """A key as text that no other key has: with its length before it, and a mark of its own for null."""
    text = key.bin.encode("hex") if kind == pl.Binary else key.cast(pl.String)
    return pl.format("{}:{}", text.str.len_bytes(), text).fill_null("-")


def _summand(value: pl.Expr, kind: DataType) -> pl.Expr:
    if kind.name in {"bigint", "double"}:
        return value
    if kind.is_integer:
        return value.cast(pl.Int64)
    if kind.name == "decimal":
        return value.cast(pl.Decimal(38, kind.scale))
    return value.cast(pl.Float64)


def _has_nan(values: pl.Series) -> bool:
    # A sum with NaN in it is NaN, and summing is quicker than looking at each; opposite infinities are looked at again.
    return values.dtype.is_float() and math.isnan(values.sum() or 0.0) and bool(values.is_nan().any())


def _extreme(part: str, value: pl.Expr, *, nan: bool) -> pl.Expr:
    if part == "hi":
        return value.nan_max() if nan else value.max()
    return value.min()


def _parts(argument: _Argument, *, nulls: bool, nan: bool) -> list[pl.Expr]:
    value = pl.col(argument.name)
    made = {
        # Without nulls the count is the number of rows, which costs nothing.
        "n": (value.count() if nulls else pl.len()).cast(pl.Int64),
        "s": _summand(value, argument.type).sum(),
        "f": value.cast(pl.Float64).sum(),
        "lo": _extreme("lo", value, nan=nan),
        "hi": _extreme("hi", value, nan=nan),
    }
    return [made[part].alias(argument.column(part)) for part in _ORDER if part in argument.parts]
