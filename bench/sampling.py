"""Where threads spend their time: looks at all stacks about a thousand times a second. Needs nothing to be installed.

A sample counts for the innermost frame of Fordstone and what it called there, so time inside Polars stands with the
line that asked for it. Threads that wait are counted apart.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_SECONDS = 0.001
_OURS = f"{Path('src') / 'fordstone'}/"
_WAITING = {"wait", "join", "_wait_for_tstate_lock"}


class Sampler:
    """Samples from its making until `finish`."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._rounds = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._thread.start()

    def finish(self) -> list[dict[str, object]]:
        """What was seen, most often first: the thread, the place, and the share of all rounds."""
        self._over.set()
        self._thread.join()
        return [
            {"thread": thread, "place": place, "share": count / max(self._rounds, 1)}
            for (thread, place), count in self._counts.most_common()
        ]

    def _sample(self) -> None:
        own = threading.get_ident()
        while not self._over.wait(EVERY_SECONDS):
            self._rounds += 1
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():  # noqa: SLF001 - the documented way to see all stacks
                if ident != own:
                    self._counts[names.get(ident, "?"), _place(frame)] += 1


def _place(leaf: FrameType) -> str:
    if leaf.f_code.co_name in _WAITING and "threading" in leaf.f_code.co_filename:
        return "waiting"
    called, frame = "", leaf
    while _OURS not in frame.f_code.co_filename:
        called = frame.f_code.co_name
        if frame.f_back is None:
            return f"{Path(leaf.f_code.co_filename).name}:{leaf.f_code.co_name}"
        frame = frame.f_back
    where = frame.f_code.co_filename.rpartition(_OURS)[2]
    return f"{where}:{frame.f_lineno} {frame.f_code.co_name}" + (f" -> {called}" if called else "")
