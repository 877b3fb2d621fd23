"""How fast stored files are read in the background to find damage, and how often. Pure; the same for the blobs of a hub and the runs of a node."""

from __future__ import annotations

from typing import Final

PASS_US: Final = 24 * 3_600_000_000
"""A pass begins at most once in this running time, so that a small store is not read all the time."""


def pause_s(size_bytes: int, bytes_per_s: int) -> float:
    """Return for how long nothing is read after this many bytes."""
    return size_bytes / bytes_per_s
