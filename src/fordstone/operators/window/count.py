"""Count windows: one row per window of a fixed number of rows of a key, in order of time.

Rows wait until the watermark passes them; then those of a key are numbered from 0 on, in order. Window w holds the rows
from w * slide to w * slide + size - 1, and is emitted when it has them all. A window that never fills is not emitted.

Rows are cut into panes at every number where a window begins or ends, so that a window is a whole number of panes and a
row is aggregated once however many windows it is in. State: the rows that wait; how many rows each key has had; the panes of each
key that windows still need, in a ring of as many places as a window has panes.

Windows are merged from blocks: a stretch of n panes is written in base `BRANCHES`, as blocks of 512 panes, then of 64, of 8, and single
ones. Blocks that begin at the same pane are shared, and only those that some window needs are made.

Invariants: a result is a function of its key's rows in order (sums of floats but for rounding), whatever the batches,
barriers, watermarks and restores; a row counts once, or leaves on the late port.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from fordstone.operators.aggregate.fragment import FIRST, LAST, Fragments
from fordstone.operators.base import Emit, Emits
from fordstone.operators.row_order import KeyedRows, Numbers, OrderedOperator, WaitingRows
from fordstone.plan.plan import Count
from fordstone.state.base import State, StateBackend

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
    """At which row of its level the block that begins at a pane stands; meaningless for those that are not needed."""
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
    inner: Numbers = blocks[:, None] + BRANCHES ** (level - 1) * np.arange(BRANCHES)
    return inner


_ROWS: Final = "__count"
"""How many rows a key has had."""
_PLACE: Final = "__place"
"""Where in its key's ring a pane lies: its number modulo the ring's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panes:
    """How rows are cut into panes, and which panes are a window. All numbers are from 0 on, for each key."""

    size: int
    slide: int

    @property
    def _stub(self) -> int:
        """How many rows a window reaches into the slide in which it ends; 0 if it ends where another begins."""
        return self.size % self.slide if self.slide < self.size else 0

    @property
    def step(self) -> int:
        """How many panes lie between the beginnings of two windows."""
        return 2 if self._stub else 1

    @property
    def length(self) -> int:
        return max(self.size // self.slide, 1) * self.step + (1 if self._stub else 0)

    def of_rows(self, rows: Numbers) -> Numbers:
        """The pane of each row; meaningless for rows in gaps."""
        slides = rows // self.slide
        return slides * 2 + (rows % self.slide >= self._stub) if self._stub else slides

    def hold(self, rows: Numbers) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows are in any window: with a slide above the size, some are not."""
        return np.asarray(rows % self.slide < self.size)

    def full(self, counts: Numbers) -> Numbers:
        """How many windows are full after `rows` rows: also the number of the first that is not."""
        return np.maximum(counts - self.size + self.slide, 0) // self.slide

    def needed(self, counts: Numbers) -> tuple[Numbers, Numbers]:
        """After `rows` rows: the first pane that a window still needs, and how many from there on have rows."""
        first = self.full(counts) * self.step
        last = self.of_rows(np.maximum(counts - 1, 0))
        return first, np.where(counts > 0, np.maximum(last - first + 1, 0), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Panes with rows, by key and number: `values` has a row for each."""

    keys: Numbers
    """The number of the key of each."""
    panes: Numbers
    firsts: Numbers
    lasts: Numbers
    values: pl.DataFrame


class CountAggregate(OrderedOperator):
    """One row per key and window, when the window is full."""

    def __init__(self, fragments: Fragments, window: Count, *, state: StateBackend) -> None:
        self._fragments = fragments
        self._panes = Panes(size=window.size, slide=window.slide)
        self._waiting = WaitingRows(
            fragments.keys, fragments.rows, time=fragments.time, read=fragments.read, state=state
        )
        key, types = fragments.state_key, fragments.key_types
        self._counts = state.table(key, schema=types | {_ROWS: pl.Int64()})
        self._table = state.table(key, schema=self._fragments.schema | {_PLACE: pl.Int64()}, sub_key=[_PLACE])

    def on_watermark(self, watermark_us: int) -> Emits:
        rows = self._waiting.release(watermark_us)
        if not rows.height:
            return []
        out = self._counted(self._waiting.by_key(rows))
        return [Emit(out)] if out.height else []

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state, "counts": self._counts, "panes": self._table}

    def _counted(self, found: KeyedRows) -> pl.DataFrame:
        keys = self._fragments.keys_of(found.keys)
        before = self._counts.get(keys).get_column(_ROWS).fill_null(0).to_numpy()
        after = before + found.counts
        new = self._of_rows(found, before)
        panes = self._with_kept(new, keys, before)
        self._keep(new, panes, keys, after)
        return self._windows(panes, keys, before, after)

    def _of_rows(self, found: KeyedRows, before: Numbers) -> _Stretch:
        key_numbers = found.key_numbers()
        starts = np.cumsum(found.counts) - found.counts
        row_numbers = np.arange(found.by_key.size) + np.repeat(before - starts, found.counts)
        rows, by_key = found.rows, found.by_key
        held = self._panes.hold(row_numbers)
        if not held.all():
            key_numbers, row_numbers, by_key = key_numbers[held], row_numbers[held], by_key[held]
        panes = self._panes.of_rows(row_numbers)
        begins = _differ(key_numbers, panes)
        at, ends = np.flatnonzero(begins), np.append(np.flatnonzero(begins)[1:], begins.size) - 1
        times = self._waiting.times(rows).take(by_key)
        if held.all():
            numbers = found.by_row(np.cumsum(begins) - 1)
        else:
            rows, numbers = rows[by_key], np.cumsum(begins) - 1
        return _Stretch(
            keys=key_numbers[at],
            panes=panes[at],
            firsts=times[at],
            lasts=times[ends] if at.size else times[:0],
            values=self._fragments.of_rows(rows, numbers),
        )

    def _with_kept(self, new: _Stretch, keys: pl.DataFrame, before: Numbers) -> _Stretch:
        """The panes that came, with those kept from before that windows need: a pane may have rows in both."""
        first, count = self._panes.needed(before)
        if not count.any():
            return new
        of_key = np.repeat(np.arange(count.size), count)
        pane = np.arange(of_key.size) + np.repeat(first - (np.cumsum(count) - count), count)
        kept = self._table.get(keys[of_key].hstack([pl.Series(_PLACE, pane % self._panes.length)]))
        both_keys, both_panes = np.concatenate([of_key, new.keys]), np.concatenate([pane, new.panes])
        order = np.lexsort((both_panes, both_keys))  # stable: what was kept stands before what came
        both_keys, both_panes = both_keys[order], both_panes[order]
        begins = _differ(both_keys, both_panes)
        numbers = np.empty_like(order)
        numbers[order] = np.cumsum(begins) - 1
        at, ends = np.flatnonzero(begins), np.append(np.flatnonzero(begins)[1:], begins.size) - 1
        firsts = np.concatenate([kept.get_column(FIRST).to_numpy(), new.firsts])[order]
        lasts = np.concatenate([kept.get_column(LAST).to_numpy(), new.lasts])[order]
        values = pl.concat([kept[self._fragments.values], new.values], rechunk=True)
        return _Stretch(
            keys=both_keys[at],
            panes=both_panes[at],
            firsts=firsts[at],
            lasts=lasts[ends],
            values=values[order] if begins.all() else self._fragments.merge(values, numbers),
        )

    def _keep(self, new: _Stretch, panes: _Stretch, keys: pl.DataFrame, after: Numbers) -> None:
        self._counts.put(keys.hstack([pl.Series(_ROWS, after)]))
        first, _ = self._panes.needed(after)
        # The last panes of each key are those that rows came to.
        touched = np.bincount(new.keys, minlength=after.size)
        in_all = np.bincount(panes.keys, minlength=after.size)
        from_end = np.cumsum(in_all)[panes.keys] - np.arange(panes.keys.size)
        changed = np.flatnonzero((from_end <= touched[panes.keys]) & (panes.panes >= first[panes.keys]))
        if not changed.size:
            return
        columns = [
            *keys[panes.keys[changed]].get_columns(),
            pl.Series(_PLACE, panes.panes[changed] % self._panes.length),
            pl.Series(FIRST, panes.firsts[changed]),
            pl.Series(LAST, panes.lasts[changed]),
            *panes.values[changed].get_columns(),
        ]
        self._table.put(pl.DataFrame(columns))

    def _windows(self, panes: _Stretch, keys: pl.DataFrame, before: Numbers, after: Numbers) -> pl.DataFrame:
        first = self._panes.full(before)
        count = self._panes.full(after) - first
        of_key = np.repeat(np.arange(count.size), count)
        window = np.arange(of_key.size) + np.repeat(first - (np.cumsum(count) - count), count)
        # Where each window's first pane stands: the panes of a key follow each other without a gap.
        base = np.searchsorted(panes.keys, of_key)
        start = base + window * self._panes.step - panes.panes[base]
        return self._fragments.finish(
            merged_stretches(self._fragments, panes.values, start, self._panes.length),
            keys=keys[of_key],
            starts=panes.firsts[start],
            ends=panes.lasts[start + self._panes.length - 1],
            windows=window,
        )


def _differ(keys: Numbers, panes: Numbers) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which are of another key or pane than the one before; the first is."""
    found = np.ones(keys.size, dtype=np.bool_)
    found[1:] = (keys[1:] != keys[:-1]) | (panes[1:] != panes[:-1])
    return found
