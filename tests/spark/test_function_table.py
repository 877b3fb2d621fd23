"""Every row of the docs' table of functions gives the same on both engines.

With data, nulls and extremes, Spark's answers are kept in tests/lang/expected_spark.json; here a live Spark, set up as
for a pipeline, is asked for the examples that the table shows.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING

import polars as pl
from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses

from fordstone.lang.expression import parse
from fordstone.lang.functions import FORMS, FUNCTIONS
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema.of({"one": "int"})


def _equal(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-12)
    if isinstance(one, Decimal) and isinstance(other, Decimal):
        return one == other
    return type(one) is type(other) and one == other


def test_every_example_of_the_function_table_gives_the_same_on_both_engines(spark: SparkSession) -> None:
    examples = [function.example for function in FUNCTIONS.values()] + [example for _, _, example in FORMS]
    parsed = [parse(example, SCHEMA) for example in examples]
    frame = pl.DataFrame({"one": [1]}, schema=SCHEMA.polars)
    edge = [frame.select(to_polars(one, SCHEMA).alias("x")).to_series()[0] for one in parsed]

    columns = [F.expr(one.sql).cast(str(one.type)).alias(f"c{at}") for at, one in enumerate(parsed)]
    # In Arrow, so that times come as they are and not as the driver's local ones.
    table = spark.createDataFrame([(1,)], "one int").select(*columns).toArrow()
    found = pl.from_arrow(table)
    assert isinstance(found, pl.DataFrame)
    center = found.row(0)

    assert len(examples) == len(FUNCTIONS) + len(FORMS) > 70
    different = [
        f"{example}: edge {mine!r}, Spark {theirs!r}"
        for example, mine, theirs in zip(examples, edge, center, strict=True)
        if not _equal(
            mine.to_list() if isinstance(mine, pl.Series) else mine,
            theirs.to_list() if isinstance(theirs, pl.Series) else theirs,
        )
    ]
    assert different == []
