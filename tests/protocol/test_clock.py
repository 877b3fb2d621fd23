"""The clock of a pipeline, whatever happens to that of the machine; and which rows are too far ahead of it."""

from __future__ import annotations

import pytest

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.protocol.clock import ahead_limit_us, pipeline_clock_us

HOUR_US = 3_600_000_000
YEAR_US = 365 * 24 * HOUR_US
NOW_US = 56 * YEAR_US


@pytest.mark.parametrize(
    ("wall_us", "before_us", "elapsed_us", "clock_us"),
    [
        pytest.param(NOW_US, 0, 0, NOW_US, id="the first epoch"),
        pytest.param(NOW_US + 5, NOW_US, 5, NOW_US + 5, id="nothing happened"),
        pytest.param(NOW_US + HOUR_US, NOW_US, 5, NOW_US + HOUR_US, id="after a pause, or a jump forward"),
        pytest.param(NOW_US, NOW_US + YEAR_US, 5, NOW_US + YEAR_US + 5, id="a jump forward was taken back"),
        pytest.param(60, NOW_US, 7, NOW_US + 7, id="started in 1970"),
        pytest.param(60, NOW_US, -7, NOW_US, id="a monotonic clock that is none"),
    ],
)
def test_the_clock_of_operators_never_goes_back_and_never_stands_still(wall_us, before_us, elapsed_us, clock_us):
    assert pipeline_clock_us(wall_us, before_us=before_us, elapsed_us=elapsed_us) == clock_us


@pytest.mark.parametrize(
    ("wall_us", "clock_us", "watermark_us", "limit_us"),
    [
        pytest.param(NOW_US, NOW_US, TIME_MIN_US, NOW_US + HOUR_US, id="no row yet"),
        pytest.param(NOW_US, NOW_US, NOW_US - 5, NOW_US + HOUR_US, id="rows of now"),
        pytest.param(NOW_US + YEAR_US, NOW_US + YEAR_US, NOW_US, NOW_US + YEAR_US + HOUR_US, id="a jump forward"),
        pytest.param(NOW_US, NOW_US + YEAR_US, NOW_US, NOW_US + HOUR_US, id="it was taken back"),
        pytest.param(NOW_US, NOW_US + YEAR_US, NOW_US + HOUR_US, NOW_US + HOUR_US, id="at the limit"),
        pytest.param(
            NOW_US, NOW_US + YEAR_US, NOW_US + HOUR_US + 1, NOW_US + YEAR_US + HOUR_US, id="rows of then moved all time"
        ),
        pytest.param(60, NOW_US + 7, NOW_US, NOW_US + 7 + HOUR_US, id="started in 1970"),
        pytest.param(60, 60, TIME_MIN_US, 60 + HOUR_US, id="started in 1970 for the first time"),
        pytest.param(NOW_US - 2 * HOUR_US, NOW_US, NOW_US - 5, NOW_US + HOUR_US, id="set back by two hours"),
        pytest.param(TIME_MAX_US, TIME_MAX_US, TIME_MIN_US, TIME_MAX_US, id="the end of time"),
    ],
)
def test_the_limit_follows_the_machines_clock_unless_rows_show_that_it_is_wrong(
    wall_us, clock_us, watermark_us, limit_us
):
    assert ahead_limit_us(wall_us, clock_us=clock_us, watermark_us=watermark_us, max_ahead_us=HOUR_US) == limit_us
