from __future__ import annotations


def test_x(spark):
    assert spark.range(10).count() == 10
    spark.createDataFrame([(1, 2.0)], ["a", "b"]).toPandas()
