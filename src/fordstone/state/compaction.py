"""Which pieces of a state are worth folding into one: by size tiers.

Pure: sizes in, a range out. Whoever asks reads the rows, folds and replaces.

A tier is what lies within a factor of `RATIO`. A tier may hold `PIECES_MAX` pieces less one; then they are folded,
together with the smaller ones between them, and move up a tier. So every row is written again about once a tier, and
the number of pieces grows with the logarithm of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RATIO: Final = 4
"""Sizes within this factor are alike."""
PIECES_MAX: Final = 12
"""So many pieces of one tier are folded."""
PIECES_TOTAL_MAX: Final = 64
"""Above so many in all, the cheapest neighbours are folded whatever their sizes."""
SMALLEST_ROWS: Final = 4096
"""Pieces up to this are all of the lowest tier: a file costs about as much whatever is in it."""


def tier_of(rows: int) -> int:
    """The tier of a piece of so many rows, from 0."""
    return ((max(rows, SMALLEST_ROWS) // SMALLEST_ROWS).bit_length() - 1) // (RATIO.bit_length() - 1)


def worth_folding(rows: Sequence[int | None]) -> range | None:
    """Which neighbours to fold, given the rows of each piece, oldest first; `None` is a piece that may not be touched."""
    tiers = [None if count is None else tier_of(count) for count in rows]
    for tier in sorted({tier for tier in tiers if tier is not None}):
        start = alike = 0
        for at, other in enumerate([*tiers, None]):
            if other is not None and other <= tier:
                alike += other == tier
                continue
            if alike >= PIECES_MAX:
                return range(start, at)
            start, alike = at + 1, 0
    return _cheapest(rows) if len(rows) > PIECES_TOTAL_MAX else None


def _cheapest(rows: Sequence[int | None]) -> range | None:
    """The `PIECES_MAX` neighbours with the fewest rows together."""
    best: range | None = None
    best_rows = 0
    for start in range(len(rows) - PIECES_MAX + 1):
        counts = [count for count in rows[start : start + PIECES_MAX] if count is not None]
        if len(counts) == PIECES_MAX and (best is None or sum(counts) < best_rows):
            best, best_rows = range(start, start + PIECES_MAX), sum(counts)
    return best
