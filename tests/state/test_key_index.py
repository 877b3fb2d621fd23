"""The key index against a dict, with good, bad and constant hashes."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fordstone.state.base import KeyIndex
from fordstone.state.key_index import MISSING, Hashes, MemoryKeyIndex
from fordstone.state.memory import IN_MEMORY
from fordstone.testing.contracts.state import KeyIndexContract

UTC = dt.UTC


def constant(keys: pl.DataFrame) -> Hashes:
    return np.full(keys.height, 0xDEADBEEFDEADBEEF, dtype=np.uint64)


def last_bucket(keys: pl.DataFrame) -> Hashes:
    """Every key begins its search at the last bucket and has to go round the end."""
    return np.full(keys.height, 2**64 - 1, dtype=np.uint64)


def same_tag(keys: pl.DataFrame) -> Hashes:
    """Keys in many buckets, with nothing to tell them apart but the keys themselves."""
    return keys.hash_rows().to_numpy() & np.uint64(0xFF)


HASHES: dict[str, Callable[[pl.DataFrame], Hashes] | None] = {
    "own": None,
    "constant": constant,
    "last bucket": last_bucket,
    "same tag": same_tag,
}

KINDS: dict[str, tuple[pl.DataType, st.SearchStrategy[object]]] = {
    "int": (pl.Int64(), st.integers(-3, 12)),
    "byte": (pl.UInt8(), st.integers(0, 9)),
    "text": (pl.String(), st.sampled_from(["", "a", "b", "é", "a much longer key than twelve bytes", "a\x00"])),
    "bytes": (pl.Binary(), st.sampled_from([b"", b"\x00", b"\x00\x00", b"\xff"])),
    "float": (pl.Float64(), st.sampled_from([0.0, -0.0, 1.5, math.nan, -math.nan, math.inf])),
    "single": (pl.Float32(), st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf])),
    "flag": (pl.Boolean(), st.booleans()),
    "day": (pl.Date(), st.sampled_from([dt.date(1969, 12, 31), dt.date(2026, 1, 1)])),
    "time": (pl.Datetime("us", "UTC"), st.sampled_from([dt.datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)])),
    "money": (pl.Decimal(12, 2), st.sampled_from([Decimal("0.00"), Decimal("-1.25"), Decimal("9999999999.99")])),
}


def plain(row: tuple[object, ...]) -> tuple[object, ...]:
    """A key that Python's dict takes for equal exactly if it is."""
    return tuple("NaN" if isinstance(value, float) and math.isnan(value) else value for value in row)


class TestKeyIndex(KeyIndexContract):
    def make(self, schema: Mapping[str, pl.DataType]) -> KeyIndex:
        return IN_MEMORY.key_index(schema)


@given(
    st.data(),
    st.sampled_from(sorted(HASHES)),
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True),
)
def test_the_index_is_a_dict_of_keys(data: st.DataObject, hash_name: str, names: list[str]) -> None:
    schema = {name: KINDS[name][0] for name in names}
    index = MemoryKeyIndex(schema, hash_keys=HASHES[hash_name])
    known: dict[tuple[object, ...], int] = {}
    rows = st.lists(st.tuples(*(st.none() | KINDS[name][1] for name in names)), max_size=12)
    for _ in range(data.draw(st.integers(1, 6), label="calls")):
        action = data.draw(st.sampled_from(["insert", "look", "remove"]), label="action")
        batch = data.draw(rows, label="keys")
        keys = pl.DataFrame(batch, schema=schema, orient="row")
        if action == "insert":
            slots, fresh = index.insert(keys)
            new = {plain(row) for row in batch} - set(known)
            assert len(fresh) == len(new)
            for row, slot in zip(batch, slots.tolist(), strict=True):
                assert known.setdefault(plain(row), slot) == slot
            assert sorted(fresh.tolist()) == sorted(known[row] for row in new)
        elif action == "look":
            assert index.find(keys).tolist() == [known.get(plain(row), MISSING) for row in batch]
        else:
            gone = {known.pop(plain(row)) for row in batch if plain(row) in known}
            assert index.remove(keys).tolist() == sorted(gone)
        assert len(index) == len(known)
        assert index.live_slots().tolist() == sorted(known.values())
        assert len(set(known.values())) == len(known)


@pytest.mark.parametrize("hash_name", sorted(HASHES))
def test_many_keys_in_one_call_grow_the_index_and_are_all_found(hash_name: str) -> None:
    index = MemoryKeyIndex({"k": pl.Int64()}, hash_keys=HASHES[hash_name])
    keys = pl.DataFrame({"k": [*range(100), *range(100)]})
    slots = index.insert(keys)[0]
    assert sorted(slots[:100].tolist()) == list(range(100))
    assert slots[:100].tolist() == slots[100:].tolist()
    assert index.find(pl.DataFrame({"k": [5, 1000, 99]})).tolist() == [slots[5], MISSING, slots[99]]


