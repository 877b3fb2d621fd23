"""Values at the rims of their types, from file to file through both engines: none is lost, and none becomes another."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tests.spark.both_engines import Engine, engine_fixture

from fordstone import Pipeline
from fordstone.connectors import files, latest, memory, rows
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.testing.contracts.connector import read_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["engine_fixture"]

BIG = 6 * 10**37
WORDS = ['"NaN"', '"Infinity"', '"-Infinity"', '"+Infinity"', '"+INF"', '"-INF"', '"INF"', '"inf"', '"nan"', '"-NaN"', "NaN", "Infinity", "-Infinity", "+Infinity", "+INF", "-INF", "INF", "-NaN", '"1.5"', "1.5", "null"]  # fmt: skip


def test_nan_and_infinities_are_keys_and_values_that_json_files_keep(engine: Engine, tmp_path: Path) -> None:
    """Five keys: NaN, null, 1.0 and both infinities."""
    lines = ['{"k":"NaN","x":1}', '{"k":NaN,"x":"Infinity"}', '{"k":null,"x":1}', '{"k":1.0,"x":"NaN"}', '{"k":"Infinity","x":2}', '{"k":"-Infinity","x":"-Infinity"}']  # fmt: skip
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jsonl").write_text("".join(f"{line}\n" for line in lines))
    pipeline = Pipeline("words")
    source = pipeline.source("src", files(str(tmp_path / "in/*.jsonl")), schema={"k": "double", "x": "double"})
    source.sink("all", files(str(tmp_path / "all"), format="jsonl"))
    source.group_by("k").agg(n="count(*)", largest="max(x)").sink("keys", files(str(tmp_path / "keys"), format="jsonl"))
    engine.run(pipeline.plan())
    assert sorted(map(str, rows(tmp_path / "all").rows())) == sorted(
        ["(nan, 1.0)", "(nan, inf)", "(None, 1.0)", "(1.0, nan)", "(inf, 2.0)", "(-inf, -inf)"]
    )
    found = {str(key): (count, str(largest)) for key, count, largest in latest(tmp_path / "keys").rows()}
    assert found == {"nan": (2, "inf"), "None": (1, "1.0"), "1.0": (1, "nan"), "inf": (1, "2.0"), "-inf": (1, "-inf")}


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([BIG, BIG], None),
        ([-BIG, -BIG], None),
        ([BIG, BIG, -BIG], BIG),
        ([BIG, 4 * 10**37 - 1], 10**38 - 1),
        ([10**38 - 1, 1], None),
    ],
)
def test_a_sum_of_decimals_is_exact_or_null_and_never_wraps(
    engine: Engine, tmp_path: Path, values: list[int], total: int | None
) -> None:
    (tmp_path / "in").mkdir()
    for number, value in enumerate(values):
        (tmp_path / "in" / f"{number}.jsonl").write_text(f'{{"k":"a","d":{value}}}\n{{"k":"b","d":1}}\n')
    pipeline = Pipeline("sums")
    source = pipeline.source("src", files(str(tmp_path / "in/*.jsonl")), schema={"k": "string", "d": "decimal(38,0)"})
    source.group_by("k").agg(total="sum(d)").sink("sums", files(str(tmp_path / "sums"), format="jsonl"))
    engine.run(pipeline.plan())
    found = dict(latest(tmp_path / "sums").rows())
    assert found == {"a": None if total is None else Decimal(total), "b": Decimal(len(values))}


def test_words_for_numbers_are_read_as_spark_reads_them(spark: SparkSession, tmp_path: Path) -> None:
    for number, word in enumerate(WORDS):
        (tmp_path / f"{number:02d}.jsonl").write_text(f'{{"x":{word},"y":[{word}]}}\n')
    schema = Schema.of({"x": "double", "y": "array<float>"})
    source = open_source(files(str(tmp_path / "*.jsonl")), SourceOptions(schema=schema, bounded=True))
    for number, (word, partition) in enumerate(zip(WORDS, source.partitions(), strict=True)):
        mine = read_all(source, partition, schema)
        theirs = spark.read.schema("x double, y array<float>").option("mode", "DROPMALFORMED")
        given = pl.from_arrow(theirs.json(str(tmp_path / f"{number:02d}.jsonl")).toArrow())
        assert isinstance(given, pl.DataFrame)
        assert_frame_equal(mine.rows, given.cast(pl.Schema(schema.polars)), check_exact=True)
        assert len(mine.rejected) == 1 - given.height, word


def test_spark_reads_the_words_that_a_sink_writes(spark: SparkSession, tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": [float("nan"), float("inf"), -float("inf"), None, 0.1]})
    pipeline = Pipeline("written")
    pipeline.source("src", memory(frame)).sink("out", files(str(tmp_path / "out"), format="jsonl"))
    pipeline.run(bounded=True)
    given = pl.from_arrow(spark.read.schema("x double").json(str(tmp_path / "out" / "epoch-*")).toArrow())
    assert isinstance(given, pl.DataFrame)
    assert_frame_equal(given, frame)
