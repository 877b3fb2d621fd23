"""Columns by slot: both kinds of storage keep the same promises."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from fordstone.state.column import (
    LOG_WASTE_BYTES_MIN,
    LOG_WASTE_ROWS_MIN,
    ArrayColumn,
    Column,
    LogColumn,
    Slots,
    column_of,
)

KINDS: list[tuple[pl.DataType, list[object]]] = [
    (pl.Int64(), [1, None, 3]),
    (pl.Boolean(), [True, None, False]),
    (pl.Float32(), [0.5, None, float("inf")]),
    (pl.String(), ["a", None, "more than twelve bytes"]),
    (pl.Decimal(8, 2), ["1.25", None, "-3.00"]),
    (pl.List(pl.Int64()), [[1], None, []]),
]


def slots(*numbers: int) -> Slots:
    return np.array(numbers, dtype=np.int64)


def put(column: Column, where: Slots, values: list[object]) -> None:
    column.put(where, column.cells(pl.Series("c", values).cast(column.dtype)))


@pytest.fixture(params=KINDS, ids=lambda kind: str(kind[0]))
def filled(request: pytest.FixtureRequest) -> tuple[Column, list[object]]:
    dtype, values = request.param
    column = column_of("c", dtype)
    column.grow(8)
    put(column, slots(5, 0, 2), values)
    return column, pl.Series("c", values).cast(dtype).to_list()


def test_what_was_put_is_got_by_slot(filled: tuple[Column, list[object]]) -> None:
    column, values = filled
    assert column.get(slots(2, 5, 0, 5)).to_list() == [values[2], values[0], values[1], values[0]]
    assert column.get(slots(2)).dtype == column.dtype


def test_what_was_not_found_is_null(filled: tuple[Column, list[object]]) -> None:
    column, values = filled
    assert column.get(slots(2, 5), found=np.array([False, True])).to_list() == [None, values[0]]


@pytest.mark.parametrize("dense", [False, True])
def test_what_was_frozen_stays_when_the_slots_are_written_again(
    filled: tuple[Column, list[object]], dense: bool
) -> None:
    column, values = filled
    make = column.frozen(slots(0, 2, 5), dense=dense)
    put(column, slots(0, 2, 5), [values[0]] * 3)
    column.grow(100)
    assert make().to_list() == [values[1], values[2], values[0]]
    assert column.get(slots(0, 2, 5)).to_list() == [values[0]] * 3


def test_growing_keeps_the_values(filled: tuple[Column, list[object]]) -> None:
    column, values = filled
    column.grow(1000)
    put(column, slots(999), [values[2]])
    assert column.get(slots(999, 0, 5)).to_list() == [values[2], values[1], values[0]]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not isinstance(kind[0], pl.List)], ids=lambda kind: str(kind[0])
)
def test_null_equals_null_and_nothing_else(kind: tuple[pl.DataType, list[object]]) -> None:
    column = column_of("c", kind[0])
    column.grow(8)
    put(column, slots(5, 0, 2), kind[1])
    values = column.get(slots(5, 0, 2)).to_list()
    cells = column.cells(pl.Series("c", [values[0], values[1], values[1], values[0]]).cast(column.dtype))
    assert column.equal(slots(5, 0, 5, 0), cells).tolist() == [True, True, False, False]


def test_types_of_fixed_width_lie_in_arrays_and_others_in_a_log() -> None:
    assert all(
        isinstance(column_of("c", dtype), ArrayColumn) for dtype in (pl.Int8(), pl.Date(), pl.Datetime("us", "UTC"))
    )
    assert all(isinstance(column_of("c", dtype), LogColumn) for dtype in (pl.String(), pl.Decimal(10, 2), pl.Int128()))


def test_cells_of_another_kind_are_refused() -> None:
    column = column_of("c", pl.Int64())
    column.grow(1)
    cells = column_of("c", pl.String()).cells(pl.Series(["a"]))
    with pytest.raises(TypeError, match="another kind of column"):
        column.put(slots(0), cells)
    with pytest.raises(TypeError, match="another kind of column"):
        column.equal(slots(0), cells)


@pytest.mark.slow
def test_a_log_is_cleared_of_waste_and_keeps_what_counts() -> None:
    column = column_of("c", pl.String())
    assert isinstance(column, LogColumn)
    column.grow(10)
    put(column, slots(9), ["kept"])
    for number in range(3 * LOG_WASTE_ROWS_MIN // 8):
        put(column, np.arange(8), [f"value {number} of slot {slot}" for slot in range(8)])
    assert column._end <= LOG_WASTE_ROWS_MIN + 28
    assert len(column._chunks) <= 20
    assert column.get(slots(9, 8, 7)).to_list() == ["kept", None, f"value {number} of slot 7"]


@pytest.mark.slow
def test_a_log_is_cleared_of_few_rows_that_take_much_room() -> None:
    column = LogColumn("c", pl.List(pl.Int64()))
    column.grow(2)
    put(column, slots(1), [[7]])
    for length in range(200_000, 200_050):
        put(column, slots(0), [list(range(length))])
    # All that was ever written is 80 MB, what counts is 1.6 MB.
    assert column.size_bytes() < LOG_WASTE_BYTES_MIN + 8 * 1024 * 1024
    assert column.get(slots(0)).list.len().to_list() == [200_049]
    assert column.get(slots(1)).to_list() == [[7]]


@pytest.mark.slow
def test_what_a_forgotten_slot_held_goes_with_the_next_clearing() -> None:
    column = LogColumn("c", pl.List(pl.Int64()))
    column.grow(100)
    for slot in range(100):
        put(column, slots(slot), [list(range(100_000))])
        column.forget(slots(slot))
    put(column, slots(3), [[1]])
    assert column.size_bytes() < LOG_WASTE_BYTES_MIN + 4 * 1024 * 1024
    assert column.get(slots(3, 4)).to_list() == [[1], None]
