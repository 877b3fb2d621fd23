"""ISO-8601 text in columns means what it means one by one."""

from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from fordstone.connectors.files.cells import parse_dates, parse_times

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
OFFSETS = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(lambda minutes: timezone(timedelta(minutes=minutes)))
TIMES = st.datetimes(
    timezones=st.one_of(st.just(UTC), OFFSETS), min_value=datetime(2, 1, 1), max_value=datetime(9998, 12, 31)
)


def micros(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def parsed(*texts: str | None) -> list[int | None]:
    values, fine = parse_times(pl.Series(texts, dtype=pl.String))
    return [int(value) if good else None for value, good in zip(values, fine, strict=True)]


@st.composite
def written(draw: st.DrawFn) -> tuple[str, int]:
    """A text in one of many shapes, and what it means."""
    time = draw(TIMES)
    digits = draw(st.integers(0, 9))
    text = time.strftime("%Y").zfill(4) + time.strftime(f"-%m-%d{draw(st.sampled_from('T t'))}%H:%M:%S")
    if digits:
        time = time.replace(microsecond=time.microsecond // 10 ** max(0, 6 - digits) * 10 ** max(0, 6 - digits))
        text += draw(st.sampled_from(".,")) + f"{time.microsecond:06d}999"[:digits]
    else:
        time = time.replace(microsecond=0)
    offset = time.utcoffset()
    assert offset is not None
    sign, minutes = "-" if offset < timedelta(0) else "+", abs(offset) // timedelta(minutes=1)
    shapes = [f"{sign}{minutes // 60:02d}:{minutes % 60:02d}", f"{sign}{minutes // 60:02d}{minutes % 60:02d}"]
    if minutes % 60 == 0:
        shapes.append(f"{sign}{minutes // 60:02d}")
    if minutes == 0:
        shapes += ["Z", "z", ""]
    return text + draw(st.sampled_from(shapes)), micros(time)


@examples(300)
@given(st.lists(written(), min_size=1, max_size=30))
def test_every_shape_means_what_the_standard_library_says_alone_and_in_company(times: list[tuple[str, int]]) -> None:
    assert parsed(*(text for text, _ in times)) == [meaning for _, meaning in times]
    assert parsed(times[0][0]) == [times[0][1]]


@examples(300)
@given(
    st.lists(
        st.one_of(st.none(), st.text(max_size=36), st.text("0123456789-:.TZ+ ", min_size=8, max_size=36)), max_size=20
    )
)
def test_any_text_is_a_time_or_not_and_its_neighbours_do_not_matter(texts: list[str | None]) -> None:
    together = parsed(*texts)
    assert together == [parsed(text)[0] for text in texts]
    for text, meaning in zip(texts, together, strict=True):
        if meaning is None or text is None:
            continue
        year_one = datetime(1, 1, 1, tzinfo=UTC)
        assert abs(meaning - micros(year_one)) < 10_000 * 366 * 86_400_000_000


@pytest.mark.parametrize(
    "text",
    [
        "2026-02-29T00:00:00Z", "1900-02-29", "2026-00-01", "2026-13-01", "2026-01-00", "2026-04-31", "0000-01-01", "2026-01-01T24:00:00Z",
        "2026-01-01T00:60:00Z", "2026-01-01T00:00:61Z", "2026-01-01T00:00:00.Z", "2026-01-01T00:00:00.1234567890Z", "2026-01-01T00:00:00+24:00",
        "2026-01-01T00:00:00+00:60", "2026-01-01T00:00:00+0", "2026-01-01T", "2026-01-01T00", "2026-01-01T00:0", "2026/01/01", "20260101",
        "2026-01-01_00:00:00", "2026-01-01T00.00.00", " 2026-01-01", "2026-01-01 ", "\uff12026-01-01", "1767225600", "", "now", "2026-W01-1",
    ],
)  # fmt: skip
def test_what_is_no_time_is_no_time(text: str) -> None:
    assert parsed(text, text) == [None, None]


def test_leap_days_leap_seconds_and_the_ends_of_the_calendar() -> None:
    assert parsed("2000-02-29") == [micros(datetime(2000, 2, 29, tzinfo=UTC))]
    assert parsed("2016-12-31T23:59:60Z") == [micros(datetime(2017, 1, 1, tzinfo=UTC))]
    assert parsed("0001-01-01T00:00Z") == [micros(datetime(1, 1, 1, tzinfo=UTC))]
    assert parsed("9999-12-31T23:59:59.999999Z") == [micros(datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC))]


def test_every_day_of_eight_centuries() -> None:
    days = pl.date_range(pl.date(1600, 1, 1), pl.date(2400, 12, 31), eager=True)
    values, fine = parse_dates(days.dt.to_string("%Y-%m-%d"))
    assert fine.all()
    assert np.array_equal(values, days.to_physical().to_numpy())


def test_a_long_column_is_parsed_in_parts_that_join() -> None:
    times = pl.datetime_range(datetime(2026, 1, 1), datetime(2026, 1, 3), "1s", time_unit="us", eager=True)
    texts = times.dt.to_string("%Y-%m-%dT%H:%M:%SZ").set(times.dt.second() == 7, "no")
    values, fine = parse_times(texts)
    assert np.array_equal(fine, (times.dt.second() != 7).to_numpy())
    assert np.array_equal(values[fine], times.to_physical().to_numpy()[fine])


def test_an_empty_column_and_a_column_of_nulls() -> None:
    assert parsed() == []
    assert parsed(None, None) == [None, None]
