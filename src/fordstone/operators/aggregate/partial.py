"""Partial aggregates: what is kept of many rows so that parts can be merged and finished.

A partial row is the key, the end of its window, how many rows, and the columns of the parts that the aggregates need of
each argument (`part` says what a part is, `KINDS` which are needed). Partial rows of equal key and window merge, and any
number of them, in any order, means the same (rule 10).

Meaning is Spark's: a sum of nulls alone is null, integer sums wrap at 64 bits, NaN is greater than any number and equal to
itself, 0.0 and -0.0 are one key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import polars as pl

from fordstone.lang.aggregates import Aggregate, AggregateCall
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.polars.numbers import whole
from fordstone.lang.polars.times import microseconds
from fordstone.lang.schema import DECIMAL_DIGITS_MAX, DataType, Schema
from fordstone.operators.aggregate.beta import Doubles, beta_high, beta_low, beta_means
from fordstone.operators.aggregate.part import (
    COLLECTED,
    COUNT,
    COUNT_TRUE,
    DIFFERENT,
    DOUBLE_SUM,
    FIRST,
    GREATEST,
    GREATEST_BY,
    LAST,
    LEAST,
    LEAST_BY,
    SPREAD,
    SUM,
    WIDE_SUM,
    Lagged,
    Part,
    Values,
    in_order,
)
from fordstone.operators.aggregate.sketches import Distinct, Quantiles, estimates, quantiles
from fordstone.operators.aggregate.user import UserPart
from fordstone.operators.base import ROW_ID, Functions
from fordstone.plan.plan import Tumbling
from fordstone.plan.stream_type import WINDOW_END, WINDOW_START, EventTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One aggregate. `parts` gives what is kept, `result` the result as an expression over the columns of these."""

    parts: Callable[[AggregateCall], tuple[Part, ...]]
    result: Callable[[AggregateCall, Values], pl.Expr]


def of_columns(
    function: Callable[[Sequence[pl.Series]], pl.Series], columns: Sequence[str], kind: pl.DataType
) -> pl.Expr:
    """A result that a function works out of whole columns of merged partial rows, all at once."""
    return pl.map_batches([pl.col(name) for name in columns], function, return_dtype=kind)


def _count(call: AggregateCall, values: Values) -> pl.Expr:  # noqa: ARG001 - all results are called alike
    return pl.col(COUNT.column(values))


def _is_wide(kind: DataType) -> bool:
    """Whether sums may have more digits than any decimal."""
    return kind.name == "decimal" and kind.precision == DECIMAL_DIGITS_MAX


def _sum_parts(call: AggregateCall) -> tuple[Part, ...]:
    return COUNT, WIDE_SUM if _is_wide(call.type) else SUM


def _sum(call: AggregateCall, values: Values) -> pl.Expr:
    """The sum; of decimals null if it has more digits than its type, as in Spark."""
    kind, total, fits = call.type, pl.col(SUM.column(values)), _count(call, values) > 0
    if WIDE_SUM in _sum_parts(call):
        total = of_columns(partial(WIDE_SUM.totals, kind=kind), WIDE_SUM.columns(values), kind.polars)
    elif kind.name == "decimal":
        fits &= total.to_physical().is_between(whole(1 - 10**kind.precision), whole(10**kind.precision - 1))
    return pl.when(fits).then(total).cast(kind.polars)


def _mean_parts(call: AggregateCall) -> tuple[Part, ...]:
    # The sum of integers wraps; their mean is that of doubles, which do not.
    whole = call.argument is not None and call.argument.type.is_integer
    return COUNT, DOUBLE_SUM if whole else SUM


def _mean(call: AggregateCall, values: Values) -> pl.Expr:
    total = pl.col((DOUBLE_SUM if values.type.is_integer else SUM).column(values)).cast(pl.Float64)
    count = _count(call, values)
    return pl.when(count > 0).then(total / count)


def _one_zero(name: str, values: Values) -> pl.Expr:
    """A column without -0.0: of the two zeros, which are equal, neither is the least, and which one is met first is chance."""
    if not values.type.is_float:
        return pl.col(name)
    zero = pl.lit(0.0, dtype=values.type.polars)
    return pl.when(pl.col(name) == zero).then(zero).otherwise(pl.col(name))


