from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.edge.bad_node import JUNK
from tests.hub.running import now_us, running_hub, serving
from tests.hub.sending import digest_of
from tests.hub.test_forget import Clock
from tests.spark.hub_nodes import HubNode, numbers
from tests.spark.test_hub_rows import EVERY, NESTED, NESTED_TYPES
from tests.waiting import until

from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Commit, EpochEntry, ForgetRequest, SkipRequest, StreamSegment
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.hub.server.serve import HubApp
from fordstone.hub.store.blobs import open_blobs
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.spark import register
from fordstone.state.base import RunRef


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubAddress]:
    with running_hub(tmp_path_factory.mktemp("hub")) as address:
        yield address


@pytest.fixture(autouse=True)
def registered(spark: SparkSession) -> None:
    register(spark)


def streamed(spark: SparkSession, address: HubAddress, pipeline: str, **options: str) -> DataFrame:
    reader = spark.readStream.format("fordstone").option("hub", address.url)
    return reader.options(pipeline=pipeline, stream="readings", **options).load()


def read(spark: SparkSession, address: HubAddress, pipeline: str, **options: str) -> DataFrame:
    reader = spark.read.format("fordstone").option("hub", address.url)
    return reader.options(pipeline=pipeline, stream="readings", **options).load()


def now(rows: DataFrame, folder: Path) -> StreamingQuery:
    """Bring what is there now into files."""
    query: StreamingQuery = (
        rows.writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "out"))
    )
    query.awaitTermination()
    return query


def rows_in(folder: Path) -> list[tuple[Any, ...]]:
    """What Spark has committed: a task that ends after its job was given up leaves a file that no batch has."""
    found = SparkSession.active().read.parquet(str(folder / "out")).select("n", "_node", "_epoch").collect()
    return sorted(tuple(row) for row in found)


def last_report(query: StreamingQuery) -> str:
    """The time of the query's last progress report."""
    return "" if query.lastProgress is None else str(query.lastProgress["timestamp"])


def test_every_type_reaches_spark_as_the_node_sent_it(spark, hub):
    HubNode(hub, "every", "a").commit(EVERY, None, EVERY.head(1))
    table = read(spark, hub, "every").orderBy("_epoch", "i64").toArrow()
    found = pl.DataFrame(table)
    assert found.filter(_epoch=3).drop("_node", "_epoch").equals(EVERY.head(1))
    # Spark puts nulls first; the smallest number was the node's last row.
    assert found.filter(_epoch=1).drop("_node", "_epoch").equals(EVERY.select(pl.all().gather([1, 2, 0])))
    assert set(found["_node"]) == {"a"}


def test_structs_maps_and_arrays_of_structs_reach_a_streaming_query_as_the_node_sent_them(spark, hub, tmp_path):
    node = HubNode(hub, "nested", "a")
    node.commit(NESTED.head(1), NESTED[1:3])
    rows = streamed(spark, hub, "nested", metadata="false")
    assert rows.schema.simpleString() == NESTED_TYPES
    now(rows, tmp_path)
    node.commit(NESTED.tail(1))
    now(streamed(spark, hub, "nested", metadata="false"), tmp_path)
    found = pl.DataFrame(spark.read.parquet(str(tmp_path / "out")).orderBy("id").toArrow())
    assert found.to_dict(as_series=False) == NESTED.to_dict(as_series=False)


def test_spark_reads_fields_keys_and_elements_of_nested_columns(spark, hub):
    HubNode(hub, "fields", "a").commit(NESTED)
    found = read(spark, hub, "fields").selectExpr(
        "id", "place.room", "place.at[0].x", "limits['low'].value", "faults[0].tags['a'][0]", "array_size(faults)"
    )
    assert sorted(tuple(row) for row in found.collect()) == [
        (1, "a", 1.5, -1, "x", 2),
        (2, None, None, None, None, 0),
        (3, None, None, None, None, None),
        (4, "", None, None, None, 1),
    ]


