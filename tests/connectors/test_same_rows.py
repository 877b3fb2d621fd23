from __future__ import annotations

import math

import polars as pl
import pytest

from fordstone.connectors.compare import difference, same_rows

ONE = pl.DataFrame({"k": ["a", "a", "b", None], "x": [1.0, 1.0, math.nan, None], "l": [[1], [1], [], None]})


def test_order_does_not_count_and_repetition_does() -> None:
    assert same_rows(ONE, ONE.reverse())
    assert not same_rows(ONE, ONE.unique())
    assert not same_rows(ONE.unique(), ONE)


def test_floats_may_differ_a_little_and_no_more() -> None:
    assert same_rows(ONE, ONE.with_columns(pl.col("x") + 1e-12))
    assert not same_rows(ONE, ONE.with_columns(pl.col("x") + 1e-6))


@pytest.mark.parametrize("other", [ONE.rename({"k": "key"}), ONE.drop("l"), ONE.cast({"x": pl.Float32()}), ONE.clear()])
def test_other_columns_or_types_are_not_the_same(other: pl.DataFrame) -> None:
    assert not same_rows(ONE, other)


def test_what_differs_is_given_on_both_sides() -> None:
    missing, extra = difference(ONE, ONE.with_columns(k=pl.lit("a")))
    assert set(missing["k"]) == {"b", None}
    assert extra["k"].to_list() == ["a", "a"]
