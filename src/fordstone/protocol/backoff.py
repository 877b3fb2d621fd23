"""How long to wait before a retry: exponential back-off with a cap and jitter. Pure: the caller draws the random number.

With jitter, a thousand nodes that lost the hub together do not all come back at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass

_EXPONENT_MAX = 62
"""Bounds the power, so that a night of failures does not build a number with a thousand digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The waits of one kind of retry."""

    first_us: int
    max_us: int
    factor: int = 2
    jitter: float = 0.5
    """The share of each wait that is random: 0.5 waits between half and all of it, 0 always all of it."""
    retry_after_max_us: int = 600_000_000
    """The longest wait that a server may ask for."""

    def wait_us(self, failures: int, *, chance: float, retry_after_us: int | None = None) -> int:
        """Return the wait after this number of failures in a row, counted from 1.

        `chance` is a random number from 0 to 1; 1 gives the longest wait. The wait is at least `retry_after_us`, which
        the server asked for, up to `retry_after_max_us`.
        """
        grown_us: int = self.first_us * self.factor ** min(max(failures - 1, 0), _EXPONENT_MAX)
        full_us = min(self.max_us, grown_us)
        wait_us = full_us - round(full_us * self.jitter * (1.0 - chance))
        if retry_after_us is None:
            return wait_us
        return max(wait_us, min(retry_after_us, self.retry_after_max_us))

    def wait_s(self, failures: int, *, chance: float, retry_after_s: float | None = None) -> float:
        """Return the same in seconds."""
        asked_us = None if retry_after_s is None else int(retry_after_s * 1e6)
        return self.wait_us(failures, chance=chance, retry_after_us=asked_us) / 1e6
