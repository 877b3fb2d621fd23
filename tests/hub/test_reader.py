"""The reader of a stream: declared time, the facts of nodes, the epochs that it holds, and the retry of calls."""

from __future__ import annotations

import msgspec
import pytest
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch, FakeHub

from fordstone.errors import HubAwayError, SourceError
from fordstone.hub.client.client import RETRY_SECONDS_MAX, retry
from fordstone.hub.client.reader import (
    BACK_OFF,
    MAX_AHEAD_US,
    EpochBuffer,
    Follower,
    Pauses,
    StreamFacts,
    StreamReader,
    declared_us,
    first_epochs,
    is_finished,
)
from fordstone.hub.messages import EpochRange, StreamEpoch
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.protocol.retry import Backoff
from fordstone.state.base import RunRef

NOW_US = 1_000_000_000_000_000


def entry(node: str, epoch: int, *, watermark_us: int = 0, ended: bool = False) -> StreamEpoch:
    return StreamEpoch(
        seq=epoch, node=node, epoch=epoch, chain=f"{node}{epoch}", runs=(), watermark_us=watermark_us, received_us=NOW_US,
        ended=ended,
    )  # fmt: skip


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
    hub, facts = FakeHub(), StreamFacts()
    hub.add("a", Epoch(watermark_us=5), Epoch(watermark_us=TIME_MAX_US, ended=True))
    facts.add(hub.stream_nodes(PIPELINE, STREAM))
    assert [facts.is_finished("a", position) for position in (0, 1, 2)] == [False, False, True]
    assert not facts.is_finished("b", 0)
    hub.add("a", Epoch(watermark_us=9))
    facts.add(hub.stream_nodes(PIPELINE, STREAM, after=facts.after))
    assert [facts.is_finished("a", position) for position in (2, 3)] == [False, False]


# Facts.


def test_no_node_is_shown_before_all_pages_of_the_first_listing_have_come():
    hub, facts = FakeHub(page_nodes=1), StreamFacts()
    hub.add("b", Epoch())
    hub.add("a", Epoch())
    facts.add(hub.stream_nodes(PIPELINE, STREAM))
    assert (facts.nodes(), facts.complete) == ((), False)
    facts.add(hub.stream_nodes(PIPELINE, STREAM, after=facts.after))
    assert (facts.nodes(), facts.complete) == (("a", "b"), True)


def epochs_of(facts: StreamFacts) -> dict[str, int]:
    return {one.node: one.epoch for one in facts.all()}


def test_facts_of_another_log_take_the_place_of_the_old_ones_once_they_are_complete():
    old, new, facts = FakeHub(log_id="old"), FakeHub(log_id="new", page_nodes=1), StreamFacts()
    old.add("a", *[Epoch()] * 9)
    old.add("lost", Epoch())
    facts.add(old.stream_nodes(PIPELINE, STREAM))
    new.add("a", Epoch(), Epoch())
    new.add("b", Epoch())
    for more in (True, True, False):
        assert (facts.nodes(), epochs_of(facts), facts.complete) == (("a", "lost"), {"a": 9, "lost": 1}, True)
        assert facts.add(new.stream_nodes(PIPELINE, STREAM, after=facts.after, log_id=facts.log_id)) is more
    assert (facts.nodes(), epochs_of(facts)) == (("a", "b"), {"a": 2, "b": 1})


def test_all_nodes_are_listed_although_the_hub_is_away_in_between():
    hub, paused = FakeHub(page_nodes=1, away=True), list[float]()
    for node in ("a", "b", "c"):
        hub.add(node, Epoch())

    def pause(seconds: float) -> None:
        paused.append(seconds)
        hub.away = False

    assert StreamReader(hub, PIPELINE, STREAM, pause=pause).facts().nodes() == ("a", "b", "c")
    assert len(paused) == 1


# Epochs that are held.


def listed(node: str, *epochs: int) -> list[StreamEpoch]:
    return [entry(node, epoch) for epoch in epochs]


def test_a_buffer_gives_what_follows_a_position():
    buffer = EpochBuffer()
    buffer.put("a", 2, listed("a", 3, 4, 7))
    buffer.put("b", 0, listed("b", 1))
    assert buffer.count == 4
    assert [buffer.has("a", position) for position in (1, 2, 4, 7)] == [False, True, True, False]
    assert [buffer.has("a", 4, until) for until in (6, 7)] == [False, True]
    assert [one.epoch for one in buffer.epochs_after("a", 3, 9, until=6)] == [4]
    assert buffer.epochs_after("a", 4, 9, until=6) == []
    assert buffer.epochs_after("a", 1, 9) == [], "a reader that went back has to ask again"


