"""The 32-bit Murmur3 as Spark's hash() has it, of many values at once, in NumPy.

Whole words are taken in as in the published algorithm (x86, 32 bits); the bytes that remain are not: Spark takes each in
as a word of its own, sign-extended. Tests compare it with Spark. All arithmetic is modulo 2**32. No Python per value:
only a step for each word of the longest.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Halves = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int64]

PADDING_BYTES: Final = 4
"""How many bytes must follow the last byte string in a buffer: words are read whole."""
_WORD: Final = 4
_C1: Final = np.uint32(0xCC9E2D51)
_C2: Final = np.uint32(0x1B873593)
_FIVE: Final = np.uint32(5)
_ADDED: Final = np.uint32(0xE6546B64)
_F1: Final = np.uint32(0x85EBCA6B)
_F2: Final = np.uint32(0xC2B2AE35)


def _rotated(values: Halves, bits: int) -> Halves:
    turned = values << np.uint32(bits)
    turned |= values >> np.uint32(32 - bits)
    return turned


def _with_word(hashes: Halves, words: Halves) -> Halves:
    mixed = _rotated(words * _C1, 15)
    mixed *= _C2
    mixed ^= hashes
    mixed = _rotated(mixed, 13)
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


def hash_halves(values: Halves, seeds: Halves) -> Halves:
    """The hash of each value of 4 bytes, from a seed of its own."""
    return _finished(_with_word(seeds, values), np.uint32(4))


def hash_words(values: Words, seeds: Halves) -> Halves:
    """The hash of each value of 8 bytes, the lower half first, from a seed of its own."""
    low, high = values.astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)
    return _finished(_with_word(_with_word(seeds, low), high), np.uint32(8))


def hash_segments(buffer: Bytes, starts: Lengths, lengths: Lengths, seeds: Halves) -> Halves:
    """The hash of each `buffer[start : start + length]`, from a seed of its own.

    `buffer` has `PADDING_BYTES` to spare at its end.
    """
    words: Halves = np.ndarray((buffer.size - PADDING_BYTES + 1,), dtype="<u4", buffer=buffer, strides=(1,))
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
