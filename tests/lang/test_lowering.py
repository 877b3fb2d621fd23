"""Every supported expression gives on Polars what Spark gave (`expected_spark.json`, made by Spark itself)."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone.lang.expression import parse
from fordstone.lang.functions import FUNCTIONS
from fordstone.lang.polars.lower import LOWERED, to_polars
from fordstone.lang.schema import DataType, Schema

GROUPS = json.loads((Path(__file__).parent / "expected_spark.json").read_text(encoding="utf-8"))

# The C library and Java differ in the last bits of these; everything else must be equal to the bit.
CLOSE = ("exp(", "ln(", "log(", "log10(", "log2(", "pow(", "power(")
TOLERANCE = 1e-12


def decode(value: Any, kind: DataType) -> Any:
    if value is None:
        return None
    if kind.element is not None:
        return [decode(item, kind.element) for item in value]
    if kind.name == "map":
        return {name: decode(item, kind.field("value")) for name, item in value.items()}
    if kind.name == "struct":
        return {name: decode(value[name], inner) for name, inner in kind.fields}
    if kind.is_float:
        return float(value) if value in {"NaN", "Infinity", "-Infinity"} else float.fromhex(value)
    if kind.name == "decimal":
        return Decimal(value)
    return bytes.fromhex(value) if kind.name == "binary" else value


def column(values: list[Any], kind: DataType) -> pl.Series:
    physical = {"timestamp": pl.Int64(), "date": pl.Int32()}.get(kind.name)
    decoded = [decode(value, kind) for value in values]
    if physical is not None:
        return pl.Series(decoded, dtype=physical).cast(kind.polars)
    return pl.Series(decoded, dtype=kind.polars)


def plain(series: pl.Series) -> list[Any]:
    if isinstance(series.dtype, pl.Datetime):
        return series.cast(pl.Int64).to_list()
    return series.cast(pl.Int32).to_list() if series.dtype == pl.Date else series.to_list()


def same(found: Any, expected: Any, *, close: bool) -> bool:
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return all(same(one, two, close=close) for one, two in zip(found, expected, strict=True))
    if isinstance(found, dict) and isinstance(expected, dict) and list(found) == list(expected):
        return all(same(found[name], expected[name], close=close) for name in expected)
    if found is None or expected is None or not isinstance(expected, float):
        return bool(found == expected)
    if math.isnan(expected) or math.isnan(found):
        return math.isnan(expected) and math.isnan(found)
    if close:
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-320)
    return bool(found == expected) and math.copysign(1, found) == math.copysign(1, expected)


def table(group: dict[str, Any]) -> tuple[Schema, pl.DataFrame]:
    schema = Schema.of(group["columns"])
    columns = {name: column([row[at] for row in group["rows"]], kind) for at, (name, kind) in enumerate(schema.columns)}
    return schema, pl.DataFrame(columns)


@pytest.mark.parametrize("group", GROUPS, ids=[group["name"] for group in GROUPS])
def test_polars_gives_what_spark_gave(group: dict[str, Any]) -> None:
    schema, frame = table(group)
    wrong = []
    for case in group["cases"]:
        expression = parse(case["sql"], schema)
        kind = DataType.parse(case["type"])
        if expression.type != kind:
            wrong.append(f"{case['sql']}: type {expression.type}, Spark {kind}")
            continue
        series = frame.select(to_polars(expression, schema)).to_series()
        if series.dtype != kind.polars or series.name != expression.name or len(series) != len(frame):
            wrong.append(f"{case['sql']}: column {series.name} {series.dtype} of {len(series)} rows")
            continue
        expected = [decode(value, kind) for value in case["values"]]
        close = any(name in case["sql"] for name in CLOSE)
        for row, (one, two) in enumerate(zip(plain(series), expected, strict=True)):
            if not same(one, two, close=close):
                wrong.append(f"{case['sql']}: row {group['rows'][row]}: {one!r}, Spark {two!r}")
    assert not wrong, "\n".join(wrong[:400]) + f"\n{len(wrong)} differences"


def rows_of(text: str, schema: dict[str, str], **columns: list[Any]) -> list[Any]:
    found = Schema.of(schema)
    frame = pl.DataFrame(columns, schema=found.polars)
    return frame.select(to_polars(parse(text, found), found)).to_series().to_list()


@pytest.mark.parametrize("divisor", ["3", "3.0D", "CASE WHEN 1 > 2 THEN 1 ELSE 3 END", "least(3, 4)", "1 + 2"])
def test_division_by_a_constant_is_correctly_rounded(divisor: str) -> None:
    # Polars multiplies by the reciprocal of a constant, which gives 10922.333333333332.
    assert rows_of(f"n / {divisor if divisor.isalnum() else f'({divisor})'}", {"n": "smallint"}, n=[32767, None, 0]) == [
        10922.333333333334, None, 0.0,
    ]  # fmt: skip
    assert rows_of(f"32767 / ({divisor})", {"n": "smallint"}, n=[1, 2]) == [10922.333333333334] * 2
    assert rows_of(f"n / ({divisor})", {"n": "smallint"}, n=[32767, 32767]) == [10922.333333333334] * 2


def test_division_by_a_column_that_is_all_one_constant_is_correctly_rounded() -> None:
    schema = Schema.of({"n": "double", "three": "int"})
    frame = pl.DataFrame({"n": [32767.0, 32767.0]}).with_columns(pl.lit(3, dtype=pl.Int32()).alias("three"))
    lowered = to_polars(parse("n / three", schema), schema)
    assert frame.select(lowered).to_series().to_list() == [10922.333333333334] * 2


@pytest.mark.slow
def test_what_a_row_gives_does_not_depend_on_its_batch() -> None:
    for group in GROUPS:
        schema, frame = table(group)
        frame = frame.gather_every(max(len(frame) // 8, 1))
        some = [to_polars(parse(case["sql"], schema), schema).alias(str(at)) for at, case in enumerate(group["cases"])]
        whole = frame.select(some)
        apart = pl.concat([frame[at : at + 1].select(some) for at in range(len(frame))])
        differing = [group["cases"][int(name)]["sql"] for name in whole.columns if not whole[name].equals(apart[name])]
        assert not differing
        assert whole.equals(frame.lazy().select(some).collect())


def test_a_constant_has_as_many_rows_as_the_frame() -> None:
    assert rows_of("1 + 1", {"n": "int"}, n=[7, 8, 9]) == [2, 2, 2]
    assert rows_of("split('a b', ' ')", {"n": "int"}, n=[7, 8]) == [["a", "b"]] * 2
    assert rows_of("NULL", {"n": "int"}, n=[7]) == [None]
    assert rows_of("1.5", {"n": "int"}, n=[]) == []


@pytest.mark.parametrize("ok", [[None, None], [False, False], [True, True], [True, False]])
@pytest.mark.parametrize(
    "text",
    [
        "0 = CASE WHEN ok THEN b ELSE 0 END",
        "CASE WHEN ok THEN b + 1L ELSE 0 END",
        "concat('<', CASE WHEN ok THEN CAST(b AS STRING) ELSE '-' END)",
        "abs(IF(ok, 1, b * 2))",
        "coalesce(IF(ok, b * 2, 1), 5) + 1",
        "5 / IF(ok, b * 2, 3)",
        "7 % IF(ok, b * 2, 3)",
        "substr('abc', IF(ok, b + 0L, 2))",
        "DATE '2024-01-31' + IF(ok, b * 1, 5)",
    ],
)
def test_a_condition_that_no_row_meets_leaves_as_many_rows(text: str, ok: list[bool | None]) -> None:
    # Polars hands on the constant branch as one row, and would fail beside a longer column.
    schema = Schema.of({"ok": "boolean", "b": "tinyint"})
    frame = pl.DataFrame({"ok": ok, "b": [3, 4]}, schema=schema.polars)
    lowered = to_polars(parse(text, schema), schema)
    one_by_one = pl.concat([frame[at : at + 1].select(lowered) for at in range(2)])
    assert frame.select(lowered).equals(one_by_one)
    assert frame.select("b", lowered).shape == (2, 2)
    assert frame.clear().select(lowered).shape == (0, 1)


def test_nested_expressions_are_worked_out_once() -> None:
    text = "x"
    for _ in range(12):
        text = f"round(least({text} * 1.1D, 50) % 7 / 3, 3)"
    schema = Schema.of({"x": "double"})
    lowered = to_polars(parse(text, schema), schema)
    assert len(str(lowered)) < 200_000  # mentioned twice at each level, it would be millions
    assert pl.DataFrame({"x": [1.0]}).select(lowered).to_series().null_count() == 0


def test_times_beyond_the_calendar_of_polars_do_not_stop_the_query() -> None:
    far = [2**63 - 1, -(2**63), None]
    schema = Schema.of({"ts": "timestamp"})
    frame = pl.DataFrame({"ts": pl.Series(far, dtype=pl.Int64())}).cast({"ts": schema["ts"].polars})
    for text in (
        "year(ts)",
        "CAST(ts AS STRING)",
        "date_trunc('month', ts)",
        "ts + INTERVAL '1' MONTH",
        "CAST(ts AS DATE)",
    ):
        assert len(frame.select(to_polars(parse(text, schema), schema))) == 3


def test_an_expression_for_another_frame_is_refused() -> None:
    expression = parse("a + 1", Schema.of({"a": "int"}))
    with pytest.raises(KeyError, match="does not have"):
        to_polars(expression, Schema.of({"b": "int"}))


def test_every_function_of_the_table_is_lowered() -> None:
    assert set(LOWERED) - set(FUNCTIONS) == {"cast", "try_cast"}
    assert set(FUNCTIONS) <= set(LOWERED)
