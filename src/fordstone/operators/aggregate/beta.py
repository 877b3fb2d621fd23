"""The Beta distribution of a success rate: its mean and its quantiles, for many keys at a time.

All is done on the scale `t = log(x / (1 - x))`, on which the density `x ** a * (1 - x) ** b / B(a, b)` has one summit, at `log(a / b)`,
and falls ever more steeply from it, so that neither end of the rates from 0 to 1 is special. The probability below a point is the
integral from there outwards, on the side away from the summit (or what that leaves of 1), by Gauss's rule up to where the density is
nothing. Newton's method (with Halley's correction) on the logarithm of the probability, which bends one way only, gets to the point
from anywhere. Densities are compared as `a * s - (a + b) * log(1 + x * (exp(s) - 1))`, the change from a point `x` on the way of `s`:
sums of large logarithms would lose as many digits as `a` and `b` have.

SciPy has such quantiles, but it would be a large dependency for a gateway. Accurate to about 1e-10 of a rate for `a` and `b` from 0.001 to 1e9; every value depends on its own arguments alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NODES: Final = 40
"""Points of Gauss's rule."""
NOTHING: Final = 40.0
"""Where the density has fallen by a factor of exp(this), the tail ends."""
STEPS_MAX: Final = 60
"""Of Newton's method. Mostly 3 or 4 are needed."""
REACH_STEPS: Final = 5
"""Of Newton's method, to find where the tail ends; it need not be exact."""
CLOSE: Final = 1e-4
"""The step is the last that sets out so close to the logarithm of the probability: what it leaves is the cube of that."""
BLOCK: Final = 1024
"""Number of quantiles computed at a time, so that intermediate arrays stay in the processor's cache."""
_FAR: Final = 30.0
_NEAR: Final = 0.5
_STIRLING_FROM: Final = 10.0
_STIRLING: Final = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_POINTS, _SHARES = np.polynomial.legendre.leggauss(NODES)


def beta_means(a: Doubles, b: Doubles) -> Doubles:
    """The mean of each Beta(a, b)."""
    return a / (a + b)


def beta_low(a: Doubles, b: Doubles, level: float) -> Doubles:
    """The lower end of the interval in which each Beta(a, b) lies with the probability `level`, equal tails apart."""
    return beta_quantiles(a, b, (1.0 - level) / 2)


def beta_high(a: Doubles, b: Doubles, level: float) -> Doubles:
    """The upper end of it."""
    return beta_quantiles(a, b, (1.0 - level) / 2, above=True)


def beta_quantiles(a: Doubles, b: Doubles, probability: float, *, above: bool = False) -> Doubles:
    """The rate below which each Beta(a, b) lies with this probability; `above`: above which.

    `a` and `b` are larger than 0, the probability lies above 0 and is at most 0.5. Equal arguments, as counts mostly are,
    are computed once.
    """
    if above:
        a, b = b, a
    # As complex numbers, pairs are compared in one go.
    pairs, inverse = np.unique(a + 1j * b, return_inverse=True)
    found = np.empty(pairs.size)
    with np.errstate(all="ignore"):
        for start in range(0, pairs.size, BLOCK):
            block = pairs[start : start + BLOCK]
            logits = _quantile_logits(_Beta.of(block.real.copy(), block.imag.copy()), probability)
            found[start : start + BLOCK] = _rate(-logits if above else logits)
    return found[inverse]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beta:
    """Distributions, and what is the same at all their points."""

    a: Doubles
    b: Doubles
    summit: Doubles
    """On the scale of `t`."""
    log_top: Doubles
    """The logarithm of the density there."""

    @classmethod
    def of(cls, a: Doubles, b: Doubles) -> _Beta:
        # log(a / b) to the last digit where both are nearly the same.
        ratio = (a - b) / b
        summit = np.where(np.abs(ratio) < _NEAR, np.log1p(ratio), np.log(a) - np.log(b))
        # Stirling's formula for the three gammas of B(a, b); its large parts cancel at the summit.
        # Sizes are taken apart, as a * b may be too large or too small for a double.
        top = 0.5 * (np.log(a) + np.log(b) - np.log(a + b) - log(2 * pi))
        return cls(a=a, b=b, summit=summit, log_top=top + _stirling(a + b) - _stirling(a) - _stirling(b))

    def at(self, rows: npt.NDArray[np.int64]) -> _Beta:
        return _Beta(a=self.a[rows], b=self.b[rows], summit=self.summit[rows], log_top=self.log_top[rows])

    def log_density(self, t: Doubles) -> Doubles:
        return self.log_top + _change(self.a, self.b, self.summit, t - self.summit)

    def below(self, t: Doubles) -> tuple[Doubles, Doubles]:
        """Of the probability below points: its logarithm, and how steep that is."""
        log_density = self.log_density(t)
        right = t > self.summit
        tail = _tail(self.a, self.b, t, right)
        small = np.minimum(self.a, self.b) < 1
        if small.any():
            # I(a, b) = I(a + 1, b + 1) + density * ((1 - x) / a - x / b): slow tails are left to the second term.
            a, b, x, y = self.a, self.b, _rate(t), _rate(-t)
            right_of_larger = t > np.log(a + 1) - np.log(b + 1)
            larger = x * y * (a + b) / a * (a + b + 1) / b * _tail(a + 1, b + 1, t, right_of_larger)
            rest = y / a - x / b
            tail = np.where(small, np.where(right_of_larger, larger - rest, larger + rest), tail)
            right = np.where(small, right_of_larger, right)
        left_of_one = 1.0 - np.exp(log_density) * tail
        log_below = np.where(right, np.log(left_of_one), log_density + np.log(tail))
        return log_below, np.where(right, np.exp(log_density) / left_of_one, 1.0 / tail)


