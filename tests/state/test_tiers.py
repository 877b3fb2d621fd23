"""Which pieces are merged: sizes in, a range out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fordstone.state.base import PIECES_MAX, PIECES_TOTAL_MAX, SMALLEST_ROWS, pieces_to_merge, tier_of


def test_pieces_of_one_tier_are_merged_with_the_smaller_ones_between_them() -> None:
    large = SMALLEST_ROWS * 20
    sizes = [large * 100, *[large, 5] * PIECES_MAX]
    assert pieces_to_merge(sizes) == range(1, len(sizes))
    assert pieces_to_merge(sizes[:-2]) is None


def test_the_smallest_tier_is_merged_first() -> None:
    sizes = [*[SMALLEST_ROWS * 20] * PIECES_MAX, *[7] * PIECES_MAX]
    assert pieces_to_merge(sizes) == range(PIECES_MAX, 2 * PIECES_MAX)


def test_few_pieces_are_left_alone() -> None:
    assert pieces_to_merge([1] * (PIECES_MAX - 1)) is None
    assert pieces_to_merge([1] * PIECES_MAX) == range(PIECES_MAX)
    assert pieces_to_merge([]) is None


def test_untouchable_pieces_part_their_neighbours() -> None:
    half = PIECES_MAX - 1
    assert pieces_to_merge([*[1] * half, None, *[1] * half]) is None


def test_too_many_pieces_of_all_sizes_are_merged_where_it_is_cheapest() -> None:
    # Sizes fall, so that no tier has enough neighbours.
    sizes = [SMALLEST_ROWS * 4**tier for tier in range(10, 0, -1) for _ in range(PIECES_MAX - 5)]
    assert len(sizes) > PIECES_TOTAL_MAX
    assert pieces_to_merge(sizes) == range(len(sizes) - PIECES_MAX, len(sizes))


def test_tiers_are_a_factor_of_four_wide() -> None:
    assert [
        tier_of(rows) for rows in (0, SMALLEST_ROWS, 4 * SMALLEST_ROWS - 1, 4 * SMALLEST_ROWS, 16 * SMALLEST_ROWS)
    ] == [0, 0, 0, 1, 2]


@given(st.lists(st.integers(1, 10 * SMALLEST_ROWS), min_size=1, max_size=400), st.floats(0, 1))
def test_rows_are_written_again_a_few_times_only_and_pieces_stay_few(sizes: list[int], share: float) -> None:
    """Whatever comes, and whatever share of the rows is left by merging."""
    pieces: list[int | None] = []
    written = 0
    for size in sizes:
        pieces.append(size)
        while (found := pieces_to_merge(pieces)) is not None:
            merged = [count for count in pieces[found.start : found.stop] if count is not None]
            assert len(merged) >= PIECES_MAX
            left = max(*merged, int(sum(merged) * share))
            written += left
            pieces[found.start : found.stop] = [left]
        assert len(pieces) <= PIECES_TOTAL_MAX
    assert written <= sum(sizes) * (2 + tier_of(sum(sizes)))
