"""Aggregates over a frame of rows up to each row: the last n rows of its key, those of a span of time, or all so far.

Rows wait until the watermark passes them and are then taken in order (`row_order`). Of each row there is a partial row of it alone
(`aggregate.partial`). A frame is a run of these, and is put together from runs of 1, 2, 4 ... partial rows that end where it ends: about
log2(frame) merges per row for all rows at once, and nothing is ever subtracted, so no rounding error and no NaN outlives its rows.

What is kept of a key: the partial rows that a later frame may reach, as lists; for frames that begin at the first row, one merged
partial row.

Invariants: a result is a function of the rows of its frame in order, to the last bit whatever the batches and restores, except that sums, means
and variances of floats over all rows so far may differ by rounding (rule 10). A row is emitted once: on the main port or on the late port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.aggregates import Aggregate, parse_aggregate
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US, human_us
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.part import COUNT, Added, End, Extreme, Lagged, Part, Spread, Values
from fordstone.operators.aggregate.partial import ONE, ROWS, Partials
from fordstone.operators.base import Emit, Emits, Family, Operator, OperatorContext, keys_text, stream_details
from fordstone.operators.row_order import KeyedRows, Numbers, OrderedOperator, WaitingRows
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

PRECEDING_ROWS_MAX: Final = 1_000_000
"""Maximum number of rows before a row that its frame holds: they are kept for every key."""
_TIME: Final = "__t"
_NEWEST: Final = "__newest"
"""The time of the last row of a key, by which keys are forgotten."""
_KEY: Final = "__key"

Array = npt.NDArray[Any]
Fields = tuple[Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """The frames of some rows, as places in an array: from `starts` to `ends`, both included. No frame is empty."""

    starts: Numbers
    ends: Numbers
    first: Numbers
    """The first place of the same key."""

    def folded(self, rows: Fields, merge: Callable[[Fields, Fields], Fields]) -> Fields:
        """Merge the rows of each frame, in order. `merge` takes earlier and later rows.

        Runs of 1, 2, 4 ... rows are merged for all places at once; a frame takes those that its length is the sum of, the shortest at
        its end. Runs that reach beyond a frame are never taken.
        """
        left, places = self.ends - self.starts + 1, self.ends.copy()
        found = tuple(np.empty(left.size, dtype=field.dtype) for field in rows)
        begun = np.zeros(left.size, dtype=np.bool_)
        run = 1
        while left.any():
            takes = (left & run) != 0
            fresh, more = takes & ~begun, takes & begun
            merged = merge(tuple(field[places[more]] for field in rows), tuple(field[more] for field in found))
            for into, field, both in zip(found, rows, merged, strict=True):
                into[fresh] = field[places[fresh]]
                into[more] = both
            begun |= takes
            places[takes] -= run
            left[takes] -= run
            # The runs of twice as many rows that end at each place; in the first ones there are not as many.
            longer = merge(tuple(field[:-run] for field in rows), tuple(field[run:] for field in rows))
            rows = tuple(np.concatenate([field[:run], both]) for field, both in zip(rows, longer, strict=True))
            run *= 2
        return found


def _sum(earlier: Fields, later: Fields) -> Fields:
    return tuple(one + other for one, other in zip(earlier, later, strict=True))


def _least(earlier: Fields, later: Fields) -> Fields:
    return (np.minimum(earlier[0], later[0]),)


def _spread(earlier: Fields, later: Fields) -> Fields:
    """Counts, means, and sums of squared distances from the mean."""
    (n1, mean1, squares1), (n2, mean2, squares2) = earlier, later
    count = n1 + n2
    share = n2 / np.maximum(count, 1)
    apart = mean2 - mean1
    mean, squares = mean1 + apart * share, squares1 + squares2 + apart * apart * n1 * share
    return (
        count,
        np.where(n1 == 0, mean2, np.where(n2 == 0, mean1, mean)),
        np.where(n1 == 0, squares2, np.where(n2 == 0, squares1, squares)),
    )


def over_frames(part: Part, values: Values, rows: pl.DataFrame, frames: Frames) -> list[pl.Series]:
    """The columns of a part over each frame, from those of single rows."""
    if isinstance(part, Added):
        return [_added(rows.get_column(part.column(values)), frames)]
    if isinstance(part, Extreme):
        return [_extreme(rows.get_column(part.column(values)), frames, greatest=part.greatest)]
    if isinstance(part, Spread):
        mean, squares = (rows.get_column(name) for name in part.columns(values))
        count = rows.get_column(COUNT.column(values)).to_numpy()
        given = (count, mean.fill_null(0.0).to_numpy(), squares.fill_null(0.0).to_numpy())
        with np.errstate(all="ignore"):
            _, means, sums = frames.folded(given, _spread)
        return [pl.Series(mean.name, means), pl.Series(squares.name, sums)]
    if isinstance(part, End):
        places = frames.starts if part.first else frames.ends
        return [rows.get_column(name).gather(places) for name in part.columns(values)]
    if isinstance(part, Lagged):
        places = frames.ends - part.rows
        found = rows.get_column(part.column(values)).gather(np.maximum(places, 0))
        return [found.zip_with(pl.Series(places >= frames.first), found.clear().extend_constant(None, 1))]
    raise TypeError(f"{part} is not known over frames")


def _added(column: pl.Series, frames: Frames) -> pl.Series:
    if column.dtype.is_decimal():
        # Whole numbers of any size; they are few enough to be added one by one.
        given = np.array(column.to_list(), dtype=object)
        (found,) = frames.folded((given,), _sum)
        return pl.Series(column.name, found.tolist(), dtype=column.dtype)
    with np.errstate(all="ignore"):
        (found,) = frames.folded((column.to_numpy(),), _sum)
    return pl.Series(column.name, found)


def _extreme(column: pl.Series, frames: Frames, *, greatest: bool) -> pl.Series:
    """By the place of each value in order, which works for any type; NaN is the greatest, and null is none."""
    order = column.arg_sort(descending=greatest, nulls_last=True).cast(pl.Int64).to_numpy()
    ranks = np.empty(order.size, dtype=np.int64)
    ranks[order] = np.arange(order.size)
    (found,) = frames.folded((ranks,), _least)
    return column.gather(order[found])


def over_aggregates(step: p.Over, schema: Schema) -> tuple[Aggregate, ...]:
    """The parsed aggregates of a step."""
    return tuple(parse_aggregate(given.sql, schema, given.name, over=True) for given in step.aggregates)


class Over(OrderedOperator):
    """Puts aggregates over their frames beside rows."""

    def __init__(self, step: p.Over, schema: Schema, *, time: EventTime, state: StateBackend) -> None:
        aggregates = over_aggregates(step, schema)
        self._by_time, self._preceding = step.frame == "range", step.preceding
        self._partials = Partials((), aggregates, schema, time=time, step=step.name)
        self._kept = [name for name in self._partials.schema if name != ONE]
        read = [*step.order, *(name for aggregate in aggregates for name in aggregate.columns)]
        self._waiting = WaitingRows(step.keys, schema, time=time, read=read, state=state)
        kinds = {name: self._partials.schema[name] for name in self._kept} | {_TIME: pl.Int64()}
        lists: dict[str, pl.DataType] = {name: pl.List(kind) for name, kind in kinds.items()}
        self._table = state.table(self._waiting.key, schema=self._waiting.key_types | lists | {_NEWEST: pl.Int64()})
        self._forget_us: int | None = TIME_MIN_US
        """No key can be forgotten before the watermark is this far; None: there is none to be forgotten."""

    def on_watermark(self, watermark_us: int) -> Emits:
        rows = self._waiting.release(watermark_us)
        out = [Emit(self._with_results(rows, watermark_us))] if rows.height else []
        if self._by_time and self._preceding is not None:
            self._forget(self._reach(watermark_us))
        return out

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state, "frames": self._table}

    def _reach(self, watermark_us: int) -> int:
        """The time from which on rows are in frames of rows to come."""
        return max(watermark_us - (self._preceding or 0), TIME_MIN_US)

    def _with_results(self, rows: pl.DataFrame, watermark_us: int) -> pl.DataFrame:
        found = self._waiting.by_key(rows)
        singles, before = self._singles(found), self._table.get(found.keys)
        held: Numbers = before.get_column(_TIME).list.len().fill_null(0).cast(pl.Int64).to_numpy()
        earlier = before.filter(pl.Series(held > 0)).select(*self._kept, _TIME).explode(*self._kept, _TIME)
        # The rows of each key: those from before, then the new ones.
        totals: Numbers = held + found.counts
        firsts: Numbers = np.cumsum(totals) - totals
        order = np.argsort(
            np.concatenate([np.repeat(firsts, held), np.repeat(firsts + held, found.counts)]), kind="stable"
        )
        together = pl.concat([earlier.select(singles.columns), singles])[order]
        new: Numbers = firsts + held - (np.cumsum(found.counts) - found.counts)
        places: Numbers = np.repeat(new, found.counts) + np.arange(rows.height)
        frames = self._frames(together, places, found, firsts, held)
        columns = [_added(together.get_column(ROWS), frames)]
        for part, values in self._partials.parts:
            columns += over_frames(part, values, together, frames)
        merged = pl.DataFrame([*columns, singles.get_column(_TIME)])
        self._remember(found, together, merged, firsts, held, watermark_us)
        results = self._partials.finish(merged)
        by_row = np.empty(rows.height, dtype=np.int64)
        by_row[found.by_key] = np.arange(rows.height)
        return found.rows.select(self._waiting.names).hstack(results[by_row])

    def _singles(self, found: KeyedRows) -> pl.DataFrame:
        """A partial row of each row alone, with its time, those of one key together."""
        rows = found.rows[found.by_key]
        times = pl.Series(_TIME, self._waiting.times(rows))
        return self._partials.of_rows_unmerged(rows.select(self._waiting.names)).select(self._kept).with_columns(times)

    def _frames(
        self, together: pl.DataFrame, places: Numbers, found: KeyedRows, firsts: Numbers, held: Numbers
    ) -> Frames:
        """The frame of each new row."""
        first = np.repeat(firsts, found.counts)
        if not self._by_time:
            starts = first if self._preceding is None else np.maximum(places - self._preceding, first)
            return Frames(starts=starts, ends=places, first=first)
        times = together.get_column(_TIME).to_numpy()
        keys = np.repeat(np.arange(held.size), held + found.counts)
        asked = times[places]
        since = np.maximum(asked, TIME_MIN_US + (self._preceding or 0)) - (self._preceding or 0)
        # Keys and times as one number each, so that one search finds the places of all keys.
        distinct, ranks = np.unique(np.concatenate([times, since]), return_inverse=True)
        codes, own = keys * distinct.size + ranks[: times.size], keys[places] * distinct.size
        ends = np.searchsorted(codes, own + np.searchsorted(distinct, asked), "right") - 1
        if self._preceding is None:
            return Frames(starts=first, ends=ends, first=first)
        return Frames(starts=np.searchsorted(codes, own + ranks[times.size :]), ends=ends, first=first)

    def _remember(
        self,
        found: KeyedRows,
        together: pl.DataFrame,
        merged: pl.DataFrame,
        firsts: Numbers,
        held: Numbers,
        watermark_us: int,
    ) -> None:
        """Keep of each key what later frames may reach."""
        totals = held + found.counts
        lasts = firsts + totals - 1
        newest = together.get_column(_TIME).gather(lasts).alias(_NEWEST)
        if self._preceding is None:
            # All rows so far as one.
            last = np.cumsum(found.counts) - 1
            kept, counts = merged.select(together.columns)[last], np.ones(totals.size, dtype=np.int64)
        elif self._by_time:
            reached = together.get_column(_TIME).to_numpy() >= self._reach(watermark_us)
            kept = together.filter(pl.Series(reached))
            counts = np.add.reduceat(reached, firsts, dtype=np.int64)
        else:
            counts = np.minimum(totals, self._preceding)
            places = np.repeat(lasts + 1 - counts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            kept = together[places]
        if not kept.height:
            self._table.delete(found.keys)
            return
        lists = kept.with_columns(pl.Series(_KEY, np.repeat(np.arange(counts.size), counts)))
        grouped = lists.group_by(_KEY, maintain_order=True).agg(pl.all())
        has = counts > 0
        if not has.all():
            self._table.delete(found.keys.filter(pl.Series(~has)))
        self._table.put(found.keys.with_columns(newest).filter(pl.Series(has)).hstack(grouped.drop(_KEY)))
        if self._forget_us is None:
            self._forget_us = TIME_MIN_US

    def _forget(self, reach_us: int) -> None:
        """Forget keys whose last row no frame reaches any more."""
        if self._forget_us is None or reach_us <= self._forget_us:
            return
        keys, following = self._table.keys_until(_NEWEST, reach_us - 1)
        if keys.height:
            self._table.delete(keys)
        self._forget_us = following


class OverFamily(Family[p.Over]):
    """Rows with aggregates over a frame of rows beside them."""

    steps = (p.Over,)
    stays = "{step} takes rows in order of time, over all nodes"

    def check(self, step: p.Over, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "over")
        time = needs_time(step, stream, "over")
        plain_keys(step.keys, stream.schema)
        if not step.aggregates:
            raise PipelineError(f"step {step.name}: over() needs at least one aggregate, such as mean='avg(temp)'.")
        self._check_frame(step)
        columns = dict(stream.schema)
        for aggregate in over_aggregates(step, stream.schema):
            if aggregate.name in columns:
                raise SchemaError(f"there is a column {aggregate.name!r} already. Name the new one differently.")
            columns[aggregate.name] = aggregate.type
            for call in aggregate.calls:
                if call.function == "lag" and (
                    step.frame == "range" or step.preceding is None or call.options[0] > step.preceding
                ):
                    raise PipelineError(
                        f"step {step.name}: lag looks {int(call.options[0]):,} rows back, which the frame does not keep. "
                        f"Write over(rows={int(call.options[0]) + 1}, ...)."
                    )
        main = StreamType(schema=Schema.of(columns), time=time, row_wise=False)
        return {p.Input(step.name): main, **late_rows(step, stream)}

    def _check_frame(self, step: p.Over) -> None:
        most = PRECEDING_ROWS_MAX if step.frame == "rows" else TIME_MAX_US
        if step.preceding is not None and not 0 <= step.preceding <= most:
            raise PipelineError(
                f"step {step.name}: the frame begins {step.preceding} {'rows' if step.frame == 'rows' else 'us'} before a row; that must not "
                f"be negative, and at most {most:,}."
            )

    def make(self, step: p.Over, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        return Over(step, stream.schema, time=needs_time(step, stream, "over"), state=context.state)

    def title(self, step: p.Over) -> str:
        return f"aggregates over {frame_text(step)} {keys_text(step.keys)}"

    def describe(self, step: p.Over, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield "computes", ", ".join(given.sql for given in step.aggregates)
        yield from stream_details(step, types)
        kept = "one row per key" if step.preceding is None else "those that frames of later rows may hold"
        yield "keeps", f"the rows that wait for time, and {kept}"


def frame_text(step: p.Over) -> str:
    """Which rows a frame holds."""
    if step.preceding is None:
        return "all rows so far"
    if step.frame == "rows":
        return f"the last {step.preceding + 1:,} rows" if step.preceding else "each row"
    return f"the rows of the last {human_us(step.preceding)}"
