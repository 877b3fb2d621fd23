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
from tests.hub.running import running_hub
from tests.spark.hub_nodes import HubNode

from fordstone.errors import SourceError
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.reader import Gap, StreamReader
from fordstone.hub.messages import Epochs, StreamEpoch, StreamPage
from fordstone.lang.duration import TIME_MAX_US
from fordstone.spark.formats.source import (
    BatchPlanner,
    HubBatchReader,
    HubSource,
    HubStreamReader,
    Limit,
    Offset,
    StreamSetting,
    find_lost,
    next_offset,
    reads_of,
)
from fordstone.state.base import RunRef

NOW_US = 1_000_000_000_000_000


def entry(seq: int, node: str, epoch: int, rows: int = 1, *, watermark_us: int = 0, ended: bool = False) -> StreamEpoch:
    run = RunRef(digest=f"{seq:032x}{epoch:032x}", size_bytes=10 * rows, rows=rows)
    return StreamEpoch(
        seq=seq, node=node, epoch=epoch, runs=(run,), watermark_us=watermark_us, received_us=NOW_US, ended=ended
    )


def text(offset: Offset) -> str:
    return json.dumps(offset.to_json())


def test_the_same_offset_has_the_same_text_whatever_way_it_came_about():
    one = Offset(nodes={"b": 2, "a": 1}, seq=3, watermark_us=4)
    other = Offset(nodes={"a": 1, "b": 2}, seq=3, watermark_us=4)
    assert text(one) == text(other) == text(Offset.from_json(json.loads(text(one))))


@pytest.mark.parametrize("value", [{}, {"epoch": 1, "work": "x"}, {"nodes": {"a": "1"}, "seq": 0, "watermark_us": 0}])
def test_an_offset_of_another_source_is_refused(value):
    with pytest.raises(SourceError, match="checkpoint location of this query's own"):
        Offset.from_json(value)


def test_without_a_limit_a_batch_has_all_that_is_there():
    end = next_offset(Offset(), [entry(1, "a", 1), entry(1, "a", 2), entry(2, "b", 7)], read_to=9, limit=Limit())
    assert (end.nodes, end.seq) == ({"a": 2, "b": 7}, 9)


@pytest.mark.parametrize(
    ("limit", "nodes", "seq"),
    [
        (Limit(rows=1), {"a": 1}, 0),
        (Limit(rows=10), {"a": 2}, 1),
        (Limit(rows=11), {"a": 2, "b": 7}, 9),
        (Limit(size_bytes=50), {"a": 1}, 0),
        (Limit(epochs=2), {"a": 2}, 1),
    ],
)
def test_a_limit_cuts_between_epochs_and_lets_one_through_however_large(limit, nodes, seq):
    entries = [entry(1, "a", 1, rows=5), entry(1, "a", 2, rows=5), entry(2, "b", 7)]
    end = next_offset(Offset(), entries, read_to=9, limit=limit)
    assert (end.nodes, end.seq) == (nodes, seq)


def test_commits_to_other_streams_make_no_batch():
    start = Offset(nodes={"a": 1}, seq=1)
    assert next_offset(start, [], read_to=50, limit=Limit()) == start


def test_the_watermark_is_what_all_nodes_have_passed_and_never_goes_back():
    start = next_offset(
        Offset(),
        [entry(1, "a", 1, watermark_us=100), entry(2, "b", 1, watermark_us=70)],
        read_to=2,
        limit=Limit(),
    )
    assert start.watermark_us == 70
    silent = next_offset(start, [entry(3, "a", 2, watermark_us=200)], read_to=3, limit=Limit())
    assert silent.watermark_us == 70
    joined = next_offset(silent, [entry(4, "c", 1, watermark_us=5)], read_to=4, limit=Limit())
    assert joined.watermark_us == 70


def test_the_watermark_does_not_wait_for_finished_nodes_and_does_not_end_with_them():
    start = next_offset(
        Offset(),
        [entry(1, "a", 1, watermark_us=50), entry(1, "a", 2, watermark_us=TIME_MAX_US, ended=True)],
        read_to=1,
        limit=Limit(),
    )
    assert (start.watermark_us, set(start.finished)) == (50, {"a"})
    assert Offset.from_json(json.loads(text(start))) == start
    onward = next_offset(start, [entry(2, "b", 1, watermark_us=90)], read_to=2, limit=Limit())
    assert (onward.watermark_us, set(onward.finished)) == (90, {"a"})
    back = next_offset(onward, [entry(3, "a", 3, watermark_us=60)], read_to=3, limit=Limit())
    assert (back.watermark_us, set(back.finished)) == (90, set())
    both = [entry(4, "b", 2, watermark_us=200), entry(5, "a", 4, watermark_us=120)]
    assert next_offset(back, both, read_to=5, limit=Limit()).watermark_us == 120


