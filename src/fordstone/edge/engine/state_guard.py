"""Measure the state while a run reads, and say what may be read. `protocol.state_limit` decides; source tasks ask before each read.

The state is measured before the first read, then once a second and after each epoch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from fordstone.edge.engine.task import Task
from fordstone.errors import TaskError
from fordstone.protocol.progress import WaitedFor
from fordstone.protocol.state_limit import ReadingLimit, describe_stop, reading_limit
from fordstone.runtime.clock import Clock

log = logging.getLogger(__name__)

MEASURE_EVERY_US: Final = 1_000_000
EPOCHS_BEFORE_STOP: Final = 2
"""A run that has to end stops when this many epochs were sealed while nothing was read: the second contains all that was read."""


class StateGuard:
    """One per engine, which sets `tasks` when they are made. Called by the threads of source tasks, and by the writer's."""

    tasks: Sequence[Task] = ()

    def __init__(
        self, clock: Clock, *, bytes_max: int, waited_for: Callable[[], list[WaitedFor]], timed: bool, must_end: bool
    ) -> None:
        """`timed`: a source has event time. `must_end`: the run ends with its input, so it does not wait for the state to shrink."""
        self._clock, self._bytes_max, self._waited_for = clock, bytes_max, waited_for
        self._timed, self._must_end = timed, must_end
        self._mutex = threading.Lock()
        self._limit: ReadingLimit | None = None
        self._due_us: int | None = None
        self._epochs_without_reading = 0

    @property
    def limit(self) -> ReadingLimit | None:
        """What was judged last."""
        return self._limit

    def state_bytes(self) -> int:
        return sum(task.chain.state_bytes() for task in self.tasks)

    def look(self) -> ReadingLimit | None:
        """What may be read now; None: everything."""
        now_us = self._clock.monotonic_us()
        if (self._due_us is None or now_us >= self._due_us) and self._mutex.acquire(blocking=False):
            try:
                self._due_us = now_us + MEASURE_EVERY_US
                self._judge()
            finally:
                self._mutex.release()
        return self._limit

    def committed(self) -> None:
        """An epoch has been sealed."""
        self._epochs_without_reading += 1
        self._due_us = None

    def refuses(self, limit: ReadingLimit, request_barrier: Callable[[], None]) -> None:
        """A source has input that it may not read. `TaskError` if the run could not end otherwise."""
        if not self._must_end or limit.until_us is not None:
            return
        if self._epochs_without_reading >= EPOCHS_BEFORE_STOP:
            raise TaskError(describe_stop(limit))
        request_barrier()

    def _judge(self) -> None:
        before = self._limit
        limit = reading_limit(
            self.state_bytes(),
            self._bytes_max,
            self._waited_for(),
            limited=before is not None,
            timed=self._timed,
        )
        if limit is None or limit.until_us is not None or before is None or before.until_us is not None:
            self._epochs_without_reading = 0
        self._limit = limit
        if (limit is None) != (before is None):
            reason = "below its limit again" if limit is None else limit.reason
            log.warning("reading limited" if limit else "reading unlimited", extra={"reason": reason})
