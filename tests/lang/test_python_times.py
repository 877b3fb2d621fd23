"""Rows with times that Python has no object for are found, and can be shown."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from fordstone.lang.python_times import beyond_python, shown_row
from fordstone.lang.values import LEAST_US, MOST_US

TIME = pl.Datetime("us", "UTC")
DAY_US = 86_400_000_000


def times(*us: int | None) -> pl.Series:
    return pl.Series("at", us, dtype=pl.Int64).cast(TIME)


def struct(at: pl.Series) -> pl.Series:
    return at.to_frame().select(pl.struct(at=pl.struct("at"))).to_series()


def mapped(at: pl.Series) -> pl.Series:
    pairs = at.to_frame().select(pl.concat_list(pl.struct(pl.lit("k").alias("key"), value="at"))).to_series()
    return pairs.cast(pl.Map(pl.String(), TIME)).alias("at")


BOTH_ENDS = [LEAST_US - 1, LEAST_US, None, MOST_US, MOST_US + 1, 2**63 - 1]
COLUMNS: dict[str, pl.Series] = {
    "timestamp": times(*BOTH_ENDS),
    "milliseconds": pl.Series("at", [each and each // 1000 for each in BOTH_ENDS[:-1]] + [2**62], dtype=pl.Int64).cast(
        pl.Datetime("ms")
    ),
    "date": pl.Series("at", [each and each // DAY_US for each in BOTH_ENDS[:-1]] + [2**31 - 1], dtype=pl.Int32).cast(
        pl.Date
    ),
    "array": times(*BOTH_ENDS).to_frame().select(pl.concat_list("at", pl.lit(0).cast(TIME))).to_series(),
    "empty arrays": pl.Series(
        "at", [[LEAST_US - 1], [], None, [], [0, MOST_US + 1], [2**63 - 1]], dtype=pl.List(pl.Int64)
    ).cast(pl.List(TIME)),
    "struct": struct(times(*BOTH_ENDS)),
    "map": mapped(times(*BOTH_ENDS)),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_rows_beyond_python_are_found_and_can_be_shown_and_the_others_are_objects(column: pl.Series):
    frame = pl.DataFrame({"n": range(6)}).with_columns(column.alias("at"))
    assert beyond_python(frame) == {0: "at", 4: "at", 5: "at"}
    assert [len(frame[[place]].rows()) for place in (1, 2, 3)] == [1, 1, 1]
    shown: list[dict[str, Any]] = [shown_row(frame, place) for place in range(6)]
    assert [row["n"] for row in shown] == [0, 1, 2, 3, 4, 5]
    assert shown[1] == frame.row(1, named=True)
    assert str(column.to_physical()[5:].to_list()[0]) == str(shown[5]["at"])


def test_values_that_only_look_large_are_objects():
    frame = pl.DataFrame({"t": ["\U0010ffff" * 9], "n": [2**63 - 1], "x": [1e308], "b": [b"\xff"], "none": [None]})
    frame = frame.with_columns(
        pl.Series("d", ["9" * 38]).cast(pl.Decimal(38, 0)), pl.Series("s", [2**63 - 1]).cast(pl.Duration("us"))
    )
    assert beyond_python(frame) == {}
    assert shown_row(frame, 0) == frame.row(0, named=True)
