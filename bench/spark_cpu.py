"""Processor time of this process and all that it started: the JVM, and Spark's Python workers below that.

Unlike the time on the clock it is hardly changed by what else the machine does.
"""

from __future__ import annotations

import os
from pathlib import Path

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_PARENT, _TIMES = 1, slice(11, 15)
"""In /proc/PID/stat after the name: the parent; the times of the process and of its children that have ended."""


def cpu_seconds() -> float:
    """So far."""
    found: dict[int, tuple[int, int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                fields = (place / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile, and its parent has its time
            found[int(place.name)] = int(fields[_PARENT]), sum(map(int, fields[_TIMES]))
    ours, new = set[int](), {os.getpid()}
    while new:
        ours |= new
        new = {pid for pid, (parent, _) in found.items() if parent in new} - ours
    return sum(found[pid][1] for pid in ours) * _TICK_SECONDS
