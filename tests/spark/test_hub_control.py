from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType, _parse_datatype_string
from tests.hub.running import running_hub
from tests.spark.hub_nodes import HubNode
from tests.spark.test_hub_rows import NESTED

from fordstone.epochs.run_file import decode_run
from fordstone.errors import FencedError, SchemaError, SinkError
from fordstone.hub.client import publisher
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ControlVersion
from fordstone.spark import register
from fordstone.spark.formats.control import ControlSetting, ControlStreamWriter, publish, rows_of, written

SCHEMA = "device string, threshold double"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubAddress]:
    with running_hub(tmp_path_factory.mktemp("hub")) as address:
        yield address


@pytest.fixture(autouse=True)
def registered(spark: SparkSession) -> None:
    register(spark)


def versions(address: HubAddress, control: str) -> list[ControlVersion]:
    return list(HubClient(address).control_page("p", control).versions)


def rows(address: HubAddress, version: ControlVersion) -> list[tuple[Any, ...]]:
    return sorted(decoded(address, version).rows())


def decoded(address: HubAddress, version: ControlVersion) -> pl.DataFrame:
    return decode_run(HubClient(address).read_blob(version.blob), version.blob)


def table(address: HubAddress, version: ControlVersion) -> list[tuple[Any, ...]]:
    """Its rows in order, without what becomes of them."""
    return decoded(address, version).sort("device").drop("__op").rows()


def setting_of(address: HubAddress, control: str, **more: str) -> ControlSetting:
    options = {"hub": address.url, "pipeline": "p", "control": control, "key": "device", **more}
    return ControlSetting.of(options, _struct())


def _struct(columns: str = SCHEMA) -> StructType:
    found = _parse_datatype_string(columns)
    assert isinstance(found, StructType)
    return found


def batch(*values: tuple[str | None, float]) -> pa.RecordBatch:
    devices, thresholds = zip(*values, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(devices, pa.string()), pa.array(thresholds, pa.float64())], ["device", "threshold"]
    )


