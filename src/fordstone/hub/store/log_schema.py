"""The schema of the hub's log, and the connections to its file.

Invariants: a file of another version is rejected, never changed. `blobs.refs` is the number of references that rows of other tables hold.
Rows of `segments` and `entries` stay for a while after their node or stream was forgotten, as `discarded` says; ids are never used again.
`blobs.stored_us` is in the hub's running time (`ran_us`), which is never set. `blobs.small`: the content is in `small_blobs` rather than in
the blob store. `blobs.damaged`: the content has another digest, or is gone; such a blob counts as missing until it is stored again.
`stream_nodes.log_bytes`: about what the segments and their entries take in this file (`SEGMENT_LOG_BYTES` and their runs).
`controls.reached` is the number after which versions go on; `counter.controls_reached` is that of tables which are not there yet.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fordstone.errors import ConfigError, StorageError

SCHEMA_VERSION: Final = 4
SEGMENT_LOG_BYTES: Final = 512
"""About what a segment takes in the file besides its runs, with its share of the entry of its epoch and of the indexes."""
BUSY_MS: Final = 10_000
PAGE_BYTES: Final = 4_096
WAL_PAGES: Final = 4_000
"""Pages in the write-ahead log before SQLite copies them into the file: rarely, because a commit waits for it."""
CACHE_BYTES: Final = 64 << 20
"""Pages of the log that the connection that writes keeps in memory: they are most of what a hub's memory grows by."""
READER_CACHE_BYTES: Final = 2 << 20
"""The same for each connection that reads. There is one for each thread that reads at a time."""
FULL: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})
"""Errors of a full disk; the second one is of the index of the write-ahead log."""

SCHEMA: Final = """
CREATE TABLE counter (
  only INTEGER PRIMARY KEY CHECK (only = 1),
  seq INTEGER NOT NULL DEFAULT 0,
  log_id TEXT NOT NULL,
  restored_us INTEGER,
  controls_reached INTEGER NOT NULL DEFAULT 0,
  ran_us INTEGER NOT NULL DEFAULT 0,
  scrub_after TEXT NOT NULL DEFAULT '',
  scrub_due_us INTEGER NOT NULL DEFAULT 0
);
INSERT INTO counter (only, log_id) VALUES (1, lower(hex(randomblob(16))) || '.' || lower(hex(randomblob(8))));
CREATE TABLE marks (ran_us INTEGER PRIMARY KEY, seq INTEGER NOT NULL);

CREATE TABLE nodes (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  pipeline TEXT NOT NULL,
  node TEXT NOT NULL,
  holder TEXT,
  hub_generation INTEGER,
  local_generation INTEGER,
  start TEXT,
  head INTEGER NOT NULL DEFAULT 0,
  head_chain TEXT NOT NULL DEFAULT '',
  seen_us INTEGER NOT NULL,
  committed_us INTEGER,
  controls BLOB NOT NULL DEFAULT '{}',
  health BLOB,
  resync INTEGER NOT NULL DEFAULT 0,
  UNIQUE (pipeline, node)
);
CREATE INDEX nodes_by_name ON nodes (node);

CREATE TABLE entries (
  node_id INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  digest TEXT NOT NULL,
  chain TEXT NOT NULL,
  hub_generation INTEGER NOT NULL,
  local_generation INTEGER NOT NULL,
  created_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  segments INTEGER NOT NULL,
  PRIMARY KEY (node_id, epoch)
) WITHOUT ROWID;
CREATE INDEX entries_by_seq ON entries (seq);
CREATE INDEX entries_read ON entries (node_id, epoch) WHERE segments = 0;

CREATE TABLE gaps (
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  PRIMARY KEY (node_id, first)
) WITHOUT ROWID;

CREATE TABLE quarantines (
  node_id INTEGER PRIMARY KEY REFERENCES nodes (id) ON DELETE CASCADE,
  epoch INTEGER NOT NULL,
  reason TEXT NOT NULL,
  since_us INTEGER NOT NULL,
  by TEXT NOT NULL
);
CREATE TABLE skips (
  node_id INTEGER NOT NULL REFERENCES nodes (id) ON DELETE CASCADE,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  at_us INTEGER NOT NULL,
  PRIMARY KEY (node_id, first)
) WITHOUT ROWID;

CREATE TABLE streams (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  pipeline TEXT NOT NULL,
  stream TEXT NOT NULL,
  UNIQUE (pipeline, stream)
);

CREATE TABLE stream_nodes (
  stream_id INTEGER NOT NULL REFERENCES streams (id),
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  epochs INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  log_bytes INTEGER NOT NULL,
  watermark_us INTEGER NOT NULL,
  removed INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  chain TEXT NOT NULL,
  newest_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  PRIMARY KEY (stream_id, node_id)
) WITHOUT ROWID;
CREATE INDEX stream_nodes_by_node ON stream_nodes (node_id);
CREATE INDEX stream_nodes_by_seq ON stream_nodes (stream_id, seq);

CREATE TABLE segments (
  stream_id INTEGER NOT NULL,
  node_id INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  runs BLOB NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  watermark_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  PRIMARY KEY (stream_id, node_id, epoch)
) WITHOUT ROWID;

CREATE TABLE forgotten_nodes (
  pipeline TEXT NOT NULL,
  node TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  chain TEXT NOT NULL,
  seq INTEGER NOT NULL,
  at_us INTEGER NOT NULL,
  PRIMARY KEY (pipeline, node)
) WITHOUT ROWID;
CREATE INDEX forgotten_nodes_by_seq ON forgotten_nodes (pipeline, seq);
CREATE TABLE forgotten_streams (
  pipeline TEXT NOT NULL,
  stream TEXT NOT NULL,
  at_us INTEGER NOT NULL,
  PRIMARY KEY (pipeline, stream)
) WITHOUT ROWID;
CREATE TABLE discarded (
  node_id INTEGER NOT NULL,
  stream_id INTEGER NOT NULL,
  PRIMARY KEY (node_id, stream_id)
) WITHOUT ROWID;

CREATE TABLE checkpoints (
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  epoch INTEGER NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (node_id, epoch)
);

CREATE TABLE consumers (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  consumer TEXT NOT NULL,
  seen_us INTEGER NOT NULL,
  UNIQUE (pipeline, consumer)
);
CREATE TABLE consumer_streams (
  consumer_id INTEGER NOT NULL REFERENCES consumers (id) ON DELETE CASCADE,
  stream TEXT NOT NULL,
  PRIMARY KEY (consumer_id, stream)
) WITHOUT ROWID;
CREATE TABLE passed (
  consumer_id INTEGER NOT NULL REFERENCES consumers (id) ON DELETE CASCADE,
  stream TEXT NOT NULL,
  node TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  chain TEXT NOT NULL,
  PRIMARY KEY (consumer_id, stream, node)
) WITHOUT ROWID;

CREATE TABLE controls (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  control TEXT NOT NULL,
  newest INTEGER NOT NULL,
  reached INTEGER NOT NULL,
  chain TEXT NOT NULL,
  UNIQUE (pipeline, control)
);
CREATE TABLE publishers (
  control_id INTEGER NOT NULL REFERENCES controls (id),
  owner TEXT NOT NULL,
  generation INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  content BLOB NOT NULL,
  starts BLOB NOT NULL,
  PRIMARY KEY (control_id, owner)
) WITHOUT ROWID;
CREATE TABLE versions (
  control_id INTEGER NOT NULL REFERENCES controls (id),
  version INTEGER NOT NULL,
  owner TEXT NOT NULL,
  batch INTEGER NOT NULL,
  snapshot INTEGER NOT NULL,
  digest TEXT NOT NULL,
  changes TEXT NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (control_id, version)
) WITHOUT ROWID;
CREATE INDEX versions_by_batch ON versions (control_id, owner, batch);
CREATE INDEX versions_by_digest ON versions (digest);

CREATE TABLE blobs (
  digest TEXT PRIMARY KEY,
  size_bytes INTEGER NOT NULL,
  stored_us INTEGER NOT NULL,
  refs INTEGER NOT NULL DEFAULT 0 CHECK (refs >= 0),
  small INTEGER NOT NULL DEFAULT 0,
  damaged INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX blobs_unnamed ON blobs (stored_us) WHERE refs = 0;
CREATE INDEX blobs_damaged ON blobs (digest) WHERE damaged;
CREATE TABLE small_blobs (
  digest TEXT PRIMARY KEY REFERENCES blobs (digest) ON DELETE CASCADE,
  data BLOB NOT NULL
);
"""


