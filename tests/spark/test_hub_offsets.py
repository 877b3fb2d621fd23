from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.serializers import CPickleSerializer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch, FakeHub
from tests.hub.running import running_hub
from tests.spark.hub_nodes import HubNode

from fordstone.errors import NodeStoppedError, SourceError
from fordstone.hub.client.reader import BACK_OFF, StreamReader
from fordstone.hub.messages import NodePosition, StreamEpoch, StreamNode
from fordstone.lang.duration import TIME_MAX_US
from fordstone.spark.formats import source as source_module
from fordstone.spark.formats.source import (
    BatchPlanner,
    HubBatchReader,
    HubSource,
    HubStreamReader,
    Limit,
    Offset,
    StreamSetting,
    epoch_pieces,
    next_offset,
    reads_of,
)
from fordstone.state.base import RunRef

NOW_US = 1_000_000_000_000_000


def entry(seq: int, node: str, epoch: int, rows: int = 1, *, watermark_us: int = 0, ended: bool = False) -> StreamEpoch:
    run = RunRef(digest=f"{seq:032x}{epoch:032x}", size_bytes=10 * rows, rows=rows)
    return StreamEpoch(
        seq=seq, node=node, epoch=epoch, chain=f"{epoch:064x}", runs=(run,), watermark_us=watermark_us, received_us=NOW_US,
        ended=ended,
    )  # fmt: skip


def nodes(**epochs: int) -> dict[str, NodePosition]:
    return {node: NodePosition(epoch, f"{epoch:064x}") for node, epoch in epochs.items()}


def text(offset: Offset) -> str:
    return json.dumps(offset.to_json())


def test_the_same_offset_has_the_same_text_whatever_way_it_came_about():
    one = Offset(nodes=nodes(b=2, a=1), watermark_us=4)
    other = Offset(nodes=nodes(a=1, b=2), watermark_us=4)
    assert text(one) == text(other) == text(Offset.from_json(json.loads(text(one))))


@pytest.mark.parametrize("value", [{}, {"epoch": 1, "work": "x"}, {"nodes": {"a": "1"}, "seq": 0, "watermark_us": 0}])
def test_an_offset_of_another_source_is_refused(value):
    with pytest.raises(SourceError, match="checkpoint location of this query's own"):
        Offset.from_json(value)


def test_without_a_limit_a_batch_has_all_that_is_there():
    end = next_offset(Offset(), [entry(1, "a", 1), entry(1, "a", 2), entry(2, "b", 7)], Limit())
    assert end.epochs == {"a": 2, "b": 7}


@pytest.mark.parametrize(
    ("limit", "epochs"),
    [
        (Limit(rows=1), {"a": 1}),
        (Limit(rows=10), {"a": 2}),
        (Limit(rows=11), {"a": 2, "b": 7}),
        (Limit(size_bytes=50), {"a": 1}),
        (Limit(epochs=2), {"a": 2}),
    ],
)
def test_a_limit_cuts_between_epochs_and_lets_one_through_however_large(limit, epochs):
    entries = [entry(1, "a", 1, rows=5), entry(1, "a", 2, rows=5), entry(2, "b", 7)]
    end = next_offset(Offset(), entries, limit)
    assert end.epochs == epochs


def test_commits_to_other_streams_make_no_batch():
    start = Offset(nodes=nodes(a=1))
    assert next_offset(start, [], Limit()) == start


def test_the_watermark_is_what_all_nodes_have_passed_and_never_goes_back():
    start = next_offset(
        Offset(),
        [entry(1, "a", 1, watermark_us=100), entry(2, "b", 1, watermark_us=70)],
        Limit(),
    )
    assert start.watermark_us == 70
    silent = next_offset(start, [entry(3, "a", 2, watermark_us=200)], Limit())
    assert silent.watermark_us == 70
    joined = next_offset(silent, [entry(4, "c", 1, watermark_us=5)], Limit())
    assert joined.watermark_us == 70


