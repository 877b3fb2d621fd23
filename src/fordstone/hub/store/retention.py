"""Remove what no reader needs: read segments, old versions of control tables, blobs without references.

Runs beside everything else, a bounded piece at a time, so that commits never wait long. Calls are serial: one thread.

Invariants: a segment is removed when every consumer of its stream has passed it, and never while no consumer is registered;
a node's head and its digest are kept for ever; the newest snapshot of a control table is kept, with all later versions. A
blob is removed when nothing references it and it was stored longer ago than `grace_us`, so that uploads for a later commit
stay. Its record is removed first, durably, then its bytes: `sweep` finds what a crash leaves between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fordstone.epochs.run_file import is_digest
from fordstone.hub.store.blobs import BlobLocks, BlobStore
from fordstone.hub.store.log import HubLog, Transaction
from fordstone.storage.failpoint import Failpoints, NoFailpoints

PIECE: Final = 500
"""Maximum number of rows or files removed at a time."""
ENTRIES_KEPT: Final = 1_000
"""Epochs of a node that are kept after their segments: to compare with what is sent again, and to be listed."""
HOUR_US: Final = 3_600_000_000
PREFIXES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How long things are kept."""

    grace_us: int = HOUR_US
    """Time that a blob may wait for the commit that references it."""
    offline_us: int = 7 * 24 * HOUR_US
    """A node that was silent for longer does not hold back old versions of control tables."""
    unread_us: int | None = None
    """Segments received longer ago are removed even if they were not read. None: never."""
    every_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What one round has removed."""

    segments: int = 0
    entries: int = 0
    versions: int = 0
    blobs: int = 0

    @property
    def more(self) -> bool:
        """Whether another round may find more at once."""
        return max(self.segments, self.entries, self.versions, self.blobs) >= PIECE


class Retention:
    """Blocks: not for the event loop."""

    def __init__(
        self, log: HubLog, blobs: BlobStore, locks: BlobLocks, *, keeping: Keeping, failpoints: Failpoints | None = None
    ) -> None:
        self.keeping = keeping
        self._log = log
        self._blobs = blobs
        self._locks = locks
        self._failpoints = failpoints or NoFailpoints()
        self._prefix = 0

    def round(self) -> Removed:
        """Remove a bounded number of rows of each kind."""
        self._failpoints.hit("hub.gc-before")
        segments = self._remove_segments()
        entries = self._write(lambda tx: tx.log.remove_entries(kept=ENTRIES_KEPT, limit=PIECE))
        versions = self._remove_versions()
        return Removed(segments=segments, entries=entries, versions=versions, blobs=self._remove_blobs())

    def sweep(self) -> int:
        """Look through one of 256 parts of the blob store for blobs that the log does not record; return their number.

        They are recorded as stored now, so that they are removed after the grace time unless a commit references them.
        """
        prefix, self._prefix = f"{self._prefix:02x}", (self._prefix + 1) % PREFIXES
        stored = {digest: size for digest, size in self._blobs.names(prefix) if is_digest(digest)}

        def adopt(tx: Transaction) -> int:
            strays = stored.keys() - tx.log.blob_sizes(stored).keys()
            tx.log.record_blobs({digest: (stored[digest], tx.now_us) for digest in strays})
            return len(strays)

        return self._log.write(adopt).result() if stored else 0

    def _remove_segments(self) -> int:
        unread_us, removed = self.keeping.unread_us, 0
        before_us = None if unread_us is None else self._log.now_us() - unread_us
        # Positions never go back, so what was found stays true.
        for passed in self._log.read(lambda log: log.passed_segments(unread_before_us=before_us)):
            removed += self._write(lambda tx, passed=passed: tx.log.remove_segments(*passed, limit=PIECE))
            if removed >= PIECE:
                break
        return removed

    def _remove_versions(self) -> int:
        since_us = self._log.now_us() - self.keeping.offline_us
        passed = self._log.read(lambda log: log.passed_versions(seen_since_us=since_us))
        return sum(self._write(lambda tx, one=one: tx.log.remove_control_versions(*one, limit=PIECE)) for one in passed)

    def _remove_blobs(self) -> int:
        before_us = self._log.now_us() - self.keeping.grace_us
        digests = self._log.read(lambda log: log.unreferenced_blobs(before_us=before_us, limit=PIECE))
        with self._locks.removal(digests) as free:
            removed = self._log.write(lambda tx: tx.log.remove_blobs(free, before_us=before_us)).result()
            self._failpoints.hit("hub.gc-forgotten")
            for digest, small in removed:
                if not small:
                    self._blobs.remove(digest)
                self._failpoints.hit("hub.gc-removed")
        return len(removed)

    def _write(self, job: Callable[..., int]) -> int:
        return self._log.write(job).result()
