"""hash() and xxhash64() on Polars, equal to Spark's to the bit.

The values of a row are hashed one after the other: the hash so far is the seed of the next, the first seed is 42, and a
null leaves the hash as it is. What is hashed of a value:

- boolean (0 or 1), tinyint, smallint, int, date (days): 4 bytes;
- bigint, timestamp (microseconds), decimal of at most 18 digits (the unscaled number): 8 bytes;
- float and double: the 4 or 8 bytes of the number, -0.0 as 0.0, and every NaN as the same one;
- string (as UTF-8) and binary: the bytes;
- wider decimal: the unscaled number in the fewest bytes that hold it with its sign, the highest byte first;
- array: its elements, one after the other.

Works on whole columns. Murmur3 is here: Spark's variant, which takes the last bytes of a string as signed words of their own.
XXH64 is in `xxh64`, for keys are hashed with it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.lang.polars import xxh64

Hashes = npt.NDArray[Any]
Halves = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.int64]

BLOCK_ROWS: Final = 32768
"""Rows hashed at a time, so that their values stay in the processor's cache."""
_SEED: Final = 42
_PADDING_BYTES: Final = xxh64.PADDING_BYTES
_LONG_DIGITS: Final = 18
"""Decimals of more digits do not fit into 8 bytes, and are hashed as bytes."""
_DECIMAL_BYTES: Final = 16
_TWO_64: Final = 2**64
_TOP_BIT: Final = 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class _Algorithm:
    """A hash function: of 4 bytes, of 8 bytes, and of any bytes, each from a seed per value."""

    of_halves: Callable[[npt.NDArray[np.uint32], Hashes], Hashes]
    of_words: Callable[[npt.NDArray[np.uint64], Hashes], Hashes]
    of_segments: Callable[[npt.NDArray[np.uint8], Rows, Rows, Hashes], Hashes]
    unsigned: type[np.unsignedinteger[Any]]
    signed: type[np.signedinteger[Any]]
    result: pl.DataType


# Murmur3

_WORD: Final = 4
_C1: Final = np.uint32(0xCC9E2D51)
_C2: Final = np.uint32(0x1B873593)
_FIVE: Final = np.uint32(5)
_ADDED: Final = np.uint32(0xE6546B64)
_F1: Final = np.uint32(0x85EBCA6B)
_F2: Final = np.uint32(0xC2B2AE35)


def _rotated32(values: Halves, bits: int) -> Halves:
    turned = values << np.uint32(bits)
    turned |= values >> np.uint32(32 - bits)
    return turned


def _with_word(hashes: Halves, words: Halves) -> Halves:
    mixed = _rotated32(words * _C1, 15)
    mixed *= _C2
    mixed ^= hashes
    mixed = _rotated32(mixed, 13)
    mixed *= _FIVE
    mixed += _ADDED
    return mixed


def _finished(hashes: Halves, lengths: Halves | np.uint32) -> Halves:
    hashes = hashes ^ lengths
    hashes ^= hashes >> np.uint32(16)
    hashes *= _F1
    hashes ^= hashes >> np.uint32(13)
    hashes *= _F2
    hashes ^= hashes >> np.uint32(16)
    return hashes


def _murmur_of_halves(values: Halves, seeds: Halves) -> Halves:
    return _finished(_with_word(seeds, values), np.uint32(4))


def _murmur_of_words(values: npt.NDArray[np.uint64], seeds: Halves) -> Halves:
    low, high = values.astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)
    return _finished(_with_word(_with_word(seeds, low), high), np.uint32(8))


def _murmur_of_segments(buffer: npt.NDArray[np.uint8], starts: Rows, lengths: Rows, seeds: Halves) -> Halves:
    # Words are read whole: the buffer has room at its end.
    words: Halves = np.ndarray((buffer.size - _PADDING_BYTES + 1,), dtype="<u4", buffer=buffer, strides=(1,))
    hashes = seeds.copy()
    whole = lengths // _WORD
    rows = np.arange(starts.size)
    for number in range(int(whole.max(initial=0))):
        rows = rows[whole[rows] > number]
        hashes[rows] = _with_word(hashes[rows], words[starts[rows] + number * _WORD])
    rest, tails = lengths % _WORD, starts + whole * _WORD
    for number in range(_WORD - 1):
        rows = np.flatnonzero(rest > number)
        signed = buffer[tails[rows] + number].view(np.int8).astype(np.int32).view(np.uint32)
        hashes[rows] = _with_word(hashes[rows], signed)
    return _finished(hashes, lengths.astype(np.uint32))


MURMUR3: Final = _Algorithm(
    of_halves=_murmur_of_halves,
    of_words=_murmur_of_words,
    of_segments=_murmur_of_segments,
    unsigned=np.uint32,
    signed=np.int32,
    result=pl.Int32(),
)
XXH64: Final = _Algorithm(
    of_halves=xxh64.hash_halves,
    of_words=xxh64.hash_words,
    of_segments=xxh64.hash_segments,
    unsigned=np.uint64,
    signed=np.int64,
    result=pl.Int64(),
)


def hashed(algorithm: _Algorithm, args: Sequence[pl.Expr]) -> pl.Expr:
    """The hash of the arguments, row by row; never null."""
    columns = pl.struct(*(arg.alias(str(at)) for at, arg in enumerate(args)))
    return columns.map_batches(partial(_hash_rows, algorithm), return_dtype=algorithm.result, is_elementwise=True)


