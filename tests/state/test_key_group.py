"""Key groups: the stored hash of a key, against the reference xxh64 and against a table that must never change."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from fordstone.errors import SchemaError
from fordstone.plan.ids import owner_of
from fordstone.state.key_group import BLOCK_ROWS, key_groups, owners, row_hashes, split_by_owner

UTC = dt.UTC
EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)


def canonical(value: object, scale: int = 0) -> bytes:
    """The canonical bytes of one value, as the module's docstring says, one value at a time."""
    if value is None:
        return b"\x00"
    if isinstance(value, bool | int):
        return b"\x01" + int(value).to_bytes(8, "little", signed=True)
    if isinstance(value, float):
        one_form = struct.pack("<Q", 0x7FF8000000000000) if math.isnan(value) else struct.pack("<d", value + 0.0)
        return b"\x01" + one_form
    if isinstance(value, str | bytes):
        content = value.encode() if isinstance(value, str) else value
        return b"\x01" + len(content).to_bytes(4, "little") + content
    if isinstance(value, Decimal):
        return b"\x01" + int(value.scaleb(scale)).to_bytes(16, "little", signed=True) + bytes([scale])
    if isinstance(value, dt.datetime):
        return canonical((value - EPOCH) // dt.timedelta(microseconds=1))
    assert isinstance(value, dt.date)
    return canonical((value - dt.date(1970, 1, 1)).days)


def group_of(*parts: bytes) -> int:
    return xxhash.xxh64_intdigest(b"".join(parts), seed=0) % 128


COLUMNS: dict[str, tuple[pl.DataType, st.SearchStrategy[object]]] = {
    "tinyint": (pl.Int8(), st.integers(-(2**7), 2**7 - 1)),
    "smallint": (pl.Int16(), st.integers(-(2**15), 2**15 - 1)),
    "int": (pl.Int32(), st.integers(-(2**31), 2**31 - 1)),
    "bigint": (pl.Int64(), st.integers(-(2**63), 2**63 - 1)),
    "boolean": (pl.Boolean(), st.booleans()),
    "float": (pl.Float32(), st.floats(width=32)),
    "double": (pl.Float64(), st.floats()),
    "string": (pl.String(), st.text(max_size=50)),
    "binary": (pl.Binary(), st.binary(max_size=50)),
    "date": (pl.Date(), st.dates()),
    "timestamp": (pl.Datetime("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    "decimal": (
        pl.Decimal(38, 3),
        st.integers(-(10**38) + 1, 10**38 - 1).map(lambda unscaled: Decimal(unscaled).scaleb(-3)),
    ),
    "null": (pl.Null(), st.none()),
}
CONTEXT_DIGITS = 60


@given(st.data(), st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3, unique=True), st.integers(1, 20))
def test_groups_of_all_types_follow_the_canonical_bytes(data: st.DataObject, names: list[str], rows: int) -> None:
    import decimal

    with decimal.localcontext() as context:
        context.prec = CONTEXT_DIGITS
        values = {
            name: data.draw(st.lists(st.none() | COLUMNS[name][1], min_size=rows, max_size=rows), label=name)
            for name in names
        }
        frame = pl.DataFrame(values, schema={name: COLUMNS[name][0] for name in names})
        scales = {"decimal": 3}
        expected = [
            group_of(*(canonical(value, scales.get(name, 0)) for name, value in zip(names, row, strict=True)))
            for row in zip(*(values[name] for name in names), strict=True)
        ]
    assert key_groups(frame, names).tolist() == expected


# This table is a promise to every stored checkpoint. If a line of it must change, the code is wrong.
GOLDEN: list[tuple[pl.DataType, object, int]] = [
    (pl.Int64(), 0, 118),
    (pl.Int64(), 1, 3),
    (pl.Int64(), -1, 54),
    (pl.Int64(), 42, 17),
    (pl.Int64(), 2**63 - 1, 65),
    (pl.Int64(), -(2**63), 97),
    (pl.Int64(), None, 104),
    (pl.Int8(), -128, 46),
    (pl.Int32(), 123456, 111),
    (pl.Boolean(), True, 3),
    (pl.Boolean(), False, 118),
    (pl.Float64(), 0.0, 118),
    (pl.Float64(), -0.0, 118),
    (pl.Float64(), 1.5, 112),
    (pl.Float64(), math.inf, 51),
    (pl.Float64(), math.nan, 70),
    (pl.Float32(), 0.1, 79),
    (pl.String(), "", 38),
    (pl.String(), "a", 75),
    (pl.String(), "device-000017", 79),
    (pl.String(), "Zürich 東京", 49),
    (pl.String(), "x" * 100, 97),
    (pl.String(), None, 104),
    (pl.Binary(), b"", 38),
    (pl.Binary(), b"\x00\xff", 53),
    (pl.Date(), dt.date(2026, 2, 28), 104),
    (pl.Datetime("us", "UTC"), dt.datetime(2026, 2, 28, 23, 59, 59, 999999, tzinfo=UTC), 34),
    (pl.Decimal(10, 2), Decimal("12.34"), 74),
    (pl.Decimal(10, 2), Decimal("-12.34"), 67),
    (pl.Decimal(38, 0), Decimal(10**37), 44),
]


@pytest.mark.parametrize(("dtype", "value", "group"), GOLDEN, ids=lambda part: repr(part)[:30])
def test_the_group_of_a_key_never_changes(dtype: pl.DataType, value: object, group: int) -> None:
    frame = pl.DataFrame({"k": pl.Series([value], dtype=dtype)})
    assert key_groups(frame, ["k"]).tolist() == [group]


def test_the_group_of_a_key_of_several_columns_never_changes() -> None:
    frame = pl.DataFrame({"device": ["gate-7", None, ""], "line": [3, 3, None]})
    assert key_groups(frame, ["device", "line"]).tolist() == [59, 8, 57]
    assert key_groups(frame, ["line", "device"]).tolist() == [11, 59, 98]


def test_a_key_without_columns_is_all_in_one_group() -> None:
    assert key_groups(pl.DataFrame({"x": [1, 2, 3]}), []).tolist() == [group_of(b"")] * 3


def test_integers_of_any_width_and_a_date_of_that_day_number_share_a_group() -> None:
    frame = pl.DataFrame({"v": [0, 1, 100]})
    wanted = key_groups(frame, ["v"]).tolist()
    for dtype in (pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt64, pl.Date):
        assert key_groups(frame.cast(dtype), ["v"]).tolist() == wanted


def test_zeros_and_nans_of_any_sign_and_payload_share_a_group() -> None:
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
    zeros = key_groups(pl.DataFrame({"v": [0.0, -0.0]}), ["v"])
    nans = key_groups(pl.DataFrame({"v": [math.nan, -math.nan, odd_nan]}), ["v"])
    assert len(set(zeros.tolist())) == 1
    assert set(nans.tolist()) == {group_of(b"\x01", struct.pack("<Q", 0x7FF8000000000000))}


def test_a_timestamp_in_other_units_is_taken_in_microseconds() -> None:
    when = dt.datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    groups = {
        int(key_groups(pl.DataFrame({"t": pl.Series([when], dtype=pl.Datetime(unit, "UTC"))}), ["t"])[0])
        for unit in ("ms", "us", "ns")
    }
    assert groups == {group_of(canonical(when))}


def test_a_sliced_and_chunked_frame_has_the_groups_of_its_rows() -> None:
    frame = pl.DataFrame(
        {
            "s": [None if i % 7 == 0 else "x" * (i % 45) for i in range(500)],
            "d": pl.Series(range(500)).cast(pl.Decimal(9, 1)),
        }
    )
    whole = key_groups(frame, ["s", "d"])
    cut = pl.concat([frame[:13], frame[13:200], frame[200:]], rechunk=False)[5:450]
    assert key_groups(cut, ["s", "d"]).tolist() == whole[5:450].tolist()


def test_blocks_do_not_show_in_the_groups() -> None:
    rows = BLOCK_ROWS + 17
    frame = pl.DataFrame({"k": np.arange(rows)})
    whole = key_groups(frame, ["k"])
    assert whole[BLOCK_ROWS - 2 :].tolist() == key_groups(frame[BLOCK_ROWS - 2 :], ["k"]).tolist()
    counts = np.bincount(whole, minlength=128)
    assert counts.min() > rows / 128 / 2
    assert counts.max() < rows / 128 * 2


def test_the_hash_of_a_row_is_that_of_its_canonical_bytes_across_blocks() -> None:
    frame = pl.DataFrame({"n": pl.Series([1, None] * BLOCK_ROWS, dtype=pl.Int32), "s": ["x"] * (2 * BLOCK_ROWS)})
    text = b"\x01" + struct.pack("<I", 1) + b"x"
    wanted = [xxhash.xxh64_intdigest(number + text) for number in (b"\x01" + struct.pack("<q", 1), b"\x00")]
    assert row_hashes(frame, ["n", "s"]).tolist() == wanted * BLOCK_ROWS
    assert row_hashes(frame.head(3), []).tolist() == [xxhash.xxh64_intdigest(b"")] * 3
    assert row_hashes(frame.clear(), ["n"]).tolist() == []


def test_an_empty_frame_has_no_groups() -> None:
    assert key_groups(pl.DataFrame(schema={"k": pl.Int64(), "s": pl.String()}), ["k", "s"]).size == 0


def test_a_list_is_no_key_and_the_error_says_what_to_do() -> None:
    with pytest.raises(SchemaError, match=r"column 'tags' of type List.*cannot be a key; cast it"):
        key_groups(pl.DataFrame({"tags": [["a"]]}), ["tags"])


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7, 128])
def test_owners_are_those_of_the_model(parallelism: int) -> None:
    groups = np.arange(128, dtype=np.uint8)
    assert owners(groups, parallelism).tolist() == [owner_of(group, parallelism) for group in range(128)]


@given(st.lists(st.none() | st.integers(-5, 50), max_size=60), st.integers(1, 9))
def test_splitting_gives_each_row_to_its_owner_in_order(keys: list[int | None], parallelism: int) -> None:
    frame = pl.DataFrame({"k": pl.Series(keys, dtype=pl.Int64), "n": pl.Series(range(len(keys)), dtype=pl.Int64)})
    parts = split_by_owner(frame, ["k"], parallelism)
    assert len(parts) == parallelism
    owned = owners(key_groups(frame, ["k"]), parallelism)
    for subtask, part in enumerate(parts):
        assert_frame_equal(part, frame.filter(pl.Series(owned == subtask, dtype=pl.Boolean)))
