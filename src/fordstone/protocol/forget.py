"""Decide whether the hub may forget a node or a stream. Pure.

`hub.store.forget` gathers the facts and carries the decision out. Forgetting is for what is gone for good: it removes the epochs and the
names, so that they no longer count.

Invariants: a node that is running is not forgotten, nor is a stream to which one still writes; epochs that may still be read are removed
only on request, and counted. A node that had epochs leaves a closing epoch, one after its newest: readers take it as the end of the
node, and no later log of the same name can be mistaken for the one that they have read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, TypeAlias

from fordstone.protocol.chain import chained

SILENT_US_MIN: Final = 60_000_000
"""A node that has not reported for this time is not running: it should have reported six times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Epochs that a registered consumer has not read yet, or that nobody reads, and their rows."""

    epochs: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContact:
    """What the hub knows of whether a node is running."""

    has_lease: bool
    stopped: bool
    """Its last report says that it has stopped."""
    silent_us: int
    """Time since it was last in contact; negative if the hub's clock was set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetNodeFacts:
    """A node that is to be forgotten."""

    head: int
    """Its newest epoch; 0: it has none."""
    contact: NodeContact
    unread: Unread


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetStreamFacts:
    """A stream that is to be forgotten."""

    writers: tuple[str, ...]
    """Running nodes whose newest epoch has this stream."""
    unread: Unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """It may be forgotten."""

    discarded: Unread
    retired: bool = False
    """The name stays reserved: readers have positions in what the node has sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StillRunning:
    """These nodes are running, and would come back at once."""

    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HasUnread:
    """Epochs would be lost that may still be read."""

    unread: Unread


ForgetDecision: TypeAlias = Forget | StillRunning | HasUnread


def is_running(contact: NodeContact) -> bool:
    """Whether a node may commit at any moment: it has the lease, and was in contact a short time ago."""
    return contact.has_lease and not contact.stopped and contact.silent_us < SILENT_US_MIN


def decide_forget_node(facts: ForgetNodeFacts, *, discard_unread: bool) -> ForgetDecision:
    """Judge whether a node may be forgotten. One without epochs always may: it has only a lease and its last report."""
    if facts.head == 0:
        return Forget(discarded=Unread())
    if is_running(facts.contact):
        return StillRunning()
    if facts.unread.epochs and not discard_unread:
        return HasUnread(unread=facts.unread)
    return Forget(discarded=facts.unread, retired=True)


def decide_forget_stream(facts: ForgetStreamFacts, *, discard_unread: bool) -> ForgetDecision:
    """Judge whether a stream may be forgotten. Its nodes go on with other streams, and may bring it back."""
    if facts.writers:
        return StillRunning(nodes=facts.writers)
    if facts.unread.epochs and not discard_unread:
        return HasUnread(unread=facts.unread)
    return Forget(discarded=facts.unread)


def closing_chain(head_chain: str, *, at_us: int) -> str:
    """Return the chain at the closing epoch of a node that is forgotten at a time."""
    return chained(head_chain, hashlib.sha256(f"forgotten {at_us}".encode()).hexdigest())
