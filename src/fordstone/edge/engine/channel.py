"""Channels: bounded queues between two tasks.

A full channel refuses batches, so its writer stops: that is how back-pressure reaches the source. Watermarks, barriers
and probes are small and always taken. First in, first out, except for an unaligned barrier, which overtakes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from fordstone.runtime.snapshot import Barrier, Batch, Item

ROWS_MAX: Final = 4 * 65_536
BYTES_MAX: Final = 64 * 1024 * 1024


def _no_wake() -> None:
    """Do nothing: no scheduler runs the task yet."""


class Channel:
    """From one task to another. One writer thread, one reader thread."""

    def __init__(self, name: str, *, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.name = name
        self.wake_reader: Callable[[], None] = _no_wake
        self.wake_writer: Callable[[], None] = _no_wake
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._items: deque[tuple[Item, int, int]] = deque()
        self._lock = threading.Lock()
        self._rows = 0
        self._bytes = 0
        self._refused = False
        self._overtaking: Barrier | None = None
        self._ahead = 0

    def offer(self, item: Item) -> bool:
        """Take the item, or refuse it because the channel is full. A batch larger than the channel fits an empty one."""
        with self._lock:
            if isinstance(item, Batch) and (self._rows >= self._rows_max or self._bytes >= self._bytes_max):
                self._refused = True
                return False
            self._append(item)
        self.wake_reader()
        return True

    def force(self, item: Item) -> None:
        """Take the item whatever the bounds: what an overtaking barrier pushes ahead, loops, and replayed logs."""
        with self._lock:
            self._append(item)
        self.wake_reader()

    def overtake(self, barrier: Barrier) -> None:
        """Show the reader a barrier at once; what stands in the channel now counts as before it."""
        with self._lock:
            self._overtaking = barrier
            self._ahead = len(self._items)
        self.wake_reader()

    def overtaken(self) -> tuple[Barrier, tuple[Item, ...]] | None:
        """The overtaking barrier, if one has come, with the items that it overtook and that still stand here."""
        if self._overtaking is None:
            return None
        with self._lock:
            barrier, self._overtaking = self._overtaking, None
            return barrier, tuple(self._items[i][0] for i in range(self._ahead))

    def take(self) -> Item | None:
        """Return the next item, or None; no item after an overtaking barrier before the reader has seen that."""
        with self._lock:
            if not self._items or (self._overtaking is not None and self._ahead == 0):
                return None
            item, rows, size = self._items.popleft()
            self._rows -= rows
            self._bytes -= size
            self._ahead = max(self._ahead - 1, 0)
            refused, self._refused = self._refused, False
        if refused:
            self.wake_writer()
        return item

    def preload(self, items: Iterable[Item]) -> None:
        """Put back what was in flight, before anything else comes."""
        for item in items:
            self.force(item)

    @property
    def rows(self) -> int:
        return self._rows

    def __len__(self) -> int:
        return len(self._items)

    def _append(self, item: Item) -> None:
        rows, size = (item.frame.height, int(item.frame.estimated_size())) if isinstance(item, Batch) else (0, 0)
        self._items.append((item, rows, size))
        self._rows += rows
        self._bytes += size
