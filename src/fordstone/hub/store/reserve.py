"""Disk space that a file holds for the hub's log, and that is given up when the disk is full.

To remove rows, SQLite must write: without any free space a full hub could never become empty. The limit on uploads
(`DiskQuota`) alone does not keep space free, because uploads in progress and other programs may take it.

Invariant: while the reserve is not held, the hub accepts neither blobs nor epochs (`DiskQuota`), so that only small writes and
removals use the space.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Final

RESERVE_BYTES_MAX: Final = 32 << 20
"""Twice the size at which SQLite empties its write-ahead log."""
RESERVE_SHARE: Final = 16
"""On a small disk the reserve is one part in this many instead."""
RESERVE_NAME: Final = "reserve"
_events = logging.getLogger(__name__)


class Reserve:
    """A file of a fixed size. `give_up` and `take` are called by one thread at a time; `held` by any."""

    def __init__(self, directory: Path, *, size_bytes: int | None = None) -> None:
        """Take the space if there is twice as much. `size_bytes`: by default as the disk allows."""
        self._path = directory / RESERVE_NAME
        if size_bytes is None:
            size_bytes = min(RESERVE_BYTES_MAX, shutil.disk_usage(directory).total // RESERVE_SHARE)
        self.size_bytes = size_bytes
        self.held = False
        self.take()

    def give_up(self) -> None:
        """Free the space; it may be free already."""
        if self.held:
            _events.warning("hub disk is full: reserve given up", extra={"bytes": self.size_bytes})
        self.held = False
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def take(self) -> bool:
        """Hold the space again if the disk has twice as much free; return whether it is held."""
        if self.held:
            return True
        try:
            if self._is_whole():
                self.held = True
            elif shutil.disk_usage(self._path.parent).free >= 2 * self.size_bytes:
                self._allocate()
                self.held = True
        except OSError as error:
            _events.warning("hub reserve not taken", extra={"error": str(error)})
            self.give_up()
        return self.held

    def _is_whole(self) -> bool:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        return status.st_size == self.size_bytes and status.st_blocks * 512 >= self.size_bytes

    def _allocate(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if self.size_bytes:
                os.posix_fallocate(fd, 0, self.size_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
