"""Decide what a barrier does at a task's gate.

Pure: given the channel of a barrier, decides whether to hold the channel, drop the barrier, or snapshot. The gate
does the moving. Barriers carry attempts; an attempt only ever gives way to a newer one (rule 4).
"""

from __future__ import annotations

from enum import Enum, auto

from fordstone.plan.ids import Attempt


class Arrival(Enum):
    """What the arrival of a barrier means."""

    STALE = auto()
    """It belongs to an attempt that has been given up: drop it."""
    WAITING = auto()
    """Barriers of other channels are still to come."""
    SNAPSHOT = auto()
    """The cut goes through here and now: freeze the state and pass the barrier on."""
    RETURNED = auto()
    """It came back around the loop: what was logged since is the loop's part of the cut."""
    LOGGED = auto()
    """Unaligned: the barriers of all channels have come, so what was logged is complete."""


class Alignment:
    """Aligned barriers at one gate. With `hold`, a channel whose barrier has come is held back until all have.

    Without (at-least-once, at-most-once) rows of the next epoch may pass while the others are awaited. Back edges of a loop
    are never waited for (rule 17).
    """

    __slots__ = ("_back", "_channels", "_come", "_hold", "_newest", "_open")

    def __init__(self, channels: int, *, hold: bool, back: frozenset[int] = frozenset()) -> None:
        self._channels = channels
        self._hold = hold
        self._back = back
        self._come: frozenset[int] = frozenset()
        self._newest = Attempt(0)
        self._open = False

    def held(self, channel: int) -> bool:
        """Whether nothing may be taken from this channel now."""
        return self._hold and self._open and channel in self._come

    def arrive(self, channel: int, attempt: Attempt) -> Arrival:
        """A barrier stands at the head of a channel and is taken off it."""
        if channel in self._back:
            return Arrival.RETURNED if attempt == self._newest else Arrival.STALE
        if attempt < self._newest or (attempt == self._newest and not self._open):
            return Arrival.STALE
        if attempt > self._newest:
            # Letting go of what was held for an older attempt: its remaining barriers will be stale.
            self._newest, self._open, self._come = attempt, True, frozenset()
        self._come |= {channel}
        if len(self._come) < self._channels - len(self._back):
            return Arrival.WAITING
        self._open, self._come = False, frozenset()
        return Arrival.SNAPSHOT


class Overtaking:
    """Unaligned barriers at one gate: the first one snapshots; what is in flight on each channel is logged until its own comes."""

    __slots__ = ("_awaited", "_channels", "_newest")

    def __init__(self, channels: int) -> None:
        self._channels = channels
        self._newest = Attempt(0)
        self._awaited: frozenset[int] = frozenset()

    def logging(self, channel: int) -> bool:
        """Whether what is taken from this channel belongs to the cut's in-flight part."""
        return channel in self._awaited

    @property
    def complete(self) -> bool:
        """Whether no channel's barrier is awaited."""
        return not self._awaited

    def abandon(self) -> None:
        """Stop logging: a newer attempt of another kind has come."""
        self._awaited = frozenset()

    def arrive(self, channel: int, attempt: Attempt) -> Arrival:
        """A barrier has overtaken what stands in a channel. After `SNAPSHOT`, ask `complete` whether it was the only one."""
        if attempt < self._newest:
            return Arrival.STALE
        if attempt > self._newest:
            self._newest = attempt
            self._awaited = frozenset(range(self._channels)) - {channel}
            return Arrival.SNAPSHOT
        if channel not in self._awaited:
            return Arrival.STALE
        self._awaited -= {channel}
        return Arrival.WAITING if self._awaited else Arrival.LOGGED
