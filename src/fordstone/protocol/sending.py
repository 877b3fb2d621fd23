"""Decide what a node sends to the hub next, and what the hub's answers mean for it. Reads and sends nothing.

`edge.sending` brings the facts and carries it out; what the hub decides is in `protocol.delivery`.

Invariants: an epoch that the hub has is never sent again; an epoch is given up here only if the hub has it; where the two
disagree about what was sealed, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

WAIT_FIRST_US: Final = 250_000
WAIT_MAX_US: Final = 30_000_000
RETRY_AFTER_MAX_US: Final = 600_000_000
RANGE_BYTES_MAX: Final = 64 << 20
"""Of rows in one commit: on a bad line, what was sent should count soon."""
RANGE_BODY_BYTES_MAX: Final = 4 << 20
RANGE_RUNS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What one epoch adds to a commit."""

    size_bytes: int
    """Of its rows."""
    body_bytes: int
    """Of its entry."""
    runs: int
    """And segments, since one without rows costs the hub as much."""


def range_length(weights: Iterable[Weight], *, epochs_max: int) -> int:
    """How many epochs from the oldest on go into one commit: all that fit, and at least one."""
    count = size_bytes = body_bytes = runs = 0
    for weight in weights:
        size_bytes += weight.size_bytes
        body_bytes += weight.body_bytes
        runs += weight.runs
        over = size_bytes > RANGE_BYTES_MAX or body_bytes > RANGE_BODY_BYTES_MAX or runs > RANGE_RUNS_MAX
        if count == epochs_max or (count and over):
            break
        count += 1
    return count


def wait_us(failures: int, *, retry_after_us: int | None, choose: Callable[[int], int]) -> int:
    """How long to wait after so many failures in a row: doubling up to a bound, half of it by chance.

    `choose(n)` gives a number from 0 to n - 1. A thousand nodes that lost the hub together do not come back together.
    """
    full_us = min(WAIT_FIRST_US << min(max(failures - 1, 0), 20), WAIT_MAX_US)
    waits_us = full_us // 2 + choose(full_us // 2 + 1)
    if retry_after_us is None:
        return waits_us
    return max(waits_us, min(retry_after_us, RETRY_AFTER_MAX_US))


# Where node and hub stand.


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known when node and hub meet."""

    head: int
    """The newest epoch that the hub has; 0: none."""
    sent: int
    """The newest epoch that the hub has acknowledged to this state directory, or that was sealed before it had an outbox."""
    newest: int
    """The newest epoch that is sealed here."""
    same: bool | None = None
    """Whether the entry of epoch `head` is the same on both sides; None: it is not here any more, or was made up again."""
    unsent_before: int = 0
    """Epochs up to this one were sealed before anything was to cross, so they hold nothing."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The hub has everything up to `done`. What follows is sent."""

    done: int


@dataclass(frozen=True, slots=True)
class FillUp:
    """Epochs `first` to `last` hold nothing for the hub, which wants them all the same."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class OtherContent:
    """An epoch has other content there."""

    epoch: int


@dataclass(frozen=True, slots=True)
class OlderHere:
    """The hub has epochs that this state directory never sealed."""

    head: int
    newest: int


@dataclass(frozen=True, slots=True)
class OlderThere:
    """The hub lacks epochs that it had acknowledged, and that are gone here."""

    head: int
    sent: int


Meeting = GoOn | FillUp | OtherContent | OlderHere | OlderThere


def meet(standing: Standing) -> Meeting:
    """Judge how the node's epochs and the hub's go together."""
    if standing.head > standing.newest:
        return OlderHere(standing.head, standing.newest)
    if standing.same is False:
        return OtherContent(standing.head)
    if standing.head >= standing.sent:
        return GoOn(standing.head)
    if standing.sent <= standing.unsent_before:
        return FillUp(standing.head + 1, standing.sent)
    return OlderThere(standing.head, standing.sent)


# What a refusal means.


@dataclass(frozen=True, slots=True)
class Fenced:
    """A newer generation commits: this process stops."""


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody else has the lease, and nobody said to take it over."""


@dataclass(frozen=True, slots=True)
class LeaseAgain:
    """The hub does not know of the lease: it may be another hub, or one with older data."""


@dataclass(frozen=True, slots=True)
class MeetAgain:
    """What the node believes of the hub is not so: look anew before anything is sent."""


@dataclass(frozen=True, slots=True)
class SendBlobs:
    """Blobs that were believed to be there are not."""


@dataclass(frozen=True, slots=True)
class TryLater:
    """Nothing that the node can mend: it waits, keeps everything, and says what the hub said."""


Meaning = Fenced | Held | LeaseAgain | MeetAgain | SendBlobs | TryLater
_MEANINGS: Final[dict[str, Meaning]] = {
    "stale_generation": Fenced(),
    "held": Held(),
    "not_found": LeaseAgain(),
    "gap": MeetAgain(),
    "other_content": MeetAgain(),
    "missing_blobs": SendBlobs(),
}


def meaning_of(code: str) -> Meaning:
    """What the hub's word for a refusal (`hub.messages.Refusal.error`) asks of a node."""
    return _MEANINGS.get(code, TryLater())
