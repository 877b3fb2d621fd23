"""The recursions behind exponentially weighted means, for many keys at a time.

By count of values:  s = alpha * x + (1 - alpha) * s
By time:             w = 2 ** (-elapsed / half_life) * w + 1;  s = x / w + (1 - 1 / w) * s

By time, `w` is the weight of all values so far, the newest counting 1: the mean of values that all count by their age
alone, so that those of one time count alike. (With `1 - 2 ** ...` as the weight of the newest, in the manner of the first
line, a value would count the less the sooner it follows another, and nothing at the same time.)

Rounded after each product and after the sum, row after row: so what comes out does not depend on where the rows of a
key were cut, and a mean may be kept as one number and gone on from. A scan that regroups sums would be quicker on one
long key, but would round differently for every cut. Powers are made of sums and products too, which are the same on every
processor; libraries round theirs differently.

While many keys have rows left, the next row of each is done in one go: as many passes as the longest key has rows. When
few keys have (`NARROW_KEYS`), their rest is done key by key.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import numpy as np
import numpy.typing as npt

NARROW_KEYS: Final = 32
"""With fewer keys than this a pass over arrays takes longer than going through their rows one by one."""
_SHORT: Final = 2**16
"""Numbers below this are sorted by radix."""

_PARTS: Final = 64
"""A power of a half is looked up for so many parts of an exponent's unit; the rest is small."""
_HALVES_MAX: Final = 2000
"""So many times halved, every double is 0."""

Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

