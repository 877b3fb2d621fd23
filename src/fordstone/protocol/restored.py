"""What a restore from a backup changes in a hub's log: its id, and the numbers that it gives. Pure.

A log id is `<family>.<word>`. A restore keeps the family and makes another word, so a node that keeps an id can tell a restored log from
another hub's, however often and from whichever backup it was restored.

Invariants: what was numbered since the backup has smaller numbers than anything after the restore, and so has what was numbered after
an earlier restore of the same backup, unless the clock goes back or more than a million numbers are given per second.
"""

from __future__ import annotations

from typing import Final

NUMBERS_SKIPPED: Final = 1_000
"""Numbers grow by a multiple of this with a restore."""


def family_of(log_id: str) -> str:
    """Return the part of a log id that restores keep."""
    return log_id.partition(".")[0]


def is_former(known: str, own: str) -> bool:
    """Whether the log that is called `own` was called `known` before it was restored. Empty: no log is known."""
    return known not in {"", own} and family_of(known) == family_of(own)


def number_after_restore(number: int, *, now_us: int) -> int:
    """Return the number from which a restored log goes on. It differs from `number` by a multiple of `NUMBERS_SKIPPED`.

    It depends on the time, because two restores of one backup begin with the same numbers.
    """
    return max(number // NUMBERS_SKIPPED + 1, now_us // 1_000) * NUMBERS_SKIPPED + number % NUMBERS_SKIPPED
