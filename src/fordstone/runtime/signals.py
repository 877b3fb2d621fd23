"""Being told to stop: SIGINT and SIGTERM, remembered until whoever runs a pipeline asks."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self


class Signals:
    """Remembers that SIGINT or SIGTERM came, so that the epoch can be finished; a second one ends the process as usual."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def stop_requested(self) -> bool:
        """Whether to stop."""
        return self._told.is_set()

    def wait(self, seconds: float) -> bool:
        """Rest, unless told to stop; says which."""
        return self._told.wait(seconds)

    def __enter__(self) -> Self:
        self.listen()
        return self

    def listen(self) -> None:
        """Begin to listen, or again: starting Spark, for one, puts a handler of its own in place. Only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._told.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._told.set()
