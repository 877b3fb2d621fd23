"""The center's half of a pipeline on Spark, over a hub: the same as on the edge engine, whatever happens on the way."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from tests.connectors.fake_hub import Epoch, FakeHub, wait_until_listed
from tests.edge.declared import OFFLINE_US, SECOND_US, Outputs, center_plan, epoch, hub
from tests.edge.hub_nodes import Node
from tests.edge.test_declared_time import Found, history, run_history
from tests.hub.running import running_hub
from tests.spark.micro import MicroQuery, MicroSpark
from tests.spark.micro_state import Died

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, files, memory
from fordstone.connectors import rows as read_rows
from fordstone.connectors.hub import HubSource
from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.epochs.manifest import Cut
from fordstone.errors import SourceError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ConsumerPosition
from fordstone.plan import plan as p
from fordstone.planner.split import placed, split
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.query import hosted_query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["hub"]

pytestmark = pytest.mark.usefixtures("quick_disk")

FAR_US = 10**12
"""After all rows: every window closes."""


def source_of(query: MicroQuery) -> HubSource:
    source = query.reader._reader.get()._planned()._sources["s"]
    assert isinstance(source, HubSource)
    return source


def heard(query: MicroQuery, hub: FakeHub) -> None:
    """Wait until the planner has heard of everything that the hub has."""
    source = source_of(query)
    source.partitions()
    for entry in hub.entries:
        assert source._facts is not None
        wait_until_listed(source._facts, entry.node, entry.epoch)


def keep_all(address: HubAddress) -> None:
    """Let the hub remove nothing, although what is read first acknowledges it."""
    HubClient(address).consumer("p", "keeper", ConsumerPosition(streams={}))


def watermark_s(query: MicroQuery) -> float:
    cut: Cut = query.committer.files.cut(query.epoch)
    return cut.sources["s"].watermark_us / SECOND_US


def started(spark: MicroSpark, plan: p.Plan, state: Path, **options: Any) -> MicroQuery:
    return spark.start(plan, state=state, shards=2, **options)


# The same as on the edge.


@pytest.mark.parametrize("seed", range(4))
def test_stream_and_batch_job_give_what_the_edge_gives(seed: int, hub: FakeHub, tmp_path: Path):
    nodes = history(Random(seed))
    wanted = run_history(hub, nodes, Random(seed), wild=False)
    # The hub has all of it now.
    stream = Outputs()
    started(MicroSpark(seed), center_plan(stream), tmp_path / "stream", bounded=True, rows_max=7, batch_rows=3).run()
    assert (stream.found(), stream.ids("late")) == wanted
    job = Outputs()
    MicroSpark(seed).run_batch(center_plan(job), state=tmp_path / "job", shards=2)
    assert (job.found(), job.ids("late")) == wanted


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_that_grows_and_dies_gives_what_the_edge_gives(seed: int, hub: FakeHub, tmp_path: Path):
    rng = Random(seed)
    nodes = history(rng)
    wanted = run_history(hub, nodes, Random(seed), wild=False)
    hub.reset()
    out = Outputs()
    spark, plan = MicroSpark(seed), center_plan(out)
    left = {node: list(epochs) for node, epochs in nodes.items()}
    for node, epochs in left.items():
        hub.add(node, epochs.pop(0))
    query = None
    while any(left.values()):
        node = rng.choice([node for node, epochs in left.items() if epochs])
        size = rng.randint(1, 4)
        taken, left[node] = left[node][:size], left[node][size:]
        hub.add(node, *taken)
        spark.fate.dies_at = None
        try:
            if query is None:
                query = started(spark, plan, tmp_path / "state")
            heard(query, hub)
            if rng.random() < 0.4:
                spark.fate.dies_within(rng.randint(1, 40))
            query.run()
        except Died:
            query = None
    spark.fate.dies_at = None
    query = query or started(spark, plan, tmp_path / "state")
    heard(query, hub)
    query.run()
    # Not bounded: what the watermark has not closed is still open.
    least_s = watermark_s(query)
    assert out.found() == {at: ids for at, ids in wanted[0].items() if at[1] + 10 <= least_s}
    assert out.ids("late") == wanted[1]
    source_of(query).close()


# Nodes.


def test_a_silent_node_holds_time_back_and_one_that_is_away_does_not(hub: FakeHub, tmp_path: Path):
    out, now_us = Outputs(), 0
    query = started(MicroSpark(), center_plan(out), tmp_path)
    hub.add("a", epoch(3, ("x", 1.0, 1)))
    hub.add("b", epoch(3, ("x", 2.0, 2)))
    query.reader._reader.get()._planned()._clock_us = lambda: now_us
    heard(query, hub)
    query.run()
    hub.add("a", epoch(50))
    heard(query, hub)
    query.run()
    assert (watermark_s(query), out.found()) == (3, {})
    now_us = OFFLINE_US
    hub.add("a", epoch(51))
    heard(query, hub)
    query.run()
    assert (watermark_s(query), out.found()) == (51, {("x", 0): [1, 2]})
    hub.add("b", epoch(52, ("x", 41.0, 3), ("x", 51.0, 4)))
    heard(query, hub)
    query.run()
    assert out.ids("late") == [3]
    source_of(query).close()


def test_a_node_of_which_the_hub_has_nothing_left_may_come_back_and_holds_time_back_meanwhile(
    hub: FakeHub, tmp_path: Path
):
    out = Outputs()
    spark = MicroSpark()
    query = started(spark, center_plan(out), tmp_path)
    hub.add("a", epoch(3, ("x", 1.0, 1)))
    last = hub.add("b", epoch(3, ("x", 2.0, 2)))
    heard(query, hub)
    query.run()
    source_of(query).close()
    hub.remove_epochs("b", last)
    hub.add("a", epoch(60))
    query = started(spark, center_plan(out), tmp_path)
    heard(query, hub)
    query.run()
    assert (watermark_s(query), out.found()) == (3, {})
    hub.add("b", epoch(20))
    heard(query, hub)
    query.run()
    assert (watermark_s(query), out.found()) == (20, {("x", 0): [1, 2]})
    source_of(query).close()


# The hub.


def test_while_the_hub_is_away_there_is_nothing_to_do_and_then_it_goes_on(hub: FakeHub, tmp_path: Path):
    out = Outputs()
    hub.goes(away=True)
    hub.add("a", epoch(10, ("x", 1.0, 1)))
    query = started(MicroSpark(), center_plan(out), tmp_path)
    assert not query.step()
    hub.goes(away=False)
    heard(query, hub)
    assert query.run() == 1
    assert out.found() == {("x", 0): [1]}
    source_of(query).close()


def test_a_query_begun_again_while_the_hub_is_away_changes_nothing_and_then_goes_on(hub: FakeHub, tmp_path: Path):
    out = Outputs()
    spark = MicroSpark()
    hub.add("a", epoch(5, ("x", 1.0, 1)))
    query = started(spark, center_plan(out), tmp_path)
    query.run()
    source_of(query).close()
    hub.goes(away=True)
    hub.add("a", epoch(10, ("x", 2.0, 2)))
    query = started(spark, center_plan(out), tmp_path)
    assert not query.step()
    hub.goes(away=False)
    heard(query, hub)
    query.run()
    assert out.found() == {("x", 0): [1, 2]}
    source_of(query).close()


def test_what_comes_after_an_available_now_query_has_begun_is_left_for_the_next(hub: FakeHub, tmp_path: Path):
    out = Outputs()
    spark = MicroSpark()
    hub.add("a", epoch(5, ("x", 1.0, 1)))
    query = started(spark, center_plan(out), tmp_path, available_now=True)
    hub.add("a", epoch(10, ("x", 2.0, 2)))
    heard(query, hub)
    query.run()
    assert out.ids("rows") == [1]
    source_of(query).close()
    query = started(spark, center_plan(out), tmp_path, available_now=True)
    query.run()
    assert (out.ids("rows"), out.found()) == ([1, 2], {("x", 0): [1, 2]})
    source_of(query).close()


def test_a_planned_batch_whose_hub_stays_away_fails_with_words_and_is_done_later(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = Outputs()
    hub.add("a", epoch(10, ("x", 1.0, 1)))
    spark = MicroSpark()
    query = started(spark, center_plan(out), tmp_path)
    hub.away_for_blobs = True
    monkeypatch.setattr("fordstone.hub.client.client.RETRY_SECONDS_MAX", 0.0)
    with pytest.raises(SourceError, match="start the hub again"):
        query.run()
    hub.away_for_blobs = False
    query = started(spark, center_plan(out), tmp_path)
    query.run()
    assert out.found() == {("x", 0): [1]}
    source_of(query).close()


def test_what_spark_has_committed_the_hub_may_remove(hub: FakeHub, tmp_path: Path):
    query = started(MicroSpark(), center_plan(Outputs()), tmp_path)
    hub.add("a", epoch(1), epoch(2))
    hub.add("b", epoch(1))
    heard(query, hub)
    query.run()
    query.reader.commit({"epoch": query.epoch, "work": "{}"})
    hub.add("a", epoch(3))
    assert hub.wait_for_passed("center", {"a": 2, "b": 1})
    query.reader.commit({"epoch": 77, "work": "{}"})
    source_of(query).close()


def test_the_token_is_not_kept_with_the_query(hub: FakeHub, tmp_path: Path):
    plan = center_plan(Outputs(), place={"url": "https://hub.test", "token": "fst_secret"})
    hub.add("a", epoch(10, ("x", 1.0, 1)))
    query = started(MicroSpark(), plan, tmp_path)
    query.run()
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert kept
    assert not [file for file in kept if b"fst_secret" in file.read_bytes()]
    source_of(query).close()


# Rows that real nodes sent: partial ones, and as they are.


@pytest.mark.parametrize("pushed", [True, False])
def test_what_nodes_sent_gives_the_same_on_the_edge_as_a_stream_and_as_a_batch_job(pushed: bool, tmp_path: Path):
    with running_hub(tmp_path / "real_hub") as address:
        for number in range(3):
            half = split(_tiered(_rows_of(number), MemorySink(), pushed=pushed)).edge
            assert half is not None
            config = RunConfig(
                state=tmp_path / "edge", node=f"n{number}", bounded=True, interval="5ms", batch_rows=4, hub=address
            )
            run(placed(half, address), {}, config)
        keep_all(address)
        found = {}
        for way in ("edge", "stream", "job"):
            sink = MemorySink()
            center = split(_tiered([], sink, pushed=pushed)).center
            assert center is not None
            assert isinstance(center.steps[0], p.Source)
            assert (center.steps[0].time is None) == pushed
            plan, state = placed(center, address), tmp_path / way
            if way == "edge":
                run(plan, {}, RunConfig(state=state, node="center", bounded=True, interval="5ms"))
            elif way == "stream":
                started(MicroSpark(3), plan, state, bounded=True, rows_max=9).run()
            else:
                MicroSpark(3).run_batch(plan, state=state, shards=2)
            newest = {row[:2]: row[2:] for row in sink.rows().select("k", "window_start", "n", "total").iter_rows()}
            found[way] = newest
    whole = pl.DataFrame(
        [row for number in range(3) for row in _rows_of(number)], schema=["k", "second", "id"], orient="row"
    )
    wanted = whole.group_by("k", start=pl.col("second") // 10 * 10).agg(n=pl.len(), total=pl.col("id").sum())
    expected = {(k, START + timedelta(seconds=start)): (n, total) for k, start, n, total in wanted.iter_rows()}
    assert found == {"edge": expected, "stream": expected, "job": expected}


START = datetime(2026, 1, 1, tzinfo=UTC)


def _rows_of(node: int) -> list[tuple[str, int, int]]:
    """Key, second and id; none is late."""
    return [("xyz"[(second + node) % 3], second, 100 * node + second) for second in range(node, 50, node + 1)]


def _tiered(rows: list[tuple[str, int, int]], sink: MemorySink, *, pushed: bool) -> p.Plan:
    source = MemorySource([[(k, START + timedelta(seconds=second), n) for k, second, n in rows]])
    pipeline = Pipeline("p")
    stream = pipeline.source(
        "in", memory(source), schema={"k": "string", "ts": "timestamp", "id": "bigint"}, time="ts"
    ).to_center(name="s")
    if not pushed:
        stream.sink("all", memory(MemorySink()))
    stream.group_by("k").window(tumbling("10s")).agg(n="count(*)", total="sum(id)").sink("windows", memory(sink))
    return pipeline.plan()


# Spark itself, and a real hub.


def test_spark_over_a_real_hub_gives_what_the_edge_gives_as_a_stream_and_as_a_batch_job(
    spark: SparkSession, tmp_path: Path
):
    nodes = history(Random(3))
    with ExitStack() as stack:
        address = stack.enter_context(running_hub(tmp_path / "hub"))
        client = HubClient(address)
        for name, epochs in nodes.items():
            node = Node(client, name)
            node.commit(*epochs[:4])
            for one in epochs[4:]:
                node.commit(one)
            node.commit(Epoch(watermark_us=FAR_US))
        keep_all(address)
        found = {}
        for way in ("stream", "job"):
            plan = _to_files(center_plan(Outputs(), place=address.at()), tmp_path / way)
            config = SparkConfig(
                state=tmp_path / f"{way}-state",
                bounded=way == "job",
                available_now=way == "stream",
                shards=2,
                rows_max=60,
            )
            query = hosted_query(plan, {}, config, spark, batch=way == "job")
            if way == "job":
                query.run_batch(lambda _: None)
            else:
                running = query.start(lambda _: None)
                running.awaitTermination()
                assert all(
                    one.numRowsDroppedByWatermark == 0
                    for progress in running.recentProgress
                    for one in progress.stateOperators
                )
            windows = read_rows(tmp_path / way / "windows")
            late = read_rows(tmp_path / way / "late")
            found[way] = (
                {
                    (k, round(start.timestamp())): sorted(ids)
                    for k, start, ids in windows.select("k", "window_start", "ids").iter_rows()
                },
                sorted(late["id"].to_list()),
            )
    fake = FakeHub(now_us=2**60)
    wanted = _on_the_edge(fake, nodes)
    assert found == {"stream": wanted, "job": wanted}


def _on_the_edge(fake: FakeHub, nodes: dict[str, Any]) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        from fordstone.connectors import hub as hub_connector

        patch.setattr(hub_connector, "client_of", lambda _: fake)
        return run_history(fake, nodes, Random(0), wild=False)


def _to_files(plan: p.Plan, root: Path) -> p.Plan:
    import msgspec

    def replaced(step: p.Step) -> p.Step:
        if not isinstance(step, p.Sink):
            return step
        return msgspec.structs.replace(step, connector=files(str(root / step.name), format="parquet"))

    return msgspec.structs.replace(plan, steps=tuple(map(replaced, plan.steps)))
