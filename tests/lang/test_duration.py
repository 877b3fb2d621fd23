"""Spans of time as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fordstone.errors import ConfigError
from fordstone.lang.duration import duration_us, human_us, positive_us

SECOND_US, MINUTE_US, HOUR_US, DAY_US = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000


@pytest.mark.parametrize(
    ("text", "wanted_us"),
    [
        ("5s", 5 * SECOND_US),
        ("250ms", 250_000),
        ("7us", 7),
        ("1h30m", 90 * MINUTE_US),
        ("1.5h", 90 * MINUTE_US),
        ("2min", 2 * MINUTE_US),
        ("2 mins", 2 * MINUTE_US),
        ("5 seconds", 5 * SECOND_US),
        ("1 second", SECOND_US),
        ("10 sec", 10 * SECOND_US),
        ("10 Secs", 10 * SECOND_US),
        ("2 minutes", 2 * MINUTE_US),
        ("1 hour", HOUR_US),
        ("1 HOUR 30 MINUTES", 90 * MINUTE_US),
        ("2days", 2 * DAY_US),
        ("1 week", 7 * DAY_US),
        ("20 milliseconds", 20_000),
        ("3 microseconds", 3),
        (" 0 seconds ", 0),
        (timedelta(minutes=2), 2 * MINUTE_US),
    ],
)
def test_units_are_short_or_written_out(text: str | timedelta, wanted_us: int):
    assert duration_us(text) == wanted_us
    assert duration_us(human_us(wanted_us)) == wanted_us


@pytest.mark.parametrize(
    "text",
    ["", "5", "seconds", "5 parsecs", "-5s", "5 s s", "1 hour and 5 minutes", "5M", "5 ss", "5 months", 5],
)
def test_anything_else_is_an_error_with_examples(text: object):
    with pytest.raises(
        ConfigError, match=r"lateness: .* is not a span of time\. Write .*'5s', '1h30m' or '5 seconds'\."
    ):
        duration_us(text, what="lateness")  # type: ignore[arg-type]  # as a user may


def test_a_span_that_must_be_longer_than_nothing_says_so():
    with pytest.raises(ConfigError, match="gap: '0 seconds' must be longer than zero"):
        positive_us("0 seconds", what="gap")
