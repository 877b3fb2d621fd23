"""The seam of parts: what is kept of an aggregate's argument, so that parts of the rows can be merged and finished.

A part is a few columns of a partial row. Each kind of part is declared once, here or in `sketches` and `user`: how it is made of rows,
how it merges, and whether rows can be taken out of it again. `partial` lists the parts of each aggregate and computes its result.
First, last and collected values carry their time: rows of one time are ordered by value (nulls first, NaN last, -0.0 before 0.0).

Invariant: parts of rows, merged in any order and grouping, mean the same as the part of all the rows (rule 10: exact, except
sums of floats, and sketches).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import ClassVar, Final

import polars as pl

from fordstone.lang.polars.numbers import whole
from fordstone.lang.polars.times import microseconds
from fordstone.lang.schema import DECIMAL_DIGITS_MAX, DataType


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The argument of a call: in which columns of a batch its values stand. `max_by` and a user's own aggregate have several."""

    index: int
    names: tuple[str, ...]
    types: tuple[DataType, ...]
    time: str | None
    """The column with the rows' event time, if they have one."""

    @property
    def value(self) -> pl.Expr:
        return pl.col(self.names[0])

    @property
    def type(self) -> DataType:
        return self.types[0]


class Part(ABC):
    """One kind of part; equal parts of one argument are kept once. Pure, and called on any thread.

    Expressions are evaluated within a `group_by`, one for each of `columns`, named so.
    """

    __slots__ = ()
    order: ClassVar[int]
    """Where its columns stand among those of other parts."""
    streams: ClassVar[bool] = True
    """Its expressions may be evaluated by the streaming engine, which does not keep the order of rows."""

    @abstractmethod
    def columns(self, values: Values) -> tuple[str, ...]:
        """The names of its columns."""

    @abstractmethod
    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:
        """The part of each group of rows. `rows` are all of them: to look at, for a quicker way."""

    def of_row(self, values: Values) -> list[pl.Expr] | None:  # noqa: ARG002 - as parts that are only known for groups
        """The part of each row alone: cheaper, where few rows share a key. Not in a group. None: it costs more than grouping."""
        return None

    @abstractmethod
    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:
        """The part of each group of partial rows. `partials` are all of them."""

    def settle(self, values: Values, made: pl.DataFrame) -> list[pl.Series]:  # noqa: ARG002 - most parts are done by then
        """What `of_rows` or `merged` gave, brought to its final form by a function of whole columns, such as a sketch's."""
        return []

    def invertible(self, values: Values) -> bool:  # noqa: ARG002 - most parts are not, whatever the type
        """Whether the part of rows that leave can be subtracted: the columns are numbers that merge by adding, exactly."""
        return False


@dataclass(frozen=True, slots=True)
class Added(Part):
    """A number that merges by adding. `summand` is what a row adds, null for nothing; `exact`: for which types it subtracts exactly."""

    order: int  # type: ignore[misc]  # of each instance, where other parts have one of the class
    letter: str
    summand: Callable[[Values], pl.Expr]
    exact: Callable[[DataType], bool]

    def columns(self, values: Values) -> tuple[str, ...]:
        return (self.column(values),)

    def column(self, values: Values) -> str:
        return f"__{self.letter}{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:
        if self is COUNT and not rows.get_column(values.names[0]).null_count():
            # Without nulls the count is the number of rows, which costs nothing.
            return [pl.len().cast(pl.Int64).alias(self.column(values))]
        return [self.summand(values).sum().alias(self.column(values))]

    def of_row(self, values: Values) -> list[pl.Expr]:
        return [self.summand(values).fill_null(0).alias(self.column(values))]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return [pl.col(self.column(values)).sum()]

    def invertible(self, values: Values) -> bool:
        return self.exact(values.type)


def _summand(values: Values) -> pl.Expr:
    """Of integers in 64 bits, which wraps, of decimals with all 38 digits, of floats in doubles."""
    kind = values.type
    if kind.name in {"bigint", "double"}:
        return values.value
    if kind.is_integer:
        return values.value.cast(pl.Int64)
    return values.value.cast(pl.Decimal(38, kind.scale) if kind.name == "decimal" else pl.Float64)


COUNT: Final = Added(0, "n", lambda values: values.value.is_not_null().cast(pl.Int64), lambda _: True)
"""How many are not null."""
COUNT_TRUE: Final = Added(1, "t", lambda values: values.value.cast(pl.Int64), lambda _: True)
# A float that was added leaves an error when it is subtracted, and NaN stays for good.
SUM: Final = Added(2, "s", _summand, lambda kind: kind.is_integer or kind.name == "decimal")
DOUBLE_SUM: Final = Added(3, "f", lambda values: values.value.cast(pl.Float64), lambda _: False)
"""The sum of integers as doubles, which does not wrap: for their mean."""


_LIMB: Final = 10**8
_LIMBS: Final = 5
"""Five limbs of eight digits have 40 digits. Sums of them in 64 bits are exact for 90 billion rows."""


