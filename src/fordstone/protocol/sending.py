"""Decide what a node sends to the hub next, and what a rejection by the hub means. Pure.

`edge.link.sender` gathers the facts and carries the decision out; what the hub decides is in `protocol.delivery`.

Invariants: an epoch that the hub has is never sent again; an epoch is dropped here only if the hub has it; if node and hub
disagree about what was sealed, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from fordstone.protocol.retry import Backoff

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
    """Whether epoch `head` has the same content on both sides; None: it is no longer here, or was rebuilt."""
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
class ContentDiffers:
    """An epoch has other content at the hub."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NodeIsOlder:
    """The hub has epochs that this state directory never sealed."""

    head: int
    newest: int


@dataclass(frozen=True, slots=True)
class HubIsOlder:
    """The hub lacks epochs that it had acknowledged, and that are no longer here."""

    head: int
    sent: int


Reconciliation = InSync | SendEmpty | ContentDiffers | NodeIsOlder | HubIsOlder


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
    return HubIsOlder(state.head, state.sent)


class Reaction(Enum):
    """What a node does after the hub has rejected a request."""

    STOP_FENCED = auto()
    """A newer generation commits: this process stops."""
    STOP_HELD = auto()
    """Another holder has the lease, and `take_over` was not given."""
    RENEW_LEASE = auto()
    """The hub does not have the lease: it may be another hub, or one with older data."""
    RECONCILE = auto()
    """The hub has other epochs than the node assumed: compare again before anything is sent."""
    SEND_BLOBS = auto()
    """The hub lacks blobs that the node assumed to be there."""
    RETRY = auto()
    """The node can do nothing about it: it waits, keeps everything, and reports the hub's message."""


_REACTIONS: Final = {
    "stale_generation": Reaction.STOP_FENCED,
    "held": Reaction.STOP_HELD,
    "not_found": Reaction.RENEW_LEASE,
    "gap": Reaction.RECONCILE,
    "other_content": Reaction.RECONCILE,
    "missing_blobs": Reaction.SEND_BLOBS,
}


def reaction_to(code: str) -> Reaction:
    """Return what the code of a rejection asks of a node; codes that are not known here mean a retry."""
    return _REACTIONS.get(code, Reaction.RETRY)
