"""How a file gets its name: written under a temporary one, synced, renamed.

Readers see the old file or the new one, whole. The new name is durable once the directory is synced, which is the
caller's to do, so that several files can share one sync.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from typing import Final

from fordstone.errors import StorageError
from fordstone.storage.disk import Data, Disk
from fordstone.storage.failpoint import Failpoints

TEMP_SUFFIX: Final = ".tmp"


class Placer:
    """Places files. Each has temporary names of its own: an old writer in the same process never meets a new one's."""

    def __init__(self, disk: Disk, failpoints: Failpoints | None = None) -> None:
        self._disk = disk
        self._failpoints = failpoints
        self._token = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    def place(self, path: str, data: Data, *, kind: str | None = None) -> None:
        """Put the bytes under `path`, replacing what has it. They are durable on return; the name is not yet.

        Hits `<kind>.created`, `<kind>.synced` and `<kind>.renamed`. On `StorageError` nothing has changed.
        """
        temp = f"{path.rpartition('/')[0]}/{self._token}-{next(self._numbers)}{TEMP_SUFFIX}"
        try:
            self._disk.create(temp, data)
            self._hit(kind, "created")
            self._disk.fsync(temp)
            self._hit(kind, "synced")
            self._disk.rename(temp, path)
        except StorageError:
            with contextlib.suppress(StorageError):
                self._disk.remove(temp)
            raise
        self._hit(kind, "renamed")

    def _hit(self, kind: str | None, what: str) -> None:
        if kind is not None and self._failpoints is not None:
            self._failpoints.hit(f"{kind}.{what}")


def remove_leftovers(disk: Disk, directory: str) -> None:
    """Take away what a crash left under temporary names. Only for the one process that writes there."""
    for name in disk.list(directory):
        if name.endswith(TEMP_SUFFIX):
            disk.remove(f"{directory}/{name}")
