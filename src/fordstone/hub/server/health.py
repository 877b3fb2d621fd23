"""Whether the hub can do its work: its log can be read and written, and its disk has space.

Checked on request, at most every few seconds and once at a time, so that asking costs the hub nothing. A check has a
timeout, so that a disk that hangs is found, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from fordstone.hub.messages import Rejection
from fordstone.hub.server.limits import DiskQuota
from fordstone.hub.store.log import HubLog

CHECK_EVERY_S: Final = 5.0
"""How old the response may be."""
CHECK_SECONDS_MAX: Final = 5.0
"""Timeout of a check."""
_events = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why the hub is unhealthy."""

    reason: str
    """In a few words, also for callers without a token."""
    details: str = ""
    """For callers with a token."""


class HubHealth:
    """Asked on the event loop."""

    def __init__(
        self,
        log: HubLog,
        quota: DiskQuota,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        seconds_max: float = CHECK_SECONDS_MAX,
    ) -> None:
        self._log = log
        self._quota = quota
        self._clock_s = clock_s
        self._seconds_max = seconds_max
        self._problem: Problem | None = None
        self._checked_s = float("-inf")
        self._checking: asyncio.Task[None] | None = None
        self._writing: Future[None] | None = None
        """A write that has not ended: no other one is handed in before."""

    async def problem(self) -> Problem | None:
        """Return what is wrong; None: nothing."""
        if self._checking is None and self._clock_s() - self._checked_s >= CHECK_EVERY_S:
            self._checking = asyncio.create_task(self._check())
        if self._checking is not None:
            await asyncio.shield(self._checking)
        return self._problem

    async def _check(self) -> None:
        before = self._problem
        try:
            self._problem = await self._find()
        finally:
            self._checked_s, self._checking = self._clock_s(), None
        if self._problem is not None and before is None:
            _events.error("hub unhealthy", extra={"reason": self._problem.reason, "details": self._problem.details})
        elif self._problem is None and before is not None:
            _events.info("hub healthy again")

    async def _find(self) -> Problem | None:
        try:
            async with asyncio.timeout(self._seconds_max):
                if self._writing is None or self._writing.done():
                    self._writing = self._log.write(lambda tx: tx.log.probe())
                await asyncio.shield(asyncio.wrap_future(self._writing))
                await asyncio.to_thread(self._log.read, lambda log: log.newest_seq())
        except TimeoutError:
            return Problem(reason="its log does not answer", details=f"for {self._seconds_max:g} s.")
        except Exception as error:  # noqa: BLE001 - whatever it is, the log does not work
            return Problem(reason="its log cannot be read or written", details=str(error))
        try:
            self._quota.check_blob()
        except Rejection as rejection:
            return Problem(reason="its disk is nearly full", details=str(rejection))
        return None
