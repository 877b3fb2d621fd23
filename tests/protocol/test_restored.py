"""What a restore from a backup does to ids and numbers of a log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.protocol.restored import NUMBERS_SKIPPED, is_former, number_after_restore


@pytest.mark.parametrize(
    ("known", "own", "former"),
    [
        ("f.1", "f.2", True),
        ("f.2", "f.1", True),
        ("f.1", "f.1", False),
        ("g.1", "f.1", False),
        ("", "f.1", False),
        ("log", "log", False),
    ],
)
def test_a_former_log_is_another_one_of_the_same_family(known: str, own: str, former: bool) -> None:
    assert is_former(known, own) is former


@given(st.integers(0, 2**40), st.integers(0, 999), st.integers(0, 2**50))
def test_numbers_after_a_restore_are_beyond_all_before_it_even_if_the_clock_is_wrong(
    number: int, since: int, now_us: int
) -> None:
    first = number_after_restore(number, now_us=now_us)
    assert first > number
    assert first % NUMBERS_SKIPPED == number % NUMBERS_SKIPPED
    assert number_after_restore(first + since, now_us=0) > first + since


def test_one_backup_that_is_restored_twice_gives_other_numbers_each_time() -> None:
    now_us = 1_794_000_000_000_000
    first, second = (number_after_restore(3, now_us=now_us + late_us) for late_us in (0, 5_000))
    assert second > first + NUMBERS_SKIPPED
