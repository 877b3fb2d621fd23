"""Requests to stop a run, from code or by SIGINT and SIGTERM. The loop that runs a pipeline asks for them."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Set once, from any thread: the run finishes its epoch and stops."""

    def __init__(self) -> None:
        self._requested = threading.Event()

    @property
    def stop_requested(self) -> bool:
        return self._requested.is_set()

    def request(self) -> None:
        """Request the stop. May be called again."""
        self._requested.set()

    def wait(self, seconds: float) -> bool:
        """Pause, or return at once when a stop is requested. Return whether it is."""
        return self._requested.wait(seconds)


class Signals(StopRequest):
    """Records SIGINT or SIGTERM, so that the epoch can be finished. A second signal ends the process as usual."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, or install them again: starting Spark, for example, replaces them. Only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._requested.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._requested.set()
