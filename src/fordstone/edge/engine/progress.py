"""The share of bounded input that was read. Only progress bars use it; no decision depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fordstone.connectors.base import Source
from fordstone.edge.engine.source_task import SourceTask
from fordstone.edge.engine.task import Task
from fordstone.epochs.manifest import PartitionCut
from fordstone.runtime.clock import Clock

LOOK_EVERY_US: Final = 500_000
"""Minimum interval between two looks: there may be thousands of files."""


class ReadSoFar:
    """Reads the positions of source tasks, from outside their threads."""

    def __init__(self, sources: Mapping[str, Source], tasks: Sequence[Task], clock: Clock) -> None:
        self._sources = sources
        self._tasks = [task for task in tasks if isinstance(task, SourceTask)]
        self._clock = clock
        self._looked_us: int | None = None
        self._found: tuple[float | None, int | None] = (None, None)

    def look(self, *, refresh: bool = False) -> tuple[float | None, int | None]:
        """The share that was read and the size of all input, if they are known. `refresh`: do not use the last result."""
        now_us = self._clock.monotonic_us()
        if refresh or self._looked_us is None or now_us - self._looked_us >= LOOK_EVERY_US:
            self._looked_us = now_us
            self._found = self._weighed()
        return self._found

    def _weighed(self) -> tuple[float | None, int | None]:
        shares = [source.share_read(self._cuts(name)) for name, source in self._sources.items()]
        sizes = [source.size_bytes() for source in self._sources.values()]
        total_bytes = None if None in sizes else sum(size for size in sizes if size is not None)
        if not shares or None in shares:
            return None, total_bytes
        weights = [size or 0 for size in sizes] if total_bytes else [1] * len(shares)
        read = sum((share or 0.0) * weight for share, weight in zip(shares, weights, strict=True))
        return read / sum(weights), total_bytes

    def _cuts(self, source: str) -> dict[str, PartitionCut]:
        cuts: dict[str, PartitionCut] = {}
        for task in self._tasks:
            if task.id.rpartition("/")[0] == source:
                cuts |= task.cuts()
        return cuts
