"""Terms over single values mean what their Polars lowering means, to the last bit."""

from __future__ import annotations

import itertools
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import polars as pl
import pytest
from tests.operators.subtasks import bits

from fordstone.lang.expression import parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.polars.scalar import as_plain, as_typed, plain_type, scalar_of, wrapped
from fordstone.lang.schema import Schema

SCHEMA = Schema.of(
    {
        "a": "double", "b": "double", "f": "float", "i": "bigint", "j": "bigint", "n": "int", "s": "string", "u": "string",
        "q": "boolean", "r": "boolean", "t": "timestamp", "d": "date", "m": "decimal(10,2)", "l": "array<string>",
    }
)  # fmt: skip
DOUBLES = [None, 0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan, 1e308]
WHOLE = [None, 0, 1, -7, 2**63 - 1, -(2**63)]
TEXTS = [None, "", "a", "b", "é", "Z"]
TRUTHS = [None, True, False]
VALUES: dict[tuple[str, str], list[Any]] = {
    ("a", "b"): DOUBLES, ("i", "j"): WHOLE, ("s", "u"): TEXTS, ("q", "r"): TRUTHS,
}  # fmt: skip
OTHERS: dict[str, list[Any]] = {
    "f": [None, 0.1, math.nan], "n": [None, 5, 2**31 - 1], "t": [None, datetime(2024, 2, 29, 12, tzinfo=UTC)],
    "d": [None, date(1969, 12, 31)], "m": [None, Decimal("12.50"), Decimal("-0.01")], "l": [None, [], ["x", None]],
}  # fmt: skip
COMPARISONS = ("=", "<>", "<", "<=", ">", ">=", "<=>")
EXPRESSIONS = [
    *(f"{left} {op} {right}" for op in COMPARISONS for left, right in (("a", "b"), ("i", "j"), ("s", "u"), ("q", "r"), ("i", "b"))),
    *(f"a {op} b" for op in "+-*/%"), *(f"i {op} j" for op in "+-*/%"), "-a", "-i", "abs(a)", "abs(i)", "n + n", "n * 2", "-n",
    "q AND r", "q OR r", "NOT q", "q AND NOT r OR q", "a IS NULL", "i IS NOT NULL", "i IN (0, 1, NULL)", "a IN (0.0D, 1.5D)",
    "CASE WHEN q THEN a WHEN r THEN b END", "CASE WHEN q THEN i ELSE j END", "coalesce(a, b, 1.0D)", "coalesce(i, j)",
    "greatest(a, b)", "least(i, j)", "i + n > j", "i + a < b", "f > a", "f + f", "n + i", "a + 0.5D > b", "i / j > 1",
    "upper(s) = u", "length(s) > n", "s || u", "s LIKE 'a%'", "t + INTERVAL '1' HOUR", "t - INTERVAL '90' SECOND", "t + INTERVAL '2' DAY", "t + INTERVAL '1' MONTH", "d + INTERVAL '2' DAY", "t - INTERVAL '1' HOUR < t", "t > TIMESTAMP '2024-01-01 00:00:00Z'",
    "hour(t) = n", "d < DATE '1970-01-01'", "m + 1", "m > 12.4", "m * m", "m = i", "CAST(i AS STRING)", "CAST(s AS DOUBLE)",
    "size(l)", "l[0]", "round(a, 1)", "floor(a)", "CAST(a AS BIGINT)", "CAST(n AS BIGINT) * 3", "TRUE AND q", "NULL OR q",
]  # fmt: skip


def frame_for(columns: tuple[str, ...]) -> pl.DataFrame:
    values = {}
    for name in columns:
        pair = next((given for names, given in VALUES.items() if name in names), None)
        values[name] = OTHERS[name] if pair is None else pair
    rows = list(itertools.product(*values.values())) or [()]
    data = {name: [row[at] for row in rows] for at, name in enumerate(values)}
    return (
        pl.DataFrame(data, schema={name: SCHEMA[name].polars for name in values})
        if values
        else pl.DataFrame({"z": [1]})
    )


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_a_scalar_is_what_the_column_would_be(text):
    found = parse(text, SCHEMA)
    frame = frame_for(found.columns)
    names = list(found.columns)
    scalar = scalar_of(found.term, lambda name: lambda _, values: values[names.index(name)])
    column = frame.select(as_plain(to_polars(found, SCHEMA), found.type)).to_series().to_list()
    plain = frame.select(as_plain(pl.col(name), SCHEMA[name]) for name in names).rows() or [()]
    assert [bits(scalar((), values)) for values in plain] == [bits(value) for value in column]


@pytest.mark.parametrize(
    "kind", ["decimal(38,10)", "timestamp", "date", "float", "array<timestamp>", "array<decimal(5,1)>", "binary"]
)
def test_plain_values_typed_again_are_what_they_were(kind):
    schema = Schema.of({"x": kind})
    given = {
        "decimal(38,10)": [Decimal("1234567890123456789012345678.0123456789"), None], "timestamp": [datetime(1, 1, 1, tzinfo=UTC), None],
        "date": [date(9999, 12, 31), None], "float": [0.1, math.nan, None], "array<timestamp>": [[datetime(2024, 1, 1, tzinfo=UTC), None], None],
        "array<decimal(5,1)>": [[Decimal("1.5")], []], "binary": [b"\x00\xff", None],
    }[kind]  # fmt: skip
    frame = pl.DataFrame({"x": given}, schema=schema.polars)
    plain = frame.select(as_plain(pl.col("x"), schema["x"])).to_series().to_list()
    again = pl.DataFrame({"x": plain}, schema={"x": plain_type(schema["x"])}).select(as_typed(pl.col("x"), schema["x"]))
    assert again.equals(frame)


def test_whole_numbers_wrap():
    assert [wrapped(2**63), wrapped(-(2**63) - 1), wrapped(2**31, 32), wrapped(5)] == [-(2**63), 2**63 - 1, -(2**31), 5]
