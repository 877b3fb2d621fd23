"""Rows that an iterator gives, as a source in memory.

A thread pulls items while the partition is read, at most `UNREAD_ROWS_MAX` rows ahead. Rows stay in memory until the engine acknowledges
them, so a run can restart and read them again. A later run cannot: it would find an iterator that has moved on.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from fordstone.connectors.memory import MemorySource, Rows, rows_of_item
from fordstone.errors import FordstoneError, SourceError

UNREAD_ROWS_MAX: Final = 100_000


class FedSource(MemorySource):
    """One partition, which an iterator or an async iterator fills. Its end is the end of the partition."""

    def __init__(self, items: Iterator[Any] | AsyncIterator[Any]) -> None:
        super().__init__([[]], live=True)
        self._next = _next_of(items)
        self._pulling = threading.Lock()
        """Held by the thread that pulls: an iterator may be asked by one at a time."""
        self._halt: threading.Event | None = None
        self._room = threading.Condition()
        self._unread_rows = 0
        self._first_piece = 0
        self._first_row = 0
        self._taken = 0
        """Number of pieces that the reader has taken, from the first on. The next one that it asks for must be there."""
        self._problem: BaseException | None = None

    @property
    def replays(self) -> bool:
        return False

    def opened(self, position: int) -> tuple[int, int]:
        """Pull from now on. Called by a reader that begins at `position`; returns the first piece that is kept, and its row."""
        with self._lock:
            first = self._first_piece, self._first_row
            self._taken = self._first_piece
        if position < first[1]:
            raise SourceError(
                f"memory source: the first {first[1]:,} rows of the generator were read by an earlier run, and are no longer there.\n"
                "A generator can be read once. Declare the pipeline again with a new one."
            )
        with self._room:
            self._unread_rows = 0
        self._halt = threading.Event()
        threading.Thread(target=self._pull, args=(self._halt,), name="fordstone-feed", daemon=True).start()
        return first

    def closed(self) -> None:
        """Pull no more, after the item that is being waited for."""
        if self._halt is not None:
            self._halt.set()
        with self._room:
            self._room.notify_all()

    def pieces(self, partition: int, first: int) -> tuple[list[Rows], bool]:
        with self._lock:
            found, ended = self._pieces[partition][first - self._first_piece :], self._ended[partition]
            self._taken = first + len(found)
        with self._room:
            self._unread_rows = 0
            self._room.notify_all()
        problem = self._problem
        if problem is not None and not found:
            if isinstance(problem, FordstoneError):
                raise problem
            raise SourceError(f"memory source: the generator failed: {problem!r}.") from problem
        return found, ended

    def acknowledge(self, position: int) -> None:
        """Remove the pieces that end before a position, if the reader has taken them: no reader of this run will begin there.

        A reader that was just opened may be about to take the first ones, and to pass over them.
        """
        with self._lock:
            pieces, removed = self._pieces[0], 0
            while self._first_piece + removed < self._taken and self._first_row + len(pieces[removed]) <= position:
                self._first_row += len(pieces[removed])
                removed += 1
            del pieces[:removed]
            self._first_piece += removed

    def _pull(self, halt: threading.Event) -> None:
        with self._pulling:
            while not halt.is_set() and not self._ended[0] and self._problem is None:
                with self._room:
                    self._room.wait_for(lambda: halt.is_set() or self._unread_rows < UNREAD_ROWS_MAX)
                if halt.is_set():
                    return
                try:
                    rows = rows_of_item(self._next())
                except (StopIteration, StopAsyncIteration):
                    self.end()
                    return
                except BaseException as problem:  # noqa: BLE001 - raised by the reader
                    self._problem = problem
                    return
                with self._room:
                    self._unread_rows += len(rows)
                self.append(0, rows)


def _next_of(items: Iterator[Any] | AsyncIterator[Any]) -> Callable[[], Any]:
    """The function that waits for the next item. Async items are awaited in an event loop of their own."""
    if isinstance(items, Iterator):
        return lambda: next(items)
    loop: list[asyncio.AbstractEventLoop] = []

    async def following() -> Any:
        return await anext(items)

    def wait() -> Any:
        if not loop:
            made = asyncio.new_event_loop()
            weakref.finalize(items, made.close)
            loop.append(made)
        return loop[0].run_until_complete(following())

    return wait
