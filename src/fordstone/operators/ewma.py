"""EWMA: every row with exponentially weighted means of its key's rows up to it, in order of time.

    by count of values:  s = alpha * x + (1 - alpha) * s
    by time:             w = 2 ** (-elapsed / half_life) * w + 1;  s = x / w + (1 - 1 / w) * s

By time, `w` is the weight of all values so far, the newest counting 1, so that values of one time count alike. The first value is the
first mean. A null value leaves the mean as it is, and its row carries that; NaN stays NaN.

Invariants: a mean is a function of its key's rows in order, to the last bit, whatever the batches, barriers, watermarks and restores:
each product and sum is rounded row after row (a scan that regroups sums would round differently for every cut), and powers are
made of sums and products, because libraries round theirs differently. A row is emitted once: on the main port or on the late port.

While many keys have rows left, the next row of each is done in one go. When few keys have (`NARROW_KEYS`), their rest is done key by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.duration import human_us
from fordstone.lang.expression import Expression, parse_double
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.base import (
    Emit,
    Emits,
    Family,
    Operator,
    OperatorContext,
    keys_text,
    stream_details,
)
from fordstone.operators.row_order import KeyedRows, OrderedOperator, WaitingRows
from fordstone.plan import plan as p
from fordstone.plan.stream_type import (
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    late_rows,
    needs_time,
    plain_keys,
)
from fordstone.state.base import State, StateBackend


def smoothed(step: p.Ewma, schema: Schema) -> tuple[Expression, ...]:
    """What each new column of a step smooths, as doubles, named as the column is."""
    return tuple(parse_double(column, schema) for column in step.columns)


NARROW_KEYS: Final = 32
"""With fewer keys than this a pass over arrays takes longer than going through their rows one by one."""
_SHORT: Final = 2**16
"""Numbers below this are sorted by radix."""

_PARTS: Final = 64
"""Number of parts of an exponent's unit for which a power of a half is looked up; the rest is small."""
_HALVES_MAX: Final = 2000
"""Halved this often, every double is 0."""

Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

