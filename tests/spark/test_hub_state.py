from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.hub.running import running_hub
from tests.spark.hub_nodes import HubNode
from tests.spark.test_hub_rows import NESTED, NESTED_TYPES

from fordstone import Pipeline
from fordstone.connectors import files, memory
from fordstone.epochs.manifest import Cut, Manifest, StateRuns, encode_manifest
from fordstone.epochs.run_file import digest_of
from fordstone.hub.client.address import HubAddress
from fordstone.hub.messages import Checkpoint
from fordstone.planner.check import step_digests, stream_types
from fordstone.spark import register
from fordstone.state.base import RunRef

Changes = list[tuple[str, int | None, bool]]
"""Key, count, and whether the key went."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubAddress]:
    with running_hub(tmp_path_factory.mktemp("hub")) as address:
        yield address


@pytest.fixture(autouse=True)
def registered(spark: SparkSession) -> None:
    register(spark)


def counting(pipeline: str = "counted") -> Pipeline:
    p = Pipeline(pipeline)
    readings = p.source("readings", memory([]), schema={"device": "string", "temp": "double"})
    readings.group_by("device").agg(n="count(*)").sink("out", files("out", format="jsonl"))
    return p


def checkpointed(
    node: HubNode, states: dict[tuple[str, str, int], list[pl.DataFrame]], digests: dict[str, str]
) -> None:
    """Commit an epoch with a checkpoint that has these states: step, name and subtask to the rows of its runs."""
    held = tuple(
        StateRuns(step, state, subtask, tuple(node.put(frame) for frame in frames))
        for (step, state, subtask), frames in states.items()
    )
    epoch = node.epoch + 1
    manifest = Manifest(
        pipeline=node.pipeline, node=node.node, epoch=epoch, attempt=1, mode="aligned", parallelism=1, plan_digest="",
        step_digests=digests, created_us=1, cut=Cut(epoch, {}), states=held,
    )  # fmt: skip
    data = encode_manifest(manifest)
    node.client.put_blob(digest_of(data), data)
    ref = RunRef(digest_of(data), len(data), 0)
    runs = tuple(run for state in held for run in state.runs)
    node.commit(None, checkpoint=Checkpoint(epoch=epoch, manifest=ref, state=runs))


def changes(rows: Changes) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={"device": pl.String, "__n": pl.Int64, "__deleted": pl.Boolean}, orient="row")


def state(spark: SparkSession, address: HubAddress, pipeline: str, **options: str) -> DataFrame:
    reader = spark.read.format("fordstone-state").option("hub", address.url)
    return reader.options(pipeline=pipeline, **options).load()


def rows_of(rows: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in rows.collect())


def test_a_table_has_the_newest_row_of_each_key_of_each_node_and_none_that_went(spark, hub):
    first: Changes = [("x", 1, False), ("y", 1, False), ("z", 1, False)]
    second: Changes = [("x", 2, False), ("y", None, True)]
    checkpointed(HubNode(hub, "tables", "a"), {("agg", "table", 0): [changes(first), changes(second)]}, {})
    b = HubNode(hub, "tables", "b")
    checkpointed(b, {("agg", "table", 0): [changes([("old", 9, False)])]}, {})
    checkpointed(
        b, {("agg", "table", 0): [changes([("x", 5, False)])], ("agg", "table", 1): [changes([("w", 6, False)])]}, {}
    )
    found = state(spark, hub, "tables", key="device")
    assert found.columns == ["_node", "_epoch", "_step", "_state", "_subtask", "device", "__n"]
    assert rows_of(found) == [
        ("a", 1, "agg", "table", 0, "x", 2),
        ("a", 1, "agg", "table", 0, "z", 1),
        ("b", 2, "agg", "table", 0, "x", 5),
        ("b", 2, "agg", "table", 1, "w", 6),
    ]
    assert rows_of(state(spark, hub, "tables", node="b", metadata="false")) == [("w", 6), ("x", 5)]
    with pytest.raises(PySparkException, match=r"nothing says which columns are its key.*device, __n"):
        state(spark, hub, "tables").collect()


def test_the_plan_says_how_a_table_is_folded(spark, hub):
    plan = counting().plan()
    digests = step_digests(plan, stream_types(plan))
    rows: list[Changes] = [[("x", 1, False)], [("x", 2, False), ("y", 1, False)]]
    checkpointed(HubNode(hub, "counted", "a"), {("agg_device", "totals", 0): [changes(part) for part in rows]}, digests)
    text = plan.to_json().decode()
    assert [row[-2:] for row in rows_of(state(spark, hub, "counted", plan=text))] == [("x", 2), ("y", 1)]
    other = Pipeline("counted")
    source = other.source("readings", memory([]), schema={"device": "string", "temp": "double"})
    source.group_by("device").agg(top="max(temp)").sink("out", files("out", format="jsonl"))
    with pytest.raises(PySparkException, match="with another plan than option 'plan' has"):
        state(spark, hub, "counted", plan=other.plan().to_json().decode()).collect()


def test_a_table_and_other_states_have_structs_maps_and_arrays_of_structs(spark, hub):
    kept = NESTED.with_columns(pl.lit(value=False).alias("__deleted"))
    gone = kept.tail(1).with_columns(pl.lit(value=True).alias("__deleted"))
    older = kept.head(1).with_columns(place=pl.lit(None, NESTED.schema["place"]))
    states = {("agg", "table", 0): [pl.concat([older, kept.tail(1)]), pl.concat([kept.head(3), gone])]}
    checkpointed(HubNode(hub, "nested", "a"), states | {("win", "runs", 0): [NESTED.head(2), NESTED[2:]]}, {})
    for step, rows in (("agg", NESTED.head(3)), ("win", NESTED)):
        found = state(spark, hub, "nested", step=step, key="id", metadata="false")
        assert found.schema.simpleString() == NESTED_TYPES
        assert pl.DataFrame(found.orderBy("id").toArrow()).to_dict(as_series=False) == rows.to_dict(as_series=False)


def test_other_states_are_given_as_they_are_stored(spark, hub):
    partial = pl.DataFrame({"device": ["x"], "__end": [10], "__sum": [1.5]})
    checkpointed(HubNode(hub, "partial", "a"), {("win", "runs", 0): [partial, partial]}, {})
    assert rows_of(state(spark, hub, "partial", metadata="false")) == [("x", 10, 1.5), ("x", 10, 1.5)]


def test_where_there_are_several_states_they_are_listed(spark, hub):
    rows = pl.DataFrame({"k": [1]})
    checkpointed(
        HubNode(hub, "several", "a"), {("one", "s", 0): [rows], ("two", "t", 0): [rows], ("two", "u", 0): []}, {}
    )
    with pytest.raises(
        PySparkException, match=r"several states fit(.|\n)*step one, state s\n(.|\n)*step two, state t\n"
    ):
        state(spark, hub, "several")
    with pytest.raises(PySparkException, match=r"no state fits(.|\n)*step one, state s\n"):
        state(spark, hub, "several", step="three")
    assert rows_of(state(spark, hub, "several", step="two", state="t", metadata="false")) == [(1,)]
    with pytest.raises(PySparkException, match="has no rows at any node yet"):
        state(spark, hub, "several", step="two", state="u")


def test_a_pipeline_without_checkpoints_is_an_error(spark, hub):
    HubNode(hub, "stateless", "a").commit(None)
    with pytest.raises(PySparkException, match="has no checkpoint of pipeline stateless on any node"):
        state(spark, hub, "stateless")