def test_what_is_lost_of_a_planned_batch_is_named():
    start, end = Offset(nodes={"a": 1}, seq=1), Offset(nodes={"a": 3, "b": 1}, seq=4)
    assert find_lost(start, end, [entry(2, "a", 2), entry(3, "a", 3), entry(4, "b", 1)]) == []
    assert find_lost(start, end, [entry(2, "a", 2)]) == [Gap(node="a", first=3, last=3), Gap(node="b", first=1, last=1)]


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
        waiting = [item for item in log if item.epoch > start.nodes.get(item.node, 0)]
        end = next_offset(start, waiting, read_to=len(commits), limit=Limit(rows=rows_max))
        if end == start:
            break
        seen += [item for item in waiting if item.epoch <= end.nodes.get(item.node, 0)]
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
        runs=(run, run, RunRef(digest="b", size_bytes=1, rows=0)),
        watermark_us=0,
        received_us=0,
    )
    assert [run.digest for _, _, run in reads_of([twice])] == ["a", "a"]


class PagedHub(HubClient):
    """Gives entries in pages of two commits."""

    def __init__(self, log: list[StreamEpoch]) -> None:
        self.log = log
        self.asked: list[int] = []

    def stream_page(
        self, pipeline: str, stream: str, *, after: int = 0, wait_s: float = 0.0, limit: int | None = None
    ) -> StreamPage:
        self.asked.append(after)
        seqs = sorted({item.seq for item in self.log if item.seq > after})
        page = seqs[: limit or 2]
        return StreamPage(
            epochs=tuple(item for item in self.log if item.seq in page),
            next=page[-1] if page else after,
            more=len(seqs) > len(page),
        )

    def epochs(self, *, pipeline: str | None = None, node: str | None = None, limit: int | None = None) -> Epochs:
        return Epochs(epochs=())


def planner_of(hub: PagedHub, *, fail_on_loss: bool = True) -> BatchPlanner:
    return BatchPlanner(StreamReader(hub, "p", "s"), fail_on_loss=fail_on_loss)


def test_a_batch_goes_over_pages_and_is_planned_again_from_its_offsets_alone():
    hub = PagedHub([entry(seq, "a", seq) for seq in range(1, 8)])
    planner = planner_of(hub)
    end = planner.plan(Offset(), Limit(rows=5))
    assert end.nodes == {"a": 5}
    planned = planner.epochs(Offset(), end)
    assert [item.epoch for item in planned] == [1, 2, 3, 4, 5]
    assert planner_of(hub).epochs(Offset(), end) == planned
    assert planner.plan(end, Limit()).nodes == {"a": 7}


def test_a_batch_can_be_planned_again_after_the_next_one_was_looked_for():
    hub = PagedHub([entry(1, "a", epoch) for epoch in (1, 2, 3)])
    planner = planner_of(hub)
    end = planner.plan(Offset(), Limit(rows=1))
    assert planner.plan(end, Limit(rows=1)).nodes == {"a": 2}
    assert [item.epoch for item in planner.epochs(Offset(), end)] == [1]


def test_pages_that_are_held_are_not_asked_for_again():
    hub = PagedHub([entry(seq, "a", seq) for seq in range(1, 5)])
    planner = planner_of(hub)
    start = Offset()
    for _ in range(4):
        start = planner.plan(start, Limit(rows=1))
    assert start.nodes == {"a": 4}
    assert hub.asked == sorted(set(hub.asked))


def test_available_now_reads_nothing_that_came_later():
    hub = PagedHub([entry(1, "a", 1), entry(2, "b", 1)])
    planner = planner_of(hub)
    until = planner.newest_commit()
    hub.log.append(entry(3, "a", 2))
    end = planner.plan(Offset(), Limit(), until=until)
    assert end.nodes == {"a": 1, "b": 1}
    assert planner.plan(end, Limit(), until=until) == end


def test_the_offset_after_everything_is_where_reading_all_would_end():
    hub = PagedHub([entry(seq, "ab"[seq % 2], seq, watermark_us=seq) for seq in range(1, 8)])
    assert planner_of(hub).offset_of_end().nodes == {"a": 6, "b": 7}


def test_epochs_that_the_hub_removed_stop_the_query_unless_loss_is_allowed():
    hub = PagedHub([entry(5, "a", 5)])
    start = Offset(nodes={"a": 2}, seq=2)
    with pytest.raises(SourceError, match=r"node a: 3 to 4.*failOnDataLoss.*consumer"):
        planner_of(hub).plan(start, Limit())
    assert planner_of(hub, fail_on_loss=False).plan(start, Limit()).nodes == {"a": 5}
    with pytest.raises(SourceError, match="node a: 3 to 4"):
        planner_of(hub).epochs(start, Offset(nodes={"a": 5}, seq=5))


def test_an_epoch_with_rows_is_found_after_many_without():
    hub = PagedHub([entry(1, "a", 1), StreamEpoch(seq=2, node="a", epoch=2, runs=(), watermark_us=0, received_us=0)])
    found = StreamReader(hub, "p", "s").example()
    assert found is not None
    assert found[0].epoch == 1


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
        assert latest["nodes"] == {"a": 3, "b": 1}
        job = HubBatchReader(StreamSetting.of(options), schema)
        found = [batch for share in job.partitions() for batch in job.read(share)]
        assert sorted(row["n"] for batch in found for row in batch.to_pylist()) == [1, 2, 3, 4, 5]
        assert HubSource(options).schema().fieldNames() == ["n", "_node", "_epoch"]
    assert reader.latestOffset(first, ReadAllAvailable()) == first, "the hub is away"
