"""Reading, typing and refusing expressions."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import sqlglot
from hypothesis import given
from hypothesis import strategies as st
from sqlglot import exp

from fordstone.errors import ExpressionError
from fordstone.lang.expression import Expression, expand, parse, parse_predicate
from fordstone.lang.functions import ALIASES, FORMS, FUNCTIONS
from fordstone.lang.like import extracting, like_regex, replacing, rust_regex
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.term import Literal, quoted_text, render

SCHEMA = Schema.of(
    {
        "device": "string", "ts": "timestamp", "temp": "double", "n": "int", "big": "bigint", "f": "float", "ok": "boolean",
        "d": "date", "price": "decimal(10,2)", "words": "array<string>", "raw": "binary", "odd name": "int", "Temp2": "double",
    }
)  # fmt: skip


def error(text: str) -> ExpressionError:
    with pytest.raises(ExpressionError) as caught:
        parse(text, SCHEMA)
    return caught.value


def test_an_expression_knows_its_name_type_and_columns() -> None:
    found = parse("temp * 9 / 5 + 32 AS f", SCHEMA)
    assert (found.name, str(found.type), found.columns) == ("f", "double", ("temp",))
    assert found.sql == "temp * 9 / 5 + 32 AS f"
    assert found.deterministic


def test_columns_are_listed_once_in_the_order_of_the_text() -> None:
    assert parse("n + big * n - temp", SCHEMA).columns == ("n", "big", "temp")


def test_a_column_keeps_its_name_and_another_expression_is_called_by_its_text() -> None:
    assert parse("`odd name`", SCHEMA).name == "odd name"
    assert parse("n+1", SCHEMA).name == "n + 1"
    assert parse("n AS n", SCHEMA) == parse("n", SCHEMA)
    assert parse("n+1 AS `n + 1`", SCHEMA) == parse("n + 1", SCHEMA)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("(n)", "n"),
        ("n+1 b", "n + 1 AS b"),
        ("((n + 1)) * 2", "(n + 1) * 2"),
        ("n + (1 + 2)", "n + (1 + 2)"),
        ("n - 1 - 2", "n - 1 - 2"),
        ("n - (1 - 2)", "n - (1 - 2)"),
        ("-n", "-n"),
        ("-(n + 1)", "-(n + 1)"),
        ("- 5", "-5"),
        ("-(5)", "-(5)"),
        ("n - -5", "n - -5"),
        ("n == 1", "n = 1"),
        ("n != 1", "n <> 1"),
        ("n is not distinct from 1", "n <=> 1"),
        ("n is distinct from 1", "NOT n <=> 1"),
        ("not n = 1 and ok or ok", "NOT n = 1 AND ok OR ok"),
        ("not (n = 1 and ok)", "NOT (n = 1 AND ok)"),
        ("ok and (ok or ok)", "ok AND (ok OR ok)"),
        ("ok is true", "ok <=> TRUE"),
        ("n between 1 and 2", "n >= 1 AND n <= 2"),
        ("n not between 1 and 2", "NOT (n >= 1 AND n <= 2)"),
        ("n not in (1, 2)", "NOT n IN (1, 2)"),
        ("case n when 1 then 'a' end", "CASE WHEN n = 1 THEN 'a' END"),
        ("if(ok, 1, 2)", "CASE WHEN ok THEN 1 ELSE 2 END"),
        ("nullif(n, 1)", "CASE WHEN n = 1 THEN NULL ELSE n END"),
        ("nvl(n, 1)", "coalesce(n, 1)"),
        ("device || '!'", "concat(device, '!')"),
        ("int(temp)", "CAST(temp AS INT)"),
        ("temp::int", "CAST(temp AS INT)"),
        ("try_cast(temp as int)", "TRY_CAST(temp AS INT)"),
        ("mod(n, 2)", "n % 2"),
        ("SUBSTR(device, 1)", "substring(device, 1)"),
        ("extract(hour from ts)", "hour(ts)"),
        ("ts + interval 90 seconds", "ts + INTERVAL '90' SECOND"),
        ("ts + interval 1 hour 30 minutes", "ts + (INTERVAL '1' HOUR + INTERVAL '30' MINUTE)"),
        ("timestamp '2020-01-01'", "TIMESTAMP '2020-01-01 00:00:00Z'"),
        ("1e3", "1000.0D"),
        ("'it''s'", r"'it\'s'"),
        ("'a' 'b'", "'ab'"),
        ("n -- a comment", "n"),
        ("date_trunc('MON', ts)", "date_trunc('month', ts)"),
        ("words[0]", "words[0]"),
        ("device ILIKE 'A!_%' ESCAPE '!'", "lower(device) LIKE 'a!_%' ESCAPE '!'"),
        ("n not ilike '1%'", "NOT lower(n) LIKE '1%'"),
        ("LEFT(device, 2)", "left(device, 2)"),
        ("date_diff(d, ts)", "datediff(d, ts)"),
        ("HASH(n, words, NULL)", "hash(n, words, NULL)"),
    ],
)  # fmt: skip
def test_the_canonical_text_is_plain_and_reads_back(text: str, canonical: str) -> None:
    found = parse(text, SCHEMA)
    assert found.sql == canonical
    again = parse(found.sql, SCHEMA)
    assert again == found
    assert hash(again) == hash(found)
    assert again.term == found.term


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1", "int"), ("2147483648", "bigint"), ("-2147483648", "int"), ("9223372036854775808", "decimal(19,0)"), ("1.50", "decimal(3,2)"), ("1e0", "double"),
        ("1L", "bigint"), ("1S", "smallint"), ("1Y", "tinyint"), ("1F", "float"), ("1D", "double"), ("1BD", "decimal(1,0)"), ("NULL", "null"), ("X'0a'", "binary"),
        ("n + 1", "int"), ("n + big", "bigint"), ("n + temp", "double"), ("big + f", "float"), ("n / 2", "double"), ("f / f", "double"), ("n % big", "bigint"), ("n + 1.5", "decimal(12,1)"),
        ("price * 2", "decimal(12,2)"), ("price / 3", "decimal(14,6)"), ("price + temp", "double"), ("coalesce(n, price)", "decimal(12,2)"), ("coalesce(n, device)", "string"),
        ("greatest(n, temp)", "double"), ("floor(temp)", "bigint"), ("floor(price)", "decimal(9,0)"), ("round(price, 1)", "decimal(10,1)"), ("round(n)", "int"), ("length(device)", "int"), ("split(device, ' ')", "array<string>"),
        ("d + 1", "date"), ("d + INTERVAL '1' DAY", "date"), ("d + INTERVAL '24' HOUR", "timestamp"), ("coalesce(d, ts)", "timestamp"), ("unix_micros(ts)", "bigint"), ("hash(raw)", "int"), ("xxhash64(n, words)", "bigint"), ("date_add(ts, 1)", "date"), ("datediff(ts, d)", "int"), ("instr(device, 'a')", "int"), ("CASE WHEN ok THEN 1 ELSE 2L END", "bigint"),
    ],
)  # fmt: skip
def test_types_are_those_of_spark(text: str, kind: str) -> None:
    assert str(parse(text, SCHEMA).type) == kind


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("tmep > 3", "tmep", "no column 'tmep'. Did you mean 'temp'?"),
        ("n + TEMP", "TEMP", "Did you mean 'temp'?"),
        ("1 + zzz", "zzz", "Columns are: device, ts"),
        ("t.n + 1", "t.n", "without a table"),
        ("n + device", "device", "needs numbers, but this is string"),
        ("n +", "+", "missing after '+'"),
        ("foo(n)", "foo", "no function foo"),
        ("1 + lenght(device)", "lenght", "Did you mean length?"),
        ("substring(device)", "device", "called with 1 arguments; it is written substring(s, start[, length])"),
        ("n + sum(n)", "sum", "sum is an aggregate"),
        ("ok AND n", "n", "condition is needed here, but this is int"),
        ("CASE WHEN n THEN 1 END", "n", "condition is needed"),
        ("coalesce(n, ok)", "ok", "no common type"),
        ("ts > n", "ts", "cannot be compared"),
        ("raw = device", "raw", "cannot be compared"),
        ("words = words", "words", "cannot be compared"),
        ("ts + 5", "5", "write an INTERVAL"),
        ("ts - ts", "ts", "unix_micros"),
        ("n = 1 = ok", "n", "parentheses"),
        ("device || n + 1", "n + 1", "parentheses"),
        ("n IN (SELECT 1)", "1", "subqueries"),
        ("(SELECT n)", "n", "subqueries"),
        ("max(n) OVER ()", "max", "OVER stands only in the SELECT list"),
        ("n AS a + 1", "+", "not expected"),
        ("lower(*)", "*", "* stands only alone"),
        ("n; ok", ";", "one expression"),
        ("lower('abc", "'abc", "ends inside a quoted string"),
        ("abs(n", "n", "')' is missing"),
        ("CAST(n AS colour)", "colour", "'colour' is not a type"),
        ("CAST(d AS INT)", "d", "date cannot be cast to int"),
        ("device LIKE 'a\\\\'", "'a", "stands only before"),
        ("device LIKE device", "device", "string literal"),
        ("device RLIKE '(?=a)'", "'(?=a)'", "not supported"),
        ("device RLIKE 'a++'", "'a++'", "possessive"),
        ("device RLIKE '(a'", "'(a'", "lacks a ')'"),
        ("split(device, 'a*')", "'a*'", "can match an empty text"),
        ("split_part(device, ',', 0)", "0", "counted from 1"),
        ("round(temp, n)", "n)", "whole number written out"),
        ("date_trunc('eon', ts)", "'eon'", "is not a unit"),
        ("date_trunc(device, ts)", "device", "string literal"),
        ("INTERVAL '1' DAY", "'1'", "not a value of its own"),
        ("ts + INTERVAL '1 month 1 day'", "'1 month", "not both"),
        ("ts + INTERVAL n SECOND", "n SECOND", "number written out"),
        ("TIMESTAMP 'soon'", "'soon'", "is not a timestamp"),
        ("current_timestamp()", "current", "current_timestamp() is not supported"),
        ("count(DISTINCT n)", "count", "is an aggregate"),
        ("extract(century FROM ts)", "century", "cannot be extracted"),
        ("price * CAST(1 AS DECIMAL(38,10))", "price", "a decimal has 38"),
        ("-CAST(1 AS DECIMAL(38,0))", "1", "narrower"),
        ("device ilike device", "device", "string literal"),
        ("split(device, 'a$')", "'a$'", "'$' or '\\Z' in a separator"),
        ("regexp_replace(device, 'a*', 'b')", "'a*'", "must not be empty"),
        ("regexp_replace(device, '', 'b')", "''", "must not be empty"),
        ("regexp_replace(device, '\\\\bx?', 'b')", "'\\\\bx?'", "must not be empty"),
        ("regexp_replace(device, '\\\\s$', '')", "'\\\\s$'", "can match a line break"),
        ("regexp_replace(device, '(a*)+b', '$1')", "'(a*)+b'", "a repeated group that can be empty"),
        ("regexp_replace(device, 'a$', '$0')", "'a$'", "beside group 0"),
        ("regexp_replace(device, '(a$)', '$1')", "'(a$)'", "in group 1"),
        ("regexp_replace(device, 'a', '$1')", "'$1'", "has no group 1"),
        ("regexp_replace(device, 'a', '$')", "'$'", "a dollar sign is"),
        ("regexp_replace(device, '(?<x>a)', '${x}')", "'${x}'", "the number of a group"),
        ("regexp_replace(device, 'a', '\\\\')", "'\\\\'", "before nothing"),
        ("regexp_replace(device, device, 'a')", "device, 'a'", "string literal"),
        ("regexp_extract(device, 'a')", "'a'", "has no group 1"),
        ("regexp_extract(device, '(a)', 2)", "2", "has no group 2"),
        ("regexp_extract(device, '(a)', -1)", "1", "has no group -1"),
        ("regexp_extract(device, 'a$', 0)", "'a$'", "beside group 0"),
        ("regexp_extract(device, 'a(?=b)', 0)", "'a(?=b)'", "not supported"),
        ("lpad(device, n)", "n)", "whole number written out"),
        ("lpad(device, 10001)", "10001", "at most 10000"),
        ("rpad(device, 3, device)", "device)", "string literal"),
        ("concat_ws(device, n)", "device", "string literal"),
        ("concat_ws(',', words)", "words", "text is needed"),
        ("date_add(d, big)", "big", "must be an int"),
        ("datediff(n, d)", "n", "date is needed"),
        ("hash()", "hash", "called with 0 arguments"),
        ("hash(n, INTERVAL '1' DAY)", "'1'", "no hash"),
        ("n & 1", "n", "not supported"),
        ("", "", "empty"),
        ("  ", "", "empty"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_the_caret_under_it(text: str, place: str, says: str) -> None:
    found = error(text)
    assert says in found.message
    assert found.text == text
    if place and found.offset is not None and "current" not in text:
        assert text.startswith(place, found.offset), found


def test_the_caret_stands_under_the_place_after_text_beyond_ascii_and_line_breaks() -> None:
    found = error("concat('日本😀', \n  tmep)")
    assert found.offset is not None
    assert found.text[found.offset :] == "tmep)"
    assert str(found).endswith("\n    tmep)\n    ^")


def test_every_word_of_the_table_has_an_example_that_reads_back() -> None:
    for function in FUNCTIONS.values():
        found = parse(function.example, SCHEMA)
        assert parse(found.sql, SCHEMA) == found, function.name
        assert function.about.endswith(".")
        assert function.signature
    for _, about, example in FORMS:
        found = parse(example, SCHEMA)
        assert parse(found.sql, SCHEMA) == found
        assert about.endswith(".")
    assert set(ALIASES.values()) <= set(FUNCTIONS)


def test_names_are_case_sensitive_and_any_name_can_be_quoted() -> None:
    schema = Schema.of(
        {"a`b": "int", "select": "int", "é 😀": "int", "case": "int", "1st": "int", "A": "int", "a": "double"}
    )
    for name in schema:
        quoted = "`" + name.replace("`", "``") + "`"
        found = parse(f"{quoted} + 1 AS {quoted}", schema)
        assert found.columns == (name,)
        assert found.name == name
        assert parse(found.sql, schema) == found
    assert str(parse("A", schema).type) == "int"
    assert str(parse("a", schema).type) == "double"


def test_a_tree_of_another_dialect_is_understood() -> None:
    tree = sqlglot.parse_one("coalesce(n, 1) + length(device) + year(ts)", dialect="spark")
    assert parse(tree, SCHEMA) == parse("coalesce(n, 1) + length(device) + year(ts)", SCHEMA)


def test_an_error_in_a_built_tree_has_a_caret_too() -> None:
    tree = exp.Add(this=exp.column("n", quoted=True), expression=exp.column("nope", quoted=True))
    with pytest.raises(ExpressionError) as caught:
        parse(tree, SCHEMA)
    assert caught.value.offset is not None
    assert caught.value.text[caught.value.offset :] == "`nope`"


def test_expand_knows_the_star_and_refuses_two_columns_of_one_name() -> None:
    assert [e.name for e in expand(["*"], SCHEMA)] == list(SCHEMA)
    assert [e.name for e in expand([exp.Star()], SCHEMA)] == list(SCHEMA)
    assert [e.name for e in expand(["n", "temp + 1 AS t"], SCHEMA)] == ["n", "t"]
    assert expand([" * "], SCHEMA)[0] == parse("device", SCHEMA)
    with pytest.raises(ExpressionError, match="two columns are called 'n'"):
        expand(["*", "temp AS n"], SCHEMA)


def test_a_predicate_is_a_condition() -> None:
    assert parse_predicate("temp > -40", SCHEMA).type == DataType("boolean")
    assert parse_predicate("NULL", SCHEMA).type == DataType("boolean")
    with pytest.raises(ExpressionError, match=re.escape("a condition is needed here, but this is double")):
        parse_predicate("temp + 1", SCHEMA)


def test_expressions_are_values() -> None:
    one, two = parse("n +   1", SCHEMA), parse("n + 1", SCHEMA)
    assert one == two
    assert len({one, two}) == 1
    assert isinstance(one, Expression)
    assert one != parse("n + 2", SCHEMA)
    with pytest.raises(AttributeError):
        one.name = "x"  # type: ignore[misc]


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_survives_as_a_literal(text: str) -> None:
    found = parse(quoted_text(text), SCHEMA)
    assert isinstance(found.term, Literal)
    assert found.term.value == text
    assert render(found.term) == quoted_text(text)


@given(st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: not name.startswith("__")))
def test_any_name_survives_as_a_column(name: str) -> None:
    schema = Schema.of({name: "int"})
    found = parse(exp.Column(this=exp.Identifier(this=name, quoted=True)), schema)
    assert found.name == name
    assert parse(found.sql, schema) == found


@pytest.mark.parametrize("number", ["0.0D", "-0.0D", "1e-320", "1.7976931348623157E308D", "CAST('-Infinity' AS DOUBLE)", "0.1F", "3.4028235E38F", "-1.50", "99999999999999999999999999999999999999", "-0.0000001", "1.10"])  # fmt: skip
def test_numbers_survive_being_written(number: str) -> None:
    found = parse(number, SCHEMA)
    again = parse(found.sql, SCHEMA)
    assert repr(again.term) == repr(found.term)


def test_a_like_pattern_and_a_regular_expression_keep_javas_meaning() -> None:
    assert like_regex("a.%_!%", "!") == r"(?s)\A(?:a\..*.%)\z"
    assert rust_regex(r"\d") == "[0-9]"
    assert rust_regex("(?i)k") == "[kK]"
    assert replacing(r"(a)(b)", r"$2\$$1x") == ("(?P<group1>a)(?P<group2>b)", "${group2}$$${group1}x")
    assert extracting("(a)$|(b)", 2)[1] == 3  # what $ lets pass is a group of its own


def test_importing_expressions_loads_neither_rich_nor_numpy() -> None:
    code = "import sys, fordstone.lang.expression, fordstone.api.column; print('rich' in sys.modules, 'numpy' in sys.modules, 'pandas' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False False False"
