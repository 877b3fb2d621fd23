from __future__ import annotations

import json
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.errors import HubAwayError, SourceError
from fordstone.hub.messages import Epochs, StreamEpoch, StreamPage
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.spark.formats.access import patiently
from fordstone.spark.formats.offsets import (
    MAX_AHEAD_US,
    Gap,
    Limit,
    Offset,
    RunRead,
    assign,
    batch,
    gaps,
    lost,
    next_offset,
    reads_of,
    time_of,
)
from fordstone.spark.formats.tail import StreamTail
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
def test_an_offset_of_somebody_else_is_told_so(value):
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


def test_a_clock_ahead_of_the_hubs_counts_an_hour_at_most_unless_the_node_has_ended():
    assert time_of(entry(1, "a", 1, watermark_us=NOW_US + 9 * MAX_AHEAD_US)) == NOW_US + MAX_AHEAD_US
    assert time_of(entry(1, "a", 1, watermark_us=TIME_MAX_US, ended=True)) == TIME_MAX_US
    assert time_of(entry(1, "a", 1, watermark_us=TIME_MIN_US)) == TIME_MIN_US


def test_a_gap_is_found_for_nodes_that_were_read_before_and_for_no_others():
    start = Offset(nodes={"a": 2}, seq=1)
    assert gaps(start, [entry(3, "a", 5), entry(4, "b", 9)]) == [Gap(node="a", first=3, last=4)]
    assert gaps(start, [entry(3, "a", 3), entry(4, "a", 4)]) == []


def test_what_is_lost_of_a_planned_batch_is_named():
    start, end = Offset(nodes={"a": 1}, seq=1), Offset(nodes={"a": 3, "b": 1}, seq=4)
    assert lost(start, end, [entry(2, "a", 2), entry(3, "a", 3), entry(4, "b", 1)]) == []
    assert lost(start, end, [entry(2, "a", 2)]) == [Gap(node="a", first=3, last=3), Gap(node="b", first=1, last=1)]


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
        behind = [item for item in log if item.seq > start.seq]
        end = next_offset(start, behind, read_to=len(commits), limit=Limit(rows=rows_max))
        if end == start:
            break
        seen += batch(start, end, behind)
        start = end
    assert sorted(seen, key=log.index) == log
    for node, last in at.items():
        assert [item.epoch for item in seen if item.node == node] == list(range(1, last + 1))


def test_runs_are_dealt_out_evenly_and_no_task_is_without():
    reads = [
        RunRead(node="a", epoch=n, digest=f"{n}", size_bytes=size, rows=1) for n, size in enumerate([9, 1, 1, 8, 1])
    ]
    hands = assign(reads, 2)
    assert sorted(sum(read.size_bytes for read in hand) for hand in hands) == [10, 10]
    assert sorted(read.epoch for hand in hands for read in hand) == [0, 1, 2, 3, 4]
    assert len(assign(reads[:1], 8)) == 1
    assert assign([], 8) == []


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
    assert [read.digest for read in reads_of([twice])] == ["a", "a"]


class PagedHub:
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


def tail_of(hub: PagedHub, *, fail_on_loss: bool = True) -> StreamTail:
    return StreamTail(hub, "p", "s", fail_on_loss=fail_on_loss)  # type: ignore[arg-type]  # all that it asks of a client


def test_a_batch_goes_over_pages_and_is_planned_again_from_its_offsets_alone():
    hub = PagedHub([entry(seq, "a", seq) for seq in range(1, 8)])
    tail = tail_of(hub)
    end = tail.latest(Offset(), Limit(rows=5))
    assert end.nodes == {"a": 5}
    planned = tail.batch(Offset(), end)
    assert [item.epoch for item in planned] == [1, 2, 3, 4, 5]
    assert tail_of(hub).batch(Offset(), end) == planned
    assert tail.latest(end, Limit()).nodes == {"a": 7}


def test_pages_that_are_held_are_not_asked_for_again():
    hub = PagedHub([entry(seq, "a", seq) for seq in range(1, 5)])
    tail = tail_of(hub)
    start = Offset()
    for _ in range(4):
        start = tail.latest(start, Limit(rows=1))
    assert start.nodes == {"a": 4}
    assert hub.asked == sorted(set(hub.asked))


def test_available_now_reads_nothing_that_came_later():
    hub = PagedHub([entry(1, "a", 1), entry(2, "b", 1)])
    tail = tail_of(hub)
    until = tail.end()
    hub.log.append(entry(3, "a", 2))
    end = tail.latest(Offset(), Limit(), until=until)
    assert end.nodes == {"a": 1, "b": 1}
    assert tail.latest(end, Limit(), until=until) == end


def test_the_offset_behind_everything_is_where_reading_all_would_end():
    hub = PagedHub([entry(seq, "ab"[seq % 2], seq, watermark_us=seq) for seq in range(1, 8)])
    assert tail_of(hub).skipped().nodes == {"a": 6, "b": 7}


def test_epochs_that_the_hub_let_go_stop_the_query_unless_loss_is_allowed():
    hub = PagedHub([entry(5, "a", 5)])
    start = Offset(nodes={"a": 2}, seq=2)
    with pytest.raises(SourceError, match=r"node a: 3 to 4.*failOnDataLoss.*consumer"):
        tail_of(hub).latest(start, Limit())
    assert tail_of(hub, fail_on_loss=False).latest(start, Limit()).nodes == {"a": 5}
    with pytest.raises(SourceError, match="node a: 3 to 4"):
        tail_of(hub).batch(start, Offset(nodes={"a": 5}, seq=5))


def test_an_epoch_with_rows_is_found_behind_many_without():
    hub = PagedHub([entry(1, "a", 1), StreamEpoch(seq=2, node="a", epoch=2, runs=(), watermark_us=0, received_us=0)])
    found = tail_of(hub).example()
    assert found is not None
    assert found.epoch == 1


def test_a_call_is_tried_again_while_the_hub_is_away_and_then_given_up():
    now_s, slept = [0.0], deque[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    answers: list[HubAwayError | str] = [HubAwayError("away"), HubAwayError("away"), "here"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(call, sleep=sleep, clock_s=lambda: now_s[0]) == "here"
    assert len(slept) == 2

    def never() -> str:
        raise HubAwayError("away")

    with pytest.raises(HubAwayError):
        patiently(never, seconds=30, sleep=sleep, clock_s=lambda: now_s[0])
    assert now_s[0] <= 35
