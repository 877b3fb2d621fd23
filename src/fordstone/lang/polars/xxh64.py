"""The 64-bit xxHash (XXH64) of many byte strings at once, in NumPy.

Used for what is stored (`key_group`, with seed 0) and for the function xxhash64, so the result is fixed by the published
algorithm; tests compare it with the reference implementation. All arithmetic is modulo 2**64.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int64]

PADDING_BYTES: Final = 8
"""How many bytes must follow the last byte string in a buffer: words are read whole."""

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_P5: Final = np.uint64(0x27D4EB2F165667C5)
_STRIPE: Final = 32
_LANE: Final = 8
_HALF: Final = 4


def _rotated(words: Words, bits: int) -> Words:
    turned = words << np.uint64(bits)
    turned |= words >> np.uint64(64 - bits)
    return turned


def _round(lane: Words, into: Words | None = None) -> Words:
    mixed = lane * _P2
    if into is not None:
        mixed += into
    mixed = _rotated(mixed, 31)
    mixed *= _P1
    return mixed


def _with_word(hashes: Words, word: Words) -> Words:
    mixed = _rotated(hashes ^ _round(word), 27)
    mixed *= _P1
    mixed += _P4
    return mixed


def _with_half(hashes: Words, half: Words) -> Words:
    mixed = _rotated(hashes ^ (half * _P1), 23)
    mixed *= _P2
    mixed += _P3
    return mixed


def _with_byte(hashes: Words, byte: Words) -> Words:
    mixed = _rotated(hashes ^ (byte * _P5), 11)
    mixed *= _P1
    return mixed


def _finished(hashes: Words) -> Words:
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
    return hashes


def hash_tagged_words(tag: int, words: Words) -> Words:
    """The hash of the 9 bytes `tag`, then each word in little-endian order."""
    start = _P5 + np.uint64(9)
    lanes = (words << np.uint64(8)) | np.uint64(tag)
    mixed = _rotated(_round(lanes) ^ start, 27)
    mixed *= _P1
    mixed += _P4
    return _finished(_with_byte(mixed, words >> np.uint64(56)))


def hash_words(words: Words, seeds: Words) -> Words:
    """The hash of the 8 bytes of each word in little-endian order, from a seed of its own."""
    return _finished(_with_word(seeds + (_P5 + np.uint64(_LANE)), words))


def hash_halves(halves: npt.NDArray[np.uint32], seeds: Words) -> Words:
    """The hash of the 4 bytes of each half word in little-endian order, from a seed of its own."""
    return _finished(_with_half(seeds + (_P5 + np.uint64(_HALF)), halves.astype(np.uint64)))


def hash_segments(buffer: Bytes, starts: Lengths, lengths: Lengths, seeds: Words | None = None) -> Words:
    """The hash of each `buffer[start : start + length]`, from seed 0 or a seed of its own.

    `buffer` has `PADDING_BYTES` to spare at its end.
    """
    # Unaligned words at any byte: views with a stride of one byte.
    size = buffer.size - PADDING_BYTES + 1
    words: Words = np.ndarray((size,), dtype="<u8", buffer=buffer, strides=(1,))
    halves = np.ndarray((size,), dtype="<u4", buffer=buffer, strides=(1,))
    hashes = np.full(starts.size, _P5, dtype=np.uint64) if seeds is None else seeds + _P5
    at = starts.copy()
    ends = starts + lengths
    long = np.flatnonzero(lengths >= _STRIPE)
    if long.size:
        hashes[long], at[long] = _stripes(words, starts[long], lengths[long], None if seeds is None else seeds[long])
    hashes += lengths.view(np.uint64)
    for width in (_LANE, _LANE, _LANE, _HALF, 1, 1, 1):
        rows = np.flatnonzero(ends - at >= width)
        if not rows.size:
            continue
        every = rows.size == at.size
        here = at if every else at[rows]
        before = hashes if every else hashes[rows]
        if width == _LANE:
            after = _with_word(before, words[here])
        elif width == _HALF:
            after = _with_half(before, halves[here].astype(np.uint64))
        else:
            after = _with_byte(before, buffer[here].astype(np.uint64))
        if every:
            hashes = after
            at += width
        else:
            hashes[rows] = after
            at[rows] += width
    return _finished(hashes)


def _stripes(words: Words, starts: Lengths, lengths: Lengths, seeds: Words | None) -> tuple[Words, Lengths]:
    """Take in all whole stripes of byte strings that have one; gives the hashes so far and where the rest begins."""
    counts = lengths // _STRIPE
    with np.errstate(over="ignore"):
        begin = (_P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1)
    lanes = [np.full(starts.size, lane, dtype=np.uint64) for lane in begin]
    if seeds is not None:
        lanes = [lane + seeds for lane in lanes]
    rows = np.arange(starts.size)
    for stripe in range(int(counts.max())):
        rows = rows[counts[rows] > stripe]
        here = starts[rows] + stripe * _STRIPE
        for number, lane in enumerate(lanes):
            lane[rows] = _round(words[here + number * _LANE], lane[rows])
    hashes = _rotated(lanes[0], 1) + _rotated(lanes[1], 7) + _rotated(lanes[2], 12) + _rotated(lanes[3], 18)
    for lane in lanes:
        hashes = (hashes ^ _round(lane)) * _P1 + _P4
    return hashes, starts + counts * _STRIPE
