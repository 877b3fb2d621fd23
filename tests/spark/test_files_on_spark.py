"""Files on a real Spark: what its workers do in processes of their own, and how its errors reach the user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from tests.connectors.test_remote_files import lines, put

from fordstone import Pipeline
from fordstone.connectors import files, rows
from fordstone.errors import SourceError, TaskError
from fordstone.spark.config import SparkConfig
from fordstone.spark.run import run_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 300
PROGRAM = """
import sys
from fordstone import Pipeline, tumbling
from fordstone.connectors import files
from fordstone.spark import run, session

url = sys.argv[1]
p = Pipeline("rolled")
source = p.source("src", files(f"{url}/in/*.jsonl"), schema={"n": "bigint", "ts": "timestamp"}, time="ts")
windows = source.group_by().window(tumbling("10s")).agg(n="count(*)")
windows.select("window_start", "n").sink("windows", files(f"{url}/windows", format="jsonl"))
windows.late.select("n").sink("late", files(f"{url}/late", format="jsonl"))
spark = session(master="local[2]", memory="1g")
for _ in sys.stdin:
    print(run(p, spark=spark, state="state", available_now=True).progress.rows_in, flush=True)
spark.stop()
"""


@pytest.mark.parametrize("store_url", ["s3", pytest.param("hdfs", marks=pytest.mark.full)], indirect=True)
def test_rolled_objects_at_a_url_are_read_once_by_workers_and_close_windows(store_url: str, tmp_path: Path):
    """Each line to the program is a run that reads what is there."""
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, store_url],
            cwd=tmp_path,
            env=dict(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        read = []
        try:
            for hours in ((0, 1), (2,), ()):
                for hour in hours:
                    put(f"{store_url}/in/h{hour}.jsonl", lines(range(60 * hour, 60 * hour + 60)))
                process.stdin.write("\n")
                process.stdin.flush()
                read.append(process.stdout.readline().strip())
            process.stdin.close()
            process.wait(SECONDS_MAX)
        finally:
            process.kill()
    assert read == ["120", "60", "0"], (tmp_path / "errors").read_text()
    assert rows(f"{store_url}/windows").sort("window_start")["n"].to_list() == [10] * 17
    assert rows(f"{store_url}/late").height == 0


@pytest.mark.parametrize("bounded", [False, True], ids=["stream", "batch"])
def test_a_missing_column_is_a_short_error_that_names_it(spark: SparkSession, tmp_path: Path, bounded: bool):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text(json.dumps({"device": "a", "temp": 1.5}) + "\n")
    p = Pipeline("missing")
    source = p.source("r", files(str(tmp_path / "in/*.jsonl")), schema={"device": "string", "temperature": "double"})
    source.sink("out", files(str(tmp_path / "out"), format="jsonl"))
    config = SparkConfig(state=tmp_path / "state", bounded=bounded, available_now=not bounded)
    # A worker's error arrives as text; a batch job looks at the files in the driver.
    with pytest.raises(SourceError if bounded else TaskError) as caught:
        run_plan(p.plan(), p.functions, config, spark=spark)
    text = str(caught.value)
    assert "no row has column 'temperature'" in text
    assert 'missing="null"' in text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= 5, text


GATHERED = """
from fordstone import Pipeline
from fordstone.connectors import files, generator, stdout
from fordstone.errors import FordstoneError
from fordstone.spark import run, session

p = Pipeline("wide")
source = p.source("src", generator(rows=200_000, keys=3), schema={"device": "string", "temp": "double"})
source.sink("printed", stdout())
source.sink("kept", files("kept", format="parquet"))
spark = session(master="local[2]", memory="1g", config={"spark.driver.maxResultSize": "1m"})
try:
    run(p, spark=spark, state="state", available_now=True)
except FordstoneError as error:
    print("ERROR", error)
spark.stop()
"""


def test_output_that_is_too_large_for_the_driver_is_an_error_that_names_the_sink(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", GATHERED], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    assert done.stdout.startswith("ERROR epoch 1: the output that goes through the driver has "), (
        done.stdout + done.stderr
    )
    assert "at most 1024.0 KiB may (spark.driver.maxResultSize)" in done.stdout
    assert "Through the driver go the rows of: printed, dead letters of src. Nothing was released." in done.stdout
    assert "--rows-max" in done.stdout
    assert not list((tmp_path / "kept").glob("epoch-*"))


TABLE = """
from fordstone import Pipeline
from fordstone.connectors import delta, generator
from fordstone.spark import run, session

p = Pipeline("wide")
source = p.source("src", generator(rows=200_000, keys=3), schema={"device": "string", "temp": "double"})
source.sink("table", delta("table"))
spark = session(master="local[2]", memory="1g", config={"spark.driver.maxResultSize": "1m"})
run(p, spark=spark, state="state", available_now=True)
spark.stop()
"""


def test_rows_of_a_delta_table_do_not_go_through_the_driver(tmp_path: Path):
    subprocess.run([sys.executable, "-c", TABLE], cwd=tmp_path, timeout=SECONDS_MAX, check=True)
    assert pl.read_delta(str(tmp_path / "table")).height == 200_000