def test_a_query_goes_on_where_it_was_and_reads_each_row_once(spark, hub, tmp_path):
    a = HubNode(hub, "once", "a")
    a.commit(numbers(1, 2), numbers(3))
    now(streamed(spark, hub, "once"), tmp_path)
    assert rows_in(tmp_path) == [(1, "a", 1), (2, "a", 1), (3, "a", 2)]
    a.commit(None)
    HubNode(hub, "once", "b").commit(numbers(10))
    a.commit(numbers(4))
    now(streamed(spark, hub, "once"), tmp_path)
    assert rows_in(tmp_path) == [(1, "a", 1), (2, "a", 1), (3, "a", 2), (4, "a", 4), (10, "b", 1)]
    assert not any(batch["numInputRows"] for batch in now(streamed(spark, hub, "once"), tmp_path).recentProgress)


def test_a_limit_makes_batches_of_whole_epochs(spark, hub, tmp_path):
    HubNode(hub, "limit", "a").commit(numbers(1, 2), numbers(3, 4), numbers(5), numbers(6, 7, 8, 9))
    query = now(streamed(spark, hub, "limit", maxRowsPerBatch="3"), tmp_path)
    assert [batch["numInputRows"] for batch in query.recentProgress if batch["numInputRows"]] == [2, 3, 4]
    assert [row[0] for row in rows_in(tmp_path)] == list(range(1, 10))


