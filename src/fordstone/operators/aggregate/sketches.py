"""Sketches: quantiles (KLL) and the number of different values (HyperLogLog).

Quantiles keep the values themselves while they are few, then a list of values with levels: one at level h stands for 2^h values. When
a sketch holds more than its levels have room for, the lowest crowded level is halved: sorted, every second value goes up a level,
chosen by the values and not by chance, so that the same parts merged in any order give the same sketch. Other batches give other
sketches: results are the same within the rank error (rule 10; about 1.3 % of the number of values for k = 200, and as 1/k). Levels
are those of Apache DataSketches, which Spark reads too. Nulls and NaN are left out, -0.0 is 0.0.

Different values are counted by a sketch of Apache DataSketches. One value is: text by its UTF-8 bytes, whole numbers, dates and timestamps
by 64 bits, floats with one zero and one NaN, decimals by their digits, bytes by their hex digits after an x. Null is no value.
Invariant: an estimate is a function of the set of values: a full sketch is taken as a union's, which ignores the order of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.lang.schema import DataType
from fordstone.operators.aggregate.part import Part, Values

_EMPTY: Final = "\0empty\0"
_FULL_PREAMBLE: Final = 10
"""The first byte of a sketch that has its registers; smaller ones list what they have seen."""
_FLAGS: Final = 5
_OUT_OF_ORDER: Final = 16


@dataclass(frozen=True, slots=True)
class Distinct(Part):
    """A sketch with 2 to the power of `lg_k` registers; null where no value has been seen."""

    lg_k: int
    order = 10
    streams = False

    def columns(self, values: Values) -> tuple[str, ...]:
        return (f"__hll{self.lg_k}_{values.index}",)

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        """The different values, of which `settle` makes sketches."""
        return [_canonical(values.value, values.type).drop_nulls().unique().alias(self.columns(values)[0])]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        return [pl.col(name).drop_nulls() for name in self.columns(values)]

    def settle(self, values: Values, made: pl.DataFrame) -> list[pl.Series]:
        (name,) = self.columns(values)
        lists = made.get_column(name)
        kind = lists.dtype.inner  # type: ignore[attr-defined]  # `of_rows` and `merged` give lists
        if kind == pl.Binary:
            return [_each(lists, lambda sketches: _union(sketches, self.lg_k))]
        return [_each(lists, lambda seen: _sketch(seen, self.lg_k))]


def estimates(lg_k: int) -> Callable[[Sequence[pl.Series]], pl.Series]:
    """The function that gives the estimate of each sketch of a column, a whole number."""

    def of(columns: Sequence[pl.Series]) -> pl.Series:
        (sketches,) = columns
        found = [0 if data is None else round(_unordered(data, lg_k).get_estimate()) for data in sketches.to_list()]
        return pl.Series(sketches.name, found, dtype=pl.Int64)

    return of


@cache
def _package() -> Any:
    import datasketches  # type: ignore[import-untyped]  # noqa: PLC0415 - two megabytes that only sketches need

    return datasketches


def _canonical(value: pl.Expr, kind: DataType) -> pl.Expr:
    if kind.name == "binary":
        return pl.lit("x") + value.bin.encode("hex")
    if kind.name in {"string", "null", "decimal"}:
        return value.cast(pl.String).replace("", _EMPTY)
    if kind.is_float:
        double = value.cast(pl.Float64)
        return pl.when(double == 0).then(0.0).otherwise(double)
    return value.cast(pl.Int64)


def _each(lists: pl.Series, make: Callable[[list[Any]], bytes]) -> pl.Series:
    found = [make(each) if each else None for each in lists.to_list()]
    return pl.Series(lists.name, found, dtype=pl.Binary)


def _sketch(seen: Iterable[Any], lg_k: int) -> bytes:
    package = _package()
    sketch = package.hll_sketch(lg_k, package.tgt_hll_type.HLL_8)
    update = sketch.update
    for value in seen:
        update(value)
    return bytes(sketch.serialize_compact())


def _union(sketches: Sequence[bytes], lg_k: int) -> bytes:
    if len(sketches) == 1:
        return sketches[0]
    package = _package()
    union = package.hll_union(lg_k)
    for data in sketches:
        union.update(package.hll_sketch.deserialize(data))
    return bytes(union.get_result(package.tgt_hll_type.HLL_8).serialize_compact())


def _unordered(data: bytes, lg_k: int) -> Any:
    """The sketch as if it had come out of a union: one that took its values one by one would know more than a merged one."""
    package = _package()
    union = package.hll_union(lg_k)
    union.update(package.hll_sketch.deserialize(data))
    found = bytearray(union.get_result(package.tgt_hll_type.HLL_8).serialize_compact())
    if found[0] == _FULL_PREAMBLE:
        found[_FLAGS] |= _OUT_OF_ORDER
    return package.hll_sketch.deserialize(bytes(found))


Doubles = npt.NDArray[np.float64]
Levels = npt.NDArray[np.uint8]

LEVEL_ROOM_MIN: Final = 8
_MIX: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Quantiles(Part):
    """A sketch of size `k`: lists of values and of their levels, the least and the greatest value."""

    k: int
    order = 11
    streams = False

    def columns(self, values: Values) -> tuple[str, ...]:
        return tuple(f"__kll{self.k}_{what}{values.index}" for what in ("values", "levels", "min", "max"))

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        seen = values.value.filter(values.value.is_not_nan())
        made = (seen, seen.is_null().cast(pl.UInt8), seen.min(), seen.max())
        return [each.alias(name) for each, name in zip(made, self.columns(values), strict=True)]

    def of_row(self, values: Values) -> list[pl.Expr]:
        seen = pl.when(values.value.is_not_nan()).then(values.value)
        level = pl.when(values.value.is_not_nan()).then(pl.lit(0, dtype=pl.UInt8))
        # A list of a null stands for none: merging drops nulls.
        made = (pl.concat_list(seen), pl.concat_list(level), seen, seen)
        return [each.alias(name) for each, name in zip(made, self.columns(values), strict=True)]

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        items, levels, least, greatest = map(pl.col, self.columns(values))
        return [items.explode().drop_nulls(), levels.explode().drop_nulls(), least.min(), greatest.max()]

    def settle(self, values: Values, made: pl.DataFrame) -> list[pl.Series]:
        items, levels = (made.get_column(name) for name in self.columns(values)[:2])
        crowded = np.flatnonzero((items.list.len() > self.k).to_numpy())
        if not crowded.size:
            return []
        found = [compact(items[row].to_numpy(), levels[row].to_numpy(), self.k) for row in crowded.tolist()]
        rows = np.arange(made.height)
        rows[crowded] = made.height + np.arange(crowded.size)
        return [
            pl.concat([items, pl.Series(items.name, [pl.Series(kept) for kept, _ in found], dtype=items.dtype)]).gather(
                rows
            ),
            pl.concat([levels, pl.Series(levels.name, [pl.Series(at) for _, at in found], dtype=levels.dtype)]).gather(
                rows
            ),
        ]


def compact(items: Doubles, levels: Levels, k: int) -> tuple[Doubles, Levels]:
    """Halve the lowest crowded level until there is room. The same items in any order give the same."""
    by_level = [np.sort(items[levels == level] + 0.0) for level in range(int(levels.max()) + 1)]
    while sum(map(len, by_level)) > sum(level_room(len(by_level), level, k) for level in range(len(by_level))):
        level = next(at for at, held in enumerate(by_level) if len(held) >= level_room(len(by_level), at, k))
        kept, raised = _halved(by_level[level])
        if level + 1 == len(by_level):
            by_level.append(raised)
        else:
            by_level[level + 1] = np.sort(np.concatenate([by_level[level + 1], raised]))
        by_level[level] = kept
    sizes = [len(held) for held in by_level]
    return np.concatenate(by_level), np.repeat(np.arange(len(by_level), dtype=np.uint8), sizes)


def level_room(levels: int, level: int, k: int) -> int:
    """How many values a level has room for: k at the top, and two thirds of the one above at each below."""
    depth = levels - 1 - level
    share: int = ((k << (depth + 1)) // 3**depth + 1) // 2
    return max(LEVEL_ROOM_MIN, share)


def _halved(ordered: Doubles) -> tuple[Doubles, Doubles]:
    """What stays (one, where they are odd) and what goes up: every second."""
    bits = int(np.bitwise_xor.reduce(ordered.view(np.uint64) * np.uint64(_MIX))) * _MIX
    upper, low = bits >> 63 & 1, bits >> 62 & 1
    if len(ordered) % 2 == 0:
        return ordered[:0], ordered[upper::2]
    return (ordered[:1], ordered[1 + upper :: 2]) if low else (ordered[-1:], ordered[upper:-1:2])


def quantiles(q: float) -> Callable[[Sequence[pl.Series]], pl.Series]:
    """The function that gives the quantile of each sketch, from the columns of `Quantiles`; null of none."""

    def of(columns: Sequence[pl.Series]) -> pl.Series:
        items, levels, least, greatest = columns
        if q in {0.0, 1.0}:
            return _positive_zero(least if q == 0 else greatest)
        lists = pl.DataFrame({"items": items, "levels": levels}).with_row_index("row")
        flat = lists.explode("items", "levels").drop_nulls().sort("row", "items")
        values, rows = flat.get_column("items").to_numpy() + 0.0, flat.get_column("row").to_numpy()
        reached = np.cumsum(np.int64(1) << flat.get_column("levels").cast(pl.Int64).to_numpy())
        found, ends = np.full(len(items), np.nan), np.searchsorted(rows, np.arange(len(items) + 1))
        before = np.concatenate([[0], reached])[ends]
        known = np.diff(ends) > 0
        # The product is a little too large for some shares, such as 0.07 of 100.
        wanted = np.maximum(np.ceil(np.diff(before) * q * (1 - 4 * np.finfo(float).eps)), 1).astype(np.int64)
        places = np.searchsorted(reached, (before[:-1] + wanted)[known])
        found[known] = values[places]
        return pl.Series(items.name, found).zip_with(pl.Series(known), pl.Series([None], dtype=pl.Float64))

    return of


def _positive_zero(values: pl.Series) -> pl.Series:
    return values.zip_with((values != 0).fill_null(value=True), pl.Series([0.0]))
