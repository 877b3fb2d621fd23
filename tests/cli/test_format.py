from __future__ import annotations

import pytest

from fordstone.cli import format as fmt


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (19_208, "19.2 kB"),
        (1_250_000, "1.25 MB"),
        (3 * 10**15, "3000 TB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(number: int, text: str):
    assert fmt.size(number) == text


@pytest.mark.parametrize(
    ("span_us", "text"),
    [
        (0, "0 us"),
        (85, "85 us"),
        (12_300, "12.3 ms"),
        (1_000_000, "1.00 s"),
        (59_900_000, "59.9 s"),
        (60_000_000, "1 min"),
        (200_000_000, "3 min 20 s"),
        (3_600_000_000, "1 h"),
        (90_000_000_000, "1 d 1 h"),
        (-2_000_000, "-2.00 s"),
    ],
)
def test_spans_are_as_exact_as_anyone_reads_them(span_us: int, text: str):
    assert fmt.span(span_us) == text


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (0, "0 rows/s"),
        (9_999, "9,999 rows/s"),
        (24_100, "24.1 k rows/s"),
        (3.6e7, "36.0 M rows/s"),
        (2e9, "2.00 G rows/s"),
    ],
)
def test_rates_have_a_unit_when_they_are_large(rows: float, text: str):
    assert fmt.rate(rows) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0 %"), (1e-7, "0 %"), (0.000123, "0.012 %"), (0.031, "3.1 %"), (0.5, "50 %"), (-0.05, "-5 %")],
)
def test_shares_keep_the_digits_that_count(part: float, text: str):
    assert fmt.share(part) == text


def test_counts_take_the_plural_unless_they_are_one():
    assert [fmt.count(1, "run"), fmt.count(2, "run"), fmt.count(1234567)] == [
        "1 run",
        "2 runs",
        "1,234,567",
    ]


def test_a_time_beyond_the_calendar_is_still_shown():
    assert fmt.instant(0) == "1970-01-01 00:00:00"
    assert fmt.instant(2**62) == f"{2**62} us since 1970"
