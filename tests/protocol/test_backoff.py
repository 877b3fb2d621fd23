"""Waits grow up to a cap, are spread by chance, and respect what the server asks for."""

from __future__ import annotations

import pytest

from fordstone.protocol.retry import Backoff

BACKOFF = Backoff(first_us=100, max_us=1_000, retry_after_max_us=5_000)


@pytest.mark.parametrize(
    ("failures", "longest_us"), [(0, 100), (1, 100), (2, 200), (4, 800), (5, 1_000), (10**9, 1_000)]
)
def test_the_wait_doubles_up_to_the_cap_and_half_of_it_is_random(failures: int, longest_us: int) -> None:
    assert BACKOFF.wait_us(failures, chance=1.0) == longest_us
    assert BACKOFF.wait_us(failures, chance=0.0) == longest_us // 2
    assert longest_us // 2 < BACKOFF.wait_us(failures, chance=0.5) < longest_us


def test_without_jitter_the_wait_is_exact() -> None:
    assert Backoff(first_us=100, max_us=1_000, factor=3, jitter=0).wait_us(2, chance=0.0) == 300


@pytest.mark.parametrize(("asked_us", "waits_us"), [(None, 100), (50, 100), (700, 700), (10**9, 5_000)])
def test_the_wait_is_at_least_what_the_server_asked_for_up_to_a_bound(asked_us: int | None, waits_us: int) -> None:
    assert BACKOFF.wait_us(1, chance=1.0, retry_after_us=asked_us) == waits_us
    asked_s = None if asked_us is None else asked_us / 1e6
    assert BACKOFF.wait_s(1, chance=1.0, retry_after_s=asked_s) == pytest.approx(waits_us / 1e6)