def test_the_watermark_does_not_wait_for_finished_nodes_and_does_not_end_with_them():
    start = next_offset(
        Offset(),
        [entry(1, "a", 1, watermark_us=50), entry(1, "a", 2, watermark_us=TIME_MAX_US, ended=True)],
        Limit(),
    )
    assert (start.watermark_us, set(start.finished)) == (50, {"a"})
    assert Offset.from_json(json.loads(text(start))) == start
    onward = next_offset(start, [entry(2, "b", 1, watermark_us=90)], Limit())
    assert (onward.watermark_us, set(onward.finished)) == (90, {"a"})
    back = next_offset(onward, [entry(3, "a", 3, watermark_us=60)], Limit())
    assert (back.watermark_us, set(back.finished)) == (90, set())
    both = [entry(4, "b", 2, watermark_us=200), entry(5, "a", 4, watermark_us=120)]
    assert next_offset(back, both, Limit()).watermark_us == 120


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(0, 9)), max_size=20),
    st.integers(1, 12),
)
def test_batches_of_any_limit_have_every_epoch_once_and_in_order(commits, rows_max):
    at: dict[str, int] = {}
    log: list[StreamEpoch] = []
    for seq, (node, epochs, rows) in enumerate(commits, start=1):
        for _ in range(epochs):
            at[node] = at.get(node, 0) + 1
            log.append(entry(seq, node, at[node], rows=rows))
    seen: list[StreamEpoch] = []
    start = Offset()
    while True:
        waiting = [item for item in log if item.epoch > start.epochs.get(item.node, 0)]
        end = next_offset(start, waiting, Limit(rows=rows_max))
        if end == start:
            break
        seen += [item for item in waiting if item.epoch <= end.epochs.get(item.node, 0)]
        start = end
    assert sorted(seen, key=log.index) == log
    for node, last in at.items():
        assert [item.epoch for item in seen if item.node == node] == list(range(1, last + 1))


def test_runs_without_rows_are_not_read_and_equal_runs_are_read_each():
    run = RunRef(digest="a", size_bytes=1, rows=1)
    twice = StreamEpoch(
        seq=1,
        node="a",
        epoch=1,
        chain="a1",
        runs=(run, run, RunRef(digest="b", size_bytes=1, rows=0)),
        watermark_us=0,
        received_us=0,
    )
    assert [run.digest for _, _, run in reads_of([twice])] == ["a", "a"]


def planner_of(hub: FakeHub, *, fail_on_loss: bool = True) -> BatchPlanner:
    return BatchPlanner(StreamReader(hub, PIPELINE, STREAM), fail_on_loss=fail_on_loss)


def filled(*commits: tuple[str, int], page_nodes: int = 1000) -> FakeHub:
    """A hub with commits of nodes, each of some epochs with one row."""
    hub = FakeHub(page_nodes=page_nodes)
    for node, epochs in commits:
        hub.add(node, *one_row(epochs))
    return hub


def one_row(epochs: int) -> list[Epoch]:
    return [Epoch(runs=[pl.DataFrame({"n": [1]})])] * epochs


def test_a_batch_goes_over_responses_and_is_planned_again_from_its_offsets_alone():
    hub = filled(("a", 4), ("b", 2), ("a", 3), page_nodes=1)
    planner = planner_of(hub)
    end = planner.plan(Offset(), Limit(rows=5))
    assert end.epochs == {"a": 4, "b": 1}
    planned = planner.epochs(Offset(), end)
    assert [(item.node, item.epoch) for item in planned] == [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1)]
    again = planner_of(hub).epochs(Offset(), end)
    assert sorted(again, key=lambda item: (item.node, item.epoch)) == planned
    while (onward := planner.plan(end, Limit())) != end:
        end = onward
    assert end.epochs == {"a": 7, "b": 2}


def test_a_batch_can_be_planned_again_after_the_next_one_was_looked_for():
    planner = planner_of(filled(("a", 3)))
    end = planner.plan(Offset(), Limit(rows=1))
    assert planner.plan(end, Limit(rows=1)).epochs == {"a": 2}
    assert [item.epoch for item in planner.epochs(Offset(), end)] == [1]


def test_a_long_batch_that_is_planned_again_is_listed_piece_by_piece():
    hub = filled(("a", 9))
    end = planner_of(hub).plan(Offset(), Limit())
    hub.epochs_max = 3
    assert [item.epoch for item in planner_of(hub).epochs(Offset(), end)] == list(range(1, 10))


def test_epochs_that_are_held_are_not_asked_for_again():
    hub = filled(("a", 4), ("b", 4))
    planner = planner_of(hub)
    start = Offset()
    for _ in range(8):
        start = planner.plan(start, Limit(epochs=1))
    assert start.epochs == {"a": 4, "b": 4}
    assert len(hub.asked) == 1


