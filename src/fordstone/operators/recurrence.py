"""The recursion behind exponentially weighted means, for many keys at a time.

    s = alpha * x + (1 - alpha) * s

Rounded after each product and after the sum, row after row: so what comes out does not depend on where the rows of a
key were cut, and a mean may be kept as one number and gone on from. A scan that regroups sums would be quicker on one
long key, but would round differently for every cut.

While many keys have rows left, the next row of each is done in one go: as many passes as the longest key has rows. When
few keys have (`NARROW_KEYS`), their rest is done key by key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

NARROW_KEYS: Final = 32
"""With fewer keys than this a pass over arrays takes longer than going through their rows one by one."""
_SHORT: Final = 2**16
"""Numbers below this are sorted by radix."""

Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """One mean a key; `known` says whether the key has had a value yet."""

    values: Doubles
    known: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of rows, those of one key together and in order; `valid` says which are not null (None: all are)."""

    values: Doubles
    valid: Mask | None


def smooth(rows: Values, counts: Rows, before: Means, alpha: float) -> tuple[Values, Means]:
    """The mean at each row, and the mean of each key behind its last row. `counts`: rows a key, none of them 0."""
    with np.errstate(all="ignore"):
        if rows.valid is None:
            out, after = _smooth_values(rows.values, counts, before, alpha)
            return Values(values=out, valid=None), after
        return _smooth_around_nulls(rows.values, rows.valid, counts, before, alpha)


def _smooth_around_nulls(
    values: Doubles, valid: Mask, counts: Rows, before: Means, alpha: float
) -> tuple[Values, Means]:
    """As if the null rows were not there; each of them gets the mean before it."""
    valid_counts = np.add.reduceat(valid, _starts(counts), dtype=np.int64)
    out, after = _smooth_values(values[valid], valid_counts, before, alpha)
    # The last value at or before each row: one of the row's own key, or there is only what was before.
    last = np.cumsum(valid) - 1
    own = last >= np.repeat(_starts(valid_counts), counts)
    spread = np.repeat(before.values, counts)
    spread[own] = out[last[own]]
    return Values(values=spread, valid=own | np.repeat(before.known, counts)), after


def _smooth_values(values: Doubles, counts: Rows, before: Means, alpha: float) -> tuple[Doubles, Means]:
    """The recursion without nulls; a key may have no rows."""
    out = np.empty_like(values)
    means, starts, left = before.values.copy(), _starts(counts), counts.copy()
    fresh = np.flatnonzero(~before.known & (counts > 0))
    if fresh.size:
        first = starts[fresh]
        out[first] = means[fresh] = values[first]
        starts[fresh] += 1
        left[fresh] -= 1
    _go_on(values * alpha, out, means, starts, left, 1.0 - alpha)
    return out, Means(values=means, known=before.known | (counts > 0))


def _go_on(weighted: Doubles, out: Doubles, means: Doubles, starts: Rows, left: Rows, keep: float) -> None:
    """Take `left` rows of each key from `starts` on into its mean, and write each mean on the way to `out`."""
    longest = int(left.max(initial=0))
    by_length = _longest_first(left, longest)
    # How many keys have a row in each pass: the first so many in the order of length.
    widths = left.size - np.cumsum(np.bincount(left, minlength=longest + 1)[:longest])
    passes = int(np.searchsorted(-widths, -NARROW_KEYS, "right"))
    at, now = starts[by_length], means[by_length]
    for width in widths[:passes].tolist():
        here, mean = at[:width], now[:width]
        mean *= keep
        mean += weighted.take(here)
        out[here] = mean
        here += 1
    if passes < longest:
        width = int(widths[passes])
        ends = (starts + left)[by_length[:width]]
        for key, (start, end) in enumerate(zip(at[:width].tolist(), ends.tolist(), strict=True)):
            last = float(now[key])
            out[start:end] = [last := x + keep * last for x in weighted[start:end].tolist()]
            now[key] = last
    means[by_length] = now


def _longest_first(left: Rows, longest: int) -> Rows:
    """The keys in order of how many rows they have, most first."""
    fewer = longest - left
    return (fewer.astype(np.uint16) if longest < _SHORT else fewer).argsort(kind="stable")


def _starts(counts: Rows) -> Rows:
    starts: Rows = np.cumsum(counts) - counts
    return starts
