"""Key groups: which of 128 slices of the key space a key is in, and which subtask owns it.

The group of a key is xxh64 (seed 0) of its canonical bytes, mod 128. It is part of what is stored: neither the bytes
nor the hash may ever change. The canonical bytes of a key are those of its columns, one after the other:

- null: one byte 0. Anything else: one byte 1, then the value:
- integers of any width, boolean (0 or 1), date (days), timestamp (microseconds): 8 bytes, signed, little-endian;
- float and double: the 8 bytes of the double, little-endian; -0.0 as 0.0, every NaN as 0x7ff8000000000000;
- string (as UTF-8) and binary: the length in bytes as 4 bytes, little-endian, then the bytes;
- decimal: the unscaled number as 16 bytes, signed, little-endian, then one byte with the scale.

A key without columns has no bytes: all rows are in one group. Works on whole columns: no Python per row. Leaves to
others: equality of keys (`key_index` has that).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.errors import SchemaError
from fordstone.lang.polars.xxh64 import PADDING_BYTES, Bytes, Lengths, Words, hash_segments, hash_tagged_words
from fordstone.plan.ids import KEY_GROUPS, owner_of

Groups = npt.NDArray[np.uint8]

BLOCK_ROWS: Final = 32768
"""Number of rows hashed at a time, so that their words stay in the processor's cache."""
_VALUE: Final = 1
_NAN_BITS: Final = np.uint64(0x7FF8000000000000)
_WORD: Final = 8
_LENGTH_BYTES: Final = 4
_DECIMAL_BYTES: Final = 17
_TWO_64: Final = 2**64


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Values of 8 bytes each."""

    words: Words
    valid: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Values of any length: their bytes one after the other, nulls without any."""

    content: Bytes
    lengths: Lengths
    valid: npt.NDArray[np.bool_] | None
    prefixed: bool
    """Whether the length stands before the bytes."""


def key_groups(frame: pl.DataFrame, columns: Sequence[str]) -> Groups:
    """The key group of each row, 0 to 127. Called for every batch that is shuffled, and when state is loaded."""
    groups = np.empty(frame.height, dtype=np.uint8)
    for start, hashes in _blocks(frame, columns):
        groups[start : start + hashes.size] = hashes & np.uint64(KEY_GROUPS - 1)
    return groups


def row_hashes(frame: pl.DataFrame, columns: Sequence[str]) -> Words:
    """The hash of each row's canonical bytes in these columns: the same in every release, so it may be stored."""
    found = np.empty(frame.height, dtype=np.uint64)
    for start, hashes in _blocks(frame, columns):
        found[start : start + hashes.size] = hashes
    return found


def owners(groups: Groups, parallelism: int) -> Groups:
    """Which of `parallelism` subtasks owns each key group."""
    return np.array([owner_of(group, parallelism) for group in range(KEY_GROUPS)], dtype=np.uint8).take(groups)


def split_by_owner(frame: pl.DataFrame, columns: Sequence[str], parallelism: int) -> list[pl.DataFrame]:
    """The rows of each subtask, in the order in which they stand in `frame`; one frame per subtask, empty ones included."""
    if parallelism == 1:
        return [frame]
    owned = owners(key_groups(frame, columns), parallelism)
    ends = np.bincount(owned, minlength=parallelism).cumsum()
    # A stable sort of bytes is a radix sort: one pass, and one gather for all subtasks.
    sorted_frame = frame[owned.argsort(kind="stable")]
    starts = [0, *ends[:-1].tolist()]
    return [sorted_frame.slice(start, end - start) for start, end in zip(starts, ends.tolist(), strict=True)]


def _blocks(frame: pl.DataFrame, columns: Sequence[str]) -> Iterator[tuple[int, Words]]:
    """The hashes of some rows at a time, and where these rows begin."""
    keys = frame.select(columns)
    if not columns:
        yield 0, np.full(frame.height, _hashes([], 1)[0], dtype=np.uint64)
        return
    for start in range(0, keys.height, BLOCK_ROWS):
        block = keys.slice(start, BLOCK_ROWS)
        yield start, _hashes([_canonical(column) for column in block.get_columns()], block.height)


def _hashes(columns: Sequence[_Fixed | _Ragged], rows: int) -> Words:
    if len(columns) == 1 and isinstance(columns[0], _Fixed):
        hashes = hash_tagged_words(_VALUE, columns[0].words)
        valid = columns[0].valid
        return hashes if valid is None else np.where(valid, hashes, _NULL_HASH)
    lengths = np.zeros(rows, dtype=np.int64)
    for column in columns:
        lengths += _widths(column)
    ends = lengths.cumsum()
    starts = ends - lengths
    buffer = np.zeros((int(ends[-1]) if rows else 0) + PADDING_BYTES, dtype=np.uint8)
    at = starts.copy()
    for column in columns:
        _write(buffer, at, column)
        at += _widths(column)
    return hash_segments(buffer, starts, lengths)


