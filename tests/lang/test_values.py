"""Python values of declared types: what fits, and in which form it is kept."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest

from fordstone.lang.schema import DataType, Schema
from fordstone.lang.values import UNFIT, UTC, UnfitError, coercion, frame_of_columns

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=UTC)
NAIVE = NOON.replace(tzinfo=None)
DAY = dt.date(2026, 1, 1)
FITTING: list[tuple[str, Any, Any]] = [
    ("int", 1, 1),
    ("int", np.int64(7), 7),
    ("bigint", -(2**63), -(2**63)),
    ("double", 1, 1.0),
    ("double", np.float32(0.5), 0.5),
    ("float", 0.1, float(np.float32(0.1))),
    ("string", "ä", "ä"),
    ("binary", b"x", b"x"),
    ("boolean", False, False),
    ("decimal(10,2)", Decimal("1.5"), Decimal("1.50")),
    ("decimal(10,2)", 3, Decimal("3.00")),
    ("date", DAY, DAY),
    ("timestamp", NOON, NOON),
    ("timestamp", NOON.astimezone(dt.timezone(dt.timedelta(hours=2))), NOON),
    ("array<int>", (1, None), [1, None]),
    ("map<string, double>", {"a": 1}, {"a": 1.0}),
    ("struct<a: int, b: string>", {"a": 1}, {"a": 1, "b": None}),
]
AS_READ: list[tuple[str, Any, Any]] = [
    ("timestamp", NAIVE, NOON),
    ("timestamp", "2026-01-01T12:00:00", NOON),
    ("timestamp", "2026-01-01T14:00:00+02:00", NOON),
    ("date", "2026-01-01", DAY),
    ("decimal(10,2)", Decimal("1.235"), Decimal("1.24")),
    ("decimal(10,2)", 12.345, Decimal("12.35")),
    ("struct<at: timestamp>", {"at": "2026-01-01T12:00:00"}, {"at": NOON}),
]
UNFITTING: list[tuple[str, Any]] = [
    ("int", 2.0),
    ("int", "3"),
    ("int", True),
    ("int", 2**31),
    ("bigint", 2**63),
    ("double", "1"),
    ("double", True),
    ("string", 1),
    ("string", b"x"),
    ("binary", "x"),
    ("boolean", 1),
    ("decimal(10,2)", "1"),
    ("decimal(10,2)", True),
    ("decimal(10,2)", 10**8),
    ("date", NOON),
    ("date", 1),
    ("timestamp", DAY),
    ("timestamp", 1),
    ("timestamp", "yesterday"),
    ("array<int>", 1),
    ("array<int>", [1.5]),
    ("map<string, double>", [("a", 1)]),
    ("map<string, double>", {1: 1.0}),
    ("struct<a: int>", {"a": 2.5}),
    ("struct<a: int>", {"b": 1}),
]


def frame_of(kind: str, *values: Any) -> pl.DataFrame:
    return frame_of_columns({"x": list(values)}, Schema.of({"x": kind}))


@pytest.mark.parametrize(("kind", "value", "kept"), FITTING)
def test_a_value_of_the_type_is_kept_in_one_form(kind: str, value: Any, kept: Any):
    for as_read in (False, True):
        found = coercion(DataType.parse(kind), as_read=as_read)(value)
        assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize(("kind", "value", "kept"), AS_READ)
def test_a_value_that_is_read_may_have_other_forms_too(kind: str, value: Any, kept: Any):
    assert coercion(DataType.parse(kind), as_read=True)(value) == kept
    with pytest.raises(UNFIT):
        coercion(DataType.parse(kind))(value)


@pytest.mark.parametrize(("kind", "value"), UNFITTING)
def test_a_value_of_another_type_is_an_error_and_never_null_or_another_value(kind: str, value: Any):
    for as_read in (False, True):
        with pytest.raises(UNFIT):
            coercion(DataType.parse(kind), as_read=as_read)(value)
    fitting = next((given for known, given, _ in FITTING if known == kind), None)
    with pytest.raises(UnfitError, match=r"^column x: ") as caught:
        frame_of(kind, fitting, None, value)
    assert (caught.value.row, caught.value.column) == (2, "x")


@pytest.mark.parametrize(("kind", "value", "kept"), [*FITTING, *AS_READ])
def test_a_frame_has_the_same_values(kind: str, value: Any, kept: Any):
    found = frame_of(kind, value, None, value)
    assert found.schema == Schema.of({"x": kind}).polars
    assert found.get_column("x").null_count() == 1
    assert found.equals(frame_of(kind, kept, None, kept))
    if not kind.startswith("map"):
        assert found.get_column("x").to_list() == [kept, None, kept]
