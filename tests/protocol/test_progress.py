"""Which partition holds the watermark back."""

from __future__ import annotations

import pytest

from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.progress import HeldBack, WaitedFor, held_back


@pytest.mark.parametrize(
    ("watermarks_us", "found"),
    [
        ({}, None),
        ({"a": 10}, None),
        ({"a": 10, "b": 10}, None),
        ({"a": TIME_MIN_US, "b": TIME_MIN_US}, None),
        ({"b": 100, "a": 10, "c": 50}, HeldBack(source="s", partition="a", lag_us=90)),
        ({"b": 100, "a": TIME_MIN_US}, HeldBack(source="s", partition="a", lag_us=None)),
    ],
)
def test_the_partition_with_the_least_watermark_holds_it_back_if_another_is_ahead(
    watermarks_us: dict[str, int], found: HeldBack | None
):
    assert held_back(WaitedFor("s", name, us) for name, us in watermarks_us.items()) == found


def test_what_is_known_of_the_partition_is_kept():
    found = held_back([WaitedFor("s", "a", 1, is_node=True, silent_us=7), WaitedFor("s", "b", 5, silent_us=9)])
    assert found == HeldBack(source="s", partition="a", lag_us=4, silent_us=7, is_node=True)
