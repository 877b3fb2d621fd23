from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from tests.waiting import until

from fordstone.errors import ConfigError
from fordstone.spark import prepared, session
from fordstone.spark.session.session import is_connect, parallelism
from fordstone.spark.session.settings import MEANING


def settings_of(spark: SparkSession) -> dict[str, str | None]:
    return {key: spark.conf.get(key) for key in MEANING}


def test_a_session_of_ours_has_the_settings_that_a_plans_meaning_needs(spark):
    assert settings_of(spark) == MEANING
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.sparkContext.uiWebUrl is None
    assert not is_connect(spark)
    assert parallelism(spark) == 2


def test_the_workers_run_this_python_and_leave_each_other_a_core(spark):
    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import sys

        for _ in batches:
            yield pa.RecordBatch.from_pylist([{"python": sys.executable, "threads": os.environ["POLARS_MAX_THREADS"]}])

    rows = spark.range(0, 2, 1, 2).mapInArrow(tell, "python string, threads string").distinct().collect()
    assert [tuple(row) for row in rows] == [(sys.executable, "1")]


def test_a_prepared_session_differs_from_the_users_only_where_meaning_needs_it(spark):
    theirs = spark.newSession()
    theirs.conf.set("spark.sql.ansi.enabled", "true")
    theirs.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    theirs.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    theirs.conf.set("spark.sql.legacy.timeParserPolicy", "LEGACY")
    theirs.conf.set("spark.sql.legacy.allowHashOnMapType", "true")
    theirs.conf.set("spark.sql.shuffle.partitions", "7")
    theirs.conf.set("spark.sql.files.maxPartitionBytes", "1048576")
    theirs.conf.set("fs.s3a.endpoint", "their store")
    ready = prepared(theirs)
    assert settings_of(ready) == MEANING
    assert ready.conf.get("spark.sql.shuffle.partitions") == "7"
    assert ready.conf.get("spark.sql.files.maxPartitionBytes") == "1048576"
    assert ready.conf.get("fs.s3a.endpoint") == "their store"
    assert ready.conf.get("spark.sql.legacy.allowHashOnMapType") == "false"
    assert ready.sparkContext is theirs.sparkContext
    assert theirs.conf.get("spark.sql.ansi.enabled") == "true"
    assert theirs.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
    assert ready.sql("SELECT CAST('x' AS INT) AS n, TIMESTAMP '1970-01-01 00:00:00' AS t").collect()[0].n is None


def test_a_session_that_is_too_old_is_refused_with_both_versions(spark):
    old = SimpleNamespace(version="4.1.2")
    with pytest.raises(ConfigError, match=r"Spark 4\.1\.2; Fordstone needs Spark 4\.3"):
        prepared(cast("SparkSession", old))


def test_a_second_session_in_a_process_belongs_to_the_first_ones_spark(spark):
    again = session()
    assert again.sparkContext is spark.sparkContext
    assert settings_of(again) == MEANING
    assert session(master=spark.sparkContext.master).sparkContext is spark.sparkContext
    with pytest.raises(ConfigError, match="Spark runs in this process already"):
        session(master="local[7]")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"remote": "local[2]"}, "names no Spark Connect server"),
        ({"remote": "sc://far", "master": "local[2]"}, "cannot be set for the Spark Connect server at sc://far"),
        ({"remote": "sc://far", "memory": "2g"}, "cannot be set for the Spark Connect server at sc://far"),
        ({"remote": "sc://far", "cores": 2}, "cannot be set for the Spark Connect server at sc://far"),
    ],
)
def test_a_spark_connect_server_is_asked_for_what_it_can_give(given, said):
    with pytest.raises(ConfigError, match=said):
        session(**given)


class Telling(StatefulProcessor):
    def init(self, handle):
        self._seen = handle.getMapState("seen", "k int", "v int")

    def handleInputRows(self, key, rows, timerValues):  # noqa: N802, N803 - Spark's names
        for _ in rows:
            pass
        print("a line of the user's", flush=True)
        yield pd.DataFrame({"k": [int(key[0])]})

    def close(self):
        pass


def test_of_a_stateful_query_a_person_sees_what_their_function_prints_and_nothing_else(spark, tmp_path, capsys):
    from pyspark.sql import functions

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 4).load()
    by_key = rows.select((functions.col("value") % 2).cast("int").alias("k")).groupBy("k")
    counts: list[int] = []
    query = (
        by_key.transformWithStateInPandas(Telling(), "k int", "append", "None")
        .writeStream.foreachBatch(lambda batch, _: counts.append(batch.count()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    said: list[str] = []
    try:
        until(lambda: len(counts) >= 1 or not query.isActive, "batch")
    finally:
        # Most likely in the middle of the next batch, whose end nobody needs to hear of.
        query.stop()
    assert counts[:1] == [2], query.exception()

    def heard() -> bool:
        said.extend(capsys.readouterr().err.splitlines())
        return len(said) >= 2

    until(heard, "line of the user's")
    assert set(said) == {"a line of the user's"}


def test_without_pyspark_the_error_says_what_to_install():
    child = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'pyspark' else find(name, *rest)\n"
        "from fordstone.errors import NotInstalledError\n"
        "try: import fordstone.spark\n"
        "except NotInstalledError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert "needs pyspark" in said
    assert "pip install 'fordstone[spark]'" in said


def test_the_function_and_the_module_of_the_same_name_do_not_take_each_others_place():
    import fordstone.spark.session.session

    assert callable(fordstone.spark.session)
    assert fordstone.spark.session is sys.modules["fordstone.spark.session.session"].session
