"""Aggregate expressions: calls that are kept, and the finish that is worked out of them."""

from __future__ import annotations

import polars as pl
import pytest
import sqlglot

from fordstone.errors import ExpressionError
from fordstone.lang.aggregates import AGGREGATES, parse_aggregate
from fordstone.lang.expression import parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import DataType, Schema

SCHEMA = Schema.of(
    {"temp": "double", "n": "int", "b": "tinyint", "big": "bigint", "f": "float", "s": "string", "ok": "boolean", "ts": "timestamp",
     "price": "decimal(10,2)", "wide": "decimal(35,2)", "words": "array<string>", "raw": "binary"}
)  # fmt: skip


def test_a_plain_call_is_one_call_and_its_result() -> None:
    found = parse_aggregate("avg(temp)", SCHEMA, "mean")
    assert [(call.function, call.argument.sql if call.argument else None) for call in found.calls] == [("mean", "temp")]
    assert found.finish.sql == "__a0 AS mean"
    assert found.finish.columns == ("__a0",)
    assert found.sql == "mean(temp) AS mean"
    assert found.columns == ("temp",)


def test_count_star_has_no_argument() -> None:
    for text in ("count(*)", "count()", "COUNT( * )"):
        found = parse_aggregate(text, SCHEMA, "n")
        assert found.calls[0].argument is None
        assert found.sql == "count(*) AS n"
        assert found.columns == ()


def test_expressions_of_calls_are_finished_from_their_results() -> None:
    found = parse_aggregate("sum(n * 2) / count(*)", SCHEMA, "r")
    assert [call.sql for call in found.calls] == ["sum(n * 2)", "count(*)"]
    assert found.finish.sql == "__a0 / __a1 AS r"
    frame = pl.DataFrame({"__a0": [7, 5], "__a1": [2, 0]})
    assert frame.select(to_polars(found.finish, found.results)).to_dict(as_series=False) == {"r": [3.5, None]}


def test_the_name_is_given_or_said_or_the_text() -> None:
    assert parse_aggregate("max(temp) - min(temp) AS spread", SCHEMA).name == "spread"
    assert parse_aggregate("max(temp) - min(temp) AS spread", SCHEMA, "spread").name == "spread"
    assert parse_aggregate("max(temp)", SCHEMA, "top").name == "top"
    assert parse_aggregate("max( temp )", SCHEMA).name == "max(temp)"
    with pytest.raises(ExpressionError, match="also AS spread"):
        parse_aggregate("max(temp) AS spread", SCHEMA, "top")


def test_the_mean_of_decimals_is_that_of_doubles_and_says_so() -> None:
    found = parse_aggregate("avg(price)", SCHEMA, "r")
    assert found.sql == "mean(CAST(price AS DOUBLE)) AS r"
    for call in (*found.calls, *parse_aggregate("sum(NULL) + avg(NULL)", SCHEMA).calls):
        assert call.argument is not None
        assert parse(call.argument.sql, SCHEMA) == call.argument


def test_trees_of_another_dialect_are_understood() -> None:
    tree = sqlglot.parse_one("sum(n) / count(*) + max(concat(s, 'x') = 'ax')", dialect="spark")
    with pytest.raises(ExpressionError, match="needs numbers, but this is boolean"):
        parse_aggregate(tree, SCHEMA)
    tree = sqlglot.parse_one("max(concat(s, 'x')) AS r", dialect="spark")
    assert parse_aggregate(tree, SCHEMA) == parse_aggregate("max(concat(s, 'x'))", SCHEMA, "r")