def streaming(
    spark: SparkSession, address: HubAddress, control: str, readings: DataFrame, folder: Path, **more: str
) -> None:
    query = (
        readings.writeStream.format("fordstone-control")
        .options(hub=address.url, pipeline="p", control=control, key="device", **more)
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def stream_of(spark: SparkSession, address: HubAddress, pipeline: str) -> DataFrame:
    return (
        spark.readStream.format("fordstone")
        .options(hub=address.url, pipeline=pipeline, stream="readings", metadata="false")
        .load()
    )


def test_each_batch_with_rows_becomes_a_version_under_an_owner_that_the_checkpoint_keeps(spark, hub, tmp_path):
    node = HubNode(hub, "feed", "a")
    node.commit(pl.DataFrame({"device": ["x", "y"], "threshold": [1.0, 2.0]}))
    streaming(spark, hub, "fed", stream_of(spark, hub, "feed"), tmp_path / "one")
    node.commit(pl.DataFrame({"device": ["x"], "threshold": [3.0]}), None)
    streaming(spark, hub, "fed", stream_of(spark, hub, "feed"), tmp_path / "one")
    first, second = versions(hub, "fed")
    assert rows(hub, first) == [("x", 1.0, "upsert"), ("y", 2.0, "upsert")]
    assert rows(hub, second) == [("x", 3.0, "upsert")]
    assert (first.owner, first.batch, second.batch) == (second.owner, 0, 1)
    streaming(spark, hub, "fed", stream_of(spark, hub, "feed"), tmp_path / "another")
    assert versions(hub, "fed")[-1].owner != first.owner


def test_output_mode_complete_replaces_the_table(spark, hub, tmp_path):
    HubNode(hub, "whole", "a").commit(pl.DataFrame({"device": ["x", "x", "y"], "threshold": [1.0, 5.0, 2.0]}))
    table = stream_of(spark, hub, "whole").groupBy("device").agg({"threshold": "max"}).toDF("device", "threshold")
    query = (
        table.writeStream.format("fordstone-control")
        .options(hub=hub.url, pipeline="p", control="complete", key="device")
        .option("checkpointLocation", str(tmp_path))
        .outputMode("complete")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    (version,) = versions(hub, "complete")
    assert version.snapshot
    assert rows(hub, version) == [("x", 5.0, "upsert"), ("y", 2.0, "upsert")]


def test_a_batch_job_changes_rows_or_replaces_the_table(spark, hub):
    options = {"hub": hub.url, "pipeline": "p", "control": "job", "key": "device", "owner": "nightly"}
    table = spark.createDataFrame([("x", 1.0), ("y", 2.0)], SCHEMA)
    table.write.format("fordstone-control").options(**options).mode("append").save()
    gone = spark.createDataFrame([("y", None, "delete")], SCHEMA + ", __op string")
    gone.write.format("fordstone-control").options(**options).mode("append").save()
    first, second = versions(hub, "job")
    assert not first.snapshot
    assert rows(hub, second) == [("y", None, "delete")]
    table.limit(0).write.format("fordstone-control").options(**options).mode("overwrite").save()
    (newest,) = versions(hub, "job")
    assert newest.snapshot
    assert rows(hub, newest) == []


def test_a_stream_and_a_batch_job_publish_structs_maps_and_arrays_of_structs(spark, hub, tmp_path):
    keyed = NESTED.with_columns(device=pl.col("id").cast(pl.String)).select("device", *NESTED.columns)
    node = HubNode(hub, "nested", "a")
    node.commit(keyed.head(2))
    streaming(spark, hub, "nested", stream_of(spark, hub, "nested"), tmp_path)
    node.commit(keyed[2:])
    streaming(spark, hub, "nested", stream_of(spark, hub, "nested"), tmp_path)
    assert [table(hub, version) for version in versions(hub, "nested")] == [keyed.head(2).rows(), keyed[2:].rows()]
    whole = spark.read.format("fordstone").options(hub=hub.url, pipeline="nested", stream="readings", metadata="false")
    options = {"hub": hub.url, "pipeline": "p", "control": "nested", "key": "device"}
    whole.load().write.format("fordstone-control").options(**options).mode("overwrite").save()
    (newest,) = versions(hub, "nested")
    assert table(hub, newest) == keyed.rows()
    assert decoded(hub, newest).schema == pl.Schema({**keyed.schema, "__op": pl.String()})


def test_a_nested_column_is_no_key(spark, hub):
    writer = spark.createDataFrame([("x", {"a": 1})], "device string, limits map<string, bigint>").write
    options = {"hub": hub.url, "pipeline": "p", "control": "mapped", "key": "limits"}
    with pytest.raises(
        PySparkException, match="option 'key' names 'limits', which is map<string,bigint> and cannot be"
    ):
        writer.format("fordstone-control").options(**options).mode("append").save()


def test_a_mistake_in_the_options_is_reported(spark, hub):
    table = spark.createDataFrame([("x", 1.0)], SCHEMA)
    writer = table.write.format("fordstone-control").options(hub=hub.url, pipeline="p", control="c").mode("append")
    with pytest.raises(PySparkException, match="option 'key' is not set"):
        writer.save()
    with pytest.raises(PySparkException, match="names 'gadget', and the rows have device, threshold"):
        writer.option("key", "gadget").save()


def test_a_commit_that_comes_again_after_an_abort_publishes_nothing_more(hub):
    setting = setting_of(hub, "again", owner="q")
    writer = ControlStreamWriter(setting, _struct(), replace=False)
    messages = [
        writer.write(iter([batch(("x", 1.0))])),
        writer.write(iter([batch(("y", 2.0))])),
        writer.write(iter([])),
    ]
    writer.commit([*messages, None], 7)
    writer.abort([*messages, None], 7)
    in_another_order = [writer.write(iter([batch(("y", 2.0), ("x", 1.0))]))]
    writer.commit([*in_another_order], 7)
    (version,) = versions(hub, "again")
    assert rows(hub, version) == [("x", 1.0, "upsert"), ("y", 2.0, "upsert")]


def test_a_newest_batch_that_was_planned_again_with_more_rows_loses_none_and_an_older_one_is_an_error(hub):
    writer = ControlStreamWriter(setting_of(hub, "more", owner="q"), _struct(), replace=False)
    writer.commit([writer.write(iter([batch(("x", 1.0))]))], 6)
    writer.commit([writer.write(iter([batch(("x", 2.0))]))], 7)
    writer.commit([writer.write(iter([batch(("x", 2.0), ("y", 2.0))]))], 7)
    assert rows(hub, versions(hub, "more")[-1]) == [("x", 2.0, "upsert"), ("y", 2.0, "upsert")]
    with pytest.raises(SinkError, match=r"(?s)batches up to 7 followed.*Bring the newer checkpoint location back"):
        writer.commit([writer.write(iter([batch(("z", 3.0))]))], 6)
    assert len(versions(hub, "more")) == 3


def test_an_owner_that_another_has_followed_is_shut_out(hub):
    def one(owner: str, number: int) -> None:
        setting = setting_of(hub, "fenced", owner=owner)
        publish(
            setting,
            _struct(),
            [written(setting, _struct(), iter([batch(("x", 1.0))]))],
            owner=owner,
            batch=number,
            replace=False,
        )

    one("old", 0)
    one("new", 0)
    with pytest.raises(FencedError, match="has a newer publisher than old"):
        one("old", 1)
    assert [version.owner for version in versions(hub, "fenced")] == ["old", "new"]


def test_now_and_then_a_version_is_the_whole_table(hub, monkeypatch):
    monkeypatch.setattr(publisher, "SNAPSHOT_EVERY", 3)
    setting = setting_of(hub, "snapshots")
    for number in range(4):
        tasks = [written(setting, _struct(), iter([batch((f"d{number}", float(number)))]))]
        publish(setting, _struct(), tasks, owner="q", batch=number, replace=False)
    found = versions(hub, "snapshots")
    assert [(version.batch, version.snapshot) for version in found] == [(2, True), (3, False)]
    assert [row[0] for row in rows(hub, found[0])] == ["d0", "d1", "d2"]


def test_a_table_whose_columns_became_others_starts_over(hub):
    setting = setting_of(hub, "columns")
    tasks = [written(setting, _struct(), iter([batch(("x", 1.0))]))]
    publish(setting, _struct(), tasks, owner="old", batch=0, replace=False)
    wider = _struct(SCHEMA + ", unit string")
    more = pa.RecordBatch.from_pylist([{"device": "y", "threshold": 2.0, "unit": "C"}])
    publish(setting, wider, [written(setting, wider, iter([more]))], owner="new", batch=0, replace=False)
    (version,) = versions(hub, "columns")
    assert version.snapshot
    assert rows(hub, version) == [("y", 2.0, "C", "upsert")]


def test_of_a_key_the_last_row_counts_and_rows_without_a_key_are_dropped(hub):
    setting = setting_of(hub, "keys")
    tasks = [
        written(setting, _struct(), iter([batch(*values)])) for values in ([("x", 1.0), (None, 2.0)], [("x", 3.0)])
    ]
    publish(setting, _struct(), tasks, owner="q", batch=0, replace=False)
    (version,) = versions(hub, "keys")
    assert rows(hub, version) == [("x", 3.0, "upsert")]


def test_times_are_the_same_moments_in_utc_and_an_odd_op_is_reported():
    schema = _struct("device string, at timestamp, plain timestamp_ntz")
    moment = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
    tokyo = pa.array([moment], pa.timestamp("us", "Asia/Tokyo"))
    plain = pa.array([moment.replace(tzinfo=None)], pa.timestamp("us"))
    frame = rows_of(
        [pa.RecordBatch.from_arrays([pa.array(["x"]), tokyo, plain], names=["device", "at", "plain"])], schema
    )
    assert frame.schema["at"] == frame.schema["plain"] == pl.Datetime("us", "UTC")
    assert frame.row(0) == ("x", moment, moment, "upsert")
    odd = pa.RecordBatch.from_pylist([{"device": "x", "__op": "drop"}])
    with pytest.raises(SchemaError, match="'drop'; it has to be 'upsert' or 'delete'"):
        rows_of([odd], _struct("device string, __op string"))
