"""Parts that carry the order of rows: the first and the last value, and all values.

The order is that of time, and among rows of one time that of the values themselves: nulls first, NaN last, -0.0 before
0.0. So what comes out is a function of the rows, whatever the batches, and the time travels with the value, so that parts
merge in any order (rule 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.lang.polars.times import microseconds
from fordstone.operators.aggregate.part import Part, Values

_ROW: Final = "__row"


@dataclass(frozen=True, slots=True)
class End(Part):
    """The value of the first or of the last row, which may be null, and its time."""

    first: bool
    streams = False

    @property
    def order(self) -> int:  # type: ignore[override]  # one class for two parts
        """First stands before last."""
        return 7 if self.first else 8

    def columns(self, values: Values) -> tuple[str, ...]:
        """The time and the value."""
        letter = "first" if self.first else "last"
        return f"__{letter}_at{values.index}", f"__{letter}{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:
        """The end in order of time, then of value."""
        at, value = self.columns(values)
        time = _time(values)
        if _in_order(values, rows):
            # No two rows of one time, all in order: nothing need be compared.
            found = [time, values.value]
            return [
                (each.first() if self.first else each.last()).alias(name)
                for each, name in zip(found, (at, value), strict=True)
            ]
        return self._ends(values, time, values.value)

    def of_row(self, values: Values) -> list[pl.Expr]:
        """The row itself."""
        at, value = self.columns(values)
        return [_time(values).alias(at), values.value.alias(value)]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        """The end of the ends."""
        at, value = self.columns(values)
        return self._ends(values, pl.col(at), pl.col(value))

    def _ends(self, values: Values, time: pl.Expr, value: pl.Expr) -> list[pl.Expr]:
        at, name = self.columns(values)
        ordered = value.sort_by([time, *_order(values, value)])
        if self.first:
            return [time.min().alias(at), ordered.first().alias(name)]
        return [time.max().alias(at), ordered.last().alias(name)]


@dataclass(frozen=True, slots=True)
class Collected(Part):
    """All values that are not null, with their times where there are any; in no order before `in_order`."""

    order = 9
    streams = False

    def columns(self, values: Values) -> tuple[str, ...]:
        """The times, where there are any, and the values."""
        value = f"__all{values.index}"
        return (value,) if values.time is None else (f"__all_at{values.index}", value)

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        """Lists, as the rows come."""
        value = values.value.drop_nulls()
        found = [value] if values.time is None else [_time(values).filter(values.value.is_not_null()), value]
        return [each.alias(name) for each, name in zip(found, self.columns(values), strict=True)]

    def of_row(self, values: Values) -> list[pl.Expr]:
        """Lists of one."""
        value = values.value
        # A list of a null stands for none: merging and finishing drop nulls.
        found = [value] if values.time is None else [pl.when(value.is_not_null()).then(_time(values)), value]
        return [pl.concat_list(each).alias(name) for each, name in zip(found, self.columns(values), strict=True)]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        """The lists, one behind the other."""
        return [pl.col(name).explode().drop_nulls() for name in self.columns(values)]


FIRST: Final = End(first=True)
LAST: Final = End(first=False)
COLLECTED: Final = Collected()


def in_order(columns: Sequence[pl.Series]) -> pl.Series:
    """Lists of values, each put in the order of its list of times (the columns of `Collected`); an empty list for none."""
    names = [f"__c{at}" for at in range(len(columns))]
    lists = pl.DataFrame([column.alias(name) for column, name in zip(columns, names, strict=True)])
    flat = lists.with_row_index(_ROW).explode(names).drop_nulls(names)
    kind = flat.schema[names[-1]]
    order = [_ROW, *names] if not kind.is_float() else [_ROW, *names, pl.lit(1.0) / pl.col(names[-1]) > 0]
    found = flat.sort(order).group_by(_ROW, maintain_order=True).agg(names[-1])
    rows = pl.DataFrame({_ROW: pl.arange(lists.height, dtype=pl.get_index_type(), eager=True)})
    joined = rows.join(found, on=_ROW, how="left", maintain_order="left").get_column(names[-1])
    return joined.fill_null(pl.Series([[]], dtype=joined.dtype)) if joined.null_count() else joined


def _time(values: Values) -> pl.Expr:
    if values.time is None:
        raise TypeError("rows without event time have no first and no last")
    return pl.col(values.time).cast(pl.Int64)


def _order(values: Values, value: pl.Expr) -> list[pl.Expr]:
    # Polars takes -0.0 and 0.0 for equal.
    return [value, pl.lit(1.0) / value > 0] if values.type.is_float else [value]


def _in_order(values: Values, rows: pl.DataFrame) -> bool:
    if values.time is None or rows.height < 2:  # noqa: PLR2004 - one row is in order
        return False
    times = microseconds(rows.get_column(values.time)).to_numpy()
    return bool((times[1:] > times[:-1]).all())