def test_a_buffer_forgets_what_was_read():
    buffer = EpochBuffer()
    buffer.put("a", 2, listed("a", 3, 4, 7))
    buffer.put("b", 0, listed("b", 1))
    buffer.forget({"a": 3, "b": 1, "unknown": 9})
    assert (buffer.count, buffer.has("a", 2), buffer.has("a", 3), buffer.has("b", 0)) == (2, False, True, False)
    buffer.put("a", 7, listed("a", 8))
    assert buffer.count == 1


def test_an_epoch_of_several_runs_counts_as_many():
    run = RunRef(digest="0" * 64, size_bytes=1, rows=1)
    large, small = (
        msgspec.structs.replace(entry("a", epoch), runs=(run,) * runs) for epoch, runs in [(1, 5000), (2, 1)]
    )
    buffer = EpochBuffer()
    buffer.put("a", 0, [large, small])
    assert buffer.count == 5001
    buffer.forget({"a": 1})
    assert buffer.count == 1
    buffer.put("a", 2, [])
    assert buffer.count == 0


def test_epochs_of_a_read_have_about_as_many_rows_as_asked_for_and_one_is_always_among_them():
    run = RunRef(digest="0" * 64, size_bytes=1, rows=4)
    epochs = [msgspec.structs.replace(one, runs=(run,)) for one in listed("a", 1, 2, 3)]
    sizes = {rows_max: len(first_epochs(epochs, rows_max)) for rows_max in (1, 4, 7, 8, 99)}
    assert sizes == {1: 1, 4: 1, 7: 1, 8: 2, 99: 3}
    assert len(first_epochs(epochs, 99, epochs_max=2)) == 2


# Pauses.


def test_a_reader_that_the_hub_failed_asks_again_after_pauses_that_grow_and_are_not_the_same_for_all():
    now_us, chances = 0, [1.0, 0.0, 1.0, 0.5]
    pauses = Pauses(
        Backoff(first_us=1_000_000, max_us=15_000_000), clock_us=lambda: now_us, chance=lambda: chances.pop(0)
    )
    waits = []
    for _ in range(3):
        pauses.failed()
        began_us = now_us
        while pauses.pausing:
            now_us += 500_000
        waits.append((now_us - began_us) / 1e6)
    assert waits == [1.0, 1.0, 4.0]
    pauses.failed(HubAwayError("busy", retry_after_s=60.0))
    now_us += 59_000_000
    assert pauses.pausing
    pauses.succeeded()
    assert not pauses.pausing


# Retries.


def test_followers_of_a_hub_that_is_away_do_not_all_ask_at_the_same_times():
    waits = []
    for chance in (0.0, 1.0):
        hub = FakeHub()
        hub.away = True
        reader = StreamReader(hub, PIPELINE, STREAM, chance=lambda: chance)  # noqa: B023 - used within the round
        follower = Follower(reader, StreamFacts(), consumer="center")
        waits.append([follower.step() for _ in range(8)])
        hub.away = False
        follower.step()
        hub.away = True
        assert follower.step() == waits[-1][0], "a response begins it again"
    assert waits[1] == [0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0]
    assert waits[0] == [wait_s * (1 - BACK_OFF.jitter) for wait_s in waits[1]]


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


def test_a_hub_that_was_restored_between_two_pages_is_an_error_and_not_the_end_of_a_node():
    hub = FakeHub(epochs_max=3)
    hub.add("a", *[Epoch()] * 9)
    reader = StreamReader(hub, PIPELINE, STREAM)
    found = reader.epochs_between({"a": EpochRange(until=9, earliest=True)})
    assert [next(found)[0].epoch for _ in range(3)] == [1, 2, 3]
    hub.set_back("a", 2)
    hub.awaited.add("a")
    with pytest.raises(
        SourceError, match=r"node a .*after epoch 3: .* ends at epoch 2 since a restore.*run this again"
    ):
        next(found)


def test_epochs_that_the_hub_removes_between_two_pages_are_passed_over_by_a_reader_of_the_earliest():
    hub = FakeHub(epochs_max=3)
    hub.add("a", *[Epoch()] * 9)
    found = StreamReader(hub, PIPELINE, STREAM).epochs_between({"a": EpochRange(until=9, earliest=True)})
    first = [next(found)[0].epoch for _ in range(3)]
    hub.remove_epochs("a", 5)
    assert first + [one.epoch for one, _ in found] == [1, 2, 3, 6, 7, 8, 9]


def test_clients_that_lost_the_hub_together_try_again_at_different_times():
    def first_pause_s(chance: float) -> float:
        paused: list[float] = []

        def never() -> str:
            raise HubAwayError("away")

        with pytest.raises(HubAwayError):
            retry(never, pause=paused.append, chance=lambda: chance)
        return paused[0]

    longest_s = first_pause_s(1.0)
    assert [first_pause_s(chance) for chance in (0.0, 0.5)] == pytest.approx([longest_s / 2, longest_s * 0.75])
