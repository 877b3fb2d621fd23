"""The timers of one key: by name, and which is due next.

Invariants: a name has one timer at most, the one set last; of timers of one time the one whose name is less comes first.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

NEVER_US: Final = 2**63 - 1
STALE_MAX: Final = 32
"""So many timers that were set anew or taken back may stay in the order of times, beside as many as there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A timer that has run out: what `on_timer` is told."""

    name: str
    time: dt.datetime
    """For when it was set: event time, or the time by the clock."""
    clock: bool


class Timers:
    """The timers of one key that go by event time, or those that go by the clock."""

    __slots__ = ("_heap", "after_us", "at_us", "changed", "set_us")

    def __init__(self, names: Iterable[str] = (), ats_us: Iterable[int] = (), sets_us: Iterable[int] = ()) -> None:
        self.at_us = dict(zip(names, ats_us, strict=True))
        self.set_us = dict(zip(self.at_us, sets_us, strict=True))
        """The event time at which each was set."""
        self.after_us: dict[str, int] = {}
        """Those that count from the next barrier on: how long."""
        self.changed = False
        self._heap = [(at_us, name) for name, at_us in self.at_us.items()]
        heapify(self._heap)

    def set(self, name: str, at_us: int, now_us: int) -> None:
        """Set a timer, in place of one of that name."""
        self.after_us.pop(name, None)
        self.at_us[name] = at_us
        self.set_us[name] = now_us
        self.changed = True
        heappush(self._heap, (at_us, name))
        if len(self._heap) > 2 * len(self.at_us) + STALE_MAX:
            # One that is set anew again and again, behind another that stays, would leave all its times there.
            self._heap = [(at_us, name) for name, at_us in self.at_us.items()]
            heapify(self._heap)

    def set_after(self, name: str, span_us: int, now_us: int) -> None:
        """Set a timer that counts from the next barrier on."""
        self.delete(name)
        self.after_us[name] = span_us
        self.set_us[name] = now_us

    def settle(self, now_us: int) -> None:
        """The barrier is here: what counts from it has a time."""
        for name, span_us in self.after_us.items():
            self.at_us[name] = now_us + span_us
            heappush(self._heap, (now_us + span_us, name))
            self.changed = True
        self.after_us = {}

    def delete(self, name: str) -> None:
        """Take a timer back, if there is one."""
        if self.after_us.pop(name, None) is not None or self.at_us.pop(name, None) is not None:
            self.set_us.pop(name, None)
            self.changed = True

    @property
    def least_us(self) -> int:
        """When the next is due."""
        heap = self._heap
        while heap and self.at_us.get(heap[0][1]) != heap[0][0]:
            heappop(heap)  # it was set anew, or taken back
        return heap[0][0] if heap else NEVER_US

    def next_below(self, bound_us: int) -> str | None:
        """The name of the next one that is due below a time."""
        return self._heap[0][1] if self.least_us < bound_us else None

    def due(self, now_us: int) -> list[tuple[int, str]]:
        """All that are due at a time, in order."""
        return sorted((at_us, name) for name, at_us in self.at_us.items() if at_us <= now_us)
