"""Small blobs, kept in the log rather than in the store.

A file, or an object of a store, costs two syncs or a round trip; a row costs a share of a sync that happens anyway. Most of
what nodes send is small, so that this decides how many nodes a hub can serve. Whoever reads the store directly does not find
these there, and asks the hub.

Invariant: a blob is in one of the two places, whole, before anything may name it.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from fordstone.hub.store.log import Turn

SMALL_BYTES_MAX: Final = 16 << 10


def keep_small(turn: Turn, digest: str, data: bytes) -> bool:
    """Keep a verified blob; False if it was there already. What comes again waits anew for a commit to name it."""
    row = turn.db.execute("SELECT size_bytes FROM blobs WHERE digest = ?", (digest,)).fetchone()
    if row is not None and row[0] == len(data):
        turn.db.execute("UPDATE blobs SET stored_us = ? WHERE digest = ?", (turn.now_us, digest))
        return False
    turn.db.execute(
        "INSERT INTO blobs (digest, size_bytes, stored_us, small) VALUES (?, ?, ?, 1) "
        "ON CONFLICT (digest) DO UPDATE SET size_bytes = excluded.size_bytes, stored_us = excluded.stored_us, small = 1",
        (digest, len(data), turn.now_us),
    )
    turn.db.execute("INSERT OR REPLACE INTO small_blobs VALUES (?, ?)", (digest, data))
    return True


def small_blob(db: sqlite3.Connection, digest: str) -> bytes | None:
    """The bytes of a small blob; None: it is none, or not there."""
    row = db.execute("SELECT data FROM small_blobs WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else row[0]
