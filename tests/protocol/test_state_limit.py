"""What is read while the state is larger than its limit."""

from __future__ import annotations

import pytest

from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.progress import WaitedFor
from fordstone.protocol.state_limit import reading_limit

AHEAD = WaitedFor("rows", "a", 50, silent_us=0)
LAGGING = WaitedFor("rows", "b", 20, silent_us=7_200_000_000)
NODE = WaitedFor("cut", "truck-7", 10, is_node=True)


@pytest.mark.parametrize(
    ("state_bytes", "limited", "waited_for", "until_us"),
    [
        (100, False, (AHEAD, LAGGING), None),
        (101, False, (AHEAD, LAGGING), 20),
        (95, True, (AHEAD, LAGGING), 20),
        (90, True, (AHEAD, LAGGING), None),
        (95, False, (AHEAD, LAGGING), None),
        (101, False, (AHEAD, NODE), 10),
        (101, False, (AHEAD,), 50),
        (101, False, (), TIME_MIN_US),
    ],
)
def test_only_what_holds_time_back_is_read_above_the_limit(
    state_bytes: int, limited: bool, waited_for: tuple[WaitedFor, ...], until_us: int | None
):
    found = reading_limit(state_bytes, 100, waited_for, limited=limited)
    assert (None if found is None else found.until_us) == until_us


@pytest.mark.parametrize(
    ("waited_for", "words"),
    [
        ((AHEAD, LAGGING), ("partition of source rows b", "silent for 2h", "idle_after=")),
        ((NODE,), ("node truck-7",)),
        ((), ("Nothing is read", "without event time")),
    ],
)
def test_the_reason_names_what_is_waited_for_and_what_to_do(waited_for: tuple[WaitedFor, ...], words: tuple[str, ...]):
    found = reading_limit(3 << 20, 2 << 20, waited_for, limited=False)
    assert found is not None
    assert all(word in found.reason for word in ("3 MiB", "2 MiB", "--state-max", "ttl=", *words))
