"""What a node sends next, how long it waits, and what the hub's words mean, as tables of facts."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.hub.messages import Refusal
from fordstone.protocol import sending as judge
from fordstone.protocol.sending import (
    RANGE_BODY_BYTES_MAX,
    RANGE_BYTES_MAX,
    RANGE_RUNS_MAX,
    RETRY_AFTER_MAX_US,
    WAIT_FIRST_US,
    WAIT_MAX_US,
    FillUp,
    GoOn,
    OlderHere,
    OlderThere,
    OtherContent,
    Standing,
    Weight,
    meaning_of,
    meet,
    range_length,
    wait_us,
)

SMALL = Weight(size_bytes=10, body_bytes=100, runs=1)


def test_in_step_one_epoch_is_one_commit():
    assert range_length([SMALL], epochs_max=1000) == 1


def test_when_behind_all_that_fits_is_folded():
    assert range_length([SMALL] * 700, epochs_max=1000) == 700
    assert range_length([SMALL] * 5000, epochs_max=1000) == 1000


@pytest.mark.parametrize(
    "heavy",
    [
        Weight(size_bytes=RANGE_BYTES_MAX // 2, body_bytes=1, runs=1),
        Weight(size_bytes=1, body_bytes=RANGE_BODY_BYTES_MAX // 2, runs=1),
        Weight(size_bytes=1, body_bytes=1, runs=RANGE_RUNS_MAX // 2),
    ],
)
def test_bytes_bodies_and_runs_each_bound_a_commit(heavy: Weight):
    assert range_length([heavy] * 5, epochs_max=1000) == 2


def test_an_epoch_beyond_every_bound_still_goes_alone():
    giant = Weight(size_bytes=RANGE_BYTES_MAX * 9, body_bytes=1, runs=1)
    assert range_length([giant, SMALL], epochs_max=1000) == 1
    assert range_length([SMALL, giant], epochs_max=1000) == 1


def test_nothing_to_send_is_no_range():
    assert range_length([], epochs_max=1000) == 0


@given(failures=st.integers(1, 10_000), chance=st.floats(0, 1))
def test_waits_grow_to_a_bound_and_are_never_nothing(failures: int, chance: float):
    waits = wait_us(failures, retry_after_us=None, choose=lambda n: min(int(chance * n), n - 1))
    full = min(WAIT_FIRST_US * 2 ** min(failures - 1, 20), WAIT_MAX_US)
    assert full // 2 <= waits <= full


def test_the_hubs_word_on_when_to_come_back_counts_up_to_a_bound():
    assert wait_us(1, retry_after_us=90_000_000, choose=lambda _: 0) == 90_000_000
    assert wait_us(1, retry_after_us=10**12, choose=lambda _: 0) == RETRY_AFTER_MAX_US
    assert wait_us(1, retry_after_us=0, choose=lambda _: 0) == WAIT_FIRST_US // 2


@pytest.mark.parametrize(
    ("standing", "expected"),
    [
        (Standing(head=0, sent=0, newest=0), GoOn(0)),
        (Standing(head=0, sent=0, newest=9), GoOn(0)),
        (Standing(head=5, sent=5, newest=9), GoOn(5)),
        # The answer to a commit was lost, or the mark was.
        (Standing(head=7, sent=5, newest=9, same=True), GoOn(7)),
        (Standing(head=9, sent=5, newest=9, same=True), GoOn(9)),
        (Standing(head=7, sent=5, newest=9, same=None), GoOn(7)),
        (Standing(head=7, sent=5, newest=9, same=False), OtherContent(7)),
        # A backup was brought back here.
        (Standing(head=10, sent=5, newest=9), OlderHere(10, 9)),
        (Standing(head=3, sent=0, newest=0), OlderHere(3, 0)),
        # A backup was brought back there.
        (Standing(head=4, sent=5, newest=9), OlderThere(4, 5)),
        (Standing(head=0, sent=5, newest=5), OlderThere(0, 5)),
        # There was no outbox before epoch 6.
        (Standing(head=0, sent=5, newest=9, unsent_before=5), FillUp(1, 5)),
        (Standing(head=3, sent=5, newest=9, unsent_before=5), FillUp(4, 5)),
        (Standing(head=5, sent=5, newest=9, unsent_before=5), GoOn(5)),
        (Standing(head=5, sent=8, newest=9, unsent_before=5), OlderThere(5, 8)),
    ],
)
def test_node_and_hub_meet(standing: Standing, expected: judge.Meeting):
    assert meet(standing) == expected


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.sampled_from([True, False, None]))
def test_nothing_is_let_go_that_the_hub_does_not_have(head: int, sent: int, waiting: int, same: bool | None):
    met = meet(Standing(head=head, sent=sent, newest=sent + waiting, same=same))
    if isinstance(met, GoOn):
        assert sent <= met.done == head <= sent + waiting
        assert same is not False


def test_every_word_of_the_hub_has_a_meaning():
    words = typing.get_args(typing.get_type_hints(Refusal)["error"])
    assert {word: type(meaning_of(word)) for word in words if type(meaning_of(word)) is not judge.TryLater} == {
        "stale_generation": judge.Fenced,
        "held": judge.Held,
        "not_found": judge.LeaseAgain,
        "gap": judge.MeetAgain,
        "other_content": judge.MeetAgain,
        "missing_blobs": judge.SendBlobs,
    }
    assert isinstance(meaning_of("a word of next year"), judge.TryLater)
