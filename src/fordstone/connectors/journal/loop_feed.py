"""A feed that serves connections: one thread with an event loop, and a few threads that journal what came."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fordstone.connectors.journal.source import Feed

log = logging.getLogger(__name__)

STOP_SECONDS_MAX: Final = 10.0
JOURNAL_THREADS: Final = 8
"""Messages of this many connections at a time wait for the disk, and share syncs."""


class LoopFeed(Feed):
    """Subclasses serve in `_main` until `_stop` is set."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._failed: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._pool = ThreadPoolExecutor(JOURNAL_THREADS, thread_name_prefix="journal")
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(STOP_SECONDS_MAX)

    def check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_SECONDS_MAX)
        self._pool.shutdown(wait=True)

    @abstractmethod
    async def _main(self) -> None:
        """Set `_ready` when clients may come, and return when `_stop` is set and all connections have ended."""

    def _run(self) -> None:
        try:
            asyncio.run(self._begin())
        except Exception as error:  # noqa: BLE001 - raised by the reader
            log.warning("source failed", extra={"source": self._where, "problem": str(error)})
            self._failed = error
        finally:
            self._ready.set()

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._main()