_PARTLY_HALVED: Final[Doubles] = np.array(
    [float(Decimal(2) ** (Decimal(-part) / _PARTS)) for part in range(_PARTS)], dtype=np.float64
)
_LN_2: Final = float(Decimal(2).ln())


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """One mean per key; `known` says whether the key has had a value yet."""

    values: Doubles
    known: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Decaying:
    """One mean per key, with the weight that it had at its last value, and the time of that."""

    means: Means
    weights: Doubles
    times_us: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of rows, those of one key together and in order; `valid` says which are not null (None: all are)."""

    values: Doubles
    valid: Mask | None


def smooth(rows: Values, counts: Rows, before: Means, alpha: float) -> tuple[Values, Means]:
    """The mean at each row, and the mean of each key after its last row. `counts`: rows per key, none of them 0."""
    with np.errstate(all="ignore"):
        values, own = _without_nulls(rows, counts)
        out, after = _recur(values, values * alpha, 1.0 - alpha, own, before)
        return _around_nulls(out, own, rows.valid, counts, before), after


def smooth_by_time(
    rows: Values, times_us: Rows, counts: Rows, before: Decaying, half_life_us: int
) -> tuple[Values, Decaying]:
    """As `smooth`, for values that count half as much with every half-life. `times_us`: never falling within a key."""
    with np.errstate(all="ignore"):
        values, own = _without_nulls(rows, counts)
        times_us = times_us if rows.valid is None else times_us[rows.valid]
        held, first = own > 0, _starts(own)
        earlier_us = np.roll(times_us, 1)
        earlier_us[first[held]] = before.times_us[held]
        # As unsigned numbers: the difference of two times may be larger than a time.
        elapsed = (times_us.view(np.uint64) - earlier_us.view(np.uint64)).astype(np.float64)
        known = before.means.known
        ones = np.ones_like(values)
        weights, weights_after = _recur(
            ones, ones, halved(elapsed / half_life_us), own, Means(values=before.weights, known=known)
        )
        share = 1.0 / weights
        out, after = _recur(values, values * share, 1.0 - share, own, before.means)
        last_us = before.times_us.copy()
        last_us[held] = times_us[(first + own - 1)[held]]
        return (
            _around_nulls(out, own, rows.valid, counts, before.means),
            Decaying(means=after, weights=weights_after.values, times_us=last_us),
        )


def halved(times: Doubles) -> Doubles:
    """`2 ** -times`, for times of 0 and more, to about the last bit."""
    times = np.minimum(times, _HALVES_MAX)
    parts = np.rint(times * _PARTS)
    rest = (parts / _PARTS - times) * _LN_2
    power = rest / 5.0 + 1.0
    for divisor in (4.0, 3.0, 2.0, 1.0):
        power *= rest
        power /= divisor
        power += 1.0
    whole = parts.astype(np.int32)
    power *= _PARTLY_HALVED.take(whole % _PARTS)
    return np.ldexp(power, -(whole // _PARTS))


def _without_nulls(rows: Values, counts: Rows) -> tuple[Doubles, Rows]:
    if rows.valid is None:
        return rows.values, counts
    return rows.values[rows.valid], np.add.reduceat(rows.valid, _starts(counts), dtype=np.int64)


def _around_nulls(out: Doubles, own: Rows, valid: Mask | None, counts: Rows, before: Means) -> Values:
    """The means at all rows, from those at the rows with a value: each null row gets the mean before it."""
    if valid is None:
        return Values(values=out, valid=None)
    # The last value at or before each row: one of the row's own key, or there is only what was before.
    last = np.cumsum(valid) - 1
    is_own = last >= np.repeat(_starts(own), counts)
    spread = np.repeat(before.values, counts)
    spread[is_own] = out[last[is_own]]
    return Values(values=spread, valid=is_own | np.repeat(before.known, counts))


def _recur(
    values: Doubles, added: Doubles, keep: Doubles | float, counts: Rows, before: Means
) -> tuple[Doubles, Means]:
    """`s = added + keep * s` at each row, for keys with any number of rows; the first value of a key is its first `s`."""
    out = np.empty_like(values)
    means, starts, left = before.values.copy(), _starts(counts), counts.copy()
    fresh = np.flatnonzero(~before.known & (counts > 0))
    if fresh.size:
        first = starts[fresh]
        out[first] = means[fresh] = values[first]
        starts[fresh] += 1
        left[fresh] -= 1
    _go_on(added, out, means, starts, left, keep)
    return out, Means(values=means, known=before.known | (counts > 0))


def _go_on(added: Doubles, out: Doubles, means: Doubles, starts: Rows, left: Rows, keep: Doubles | float) -> None:
    """Take `left` rows of each key from `starts` on into its mean, and write each mean on the way to `out`."""
    longest = int(left.max(initial=0))
    fewer = longest - left
    by_length = (fewer.astype(np.uint16) if longest < _SHORT else fewer).argsort(kind="stable")
    # How many keys have a row in each pass: the longest keys come first.
    widths = left.size - np.cumsum(np.bincount(left, minlength=longest + 1)[:longest])
    passes = int(np.searchsorted(-widths, -NARROW_KEYS, "right"))
    at, now = starts[by_length], means[by_length]
    for width in widths[:passes].tolist():
        here, mean = at[:width], now[:width]
        mean *= keep if isinstance(keep, float) else keep.take(here)
        mean += added.take(here)
        out[here] = mean
        here += 1
    if passes < longest:
        width = int(widths[passes])
        ends = (starts + left)[by_length[:width]]
        for key, (start, end) in enumerate(zip(at[:width].tolist(), ends.tolist(), strict=True)):
            last, xs = float(now[key]), added[start:end].tolist()
            if isinstance(keep, float):
                out[start:end] = [last := x + keep * last for x in xs]
            else:
                out[start:end] = [last := x + k * last for x, k in zip(xs, keep[start:end].tolist(), strict=True)]
            now[key] = last
    means[by_length] = now


def _starts(counts: Rows) -> Rows:
    starts: Rows = np.cumsum(counts) - counts
    return starts


class EwmaFamily(Family[p.Ewma]):
    """Rows with exponentially weighted means beside them."""

    steps = (p.Ewma,)
    stays = "{step} takes rows in order of time, over all nodes"

    def check(self, step: p.Ewma, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "ewma")
        time = needs_time(step, stream, "ewma")
        if (step.alpha is None) == (step.half_life_us is None):
            raise PipelineError(
                f"step {step.name}: ewma needs either alpha= (the weight of the newest value) "
                "or half_life= (after how long a value counts half), and not both."
            )
        if step.half_life_us is not None and step.half_life_us <= 0:
            raise PipelineError(
                f"step {step.name}: half_life={step.half_life_us}us must be longer than zero. "
                "It is the time after which a value counts half."
            )
        if step.alpha is not None and not 0 < step.alpha <= 1:
            raise PipelineError(
                f"step {step.name}: alpha={step.alpha} must be above 0 and at most 1. It is the weight of the newest value."
            )
        plain_keys(step.keys, stream.schema)
        if not step.columns:
            raise PipelineError(f"step {step.name}: ewma() needs at least one column, such as smooth='temp'.")
        columns: dict[str, str | DataType] = dict(stream.schema)
        for column in smoothed(step, stream.schema):
            if column.name in columns:
                raise SchemaError(f"there is a column {column.name!r} already. Name the new one differently.")
            columns[column.name] = column.type
        main = StreamType(schema=Schema.of(columns), time=time, row_wise=False)
        return {p.Input(step.name): main, **late_rows(step, stream)}

    def make(self, step: p.Ewma, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        return Ewma(
            step.keys,
            smoothed(step, stream.schema),
            stream.schema,
            alpha=step.alpha,
            half_life_us=step.half_life_us,
            time=needs_time(step, stream, "ewma"),
            state=context.state,
        )

    def title(self, step: p.Ewma) -> str:
        weight = f"alpha {step.alpha}" if step.half_life_us is None else f"half-life {human_us(step.half_life_us)}"
        return f"exponentially weighted mean {keys_text(step.keys)}, {weight}"

    def describe(self, step: p.Ewma, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield "smooths", ", ".join(step.columns)
        yield from stream_details(step, types)
        each = "one number" if step.half_life_us is None else "three numbers"
        yield "keeps", f"the rows that wait for time, and {each} per key and column"


class Ewma(OrderedOperator):
    """Smooths columns of rows by key."""

    def __init__(
        self,
        keys: Sequence[str],
        columns: Sequence[Expression],
        schema: Schema,
        *,
        alpha: float | None = None,
        half_life_us: int | None = None,
        time: EventTime,
        state: StateBackend,
    ) -> None:
        """`columns`: what to smooth, as doubles, named as the new columns are. `schema` is the input's.

        One of `alpha` and `half_life_us` is given.
        """
        self._columns = [to_polars(column, schema) for column in columns]
        self._new = [column.name for column in columns]
        self._smoothers = [_Smoother(index, alpha=alpha, half_life_us=half_life_us) for index in range(len(columns))]
        read = [name for column in columns for name in column.columns]
        self._waiting = WaitingRows(keys, schema, time=time, read=read, state=state)
        kept = {name: kind for smoother in self._smoothers for name, kind in smoother.kept.items()}
        self._table = state.table(self._waiting.key, schema=self._waiting.key_types | kept)

    def on_watermark(self, watermark_us: int) -> Emits:
        rows = self._waiting.release(watermark_us)
        return [Emit(self._with_means(rows))] if rows.height else []

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state, "means": self._table}

    def _with_means(self, rows: pl.DataFrame) -> pl.DataFrame:
        found = self._waiting.by_key(rows)
        values, before = found.rows.select(self._columns), self._table.get(found.keys)
        times_us = self._waiting.times(found.rows)
        new, after = [], []
        for name, smoother in zip(self._new, self._smoothers, strict=True):
            given = _by_key(values.get_column(name), found.by_key)
            out, then = smoother.smooth(given, times_us, found, before)
            new.append(_by_row(name, out, found.by_key))
            after += then
        self._table.put(found.keys.with_columns(after))
        return found.rows[self._waiting.names].with_columns(new)


class _Smoother:
    """Smooths one column. Kept of a key: the mean, null before the first value; by time also its weight, and the last value's time."""

    def __init__(self, index: int, *, alpha: float | None, half_life_us: int | None) -> None:
        self._mean, self._weight, self._time = f"__s{index}", f"__w{index}", f"__t{index}"
        self._alpha, self._half_life_us = alpha or 1.0, half_life_us
        self.kept: dict[str, pl.DataType] = {self._mean: pl.Float64()}
        if half_life_us is not None:
            self.kept |= {self._weight: pl.Float64(), self._time: pl.Int64()}

    def smooth(
        self, values: Values, times_us: Rows, found: KeyedRows, before: pl.DataFrame
    ) -> tuple[Values, list[pl.Series]]:
        """The means at each row, and what is then kept of each key."""
        series = before.get_column(self._mean)
        means = Means(values=series.to_numpy(), known=series.is_not_null().to_numpy())
        if self._half_life_us is None:
            out, after = smooth(values, found.counts, means, self._alpha)
            return out, [_series(self._mean, after.values, after.known)]
        so_far = Decaying(
            means=means,
            weights=before.get_column(self._weight).to_numpy(),
            times_us=before.get_column(self._time).fill_null(0).to_numpy(),
        )
        out, then = smooth_by_time(values, times_us.take(found.by_key), found.counts, so_far, self._half_life_us)
        known = then.means.known
        return out, [
            _series(self._mean, then.means.values, known),
            _series(self._weight, then.weights, known),
            _series(self._time, then.times_us, known),
        ]


def _by_key(series: pl.Series, by_key: Rows) -> Values:
    valid = series.is_not_null().to_numpy().take(by_key) if series.null_count() else None
    return Values(values=series.to_numpy().take(by_key), valid=valid)


def _by_row(name: str, found: Values, by_key: Rows) -> pl.Series:
    values = np.empty_like(found.values)
    values[by_key] = found.values
    if found.valid is None:
        return _series(name, values, None)
    valid = np.empty_like(found.valid)
    valid[by_key] = found.valid
    return _series(name, values, valid)


def _series(name: str, values: Doubles | Rows, valid: Mask | None) -> pl.Series:
    series = pl.Series(name, values)
    if valid is None or valid.all():
        return series
    return series.zip_with(pl.Series(valid), pl.Series(name, [None], dtype=series.dtype))
