"""What the hub may forget, as a table of facts."""

from __future__ import annotations

import pytest

from fordstone.protocol.forget import (
    SILENT_US_MIN,
    Forget,
    ForgetDecision,
    ForgetNodeFacts,
    ForgetStreamFacts,
    HasUnread,
    NodeContact,
    StillRunning,
    Unread,
    closing_chain,
    decide_forget_node,
    decide_forget_stream,
)

RUNNING = NodeContact(has_lease=True, stopped=False, silent_us=SILENT_US_MIN - 1)
SILENT = NodeContact(has_lease=True, stopped=False, silent_us=SILENT_US_MIN)
STOPPED = NodeContact(has_lease=True, stopped=True, silent_us=0)
RESTORED = NodeContact(has_lease=False, stopped=False, silent_us=0)
CLOCK_SET_BACK = NodeContact(has_lease=True, stopped=False, silent_us=-5 * SILENT_US_MIN)
NONE, SOME = Unread(), Unread(epochs=3, rows=70)


@pytest.mark.parametrize(
    ("head", "contact", "unread", "discard", "expected"),
    [
        # All was read.
        (9, SILENT, NONE, False, Forget(discarded=NONE, retired=True)),
        (9, STOPPED, NONE, False, Forget(discarded=NONE, retired=True)),
        (9, RESTORED, NONE, False, Forget(discarded=NONE, retired=True)),
        (9, SILENT, NONE, True, Forget(discarded=NONE, retired=True)),
        # Not all was read.
        (9, SILENT, SOME, False, HasUnread(unread=SOME)),
        (9, SILENT, SOME, True, Forget(discarded=SOME, retired=True)),
        (9, SILENT, Unread(epochs=3, rows=0), False, HasUnread(unread=Unread(epochs=3, rows=0))),
        # It is running: then nothing helps.
        (9, RUNNING, NONE, False, StillRunning()),
        (9, RUNNING, SOME, True, StillRunning()),
        (9, CLOCK_SET_BACK, NONE, False, StillRunning()),
        # It has no epochs: only a lease and a report.
        (0, RUNNING, NONE, False, Forget(discarded=NONE)),
        (0, SILENT, NONE, False, Forget(discarded=NONE)),
    ],
)
def test_a_node_is_forgotten_if_it_is_gone_and_nothing_is_lost_unasked(
    head: int, contact: NodeContact, unread: Unread, discard: bool, expected: ForgetDecision
) -> None:
    facts = ForgetNodeFacts(head=head, contact=contact, unread=unread)
    assert decide_forget_node(facts, discard_unread=discard) == expected


@pytest.mark.parametrize(
    ("writers", "unread", "discard", "expected"),
    [
        ((), NONE, False, Forget(discarded=NONE)),
        ((), SOME, False, HasUnread(unread=SOME)),
        ((), SOME, True, Forget(discarded=SOME)),
        (("a", "b"), NONE, False, StillRunning(nodes=("a", "b"))),
        (("a",), SOME, True, StillRunning(nodes=("a",))),
    ],
)
def test_a_stream_is_forgotten_if_nobody_writes_to_it_and_nothing_is_lost_unasked(
    writers: tuple[str, ...], unread: Unread, discard: bool, expected: ForgetDecision
) -> None:
    assert decide_forget_stream(ForgetStreamFacts(writers=writers, unread=unread), discard_unread=discard) == expected


def test_the_closing_epoch_belongs_to_one_log_and_one_moment() -> None:
    assert closing_chain("a" * 64, at_us=1) == closing_chain("a" * 64, at_us=1)
    assert (
        len({closing_chain("a" * 64, at_us=1), closing_chain("a" * 64, at_us=2), closing_chain("b" * 64, at_us=1)}) == 3
    )