def test_a_batch_that_failed_is_planned_again_with_the_same_rows(spark, hub, tmp_path):
    node = HubNode(hub, "again", "a")
    node.commit(numbers(1), numbers(2))
    seen: list[tuple[int, list[int]]] = []

    def keep(rows: DataFrame, batch: int) -> None:
        seen.append((batch, sorted(row.n for row in rows.collect())))
        if len(seen) == 1:
            raise RuntimeError("the sink is full")

    def run() -> None:
        query = (
            streamed(spark, hub, "again")
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    with pytest.raises(PySparkException, match="the sink is full"):
        run()
    node.commit(numbers(3))
    run()
    assert seen == [(0, [1, 2]), (0, [1, 2]), (1, [3])]


def test_the_stream_goes_on_when_the_hub_comes_back(spark, tmp_path):
    with running_hub(tmp_path / "hub", direct=False) as address:
        node = HubNode(address, "outage", "a")
        node.commit(numbers(1))
        query = (
            streamed(spark, address, "outage")
            .writeStream.format("memory")
            .queryName("outage")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        until(lambda: spark.table("outage").count() == 1, "row before the outage")
    try:
        before = last_report(query)
        until(lambda: last_report(query) != before or not query.isActive, "trigger without a hub")
        assert query.exception() is None
        with running_hub(tmp_path / "hub", direct=False, port=int(address.url.rpartition(":")[2])):
            node.commit(numbers(2))
            HubNode(address, "outage", "late").commit(numbers(3))
            until(lambda: spark.table("outage").count() == 3, "rows after the outage")
            assert sorted(row.n for row in spark.table("outage").collect()) == [1, 2, 3]
            query.stop()
    finally:
        query.stop()


def test_a_query_may_begin_after_what_is_there(spark, hub, tmp_path):
    node = HubNode(hub, "latest", "a")
    node.commit(numbers(1))
    query = (
        streamed(spark, hub, "latest", startingEpochs="latest")
        .writeStream.format("memory")
        .queryName("latest_only")
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        until(lambda: query.lastProgress is not None, "first trigger")
        node.commit(numbers(2))
        until(lambda: spark.table("latest_only").count() > 0, "row")
        assert [row.n for row in spark.table("latest_only").collect()] == [2]
    finally:
        query.stop()


def test_a_named_consumer_tells_the_hub_what_it_has_passed(spark, hub, tmp_path):
    node = HubNode(hub, "passed", "a")
    node.commit(numbers(1), numbers(2))
    now(streamed(spark, hub, "passed", consumer="report", maxRowsPerBatch="1"), tmp_path)
    (info,) = [info for info in HubClient(hub).streams().streams if info.pipeline == "passed"]
    # Spark says that a batch is done when it begins the next.
    assert info.consumers in ({"report": 1}, {"report": 0})


def test_somebodys_own_session_reads_the_same_times_whatever_its_settings(spark, hub):
    HubNode(hub, "zones", "a").commit(EVERY.select("ts", "dec"))
    theirs = spark.newSession()
    theirs.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    theirs.conf.set("spark.sql.ansi.enabled", "true")
    register(theirs)
    rows = read(theirs, hub, "zones").selectExpr("unix_micros(ts) AS us", "CAST(dec AS STRING) AS dec").collect()
    assert [(row.us, row.dec) for row in rows] == [(-1, "-1.50"), (None, None), (2**50, "99999999.99")]


def test_columns_that_the_user_names_are_read_and_no_others(spark, hub):
    HubNode(hub, "some", "a").commit(EVERY)
    reader = spark.read.format("fordstone").options(hub=hub.url, pipeline="some", stream="readings")
    rows = reader.schema("_epoch bigint, i16 int").load().collect()
    assert [tuple(row) for row in rows] == [(1, 1), (1, None), (1, -1)]
    assert read(spark, hub, "some", metadata="false").columns == EVERY.columns


def test_partial_rows_are_read_with_the_columns_that_they_have(spark, hub):
    partial = pl.DataFrame({"device": ["x"], "__window_end": [10], "__sum_0": [1.5]})
    HubNode(hub, "partial", "a").commit(partial)
    (row,) = read(spark, hub, "partial", metadata="false").collect()
    assert row.asDict() == {"device": "x", "__window_end": 10, "__sum_0": 1.5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stream": "readings"}, "option 'pipeline' is not set"),
        ({"pipeline": "nothing", "stream": "readings"}, "has no rows at the hub"),
        ({"pipeline": "../up", "stream": "readings"}, "a name has 1 to 100 letters"),
        (
            {"pipeline": "some", "stream": "s", "startingEpochs": "7"},
            "startingEpochs='7' must be 'earliest' or 'latest'",
        ),
        ({"pipeline": "some", "stream": "s", "maxRowsPerBatch": "few"}, "a whole number of at least 1"),
    ],
)
def test_a_mistake_in_the_options_is_reported_when_the_table_is_loaded(spark, hub, options, words):
    with pytest.raises(PySparkException, match=words):
        spark.read.format("fordstone").options(hub=hub.url, **options).load()


@contextlib.contextmanager
def guarded_hub(data: Path) -> Iterator[tuple[HubAddress, str]]:
    """A hub that asks for tokens; its address with one of a node's, and one of the center's."""
    data.mkdir()
    file = TokenFile(data)
    node = file.add("truck", role="node", node="a", now_us=1)
    center = file.add("report", role="center", now_us=1)

    with contextlib.closing(HubLog(SqliteStore(data / "log.sqlite"), clock_us=now_us)) as log:
        tokens = Tokens(file, clock_s=time.monotonic, clock_us=now_us)
        app = HubApp(log, open_blobs(f"file://{data / 'blobs'}", beside=data), tokens=tokens)
        with serving(app) as url:
            yield HubAddress(url=url, token=node), center


def test_the_token_of_the_center_opens_the_hub_and_a_wrong_one_is_reported_and_never_shown(spark, tmp_path):
    with guarded_hub(tmp_path / "hub") as (address, center):
        HubNode(address, "guarded", "a").commit(numbers(1, 2))
        (tmp_path / "token").write_text(f"{center}\n")
        rows = read(spark, address, "guarded", tokenFile=str(tmp_path / "token")).collect()
        assert sorted(row.n for row in rows) == [1, 2]
        wrong = center[:-4] + "0000"
        with pytest.raises(PySparkException, match="token") as failure:
            read(spark, address, "guarded", token=wrong)
        assert "401" in str(failure.value) or "refused" in str(failure.value)
        assert wrong not in str(failure.value)


def test_a_worker_that_reads_a_hub_imports_no_more_than_it_needs_and_another_no_client_of_hubs():
    child = (
        "import sys, fordstone.spark, fordstone.spark.formats.register\n"
        "assert 'urllib3' not in sys.modules\n"
        "import fordstone.spark.formats.source\n"
        "assert not {'fordstone.spark.run', 'fordstone.edge.run', 'fordstone.api'} & set(sys.modules)\n"
        "from fordstone.spark import run\n"
        "assert callable(run) and fordstone.spark.run is run is sys.modules['fordstone.spark.run'].run\n"
    )
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Nodes that are not read.


def commit_junk(node: HubNode) -> None:
    """Commit an epoch of 16 bytes that are no Arrow."""
    ref = RunRef(digest=digest_of(JUNK), size_bytes=len(JUNK), rows=1)
    node.client.put_blob(ref.digest, JUNK)
    node.epoch += 1
    segment = StreamSegment(runs=(ref,), watermark_us=node.epoch)
    entry = EpochEntry(epoch=node.epoch, streams={node.stream: segment}, created_us=node.epoch)
    node.client.commit(node.pipeline, node.node, Commit(generation=node.generation, epochs=(entry,)))


def test_a_bad_epoch_puts_its_node_into_quarantine_and_a_skip_lets_jobs_and_streams_go_on(spark, hub, tmp_path):
    good, bad = HubNode(hub, "bad", "good"), HubNode(hub, "bad", "bad")
    good.commit(numbers(1))
    bad.commit(numbers(11))
    commit_junk(bad)
    bad.commit(numbers(13))
    columns = "n bigint, half double, _node string, _epoch bigint"

    def stream() -> None:
        reader = spark.readStream.format("fordstone").option("hub", hub.url).schema(columns)
        now(reader.options(pipeline="bad", stream="readings").load(), tmp_path)

    with pytest.raises(PySparkException, match=r"fordstone hub skip bad --pipeline bad --until 2"):
        stream()
    (found,) = [one.quarantine for one in good.client.nodes().nodes if one.node == "bad" and one.pipeline == "bad"]
    assert found is not None
    assert (found.epoch, found.by) == (2, "format-fordstone")
    assert sorted(row.n for row in read(spark, hub, "bad").collect()) == [1, 11], "a job goes on without the node"
    with pytest.raises(PySparkException, match=r"fordstone hub skip bad --pipeline bad --until 2"):
        stream()  # its offsets say that the epoch was read
    good.client.skip("bad", "bad", SkipRequest(until=2))
    stream()
    good.commit(numbers(2))
    stream()
    assert rows_in(tmp_path) == [(1, "good", 1), (2, "good", 2), (11, "bad", 1), (13, "bad", 3)]


@pytest.mark.parametrize(
    ("name", "changed"),
    [("missing", numbers(2).drop("half")), ("typed", numbers(2).with_columns(half=pl.lit("x")))],
    ids=["column missing", "another type"],
)
def test_an_epoch_with_other_columns_fails_with_the_command_and_leaves_the_node_alone(spark, hub, name, changed):
    node = HubNode(hub, name, "a")
    node.commit(numbers(1), changed)
    reader = spark.read.format("fordstone").option("hub", hub.url).schema("n bigint, half double")
    with pytest.raises(PySparkException, match=f"fordstone hub quarantine a --pipeline {name} --epoch 2"):
        reader.options(pipeline=name, stream="readings", metadata="false").load().collect()
    assert all(one.quarantine is None for one in node.client.nodes().nodes if one.pipeline == name)


def test_a_query_goes_on_without_a_node_that_the_hub_has_forgotten(spark, tmp_path):
    clock = Clock()
    with running_hub(tmp_path / "hub", clock_us=clock) as hub:
        a, gone = HubNode(hub, "gone", "a"), HubNode(hub, "gone", "gone")
        a.commit(numbers(1))
        gone.commit(numbers(11))
        now(streamed(spark, hub, "gone"), tmp_path)
        clock.pass_silence()
        assert a.client.forget_node("gone", "gone", ForgetRequest(discard_unread=True)).changed
        a.commit(numbers(2))
        now(streamed(spark, hub, "gone"), tmp_path)
        assert rows_in(tmp_path) == [(1, "a", 1), (2, "a", 2), (11, "gone", 1)]
        assert sorted(row.n for row in read(spark, hub, "gone").collect()) == [1, 2]
