"""Rows for aggregates, and the results over some of them in plain Python. For both engines."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import polars as pl
import pytest
from tests.edge.runs import START

from fordstone import Aggregator

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "s": "string"}
TEXTS = {
    "first": "first(x)", "last": "last(s)", "var": "variance(x)", "dev": "stddev_pop(x)", "different": "count_distinct(s)",
    "mid": "median(x)", "high": "quantile(x, 0.9)", "all": "collect(x)",
    "exactly": "count(DISTINCT s)", "summed": "sum(DISTINCT round(x))", "averaged": "avg(DISTINCT round(x))",
    "at_top": "max_by(s, x)", "at_bottom": "min_by(s, round(x))", "positive": "count(*) FILTER (WHERE x > 0)",
}  # fmt: skip
Row = tuple[str, int, float | None, str | None]


class Longest(Aggregator):
    """The longest text, the least of several; and how many rows there were."""

    state: ClassVar = {"text": "string", "rows": "bigint"}
    result = "string"

    def add(self, *values: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"text": self._longest(values[0]), "rows": pl.len().cast(pl.Int64)}

    def merge(self, *state: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"text": self._longest(state[0]), "rows": state[1].sum()}

    def finish(self, *state: pl.Expr) -> pl.Expr:
        return pl.format("{}/{}", state[0].fill_null("-"), state[1])

    def _longest(self, text: pl.Expr) -> pl.Expr:
        return text.sort_by([-text.str.len_bytes().cast(pl.Int64), text], nulls_last=True).first()


def some_rows(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)
    return [
        (rng.choice("ab"), second // 2, rng.choice((None, round(rng.uniform(-9, 9), 3))), rng.choice((None, "é", "", "long")))
        for second in range(count)
    ]  # fmt: skip


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), row[2], row[3])


def wanted(rows: list[Row]) -> dict[str, Any]:
    """The results over some rows, in plain Python."""

    def in_order(at: int) -> list[Any]:
        return [row[at] for row in sorted(rows, key=lambda row: (row[1], () if row[at] is None else (row[at],)))]

    values = sorted(row[2] for row in rows if row[2] is not None)
    mean = math.fsum(values) / len(values) if values else 0.0
    squares = math.fsum((value - mean) ** 2 for value in values)
    texts = [row[3] for row in rows if row[3] is not None]
    rounded = {_rounded(value) for value in values}
    by_x = sorted((row[2], row[3] is not None, row[3] or "") for row in rows if row[2] is not None)
    by_rounded = sorted((_rounded(row[2]), row[3] is not None, row[3] or "") for row in rows if row[2] is not None)
    longest = min(texts, key=lambda text: (-len(text.encode()), text)) if texts else "-"
    return {
        "first": in_order(2)[0],
        "last": in_order(3)[-1],
        "var": squares / (len(values) - 1) if len(values) > 1 else None,
        "dev": math.sqrt(squares / len(values)) if values else None,
        "different": len(set(texts)),
        "mid": values[math.ceil(len(values) / 2) - 1] if values else None,
        "high": values[math.ceil(len(values) * 9 / 10) - 1] if values else None,
        "all": [value for value in in_order(2) if value is not None],
        "exactly": len(set(texts)),
        "summed": math.fsum(rounded) if rounded else None,
        "averaged": math.fsum(rounded) / len(rounded) if rounded else None,
        "at_top": by_x[-1][2] if by_x and by_x[-1][1] else None,
        "at_bottom": by_rounded[0][2] if by_rounded and by_rounded[0][1] else None,
        "positive": sum(value > 0 for value in values),
        "own": f"{longest}/{len(rows)}",
    }


def _rounded(value: float) -> float:
    """Half away from zero; 0.0 without a sign."""
    return math.copysign(math.floor(abs(value) + 0.5), value) + 0.0


def check(found: Mapping[str, Any], rows: list[Row]) -> None:
    for name, value in wanted(rows).items():
        assert found[name] == (pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value), name
