"""Ids as positions, and what the description of a stream says about what was read of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.connectors.redis.history import (
    IdRangeError,
    Intact,
    Lost,
    Reached,
    Rewritten,
    StreamFacts,
    id_of,
    judge,
    number_of,
)

BITS = 4
parts = st.tuples(st.integers(0, (1 << 43) - 2), st.integers(0, (1 << 20) - 1))


@given(parts, parts)
def test_positions_have_the_order_of_ids_and_give_them_back(one: tuple[int, int], other: tuple[int, int]) -> None:
    numbers = [number_of(f"{ms}-{sequence}", 20) for ms, sequence in (one, other)]
    assert (numbers[0] < numbers[1]) == (one < other)
    assert id_of(numbers[0], 20) == f"{one[0]}-{one[1]}"
    assert numbers[0] + 1 < 1 << 63


@pytest.mark.parametrize("text", ["1-1048576", "8796093022208-0", "18446744073709551615-18446744073709551615"])
def test_an_id_that_does_not_fit_is_an_error(text: str) -> None:
    with pytest.raises(IdRangeError, match=text):
        number_of(text, 20)


def test_ids_that_are_counted_by_hand_fit_with_more_bits_for_the_count() -> None:
    assert id_of(number_of("0-1099511627776", 62), 62) == "0-1099511627776"


def stream(first: int | None, newest: int, *, length: int, added: int, deleted: int = 0) -> StreamFacts:
    return StreamFacts(length=length, first=first, newest=newest, added=added, deleted=deleted)


def reached(after: int, count: int | None, *, is_entry: bool = True) -> Reached:
    return Reached(after=after, count=count, is_entry=is_entry)


@pytest.mark.parametrize(
    ("read", "facts", "wanted"),
    [
        # Nothing was ever there.
        (reached(0, 0, is_entry=False), None, Intact()),
        (reached(0, 0, is_entry=False), stream(7, 9, length=3, added=3), Intact()),
        # Trimmed before the position, or up to it.
        (reached(9, 5, is_entry=False), stream(8, 12, length=4, added=7), Intact()),
        (reached(9, 5), stream(10, 12, length=3, added=8), Intact()),
        (reached(9, 5), stream(None, 9, length=0, added=5), Intact()),
        # Trimmed beyond it.
        (reached(9, 5), stream(11, 12, length=2, added=8), Lost(1)),
        (reached(9, 5), stream(None, 12, length=0, added=8), Lost(3)),
        (reached(9, None), stream(10, 12, length=3, added=8), Lost(None)),
        (reached(9, None), stream(10, 12, length=3, added=3), Intact()),
        # The last entry was deleted on purpose, or has vanished.
        (reached(9, 5), stream(8, 12, length=4, added=7, deleted=9), Intact()),
        (reached(9, 5), stream(8, 12, length=4, added=7, deleted=11), Intact()),
        (reached(9, 5), stream(8, 12, length=4, added=7, deleted=8), Rewritten),
        # Another stream, or an older one.
        (reached(9, 5), None, Rewritten),
        (reached(9, 5), stream(3, 8, length=4, added=4), Rewritten),
        (reached(9, 5), stream(11, 12, length=2, added=2), Rewritten),
        (reached(9, 5), stream(11, 30, length=20, added=20), Rewritten),
        (reached(9, 5), stream(8, 12, length=3, added=4), Rewritten),
    ],
)
def test_what_is_missing_is_distinguished_from_what_was_removed_after_it_was_read(
    read: Reached, facts: StreamFacts | None, wanted: Any
) -> None:
    found = judge(read, facts, BITS)
    assert isinstance(found, wanted) if isinstance(wanted, type) else found == wanted