_PARTLY_HALVED: Final[Doubles] = np.array(
    [float(Decimal(2) ** (Decimal(-part) / _PARTS)) for part in range(_PARTS)], dtype=np.float64
)
_LN_2: Final = float(Decimal(2).ln())


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """One mean a key; `known` says whether the key has had a value yet."""

    values: Doubles
    known: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Decaying:
    """One mean a key, with the weight that it had at its last value, and the time of that."""

    means: Means
    weights: Doubles
    times_us: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of rows, those of one key together and in order; `valid` says which are not null (None: all are)."""

    values: Doubles
    valid: Mask | None


def smooth(rows: Values, counts: Rows, before: Means, alpha: float) -> tuple[Values, Means]:
    """The mean at each row, and the mean of each key behind its last row. `counts`: rows a key, none of them 0."""
    with np.errstate(all="ignore"):
        values, own = _without_nulls(rows, counts)
        out, after = _recur(values, values * alpha, 1.0 - alpha, own, before)
        return _around_nulls(out, own, rows.valid, counts, before), after


def smooth_by_time(
    rows: Values, times_us: Rows, counts: Rows, before: Decaying, half_life_us: int
) -> tuple[Values, Decaying]:
    """As `smooth`, for values that count half as much with every half-life. `times_us`: never falling within a key."""
    with np.errstate(all="ignore"):
        values, own = _without_nulls(rows, counts)
        times_us = times_us if rows.valid is None else times_us[rows.valid]
        held, first = own > 0, _starts(own)
        earlier_us = np.roll(times_us, 1)
        earlier_us[first[held]] = before.times_us[held]
        # As unsigned numbers: the difference of two times may be larger than a time.
        elapsed = (times_us.view(np.uint64) - earlier_us.view(np.uint64)).astype(np.float64)
        known = before.means.known
        ones = np.ones_like(values)
        weights, weights_after = _recur(
            ones, ones, halved(elapsed / half_life_us), own, Means(values=before.weights, known=known)
        )
        share = 1.0 / weights
        out, after = _recur(values, values * share, 1.0 - share, own, before.means)
        last_us = before.times_us.copy()
        last_us[held] = times_us[(first + own - 1)[held]]
        return (
            _around_nulls(out, own, rows.valid, counts, before.means),
            Decaying(means=after, weights=weights_after.values, times_us=last_us),
        )


def halved(times: Doubles) -> Doubles:
    """1, so many times halved: `2 ** -times`, for times of 0 and more, to about the last bit."""
    times = np.minimum(times, _HALVES_MAX)
    parts = np.rint(times * _PARTS)
    rest = (parts / _PARTS - times) * _LN_2
    power = rest / 5.0 + 1.0
    for divisor in (4.0, 3.0, 2.0, 1.0):
        power *= rest
        power /= divisor
        power += 1.0
    whole = parts.astype(np.int32)
    power *= _PARTLY_HALVED.take(whole % _PARTS)
    return np.ldexp(power, -(whole // _PARTS))


def _without_nulls(rows: Values, counts: Rows) -> tuple[Doubles, Rows]:
    """The values that are there, and how many each key has."""
    if rows.valid is None:
        return rows.values, counts
    return rows.values[rows.valid], np.add.reduceat(rows.valid, _starts(counts), dtype=np.int64)


def _around_nulls(out: Doubles, own: Rows, valid: Mask | None, counts: Rows, before: Means) -> Values:
    """The means at all rows, from those at the rows with a value: each null row gets the mean before it."""
    if valid is None:
        return Values(values=out, valid=None)
    # The last value at or before each row: one of the row's own key, or there is only what was before.
    last = np.cumsum(valid) - 1
    is_own = last >= np.repeat(_starts(own), counts)
    spread = np.repeat(before.values, counts)
    spread[is_own] = out[last[is_own]]
    return Values(values=spread, valid=is_own | np.repeat(before.known, counts))


def _recur(
    values: Doubles, added: Doubles, keep: Doubles | float, counts: Rows, before: Means
) -> tuple[Doubles, Means]:
    """`s = added + keep * s` at each row, for keys with any number of rows; the first value of a key is its first `s`."""
    out = np.empty_like(values)
    means, starts, left = before.values.copy(), _starts(counts), counts.copy()
    fresh = np.flatnonzero(~before.known & (counts > 0))
    if fresh.size:
        first = starts[fresh]
        out[first] = means[fresh] = values[first]
        starts[fresh] += 1
        left[fresh] -= 1
    _go_on(added, out, means, starts, left, keep)
    return out, Means(values=means, known=before.known | (counts > 0))


def _go_on(added: Doubles, out: Doubles, means: Doubles, starts: Rows, left: Rows, keep: Doubles | float) -> None:
    """Take `left` rows of each key from `starts` on into its mean, and write each mean on the way to `out`."""
    longest = int(left.max(initial=0))
    by_length = _longest_first(left, longest)
    # How many keys have a row in each pass: the first so many in the order of length.
    widths = left.size - np.cumsum(np.bincount(left, minlength=longest + 1)[:longest])
    passes = int(np.searchsorted(-widths, -NARROW_KEYS, "right"))
    at, now = starts[by_length], means[by_length]
    for width in widths[:passes].tolist():
        here, mean = at[:width], now[:width]
        mean *= keep if isinstance(keep, float) else keep.take(here)
        mean += added.take(here)
        out[here] = mean
        here += 1
    if passes < longest:
        width = int(widths[passes])
        ends = (starts + left)[by_length[:width]]
        for key, (start, end) in enumerate(zip(at[:width].tolist(), ends.tolist(), strict=True)):
            last, xs = float(now[key]), added[start:end].tolist()
            if isinstance(keep, float):
                out[start:end] = [last := x + keep * last for x in xs]
            else:
                out[start:end] = [last := x + k * last for x, k in zip(xs, keep[start:end].tolist(), strict=True)]
            now[key] = last
    means[by_length] = now


def _longest_first(left: Rows, longest: int) -> Rows:
    """The keys in order of how many rows they have, most first."""
    fewer = longest - left
    return (fewer.astype(np.uint16) if longest < _SHORT else fewer).argsort(kind="stable")


def _starts(counts: Rows) -> Rows:
    starts: Rows = np.cumsum(counts) - counts
    return starts