def _hash_rows(algorithm: _Algorithm, rows: pl.Series) -> pl.Series:
    found = np.full(len(rows), _SEED, dtype=algorithm.unsigned)
    for start in range(0, len(rows), BLOCK_ROWS):
        block = found[start : start + BLOCK_ROWS]
        for column in rows.slice(start, BLOCK_ROWS).struct.unnest().get_columns():
            _take_in(algorithm, column, block)
    return pl.Series(rows.name, found.view(algorithm.signed))


def _take_in(algorithm: _Algorithm, column: pl.Series, hashes: Hashes) -> None:
    """Let the hashes go on with the values of a column, in place."""
    if isinstance(column.dtype, pl.List):
        _take_in_arrays(algorithm, column, hashes)
        return
    if column.null_count() == len(column):
        return
    if not column.null_count():
        hashes[:] = _hasher(algorithm, column)(slice(None), hashes)
        return
    rows = column.is_not_null().arg_true().to_numpy()
    hashes[rows] = _hasher(algorithm, column.drop_nulls())(slice(None), hashes[rows])


def _take_in_arrays(algorithm: _Algorithm, column: pl.Series, hashes: Hashes) -> None:
    """Arrays, and arrays of arrays, whose hash is that of all the elements within: first all first elements, and so on."""
    table = pl.DataFrame({"row": np.arange(len(column)), "element": column})
    while isinstance(table.schema["element"], pl.List):
        table = table.explode("element")
    if table.schema["element"] == pl.Null:
        return
    table = table.drop_nulls("element")
    rows = table.get_column("row").to_numpy()
    if not rows.size:
        return
    hasher = _hasher(algorithm, table.get_column("element"))
    place = np.arange(rows.size) - np.searchsorted(rows, rows)
    order = place.argsort(kind="stable")
    ends = np.bincount(place).cumsum()
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        some = order[start:end]
        hashes[rows[some]] = hasher(some, hashes[rows[some]])


def _hasher(algorithm: _Algorithm, column: pl.Series) -> Callable[[Rows | slice, Hashes], Hashes]:
    """What hashes some values of a column without nulls, each from a seed."""
    dtype = column.dtype
    wide = isinstance(dtype, pl.Decimal) and dtype.precision > _LONG_DIGITS
    if wide or isinstance(dtype, pl.String | pl.Binary):
        buffer, starts, lengths = _wide_decimal(column) if wide else _bytes(column.cast(pl.Binary))
        return lambda some, seeds: algorithm.of_segments(buffer, starts[some], lengths[some], seeds)
    values = _fixed(column)
    hashed = algorithm.of_halves if values.dtype == np.uint32 else algorithm.of_words
    return lambda some, seeds: hashed(values[some], seeds)


def _fixed(column: pl.Series) -> npt.NDArray[Any]:
    """Values of 4 or 8 bytes each."""
    if column.dtype == pl.Float32:
        return _float_bits(column.to_numpy().view(np.uint32), 0x7F800000, 0x7FC00000)
    if column.dtype == pl.Float64:
        return _float_bits(column.to_numpy().view(np.uint64), 0x7FF0000000000000, 0x7FF8000000000000)
    physical = column.to_physical()
    if isinstance(column.dtype, pl.Decimal) or physical.dtype == pl.Int64:
        return physical.cast(pl.Int64).to_numpy().view(np.uint64)
    return physical.cast(pl.Int32).to_numpy().view(np.uint32)


def _float_bits(bits: npt.NDArray[Any], infinity: int, nan: int) -> npt.NDArray[Any]:
    """-0.0 as 0.0, and every NaN as Java's; compared by their bits, because NumPy warns of a NaN that signals."""
    unsigned = bits.dtype.type
    size = bits & unsigned(np.iinfo(unsigned).max >> 1)
    bits = np.where(size == 0, unsigned(0), bits)
    bits[size > infinity] = nan
    return bits


def _bytes(column: pl.Series) -> tuple[npt.NDArray[np.uint8], Rows, Rows]:
    """All bytes in one buffer with room at its end, and where each value begins and how long it is."""
    # An empty value comes out of `explode` as one null.
    content = column.cast(pl.List(pl.UInt8)).explode().drop_nulls().to_numpy()
    lengths = column.bin.size().cast(pl.Int64).to_numpy()
    buffer = np.zeros(content.size + _PADDING_BYTES, dtype=np.uint8)
    buffer[: content.size] = content
    return buffer, lengths.cumsum() - lengths, lengths


def _wide_decimal(column: pl.Series) -> tuple[npt.NDArray[np.uint8], Rows, Rows]:
    halves = column.to_physical().to_frame("n").select(
        high=(pl.col("n") // pl.lit(_TWO_64, dtype=pl.Int128)).cast(pl.Int64),
        low=(pl.col("n") % pl.lit(_TWO_64, dtype=pl.Int128)).cast(pl.UInt64),
    )  # fmt: skip
    content = np.empty((len(column), _DECIMAL_BYTES), dtype=np.uint8)
    content[:, :8] = halves.get_column("high").to_numpy().astype(">i8").view(np.uint8).reshape(-1, 8)
    content[:, 8:] = halves.get_column("low").to_numpy().astype(">u8").view(np.uint8).reshape(-1, 8)
    # A byte can be left out while it is all sign, and the next one still shows the sign.
    sign = np.where(content[:, :1] >= _TOP_BIT, 0xFF, 0).astype(np.uint8)
    telling = content != sign
    telling[:, :-1] |= (content[:, 1:] ^ sign) >= _TOP_BIT
    telling[:, -1] = True
    first = telling.argmax(axis=1)
    buffer = np.zeros(content.size + _PADDING_BYTES, dtype=np.uint8)
    buffer[: content.size] = content.reshape(-1)
    starts = np.arange(len(column), dtype=np.int64) * _DECIMAL_BYTES + first
    return buffer, starts, _DECIMAL_BYTES - first
