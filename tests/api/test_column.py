"""Expressions built with operators are the same as written ones, whatever names and values they hold."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.api.column import Column, col, count, fn, lit, max_, mean, min_, sum_, when
from fordstone.errors import ExpressionError
from fordstone.lang.aggregates import parse_aggregate
from fordstone.lang.expression import parse
from fordstone.lang.schema import DataType, Schema

SCHEMA = Schema.of(
    {
        "a": "int",
        "x": "double",
        "s": "string",
        "ok": "boolean",
        "ts": "timestamp",
        "d": "date",
        "words": "array<string>",
    }
)


@pytest.mark.parametrize(
    ("built", "written"),
    [
        (col("a") + 1, "a + 1"),
        (1 + col("a"), "1 + a"),
        ((col("a") + 1) * 2, "(a + 1) * 2"),
        (2 - (col("a") - 1), "2 - (a - 1)"),
        (col("a") - 1 - 2, "a - 1 - 2"),
        (2 * col("a") / 3 % 4, "2 * a / 3 % 4"),
        (6 / col("a"), "6 / a"),
        (6 % col("a"), "6 % a"),
        (-col("a"), "-a"),
        (-(col("a") + 1), "-(a + 1)"),
        (col("a") == 1, "a = 1"),
        (col("a") != 1, "a <> 1"),
        (col("a") < 1, "a < 1"),
        (col("a") <= 1, "a <= 1"),
        (col("a") > 1, "a > 1"),
        (1 > col("a"), "a < 1"),  # noqa: SIM300 - the order is what is tested
        (col("a") >= -1, "a >= -1"),
        ((col("a") > 1) & ~col("ok") | (col("x") < 2), "a > 1 AND NOT ok OR x < 2"),
        ((col("a") > 1) & (~col("ok") | (col("x") < 2)), "a > 1 AND (NOT ok OR x < 2)"),
        (~((col("a") > 1) & col("ok")), "NOT (a > 1 AND ok)"),
        (True & col("ok"), "TRUE AND ok"),
        (False | col("ok"), "FALSE OR ok"),
        (col("a").is_null(), "a IS NULL"),
        ((col("a") + 1).is_not_null(), "a + 1 IS NOT NULL"),
        (col("a").is_in(1, 2, None), "a IN (1, 2, NULL)"),
        (col("a").between(1, col("x")), "a BETWEEN 1 AND x"),
        (col("s").like("a%"), "s LIKE 'a%'"),
        (col("s").rlike("a+"), "s RLIKE 'a+'"),
        (col("a").null_safe_eq(None), "a <=> NULL"),
        (col("a").cast("double") / 2, "CAST(a AS DOUBLE) / 2"),
        (col("a").cast(DataType.parse("decimal(5,1)")), "CAST(a AS DECIMAL(5,1))"),
        (when(col("ok"), 1).when(col("a") > 1, 2).otherwise(3), "CASE WHEN ok THEN 1 WHEN a > 1 THEN 2 ELSE 3 END"),
        (when(col("ok"), col("s")), "CASE WHEN ok THEN s END"),
        (fn("lower", col("s")), "lower(s)"),
        (fn("date_trunc", "hour", col("ts")), "date_trunc('hour', ts)"),
        (col("words")[0], "words[0]"),
        (fn("split", col("s"), " ")[1], "split(s, ' ')[1]"),
        (col("ts") - timedelta(seconds=90), "ts - INTERVAL '90' SECOND"),
        (col("ts") + timedelta(milliseconds=-1500), "ts + INTERVAL '-1.5' SECOND"),
        ((col("a") + 1).as_("b"), "a + 1 AS b"),
        (col("a").as_("b").as_("c"), "a AS c"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_built_is_what_is_written(built: Column, written: str) -> None:
    found = parse(built.tree, SCHEMA)
    assert found == parse(written, SCHEMA)
    assert parse(found.sql, SCHEMA) == found


@pytest.mark.parametrize(
    ("value", "sql", "kind"),
    [
        (None, "NULL", "null"),
        (True, "TRUE", "boolean"),
        (5, "5", "int"),
        (-5, "-5", "int"),
        (2**31, "2147483648", "bigint"),
        (-(2**63), "-9223372036854775808", "bigint"),
        (1.5, "1.5D", "double"),
        (-0.0, "-0.0D", "double"),
        (1e300, "1e+300D", "double"),
        (float("nan"), "CAST('NaN' AS DOUBLE)", "double"),
        (float("-inf"), "CAST('-Infinity' AS DOUBLE)", "double"),
        (Decimal("1.50"), "1.50", "decimal(3,2)"),
        (
            Decimal("-12345678901234567890123456789012345.67"),
            "-12345678901234567890123456789012345.67",
            "decimal(37,2)",
        ),
        (Decimal(-5), "-5BD", "decimal(1,0)"),
        (Decimal("1E3"), "1000BD", "decimal(4,0)"),
        ("it's", r"'it\'s'", "string"),
        (b"\x00\xff", "X'00FF'", "binary"),
        (date(2024, 2, 29), "DATE '2024-02-29'", "date"),
        (datetime(1969, 12, 31, 23, 59, 59, 5, tzinfo=UTC), "TIMESTAMP '1969-12-31 23:59:59.000005Z'", "timestamp"),
        (datetime(2024, 1, 1, 1, tzinfo=timezone(timedelta(hours=2))), "TIMESTAMP '2023-12-31 23:00:00Z'", "timestamp"),
    ],
)
def test_a_python_value_is_the_constant_it_looks_like(value: Any, sql: str, kind: str) -> None:
    found = parse(lit(value).tree, SCHEMA)
    assert found.sql == sql
    assert str(found.type) == kind
    assert parse(found.sql, SCHEMA) == found


@pytest.mark.parametrize("value", [object(), [1], datetime(2024, 1, 1), Decimal("NaN"), {"a": 1}])
def test_a_value_that_is_no_constant_is_refused(value: Any) -> None:
    with pytest.raises(ExpressionError):
        lit(value)


@given(
    name=st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: not name.startswith("__")),
    text=st.text(st.characters(codec="utf-8")),
)
def test_no_name_and_no_text_can_break_out_of_its_place(name: str, text: str) -> None:
    schema = Schema.of({name: "string"})
    found = parse((col(name) == text).as_(name).tree, schema)
    assert found.columns == (name,)
    assert found.name == name
    assert parse(found.sql, schema) == found


def test_aggregates_are_built_as_they_are_written() -> None:
    pairs = [
        (count(), "count(*)"), (count("a"), "count(a)"), (count(col("a") > 1), "count(a > 1)"), (sum_("a"), "sum(a)"), (mean(col("x")), "avg(x)"),
        (min_("ts"), "min(ts)"), (max_("x") - min_("x"), "max(x) - min(x)"), ((sum_("a") / count()).as_("r"), "sum(a) / count(*)"),
    ]  # fmt: skip
    for built, written in pairs:
        assert parse_aggregate(built.tree, SCHEMA, "r") == parse_aggregate(written, SCHEMA, "r")


def test_a_column_is_no_truth_value_and_cannot_be_looped_over() -> None:
    with pytest.raises(TypeError, match=r"& \| ~"):
        bool(col("a") == 1)
    with pytest.raises(TypeError):
        iter(col("a"))
    with pytest.raises(TypeError):
        1 in col("a")  # noqa: B015 - the test itself
    with pytest.raises(TypeError):
        hash(col("a"))


def test_building_with_a_column_leaves_it_as_it_was() -> None:
    base = col("a") + 1
    before = str(base)
    first = when(col("ok"), base)
    first.otherwise(2)
    first.when(col("ok"), 3)
    assert (str(base * 2), str(base), str(first)) == ("(`a` + 1) * 2", before, "CASE WHEN `ok` THEN `a` + 1 END")


@pytest.mark.parametrize(
    "make", [lambda: col(""), lambda: fn("lower(", "x"), lambda: col("a").as_("b") + 1, lambda: col("a").is_in()]
)
def test_what_cannot_be_built_is_refused_at_once(make: Any) -> None:
    with pytest.raises(ExpressionError):
        make()


def test_an_unknown_column_in_a_built_expression_is_named_with_a_caret() -> None:
    with pytest.raises(ExpressionError, match="no column 'b'") as caught:
        parse((col("a") + col("b") * 2).tree, SCHEMA)
    assert caught.value.offset is not None
    assert caught.value.text.startswith("`b`", caught.value.offset)
