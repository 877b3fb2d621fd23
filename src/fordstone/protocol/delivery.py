"""Decide what becomes of a commit: epochs a to b of a node, handed to the hub.

Reads nothing: the hub brings the facts and carries the decision out in one transaction.

Invariants: epochs at the hub have no gaps; what stands there never changes; a range that was folded anew after a lost
answer adds only what is new; nothing below the granted fence is accepted, not even what is there already, so that a
node that was shut out learns of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fordstone.protocol.lease import Fence


class Sent(NamedTuple):
    """One epoch as it came: its number and what tells its content from any other."""

    epoch: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Everything from `first_new` on is new and follows what is there."""

    first_new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyDone:
    """All of it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherContent:
    """This epoch is there, and is not the same."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Epochs are missing in between."""

    next_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A newer generation has the right to commit."""

    by: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class NotGranted:
    """The hub never gave this generation out: a lease must be asked for first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """These blobs must come first."""

    digests: tuple[str, ...]


CommitDecision: TypeAlias = Accept | AlreadyDone | OtherContent | Gap | Stale | NotGranted | Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts:
    """What the decision rests on."""

    fence: Fence
    """The sender's."""
    granted: Fence | None
    """What the hub gave out last."""
    head: int
    """The newest epoch that is there; 0: none."""
    sent: tuple[Sent, ...]
    """At least one, contiguous, in order."""
    known: Mapping[int, str]
    """Digests of epochs that are there. Below some epoch they are forgotten: what came so long ago is taken to be the same."""


def decide_order(facts: CommitFacts) -> CommitDecision:
    """Judge all but the blobs: who sends, and whether it fits behind what is there."""
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
    """Judge a commit of which the blobs `absent` are not at the hub (of those that its new epochs and checkpoint name).

    Who sends and in which order counts before the blobs: nobody uploads for a commit that could not be accepted.
    """
    decision = decide_order(facts)
    if isinstance(decision, Accept) and absent:
        return Missing(digests=tuple(sorted(absent)))
    return decision
