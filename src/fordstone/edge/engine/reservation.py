"""Reservations, for at-most-once: where a source has read to is durable before the rows move on.

A restart begins behind the reserved positions, so nothing is ever worked on twice; what was between the last checkpoint
and the crash is lost, which is what at-most-once says.
"""

from __future__ import annotations

import json
import threading
from typing import Final

import msgspec

from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import StorageError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.storage.disk import Disk

REWRITE_AFTER_LINES: Final = 10_000


class Reservations:
    """An append-only file of positions, synced line by line; begun anew when it grows long."""

    def __init__(self, disk: Disk, base: str) -> None:
        self._disk = disk
        self._path = f"{base}/reserved.jsonl"
        self._temp = f"{base}/reserved.jsonl.new"
        self._lock = threading.Lock()
        self._reserved: dict[tuple[str, str], tuple[int, int]] = {}
        """The position, and the newest time before it."""
        self._lines = 0
        disk.make_dirs(base)
        if disk.exists(self._path):
            self._read(disk.read(self._path))
        self._rewrite()

    def reserve(self, step: str, partition: str, position: int, time_us: int) -> None:
        """After this returns, a restart begins behind `position`, and lets no window out again that ends before `time_us`.

        At the end of bounded input: partition "", position 0, `TIME_MAX_US`.
        """
        with self._lock:
            self._reserved[step, partition] = (position, time_us)
            self._lines += 1
            if self._lines >= REWRITE_AFTER_LINES:
                self._rewrite()
                return
            try:
                self._disk.append(self._path, _line(step, partition, position, time_us))
            except StorageError:
                # A part of the line may be there: the next one must not be glued to it.
                self._lines = REWRITE_AFTER_LINES
                raise
            self._disk.fsync(self._path)

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

    def _read(self, data: bytes) -> None:
        for line in data.splitlines():
            try:
                step, partition, position, time_us = json.loads(line)
            except (ValueError, TypeError):
                # The last line of a crash: what it reserved had not moved yet.
                continue
            self._reserved[str(step), str(partition)] = (int(position), int(time_us))

    def _rewrite(self) -> None:
        if self._disk.exists(self._temp):
            self._disk.remove(self._temp)
        lines = (_line(*key, *value) for key, value in self._reserved.items())
        self._disk.create(self._temp, b"".join(lines))
        self._disk.fsync(self._temp)
        self._disk.rename(self._temp, self._path)
        self._disk.fsync_dir(self._path.rpartition("/")[0])
        self._lines = len(self._reserved)


def _line(step: str, partition: str, position: int, time_us: int) -> bytes:
    return json.dumps([step, partition, position, time_us]).encode() + b"\n"
