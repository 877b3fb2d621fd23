"""Remove what no reader needs: read segments, what was forgotten, old versions of control tables, blobs without references.

Runs beside everything else, a bounded piece at a time, so that commits never wait long. Calls are serial: one thread.

Invariants: a segment is removed when every consumer of its stream has passed it, and never while no consumer is registered, unless
`unread_us` of running time have gone by (clocks that are set remove nothing);
a node's head and its digest are kept for ever; the newest snapshot of a control table is kept, with all later versions. A
blob is removed when nothing references it and it was stored longer ago than `grace_us`, so that uploads for a later commit
stay. Its record is removed first, durably, then its bytes: `sweep` finds what a crash leaves between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fordstone.epochs.run_file import is_digest
from fordstone.hub.messages import Rejection
from fordstone.hub.store.blobs import BlobLocks, BlobStore
from fordstone.hub.store.log import HubLog, Transaction
from fordstone.protocol.retention import expired_mark, is_mark_due, pages_to_cut
from fordstone.storage.failpoint import Failpoints, NoFailpoints

PIECE: Final = 500
"""Maximum number of rows or files removed at a time."""
FULL_PIECE: Final = 50
"""The same while the disk is full: the write-ahead log has only the space that the reserve has left."""
PAGES_PIECE: Final = 500
"""Maximum number of pages cut off the log's file at a time: commits waited 23 ms for it, 63 ms at most."""
ENTRIES_KEPT: Final = 1_000
"""Epochs of a node that are kept after their segments: to compare with what is sent again, and to be listed."""
PUBLISHERS_KEPT: Final = 100
"""Owners of a control table that are remembered: one that was superseded is fenced as long as it is."""
PAIRS_PIECE: Final = 2_000
"""Maximum number of pairs of stream and node that are looked at at a time."""
NODES_PIECE: Final = 1_000
"""Maximum number of nodes of which epochs are looked for at a time."""
HOUR_US: Final = 3_600_000_000
OFFLINE_US: Final = 7 * 24 * HOUR_US
"""A node that was silent for longer does not hold back old versions of control tables."""
PREFIXES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What one round has removed."""

    discarded: int = 0
    """Segments and entries of nodes and streams that were forgotten."""
    segments: int = 0
    entries: int = 0
    versions: int = 0
    publishers: int = 0
    blobs: int = 0
    pages: int = 0
    """Cut off the log's file."""
    more: bool = False
    """Whether another round may find more at once."""


