"""Sketches that our aggregates keep, read by Spark's own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from tests.operators.kll_format import kll_bytes

from fordstone.lang.aggregates import parse_aggregate
from fordstone.lang.schema import Schema
from fordstone.operators.aggregate.partial import Partials
from fordstone.operators.aggregate.sketches import compact

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema.of({"s": "string"})


def test_spark_reads_the_sketches_of_our_state(spark: SparkSession) -> None:
    rows = pl.DataFrame({"s": [str(number) for number in range(10_000)]})
    partials = Partials((), [parse_aggregate("count_distinct(s)", SCHEMA, "n")], SCHEMA)
    state = partials.merge(pl.concat([partials.of_rows(rows.head(7_000)), partials.of_rows(rows.tail(6_000))]))
    ours = partials.finish(state)["n"][0]
    (column,) = [name for name in state.columns if name.startswith("__hll")]

    values = np.random.default_rng(1).normal(size=10_000)
    items, levels = compact(values, np.zeros(values.size, dtype=np.uint8), 200)
    quantiles = kll_bytes(items, levels, 200, least=values.min(), greatest=values.max())

    given = spark.createDataFrame([(bytearray(state[column][0]), bytearray(quantiles))], "hll binary, kll binary")
    found = given.selectExpr(
        "hll_sketch_estimate(hll) AS n",
        "kll_sketch_get_n_double(kll) AS count",
        "kll_sketch_get_quantile_double(kll, 0.5D) AS median",
        "kll_sketch_get_rank_double(kll, 0.0D) AS rank",
    ).first()
    assert found is not None
    assert found.n == pytest.approx(ours, rel=0.02)
    assert found.n == pytest.approx(10_000, rel=0.05)
    assert found["count"] == 10_000
    assert found.median == pytest.approx(np.median(values), abs=0.05)
    assert found["rank"] == pytest.approx(np.mean(values <= 0), abs=0.02)
