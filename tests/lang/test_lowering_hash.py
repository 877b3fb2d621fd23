"""hash and xxhash64 beyond the table of Spark's answers: any rows, against the definition written value by value."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fordstone.lang.expression import parse
from fordstone.lang.polars.hash import BLOCK_ROWS
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.schema import DataType, Schema

SCHEMA = Schema.of(
    {
        "a": "boolean", "b": "tinyint", "i": "int", "l": "bigint", "f": "float", "x": "double", "p": "decimal(18,2)", "w": "decimal(38,3)",
        "s": "string", "y": "binary", "ts": "array<array<string>>", "xs": "array<double>", "ws": "array<decimal(20,0)>",
    }
)  # fmt: skip
MASK = 2**32 - 1


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & MASK


def murmur3(data: bytes, seed: int) -> int:
    """Spark's Murmur3, byte string by byte string."""
    whole = len(data) // 4 * 4
    words = [
        *struct.unpack(f"<{whole // 4}I", data[:whole]),
        *(byte - 256 if byte > 127 else byte for byte in data[whole:]),
    ]
    for word in words:
        seed = (_turned(seed ^ (_turned(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK), 13) * 5 + 0xE6546B64) & MASK
    seed ^= len(data)
    seed = (seed ^ seed >> 16) * 0x85EBCA6B & MASK
    seed = (seed ^ seed >> 13) * 0xC2B2AE35 & MASK
    return seed ^ seed >> 16


def content(value: Any, kind: DataType) -> bytes:
    """The bytes that are hashed of a value."""
    match kind.name:
        case "boolean" | "tinyint" | "int":
            return struct.pack("<i", int(value))
        case "bigint":
            return struct.pack("<q", value)
        case "float" | "double":
            value = math.nan if math.isnan(value) else value + 0.0
            return struct.pack("<f" if kind.name == "float" else "<d", value)
        case "decimal":
            sign, digits, exponent = value.as_tuple()
            number: int = int("".join(map(str, digits))) * 10 ** (exponent + kind.scale) * (-1 if sign else 1)
            if kind.precision <= 18:
                return struct.pack("<q", number)
            size = ((~number if number < 0 else number).bit_length()) // 8 + 1
            return number.to_bytes(size, "big", signed=True)
        case "string":
            return bytes(str(value).encode())
        case _:
            return bytes(value)


def chained(value: Any, kind: DataType, seed: int, one: Callable[[bytes, int], int]) -> int:
    if value is None:
        return seed
    if kind.element is not None:
        for item in value:
            seed = chained(item, kind.element, seed, one)
        return seed
    return one(content(value, kind), seed)


def signed(value: int, bits: int) -> int:
    return value - 2**bits if value >> (bits - 1) else value


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    limit = 10**digits - 1
    edges = st.integers(0, 127).map(lambda bits: min(2**bits, limit))
    whole = (
        st.integers(-limit, limit)
        | edges
        | edges.map(lambda edge: -edge)
        | edges.map(lambda edge: -edge - 1 + (edge == limit))
    )
    return whole.map(lambda number: Decimal(f"{number}e-{scale}"))


TEXT = st.text(st.characters(codec="utf-8"), max_size=80)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32) | st.sampled_from([0.0, -0.0]),
    "double": st.floats() | st.sampled_from([0.0, -0.0]),
    "decimal(18,2)": decimals(18, 2),
    "decimal(38,3)": decimals(38, 3),
    "string": TEXT,
    "binary": st.binary(max_size=80),
    "array<array<string>>": st.lists(st.none() | st.lists(st.none() | TEXT, max_size=3), max_size=3),
    "array<double>": st.lists(st.none() | st.floats(), max_size=5),
    "array<decimal(20,0)>": st.lists(st.none() | decimals(20, 0), max_size=3),
}
ROWS = st.lists(st.tuples(*(st.none() | VALUES[str(kind)] for _, kind in SCHEMA.columns)), max_size=6)


def evaluated(text: str, frame: pl.DataFrame, schema: Schema = SCHEMA) -> list[int]:
    return frame.select(to_polars(parse(text, schema), schema)).to_series().to_list()


@given(rows=ROWS)
def test_any_rows_hash_as_their_values_do_one_after_the_other(rows: list[tuple[Any, ...]]) -> None:
    frame = pl.DataFrame(rows, schema=SCHEMA.polars, orient="row")
    for function, bits, one in (("hash", 32, murmur3), ("xxhash64", 64, xxhash.xxh64_intdigest)):
        for names in ([name] for name in SCHEMA):
            expected = [chained(row[list(SCHEMA).index(names[0])], SCHEMA[names[0]], 42, one) for row in rows]
            assert evaluated(f"{function}({names[0]})", frame) == [signed(value, bits) for value in expected], names
        expected = []
        for row in rows:
            seed = 42
            for value, (_, kind) in zip(row, SCHEMA.columns, strict=True):
                seed = chained(value, kind, seed, one)
            expected.append(signed(seed, bits))
        assert evaluated(f"{function}({', '.join(SCHEMA)})", frame) == expected


@pytest.mark.parametrize("function", ["hash", "xxhash64"])
def test_every_nan_has_the_same_hash(function: str) -> None:
    doubles = np.array(
        [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000001, 0xFFFFFFFFFFFFFFFF], dtype=np.uint64
    )
    floats = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], dtype=np.uint32)
    frame = pl.DataFrame({"x": doubles.view(np.float64), "f": floats.view(np.float32)})
    schema = Schema.of({"x": "double", "f": "float"})
    assert len(set(evaluated(f"{function}(x)", frame, schema))) == 1
    assert len(set(evaluated(f"{function}(f)", frame, schema))) == 1


@pytest.mark.parametrize("function", ["hash", "xxhash64"])
def test_rows_beyond_a_block_hash_as_they_do_alone(function: str) -> None:
    schema = Schema.of({"s": "string", "n": "int", "ns": "array<int>"})
    rows = BLOCK_ROWS + 3
    every = pl.int_range(rows, eager=True)
    frame = pl.DataFrame({"s": every.cast(pl.String), "n": every, "ns": every.reshape((rows, 1))}, schema=schema.polars)
    whole = evaluated(f"{function}(s, n, ns)", frame, schema)
    for at in (0, BLOCK_ROWS - 1, BLOCK_ROWS, rows - 1):
        assert evaluated(f"{function}(s, n, ns)", frame[at : at + 1], schema) == [whole[at]]
    assert len(set(whole)) > rows * 0.99


def test_a_hash_can_be_grouped_by_and_filtered_by_in_a_lazy_query() -> None:
    schema = Schema.of({"s": "string"})
    frame = pl.DataFrame({"s": ["a", None, "b", "a"]})
    lowered = to_polars(parse("hash(s) AS h", schema), schema)
    assert frame.lazy().group_by(lowered).len().sort("len").collect().get_column("len").to_list() == [1, 1, 2]
    assert frame.lazy().filter(to_polars(parse("hash(s) = 42", schema), schema)).collect().height == 1
