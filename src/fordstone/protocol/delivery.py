"""Decide how epochs get from a node to the hub: what the hub accepts, and what the node sends next. Pure.

The hub (`hub.store.commits`) and the node (`edge.link.sender`) gather the facts, and carry the decisions out.

Invariants of the hub: its epochs never change, and have no gaps but those that a restore from a backup has left, which are
recorded; a commit that overlaps with what is there, as after a lost
response, adds only the new epochs; nothing below the granted fence is accepted, not even epochs that are there already, so
that a fenced node learns of it.

Invariants of the node: an epoch that the hub has is never sent again; an epoch is dropped here only if the hub has it; if node
and hub disagree about what was sealed, nothing is sent, and nobody is fenced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from fordstone.protocol.chain import PositionJudgement
from fordstone.protocol.lease import Fence
from fordstone.protocol.retry import Backoff

# What the hub accepts.


class Sent(NamedTuple):
    """One epoch of a commit: its number and the digest of its content."""

    epoch: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """All epochs from `first_new` on are new, and follow the newest that is there."""

    first_new: int
    lost_from: int | None = None
    """The hub was restored from a backup, and the node no longer has the epochs from this one to the one before `first_new`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyDone:
    """All epochs are there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherContent:
    """This epoch, or one before it, is there with other content."""

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
    after: PositionJudgement | None = None
    """How the chain that the node has before the first epoch compares with what is there; None: the node does not say."""
    resync: bool = False
    """The hub was restored from a backup, and this node has committed nothing since: its next commit may leave epochs out."""


def decide_order(facts: CommitFacts) -> CommitDecision:
    """Judge the fence and the order of epochs, but not the blobs."""
    if facts.granted is None or facts.fence > facts.granted:
        return NotGranted()
    if facts.fence < facts.granted:
        return Stale(by=facts.granted)
    first = facts.sent[0].epoch
    if facts.after is PositionJudgement.DIFFERS:
        return OtherContent(epoch=first - 1)
    for sent in facts.sent:
        if sent.epoch <= facts.head and facts.known.get(sent.epoch, sent.digest) != sent.digest:
            return OtherContent(epoch=sent.epoch)
    if facts.sent[-1].epoch <= facts.head:
        return AlreadyDone()
    if first > facts.head + 1:
        if facts.resync and facts.after is not None:
            return Accept(first_new=first, lost_from=facts.head + 1)
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


# What the node sends.

SEND_BACKOFF: Final = Backoff(first_us=250_000, max_us=30_000_000)
COMMIT_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of rows in one commit: on a bad line, progress should be acknowledged soon."""
COMMIT_BODY_BYTES_MAX: Final = 4 << 20
COMMIT_RUNS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What one epoch adds to a commit."""

    size_bytes: int
    """Bytes of its rows."""
    body_bytes: int
    """Bytes of its entry."""
    runs: int
    """Runs and segments: a segment without rows costs the hub as much as a run."""


def range_length(weights: Iterable[Weight], *, epochs_max: int) -> int:
    """Return how many epochs, from the oldest on, go into one commit: all that fit, and at least one."""
    count = size_bytes = body_bytes = runs = 0
    for weight in weights:
        size_bytes += weight.size_bytes
        body_bytes += weight.body_bytes
        runs += weight.runs
        over = size_bytes > COMMIT_BYTES_MAX or body_bytes > COMMIT_BODY_BYTES_MAX or runs > COMMIT_RUNS_MAX
        if count == epochs_max or (count and over):
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncState:
    """What node and hub each have of one pipeline's epochs."""

    head: int
    """The newest epoch that the hub has; 0: none."""
    sent: int
    """The newest epoch that the hub has acknowledged to this state directory, or that was sealed before it had an outbox."""
    newest: int
    """The newest epoch that is sealed here."""
    same: bool | None = None
    """Whether both sides have the same chain at `head`; None: it is not known here."""
    restored: bool = False
    """The log that acknowledged `sent` was restored from a backup since, as the hub says."""
    unsent_before: int = 0
    """Epochs up to this one were sealed before there was an outbox, so they hold nothing for the hub."""


@dataclass(frozen=True, slots=True)
class InSync:
    """The hub has everything up to `done`. Later epochs are sent."""

    done: int


@dataclass(frozen=True, slots=True)
class SendEmpty:
    """Epochs `first` to `last` hold nothing for the hub, which needs an entry for each of them all the same."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class OfferAgain:
    """The hub was restored from a backup: it has nothing after `head`. What is still here is sent again, and the rest is lost."""

    head: int


@dataclass(frozen=True, slots=True)
class ContentDiffers:
    """The epochs up to this one have other content at the hub."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NodeIsOlder:
    """The hub has epochs that this state directory never sealed."""

    head: int
    newest: int


@dataclass(frozen=True, slots=True)
class HubIsOlder:
    """The hub lacks epochs that were acknowledged, and does not say that it was restored from a backup; or it is another hub."""

    head: int
    sent: int


Reconciliation = InSync | SendEmpty | OfferAgain | ContentDiffers | NodeIsOlder | HubIsOlder


def reconcile(state: SyncState) -> Reconciliation:
    """Compare the node's epochs with the hub's."""
    if state.head > state.newest:
        return NodeIsOlder(state.head, state.newest)
    if state.same is False:
        return ContentDiffers(state.head)
    if state.head >= state.sent:
        return InSync(state.head)
    if state.sent <= state.unsent_before:
        return SendEmpty(state.head + 1, state.sent)
    if state.restored:
        return OfferAgain(state.head)
    return HubIsOlder(state.head, state.sent)


class Reaction(Enum):
    """What a node does after the hub has rejected a request."""

    STOP_FENCED = auto()
    """A newer generation commits: this process stops."""
    STOP_HELD = auto()
    """Another holder has the lease, and `take_over` was not given."""
    STOP_FORGOTTEN = auto()
    """The hub has forgotten this node, and uses its name no more."""
    RENEW_LEASE = auto()
    """The hub does not have the lease, or its newest epoch is another one than the request named: look again, and request it."""
    RECONCILE = auto()
    """The hub has other epochs than the node assumed: compare again before anything is sent."""
    SEND_BLOBS = auto()
    """The hub lacks blobs that the node assumed to be there."""
    RETRY = auto()
    """The node can do nothing about it: it waits, keeps everything, and reports the hub's message."""


_REACTIONS: Final = {
    "stale_generation": Reaction.STOP_FENCED,
    "held": Reaction.STOP_HELD,
    "forgotten": Reaction.STOP_FORGOTTEN,
    "not_found": Reaction.RENEW_LEASE,
    "not_head": Reaction.RENEW_LEASE,
    "gap": Reaction.RECONCILE,
    "other_content": Reaction.RECONCILE,
    "missing_blobs": Reaction.SEND_BLOBS,
}


def reaction_to(code: str) -> Reaction:
    """Return what the code of a rejection asks of a node; codes that are not known here mean a retry."""
    return _REACTIONS.get(code, Reaction.RETRY)