def _widths(column: _Fixed | _Ragged) -> Lengths:
    if isinstance(column, _Fixed):
        if column.valid is None:
            return np.full(column.words.size, 1 + _WORD, dtype=np.int64)
        return 1 + _WORD * column.valid.astype(np.int64)
    prefix = _LENGTH_BYTES if column.prefixed else 0
    return column.lengths + (1 + prefix if column.valid is None else 1 + prefix * column.valid.astype(np.int64))


def _write(buffer: Bytes, at: Lengths, column: _Fixed | _Ragged) -> None:
    valid = column.valid
    buffer[at] = _VALUE if valid is None else valid
    here = (at if valid is None else at[valid]) + 1
    size = buffer.size - PADDING_BYTES + 1
    if isinstance(column, _Fixed):
        words = np.ndarray((size,), dtype="<u8", buffer=buffer, strides=(1,))
        words[here] = column.words if valid is None else column.words[valid]
        return
    lengths = column.lengths if valid is None else column.lengths[valid]
    if column.prefixed:
        halves = np.ndarray((size,), dtype="<u4", buffer=buffer, strides=(1,))
        halves[here] = lengths
        here = here + _LENGTH_BYTES
    before = lengths.cumsum() - lengths
    buffer[np.repeat(here - before, lengths) + np.arange(column.content.size)] = column.content


def _canonical(column: pl.Series) -> _Fixed | _Ragged:
    dtype = column.dtype
    if isinstance(dtype, pl.Datetime):
        column = column.dt.cast_time_unit("us")
    if dtype.is_integer() or isinstance(dtype, pl.Boolean | pl.Date | pl.Datetime | pl.Null):
        return _Fixed(_words(column.to_physical().cast(pl.Int64, wrap_numerical=True)), _valid(column))
    if dtype.is_float():
        values = column.cast(pl.Float64).fill_null(0.0).to_numpy() + 0.0
        words = values.view(np.uint64)
        words[np.isnan(values)] = _NAN_BITS
        return _Fixed(words, _valid(column))
    if isinstance(dtype, pl.String | pl.Binary):
        return _text(column.cast(pl.Binary))
    if isinstance(dtype, pl.Decimal):
        return _decimal(column, dtype.scale)
    raise SchemaError(
        f"column {column.name!r} of type {dtype} cannot be a key; cast it to a number, text, bytes or a time."
    )


def _valid(column: pl.Series) -> npt.NDArray[np.bool_] | None:
    return column.is_not_null().to_numpy() if column.null_count() else None


def _words(column: pl.Series) -> Words:
    values: npt.NDArray[np.int64] = (column.fill_null(0) if column.null_count() else column).to_numpy()
    return values.view(np.uint64)


def _text(column: pl.Series) -> _Ragged:
    # An empty or null value comes out of `explode` as one null.
    content = column.cast(pl.List(pl.UInt8)).explode().drop_nulls().to_numpy()
    lengths = column.bin.size().fill_null(0).cast(pl.Int64).to_numpy()
    return _Ragged(content, lengths, _valid(column), prefixed=True)


def _decimal(column: pl.Series, scale: int) -> _Ragged:
    unscaled = column.to_physical().drop_nulls().to_frame("n")
    halves = unscaled.select(
        low=(pl.col("n") % pl.lit(_TWO_64, dtype=pl.Int128)).cast(pl.UInt64),
        high=(pl.col("n") // pl.lit(_TWO_64, dtype=pl.Int128)).cast(pl.Int64),
    )
    content = np.empty((unscaled.height, _DECIMAL_BYTES), dtype=np.uint8)
    content[:, :8] = halves.get_column("low").to_numpy().astype("<u8").view(np.uint8).reshape(-1, 8)
    content[:, 8:16] = halves.get_column("high").to_numpy().astype("<i8").view(np.uint8).reshape(-1, 8)
    content[:, 16] = scale
    valid = _valid(column)
    lengths = np.full(len(column), _DECIMAL_BYTES, dtype=np.int64)
    return _Ragged(content.reshape(-1), lengths if valid is None else lengths * valid, valid, prefixed=False)


_NULL_HASH: Final = hash_segments(
    np.zeros(1 + PADDING_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
)[0]