def test_the_planner_holds_a_bounded_number_of_epochs_however_far_the_query_lags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source_module, "EPOCHS_PER_BATCH_MAX", 10)
    hub = filled(("a", 50), ("b", 50))
    planner, start, held = planner_of(hub), Offset(), list[int]()
    while (end := planner.plan(start, Limit())) != start:
        held.append(planner._buffer.count)
        start = end
    assert start.epochs == {"a": 50, "b": 50}
    assert max(held) <= 10


def test_available_now_reads_nothing_that_came_later():
    hub = filled(("a", 1), ("b", 1))
    planner = planner_of(hub)
    until = planner.newest_epochs()
    hub.add("a", *one_row(1))
    hub.add("c", *one_row(1))
    end = planner.plan(Offset(), Limit(), until=until)
    assert end.epochs == {"a": 1, "b": 1}
    assert planner.plan(end, Limit(), until=until) == end


def test_the_offset_after_everything_is_where_reading_all_would_end():
    hub = FakeHub(now_us=NOW_US)
    for seq in range(1, 8):
        hub.add("ab"[seq % 2], Epoch(watermark_us=seq))
    hub.add("c", Epoch(watermark_us=TIME_MAX_US, ended=True))
    end = planner_of(hub).offset_of_end()
    assert end.epochs == {"a": 3, "b": 4, "c": 1}
    assert (end.watermark_us, sorted(end.finished)) == (6, ["c"])
    assert end == planner_of(hub).plan(Offset(), Limit())


def test_epochs_that_the_hub_removed_stop_the_query_unless_loss_is_allowed():
    hub = filled(("a", 5))
    start = planner_of(hub).plan(Offset(), Limit(rows=2))
    end = planner_of(hub).plan(Offset(), Limit())
    hub.remove_epochs("a", 4)
    with pytest.raises(SourceError, match=r"node a: epochs up to 4 are gone.*failOnDataLoss.*consumer"):
        planner_of(hub).plan(start, Limit())
    assert planner_of(hub, fail_on_loss=False).plan(start, Limit()).epochs == {"a": 5}
    with pytest.raises(SourceError, match="node a: epochs up to 4 are gone"):
        planner_of(hub).epochs(start, end)
    assert [item.epoch for item in planner_of(hub, fail_on_loss=False).epochs(start, end)] == [5]
    assert planner_of(hub).plan(Offset(), Limit()).epochs == {"a": 5}, "a new query begins with what is there"


@pytest.mark.parametrize("onward", [0, 1, 2, 5])
def test_a_hub_that_was_set_back_stops_the_query_however_far_it_has_come_since(onward: int):
    hub = filled(("a", 5), ("b", 1))
    planner = planner_of(hub)
    start = planner.plan(Offset(), Limit())
    before = planner_of(hub).plan(Offset(), Limit(rows=4))
    hub.set_back("a", 3)
    if onward:
        hub.add("a", *[Epoch(runs=[pl.DataFrame({"n": [9]})])] * onward)
    # A query that runs learns of it with the next commit of the node.
    for planning in (planner_of(hub), planner) if onward else (planner_of(hub),):
        with pytest.raises(NodeStoppedError, match=r"node a .*fordstone hub restore"):
            planning.plan(start, Limit())
    with pytest.raises(NodeStoppedError, match=r"node a .*fordstone hub restore"):
        planner_of(hub).epochs(before, start)


def test_a_planned_batch_of_a_node_that_a_restored_hub_waits_for_is_no_loss():
    hub = filled(("a", 5))
    start = planner_of(hub).plan(Offset(), Limit(rows=2))
    end = planner_of(hub).plan(Offset(), Limit())
    hub.set_back("a", 3)
    hub.awaited.add("a")
    for fail_on_loss in (True, False):
        with pytest.raises(SourceError, match=r"node a .*after epoch 2: .* since a restore") as caught:
            planner_of(hub, fail_on_loss=fail_on_loss).epochs(start, end)
        assert "failOnDataLoss" not in str(caught.value)


def test_an_epoch_with_rows_is_found_after_many_without():
    hub = filled(("a", 1))
    hub.add("a", *[Epoch()] * 60)
    found = StreamReader(hub, PIPELINE, STREAM).example()
    assert found is not None
    assert found[0].epoch == 1


