"""Entries with any bytes are rows or are rejected, each by itself; rows come back as they were."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from fordstone.connectors.redis.kind import EntryFormat, RedisSettings
from fordstone.connectors.redis.rows import EntryRows, RawEntry, RowEntries
from fordstone.lang.schema import Schema

SCHEMA = Schema.of({"s": "string", "b": "binary", "n": "int", "d": "double", "f": "boolean", "t": "timestamp"})
names = st.sampled_from([b"s", b"b", b"n", b"d", b"f", b"t", b"value", b"", b"\xff"])
values = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"1", b"-1.5", b"nan", b"true", b"2026-01-01", b"2026-01-01T00:00:00Z", b'{"n":1}', b"{", b"99999999999"]
    ),
)
entries = st.lists(
    st.lists(st.tuples(names, values), min_size=1, max_size=6).map(
        lambda pairs: [part for pair in pairs for part in pair]
    ),
    min_size=1,
    max_size=12,
)


def reader(how: EntryFormat, schema: Schema = SCHEMA) -> EntryRows:
    return EntryRows(RedisSettings(keys=("s",), url="redis://localhost", format=how), schema)


def with_ids(fields: list[list[bytes]]) -> list[RawEntry]:
    return [[b"%d-0" % number, one] for number, one in enumerate(fields, start=1)]


@given(entries, st.sampled_from(["fields", "json"]))
def test_each_entry_is_a_row_or_rejected_whatever_the_others_are(fields: list[list[bytes]], how: EntryFormat) -> None:
    rows, found = reader(how), with_ids(fields)
    frame, positions, rejected = rows.of("s", found, range(1, len(found) + 1))
    assert frame.schema == SCHEMA.polars
    assert sorted([*positions, *(one.position for one in rejected)]) == [*range(1, len(found) + 1)]
    alone = [rows.of("s", [entry], [number]) for number, entry in enumerate(found, start=1)]
    assert_frame_equal(frame, pl.concat([part for part, _, _ in alone]))
    assert [one for _, _, some in alone for one in some] == [*rejected]


rows_of_values = st.fixed_dictionaries(
    {
        "s": st.none() | st.text(max_size=8),
        "b": st.none() | st.binary(max_size=8),
        "n": st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
        "d": st.none() | st.floats(allow_nan=True),
        "f": st.none() | st.booleans(),
        "t": st.none() | st.datetimes(timezones=st.just(UTC)),
    }
)


@given(st.lists(rows_of_values, min_size=1, max_size=8), st.sampled_from(["fields", "json"]))
def test_rows_come_back_as_they_were_written(written: list[dict[str, Any]], how: EntryFormat) -> None:
    frame = pl.DataFrame(written, schema=SCHEMA.polars)
    fields = RowEntries(RedisSettings(keys=("s",), url="redis://localhost", format=how), SCHEMA).of(frame)
    back, _, rejected = reader(how).of("s", with_ids(fields), range(1, frame.height + 1))
    assert not rejected
    assert_frame_equal(back, frame, check_exact=True)


def test_dates_and_decimals_come_back_too() -> None:
    schema = Schema.of({"day": "date", "price": "decimal(9,2)"})
    frame = pl.DataFrame(
        {"day": [date(1, 1, 1), date(9999, 12, 31), None], "price": [Decimal("-0.01"), None, Decimal("9999999.99")]},
        schema=schema.polars,
    )
    fields = RowEntries(RedisSettings(keys=("s",), url="redis://localhost"), schema).of(frame)
    back, _, rejected = reader("fields", schema).of("s", with_ids(fields), range(1, 4))
    assert not rejected
    assert_frame_equal(back, frame)


def test_times_that_no_reader_takes_are_null() -> None:
    schema = Schema.of({"t": "timestamp"})
    frame = pl.DataFrame({"t": [-(1 << 62), 0]}).cast({"t": schema.polars["t"]})
    fields = RowEntries(RedisSettings(keys=("s",), url="redis://localhost"), schema).of(frame)
    back, _, rejected = reader("fields", schema).of("s", with_ids(fields), range(1, 3))
    assert not rejected
    assert back["t"].to_list() == [None, datetime(1970, 1, 1, tzinfo=UTC)]
