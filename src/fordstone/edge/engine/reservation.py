"""Reservations, for at-most-once: where a source has read to is durable before the rows move on.

A restart begins after the reserved positions, so no row is ever processed twice. Rows between the last checkpoint and the
crash are lost, as at-most-once allows.
"""

from __future__ import annotations

import threading
from typing import Final

import msgspec

from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import CheckpointError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.storage.checksum import seal
from fordstone.storage.disk import Disk
from fordstone.storage.journal import Journal

REWRITE_AFTER_LINES: Final = 10_000
_LINE: Final = msgspec.json.Decoder(tuple[str, str, int, int])


class Reservations:
    """A journal of positions, synced line by line, and rewritten when it grows long."""

    def __init__(self, disk: Disk, base: str) -> None:
        self._journal = Journal(disk, f"{base}/reserved.jsonl")
        self._lock = threading.Lock()
        self._reserved: dict[tuple[str, str], tuple[int, int]] = {}
        """The position, and the newest time before it."""
        self._lines = 0
        disk.make_dirs(base)
        self._read()
        self._rewrite()

    def reserve(self, step: str, partition: str, position: int, time_us: int) -> None:
        """After this returns, a restart begins after `position`, and emits no window again that ends before `time_us`.

        At the end of bounded input: partition "", position 0, `TIME_MAX_US`.
        """
        with self._lock:
            self._reserved[step, partition] = (position, time_us)
            self._lines += 1
            if self._lines >= REWRITE_AFTER_LINES:
                self._rewrite()
                return
            self._journal.append(_line(step, partition, position, time_us))

    def beyond(self, step: str, partitions: dict[str, PartitionCut]) -> dict[str, PartitionCut]:
        """The partitions of a checkpoint, moved on to what has been reserved since."""
        moved = dict(partitions)
        for (source, partition), (position, time_us) in self._reserved.items():
            if source != step or not partition:
                continue
            cut = moved.get(partition, PartitionCut(position=0))
            moved[partition] = msgspec.structs.replace(
                cut, position=max(cut.position, position), max_time_us=max(cut.max_time_us, time_us)
            )
        return moved

    def time_us(self, step: str, lateness_us: int) -> int:
        """How far a source's watermark may have come at most."""
        times = [time_us for (source, _), (_, time_us) in self._reserved.items() if source == step]
        newest_us = max(times, default=TIME_MIN_US)
        return newest_us if newest_us in {TIME_MIN_US, TIME_MAX_US} else newest_us - lateness_us

    def _read(self) -> None:
        content = self._journal.read()
        if content.damaged_lines:
            raise CheckpointError(
                f"{self._journal.path}: {content.damaged_lines} lines are damaged, so rows that were read before might be read "
                "again, which at_most_once rules out. Restore the file from a copy, or start with an empty state directory."
            )
        # A torn last line is no loss: the rows that it reserved had not moved yet.
        for record in content.records:
            step, partition, position, time_us = record.decode(_LINE)
            self._reserved[step, partition] = (position, time_us)

    def _rewrite(self) -> None:
        self._journal.rewrite(_line(*key, *value) for key, value in self._reserved.items())
        self._lines = len(self._reserved)


def _line(step: str, partition: str, position: int, time_us: int) -> bytes:
    return seal("reserved", (step, partition, position, time_us))
