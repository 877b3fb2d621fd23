"""The vectorised hash against the reference implementation."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fordstone.lang.polars.xxh64 import PADDING_BYTES, hash_halves, hash_segments, hash_tagged_words, hash_words

segments = st.lists(st.one_of(st.binary(max_size=12), st.binary(min_size=28, max_size=140)), max_size=30)


@given(segments)
def test_segments_hash_as_the_reference_does(parts: list[bytes]) -> None:
    buffer = np.frombuffer(b"".join(parts) + bytes(PADDING_BYTES), dtype=np.uint8)
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    starts = lengths.cumsum() - lengths
    assert hash_segments(buffer, starts, lengths).tolist() == [xxhash.xxh64_intdigest(part) for part in parts]


def test_every_length_up_to_four_stripes_hashes_as_the_reference_does() -> None:
    content = bytes(range(1, 140))
    buffer = np.frombuffer(content + bytes(PADDING_BYTES), dtype=np.uint8)
    lengths = np.arange(len(content) + 1)
    got = hash_segments(buffer, np.zeros_like(lengths), lengths)
    assert got.tolist() == [xxhash.xxh64_intdigest(content[:length]) for length in lengths]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_tagged_words_hash_as_the_reference_does(words: list[int]) -> None:
    got = hash_tagged_words(1, np.array(words, dtype=np.uint64))
    assert got.tolist() == [xxhash.xxh64_intdigest(b"\x01" + word.to_bytes(8, "little")) for word in words]


@given(st.lists(st.tuples(st.binary(max_size=100), st.integers(0, 2**64 - 1)), max_size=30))
def test_segments_hash_from_their_own_seeds_as_the_reference_does(pairs: list[tuple[bytes, int]]) -> None:
    buffer = np.frombuffer(b"".join(part for part, _ in pairs) + bytes(PADDING_BYTES), dtype=np.uint8)
    lengths = np.array([len(part) for part, _ in pairs], dtype=np.int64)
    seeds = np.array([seed for _, seed in pairs], dtype=np.uint64)
    got = hash_segments(buffer, lengths.cumsum() - lengths, lengths, seeds)
    assert got.tolist() == [xxhash.xxh64_intdigest(part, seed) for part, seed in pairs]
    assert seeds.tolist() == [seed for _, seed in pairs]  # untouched


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1))
def test_words_and_halves_hash_from_their_own_seeds_as_the_reference_does(pairs: list[tuple[int, int]]) -> None:
    words = np.array([word for word, _ in pairs], dtype=np.uint64)
    seeds = np.array([seed for _, seed in pairs], dtype=np.uint64)
    assert hash_words(words, seeds).tolist() == [
        xxhash.xxh64_intdigest(word.to_bytes(8, "little"), seed) for word, seed in pairs
    ]
    assert hash_halves(words.astype(np.uint32), seeds).tolist() == [
        xxhash.xxh64_intdigest(word.to_bytes(8, "little")[:4], seed) for word, seed in pairs
    ]