@dataclass(frozen=True, slots=True)
class WideSum(Part):
    """The exact sum of decimals whose sum may have more than 38 digits: a sum per limb of eight digits, the lowest first.

    Polars' own sum wraps in 128 bits, and Polars panics where a single value of more than 38 digits is made a column.
    """

    order = 2

    def columns(self, values: Values) -> tuple[str, ...]:
        return tuple(f"__w{values.index}_{limb}" for limb in range(_LIMBS))

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return [
            limb.sum().alias(name) for limb, name in zip(self.limbs(values.value), self.columns(values), strict=True)
        ]

    def of_row(self, values: Values) -> list[pl.Expr]:
        return [
            limb.fill_null(0).alias(name)
            for limb, name in zip(self.limbs(values.value), self.columns(values), strict=True)
        ]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return [pl.col(name).sum() for name in self.columns(values)]

    def invertible(self, values: Values) -> bool:  # noqa: ARG002 - integers subtract exactly
        return True

    def totals(self, columns: Sequence[pl.Series], kind: DataType) -> pl.Series:
        """The sums as decimals of a type; null where one does not fit."""
        totals = [sum(limb * _LIMB**place for place, limb in enumerate(row)) for row in zip(*columns, strict=True)]
        limit = 10**kind.precision
        with localcontext(prec=DECIMAL_DIGITS_MAX):
            found = [Decimal(total).scaleb(-kind.scale) if -limit < total < limit else None for total in totals]
        return pl.Series(found, dtype=kind.polars, strict=True)

    def limbs(self, value: pl.Expr) -> list[pl.Expr]:
        """The limbs of decimals, the lowest first."""
        rest, found = value.to_physical().cast(pl.Int128), []
        for _ in range(_LIMBS - 1):
            above = rest // whole(_LIMB)
            found.append((rest - above * whole(_LIMB)).cast(pl.Int64))
            rest = above
        return [*found, rest.cast(pl.Int64)]


WIDE_SUM: Final = WideSum()


@dataclass(frozen=True, slots=True)
class Extreme(Part):
    """The least or the greatest; NaN is greater than any number."""

    greatest: bool

    @property
    def order(self) -> int:  # type: ignore[override]  # one class for two parts
        return 5 if self.greatest else 4

    def columns(self, values: Values) -> tuple[str, ...]:
        return (self.column(values),)

    def column(self, values: Values) -> str:
        return f"__{'hi' if self.greatest else 'lo'}{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:
        return [self._found(values.value, rows.get_column(values.names[0])).alias(self.column(values))]

    def of_row(self, values: Values) -> list[pl.Expr]:
        return [values.value.alias(self.column(values))]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:
        name = self.column(values)
        return [self._found(pl.col(name), partials.get_column(name))]

    def _found(self, value: pl.Expr, seen: pl.Series) -> pl.Expr:
        if not self.greatest:
            return value.min()
        # A sum with NaN in it is NaN, and summing is quicker than looking at each; opposite infinities are looked at again.
        has_nan = seen.dtype.is_float() and math.isnan(seen.sum() or 0.0) and bool(seen.is_nan().any())
        return value.nan_max() if has_nan else value.max()


LEAST: Final = Extreme(greatest=False)
GREATEST: Final = Extreme(greatest=True)


@dataclass(frozen=True, slots=True)
class Spread(Part):
    """The mean and the sum of squared distances from it, which merge without losing digits. Needs `Count` beside it."""

    order = 6

    def columns(self, values: Values) -> tuple[str, ...]:
        return f"__mean{values.index}", f"__m2{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        mean, squares = self.columns(values)
        value = values.value
        return [value.mean().alias(mean), (value.var(ddof=0) * value.count()).alias(squares)]

    def of_row(self, values: Values) -> list[pl.Expr]:
        mean, squares = self.columns(values)
        # Not simply 0: of NaN and of the infinities it is NaN.
        return [values.value.alias(mean), (values.value - values.value).alias(squares)]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        """The squares of each part, and those of its mean's distance from the mean of all."""
        mean, squares = map(pl.col, self.columns(values))
        count = pl.col(COUNT.column(values))
        total = pl.when(count.sum() > 0).then((count * mean).sum() / count.sum())
        return [total.alias(self.columns(values)[0]), squares.sum() + (count * (mean - total).pow(2)).sum()]


SPREAD: Final = Spread()
_ROW: Final = "__row"


@dataclass(frozen=True, slots=True)
class End(Part):
    """The value of the first or of the last row, which may be null, and its time."""

    first: bool
    streams = False

    @property
    def order(self) -> int:  # type: ignore[override]  # one class for two parts
        return 7 if self.first else 8

    def columns(self, values: Values) -> tuple[str, ...]:
        letter = "first" if self.first else "last"
        return f"__{letter}_at{values.index}", f"__{letter}{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:
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
        at, value = self.columns(values)
        return [_time(values).alias(at), values.value.alias(value)]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        at, value = self.columns(values)
        return self._ends(values, pl.col(at), pl.col(value))

    def _ends(self, values: Values, time: pl.Expr, value: pl.Expr) -> list[pl.Expr]:
        at, name = self.columns(values)
        ordered = value.sort_by([time, *_order(values, value)])
        if self.first:
            return [time.min().alias(at), ordered.first().alias(name)]
        return [time.max().alias(at), ordered.last().alias(name)]


