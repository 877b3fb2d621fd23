"""Long polls: wait on the event loop for what the writing thread tells.

Invariants: who looks again after each wake misses nothing, because waiting begins before looking; nobody waits once `end`
was called.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from fordstone.hub.store.log import Key


class Waiting:
    """Everything but `tell` and `end` is called on the event loop."""

    def __init__(self) -> None:
        self._events: dict[Key, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = False

    def begin(self) -> None:
        """Called once, on the event loop, before the first request."""
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def on(self, key: Key) -> Iterator[asyncio.Event]:
        """An event that is set when `key` changes, or at the end."""
        event = asyncio.Event()
        if self.ended:
            event.set()
        self._events.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            events = self._events[key]
            events.discard(event)
            if not events:
                del self._events[key]

    def waiting(self) -> int:
        """How many wait."""
        return sum(len(events) for events in self._events.values())

    def tell(self, keys: frozenset[Key]) -> None:
        """Wake those that wait for one of these. From any thread."""
        self._call(lambda: self._wake(keys))

    def end(self) -> None:
        """Wake everybody, for good. From any thread; at once when the hub stops, so that no poll holds it up."""
        self.ended = True
        self._call(lambda: self._wake(None))

    def _call(self, wake: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(wake)

    def _wake(self, keys: frozenset[Key] | None) -> None:
        for key in list(self._events) if keys is None else keys:
            for event in self._events.get(key, ()):
                event.set()
