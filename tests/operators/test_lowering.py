"""Every supported expression gives on Polars what Spark gave (`expected_spark.json`, made by Spark itself)."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone.model.expression import parse
from fordstone.model.functions import FUNCTIONS
from fordstone.model.schema import DataType, Schema
from fordstone.operators.lowering import LOWERED, to_polars

GROUPS = json.loads((Path(__file__).parent / "expected_spark.json").read_text(encoding="utf-8"))

# The C library and Java differ in the last bits of these; everything else must be equal to the bit.
CLOSE = ("exp(", "ln(", "log(", "log10(", "log2(", "pow(", "power(")
TOLERANCE = 1e-12


def decode(value: Any, kind: DataType) -> Any:
    if value is None:
        return None
    if kind.element is not None:
        return [decode(item, kind.element) for item in value]
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


def test_every_function_of_the_table_is_lowered() -> None:
    assert set(LOWERED) - set(FUNCTIONS) == {"cast", "try_cast"}
    assert set(FUNCTIONS) <= set(LOWERED)
