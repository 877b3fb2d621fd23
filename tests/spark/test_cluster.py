"""What a session does on a real cluster and with a real Spark Connect server; the driver is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.java_options import OPTIONS
from tests.spark.cluster import can_hide, connect_server, standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
CHILD_SECONDS_MAX = 180

# What every driver here can do: run our Python in tasks, read a Python source, keep state.
DRIVER = """
import sys, tempfile
import pandas as pd
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from fordstone.spark import prepared, session
from fordstone.spark.session.session import is_connect, parallelism
from fordstone.spark.session.settings import MEANING

class Reader(DataSourceStreamReader):
    def initialOffset(self): return {"at": 0}
    def latestOffset(self): return {"at": 1}
    def partitions(self, start, end): return [InputPartition(n) for n in range(4)]
    def read(self, partition): yield (partition.value % 2, partition.value)

class Source(DataSource):
    @classmethod
    def name(cls): return "numbers"
    def schema(self): return "shard int, n int"
    def streamReader(self, schema): return Reader()

class Summing(StatefulProcessor):
    def init(self, handle): self._sums = handle.getMapState("sums", "k int", "v int")
    def handleInputRows(self, key, rows, timerValues):
        yield pd.DataFrame({"total": [int(sum(frame["n"].sum() for frame in rows))]})
    def close(self): pass

def stateful(spark, folder):
    spark.dataSource.register(Source)
    totals = spark.readStream.format("numbers").load().groupBy("shard").transformWithStateInPandas(
        Summing(), "total int", "append", "None")
    query = totals.writeStream.format("parquet").option("path", folder + "/out").option(
        "checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
    assert query.awaitTermination(120), "the query did not end"
    assert query.exception() is None, query.exception()
    return sorted(row.total for row in spark.read.parquet(folder + "/out").collect())


def tell(*words):
    print(*words, flush=True)
"""


class Driver:
    """A process that reports what it does, line by line, and waits at given points."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process = process
        self._errors = errors

    def heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the driver ended:\n{self._errors.read_text()}"
        return line.strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ended(self) -> int:
        return self._process.wait(CHILD_SECONDS_MAX)

    @property
    def errors(self) -> str:
        return self._errors.read_text()


@contextmanager
def driver(folder: Path, code: str, *arguments: str) -> Iterator[Driver]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    errors = folder / "driver-errors"
    with errors.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{DRIVER}\nOPTIONS = {OPTIONS!r}\n{code}", *arguments, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            env=environment,
            cwd=folder,
        )
    with process:
        try:
            yield Driver(process, errors)
        finally:
            if process.poll() is None:
                process.kill()


ON_CLUSTER = """
spark = session(master=sys.argv[1], cores=2, memory="512m", config={
    "spark.driver.memory": "512m", "spark.driver.extraJavaOptions": OPTIONS, "spark.executor.extraJavaOptions": OPTIONS})
ready = prepared(spark)
tell(is_connect(spark), parallelism(spark), ready.conf.get("spark.sql.shuffle.partitions"))
tell(*stateful(ready, sys.argv[2]))
sys.stdin.readline()
tell(ready.range(0, 100, 1, 4).mapInArrow(lambda batches: batches, "id long").count())
spark.stop()
tell("stopped")
sys.stdin.readline()
"""


@pytest.mark.full  # `test_cli` runs a pipeline on such a cluster
def test_a_session_on_a_standalone_cluster_runs_our_python_on_its_executors_and_survives_the_loss_of_one(tmp_path):
    with standalone(tmp_path) as cluster:
        with driver(tmp_path, ON_CLUSTER, cluster.master) as child:
            assert child.heard() == "False 2 2"
            assert child.heard() == "2 4"
            executors = cluster.executor_pids()
            assert len(executors) == 2
            assert cluster.python_pids() != []
            os.kill(executors[0], signal.SIGKILL)
            cluster.until(
                lambda: len(set(cluster.executor_pids()) - {executors[0]}) == 2, "executor in the lost one's place"
            )
            child.go_on()
            assert child.heard() == "100"
            assert child.heard() == "stopped"
            cluster.until(lambda: cluster.executor_pids() == [], "end of the executors")
            child.go_on()
            assert child.ended() == 0
        workers = cluster.worker_pids
        assert all(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.full
def test_a_cluster_ends_with_the_test_that_failed_in_it(tmp_path):
    pids: list[int] = []

    def failing_test() -> None:
        with standalone(tmp_path, workers=1) as cluster:
            pids.extend(cluster.worker_pids)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_test()
    assert len(pids) == 1
    assert not Path(f"/proc/{pids[0]}").exists()


APART = """
from fordstone import Pipeline
from fordstone.connectors import generator, files
from fordstone.errors import ConfigError
import fordstone.spark

spark = session(master=sys.argv[1], cores=2, memory="512m", config={
    "spark.driver.memory": "512m", "spark.driver.extraJavaOptions": OPTIONS, "spark.executor.extraJavaOptions": OPTIONS})
p = Pipeline("apart")
rows = p.source("rows", generator(rows=10), schema={"n": "bigint"})
rows.group_by("n").agg(c="count(*)").sink("out", files(sys.argv[2] + "/out", format="jsonl"))
try:
    fordstone.spark.run(p, spark=spark, state=sys.argv[2] + "/state", available_now=True)
except ConfigError as error:
    tell(str(error).replace("\\n", " "))
"""


@pytest.mark.skipif(not can_hide(), reason="only root may give a process directories of its own")
def test_executors_that_do_not_see_the_checkpoint_location_are_noticed_before_anything_is_read(tmp_path: Path):
    state = tmp_path / "state"
    state.mkdir()
    with standalone(tmp_path, apart=state) as cluster, driver(tmp_path, APART, cluster.master) as child:
        said = child.heard()
        assert f"do not see {state}/" in said
        assert "fordstone/query.json, which the driver has written" in said
        assert "Give --state a directory that all machines mount" in said


THROUGH_CONNECT = """
spark = session(remote=sys.argv[1])
ready = prepared(spark)
tell(is_connect(ready), parallelism(ready), ready.conf.get("spark.sql.shuffle.partitions"))
tell({key: ready.conf.get(key) for key in MEANING} == dict(MEANING))
tell(*stateful(ready, sys.argv[2]))
"""


def test_a_session_through_spark_connect_runs_the_same_and_its_process_ends_by_itself(
    tmp_path: Path, spark: SparkSession
):
    with connect_server(spark) as address, driver(tmp_path, THROUGH_CONNECT, address) as child:
        assert child.heard() == "True 2 2"
        assert child.heard() == "True"
        assert child.heard() == "2 4"
        assert child.ended() == 0, child.errors