@dataclass(frozen=True, slots=True)
class Chosen(Part):
    """The first argument in the row with the least or the greatest second one, which is not null; of several such rows the least or the
    greatest value. So it does not depend on the order of rows.
    """

    greatest: bool
    streams = False

    @property
    def order(self) -> int:  # type: ignore[override]  # one class for two parts
        return 13 if self.greatest else 12

    def columns(self, values: Values) -> tuple[str, ...]:
        letter = "max" if self.greatest else "min"
        return f"__{letter}_by_at{values.index}", f"__{letter}_by{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return self._chosen(values, pl.col(values.names[1]), values.value)

    def of_row(self, values: Values) -> list[pl.Expr]:
        at, name = self.columns(values)
        by = pl.col(values.names[1])
        return [by.alias(at), pl.when(by.is_not_null()).then(values.value).alias(name)]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        at, name = self.columns(values)
        return self._chosen(values, pl.col(at), pl.col(name))

    def _chosen(self, values: Values, by: pl.Expr, value: pl.Expr) -> list[pl.Expr]:
        at, name = self.columns(values)
        order = [by, *_order(values, value)]
        nulls_last = [not self.greatest, *[False] * (len(order) - 1)]
        by, value = (each.sort_by(order, nulls_last=nulls_last) for each in (by, value))
        by, value = (each.last() if self.greatest else each.first() for each in (by, value))
        return [by.alias(at), pl.when(by.is_not_null()).then(value).alias(name)]


@dataclass(frozen=True, slots=True)
class Different(Part):
    """The different values that are not null, in order; -0.0 is 0.0."""

    order = 14
    streams = False

    def columns(self, values: Values) -> tuple[str, ...]:
        return (self.column(values),)

    def column(self, values: Values) -> str:
        return f"__set{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return [_one_zero(values).drop_nulls().unique().sort().alias(self.column(values))]

    def of_row(self, values: Values) -> list[pl.Expr]:
        # A list of a null stands for none: merging and finishing drop nulls.
        return [pl.concat_list(_one_zero(values)).alias(self.column(values))]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return [pl.col(self.column(values)).explode().drop_nulls().unique().sort()]

    def found(self, values: Values) -> pl.Expr:
        """The lists of different values, for results."""
        return pl.col(self.column(values)).list.drop_nulls()


def _one_zero(values: Values) -> pl.Expr:
    if not values.type.is_float:
        return values.value
    zero = pl.lit(0.0, dtype=values.type.polars)
    return pl.when(values.value == zero).then(zero).otherwise(values.value)


@dataclass(frozen=True, slots=True)
class Collected(Part):
    """All values that are not null, with their times where there are any; in no order before `in_order`."""

    order = 9
    streams = False

    def columns(self, values: Values) -> tuple[str, ...]:
        value = f"__all{values.index}"
        return (value,) if values.time is None else (f"__all_at{values.index}", value)

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        value = values.value.drop_nulls()
        found = [value] if values.time is None else [_time(values).filter(values.value.is_not_null()), value]
        return [each.alias(name) for each, name in zip(found, self.columns(values), strict=True)]

    def of_row(self, values: Values) -> list[pl.Expr]:
        value = values.value
        # A list of a null stands for none: merging and finishing drop nulls.
        found = [value] if values.time is None else [pl.when(value.is_not_null()).then(_time(values)), value]
        return [pl.concat_list(each).alias(name) for each, name in zip(found, self.columns(values), strict=True)]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return [pl.col(name).explode().drop_nulls() for name in self.columns(values)]


@dataclass(frozen=True, slots=True)
class Lagged(Part):
    """The value some rows before. Known of single rows only: it is looked up in rows that are in order (`operators.over`)."""

    rows: int
    order = 15

    def columns(self, values: Values) -> tuple[str, ...]:
        return (self.column(values),)

    def column(self, values: Values) -> str:
        return f"__lag{self.rows}_{values.index}"

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - only its type is asked for
        return [values.value.first().alias(self.column(values))]

    def of_row(self, values: Values) -> list[pl.Expr]:
        return [values.value.alias(self.column(values))]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:
        raise TypeError(f"{self.column(values)} is not merged, in {partials.height} rows")


FIRST: Final = End(first=True)
LAST: Final = End(first=False)
COLLECTED: Final = Collected()
LEAST_BY: Final = Chosen(greatest=False)
GREATEST_BY: Final = Chosen(greatest=True)
DIFFERENT: Final = Different()


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
