"""Patterns and zones that are refused when the pipeline is built, and what no batch may change. What they give is checked against Spark."""

from __future__ import annotations

import polars as pl
import pytest

from fordstone.errors import ExpressionError
from fordstone.lang.expression import parse
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import Schema
from fordstone.lang.time_format import COUNTS, LIST

SCHEMA = Schema.of({"s": "string", "ts": "timestamp", "n": "bigint"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("to_timestamp(s, 'YYYY')", f"has the letter Y, which is not supported here. Letters are {LIST}; other text"),
        ("to_timestamp(s, 'EEE d MMM')", "has the letter E"),
        ("to_timestamp(s, 'yyyy DDD')", "has the letter D"),
        ("date_format(ts, 'ww')", f"has the letter w, which is not supported here. Letters are {LIST} D E; other text"),
        ("date_format(ts, 'at HH')", "has the letter t"),
        ("to_date(s, 'ddd')", "has ddd, which is not supported. Write d, dd"),
        ("from_unixtime(n, 'ZZZZ')", "has ZZZZ, which is not supported. Write Z, ZZ, ZZZ, ZZZZZ"),
        ("to_timestamp(s, 'SSSSSSSSSS')", "has SSSSSSSSSS"),
        ("to_timestamp(s, 'HH:mm:ss hh')", "reads the hour twice"),
        ("to_timestamp(s, 'yyyy yy')", "reads y twice"),
        ("to_timestamp(s, 'XXX Z')", "reads the zone twice"),
        ("to_timestamp(s, '[yyyy')", r"has a \[ without \]"),
        ("to_timestamp(s, 'yyyy]')", r"has a \] without \["),
        ("to_timestamp(s, 'yyyy{')", "has '{', which has no meaning"),
        ('to_timestamp(s, "yyyy \'T")', "has a quote that is not closed"),
        ("to_timestamp(s, s)", "must be a string literal"),
        ("date_format(ts, concat('y', 'y'))", "must be a string literal"),
        ("to_timestamp(n, 'yyyy')", "text is needed here, but this is bigint"),
        ("date_format(n, 'yyyy')", "timestamp is needed here, but this is bigint"),
        ("unix_timestamp(n)", "timestamp is needed here, but this is bigint"),
        ("unix_timestamp()", "unix_timestamp"),
        ("timestamp_millis(s)", "bigint is needed here, but this is string"),
        ("timestamp_seconds(s)", "bigint is needed here, but this is string"),
        (
            "to_utc_timestamp(ts, 'Europe/Bärlin')",
            "'Europe/Bärlin' is not a zone. Write a region such as 'Europe/Berlin'",
        ),
        ("to_utc_timestamp(ts, 'PST')", "'PST' is not a zone"),
        ("to_utc_timestamp(ts, '+19:00')", "is not a zone"),
        ("to_utc_timestamp(ts, '')", "is not a zone"),
        ("from_utc_timestamp(ts, s)", "must be a string literal"),
    ],
)
def test_what_is_not_supported_is_an_error_that_names_what_is(text: str, problem: str):
    with pytest.raises(ExpressionError, match=problem):
        parse(text, SCHEMA)


def test_every_letter_is_read_or_written_as_it_is_listed():
    assert set(LIST.split()) | set("DE") == set(COUNTS)
    for letter, counts in COUNTS.items():
        for count in counts:
            pattern = letter * count
            assert str(parse(f"date_format(ts, '{pattern}')", SCHEMA).type) == "string"
            if letter not in "DE":
                assert str(parse(f"to_timestamp(s, '{pattern}')", SCHEMA).type) == "timestamp"


def test_times_that_fit_no_calendar_are_null_and_do_not_stop_the_query():
    far = [2**63 - 1, -(2**63), 9_000_000_000_000_000_000, None]
    frame = pl.DataFrame({"ts": pl.Series(far, dtype=pl.Int64).cast(pl.Datetime("us", "UTC")), "n": far})
    for text in ("date_format(ts, 'yyyy MMM E')", "from_utc_timestamp(ts, 'Europe/Berlin')", "timestamp_millis(n)"):
        assert frame.select(to_polars(parse(text, SCHEMA), SCHEMA)).to_series().null_count() == len(far)


@pytest.mark.parametrize("pattern", ["dd/MM/yyyy HH:mm:ss", "d/M/yyyy H:m:s", "dd/MM/yyyy[ HH:mm:ss]"])
def test_what_a_text_gives_does_not_depend_on_its_batch(pattern: str):
    texts = ["06/05/2024 07:08:09", None, "x", "06/05/-0044 07:08:09", "6/5/2024 7:8:9", "31/02/2024 00:00:00"]
    frame = pl.DataFrame({"s": texts}, schema={"s": pl.String})
    expression = to_polars(parse(f"to_timestamp(s, '{pattern}')", SCHEMA), SCHEMA)
    together = frame.select(expression).to_series().cast(pl.Int64).to_list()
    alone = [frame[at : at + 1].select(expression).to_series().cast(pl.Int64).item() for at in range(frame.height)]
    assert together == alone
    assert together[0] == 1_714_979_289_000_000
    assert together[1:3] == [None, None]