def test_the_same_call_twice_is_kept_once() -> None:
    found = parse_aggregate("avg(temp) + mean(temp) * max(n)", SCHEMA)
    assert [call.sql for call in found.calls] == ["mean(temp)", "max(n)"]
    assert found.finish.sql.startswith("__a0 + __a0 * __a1")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("count(*)", "bigint"), ("count(s)", "bigint"), ("sum(n)", "bigint"), ("sum(b)", "bigint"), ("sum(big)", "bigint"), ("sum(temp)", "double"), ("sum(f)", "double"),
        ("sum(price)", "decimal(20,2)"), ("sum(wide)", "decimal(38,2)"), ("avg(n)", "double"), ("avg(price)", "double"), ("mean(temp)", "double"), ("min(s)", "string"), ("max(ts)", "timestamp"), ("min(b)", "tinyint"),
        ("max(price)", "decimal(10,2)"), ("max(ok)", "boolean"), ("max(temp) > 3", "boolean"), ("sum(n) + 1", "bigint"), ("sum(price) / count(*)", "decimal(38,20)"), ("round(avg(temp), 1)", "double"),
        ("CASE WHEN count(*) > 0 THEN sum(n) END", "bigint"), ("count(CASE WHEN temp > 3 THEN 1 END)", "bigint"), ("date_trunc('hour', max(ts))", "timestamp"),
        ("count(DISTINCT s)", "bigint"), ("sum(DISTINCT price)", "decimal(20,2)"), ("avg(DISTINCT n)", "double"), ("max(DISTINCT s)", "string"), ("max_by(s, temp)", "string"),
        ("min_by(ts, n + 1)", "timestamp"), ("sum(n) FILTER (WHERE ok AND n > 1) / count(*) FILTER (WHERE ok)", "double"), ("count(DISTINCT s) FILTER (WHERE ok) + 1", "bigint"),
    ],
)  # fmt: skip
def test_results_have_sparks_types_and_read_back(text: str, kind: str) -> None:
    found = parse_aggregate(text, SCHEMA, "r")
    assert found.type == DataType.parse(kind)
    assert found.finish.type == found.type
    again = parse_aggregate(found.sql, SCHEMA, found.name)
    assert again == found
    assert hash(again) == hash(found)


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("n", "n", "stands outside of an aggregate"),
        ("sum(n) + big", "big", "write for instance max(big)"),
        ("1 + 1", "1", "not an aggregate; there are count(*)"),
        ("sum(s)", "s)", "a number is needed here, but this is string"),
        ("avg(ok)", "ok", "a number is needed"),
        ("sum(zzz)", "zzz", "no column 'zzz'"),
        ("sum(sum(n))", "sum(n))", "is an aggregate"),
        ("sum(*)", "*", ""),
        ("sum(n, big)", "sum", "called with 2 arguments; it is written sum(x)"),
        ("max(words)", "words", "arrays have no"),
        ("stddev(DISTINCT n)", "n)", "there are count, sum, avg, min and max of one DISTINCT"),
        ("count(DISTINCT n, big)", "n,", "of one DISTINCT expression"),
        ("sum(DISTINCT s)", "s)", "a number is needed here"),
        ("first(n) FILTER (WHERE ok)", "first", "first is not supported with FILTER"),
        ("abs(n) FILTER (WHERE ok)", "abs", "abs is not supported with FILTER"),
        ("sum(n) FILTER (WHERE s)", "s)", "a condition is needed"),
        ("max_by(n)", "max_by", "called with 1 arguments; it is written max_by(x, y)"),
        ("max_by(n, words)", "max_by", "array<string> cannot be put in order"),
        ("sum(n) OVER ()", "sum", "OVER stands only in the SELECT list"),
        (
            "percentile(temp, 0.5)",
            "percentile",
            "is not one of the aggregates here, which are approx_count_distinct, avg, ",
        ),
        ("quantile(temp)", "quantile", "called with 1 arguments; it is written quantile(x, q[, k])"),
        ("quantile(temp, 1.5)", "1.5", "q of quantile does not lie between 0 and 1"),
        ("quantile(temp, -0.1)", "0.1", "does not lie between 0 and 1"),
        ("quantile(temp, n)", "n)", "a number written out"),
        ("quantile(temp, 0.5, 7)", "7)", "no whole number from 8 to 65535"),
        ("median(s)", "s)", "a number is needed"),
        ("median(temp, 0.5, 200)", "median", "called with 3 arguments"),
        ("count_distinct(s, 22)", "22", "no whole number from 7 to 21"),
        ("count_distinct(s, 12.5)", "12.5", "no whole number"),
        ("count_distinct(words)", "words", "arrays cannot be counted"),
        ("first(words)", "words", "array<string> cannot be put in order"),
        ("collect(words)", "words", "array<string> cannot be put in order"),
        ("stddev(ok)", "ok", "a number is needed"),
        ("summ(temp)", "summ", "Did you mean sum?"),
    ],
)
def test_a_mistake_is_refused_with_the_caret_under_it(text: str, place: str, says: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_aggregate(text, SCHEMA, "r")
    assert says in caught.value.message
    assert caught.value.offset is not None
    assert text.startswith(place, caught.value.offset), caught.value


def test_every_aggregate_has_a_line_and_an_example_for_the_docs() -> None:
    for function in AGGREGATES.values():
        found = parse_aggregate(function.example, SCHEMA, over=function.over_only)
        assert found.calls[0].function == function.name
        assert function.about.endswith(".")
