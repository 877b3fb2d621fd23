"""Random expressions over random rows: they read back as they are written, and running them never raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import polars as pl
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from tests.examples import examples

from fordstone.errors import ExpressionError
from fordstone.lang.expression import parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema

SCHEMA = Schema.of(
    {
        "b": "tinyint", "i": "int", "l": "bigint", "f": "float", "x": "double", "p": "decimal(10,2)",
        "q": "decimal(38,6)", "s": "string", "t": "string", "ok": "boolean", "ts": "timestamp", "d": "date", "odd `name`": "int",
    }
)  # fmt: skip

# Everything of a kind: (kind, how it is written, kinds of what goes into it).
Form = tuple[str, str, tuple[str, ...]]
FORMS: list[Form] = [
    *(("number", f"({{}}) {op} ({{}})", ("number", "number")) for op in "+-*/%"),
    *(("number", f"{{}} {op} {{}}", ("leaf", "leaf")) for op in "+-*/%"),
    ("number", "-({})", ("number",)),
    *(("number", f"{name}({{}})", ("number",)) for name in ("abs", "floor", "ceil", "sqrt", "exp", "ln", "log10", "log2", "sign")),
    *(("number", f"round({{}}, {places})", ("number",)) for places in (-20, -2, 0, 1, 3, 18)),
    ("number", "pow({}, {})", ("number", "number")),
    ("number", "greatest({}, {})", ("number", "number")),
    ("number", "least({}, {})", ("number", "number")),
    ("number", "coalesce({}, {})", ("number", "number")),
    ("number", "nullif({}, {})", ("number", "number")),
    ("number", "CASE WHEN {} THEN {} ELSE {} END", ("condition", "number", "number")),
    *(("number", f"CAST({{}} AS {kind})", ("any",)) for kind in ("TINYINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL(10,2)", "DECIMAL(38,12)")),
    *(("number", f"TRY_CAST({{}} AS {kind})", ("number",)) for kind in ("TINYINT", "BIGINT", "DECIMAL(5,2)")),
    ("number", "length({})", ("text",)),
    ("number", "size(split({}, ' '))", ("text",)),
    *(("number", f"{name}({{}})", ("time",)) for name in ("year", "month", "dayofweek", "weekofyear", "hour", "second", "unix_micros", "unix_seconds")),
    *(("number", f"{name}({{}}, {{}})", ("any", "any")) for name in ("hash", "xxhash64")),
    ("number", "instr({}, {})", ("text", "text")),
    ("number", "datediff({}, {})", ("time", "time")),
    *(("condition", f"{name}({{}}, {{}})", ("text", "text")) for name in ("startswith", "endswith", "contains")),
    ("condition", "({}) ILIKE '%A_'", ("text",)),
    *(("text", f"{name}({{}}, {{}})", ("text", "whole")) for name in ("left", "right")),
    *(("text", f"{name}({{}}, 7, 'é😀')", ("any",)) for name in ("lpad", "rpad")),
    ("text", "concat_ws('-', {}, {})", ("any", "text")),
    ("text", "reverse({})", ("text",)),
    ("text", "regexp_replace({}, '([a-f])(\\\\d)?$|é', '$2\\\\$')", ("text",)),
    ("text", "regexp_extract({}, '(\\\\d+)|(.)$', 2)", ("text",)),
    *(("time", f"{name}({{}}, {{}})", ("time", "whole")) for name in ("date_add", "date_sub")),
    *(("condition", f"({{}}) {op} ({{}})", ("number", "number")) for op in ("=", "<>", "<", ">=", "<=>")),
    *(("condition", f"({{}}) {op} ({{}})", ("text", "text")) for op in ("=", "<", "<=>")),
    *(("condition", f"({{}}) {op} ({{}})", ("time", "time")) for op in ("=", ">", "<=>")),
    ("condition", "({}) AND ({})", ("condition", "condition")),
    ("condition", "({}) OR ({})", ("condition", "condition")),
    ("condition", "NOT ({})", ("condition",)),
    ("condition", "({}) IS NULL", ("any",)),
    ("condition", "({}) IS NOT NULL", ("any",)),
    ("condition", "({}) IN ({}, {}, NULL)", ("number", "number", "number")),
    ("condition", "({}) BETWEEN ({}) AND ({})", ("number", "number", "number")),
    ("condition", "({}) LIKE '%a_'", ("text",)),
    ("condition", "({}) RLIKE '(?i)^[a-f]+\\\\s?\\\\d*$'", ("text",)),
    ("condition", "isnan({})", ("number",)),
    ("condition", "CAST({} AS BOOLEAN)", ("any",)),
    ("text", "concat({}, {})", ("any", "text")),
    ("text", "({}) || ({})", ("text", "any")),
    *(("text", f"{name}({{}})", ("text",)) for name in ("lower", "upper", "trim", "ltrim")),
    ("text", "trim(BOTH {} FROM {})", ("text", "text")),
    ("text", "substr({}, {}, {})", ("text", "whole", "whole")),
    ("text", "substr({}, {})", ("text", "whole")),
    ("text", "replace({}, 'a', '😀')", ("text",)),
    ("text", "split({}, '[, ]')[{}]", ("text", "whole")),
    ("text", "split_part({}, 'a', -2)", ("text",)),
    ("text", "CAST({} AS STRING)", ("any",)),
    ("text", "CASE WHEN {} THEN {} END", ("condition", "text")),
    *(("time", f"date_trunc('{unit}', {{}})", ("time",)) for unit in ("year", "quarter", "week", "day", "hour", "millisecond")),
    *(("time", f"({{}}) {op} INTERVAL {span}", ("time",)) for op in "+-" for span in ("'36' HOUR", "'1' MONTH", "7 DAYS", "'-3' YEAR", "'0.5' SECOND")),
    ("time", "CAST({} AS TIMESTAMP)", ("any",)),
    ("time", "CAST({} AS DATE)", ("time",)),
    ("time", "to_timestamp({})", ("text",)),
    ("time", "coalesce({}, {})", ("time", "time")),
    ("time", "greatest({}, {})", ("time", "time")),
]  # fmt: skip
LEAVES = {
    "number": ["b", "i", "l", "f", "x", "p", "q", "`odd ``name```", "0", "1", "-1", "2147483647", "-2147483648", "9223372036854775807", "-9223372036854775808", "0.5", "-1.50", "1e300", "-0.0D", "1.5F", "3L", "NULL", "CAST('NaN' AS DOUBLE)"],
    "whole": ["i", "0", "1", "-3", "2147483647", "-2147483648", "CAST(b AS INT)", "NULL", "`odd ``name```"],
    "condition": ["ok", "TRUE", "FALSE", "NULL"],
    "text": ["s", "t", "''", "'a b'", "'it\\'s \\\\ \\n'", "'é😀日'", "NULL", "'2020-02-30 25:00'", "'1e5'"],
    "time": ["ts", "d", "TIMESTAMP '1969-12-31 23:59:59.5'", "DATE '2024-02-29'"],
}  # fmt: skip
LEAVES["leaf"] = LEAVES["number"]
LEAVES["any"] = [*LEAVES["number"], *LEAVES["condition"], *LEAVES["text"], *LEAVES["time"]]


def trees(kind: str, depth: int) -> st.SearchStrategy[str]:
    leaf = st.sampled_from(LEAVES[kind])
    forms = [form for form in FORMS if form[0] == kind or kind == "any"]
    if depth == 0 or not forms:
        return leaf

    def filled(form: Form) -> st.SearchStrategy[str]:
        return st.tuples(*(trees(part, depth - 1) for part in form[2])).map(lambda parts: form[1].format(*parts))

    return st.one_of(leaf, st.sampled_from(forms).flatmap(filled))


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    limit = 10**digits - 1
    return st.one_of(st.integers(-limit, limit), st.sampled_from([0, limit, -limit])).map(
        lambda n: Decimal(f"{n}e-{scale}")
    )


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "tinyint": st.integers(-128, 127),
    "int": st.integers(-(2**31), 2**31 - 1) | st.sampled_from([2**31 - 1, -(2**31), 0, -1]),
    "bigint": st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**63 - 1, -(2**63), 0, -1]),
    "float": st.floats(width=32),
    "double": st.floats() | st.sampled_from([0.0, -0.0, math.nan, math.inf, 1.005, 2.5]),
    "decimal(10,2)": decimals(10, 2),
    "decimal(38,6)": decimals(38, 6),
    "string": st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["", " 12.5 ", "2024-02-29 23:59:59.5Z", "-1e400", "a,b c", "NaN"]),
    "boolean": st.booleans(),
    "timestamp": st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**16), 10**16),
    "date": st.integers(-(2**31), 2**31 - 1) | st.integers(-800_000, 3_000_000),
}  # fmt: skip
ROWS = st.lists(st.tuples(*(st.none() | VALUES[str(kind)] for _, kind in SCHEMA.columns)), min_size=0, max_size=4)


def frame(rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    physical: Callable[[str], pl.DataType | None] = {"timestamp": pl.Int64(), "date": pl.Int32()}.get
    columns = {}
    for at, (name, kind) in enumerate(SCHEMA.columns):
        stored = physical(kind.name)
        series = pl.Series([row[at] for row in rows], dtype=stored or kind.polars)
        columns[name] = series.cast(kind.polars) if stored is not None else series
    return pl.DataFrame(columns)


@examples(300, HealthCheck.filter_too_much)
@given(text=st.sampled_from(["number", "condition", "text", "time"]).flatmap(lambda kind: trees(kind, 3)), rows=ROWS)
def test_random_expressions_read_back_and_never_raise_when_they_run(text: str, rows: list[tuple[Any, ...]]) -> None:
    try:
        expression = parse(text, SCHEMA)
    except ExpressionError:
        assume(False)  # types that clash are not what is tested here
    again = parse(expression.sql, SCHEMA)
    assert again == expression
    assert repr(again.term) == repr(expression.term)  # NaN does not equal itself
    assert parse(expression.tree, SCHEMA) == expression
    table = frame(rows)
    found = table.select(to_polars(expression, SCHEMA))
    assert found.schema == {expression.name: expression.type.polars}
    assert len(found) == len(table)
    assert (
        table.with_columns(to_polars(expression, SCHEMA).alias("found")).get_column("found").equals(found.to_series())
    )
