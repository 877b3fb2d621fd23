"""Decide whether the hub accepts a commit, which is a range of epochs of one node. Pure.

The hub gathers the facts and carries the decision out in one transaction.

Invariants: epochs at the hub have no gaps and never change; a commit that overlaps with what is there, as after a lost
response, adds only the new epochs; nothing below the granted fence is accepted, not even epochs that are there already, so
that a fenced node learns of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fordstone.protocol.lease import Fence


class Sent(NamedTuple):
    """One epoch of a commit: its number and the digest of its content."""

    epoch: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """All epochs from `first_new` on are new, and follow the newest that is there."""

    first_new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyDone:
    """All epochs are there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherContent:
    """This epoch is there with other content."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Epochs between are missing."""

    next_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A newer generation has the lease."""

    by: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class NotGranted:
    """The hub never granted this generation: the node must request a lease first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """These blobs must be uploaded first."""

    digests: tuple[str, ...]


CommitDecision: TypeAlias = Accept | AlreadyDone | OtherContent | Gap | Stale | NotGranted | Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts:
    """The facts that decide."""

    fence: Fence
    """The fence of the sender."""
    granted: Fence | None
    """The fence that the hub granted last."""
    head: int
    """The newest epoch that is there; 0: none."""
    sent: tuple[Sent, ...]
    """At least one, contiguous, in order."""
    known: Mapping[int, str]
    """Digests of epochs that are there. Those of old epochs are not kept; their content is assumed to be the same."""


def decide_order(facts: CommitFacts) -> CommitDecision:
    """Judge the fence and the order of epochs, but not the blobs."""
    if facts.granted is None or facts.fence > facts.granted:
        return NotGranted()
    if facts.fence < facts.granted:
        return Stale(by=facts.granted)
    for sent in facts.sent:
        if sent.epoch <= facts.head and facts.known.get(sent.epoch, sent.digest) != sent.digest:
            return OtherContent(epoch=sent.epoch)
    if facts.sent[-1].epoch <= facts.head:
        return AlreadyDone()
    if facts.sent[0].epoch > facts.head + 1:
        return Gap(next_epoch=facts.head + 1)
    return Accept(first_new=facts.head + 1)


def decide_commit(facts: CommitFacts, *, absent: Collection[str]) -> CommitDecision:
    """Judge a commit. `absent`: the blobs of its new epochs and checkpoint that are not at the hub.

    Fence and order are judged before blobs, so no blobs are uploaded for a commit that would be rejected.
    """
    decision = decide_order(facts)
    if isinstance(decision, Accept) and absent:
        return Missing(digests=tuple(sorted(absent)))
    return decision
