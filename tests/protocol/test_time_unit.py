"""Times that make sense only in another unit."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from fordstone.protocol.time_unit import wrong_unit


def us(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


MEANT_US = us("2026-01-01T00:00:06")


@pytest.mark.parametrize(
    ("time_us", "read_as", "unit"),
    [
        (MEANT_US // 1_000, "us", "ms"),
        (MEANT_US // 1_000_000, "us", "s"),
        (MEANT_US // 1_000, "ms", "s"),
        (MEANT_US * 1_000, "us", "ns"),
        (MEANT_US * 1_000, "ms", "us"),
        (MEANT_US * 1_000, "s", "ms"),
        (MEANT_US // 1_000_000, "ms", None),
    ],
)
def test_a_time_that_is_plausible_in_another_unit_was_read_in_a_wrong_one(time_us: int, read_as: str, unit: str | None):
    found = wrong_unit(time_us)
    assert found is not None
    assert found.meant_us == MEANT_US
    assert found.unit(read_as) == unit


@pytest.mark.parametrize(
    "time_us",
    [
        *(0, 1, -1, 300_000_000, -MEANT_US // 1_000, us("1970-01-02T00:00:00"), us("1970-03-01T00:00:00")),
        *(us("1979-12-31T23:59:59"), us("1980-01-01T00:00:00"), us("2099-12-31T23:59:59"), us("2100-01-01T00:00:00")),
        *(us("9999-12-31T23:59:59"), us("0001-01-01T00:00:00"), 2**62),
    ],
)
def test_other_times_are_taken_as_they_are(time_us: int):
    assert wrong_unit(time_us) is None