class StoreFailedError(Exception):
    """The database failed (a full disk, a damaged file). Nothing of the open transaction is kept. The text says why."""


def open_connection(path: Path) -> sqlite3.Connection:
    """Connect to the file; `set_up` comes next."""
    return sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)


def set_up(connection: sqlite3.Connection, *, wal_pages: int | None = None) -> sqlite3.Connection:
    """Prepare a connection: to write if `wal_pages` are given. Every commit is synced, because nothing is answered that is not durable."""
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    if wal_pages is not None:
        # Both hold for a new file only, and before its first page is written.
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {wal_pages * PAGE_BYTES}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {wal_pages}")
        connection.execute(f"PRAGMA cache_size = -{CACHE_BYTES >> 10}")
        connection.execute("PRAGMA foreign_keys = ON")
        # Some builds of SQLite overwrite what is deleted with zeros: then removing a blob writes as much as storing it.
        connection.execute("PRAGMA secure_delete = OFF")
    else:
        connection.execute(f"PRAGMA cache_size = -{READER_CACHE_BYTES >> 10}")
        connection.execute("PRAGMA query_only = ON")
    return connection


def open_for_writing(
    path: Path, open_file: Callable[[Path], sqlite3.Connection], *, wal_pages: int
) -> sqlite3.Connection:
    """Open the file, or make it. `StorageError` if that fails, `ConfigError` if another version has written it."""
    try:
        connection = set_up(open_file(path), wal_pages=wal_pages)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
    except sqlite3.Error as error:
        raise StorageError(
            f"the hub's log {path} cannot be opened: {error}. Check the disk and the directory's permissions."
        ) from error
    if 0 < found < SCHEMA_VERSION:
        connection.close()
        raise ConfigError(
            f"the hub's log {path} has version {found}, from before the first release; this program reads version {SCHEMA_VERSION} and has "
            "changed nothing.\nStart the hub with an empty directory; nodes and centers then start with empty ones too."
        )
    if found > SCHEMA_VERSION:
        connection.close()
        raise ConfigError(
            f"the hub's log {path} has version {found}; this program reads version {SCHEMA_VERSION} and has changed nothing.\n"
            "Install the newer fordstone that wrote it."
        )
    return connection


def describe_failure(error: sqlite3.Error) -> str:
    """Say why the database failed, and what to do if that is known."""
    if getattr(error, "sqlite_errorcode", None) in FULL:
        return "its disk is full. Free space there, or let consumers read on"
    return str(error)
