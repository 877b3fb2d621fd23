"""Which epochs of a node are read while something is wrong with it (rule 25). Pure.

A node whose next epoch cannot be taken is put into quarantine at that epoch: its rows before it are read, and nothing waits for it. Release
lets readers try again. A skip is a range of epochs that readers pass over: those that cannot be read, or were lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Skip:
    """Epochs that are passed over. `last` may be the one before `first`: then only what was read before is taken for granted."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Which epochs of a node the hub gives to readers."""

    quarantined: int = 0
    """The first epoch that is not to be read; 0: the node is not in quarantine."""
    skips: tuple[Skip, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readable:
    """Where reading a node goes on."""

    after: int
    """The position, or the end of the epochs that are passed over from there."""
    until: int | None
    """The last epoch that may be read; None: there is no limit."""


def readable(position: int, limits: ReadLimits) -> Readable:
    """Return where a reader at a position goes on."""
    after, ends = position, list[int]()
    for skip in sorted(limits.skips):
        if skip.first - 1 <= after:
            after = max(after, skip.last)
        else:
            ends.append(skip.first - 1)  # what is before the range is read first
    if limits.quarantined:
        # A reader that is beyond it (an offset that was fixed before decoding) reads nothing more.
        ends.append(max(after, limits.quarantined - 1))
    return Readable(after=after, until=min(ends, default=None))


def describe_ways_on(pipeline: str, node: str, epoch: int) -> str:
    """Return the commands that end a quarantine at this epoch, as a sentence."""
    which = f"{node} --pipeline {pipeline}"
    return f"`fordstone hub skip {which} --until {epoch}` passes over the epoch, and `fordstone hub release {which}` lets readers try it again."


def is_waived(epoch: int, skips: Iterable[Skip]) -> bool:
    """Whether a position is no longer compared with the log: a skip says that the reader goes on after it."""
    return any(epoch <= skip.last for skip in skips)


def open_gaps(lost: Iterable[tuple[int, int]], skips: Collection[Skip]) -> list[tuple[int, int]]:
    """Return the ranges of lost epochs (first, last) that no skip covers: readers stop at them."""
    return [(first, last) for first, last in lost if not any(one.first <= first and last <= one.last for one in skips)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipFacts:
    """What the hub knows of a node of which epochs are to be skipped."""

    head: int
    quarantined: int
    """0: it is not in quarantine."""
    lost: Sequence[tuple[int, int]] = ()
    """First and last of each range that was lost when the hub was restored from a backup."""
    skips: Sequence[Skip] = ()


@dataclass(frozen=True, slots=True)
class NothingToSkip:
    """There is nothing that readers stop at."""


@dataclass(frozen=True, slots=True)
class SkipTooFar:
    """Epochs would be skipped that are still to come."""

    last_max: int


@dataclass(frozen=True, slots=True)
class SkipTooShort:
    """Readers would stop at the same epoch again."""

    last_min: int


SkipDecision: TypeAlias = Skip | NothingToSkip | SkipTooFar | SkipTooShort


def decide_skip(facts: SkipFacts, until: int) -> SkipDecision:
    """Decide which epochs readers pass over: from what they stop at, to `until`."""
    gaps = [Skip(first=first, last=last) for first, last in open_gaps(facts.lost, facts.skips)]
    if facts.quarantined:
        gap = next((gap for gap in gaps if gap.first <= facts.quarantined <= gap.last), None)
        stops = gap or Skip(first=facts.quarantined, last=facts.quarantined)
        last_min = facts.quarantined - 1 if gap is None else gap.last
    elif gaps:
        stops = gaps[0]
        last_min = stops.last
    else:
        return NothingToSkip()
    last_max = max(facts.head, stops.first - 1)
    if until < last_min:
        return SkipTooShort(last_min)
    return SkipTooFar(last_max) if until > last_max else Skip(first=stops.first, last=until)
