"""Decide which checkpoints and runs are removed at a node, which unread commits at the hub, and what its log gives back. Pure.

`epochs.store` and `epochs.copies` gather the facts and carry out the removal, manifests first. `hub.store.retention` does for the hub.

Invariants: a run stays while a kept manifest names it, or while it is held; the newest manifest always stays. An unread commit is
removed by the time that the hub has run since it received it: clocks that are set, forward or back, remove nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, NamedTuple

MARKS: Final = 100
"""Parts of the time for which unread commits are kept: they are removed at most one part later."""
FREE_PAGES_KEPT: Final = 4_096
"""Free pages of the hub's log that stay in its file, because writing to them is cheaper than growing the file again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep and to remove. Manifests are removed first, durably, from the oldest on."""

    kept: tuple[int, ...]
    remove_manifests: tuple[int, ...]
    remove_runs: tuple[str, ...]


def decide_retention(
    manifests: Mapping[int, AbstractSet[str]],
    runs: AbstractSet[str],
    *,
    keep: int,
    pinned: AbstractSet[int] = frozenset(),
    acknowledged: Collection[int] = (),
    held: Iterable[str] = (),
) -> Retention:
    """Keep the last `keep` manifests, the pinned ones (being uploaded), and the newest one that each copy has acknowledged.

    `manifests` maps every epoch to the digests it names, `runs` are the digests that exist, `held` are digests that are
    being written or will be named by a manifest soon. `acknowledged` are the newest epochs that the hub and the remote have.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint must be kept")
    epochs = sorted(manifests)
    kept = set(epochs[-keep:]) | (pinned & manifests.keys())
    for newest in acknowledged:
        kept.update([epoch for epoch in epochs if epoch <= newest][-1:])
    # In place: after a month without the hub, millions of runs are held.
    unnamed = set(runs)
    for epoch in kept:
        unnamed -= manifests[epoch]
    unnamed.difference_update(held)
    return Retention(
        kept=tuple(sorted(kept)),
        remove_manifests=tuple(epoch for epoch in epochs if epoch not in kept),
        remove_runs=tuple(sorted(unnamed)),
    )


def pages_to_cut(*, pages: int, free: int, short_of_space: bool) -> int:
    """Return how many free pages of the hub's log are cut off its file.

    Usually the file may be twice as large as its content, so that a steady load moves no pages. All free pages are cut off while
    the disk is short of space: other files need it.
    """
    return free if short_of_space else max(0, free - max(FREE_PAGES_KEPT, pages // 2))


class Mark(NamedTuple):
    """A moment of the hub's running time, and the newest commit at it."""

    ran_us: int
    seq: int


def is_mark_due(marks: Sequence[Mark], *, ran_us: int, keep_us: int) -> bool:
    """Return whether the present moment becomes a mark. `marks` are in order of time; `ran_us` is the present one."""
    return not marks or ran_us - marks[-1].ran_us >= max(1, keep_us // MARKS)


def expired_mark(marks: Sequence[Mark], *, ran_us: int, keep_us: int) -> Mark | None:
    """Return the newest mark that is at least `keep_us` old. Commits up to it are as old; None: none is."""
    return max((mark for mark in marks if ran_us - mark.ran_us >= keep_us), default=None)
