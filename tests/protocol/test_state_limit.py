"""What is read while the state is larger than its limit."""

from __future__ import annotations

import pytest

from fordstone.protocol.progress import WaitedFor
from fordstone.protocol.state_limit import reading_limit

AHEAD = WaitedFor("rows", "a", 50, silent_us=0)
LAGGING = WaitedFor("rows", "b", 20, silent_us=7_200_000_000)
EVERYTHING = "everything is read"
NODE = WaitedFor("cut", "truck-7", 10, is_node=True)


@pytest.mark.parametrize(
    ("state_bytes", "limited", "waited_for", "expected"),
    [
        (100, False, (AHEAD, LAGGING), EVERYTHING),
        (101, False, (AHEAD, LAGGING), 20),
        (95, True, (AHEAD, LAGGING), 20),
        (90, True, (AHEAD, LAGGING), EVERYTHING),
        (95, False, (AHEAD, LAGGING), EVERYTHING),
        (101, False, (AHEAD, NODE), 10),
        (101, False, (AHEAD,), 50),
        (125, True, (AHEAD, LAGGING), 20),
        (126, True, (AHEAD, LAGGING), None),
        (126, False, (AHEAD,), None),
        (101, False, (), None),
    ],
)
def test_only_what_holds_time_back_is_read_above_the_limit(
    state_bytes: int, limited: bool, waited_for: tuple[WaitedFor, ...], expected: int | str | None
):
    found = reading_limit(state_bytes, 100, waited_for, limited=limited, timed=True)
    assert (EVERYTHING if found is None else found.until_us) == expected
    if found is not None:
        assert found.allows(20) == (expected is not None and expected != 10)
        assert not found.allows(51)
        assert not found.allows(None)


def test_without_event_time_nothing_is_read_above_the_limit():
    assert reading_limit(100, 100, (), limited=False, timed=False) is None
    found = reading_limit(101, 100, (), limited=False, timed=False)
    assert found is not None
    assert not found.allows(None)


@pytest.mark.parametrize(
    ("state_mib", "waited_for", "timed", "words"),
    [
        (22, (AHEAD, LAGGING), True, ("partition of source rows b", "silent for 2h", "idle_after=")),
        (22, (NODE,), True, ("node truck-7",)),
        (22, (), True, ("all are idle", "The next rows of one move time on")),
        (22, (), False, ("Nothing is read", "no source has event time")),
        (26, (AHEAD, LAGGING), True, ("Nothing is read above 1.25 times the limit",)),
        (26, (), False, ("Nothing is read above 1.25 times the limit",)),
    ],
)
def test_the_reason_names_what_is_waited_for_and_what_to_do(
    state_mib: int, waited_for: tuple[WaitedFor, ...], timed: bool, words: tuple[str, ...]
):
    found = reading_limit(state_mib << 20, 20 << 20, waited_for, limited=False, timed=timed)
    assert found is not None
    assert all(word in found.reason for word in (f"{state_mib} MiB", "20 MiB", "--state-max", "ttl=", *words))
