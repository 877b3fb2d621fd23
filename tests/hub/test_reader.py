"""The reader of a stream: declared time, gaps, the index, and the retry of calls."""

from __future__ import annotations

import pytest
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch, FakeHub

from fordstone.errors import HubAwayError
from fordstone.hub.client.client import RETRY_SECONDS_MAX, retry
from fordstone.hub.client.reader import (
    MAX_AHEAD_US,
    Gap,
    StreamIndex,
    StreamReader,
    declared_us,
    find_gaps,
    is_finished,
)
from fordstone.hub.messages import StreamEpoch
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US

NOW_US = 1_000_000_000_000_000


def entry(node: str, epoch: int, *, watermark_us: int = 0, ended: bool = False) -> StreamEpoch:
    return StreamEpoch(
        seq=epoch, node=node, epoch=epoch, runs=(), watermark_us=watermark_us, received_us=NOW_US, ended=ended
    )


# Time.


@pytest.mark.parametrize(
    ("watermark_us", "ended", "declared", "finished"),
    [
        pytest.param(TIME_MIN_US, False, TIME_MIN_US, False, id="nothing is known yet"),
        pytest.param(5, False, 5, False, id="an ordinary time"),
        pytest.param(NOW_US + MAX_AHEAD_US, False, NOW_US + MAX_AHEAD_US, False, id="an hour ahead"),
        pytest.param(NOW_US + MAX_AHEAD_US + 1, False, NOW_US + MAX_AHEAD_US, False, id="a clock that is ahead"),
        pytest.param(TIME_MAX_US, True, TIME_MIN_US, True, id="the node's input ended"),
        pytest.param(TIME_MAX_US, False, TIME_MIN_US, True, id="the stream's input ended, the node goes on"),
        pytest.param(5, True, TIME_MIN_US, True, id="ended, with a time of its own"),
        pytest.param(NOW_US + 9 * MAX_AHEAD_US, True, TIME_MIN_US, True, id="ended, with a clock that is ahead"),
    ],
)
def test_the_hubs_clock_bounds_declared_time_and_a_finished_epoch_declares_none(
    watermark_us: int, ended: bool, declared: int, finished: bool
):
    one = entry("a", 1, watermark_us=watermark_us, ended=ended)
    assert (declared_us(one), is_finished(one)) == (declared, finished)


def test_a_node_is_finished_once_its_last_epoch_was_read_and_until_it_is_started_again():
    hub, index = FakeHub(), StreamIndex()
    hub.add("a", Epoch(watermark_us=5), Epoch(watermark_us=TIME_MAX_US, ended=True))
    index.add(hub.stream_page(PIPELINE, STREAM))
    assert [index.is_finished("a", position) for position in (0, 1, 2)] == [False, False, True]
    assert not index.is_finished("b", 0)
    hub.add("a", Epoch(watermark_us=9))
    index.add(hub.stream_page(PIPELINE, STREAM, after=index.after))
    assert [index.is_finished("a", position) for position in (2, 3)] == [False, False]


# Gaps.


def test_a_gap_is_found_for_nodes_that_were_read_before_and_for_no_others():
    assert find_gaps({"a": 2}, [entry("a", 5), entry("b", 9)]) == [Gap(node="a", first=3, last=4)]
    assert find_gaps({"a": 2}, [entry("a", 3), entry("a", 4)]) == []
    assert find_gaps({}, [entry("a", 3), entry("a", 5)]) == [Gap(node="a", first=4, last=4)]


# The index.


def test_no_node_is_shown_before_all_pages_of_the_first_listing_have_come():
    hub, index = FakeHub(page_commits=1), StreamIndex()
    hub.add("a", Epoch())
    hub.add("b", Epoch())
    index.add(hub.stream_page(PIPELINE, STREAM))
    assert index.nodes() == ()
    index.add(hub.stream_page(PIPELINE, STREAM, after=index.after))
    assert index.nodes() == ("a", "b")


def test_acknowledged_epochs_are_forgotten_and_their_nodes_are_not():
    hub, index = FakeHub(), StreamIndex()
    hub.add("a", Epoch(), Epoch(), Epoch())
    index.add(hub.stream_page(PIPELINE, STREAM))
    index.forget({"a": 2, "unknown": 9})
    assert (index.entries, [one.epoch for one in index.epochs_after("a", 0, 10)]) == (1, [3])
    index.forget({"a": 3})
    index.add(hub.stream_page(PIPELINE, STREAM))
    assert (index.nodes(), index.last("a"), index.entries) == (("a",), 3, 0)


def test_unread_epochs_of_all_nodes_come_in_the_hubs_order():
    hub, index = FakeHub(), StreamIndex()
    for node in ("b", "a", "b"):
        hub.add(node, Epoch(), Epoch())
    index.add(hub.stream_page(PIPELINE, STREAM))
    found = index.unread({"b": 1, "gone": 7})
    assert [(one.node, one.epoch) for one in found] == [("b", 2), ("a", 1), ("a", 2), ("b", 3), ("b", 4)]


def test_all_pages_are_listed_although_the_hub_is_away_in_between():
    hub, paused = FakeHub(page_commits=1, away=True), list[float]()
    for node in ("a", "b", "c"):
        hub.add(node, Epoch())

    def pause(seconds: float) -> None:
        paused.append(seconds)
        hub.away = False

    reader = StreamReader(hub, PIPELINE, STREAM, pause=pause)
    found = []
    for page in reader.pages():
        found += [one.node for one in page.epochs]
        hub.away = page.more
    assert (found, len(paused)) == (["a", "b", "c"], 3)


# Retries.


def test_a_call_is_tried_again_while_the_hub_is_away_and_then_given_up():
    paused: list[float] = []
    answers: list[HubAwayError | str] = [HubAwayError("away"), HubAwayError("busy", retry_after_s=7.0), "here"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retry(call, pause=paused.append) == "here"
    assert (len(paused), paused[1]) == (2, 7.0)
    paused.clear()

    def never() -> str:
        raise HubAwayError("away")

    with pytest.raises(HubAwayError):
        retry(never, pause=paused.append)
    assert RETRY_SECONDS_MAX / 2 < sum(paused) <= RETRY_SECONDS_MAX
