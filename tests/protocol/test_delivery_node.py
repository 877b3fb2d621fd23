"""What a node sends next, how long it waits, and what the hub's words mean, as tables of facts."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.hub.messages import Refusal
from fordstone.protocol.delivery import (
    COMMIT_BODY_BYTES_MAX,
    COMMIT_BYTES_MAX,
    COMMIT_RUNS_MAX,
    SEND_BACKOFF,
    ContentDiffers,
    HubIsOlder,
    InSync,
    NodeIsOlder,
    OfferAgain,
    Reaction,
    Reconciliation,
    SendEmpty,
    SyncState,
    Weight,
    range_length,
    reaction_to,
    reconcile,
)

SMALL = Weight(size_bytes=10, body_bytes=100, runs=1)


def test_in_step_one_epoch_is_one_commit():
    assert range_length([SMALL], epochs_max=1000) == 1


def test_a_node_that_lags_sends_all_that_fits_in_one_commit():
    assert range_length([SMALL] * 700, epochs_max=1000) == 700
    assert range_length([SMALL] * 5000, epochs_max=1000) == 1000


@pytest.mark.parametrize(
    "heavy",
    [
        Weight(size_bytes=COMMIT_BYTES_MAX // 2, body_bytes=1, runs=1),
        Weight(size_bytes=1, body_bytes=COMMIT_BODY_BYTES_MAX // 2, runs=1),
        Weight(size_bytes=1, body_bytes=1, runs=COMMIT_RUNS_MAX // 2),
    ],
)
def test_bytes_bodies_and_runs_each_bound_a_commit(heavy: Weight):
    assert range_length([heavy] * 5, epochs_max=1000) == 2


def test_an_epoch_beyond_every_bound_still_goes_alone():
    giant = Weight(size_bytes=COMMIT_BYTES_MAX * 9, body_bytes=1, runs=1)
    assert range_length([giant, SMALL], epochs_max=1000) == 1
    assert range_length([SMALL, giant], epochs_max=1000) == 1


def test_nothing_to_send_is_no_range():
    assert range_length([], epochs_max=1000) == 0


def test_waits_for_the_hub_are_bounded_and_never_nothing() -> None:
    assert SEND_BACKOFF.wait_us(1, chance=0.0) == 125_000
    assert SEND_BACKOFF.wait_us(10_000, chance=1.0) == 30_000_000
    assert SEND_BACKOFF.wait_us(1, chance=0.0, retry_after_us=10**12) == 600_000_000


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (SyncState(head=0, sent=0, newest=0), InSync(0)),
        (SyncState(head=0, sent=0, newest=9), InSync(0)),
        (SyncState(head=5, sent=5, newest=9), InSync(5)),
        # The answer to a commit was lost, or the mark was.
        (SyncState(head=7, sent=5, newest=9, same=True), InSync(7)),
        (SyncState(head=9, sent=5, newest=9, same=True), InSync(9)),
        (SyncState(head=7, sent=5, newest=9, same=None), InSync(7)),
        (SyncState(head=7, sent=5, newest=9, same=False), ContentDiffers(7)),
        # A backup was brought back here.
        (SyncState(head=10, sent=5, newest=9), NodeIsOlder(10, 9)),
        (SyncState(head=3, sent=0, newest=0), NodeIsOlder(3, 0)),
        # A backup was brought back there.
        (SyncState(head=4, sent=5, newest=9), HubIsOlder(4, 5)),
        (SyncState(head=0, sent=5, newest=5), HubIsOlder(0, 5)),
        # The hub says that it was restored from a backup.
        (SyncState(head=4, sent=5, newest=9, restored=True), OfferAgain(4)),
        (SyncState(head=0, sent=5, newest=5, restored=True), OfferAgain(0)),
        (SyncState(head=5, sent=5, newest=9, same=True, restored=True), InSync(5)),
        (SyncState(head=7, sent=5, newest=9, same=True, restored=True), InSync(7)),
        (SyncState(head=7, sent=5, newest=9, same=False, restored=True), ContentDiffers(7)),
        (SyncState(head=10, sent=5, newest=9, restored=True), NodeIsOlder(10, 9)),
        # Whichever epoch it is, what is compared is all up to it.
        (SyncState(head=5, sent=5, newest=9, same=False), ContentDiffers(5)),
        (SyncState(head=3, sent=5, newest=9, same=False, unsent_before=5), ContentDiffers(3)),
        # There was no outbox before epoch 6.
        (SyncState(head=0, sent=5, newest=9, unsent_before=5), SendEmpty(1, 5)),
        (SyncState(head=3, sent=5, newest=9, unsent_before=5), SendEmpty(4, 5)),
        (SyncState(head=5, sent=5, newest=9, unsent_before=5), InSync(5)),
        (SyncState(head=5, sent=8, newest=9, unsent_before=5), HubIsOlder(5, 8)),
    ],
)
def test_node_and_hub_are_reconciled(state: SyncState, expected: Reconciliation) -> None:
    assert reconcile(state) == expected


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.sampled_from([True, False, None]))
def test_nothing_is_dropped_that_the_hub_does_not_have(head: int, sent: int, waiting: int, same: bool | None):
    found = reconcile(SyncState(head=head, sent=sent, newest=sent + waiting, same=same))
    if isinstance(found, InSync):
        assert sent <= found.done == head <= sent + waiting
        assert same is not False


def test_every_code_of_the_hub_has_a_reaction() -> None:
    codes = typing.get_args(typing.get_type_hints(Refusal)["error"])
    assert {code: reaction_to(code) for code in codes if reaction_to(code) is not Reaction.RETRY} == {
        "stale_generation": Reaction.STOP_FENCED,
        "held": Reaction.STOP_HELD,
        "forgotten": Reaction.STOP_FORGOTTEN,
        "not_found": Reaction.RENEW_LEASE,
        "not_head": Reaction.RENEW_LEASE,
        "gap": Reaction.RECONCILE,
        "other_content": Reaction.RECONCILE,
        "missing_blobs": Reaction.SEND_BLOBS,
    }
    assert reaction_to("a code of next year") is Reaction.RETRY
