"""Look for blobs that have rotted: read them all, slowly, and compare their digests.

A damaged blob is marked in the log and counts as missing, so that a node that still has it sends it again, and readers get an error
instead of other bytes. An upload replaces it (`Upload.store`, `LogWriter.save_small_blob`). This module marks; it removes nothing.

Invariants: a blob is marked only after a second read, under its lock or in the transaction that marks it, so that none is marked
that was stored again meanwhile. How far a pass has come is durable, and the next start resumes there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fordstone.epochs.run_file import SCRUB_PASS_US, digest_of
from fordstone.hub.store.blobs import BlobLocks, BlobStore, is_whole
from fordstone.hub.store.log import HubLog, Transaction
from fordstone.hub.store.log_records import BlobRecord
from fordstone.hub.store.log_schema import StoreFailedError

RATE_BYTES: Final = 4 << 20
"""Bytes per second that the hub reads in the background, by default."""
PIECE_BYTES: Final = 64 << 20
PIECE_BLOBS: Final = 1_000
PIECE_SECONDS: Final = 5.0
"""Bounds of a piece: after it, progress is saved or reported. The last blob may exceed them."""
_LISTED: Final = 200
"""Blobs that are listed at a time."""
_events = logging.getLogger(__name__)


class ScrubStoppedError(Exception):
    """The hub stops; the piece is not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """What one piece has found."""

    blobs: int = 0
    size_bytes: int = 0
    damaged: tuple[str, ...] = ()
    after: str | None = None
    """The last blob that was looked at; None: there is none after it."""


class ReadPace:
    """Bounds the bytes per second that one thread reads. `stop` ends its pauses."""

    def __init__(self, bytes_per_s: int, stop: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stop = stop

    def wait(self, size_bytes: int) -> None:
        """Pause for as long as this many bytes should take; raises `ScrubStoppedError` once the hub stops."""
        if self._stop.wait(size_bytes / self._bytes_per_s):
            raise ScrubStoppedError


class Scrub:
    """Called from several threads: the hub's background, and those of requests. Blocks."""

    def __init__(
        self,
        log: HubLog,
        blobs: BlobStore,
        locks: BlobLocks,
        *,
        on_read: Callable[[int], None] = lambda _: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_read` gets the size of each blob that was looked at."""
        self._log = log
        self._blobs = blobs
        self._locks = locks
        self._on_read = on_read
        self._clock_s = clock_s

    def next_piece(self, pace: Callable[[int], None], *, small_only: bool = False) -> Scrubbed | None:
        """Look at the next blobs of the background's pass, and save how far it has come; None: the next pass is not due yet."""
        after, due_us = self._log.read(lambda log: log.scrub_state())
        if not after:
            if self._log.ran_us() < due_us:
                return None
            due_us = self._log.ran_us() + SCRUB_PASS_US
        found = self.piece(after, pace=pace, small_only=small_only)
        self._log.write(lambda tx: tx.log.save_scrub(found.after or "", due_us=due_us)).result()
        return found

    def piece(self, after: str, *, pace: Callable[[int], None] = lambda _: None, small_only: bool = False) -> Scrubbed:
        """Look at the blobs after one, in order of their digest, up to the bounds of a piece."""
        began_s, blobs, size_bytes, damaged = self._clock_s(), 0, 0, []
        while True:
            listed = self._log.read(lambda log, after=after: log.blobs_after(after, limit=_LISTED))  # type: ignore[misc]
            for record in listed:
                after = record.digest
                if small_only and not record.small:
                    continue
                try:
                    is_damaged = not self._is_whole(record, pace)
                    self._on_read(record.size_bytes)
                    if is_damaged != record.damaged:
                        is_damaged = self.confirm(record.digest)
                    if is_damaged:
                        damaged.append(record.digest)
                except StoreFailedError as error:
                    # The log's file itself: nothing can be marked there, and the blobs after it may be whole.
                    _events.error("hub log is damaged", extra={"digest": record.digest, "error": str(error)})
                    damaged.append(record.digest)
                blobs, size_bytes = blobs + 1, size_bytes + record.size_bytes
                if blobs >= PIECE_BLOBS or size_bytes >= PIECE_BYTES or self._clock_s() - began_s >= PIECE_SECONDS:
                    return Scrubbed(blobs=blobs, size_bytes=size_bytes, damaged=tuple(damaged), after=after)
            if len(listed) < _LISTED:
                return Scrubbed(blobs=blobs, size_bytes=size_bytes, damaged=tuple(damaged))

    def confirm(self, digest: str) -> bool:
        """Read a blob again that seems to be damaged, or to be whole again, and mark it as what it is; return whether it is damaged."""
        with self._locks.arrival(digest):
            known = self._log.read(lambda log: log.blob_at(digest))
            if known is None:
                return False
            whole = False if known.small else is_whole(self._blobs, digest)

            def mark(tx: Transaction) -> bool:
                now = tx.log.blob_at(digest)
                if now is None or now.small != known.small:
                    return False
                if now.small:
                    data = tx.log.small_blob(digest)
                    damaged = data is None or digest_of(data) != digest
                else:
                    damaged = not whole
                if damaged != now.damaged:
                    tx.log.mark_damaged(digest, damaged=damaged)
                    fields = {"digest": digest, "bytes": now.size_bytes, "references": now.refs}
                    if damaged:
                        _events.error("hub blob is damaged", extra=fields)
                    else:
                        _events.warning("hub blob is whole again", extra=fields)
                return damaged

            return self._log.write(mark).result()

    def _is_whole(self, record: BlobRecord, pace: Callable[[int], None]) -> bool:
        if not record.small:
            return is_whole(self._blobs, record.digest, after_chunk=pace)
        data = self._log.read(lambda log: log.small_blob(record.digest))
        pace(record.size_bytes)
        return data is not None and digest_of(data) == record.digest
