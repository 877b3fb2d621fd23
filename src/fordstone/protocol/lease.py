"""Decide which state directory may commit for a pipeline on a node. Pure.

The hub gathers what it has granted and what is requested, and stores the outcome before it responds.

A copy of a state directory, as from a backup or a cloned machine, has the same holder as the original. What it cannot have shows
the difference: the newest epoch that the original has committed. So a later start of a holder must name the hub's head and the chain at it.

Invariants: a fence never decreases; two holders never have the same hub generation; two starts of one holder never have the same
fence; a copy without the newest epoch never gets the lease, however often it is started, unless it takes over on purpose; a request
that is repeated after a lost response gets the same fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from fordstone.protocol.restored import NUMBERS_SKIPPED


class Fence(NamedTuple):
    """A generation in the order of comparison: the hub's number first, then the local incarnation (rule 18)."""

    hub: int
    local: int


NO_FENCE: Final = Fence(0, 0)
"""Of one that never had a generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """This holder now has the lease."""

    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldByOther:
    """Another state directory has the lease, and the request does not take it over."""

    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderIncarnation:
    """The same state directory was started since: this process is an old one, or the directory is a copy."""

    by: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class NotHead:
    """The request does not name the head. The head has moved since the node looked, or the state directory is an old copy."""

    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """Another holder has committed since this one had the lease, before or after the hub was restored: this one's epochs do not follow."""

    by: Fence


LeaseDecision: TypeAlias = Granted | HeldByOther | OlderIncarnation | NotHead | Superseded


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The last lease that was granted."""

    holder: str
    fence: Fence
    start: str | None
    """The random word of the start that got it; None: the hub was restored from a backup since, and the lease has ended."""


class Position(NamedTuple):
    """A node's newest epoch, and the chain at it."""

    epoch: int
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """A request, and what the hub has."""

    holding: Holding | None
    """None: no lease was ever granted."""
    head: Position
    """At the hub."""
    holder: str
    local: int
    start: str
    claimed: Position
    """The newest epoch that the node says it has in common with the hub."""
    granted: int = 0
    """The hub generation that the requesting directory was granted last; 0: none."""
    restored: bool = False
    """The epochs of this node were acknowledged by the hub's log before that was restored from a backup."""
    resync: bool = False
    """The hub was restored, and nothing was committed since: it takes epochs that do not follow its head."""
    take_over: bool = False
    first: int = 1
    """The hub generation of a node that never had one. In a restored log it is larger than those that were given since the backup."""

    @property
    def knows_head(self) -> bool:
        return self.claimed == self.head

    @property
    def is_superseded(self) -> bool:
        """Whether the later epochs of the request do not follow those of a restored log.

        Either somebody has gone on from the log's head since the restore, perhaps a copy of the same directory, or the log has a lease of
        another holder that is not older than the last one of this one. The number of take-overs shows the latter: restores add only
        multiples of `NUMBERS_SKIPPED`.
        """
        if self.holding is None or self.claimed.epoch <= self.head.epoch:
            return False
        if self.holding.start is not None:
            return not self.resync
        return (
            self.holding.holder != self.holder
            and self.granted % NUMBERS_SKIPPED <= self.holding.fence.hub % NUMBERS_SKIPPED
        )


def decide_lease(facts: LeaseFacts) -> LeaseDecision:
    """Judge one request. A request that is repeated by the same start changes nothing."""
    holding = facts.holding
    if holding is None:
        return Granted(fence=Fence(facts.first, facts.local))
    known = holding.fence
    if holding.holder == facts.holder:
        if (facts.local, facts.start) == (known.local, holding.start):
            return Granted(fence=known)
        newer = facts.local > known.local or (facts.local == known.local and holding.start is None)
        # A hub that was restored may have lost the newest epochs; the holder that has them may commit, if nobody has gone on since.
        ahead = facts.restored and facts.resync and facts.claimed.epoch > facts.head.epoch
        if newer and (facts.knows_head or ahead):
            return Granted(fence=Fence(known.hub, facts.local))
        if not facts.take_over:
            return NotHead(head=facts.head.epoch) if newer else OlderIncarnation(by=known)
    elif not facts.take_over:
        return HeldByOther(fence=known)
    if facts.is_superseded:
        return Superseded(by=known)
    return Granted(fence=Fence(known.hub + 1, facts.local))