def _variance(*, less: int, root: bool = False) -> Callable[[AggregateCall, Values], pl.Expr]:
    def result(call: AggregateCall, values: Values) -> pl.Expr:
        count, squares = _count(call, values), pl.col(SPREAD.columns(values)[1])
        variance = pl.when(count > less).then(squares / (count - less))
        return variance.sqrt() if root else variance

    return result


def _collected(call: AggregateCall, values: Values) -> pl.Expr:
    return of_columns(in_order, COLLECTED.columns(values), call.type.polars)


def _different_sum(call: AggregateCall, values: Values) -> pl.Expr:
    """Of the different values; integers in 64 bits, which wraps, and decimals as `_sum`."""
    kind = call.type
    found = DIFFERENT.found(values).cast(pl.List(kind.polars))
    total = found.list.sum()
    if _is_wide(kind):
        limbs = [found.list.eval(limb).list.sum().fill_null(0) for limb in WIDE_SUM.limbs(pl.element())]
        total = pl.struct(limb.alias(str(place)) for place, limb in enumerate(limbs)).map_batches(
            lambda sums: WIDE_SUM.totals(sums.struct.unnest().get_columns(), kind), return_dtype=kind.polars
        )
    return pl.when(found.list.len() > 0).then(total).cast(kind.polars)


def _distinct(call: AggregateCall) -> Distinct:
    (lg_k,) = call.options
    return Distinct(int(lg_k))


def _estimate(call: AggregateCall, values: Values) -> pl.Expr:
    part = _distinct(call)
    return of_columns(estimates(part.lg_k), part.columns(values), pl.Int64())


def _sketch(call: AggregateCall) -> Quantiles:
    _, k = call.options
    return Quantiles(int(k))


def _quantile(call: AggregateCall, values: Values) -> pl.Expr:
    return of_columns(quantiles(call.options[0]), _sketch(call).columns(values), pl.Float64())


def _beta(function: Callable[..., Doubles]) -> Callable[[AggregateCall, Values], pl.Expr]:
    """A result worked out of how many are true and how many are false; the options end with the prior."""

    def result(call: AggregateCall, values: Values) -> pl.Expr:
        *level, a, b = call.options

        def finish(columns: Sequence[pl.Series]) -> pl.Series:
            counted, true = (column.to_numpy() for column in columns)
            return pl.Series(function(a + true, b + (counted - true), *level))

        return of_columns(finish, [COUNT.column(values), COUNT_TRUE.column(values)], pl.Float64())

    return result


KINDS: Final[dict[str, Kind]] = {
    "count": Kind(parts=lambda _: (COUNT,), result=_count),
    "sum": Kind(parts=_sum_parts, result=_sum),
    "mean": Kind(parts=_mean_parts, result=_mean),
    "min": Kind(parts=lambda _: (LEAST,), result=lambda _, values: _one_zero(LEAST.column(values), values)),
    "max": Kind(parts=lambda _: (GREATEST,), result=lambda _, values: _one_zero(GREATEST.column(values), values)),
    "var_samp": Kind(parts=lambda _: (COUNT, SPREAD), result=_variance(less=1)),
    "var_pop": Kind(parts=lambda _: (COUNT, SPREAD), result=_variance(less=0)),
    "stddev_samp": Kind(parts=lambda _: (COUNT, SPREAD), result=_variance(less=1, root=True)),
    "stddev_pop": Kind(parts=lambda _: (COUNT, SPREAD), result=_variance(less=0, root=True)),
    "first": Kind(parts=lambda _: (FIRST,), result=lambda _, values: pl.col(FIRST.columns(values)[1])),
    "last": Kind(parts=lambda _: (LAST,), result=lambda _, values: pl.col(LAST.columns(values)[1])),
    "max_by": Kind(parts=lambda _: (GREATEST_BY,), result=lambda _, values: pl.col(GREATEST_BY.columns(values)[1])),
    "min_by": Kind(parts=lambda _: (LEAST_BY,), result=lambda _, values: pl.col(LEAST_BY.columns(values)[1])),
    "count distinct": Kind(
        parts=lambda _: (DIFFERENT,), result=lambda _, values: DIFFERENT.found(values).list.len().cast(pl.Int64)
    ),
    "sum distinct": Kind(parts=lambda _: (DIFFERENT,), result=_different_sum),
    "mean distinct": Kind(
        parts=lambda _: (DIFFERENT,),
        result=lambda _, values: DIFFERENT.found(values).cast(pl.List(pl.Float64)).list.mean(),
    ),
    "lag": Kind(
        parts=lambda call: (Lagged(int(call.options[0])),),
        result=lambda call, values: pl.col(Lagged(int(call.options[0])).column(values)),
    ),
    "collect": Kind(parts=lambda _: (COLLECTED,), result=_collected),
    "count_distinct": Kind(parts=lambda call: (_distinct(call),), result=_estimate),
    "quantile": Kind(parts=lambda call: (_sketch(call),), result=_quantile),
    "beta_mean": Kind(parts=lambda _: (COUNT, COUNT_TRUE), result=_beta(beta_means)),
    "beta_low": Kind(parts=lambda _: (COUNT, COUNT_TRUE), result=_beta(beta_low)),
    "beta_high": Kind(parts=lambda _: (COUNT, COUNT_TRUE), result=_beta(beta_high)),
}
"""By name; what a user's own keeps stands in `user`."""


