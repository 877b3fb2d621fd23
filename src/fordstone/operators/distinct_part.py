"""How many different values: a HyperLogLog sketch of Apache DataSketches, as the bytes that its readers everywhere take.

What is one value: text by its UTF-8 bytes, whole numbers, dates and timestamps by 64 bits, floats by their value with one
zero and one NaN, decimals by their digits, bytes by their hex digits behind an x. Null is no value. The empty text is one, which the package
would pass over: another text stands for it.

The package is imported where the first sketch is made. Invariant: an estimate is a function of the set of values, not of how
they came: once a sketch is full it is taken as a union's, whose estimate does not look at the order of updates (rule 10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import polars as pl

from fordstone.model.schema import DataType
from fordstone.operators.part import Part, Values

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
    single = False

    def columns(self, values: Values) -> tuple[str, ...]:
        """The sketch."""
        return (f"__hll{self.lg_k}_{values.index}",)

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        """The different values, of which `settle` makes sketches."""
        return [_canonical(values.value, values.type).drop_nulls().unique().alias(self.columns(values)[0])]

    def of_row(self, values: Values) -> list[pl.Expr]:
        """There is none."""
        raise NotImplementedError("a sketch for each row would be more work than grouping")

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:  # noqa: ARG002 - one way for all
        """The sketches, which `settle` unites."""
        return [pl.col(name).drop_nulls() for name in self.columns(values)]

    def settle(self, values: Values, made: pl.DataFrame) -> list[pl.Series]:
        """Sketches of values, or unions of sketches."""
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