class Retention:
    """Blocks: not for the event loop."""

    def __init__(
        self,
        log: HubLog,
        blobs: BlobStore,
        locks: BlobLocks,
        *,
        unread_us: int | None = None,
        grace_us: int = HOUR_US,
        every_s: float = 60.0,
        short_of_space: Callable[[], bool] = lambda: False,
        failpoints: Failpoints | None = None,
    ) -> None:
        """`unread_us`: segments that the hub has had for longer, while it ran, are removed even if they were not read; None: never.

        `grace_us`: how long a blob may wait for the commit that references it. `every_s`: the pause between rounds that remove little, for
        the caller. `short_of_space`: whether a disk of the hub is nearly full.
        """
        self._unread_us = unread_us
        self._grace_us = grace_us
        self.every_s = every_s
        self._short_of_space = short_of_space
        self._log = log
        self._blobs = blobs
        self._locks = locks
        self._failpoints = failpoints or NoFailpoints()
        self._prefix = 0
        self._after_pair = (0, 0)
        self._after_node = 0

    def round(self) -> Removed:
        """Remove a bounded number of rows of each kind. If the disk is full, the log's reserve is used for it."""
        had_reserve = self._log.has_reserve()
        try:
            return self._round()
        except Rejection:
            if not had_reserve or self._log.has_reserve():
                raise
        return self._round()

    def _round(self) -> Removed:
        self._failpoints.hit("hub.gc-before")
        piece = PIECE if self._log.has_reserve() else FULL_PIECE
        discarded = self._write(lambda tx: tx.log.remove_discarded(limit=piece))
        segments = self._remove_segments(piece)
        entries = self._remove_entries(piece)
        versions = self._remove_versions(piece)
        publishers = self._remove_publishers(piece)
        blobs = self._remove_blobs(piece)
        pages = self._return_space()
        return Removed(
            discarded=discarded,
            segments=segments,
            entries=entries,
            versions=versions,
            publishers=publishers,
            blobs=blobs,
            pages=pages,
            more=max(discarded, segments, entries, versions, publishers, blobs) >= piece or pages >= PAGES_PIECE,
        )

    def sweep(self) -> int:
        """Look through one of 256 parts of the blob store for blobs that the log does not record; return their number.

        They are recorded as stored now, so that they are removed after the grace time unless a commit references them.
        """
        prefix, self._prefix = f"{self._prefix:02x}", (self._prefix + 1) % PREFIXES
        stored = {digest: size for digest, size in self._blobs.names(prefix) if is_digest(digest)}

        def adopt(tx: Transaction) -> int:
            strays = stored.keys() - tx.log.recorded_blobs(stored)
            tx.log.record_blobs({digest: (stored[digest], tx.ran_us) for digest in strays})
            return len(strays)

        return self._log.write(adopt).result() if stored else 0

    def _remove_segments(self, piece: int) -> int:
        """Look through all pairs of stream and node, from where the previous round has stopped, until a piece is removed."""
        unread_seq, removed = self._expired_seq(), 0
        while removed < piece:
            after = self._after_pair
            passed, last = self._log.read(
                lambda log, after=after: log.passed_segments(  # type: ignore[misc]
                    unread_seq=unread_seq, after=after, limit=PAIRS_PIECE, piece=piece
                )
            )
            for one in passed:
                # Positions never go back, so what was found stays true.
                removed += self._write(lambda tx, one=one: tx.log.remove_segments(*one, limit=piece))
                if removed >= piece:
                    return removed
                self._after_pair = one[:2]
            self._after_pair = last or (0, 0)
            if last is None:
                break
        return removed

    def _expired_seq(self) -> int:
        """Return the commit up to which all are removed, read or not; 0: none. Marks the present moment if that is due."""
        keep_us = self._unread_us
        if keep_us is None:
            return 0
        marks, ran_us = self._log.read(lambda log: log.marks()), self._log.ran_us()
        expired = expired_mark(marks, ran_us=ran_us, keep_us=keep_us)
        if is_mark_due(marks, ran_us=ran_us, keep_us=keep_us):
            before_us = 0 if expired is None else expired.ran_us
            self._log.write(lambda tx: tx.log.add_mark(tx.ran_us, before_us=before_us)).result()
        return 0 if expired is None else expired.seq

    def _remove_entries(self, piece: int) -> int:
        removed = 0
        while removed < piece:
            after, limit = self._after_node, piece - removed
            count, last = self._log.write(
                lambda tx, after=after, limit=limit: tx.log.remove_entries(  # type: ignore[misc]
                    kept=ENTRIES_KEPT, after=after, nodes=NODES_PIECE, limit=limit
                )
            ).result()
            removed += count
            self._after_node = last or 0
            if last is None:
                break
        return removed

    def _remove_versions(self, piece: int) -> int:
        """Remove versions of control tables older than the newest snapshot that every node of the pipeline has read."""
        since_us, removed = self._log.now_us() - OFFLINE_US, 0
        read: dict[str, dict[str, int]] = {}
        for table_id, pipeline, control in self._log.read(lambda log: log.old_versions()):
            if pipeline not in read:
                read[pipeline] = self._log.read(
                    lambda log, pipeline=pipeline: log.versions_read(pipeline, seen_since_us=since_us)  # type: ignore[misc]
                )
            until = read[pipeline].get(control)
            removed += self._write(
                lambda tx, table_id=table_id, until=until: tx.log.remove_control_versions(
                    table_id, tx.log.newest_snapshot(table_id, until=until), limit=piece
                )
            )
            if removed >= piece:
                break
        return removed

    def _remove_publishers(self, piece: int) -> int:
        found = self._log.read(lambda log: log.superseded_publishers(kept=PUBLISHERS_KEPT, limit=piece))

        def remove(tx: Transaction) -> int:
            for one in found:
                tx.log.remove_publisher(*one)
            return len(found)

        return self._write(remove) if found else 0

    def _remove_blobs(self, piece: int) -> int:
        before_us = self._log.ran_us() - self._grace_us
        digests = self._log.read(lambda log: log.unreferenced_blobs(before_us=before_us, limit=piece))
        with self._locks.removal(digests) as free:
            removed = self._log.write(lambda tx: tx.log.remove_blobs(free, before_us=before_us)).result()
            self._failpoints.hit("hub.gc-forgotten")
            for digest, small in removed:
                if not small:
                    self._blobs.remove(digest)
                self._failpoints.hit("hub.gc-removed")
        return len(removed)

    def _return_space(self) -> int:
        """Cut free pages off the log's file, and hold the reserve again if there is space for it; return the number of pages."""
        short = self._short_of_space() or not self._log.has_reserve()
        found = self._log.read(lambda log: log.pages())
        pages = min(pages_to_cut(pages=found.pages, free=found.free, short_of_space=short), PAGES_PIECE)
        if pages:
            self._log.shrink(pages).result()
        if short:
            # The file becomes shorter when its write-ahead log is copied into it.
            self._log.empty_wal().result()
            self._log.restore_reserve().result()
        return pages

    def _write(self, job: Callable[..., int]) -> int:
        return self._log.write(job).result()