def kind_of(call: AggregateCall, functions: Functions) -> Kind:
    """What a call keeps and how it finishes."""
    if call.declared is not None:
        return KINDS[call.function]
    part = UserPart(call.function, call.state, functions)
    return Kind(parts=lambda _: (part,), result=part.result)


END: Final = "__end"
"""The end of a partial row's window, Int64 microseconds."""
ROWS: Final = "__rows"
ONE: Final = "__all"
"""Stands for the key where there is none: all rows belong together."""
STREAMING_ROWS: Final = 200_000
SPLIT_ROWS: Final = 50_000
SPLIT_WINDOWS: Final = 8
_TIMESTAMP: Final = pl.Datetime("us", "UTC")
_Time = TypeVar("_Time", int, pl.Expr)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """One distinct argument, and which parts of it are kept, in the order of their columns."""

    values: Values
    computed: tuple[pl.Expr, ...]
    """What is worked out before the parts are made; an argument that is just a column is not."""
    parts: tuple[Part, ...]


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
        functions: Functions | None = None,
        meaning: str = "",
    ) -> None:
        """`functions`: the classes of users' own aggregates, as this process knows them; others are imported.

        `meaning`: a digest of what partial rows say; columns are named alike whatever stands in them.
        """
        self.keys = tuple(keys)
        self.meaning = meaning
        self.state_key = self.keys or (ONE,)
        """What partial rows belong together by, the window apart: never empty."""
        self._group = (*self.state_key, END) if window is not None else self.state_key
        self._step = step
        self._with_id = with_id
        self._window = window
        self._aggregates = tuple(aggregates)
        calls = dict.fromkeys(call for aggregate in aggregates for call in aggregate.calls)
        self._kinds = {call: kind_of(call, {} if functions is None else functions) for call in calls if call.arguments}
        self._time = time
        self._arguments = self._distinct_arguments(schema)
        self._key_columns = [normalised_key(name, schema[name]) for name in self.keys] or [
            pl.lit(0, dtype=pl.Int8).alias(ONE)
        ]
        self._computed = [computed for argument in self._arguments.values() for computed in argument.computed]
        self._parts = [(part, argument.values) for argument in self._arguments.values() for part in argument.parts]
        self._streams = all(part.streams for part, _ in self._parts)
        single = [part.of_row(values) for part, values in self._parts]
        self._single = None if None in single else [column for columns in single for column in columns or ()]
        """The columns of each row alone, where every part has them."""
        self._finish = [self._finish_columns(aggregate) for aggregate in self._aggregates]
        self._plain = [
            results[0].alias(aggregate.name)
            for aggregate, (results, _) in zip(self._aggregates, self._finish, strict=True)
            if aggregate.finish.is_column
        ]
        """Calls that are results as they are: worked out together, which is quicker."""
        self.schema = self.of_rows(schema.empty()).schema
        """The columns of partial rows."""

    def ends(self, frame: pl.DataFrame) -> pl.Series:
        """The end of the window, or pane, of each row."""
        return frame.select(self._end_column()).to_series()

    def of_rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Partial rows of a batch, one for each key and window in it."""
        rows = frame.with_columns(self._computed) if self._computed else frame
        exprs: list[pl.Expr] = [pl.len().cast(pl.Int64).alias(ROWS)]
        for part, values in self._parts:
            exprs += part.of_rows(values, rows)
        return self._settled(self._grouped(rows, self._key_columns, self.only_end(rows), exprs))

    def of_rows_unmerged(self, frame: pl.DataFrame) -> pl.DataFrame:
        """A partial row for each row: cheaper, when few rows share a key. Where there is no such part: as `of_rows`."""
        if self._single is None:
            return self.of_rows(frame)
        rows = frame.with_columns(self._computed) if self._computed else frame
        columns = list(self._key_columns)
        if self._window is not None:
            only = self.only_end(rows)
            columns.append(self._end_column() if only is None else pl.lit(only, dtype=pl.Int64).alias(END))
        return rows.select(*columns, pl.repeat(1, pl.len(), dtype=pl.Int64).alias(ROWS), *self._single)

    def merge(self, partials: pl.DataFrame) -> pl.DataFrame:
        """One partial row for each key and window."""
        exprs = [pl.col(ROWS).sum()]
        for part, values in self._parts:
            exprs += part.merged(values, partials)
        by = [pl.col(name) for name in self.state_key]
        return self._settled(self._merged(partials, by, exprs))

    def _merged(self, partials: pl.DataFrame, by: list[pl.Expr], exprs: list[pl.Expr]) -> pl.DataFrame:
        if self._window is None or partials.height == 0:
            return self._grouped(partials, by, None, exprs)
        parts = self.by_end(partials)
        if parts is None:
            return self._grouped(partials, by, None, exprs, ends=pl.col(END))
        return pl.concat([self._grouped(part, by, part.get_column(END)[0], exprs) for part in parts])

    def by_end(self, rows: pl.DataFrame) -> list[pl.DataFrame] | None:
        """The rows (at least one) of each window apart, if it is quicker to group them by the key alone, window by window.

        That takes half the time of grouping by both, unless windows are many or rows are few.
        """
        ends = rows.get_column(END)
        low, high = int(ends.min()), int(ends.max())  # type: ignore[arg-type]  # an Int64 without nulls
        if low == high:
            return [rows]
        if self._window is None or rows.height < SPLIT_ROWS or (high - low) // self._window.size_us >= SPLIT_WINDOWS:
            return None
        return rows.partition_by(END, maintain_order=False)

    def _settled(self, made: pl.DataFrame) -> pl.DataFrame:
        settled = [series for part, values in self._parts for series in part.settle(values, made)]
        return made.with_columns(settled) if settled else made

    def _end_column(self) -> pl.Expr:
        if self._window is None or self._time is None:
            raise TypeError(f"step {self._step} has no windows")
        return _end_of(pl.col(self._time.column).to_physical() + self._time.shift_us, self._window).alias(END)

    def only_end(self, rows: pl.DataFrame) -> int | None:
        """The end of the window that all rows lie in, if they lie in one: then grouping by the key alone will do."""
        if self._window is None or self._time is None or rows.height == 0:
            return None
        times = microseconds(rows.get_column(self._time.column))
        ends = [_end_of(int(time) + self._time.shift_us, self._window) for time in (times.min(), times.max())]  # type: ignore[arg-type]  # an Int64 without nulls
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
        if frame.height >= STREAMING_ROWS and self._streams:
            # On many rows the streaming engine takes half the time, on few it takes longer.
            return frame.lazy().group_by(by).agg(exprs).collect(engine="streaming")
        return frame.group_by(by).agg(exprs)

    def columns(self) -> list[str]:
        """The columns of a partial row, in order."""
        return [*self._group, ROWS, *(name for part, values in self._parts for name in part.columns(values))]

    @property
    def parts(self) -> list[tuple[Part, Values]]:
        """What is kept of the arguments, in the order of its columns."""
        return self._parts

    @property
    def invertible(self) -> bool:
        """Whether rows can be taken out again, exactly, by subtraction."""
        return all(part.invertible(values) for part, values in self._parts)

    def value_columns(self) -> list[str]:
        return [name for name in self.columns() if name not in self._group]

    def finish(self, partials: pl.DataFrame) -> pl.DataFrame:
        found = [partials.get_column(name) for name in self.keys]
        if self._window is not None:
            ends = partials.get_column(END)
            starts = (ends - self._window.size_us).cast(_TIMESTAMP)
            found += [starts.alias(WINDOW_START), ends.cast(_TIMESTAMP).alias(WINDOW_END)]
        plain = partials.select(self._plain)
        for aggregate, (results, finish) in zip(self._aggregates, self._finish, strict=True):
            is_plain = aggregate.finish.is_column
            found.append(
                plain.get_column(aggregate.name) if is_plain else partials.select(results).select(finish).to_series()
            )
        rows = pl.DataFrame(found)
        return rows.with_columns(row_ids(self._step, partials, self.keys, END)) if self._with_id else rows

    def timeless(self, frame: pl.DataFrame) -> pl.Series | None:
        """Which rows have no time, if any: a user's function may have given them none."""
        if self._time is None or not frame.get_column(self._time.column).null_count():
            return None
        return frame.get_column(self._time.column).is_null()

    def _distinct_arguments(self, schema: Schema) -> dict[tuple[str, ...], _Argument]:
        wanted: dict[tuple[str, ...], tuple[AggregateCall, set[Part]]] = {}
        for call, kind in self._kinds.items():
            _, parts = wanted.setdefault(_spelling(call), (call, set()))
            parts.update(kind.parts(call))
        found = {}
        for index, (spelling, (call, parts)) in enumerate(wanted.items()):
            names, computed = [], []
            for at, argument in enumerate(call.arguments):
                if argument.is_column:
                    names.append(argument.columns[0])
                else:
                    names.append(f"__x{index}_{at}")
                    computed.append(to_polars(argument, schema).alias(names[-1]))
            types = tuple(argument.type for argument in call.arguments)
            time = None if self._time is None else self._time.column
            values = Values(index=index, names=tuple(names), types=types, time=time)
            ordered = tuple(sorted(parts, key=lambda part: (part.order, part.columns(values))))
            found[spelling] = _Argument(values=values, computed=tuple(computed), parts=ordered)
        return found

    def _finish_columns(self, aggregate: Aggregate) -> tuple[list[pl.Expr], pl.Expr]:
        results = [
            self._result(call).alias(name) for call, name in zip(aggregate.calls, aggregate.results, strict=True)
        ]
        return results, to_polars(aggregate.finish, aggregate.results).alias(aggregate.name)

    def _result(self, call: AggregateCall) -> pl.Expr:
        if not call.arguments:
            return pl.col(ROWS)
        return self._kinds[call].result(call, self._arguments[_spelling(call)].values)


