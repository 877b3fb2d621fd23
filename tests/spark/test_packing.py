"""Packed rows: which shard a row goes to, what is packed together, and that nothing changes on the way."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

import polars as pl
import pytest

from fordstone.plan.ids import KEY_GROUPS
from fordstone.spark.hosted.packing import (
    PACK_BYTES,
    Packed,
    Packer,
    What,
    decode,
    encode,
    record_batch,
    shard_keys,
    shards_of,
    spark_hashes,
    split_state,
)
from fordstone.state.key_group import key_groups, owners

SPARK_HASHES = {
    0: 933211791,
    1: -559580957,
    2: 1765031574,
    3: -1823081949,
    5: 1023896466,
    8: -132918897,
    42: 29417773,
    127: 1135925485,
    128: 1048743430,
    1000: -14577491,
    65535: -1629199920,
    2**31 - 1: 133916647,
    -1: -1604776387,
    -(2**31): 723455942,
}
"""What `pyspark.sql.functions.hash` of Spark 4.3.0 gives for an int."""


@pytest.mark.parametrize(("number", "hashed"), SPARK_HASHES.items())
def test_a_shard_key_is_hashed_as_spark_hashes_it(number: int, hashed: int) -> None:
    assert spark_hashes([number]).tolist() == [hashed]


@pytest.mark.parametrize("shards", range(1, KEY_GROUPS + 1))
def test_every_shard_has_a_partition_of_its_own(shards: int) -> None:
    keys = shard_keys(shards)
    # Spark's pmod, and Python's, is never negative.
    assert (spark_hashes(keys) % shards).tolist() == list(range(shards))
    assert shards_of(keys) == {key: shard for shard, key in enumerate(keys)}


@pytest.mark.parametrize("shards", [0, -1, KEY_GROUPS + 1])
def test_more_shards_than_key_groups_or_none_are_refused(shards: int) -> None:
    with pytest.raises(ValueError, match="1 to 128"):
        shard_keys(shards)


HOSTILE = pl.DataFrame(
    {
        "n": [None, 2**53 + 1, -(2**63), 2**63 - 1],
        "x": [None, math.nan, -0.0, math.inf],
        "k": [None, "", "日本", "a\x00b"],
        "d": [None, Decimal("-12.345"), Decimal("123456789.999"), Decimal("0.000")],
        "t": [
            None,
            datetime(1, 1, 1, tzinfo=UTC),
            datetime(1969, 12, 31, 23, 59, tzinfo=UTC),
            datetime.max.replace(tzinfo=UTC),
        ],
        "l": [None, [], [None, "a"], ["b"]],
        "b": [None, b"", b"\x00\xff", b"c"],
        "f": [None, True, False, True],
    },
    schema={
        "n": pl.Int64(),
        "x": pl.Float64(),
        "k": pl.String(),
        "d": pl.Decimal(38, 3),
        "t": pl.Datetime("us", "UTC"),
        "l": pl.List(pl.String()),
        "b": pl.Binary(),
        "f": pl.Boolean(),
    },
)


@pytest.mark.parametrize(
    "frame", [HOSTILE, HOSTILE.clear(), HOSTILE.slice(1, 2), pl.concat([HOSTILE, HOSTILE], rechunk=False)]
)
def test_a_batch_comes_back_as_it_was(frame: pl.DataFrame) -> None:
    back = decode(encode(frame))
    assert back.schema == frame.schema
    assert back.equals(frame)
    assert back.get_column("x").cast(pl.String).to_list() == frame.get_column("x").cast(pl.String).to_list()


def packed(packer: Packer) -> list[Packed]:
    return list(packer.taken())


def test_rows_go_to_the_shard_that_owns_their_key() -> None:
    frame = pl.DataFrame({"k": [None if n % 7 == 0 else f"k{n % 50}" for n in range(500)], "n": range(500)})
    packer = Packer(5)
    packer.keyed(3, ["k"], frame, late=False)
    found = packed(packer)
    assert {(row.what, row.tag) for row in found} == {(What.ROWS, 3)}
    assert pl.concat([decode(row.data) for row in found]).sort("n").equals(frame)
    for row in found:
        assert set(owners(key_groups(decode(row.data), ["k"]), 5).tolist()) == {row.shard}


def test_a_row_of_state_goes_where_the_rows_of_its_key_go() -> None:
    frame = pl.DataFrame({"k": [None, "", *map(str, range(200))], "n": range(202)})
    packer = Packer(4)
    packer.keyed(0, ["k"], frame, late=False)
    rows = {row.shard: set(decode(row.data)["n"].to_list()) for row in packed(packer)}
    states = {shard: set(mine["n"].to_list()) for shard, mine in split_state(frame, ["k"], keyed=True, shards=4)}
    assert states == rows
    assert [shard for shard, _ in split_state(frame, ["k"], keyed=False, shards=4)] == [0]


def test_rows_without_a_key_belong_to_the_first_shard() -> None:
    packer = Packer(4)
    packer.keyed(1, [], HOSTILE, late=False)
    packer.keyed(1, [], HOSTILE, late=True)
    assert [(row.shard, row.what, row.tag) for row in packed(packer)] == [(0, What.ROWS, 1), (0, What.LATE, 1)]


def test_branches_with_their_columns_in_another_order_are_packed_side_by_side() -> None:
    """Two branches of a union came to one task, and their rows could not be put together."""
    packer = Packer(1)
    packer.keyed(0, ["k"], pl.DataFrame({"k": ["a"], "n": [1]}), late=False)
    packer.keyed(0, ["k"], pl.DataFrame({"n": [2], "k": ["a"]}), late=False)
    packer.keyed(0, ["k"], pl.DataFrame({"k": ["b"], "n": [3]}), late=False)
    found = [decode(row.data) for row in packed(packer)]
    assert sorted(pl.concat([frame.select("k", "n") for frame in found]).rows()) == [("a", 1), ("a", 2), ("b", 3)]
    assert len(found) == 2


def test_rows_with_ids_and_rows_without_are_packed_side_by_side() -> None:
    """Of two sources in a union only one carries ids, for a sink of its own that releases at once."""
    packer = Packer(2)
    packer.keyed(0, ["k"], pl.DataFrame({"k": ["a"], "__id": ["1"]}), late=False)
    packer.keyed(0, ["k"], pl.DataFrame({"k": ["a"]}), late=False)
    assert sum(decode(row.data).height for row in packed(packer)) == 2


def test_rows_for_a_sink_go_by_each_shard_in_turn() -> None:
    packer = Packer(3)
    for number in range(7):
        packer.out(2, pl.DataFrame({"n": [number]}))
    found = {row.shard: decode(row.data)["n"].to_list() for row in packed(packer)}
    assert found == {0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}


def test_rows_are_packed_when_they_are_long_enough_together() -> None:
    packer = Packer(1)
    rows = PACK_BYTES // 8
    packer.out(0, pl.DataFrame({"n": range(rows - 1)}))
    assert list(packer.ready()) == []
    packer.out(0, pl.DataFrame({"n": [rows - 1]}))
    (one,) = packer.ready()
    assert decode(one.data)["n"].to_list() == list(range(rows))
    assert packed(packer) == []


def test_many_short_rows_are_cut_into_packs_of_like_size() -> None:
    packer = Packer(1)
    frame = pl.DataFrame({"n": range(PACK_BYTES)})
    packer.out(0, frame)
    found = packed(packer)
    assert all(PACK_BYTES / 2 < len(row.data) < 2 * PACK_BYTES for row in found)
    assert pl.concat([decode(row.data) for row in found]).equals(frame)


def test_rows_that_grow_longer_all_at_once_still_make_no_pack_too_large() -> None:
    packer = Packer(1)
    short, long = "x", "x" * (PACK_BYTES // 16)
    frame = pl.DataFrame({"text": [*[short] * 50_000, *[long] * 100, short]})
    for part in frame.iter_slices(10_000):
        packer.out(0, part)
    found = packed(packer)
    assert max(len(row.data) for row in found) <= 2 * PACK_BYTES
    assert pl.concat([decode(row.data) for row in found]).equals(frame)


def test_a_row_longer_than_a_pack_is_packed_alone() -> None:
    packer = Packer(1)
    frame = pl.DataFrame({"text": ["x" * (3 * PACK_BYTES), "y" * (3 * PACK_BYTES)]})
    packer.out(0, frame)
    assert [decode(row.data)["text"].to_list() for row in packed(packer)] == [[text] for text in frame["text"]]


def test_text_that_shards_share_does_not_make_their_packs_small() -> None:
    """The text of all shards lies in one place once rows are in order of shard, and counts as that of each."""
    packer = Packer(64)
    for number in range(8):
        packer.keyed(
            0, ["k"], pl.DataFrame({"k": [f"a key of some length {number} {n}" for n in range(20_000)]}), late=False
        )
    assert len(packed(packer)) <= 64 * 4


def test_no_rows_make_no_pack() -> None:
    packer = Packer(2)
    packer.out(0, HOSTILE.clear())
    packer.keyed(0, ["k"], HOSTILE.clear(), late=False)
    assert packed(packer) == []


def test_what_is_for_all_goes_to_every_shard() -> None:
    packer = Packer(3)
    packer.to_all(What.CLOCK, 0, b"x")
    assert packed(packer) == [Packed(shard, What.CLOCK, 0, b"x") for shard in range(3)]


def test_more_bytes_than_arrow_can_count_are_an_error_and_no_wrong_rows() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 30

    rows = [Packed(0, What.ROWS, 0, Long())] * 2
    with pytest.raises(OverflowError):
        record_batch(rows, [0])