def test_slots_of_removed_keys_are_given_again_before_new_ones() -> None:
    index = MemoryKeyIndex({"k": pl.Int64()})
    index.insert(pl.DataFrame({"k": range(10)}))
    gone = index.remove(pl.DataFrame({"k": [3, 4, 5]}))
    again = index.insert(pl.DataFrame({"k": [100, 101, 102, 103]}))[0]
    assert set(gone.tolist()) < set(again.tolist())
    assert max(again.tolist()) == 10


def test_keys_that_come_and_go_do_not_make_the_index_grow() -> None:
    index = MemoryKeyIndex({"k": pl.Int64()})
    for start in range(0, 40_000, 100):
        keys = pl.DataFrame({"k": range(start, start + 100)})
        index.insert(keys)
        index.remove(keys)
    assert len(index) == 0
    assert index.capacity <= 256
    assert index._buckets.size <= 1024


def test_a_full_index_is_not_built_again_at_every_change() -> None:
    index = MemoryKeyIndex({"k": pl.Int64()})
    index.insert(pl.DataFrame({"k": range(511)}))
    rebuilt = 0
    for key in range(1000, 1400):
        before = index._buckets
        index.insert(pl.DataFrame({"k": [key]}))
        index.remove(pl.DataFrame({"k": [key]}))
        rebuilt += index._buckets is not before
    assert rebuilt <= 4


def test_filling_an_empty_index_is_the_same_as_inserting() -> None:
    keys = pl.DataFrame({"k": [f"device {number}" for number in range(1000)], "n": [*range(999), None]})
    index = MemoryKeyIndex(keys.schema)
    assert index.fill(keys).tolist() == list(range(1000))
    assert index.find(keys.reverse()).tolist() == list(range(999, -1, -1))
    assert index.insert(keys)[1].size == 0


def test_filling_with_no_keys_leaves_the_index_usable() -> None:
    index = MemoryKeyIndex({"k": pl.String()})
    assert index.fill(pl.DataFrame(schema={"k": pl.String()})).size == 0
    assert index.insert(pl.DataFrame({"k": ["a", "a"]}))[0].tolist() == [0, 0]


def test_only_an_empty_index_is_filled() -> None:
    index = MemoryKeyIndex({"k": pl.Int64()})
    index.insert(pl.DataFrame({"k": [1]}))
    with pytest.raises(ValueError, match="only an empty index"):
        index.fill(pl.DataFrame({"k": [2]}))


def test_keys_of_another_type_are_refused_by_name() -> None:
    index = MemoryKeyIndex({"k": pl.Int64()})
    with pytest.raises(TypeError, match="key column 'k' is Int32, the index was made for Int64"):
        index.insert(pl.DataFrame({"k": [1]}, schema={"k": pl.Int32()}))


def test_a_key_has_columns() -> None:
    with pytest.raises(ValueError, match="at least one column"):
        MemoryKeyIndex({})


@pytest.mark.slow
def test_long_text_that_is_overwritten_slot_by_slot_does_not_pile_up() -> None:
    index = MemoryKeyIndex({"k": pl.String()})
    for start in range(0, 400_000, 2000):
        keys = pl.DataFrame(
            {"k": [f"a key that is longer than twelve bytes: {number:08d}" for number in range(start, start + 2000)]}
        )
        index.insert(keys)
        index.remove(keys)
    # 2,000 slots, and at most 64 Ki rows of waste of about 50 bytes.
    assert index.size_bytes() < 12_000_000


@pytest.mark.parametrize("dtype", [pl.Float32(), pl.Float64()])
@pytest.mark.parametrize("beside", [[], ["text"]])
def test_zeros_of_both_signs_and_all_nans_are_one_key_each_whatever_stands_beside_them(
    dtype: pl.DataType, beside: list[str]
) -> None:
    def key(*values: float | None) -> pl.DataFrame:
        return pl.DataFrame({"f": pl.Series(values, dtype=dtype), **dict.fromkeys(beside, "same")})

    index = MemoryKeyIndex(key(0.0).schema)
    zero = index.insert(key(0.0))[0][0]
    nan = index.insert(key(math.nan))[0][0]
    assert index.insert(key(None, -0.0, -math.nan))[0].tolist() == [2, zero, nan]
    assert index.insert(key(-0.0))[0].tolist() == [zero]