def _end_of(at: _Time, window: Tumbling) -> _Time:
    """The end of the window that holds a time."""
    size_us, offset_us = window.size_us, window.offset_us
    return (at - offset_us) // size_us * size_us + (offset_us + size_us)


def _spelling(call: AggregateCall) -> tuple[str, ...]:
    return tuple(argument.sql for argument in call.arguments)


def normalised_key(name: str, kind: DataType) -> pl.Expr:
    """A key column as it is grouped by: both zeros are one key, shown without a sign."""
    # Adding 0.0 would say so too, but the optimiser takes that away.
    if not kind.is_float:
        return pl.col(name)
    zero = pl.lit(0.0, dtype=kind.polars)
    return pl.when(pl.col(name) == zero).then(zero).otherwise(pl.col(name)).alias(name)


def row_ids(step: str, rows: pl.DataFrame, keys: Sequence[str], window: str) -> pl.Series:
    """Step, key and window: the same on every replay (rule 13), and different for different keys.

    A key is spelt with its length before it, and a mark of its own for null.
    """
    parts = [pl.lit(step)]
    for name in keys:
        text = pl.col(name).bin.encode("hex") if rows.schema[name] == pl.Binary else pl.col(name).cast(pl.String)
        parts.append(pl.format("{}:{}", text.str.len_bytes(), text).fill_null("-"))
    return rows.select(pl.concat_str([*parts, pl.col(window).cast(pl.String)], separator="|").alias(ROW_ID)).to_series()
