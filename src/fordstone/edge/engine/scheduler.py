"""The thread scheduler: a thread for each task, the coordinator and the writer.

Polars releases the interpreter while it works, so tasks run in parallel. A thread whose step did nothing sleeps
until it is woken. The first failure stops all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

from fordstone.edge.engine.engine import Steppable

TICK_SECONDS: Final = 0.01
TICKS_A_CALL: Final = 5
"""Number of checks whether the run is over per call of `every_tick`."""
JOIN_SECONDS: Final = 60.0


class ThreadScheduler:
    """Runs steppables until a condition holds. Used once."""

    def __init__(self, steppables: Sequence[Steppable]) -> None:
        self._steppables = tuple(steppables)
        self._events = [threading.Event() for _ in steppables]
        self._halt = threading.Event()
        self._done = threading.Event()
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def run(self, until: Callable[[], bool], *, every_tick: Callable[[], None] | None = None) -> None:
        """Start, and return when `until` holds; raises what a step raised. `every_tick` is called about 20 times a second."""
        for steppable, event in zip(self._steppables, self._events, strict=True):
            steppable.wake = event.set
        for index, (steppable, event) in enumerate(zip(self._steppables, self._events, strict=True)):
            name = f"fordstone-{getattr(steppable, 'id', type(steppable).__name__.lower())}-{index}"
            thread = threading.Thread(target=self._loop, args=(steppable, event), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            for tick in itertools.count():
                if self._failures or until():
                    break
                self._done.wait(TICK_SECONDS)
                if every_tick is not None and tick % TICKS_A_CALL == 0:
                    every_tick()
        finally:
            self._stop()
        if self._failures:
            raise self._failures[0]

    def _stop(self) -> None:
        self._halt.set()
        for event in self._events:
            event.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _loop(self, steppable: Steppable, event: threading.Event) -> None:
        try:
            while not self._halt.is_set():
                event.clear()
                if steppable.step():
                    continue
                wait_us = steppable.idle_wait_us
                if self._halt.is_set():
                    return
                event.wait(None if wait_us is None else wait_us / 1e6)
        except BaseException as failure:  # noqa: BLE001 - handed to the caller of run
            self._failures.append(failure)
            self._done.set()