def _tail(a: Doubles, b: Doubles, t: Doubles, right: Mask) -> Doubles:
    """The probability beyond points on the side away from the summit, as a multiple of the density at the points."""
    # On the right, the mirror image: what is integrated is always on the left of the summit, leftwards.
    a, b, t = np.where(right, b, a), np.where(right, a, b), np.where(right, -t, t)
    reach = _reach(a, b, t)
    ways = np.multiply.outer(-0.5 * (_POINTS + 1), reach)
    densities = _change(a, b, t, ways)
    np.exp(densities, out=densities)
    # One product after the other: a matrix product would round differently for every size.
    tail = np.zeros_like(t)
    for share, at_point in zip(_SHARES.tolist(), densities, strict=True):
        tail += share * at_point
    return 0.5 * reach * tail


def _reach(a: Doubles, b: Doubles, t: Doubles) -> Doubles:
    """How far left of a point that is left of the summit the density is nothing.

    The logarithm of the density is concave: Newton's method comes back from beyond, step by step, and never too far.
    """
    x = _rate(t)
    slope, bend = a - (a + b) * x, (a + b) * x * (1 - x)
    reach = 2 * NOTHING / (slope + np.sqrt(slope * slope + 2 * NOTHING * bend))
    for _ in range(REACH_STEPS):
        reach += (NOTHING + _change(a, b, t, -reach)) / (a - (a + b) * _rate(t - reach))
    return reach


def _change(a: Doubles, b: Doubles, t: Doubles, s: Doubles) -> Doubles:
    """By how much the logarithm of the density changes from `t` to `t + s`."""
    # From the smaller of x and 1 - x: of the larger one, what is missing to 1 would be lost.
    mirrored = t > 0
    a_here = np.where(mirrored, b, a)
    off = np.abs(t)
    way = s * np.where(mirrored, -1.0, 1.0)
    if way.max(initial=0.0) > _FAR:
        # log(1 + x * (exp(way) - 1)) where exp(way) may be too large.
        grown = np.log1p(_rate(-off) * np.expm1(np.minimum(way, _FAR)))
        grown = np.where(way > _FAR, np.logaddexp(0.0, way - off) - np.log1p(np.exp(-off)), grown)
    else:
        grown = np.expm1(way)
        grown *= _rate(-off)
        np.log1p(grown, out=grown)
    grown *= a + b
    way *= a_here
    way -= grown
    return way


def _quantile_logits(beta: _Beta, probability: float) -> Doubles:
    """Where each distribution has this probability (at most 0.5) below."""
    wanted = log(probability)
    t = _first_guess(beta, probability)
    open_rows = np.arange(t.size)
    for _ in range(STEPS_MAX):
        here = beta if open_rows.size == t.size else beta.at(open_rows)
        at = t[open_rows]
        log_below, slope = here.below(at)
        missing = wanted - log_below
        bend = here.a * _rate(-at) - here.b * _rate(at) - slope
        step = missing / slope
        step /= np.maximum(1.0 + 0.5 * step * bend, 0.5)
        # From far right, where the slope is nothing, back in steps that double.
        bound = 5.0 + np.abs(at)
        t[open_rows] = at + np.clip(step, -bound, bound)
        open_rows = open_rows[np.abs(missing) > CLOSE]
        if not open_rows.size:
            break
    return t


def _first_guess(beta: _Beta, probability: float) -> Doubles:
    """Near the point: from the normal distribution, or for small `a` or `b` from how the tails begin."""
    a, b = beta.a, beta.b
    z = -NormalDist().inv_cdf(probability)
    u, v = 1 / (2 * a - 1), 1 / (2 * b - 1)
    h, bent = 2 / (u + v), (z * z - 3) / 6
    w = z * np.sqrt(np.maximum(h + bent, 0.0)) / h - (v - u) * (bent + 5 / 6 - 2 / (3 * h))
    # As if the tails x ** a and (1 - x) ** b met at the summit.
    left, right = np.exp(a * np.log(a / (a + b))) / a, np.exp(b * np.log(b / (a + b))) / b
    whole = left + right
    log_x, log_y = np.log(a * whole * probability) / a, np.log(b * whole * (1 - probability)) / b
    by_left, by_right = log_x - np.log1p(-np.exp(log_x)), np.log1p(-np.exp(log_y)) - log_y
    by_tails = np.where(probability < left / whole, by_left, by_right)
    return np.where((a > 1) & (b > 1), beta.summit - 2 * w, by_tails)


def _rate(t: Doubles) -> Doubles:
    return 1.0 / (1.0 + np.exp(-t))


def _stirling(z: Doubles) -> Doubles:
    """What Stirling's formula for the logarithm of gamma(z) leaves out."""
    small = z < _STIRLING_FROM
    y = np.where(small, z + _STIRLING_FROM, z)
    inverse = 1.0 / y
    square, left_out = inverse * inverse, np.zeros_like(y)
    for term in reversed(_STIRLING):
        left_out = left_out * square + term
    left_out *= inverse
    if not small.any():
        return left_out
    # gamma(z) = gamma(z + 10) / (z * (z + 1) * ... * (z + 9)), and the difference of the formula between the two.
    product = z.copy()
    for number in range(1, int(_STIRLING_FROM)):
        product *= z + number
    formula = (y - 0.5) * np.log(y) - y - ((z - 0.5) * np.log(z) - z)
    return np.where(small, left_out + formula - np.log(product), left_out)
