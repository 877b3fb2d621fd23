"""Merge many overlapping stretches of panes, all of one length, without merging what they share again and again.

A stretch of n panes is written in base `BRANCHES`: so many blocks of 512 panes, then of 64, of 8, and single ones. A block is
merged from `BRANCHES` blocks of the next smaller length. Blocks that begin at the same pane are the same, whichever
stretches they are in, and only those that some stretch needs are made. So one stretch alone costs what it has panes, and
stretches that begin at every pane cost a few merges each.

How a stretch is taken apart depends on its length alone, and not on which others are wanted.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from fordstone.operators.fragment import Fragments
from fordstone.operators.row_order import Numbers

BRANCHES: Final = 8
"""How many blocks are merged into one of the next length."""


def merged_stretches(fragments: Fragments, panes: pl.DataFrame, starts: Numbers, length: int) -> pl.DataFrame:
    """For each of `starts`, the `length` panes from that row on, as one partial row."""
    if length == 1 or not starts.size:
        return panes[starts]
    parts = _parts(length)
    made, rows_above = [panes], 0
    """The blocks of each level, those of level 0 being all panes."""
    blocks = _wanted(starts, parts, panes.height)
    where, of_starts = np.arange(panes.height), []
    """At which row of its level the block that begins at a pane stands; meaningless for those that nobody needs."""
    for level, offsets in enumerate(parts):
        if level:
            inner = where[_inner(blocks[level], level).ravel()]
            numbers = np.repeat(np.arange(blocks[level].size), BRANCHES)
            made.append(fragments.merge(made[-1][inner], numbers))
            where = np.empty_like(where)
            where[blocks[level]] = np.arange(blocks[level].size)
        of_starts.append(rows_above + where[starts[:, None] + offsets])
        rows_above += made[-1].height
    # The longest blocks come first in a stretch: so partial rows are merged in the order of their panes.
    found = np.hstack(of_starts[::-1])
    return fragments.merge(
        pl.concat(made, rechunk=True)[found.ravel()], np.repeat(np.arange(starts.size), found.shape[1])
    )


def _parts(length: int) -> list[Numbers]:
    """For each level, at which distances from the beginning of a stretch its blocks begin: the longest blocks first."""
    digits, rest = [], length
    while rest:
        rest, digit = divmod(rest, BRANCHES)
        digits.append(digit)
    parts, at = [], 0
    for level in reversed(range(len(digits))):
        block = BRANCHES**level
        parts.append(at + block * np.arange(digits[level]))
        at += block * digits[level]
    return parts[::-1]


def _wanted(starts: Numbers, parts: list[Numbers], panes: int) -> list[Numbers]:
    """For each level but the lowest, where blocks begin that are needed, ascending: by stretches, or by longer blocks."""
    found: list[Numbers] = []
    for level in reversed(range(1, len(parts))):
        needed = np.zeros(panes, dtype=np.bool_)
        needed[starts[:, None] + parts[level]] = True
        if found:
            needed[_inner(found[-1], level + 1)] = True
        found.append(np.flatnonzero(needed))
    return [starts, *reversed(found)]


def _inner(blocks: Numbers, level: int) -> Numbers:
    """Where the blocks begin that those of a level are made of."""
    inner: Numbers = blocks[:, None] + BRANCHES ** (level - 1) * np.arange(BRANCHES)
    return inner