def test_the_epochs_of_a_batch_job_are_spread_over_tasks_by_their_bytes():
    def newest(node: str, epoch: int, removed: int, size_bytes: int) -> StreamNode:
        return StreamNode(
            node=node,
            seq=1,
            epoch=epoch,
            chain=f"{epoch:064x}",
            watermark_us=0,
            received_us=0,
            removed=removed,
            size_bytes=size_bytes,
        )

    nodes = [
        newest("a", 100, 20, 900),
        newest("b", 3, 0, 100),
        newest("empty", 5, 5, 0),
        newest("without rows", 9, 0, 0),
    ]
    pieces = epoch_pieces(nodes, 4)
    assert [(node, wanted.after, wanted.until) for node, wanted, _ in pieces] == [
        ("a", 20, 40),
        ("a", 40, 60),
        ("a", 60, 80),
        ("a", 80, 100),
        ("b", 0, 3),
        ("without rows", 0, 9),
    ]
    assert pieces[0][1].seen == NodePosition(100, f"{100:064x}"), "a log that is set back until then is noticed"


def test_while_the_hub_is_away_it_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch):
    hub, now_us = FakeHub(away=True), 0
    monkeypatch.setattr(StreamSetting, "reader", lambda _: StreamReader(hub, PIPELINE, STREAM))
    monkeypatch.setattr(source_module, "monotonic_clock_us", lambda: now_us)
    reader = HubStreamReader(
        StreamSetting.of({"hub": "http://127.0.0.1:1", "pipeline": PIPELINE, "stream": STREAM}), StructType([])
    )
    start = reader.initialOffset()
    for _ in range(600):  # a minute of Spark's polling
        assert reader.latestOffset(start, ReadAllAvailable()) == start
        now_us += 100_000
    assert 5 <= len(hub.calls) <= 15
    hub.away = False
    hub.add("a", *one_row(1))
    now_us += BACK_OFF.max_us
    assert reader.latestOffset(start, ReadAllAvailable()) != start


def test_the_calls_that_spark_makes_read_each_row_once_although_the_reader_is_sent_and_made_again(tmp_path):
    schema = StructType([StructField("n", LongType()), StructField("_node", StringType())])

    def rows(reader: HubStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, str]]:
        sent = CPickleSerializer().loads(CPickleSerializer().dumps(reader))
        found = [batch for share in reader.partitions(start, end) for batch in sent.read(share)]
        return sorted((row["n"], row["_node"]) for batch in found for row in batch.to_pylist())

    with running_hub(tmp_path / "hub") as address:
        options = {"hub": address.url, "pipeline": "p", "stream": "readings", "consumer": "query"}
        node = HubNode(address, "p", "a")
        node.commit(pl.DataFrame({"n": [1, 2]}))
        node.commit(pl.DataFrame({"n": [3]}))
        reader = HubStreamReader(StreamSetting.of(options), schema)
        start = reader.initialOffset()
        first = reader.latestOffset(start, ReadMaxRows(2))
        assert rows(reader, start, first) == [(1, "a"), (2, "a")]
        again = HubStreamReader(StreamSetting.of(options), schema)
        assert rows(again, start, first) == [(1, "a"), (2, "a")]
        again.commit(first)
        HubNode(address, "p", "b").commit(pl.DataFrame({"n": [4]}))
        again.prepareForTriggerAvailableNow()
        node.commit(pl.DataFrame({"n": [5]}))
        second = again.latestOffset(first, ReadAllAvailable())
        assert rows(again, first, second) == [(3, "a"), (4, "b")]
        assert again.latestOffset(second, ReadAllAvailable()) == second
        latest = HubStreamReader(StreamSetting.of({**options, "startingEpochs": "latest"}), schema).initialOffset()
        assert {node: epoch for node, (epoch, _) in latest["nodes"].items()} == {"a": 3, "b": 1}
        job = HubBatchReader(StreamSetting.of(options), schema)
        found = [batch for share in job.partitions() for batch in job.read(share)]
        assert sorted(row["n"] for batch in found for row in batch.to_pylist()) == [1, 2, 3, 4, 5]
        assert HubSource(options).schema().fieldNames() == ["n", "_node", "_epoch"]
    assert reader.latestOffset(first, ReadAllAvailable()) == first, "the hub is away"
