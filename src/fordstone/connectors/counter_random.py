"""Random numbers as a pure function of where they stand: (seed, lane, column, sequence number).

There is no state to carry, so any slice of the numbers can be made alone. Only integer arithmetic decides the values:
they are the same on every machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_30: Final = np.uint64(30)
_SHIFT_27: Final = np.uint64(27)
_SHIFT_31: Final = np.uint64(31)
_WORD_MASK: Final = (1 << 64) - 1
_HALVES: Final = 8
"""A normal number is the sum of so many 16-bit ones."""


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> _SHIFT_30)) * _MIX_1
    words = (words ^ (words >> _SHIFT_27)) * _MIX_2
    return words ^ (words >> _SHIFT_31)


def stream_key(seed: int, *names: int | str) -> int:
    """A 64-bit number that tells streams of random numbers apart."""
    key = seed & _WORD_MASK
    for name in names:
        for byte in str(name).encode() + b"\x00":
            key = int(_mixed(np.array([(key + byte + 1) & _WORD_MASK], dtype=np.uint64) * _GAMMA)[0])
    return key


def random_words(key: int, first: int, count: int, *, draw: int = 0) -> Words:
    """64 random bits for each of the sequence numbers `first`, `first + 1`, ...; each `draw` is another such stream."""
    sequence = np.arange(first, first + count, dtype=np.uint64)
    offset = np.array([(key + draw * 0xD1B54A32D192ED03) & _WORD_MASK], dtype=np.uint64)
    return _mixed(_mixed(sequence * _GAMMA + offset) ^ offset)


def random_below(words: Words, bound: int) -> npt.NDArray[np.int64]:
    """Whole numbers in [0, bound), spread evenly as far as 32 bits allow; `bound` is at most 2**32."""
    return (((words >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def random_normal(key: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """About normal with mean 0 and deviation 1: the sum of eight even 16-bit numbers, which is exact in a double."""
    halves = np.stack([random_words(key, first, count, draw=draw) for draw in (1, 2)], axis=1).view(np.uint16)
    total = halves.sum(axis=1, dtype=np.int64).astype(np.float64)
    mean = _HALVES * 65535 / 2
    deviation = (_HALVES * (65536**2 - 1) / 12) ** 0.5
    normal: npt.NDArray[np.float64] = (total - mean) / deviation
    return normal
