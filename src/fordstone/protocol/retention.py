"""Decide which checkpoints and runs are removed. Pure.

`epochs.store` and `epochs.copies` gather the facts and carry out the removal, manifests first.

Invariants: a run stays while a kept manifest names it, or while it is held; the newest manifest always stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


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
    acknowledged: int | None = None,
    held: AbstractSet[str] = frozenset(),
) -> Retention:
    """Keep the last `keep` manifests, the pinned ones (being uploaded), and the newest one that the hub acknowledged.

    `manifests` maps every epoch to the digests it names, `runs` are the digests that exist, `held` are digests that are
    being written or will be named by a manifest soon. `acknowledged` is the newest epoch that the hub has.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint must be kept")
    epochs = sorted(manifests)
    kept = set(epochs[-keep:]) | (pinned & manifests.keys())
    if acknowledged is not None:
        kept.update([epoch for epoch in epochs if epoch <= acknowledged][-1:])
    named: set[str] = set(held)
    for epoch in kept:
        named |= manifests[epoch]
    return Retention(
        kept=tuple(sorted(kept)),
        remove_manifests=tuple(epoch for epoch in epochs if epoch not in kept),
        remove_runs=tuple(sorted(runs - named)),
    )
